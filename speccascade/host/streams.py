"""What a process prints: on streams that are closed, have no reader or cannot encode it, and by loggers of others."""

from collections.abc import Callable, Iterator
import contextlib
import io
import logging
import os
import select
import sys
from typing import Any, TextIO


@contextlib.contextmanager
def prepared() -> Iterator[None]:
  """Let a command print whatever the standard streams are, and write what it printed at the end.

  A stream that is closed becomes the null device, so that no other file gets its number; `sys.stdout` stays None.
  """
  for number in range(3):
    try:
      os.fstat(number)
    except OSError:
      os.open(os.devnull, os.O_RDWR)  # which gets the lowest free number, this one
  if sys.stderr is None:
    sys.stderr = open(os.devnull, 'w')
  out = sys.stdout
  strict = isinstance(out, io.TextIOWrapper) and out.errors in ('strict', 'surrogateescape')
  errors = out.errors if strict else None
  if strict:
    out.reconfigure(errors='backslashreplace')
  try:
    try:
      yield
    except SystemExit:
      flush()
      raise
    flush()
  finally:
    if strict:
      out.reconfigure(errors=errors)


class _Lossy:
  """A stream that drops what cannot be written: what it reports is not worth the end of a run."""

  def __init__(self, stream: TextIO):
    self._stream = stream

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)

  def write(self, text: str) -> int:
    return self._tried(self._stream.write, text) or 0

  def flush(self):
    self._tried(self._stream.flush)

  def _tried(self, function: Callable, *given: str) -> Any:
    try:
      return function(*given)
    except BrokenPipeError:  # nobody reads it: the command ends as other tools do
      raise
    except OSError:
      os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


@contextlib.contextmanager
def lossy() -> Iterator[None]:
  """Let work go on where standard error cannot be written, as on a full disk; from then on nothing is."""
  before = sys.stderr
  if before is not None:
    sys.stderr = _Lossy(before)
  try:
    yield
  finally:
    sys.stderr = before


def flush():
  """Write what was printed."""
  for stream in filter(None, (sys.stdout, sys.stderr)):
    stream.flush()


def unread() -> bool:
  """Tell whether nobody reads a standard stream any more, as in `COMMAND | head`."""
  poll = select.poll()
  for number in (1, 2):
    poll.register(number, 0)
  return any(event & select.POLLERR for _, event in poll.poll(0))


def discard():
  """Discard what a standard stream cannot write, which Python would try again at its exit."""
  for stream in filter(None, (sys.stdout, sys.stderr)):
    try:
      stream.flush()
    except OSError:
      os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def errors_alone(logger: str) -> Iterator[None]:
  """Let a logger of another package report nothing but errors."""
  logger = logging.getLogger(logger)
  level = logger.level
  logger.setLevel(logging.ERROR)
  try:
    yield
  finally:
    logger.setLevel(level)
