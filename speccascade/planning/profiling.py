"""Measure what speculative verification decides by: how often drafts are kept, by S and A, and what verifying costs.

  python -m speccascade.profile --models DRAFT COMPANION TARGET --data train.jsonl.gz \\
      --prompt-field 'Question: {question}\\nAnswer:' --temperature 0.6 --top-p 0.9 --out profile.json
  python -m speccascade.profile --models DRAFT COMPANION TARGET --times profile.json --data train.txt --out here.json

The prompts are decoded with every draft verified, while the companion reads it too; then forward passes are timed; then
some of the prompts are decoded at each batch in every way that may be the fastest, which is the one that sv_exact takes
there. The file goes to methods.sv_exact(profile='profile.json'), in gin as well, and to speccascade.decode --profile.
With --times the table is that of a profile which was measured elsewhere, and only times are measured; give --data too,
or the cost model chooses the ways. OUT is written before the ways are tried and again after: stopped between, it has
those of the cost model, and --times OUT --data FILE --out NEW tries them.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
import concurrent.futures
import dataclasses
import functools
import itertools
import sys
import time
from typing import Any

from flax import struct
import jax.numpy as jnp
import numpy as np

from speccascade import backends, checkpoints, rules, sampling
from speccascade.backends import sharding, traced
from speccascade.data import files
from speccascade.decode import decode
from speccascade.engine import inputs, profiles, requests, verification
from speccascade.engine.engine import Engine
from speccascade.engine.loop import positions
from speccascade.engine.method import Method
from speccascade.engine.phases import Propose, Score, Verify
from speccascade.evaluate import protocols, sv_studies
from speccascade.evaluate.formats import markdown
from speccascade.host import commands, disk, multihost
from speccascade.host.errors import RunError
from speccascade.host.progress import Progress
from speccascade.methods import sv_exact
from speccascade.models import packing
from speccascade.planning import floor
from speccascade.stopping import Policy
from speccascade.types import Array, Context, Model, places, State, take

BATCHES = (1, 4, 8, 16, 32)
_NOTED = ('s', 'a', 's_target', 'accept', 'place')


# ---- acceptance ----


@struct.dataclass
class Notes(Policy):
  """No limit to a draft; the carry is what `Observe` notes of every position."""

  positions: int = struct.field(pytree_node=False)

  def init(self, rows):
    return {name: jnp.zeros((rows, self.positions)) for name in _NOTED}


@struct.dataclass
class Observe:
  """Note at the position of each drafted token what companion and verifier say of it; its last test counts."""

  def __str__(self):
    return 'observe'

  def __call__(self, context: Context, state: State) -> State:
    width = state.window.source.shape[1]
    s, a = verification.indicators(state, 1, width)
    s_target, _ = verification.indicators(state, 2, width)
    accept = verification.chance(state, 2, width)
    place = jnp.broadcast_to(places(s.shape[1]).astype(jnp.float32), s.shape)
    found = dict(zip(_NOTED, (s, a, s_target, accept, place), strict=True))
    return state.replace(policy={name: self._noted(state, x, found[name]) for name, x in state.policy.items()})

  def _noted(self, state: State, noted: Array, new: Array) -> Array:
    slot = places(noted.shape[1]) - state.length[:, None]
    fresh = (slot >= 0) & (slot < state.window.size[:, None]) & state.active[:, None]
    return jnp.where(fresh, take(new, jnp.clip(slot, 0, new.shape[1] - 1)), noted)


def observing(block: int, slots: int) -> Method:
  """Return speculative decoding that verifies all of a draft of γ + 1 tokens, the companion reading along."""
  phases = (
    Propose(0, block + 1),
    Score(1, (block + 1,), verification.First(block)),
    Score(2, (block + 1,), verification.First(block), level=True),
    Observe(),
    Verify(rules.bind(rules.own), (2,)),
  )
  return Method(phases, (0, 1, 2), block + 1, Notes(slots), kind='profile')


def observe(
  models: Sequence[Model], rows: Sequence[requests.Row], block: int = 5, batch: int = 16
) -> dict[str, np.ndarray]:
  """Decode rows; return `profiles.FIELDS` of every token that was tested, which is every token of the output."""
  size = sharding.even(min(batch, len(rows)), sharding.row_parts(models))
  width, max_new = inputs.prompt_width(models, rows, None), max(r.max_new for r in rows)
  slots = positions(models[-1].network, width, max_new, block + 1)
  method, needs = observing(block, slots), requests.features(rows)
  made = Engine(method, models, needs=needs, size=size, width=width, max_new=max_new)
  order, parts, progress = inputs.by_length([r.tokens for r in rows]), [], Progress('profile', len(rows), unit='texts')
  for i in range(0, len(rows), size):
    some = order[i : i + size]
    place = list(range(len(some)))
    prefix = made.prefill([rows[n].tokens for n in some], size)
    state, ended = made.begin(prefix, made.arrival([rows[n] for n in some], None, place)), None
    while ended is None or not ended['done'].all():
      state, packed = made.run(state)
      ended = made.collect(packed, state)
    noted = {name: np.asarray(x) for name, x in state.policy.items()}
    parts += [_sample(models[-1], rows[n], n, p, ended, noted) for n, p in zip(some, place, strict=True)]
    progress.add(len(some))
  return {name: np.concatenate([part[name] for part in parts]) for name in profiles.FIELDS}


def _sample(verifier: Model, row: requests.Row, number: int, place: int, ended, noted) -> dict[str, np.ndarray]:
  """Return what was noted of one row's output."""
  if (ended['fault'][place] >= 0).any():
    raise ValueError(f'prompt {number}: logits are not finite; check the weights for NaN, or decode in float32.')
  start = row.tokens.size if verifier.network.start_id is None else 1
  span = slice(start, ended['length'][place])
  found = {name: np.float64(x[place, span]) for name, x in noted.items()}
  return found | {'request': np.full(len(found['s']), float(number))}


