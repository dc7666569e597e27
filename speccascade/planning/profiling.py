"""Measure what speculative verification decides by: acceptance by S and A, and what verifying costs.

The prompts are decoded with every draft verified, while the companion reads it too; then forward passes are timed.
`planner.plan` calls this for three models and adds what a round costs apart from its calls.

Axis letters: N samples, I bins of S, J bins of A.
"""

from collections.abc import Callable, Mapping, Sequence
import concurrent.futures
import dataclasses
import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from speccascade import backends, methods, rules
from speccascade.backends import sharding
from speccascade.backends.ops import take
from speccascade.engine import inputs, requests
from speccascade.engine.engine import Engine
from speccascade.engine.job import Job
from speccascade.engine.limits import First
from speccascade.engine.loop import positions
from speccascade.engine.lowering import Phase
from speccascade.engine.method import About, Method
from speccascade.engine.phases import Propose, Score, Verify
from speccascade.engine.records import fresh_slots, Record
from speccascade.engine.state import Context, State
from speccascade.host import multihost
from speccascade.host.progress import Progress
from speccascade.models import packing
from speccascade.planning import timing
from speccascade.sv import plans, verification
from speccascade.sv.verification import AcceptanceTable
from speccascade.types import Array, iota, Model, NO_FAULT

BINS = 20, 15  # of S, and of A in each
_PSEUDO = 8.0  # samples that a bin borrows from its row, and a row from all


# ---- acceptance ----


@struct.dataclass
class Notes(Record):
  """What companion and verifier make of the token at each position."""

  s: Array  # [B, T], as are the others
  a: Array
  s_target: Array
  accept: Array
  position: Array  # in the draft


@struct.dataclass
class Observe(Phase):
  """Note what companion and verifier make of each drafted token; its last test counts."""

  def __str__(self):
    return 'observe'

  def records(self, rows: int, positions: int) -> dict[str, Record]:
    return {'notes': Notes(*[jnp.zeros((rows, positions))] * 5)}

  def __call__(self, context: Context, state: State) -> State:
    width = state.window.source.shape[1]
    s, a = verification.indicators(state, 1, width)
    s_target, _ = verification.indicators(state, 2, width)
    accept = verification.chance(state, 2, width)
    position = jnp.broadcast_to(iota(s.shape[1]).astype(jnp.float32), s.shape)

    def noted(old, new):
      slot, fresh = fresh_slots(state.length, old.shape[1], state.window.size)
      return jnp.where(fresh & state.active[:, None], take(new, jnp.minimum(slot, new.shape[1] - 1)), old)

    notes = jax.tree.map(noted, state.records['notes'], Notes(s, a, s_target, accept, position))
    return state.replace(records=state.records | {'notes': notes})


def observing(block: int) -> Method:
  """Return speculative decoding that verifies all of a draft of γ + 1 tokens, the companion reading along."""
  phases = (
    Propose(0, block + 1),
    Score(1, First(block)),
    Score(2, First(block)),
    Observe(),
    Verify(rules.bind(rules.own), (2,)),
  )
  return Method(phases, (0, 1, 2), about=About('observing'))


def samples_of(
  models: Sequence[Model], prompts: Sequence, *, block: int, batch_size: int, progress: bool = True, **call
) -> dict[str, np.ndarray]:
  """Decode prompts by one sampler; return `plans.FIELDS` of every tested token, which are those of the output."""
  job = Job.of(observing(block), models, prompts, **call)
  rows = job.rows
  size = sharding.even(min(batch_size, len(rows)), job.shards)
  made = Engine(dataclasses.replace(job, size=size))
  order = inputs.by_length([r.tokens for r in rows])
  parts = []
  bar = Progress('acceptance by S and A', len(rows), unit='texts', shown=progress)
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
  return {name: np.concatenate([part[name] for part in parts]) for name in plans.FIELDS}


def _sample(verifier: Model, row: requests.Row, number: int, index: int, ended) -> dict[str, np.ndarray]:
  """Return what was noted of one row's output."""
  if ended['fault'].code[index] != NO_FAULT:
    raise ValueError(f'prompt {number}: logits are not finite; check the weights for NaN, or decode in float32.')
  start = row.tokens.size if verifier.network.start_id is None else 1
  span = slice(start, ended['length'][index])
  sample = {name: np.float64(x[index, span]) for name, x in vars(ended['notes']).items()}
  return sample | {'request': np.full(len(sample['s']), float(number))}


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
    steps[rows] = tuple(seconds.pop(name) for name in ('draft', 'companion', 'alone'))
    times[rows] = dict(sorted(seconds.items()))
    bar.add(1, f'batch {rows}')
  return times, steps


