"""Signals of commands: SIGTERM ends them as Ctrl-C does, and neither is lost."""

from collections.abc import Iterator
import contextlib
import os
import signal
import sys
import threading

AGAIN = 0.05  # seconds


class Ended(KeyboardInterrupt):
  """The process got SIGTERM."""


@contextlib.contextmanager
def handled() -> Iterator[None]:
  """Raise on SIGTERM, which schedulers send, as on Ctrl-C; send either again where Python drops what it raised.

  Python drops an exception in a callback of the garbage collector or of a weak reference, and in `__del__`.
  """

  def end(*_):
    raise Ended

  def dropped(lost):
    if not isinstance(lost.exc_value, KeyboardInterrupt):
      report(lost)
      return
    number = signal.SIGTERM if isinstance(lost.exc_value, Ended) else signal.SIGINT
    again = threading.Timer(AGAIN, signal.pthread_kill, (threading.main_thread().ident, number))
    again.daemon = True
    again.start()

  if threading.current_thread() is not threading.main_thread():  # Python allows no handler here
    yield
    return
  before, report = signal.signal(signal.SIGTERM, end), sys.unraisablehook
  sys.unraisablehook = dropped
  try:
    yield
  finally:
    sys.unraisablehook = report
    signal.signal(signal.SIGTERM, before)


def leave(*_):
  """End the process while it imports its modules, which takes a second or two, with a line and no traceback."""
  os.write(2, b'interrupted\n')
  os._exit(130)


def while_importing():
  """Let Ctrl-C end a command of this package until `commands.run` begins; other programs keep their handler."""
  importing = sys.argv[:1] == ['-m'] and '-m' in sys.orig_argv  # as Python has it while it looks for a module
  asked = sys.orig_argv[sys.orig_argv.index('-m') + 1 :] if importing else []
  if asked and asked[0].split('.')[0] == __package__.split('.')[0]:
    signal.signal(signal.SIGINT, leave)
