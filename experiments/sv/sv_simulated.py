"""Simulate speculative verification for models and chips that are not here: where it pays, and by how much.

  python -m experiments.sv.sv_simulated compile --topology v5e:2x2 --out v5e.json
  python -m experiments.sv.sv_simulated roofline --topology v5e:2x2 --out v5e_roofline.json
  python -m experiments.sv.sv_simulated tables v5e.json v6e.json --llama gsm8k.json --t5 multi30k.json
  python -m experiments.sv.sv_simulated check plan.json --models DRAFT COMPANION TARGET --prompts FILE

`compile` compiles forward passes of the published sizes for a chip (needs the extra `tpu`; an hour on a busy machine)
and goes on where it was interrupted. `roofline` writes the least times instead, by bytes and operations. `tables`
simulates rounds from the samples of plans of three models and prints Markdown. `check` simulates the rounds of a plan's
own models from the times of their calls, and decodes with them on the device that the plan was made on.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping
import dataclasses
import functools
import json
from pathlib import Path
import sys

import jax

from experiments.sv import compiled_times, sv_costs, sv_simulation
from experiments.sv.sv_simulation import Trio
from speccascade import checkpoints, methods, Sampler
from speccascade.data import files
from speccascade.evaluate.report.formats import markdown
from speccascade.models import shapes
from speccascade.planning import timing
from speccascade.sv import plans

SIZES = {'llama': (shapes.llama, shapes.LLAMA), 't5': (shapes.t5, shapes.T5_V1_1)}
TRIOS = [('llama', '68m', '160m', '13b'), ('t5', 'small', 'base', 'xxl')]
GRIDS = [  # (rows, tokens of each) of what a drafter, a companion and a verifier is fed
  ((8, 1), (64, 1), (256, 1)),
  ((8, 1), (64, 1), (256, 1), (256, 4)),
  ((8, 1), (64, 1), (256, 1), (256, 2), (256, 4)),
]
BATCHES = (8, 32, 64, 128, 256)
SLOPES = (0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)


def compile_times(args: argparse.Namespace):
  """Write the times of every network to a file, which is written anew after each."""
  times = _stored(args.out, args.topology)
  for family, *sizes in TRIOS:
    make, table = SIZES[family]
    for size, grid in zip(sizes, GRIDS, strict=True):
      if f'{family} {size}' in times:
        continue
      build = functools.partial(lambda layers, make, size: make(size, layers=layers), make=make, size=size)
      found = compiled_times.compiled(build, table[size][-1], args.topology, grid)
      times[f'{family} {size}'] = dataclasses.asdict(found)
      args.out.write_text(json.dumps(times, indent=1) + '\n')
      print(f'{args.topology}: {family} {size}', flush=True)


def _stored(out: Path, source: str) -> dict:
  """Return the times that a file has so far; those of another source are refused."""
  times = json.loads(out.read_text()) if out.exists() else {'topology': source}
  if times.get('topology') != source:
    raise SystemExit(f'{out} has the times of {times.get("topology")}, not of {source}; give another --out.')
  return times


def roofline_times(args: argparse.Namespace):
  """Write the least times of every network to a file."""
  times = _stored(args.out, f'{args.topology}, roofline')
  sizes = {(family, size) for family, *trio in TRIOS for size in trio}
  made = {f'{f} {size}': compiled_times.roofline(SIZES[f][0](size), args.topology) for f, size in sorted(sizes)}
  times |= {name: dataclasses.asdict(x) for name, x in made.items()}
  args.out.write_text(json.dumps(times, indent=1) + '\n')


def print_tables(args: argparse.Namespace):
  """Print a table for each chip, verifier and plan, with the totals of the decode loop and with any total."""
  observed = {family: [plans.profile_of(path) for path in getattr(args, family)] for family in SIZES}
  for family, profiles in observed.items():
    for profile in profiles if args.slopes else ():
      print(markdown(sv_simulation.by_slope(profile, args.slopes, args.drafter) | {'title': _name(family, profile)}))
  for path in args.times:
    stored = json.loads(path.read_text())
    times = {name: compiled_times.PassTimes(**x) for name, x in stored.items() if name != 'topology'}
    for family, *sizes in TRIOS:
      if not all(f'{family} {size}' in times for size in sizes):
        continue
      for profile in observed[family]:
        for any_total in (False, True):
          trio = Trio(*(times[f'{family} {size}'] for size in sizes), any_total)
          totals = 'any total' if any_total else 'totals of the loop'
          title = f'{path.stem}, {family} {", ".join(sizes)}, {_name(family, profile)}, {totals}'
          print(markdown(sv_simulation.table(title, profile, trio, args.batches)), flush=True)


def _name(family: str, profile: plans.Profile) -> str:
  return f'samples of {family}, ' + ', '.join(f'{name} {x:g}' for name, x in profile.origin.sampler)


def check(args: argparse.Namespace):
  """Print, of a plan and its models, speed over the verifier alone: as simulated, as measured, and their ratio.

  Rounds are simulated with full batches, so they are measured with full batches: until the first text of each ends.
  Simulated are those of all the plan's prompts; of fewer, texts that are easier or harder make a difference.
  """
  profile = plans.profile_of(args.plan)
  models = checkpoints.load_all(args.models)
  if (here := plans.device_of(models)) != profile.origin.device:
    raise SystemExit(f'{args.plan} has times of {profile.origin.device}, and this is {here}; check it there.')
  profile.origin.check_models(models, (0, 1, 2))
  models = timing.endless(models)
  field = args.prompt_field and args.prompt_field.replace('\\n', '\n')
  prompts = files.texts(args.prompts, field, args.count)
  sampler = Sampler(**dict(profile.origin.sampler))
  width = max(len(models[-1].tokenizer.encode(prompt)) for prompt in prompts)
  sizes = dict(max_new_tokens=args.max_new_tokens, max_prompt_tokens=width, sampler=sampler)
  most = profile.origin.block
  made = timed_methods(profile, most, {1, 3, 5, most})
  for batch in args.batches or profile.steps:
    some = prompts[: len(prompts) // batch * batch]
    runs = {name: timing.full_rounds(method, models, some, batch, **sizes) for name, method in made.items()}
    compare(profile, batch, most, runs, args.trials)


def timed_methods(profile: plans.Profile, block: int, blocks: Iterable[int]) -> dict[str, methods.Method]:
  """Return plain decoding and, by the names of `sv_costs`, speculative decoding of `blocks` and verification."""
  return {
    'plain': methods.autoregressive(2),
    **{f'speculative, γ = {n}': methods.speculative(block=n, pair=(0, 2)) for n in sorted(blocks)},
    'SV, all tokens': methods.sv(profile, block),
    'SV, accepted tokens': methods.sv(profile, block, goodput='accepted'),
    'SV exact': methods.sv_exact(profile, block),
  }


def compare(profile: plans.Profile, batch: int, block: int, runs: Mapping[str, Callable], trials: int):
  """Time runs of `full_rounds` in turn, and print each but the plain one's speed over that, simulated and measured."""
  done = timing.interleave(runs, trials)
  plain = done.pop('plain')
  for name, rounds in done.items():
    gains = [one.speed / other.speed for one, other in zip(rounds, plain, strict=True)]
    median, low, high = timing.Interval.of(gains)
    simulated = sv_costs.speedup(profile, batch, name, block)
    measured = f'measured {median:.2f} [{low:.2f} … {high:.2f}]'
    print(f'batch {batch}, {name}: simulated {simulated:.2f}, {measured}, ratio {simulated / median:.2f}', flush=True)


