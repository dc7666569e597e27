"""What a process prints, on standard streams and by loggers of other packages."""

from collections.abc import Iterator
import contextlib
import logging
import os
import sys


def flush():
  """Write what was printed."""
  for stream in filter(None, (sys.stdout, sys.stderr)):
    stream.flush()


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
