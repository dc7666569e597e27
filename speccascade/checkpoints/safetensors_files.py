"""The tensors of safetensors files.

A file is opened anew for each tensor: the library maps it into memory, and its pages are to leave the process with it.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np

from speccascade.checkpoints.assemble import Box, full_box, Shape
from speccascade.checkpoints.files import AGAIN, check_pointer

DTYPES = {'F32': np.float32, 'F16': np.float16, 'BF16': ml_dtypes.bfloat16}


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor of a file, not read yet."""

  file: Path
  name: str
  code: str  # safetensors' name of the dtype
  shape: Shape

  @property
  def dtype(self) -> np.dtype:
    """Return the dtype in numpy's terms."""
    if self.code not in DTYPES:
      remedy = 'as float32' if self.code == 'F64' else 'unquantised'
      raise ValueError(
        f"{self.file}: tensor '{self.name}' has dtype {self.code}, and {', '.join(DTYPES)} are read: "
        f'save the model {remedy}'
      )
    return np.dtype(DTYPES[self.code])

  def read(self, box: Box | None = None) -> np.ndarray:
    """Return the tensor, or the part of it in a box, in memory of its own."""
    with _opened(self.file) as file:
      x = file.get_tensor(self.name) if box in (None, full_box(self.shape)) else file.get_slice(self.name)[box]
    return x.astype(self.dtype, copy=False)


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


def tensors(file: Path) -> dict[str, Tensor]:
  """Return the tensors of a file."""
  with _opened(file) as opened:
    slices = {name: opened.get_slice(name) for name in opened.keys()}
    return {name: Tensor(file, name, x.get_dtype(), tuple(x.get_shape())) for name, x in slices.items()}


def offsets(file: Path) -> list[tuple[int, int]]:
  """Return the first byte of each tensor of a file, and the one after its last."""
  with _opened(file), file.open('rb') as f:
    start = 8 + int.from_bytes(f.read(8), 'little')
    header = json.loads(f.read(start - 8))
  from_start = [entry['data_offsets'] for name, entry in header.items() if name != '__metadata__']
  return [(start + first, start + last) for first, last in from_start]
