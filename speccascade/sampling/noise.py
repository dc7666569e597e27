"""Where random choices come from.

`Keyed` has uniform numbers keyed by row, position and purpose. `Coupled` has Gumbel noise keyed by row, position and
token, by which drafter and target draw alike.
"""

from typing import Self, TYPE_CHECKING

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from speccascade.backends import ops, sharding
from speccascade.backends.ops import take1
from speccascade.types import ACCEPT, Array, DRAFT, static

if TYPE_CHECKING:
  from speccascade.sampling.sampler import Sampler

_TURNS = (13, 15, 26, 6), (17, 29, 16, 24)  # of the words of Threefry-2x32, by round
_BEHIND = -1e6  # what has no weight stands behind what has
_BLOCK = 128  # vocabulary entries in one block of the two-level draw, and lanes of a TPU


def draw(weights: Array, u: Array, layout: sharding.Layout = sharding.Layout()) -> Array:
  """Draw a token from weights, which need not be normalised.

  First a block of the vocabulary, then a token in it: no sum over V runs in sequence, no noise over V is made, and
  distributions with hundreds of thousands of entries have their full resolution. A token of weight 0 is never drawn.

  Args:
    weights: [..., V], at least 0.
    u: [..., 2] two uniform numbers.
    layout: The layout of a program for several devices.

  Returns:
    [...].
  """
  vocab = weights.shape[-1]
  weights = layout.in_blocks(weights, _BLOCK)
  blocks = -(-vocab // _BLOCK)
  if blocks == 1:
    return _pick(weights, u[..., 0])
  padded = jnp.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, blocks * _BLOCK - vocab)])
  padded = padded.reshape(*weights.shape[:-1], blocks, _BLOCK)
  block = _pick(layout.gathered(padded.sum(-1)), u[..., 0])
  flat = padded.reshape(-1, blocks, _BLOCK)
  inside = take1(flat, block.reshape(-1)).reshape(*weights.shape[:-1], _BLOCK)
  return block * _BLOCK + _pick(inside, u[..., 1])


def _pick(weights: Array, u: Array) -> Array:
  """Invert the cumulative sum of weights [..., N] at u [...]."""
  total = jnp.cumsum(weights, -1)
  hit = (total > u[..., None] * total[..., -1:]) & (weights > 0)
  return jnp.where(hit, jnp.inf, weights).argmax(-1).astype(jnp.int32)  # the first hit; rounding may leave none


class Noise:
  """Where random choices come from. The base of every noise.

  A method returns the noise as well, so that a test can record what was asked.

  Attributes:
    coupled: Whether all draws at a position are by the same noise. A drafted token is then accepted if it is the one
      that the target draws.
  """

  coupled: bool = False

  def draw(self, weights: Array, position: Array, purpose: int, start: Array) -> tuple[Array, Self]:
    """Draw a token in each row.

    Args:
      weights: [B, V]; [B, W, V] where the noise is coupled.
      position: [B] or [B, W] the position of the token.
      purpose: DRAFT or FINAL.
      start: [B] the position at which the round began.

    Returns:
      The tokens [B] or [B, W], and the noise.
    """
    raise NotImplementedError(f'{type(self).__name__} has no draw(weights, position, purpose, start).')

  def order(self, logits: Array, weights: Array, position: Array) -> Array:
    """Return the order in which a drafter would choose tokens [B, V], the first the largest.

    Args:
      logits: [B, V] of the drafter.
      weights: [B, V] its distribution.
      position: [B] of the token.
    """
    return logits

  def accept(self, numerator: Array, denominator: Array, position: Array, start: Array) -> tuple[Array, Self]:
    """Test each pending token.

    Args:
      numerator: [B, W].
      denominator: [B, W].
      position: [B, W] the positions of the tokens.
      start: [B] the position at which the round began.

    Returns:
      [B, W], true with probability min(1, numerator / denominator), and the noise.
    """
    raise NotImplementedError(f'{type(self).__name__} has no accept(numerator, denominator, position, start).')


def make(keys: Array, by_round: bool, sampler: 'Sampler') -> Noise:
  """Return the noise of rows by key data [B, 2], as the sampler wants it."""
  return Coupled(keys, sampler.greedy) if sampler.coupling == 'gumbel' else Keyed(keys, sampler.greedy, by_round)


