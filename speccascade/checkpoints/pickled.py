"""The tensors in PyTorch's files, read without torch: a pickle says where each lies, the numbers lie beside it.

A pickle may name anything and have it called. Here one may name what rebuilds a tensor, the types of storages and
OrderedDict; a file that names anything else is refused before it is called.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
import dataclasses
import io
import math
from pathlib import Path
import pickle
import reprlib
import struct
from typing import Any, BinaryIO, NamedTuple
import zipfile

import ml_dtypes
import numpy as np

from speccascade.types import Array

_STORAGES = {  # their dtypes by the names of their classes
  'BFloat16Storage': ml_dtypes.bfloat16,
  'BoolStorage': np.bool_,
  'ByteStorage': np.uint8,
  'CharStorage': np.int8,
  'DoubleStorage': np.float64,
  'FloatStorage': np.float32,
  'HalfStorage': np.float16,
  'IntStorage': np.int32,
  'LongStorage': np.int64,
  'ShortStorage': np.int16,
}
_MAGIC = 0x1950A86A20F9469CFC6C  # what a file of torch before 1.6 begins with
_LARGEST = 1 << 28  # bytes of the pickle, of which a tensor needs some hundred


class NotTensors(ValueError):
  """A file is intact, and has something else than tensors by name."""


class _Storage(NamedTuple):
  dtype: np.dtype
  key: str
  count: int


@dataclasses.dataclass(frozen=True)
class Pickled:
  """A tensor in a file: its numbers begin at a byte of it and lie apart by strides, in numbers."""

  file: Path
  dtype: np.dtype
  shape: tuple[int, ...]
  strides: tuple[int, ...]
  start: int

  def read(self, box: tuple[slice, ...] | None = None) -> Array:
    """Return a part of the tensor in memory of its own."""
    if not math.prod(self.shape):
      return np.zeros(self.shape, self.dtype)[... if box is None else box]
    strides = [n * self.dtype.itemsize for n in self.strides]
    last = sum((n - 1) * stride for n, stride in zip(self.shape, strides, strict=True))
    buffer = np.memmap(self.file, np.uint8, 'r', self.start, (last + self.dtype.itemsize,))
    return np.ndarray(self.shape, self.dtype, buffer, 0, strides)[... if box is None else box].copy()


def read(file: Path) -> dict[str, Pickled]:
  """Return the tensors of a file by name.

  Raises:
    NotTensors: The file is no map of names to tensors, or its pickle names something else than tensors.
    Exception: What a damaged zip or pickle makes Python raise.
  """
  state, starts = _of_zip(file) if zipfile.is_zipfile(file) else _of_old(file)
  if not isinstance(state, dict) or not all(isinstance(x, _Tensor) for x in state.values()):
    raise NotTensors('it is no map of names to tensors')
  if wrong := [name for name in state if type(name) is not str]:
    raise NotTensors(f'it has {reprlib.repr(wrong[0])} for the name of a tensor')
  return {name: _placed(file, x, starts) for name, x in state.items()}


def _of_zip(file: Path) -> tuple[Any, dict[str, tuple[int, int]]]:
  """Return what is pickled in a file, and the first byte and the size of each storage."""
  with zipfile.ZipFile(file) as archive, file.open('rb') as opened:
    entries = {info.filename.partition('/')[2]: info for info in archive.infolist()}
    if compressed := [name for name, info in entries.items() if info.compress_type != zipfile.ZIP_STORED]:
      raise ValueError(f'{compressed[0]} is compressed in it, as PyTorch writes none')
    places = {name: (_start(opened, info), info.file_size) for name, info in entries.items()}
    order = _bytes(opened, *places.get('byteorder', (0, 0)))
    if order not in (b'', b'little'):
      raise ValueError(f'its bytes are in the order {order[:10]!r}, and little is read')
    state = _unpickled(io.BytesIO(_bytes(opened, *places['data.pkl'])))
  return state, {name.removeprefix('data/'): place for name, place in places.items()}


def _start(opened: BinaryIO, info: zipfile.ZipInfo) -> int:
  """Return the first byte of an entry, behind its header."""
  opened.seek(info.header_offset)
  lengths = struct.unpack('<26xHH', opened.read(30))
  return info.header_offset + 30 + sum(lengths)


def _bytes(opened: BinaryIO, start: int, size: int) -> bytes:
  if size > _LARGEST:
    raise ValueError(f'its pickle has {size} bytes, more than {_LARGEST}')
  opened.seek(start)
  return opened.read(size)


def _of_old(file: Path) -> tuple[Any, dict[str, tuple[int, int]]]:
  """Return the same of a file as torch wrote before 1.6: pickles one after the other, then the storages."""
  with file.open('rb') as opened:
    head = pickle.dumps(_MAGIC, 2)
    if opened.read(len(head)) != head:
      raise ValueError('it does not begin as a file of PyTorch')
    _, system = (_unpickled(opened) for _ in range(2))
    if not isinstance(system, dict) or system.get('little_endian') is not True:
      raise ValueError('its bytes are not in the order little')
    storages: dict[str, _Storage] = {}
    state = _unpickled(opened, storages)
    starts = {}
    for key in _unpickled(opened):
      (count,) = struct.unpack('<q', opened.read(8))
      size = count * storages[key].dtype.itemsize
      starts[key] = opened.tell(), size
      opened.seek(size, io.SEEK_CUR)
  return state, starts


# ---- the pickle ----


class _Tensor(NamedTuple):
  """A tensor as it is pickled."""

  storage: _Storage
  offset: int
  shape: tuple[int, ...]
  strides: tuple[int, ...]


def _unpickled(opened: BinaryIO, storages: dict[str, _Storage] | None = None) -> Any:
  return _Unpickler(opened, {} if storages is None else storages).load()


class _Unpickler(pickle._Unpickler):  # Python's own: that in C makes room for as many objects as a file claims
  """Makes tensors, numbers, texts and collections; nothing that a pickle names is imported."""

  def __init__(self, opened: BinaryIO, storages: dict[str, _Storage]):
    super().__init__(opened, encoding='utf-8')
    self.storages = storages

  def find_class(self, module: str, name: str) -> Any:
    if module == 'torch' and name in _STORAGES:
      return name
    known = _callables()
    if (module, name) not in known:
      raise NotTensors(f'it names {module}.{name}, which is not called')
    return known[module, name]

  def persistent_load(self, pid: Any) -> _Storage:
    kind, name, key, _, count, *view = pid
    if [type(x) for x in (kind, name, key, count)] != [str, str, str, int] or name not in _STORAGES or any(view):
      raise NotTensors(f'it refers to {reprlib.repr(pid)}, which is no storage')
    storage = _Storage(np.dtype(_STORAGES[name]), key, count)
    self.storages.setdefault(key, storage)
    return storage


def _callables() -> Mapping[tuple[str, str], Callable]:
  """Return what a pickle may call, made anew for each name: a pickle may set attributes of what it has."""

  def tensor(storage, offset, shape, strides, *_):
    return _Tensor(storage, offset, tuple(shape), tuple(strides))

  def dictionary(*items):
    return OrderedDict(*items)

  return {
    ('torch._utils', '_rebuild_tensor'): tensor,
    ('torch._utils', '_rebuild_tensor_v2'): tensor,
    ('torch._utils', '_rebuild_parameter'): lambda data, *_: data,
    ('collections', 'OrderedDict'): dictionary,
  }


def _placed(file: Path, x: _Tensor, starts: Mapping[str, tuple[int, int]]) -> Pickled:
  """Return a tensor with its place, which must lie in its storage, and the storage in the file."""
  storage = x.storage
  numbers = (x.offset, *x.shape, *x.strides)
  if not isinstance(storage, _Storage) or any(type(n) is not int or n < 0 for n in numbers):
    raise ValueError(f'it has a tensor of shape {reprlib.repr(x.shape)}, which is none')
  start, size = starts[storage.key]
  count = math.prod(x.shape)
  last = x.offset + sum((n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True)) if count else 0
  item = storage.dtype.itemsize
  if last >= max(storage.count, 1) or count > storage.count or storage.count * item > size:
    raise ValueError(f'its tensor of shape {x.shape} is larger than its storage, of {size} bytes')
  if start + size > file.stat().st_size:
    raise ValueError('its storages end behind it')
  return Pickled(file, storage.dtype, x.shape, x.strides, start + x.offset * item)
