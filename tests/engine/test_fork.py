"""A process that was forked after JAX had started says so, and one that was forked before decodes."""

import subprocess
import sys

import pytest

PROGRAM = """
import multiprocessing
import sys
import warnings
from speccascade import decode, methods
from speccascade.models import toy

def run(name):
  try:
    print(name, len(decode(methods.autoregressive(), [toy.model(0)], [[1]], max_new_tokens=4).tokens[0]), flush=True)
  except RuntimeError as error:
    print(name, error, flush=True)

def forked(name):
  child = multiprocessing.get_context('fork').Process(target=run, args=(name,))
  child.start()
  child.join(100)
  child.kill()

warnings.simplefilter('ignore')  # of JAX, of every fork
forked('before')
run('parent')
forked('after')
"""


@pytest.mark.long
def test_a_process_forked_after_decoding_says_that_it_cannot_decode():
  done = subprocess.run([sys.executable, '-c', PROGRAM], capture_output=True, text=True, check=True)
  before, parent, after = done.stdout.splitlines()
  assert (before, parent) == ('before 4', 'parent 4')
  assert after.startswith('after process ') and "get_context('spawn')" in after
