"""Probabilities: softmax at a temperature, filters, distances, residuals, and where random choices come from.

Temperature 0 is the one-hot law of the arg max, and `Sampler` is the only place that knows it.
Everything is float32 and broadcasts over leading axes `...`.
"""

import dataclasses
import numbers
from typing import Any, Protocol

from flax import struct
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from speccascade.types import ACCEPT, Array, DRAFT, places, State, take

_BLOCK = 128  # vocabulary entries in one block of the two-level draw


def softmax(logits: Array) -> Array:
  """Return the unscaled law of logits [..., V]."""
  return jax.nn.softmax(logits.astype(jnp.float32))


def log_softmax(logits: Array) -> Array:
  """Return the unscaled log-law of logits [..., V]."""
  return jax.nn.log_softmax(logits.astype(jnp.float32))


def confidence(logits: Array) -> Array:
  """Return max_v of the unscaled law, without computing the law: 1 / Σ exp(ℓ - max ℓ)."""
  logits = logits.astype(jnp.float32)
  return 1 / jnp.exp(logits - logits.max(-1, keepdims=True)).sum(-1)


def entropy(logits: Array) -> Array:
  """Return H of the unscaled law; 0 log 0 = 0."""
  logp = log_softmax(logits)
  p = jnp.exp(logp)
  return -jnp.sum(jnp.where(p > 0, p * logp, 0), -1)


def tv(a: Array, b: Array) -> Array:
  """Return the total variation distance, Σ_v max(0, a(v) - b(v))."""
  return jnp.maximum(a - b, 0).sum(-1)


def argmax(x: Array) -> Array:
  """Return the arg max of x [..., V], the lowest index on ties: as two maxima of floats, which run as vectors."""
  x = jax.lax.optimization_barrier(x)  # computed twice, x and its maximum might round differently
  last = x.shape[-1] - 1
  after = last - _index(x)
  return last - jnp.where(x == x.max(-1, keepdims=True), after, 0).max(-1).astype(jnp.int32)


def _index(x: Array) -> Array:
  return jax.lax.broadcasted_iota(jnp.float32, x.shape, x.ndim - 1)  # exact below 2²⁴


def one_hot_max(x: Array) -> Array:
  """Return the one-hot law of the arg max, the lowest index on ties."""
  return jax.nn.one_hot(argmax(x), x.shape[-1], dtype=jnp.float32)


def at_token(x: Array, token: Array) -> Array:
  """Return x[..., token]."""
  return jnp.take_along_axis(x, token[..., None], axis=-1, mode='clip')[..., 0]


def residual(pi: Array, q: Array) -> Array:
  """Return norm(max(0, π - q)), and π where that is all zero (by rounding: π = q is never rejected)."""
  rest = jnp.maximum(pi - q, 0)
  total = rest.sum(-1, keepdims=True)
  return jnp.where(total > 0, rest / jnp.where(total > 0, total, 1), pi)


def keep_top_k(logits: Array, k: int) -> Array:
  """Mask all but the k largest logits; ties with the k-th stay."""
  kth = jax.lax.top_k(logits, min(k, logits.shape[-1]))[0][..., -1:]
  return jnp.where(logits >= kth, logits, -jnp.inf)


def keep_top_p(logits: Array, top_p: Array) -> Array:
  """Mask every token whose strictly likelier ones already hold `top_p` of the mass; ties stay together.

  The threshold is found by bisection over the bits of a float32, which order as the values do: exact in 31 steps
  of one masked sum each, where a sort of the vocabulary costs more.
  """
  p = softmax(logits)
  bits = jax.lax.bitcast_convert_type(p, jnp.int32)

  def halve(_, bounds):
    low, high = bounds  # mass above `high` < top_p <= mass above `low`
    middle = low + (high - low) // 2
    above = jnp.sum(jnp.where(bits > middle, p, 0), -1, keepdims=True)
    return jnp.where(above < top_p, low, middle), jnp.where(above < top_p, middle, high)

  shape = p.shape[:-1] + (1,)
  low = jnp.full(shape, -1, jnp.int32)
  high = jnp.full(shape, np.float32(1).view(np.int32) + 1, jnp.int32)
  _, threshold = jax.lax.fori_loop(0, 31, halve, (low, high))
  return jnp.where(bits >= threshold, logits, -jnp.inf)