def main():
  """Run a subcommand."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  commands = parser.add_subparsers(required=True)
  for name, run in (('compile', compile_times), ('roofline', roofline_times)):
    one = commands.add_parser(name)
    one.add_argument('--topology', default='v5e:2x2')
    one.add_argument('--out', type=Path, required=True)
    one.set_defaults(run=run)
  one = commands.add_parser('tables')
  one.add_argument('times', nargs='+', type=Path)
  one.add_argument('--llama', nargs='*', default=[], help='plans whose samples Llama has')
  one.add_argument('--t5', nargs='*', default=[], help='plans whose samples T5 has')
  one.add_argument('--batches', type=int, nargs='+', default=BATCHES)
  one.add_argument('--slopes', type=float, nargs='*', default=SLOPES, help='what a token more costs, in steps')
  one.add_argument('--drafter', type=float, default=0.02, help='a step of the drafter over one of the verifier')
  one.set_defaults(run=print_tables)
  one = commands.add_parser('check')
  one.add_argument('plan')
  one.add_argument('--models', nargs=3, required=True)
  one.add_argument('--prompts', required=True)
  one.add_argument('--prompt_field')
  one.add_argument('--count', type=int, default=64)
  one.add_argument('--max_new_tokens', type=int, default=64)
  one.add_argument('--batches', type=int, nargs='*', help='those of the plan by default')
  one.add_argument('--trials', type=int, default=5)
  one.set_defaults(run=check)
  args = parser.parse_args()
  if args.run is not check:
    jax.config.update('jax_platforms', 'cpu')  # whatever is here, it is not what is compiled for
  args.run(args)


if __name__ == '__main__':
  sys.exit(main())
