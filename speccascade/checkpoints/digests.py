"""Digests that identify checkpoints without reading all of them."""

from collections.abc import Mapping
import hashlib
from pathlib import Path

from flax.traverse_util import flatten_dict
import numpy as np

from speccascade.checkpoints import stored
from speccascade.host import multihost
from speccascade.types import Params

_HEAD = 1 << 20  # bytes of a file that are read in full; of a larger one, this much of its head and samples
_SAMPLES = 1024
_SAMPLE = 64


def of_files(files: Mapping[str, Path]) -> str:
  """Return 16 hex digits of files by name: their names, sizes, heads, and bytes sampled throughout."""
  value = hashlib.sha256()
  for name, file in sorted(files.items(), key=lambda item: Path(item[0])):
    size = file.stat().st_size
    value.update(f'{name}\0{size}\0'.encode())
    with file.open('rb') as f:
      value.update(f.read(_HEAD))
      for offset in _sampled(file, size) if size > _HEAD else ():
        f.seek(offset)
        value.update(f.read(_SAMPLE))
  return value.hexdigest()[:16]


def of_params(params: Params) -> str:
  """Return 16 hex digits of parameters: names, dtypes, shapes, and values sampled of each."""
  value = hashlib.sha256()
  for name, x in flatten_dict(params, sep='.').items():
    value.update(f'{name} {x.dtype} {x.shape}'.encode())
    value.update(np.asarray(multihost.to_host(x)).reshape(-1)[:: max(1, x.size // 1024)].tobytes())
  return value.hexdigest()[:16]


def _sampled(file: Path, size: int) -> list[int]:
  """Return the offsets at which a large file is sampled: evenly, to its end, and in the middle of each tensor."""
  offsets = [(size - _SAMPLE) * i // _SAMPLES for i in range(1, _SAMPLES + 1)]
  if file.suffix == '.safetensors':
    offsets += [first + max(0, last - first - _SAMPLE) // 2 for first, last in stored.offsets(file)]
  return offsets
