"""What a process prints: on streams that are closed, have no reader or cannot encode it, and by loggers of others."""

from collections.abc import Iterator
import contextlib
import io
import logging
import os
import select
import sys


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
