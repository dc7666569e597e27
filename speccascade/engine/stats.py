"""What decoding counts, and what it records of each token.

The loop carries `Counts`, none of which follows from the others; `derive` makes the statistics of a row from them on
the host. Nothing after the end of a row is counted, except in `computed`.

Axis letters: B batch, M models of a method, W window of pending tokens, T token buffer, V vocabulary.
"""

from typing import Any

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from speccascade import sampling
from speccascade.backends.ops import take
from speccascade.types import Array, BONUS, iota, NOWHERE, RESIDUAL

PER_MODEL = ('calls', 'positions', 'computed', 'drafted')  # statistics with an axis of models


@struct.dataclass
class Counts:
  """The counts that the loop carries.

  `positions` are those that the method needed; `computed` are those that the device worked on for the row, with padding
  and with the steps for which the row was idle or finished.
  """

  calls: Array  # [B, M]
  positions: Array  # [B, M]
  computed: Array  # [B, M]
  drafted: Array  # [B, M]
  deferred: Array  # [B] emitted tokens that a rule left to a model after the drafter; NaN where nothing decides that
  accepted_lengths: Array  # [B, W+1] histogram over rounds of the accepted length
  verified_lengths: Array  # [B, W+1] histogram over rounds of how many pending tokens all models of the test scored
  tested_at: Array  # [B, W] by position in the block
  source: Array  # [B, T] for each output token: the model that drafted it (or wrote it alone), RESIDUAL or BONUS

  @classmethod
  def zeros(cls, batch: int, models: int, width: int, buffer: int) -> 'Counts':
    """Return the counts of rows that have not begun."""
    numbers = lambda *shape: jnp.zeros((batch, *shape), jnp.int32)
    return cls(
      **dict.fromkeys(PER_MODEL, numbers(models)),
      deferred=jnp.zeros(batch),
      accepted_lengths=numbers(width + 1),
      verified_lengths=numbers(width + 1),
      tested_at=numbers(width),
      source=jnp.full((batch, buffer), NOWHERE, jnp.int32),
    )

  def charge(self, slot: int, **counts: Array | int) -> 'Counts':
    """Add to the counts of one model, each number [B] or one for all rows."""
    added = {name: with_column(x := getattr(self, name), slot, x[:, slot] + n) for name, n in counts.items()}
    return self.replace(**added)


@struct.dataclass
class Stats:
  """What decoding cost and where its tokens came from, by example; `Counts` explains those that the loop carries."""

  calls: Array  # [M, examples]
  positions: Array
  computed: Array
  drafted: Array
  rounds: Array  # [examples] verifications
  tested: Array  # drafted tokens that met the acceptance test
  accepted: Array
  emitted: Array
  deferred: Array
  accepted_lengths: Array  # [examples, W+1]
  verified_lengths: Array  # [examples, W+1]
  tested_at: Array  # [examples, W]
  accepted_at: Array  # [examples, W]
  source: Array  # of each output token of each example


def derive(counts: dict[str, np.ndarray]) -> dict[str, Any]:
  """Return the statistics of rows from their counts, arrays with any axes in front."""
  at_least = counts['accepted_lengths'][..., ::-1].cumsum(-1)[..., ::-1]  # rounds that accepted so many or more
  accepted_at = at_least[..., 1:]
  return counts | dict(
    rounds=counts['verified_lengths'].sum(-1),
    tested=counts['tested_at'].sum(-1),
    accepted=accepted_at.sum(-1),
    emitted=(counts['source'] != NOWHERE).sum(-1),
    accepted_at=accepted_at,
  )


