"""The trained checkpoints and their prompts, where a folder of them is there."""

import gzip
import json
from pathlib import Path

NEW = 40
NAMES = [
  't5_multi30k/small',
  't5_multi30k/base',
  't5_multi30k/large',
  'llama_gsm8k/draft',
  'llama_gsm8k/companion',
  'llama_gsm8k/target',
]


def lines(path: Path) -> list[str]:
  """Return the lines of a compressed text."""
  with gzip.open(path, 'rt', encoding='utf-8') as f:
    return [line.rstrip('\n') for line in f]


PAIRS = {'t5_multi30k': ('small', 'large'), 'llama_gsm8k': ('draft', 'target'), 'llama_sums': ('draft', 'target')}


def corpus(shared: Path, family: str, count: int | None = None, split: str = 'train') -> list[str]:
  """Return texts of a family's data, `count` of each of its files."""
  data = shared / 'data' / family.rsplit('_', 1)[1]
  if family.startswith('t5'):
    return [line for name in ('en', 'de') for line in lines(data / f'{split}.{name}.gz')[:count]]
  rows = [json.loads(line) for line in lines(data / f'{split}.jsonl.gz')[:count]]
  return [f'Question: {row["question"]}\nAnswer: {row["answer"]}' for row in rows]


def prompts(shared: Path, name: str, count: int) -> list[str]:
  """Return validation sentences for the translators, questions for the others."""
  if name.startswith('t5'):
    return lines(shared / 'data' / 'multi30k' / 'val.en.gz')[:count]
  data = 'sums' if name.startswith('llama_sums') else 'gsm8k'
  questions = lines(shared / 'data' / data / 'test_first600.jsonl.gz')[:count]
  return [f'Question: {json.loads(x)["question"]}\nAnswer:' for x in questions]
