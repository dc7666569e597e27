"""What a process prints: on streams that have no reader or no room, and by loggers of others."""

from collections.abc import Iterator
import contextlib
import logging
import os
import select
import sys


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
