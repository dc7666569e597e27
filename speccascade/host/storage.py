"""Paths, of this machine or in a bucket; files of this machine, written atomically; locks; local copies of objects.

A bucket is gs://…, s3://… and whatever else fsspec has a package for. `runs.RunDir` writes there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
from pathlib import Path
import posixpath
import re
import socket
import tempfile
from typing import Any, BinaryIO
import uuid

from speccascade.host.errors import first_line, RunError
from speccascade.host.progress import Progress

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PACKAGES = {'gs': 'gcsfs', 'gcs': 'gcsfs', 's3': 's3fs', 'az': 'adlfs', 'abfs': 'adlfs', 'abfss': 'adlfs'}
CLIENTS = ('gcsfs', 'google', 'aiohttp', 'aiobotocore', 'botocore', 's3fs', 'adlfs', 'azure', 'requests', 'fsspec')
_ADDRESS = re.compile(r'([A-Za-z][\w+.-]*)://')
_MISWRITTEN = re.compile(rf'({"|".join(PACKAGES)}):(?!//[^/])')
_PART = re.compile(r'\.[0-9a-f]{8}\.part')


# ---- paths ----


def cache_folder(name: str) -> Path | None:
  """Return a folder of copies that can be made again, None where neither XDG_CACHE_HOME nor a home is known."""
  try:
    return Path(os.environ.get('XDG_CACHE_HOME') or '~/.cache').expanduser() / 'speccascade' / name
  except RuntimeError:
    return None


CACHE = cache_folder('buckets')


def is_address(path: Any) -> bool:
  """Tell whether a text is an address, SCHEME://…, and no path of this machine.

  Raises:
    ValueError: for an address that lacks a part, or that is of this machine.
  """
  text = str(path) if isinstance(path, str | Path) else ''
  if scheme := _MISWRITTEN.match(text):
    raise ValueError(f'{text} is neither a path nor an address: write {scheme[1]}://BUCKET/PATH, a text.')
  if text.startswith(('file:/', 'local:/')):
    raise ValueError(f'{text} is on this machine: give its path, without {text.partition(":")[0]}://.')
  return isinstance(path, str) and bool(_ADDRESS.match(path))


def in_bucket(path: Any) -> bool:
  """Tell whether a path is in a bucket."""
  return not isinstance(path, str | Path)


def local(path: str | os.PathLike) -> Path:
  """Return a path of this machine with `~` expanded; raise ValueError for an address, as gs://…."""
  if is_address(path):
    raise ValueError(f'{path} is an address, which cannot be opened here: copy or mount it, and give that path.')
  return Path(path).expanduser()


def resolve(path: str | os.PathLike):
  """Return a path of this machine with `~` expanded, or the path of an address, whose package must be installed."""
  return _open_address(path) if is_address(path) else Path(path).expanduser()


def _open_address(address: str):
  scheme = _ADDRESS.match(address)[1]
  if scheme == 'data':
    raise ValueError(f'{address} would be content and no file: give a path, or an address as gs://BUCKET/PATH.')
  try:
    import upath

    for name in ('gcsfs', 'google.auth'):  # they log the traceback of each attempt that fails
      logging.getLogger(name).setLevel(logging.CRITICAL)
    path = upath.UPath(address, use_listings_cache=False)
    _ = path.fs
  except ImportError as error:
    missing = PACKAGES.get(scheme) or getattr(error, 'name', None) or 'its fsspec package'
    missing = f'universal-pathlib {missing}' if getattr(error, 'name', '') == 'upath' else missing
    raise ValueError(f'{address} cannot be opened: pip install {missing}') from error
  except (ValueError, TypeError, OSError) as error:  # whatever a file system asks for first
    raise ValueError(
      f'{address} cannot be opened ({first_line(error)}): fsspec has gs://, s3://, az:// and more'
    ) from error
  return path


def file_name(name: str) -> str:
  """Return a name as that of a file in a folder, never one of a folder above it, as `..`."""
  return re.sub(r'^\.+|[^\w.-]+', '_', name) or '_'


# ---- errors ----


