"""The fastest settings of curves whose loss of quality against the reference is certified on calibration prompts.

For each setting a test asks whether its expected loss is more than `at_most`. The settings of a curve are tested in the
order of its values, until the first that may lose more. That order is known before the data, so the chance that any
setting is certified wrongly is that of one test (fixed-sequence testing, a form of "Learn then Test").

Axis letters: N prompts, K statistics of a metric, R resamples.
"""

import bisect
from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from speccascade.evaluate import intervals
from speccascade.evaluate.curves import Point

PRIOR = 0.04  # the variance of losses that the first bets expect
MOST = 0.9  # of its wealth, the share that a bet can lose
PER_CENT = 100  # of a metric's points in a loss of 1


# ---- losses and their tests ----


def betting_p_value(losses: np.ndarray, at_most: float, level: float) -> float:
  """Return a p-value of the hypothesis that the expected loss is `at_most` or more.

  It is valid for every number of losses and every distribution of them (Waudby-Smith and Ramdas 2024): someone bets on
  each loss that it is less than `at_most`, at odds that are fair where the hypothesis is true. Then the wealth, 1 at
  the beginning, ever reaches 1/p with a chance of p at most. The bets are sized by the variance of the losses before.

  Args:
    losses: [N], each in −1 … 1, independent of each other and in an order that does not depend on them.
    at_most: between −1 and 1.
    level: that p is to be compared with, for which the bets are sized; p is valid for any.

  Returns:
    The p-value.

  Raises:
    ValueError: If a loss is not in −1 … 1, or `at_most` not between them.
  """
  losses = np.asarray(losses, np.float64)
  if not (np.abs(losses) <= 1).all():
    raise ValueError(f'a loss is {losses[~(np.abs(losses) <= 1)][0]}; scale losses to −1 … 1.')
  if not -1 < at_most < 1:
    raise ValueError(f'at_most={at_most} is not between −1 and 1.')
  count = np.arange(1, len(losses) + 1)
  means = np.cumsum(losses) / (count + 1)
  variances = (PRIOR + np.cumsum((losses - means) ** 2)) / (count + 1)
  before = np.concatenate([[PRIOR], variances[:-1]])  # a bet must not know the loss that it is on
  bets = np.minimum(np.sqrt(2 * np.log(1 / level) / (len(losses) * before)), MOST / (1 - at_most))
  wealth = np.cumsum(np.log1p(bets * (at_most - losses)))
  return float(np.exp(-max(0.0, wealth.max(initial=0.0))))


@dataclasses.dataclass(frozen=True)
class MeanLoss:
  """The loss of a setting by a metric that is a mean of scores; all values are in points of the metric.

  Attributes:
    losses: [N], the score of the reference less that of the setting, each in −1 … 1.
  """

  losses: np.ndarray
  finite = True  # whether its test is valid for every number of prompts

  def __len__(self) -> int:
    return len(self.losses)

  def take(self, rows: np.ndarray) -> 'MeanLoss':
    """Return the loss on some of the prompts, in this order."""
    return MeanLoss(self.losses[rows])

  def value(self) -> float:
    """Return the mean loss."""
    return float(PER_CENT * self.losses.mean())

  def resampled(self, seed: int) -> np.ndarray:
    """Return the mean loss on each resample of the prompts [R]."""
    return PER_CENT * intervals.draws(seed, len(self.losses)) @ self.losses / len(self.losses)

  def p_value(self, at_most: float, level: float, seed: int) -> float:
    """Return a p-value of the hypothesis that the expected loss is `at_most` or more."""
    return betting_p_value(self.losses, at_most / PER_CENT, level)

  def bound(self, level: float, seed: int) -> float:
    """Return the least hundredth of a point at which the hypothesis is rejected, an upper bound of the loss."""
    hundredths = range(1 - PER_CENT**2, PER_CENT**2)
    # p falls as `at_most` grows, for every bet on a loss then gains more
    rejected = lambda i: self.p_value(i / PER_CENT, level, seed) <= level
    return (hundredths[0] + bisect.bisect_left(hundredths, True, key=rejected)) / PER_CENT


@dataclasses.dataclass(frozen=True)
class CorpusLoss:
  """The loss of a setting by a metric that has one value for all texts, whose test is a bootstrap.

  Attributes:
    metric: a function of sums of statistics.
    reference: [N, K + 1], the statistics of each prompt under the reference; the last is its number of examples.
    setting: [N, K + 1], the same under the setting.
  """

  metric: Any
  reference: np.ndarray
  setting: np.ndarray
  finite = False

  def __len__(self) -> int:
    return len(self.setting)

  def take(self, rows: np.ndarray) -> 'CorpusLoss':
    """Return the loss on some of the prompts."""
    return CorpusLoss(self.metric, self.reference[rows], self.setting[rows])

  def value(self) -> float:
    """Return the loss on all prompts."""
    return float(self._losses(np.ones((1, len(self.setting))))[0])

  def resampled(self, seed: int) -> np.ndarray:
    """Return the loss on each resample of the prompts [R]."""
    return self._losses(intervals.draws(seed, len(self.setting)))

  def p_value(self, at_most: float, level: float, seed: int) -> float:
    """Return the share of resamples whose loss is `at_most` or more."""
    resampled = self.resampled(seed)
    return float((1 + (resampled >= at_most).sum()) / (1 + len(resampled)))

  def bound(self, level: float, seed: int) -> float:
    """Return the loss that only a share `level` of resamples exceeds."""
    return float(np.quantile(self.resampled(seed), 1 - level))

  def _losses(self, weights: np.ndarray) -> np.ndarray:
    """Return the loss where each prompt counts so often [R] for weights [R, N]."""
    pairs = zip(weights @ self.reference, weights @ self.setting, strict=True)
    value = lambda row: self.metric.combine(row[:-1], int(round(row[-1])))
    return np.array([value(reference) - value(setting) for reference, setting in pairs])


