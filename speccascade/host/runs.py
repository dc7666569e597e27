"""The folder of a run, on a disk or in a bucket: whole files, journals and a lock, for one process or for several.

Of several processes the first one reads and writes, and all get what it gets; a failure is one sentence in all of
them. Files are replaced atomically. A journal has lines of JSON in a fixed order, from which a killed run goes on: it
grows by one batch at a time, and opening it again truncates a last line that was not finished. In a bucket, whose
objects cannot grow, each batch is an object:

  examples/00000000-00000032.jsonl    the first 32 lines
  examples/00000032-00000064.jsonl    the next ones
  examples.jsonl                      all of them, joined when the journal is complete

A bucket cannot be locked: there the journals show that two processes write one run.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import functools
import itertools
import json
import os
from pathlib import Path
import posixpath
import re
import tempfile
from typing import Any
import uuid

from speccascade.host import multihost, storage
from speccascade.host.errors import RunError

LOCK = 'lock'
SHARDS = 'shards'
BATCH = 64  # objects read at once


def as_json(value: Any) -> str:
  """Return JSON for people and programs; NaN is refused, for few programs read it."""
  return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + '\n'


def as_line(record: dict) -> str:
  """Return an object as a line of JSON; NaN is refused."""
  return json.dumps(record, ensure_ascii=False, allow_nan=False) + '\n'


def _by_first(failure: str, remedy: str) -> Callable[[Callable], Callable]:
  """Return a decorator of methods that take a name: the first process runs them, and all get the result or failure."""

  def decorate(method: Callable) -> Callable:
    @functools.wraps(method)
    def call(self: 'RunDir', name: str = '', *args: Any) -> Any:
      def run() -> Any:
        path = self.path / name if name else self.path
        with storage.one_sentence(f'{path} {failure}', remedy.format(self.elsewhere)):
          return method(self, name, *args)

      return multihost.once(run)

    return call

  return decorate


_reads = _by_first('cannot be read', 'permit it, or {}')
_writes = _by_first('cannot be written', 'free some space, then run the same command to go on')


class RunDir:
  """The folder of a run, which every process of several uses alike; a name is that of a file or folder in it.

  Args:
    path: Of the folder, on a disk or in a bucket.
    elsewhere: The remedy where the folder cannot be used, as in 'choose another folder'.
  """

  def __new__(cls, path: Path, *args: Any) -> 'RunDir':
    return super().__new__(_InBucket if storage.in_bucket(path) else RunDir)

  def __init__(self, path: Path, elsewhere: str = 'choose another --run_dir'):
    self.path = path
    self.elsewhere = elsewhere

  def __str__(self) -> str:
    return str(self.path)

  def __truediv__(self, name: str) -> 'RunDir':
    return RunDir(self.path / name, self.elsewhere)

  @_reads
  def names(self, name: str = '') -> list[str]:
    """Return the names in a folder, none where it does not exist."""
    folder = self.path / name
    return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []

  @_reads
  def measured(self, name: str = '') -> bool:
    """Return whether a journal in a folder has a line."""
    return any(journal.stat().st_size for journal in (self.path / name).rglob('*.jsonl'))

  @_reads
  def exists(self, name: str) -> bool:
    """Return whether there is a file or folder of this name."""
    return (self.path / name).exists()

  @_reads
  def read(self, name: str) -> str:
    """Return the content of a text file."""
    return (self.path / name).read_bytes().decode('utf-8', 'replace')

  def read_json(self, name: str) -> Any:
    """Return the value of a JSON file, the list of lines of a .jsonl file."""
    text = self.read(name)
    try:  # only line feeds end a line: a text may hold other characters that end one elsewhere
      return [json.loads(line) for line in text.split('\n') if line] if name.endswith('.jsonl') else json.loads(text)
    except ValueError:
      raise RunError(f'{self.path / name} is damaged; delete it, and the same command makes it again.') from None

  @_writes
  def write(self, name: str, content: str | bytes | Iterable[bytes]):
    """Write a file atomically; its content may come in pieces."""
    storage.write(self.path / name, content)

  @_writes
  def remove(self, name: str):
    """Remove a file."""
    (self.path / name).unlink()

  @_writes
  def clean(self, name: str = ''):
    """Remove what processes that were killed had not written to its end, but not what shards may be writing."""
    folder = self.path / name
    for part in filter(storage.is_part, folder.rglob('*.part')):
      if SHARDS not in part.relative_to(folder).parts:
        part.unlink(missing_ok=True)

  @contextlib.contextmanager
  def locked(self) -> Iterator[None]:
    """Lock the folder, made where there is none; in a bucket check that it can be written, and name this process."""
    with multihost.on_writer(self._lock()):
      yield

  def _lock(self) -> contextlib.AbstractContextManager[None]:
    return storage.lock(self.path / LOCK, self.elsewhere)

  # ---- journals ----

  def journal(self, name: str, *, sync: bool = True) -> 'Journal':
    """Open a journal, made where there is none.

    With `sync`, lines also survive a crash of the machine, for `append` waits for the disk.
    """
    return Journal(self, name, sync)

  @_reads
  def count(self, name: str) -> int:
    """Return how many complete lines a journal has, which another process may be writing."""
    path = self.path / name
    return path.read_bytes().count(b'\n') if path.exists() else 0

  def lines(self, name: str) -> Iterator[bytes]:
    """Yield the lines of a journal, made where there is none; only the first process has it."""
    self.path.mkdir(parents=True, exist_ok=True)
    with open(self.path / name, 'a+b') as file:
      file.seek(0)
      yield from file

  @_writes
  def append(self, name: str, data: bytes, start: int, end: int, sync: bool):
    """Append the lines of a journal with these numbers."""
    with open(self.path / name, 'ab', buffering=0) as file:
      while data:
        data = data[file.write(data) :]
      if sync:
        os.fsync(file.fileno())

  @_writes
  def truncate(self, name: str, size: int):
    """Drop what follows so many bytes of a journal."""
    os.truncate(self.path / name, size)

  @_writes
  def seal(self, name: str):
    """Note that no line of a journal will follow."""


class _InBucket(RunDir):
  """The folder of a run in a bucket."""

  def _key(self, name: str) -> str:
    return posixpath.join(self.path.path, name)

  @_writes
  def write(self, name: str, content: str | bytes | Iterable[bytes]):
    with tempfile.NamedTemporaryFile() as file:
      storage.write_pieces(file, content)
      self.path.fs.put_file(file.name, self._key(name))

  @contextlib.contextmanager
  def _lock(self) -> Iterator[None]:
    probe = f'{LOCK}.{uuid.uuid4().hex[:8]}.part'
    remedy = f'permit all three, or {self.elsewhere}'
    with storage.one_sentence(f'{self} cannot be written, read and cleared', remedy):
      self.path.fs.pipe_file(self._key(probe), probe.encode(), mode='create')
      if probe not in storage.objects(self.path) or self.path.fs.cat_file(self._key(probe)) != probe.encode():
        raise OSError(f'{probe} was written, but reads differently')
      self.path.fs.rm([self._key(probe)])
    self.write(LOCK, storage.this_process())
    yield

  def _parts(self, name: str) -> list[tuple[str, int]]:
    """Return the keys of the parts of a journal in order, each with the number of its last line."""
    folder = self.path / Path(name).stem
    end = 0
    parts = []
    for part in storage.objects(folder):
      numbers = re.fullmatch(r'(\d+)-(\d+)\.jsonl', part)
      if numbers is None or int(numbers[1]) != end:
        raise RunError(f'{folder / part} does not follow line {end}; delete {folder} to start anew.')
      end = int(numbers[2])
      parts.append((posixpath.join(folder.path, part), end))
    return parts

  @_reads
  def count(self, name: str) -> int:
    if (self.path / name).exists():
      return sum(1 for _ in self.lines(name))
    parts = self._parts(name)
    return parts[-1][1] if parts else 0

  def lines(self, name: str) -> Iterator[bytes]:
    if (self.path / name).exists():
      yield from (self.path / name).read_bytes().splitlines(True)
      return
    keys = [key for key, _ in self._parts(name)]
    for start in range(0, len(keys), BATCH):
      some = keys[start : start + BATCH]
      contents = self.path.fs.cat(some)
      for key in some:
        yield from contents[key].splitlines(True)

  @_writes
  def append(self, name: str, data: bytes, start: int, end: int, sync: bool):
    part = self.path / Path(name).stem / f'{start:08d}-{end:08d}.jsonl'
    try:
      self.path.fs.pipe_file(part.path, data, mode='create')
    except FileExistsError:
      raise RunError(f'{part} was written meanwhile: another process runs the same; stop one of them.') from None

  @_writes
  def truncate(self, name: str, size: int):
    raise RunError(f'{self.path / name}: its last line is damaged; delete its last part, and the same command goes on.')

  @_writes
  def seal(self, name: str):
    if not (self.path / name).exists():
      self.write(name, self.lines(name))
    if parts := list(storage.objects(self.path / Path(name).stem)):
      self.path.fs.rm([self._key(f'{Path(name).stem}/{part}') for part in parts])


class Journal:
  """The lines of a file of a run, each an object; `RunDir.journal` opens it.

  Raises:
    RunError: where a line that is not the last one is damaged, or the file cannot be read.
  """

  def __init__(self, run: RunDir, name: str, sync: bool):
    self.path = run.path / name
    self._run = run
    self._name = name
    self._sync = sync
    self.count = multihost.once(self._recover)

  def _recover(self) -> int:
    """Return how many lines are complete; truncate what follows them."""
    count = size = 0
    lines = self.raw()
    for line in lines:
      if not self._is_record(line):
        if any(True for _ in lines):
          raise RunError(f'{self.path}: line {count + 1} is damaged; delete the file to start anew.')
        self._run.truncate(self._name, size)
        break
      count += 1
      size += len(line)
    return count

  def _is_record(self, line: bytes) -> bool:
    try:
      record = json.loads(line)
    except ValueError:
      return False
    return line.endswith(b'\n') and isinstance(record, dict)

  def raw(self) -> Iterator[bytes]:
    """Yield the lines as they are written, which may be more than memory holds; only the first process has them."""
    with storage.one_sentence(f'{self.path} cannot be read', f'permit it, or {self._run.elsewhere}'):
      yield from self._run.lines(self._name)

  def lines(self) -> Iterator[dict]:
    """Yield the lines; only the first process has them."""
    return map(json.loads, self.raw())

  def append(self, records: Iterable[dict]):
    """Add lines, and return when the file has them and every process has come here."""
    records = list(records)
    data = ''.join(map(as_line, records)).encode()
    end = self.count + len(records)
    multihost.barrier()
    self._run.append(self._name, data, self.count, end, self._sync)
    self.count = end

  def keep_while(self, wanted: Callable[[dict], bool]):
    """Drop the first line that is not wanted and all after it."""

    def kept() -> list[int]:
      return [len(line) for line in itertools.takewhile(lambda line: wanted(json.loads(line)), self.raw())]

    sizes = multihost.once(kept)
    self._run.truncate(self._name, sum(sizes))
    self.count = len(sizes)

  def agree(self, keys: Sequence[str], plan: Sequence[tuple]):
    """Check that the lines of a killed run are the first ones of the plan."""

    def is_planned(line, key):
      return tuple(line.get(k) for k in keys) == tuple(key)

    def same():
      return all(is_planned(line, key) for line, key in zip(self.lines(), plan, strict=False))

    if self.count > len(plan) or not multihost.once(same):
      raise RunError(f'{self.path} has lines of another run; choose another --run_dir to start anew.')

  def seal(self):
    """Note that no line will follow."""
    self._run.seal(self._name)
