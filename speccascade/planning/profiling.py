"""Measure what a schedule of verification decides by: acceptance by signals, and what verifying costs.

The prompts are decoded with every draft verified, while a companion reads it too, if there is one; then forward passes
are timed. `planner.plan` calls this and adds what a round costs apart from its calls.

Axis letters: N samples.
"""

from collections.abc import Callable, Mapping, Sequence
import concurrent.futures
import dataclasses
import functools
from typing import Any

from flax import struct
import jax.numpy as jnp
import numpy as np

from speccascade import backends, methods, rules
from speccascade.backends import sharding
from speccascade.backends.ops import take
from speccascade.engine import inputs, requests
from speccascade.engine.engine import Engine
from speccascade.engine.job import DecodeJob
from speccascade.engine.limits import First
from speccascade.engine.loop import positions
from speccascade.engine.lowering import Phase
from speccascade.engine.method import About, Method
from speccascade.engine.phases import Propose, Score, Verify
from speccascade.engine.records import fresh_slots
from speccascade.engine.state import Context, Record, State
from speccascade.host import multihost
from speccascade.host.progress import Progress
from speccascade.models import packing
from speccascade.planning import fitting, timing
from speccascade.sv import plans, predictors, verification
from speccascade.sv.predictors import AcceptanceTable, Predictor
from speccascade.types import Array, iota, Model, NO_FAULT, static

# ---- acceptance ----


@struct.dataclass
class Noted(Record):
  """What signals and verifier make of the token at each position [B, T]; `position` is that in the draft."""

  values: dict[str, Array]


@struct.dataclass
class Observe(Phase):
  """Note what signals, a companion and the verifier make of each drafted token; its last test counts."""

  signals: tuple[Callable, ...] = static()
  verifier: int = static()

  def __str__(self):
    return 'observe'

  @property
  def names(self) -> list[str]:
    """The fields of what is noted."""
    of_companion = ['s', 'a', 's_target'] * (self.verifier == 2)
    return ['accept', 'position', *of_companion, *map(predictors.spelled, self.signals)]

  def records(self, rows: int, positions: int) -> dict[str, Record]:
    return {'notes': Noted({name: jnp.zeros((rows, positions)) for name in self.names})}

  def __call__(self, context: Context, state: State) -> State:
    width = state.window.source.shape[1]
    draft = verification.drafted(state, width, self.verifier)
    values = [verification.chance(state, self.verifier, width)]
    values.append(jnp.broadcast_to(iota(width).astype(jnp.float32), values[0].shape))
    if self.verifier == 2:
      values += [*predictors.companion(verification.drafted(state, width, 1)), predictors.companion(draft)[0]]
    values += [signal(draft) for signal in self.signals]

    def noted(old, new):
      slot, fresh = fresh_slots(state.length, old.shape[1], state.window.size)
      return jnp.where(fresh & state.active[:, None], take(new, jnp.minimum(slot, new.shape[1] - 1)), old)

    old = state.records['notes'].values
    notes = Noted({name: noted(old[name], new) for name, new in zip(self.names, values, strict=True)})
    return state.replace(records=state.records | {'notes': notes})


def observing(block: int, models: int = 3, signals: Sequence[Callable] = ()) -> Method:
  """Return speculative decoding that verifies all of a draft of γ + 1 tokens, a companion reading along."""
  scores = [Score(m, First(block)) for m in range(1, models)]
  phases = (
    Propose(0, block + 1),
    *scores,
    Observe(tuple(signals), models - 1),
    Verify(rules.bind(rules.own), (models - 1,)),
  )
  return Method(phases, tuple(range(models)), about=About('observing'))


def samples_of(
  models: Sequence[Model],
  prompts: Sequence,
  *,
  block: int,
  batch_size: int,
  signals: Sequence[Callable] = (),
  progress: bool = True,
  **call,
) -> dict[str, np.ndarray]:
  """Decode prompts by one sampler; return `Profile.samples` of every tested token, which are those of the output."""
  job = DecodeJob.of(observing(block, len(models), signals), models, prompts, **call)
  rows = job.rows
  size = sharding.even(min(batch_size, len(rows)), job.shards)
  made = Engine(dataclasses.replace(job, size=size))
  order = inputs.by_length([r.tokens for r in rows])
  parts = []
  bar = Progress('acceptance by signals', len(rows), unit='texts', shown=progress)
  for i in range(0, len(rows), size):
    some = order[i : i + size]
    index = list(range(len(some)))
    prefix = made.prefill([rows[n].tokens for n in some], size)
    state = made.begin(prefix, made.insert_batch([rows[n] for n in some], None, index))
    ended = None
    while ended is None or not ended['done'].all():
      state, ended = made.collect(made.run(state))
    parts += [_sample(models[-1], rows[n], n, p, ended) for n, p in zip(some, index, strict=True)]
    bar.add(len(some))
  return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _sample(verifier: Model, row: requests.RequestRow, number: int, index: int, ended) -> dict[str, np.ndarray]:
  """Return what was noted of one row's output."""
  if ended['fault'].code[index] != NO_FAULT:
    raise ValueError(f'prompt {number}: logits are not finite; check the weights for NaN, or decode in float32.')
  start = row.tokens.size if verifier.network.start_id is None else 1
  span = slice(start, ended['length'][index])
  sample = {name: np.float64(x[index, span]) for name, x in ended['notes'].values.items()}
  return sample | {'request': np.full(len(sample['accept']), float(number))}


