"""Measure what speculative verification decides by: how often drafts are kept, by S and A, and what verifying costs.

  python -m speccascade.profile --models DRAFT COMPANION TARGET --data train.jsonl.gz \\
      --prompt-field 'Question: {question}\\nAnswer:' --temperature 0.6 --top-p 0.9 --out profile.json
  python -m speccascade.profile --models DRAFT COMPANION TARGET --times profile.json --out here.json

The prompts are decoded with every draft verified, while the companion reads it too; then forward passes are timed; then
some of the prompts are decoded at each batch in every way that may be the fastest, which is the one that sv_exact takes
there. The file goes to methods.sv_exact(profile='profile.json'), in gin as well, and to speccascade.decode --profile.
With --times the table is that of a profile which was measured elsewhere, and only times are measured, those of
decoding where prompts are given with --data.
"""

import argparse
from collections.abc import Sequence
import concurrent.futures
import dataclasses
import functools
import sys
import time

from flax import struct
import jax.numpy as jnp
import numpy as np

from speccascade import (
  checkpoints,
  commands,
  disk,
  distributed,
  inputs,
  packing,
  probs,
  profiles,
  requests,
  rules,
  scheduling,
)
from speccascade.data import files
from speccascade.decode import decode
from speccascade.engine import Engine
from speccascade.errors import RunError
from speccascade.evaluate import floor, protocols, sv_studies
from speccascade.evaluate.formats import markdown
from speccascade.loop import positions
from speccascade.methods import Method, sv_exact
from speccascade.phases import Propose, Score, Verify
from speccascade.progress import Progress
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
    s, a = scheduling.indicators(state, 1)
    s_target, accept = scheduling.indicators(state, 2)
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
    Score(1, (block + 1,), scheduling.First(block)),
    Score(2, (block + 1,), scheduling.First(block), level=True),
    Observe(),
    Verify(rules.bind(rules.own), (2,)),
  )
  return Method(phases, (0, 1, 2), block + 1, Notes(slots), kind='profile')


