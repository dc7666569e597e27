"""A run's directory, on a disk or in a bucket: one process at a time, one config for life.

A bucket cannot be locked: there the journals show that two processes write one run.
"""

from collections.abc import Callable, Iterable, Iterator
import contextlib
import difflib
import functools
import json
from pathlib import Path
from typing import Any
import uuid

from speccascade.host import multihost, storage
from speccascade.host.errors import RunError
from speccascade.host.journal import GO_ON

CONFIG = 'config.gin'
OURS = {'environment.json', 'examples.jsonl', 'latency.jsonl', 'results.json'}
LOCK = 'lock'
SHARDS = 'shards'
READ = 'permit it, or choose another --run_dir'  # the remedy where something cannot be read


def by_writer(block: Callable[..., Iterator[None]]) -> Callable[..., contextlib.AbstractContextManager[None]]:
  """Make of a generator a context that the writer alone enters, as a decorator."""
  manager = contextlib.contextmanager(block)
  return functools.wraps(block)(lambda *args, **kwargs: multihost.on_writer(manager(*args, **kwargs)))


@by_writer
def locked(folder: Path, *, shared: bool = False) -> Iterator[None]:
  """Lock a run directory, made where there is none; `shared`, next to other processes that share it."""
  with storage.one_sentence(f'{folder} cannot be a run directory', 'choose another --run_dir'):
    storage.make_folder(folder)
    strangers = {name for name in storage.names(folder) if not storage.is_part(Path(name))} - {LOCK, SHARDS}
    if strangers and not (folder / CONFIG).exists():
      raise RunError(
        f'{folder} has a run whose {CONFIG} is gone: put it back, or choose another --run_dir.'
        if strangers & OURS
        else f'{folder} is not empty and no run directory (it has {min(strangers)}); choose another --run_dir.'
      )
  with owned(folder, 'choose another --run_dir', shared=shared):
    if not shared:
      clean(folder)
    yield


def owned(folder: Path, remedy: str, *, shared: bool = False) -> contextlib.AbstractContextManager[None]:
  """Lock a folder; in a bucket, which cannot be locked, only check that it can be written and name this process."""
  if not storage.in_bucket(folder):
    return storage.lock(folder / LOCK, remedy, shared=shared)
  _check_bucket(folder)
  write(folder / LOCK, storage.this_process())
  return contextlib.nullcontext()


def _check_bucket(folder):
  """Write, list, read and remove an object, as a run will do."""
  name = f'{LOCK}.{uuid.uuid4().hex[:8]}.part'
  remedy = 'permit all three, or choose another --run_dir'
  with storage.one_sentence(f'{folder} cannot be written, read and cleared', remedy):
    storage.create(folder / name, name.encode())
    if list(storage.contents(folder, [n for n in storage.objects(folder) if n == name])) != [name.encode()]:
      raise OSError(f'{name} was written, but reads differently')
    storage.remove(folder, [name])


def clean(folder: Path):
  """Remove what processes that were killed had not written to its end, but not what shards may be writing."""
  if storage.in_bucket(folder):
    return
  for part in filter(storage.is_part, folder.rglob('*.part')):
    if SHARDS not in part.relative_to(folder).parts:
      part.unlink(missing_ok=True)


def measured(folder: Path) -> bool:
  """Return whether a run has a line yet."""
  if storage.in_bucket(folder):
    return any(name.endswith('.jsonl') and about['size'] for name, about in storage.objects(folder).items())
  return any(journal.stat().st_size for journal in folder.rglob('*.jsonl'))


def exists(path: Path) -> bool:
  """Return whether a file of the run exists."""
  with storage.one_sentence(f'{path} cannot be read', READ):
    return multihost.once(path.exists)


def write(path: Path, content: str | bytes | Iterable[bytes]):
  """Write a file of the run atomically."""
  with storage.one_sentence(f'{path} cannot be written', GO_ON):
    multihost.once(lambda: storage.write(path, content))


def as_json(value: Any) -> str:
  """Return JSON for people and programs; NaN is refused, for few programs read it."""
  return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + '\n'


def write_json(path: Path, value: Any):
  """Write a JSON file of the run."""
  write(path, as_json(value))


def read(path: Path) -> str:
  """Return a text file of the run."""
  with storage.one_sentence(f'{path} cannot be read', READ):
    return path.read_bytes().decode('utf-8', 'replace')


def read_json(path: Path, valid: Callable[[Any], bool]) -> Any:
  """Return the checked value of a JSON file of the run, the list of lines of a .jsonl file."""
  text = read(path)
  try:  # only line feeds end a line: a text may hold other characters that end one elsewhere
    value = [json.loads(line) for line in text.split('\n') if line] if path.suffix == '.jsonl' else json.loads(text)
    if valid(value):
      return value
  except ValueError:
    pass
  raise RunError(f'{path} is damaged; delete it, and the same command makes it again.')


def write_config(folder: Path, config: str, *, begun: bool = False):
  """Write the config of a new run; refuse to go on with one that had another or has `begun`, and say what changed."""
  path = folder / CONFIG
  there = path.exists()
  if storage.in_bucket(folder) and not there:
    with contextlib.suppress(FileExistsError):  # another shard has begun meanwhile
      storage.create(path, config.encode())
  elif not there or not (begun or measured(folder)):
    write(path, config)  # there is nothing yet that another config could have made
  old = read(path).splitlines()
  new = config.splitlines()
  if old == new:
    return
  changes = [x for x in difflib.unified_diff(old, new, lineterm='', n=0) if x[:3] not in ('---', '+++', '@@ ')]
  shown = '\n'.join(f'  {x}' for x in changes[:20])
  raise RunError(
    f'{folder} has a run with another config; choose another --run_dir, or repeat the first command to resume it. '
    f'What changed (- then, + now):\n{shown}'
  )
