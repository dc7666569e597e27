"""The launch files parse, and each starts every shard once with a command line that the runner takes."""

import os
import pathlib
import shlex
import subprocess
import tempfile

import pytest
import yaml

from speccascade import run

LAUNCH = pathlib.Path(__file__).parents[1] / 'scripts' / 'launch'
ARGUMENTS = ['--gin_file=my runs/x.gin', '--run_dir=runs/x', "--gin.SMALL='/my data'"]
STUB = '#!/usr/bin/env bash\n'


@pytest.fixture
def called(tmp_path):
  """Return a function that runs a command where programs only note how they were called, and returns those calls."""
  programs = {
    'python': 'printf "%q " "$@" > "$CALLS/$$"',  # a file each: shards run side by side
    'srun': 'while [[ $1 == -* ]]; do shift; done; exec "$@"',
    'xpk': 'for a in "$@"; do case $a in --command=*) exec bash -c "${a#--command=}";; esac; done; exit 1',
  }
  for name, text in programs.items():
    (tmp_path / name).write_text(STUB + text + '\n')
    (tmp_path / name).chmod(0o755)

  def call(*command, **env) -> list[list[str]]:
    calls = pathlib.Path(tempfile.mkdtemp(dir=tmp_path))
    env = os.environ | env | {'PATH': f'{tmp_path}{os.pathsep}{os.environ["PATH"]}', 'CALLS': str(calls)}
    subprocess.run(command, env=env, check=True, timeout=60)
    return [shlex.split(file.read_text()) for file in calls.iterdir()]

  return call


def shards(calls: list[list[str]]) -> list[tuple[int, int]]:
  """Return which shards were started, having parsed the command lines."""
  found = []
  for program in calls:
    assert program[:2] == ['-m', 'speccascade.run']
    parser = run._parser()
    args = parser.parse_args(list(map(parser.spelled, program[2:])))
    assert args.gin_file and args.run_dir
    found.append(args.shard)
  return sorted(found)


def test_a_shell_starts_every_shard(called):
  calls = called(LAUNCH / 'shell.sh', *ARGUMENTS, SHARDS='3')
  assert shards(calls) == [(0, 3), (1, 3), (2, 3)] and all(call[2:-1] == ARGUMENTS for call in calls)


def test_an_array_of_slurm_starts_a_shard_each_and_those_that_are_missing(called):
  script = LAUNCH / 'slurm_array.sh'
  slurm = lambda i, **env: called(script, *ARGUMENTS, SLURM_ARRAY_TASK_ID=str(i), SLURM_ARRAY_TASK_COUNT='2', **env)
  assert [*shards(slurm(0)), *shards(slurm(1))] == [(0, 2), (1, 2)]
  assert shards(slurm(5, SHARDS='8')) == [(5, 8)]


def test_hosts_of_slurm_start_one_program_each(called):
  (call,) = called(LAUNCH / 'slurm_hosts.sh', *ARGUMENTS)
  assert shards([call]) == [None] and call[2:] == [*ARGUMENTS, '--distributed']


def test_xpk_starts_a_workload_for_each(called):
  env = dict(CLUSTER='mine', TPU='v5litepod-4', IMAGE='image', SHARDS='3')
  calls = called(LAUNCH / 'xpk.sh', *ARGUMENTS, **env)
  assert shards(calls) == [(0, 3), (1, 3), (2, 3)] and calls[0][2:-1] == ARGUMENTS
  assert shards(called(LAUNCH / 'xpk.sh', *ARGUMENTS, **env, ONLY='0 2')) == [(0, 3), (2, 3)]


def test_an_indexed_job_starts_as_many_as_it_says(called):
  job = yaml.safe_load((LAUNCH / 'gke_indexed_job.yaml').read_text())['spec']
  (container,) = job['template']['spec']['containers']
  count = job['completions']
  assert job['completionMode'] == 'Indexed' and job['parallelism'] == count
  found = [
    shard
    for i in range(count)
    for shard in shards(called(*container['command'], *container['args'], JOB_COMPLETION_INDEX=str(i)))
  ]
  assert found == [(i, count) for i in range(count)]
