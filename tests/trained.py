"""The trained checkpoints and their prompts, where a folder of them is there."""

import gzip
import json
from pathlib import Path

NEW = 40
NAMES = [
  't5_multi30k/small', 't5_multi30k/base', 't5_multi30k/large',
  'llama_gsm8k/draft', 'llama_gsm8k/companion', 'llama_gsm8k/target',
]  # fmt: skip


def lines(path: Path) -> list[str]:
  """Return the lines of a compressed text."""
  with gzip.open(path, 'rt', encoding='utf-8') as f:
    return [line.rstrip('\n') for line in f]


def prompts(shared: Path, name: str, count: int) -> list[str]:
  """Return validation sentences for the translators, questions for the others."""
  if name.startswith('t5'):
    return lines(shared / 'data' / 'multi30k' / 'val.en.gz')[:count]
  questions = lines(shared / 'data' / 'gsm8k' / 'test_first600.jsonl.gz')[:count]
  return [f'Question: {json.loads(x)["question"]}\nAnswer:' for x in questions]
