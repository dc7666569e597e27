"""A signal ends a command wherever it arrives, also where Python drops what its handler raises."""

import gc
import signal
import subprocess
import sys
import time
import weakref

import pytest

from speccascade.host import interrupt

ENDS = [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, interrupt.Ended)]


def in_a_callback_of_gc(send):
  def callback(phase, _):
    gc.callbacks.remove(callback)
    send()

  gc.callbacks.append(callback)
  gc.collect()


def in_a_finalizer(send):
  class Object:
    def __del__(self):
      send()

  del (x := [Object()])[0], x


def in_a_weak_reference(send):
  class Object:
    pass

  made = Object()
  reference = weakref.ref(made, lambda _: send())
  del made
  return reference


PLACES = (lambda send: send(), in_a_callback_of_gc, in_a_finalizer, in_a_weak_reference)


@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize(('number', 'ended'), ENDS)
@pytest.mark.parametrize('place', PLACES)
def test_a_signal_ends_what_runs_wherever_it_arrives(place, number, ended, capsys):
  before = [signal.getsignal(n) for n, _ in ENDS], sys.unraisablehook
  with pytest.raises(KeyboardInterrupt) as found, interrupt.handled():
    place(lambda: signal.raise_signal(number))
    time.sleep(5)
    pytest.fail('it went on')
  assert found.type is ended and not capsys.readouterr().err
  assert before == ([signal.getsignal(n) for n, _ in ENDS], sys.unraisablehook)


@pytest.mark.parametrize('place', PLACES[1:])
def test_a_signal_that_comes_at_the_end_is_raised_there(place):
  with pytest.raises(interrupt.Ended), interrupt.handled():
    place(lambda: signal.raise_signal(signal.SIGTERM))
  time.sleep(0.1)  # nothing is sent once the handlers are gone: it would end this process


def test_what_else_is_dropped_is_shown_as_before(monkeypatch):
  shown = []
  monkeypatch.setattr(sys, 'unraisablehook', lambda x: shown.append(x.exc_type))
  with interrupt.handled():
    in_a_finalizer(lambda: 1 / 0)
  assert shown == [ZeroDivisionError]


def test_a_command_whose_signal_jax_drops_exits_with_143():
  code = """
import argparse, gc, os, signal, sys, time
import jax
from speccascade.host import commands
from jax._src.lib import _xla_gc_callback

def command(args):
  inside = next(f for f in gc.callbacks if f is _xla_gc_callback)
  at = gc.callbacks.index(inside)
  def killed(*given):
    gc.callbacks[at] = inside
    os.kill(os.getpid(), signal.SIGTERM)
  gc.callbacks[at] = killed
  gc.collect()
  time.sleep(30)

sys.exit(commands.run(commands.Parser('x', 'x'), command, [], 'stopped'))
"""
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=25)
  assert (done.returncode, done.stderr) == (143, 'stopped\n')
