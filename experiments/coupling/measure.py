"""Texts of every method with Gumbel coupling, held against the lockstep of the same target.

python experiments/coupling/measure.py SHARED [--sentences 1000] [--problems 500] [--dtype float32]
"""

import argparse
import functools
import gzip
import json

import numpy as np

from speccascade import decode, load, methods, rules, Sampler, stopping
from speccascade.models import ngram

OPT = functools.partial(rules.opt, alpha=0.1)
TOKEN = functools.partial(rules.token_v3, alpha=0.3)
MEAN = functools.partial(rules.weighted, weights=(0.4, 0.6))
CONTRAST = functools.partial(rules.contrastive, mu=0.1)
LOOKUP = 'prompt lookup'
TARGETS = {  # the lockstep first
  'the verifier': {
    'alone': methods.autoregressive(1),
    **{f'γ = {n}': methods.speculative(block=n) for n in (1, 2, 3, 5, 7)},
    'Heuristic': methods.speculative(block=5, policy=stopping.Heuristic()),
    'MovingAverage': methods.speculative(block=5, policy=stopping.MovingAverage(0.4, 0.5)),
    'Confidence': methods.speculative(block=5, policy=stopping.Confidence(0.3)),
    LOOKUP: methods.speculative(block=5),
  },
  'an ensemble': {
    'lockstep': methods.ensemble(MEAN),
    'naive_cos': methods.naive_cos(MEAN, 5),
    'cos': methods.cos(MEAN, (5, 1)),
    'ensemble_sd': methods.ensemble_sd(MEAN, 5),
  },
  'a contrast': {
    'lockstep': methods.ensemble(CONTRAST),
    'naive_cos': methods.naive_cos(CONTRAST, 5),
    'cos': methods.cos(CONTRAST, (5, 1)),
  },
  'OPT': {
    'lockstep': methods.oracle(OPT),
    'γ = 2': methods.speculative(OPT, 2),
    'γ = 5': methods.speculative(OPT, 5),
    'cos': methods.cos(OPT, (5, 1)),
  },
  'token_v3': {'lockstep': methods.oracle(TOKEN), 'γ = 5': methods.speculative(TOKEN, 5)},
}


def lines(path: str, count: int) -> list[str]:
  """Return the first lines of a file of data."""
  with gzip.open(path, 'rt') as file:
    return [line.strip() for line in file][:count]


def measure(family: str, models, prompts: list[str], new_tokens: int, coupling: str):
  """Print for each method how much is accepted, and how many texts are others than those of the lockstep."""
  for target, some in TARGETS.items():
    if coupling == 'maximal' and target != 'the verifier':
      continue
    lockstep = None
    for name, method in some.items():
      used = [ngram.drafter(models[-1]), models[-1]] if name == LOOKUP else models
      sampler = Sampler(1.0, coupling=coupling)
      out = decode(method, used, prompts, max_new_tokens=new_tokens, sampler=sampler, batch_size=16)
      lockstep = lockstep or out.tokens
      accepted = out.stats.accepted.sum() / max(1, out.stats.tested.sum())
      calls = out.stats.emitted.sum() / max(1, out.stats.calls[-1].sum())
      others = [i for i, (a, b) in enumerate(zip(lockstep, out.tokens, strict=True)) if a != b]
      print(
        f'{family} | {coupling} | {target} | {name} | {accepted:.3f} accepted | {calls:.2f} tokens a call | '
        f'{len(others)} of {len(prompts)} differ',
        flush=True,
      )
      for i in others[:2] if coupling == 'gumbel' else ():
        at = next((k for k, (a, b) in enumerate(zip(lockstep[i], out.tokens[i])) if a != b), -1)
        print(f'  text {i}, token {at}: {lockstep[i][at]} and {out.tokens[i][at]}', flush=True)


def main():
  """Measure both families."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('shared')
  parser.add_argument('--sentences', type=int, default=1000)
  parser.add_argument('--problems', type=int, default=500)
  parser.add_argument('--dtype', default='float32')
  args = parser.parse_args()
  problems = lines(f'{args.shared}/data/sums/test_first600.jsonl.gz', args.problems)
  families = {
    't5_multi30k': (('small', 'large'), lines(f'{args.shared}/data/multi30k/val.en.gz', args.sentences), 48),
    'llama_sums': (('draft', 'target'), [f'Question: {json.loads(x)["question"]}\nAnswer:' for x in problems], 80),
  }
  for family, (names, prompts, new_tokens) in families.items():
    models = [load(f'{args.shared}/checkpoints/{family}/{name}', dtype=args.dtype) for name in names]
    print(f'{family}: {len(prompts)} prompts of {np.mean([len(x) for x in prompts]):.0f} characters', flush=True)
    for coupling in ('gumbel', 'maximal'):
      measure(family, models, prompts, new_tokens, coupling)


if __name__ == '__main__':
  main()
