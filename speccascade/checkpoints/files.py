"""What the formats share: checkpoints appear whole or not at all, and trees are checked tensor by tensor."""

from collections.abc import Iterator, Mapping
import contextlib
import hashlib
import os
from pathlib import Path
import re
import shutil
import socket
import uuid
import zlib

import jax
import numpy as np

from speccascade.checkpoints.tensor_files import AGAIN, header
from speccascade.host import storage
from speccascade.types import Network, Params

_WHOLE = 1 << 20  # bytes of a file that `digest` reads in full; of a larger one, this much of its head and samples
_SAMPLES, _SAMPLE = 1024, 64
_OURS = {'speccascade.json', 'model.safetensors', 'checkpoint'}  # of which every checkpoint that we write has one
_UNFINISHED = re.compile(r'\.tmp-[^/]*$|\.orbax-checkpoint-tmp[^/]*$')


@contextlib.contextmanager
def whole(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
  """Yield a folder to write into, which gets the name `path` when all of it is written.

  With `overwrite` it replaces a checkpoint of ours or an empty folder, and nothing else. That stays until the new one
  is whole, and is moved aside for it, so that a process that is killed between the two renames loses neither.
  """
  path = Path(os.path.abspath(path))
  _check_free(path, overwrite)
  scratch, aside = _beside(path), _beside(path)
  scratch.mkdir(parents=True)
  try:
    with storage.full_disk(path):
      yield scratch
    _check_free(path, overwrite)  # once more, for another process may have written there
    if path.exists():
      path.rename(aside)
    scratch.rename(path)
    for left in (aside, *_left_behind(path)):
      shutil.rmtree(left, ignore_errors=True)
  finally:
    shutil.rmtree(scratch, ignore_errors=True)


def _check_free(path: Path, overwrite: bool):
  if path.exists() and not overwrite:
    raise FileExistsError(f'{path} exists: choose another path, remove it, or ask for overwriting')
  if path.exists() and not path.is_dir():
    raise NotADirectoryError(f'{path} is a file: choose a folder')
  found = sorted(p.name for p in path.iterdir()) if path.exists() else []
  if found and not {*found} & _OURS:
    raise FileExistsError(f'{path} is no checkpoint of ours, it holds {found[0]}: choose another path, or remove it')


def _beside(path: Path) -> Path:
  """Return a name beside a path that no other writer has, and that tells whose it is."""
  return path.with_name(f'{path.name}.tmp-{uuid.uuid4().hex[:8]}.{os.getpid()}.{socket.gethostname()}')


def _left_behind(path: Path) -> Iterator[Path]:
  """Yield what writers of `path` on this machine left that were killed."""
  for found in path.parent.iterdir():
    name = found.name.removeprefix(f'{path.name}.tmp-')
    if mine := re.fullmatch(rf'[0-9a-f]{{8}}\.(\d+)\.{re.escape(socket.gethostname())}', name):
      try:
        os.kill(int(mine.group(1)), 0)
      except ProcessLookupError:
        yield found
      except PermissionError:  # another user's, and alive
        pass


def unfinished(path: Path) -> bool:
  """Tell whether a name is one that a writer gives to what it has not finished."""
  return bool(_UNFINISHED.search(path.name))


def check_finished(path: Path) -> None:
  """Raise where a writer of `path` was stopped half-way."""
  left = [path] if unfinished(path) else []
  if not path.exists() and path.parent.is_dir():
    left = [p for p in sorted(path.parent.glob(path.name + '.*')) if unfinished(p)]
  if left:
    raise ValueError(f'{left[0]} is half-written, its writer was stopped: remove it and write the checkpoint again')


def named(params: Params, prefix: str = '') -> dict[str, jax.Array]:
  """Return the leaves of a tree by dotted name."""
  if not isinstance(params, dict):
    return {prefix[:-1]: params}
  return {name: x for key, tree in params.items() for name, x in named(tree, f'{prefix}{key}.').items()}


def nested(leaves: dict[str, jax.Array]) -> Params:
  """Undo `named`, taking the leaves out of the dict that is given."""
  tree: Params = {}
  for name in list(leaves):
    *modules, leaf = name.split('.')
    at = tree
    for module in modules:
      at = at.setdefault(module, {})
    at[leaf] = leaves.pop(name)
  return tree


def check_shapes(found: dict[str, tuple[int, ...]], network: Network, where: Path) -> None:
  """Raise one error for the first tensor that is missing, of another shape, or unexpected."""
  expected = {name: x.shape for name, x in named(network.param_shapes()).items()}
  for name, shape in expected.items():
    if name not in found:
      raise ValueError(f"{where}: tensor '{name}' {list(shape)} is missing: {AGAIN}")
    if tuple(found[name]) != shape:
      raise ValueError(
        f"{where}: tensor '{name}' has shape {list(found[name])}, but with the sizes of the other tensors and of "
        f'config.json or gin, where there is one, it should have {list(shape)}: correct that file, or {AGAIN}'
      )
  for name in found:
    if name not in expected:
      raise ValueError(
        f"{where}: tensor '{name}' {list(found[name])} is unexpected in a {type(network).__name__} of these sizes: "
        f'is it another architecture? Else {AGAIN}'
      )


def checksum(x: jax.Array | np.ndarray) -> int:
  """Return the CRC-32 of an array's bytes in C order."""
  return zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)


def file_checksum(file: Path) -> int:
  """Return the CRC-32 of a file, read in pieces."""
  value = 0
  with file.open('rb') as f:
    while piece := f.read(1 << 24):
      value = zlib.crc32(piece, value)
  return value


def digest(named: Mapping[str, Path]) -> str:
  """Return 16 hex digits of files by name: their names, sizes, heads, and bytes sampled throughout."""
  value = hashlib.sha256()
  for name, file in sorted(named.items(), key=lambda item: Path(item[0])):
    size = file.stat().st_size
    value.update(f'{name}\0{size}\0'.encode())
    with file.open('rb') as f:
      value.update(f.read(_WHOLE))
      for place in _places(file, size) if size > _WHOLE else ():
        f.seek(place)
        value.update(f.read(_SAMPLE))
  return value.hexdigest()[:16]


def digest_of_params(params: Params) -> str:
  """Return 16 hex digits of parameters: names, dtypes, shapes, and values sampled of each."""
  value = hashlib.sha256()
  for name, x in named(params).items():
    value.update(f'{name} {x.dtype} {x.shape}'.encode())
    value.update(np.asarray(x).reshape(-1)[:: max(1, x.size // 1024)].tobytes())
  return value.hexdigest()[:16]


def _places(file: Path, size: int) -> list[int]:
  """Return where a large file is sampled: evenly, its end included, and in the midst of each of its tensors."""
  places = [(size - _SAMPLE) * i // _SAMPLES for i in range(1, _SAMPLES + 1)]
  if file.suffix == '.safetensors':
    places += [tensor.start + max(0, tensor.nbytes - _SAMPLE) // 2 for tensor in header(file).values()]
  return places


def copy_tokenizer(tokenizer, folder: Path) -> list[str]:
  """Copy a tokenizer's files into a folder and return their names."""
  files = tokenizer.files() if tokenizer is not None else []
  for file in files:
    shutil.copyfile(file, folder / Path(file).name)
  return [Path(file).name for file in files]
