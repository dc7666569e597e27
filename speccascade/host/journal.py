"""Journals: JSON lines in a fixed order, from which a killed run goes on.

A journal only grows, one batch at a time. Opening it again truncates a last line that was not finished. In a bucket,
whose objects cannot grow, each batch is an object:

  examples/00000000-00000032.jsonl    the first 32 lines
  examples/00000032-00000064.jsonl    the next ones
  examples.jsonl                      all of them, joined when the journal is complete
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import itertools
import json
import os
from pathlib import Path
import re

from speccascade.host import multihost, storage
from speccascade.host.errors import RunError

GO_ON = 'free some space, then run the same command to go on'


class Journal:
  """The lines of a file, each an object with certain fields.

  Every process of several calls each method; the first one reads and writes, and all know the count.

  Args:
    path: of the file, on a disk or in a bucket.
    fields: that every line has.
    elsewhere: the remedy where the file cannot be opened, as in 'choose another folder'.
    sync: whether `append` waits for the disk, so that the lines also survive a crash of the machine.

  Raises:
    RunError: where a line that is not the last one is damaged, or the file cannot be read.
  """

  def __init__(
    self, path: Path, fields: Iterable[str] = (), *, elsewhere: str = 'choose another --run_dir', sync: bool = True
  ):
    self.path = path
    self._fields = frozenset(fields)
    self._remedy = f'permit it, or {elsewhere}'
    self._sync = sync
    self._store = None  # where this process reads and writes
    try:
      self.count = multihost.once(self._recover)
    except BaseException:
      self.close()
      raise

  def _recover(self) -> int:
    """Return how many lines are complete; truncate what follows them."""
    count = size = 0
    with storage.one_sentence(f'{self.path} cannot be read', self._remedy):
      self._store = _Objects(self.path) if storage.in_bucket(self.path) else _File(self.path, self._sync)
      lines = self._store.lines()
      for line in lines:
        if not self._is_record(line):
          if any(True for _ in lines):
            raise RunError(f'{self.path}: line {count + 1} is damaged; delete the file to start anew.')
          self._store.truncate(size)
          break
        count += 1
        size += len(line)
    return count

  def lines(self) -> Iterator[dict]:
    """Yield the lines, which may be more than memory holds; only the process that writes has them."""
    return map(json.loads, self.raw())

  def raw(self) -> Iterator[bytes]:
    """Yield the lines as they are written."""
    with storage.one_sentence(f'{self.path} cannot be read', self._remedy):
      yield from self._store.lines()

  def append(self, records: Iterable[dict]):
    """Add lines, and return when the file has them and every process has come here."""
    records = list(records)
    data = ''.join(as_line(record) for record in records).encode()
    multihost.barrier()
    with storage.one_sentence(f'{self.path} cannot be written', GO_ON):
      multihost.once(lambda: self._store.append(data, self.count, self.count + len(records)))
    self.count += len(records)

  def keep_while(self, wanted: Callable[[dict], bool]):
    """Drop the first line that is not wanted and all after it."""
    self.count = multihost.once(lambda: self._keep_while(wanted))

  def _keep_while(self, wanted: Callable[[dict], bool]) -> int:
    lines = list(itertools.takewhile(lambda line: wanted(json.loads(line)), self.raw()))
    with storage.one_sentence(f'{self.path} cannot be written', GO_ON):
      self._store.truncate(sum(map(len, lines)))
    return len(lines)

  def agree(self, keys: Sequence[str], plan: Sequence[tuple]):
    """Check that the lines of a killed run are the first ones of the plan."""
    multihost.once(lambda: self._agree(keys, plan))

  def _agree(self, keys: Sequence[str], plan: Sequence[tuple]):
    same = all(tuple(line.get(k) for k in keys) == tuple(p) for line, p in zip(self.lines(), plan, strict=False))
    if not same or self.count > len(plan):
      raise RunError(f'{self.path} has lines of another run; choose another --run_dir to start anew.')

  def seal(self):
    """Note that no line will follow."""
    with storage.one_sentence(f'{self.path} cannot be written', GO_ON):
      multihost.once(lambda: self._store.seal())

  def close(self):
    """Close the file."""
    if self._store is not None:
      self._store.close()

  def _is_record(self, line: bytes) -> bool:
    try:
      record = json.loads(line)
    except ValueError:
      return False
    return line.endswith(b'\n') and isinstance(record, dict) and self._fields <= record.keys()


def as_line(record: dict) -> str:
  """Return an object as a line of JSON; NaN is refused, for few programs read it."""
  return json.dumps(record, ensure_ascii=False, allow_nan=False) + '\n'


def count(path: Path) -> int:
  """Return how many complete lines a journal has, which another process may be writing."""
  if storage.in_bucket(path):
    return _Objects(path).count()
  return path.read_bytes().count(b'\n') if path.exists() else 0


class _File:
  """Lines on a disk: one file, appended to."""

  def __init__(self, path: Path, sync: bool):
    self._path = path
    self._sync = sync
    self._file = open(path, 'ab', buffering=0, opener=storage.no_follow)

  def lines(self) -> Iterator[bytes]:
    with open(self._path, 'rb') as f:
      yield from f

  def truncate(self, size: int):
    self._file.truncate(size)

  def append(self, data: bytes, start: int, end: int):
    while data:
      data = data[os.write(self._file.fileno(), data) :]
    if self._sync:
      os.fsync(self._file.fileno())

  def seal(self):
    pass

  def close(self):
    self._file.close()


class _Objects:
  """Lines in a bucket: an object for each time that some were added, then one for all."""

  def __init__(self, path):
    self._path = path
    self._folder = path.parent / path.stem

  def _parts(self) -> list[str]:
    """Return the names of the parts in order; each name has the numbers of its lines."""
    end = 0
    parts = []
    for name in storage.objects(self._folder):
      bounds = re.fullmatch(r'(\d+)-(\d+)\.jsonl', name)
      if bounds is None or int(bounds.group(1)) != end:
        raise RunError(f'{self._folder / name} does not follow line {end}; delete {self._folder} to start anew.')
      end = int(bounds.group(2))
      parts.append(name)
    return parts

  def lines(self) -> Iterator[bytes]:
    sealed = self._path.exists()
    for content in [self._path.read_bytes()] if sealed else storage.contents(self._folder, self._parts()):
      yield from content.splitlines(True)

  def count(self) -> int:
    if self._path.exists():
      return sum(1 for _ in self.lines())
    return int(re.findall(r'\d+', parts[-1])[1]) if (parts := self._parts()) else 0

  def truncate(self, size: int):
    raise RunError(f'{self._folder}: its last line is damaged; delete its last part, and the same command goes on.')

  def append(self, data: bytes, start: int, end: int):
    part = self._folder / f'{start:08d}-{end:08d}.jsonl'
    try:
      storage.create(part, data)
    except FileExistsError:
      raise RunError(f'{part} was written meanwhile: another process runs the same; stop one of them.') from None

  def seal(self):
    if not self._path.exists():
      storage.write(self._path, self.lines())
    storage.remove(self._folder, list(storage.objects(self._folder)))

  def close(self):
    pass
