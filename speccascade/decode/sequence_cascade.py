"""The sequence cascade: model 0 answers, and model 1 answers anew where the score of that answer is low."""

from collections.abc import Callable, Sequence
import dataclasses

import numpy as np

from speccascade import methods
from speccascade.engine.job import Job
from speccascade.engine.results import Row
from speccascade.engine.stats import PER_MODEL
from speccascade.types import Model

_OF_THE_ANSWER = ('source', 'emitted')  # statistics that are not added up


def decode(job: Job, run: Callable) -> list[Row]:
  """Decode with model 0 and, under the threshold, with model 1; what both cost is added up.

  The EOS ids of model 1 end both answers.
  The second answer has a stream of random numbers of its own, for the first one's have chosen it. Its programs are
  those of all rows, so that how many are answered anew compiles nothing.
  """
  method = job.method
  alone = lambda model, **changes: dataclasses.replace(job, method=methods.autoregressive(model), **changes)
  first = run(alone(0, models=_with_ends_of_the_last(job.models), trace=True))
  sound = [i for i, row in enumerate(first) if row.fault is None]
  anew = [i for i in sound if float(method.score(first[i].logprobs[0])) < method.threshold]
  second = {}
  if anew:
    rows = [dataclasses.replace(row, stream=1) for row in job.rows]
    others = frozenset(range(len(rows))).difference(anew)
    second = dict(zip(anew, run(alone(1, rows=rows), skip=others), strict=True))
  return [_joined(row, second.get(i)) for i, row in enumerate(first)]


def _with_ends_of_the_last(models: Sequence[Model]) -> list[Model]:
  """Return the models, model 0 with the EOS ids of model 1."""
  first, last = models
  ends = last.network.eos_ids
  if first.network.eos_ids == ends:
    return [first, last]
  return [first.replace(network=dataclasses.replace(first.network, eos_ids=ends)), last]


def _joined(first: Row, again: Row | None) -> Row:
  """Return the last answer, with what both cost by model."""
  stats = {name: np.pad(value, (0, 1)) if name in PER_MODEL else value for name, value in first.stats.items()}
  if again is None:
    return dataclasses.replace(first, stats=stats, logprobs=None)
  both = {name: new if name in _OF_THE_ANSWER else stats[name] + new for name, new in again.stats.items()}
  return dataclasses.replace(again, stats=both)
