"""Acceptance and equality of texts with and without Gumbel coupling: python experiments/coupling/measure.py SHARED."""

import gzip
import json
import sys

from speccascade import decode, load, methods, Sampler

SHARED = sys.argv[1]
METHODS = {
  'alone': methods.autoregressive(1),
  'γ = 2': methods.speculative(block=2),
  'γ = 5': methods.speculative(block=5),
}


def lines(name: str, count: int) -> list[str]:
  """Return the first lines of a file of data."""
  with gzip.open(f'{SHARED}/data/{name}.gz', 'rt') as file:
    return [line.strip() for line in file][:count]


FAMILIES = {
  't5_multi30k': (('small', 'large'), lines('multi30k/val.en', 150)),
  'llama_sums': (
    ('draft', 'target'),
    [f'Question: {json.loads(x)["question"]}\nAnswer:' for x in lines('sums/test_first600.jsonl', 100)],
  ),
}

for family, (names, prompts) in FAMILIES.items():
  models = [load(f'{SHARED}/checkpoints/{family}/{name}', dtype='float32') for name in names]
  for coupling in ('maximal', 'gumbel'):
    texts = {}
    for name, method in METHODS.items():
      sampler = Sampler(1.0, coupling=coupling)
      out = decode(method, models, prompts, max_new_tokens=48, sampler=sampler, batch_size=16)
      texts[name] = out.tokens
      accepted = out.stats.accepted.sum() / max(1, out.stats.tested.sum())
      same = sum(a == b for a, b in zip(texts['alone'], out.tokens, strict=True))
      calls = out.stats.emitted.sum() / out.stats.calls[-1].sum()
      print(f'{family} {coupling} {name}: {accepted:.3f} accepted, {calls:.2f} tokens a call, {same} texts as alone')
