"""Compiled programs in a folder: a damaged one is replaced, and a copy of the folder serves as the folder does."""

import shutil
import subprocess
import sys

PROGRAM = """
import sys
import jax
import speccascade

speccascade.compilation_cache(sys.argv[1])
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith('cache_hits') else None)
print(jax.jit(lambda x: x * 3)(2), len(hits))
"""


def run(folder) -> tuple[str, str]:
  """Return what a process prints that multiplies, with the programs that it reads, and what it warns of."""
  done = subprocess.run([sys.executable, '-c', PROGRAM, str(folder)], capture_output=True, text=True, check=True)
  return done.stdout.strip(), done.stderr


def test_a_damaged_program_is_replaced_and_a_copy_is_used(tmp_path):
  folder = tmp_path / 'cache'
  assert run(folder) == ('6 0', '')
  [entry] = folder.glob('*-cache')
  sound = entry.stat().st_size
  entry.write_bytes(entry.read_bytes()[: sound // 2])
  printed, warned = run(folder)
  assert printed == '6 0' and 'cache entry' in warned
  assert entry.stat().st_size > sound * 0.9
  shutil.move(folder, tmp_path / 'moved')
  assert run(tmp_path / 'moved') == ('6 1', '')
