"""Files of all formats: folders that are written completely or not at all, JSON, checksums."""

from collections.abc import Iterable, Iterator
import contextlib
import glob
import json
import os
from pathlib import Path
import re
import shutil
import socket
import uuid
import zlib

from flax.traverse_util import flatten_dict
import jax
import numpy as np

from speccascade.host import storage
from speccascade.types import Model, Params

AGAIN = 'copy or download the checkpoint again'
OTHERS = {'.bin', '.pt', '.pth', '.h5', '.msgpack', '.ot', '.onnx', '.gguf'}  # the same weights for other programs
GGUF = 'of GGUF, the format of llama.cpp, the file is given and not its folder: load FOLDER/NAME.gguf'
GENERATION = 'generation_config.json'
WEIGHTS = 'model.safetensors'
INDEX = f'{WEIGHTS}.index.json'
_OURS = {WEIGHTS, INDEX, 'checkpoint'}  # of which every checkpoint that we write has one
_UNFINISHED = re.compile(r'\.tmp-[^/]*$|\.orbax-checkpoint-tmp[^/]*$')


@contextlib.contextmanager
def atomic_dir(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
  """Yield a folder to write into, which gets the name `path` when all of it is written.

  Args:
    path: Folder of a checkpoint. An old one is renamed when the new one is complete, so that a process that is killed
      between the two renames loses neither.
    overwrite: Replace a checkpoint of ours or an empty folder; anything else is never replaced.

  Raises:
    FileExistsError: `path` exists and may not be replaced.
    NotADirectoryError: `path` is a file.
  """
  path = Path(os.path.abspath(path))
  check_free(path, overwrite)
  scratch = _scratch_name(path)
  aside = _scratch_name(path)
  scratch.mkdir(parents=True)
  try:
    with storage.full_disk(path):
      yield scratch
    check_free(path, overwrite)  # once more, for another process may have written there
    if path.exists():
      path.rename(aside)
    scratch.rename(path)
    for left in (aside, *_left_behind(path)):
      shutil.rmtree(left, ignore_errors=True)
  finally:
    shutil.rmtree(scratch, ignore_errors=True)


def check_free(path: Path, overwrite: bool):
  """Raise where `path` may not be written, as `atomic_dir` does."""
  if path.exists() and not overwrite:
    raise FileExistsError(f'{path} exists: choose another path, remove it, or ask for overwriting')
  if path.exists() and not path.is_dir():
    raise NotADirectoryError(f'{path} is a file: choose a folder')
  names = sorted(p.name for p in path.iterdir()) if path.exists() else []
  if names and not {*names} & _OURS:
    raise FileExistsError(f'{path} is no checkpoint of ours, it has {names[0]}: choose another path, or remove it')


def _scratch_name(path: Path) -> Path:
  """Return a name next to a path that no other writer has, with the process and the machine in it."""
  return path.with_name(f'{path.name}.tmp-{uuid.uuid4().hex[:8]}.{os.getpid()}.{socket.gethostname()}')


def _left_behind(path: Path) -> Iterator[Path]:
  """Yield what killed writers of `path` on this machine left."""
  for file in path.parent.iterdir():
    name = file.name.removeprefix(f'{path.name}.tmp-')
    if mine := re.fullmatch(rf'[0-9a-f]{{8}}\.(\d+)\.{re.escape(socket.gethostname())}', name):
      try:
        os.kill(int(mine.group(1)), 0)
      except ProcessLookupError:
        yield file
      except PermissionError:  # another user's, and alive
        pass


def check_finished(path: Path) -> None:
  """Raise where a writer of `path` was stopped."""
  candidates = [path]
  if not path.exists() and path.parent.is_dir():
    candidates = sorted(path.parent.glob(f'{glob.escape(path.name)}.*'))
  if left := [p for p in candidates if _UNFINISHED.search(p.name)]:
    raise ValueError(f'{left[0]} is half-written, its writer was stopped: remove it and write the checkpoint again')


def check_plain(paths: Iterable[Path]) -> None:
  """Raise for a pipe or a device, which would be waited for."""
  for path in paths:
    if path.exists() and not (path.is_file() or path.is_dir()):
      raise ValueError(f'{path} is a pipe or a device and no file: remove it')


def check_pointer(file: Path) -> None:
  """Raise where Git LFS has left its pointer in a file's place."""
  with file.open('rb') as f:
    if f.read(8) == b'version ':
      raise ValueError(
        f'{file} is the pointer of Git LFS, not the weights: fetch them, by git lfs pull in {file.parent}'
      )


def read_json(path: Path) -> dict:
  """Return a JSON object."""
  try:
    value = json.loads(path.read_text(encoding='utf-8'))
  except FileNotFoundError:
    raise FileNotFoundError(f'{path} does not exist: is {path.parent} a Hugging Face model folder?') from None
  except (ValueError, RecursionError) as error:  # also for numbers of very many digits
    raise ValueError(f'{path} is not valid JSON ({error}): {AGAIN}') from error
  if type(value) is not dict:
    raise ValueError(f'{path} is not a JSON object: {AGAIN}')
  return value


def check_floats(model: Model):
  """Raise for weights that no format has here."""
  if any(x.dtype == np.int8 for x in jax.tree.leaves(model.params)):
    raise ValueError(f'the weights of {model.name} are int8, which is not written: load it as float32 or bfloat16')


def checksum(x: jax.Array | np.ndarray) -> int:
  """Return the CRC-32 of an array's bytes in C order."""
  return zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)


def facts(params: Params) -> dict[str, dict]:
  """Return shape, dtype and checksum of every tensor."""
  return {
    name: {'shape': list(x.shape), 'dtype': x.dtype.name, 'crc32': checksum(np.asarray(x))}
    for name, x in flatten_dict(params, sep='.').items()
  }


def copy_tokenizer(tokenizer, folder: Path):
  """Copy a tokenizer's files into a folder."""
  for file in tokenizer.files() if tokenizer is not None else ():
    copy = folder / os.path.relpath(file, Path(tokenizer.path).parent)
    copy.parent.mkdir(exist_ok=True)
    shutil.copyfile(file, copy)


def write_generation(model: Model, folder: Path):
  """Write a model's `generation_config.json`, if it has one, into a folder, with the ids that end its texts now."""
  if model.generation is not None:
    config = json.loads(model.generation) | {'eos_token_id': list(model.network.eos_ids) or None}
    (folder / GENERATION).write_text(json.dumps(config, indent=2) + '\n', encoding='utf-8')