@struct.dataclass
class Round:
  """The outcome of a verification, by row."""

  scored: Array  # [B] pending tokens that all models of the test have scored
  tested: Array  # [B]
  accepted: Array  # [B]
  rejected: Array  # [B] whether a tested token was not accepted
  more: Array  # [B] whether a token follows the accepted ones
  token: Array  # [B] that token
  deferred: Array | None  # [B, W+1] whether the rule deferred there; None where it makes no decision

  def count(self, state: Any, emitted: Array) -> Counts:
    """Return the counts of a state with this round, whose first `emitted` [B] tokens come before the end of a row."""
    drawn = jnp.where(self.rejected, RESIDUAL, BONUS)[:, None]
    drafted = jnp.pad(state.window.source, ((0, 0), (0, 1)))  # [B, W+1]
    origin = jnp.where(iota(drafted.shape[1]) < self.accepted[:, None], drafted, drawn)
    counts = state.stats
    width = counts.tested_at.shape[1]
    slots = iota(width + 1)
    # Tests count up to the first failure.
    reached = jnp.minimum(jnp.minimum(self.tested, self.accepted + 1), emitted)
    counted = state.active & (emitted > 0)
    slot, fresh = fresh_slots(state.length, counts.source.shape[1], emitted)
    histogram = lambda which, value, rows: which + ((slots == value[:, None]) & rows[:, None]).astype(jnp.int32)
    accepted = jnp.minimum(self.accepted, emitted)
    return counts.replace(
      deferred=counts.deferred + self._deferred(slots < emitted[:, None]),
      accepted_lengths=histogram(counts.accepted_lengths, accepted, counted & (self.tested > 0)),
      verified_lengths=histogram(counts.verified_lengths, self.scored, counted),
      tested_at=counts.tested_at + (iota(width) < reached[:, None]).astype(jnp.int32),
      source=jnp.where(fresh, take(origin, jnp.minimum(slot, width)), counts.source),
    )

  def _deferred(self, fresh: Array) -> Array:
    """Return [B]: how many of the fresh tokens [B, W+1] were left to a model after the drafter, NaN if unknown."""
    if self.deferred is None:
      return jnp.full(fresh.shape[0], jnp.nan)
    return jnp.sum(fresh & self.deferred, 1, dtype=jnp.float32)


# ---- what is recorded of each token ----


@struct.dataclass
class Top:
  """The likeliest tokens under the last model at each output position."""

  ids: Array  # [B, T, K]
  logprobs: Array  # [B, T, K]

  @classmethod
  def empty(cls, batch: int, buffer: int, count: int) -> 'Top | None':
    """Return an array for so many tokens at each position, None for none."""
    shape = (batch, buffer, count)
    return cls(jnp.zeros(shape, jnp.int32), jnp.full(shape, jnp.nan)) if count else None


def record_logprobs(logprobs: Array, window, fed: Array, length: Array, new: Array, emitted: Array) -> Array:
  """Record the unscaled log-probability of each new token [B, W+1] under each model that has scored it, else NaN."""
  width = new.shape[1]
  slot, fresh = fresh_slots(length, logprobs.shape[2], emitted)
  models = []
  for m, logits in enumerate(window.logits):
    logp = sampling.at_token(sampling.log_softmax(logits), new)
    logp = jnp.where(iota(width) <= (fed[:, m] - length)[:, None], logp, jnp.nan)
    models.append(jnp.where(fresh, take(logp, jnp.minimum(slot, width - 1)), logprobs[:, m]))
  return jnp.stack(models, 1)


def record_top(top: Top, logits: Array, length: Array, emitted: Array) -> Top:
  """Record the likeliest tokens of logits [B, W+1, V] at each new position."""
  values, ids = lax.top_k(sampling.log_softmax(logits), top.ids.shape[2])  # [B, W+1, K]
  slot, fresh = fresh_slots(length, top.ids.shape[1], emitted)
  slot = jnp.minimum(slot, ids.shape[1] - 1)
  fresh = fresh[..., None]
  return Top(jnp.where(fresh, take(ids, slot), top.ids), jnp.where(fresh, take(values, slot), top.logprobs))


def tally(new: Array, fresh: Array, vocab: int) -> Array:
  """Count each token among the fresh ones of new [B, W+1]: [B, V]."""
  return jnp.where(fresh[..., None], jax.nn.one_hot(new, vocab, dtype=jnp.int32), 0).sum(1)


def fresh_slots(length: Array, buffer: int, count: Array) -> tuple[Array, Array]:
  """Return for every position of a buffer [B, T] its slot in the window, and whether it is one of the first `count`."""
  slot = iota(buffer) - length[:, None]
  return jnp.maximum(slot, 0), (slot >= 0) & (slot < count[:, None])


def with_column(x: Array, m: int, value: Array) -> Array:
  """Return x [B, M] with its column m set to value [B]."""
  return jnp.where(iota(x.shape[1]) == m % x.shape[1], value[:, None], x)