# ---- times ----


def measure_times(
  models: Sequence[Model], block: int, batches: Sequence[int] = BATCHES, *, source: int = 64, tokens: int = 128,
  trials: int = 5
) -> tuple[dict[int, dict[int, float]], dict[int, tuple[float, ...]]]:  # fmt: skip
  """Return `times` and `steps` of a profile.

  The numbers of tokens are those that `sv_exact` computes: the widths of one row's window, packed totals of several
  rows, or whole windows alone where the backend packs nothing.
  """
  times, steps = {}, {}
  parts = sharding.row_parts(models)
  batches = sorted({sharding.even(rows, parts) for rows in batches})
  progress = Progress('times', len(batches), unit='batches')
  for rows in batches:
    timers = _timers(models, block + 1, rows, source, tokens)
    found = {name: float(np.median(x)) for name, x in floor.interleave(timers, trials).items()}
    del timers  # and with them the caches, before the next are made
    steps[rows] = tuple(found.pop(name) for name in ('draft', 'companion', 'alone'))
    times[rows] = dict(sorted(found.items()))
    progress.add(1, f'batch {rows}')
  return times, steps


def _timers(models: Sequence[Model], width: int, rows: int, source: int, tokens: int) -> dict[Any, Callable]:
  """Return timers of the drafter's, companion's and verifier's steps, and by size of the verifier's windows."""
  caches = [floor.filled([m], rows, source, positions(m.network, source, tokens, width)) for m in models]
  timer = functools.partial(floor.forward_seconds, batch=rows, source=source, tokens=tokens, window=width)
  of = lambda i, width, **how: functools.partial(timer, models[i], width=width, caches=caches[i], **how)
  made = {'draft': of(0, 1), 'companion': of(1, width), 'alone': of(2, 1), rows * width: of(2, width)}
  if rows * width >= backends.of(models[2].params).pack_from:
    for n in packing.steps(width)[:-1]:
      made[rows * n] = of(2, n) if rows == 1 else of(2, width, total=rows * n)
  with concurrent.futures.ThreadPoolExecutor(multihost.threads()) as pool:  # they compile side by side
    return dict(zip(made, pool.map(traced.carried(lambda make: make()), made.values()), strict=True))


