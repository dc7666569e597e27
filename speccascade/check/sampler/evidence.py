"""A bet against a claim about chances: how strongly outcomes speak against it, whenever one stops."""

from collections.abc import Sequence
import math

import numpy as np

FALSE_ALARM = 1e-6
SHIFTS = tuple(sign * x for x in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2) for sign in (1, -1))


class Bet:
  """Evidence against "each outcome follows its distribution", valid whenever one stops.

  The mean of many bets. One is, for a set A of outcomes and a shift δ, the product of P(z | π(A) + δ) / P(z | π(A)), z
  whether an outcome is in A; another, for a law f, the product of f(x) / π(x). Each has the expectation 1 under the
  claim, and so has their mean: it exceeds 1 / ε with a chance of at most ε.
  """

  def __init__(self, sets: int, laws: int = 0):
    self.logs = np.zeros((sets, len(SHIFTS)))
    self.of_laws = np.zeros(laws)

  def add(self, inside: np.ndarray, chance: np.ndarray, ratios: Sequence[float] = ()):
    """Add outcomes.

    Args:
      inside: Whether each was in each set, [N, sets].
      chance: How likely that was, [N, sets] or [sets].
      ratios: f(x) / π(x) of each law, for one outcome.
    """
    chance = np.broadcast_to(np.asarray(chance, np.float64), inside.shape)[..., None]
    shifted = np.clip(chance + np.array(SHIFTS), 1e-3, 1 - 1e-3)
    settled = (chance <= 0) | (chance >= 1)  # nothing to bet on; what cannot be refutes at once
    with np.errstate(divide='ignore'):
      ratio = np.where(inside[..., None], np.log(shifted / chance), np.log((1 - shifted) / (1 - chance)))
    impossible = np.where(inside[..., None], chance <= 0, chance >= 1)
    self.logs += np.where(impossible, np.inf, np.where(settled, 0, ratio)).sum(0)
    if len(ratios):
      self.of_laws += np.log(ratios)

  @property
  def every(self) -> np.ndarray:
    """The logarithm of what each bet has won: those of the sets, a shift after the other, and those of the laws."""
    return np.concatenate([self.logs.ravel(), self.of_laws])

  @property
  def evidence(self) -> float:
    """The logarithm of the evidence."""
    top = self.every.max()
    return float(top if np.isinf(top) else top + np.log(np.mean(np.exp(self.every - top))))

  @property
  def refuted(self) -> bool:
    """Whether the claim is refuted at `FALSE_ALARM`."""
    return self.evidence > -math.log(FALSE_ALARM)


def excluded(found: np.ndarray, law: np.ndarray, runs: int) -> float:
  """Return the total variation above which a bias is excluded by the shares of outcomes in so many runs.

  With a chance of at least 1 - `FALSE_ALARM` those shares are that near to the sampler's own law (Bretagnolle, Huber
  and Carol), and so near they are to the other.
  """
  near = math.sqrt((found.size * math.log(2) - math.log(FALSE_ALARM)) / (2 * runs))
  return min(1.0, float(0.5 * abs(found - law).sum()) + near)
