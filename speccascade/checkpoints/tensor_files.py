"""Safetensors files, read one tensor at a time.

A file is a length (8 bytes), a JSON header {name: {dtype, shape, data_offsets}} and the data. Reading into fresh
memory, not through a memory map, keeps the pages of a large file out of the process; and looking at the header
ourselves lets an error name the tensor that is cut off.
"""

import dataclasses
import itertools
import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np

from speccascade.checkpoints import shards

DTYPES = {
  'F32': np.dtype(np.float32),
  'F16': np.dtype(np.float16),
  'BF16': np.dtype(ml_dtypes.bfloat16),
}
AGAIN = 'copy or download the checkpoint again'


@dataclasses.dataclass(frozen=True)
class Stored:
  """Where a tensor lies."""

  file: Path
  name: str
  code: str  # safetensors' name of the dtype
  shape: tuple[int, ...]
  start: int
  nbytes: int

  @property
  def dtype(self) -> np.dtype:
    """Return the dtype in numpy's terms."""
    if self.code not in DTYPES:
      raise ValueError(
        f"{self.file}: tensor '{self.name}' has dtype {self.code}, not one of {', '.join(DTYPES)}: "
        'save the model unquantised'
      )
    return DTYPES[self.code]

  def read(self, box: shards.Box | None = None) -> np.ndarray:
    """Return the tensor, or the part of it in a box, in memory of its own."""
    if box is not None and not shards.is_whole(box, self.shape):
      return self._part(box)
    count = math.prod(self.shape)
    data = np.fromfile(self.file, dtype=self.dtype, count=count, offset=self.start)
    if data.size != count:
      raise ValueError(f"{self.file}: tensor '{self.name}' is cut off, {data.size} of {count} values: {AGAIN}")
    return data.reshape(self.shape)

  def _part(self, box: shards.Box) -> np.ndarray:
    """Read what lies in a box, and no byte beside it."""
    starts, length = shards.runs(box, self.shape)
    part = np.empty((len(starts), length), self.dtype)
    rows = part.view(np.uint8)
    with self.file.open('rb', buffering=0) as f:
      for start, row in zip(starts.tolist(), rows, strict=True):
        f.seek(self.start + start * self.dtype.itemsize)
        into = memoryview(row)
        while into.nbytes:  # a call reads 2 GiB at most
          if not (count := f.readinto(into)):
            raise ValueError(f"{self.file}: tensor '{self.name}' is cut off, {into.nbytes} bytes are missing: {AGAIN}")
          into = into[count:]
    return part.reshape(shards.size(box))


def index(folder: Path) -> dict[str, Stored]:
  """Return every tensor of a folder, from `model.safetensors` or from the shards that its index lists."""
  single, shards = folder / 'model.safetensors', folder / 'model.safetensors.index.json'
  if single.exists():
    return header(single)
  if shards.exists():
    return _sharded(shards)
  found = sorted(p.name for p in folder.glob('*.safetensors')) or sorted(p.name for p in folder.glob('*.bin'))
  remedy = 'save it with model.save_pretrained(path, safe_serialization=True)' if found else 'is this the right folder?'
  if found and found[0].endswith('.safetensors'):
    remedy = 'the index is missing, so perhaps shards are too: ' + AGAIN
  raise FileNotFoundError(
    f'{single} and {shards.name} do not exist (found: {", ".join(found) or "no weights"}): {remedy}'
  )


def _sharded(path: Path) -> dict[str, Stored]:
  """Return the tensors of an index, each looked up in its shard."""
  weight_map = read_json(path).get('weight_map')
  if not weight_map:
    raise ValueError(f"{path} has no 'weight_map': {AGAIN}")
  tensors = {}
  for name in sorted(set(weight_map.values()), key=str):
    first = next(tensor for tensor, file in weight_map.items() if file == name)
    if not isinstance(name, str) or name != Path(name).name or not name.endswith('.safetensors'):
      raise ValueError(f"{path}: 'weight_map' puts '{first}' into {name!r}, not a file of this folder: {AGAIN}")
    if not (path.parent / name).exists():
      raise FileNotFoundError(f"{path.parent / name} does not exist, and {path.name} puts '{first}' there: {AGAIN}")
    tensors |= header(path.parent / name)
  for name, file in weight_map.items():
    if name not in tensors:
      raise ValueError(f"{path.parent / file} does not hold tensor '{name}' as {path.name} says: {AGAIN}")
  return tensors


def header(file: Path) -> dict[str, Stored]:
  """Return the tensors of one file, having checked that all of their bytes are there."""
  size = file.stat().st_size
  with file.open('rb') as f:
    head = f.read(8)
    if head == b'version ':
      raise ValueError(
        f'{file} is the pointer of Git LFS, not the weights: fetch them, by git lfs pull in {file.parent}'
      )
    length = int.from_bytes(head, 'little')
    if size < 8 or length > size - 8:
      raise ValueError(f'{file} is cut off in its header, it has {size} bytes: {AGAIN}')
    try:
      entries = json.loads(f.read(length))
      entries.pop('__metadata__', None)
      found = {name: _entry(file, name, entry, 8 + length, size) for name, entry in entries.items()}
    except (UnicodeDecodeError, json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
      raise ValueError(f'{file} has an unreadable header ({error}): {AGAIN}') from error
  for before, after in itertools.pairwise(sorted(found.values(), key=lambda tensor: (tensor.start, tensor.nbytes))):
    if after.start < before.start + before.nbytes:
      raise ValueError(f"{file}: tensors '{before.name}' and '{after.name}' overlap: {AGAIN}")
  return found


def _entry(file: Path, name: str, entry: dict, base: int, size: int) -> Stored:
  """Return one tensor of a header, having checked its place."""
  start, end = entry['data_offsets']
  if not 0 <= start <= end or any(length < 0 for length in entry['shape']):
    raise ValueError(f"{file}: tensor '{name}' lies from byte {start} to {end}, {entry['shape']}: {AGAIN}")
  stored = Stored(file, name, entry['dtype'], tuple(entry['shape']), base + start, end - start)
  if base + end > size:
    raise ValueError(f"{file}: tensor '{name}' ends at byte {base + end}, but the file at {size}, cut off: {AGAIN}")
  dtype = DTYPES.get(stored.code)
  if dtype and end - start != math.prod(stored.shape) * dtype.itemsize:
    raise ValueError(
      f"{file}: tensor '{name}' {stored.code}{list(stored.shape)} does not fit its {end - start} bytes: {AGAIN}"
    )
  return stored


def read_json(path: Path) -> dict:
  """Return a JSON object."""
  try:
    value = json.loads(path.read_text(encoding='utf-8'))
  except FileNotFoundError:
    raise FileNotFoundError(f'{path} does not exist: is {path.parent} a Hugging Face model folder?') from None
  except (UnicodeDecodeError, json.JSONDecodeError) as error:
    raise ValueError(f'{path} is not valid JSON ({error}): {AGAIN}') from error
  if type(value) is not dict:
    raise ValueError(f'{path} is not a JSON object: {AGAIN}')
  return value