def measure_ways(
  found: profiles.Profile, models: Sequence[Model], prompts: Sequence, *, max_new_tokens: int = 128, seed: int = 0,
  trials: int = 3,
) -> dict[int, dict[profiles.Way, float]]:  # fmt: skip
  """Return `measured` of a profile: tokens a second of two batches of prompts, eight texts at least, medians of trials.

  The ways take turns, and each trial has prompts and a seed of its own, for few texts say little of a way. Too few
  prompts are repeated. A text is as long as one of those that were observed, the same in each way, for a batch takes as
  long as its longest: sampled texts would differ by more than the ways do. Where speculative decoding is fastest with
  the least or most γ that was tried, those beside it are tried too, in turn with it and plain decoding.
  """
  call = dict(max_new_tokens=max_new_tokens, sampler=sampling.Sampler(**dict(found.origin.sampler)))
  width = inputs.prompt_width(models, requests.rows(models, prompts, seed=seed, **call), None)
  _, lengths = np.unique(found.samples['request'], return_counts=True)
  prompts = [_of_length(prompt, lengths[i % len(lengths)]) for i, prompt in enumerate(prompts)]
  tried = {batch: list(sv_studies.candidates(found, batch)) for batch in found.times}
  progress = Progress('ways', sum(map(len, tried.values())) * (trials + 1), unit='decodes')
  measured = {}

  def run(way, batch, trials):
    method = sv_exact(dataclasses.replace(found, ways={batch: way}))
    trial, count = next(trials), max(2 * batch, 8)
    texts = [prompts[(trial * count + i) % len(prompts)] for i in range(count)]
    own = dict(prompts=texts, seed=seed + trial)
    speed = _speed(method, models=models, batch=batch, max_prompt_tokens=width, **own, **call)
    progress.add(1, f'batch {batch}, {way}')
    return speed

  for batch, some in tried.items():
    protocols.few_executables()
    speeds = measured[batch] = {}
    while some:
      turns = floor.interleave({way: functools.partial(run, way, batch, itertools.count()) for way in some}, trials)
      speeds |= {way: float(np.median(x)) for way, x in turns.items()}
      some = _beside(speeds, found.origin.block)
      progress.expect(len(some) * (trials + 1))
  return measured


def _of_length(prompt: Any, tokens: int) -> requests.Request:
  request = prompt if isinstance(prompt, requests.Request) else requests.Request(prompt)
  return dataclasses.replace(request, min_new_tokens=int(tokens), max_new_tokens=int(tokens))


def _beside(speeds: Mapping[profiles.Way, float], most: int) -> list[profiles.Way]:
  """Return what to try next: nothing, or the γ beside the fastest, with it and plain decoding."""
  best = max((way for way in speeds if way.kind == 'speculative'), key=speeds.get, default=None)
  near = [] if best is None else [best._replace(block=n) for n in (best.block - 1, best.block + 1) if 0 < n <= most]
  new = [way for way in near if way not in speeds]
  return [profiles.Way('plain'), best, *new] if new else []


def _speed(method: Method, *, prompts: Sequence, batch: int, **call) -> float:
  """Return the tokens a second of decoding batch after batch."""
  start, tokens = time.perf_counter(), 0
  for i in range(0, len(prompts), batch):
    out = decode(method, prompts=prompts[i : i + batch], batch_size=batch, **call)
    tokens += int(out.stats.emitted.sum())
  return tokens / (time.perf_counter() - start)


# ---- a profile ----


