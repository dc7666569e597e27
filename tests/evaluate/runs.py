"""Runs for what is tested of them: a config of toys, commands in processes of their own, and shares of a run."""

from collections.abc import Callable
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

import toys

from speccascade import methods
from speccascade.evaluate import Curve, Experiment, runner
from speccascade.evaluate.shards import Shard
from speccascade.host.runs import RunDir

ROOT = pathlib.Path(__file__).parents[2]
GOOD = """
import toys
target/Curve.name = 'target only'
target/Curve.method = @methods.autoregressive
target/Curve.settings = {'model': 1}
opt/Curve.name = 'opt'
opt/Curve.method = @methods.speculative
opt/Curve.rule = @rules.opt
opt/Curve.parameter = 'alpha'
opt/Curve.values = [0.0, 0.5]
opt/Curve.settings = {'block': 2}
Experiment.task = @toys.task()
Experiment.models = @toys.models
Experiment.curves = [@target/Curve(), @opt/Curve()]
run.experiments = [@Experiment()]
"""
RUN = """
Experiment.quality_batch = 1
Experiment.trace_examples = 2
"""
TARGET = Curve('target only', methods.autoregressive, settings={'model': 1})
QUICK = Experiment(toys.task(3, 4), toys.models, [TARGET], temperatures=[0.0], quality_batch=1, trace_examples=1)


def written(folder: pathlib.Path, text: str = GOOD + RUN) -> pathlib.Path:
  """Write a config, and return its path."""
  path = folder / 'toy.gin'
  path.write_text(text)
  return path


def given(config: pathlib.Path, folder) -> list[str]:
  """Return the arguments of every run."""
  cache = os.path.join(tempfile.gettempdir(), 'speccascade-test-cache')
  return [f'--gin_file={config}', f'--run_dir={folder}', f'--compilation_cache={cache}']


def start(config: pathlib.Path, folder, *flags, before: str = '', cwd=None, **env) -> subprocess.Popen:
  """Start a run in a process of its own, in the folder `cwd`, `before` being code that it runs first."""
  paths = [str(ROOT), str(ROOT / 'tests' / 'evaluate')]
  env = os.environ | env | {'PYTHONPATH': os.pathsep.join(paths), 'JAX_PLATFORMS': 'cpu'}
  code = f"{before}\nimport runpy; runpy.run_module('speccascade.run', run_name='__main__', alter_sys=True)"
  command = [sys.executable, '-c', code, *given(config, folder), *flags]
  return subprocess.Popen(
    command, env=env, cwd=cwd or config.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
  )


def lines_in(path) -> int:
  """Return how many complete lines a journal has."""
  return RunDir(path.parent).count(path.name)


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
  out, err = process.communicate(timeout=300)
  return process.returncode, out, err


def wait_until(begun: Callable[[], Any], *processes: subprocess.Popen):
  """Wait until something has begun, while all of these processes run."""
  deadline = time.monotonic() + 120
  while not begun():
    ended = [finish(process) for process in processes if process.poll() is not None]
    assert not ended and time.monotonic() < deadline, ended
    time.sleep(0.002)


def share(experiment, folder, index, count=3, config='a = 1\n'):
  return runner.run([experiment], folder, config=config, shard=Shard(index, count))


def merge(experiment, folder, config='a = 1\n'):
  return runner.merge([experiment], folder, config=config)


def same_bytes(one: pathlib.Path, other: pathlib.Path):
  """Check that every file but those with a date in them, and the locks, is the same in both run directories."""
  dated = re.compile(r'curves/|lock$|shards/')

  def names(folder: pathlib.Path) -> set[str]:
    files = {str(p.relative_to(folder)) for p in folder.rglob('*') if p.is_file()}
    return {name for name in files if not dated.search(name)}

  assert names(one) == names(other) and len(names(one)) >= 10
  for name in names(one):
    assert (one / name).read_bytes() == (other / name).read_bytes(), name
