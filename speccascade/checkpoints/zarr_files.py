"""The tensors of zarr arrays, in folders of their own or in one OCDBT store: what T5X and Orbax write."""

from collections.abc import Iterator
import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from speccascade.checkpoints.assemble import Box, Shape
from speccascade.checkpoints.files import AGAIN


@dataclasses.dataclass(frozen=True)
class Tensor:
  """An array, not read yet."""

  file: Path
  name: str
  store: Any  # of tensorstore

  @property
  def shape(self) -> Shape:
    """Return the array's shape."""
    return self.store.shape

  @property
  def dtype(self) -> np.dtype:
    """Return the array's dtype; version 2 of T5X's format stored the bits of bfloat16 as integers."""
    dtype = self.store.dtype.numpy_dtype
    return np.dtype(ml_dtypes.bfloat16) if dtype == np.uint16 else dtype

  def read(self, box: Box | None = None) -> np.ndarray:
    """Return the array, or the part of it in a box."""
    with _clear(f"tensor '{self.name}' {list(self.shape)}", self.file):
      return (self.store if box is None else self.store[box]).read().result().view(self.dtype)


def open_tensor(name: str, where: Path, kvstore: dict) -> Tensor:
  """Return an array of a store; a chunk that is not there is an error, never zeros."""
  spec = {'driver': 'zarr', 'kvstore': kvstore, 'fill_missing_data_reads': False}
  with _clear(f"tensor '{name}'", where):
    return Tensor(where, name, tensorstore().open(spec, open=True).result())


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
