"""How many tokens a round commits with leaves, of trained pairs.

python experiments/leaves/measure.py [--families sums gsm8k multi30k] [--count 64] [--block 5] [--leaves 3 5 10 20]
    [--out table.jsonl]    # what is there is not measured again

Each line is a family, a target, a temperature and a draft: a chain by the maximal coupling, and by one noise without
and with leaves. Tokens a round are counted, so they are noise-free but for the sample of prompts, whose 95 % interval
is by resampling texts.
"""

import argparse
import functools
import json
import pathlib

import numpy as np

from speccascade import decode, load, methods, rules, Sampler
from speccascade.data import files

PAIRS = {
  'sums': (('draft', 'target'), 'test.jsonl', 80),
  'gsm8k': (('draft', 'target'), 'test.jsonl', 96),
  'multi30k': (('small', 'large'), 'val.en', 48),
}
QUESTION = 'Question: {question}\nAnswer:'
TARGETS = {
  'the verifier': methods.speculative,
  'OPT, α = .1': functools.partial(methods.speculative, functools.partial(rules.opt, alpha=0.1)),
  'an ensemble (.4, .6)': functools.partial(methods.ensemble_sd, functools.partial(rules.weighted, weights=(0.4, 0.6))),
}
CASES = [('the verifier', t) for t in (0.0, 0.7, 1.0)] + [(target, 1.0) for target in [*TARGETS][1:]]


def tokens_a_round(stats) -> tuple[float, float]:
  """Return emitted tokens over rounds, and half of its 95 % interval."""
  emitted, rounds = (np.asarray(x, float) for x in (stats.emitted, stats.rounds))
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
  parser.add_argument('--families', nargs='+', default=[*PAIRS], choices=[*PAIRS])
  parser.add_argument('--count', type=int, default=64, help='prompts')
  parser.add_argument('--block', type=int, default=5)
  parser.add_argument('--leaves', type=int, nargs='+', default=[3, 5, 10])
  parser.add_argument('--out', type=pathlib.Path, default=pathlib.Path('leaves.jsonl'))
  args = parser.parse_args()
  lines = [json.loads(x) for x in args.out.read_text().splitlines()] if args.out.exists() else []
  has = {tuple(x[name] for name in ('family', 'target', 'temperature', 'draft')) for x in lines}
  for family in args.families:
    names, data, new_tokens = PAIRS[family]
    models = [load(f'family:{family}/{name}') for name in names]
    field = QUESTION if data.endswith('.jsonl') else None
    prompts = files.texts(f'family:{family}/{data}', field, args.count)
    for target, temperature in CASES:
      for draft, leaves, sampler in drafts(temperature, args.leaves):
        if (family, target, temperature, draft) in has:
          continue
        method = TARGETS[target](block=args.block, leaves=leaves)
        how = dict(max_new_tokens=new_tokens, batch_size=16, seed=0)
        stats = decode(method, models, prompts, sampler=sampler, **how).stats
        tokens, half = tokens_a_round(stats)
        line = dict(family=family, target=target, temperature=temperature, draft=draft, tokens_a_round=round(tokens, 3))
        line |= dict(half_interval=round(half, 3), hits=round(float(stats.hits.sum() / stats.rounds.sum()), 3))
        print(json.dumps(line, ensure_ascii=False), flush=True)
        with args.out.open('a') as file:
          print(json.dumps(line, ensure_ascii=False), file=file)


if __name__ == '__main__':
  main()
