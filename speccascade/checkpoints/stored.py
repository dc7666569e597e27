"""Tensors as they are stored, none read yet: of safetensors files, of PyTorch's files and of zarr arrays.

A safetensors file is opened anew for each tensor: the library maps it into memory, and its pages are to leave the
process with it. tensorstore is imported where a file needs it.

A box is a tuple of slices with both ends, one for each axis.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from speccascade.checkpoints import pickled
from speccascade.checkpoints.files import AGAIN, check_pointer
from speccascade.host.errors import first_line
from speccascade.types import Array

Box = tuple[slice, ...]
Shape = tuple[int, ...]
_FLOATS = {'float32': np.float32, 'float16': np.float16, 'bfloat16': ml_dtypes.bfloat16}
_ARRAYS = _FLOATS | {'float64': np.float64}
_SAFETENSORS = {'F32': np.float32, 'F16': np.float16, 'BF16': ml_dtypes.bfloat16}


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
  """A stored tensor; `read(box)` returns the part of it in a box, `read()` all of it."""

  file: Path
  name: str
  shape: Shape
  code: str  # the name of its dtype in the file
  read: Callable[..., Array]
  dtypes: Mapping[str, Any] = dataclasses.field(default_factory=lambda: _ARRAYS)  # those that are read, by such names

  @property
  def dtype(self) -> np.dtype:
    """Return the dtype in numpy's terms, or raise for one that is not read."""
    if self.code not in self.dtypes:
      raise ValueError(
        f"{self.file}: tensor '{self.name}' has dtype {self.code}, and {', '.join(self.dtypes)} are read: "
        f'save the model {"as float32" if self.code in ("F64", "float64") else "unquantised"}'
      )
    return np.dtype(self.dtypes[self.code])


def full_box(shape: Shape) -> Box:
  """Return the box of all of an array."""
  return tuple(slice(0, n) for n in shape)


def in_memory(where: Any, name: str, array: Array) -> Tensor:
  """Return the tensor of what is an array already, traced or not."""
  code = array.dtype.name
  dtypes = _ARRAYS | {'int32': np.int32}
  return Tensor(where, name, array.shape, code, lambda box=None: array if box is None else array[box], dtypes)


# ---- safetensors ----


def of_safetensors(file: Path) -> dict[str, Tensor]:
  """Return the tensors of a safetensors file."""
  with _opened(file) as opened:
    slices = {name: opened.get_slice(name) for name in opened.keys()}
    facts = {name: (tuple(x.get_shape()), x.get_dtype()) for name, x in slices.items()}
  return {
    name: Tensor(file, name, shape, code, functools.partial(_read_safetensors, file, name, shape), _SAFETENSORS)
    for name, (shape, code) in facts.items()
  }


def _read_safetensors(file: Path, name: str, shape: Shape, box: Box | None = None) -> np.ndarray:
  with _opened(file) as tensors:
    return tensors.get_tensor(name) if box in (None, full_box(shape)) else tensors.get_slice(name)[box]


@contextlib.contextmanager
def _opened(file: Path) -> Iterator:
  """Yield an open file; the library's errors come with the file and a remedy."""
  from safetensors import safe_open, SafetensorError  # lazily: other formats do not need it

  try:
    with safe_open(file, 'numpy') as tensors:
      yield tensors
  except SafetensorError as error:
    check_pointer(file)
    raise ValueError(f'{file} is truncated or corrupt, it has {file.stat().st_size} bytes ({error}): {AGAIN}') from None


def offsets(file: Path) -> list[tuple[int, int]]:
  """Return the first byte of each tensor of a safetensors file, and the one after its last."""
  with _opened(file), file.open('rb') as f:
    start = 8 + int.from_bytes(f.read(8), 'little')
    header = json.loads(f.read(start - 8))
  from_start = [entry['data_offsets'] for name, entry in header.items() if name != '__metadata__']
  return [(start + first, start + last) for first, last in from_start]


# ---- PyTorch ----


def of_torch(file: Path) -> dict[str, Tensor]:
  """Return the tensors of a file as `pytorch_model.bin`, of which nothing but tensors is unpickled."""
  check_pointer(file)
  try:
    found = pickled.read(file)
  except pickled.NotTensors as error:
    raise ValueError(
      f'{file} has more than tensors, or no names ({error}): write them alone where it was made, by '
      'torch.save(model.state_dict(), PATH)'
    ) from None
  except Exception as error:  # whatever unpickling raises
    reason = first_line(error, named=True)[:200]
    raise ValueError(
      f'{file} is truncated or corrupt, it has {file.stat().st_size} bytes ({reason}): {AGAIN}'
    ) from None
  return {name: Tensor(file, name, x.shape, x.dtype.name, x.read, _FLOATS) for name, x in found.items()}


# ---- zarr, as T5X and Orbax write it ----


def of_zarr(name: str, where: Path, kvstore: dict) -> Tensor:
  """Return an array of a store; a chunk that is not there is an error, never zeros."""
  spec = {'driver': 'zarr', 'kvstore': kvstore, 'fill_missing_data_reads': False}
  with _clear(f"tensor '{name}'", where):
    store = tensorstore().open(spec, open=True).result()
  code = store.dtype.numpy_dtype.name
  code = 'bfloat16' if code == 'uint16' else code  # version 2 of T5X's format stored its bits
  return Tensor(where, name, store.shape, code, functools.partial(_read_zarr, where, name, store))


def _read_zarr(where: Path, name: str, store: Any, box: Box | None = None) -> np.ndarray:
  with _clear(f"tensor '{name}' {list(store.shape)}", where):
    x = (store if box is None else store[box]).read().result()
  return x.view(ml_dtypes.bfloat16) if x.dtype == np.uint16 else x


def ocdbt(folder: Path, path: str = '') -> dict:
  """Return the kvstore of what lies at a path in the OCDBT store of a folder."""
  return {'driver': 'ocdbt', 'base': {'driver': 'file', 'path': f'{folder}/'}, 'path': path}


def names_in_ocdbt(folder: Path) -> list[str]:
  """Return the names of all arrays in the OCDBT store of a folder."""
  with _clear('the store', folder):
    store = tensorstore().KvStore.open(ocdbt(folder)).result()
    keys = [key.decode() for key in store.list().result()]
  return [key.removesuffix('/.zarray') for key in keys if key.endswith('/.zarray')]


def tensorstore():
  """Return the library, imported when it is needed: it is large."""
  import tensorstore

  return tensorstore


@contextlib.contextmanager
def _clear(what: str, where: Path) -> Iterator[None]:
  """Turn tensorstore's errors, which carry their whole spec, into one sentence."""
  try:
    yield
  except (ValueError, OSError, KeyError) as error:
    reason = str(error).split(' [')[0].split(' when ')[0]
    raise ValueError(f'{where}: {what} cannot be read ({reason}): {AGAIN}') from None