def number(value: Any) -> Any:
  """Return a concrete array without axes as a number; anything else as it is."""
  concrete = isinstance(value, (np.generic, np.ndarray, jax.Array)) and not isinstance(value, jax.core.Tracer)
  return value.item() if concrete and np.ndim(value) == 0 and value.dtype.kind in 'iufV' else value


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Sampler:
  """Turn logits into the law that is sampled from: penalty → temperature → top-k → top-p.

  One sampler serves all models of a run. `top_k` and whether the temperature is 0 are part of the program; the other
  values are traced, so changing them compiles nothing. `seen` is bound by the loop: the tokens before each position.
  """

  temperature: float = 1.0
  top_k: int | None = None
  top_p: float | None = None
  repetition_penalty: float | None = None
  seen: Array | None = None  # [..., V] of bool

  def __post_init__(self):
    for name, valid, wanted in (
      ('temperature', lambda x: x == 0 or 1e-4 <= x < np.inf, '0 (greedy) or at least 0.0001'),
      ('top_p', lambda x: 0 < x <= 1, 'over 0 and at most 1'),
      ('repetition_penalty', lambda x: 0 < x < np.inf, 'over 0'),
    ):
      value = number(getattr(self, name))
      if isinstance(value, (str, bool)) or (isinstance(value, numbers.Real) and not valid(value)):
        raise ValueError(f'Sampler: {name}={value!r} is not a number {wanted}.')
      if isinstance(value, numbers.Real):
        object.__setattr__(self, name, float(value))
    k = self.top_k
    if k is not None and (not isinstance(k, numbers.Integral) or isinstance(k, bool) or k < 1):
      raise ValueError(f'Sampler: top_k={k!r} is not a whole number of at least 1; use None for no filter.')

  @property
  def greedy(self) -> bool:
    return _is_number(self.temperature, 0)

  @property
  def penalises(self) -> bool:
    return not (self.repetition_penalty is None or _is_number(self.repetition_penalty, 1))

  def tree_flatten(self):
    off = _is_number(self.top_p, 1)
    values = (
      None if self.greedy else traced(self.temperature),
      None if off else traced(self.top_p),
      traced(self.repetition_penalty) if self.penalises else None,
      self.seen,
    )
    return values, (self.greedy, self.top_k)

  @classmethod
  def tree_unflatten(cls, static, values):
    greedy, top_k = static
    temperature, top_p, penalty, seen = values
    return cls(0.0 if greedy else temperature, top_k, top_p, penalty, seen)

  def bind(self, seen: Array | None) -> 'Sampler':
    """Return the sampler for positions before which the tokens `seen` [..., V] stand."""
    return dataclasses.replace(self, seen=seen)

  def penalised(self, logits: Array) -> Array:
    """Apply the repetition penalty: seen tokens' logits move towards -∞ by a factor."""
    logits = logits.astype(jnp.float32)
    if not self.penalises or self.seen is None:
      return logits
    factor = jnp.where(logits > 0, 1 / self.repetition_penalty, self.repetition_penalty)
    return jnp.where(self.seen, logits * factor, logits)

  def __call__(self, logits: Array) -> Array:
    """Return the sampled law of logits [..., V]."""
    logits = self.penalised(logits)
    if self.greedy:
      return one_hot_max(logits)
    logits = logits / self.temperature
    if self.top_k is not None:
      logits = keep_top_k(logits, self.top_k)
    if self.top_p is not None and not _is_number(self.top_p, 1):
      logits = keep_top_p(logits, self.top_p)
    return softmax(logits)

  def soft(self, logits: Array) -> Array:
    """Return the law that a combination of probabilities starts from: at temperature 0, the unscaled one."""
    return softmax(self.penalised(logits)) if self.greedy else self(logits)

  def harden(self, probs: Array) -> Array:
    """Finish a combination of probabilities: at temperature 0 its arg max, else itself."""
    return one_hot_max(probs) if self.greedy else probs


def at_window(sampler: Sampler, state: State) -> Sampler:
  """Bind a sampler to every slot of the window: a penalty at slot j sees the pending tokens before j."""
  if not sampler.penalises:
    return sampler
  width, vocab = state.window.probs.shape[1:]
  pending = take(state.tokens, state.length[:, None] + places(width))
  drafted = jax.nn.one_hot(pending, vocab, dtype=bool) & (places(width) < state.window.size[:, None])[..., None]
  before = jnp.pad(jax.lax.cummax(drafted.astype(jnp.int8), axis=1), ((0, 0), (1, 0), (0, 0))) > 0  # [B, W+1, V]
  return sampler.bind(before | state.seen[:, None])


