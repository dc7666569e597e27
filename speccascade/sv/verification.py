"""How much of a draft the verifier scores: the tokens that speculative verification expects to pay.

With S = Σ_v min(q̃, c̃) and A = min(1, c̃(x)/q̃(x)) of drafter and companion (the unscaled ones at temperature 0), a
table gives a(S, A), the chance that the verifier accepts x; Π a over a row's first k tokens is the gain of its k-th. A
row's gains fall, so the tokens of the batch in the order of their gains are, at every total, the best choice of so
many: the total decides alone.

Axis letters: B batch, W window of pending tokens, V vocabulary, N tokens of a batch, I bins of S, J bins of A.
"""

from collections.abc import Mapping, Sequence
from typing import Any
import warnings

from flax import struct
from jax import lax
import jax.numpy as jnp
import numpy as np

from speccascade import sampling
from speccascade.backends.ops import take
from speccascade.engine.feeding import drawn_window
from speccascade.engine.limits import Limit
from speccascade.engine.method import index_for
from speccascade.engine.state import Context, sampler_for_window, State
from speccascade.types import Array, checked_int, iota, static

COUNTS = ('tokens', 'accepted')  # what goodput counts: all that come out, or the drafted ones that are accepted


@struct.dataclass
class AcceptanceTable:
  """Mean acceptance by S and A: `means` [I, J] with inner edges `s_edges` [I-1] and, for each S, `a_edges` [I, J-1]."""

  s_edges: Array
  a_edges: Array
  means: Array

  def __call__(self, s: Array, a: Array) -> Array:
    """Return the means for s and a of one shape; comparisons and sums, where a TPU would gather entry by entry."""

    def trailing(x):
      return jnp.asarray(x).reshape((1,) * s.ndim + np.shape(x))

    count, most = np.shape(self.means)
    row = jnp.sum(trailing(self.s_edges) <= s[..., None], -1)[..., None] == trailing(jnp.arange(count))  # [..., I]
    column = jnp.sum(trailing(self.a_edges) <= a[..., None, None], -1)  # [..., I]
    cell = row[..., None] & (column[..., None] == trailing(jnp.arange(most)[None]))
    return jnp.sum(jnp.where(cell, trailing(self.means), 0), (-2, -1))

  @classmethod
  def of(cls, s_edges: Sequence, a_edges: Sequence[Sequence], means: Sequence) -> 'AcceptanceTable':
    """Return a table from rows of edges, which may differ in length: the edges of A are padded with infinity."""
    padded = np.full((len(a_edges), max(map(len, a_edges), default=0)), np.inf, np.float32)
    for i, edges in enumerate(a_edges):
      padded[i, : len(edges)] = edges
    return cls(np.asarray(s_edges, np.float32), padded, np.asarray(means, np.float32))

  def lists(self) -> dict[str, list]:
    """Return what `of` takes, as lists."""
    rows = [row[np.isfinite(row)].tolist() for row in np.asarray(self.a_edges)]
    return dict(s_edges=np.asarray(self.s_edges).tolist(), a_edges=rows, means=np.asarray(self.means).tolist())

  def check(self) -> None:
    """Refuse a table whose shapes do not fit, whose edges do not ascend or whose means are no shares."""
    means = np.asarray(self.means)
    a_edges = np.asarray(self.a_edges)
    if means.shape != (len(self.s_edges) + 1, a_edges.shape[1] + 1) or len(a_edges) != len(means):
      raise ValueError(
        'table: means need a row for each bin of S and a column for each bin of A, a_edges a row for each'
      )
    if bad := means[~((means >= 0) & (means <= 1 + 1e-4))].tolist():
      raise ValueError(f'table: means has {bad[0]:g}, which is no share of accepted tokens, 0 … 1.')
    for name, edges in [('s_edges', np.asarray(self.s_edges)), *(('a_edges', row[row < np.inf]) for row in a_edges)]:
      if not (np.diff(edges) > 0).all() or not np.isfinite(edges).all():
        raise ValueError(f'table: {name}={edges.tolist()} do not ascend.')

  def cells(self, s: np.ndarray, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the row and the column of each sample [N], on the host."""
    row = np.searchsorted(self.s_edges, np.float32(s), side='right')
    return row, (np.asarray(self.a_edges)[row] <= np.float32(a)[:, None]).sum(1)

  def predict(self, s: np.ndarray, a: np.ndarray) -> np.ndarray:
    """Return the means for samples [N], on the host."""
    return np.asarray(self.means, np.float64)[self.cells(s, a)]


@struct.dataclass
class Latency:
  """The verifier's seconds for n tokens of a batch, `seconds[i][n]` for batches of `rows[i]`.

  A round costs more than this: `steps[i]` are the seconds of one token of the drafter, and of the companion's reading.
  """

  seconds: tuple[Array, ...]
  steps: tuple[Array, ...]  # [2] each
  rows: tuple[int, ...] = static()

  @classmethod
  def of(cls, times: Any, steps: Mapping[int, Sequence[float]] | None = None) -> 'Latency':
    """Take {rows: {tokens: seconds}} as measured, a staircase between, or a time for 0, 1, 2, … tokens of any batch."""
    by_rows = times if isinstance(times, Mapping) else {1: times}
    rows = tuple(sorted(checked_int('rows', n) for n in by_rows))
    if not rows:
      raise ValueError('latency has no times; give those of a batch of one row at least.')
    seconds = tuple(_staircase(by_rows[n]) for n in rows)
    return cls(seconds, tuple(np.float32((steps or {}).get(n, (0, 0))[:2]) for n in rows), rows)

  def at(self, batch: int, first: Array, count: int) -> tuple[Array, Array]:
    """Return the seconds [N] of first, first + 1, … tokens of a batch, and those of a drafter's and companion's step.

    Beyond the measured tokens time goes on to grow as it does over all of them.
    """
    i = index_for(self.rows, batch)
    known = jnp.asarray(self.seconds[i])
    missing = max(batch + count - known.size, 0)
    slope = jnp.maximum(known[-1] - known[0], 0) / (known.size - 1)
    known = jnp.concatenate([known, known[-1] + slope * jnp.arange(1, missing + 1).astype(known.dtype)])
    return lax.dynamic_slice(known, (first,), (count,)), jnp.asarray(self.steps[i])


def _staircase(times: Mapping[int, float] | Sequence[float]) -> np.ndarray:
  """Return the time of every number of tokens; one that was not measured takes that of the next that was."""
  if isinstance(times, Mapping):
    totals = np.array([checked_int('tokens', n) for n in sorted(times)] or [0])
    measured = np.array([times.get(n, 0) for n in totals], np.float64)
    measured = np.maximum.accumulate(measured)  # noise may have made more tokens look cheaper
    seconds = measured[np.searchsorted(totals, np.arange(totals[-1] + 1))]
  else:
    seconds = np.asarray(times)
  if seconds.ndim != 1 or seconds.size < 2 or not ((seconds > 0) & np.isfinite(seconds)).all():
    raise ValueError("latency needs the verifier's time, > 0, for 0, 1, 2, … tokens, two at least.")
  return seconds.astype(np.float32)


def best_total(gains: Array, seconds: Array, certain: Array | int, greedy: bool = False) -> Array:
  """Return how many of the tokens with gains [N], which fall, to score for the best (certain + Σ gains) / seconds.

  `certain` tokens count whatever is scored: the rows, or 0 where only accepted tokens count. `seconds` [N + 1] are
  those of a round that scores 0, 1, … of them. Time is a staircase on most devices, so the best total may lie behind a
  worse one; `greedy` stops before the first fall, as published.
  """
  counted = jnp.cumsum(jnp.concatenate([jnp.asarray(certain, gains.dtype)[None], gains]))
  goodput = counted / seconds
  if greedy:
    rises = (goodput[1:] >= goodput[:-1]) & (gains > 0)
    return jnp.sum(jnp.cumprod(rises, dtype=jnp.int32))
  worth = jnp.concatenate([jnp.ones(1, bool), gains > 0])
  return jnp.argmax(jnp.where(worth, goodput, 0)).astype(jnp.int32)


def lengths(gains: Array, seconds: Array, certain: Array | int, greedy: bool = False) -> Array:
  """Return how many tokens of each row are among the best total, for gains [B, W] that fall along a row: [B]."""
  flat = gains.reshape(-1)
  index = lax.iota(jnp.int32, flat.size)
  falling, order = lax.sort((-flat, index), num_keys=1, is_stable=True)
  total = best_total(-falling, seconds, certain, greedy)
  last = jnp.maximum(total - 1, 0)
  least = (-falling)[last]
  at = order[last]
  chosen = (total > 0) & ((flat > least) | ((flat == least) & (index <= at)))  # equal gains come in the order of rows
  return chosen.reshape(gains.shape).sum(1, dtype=jnp.int32)


def certain(counts: str, rows: Array | int) -> Array | int:
  """Return how many tokens count whatever is scored: one a row, none where only accepted ones count."""
  return rows if counts == 'tokens' else 0


@struct.dataclass
class Goodput(Limit):
  """Choose how many tokens of each row to verify, for the best expected goodput of the batch.

  Each row has a token in any case, so that every row goes on. Goodput counts, over T(B + tokens), either the 'tokens'
  that come out, B + Σ gains, or the drafted tokens that are 'accepted', Σ gains. T is the verifier's time for that many
  tokens and, unless the choice is `greedy`, for `drafts` of the drafter and the companion's reading. `spare` of a row's
  last tokens are not scored: with 1 the last is only tested.
  """

  table: AcceptanceTable
  latency: Latency
  companion: int = static()
  most: int = static()
  drafts: int = static(default=0)
  spare: int = static(default=0)
  greedy: bool = static(default=False)
  counts: str = static(default='tokens')

  fine = True  # its choice goes by what each number of tokens costs

  def __post_init__(self):
    if self.counts not in COUNTS:
      raise ValueError(f"goodput={self.counts!r} is neither 'tokens' nor 'accepted'; give what goodput counts.")

  def __str__(self):
    return 'greedy ' * self.greedy + 'goodput' + ' of accepted tokens' * (self.counts == 'accepted')

  @property
  def reads(self) -> tuple[int, ...]:
    """The slots whose logits it reads."""
    return 0, self.companion

  def __call__(self, context: Context, state: State) -> Array:
    gains = jnp.cumprod(self.acceptance(state), 1)  # [B, most]
    if gains.shape[0] > self.latency.rows[-1] > 1:
      warnings.warn(
        f'the plan has times of up to {self.latency.rows[-1]} rows, and this batch has {gains.shape[0]}: what more '
        'tokens cost is a guess; plan with --batches of this size.',
        stacklevel=2,
      )
    rows = jnp.sum(state.active)
    seconds, (draft, companion) = self.latency.at(gains.shape[0], rows, gains.size + 1)
    others = 0 if self.greedy else self.drafts * draft + companion
    return lengths(gains, seconds + others, certain(self.counts, rows), self.greedy)

  def acceptance(self, state: State) -> Array:
    """Return a(S, A) of the tokens that may be scored [B, most], 0 of the others."""
    s, a = indicators(state, self.companion, self.most)
    scored = (iota(self.most) < (state.window.size - self.spare)[:, None]) & state.active[:, None]
    return jnp.where(scored, self.table(s, a), 0)


def indicators(state: State, companion: int, slots: int) -> tuple[Array, Array]:
  """Return S and A of the first pending tokens [B, slots], which model 0 drew, against a model that has read them.

  They are those of the sampled distributions, at temperature 0 of the unscaled ones.
  """
  w = state.window
  sampler = sampler_for_window(state, slots)
  q = sampler.soft(w.logits[0][:, :slots], drawn_window(state).probs[:, :slots])
  distribution = sampler.soft(w.logits[companion][:, :slots])
  return jnp.minimum(q, distribution).sum(-1), _ratio(state, q, distribution)


def chance(state: State, model: int, slots: int) -> Array:
  """Return how likely each of the first pending tokens [B, slots] is to be accepted by a model that has read them."""
  distribution = sampler_for_window(state, slots)(state.window.logits[model][:, :slots])
  return _ratio(state, drawn_window(state).probs[:, :slots], distribution)


def _ratio(state: State, q: Array, distribution: Array) -> Array:
  """Return min(1, distribution / q) at the first pending tokens."""
  tokens = take(state.tokens, state.length[:, None] + iota(q.shape[1]))
  q_x = sampling.at_token(q, tokens)
  at_x = sampling.at_token(distribution, tokens)
  return jnp.where(q_x > 0, jnp.minimum(1, at_x / jnp.where(q_x > 0, q_x, 1)), 0)
