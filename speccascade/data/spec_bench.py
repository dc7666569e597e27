"""Spec-Bench (Xia et al. 2024): prompts of six tasks, of which one is MT-bench with its eight categories."""

import dataclasses

from speccascade.data import files
from speccascade.data.examples import Task

MT_BENCH = ('writing', 'roleplay', 'reasoning', 'math', 'coding', 'extraction', 'stem', 'humanities')


def spec_bench(
  path: str,
  *,
  chat: bool | str = True,
  count: int | None = None,
  seed: int | None = 0,
  max_prompt_tokens: int = 2048,
  max_new_tokens: int = 1024,
  tokenizer: str | None = None,
) -> Task:
  """Return the prompts of Spec-Bench, for speed: the first turn of each, with its task as its domain.

  Args:
    path: Its question.jsonl, of which each object has a `category`, one of thirteen, which `info` has too.
    chat: Whether the prompt is a message for the models' chat template; a text is the system's message.
    count: Number of examples; None for all.
    seed: Of a random subset of `count` examples.
    max_prompt_tokens: The longest prompt.
    max_new_tokens: Tokens to generate at most.
    tokenizer: Path of the models' tokenizer, to truncate long prompts.
  """
  limits = dict(max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens, tokenizer=tokenizer)
  task = files.conversations(
    path, chat=chat, count=count, seed=seed, info_fields=['category'], name='spec_bench', **limits
  )

  def domain(category):
    return 'mt_bench' if category in MT_BENCH else category

  examples = [dataclasses.replace(e, info=e.info | {'domain': domain(e.info['category'])}) for e in task.examples]
  return dataclasses.replace(task, examples=examples)
