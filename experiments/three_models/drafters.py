"""Acceptance of drafters on prompts that they were not trained on, for each rule: enumerated on texts, and counted.

  python -m experiments.three_models.drafters SMALL OUT/exact/model OUT/opt/model …

The verifier is the large T5 of the family of Multi30k, the companion the base one.
"""

import functools
import sys

import jax.numpy as jnp
import numpy as np

import speccascade
from speccascade import methods, rules, sampling
from speccascade.data import files
from speccascade.decode import scoring

RULES = {
  'exact': rules.speculative,
  'OPT': functools.partial(rules.opt, alpha=0.1),
  'Token': functools.partial(rules.token_v3, alpha=0.5),
}
PROMPTS = 100


def overlaps(logits, tokens):
  """Return Σ min(q, π) for each rule, the companion's gap, S(q, c) and S(q, p) of drafter, verifier and companion."""
  q, p, c = map(sampling.softmax, logits)
  of_q = lambda other: jnp.minimum(q, other)
  rates = [of_q(rules.target(rule, logits[:2]).probs).sum(-1) for rule in RULES.values()]
  gap = jnp.abs(of_q(c) - of_q(p)).sum(-1)
  return jnp.stack([*rates, gap, of_q(c).sum(-1), of_q(p).sum(-1)], -1)


def main():
  """Print a row for each drafter."""
  drafters = sys.argv[1:]
  load = functools.partial(speccascade.load, dtype='float32')
  base, large = load('family:multi30k/base'), load('family:multi30k/large')
  sources, targets = (files.lines(f'family:multi30k/val.{x}')[:PROMPTS] for x in ('en', 'de'))
  outputs = [large.tokenizer.encode(text, begins=False) for text in targets]
  names = [*(f'{name}, enumerated' for name in RULES), 'gap', 'correlation', *(f'{name}, counted' for name in RULES)]
  print('| drafter | ' + ' | '.join(names) + ' |\n|' + ' --- |' * (1 + len(names)))
  for path in drafters:
    small = load(path)
    *known, x, y = np.concatenate(scoring.read([small, large, base], sources, outputs, overlaps)).T
    cells = [*(values.mean() for values in known), np.corrcoef(x, y)[0, 1]]
    for rule in RULES.values():
      method = methods.speculative(rule, block=5)
      out = speccascade.decode(method, [small, large], sources, max_new_tokens=64, batch_size=50, seed=1)
      cells.append(out.stats.accepted.sum() / out.stats.tested.sum())
    print(f'| {path} | ' + ' | '.join(f'{x:.3f}' for x in map(float, cells)) + ' |', flush=True)


if __name__ == '__main__':
  main()
