"""Signals of commands: SIGTERM ends them as Ctrl-C does, and either waits for what must be finished."""

from collections.abc import Callable, Iterator
import contextlib
import signal
import sys
import threading
from typing import Any

_SOON = 0.02  # seconds after which a dropped signal is sent again


class Ended(KeyboardInterrupt):
  """The process got SIGTERM."""


@contextlib.contextmanager
def handled() -> Iterator[None]:
  """Raise on SIGTERM, which schedulers send, as on Ctrl-C.

  Python drops what a handler raises inside a callback of the garbage collector, a finalizer or a weak reference, of
  which JAX has some. A signal whose exception is dropped is sent again until one comes through.
  """
  ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # and not ignored, as in the background
  with _handler(_raise, signal.SIGTERM, *[signal.SIGINT] * ours), _sent_again():
    yield


def _raise(number: int, _: Any = None):
  raise Ended if number == signal.SIGTERM else KeyboardInterrupt


@contextlib.contextmanager
def _sent_again() -> Iterator[None]:
  """Send a signal once more where Python drops its exception, a little later: then the callback is over."""
  before = sys.unraisablehook
  dropped: list[int] = []
  lock = threading.Lock()

  def send(number: int):
    with lock:  # whoever takes it off the list raises it: this thread, or the end of the block
      if number in dropped:
        dropped.remove(number)
        signal.pthread_kill(threading.main_thread().ident, number)

  def hook(unraisable: Any):
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
      return before(unraisable)
    number = signal.SIGTERM if isinstance(unraisable.exc_value, Ended) else signal.SIGINT
    dropped.append(number)
    timer = threading.Timer(_SOON, send, [number])
    timer.daemon = True
    timer.start()

  sys.unraisablehook = hook
  left: list[int] = []
  try:
    yield
  finally:
    sys.unraisablehook = before
    with lock:
      left, dropped[:] = dropped[:], []
  if left:
    _raise(left[0])


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
