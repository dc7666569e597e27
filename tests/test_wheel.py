"""A wheel, installed where nothing else of this clone is seen, runs the default and finds the gin files that ship."""

import email
import os
from pathlib import Path
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile

import pytest

import speccascade

ROOT = Path(__file__).parents[1]
PARTS = ('speccascade', 'gin_configs', 'setup.py', 'pyproject.toml', 'README.md', 'LICENSE')
SHORT = (
  '--gin.Experiment.curves=opt(alpha=[0.3])',
  '--gin.Experiment.quality_examples=2',
  '--gin.Experiment.latency_examples=0',
  '--gin.Experiment.trace_examples=1',
  '--gin.Experiment.temperatures=[0.0]',
)


def call(*command, **settings) -> str:
  """Run a command and return what it printed, errors included."""
  done = subprocess.run(
    list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **settings
  )
  assert done.returncode == 0, done.stdout
  return done.stdout


@pytest.fixture(scope='module')
def wheel(tmp_path_factory) -> Path:
  """Build from a copy, which the build may write into."""
  copy = tmp_path_factory.mktemp('clone')
  for part in PARTS:
    if (ROOT / part).is_dir():
      shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns('__pycache__'))
    else:
      shutil.copyfile(ROOT / part, copy / part)
  pip = (sys.executable, '-m', 'pip', 'wheel', '-q', '--no-deps', '--no-build-isolation')
  call(*pip, '-w', copy / 'dist', copy)
  (file,) = (copy / 'dist').glob('*.whl')
  return file


@pytest.fixture(scope='module')
def installed(wheel, tmp_path_factory) -> Path:
  """Return the Python of an environment with the wheel, and with the packages here, but not this clone."""
  folder = tmp_path_factory.mktemp('environment')
  venv.create(folder, with_pip=False)
  python = folder / 'bin' / 'python'
  call(sys.executable, '-m', 'pip', '--python', python, 'install', '-q', '--no-deps', '--no-index', wheel)
  (site,) = folder.glob('lib/python*/site-packages')
  (site / 'here.pth').write_text(sysconfig.get_path('purelib') + '\n')
  return python


def environment() -> dict[str, str]:
  """Return the environment of a user's shell: no path to this clone, no word on what device to use."""
  return {k: v for k, v in os.environ.items() if k not in ('PYTHONPATH', 'JAX_PLATFORMS')}


@pytest.mark.long
def test_the_default_runs_from_another_folder_and_gin_files_have_the_names_that_they_have_here(installed, tmp_path):
  (tmp_path / 'mine.gin').write_text("include 'families/sums.gin'\n")
  code = """
import speccascade
from speccascade.evaluate import config
print(speccascade.__file__)
for name in ('mine.gin', 'gin_configs/runs/multi30k_table2.gin', 'runs/gsm8k_cos.gin'):
  print(len(config.parse([name])))
"""
  where, *lengths = call(installed, '-c', code, cwd=tmp_path, env=environment()).splitlines()
  assert where.startswith(str(installed.parents[1]))
  assert len(lengths) == 3 and all(int(length) > 1000 for length in lengths)
  cache = os.path.join(tempfile.gettempdir(), 'speccascade-test-cache')
  command = (installed, '-m', 'speccascade.run', *SHORT, f'--compilation_cache={cache}')
  out = call(*command, cwd=tmp_path, env=environment())
  (run,) = (tmp_path / 'runs').iterdir()
  assert (run / 'report.html').is_file() and 'quality: 4/4 examples' in out
  assert 'Unable to initialize backend' not in out  # what JAX says of chips that are not there


def test_the_wheel_says_what_an_index_shows(wheel):
  with zipfile.ZipFile(wheel) as archive:
    names = archive.namelist()
    (metadata,) = (name for name in names if name.endswith('.dist-info/METADATA'))
    said = email.message_from_bytes(archive.read(metadata))
  text = said.get_payload(decode=True).decode()
  assert said['Description-Content-Type'] == 'text/markdown' and text.startswith('# speccascade')
  assert '](docs/' not in text and 'docs/methods.md' in text
  assert {*said.get_all('Provides-Extra')} >= {'seqio', 'cuda', 'tpu', 'k8s', 'parity', 'test', 'dev'}
  shipped = {name.removeprefix('speccascade/') for name in names if name.startswith('speccascade/gin_configs/')}
  assert shipped == {p.relative_to(ROOT).as_posix() for p in (ROOT / 'gin_configs').rglob('*.gin')}
  assert said['Version'] == speccascade.__version__ and 'speccascade/py.typed' in names
  assert not any(name.startswith(('tests', 'gin_configs')) for name in names)
