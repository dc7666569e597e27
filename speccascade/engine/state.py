"""The state that every phase reads and writes.

Axis letters: B batch, M models of a method, W window of pending tokens, V vocabulary, T token buffer, K stop tokens.

Every array of the state has the rows of the batch on axis 0. Three facts are true between any two phases:
  * slot = absolute position, in the caches and in `State.tokens`; nothing stores an index;
  * `fed[b, m]` tokens of row b are in the cache of model m, so it knows the distributions up to position `fed[b, m]`;
  * the last committed token is fed to no model: `fed <= length - 1` when nothing is pending.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

from flax import struct
import jax
import jax.numpy as jnp

from speccascade import sampling, stopping
from speccascade.backends import Backend
from speccascade.backends.ops import take
from speccascade.types import Array, Cache, Carry, iota, Model, NO_FAULT, Prompt, static, Window


@struct.dataclass
class Limits:
  """What a row's request changes of its logits and of its end, where any request of the batch does so."""

  stop_ids: Array  # [B, K] tokens that end the row, as EOS does; -1 is none
  least: Array | None = None  # [B] the position before which the row must not end
  bias: Array | None = None  # [B, V] added to every model's logits
  processed: Array | None = None  # [B] whether its likeliest tokens are the target's


@struct.dataclass
class Arrays:
  """Rows as arrays, padded to a batch."""

  prompt: Prompt
  key: Array  # [B, 4] seed, stream, example, sample
  max_new: Array  # [B]
  sampler: sampling.Sampler  # its numbers [B]
  limits: Limits
  real: Array  # [B] rows that are not padding


@struct.dataclass
class Fault:
  """Why a row has no next token."""

  code: Array  # [B] of `types`, or NO_FAULT
  value: Array  # [B] what the target sums to, or its least entry

  @classmethod
  def none(cls, batch: int) -> 'Fault':
    """Return that of rows that go on."""
    return cls(jnp.full(batch, NO_FAULT, jnp.int32), jnp.zeros(batch))


@struct.dataclass
class NoLeaves:
  """What stands for the leaves of a round without them; the base of `leaves.Leaves`."""

  def scored_by(self, m: int) -> int:
    """Return how many leaves model m scores beside what it is fed."""
    return 0

  def beside(self, m: int, length: Array, *fed: Array) -> tuple[Sequence[Array], dict[str, int]]:
    """Return tokens and positions [B, L] with those of leaves behind them, and what says so to the network."""
    return fed, {}

  def after(self, context: 'Context', state: 'State', m: int, logits: Array) -> tuple['State', Array]:
    """Return the state with the logits after leaves, and those [B, L, V] of what model m was fed beside them."""
    return state, logits

  def drawn(self, order: Callable[[], Array], token: Array, write: Callable[[Array, Array], Array]) -> Self:
    """Return the leaves with those beside a token [B] that was drawn.

    Args:
      order: Returns the order of the drafter's choices [B, V], the first the largest.
      token: The token.
      write: Puts what is of this place into an array of all places.
    """
    return self

  def specs(self, by_row: Self, by_vocabulary: Callable[[Array, int], Any]) -> Self:
    """Return how each array is sharded, where all are by rows, and logits of a slot by its vocabulary."""
    return by_row

  def go_on(self, test: Any, context: 'Context', state: 'State', c: 'Commit') -> tuple['State', 'Commit']:
    """Return the state and the outcome of a test, with a token more where that after a rejection is a leaf."""
    return state, c


@struct.dataclass
class NoHit:
  """What stands for the leaves that were hit where there are none; the base of `leaves.Hit`."""

  @property
  def count(self) -> Array | int:
    """Return how many tokens follow a leaf [B]."""
    return 0

  def put(self, tokens: Array, at: Array) -> Array:
    """Return tokens [B, T] with those that follow leaves at `at` [B]."""
    return tokens

  def read(self, accepted: Array, models: int) -> Array:
    """Return the lengths [B, M] that models have read rightly, of those up to the accepted tokens [B, 1]."""
    return accepted

  def shown(self, context: 'Context', state: 'State', accepted: Array) -> 'State':
    """Return the state as records see it: with what was computed after leaves in the place of what was dropped."""
    return state

  def sources(self, drawn: Array, after: Array) -> Array:
    """Return the sources of drawn tokens [B, …], of those after leaves [B, W+1] another."""
    return drawn


