"""How much predictors of acceptance tell, and what each would gain: held-out texts of trios of models, at T = 1.

  python -m experiments.predictors.measure_signals observe gsm8k --out gsm8k.npz
  python -m experiments.predictors.measure_signals tables gsm8k.npz sums.npz multi30k.npz

`observe` decodes with every draft verified and writes what each signal was of each token. `tables` fits every predictor
to one half of the texts and judges it by the other, both ways: the share of the entropy of acceptance that it
explains, the area under its curve, and, by simulated rounds, speed at the roofline of models that are not here.
"""

import argparse
from collections.abc import Mapping
import dataclasses
from pathlib import Path

import numpy as np

from experiments.helpers import families
from experiments.sv import compiled_times, sv_costs
from experiments.sv.sv_simulation import Trio
from speccascade import checkpoints, Sampler
from speccascade.evaluate.report.formats import markdown
from speccascade.models import shapes
from speccascade.planning import fitting, profiling, sv_model
from speccascade.sv import plans, predictors

SIGNALS = {name: f for name, f in predictors.known().items() if name != 'companion'}
COMPANIONS = {'companion': ('s', 'a'), 'S alone': ('s',), 'A alone': ('a',)}
BLOCK = 7
BINS = 8, 6  # of S, and of A in each
BATCHES = 8, 32, 128


def observe(args: argparse.Namespace):
  """Write what signals were of each token."""
  models = [checkpoints.load(f'family:{args.family}/{name}') for name in families.TRIOS[args.family]]
  prompts = families.prompts(args.family, args.count)
  signals = [f for f in SIGNALS.values() if args.coupling == 'gumbel' or not predictors.declaration(f).coupled]
  samples = profiling.samples_of(
    models,
    prompts,
    block=BLOCK,
    batch_size=args.count,
    signals=signals,
    max_new_tokens=args.max_new_tokens,
    seed=0,
    sampler=Sampler(coupling=args.coupling),
  )
  np.savez_compressed(args.out, **samples)
  print(f'{args.out}: {samples["accept"].size} tokens of {args.count} texts')


def held_out(samples: Mapping[str, np.ndarray], name: str) -> np.ndarray:
  """Return the chances [N] that a predictor gives, fitted to the other half of the texts."""
  half = samples['request'] % 2
  signals = [samples[field] for field in COMPANIONS.get(name, (name,))]
  found = np.zeros_like(samples['accept'])
  for side in (0, 1):
    accept, *seen = (x[half == side] for x in (samples['accept'], *signals))
    if name in ('margin', 'noisy_margin'):
      made = fitting.curve(accept, *seen)
    else:  # few tokens fill few bins
      made = fitting.table(accept, seen[0], seen[-1], BINS if len(seen) > 1 else (1, BINS[0]))
    found[half != side] = made.predict(*(x[half != side] for x in signals))
  return found


def learned(samples: Mapping[str, np.ndarray], name: str, seed: int = 0) -> np.ndarray:
  """Return the chances [N] of a curve that learns while a text goes on, by tests of every token."""
  half = samples['request'] % 2
  drawn = np.random.default_rng(seed).random(samples['accept'].size) < samples['accept']
  found = np.zeros_like(samples['accept'])
  for side in (0, 1):
    start = fitting.curve(samples['accept'][half == side], samples[name][half == side])
    for text in np.unique(samples['request'][half != side]):
      b, w = float(start.bias), float(start.slope)
      for i in np.flatnonzero(samples['request'] == text):
        x = samples[name][i]
        found[i] = 1 / (1 + np.exp(-b - w * x))
        step = start.rate * (drawn[i] - found[i]) / (1 + x * x)
        b, w = b + step, w + step * x
  return found


def explained(accept: np.ndarray, chance: np.ndarray) -> float:
  """Return the share of the entropy of acceptance, yes or no, that a prediction explains."""
  chance = np.clip(chance, 1e-4, 1 - 1e-4)
  mean = accept.mean()
  entropy = -(mean * np.log(mean) + (1 - mean) * np.log(1 - mean))
  return 1 + (accept * np.log(chance) + (1 - accept) * np.log(1 - chance)).mean() / entropy


def area(accept: np.ndarray, chance: np.ndarray) -> float:
  """Return how often an accepted token has a higher chance than a rejected one, a tie for a half."""
  _, which = np.unique(chance, return_inverse=True)
  yes, no = (np.bincount(which, weight) for weight in (accept, 1 - accept))
  return float((yes * (np.cumsum(no) - no / 2)).sum() / (yes.sum() * no.sum()))


