"""Compiled programs in a folder: a damaged one is replaced, and a copy of the folder serves as the folder does."""

import shutil
import subprocess
import sys

import pytest

PROGRAM = """
import pathlib
import sys
import jax
import speccascade

folder, damages = sys.argv[1:]
speccascade.compilation_cache(folder)
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith('cache_hits') else None)
multiplied = lambda: print(jax.jit(lambda x: x * 3)(2), len(hits))
multiplied()
if damages == 'True':
  [entry] = pathlib.Path(folder).glob('*-cache')
  sound = entry.stat().st_size
  entry.write_bytes(entry.read_bytes()[: sound // 2])
  jax.clear_caches()
  multiplied()
  assert entry.stat().st_size > sound * 0.9
"""


def run(folder, damages: bool) -> tuple[str, str]:
  """Return what a process prints that multiplies, with the programs that it reads, and what it warns of."""
  command = [sys.executable, '-c', PROGRAM, str(folder), str(damages)]
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  return done.stdout, done.stderr


@pytest.mark.long
def test_a_damaged_program_is_replaced_and_a_copy_is_used(tmp_path):
  printed, warned = run(tmp_path / 'cache', True)
  assert printed == '6 0\n6 0\n' and warned.count('cache entry') == 1
  shutil.move(tmp_path / 'cache', tmp_path / 'moved')
  assert run(tmp_path / 'moved', False) == ('6 1\n', '')
