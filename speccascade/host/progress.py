"""Progress on standard error: one line that updates on a terminal, else a line now and then."""

from collections.abc import Callable
import sys
import time

EVERY = 20.0  # seconds between lines where there is no terminal
silent = False  # where another process says the same


class Progress:
  """Count the work of a phase, what is left of it and how long it takes."""

  def __init__(
    self, label: str, total: int, done: int = 0, *, unit: str = 'examples', stream=None, shown: bool = True,
    clock: Callable[[], float] = time.monotonic,
  ):  # fmt: skip
    self._shown = shown
    self._clock = clock
    self._label, self._total, self._first, self._done, self._unit = label, total, done, done, unit
    self._stream = stream or sys.stderr
    self._start = self._said = clock()
    self._terminal = self._stream.isatty()
    self._width = 0

  def add(self, count: int, note: str = ''):
    """Note finished work."""
    self._done += count
    now = self._clock()
    every = 0.1 if self._terminal else EVERY
    if now - self._said >= every or self._done >= self._total:
      self._said = now
      self._say(now, note)

  def expect(self, count: int):
    """Note that there is more work than was known."""
    self._total += count

  def need(self, count: int):
    """Note that at least so much is left."""
    self._total = max(self._total, self._done + count)

  def end(self):
    """Note that no work is left, also where there was less than was known."""
    if self._done < self._total:
      self._total = self._done
      self.add(0)

  def leave_out(self, seconds: float):
    """Take time that was spent on something else off the clock."""
    self._start += seconds

  def _say(self, now: float, note: str):
    if silent or not self._shown:
      return
    rate = (self._done - self._first) / max(now - self._start, 1e-9)
    left = (self._total - self._done) / rate if rate else 0.0
    over = self._done >= self._total
    time_ = f'in {duration(now - self._start)}' if over else f'{duration(left)} left'
    line = f'{self._label}: {self._done}/{self._total} {self._unit}, {rate:.1f}/s, {time_}'
    line += f' · {note}' if note and not over else ''
    if self._terminal:
      print('\r' + line[:119].ljust(self._width), end='\n' if over else '', file=self._stream, flush=True)
      self._width = min(len(line), 119)
    else:
      print(line, file=self._stream, flush=True)


def duration(seconds: float) -> str:
  """Return a time in words: 8 s, 2 min 5 s, 1 h 3 min."""
  seconds = int(seconds + 0.5)
  if seconds < 60:
    return f'{seconds} s'
  if seconds < 3600:
    return f'{seconds // 60} min {seconds % 60} s'
  return f'{seconds // 3600} h {seconds // 60 % 60} min'
