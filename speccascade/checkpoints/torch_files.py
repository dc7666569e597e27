"""The tensors of PyTorch's files, as `pytorch_model.bin`; torch is imported where one is read."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from speccascade.checkpoints.assemble import Box, Shape
from speccascade.checkpoints.files import AGAIN, check_pointer
from speccascade.host.errors import first_line

_DTYPES = {'float32': np.float32, 'float16': np.float16, 'bfloat16': ml_dtypes.bfloat16}


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
  """A tensor of a file that is mapped into memory."""

  file: Path
  name: str
  data: Any  # of torch

  @property
  def shape(self) -> Shape:
    """Return the tensor's shape."""
    return tuple(self.data.shape)

  @property
  def dtype(self) -> np.dtype:
    """Return the dtype in numpy's terms."""
    name = str(self.data.dtype).removeprefix('torch.')
    if name not in _DTYPES:
      raise ValueError(
        f"{self.file}: tensor '{self.name}' has dtype {name}, and {', '.join(_DTYPES)} are read: "
        f'save the model {"as float32" if name == "float64" else "unquantised"}'
      )
    return np.dtype(_DTYPES[name])

  def read(self, box: Box | None = None) -> np.ndarray:
    """Return the tensor, or the part of it in a box, in memory of its own."""
    import torch

    part = (self.data if box is None else self.data[box]).detach()
    bits = torch.int16 if self.dtype.itemsize == 2 else torch.int32  # numpy has no bfloat16
    return np.array(part.contiguous().view(bits).numpy()).view(self.dtype)


def check_readable(where: Any) -> None:
  """Raise where torch is not installed."""
  if importlib.util.find_spec('torch') is None:
    raise ValueError(
      f'{where} has its weights as pytorch_model.bin alone, which needs torch: pip install torch, or write them as '
      'safetensors where it is, by transformers: from_pretrained(PATH) and save_pretrained(PATH)'
    )


def tensors(file: Path) -> dict[str, Tensor]:
  """Return the tensors of a file, of which nothing but tensors is unpickled."""
  check_readable(file)
  check_pointer(file)
  try:
    state = _load(file)
  except Exception as error:  # whatever unpickling raises
    raise ValueError(
      f'{file} is truncated, corrupt or more than tensors, it has {file.stat().st_size} bytes '
      f'({first_line(error)[:200]}): {AGAIN}'
    ) from None
  if not isinstance(state, dict) or not all(hasattr(x, 'detach') for x in state.values()):
    raise ValueError(f'{file} is no map of names to tensors: save it with model.save_pretrained(PATH)')
  return {name: Tensor(file, name, x) for name, x in state.items()}


def _load(file: Path) -> Any:
  import torch  # lazily: only these files need it

  settings = dict(map_location='cpu', weights_only=True)
  try:
    return torch.load(file, mmap=True, **settings)
  except RuntimeError:  # files of torch before 1.6 cannot be mapped
    return torch.load(file, **settings)
