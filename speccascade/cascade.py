"""The sequence cascade: model 0 answers, and model 1 answers anew where the score of that answer is low."""

from collections.abc import Callable
import dataclasses

import numpy as np

from speccascade import methods, results
from speccascade.start import PER_MODEL


def decode(method: methods.SequenceCascade, rows, run: Callable) -> results.Decoded:
  """Decode with model 0 and, under the threshold, with model 1; what both cost is added up.

  The second answer has a stream of random numbers of its own, for the first one's have chosen it.
  """
  first = run(methods.autoregressive(0), rows, trace=True)
  anew = [i for i, logprobs in enumerate(first.logprobs) if float(method.score(logprobs[0])) < method.threshold]
  if anew:
    again = run(methods.autoregressive(1), [dataclasses.replace(rows[i], stream=1) for i in anew])
    return results.replaced(first, anew, again)
  wider = {name: np.pad(getattr(first.stats, name), ((0, 1), (0, 0))) for name in PER_MODEL}
  return dataclasses.replace(first, stats=first.stats.replace(**wider), logprobs=None)
