"""Spec-Bench (Xia et al. 2024): prompts of six tasks, of which one is MT-bench with its eight categories."""

import dataclasses

from speccascade.data import files
from speccascade.data.examples import Task

MT_BENCH = ('writing', 'roleplay', 'reasoning', 'math', 'coding', 'extraction', 'stem', 'humanities')


def spec_bench(path: str, *, count: int | None = None, tokenizer: str | None = None) -> Task:
  """Return the prompts of Spec-Bench, for speed: the first turn of each, with its task as its domain.

  Args:
    path: Its question.jsonl, of which each object has a `category`, one of thirteen, which `info` has too.
    count: Number of examples, chosen at random but the same in every run; None for all.
    tokenizer: Path of the models' tokenizer, to truncate long prompts.
  """
  settings = dict(chat=True, seed=0, max_prompt_tokens=2048, max_new_tokens=1024, name='spec_bench')
  task = files.conversations(path, count=count, tokenizer=tokenizer, info_fields=['category'], **settings)

  def domain(category):
    return 'mt_bench' if category in MT_BENCH else category

  examples = [dataclasses.replace(e, info=e.info | {'domain': domain(e.info['category'])}) for e in task.examples]
  return dataclasses.replace(task, examples=examples)
