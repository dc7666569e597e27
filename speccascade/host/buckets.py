"""Files in buckets: gs://…, s3://… and whatever else fsspec has a package for, as paths like those of a disk.

A bucket holds whole objects: each is there or not, none is appended to or renamed, and none can be locked. What is
written with `create` is written only where there is nothing yet, so of two writers of one name one fails.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import fcntl
import hashlib
import json
import logging
import os
from pathlib import Path
import posixpath
import re
from typing import Any
import uuid

from speccascade.host.progress import Progress

PACKAGES = {'gs': 'gcsfs', 'gcs': 'gcsfs', 's3': 's3fs', 'az': 'adlfs', 'abfs': 'adlfs', 'abfss': 'adlfs'}
CLIENTS = ('gcsfs', 'google', 'aiohttp', 'aiobotocore', 'botocore', 's3fs', 'adlfs', 'azure', 'requests', 'fsspec')
CACHE = Path(os.environ.get('XDG_CACHE_HOME') or '~/.cache').expanduser() / 'speccascade' / 'buckets'
AT_ONCE = 64  # objects read side by side
_ADDRESS = re.compile(r'([A-Za-z][\w+.-]*)://')
_MISWRITTEN = re.compile(rf'({"|".join(PACKAGES)}):(?!//[^/])')


def is_address(path: Any) -> bool:
  """Tell whether a text is an address, SCHEME://…, and no path of this machine; refuse what means to be one."""
  text = str(path) if isinstance(path, str | Path) else ''
  if found := _MISWRITTEN.match(text):
    raise ValueError(f'{text} is neither a path nor an address: write {found[1]}://BUCKET/PATH, a text.')
  if text.startswith(('file:/', 'local:/')):
    raise ValueError(f'{text} lies on this machine: give its path, without {text.partition(":")[0]}://.')
  return isinstance(path, str) and bool(_ADDRESS.match(path))


def path(address: str):
  """Return an address as a path, having checked that what opens it is installed."""
  scheme = _ADDRESS.match(address).group(1)
  if scheme == 'data':
    raise ValueError(f'{address} would be content and no file: give a path, or an address as gs://BUCKET/PATH.')
  try:
    import upath

    for name in ('gcsfs', 'google.auth'):  # they log the traceback of each attempt that fails
      logging.getLogger(name).setLevel(logging.CRITICAL)
    found = upath.UPath(address, use_listings_cache=False)
    _ = found.fs
  except ImportError as error:
    missing = PACKAGES.get(scheme) or getattr(error, 'name', None) or 'its fsspec package'
    missing = f'universal-pathlib {missing}' if getattr(error, 'name', '') == 'upath' else missing
    raise ValueError(f'{address} cannot be opened: pip install {missing}') from error
  except (ValueError, TypeError, OSError) as error:  # whatever a file system wants to know first
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise ValueError(f'{address} cannot be opened ({said}): fsspec has gs://, s3://, az:// and more') from error
  return found


def inside(path: Any) -> bool:
  """Tell whether a path lies in a bucket."""
  return not isinstance(path, str | Path)


@contextlib.contextmanager
def reached() -> Iterator[None]:
  """Turn errors of the clients of buckets into those of a file system."""
  try:
    yield
  except OSError:
    raise
  except Exception as error:  # clients have errors of their own, and which client it is the address decides
    if type(error).__module__.split('.')[0] not in CLIENTS:
      raise
    raise OSError(f'{type(error).__name__}: {str(error).strip().splitlines()[0]}') from error


def files(folder) -> dict[str, dict]:
  """Return the objects below a folder by their names from it, with what the bucket says of each."""
  with reached():
    try:
      found = folder.fs.find(folder.path, detail=True)
    except FileNotFoundError:
      return {}
  return {posixpath.relpath(name, folder.path): about for name, about in sorted(found.items())}


def write(path, content: bytes):
  """Write an object."""
  with reached():
    path.fs.pipe_file(path.path, content)


def create(path, content: bytes):
  """Write an object where there is none; raise FileExistsError where there is one."""
  with reached():
    path.fs.pipe_file(path.path, content, mode='create')


def upload(file: Path, path):
  """Write an object with the content of a file."""
  with reached():
    path.fs.put_file(str(file), path.path)


