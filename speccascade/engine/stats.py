"""What decoding counts.

The loop carries `Counts`, none of which follows from the others; `derive` makes the statistics of a row from them on
the host. Nothing after the end of a row is counted, except in `computed`.

Axis letters: B batch, M models of a method, W window of pending tokens, T token buffer, V vocabulary.
"""

from typing import Any

from flax import struct
import jax.numpy as jnp
import numpy as np

from speccascade.backends.ops import take, with_column
from speccascade.engine.records import fresh_slots
from speccascade.engine.state import Commit, Record, State
from speccascade.types import AFTER_LEAF, Array, BONUS, iota, NO_SOURCE, RESIDUAL

PER_MODEL = ('calls', 'positions', 'computed', 'drafted')  # statistics with an axis of models


@struct.dataclass
class Counts(Record):
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
  source: Array  # [B, T] of each output token: the model that drafted it (or wrote it alone), or a code of `types`

  @classmethod
  def zeros(cls, batch: int, models: int, width: int, buffer: int) -> 'Counts':
    """Return the counts of rows that have not begun."""

    def numbers(*shape):
      return jnp.zeros((batch, *shape), jnp.int32)

    return cls(
      **dict.fromkeys(PER_MODEL, numbers(models)),
      deferred=jnp.zeros(batch),
      accepted_lengths=numbers(width + 1),
      verified_lengths=numbers(width + 1),
      tested_at=numbers(width),
      source=jnp.full((batch, buffer), NO_SOURCE, jnp.int32),
    )

  def charge(self, slot: int, **counts: Array | int) -> 'Counts':
    """Add to the counts of one model, each number [B] or one for all rows."""
    added = {name: with_column(x := getattr(self, name), slot, x[:, slot] + n) for name, n in counts.items()}
    return self.replace(**added)

  def after(self, state: State, commit: Commit, new: Array, emitted: Array) -> 'Counts':
    drawn = jnp.where(commit.rejected, RESIDUAL, BONUS)[:, None]
    drafted = jnp.pad(state.window.source, ((0, 0), (0, 1)))  # [B, W+1]
    width = self.tested_at.shape[1]
    slots = iota(width + 1)
    drawn = commit.leaf.sources(drawn, slots > commit.accepted[:, None])
    origin = jnp.where(iota(drafted.shape[1]) < commit.accepted[:, None], drafted, drawn)
    # Tests count up to the first failure.
    reached = jnp.minimum(jnp.minimum(commit.tested, commit.accepted + 1), emitted)
    counted = state.active & (emitted > 0)
    slot, fresh = fresh_slots(state.length, self.source.shape[1], emitted)

    def histogram(which, value, rows):
      return which + ((slots == value[:, None]) & rows[:, None]).astype(jnp.int32)

    accepted = jnp.minimum(commit.accepted, emitted)
    deferred = jnp.nan  # unknown
    if commit.deferred is not None:
      deferred = jnp.sum(jnp.where(slots < emitted[:, None], commit.deferred.astype(jnp.float32), 0), 1)
    return self.replace(
      deferred=self.deferred + deferred,
      accepted_lengths=histogram(self.accepted_lengths, accepted, counted & (commit.tested > 0)),
      verified_lengths=histogram(self.verified_lengths, commit.scored, counted),
      tested_at=self.tested_at + (iota(width) < reached[:, None]).astype(jnp.int32),
      source=jnp.where(fresh, take(origin, jnp.minimum(slot, width)), self.source),
    )


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
  hits: Array  # rejections after which a leaf and one token more followed
  emitted: Array
  deferred: Array
  accepted_lengths: Array  # [examples, W+1]
  verified_lengths: Array  # [examples, W+1]
  tested_at: Array  # [examples, W]
  accepted_at: Array  # [examples, W]
  source: Array  # of each output token of each example


def acceptance_record(stats: dict[str, Any], method: str) -> dict[str, Any]:
  """Return the acceptance of a row from its statistics, in the words of serving engines, and its method's name."""
  histogram = np.asarray(stats['accepted_lengths'])
  steps, drafted = int(histogram.sum()), int(np.sum(stats['drafted']))
  accepted = int(stats['accepted'])
  others = int(stats['rounds']) - steps  # rounds in which nothing was tested, of a token each
  return dict(
    method=method,
    mean_acceptance_length=(int(stats['emitted']) - others) / max(steps, 1),
    draft_acceptance_rate=accepted / max(drafted, 1),
    acceptance_histogram=histogram.tolist(),
    num_spec_steps=steps,
    num_accepted_draft_tokens=accepted,
    num_draft_tokens=drafted,
    num_spec_tokens=histogram.size - 1,
  )


def derive(counts: dict[str, np.ndarray]) -> dict[str, Any]:
  """Return the statistics of rows from their counts, arrays with any axes in front."""
  at_least = counts['accepted_lengths'][..., ::-1].cumsum(-1)[..., ::-1]  # rounds that accepted so many or more
  accepted_at = at_least[..., 1:]
  return counts | dict(
    rounds=counts['verified_lengths'].sum(-1),
    tested=counts['tested_at'].sum(-1),
    accepted=accepted_at.sum(-1),
    hits=(counts['source'] == AFTER_LEAF).sum(-1),
    emitted=(counts['source'] != NO_SOURCE).sum(-1),
    accepted_at=accepted_at,
  )
