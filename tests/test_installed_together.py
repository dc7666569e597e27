"""Libraries whose models and trainers are used beside this package install beside it, in today's versions."""

import pathlib
import re
import shutil
import subprocess

import pytest
from tiers import long_but

ROOT = pathlib.Path(__file__).parents[1]
UV = shutil.which('uv')
LIBRARIES = {  # the oldest version that would do
  'google-tunix': (0, 1, 7),
  'gemma': (4,),
  'keras-hub': (0, 32),
  'maxtext[tpu]': (0, 2, 5),
  'tpu-inference': (0, 32),
  'qwix': (0, 1, 2),
  'tokamax': (0, 0, 17),
}


def resolved(*packages: str, python: str) -> dict[str, tuple[int, ...]]:
  """Return the versions that are chosen for packages beside this one, the newest that go together."""
  options = '--no-python-downloads', '--no-header', '--no-annotate', '--python-version', python
  command = [UV, 'pip', 'compile', *options, '-', 'setup.py']
  done = subprocess.run(command, input='\n'.join(packages), capture_output=True, text=True, cwd=ROOT)
  if done.returncode and re.search('error sending request|dns error|[Cc]onnect', done.stderr):
    pytest.skip('no package index is reached')
  assert done.returncode == 0, done.stderr
  lines = re.findall(r'^([\w.-]+)(?:\[[^]]*\])?==([\d.]+)', done.stdout, re.MULTILINE)
  return {name: tuple(map(int, version.strip('.').split('.'))) for name, version in lines}


@pytest.mark.skipif(UV is None, reason='needs uv')
@pytest.mark.parametrize('library', long_but(LIBRARIES, ['google-tunix', 'gemma', 'keras-hub']))
def test_a_library_of_the_field_installs_beside_this_package(library):
  found = resolved(f'{library}>={".".join(map(str, LIBRARIES[library]))}', python='3.12')
  assert found['jax'] >= (0, 10) and found[library.partition('[')[0]] >= LIBRARIES[library]
  assert found.get('transformers', (5,)) >= (5,)  # a resolver may flee from a conflict to a version of old