# ---- times ----


def measure_times(
  models: Sequence[Model],
  block: int,
  batches: Sequence[int],
  *,
  source: int = 64,
  tokens: int = 128,
  trials: int = 5,
  progress: bool = True,
) -> tuple[dict[int, dict[int, float]], dict[int, tuple[float, ...]]]:
  """Return `times` of a profile, and its `steps` without the last of each, all of calls in a loop of their own.

  The numbers of tokens are those that `sv_exact` computes: the widths of one row's window, packed totals of several
  rows, or padded windows alone where the backend packs nothing.
  """
  times = {}
  steps = {}
  bar = Progress('times', len(batches), unit='batches', shown=progress)
  for rows in batches:
    timers = _timers(models, block + 1, rows, source, tokens)
    seconds = {name: float(np.median(x)) for name, x in timing.interleave(timers, trials).items()}
    del timers  # and with them the caches, before the next are made
    steps[rows] = tuple(seconds.pop(name, 0.0) for name in ('draft', 'companion', 'alone'))
    times[rows] = dict(sorted(seconds.items()))
    bar.add(1, f'batch {rows}')
  return times, steps


def _timers(models: Sequence[Model], width: int, rows: int, source: int, tokens: int) -> dict[Any, Callable]:
  """Return timers of the drafter's, a companion's and the verifier's steps, and by size of the verifier's windows."""
  caches = [timing.filled([m], rows, source, positions(m.network, source, tokens, width)) for m in models]
  timer = functools.partial(timing.passes_seconds, batch=rows, source=source, tokens=tokens, window=width)

  def of(i, width, **how):
    return functools.partial(timer, [(models[i], width, 1)], caches=caches[i], **how)

  last = len(models) - 1
  made = {'draft': of(0, 1), 'alone': of(last, 1), rows * width: of(last, width)}
  made |= {'companion': of(1, width)} if last == 2 else {}
  backend = backends.backend_for(models[last].params)
  for n in backend.window_widths(rows, packing.fine_widths(width))[:-1]:
    made[rows * n] = of(last, n) if rows == 1 else of(last, width, total=rows * n)
  with concurrent.futures.ThreadPoolExecutor(multihost.threads()) as pool:  # they compile side by side
    return dict(zip(made, pool.map(lambda make: make(), made.values()), strict=True))


def scoring_all(block: int, models: int = 3) -> Method:
  """Return `scheduled` that scores all it may, with the work of a choice by a table of acceptance."""
  signal = predictors.companion if models == 3 else predictors.drawn_q
  rows, columns = fitting.BINS  # of fewer bins the compiler would leave the signal out
  a_edges = [np.arange(1, columns) / columns] * rows
  certain = AcceptanceTable.of(np.arange(1, rows) / rows, a_edges, np.ones((rows, columns)))
  budget = verification.Goodput(verification.Latency.of(np.ones(2)))
  return methods.scheduled(signal, block, budget=budget, fit=certain, pair=None if models == 3 else (0, models - 1))


def overhead(seconds: float, block: int, draft: float, companion: float, verifier: float) -> float:
  """Return what a round of `scoring_all` takes more than its calls; the verifier's is that of the whole window."""
  return max(0.0, seconds - (block + 1) * draft - companion - verifier)


# ---- a profile ----


def profile(
  origin: plans.Origin,
  samples: Mapping[str, np.ndarray],
  times: Mapping[int, Mapping[int, float]],
  steps: Mapping[int, Sequence[float]],
  rounds: Mapping[int, Mapping[int, float]] | None = None,
  bins: Sequence[int] = fitting.BINS,
  signals: Sequence[Callable] = (),
) -> plans.Profile:
  """Return a profile of samples and times; a companion's table has at most `bins` of S and, in each, of A."""
  accept = samples['accept']
  table = fitting.table(accept, samples['s'], samples['a'], bins) if 's' in samples else None
  fits = {}
  for signal in signals:
    name = predictors.spelled(signal)
    fits[name] = fitting.fitted(Predictor.of(signal), accept, samples[name])
  return plans.Profile.of(table, origin, samples, times, steps, rounds, fits)
