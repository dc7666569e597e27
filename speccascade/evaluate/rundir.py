"""A run's directory: one process at a time, one config for life, and journals that a killed run goes on with.

A journal has one JSON object a line and is only ever appended to, whole batches at a time; whoever opens it again cuts
off a line that was not finished. Every other file is written beside its place and renamed into it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import difflib
import fcntl
import json
import os
from pathlib import Path
import socket
from typing import Any

from speccascade import disk
from speccascade.errors import RunError

CONFIG = 'config.gin'
OURS = {'environment.json', 'examples.jsonl', 'latency.jsonl', 'results.json'}
LOCK = 'lock'


@contextlib.contextmanager
def locked(folder: Path):
  """Hold a run directory for this process, making it where there is none; the system releases it with the process."""
  with told(f'{folder} cannot be a run directory', 'choose another --run_dir'):
    folder.mkdir(parents=True, exist_ok=True)
    strangers = {p.name for p in folder.iterdir() if p.name != LOCK and not disk.is_part(p)}
    if strangers and not (folder / CONFIG).exists():
      raise RunError(
        f'{folder} holds a run whose {CONFIG} is gone: put it back, or choose another --run_dir.'
        if strangers & OURS
        else f'{folder} is not empty and no run directory (it has {min(strangers)}); choose another --run_dir.'
      )
    handle = open(folder / LOCK, 'a+')
  with handle:
    try:
      fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      handle.seek(0)
      owner = handle.read().strip() or 'another process'
      raise RunError(f'{folder} is in use by {owner}; wait for it, stop it, or choose another --run_dir.') from None
    with told(f'{handle.name} cannot be written', 'free some space'):
      handle.truncate(0)
      handle.write(f'process {os.getpid()} on {socket.gethostname()}\n')
      handle.flush()
      for part in filter(disk.is_part, folder.rglob('*.part')):  # of a process that was killed
        part.unlink()
    yield


@contextlib.contextmanager
def told(what: str, remedy: str):
  """Turn a failure of the file system into one line with its remedy."""
  try:
    yield
  except OSError as error:
    raise RunError(f'{what}: {error.strerror or error}; {remedy}.') from error


def write(path: Path, content: str | bytes):
  """Write a file of the run so that it is there whole or not at all."""
  with told(f'{path} cannot be written', 'free some space or permit it, then run the same command to go on'):
    disk.write(path, content)


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


def keep_config(folder: Path, config: str):
  """Write the config of a new run; refuse to go on with a run that had another one, and say what changed."""
  path = folder / CONFIG
  if not path.exists() or not any(journal.stat().st_size for journal in folder.rglob('*.jsonl')):
    write(path, config)  # there is nothing yet that another config could have made
    return
  old, new = read(path).splitlines(), config.splitlines()
  if old == new:
    return
  changes = [x for x in difflib.unified_diff(old, new, lineterm='', n=0) if x[:3] not in ('---', '+++', '@@ ')]
  shown = '\n'.join(f'  {x}' for x in changes[:20])
  raise RunError(
    f'{folder} holds a run with another config; choose another --run_dir, or repeat the first command to go on. '
    f'What changed (- then, + now):\n{shown}'
  )


class Journal:
  """The lines of a protocol in a fixed order, each with these fields, of which a killed run has left the first ones."""

  def __init__(self, path: Path, fields: Iterable[str] = ()):
    self.path, self._fields = path, frozenset(fields)
    self.count = self._recover()
    with told(f'{path} cannot be opened', 'permit it, or choose another --run_dir'):
      self._file = open(path, 'ab', buffering=0)

  def _recover(self) -> int:
    """Return how many lines are whole; cut off what follows them."""
    if not self.path.exists():
      return 0
    count = good = 0
    with told(f'{self.path} cannot be read', 'permit it, or choose another --run_dir'):
      with open(self.path, 'rb') as f:
        for line in f:
          if not self._is_record(line):
            break
          count += 1
          good += len(line)
        else:
          return count
        if f.read(1):
          raise RunError(f'{self.path}: line {count + 1} is damaged; delete the file to measure anew.')
      os.truncate(self.path, good)
    return count

  def lines(self) -> Iterator[dict]:
    """Yield the lines, which may be more than memory holds."""
    with told(f'{self.path} cannot be read', 'permit it, or choose another --run_dir'):
      with open(self.path, encoding='utf-8') as f:
        yield from map(json.loads, f)

  def append(self, records: Iterable[dict]):
    """Add lines, and return when the disk has them."""
    records = list(records)
    data = ''.join(json.dumps(r, ensure_ascii=False, allow_nan=False) + '\n' for r in records).encode()
    with told(f'{self.path} cannot be written', 'free some space, then run the same command to go on'):
      while data:
        data = data[os.write(self._file.fileno(), data) :]
      os.fsync(self._file.fileno())
    self.count += len(records)

  def agree(self, keys: Sequence[str], plan: Sequence[tuple]):
    """Check that the lines left by a killed run are the first ones of the plan."""
    same = all(tuple(line.get(k) for k in keys) == tuple(p) for line, p in zip(self.lines(), plan, strict=False))
    if not same or self.count > len(plan):
      raise RunError(f'{self.path} has lines of another run; choose another --run_dir to start anew.')

  def close(self):
    """Close the file."""
    self._file.close()

  def _is_record(self, line: bytes) -> bool:
    try:
      record = json.loads(line)
    except ValueError:
      return False
    return line.endswith(b'\n') and isinstance(record, dict) and self._fields <= record.keys()
