"""How much of a draft the verifier scores: a budget over what a predictor tells of each drafted token.

A predictor gives a, the chance that the verifier accepts a token if it accepts those before it; Π a over a row's first
k tokens is the gain of its k-th. A row's gains fall, so the tokens of the batch in the order of their gains are, at
every total, the best choice of so many: the total decides alone. `Goodput` chooses it by the verifier's times, `TopK`
is told it; `Causal` takes each row by itself, `Stale` what another budget chose a round ago.

Axis letters: B batch, W window of pending tokens, V vocabulary, N tokens of a batch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self
import warnings

from flax import struct
from jax import lax
import jax.numpy as jnp
import numpy as np

from speccascade import acceptance, stopping
from speccascade.backends.ops import take
from speccascade.engine.feeding import drawn_window
from speccascade.engine.limits import Limit
from speccascade.engine.method import index_for
from speccascade.engine.state import Context, sampler_for_window, State
from speccascade.sv import predictors
from speccascade.sv.predictors import AsIs, Logistic, Predictor
from speccascade.types import Array, Carry, checked_int, FINAL, iota, static, Told

ANY = 2**31 - 1  # rows that times of any batch are of
COUNTS = ('tokens', 'accepted')  # what goodput counts: all that come out, or the drafted ones that are accepted


@struct.dataclass
class Latency:
  """The verifier's seconds for n tokens of a batch, `seconds[i][n]` for batches of `rows[i]`.

  A round costs more than this: `steps[i]` are the seconds of one token of the drafter, of the companion's reading, and
  of all else.
  """

  seconds: tuple[Array, ...]
  steps: tuple[Array, ...]  # [3] each
  rows: tuple[int, ...] = static()

  @classmethod
  def of(cls, times: Any, steps: Mapping[int, Sequence[float]] | None = None) -> 'Latency':
    """Take {rows: {tokens: seconds}} as measured, a staircase between, or a time for 0, 1, 2, … tokens of any batch."""
    by_rows = times if isinstance(times, Mapping) else {ANY: times}
    rows = tuple(sorted(checked_int('rows', n) for n in by_rows))
    if not rows:
      raise ValueError('latency has no times; give those of a batch of one row at least.')
    seconds = tuple(_staircase(by_rows[n]) for n in rows)
    return cls(seconds, tuple(np.float32([*(steps or {}).get(n, ()), 0, 0, 0][:3]) for n in rows), rows)

  def at(self, batch: int, first: Array, count: int) -> tuple[Array, Array]:
    """Return the seconds [N] of first, first + 1, … tokens of a batch, and its steps.

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
  return largest(gains, lambda falling: best_total(falling, seconds, certain, greedy))


def largest(gains: Array, total_of: Callable[[Array], Array]) -> Array:
  """Return how many tokens of each row [B] are among the `total_of(gains in order)` with the largest gains [B, W]."""
  flat = gains.reshape(-1)
  index = lax.iota(jnp.int32, flat.size)
  falling, order = lax.sort((-flat, index), num_keys=1, is_stable=True)
  total = total_of(-falling)
  last = jnp.maximum(total - 1, 0)
  least = (-falling)[last]
  at = order[last]
  chosen = (total > 0) & ((flat > least) | ((flat == least) & (index <= at)))  # equal gains come in the order of rows
  return chosen.reshape(gains.shape).sum(1, dtype=jnp.int32)


def certain(counts: str, rows: Array | int) -> Array | int:
  """Return how many tokens count whatever is scored: one a row, none where only accepted ones count."""
  return rows if counts == 'tokens' else 0


# ---- budgets ----


@struct.dataclass
class Budget:
  """How many tokens of each row are verified. The base of every budget.

  Attributes:
    told: What it decides on a token by, beside its chance and those before it; what does not say it is told everything.
    stops: Whether a draft ends behind a token whose chance is under its `threshold`.
    threshold: That chance; None where it does not stop.
  """

  told = Told.LATER | Told.OTHERS
  stops = False
  threshold = None

  def __call__(self, chances: Array, active: Array) -> Array:
    """Return how many tokens of each row to verify [B], by their chances [B, W], 0 of what there is not."""
    raise NotImplementedError(f'{type(self).__name__} has no __call__(chances, active).')

  def measured(self, latency: 'Latency | None', drafts: int, companion: bool) -> Self:
    """Return it with the verifier's times, of rounds of so many drafted tokens, which a companion reads or not."""
    return self


