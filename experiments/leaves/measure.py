"""How many tokens a round commits with leaves, of trained pairs.

python -m experiments.leaves.measure [--families sums gsm8k multi30k] [--count 64] [--block 5] [--leaves 3 5 10]
    [--out leaves.csv]    # what is there is not measured again

Each row is a family, a target, a temperature and a draft: a chain by the maximal coupling, and by one noise without and
with leaves. Tokens a round are counted, so they are noise-free but for the sample of prompts, whose 95 % interval is by
resampling texts.
"""

import argparse
import functools
import pathlib

import numpy as np

from experiments.helpers import families, rows
from speccascade import decode, methods, rules, Sampler

NEW_TOKENS = {'sums': 80, 'gsm8k': 96, 'multi30k': 48}
TARGETS = {
  'the verifier': methods.speculative,
  'OPT, α = .1': functools.partial(methods.speculative, functools.partial(rules.opt, alpha=0.1)),
  'an ensemble (.4, .6)': functools.partial(methods.ensemble_sd, functools.partial(rules.weighted, weights=(0.4, 0.6))),
}
CASES = [('the verifier', t) for t in (0.0, 0.7, 1.0)] + [(target, 1.0) for target in [*TARGETS][1:]]


def tokens_a_round(emitted, rounds) -> tuple[float, float]:
  """Return tokens over rounds of texts, and half of its 95 % interval."""
  emitted, rounds = (np.asarray(x, float) for x in (emitted, rounds))
  some = np.random.default_rng(0).integers(0, emitted.size, (2000, emitted.size))
  low, high = np.quantile(emitted[some].sum(1) / rounds[some].sum(1), (0.025, 0.975))
  return emitted.sum() / rounds.sum(), (high - low) / 2


def drafts(temperature: float, leaves: list[int]) -> list[tuple[str, int, Sampler]]:
  """Return what is compared: a name, the leaves, and the sampler."""
  if not temperature:
    return [(f'{n} leaves', n, Sampler(0.0)) for n in (0, *leaves)]
  coupled = Sampler(temperature, coupling='gumbel')
  return [('maximal', 0, Sampler(temperature)), *((f'{n} leaves', n, coupled) for n in (0, *leaves))]


def main():
  """Measure all pairs."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--families', nargs='+', default=[*NEW_TOKENS], choices=[*NEW_TOKENS])
  parser.add_argument('--count', type=int, default=64, help='prompts')
  parser.add_argument('--block', type=int, default=5)
  parser.add_argument('--leaves', type=int, nargs='+', default=[3, 5, 10])
  parser.add_argument('--out', type=pathlib.Path, default=pathlib.Path('leaves.csv'))
  args = parser.parse_args()
  for family in args.families:
    models, prompts = families.pair(family), families.prompts(family, args.count, 'val')
    for target, temperature in CASES:
      for draft, leaves, sampler in drafts(temperature, args.leaves):
        key = dict(family=family, target=target, temperature=temperature, draft=draft)
        if rows.has(args.out, key):
          continue
        method = TARGETS[target](block=args.block, leaves=leaves)
        how = dict(max_new_tokens=NEW_TOKENS[family], batch_size=16, seed=0)
        stats = decode(method, models, prompts, sampler=sampler, **how).stats
        tokens, half = tokens_a_round(stats.emitted, stats.rounds)
        hits = stats.hits.sum() / stats.rounds.sum()
        rows.append(args.out, key | dict(tokens_a_round=f'{tokens:.3f}', half=f'{half:.3f}', hits=f'{hits:.3f}'))


if __name__ == '__main__':
  main()