def observe(
  models: Sequence[Model], rows: Sequence[requests.Row], block: int = 5, batch: int = 16
) -> dict[str, np.ndarray]:
  """Decode rows; return `profiles.FIELDS` of every token that was tested, which is every token of the output."""
  size, width, max_new = min(batch, len(rows)), inputs.prompt_width(models, rows, None), max(r.max_new for r in rows)
  slots = positions(models[-1].network, width, max_new, block + 1)
  method, needs = observing(block, slots), requests.features(rows)
  made = Engine(method, models, needs=needs, size=size, width=width, max_new=max_new)
  order, parts, progress = inputs.by_length([r.tokens for r in rows]), [], Progress('profile', len(rows), unit='texts')
  for i in range(0, len(rows), size):
    some = order[i : i + size]
    place = list(range(len(some)))
    prefix = made.prefill([rows[n].tokens for n in some], size)
    state, packed = made.run(None, (prefix, made.arrival([rows[n] for n in some], place, place)))
    ended, noted = made.collect(packed, state), {name: np.asarray(x) for name, x in state.policy.items()}
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

  The numbers of tokens are those that the loop computes: the widths of one row's window, packed totals of several rows.
  """
  times, steps = {}, {}
  progress = Progress('times', len(batches), unit='batches')
  for rows in batches:
    sizes = [rows * n for n in packing.steps(block + 1)]
    timer = functools.partial(floor.forward_seconds, source=source, tokens=tokens, window=block + 1)
    made = {'draft': lambda t=timer, n=rows: t(models[0], n, 1)}
    made['companion'] = lambda t=timer, n=rows: t(models[1], n, block + 1)
    made['alone'] = lambda t=timer, n=rows: t(models[2], n, 1)
    for size in sizes:
      made[size] = functools.partial(_verifier, timer, models[2], rows, block + 1, size)
    with concurrent.futures.ThreadPoolExecutor(distributed.threads()) as pool:  # they compile side by side
      timers = dict(zip(made, pool.map(lambda make: make(), made.values()), strict=True))
    found = {name: float(np.median(x)) for name, x in floor.interleave(timers, trials).items()}
    times[rows] = {size: found[size] for size in sizes}
    steps[rows] = tuple(found[name] for name in ('draft', 'companion', 'alone'))
    progress.add(1, f'batch {rows}')
  return times, steps


def _verifier(timer, model: Model, rows: int, width: int, size: int):
  if rows == 1:
    return timer(model, 1, size)
  return timer(model, rows, width, total=None if size == rows * width else size)


def measure_ways(
  found: profiles.Profile,
  models: Sequence[Model],
  prompts: Sequence,
  *,
  max_new_tokens: int = 128,
  sampler: probs.Sampler = probs.Sampler(),
  seed: int = 0,
  trials: int = 3,
) -> dict[int, dict[profiles.Way, float]]:
  """Return `measured` of a profile: tokens a second of two batches of prompts (four of one row), medians of trials.

  The ways take turns; too few prompts are repeated.
  """
  call = dict(max_new_tokens=max_new_tokens, sampler=sampler, seed=seed)
  width = inputs.prompt_width(models, requests.rows(models, prompts, **call), None)
  tried = {batch: list(sv_studies.candidates(found, batch)) for batch in found.times}
  progress = Progress('ways', sum(map(len, tried.values())) * (trials + 1), unit='decodes')
  measured = {}
  for batch, some in tried.items():
    protocols.few_executables()
    texts = [prompts[i % len(prompts)] for i in range(max(2 * batch, 4))]
    made = {way: sv_exact(dataclasses.replace(found, ways={batch: way})) for way in some}
    run = functools.partial(_speed, models=models, batch=batch, max_prompt_tokens=width, **call)
    speeds = {way: [] for way in some}
    for trial in range(trials + 1):
      for way, method in made.items():
        speed = run(method, prompts=texts if trial else texts[:batch])  # first unrecorded, for it compiles
        speeds[way] += [speed] if trial else []
        progress.add(1, f'batch {batch}, {way}')
    measured[batch] = {way: float(np.median(x)) for way, x in speeds.items()}
  return measured


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
  sampler: probs.Sampler = probs.Sampler(),
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
  rows = requests.rows(models, prompts, max_new_tokens=max_new_tokens, sampler=sampler, seed=seed)
  samples = observe(models, rows, block, batch_size)
  origin = profiles.Origin(
    tuple(m.name for m in models), tuple(m.digest for m in models), profiles.sampler_of(sampler),
    profiles.device_of(models), f'{data}, {len(rows)} prompts {profiles.digest_of([r.tokens for r in rows])}', block,
  )  # fmt: skip
  source = int(np.median([r.tokens.size for r in rows]))
  times, steps = measure_times(models, block, batches, source=source, tokens=max_new_tokens)
  table = profiles.fit(samples['s'], samples['a'], samples['accept'], bins)
  found = profiles.Profile(table, scheduling.Latency.of(times, steps), origin, samples, times, steps)
  return _with_ways(found, models, prompts, trials, max_new_tokens=max_new_tokens, sampler=sampler, seed=seed)


def _with_ways(found: profiles.Profile, models, prompts: Sequence | None, trials: int, **call) -> profiles.Profile:
  measured = measure_ways(found, models, prompts, trials=trials, **call) if prompts and trials else None
  found = dataclasses.replace(found, measured=measured)
  return dataclasses.replace(found, ways=sv_studies.best_ways(found))


def timed(
  found: profiles.Profile, models: Sequence[Model], batches: Sequence[int], tokens: int,
  prompts: Sequence | None = None, *, seed: int = 0, trials: int = 3,
) -> profiles.Profile:  # fmt: skip
  """Return a profile with the times of this device, those of decoding where there are prompts."""
  profiles.check_digests(found.origin, models)
  times, steps = measure_times(models, found.origin.block, batches, tokens=tokens)
  origin = dataclasses.replace(found.origin, device=profiles.device_of(models))
  latency = scheduling.Latency.of(times, steps)
  found = dataclasses.replace(found, latency=latency, origin=origin, times=times, steps=steps)
  sampler = probs.Sampler(**dict(origin.sampler))
  return _with_ways(found, models, prompts, trials, max_new_tokens=tokens, sampler=sampler, seed=seed)


# ---- the command ----


def main(argv: Sequence[str] | None = None) -> int:
  """Measure and save a profile; return the exit code."""
  return commands.run(_parser(), _run, argv, 'interrupted')


def _parser() -> commands.Parser:
  parser = commands.Parser('speccascade.profile', __doc__)
  parser.add_argument(
    '--models', nargs=3, required=True, metavar=('DRAFT', 'COMPANION', 'TARGET'), help='checkpoints'
  )
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
  parser.add_argument('--batches', type=_counts, default=BATCHES, help='rows at which times are measured (1,4,8,16,32)')
  parser.add_argument('--bins', type=_counts, default=(20, 15), help='of S, and of A in each (20,15)')
  parser.add_argument(
    '--trials', type=int, default=3, help='of decoding in each way; with 0 the cost model chooses (3)'
  )
  parser.add_argument('--seed', type=int, default=0, help='(0)')
  parser.add_argument('--dtype', choices=['float32', 'bfloat16', 'float16'], help='of the models (as stored)')
  for name in probs.NEUTRAL:
    parser.add_argument(
      f'--{name.replace("_", "-")}', type=int if name == 'top_k' else float,
      help='0 is greedy (1)' if name == 'temperature' else None,
    )  # fmt: skip
  return parser


def _counts(text: str) -> tuple[int, ...]:
  return tuple(map(commands.count, text.split(',')))


def _run(args: argparse.Namespace):
  out = disk.local(args.out)
  if out.exists() and not args.overwrite:
    raise RunError(f'{out} is there already: name another file, or give --overwrite.')
  if args.data is None and args.times is None:
    raise RunError('give --data FILE to measure acceptance and times, or --times PROFILE to measure times alone.')
  if args.trials < 0:
    raise RunError(f'--trials={args.trials} is not a number of trials; give 0 or more.')
  if len(args.bins) != 2:
    raise RunError(f'--bins takes two numbers, as in 20,15, not {len(args.bins)}.')
  sampler = probs.Sampler(**{n: x for n in probs.NEUTRAL if (x := getattr(args, n)) is not None})
  field = args.prompt_field and args.prompt_field.replace('\\n', '\n')
  prompts = files.texts(args.data, field, args.count) if args.data else None
  old = profiles.load(args.times) if args.times else None
  others = {path: profiles.load(path) for path in args.against}
  paths = [disk.local(path) for path in args.models]
  for path in paths:
    checkpoints.digest(path)  # raises where there is no checkpoint, before the others are read
  models = [checkpoints.load(path, dtype=args.dtype) for path in paths]
  if old:
    found = timed(old, models, args.batches, args.tokens, prompts, seed=args.seed, trials=args.trials)
  else:
    found = profile(
      models, prompts, sampler=sampler, block=args.block, max_new_tokens=args.tokens, batch_size=args.batch,
      batches=args.batches, bins=args.bins, data=disk.local(args.data).name, seed=args.seed, trials=args.trials,
    )  # fmt: skip
  found.save(out)
  tables = [sv_studies.information(found.samples, args.bins), sv_studies.break_even(found), sv_studies.ways(found)]
  tables += [sv_studies.robustness({out.name: found} | others)] if others else []
  for table in tables:
    print(markdown(table), end='\n\n')


if __name__ == '__main__':
  sys.exit(main())
