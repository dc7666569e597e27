"""A task and a pair of models that come with the package: translation of captions, English → German.

The pair was trained by `python -m speccascade.train --gin_file=gin_configs/train/embedded.gin --out=OUT`. Its sentences
were sampled once from a small grammar with weighted synonyms. No English sentence occurs twice, so `validation` and
`test` share none with `train`.
"""

import bz2
import functools
from pathlib import Path

from speccascade.checkpoints import load
from speccascade.data.examples import Example, Task
from speccascade.types import Model

_FOLDER = Path(__file__).parent / 'pretrained'
_SENTENCES = Path(__file__).parent / 'sentences'
_MAX_TOKENS = 64
SPLITS = ('train', 'validation', 'test')  # of 40 000, 2 000 and 2 000 pairs


def task(split: str = 'validation', count: int | None = None) -> Task:
  """Return a translation task judged by BLEU.

  Args:
    split: 'validation', 'test' or 'train'.
    count: Number of examples, the first ones of the split; 500 by default.

  Returns:
    A task whose examples are the same in every run.

  Raises:
    ValueError: if there is no such split, or it has fewer sentences.
  """
  from speccascade.data import metrics  # lazily: models need no metrics

  chosen = sentences(split, 500 if count is None else count)
  examples = tuple(Example(i, source, target) for i, (source, target) in enumerate(chosen))
  return Task('captions', examples, _MAX_TOKENS, _MAX_TOKENS, {'bleu': metrics.bleu})


def sentences(split: str = 'train', count: int | None = None) -> tuple[tuple[str, str], ...]:
  """Return pairs of an English sentence and its German translation.

  Args:
    split: 'train', 'validation' or 'test'.
    count: Number of pairs, the first ones of the split; all by default.

  Returns:
    The pairs, always in the same order.

  Raises:
    ValueError: if there is no such split, or it has fewer pairs.
  """
  if split not in SPLITS:
    raise ValueError(f'split={split!r}: choose from {", ".join(SPLITS)}')
  pairs = _pairs(split)
  if count is None:
    return pairs
  if count not in range(1, len(pairs) + 1):
    raise ValueError(f'count={count!r}: the {split} split has {len(pairs)} sentences; ask for 1 to {len(pairs)}')
  return pairs[: int(count)]


@functools.cache
def _pairs(split: str) -> tuple[tuple[str, str], ...]:
  """Read all pairs of a split from the files of the package."""
  files = [_SENTENCES / f'{split}.{language}.bz2' for language in ('en', 'de')]
  english, german = (bz2.decompress(file.read_bytes()).decode('utf-8').splitlines() for file in files)
  return tuple(zip(english, german, strict=True))


def models(dtype: str | None = None) -> list[Model]:
  """Return the pair of models.

  Args:
    dtype: Of the parameters; by default the one that suits the machine.

  Returns:
    The drafter 'small' and the verifier 'large'.
  """
  return [load(_FOLDER / name, dtype=dtype, name=name) for name in ('small', 'large')]


def vocabulary() -> str:
  """Return the path of the pair's sentencepiece vocabulary."""
  return str(_FOLDER / 'large' / 'spiece.model')
