"""Tokens and statistics of every method, rule and sampler, to compare two versions of the loop byte for byte.

  PYTHONPATH=. python tests/engine/golden.py record BEFORE.json     # in a clone of the version before
  PYTHONPATH=. python tests/engine/golden.py record AFTER.json
  PYTHONPATH=. python tests/engine/golden.py compare BEFORE.json AFTER.json

`record … embedded` decodes with the pair of the package instead of toy models. Each takes some twenty minutes.
"""

import json
from pathlib import Path
import sys

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import cases  # noqa: E402

import speccascade  # noqa: E402
from speccascade import embedded, Sampler  # noqa: E402
from speccascade.engine.stats import Stats  # noqa: E402

SAMPLERS = {'T=0': dict(temperature=0.0), 'T=.7': dict(temperature=0.7, top_k=3, top_p=0.9), 'T=1': dict()}
ROWS = 5
SENTENCES = (
  'An old man is carrying a small box.',
  'A dog runs.',
  'Two women are sitting in the park.',
  'A boy plays with a red ball.',
  'The children eat.',
)
PROMPTS = [[1, 1], [2, 3, 1], [4], [0, 2], [3, 3, 3, 1]]


def noted(out: speccascade.Decoded) -> dict:
  """Return the tokens and every statistic of what was decoded, as JSON has them."""
  plain = lambda x: [list(map(int, row)) for row in x] if isinstance(x, list) else np.asarray(x, np.float64).tolist()
  return {'tokens': plain(out.tokens)} | {name: plain(getattr(out.stats, name)) for name in Stats.__dataclass_fields__}


def record(path: str, models: str = 'toy'):
  """Write what all methods decode."""
  pairs = {2: cases.PAIR5, 3: cases.TRIO5} if models == 'toy' else {2: list(embedded.models())}
  prompts = PROMPTS if models == 'toy' else SENTENCES
  found = {}
  for name, (method, of, _) in (cases.METHODS | {f'late {name}': x for name, x in cases.LATE.items()}).items():
    if len(of) not in pairs:
      continue
    for setting, numbers in SAMPLERS.items():
      for batch in (1, ROWS):
        call = dict(max_new_tokens=12, sampler=Sampler(**numbers), seed=3, batch_size=batch)
        found[f'{name}, {setting}, batch {batch}'] = noted(
          speccascade.decode(method, pairs[len(of)], prompts[:batch], **call)
        )
    jax.clear_caches()  # programs have more memory mappings than a process may have
    print(name, file=sys.stderr, flush=True)
  Path(path).write_text(json.dumps(found))


def compare(before: str, after: str) -> int:
  """Print what differs; return how many decodes do, or are missing."""
  one, other = (json.loads(Path(path).read_text()) for path in (before, after))
  differ = 0
  for name in sorted(one.keys() | other.keys()):
    parts = [part for part in one.get(name, {}) if str(one[name][part]) != str(other.get(name, {}).get(part))]
    if parts or name not in one:
      differ += 1
      print(f'{name}: {", ".join(parts) or "missing"}')
  print(f'{differ} of {len(one)} differ')
  return differ


if __name__ == '__main__':
  command, *arguments = sys.argv[1:]
  sys.exit(min({'record': record, 'compare': compare}[command](*arguments) or 0, 1))
