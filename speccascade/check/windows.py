"""Whether a model gives the same logits however a text is cut into windows, which speculative decoding relies on.

A verifier reads several drafted tokens in one call, and goes back to an earlier position where one is rejected. A
network that was written for one prompt and then single tokens may do neither: its mask may be that of a prompt, its
cache may be written from the start, or keep what was rolled back. The reference is the text token by token.

Axis letters: B batch, L new tokens, V vocabulary, S prompt.
"""

from collections.abc import Sequence
import functools

import jax
import jax.numpy as jnp
import numpy as np

from speccascade.check.report import Finding
from speccascade.check.sampler.cases import number
from speccascade.engine import validate
from speccascade.host.errors import first_line
from speccascade.types import Array, Cache, Model, Prompt

LENGTHS = 8, 5, 1  # of the prompts
POSITIONS = 37  # the most, those of what is rolled back included
WIDTHS = 1, 5  # in turn


def findings(model: Model) -> list[Finding]:
  """Return what is found of a model."""
  try:
    validate.check_network(model)
    with jax.default_matmul_precision('highest'):
      return _Windows(model).findings()
  except Exception as error:  # whatever a user's network raises
    return [Finding('reads a text', False, first_line(error, named=True))]


@functools.partial(jax.jit, static_argnums=0)
def _extend(network, params, cache: Cache, tokens: Array, positions: Array) -> tuple[Array, Cache]:
  return network.extend(params, cache, tokens, positions)


class _Windows:
  """A batch of random texts, each behind a prompt, and what a model reads of them."""

  def __init__(self, model: Model):
    self.network, self.params = model.network, model.params
    most = self.network.max_positions
    self.slots = POSITIONS if most is None else min(POSITIONS, most)
    self.alone = self.network.start_id is None  # one buffer with the prompt
    size = len(LENGTHS), self.slots
    self.tokens = np.random.default_rng(0).integers(0, self.network.vocab_size, size, np.int32)
    self.length = np.int32(LENGTHS)
    self.count = self.slots - max(WIDTHS) - (max(LENGTHS) if self.alone else 0)  # tokens behind the prompt
    if self.count < 1:
      raise ValueError(f'max_positions={most} are too few to check: {self.slots - self.count + 1} are read')

  def findings(self) -> list[Finding]:
    """Return the answers."""
    singly = self.read([1] * self.count)
    found = [
      self.compared('reads windows as single tokens', self.read(WIDTHS), singly),
      self.compared('forgets what is rolled back', self.read(WIDTHS, rejected=True), singly),
      self.compared('reads each row by itself', self.read(WIDTHS, rows=slice(1, None)), singly[1:], LENGTHS[1:]),
    ]
    if self.alone:
      found.append(self.compared('reads a prompt as single tokens', self.read_prompt(), singly[:, :1]))
    return found

  def read(self, widths: Sequence[int], rejected: bool = False, rows: slice = slice(None)) -> np.ndarray:
    """Return the logits [B, count, V] behind the prompts, read in windows of these widths in turn.

    With `rejected`, each window is first read with other tokens, and more of them.
    """
    tokens, length = self.tokens[rows], self.length[rows]
    prompt = Prompt(jnp.asarray(tokens[:, : max(LENGTHS)]), jnp.asarray(length))
    cache = jax.jit(self.network.prefill, static_argnums=2)(self.params, prompt, self.slots)
    first = length - 1 if self.alone else np.zeros_like(length)  # the last of the prompt is fed once more
    behind = np.take_along_axis(tokens, first[:, None] + np.arange(self.count)[None], 1)
    found = []
    while (at := sum(x.shape[1] for x in found)) < self.count:
      here = behind[:, at : at + widths[len(found) % len(widths)]]
      if rejected:
        other = np.pad((here + 1) % self.network.vocab_size, [(0, 0), (0, max(WIDTHS) - here.shape[1])])
        _, cache = self.feed(cache, other, first + at)
      logits, cache = self.feed(cache, here, first + at)
      found.append(np.asarray(logits, np.float32))
    return np.concatenate(found, 1)

  def read_prompt(self) -> np.ndarray:
    """Return the logits [B, 1, V] behind the prompts, whose tokens are fed to an empty cache one by one."""
    cache = self.network.empty_cache(self.params, len(self.tokens), self.slots)
    found = []
    for at in range(max(LENGTHS)):
      logits, cache = self.feed(cache, self.tokens[:, at : at + 1], np.full_like(self.length, at))
      found.append(np.asarray(logits, np.float32))
    return np.take_along_axis(np.concatenate(found, 1), self.length[:, None, None] - 1, 1)

  def feed(self, cache: Cache, tokens: np.ndarray, first: np.ndarray) -> tuple[Array, Cache]:
    """Feed tokens [B, L] at consecutive positions."""
    positions = first[:, None] + np.arange(tokens.shape[1], dtype=np.int32)[None]
    return _extend(self.network, self.params, cache, jnp.asarray(tokens), jnp.asarray(positions))

  def compared(self, question: str, found: np.ndarray, singly: np.ndarray, lengths: Sequence[int] = LENGTHS) -> Finding:
    """Return whether logits are those of single tokens but for rounding, in units of their spread."""
    apart = np.abs(found - singly).max(-1) / np.maximum(singly.std(-1), 1e-6)
    wrong = np.argwhere(~(apart <= self.rounding))  # NaN is wrong
    if not wrong.size:
      return Finding(question, True, f'logits differ by {number(apart.max())} of their spread at most')
    row, place = wrong[0]
    message = f'{len(wrong)} of {apart.size} logits differ, the first by {number(apart[row, place])} of their spread'
    return Finding(question, False, f'{message}, {place} tokens behind a prompt of {lengths[row]}')

  @functools.cached_property
  def rounding(self) -> float:
    """How far rounding takes logits apart, by the shortest numbers among the parameters and in the cache."""
    empty = functools.partial(self.network.empty_cache, batch=1, slots=self.slots)
    cache = jax.eval_shape(empty, self.params) if self.alone else ()
    floats = [x.dtype for x in jax.tree.leaves((self.params, cache)) if jnp.issubdtype(x.dtype, jnp.floating)]
    return max((float(jnp.finfo(x).eps) for x in floats), default=float(jnp.finfo(jnp.float32).eps)) ** 0.5