Loss = MeanLoss | CorpusLoss


# ---- the choice ----


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A setting that may be chosen.

  Attributes:
    point: the setting.
    cost: its time or calls of the large model, as a share of the reference's.
    loss: on all prompts.
  """

  point: Point
  cost: float
  loss: Loss


def certified(
  candidates: Sequence[Candidate], at_most: float, level: float, rows: np.ndarray, seed: int
) -> list[float]:
  """Return the p-values of a curve's settings in order, up to the first above `level`, its chance of error."""
  p_values: list[float] = []
  for candidate in candidates:
    p_values.append(candidate.loss.take(rows).p_value(at_most, level, seed))
    if p_values[-1] > level:
      break
  return p_values


def error_share(curves: Mapping[str, Any], confidence: float) -> float:
  """Return the chance of error of each curve: an equal share of 1 − `confidence` (Bonferroni)."""
  return (1 - confidence) / len(curves)


def fastest(
  curves: Mapping[str, Sequence[Candidate]], at_most: float, confidence: float, rows: np.ndarray, seed: int = 0
) -> tuple[Candidate | None, dict[str, list[float]]]:
  """Return the fastest certified setting of some curves, None without one, and the p-values of each curve.

  The guarantee holds for all certified settings at once, so one may be chosen by anything, times on the same prompts
  included.

  Args:
    curves: the settings of each curve, in the order of its values.
    at_most: the loss that is promised, in points of the metric.
    confidence: the chance that the guarantee holds, over draws of the calibration prompts.
    rows: the calibration prompts, in random order.
    seed: of a bootstrap's resamples.
  """
  share = error_share(curves, confidence)
  tested = {name: certified(some, at_most, share, rows, seed) for name, some in curves.items()}
  passed = [c for name, some in curves.items() for c, p in zip(some, tested[name], strict=False) if p <= share]
  return min(passed, key=lambda c: c.cost, default=None), tested


def prompts(curves: Mapping[str, Sequence[Candidate]]) -> int:
  """Return how many prompts there are."""
  return len(next(iter(curves.values()))[0].loss)


def split(seed: int, n: int, test_share: float) -> tuple[np.ndarray, np.ndarray]:
  """Return the rows of calibration and of test prompts, in random order."""
  rows = np.random.default_rng(seed).permutation(n)
  tested = int(round(n * test_share))
  return rows[tested:], rows[:tested]


def resampled(
  curves: Mapping[str, Sequence[Candidate]], at_most: float, confidence: float, test_share: float, times: int
) -> dict[str, Any]:
  """Return how often `fastest` keeps its promise where prompts are divided anew, by the seeds 1, 2, … `times`.

  Returns:
    `times`; `kept`, in how many the loss on the test prompts is `at_most` or less, or no setting was certified;
    `kept_if_drawn`, what the function of that name counts; `none`, in how many none was certified; `chosen`, how often
    each setting was; `cost`, the mean of the chosen ones' (1 for none); `kept_by_mean`, in how many the fastest setting
    whose mean loss on the calibration prompts is `at_most` or less, chosen without a test, loses no more on the test
    prompts.
  """
  n = prompts(curves)
  settings = [candidate for some in curves.values() for candidate in some]
  keeps = lambda best, test: best is None or best.loss.take(test).value() <= at_most
  kept = 0
  by_mean = 0
  costs = []
  chosen: dict[str, int] = {}
  for seed in range(1, times + 1):
    calibration, test = split(seed, n, test_share)
    best, _ = fastest(curves, at_most, confidence, calibration, seed)
    kept += keeps(best, test)
    seems = [c for c in settings if c.loss.take(calibration).value() <= at_most]
    by_mean += keeps(min(seems, key=lambda c: c.cost, default=None), test)
    costs.append(1.0 if best is None else best.cost)
    label = '' if best is None else best.point.label
    chosen[label] = chosen.get(label, 0) + 1
  none = chosen.pop('', 0)
  cost = float(np.mean(costs))
  drawn = kept_if_drawn(curves, at_most, confidence, len(calibration), times)
  return dict(times=times, kept=kept, kept_if_drawn=drawn, none=none, chosen=chosen, cost=cost, kept_by_mean=by_mean)


def kept_if_drawn(
  curves: Mapping[str, Sequence[Candidate]], at_most: float, confidence: float, count: int, times: int
) -> int:
  """Return in how many of `times` draws the promise is kept where the run's prompts are the population.

  Their expected loss is known, so this counts the promise itself; a test half's loss is not the expected one. `count`
  calibration prompts are drawn with replacement, by the seeds 1, 2, ….
  """
  n = prompts(curves)
  kept = 0
  for seed in range(1, times + 1):
    drawn = np.random.default_rng(seed).integers(n, size=count)
    best, _ = fastest(curves, at_most, confidence, drawn, seed)
    kept += best is None or best.loss.value() <= at_most
  return kept
