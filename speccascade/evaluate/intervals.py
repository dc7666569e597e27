"""Intervals of what is measured, from resampled examples and from times of groups of examples.

Axis letters: R resamples, N examples, G groups of examples that were timed together, K totals, P points of a curve.
"""

from collections.abc import Hashable, Iterator, Sequence
import functools

import numpy as np
from scipy import special

RESAMPLES = 1000
TAIL = 0.025  # on each side of every interval
_AT_ONCE = 1 << 22  # numbers that are held in float64 beside the resamples, which are bytes
LEAST = 6  # groups of fewer have no interval


@functools.lru_cache(maxsize=4)
def draws(seed: Hashable, n: int) -> np.ndarray:
  """Return how often each of n examples is in each resample [R, n]."""
  random = np.random.default_rng(seed)
  drawn = np.empty((RESAMPLES, n), np.uint8)  # none is drawn 256 times: the mean is 1
  for rows in _blocks(RESAMPLES, n):
    drawn[rows] = random.multinomial(n, np.full(n, 1 / n), rows.stop - rows.start)
  return drawn


def _blocks(rows: int, n: int) -> Iterator[slice]:
  """Yield slices of rows of n numbers that are few enough to be held at once."""
  step = max(1, _AT_ONCE // max(n, 1))
  for start in range(0, rows, step):
    yield slice(start, min(rows, start + step))


def totals(weights: np.ndarray, statistics: np.ndarray) -> np.ndarray:
  """Return the sums [R, K] of statistics [N, K] over examples with weights [R, N]."""
  return np.concatenate([weights[rows].astype(float) @ statistics for rows in _blocks(*weights.shape)])


def interval(values: np.ndarray) -> list[float]:
  """Return the 95 % interval of the values [R] of a measure."""
  return [float(x) for x in np.quantile(values, (TAIL, 1 - TAIL))]


def of_ratio(sums: np.ndarray, powers: Sequence[int]) -> list[float] | None:
  """Return the 95 % interval of a ratio of totals over groups: Student's t of its logarithm.

  The standard error of the logarithm is that of the mean, over groups, of its linear approximation.

  Args:
    sums: [G, K], what each group adds to each total.
    powers: [K], of the totals in the ratio: 1 in its numerator, -1 in its denominator.

  Returns:
    None where there are fewer than LEAST groups, or where a total is 0.
  """
  groups = len(sums)
  means = sums.mean(0)
  if groups < LEAST or not means.all():
    return None
  error = (sums / means @ powers).std(ddof=1) / np.sqrt(groups)
  reach = special.stdtrit(groups - 1, 1 - TAIL) * error
  logarithm = np.log(means) @ powers
  return [float(np.exp(x)) for x in (logarithm - reach, logarithm + reach)]


def weights(seed: int, groups: Sequence[Sequence[int]], n: int) -> tuple[np.ndarray, np.ndarray]:
  """Return the weight in each resample of each timed group [R, G], and of each example whose quality is known [R, n].

  A group is drawn as one, with all of its examples; the other examples are drawn each alone.

  Args:
    seed: Of the resamples.
    groups: The positions of a group's examples among the n; a negative one is not among them.
    n: How many examples have a known quality.
  """
  by_group = draws(seed, len(groups))
  group_of = np.full(n, -1)
  for i, group in enumerate(groups):
    group_of[[example for example in group if example >= 0]] = i
  by_example = by_group[:, group_of]
  if alone := np.count_nonzero(group_of < 0):
    by_example[:, group_of < 0] = draws((seed, 1), alone)
  return by_group, by_example


def reaching(quality: np.ndarray, speed: np.ndarray, wanted: np.ndarray, *, between: bool) -> np.ndarray:
  """Return the largest speed at which a curve has at least the wanted quality, -inf where it has not.

  Args:
    quality: [R, P] in the order of the curve's parameter.
    speed: [R, P].
    wanted: [R].
    between: Whether quality and speed are linear between neighbouring points; if not, only the points count.

  Returns:
    [R].
  """
  wanted = wanted[:, None]
  best = np.where(quality >= wanted, speed, -np.inf).max(1)
  if not between or quality.shape[1] < 2:
    return best
  left = quality[:, :-1]
  right = quality[:, 1:]
  crosses = (np.minimum(left, right) < wanted) & (wanted <= np.maximum(left, right))
  share = (wanted - left) / np.where(crosses, right - left, 1)
  crossing = np.where(crosses, speed[:, :-1] + (speed[:, 1:] - speed[:, :-1]) * share, -np.inf)
  return np.maximum(best, crossing.max(1))


def reached(values: np.ndarray, groups: int) -> list[float | None] | None:
  """Return the 95 % interval of a speed [R] that some resamples do not reach, whose value is -inf.

  Its bounds are the quantiles that have the coverage of Student's t: resamples of few groups differ too little
  (Hesterberg 2015, "expanded percentile"). The lower bound is None where it is not reached; there is no interval where
  the upper one is not, or where there are fewer than LEAST groups.
  """
  if groups < LEAST:
    return None
  tail = special.ndtr(-np.sqrt(groups / (groups - 1)) * special.stdtrit(groups - 1, 1 - TAIL))
  bounds = [
    float(np.quantile(values, share, method=method)) for share, method in ((tail, 'lower'), (1 - tail, 'higher'))
  ]
  if not np.isfinite(bounds[1]):
    return None
  return [x if np.isfinite(x) else None for x in bounds]
