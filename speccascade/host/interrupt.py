"""Ctrl-C while a command imports its modules, which takes a second or two, prints a line and no traceback."""

import os
import signal
import sys


def leave(*_):
  """End the process."""
  os.write(2, b'interrupted\n')
  os._exit(130)


def while_importing():
  """Let Ctrl-C end a command of this package until `commands.run` begins; other programs keep their handler."""
  importing = sys.argv[:1] == ['-m'] and '-m' in sys.orig_argv  # as Python has it while it looks for a module
  asked = sys.orig_argv[sys.orig_argv.index('-m') + 1 :] if importing else []
  if asked and asked[0].split('.')[0] == __package__.split('.')[0]:
    signal.signal(signal.SIGINT, leave)