def hashed(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
  """Return Threefry-2x32 of words (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

  It is that of `jax.random`, unrolled, so that few words are one kernel.
  """
  keys = *key, key[0] ^ key[1] ^ np.uint32(0x1BD11BDA)
  x, y = counter[0] + keys[0], counter[1] + keys[1]
  for i in range(5):
    for turn in _TURNS[i % 2]:
      x = x + y
      y = ((y << turn) | (y >> (32 - turn))) ^ x
    x = x + keys[(i + 1) % 3]
    y = y + keys[(i + 2) % 3] + np.uint32(i + 1)
  return x, y


@struct.dataclass
class Keyed(Noise):
  """Uniform numbers keyed by (example, absolute position, purpose), so that a row is the same in any company.

  A drafted token that no test has looked at may be drawn anew with the same number. Block verification looks at the
  whole block before it drops a part, so there the position in the block is part of the key as well.
  """

  keys: Array  # [B, 2]
  greedy: bool = static(default=False)  # the models' are one-hot; a target need not be
  by_round: bool = static(default=False)  # whether the position in the block is part of the key
  layout: sharding.Layout = static(default=sharding.Layout())  # of the program

  def uniform(self, position: Array, purpose: int, start: Array) -> Array:
    """Return two numbers of [0, 1) for each position [B, ...]: [B, ..., 2]."""

    def words(x):
      return jnp.broadcast_to(x.reshape(x.shape + (1,) * (position.ndim - x.ndim)), position.shape).astype(jnp.uint32)

    offset = words(position - start.reshape(start.shape + (1,) * (position.ndim - 1)) if self.by_round else 0 * start)
    counter = 3 * words(position) + np.uint32(purpose), offset
    found = hashed((words(self.keys[:, 0]), words(self.keys[:, 1])), counter)
    return jnp.stack([(w >> 8).astype(jnp.float32) * 2.0**-24 for w in found], -1)

  def draw(self, weights, position, purpose, start):
    if self.greedy and purpose == DRAFT:
      return _index_of_one(weights), self
    return draw(weights, self.uniform(position, purpose, start), self.layout), self

  def accept(self, numerator, denominator, position, start):
    return self.uniform(position, ACCEPT, start)[..., 0] * denominator < numerator, self


def _index_of_one(weights: Array) -> Array:
  """Return the index of the 1 of one-hot weights [..., V]."""
  index = jax.lax.broadcasted_iota(jnp.float32, weights.shape, weights.ndim - 1)  # exact below 2²⁴
  return (weights * index).sum(-1).astype(jnp.int32)


@struct.dataclass
class Coupled(Noise):
  r"""Gumbel noise, hashed from (row, position, token) when it is needed.

  With E of each token exponential, :math:`\arg\max_v \log w(v) - \log E_v` follows w. The token at a position is then a
  function of the target, the row's key and the tokens before it, whatever was drafted.
  """

  keys: Array  # [B, 2]
  greedy: bool = static(default=False)  # the models' distributions are one-hot; a target need not be

  coupled = True

  def draw(self, weights, position, purpose, start):
    if self.greedy and purpose == DRAFT:
      return _index_of_one(weights), self
    return ops.argmax(self._race(weights, position)), self

  def order(self, logits, weights, position):
    return logits if self.greedy else jnp.where(weights > 0, self._race(weights, position), logits + _BEHIND)

  def _race(self, weights: Array, position: Array) -> Array:
    return jnp.log(weights) - jnp.log(self.exponential(position, weights.shape[-1]))

  def accept(self, numerator, denominator, position, start):
    raise ValueError("coupling='gumbel' makes no test by chance; give accept=acceptance.token_wise, or leave it out.")

  def exponential(self, position: Array, vocab: int) -> Array:
    """Return the exponential numbers [..., V] of positions [B, ...]; the id of a token alone says which is its own."""
    blocks = -(-vocab // (2 * _BLOCK))
    shape = (*position.shape, blocks, _BLOCK)

    def by_row(x):
      return jnp.broadcast_to(x.reshape(x.shape + (1,) * (len(shape) - x.ndim)), shape)

    block, lane = (jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 2 + i) for i in range(2))
    key = [by_row(self.keys[:, i].astype(jnp.uint32)) for i in range(2)]
    counter = by_row(position.astype(jnp.uint32)), block * _BLOCK + lane
    words = jnp.stack(hashed(tuple(key), counter), -2)  # [..., blocks, 2, lanes]
    words = words.reshape(*position.shape, -1)[..., :vocab]
    # The least numbers win, so the resolution is there: no u is 0 or 1, and u may be as small as 2⁻³³.
    u = jnp.minimum((words.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log1p(-u)
