"""The sequence cascade: model 0 answers, and model 1 answers anew where the score of that answer is low."""

from collections.abc import Callable
import dataclasses
import numbers

from flax import struct
import numpy as np

from speccascade import rules, sampling
from speccascade.engine.job import DecodeJob
from speccascade.engine.method import About, Method, Strategy
from speccascade.engine.results import Row
from speccascade.engine.stats import PER_MODEL
from speccascade.types import static

_OF_THE_ANSWER = ('source', 'emitted')  # statistics that are not added up


@struct.dataclass
class SequenceCascade(Strategy):
  """Model 0 writes the complete answer; model 1 writes it anew where the answer's score is under the threshold."""

  score: Callable = static()
  threshold: float = static()
  answers: tuple[Method, Method] = ()  # by which each model answers

  about = About('sequence_cascade')
  phases = ()
  slots = (0, 1)
  answering = slots
  whole_texts = True

  def running_all(self) -> 'SequenceCascade':
    return self.replace(threshold=np.inf)  # answers everything anew

  def decode(self, job: DecodeJob, run: Callable) -> list[Row]:
    """Decode with model 0 and, under the threshold, with model 1; what both cost is added up.

    The EOS ids of model 1 end both answers.
    The second answer has a stream of random numbers of its own, for the first one's have chosen it. Its programs are
    those of all rows, so that how many are answered anew compiles nothing.
    """

    def alone(model, **changes):
      return dataclasses.replace(job, method=self.answers[model], **changes)

    first = run(alone(0, eos_ids=job.models[1].network.eos_ids, trace='models'))
    sound = [i for i, row in enumerate(first) if row.fault is None]
    anew = [i for i in sound if self._scored(first[i].logprobs[0]) < self.threshold]
    second = {}
    if anew:
      rows = [dataclasses.replace(row, stream=1) for row in job.rows]
      others = frozenset(range(len(rows))).difference(anew)
      second = dict(zip(anew, run(alone(1, rows=rows), skip=others), strict=True))
    return [_joined(row, second.get(i)) for i, row in enumerate(first)]

  def _scored(self, logprobs: np.ndarray) -> float:
    """Return the score of an answer, of the log-probabilities of its tokens [n]."""
    score = sampling.number(self.score(logprobs))
    if not isinstance(score, numbers.Real) or np.isnan(score):
      raise ValueError(
        f'sequence_cascade: score {rules.name_of(self.score)} returns {score!r} for an answer of {logprobs.size} '
        'tokens; return one number.'
      )
    return float(score)


def _joined(first: Row, again: Row | None) -> Row:
  """Return the last answer, with what both cost by model."""
  stats = {name: np.pad(value, (0, 1)) if name in PER_MODEL else value for name, value in first.stats.items()}
  if again is None:
    return dataclasses.replace(first, stats=stats, logprobs=None)
  both = {name: new if name in _OF_THE_ANSWER else stats[name] + new for name, new in again.stats.items()}
  return dataclasses.replace(again, stats=both)
