"""A run's directory, on a disk or in a bucket: one process at a time, one config for life.

Every file is written beside its place and renamed into it, or is an object of a bucket, which is whole or not there.
A bucket cannot be locked: there two processes of one run are found out by their journals.
"""

from collections.abc import Callable, Iterable, Iterator
import contextlib
import difflib
import fcntl
import json
import os
from pathlib import Path
import socket
from typing import Any
import uuid

from speccascade.host import buckets, disk, multihost
from speccascade.host.errors import RunError

CONFIG = 'config.gin'
OURS = {'environment.json', 'examples.jsonl', 'latency.jsonl', 'results.json'}
LOCK, SHARDS = 'lock', 'shards'


def locked(folder: Path, *, shared: bool = False) -> contextlib.AbstractContextManager[None]:
  """Hold a run directory for this process, making it where there is none; `shared`, beside others that share it."""
  return multihost.held(_locked(folder, shared))


@contextlib.contextmanager
def _locked(folder: Path, shared: bool) -> Iterator[None]:
  with told(f'{folder} cannot be a run directory', 'choose another --run_dir'):
    disk.make(folder)
    strangers = {name for name in disk.names(folder) if name not in (LOCK, SHARDS) and not disk.is_part(Path(name))}
    if strangers and not (folder / CONFIG).exists():
      raise RunError(
        f'{folder} holds a run whose {CONFIG} is gone: put it back, or choose another --run_dir.'
        if strangers & OURS
        else f'{folder} is not empty and no run directory (it has {min(strangers)}); choose another --run_dir.'
      )
  with owned(folder, 'choose another --run_dir', shared=shared):
    if not shared:
      clean(folder)
    yield


@contextlib.contextmanager
def owned(folder: Path, remedy: str, *, shared: bool = False) -> Iterator[None]:
  """Hold a folder for this process by its lock, which the system releases with the process; in a bucket only say so."""
  owner = f'process {os.getpid()} on {socket.gethostname()}\n'
  if buckets.inside(folder):
    _check_bucket(folder)
    write(folder / LOCK, owner)
    yield
    return
  with told(f'{folder} cannot be written', remedy):
    disk.make(folder)
    handle = open(folder / LOCK, 'a+', opener=disk.unlinked)
  with handle:
    try:
      fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
      handle.seek(0)
      other = handle.read().strip() or 'another process'
      raise RunError(f'{folder} is in use by {other}; wait for it, stop it, or {remedy}.') from None
    with told(f'{handle.name} cannot be written', 'free some space'):
      handle.truncate(0)
      handle.write(owner)
      handle.flush()
    yield


def _check_bucket(folder):
  """Write, find, read and remove an object, all of which a run comes to do."""
  name = f'{LOCK}.{uuid.uuid4().hex[:8]}.part'
  with told(f'{folder} cannot be written, read and cleared', 'permit all three, or choose another --run_dir'):
    buckets.create(folder / name, name.encode())
    if list(buckets.contents(folder, [n for n in buckets.files(folder) if n == name])) != [name.encode()]:
      raise OSError(f'{name} was written, but is not found as it was')
    buckets.remove(folder, [name])


def clean(folder: Path):
  """Remove what processes that were killed had not written to its end, but not what shards may be writing."""
  if buckets.inside(folder):
    return
  for part in filter(disk.is_part, folder.rglob('*.part')):
    if SHARDS not in part.relative_to(folder).parts:
      part.unlink(missing_ok=True)


def measured(folder: Path) -> bool:
  """Tell whether a run has a line yet."""
  if buckets.inside(folder):
    return any(name.endswith('.jsonl') and about['size'] for name, about in buckets.files(folder).items())
  return any(journal.stat().st_size for journal in folder.rglob('*.jsonl'))


@contextlib.contextmanager
def told(what: str, remedy: str) -> Iterator[None]:
  """Turn a failure of the file system into one line with its remedy."""
  try:
    with buckets.reached():
      yield
  except OSError as error:
    reason = ' '.join(str(error.strerror or error).split())  # a bucket's may have lines
    raise RunError(f'{what}: {reason}; {remedy}.') from error


def exists(path: Path) -> bool:
  """Tell whether a file of the run is there."""
  with told(f'{path} cannot be read', 'permit it, or choose another --run_dir'):
    return multihost.once(path.exists)


def write(path: Path, content: str | bytes | Iterable[bytes]):
  """Write a file of the run so that it is there whole or not at all."""
  with told(f'{path} cannot be written', 'free some space or permit it, then run the same command to go on'):
    multihost.once(lambda: disk.write(path, content))


def as_json(value: Any) -> str:
  """Return JSON for people and programs; NaN is refused, for few programs read it."""
  return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + '\n'


def write_json(path: Path, value: Any):
  """Write a JSON file of the run."""
  write(path, as_json(value))


def read(path: Path) -> str:
  """Return a text file of the run."""
  with told(f'{path} cannot be read', 'permit it, or choose another --run_dir'):
    return path.read_bytes().decode('utf-8', 'replace')


def read_json(path: Path, valid: Callable[[Any], bool]) -> Any:
  """Return what a JSON file of the run holds, or the list of what a .jsonl file does, having checked it."""
  text = read(path)
  try:  # only line feeds end a line: a text may hold other characters that end one elsewhere
    value = [json.loads(line) for line in text.split('\n') if line] if path.suffix == '.jsonl' else json.loads(text)
    if valid(value):
      return value
  except ValueError:
    pass
  raise RunError(f'{path} is damaged; delete it, and the same command makes it anew.')


def keep_config(folder: Path, config: str, *, begun: bool = False):
  """Write the config of a new run; refuse to go on with one that had another or has `begun`, and say what changed."""
  path = folder / CONFIG
  there = path.exists()
  if buckets.inside(folder) and not there:
    with contextlib.suppress(FileExistsError):  # another shard has begun meanwhile
      buckets.create(path, config.encode())
  elif not there or not (begun or measured(folder)):
    write(path, config)  # there is nothing yet that another config could have made
  old, new = read(path).splitlines(), config.splitlines()
  if old == new:
    return
  changes = [x for x in difflib.unified_diff(old, new, lineterm='', n=0) if x[:3] not in ('---', '+++', '@@ ')]
  shown = '\n'.join(f'  {x}' for x in changes[:20])
  raise RunError(
    f'{folder} holds a run with another config; choose another --run_dir, or repeat the first command to go on. '
    f'What changed (- then, + now):\n{shown}'
  )