def profile(
  models: Sequence[Model],
  prompts: Sequence,
  *,
  sampler: sampling.Sampler = sampling.Sampler(),
  block: int = 5,
  max_new_tokens: int = 128,
  batch_size: int = 16,
  batches: Sequence[int] = BATCHES,
  bins: Sequence[int] = (20, 15),
  data: str = 'prompts',
  seed: int = 0,
  trials: int = 3,
) -> profiles.Profile:
  """Measure acceptance on prompts, and times on this device at each of `batches`, of drafter, companion, verifier.

  The table has at most `bins` of S and, in each, of A, all with about as many samples. Ways to decode are tried
  `trials` times; with 0 the cost model chooses among them.
  """
  if len(models) != 3:
    raise ValueError(f'a profile is of a drafter, a companion and a verifier, not of {len(models)} models.')
  if max_new_tokens <= block:
    raise ValueError(f'max_new_tokens={max_new_tokens} is not more than γ = {block}: no text would hold a whole draft.')
  rows = requests.rows(models, prompts, max_new_tokens=max_new_tokens, sampler=sampler, seed=seed)
  for i, row in enumerate(rows):
    if profiles.sampler_of(row.sampler) != profiles.sampler_of(sampler):
      raise ValueError(f'prompt {i} has a sampler of its own; a profile is of one sampler.')
  samples = observe(models, rows, block, batch_size)
  source = _median([r.tokens for r in rows])
  origin = profiles.Origin(
    tuple(m.name for m in models), tuple(m.digest for m in models), profiles.sampler_of(sampler),
    profiles.device_of(models), f'{data}, {len(rows)} prompts {profiles.digest_of([r.tokens for r in rows])}', block,
    source,
  )  # fmt: skip
  times, steps = measure_times(models, block, batches, source=source, tokens=max_new_tokens)
  table = profiles.fit(samples['s'], samples['a'], samples['accept'], bins)
  found = profiles.Profile(table, verification.Latency.of(times, steps), origin, samples, times, steps)
  return with_ways(found, models, prompts, trials, max_new_tokens=max_new_tokens, seed=seed)


def _median(rows: Sequence[np.ndarray]) -> int:
  return int(np.median([row.size for row in rows]))


def with_ways(found: profiles.Profile, models, prompts: Sequence | None, trials: int, **call) -> profiles.Profile:
  """Return a profile with the fastest way at each batch: as measured or, without prompts or trials, as modelled."""
  measured = measure_ways(found, models, prompts, trials=trials, **call) if prompts and trials else None
  found = dataclasses.replace(found, measured=measured)
  return dataclasses.replace(found, ways=sv_studies.best_ways(found))


def timed(
  found: profiles.Profile, models: Sequence[Model], batches: Sequence[int], tokens: int,
  prompts: Sequence | None = None, *, seed: int = 0, trials: int = 3,
) -> profiles.Profile:  # fmt: skip
  """Return a profile with the times of this device, those of decoding where there are prompts."""
  profiles.check_digests(found.origin, models)
  source = found.origin.source
  if prompts:
    rows = requests.rows(models, prompts, max_new_tokens=tokens, sampler=sampling.Sampler(), seed=seed)
    source = _median([r.tokens for r in rows])
  times, steps = measure_times(models, found.origin.block, batches, source=source, tokens=tokens)
  origin = dataclasses.replace(found.origin, device=profiles.device_of(models), source=source)
  latency = verification.Latency.of(times, steps)
  found = dataclasses.replace(found, latency=latency, origin=origin, times=times, steps=steps)
  return with_ways(found, models, prompts, trials, max_new_tokens=tokens, seed=seed)


# ---- the command ----


def main(argv: Sequence[str] | None = None) -> int:
  """Measure and save a profile; return the exit code."""
  return commands.run(_parser(), _run, argv, 'interrupted')


