"""Signals of commands: SIGTERM ends them as Ctrl-C does, and either waits for what must be finished."""

from collections.abc import Callable, Iterator
import contextlib
import signal
import threading


class Ended(KeyboardInterrupt):
  """The process got SIGTERM."""


@contextlib.contextmanager
def handled() -> Iterator[None]:
  """Raise on SIGTERM, which schedulers send, as on Ctrl-C."""

  def end(*_):
    raise Ended

  with _handler(end, signal.SIGTERM):
    yield


@contextlib.contextmanager
def deferred() -> Iterator[None]:
  """Defer Ctrl-C and SIGTERM to the end of the block: numpy and Orbax lose exceptions that handlers raise."""
  received = []
  try:
    with _handler(lambda number, _: received.append(number), signal.SIGINT, signal.SIGTERM):
      yield
  finally:
    if received:
      signal.raise_signal(received[0])


@contextlib.contextmanager
def _handler(handler: Callable, *numbers: int) -> Iterator[None]:
  """Handle signals by a function, in the main thread, which alone runs handlers."""
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  before = {number: signal.signal(number, handler) for number in numbers}
  try:
    yield
  finally:
    for number, old in before.items():
      signal.signal(number, signal.SIG_DFL if old is None else old)
