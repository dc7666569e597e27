"""The trained families, with the texts on which their models are compared."""

import json

import speccascade
from speccascade.data import files
from speccascade.data.examples import Task
from speccascade.types import Model

TRIOS = {name: ('draft', 'companion', 'target') for name in ('gsm8k', 'sums')} | {
  'multi30k': ('small', 'base', 'large')
}
PAIRS = {family: (first, last) for family, (first, _, last) in TRIOS.items()}
QUESTION = 'Question: {question}\nAnswer:'


def pair(family: str, dtype: str | None = 'float32') -> list[Model]:
  """Return the drafter and the verifier of a family."""
  return [speccascade.load(f'family:{family}/{name}', dtype=dtype) for name in PAIRS[family]]


def prompts(family: str, count: int | None, split: str = 'test_2016_flickr') -> list[str]:
  """Return the first sentences of a split for the translators, the first test questions for the others."""
  if family == 'multi30k':
    return files.lines(f'family:{family}/{split}.en')[:count]
  return files.texts(f'family:{family}/test.jsonl', QUESTION, count)


def corpus(family: str, count: int | None = None, split: str = 'train') -> list[str]:
  """Return texts of a family, `count` of each of its files."""
  if family == 'multi30k':
    return [line for side in ('en', 'de') for line in files.lines(f'family:{family}/{split}.{side}')[:count]]
  rows = map(json.loads, files.lines(f'family:{family}/{split}.jsonl')[:count])
  return [f'{QUESTION.format_map(row)} {row["answer"]}' for row in rows]


def task(family: str, split: str, count: int | None, new_tokens: int) -> Task:
  """Return a task of a family: translation, or problems whose answer is a number."""
  if family == 'multi30k':
    sides = [f'family:multi30k/{split}.{side}' for side in ('en', 'de')]
    return files.parallel_text(*sides, count=count, max_prompt_tokens=64, max_new_tokens=new_tokens)
  fields = dict(prompt_field=QUESTION, target_field='answer', metrics=['final_number'], stop=['\nQuestion:'])
  limits = dict(count=count, max_prompt_tokens=96, max_new_tokens=new_tokens)
  return files.jsonl(f'family:{family}/{split}.jsonl', **fields, **limits)
