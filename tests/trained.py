"""The trained families and their prompts."""

import contextlib
import json
import os
import pathlib
import tempfile

from speccascade.data import files

NEW = 40
PAIRS = {'multi30k': ('small', 'large'), 'gsm8k': ('draft', 'target'), 'sums': ('draft', 'target')}
NAMES = [
  *(f'multi30k/{name}' for name in ('small', 'base', 'large')),
  *(f'gsm8k/{name}' for name in ('draft', 'companion', 'target')),
]

BESIDE = pathlib.Path(__file__).parents[2] / 'shared'  # a folder of checkpoints and data may lie beside the project
BY_FAMILY = {'multi30k': 't5_multi30k', 'gsm8k': 'llama_gsm8k', 'sums': 'llama_sums'}


def folder() -> pathlib.Path | None:
  """Return the folder of families that a user names, else links to what lies beside the project."""
  if given := os.environ.get('SPECCASCADE_FAMILIES'):
    return pathlib.Path(given)
  if not (BESIDE / 'checkpoints').is_dir():
    return None
  root = pathlib.Path(tempfile.gettempdir()) / 'speccascade-test-families'
  for name, checkpoints in BY_FAMILY.items():
    (root / name).mkdir(parents=True, exist_ok=True)
    for file in (*(BESIDE / 'checkpoints' / checkpoints).iterdir(), *(BESIDE / 'data' / name).iterdir()):
      with contextlib.suppress(FileExistsError):
        (root / name / file.name.replace('test_first600', 'test')).symlink_to(file)
  return root


def corpus(family: str, count: int | None = None, split: str = 'train') -> list[str]:
  """Return texts of a family, `count` of each of its files."""
  if family == 'multi30k':
    return [line for side in ('en', 'de') for line in files.lines(f'family:{family}/{split}.{side}')[:count]]
  rows = map(json.loads, files.lines(f'family:{family}/{split}.jsonl')[:count])
  return [f'Question: {row["question"]}\nAnswer: {row["answer"]}' for row in rows]


def prompts(family: str, count: int) -> list[str]:
  """Return validation sentences for the translators, questions for the others."""
  if family == 'multi30k':
    return files.lines(f'family:{family}/val.en')[:count]
  questions = files.lines(f'family:{family}/test.jsonl')[:count]
  return [f'Question: {json.loads(x)["question"]}\nAnswer:' for x in questions]
