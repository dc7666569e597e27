"""The one cost model: a round costs its calls, each as it was measured, and an overhead.

Plans, reports and the studies of speculative verification predict with it by the formulas of `theory`; the floor of a
compiled program is the same sum, of bytes.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses

import numpy as np

from speccascade import theory
from speccascade.engine.method import ALONE, Method

FREE = 1e-6  # the cost ratio of a drafter without cost, and of one whose calls are timed with their round
LEAST = 20  # tests of a position in the block that make a rate of their own


def calls_cost(method: Method, cost: Callable[[int], float]) -> float:
  """Return what the calls of a round cost, the dearest where models take turns; a call of a slot costs `cost(slot)`."""
  return max(sum(count * cost(slot) for slot, count in calls.items()) for calls in method.calls())


@dataclasses.dataclass(frozen=True)
class Costs:
  """Seconds at one batch size.

  Attributes:
    draft: A call of the drafter.
    verify: {tokens of each row: a call of the verifier}; those of one token are in it.
    overhead: A round, apart from its calls.
    start: A batch, once: its prefill and the host's work.
    start_alone: The same where the verifier decodes alone.
  """

  draft: float
  verify: Mapping[int, float]
  overhead: float = 0.0
  start: float = 0.0
  start_alone: float = 0.0

  @property
  def token(self) -> float:
    """A token of the verifier alone."""
    return self.verify[1]

  @property
  def ratio(self) -> float:
    """A call of the drafter over one of the verifier."""
    return self.draft / self.token

  def window(self, width: float) -> float:
    """Return the seconds of a call of the verifier with so many tokens of each row."""
    return at_width(self.verify, width)

  def round(self, drafts: float, width: float) -> float:
    """Return the seconds of a round of so many calls of the drafter and one of the verifier."""
    return drafts * self.draft + self.window(width) + self.overhead


def speedup(
  method: Method, acceptance: Sequence[float], costs: Costs, lengths: Sequence[int] = (), hits: float = 0.0
) -> float | None:
  """Return the predicted speed-up of a method at these costs, None where there is no formula.

  It is that of long texts or, over the verifier alone, of texts of the given lengths: what starts a batch counts, and
  so does the end of a text, which cuts its last round short. A share `hits` of rejections is followed by a leaf, and so
  by one token more.
  """
  width = window(method)
  steady = predict(method, acceptance, costs.ratio, costs.window(width) / costs.token, costs.overhead / costs.token)
  if not len(lengths) or method.about.over != ALONE:
    return steady if not hits else steady * (1 + hits * _rejected(acceptance, method.block))
  lengths, counts = np.unique(lengths, return_counts=True)
  [calls] = method.calls()
  spent = costs.round(calls[0], width)
  alone = costs.start_alone + lengths * (costs.token + costs.overhead)
  sped = costs.start + rounds(acceptance, method.block, lengths[-1], hits)[lengths] * spent
  return float((counts * alone).sum() / (counts * sped).sum())


def speedup_of_texts(costs: Costs, seconds: float, lengths: Sequence[int]) -> float:
  """Return the speed-up over the verifier alone of texts whose tokens take so long, with what starts a batch."""
  alone = costs.start_alone + np.asarray(lengths) * (costs.token + costs.overhead)
  return float(alone.sum() / (costs.start + np.asarray(lengths) * seconds).sum())


def mean_rate(acceptance: Sequence[float], block: int) -> float:
  """Return the share of the tested tokens of drafts of γ tokens that is accepted."""
  accepted = theory.ByPosition(acceptance).all_accepted(np.arange(block + 1))
  return float(accepted[1:].sum() / accepted[:-1].sum())


def _rejected(acceptance: Sequence[float], block: int) -> float:
  """Return the rejections of a round over its tokens."""
  rate = theory.ByPosition(acceptance)
  return float((1 - rate.all_accepted(block)) / theory.tokens_per_round(rate, block))


def rounds(acceptance: Sequence[float], block: int, longest: int, hits: float = 0.0) -> np.ndarray:
  """Return how many rounds texts of 0, 1, … `longest` tokens are expected to take: [longest + 1]."""
  accepted = theory.ByPosition(acceptance).all_accepted(np.arange(block + 1))
  chances = accepted - np.append(accepted[1:], 0)  # that a round gives 1, 2, … block + 1 tokens
  followed = hits * chances[:-1]  # by a leaf
  chances = chances + np.append(0, followed) - np.append(followed, 0)
  expected = np.zeros(longest + 1)
  for n in range(1, longest + 1):
    before = np.maximum(n - 1 - np.arange(block + 1), 0)
    expected[n] = 1 + chances @ expected[before]
  return expected


def predict(
  method: Method,
  acceptance: float | Sequence[float],
  cost_ratio: float,
  verify_cost: float = 1.0,
  overhead: float = 0.0,
) -> float | None:
  """Return the predicted speed-up of a method over what it says in `about.over`, None where there is no formula.

  Acceptance is one rate, or those by position in the block; of a method that accepts all, the share of tokens that are
  drafted. Formulas are of two models, which are taken to be accepted alike where both draft. Times, of the drafter's
  call, of the verifier's window and of what a round costs apart from its calls, are in units of the verifier's time for
  one token.
  """
  about = method.about
  if about.is_baseline:
    return 1.0
  if about.speedup is None or len({*method.slots}) != 2:
    return None
  rate = acceptance if np.ndim(acceptance) == 0 else theory.ByPosition(acceptance)
  return float(about.speedup(rate, about.block, cost_ratio, verify_cost, overhead))


def by_position(tested: Sequence[int], accepted: Sequence[int]) -> tuple[float, ...]:
  """Return the acceptance rate at each position in the block, one rate for the positions from where tests are few."""
  tested = np.asarray(tested)
  accepted = np.asarray(accepted)
  few = tested < LEAST
  first = int(np.argmax(few)) if few.any() else tested.size
  rates = list(accepted[:first] / tested[:first])
  if tested[first:].sum():
    rates.append(accepted[first:].sum() / tested[first:].sum())
  if not rates:
    raise ValueError('No drafted token was tested; give more prompts, or longer outputs.')
  return tuple(map(float, rates))


def window(method: Method) -> int:
  """Return how many tokens the verifier is fed at once: at most a draft of γ tokens and the one before it."""
  gamma = method.block[0] if isinstance(method.block, Sequence) else method.block
  return min(gamma + 1, method.verifier_width)


def at_width(forward: Mapping[int, float], width: float) -> float:
  """Return the time of a window, between measured widths on the line between them, beyond them that of the widest."""
  return float(np.interp(width, sorted(forward), [forward[w] for w in sorted(forward)]))