@dataclasses.dataclass(frozen=True)
class HeldOut:
  """A fit of samples whose chances [N] were held out."""

  chances: np.ndarray

  def predict(self, *_) -> np.ndarray:
    """Return the chances, whatever the signals are."""
    return self.chances

  def check(self):
    """Accept any chances, as a table of a companion does its own."""


def drafting(profile: plans.Profile, tokens: int, flat: bool) -> plans.Profile:
  """Return a profile of what was held out, whose drafter, if it is flat, gives so many tokens in the time of one."""
  share = tokens if flat else 1
  steps = {batch: (draft / share, *others) for batch, (draft, *others) in profile.steps.items()}
  known = ((name.partition(' '), x) for name, x in profile.samples.items())
  fits = {name: HeldOut(x) for (kind, _, name), x in known if kind == 'chance'}
  samples = {name: fit.chances for name, fit in fits.items()} | profile.samples  # 'A alone' is no name of a sample
  return plans.Profile.of(fits.get('companion'), profile.origin, samples, profile.times, steps, fits=fits)


def speeds(samples: Mapping[str, np.ndarray], trio: Trio, batch: int, flat: bool) -> dict[str, str]:
  """Return the speed over plain decoding of the best γ, and of each predictor by the best total, with its γ.

  A flat drafter gives a whole draft in the time of one token.
  """
  origin = plans.Origin((), (), (), '', '', BLOCK)
  names = [name.removeprefix('chance ') for name in samples if name.startswith('chance ')]
  best: dict[str, tuple[float, int]] = {}
  for block in (1, 2, 3, 5, 7):
    made = trio.profile(plans.Profile.of(None, origin, samples, {1: {1: 1.0, 2: 1.0}}, {1: (0, 0, 1, 0)}), batch, block)
    plain = sv_costs.plain(made, batch)
    found = {'best γ': sv_costs.speculative(drafting(made, block, flat), batch, block) / plain}
    scheduled = drafting(made, block + 1, flat)  # which drafts a token more
    for name in names:
      found[name] = sv_model.simulate(scheduled, batch, block, sv_model.Variant(name))['sv'] / plain
    best = {name: max(best.get(name, (0.0, 0)), (x, block)) for name, x in found.items()}
  return {name: f'{x:.2f} ({block})' for name, (x, block) in best.items()}


def tables(args: argparse.Namespace):
  """Print what each predictor tells, and what it would gain."""
  rows, gained = [], []
  for path in args.files:
    samples = dict(np.load(path))
    names = [*COMPANIONS, *(name for name in SIGNALS if name in samples)]
    found = {name: held_out(samples, name) for name in names}
    found |= {f'{name}, learning': learned(samples, name) for name in ('margin', 'noisy_margin') if name in samples}
    accept = samples['accept']
    for name, chance in found.items():
      rows.append([path.stem, name, f'{100 * explained(accept, chance):.1f} %', f'{area(accept, chance):.3f}'])
    some = {name: found[name] for name in ('companion', 'margin', 'max_q', 'drawn_q')}
    samples |= {f'chance {name}': chance for name, chance in some.items()}
    for chip in args.chips:
      times = [compiled_times.roofline(shapes.llama(size), chip) for size in ('68m', '160m', '13b')]
      for batch in BATCHES:
        for flat in (False, True):
          speed = speeds(samples, Trio(*times), batch, flat)
          gained.append([path.stem, chip, 'one call a draft' if flat else 'a step a token', batch, *speed.values()])
  columns = ['texts', 'predictor', 'entropy explained', 'area under the curve']
  print(markdown(dict(title='What predictors tell', columns=columns, rows=rows, note='')))
  if gained:
    columns = ['texts', 'chip', 'drafter', 'batch', 'best γ', *some]
    print(markdown(dict(title='Speed over plain decoding (γ)', columns=columns, rows=gained, note='')))


def main():
  """Observe, or print tables."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  commands = parser.add_subparsers(required=True)
  one = commands.add_parser('observe')
  one.add_argument('family', choices=families.TRIOS)
  one.add_argument('--count', type=int, default=64)
  one.add_argument('--max_new_tokens', type=int, default=64)
  one.add_argument('--coupling', choices=['maximal', 'gumbel'], default='maximal')
  one.add_argument('--out', type=Path, required=True)
  one.set_defaults(run=observe)
  other = commands.add_parser('tables')
  other.add_argument('files', type=Path, nargs='+')
  other.add_argument('--chips', nargs='*', default=['v5e:2x2'])
  other.set_defaults(run=tables)
  args = parser.parse_args()
  args.run(args)


if __name__ == '__main__':
  main()
