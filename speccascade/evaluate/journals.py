"""Journals: the lines of a protocol in the order of its plan, with which a killed run goes on.

A journal has one JSON object a line and is only ever appended to, whole batches at a time; whoever opens it again cuts
off a line that was not finished. In a bucket, where nothing is appended to, each batch is an object of its own:

  examples/00000000-00000032.jsonl    the first 32 lines
  examples/00000032-00000064.jsonl    the next ones
  examples.jsonl                      all of them, put together when the journal is whole
"""

from collections.abc import Iterable, Iterator, Sequence
import json
import os
from pathlib import Path
import re

from speccascade.evaluate.rundir import told
from speccascade.host import buckets, disk, multihost
from speccascade.host.errors import RunError

AGAIN = 'permit it, or choose another --run_dir'
GO_ON = 'free some space, then run the same command to go on'


class Journal:
  """The lines of a protocol in a fixed order, each with these fields, of which a killed run has left the first ones."""

  def __init__(self, path: Path, fields: Iterable[str] = ()):
    self.path, self._fields = path, frozenset(fields)
    self._kept = (_Parts if buckets.inside(path) else _File)(path)
    self.count = multihost.once(self._recover)

  def _recover(self) -> int:
    """Return how many lines are whole; cut off what follows them."""
    count = good = 0
    with told(f'{self.path} cannot be read', AGAIN):
      lines = self._kept.lines()
      for line in lines:
        if not self._is_record(line):
          if any(True for _ in lines):
            raise RunError(f'{self.path}: line {count + 1} is damaged; delete the file to measure anew.')
          self._kept.cut(good)
          break
        count += 1
        good += len(line)
    with told(f'{self.path} cannot be opened', AGAIN):
      self._kept.open()
    return count

  def lines(self) -> Iterator[dict]:
    """Yield the lines, which may be more than memory holds; only the process that writes has them."""
    return map(json.loads, self.raw())

  def raw(self) -> Iterator[bytes]:
    """Yield the lines as they are written."""
    with told(f'{self.path} cannot be read', AGAIN):
      yield from self._kept.lines()

  def append(self, records: Iterable[dict]):
    """Add lines, and return when the disk has them and every process has come here."""
    records = list(records)
    data = ''.join(json.dumps(r, ensure_ascii=False, allow_nan=False) + '\n' for r in records).encode()
    multihost.barrier()
    with told(f'{self.path} cannot be written', GO_ON):
      multihost.once(lambda: self._kept.append(data, self.count, self.count + len(records)))
    self.count += len(records)

  def agree(self, keys: Sequence[str], plan: Sequence[tuple]):
    """Check that the lines left by a killed run are the first ones of the plan."""
    multihost.once(lambda: self._agree(keys, plan))

  def _agree(self, keys: Sequence[str], plan: Sequence[tuple]):
    same = all(tuple(line.get(k) for k in keys) == tuple(p) for line, p in zip(self.lines(), plan, strict=False))
    if not same or self.count > len(plan):
      raise RunError(f'{self.path} has lines of another run; choose another --run_dir to start anew.')

  def seal(self):
    """Note that no line will follow."""
    with told(f'{self.path} cannot be written', GO_ON):
      multihost.once(self._kept.seal)

  def close(self):
    """Close the file."""
    self._kept.close()

  def _is_record(self, line: bytes) -> bool:
    try:
      record = json.loads(line)
    except ValueError:
      return False
    return line.endswith(b'\n') and isinstance(record, dict) and self._fields <= record.keys()


def count(path: Path) -> int:
  """Return how many whole lines a journal has, which another process may be writing."""
  with told(f'{path} cannot be read', AGAIN):
    return (_Parts if buckets.inside(path) else _File)(path).count()


class _File:
  """Lines on a disk: one file, appended to."""

  def __init__(self, path: Path):
    self._path, self._handle = path, None

  def lines(self) -> Iterator[bytes]:
    if self._path.exists():
      with open(self._path, 'rb') as f:
        yield from f

  def count(self) -> int:
    return sum(line.endswith(b'\n') for line in self.lines())

  def cut(self, size: int):
    with open(self._path, 'r+b', opener=disk.unlinked) as f:
      f.truncate(size)

  def open(self):
    self._handle = open(self._path, 'ab', buffering=0, opener=disk.unlinked)

  def append(self, data: bytes, start: int, end: int):
    disk.append(self._handle, data)
    os.fsync(self._handle.fileno())

  def seal(self):
    pass

  def close(self):
    if self._handle is not None:
      self._handle.close()


class _Parts:
  """Lines in a bucket: an object for each time that some were added, then one for all."""

  def __init__(self, path):
    self._path, self._folder = path, path.parent / path.stem

  def _parts(self) -> list[str]:
    """Return the names of the parts in order; each says which lines it has."""
    end, found = 0, []
    for name in buckets.files(self._folder):
      bounds = re.fullmatch(r'(\d+)-(\d+)\.jsonl', name)
      if bounds is None or int(bounds.group(1)) != end:
        raise RunError(f'{self._folder / name} does not follow line {end}; delete {self._folder} to measure anew.')
      end = int(bounds.group(2))
      found.append(name)
    return found

  def lines(self) -> Iterator[bytes]:
    whole = self._path.exists()
    for content in [self._path.read_bytes()] if whole else buckets.contents(self._folder, self._parts()):
      yield from content.splitlines(True)

  def count(self) -> int:
    if self._path.exists():
      return sum(1 for _ in self.lines())
    return int(re.findall(r'\d+', parts[-1])[1]) if (parts := self._parts()) else 0

  def cut(self, size: int):
    raise RunError(f'{self._folder}: its last line is damaged; delete its last part, and the same command goes on.')

  def open(self):
    pass

  def append(self, data: bytes, start: int, end: int):
    part = self._folder / f'{start:08d}-{end:08d}.jsonl'
    try:
      buckets.create(part, data)
    except FileExistsError:
      raise RunError(f'{part} was written meanwhile: another process runs the same; stop one of them.') from None

  def seal(self):
    if not self._path.exists():
      disk.write(self._path, self.lines())
    buckets.remove(self._folder, list(buckets.files(self._folder)))

  def close(self):
    pass