def remove(folder, names: list[str]):
  """Remove objects of a folder."""
  with reached():
    if names:
      folder.fs.rm([posixpath.join(folder.path, name) for name in names])


def contents(folder, names: list[str]) -> Iterator[bytes]:
  """Yield what objects of a folder hold, in order, some of them fetched side by side."""
  for start in range(0, len(names), AT_ONCE):
    paths = [posixpath.join(folder.path, name) for name in names[start : start + AT_ONCE]]
    with reached():
      found = folder.fs.cat(paths) if len(paths) > 1 else {paths[0]: folder.fs.cat_file(paths[0])}
    yield from (found[path] for path in paths)


# ---- copies on this machine ----


def copied(path, wanted: Callable[[str], bool] = lambda name: True, beside: Sequence[str] = ()) -> Path:
  """Return a copy on this machine of a file or folder and of what lies beside it; what has changed is fetched anew.

  Beside it lie files and the folders `beside`. `wanted` tells by their names from the folder above which are copied.
  """
  above = path.parent
  root = CACHE / hashlib.sha256(str(above).encode()).hexdigest()[:16]
  root.mkdir(parents=True, exist_ok=True)
  with open(root / '.lock', 'a') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    _update(above, root, _listed(path, wanted, beside))
  return root / path.name


def _listed(path, wanted: Callable[[str], bool], folders: Sequence[str]) -> dict[str, dict]:
  """Return the names of what is to be there, with what the bucket says of each."""
  with reached():
    is_file = path.fs.isfile(path.path)
    found = {path.name: path.fs.info(path.path)} if is_file else {}
    beside = path.fs.ls(path.parent.path, detail=True)
  if not is_file:
    found = {f'{path.name}/{name}': about for name, about in files(path).items()}
    if not found:
      raise FileNotFoundError(f'{path} does not exist: the bucket has nothing of that name')
    found |= {f'{folder}/{name}': about for folder in folders for name, about in files(path.parent / folder).items()}
    found |= {posixpath.basename(about['name']): about for about in beside if about['type'] == 'file'}
  return {name: about for name, about in found.items() if wanted(name)}


def _update(above, root: Path, listed: dict[str, dict]):
  """Fetch what is not there as listed, noting each file, and remove what was fetched once and is listed no more."""
  known = root / '.known.json'
  had = json.loads(known.read_text(encoding='utf-8')) if known.exists() else {}
  marks = {name: _mark(about) for name, about in listed.items()}
  missing = {
    name: about.get('size') or 0 for name, about in listed.items()
    if had.get(name) != marks[name] or not (root / name).is_file()
  }  # fmt: skip
  progress = Progress(f'fetching {above}', sum(missing.values()), unit='bytes')
  for name, size in missing.items():
    _fetch(above / name, root / name, size, progress)
    had[name] = marks[name]
    _note(known, had)
  tops = {name.split('/')[0] for name in listed if '/' in name}
  gone = [name for name in had if name not in listed and name.split('/')[0] in tops]
  for name in gone:
    (root / name).unlink(missing_ok=True)
  if gone:
    _note(known, {name: mark for name, mark in had.items() if name not in gone})


def _mark(about: dict) -> str:
  """Return what tells the content of an object from any other."""
  return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _note(known: Path, had: dict[str, str]):
  part = known.with_suffix('.part')
  part.write_text(json.dumps(had), encoding='utf-8')
  os.replace(part, known)


def _fetch(path, to: Path, size: int, progress: Progress):
  """Fetch an object to its place, where it is whole or not at all, and count its bytes while they come."""
  from fsspec.callbacks import Callback

  part, counted = to.with_name(f'{to.name}.{uuid.uuid4().hex[:8]}.part'), 0

  def count(_, value: int):
    nonlocal counted
    if value != counted:
      progress.add(value - counted, to.name)
    counted = value

  part.parent.mkdir(parents=True, exist_ok=True)
  try:
    with reached():
      path.fs.get_file(path.path, str(part), callback=Callback(hooks={'count': count}))
    os.replace(part, to)
  finally:
    part.unlink(missing_ok=True)
  count(None, size)  # of which not every client tells
