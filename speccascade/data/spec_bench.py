"""Spec-Bench (Xia et al. 2024): prompts of six tasks, of which one is MT-bench with its eight categories."""

import dataclasses

from speccascade.data.examples import Task

MT_BENCH = ('writing', 'roleplay', 'reasoning', 'math', 'coding', 'extraction', 'stem', 'humanities')


def spec_bench(task: Task) -> Task:
  """Return Spec-Bench's prompts with the task of each as its domain.

  Args:
    task: The prompts, with their field `category`, one of thirteen.
  """

  def domain(category):
    return 'mt_bench' if category in MT_BENCH else category

  examples = [dataclasses.replace(e, info=e.info | {'domain': domain(e.info['category'])}) for e in task.examples]
  return dataclasses.replace(task, examples=examples)
