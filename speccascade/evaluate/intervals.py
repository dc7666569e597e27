"""Intervals of what is measured, from resampled examples; the same resamples serve all points and measures.

Axis letters: R resamples, N examples, G groups of examples that were timed together, P points of a curve.
"""

from collections.abc import Sequence
import functools

import numpy as np

RESAMPLES = 1000
BOUNDS = (2.5, 97.5)  # per cent, of every interval


@functools.lru_cache(maxsize=2)
def draws(seed: int, n: int) -> np.ndarray:
  """Return how often each of n examples is in each resample [R, n]."""
  return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), RESAMPLES)


def interval(values: np.ndarray) -> list[float]:
  """Return the 95 % interval of the values [R] of a measure."""
  return [float(x) for x in np.percentile(values, BOUNDS)]


def group_weights(seed: int, groups: Sequence[Sequence[int]], n: int) -> np.ndarray:
  """Return the weight of each timed group in each resample [R, G].

  Args:
    seed: of the resamples.
    groups: the positions of a group's examples among the n whose quality is known; a negative one is not among them.
    n: how many those are.
  """
  if min(map(min, groups)) < 0:  # then times are resampled by themselves
    return draws(seed, len(groups)).astype(float)
  drawn = draws(seed, n)
  return np.stack([drawn[:, list(group)].mean(1) for group in groups], 1)


def reaching(quality: np.ndarray, speed: np.ndarray, wanted: np.ndarray, *, between: bool) -> np.ndarray:
  """Return the largest speed at which a curve has at least the wanted quality, -inf where it has not.

  Args:
    quality: [R, P] in the order of the curve's parameter.
    speed: [R, P].
    wanted: [R].
    between: whether quality and speed are linear between neighbouring points; if not, only the points count.

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


def reached(values: np.ndarray) -> list[float | None] | None:
  """Return the interval of a speed [R] that some resamples do not reach, whose value is -inf.

  The lower bound is None where more than 2.5 % do not reach it; there is no interval where 97.5 % do not.
  """
  bounds = [
    float(np.percentile(values, bound, method=method))
    for bound, method in zip(BOUNDS, ('lower', 'higher'), strict=True)
  ]
  if not np.isfinite(bounds[1]):
    return None
  return [x if np.isfinite(x) else None for x in bounds]