@contextlib.contextmanager
def full_disk(path: Path) -> Iterator[None]:
  """Raise an OSError that names the path where a disk is full, which libraries report in errors of their own."""
  try:
    yield
  except Exception as error:
    for number in FULL:
      if getattr(error, 'errno', None) == number or os.strerror(number) in str(error):
        raise OSError(number, os.strerror(number), str(path)) from error
    raise


@contextlib.contextmanager
def client_errors() -> Iterator[None]:
  """Turn errors of the clients of buckets into those of a file system."""
  try:
    yield
  except OSError:
    raise
  except Exception as error:  # the address decides which client it is, and each has errors of its own
    if type(error).__module__.split('.')[0] not in CLIENTS:
      raise
    raise OSError(first_line(error, named=True)) from error


@contextlib.contextmanager
def one_sentence(what: str, remedy: str) -> Iterator[None]:
  """Turn a failure of a file system or a bucket into a RunError: what failed, why, and the remedy."""
  try:
    with client_errors():
      yield
  except OSError as error:
    reason = ' '.join(str(error.strerror or error).split())  # a bucket's may have lines
    raise RunError(f'{what}: {reason}; {remedy}.') from error


# ---- atomic writes ----


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
  """Yield the path of a file to write next to `path`, which replaces it when the block ends without an error."""
  path.parent.mkdir(parents=True, exist_ok=True)
  part = path.with_name(f'{path.name}.{uuid.uuid4().hex[:8]}.part')
  try:
    with full_disk(path):
      yield part
    os.replace(part, path)
  finally:
    part.unlink(missing_ok=True)


def is_device(path: Path) -> bool:
  """Tell whether a path is a pipe or a device, which is written into and never replaced."""
  return path.exists() and not path.is_file() and not path.is_dir()


def write(path: Path, content: str | bytes | Iterable[bytes]):
  """Write a file of this machine atomically; its content may come in pieces."""
  if is_device(path):
    with open(path, 'wb') as file:
      write_pieces(file, content)
    return
  with atomic(path) as part, open(part, 'xb') as file:
    write_pieces(file, content)
    os.fsync(file.fileno())


def write_pieces(file: BinaryIO, content: str | bytes | Iterable[bytes]):
  """Write into an open file."""
  content = content.encode() if isinstance(content, str) else content
  file.writelines([content] if isinstance(content, bytes) else content)
  file.flush()


def is_part(path: Path) -> bool:
  """Tell whether a file is one that `atomic` has not finished."""
  return bool(_PART.fullmatch(''.join(path.suffixes[-2:])))


def check_free(path: Path, overwrite: bool):
  """Raise FileExistsError where a path exists and is not to be replaced."""
  if path.exists() and not overwrite:
    raise FileExistsError(f'{path} exists; pass --overwrite to replace it.')


def check_writable(path: Path):
  """Raise PermissionError where nothing can be written next to a path, of which some folders may be missing."""
  if is_device(path):
    return
  parent = next(p for p in Path(os.path.abspath(path)).parents if p.exists())
  try:  # with a name as long as that of `atomic`
    with tempfile.TemporaryDirectory(dir=parent, prefix=f'{path.name}.', suffix='.part'):
      pass
  except OSError as error:
    raise PermissionError(f'{path} cannot be written in {parent} ({error.strerror}): choose another') from None


def output_file(path: Path, overwrite: bool) -> Path:
  """Return the file that a command writes: a path, or what it links to, for a link stays.

  Raises:
    RunError: for a folder.
    OSError: for a file that is not to be replaced, or one out of reach.
  """
  if path.is_dir():
    raise RunError(f'{path} is a folder: name a file in it.')
  path = Path(os.path.realpath(path))
  check_free(path, overwrite)
  check_writable(path)
  return path


# ---- digests ----


def digest(data: bytes) -> str:
  """Return 16 hex digits that tell bytes from any other."""
  return hashlib.sha256(data).hexdigest()[:16]


def digest_of_json(value: Any) -> str:
  """Return the digest of a value as JSON has it, whatever the order of its keys; what JSON lacks counts as text."""
  return digest(json.dumps(value, sort_keys=True, default=str).encode())


