"""A task and a pair of models that come with the package: captions of a generated language, English → German.

The pair was trained by `python -m speccascade.train --gin_file=gin_configs/train/embedded.gin --out=OUT`.
"""

from pathlib import Path

from speccascade.checkpoints import load
from speccascade.data.examples import Task
from speccascade.embedded import grammar
from speccascade.types import Model

_FOLDER = Path(__file__).parent / 'pretrained'
_MAX_TOKENS = 64


def task(split: str = 'validation', count: int | None = None) -> Task:
  """Return the translation task: 500 sentences of the split, or `count`, judged by BLEU."""
  from speccascade.data import metrics  # lazily: models need no metrics

  examples = grammar.examples(split, 500 if count is None else count)
  return Task('captions', examples, _MAX_TOKENS, _MAX_TOKENS, {'bleu': metrics.bleu})


def models(dtype: str | None = None) -> list[Model]:
  """Return the drafter 'small' and the verifier 'large', in the dtype that suits the machine unless told."""
  return [load(_FOLDER / name, dtype=dtype, name=name) for name in ('small', 'large')]


def vocabulary() -> str:
  """Return the path of the pair's sentencepiece vocabulary."""
  return str(_FOLDER / 'large' / 'spiece.model')