@struct.dataclass
class Commit:
  """The outcome of a verification, by row: which tokens are committed, and how they came about."""

  scored: Array  # [B] pending tokens that all models of the test have scored
  tested: Array  # [B]
  accepted: Array  # [B] so many of the pending tokens are committed
  rejected: Array  # [B] whether a tested token was not accepted
  more: Array  # [B] whether a token follows the accepted ones
  token: Array  # [B] that token
  deferred: Array | None  # [B, W+1] whether the rule deferred there; None where it makes no decision
  judge: int = static()  # the slot of the last model of the test
  target: Array | None = None  # [B, W+1, V] the target that was tested; None where there is none
  leaf: NoHit = NoHit()  # what follows leaves


class Record:
  """An array, or some, with rows on axis 0, that a commit may change. The base of every record.

  Attributes:
    for_host: Whether the host reads it.
  """

  for_host: bool = True

  def after(self, state: 'State', commit: Commit, new: Array, emitted: Array) -> Self:
    """Return the record after a commit.

    Args:
      state: The state before it.
      commit: The outcome of the verification.
      new: The new tokens [B, W+1].
      emitted: How many of them are committed [B].
    """
    return self


@struct.dataclass
class State:
  """All that the decode loop carries."""

  tokens: Array  # [B, T]
  length: Array  # [B] committed tokens
  limit: Array  # [B] the length at which a row ends
  done: Array  # [B]
  active: Array  # [B] rows that the phases work on now
  fed: Array  # [B, M]
  caches: tuple[Cache, ...]
  window: Window
  sampler: sampling.Sampler  # its numbers [B]
  limits: Limits
  noise: sampling.Noise
  policy: Carry  # of the draft-length policy
  idle: Array  # [B] rounds since the row, or where models take turns any row, grew
  fault: Fault
  records: dict[str, Record]  # of the committed tokens

  @property
  def stats(self) -> Record:
    """What is counted, `stats.Counts`."""
    return self.records['stats']

  def charge(self, slot: int, **counts: Array | int) -> 'State':
    """Add to the counts of a model: `calls`, `positions`, `computed`, `drafted`, each [B] or one for all rows."""
    return self.replace(records=self.records | {'stats': self.stats.charge(slot, **counts)})


class Context(NamedTuple):
  """What is fixed while decoding: the models with their parameters bound, and what the program is compiled for."""

  extend: tuple[Callable[..., tuple[Array, Cache]], ...]  # (cache, tokens, positions[, packing]) -> logits, cache
  packs: tuple[bool, ...]  # whether each model takes a packed window
  corrected: tuple[Callable[[Array, Array], Array] | None, ...]  # (logits [B, V], token [B]) -> logits
  cache_of: tuple[int | None, ...]  # the cache that each model reads and writes; None where it lies elsewhere
  policy: stopping.Policy
  eos_ids: tuple[int, ...]
  processor: Callable[[Array, Array, Array], Array] | None = None  # (logits [V], tokens [T], how many) -> logits [V]
  backend: Backend = Backend()
  # [V] by slot: the tokens that a translated drafter lacks, where a combiner of logits reads it, else None. The window
  # stores its lowest logit for them, and `masked` makes a distribution of the drafter of that.
  lacks: tuple[Array | None, ...] = ()

  def masked(self, m: int, logits: Array | None) -> Array | None:
    """Return logits [..., V] of slot m whose distribution leaves out the tokens that the model lacks."""
    return logits if logits is None or self.lacks[m] is None else jnp.where(self.lacks[m], -jnp.inf, logits)


def sampler_for_window(state: State, slots: int | None = None) -> sampling.Sampler:
  """Bind the sampler to the first slots of the window, or all: a penalty at slot j sees the pending tokens before j."""
  sampler = state.sampler.by_number(lambda x: x[:, None])
  if not sampler.penalises:
    return sampler
  width = state.window.source.shape[1]
  vocab = state.window.vocab
  pending = take(state.tokens, state.length[:, None] + iota(width))
  real = iota(width) < state.window.size[:, None]
  drafted = jnp.where(real[..., None], jax.nn.one_hot(pending, vocab, dtype=jnp.int32), 0)
  before = jnp.pad(jnp.cumsum(drafted, 1), ((0, 0), (1, 0), (0, 0)))[:, :slots]  # [B, W+1, V]
  seen, counts = (state.records.get(name) for name in ('seen', 'counts'))
  return sampler.bind(
    None if seen is None else (before > 0) | seen.tokens[:, None],
    None if counts is None else before + counts.times[:, None],
  )


def cache_slots(slots: Sequence[Model]) -> tuple[int, ...]:
  """Return for each slot the slot whose cache it uses: its own, or that of a network that it is a part of."""

  def shares(model: Model, other: Model) -> bool:
    return model.network.shares_cache(model.params, other.network, other.params)

  own = [slot for slot, model in enumerate(slots) if not any(shares(model, other) for other in slots)]
  return tuple(next((j for j in own if shares(model, slots[j])), slot) for slot, model in enumerate(slots))
