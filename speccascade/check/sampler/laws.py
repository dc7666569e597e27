"""The law of a sampler, by the uniform numbers at which what it emits changes.

What a sampler emits is a step function of each uniform number, given those before it. The steps are found by bisection,
so that thresholds may lie anywhere. A sampler that asks for other numbers, for many, or whose law changes with a number
at no step, as that of an exponential race, is given up.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from speccascade.check.sampler.calls import Call

CALLS = 150_000  # of a case, then it is given up
DEPTH = 12  # uniform numbers of one call
MOST = 100_000  # numbers of one call: who asks for more does not end
TRIES = 32  # calls with random numbers before anything is enumerated
_WIDTH = 1e-8  # of the interval in which a step is found
_ENDS = 1e-7
_GRID = (_ENDS, *((i + 0.5) / 16 for i in range(16)), 1 - _ENDS)
_AFTER = np.random.default_rng(0).random((4, 64)).tolist()  # numbers that may follow, to tell two calls apart
_BITS = np.random.PCG64(0)  # which nothing is drawn from


class GaveUp(Exception):
  """The law cannot be enumerated."""


class Exhausted(BaseException):
  """More numbers are asked for than there are; no code of a user's catches it by `except Exception`."""


class _Asked(np.random.Generator):
  """A generator that notes what it is asked for."""

  def __init__(self, bits: Any):
    super().__init__(bits)
    self.used = 0
    self.others = False  # whether anything but uniform numbers is asked for
    self.exhausted = False

  def __getattribute__(self, name: str) -> Any:
    if name != 'random' and not name.startswith('_') and hasattr(np.random.Generator, name):
      self.others = True
    return super().__getattribute__(name)

  def _take(self, size: Any, most: int) -> tuple[int, int]:
    """Count the next numbers; return where they begin and end."""
    start = self.used
    self.used += 1 if size is None else int(np.prod(size))
    if self.used > most:
      self.exhausted = True
      raise Exhausted
    return start, self.used


class _Counted(_Asked):
  """Random numbers, of which one call may have `MOST`."""

  def random(self, size: Any = None, *args, **kwargs) -> Any:
    """Return the next numbers."""
    self._take(size, MOST)
    return super().random(size, *args, **kwargs)


class _Fed(_Asked):
  """Numbers that are given."""

  def __init__(self, values: Sequence[float]):
    super().__init__(_BITS)
    self.values = values

  def random(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> Any:
    """Return the next numbers."""
    start, end = self._take(out.shape if size is None and out is not None else size, len(self.values))
    taken = np.array(self.values[start:end], dtype)
    if out is not None:
      out[...] = taken.reshape(out.shape)
      return out
    return taken[0] if size is None else taken.reshape(size)


def tried(call: Call) -> bool:
  """Run a sampler some times; return whether it may be enumerated."""
  random = np.random.default_rng(0)
  drafts, chances = zip(*call.drafted, strict=True)
  which = random.choice(len(drafts), TRIES, p=np.array(chances) / sum(chances))
  asked = [_Counted(np.random.PCG64(i)) for i in range(TRIES)]
  for i, rng in zip(which, asked, strict=True):
    try:
      call(drafts[i], rng)
    except Exhausted:
      raise ValueError(f'the sampler asks for more than {MOST} random numbers in a call: let it end.') from None
  return all(not rng.others and rng.used <= DEPTH for rng in asked)


def enumerated(call: Call) -> np.ndarray:
  """Return the law of the first L tokens.

  Raises:
    GaveUp: It cannot be enumerated.
  """
  left = [CALLS]
  return sum(chance * _Tree(call, tokens, left).mean([]) for tokens, chance in call.drafted)


class _Tree:
  """The calls of a sampler for one draft, by the numbers that they are given."""

  def __init__(self, call: Call, tokens: Sequence[int], left: list[int]):
    self.call, self.tokens, self.left = call, tokens, left

  def at(self, values: Sequence[float]) -> np.ndarray | None:
    """Return the law of a call with these numbers, None where it asks for more."""
    self.left[0] -= 1
    if self.left[0] < 0:
      raise GaveUp
    rng, law = _Fed(values), None
    try:
      law = self.call(self.tokens, rng)
    except Exhausted:
      pass
    if rng.others:
      raise GaveUp
    return None if rng.exhausted else law

  def mean(self, values: list[float]) -> np.ndarray:
    """Return the mean of the law over all numbers that follow."""
    law = self.at(values)
    if law is not None:
      return law
    if len(values) == DEPTH:
      raise GaveUp
    edges = [0.0, *self._steps(self._likeness(values), _GRID, _alike), 1.0]
    return sum(self._between(values, a, b) for a, b in zip(edges, edges[1:], strict=False))

  def _likeness(self, values: list[float]) -> Callable[[float], list]:
    """Return a function of a number that tells what calls with it do, without all numbers that may follow."""

    def likeness(u: float) -> list:
      law = self.at([*values, u])
      return [law] if law is not None else [self._followed([*values, u, *after]) for after in _AFTER]

    return likeness

  def _followed(self, values: list[float]) -> np.ndarray:
    law = self.at(values)
    if law is None:
      raise GaveUp
    return law

  def _steps(self, f: Callable[[float], Any], at: Sequence[float], same: Callable[[Any, Any], bool]) -> list[float]:
    """Return where a step function changes between points."""
    values = [f(u) for u in at]
    found = []
    for a, b, f_a, f_b in zip(at, at[1:], values, values[1:], strict=False):
      found += self._between_two(f, a, b, f_a, f_b, same)
    return found

  def _between_two(self, f, a: float, b: float, f_a: Any, f_b: Any, same: Callable) -> list[float]:
    if same(f_a, f_b):
      return []
    middle = (a + b) / 2
    if b - a < _WIDTH:
      return [middle]
    f_m = f(middle)
    return [*self._between_two(f, a, middle, f_a, f_m, same), *self._between_two(f, middle, b, f_m, f_b, same)]

  def _between(self, values: list[float], a: float, b: float) -> np.ndarray:
    """Return the integral of the law over a number between two steps, of which the likeness saw no other."""

    def f(u: float) -> np.ndarray:
      return self.mean([*values, u])

    ends = a + (b - a) * 1e-3, b - (b - a) * 1e-3
    law = f(ends[0])
    if _close(law, f(ends[1])):
      return (b - a) * law
    points = np.linspace(*ends, 5).tolist()
    laws = [f(u) for u in points]
    if not any(_close(x, y) for x, y in zip(laws, laws[1:], strict=False)):
      raise GaveUp  # it changes everywhere
    edges = [a, *self._steps(f, points, _close), b]
    return sum((d - c) * f((c + d) / 2) for c, d in zip(edges, edges[1:], strict=False))


def _alike(a: list, b: list) -> bool:
  return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _close(a: np.ndarray, b: np.ndarray) -> bool:
  return bool(abs(a - b).max() < 1e-9)
