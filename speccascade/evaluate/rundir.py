"""The run directory of experiments: one process at a time, or its shards, and one config for life."""

from collections.abc import Iterator
import contextlib
import difflib
from pathlib import Path

from speccascade.host import storage
from speccascade.host.errors import RunError
from speccascade.host.runs import LOCK, RunDir, SHARDS

CONFIG = 'config.gin'
OURS = {'environment.json', 'examples.jsonl', 'latency.jsonl', 'results.json'}


def check(run: RunDir):
  """Refuse a folder of something else."""
  strangers = {name for name in run.names() if not storage.is_part(Path(name))} - {LOCK, SHARDS}
  if strangers and not run.exists(CONFIG):
    raise RunError(
      f'{run} has a run whose {CONFIG} is gone: put it back, or {run.elsewhere}.'
      if strangers & OURS
      else f'{run} is not empty and no run directory (it has {min(strangers)}); {run.elsewhere}.'
    )


@contextlib.contextmanager
def locked(run: RunDir) -> Iterator[None]:
  """Lock a run directory, made where there is none."""
  check(run)
  with run.locked():
    run.clean()
    yield


def write_config(run: RunDir, config: str):
  """Write the config of a new run; refuse to go on with one that had another, and say what changed."""
  if not run.exists(CONFIG) or not run.measured():  # nothing yet that another config could have made
    run.write(CONFIG, config)
  old = run.read(CONFIG).splitlines()
  new = config.splitlines()
  if old == new:
    return
  changes = [x for x in difflib.unified_diff(old, new, lineterm='', n=0) if x[:3] not in ('---', '+++', '@@ ')]
  shown = '\n'.join(f'  {x}' for x in changes[:20])
  raise RunError(
    f'{run} has a run with another config; {run.elsewhere}, or repeat the first command to resume it. '
    f'What changed (- then, + now):\n{shown}'
  )
