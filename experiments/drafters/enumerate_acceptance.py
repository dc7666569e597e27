"""Enumerate the acceptance Σ min(q̃, π) of drafters by depth, on given translations, towards four targets.

python -m experiments.drafters.enumerate_acceptance DRAFTERS OUT.csv

DRAFTERS is the folder of `gin_configs/train/drafters.gin`; a drafter that is not
there is left out. A draft is the text itself, so nothing is decoded and nothing is drawn.
"""

import csv
import functools
from pathlib import Path
import sys

import jax
import jax.numpy as jnp
import numpy as np

from experiments.drafters.measure import drafter_of, rule, TARGETS
from experiments.helpers import families
from speccascade import rules, Sampler
from speccascade.backends.ops import take
from speccascade.data import files
from speccascade.drafters.medusa import Medusa
from speccascade.evaluate import intervals
from speccascade.train import forcing
from speccascade.train.batches import collate

DEPTH = 5
COUNT = 200
DRAFTING = forcing.Drafting(DEPTH, keep=1.0, least=1.0)


@functools.partial(jax.jit, static_argnums=0)
def rates(network, params, batch, small, large):
  """Return the weight [B, M] of what is drafted, and its acceptance at temperatures 1 and 0 for each target."""
  said = forcing.forced(network, params, batch, large, DRAFTING)
  pair = [take(forcing.logits_of(m.network, m.params, batch), said.at) for m in (small, large)]
  out = []
  for sampler in (Sampler(1.0), Sampler(0.0)):
    q = sampler(said.logits)
    out += [jnp.minimum(q, rules.target(rule(name), pair, sampler).probs).sum(-1) for name in TARGETS]
  return said.weight, jnp.stack(out)


def depth_of(network, width: int, count: int) -> np.ndarray:
  """Return the depth in a draft, from 1, of each of so many logits of a row; 0 for all of one token at a time."""
  m = np.arange(count)
  if isinstance(network, Medusa):
    return 1 + m % network.config.heads
  return np.where(m < width, 1, 2 + (m - width) % (DEPTH - 1)) if count > width else 0 * m


def main():
  """Write a line for each drafter, target, temperature and depth."""
  folder, out = map(Path, sys.argv[1:])
  small, large = families.pair('multi30k')
  sides = (files.lines(f'family:multi30k/test_2016_flickr.{side}')[:COUNT] for side in ('en', 'de'))
  pairs = [[large.tokenizer.encode(text) for text in side] for side in sides]
  pairs = [(source[:40], target[:40]) for source, target in zip(*pairs)]
  lines = []
  for name in ('small', 'layer_skip', 'one_pass', 'eagle', 'medusa'):
    drafter = drafter_of(name, (small, large), folder)
    if drafter is None:
      continue
    found = []
    for at in range(0, COUNT, 50):
      batch = collate(pairs[at : at + 50], (40,), large.network.eos_ids)
      found.append(rates(drafter.network, drafter.params, batch.replace(truncated=None), small, large))
    weight, rate = np.concatenate([w for w, _ in found]), np.concatenate([r for _, r in found], 1)
    depths = depth_of(drafter.network, 40, weight.shape[1])
    for k, values in enumerate(rate):
      for depth in sorted(set(depths)):
        here = weight * (depths == depth)
        sums, counts = (values * here).sum(1), here.sum(1)
        draws = intervals.draws(0, COUNT)
        low, high = intervals.interval((draws @ sums) / (draws @ counts))
        key = dict(
          drafter=name, target=[*TARGETS][k % len(TARGETS)], temperature=1 - k // len(TARGETS), depth=int(depth)
        )
        numbers = dict(acceptance=sums.sum() / counts.sum(), low=low, high=high)
        lines.append(key | {name: f'{number:.4f}' for name, number in numbers.items()})
    print(*lines[-2 * len(TARGETS) * len(set(depths)) :], sep='\n', flush=True)
  with out.open('w', newline='') as opened:
    writer = csv.DictWriter(opened, lines[0])
    writer.writeheader()
    writer.writerows(lines)


if __name__ == '__main__':
  main()