def _parser() -> commands.Parser:
  parser = commands.Parser('speccascade.profile', __doc__)
  parser.add_argument(
    '--models', nargs=3, required=True, metavar=('DRAFT', 'COMPANION', 'TARGET'),
    help='checkpoints; FOLDER@4 is the first four layers of FOLDER',
  )  # fmt: skip
  parser.add_argument('--out', required=True, help='the file to write')
  parser.add_argument('--overwrite', action='store_true', help='replace OUT')
  parser.add_argument('--data', metavar='FILE', help='prompts: lines, or JSON lines with --prompt-field; .gz or not')
  parser.add_argument('--times', metavar='PROFILE', help='measure times alone, for the table of this profile')
  parser.add_argument(
    '--against', nargs='+', default=[], metavar='PROFILE',
    help='also say how well tables of other data, samplers or γ predict these samples, and the other way round',
  )  # fmt: skip
  parser.add_argument('--prompt-field', help="a field of JSON lines, or a template: 'Question: {question}\\nAnswer:'")
  parser.add_argument('--count', type=commands.count, default=512, help='how many of the prompts (512)')
  parser.add_argument('--tokens', type=commands.count, default=128, help='the most new tokens (128)')
  parser.add_argument('--block', type=commands.count, default=5, help='γ, the most tokens to be verified (5)')
  parser.add_argument('--batch', type=commands.count, default=16, help='rows decoded at once (16)')
  parser.add_argument('--batches', type=commands.counts, default=BATCHES, help='rows at which to time (1,4,8,16,32)')
  parser.add_argument('--bins', type=commands.counts, default=(20, 15), help='of S, and of A in each (20,15)')
  parser.add_argument(
    '--trials', type=int, default=3, help='of decoding in each way; with 0 the cost model chooses (3)'
  )
  parser.add_argument('--seed', type=int, default=0, help='(0)')
  parser.add_argument('--dtype', choices=['float32', 'bfloat16', 'float16'], help='of the models (as stored)')
  parser.add_argument('--mesh', type=commands.mesh, help='devices by axis, as in data=1,model=4 (one device)')
  commands.add_sampler(parser)
  return parser


def _check(args: argparse.Namespace):
  """Refuse what can be told to be wrong before anything is read."""
  out = disk.local(args.out)
  if out.exists() and not args.overwrite:
    raise RunError(f'{out} is there already: name another file, or give --overwrite.')
  if args.data is None and args.times is None:
    raise RunError('give --data FILE to measure acceptance and times, or --times PROFILE to measure times alone.')
  if args.trials < 0:
    raise RunError(f'--trials={args.trials} is not a number of trials; give 0 or more.')
  if len(args.bins) != 2:
    raise RunError(f'--bins takes two numbers, as in 20,15, not {len(args.bins)}.')
  if args.times:
    own = [n for n in ('block', 'batch', 'bins', *sampling.NEUTRAL) if getattr(args, n) != _parser().get_default(n)]
    if own:
      raise RunError(f'--{own[0].replace("_", "-")} is that of the profile with --times; leave it out.')
  elif args.tokens <= args.block:
    raise RunError(f'--tokens {args.tokens} is not more than --block {args.block}: no text would hold a whole draft.')


def _run(args: argparse.Namespace):
  _check(args)
  out, sampler = disk.local(args.out), commands.sampler(args)
  disk.sweep(out)
  field = args.prompt_field and args.prompt_field.replace('\\n', '\n')
  prompts = files.texts(args.data, field, args.count) if args.data else None
  old = profiles.load(args.times) if args.times else None
  others = {path: profiles.load(path) for path in args.against}
  for path in args.models:
    checkpoints.digest(path)  # raises where there is no checkpoint, before the others are read
  mesh = None if args.mesh is None else sharding.mesh(args.mesh)
  models = checkpoints.load_all(args.models, dtype=args.dtype, mesh=mesh)
  if old:
    found = timed(old, models, args.batches, args.tokens, prompts, trials=0)
  else:
    found = profile(
      models, prompts, sampler=sampler, block=args.block, max_new_tokens=args.tokens, batch_size=args.batch,
      batches=args.batches, bins=args.bins, data=disk.local(args.data).name, seed=args.seed, trials=0,
    )  # fmt: skip
  found.save(out)  # whole but for the ways, which take longest
  found = with_ways(found, models, prompts, args.trials, max_new_tokens=args.tokens, seed=args.seed)
  found.save(out)
  tables = [sv_studies.information(found.samples, found.table), sv_studies.break_even(found), sv_studies.ways(found)]
  tables += [sv_studies.robustness({out.name: found} | others)] if others else []
  for table in tables:
    print(markdown(table), end='\n\n')


if __name__ == '__main__':
  sys.exit(main())
