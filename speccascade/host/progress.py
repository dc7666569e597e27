"""Progress on standard error: a line that updates on a terminal, else a line now and then."""

import os
import shutil
import sys
import warnings

try:
  import tqdm
except ValueError as error:  # a setting of the environment that is no number
  for name in [name for name in os.environ if name.startswith('TQDM_')]:
    del os.environ[name]
  warnings.warn(f'settings TQDM_… of the environment are ignored: {error}', stacklevel=2)
  import tqdm

EVERY = 20.0  # seconds between lines where there is no terminal
silent = False  # in all processes but the first of several


class Progress(tqdm.tqdm):
  """A bar of tqdm without the bar: counts, the rate, the time left and a note."""

  monitor_interval = 0  # no thread

  def __init__(
    self,
    label: str,
    total: int,
    done: int = 0,
    *,
    unit: str = 'examples',
    stream=None,
    shown: bool = True,
    budget: float | None = None,
  ):
    stream = stream or sys.stderr
    terminal = stream.isatty()
    left = '<{remaining}, {rate_noinv_fmt}' if budget is None else f', budget {self.format_interval(budget)}'
    super().__init__(
      desc=label,
      total=total,
      initial=done,
      unit=f' {unit}',
      bar_format=f'{{desc}}: {{n_fmt}}/{{total_fmt}}{{unit}} [{{elapsed}}{left}{{postfix}}]',
      file=stream if terminal else _Lines(stream),
      leave=terminal,
      ncols=shutil.get_terminal_size().columns if terminal else None,
      mininterval=0.1 if terminal else EVERY,
      miniters=1,
      smoothing=0,  # the rate since the start
      delay=0 if terminal else 1e-9,  # no line before there is something to report
      disable=silent or not shown,
    )

  def add(self, count: int, note: str = ''):
    """Count finished work; the last of it is always shown."""
    self.set_postfix_str(note, refresh=False)
    if not self.update(count) and self.n >= self.total:
      self.refresh()

  def expect(self, count: int):
    """Raise the total by more work."""
    self.total += count

  def end(self):
    """Report that no work is left, also where there was less than the total."""
    if 0 < self.n < self.total:
      self.total = self.n
      self.refresh()
    self.close()

  def leave_out(self, seconds: float):
    """Leave time that was spent on something else out of the rate."""
    if not self.disable:
      self.start_t += seconds
      self.last_print_t += seconds


class _Lines:
  """Writes each state of a bar as a line of its own."""

  def __init__(self, stream):
    self._stream = stream

  def write(self, text: str):
    if text := text.replace('\x1b[A', '').strip():  # by which tqdm goes up from a bar below another
      self._stream.write(f'{text}\n')

  def flush(self):
    self._stream.flush()