@struct.dataclass
class Goodput(Budget):
  """Verify what gives the batch the best expected goodput.

  Each row has a token in any case, so that every row goes on. Goodput counts, over T(B + tokens), either the 'tokens'
  that come out, B + Σ gains, or the drafted tokens that are 'accepted', Σ gains. T is the verifier's time for that many
  tokens and, unless the choice is `greedy`, for `drafts` of the drafter and the companion's reading.
  """

  latency: Latency | None = None
  drafts: int = static(default=0)
  companion: bool = static(default=True)
  greedy: bool = static(default=False)
  counts: str = static(default='tokens')

  def __post_init__(self):
    if self.counts not in COUNTS:
      raise ValueError(f"goodput={self.counts!r} is neither 'tokens' nor 'accepted'; give what goodput counts.")

  def __str__(self):
    return 'greedy ' * self.greedy + 'goodput' + ' of accepted tokens' * (self.counts == 'accepted')

  @property
  def told(self) -> Told:
    return Told.OTHERS if self.greedy else Told.LATER | Told.OTHERS

  def measured(self, latency, drafts, companion):
    latency = latency if self.latency is None else self.latency
    if latency is None:
      raise ValueError("budget=Goodput() needs the verifier's times; give a plan, or another budget, as Causal().")
    return self.replace(latency=latency, drafts=drafts, companion=companion)

  def __call__(self, chances, active):
    gains = jnp.cumprod(chances, 1)
    if gains.shape[0] > self.latency.rows[-1]:
      warnings.warn(
        f'the plan has times of up to {self.latency.rows[-1]} rows, and this batch has {gains.shape[0]}: what more '
        'tokens cost is a guess; plan with --batches of this size.',
        stacklevel=2,
      )
    rows = jnp.sum(active)
    seconds, (draft, companion, rest) = self.latency.at(gains.shape[0], rows, gains.size + 1)
    others = 0 if self.greedy else self.drafts * draft + rest + (companion if self.companion else 0)
    return lengths(gains, seconds + others, certain(self.counts, rows), self.greedy)


@struct.dataclass
class Causal(Budget):
  """Verify a row's tokens up to the first that is accepted with a chance under `threshold`; its draft ends there."""

  threshold: Array = 0.4

  told = Told.NOTHING
  stops = True

  def __post_init__(self):
    stopping.check_chance(self, 'threshold')

  def __str__(self):
    return 'causal'

  def __call__(self, chances, active):
    return acceptance.leading((chances >= self.threshold) & (chances > 0))


@struct.dataclass
class TopK(Budget):
  """Verify the tokens with the largest gains, `k` times as many as there are rows."""

  k: int = static(default=2)

  told = Told.OTHERS

  def __post_init__(self):
    checked_int('TopK: k', self.k)

  def __str__(self):
    return f'top {self.k}'

  def __call__(self, chances, active):
    total = self.k * jnp.sum(active)
    return largest(jnp.cumprod(chances, 1), lambda falling: jnp.minimum(total, jnp.sum(falling > 0)))


@struct.dataclass
class Stale(Budget):
  """Verify as many tokens of a row as another budget chose in the round before, for its draft; at first all."""

  budget: Budget

  told = Told.EARLIER | Told.OTHERS

  def __str__(self):
    return f'stale {self.budget}'

  def measured(self, latency, drafts, companion):
    return self.replace(budget=check(self.budget).measured(latency, drafts, companion))

  def __call__(self, chances, active):
    return self.budget(chances, active)


def check(budget: Any) -> Budget:
  """Return a budget, having checked that it is one."""
  if not isinstance(budget, Budget):
    raise ValueError(f'budget={budget!r} is no budget; give Goodput(), Causal(), TopK() or Stale(budget=…).')
  if budget.stops and budget.threshold is None:
    raise ValueError(f'{type(budget).__name__} stops drafts and has no threshold; give it the chance that ends one.')
  return budget


# ---- in the loop ----