def _timers(models: Sequence[Model], width: int, rows: int, source: int, tokens: int) -> dict[Any, Callable]:
  """Return timers of the drafter's, companion's and verifier's steps, and by size of the verifier's windows."""
  caches = [timing.filled([m], rows, source, positions(m.network, source, tokens, width)) for m in models]
  timer = functools.partial(timing.forward_seconds, batch=rows, source=source, tokens=tokens, window=width)

  def of(i, width, **how):
    return functools.partial(timer, models[i], width=width, caches=caches[i], **how)

  made = {'draft': of(0, 1), 'companion': of(1, width), 'alone': of(2, 1), rows * width: of(2, width)}
  if rows * width >= backends.backend_for(models[2].params).pack_from:
    for n in packing.fine_widths(width)[:-1]:
      made[rows * n] = of(2, n) if rows == 1 else of(2, width, total=rows * n)
  with concurrent.futures.ThreadPoolExecutor(multihost.threads()) as pool:  # they compile side by side
    return dict(zip(made, pool.map(lambda make: make(), made.values()), strict=True))


def scoring_all(block: int) -> Method:
  """Return `sv_exact` that scores all it may, with the work of a choice by a table of acceptance."""
  s_edges, a_edges = (np.arange(1, n) / n for n in BINS)  # of fewer bins the compiler would leave S and A out
  certain = AcceptanceTable.of(s_edges, [a_edges] * BINS[0], np.ones(BINS))
  return methods.sv_exact(plans.Profile(certain, np.ones(2)), block)


def overhead(seconds: float, block: int, draft: float, companion: float, verifier: float) -> float:
  """Return what a round of `scoring_all` takes more than its calls; the verifier's is that of the whole window."""
  return max(0.0, seconds - (block + 1) * draft - companion - verifier)


# ---- the table ----


def fit(s: np.ndarray, a: np.ndarray, accept: np.ndarray, bins: Sequence[int] = BINS) -> AcceptanceTable:
  """Return mean acceptance in bins of equal counts: `bins` of S and, within each of those, of A.

  A bin with few samples is drawn towards the mean of its row, a row towards that of all.
  """
  s_edges = edges(s, bins[0])
  row = np.searchsorted(s_edges, s, side='right')
  a_edges = [edges(a[row == i], bins[1]) for i in range(len(s_edges) + 1)]
  shape = len(a_edges), max(len(e) for e in a_edges) + 1
  row, column = AcceptanceTable.of(s_edges, a_edges, np.zeros(shape)).cells(s, a)
  total, count = (np.zeros(shape) for _ in range(2))
  np.add.at(total, (row, column), accept)
  np.add.at(count, (row, column), 1)
  of_row = (total.sum(1, keepdims=True) + _PSEUDO * accept.mean()) / (count.sum(1, keepdims=True) + _PSEUDO)
  return AcceptanceTable.of(s_edges, a_edges, (total + _PSEUDO * of_row) / (count + _PSEUDO))


def edges(x: np.ndarray, bins: int) -> np.ndarray:
  """Return the inner edges of at most `bins` bins with equal counts of x; equal values stay together."""
  if not x.size or bins == 1:
    return np.zeros(0)
  inner = np.unique(np.quantile(x, np.arange(1, bins) / bins, method='inverted_cdf'))
  return inner[inner > x.min()]


# ---- a profile ----


def profile(
  origin: plans.Origin,
  samples: Mapping[str, np.ndarray],
  times: Mapping[int, Mapping[int, float]],
  steps: Mapping[int, Sequence[float]],
  rounds: Mapping[int, Mapping[int, float]] | None = None,
  bins: Sequence[int] = BINS,
) -> plans.Profile:
  """Return a profile of samples and times; the table has at most `bins` of S and, in each, of A."""
  table = fit(samples['s'], samples['a'], samples['accept'], bins)
  return plans.Profile.of(table, origin, samples, times, steps, rounds)
