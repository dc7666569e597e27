"""Cascades of a small drafter and SmolLM2-135M-Instruct: what a text is worth to the verifier, by its rounds.

python -m experiments.smollm2.cascades OUT.csv --drafters OUT/draft/model --spec_bench question.jsonl --gsm8k test.jsonl

The arguments are those of `measure`. Each row is a method, a drafter and a temperature over all prompts: tokens a
round, calls of the verifier a token, and the mean log-probability of a text's tokens under the verifier alone, at
temperature 1 without filters; the first and the last with an interval over texts. Rows that are there are not measured
again.
"""

import argparse

from experiments.helpers import counted, rows
from experiments.smollm2 import measure, prompts
import speccascade
from speccascade import decode, methods, rules, Sampler
from speccascade.decode import scoring
from speccascade.types import Model

RULES = {  # of each the α, from the verifier to the drafter
  'chow': (0.2, 0.5, 0.8),
  'diff': (0.0, 0.2, 0.5),
  'opt': (0.0, 0.2, 0.5),
  'token_v3': (0.2, 0.5, 0.8),
  'lossy': (0.3, 0.6),
  'mentored': (0.1, 0.5),
  'typical': (0.8, 0.97),
}
COLLABORATIVE = ('weighted:.5,.5', 'contrastive:.2')
DRAFTER, VERIFIER = 'the drafter alone', 'the verifier alone'


def methods_of(block: int) -> dict[str, tuple]:
  """Return by name a method and which of drafter and verifier it takes."""
  made = {VERIFIER: (methods.autoregressive(), slice(1, 2)), DRAFTER: (methods.autoregressive(), slice(0, 1))}
  texts = [f'{name}:{value}' for name, values in RULES.items() for value in values]
  for text in ('speculative', *texts):
    made[text] = methods.speculative(rules.find(text), block=block), slice(2)
  return made | {text: (methods.ensemble_sd(rules.find(text), block=block), slice(2)) for text in COLLABORATIVE}


def row_of(out, asked: list, verifier: Model) -> dict[str, float]:
  """Return what is measured of decoded texts."""
  stats, texts = out.stats, [x if len(x) else [0] for x in out.tokens]
  scored = scoring.score(methods.autoregressive(), [verifier], asked, texts)
  row = counted.ratio('tokens_per_round', stats.emitted, stats.rounds)
  row |= counted.ratio('logprob', [x.logprobs.sum() for x in scored], [len(x.logprobs) for x in scored])
  row['accepted'] = stats.accepted.sum() / max(stats.tested.sum(), 1)
  return row | {'verifier_calls_per_token': stats.calls[-1].sum() / stats.emitted.sum()}


def main():
  """Measure what is missing, a line each."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  measure.add_arguments(parser)
  parser.add_argument('--temperatures', nargs='+', type=float, default=[1.0])
  parser.add_argument('--batch_size', type=int, default=16)
  names = [*methods_of(1)]
  parser.add_argument('--methods', nargs='+', choices=names, default=names, metavar='METHOD', help='as opt:0.2 (all)')
  args = parser.parse_args()
  made = methods_of(args.block)
  model = speccascade.load(prompts.MODEL, dtype=args.dtype)
  ids = args.frequent and measure.frequent_ids(model, args.frequent, args.tokens)
  asked = [x for _, some in measure.sets(args) for x in some]
  size = dict(max_new_tokens=args.new_tokens, batch_size=args.batch_size, seed=0)
  for temperature in args.temperatures:
    for drafter in args.drafters:
      for name in args.methods:
        method, which = made[name]
        key = dict(drafter='' if name == VERIFIER else drafter, method=name, temperature=temperature)
        key |= dict(prompts=len(asked), dtype=args.dtype, block=args.block, tokens=args.tokens if ids else 0)
        if rows.has(args.out, key):
          continue
        models = [measure.drafter_of(drafter, model, ids), model][which]
        row = row_of(decode(method, models, asked, sampler=Sampler(temperature), **size), asked, model)
        rows.append(args.out, key | {what: f'{number:.4g}' for what, number in row.items()})


if __name__ == '__main__':
  main()