@struct.dataclass
class Scheduled(Limit):
  """Score as many tokens as a budget gives each row by what a predictor says; `spare` of its last are not scored.

  With 1 to spare, the last that was drafted is only tested.
  """

  predictor: Predictor
  budget: Budget
  most: int = static()
  spare: int = static(default=0)

  fine = True  # its choice may go by what each number of tokens costs

  def __str__(self):
    return f'{self.budget} by {self.predictor.name}'

  @property
  def reads(self) -> tuple[int, ...]:
    """The slots whose logits it reads."""
    return (0, 1) if self.predictor.declaration.companion else (0,)

  @property
  def stops(self) -> bool:
    """Whether it ends drafts, which a companion has not read."""
    return self.budget.stops and not self.predictor.declaration.companion

  @property
  def policy(self) -> stopping.Policy | None:
    return Scheduling(self) if self.remembers or self.stops else None

  @property
  def told(self) -> Told:
    return self.budget.told | (Told.TOKEN if self.predictor.declaration.drawn else Told.NOTHING)

  @property
  def coupled(self) -> bool:
    return self.predictor.declaration.coupled

  @property
  def stale(self) -> bool:
    """Whether a choice is used in the round after that in which it was made."""
    return Told.EARLIER in self.budget.told

  @property
  def remembers(self) -> bool:
    """Whether something goes on from round to round."""
    return self.predictor.fit.learns or self.stale

  def counts(self, pending: int) -> Sequence[int]:
    return range(max(min(pending - self.spare, self.most), 0) + 1)

  def __call__(self, context: Context, state: State) -> Array:
    if not self.stale:
      return self.choice(state)
    return jnp.minimum(state.policy.lengths, jnp.maximum(state.window.size - self.spare, 0))

  def choice(self, state: State) -> Array:
    """Return how many tokens of each row the budget gives [B]."""
    slots = min(self.most, state.window.source.shape[1])  # a round may draft less than it was made for
    draft = self.draft(state, slots)
    scored = (iota(slots) < (state.window.size - self.spare)[:, None]) & state.active[:, None]
    return self.budget(jnp.where(scored, self.predictor(self.carry(state.policy), draft), 0), state.active)

  def draft(self, state: State, slots: int) -> stopping.Draft:
    """Return what its predictor reads of the first pending tokens [B, slots]."""
    return drafted(state, slots, 1 if self.predictor.declaration.companion else None)

  def carry(self, policy: Carry) -> Carry:
    """Return the carry of the predictor's fit, of that of a policy."""
    return policy.fit if self.remembers or self.stops else self.predictor.fit.init(1)


@struct.dataclass
class Memory:
  """What `Scheduling` keeps: the carry of the fit, and how many tokens of each row are verified next [B]."""

  fit: Carry
  lengths: Array


@struct.dataclass
class Scheduling(stopping.Policy):
  """What goes on from round to round of a `Scheduled` limit, and where it ends drafts."""

  limit: Scheduled

  told = Told.NOTHING  # or what the limit says

  @property
  def reads(self) -> tuple[int, ...]:
    """The slots whose logits it learns from, or makes the next choice of."""
    return self.limit.reads

  def init(self, rows):
    return Memory(self.limit.predictor.fit.init(rows), jnp.full(rows, self.limit.most, jnp.int32))

  def varies(self):
    return self.limit.stops

  def stops_early(self):
    return self.limit.stops

  def ends(self, carry, draft):
    if not self.limit.stops:
      return jnp.zeros(draft.tokens.shape, bool)
    return self.limit.predictor(carry.fit, draft) < self.limit.budget.threshold

  def learn(self, state, tested, accepted, live, most):
    fit = self.limit.predictor.fit
    memory = state.policy
    if fit.learns:
      slot = iota(state.window.source.shape[1])
      signals = self.limit.predictor.signals(self.limit.draft(state, slot.size))
      at = (slot < tested[:, None]) & live[:, None]
      memory = memory.replace(fit=fit.update(memory.fit, at, slot < accepted[:, None], *signals))
    if self.limit.stale:
      memory = memory.replace(lengths=jnp.where(state.active, self.limit.choice(state), memory.lengths))
    return memory


def drafted(state: State, slots: int, companion: int | None = None) -> stopping.Draft:
  """Return the first pending tokens [B, slots], which model 0 drew, and the logits of a model that has read them."""
  w = state.window
  position = state.length[:, None] + iota(slots)
  of_companion = None if companion is None else w.logits[companion][:, :slots]
  q = drawn_window(state).probs[:, :slots]
  sampler = sampler_for_window(state, slots)
  tokens = take(state.tokens, position)
  return stopping.Draft(w.logits[0][:, :slots], q, tokens, position, sampler, state.noise, of_companion)


def chance(state: State, model: int, slots: int) -> Array:
  """Return how likely each of the first pending tokens [B, slots] is to be accepted by a model that has read them."""
  draft = drafted(state, slots, model)
  if state.noise.coupled:  # it is accepted if it is the model's own
    own, _ = state.noise.draw(draft.sampler(draft.companion), draft.position, FINAL, state.length)
    return (own == draft.tokens).astype(jnp.float32)
  return predictors.ratio(draft.probs, draft.sampler(draft.companion), draft.tokens)


def known() -> dict[str, Any]:
  """Return the budgets of the package, and the signals and fits that predictors are made of, by name."""
  budgets = {x.__name__: x for x in (Goodput, Causal, TopK, Stale)}
  return budgets | predictors.known() | {x.__name__: x for x in (AsIs, Logistic)}