def _is_number(value: Any, number: float) -> bool:
  return isinstance(value, numbers.Real) and value == number


def traced(value: Any) -> Any:
  """Return a number as float32, so that 1 and 1.0 and .7 are one program; anything else as it is."""
  value = number(value)
  return np.float32(value) if isinstance(value, numbers.Real) else value


def draw(weights: Array, u: Array) -> Array:
  """Draw a token from weights [..., V] >= 0, which need not be normalised, with two uniforms u [..., 2].

  First a block of the vocabulary, then a token in it: no sum over V runs in sequence, no noise over V is made, and
  laws with hundreds of thousands of entries keep their full resolution. A token of weight 0 is never drawn.
  """
  vocab = weights.shape[-1]
  blocks = -(-vocab // _BLOCK)
  if blocks == 1:
    return _pick(weights, u[..., 0])
  padded = jnp.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, blocks * _BLOCK - vocab)])
  padded = padded.reshape(*weights.shape[:-1], blocks, _BLOCK)
  block = _pick(padded.sum(-1), u[..., 0])
  inside = jnp.take_along_axis(padded, block[..., None, None], axis=-2, mode='clip')[..., 0, :]
  return block * _BLOCK + _pick(inside, u[..., 1])


def _pick(weights: Array, u: Array) -> Array:
  """Invert the cumulative sum of weights [..., N] at u [...]."""
  total = jnp.cumsum(weights, -1)
  hit = (total > u[..., None] * total[..., -1:]) & (weights > 0)
  return jnp.where(hit.any(-1), hit.argmax(-1), weights.argmax(-1)).astype(jnp.int32)


class Noise(Protocol):
  """Where random choices come from. A method returns the noise as well, so that a test can record what was asked."""

  def draw(self, weights: Array, position: Array, purpose: int, start: Array) -> tuple[Array, 'Noise']:
    """Draw tokens [B] from weights [B, V] for position [B]; `start` [B] is where the round began."""

  def accept(self, numerator: Array, denominator: Array, position: Array, start: Array) -> tuple[Array, 'Noise']:
    """Return for [B, W] whether a test of probability min(1, numerator / denominator) succeeds."""


@struct.dataclass
class Keyed:
  """Noise keyed by (example, absolute position, purpose), so that a row is the same in any company.

  A drafted token that no test has looked at may be drawn anew with the same number. Block verification looks at the
  whole block before it drops a part, so there the place in the block is part of the key as well (K > 1).
  All numbers are made before the loop, which then only looks them up.
  """

  uniforms: Array  # [B, T, K, 3, 2]
  greedy: bool = struct.field(pytree_node=False, default=False)  # the models' laws are one-hot; a target need not be

  @classmethod
  def make(cls, keys: Array, positions: int, in_block: int = 1, greedy: bool = False) -> 'Keyed':
    """Hash key data [B, 2] with every position, place in the block (1: not part of the key) and purpose."""
    shape = (keys.shape[0], positions, in_block, 3)
    row, position, place, purpose = (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in range(4))
    words = jax.extend.random.threefry2x32_p.bind(keys[row, 0], keys[row, 1], 3 * position + purpose, place)
    return cls(jnp.stack([(w >> 8).astype(jnp.float32) * 2.0**-24 for w in words], -1), greedy)

  def _uniform(self, position: Array, purpose: int, start: Array) -> Array:
    place = position - start if self.uniforms.shape[2] > 1 else jnp.zeros_like(position)
    return self.uniforms[jnp.arange(position.shape[0]), position, place, purpose]

  def draw(self, weights, position, purpose, start):
    if self.greedy and purpose == DRAFT:
      return (weights * _index(weights)).sum(-1).astype(jnp.int32), self  # weights are one-hot
    return draw(weights, self._uniform(position, purpose, start)), self

  def accept(self, numerator, denominator, position, start):
    u = jax.vmap(lambda p: self._uniform(p, ACCEPT, start), 1, 1)(position)[..., 0]
    return u * denominator < numerator, self
