"""Acceptance of drafters on prompts that they were not trained on, for each rule: enumerated on texts, and counted.

  python experiments/three_models/drafters.py SHARED SMALL OUT/exact/model OUT/opt/model …

SHARED is the folder of the checkpoints; the verifier is its large T5 of Multi30k, the companion the base one.
"""

import functools
from pathlib import Path
import sys

import jax
import jax.numpy as jnp
import numpy as np

import speccascade
from speccascade import methods, rules
from speccascade.data import files
from speccascade.train import data, losses
from speccascade.train.batches import collate

RULES = {
  'exact': rules.speculative,
  'OPT': functools.partial(rules.opt, alpha=0.1),
  'Token': functools.partial(rules.token_v3, alpha=0.5),
}
PROMPTS = 100


@functools.partial(jax.jit, static_argnums=0)
def _logits(network, params, batch):
  return losses.logits_of(network, params, batch)


@jax.jit
def _enumerated(q_logits, p_logits, c_logits, real):
  """Return the mean acceptance rate for each rule, the companion's gap, and the correlation of S(q, c) and S(q, p)."""
  mean = lambda x: jnp.where(real, x, 0).sum() / real.sum()
  q, p, c = map(jax.nn.softmax, (q_logits, p_logits, c_logits))
  rates = [mean(losses.accepted(q, rules.target(rule, (q_logits, p_logits)).probs)) for rule in RULES.values()]
  x, y = (s - mean(s) for s in (losses.accepted(q, c), losses.accepted(q, p)))
  correlation = mean(x * y) / jnp.sqrt(mean(x * x) * mean(y * y))
  return [*rates, mean(losses.companion_gap(q, c, p)), correlation]


def main():
  """Print a row for each drafter."""
  shared, *drafters = sys.argv[1:]
  folder = Path(shared, 'checkpoints', 't5_multi30k')
  load = functools.partial(speccascade.load, dtype='float32')
  base, large = load(folder / 'base'), load(folder / 'large')
  texts = [files.lines(Path(shared, 'data', 'multi30k', f'val.{x}.gz'))[:PROMPTS] for x in ('en', 'de')]
  batch = collate(list(data.tokenised(zip(*texts, strict=True), large.tokenizer)), (64,))
  real = np.arange(64)[None] < batch.target_length[:, None]
  p, c = (_logits(m.network, m.params, batch) for m in (large, base))
  names = [*(f'{name}, enumerated' for name in RULES), 'gap', 'correlation', *(f'{name}, counted' for name in RULES)]
  print('| drafter | ' + ' | '.join(names) + ' |\n|' + ' --- |' * (1 + len(names)))
  for path in drafters:
    small = load(path)
    cells = _enumerated(_logits(small.network, small.params, batch), p, c, real)
    for rule in RULES.values():
      method = methods.speculative(rule, block=5)
      out = speccascade.decode(method, [small, large], texts[0], max_new_tokens=64, batch_size=50, seed=1)
      cells.append(out.stats.accepted.sum() / out.stats.tested.sum())
    print(f'| {path} | ' + ' | '.join(f'{x:.3f}' for x in map(float, cells)) + ' |', flush=True)


if __name__ == '__main__':
  main()