def check_identity(what: str, before: Mapping[str, Any], identity: Mapping[str, Any]):
  """Raise where what was written `before` is not of this identity; `what` begins the sentence."""
  for name, value in identity.items():
    if before.get(name) != value:
      raise ValueError(f'{what} {name} {before.get(name)}, not {value}: choose another folder, or remove it')


# ---- locks ----


def try_lock(file) -> bool:
  """Lock an open file and tell whether that was possible; the lock ends with the file or with the process."""
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  return True


@contextlib.contextmanager
def lock(path: Path, remedy: str) -> Iterator[None]:
  """Lock a folder by a file in it, which names the process that has the lock.

  Args:
    path: The lock file; its folder is made where there is none.
    remedy: Ends the error, as in 'choose another folder'.

  Raises:
    RunError: where another process has the lock, or the file cannot be written.
  """
  with one_sentence(f'{path.parent} cannot be written', remedy):
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, 'a+')
  with file:
    if not try_lock(file):
      file.seek(0)
      owner = file.read().strip() or 'another process'
      raise RunError(f'{path.parent} is in use by {owner}; wait for it, stop it, or {remedy}.')
    with one_sentence(f'{path} cannot be written', 'free some space'):
      file.truncate(0)
      file.write(this_process())
      file.flush()
    yield


def this_process() -> str:
  """Return the line by which a lock names this process."""
  return f'process {os.getpid()} on {socket.gethostname()}\n'


# ---- objects of a bucket ----


@client_errors()
def objects(folder) -> dict[str, dict]:
  """Return the objects below a folder by their names in it, with what the bucket reports of each."""
  try:
    entries = folder.fs.find(folder.path, detail=True)
  except FileNotFoundError:
    return {}
  return {posixpath.relpath(name, folder.path): about for name, about in sorted(entries.items())}


# ---- local copies ----


# Chooses, by the names that files have from the folder above, those that are copied; the function reads one of them.
Choose = Callable[[Sequence[str], Callable[[str], bytes]], Iterable[str]]


def everything(names: Sequence[str], read: Callable[[str], bytes]) -> Sequence[str]:
  """Choose all files."""
  return names


def local_copy(path, choose: Choose = everything, siblings: Sequence[str] = ()) -> Path:
  """Return a file or folder on this machine; of a bucket, a copy of it and of the files next to it.

  Each version of a folder is fetched once, to `CACHE`.

  Args:
    path: A path of this machine, an address, or a path in a bucket.
    choose: Which objects are copied.
    siblings: Folders next to `path` that are copied too; files next to a folder always are.
  """
  path = resolve(path) if isinstance(path, str) else path
  if not in_bucket(path):
    return path.expanduser()
  if CACHE is None:
    raise RunError(f'{path} cannot be copied here, for no home folder is known: set XDG_CACHE_HOME to a folder.')
  listed = _list(path, choose, siblings)
  copy = CACHE / digest_of_json([str(path.parent), listed])
  if not copy.exists():
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch, client_errors():
      made = Path(scratch) / 'copy'
      made.mkdir()
      progress = Progress(f'fetching {path.parent}', len(listed), unit='files')
      for name in listed:
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        path.fs.get_file((path.parent / name).path, str(made / name))
        progress.add(1, name)
      rename_new(made, copy)
  return copy / path.name


def rename_new(made: Path, name: Path):
  """Give a folder its name, unless another process has made it meanwhile."""
  try:
    made.rename(name)
  except OSError:
    if not name.is_dir():
      raise


@client_errors()
def _list(path, choose: Choose, siblings: Sequence[str]) -> dict[str, dict]:
  """Return the objects to copy by their names from the folder above."""
  if path.fs.isfile(path.path):
    entries = {path.name: path.fs.info(path.path)}
  elif not objects(path):
    raise FileNotFoundError(f'{path} does not exist: the bucket has nothing of that name')
  else:
    next_to = path.fs.ls(path.parent.path, detail=True)
    entries = {posixpath.basename(about['name']): about for about in next_to if about['type'] == 'file'}
    for folder in (path.name, *siblings):
      entries |= {f'{folder}/{name}': about for name, about in objects(path.parent / folder).items()}
  chosen = choose(list(entries), lambda name: path.fs.cat_file((path.parent / name).path))
  return {name: entries[name] for name in chosen}
