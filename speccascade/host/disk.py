"""Files that are there whole or not at all, on a disk or in a bucket, and paths that this machine can open."""

from collections.abc import Callable, Iterable, Iterator
import contextlib
import errno
import glob
import os
from pathlib import Path
import re
import tempfile
import uuid

from speccascade.host import buckets

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PART = re.compile(r'\.[0-9a-f]{8}\.part')


def local(path: str | os.PathLike) -> Path:
  """Return a path of this machine's file system, `~` written out; an address, as gs://…, is refused."""
  if buckets.is_address(path):
    raise ValueError(f'{path} is an address, and this is opened on a disk alone: copy or mount it, and give that.')
  return Path(path).expanduser()


def place(path: str | os.PathLike) -> Path:
  """Return a path of this machine's file system, `~` written out, or of a bucket."""
  return buckets.path(path) if buckets.is_address(path) else Path(path).expanduser()


def here(path: str | os.PathLike, wanted: Callable[[str], bool] = lambda name: True) -> Path:
  """Return a path of this machine's file system, where an address is copied to; see `buckets.copied`."""
  return buckets.copied(buckets.path(path), wanted) if buckets.is_address(path) else Path(path).expanduser()


def make(folder: Path):
  """Make a folder; a bucket has none to make."""
  if not buckets.inside(folder):
    folder.mkdir(parents=True, exist_ok=True)


def names(folder: Path) -> list[str]:
  """Return what lies in a folder, nothing where there is none."""
  if buckets.inside(folder):
    return sorted({name.split('/')[0] for name in buckets.files(folder)})
  return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []


def write(path: Path, content: str | bytes | Iterable[bytes]):
  """Write a file, whose content may come in pieces, beside its place and rename it when the disk has all of it."""
  content = content.encode() if isinstance(content, str) else content
  if buckets.inside(path):
    _send(path, content)
    return
  path.parent.mkdir(parents=True, exist_ok=True)
  part = path.with_name(f'{path.name}.{uuid.uuid4().hex[:8]}.part')
  try:
    with writing(path), open(part, 'xb') as f:
      f.writelines([content] if isinstance(content, bytes) else content)
      f.flush()
      os.fsync(f.fileno())
    os.replace(part, path)
  finally:
    part.unlink(missing_ok=True)


def unlinked(path: str, flags: int) -> int:
  """Open a file as `open` does when it is given this as `opener`, but not through a symbolic link."""
  try:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)
  except OSError as error:
    if error.errno != errno.ELOOP:
      raise
    raise OSError(errno.ELOOP, 'it is a symbolic link, which is not followed; remove it', path) from None


def append(file, data: bytes):
  """Write all of some bytes to an unbuffered file."""
  while data:
    data = data[os.write(file.fileno(), data) :]


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
  """Raise an OSError with the path where a disk is full, which libraries say in errors of their own."""
  try:
    yield
  except Exception as error:
    for number in FULL:
      if getattr(error, 'errno', None) == number or os.strerror(number) in str(error):
        raise OSError(number, os.strerror(number), str(path)) from error
    raise


def _send(path, content: bytes | Iterable[bytes]):
  """Write an object; pieces are put together on this machine first."""
  if isinstance(content, bytes):
    buckets.write(path, content)
    return
  with tempfile.NamedTemporaryFile() as f:
    f.writelines(content)
    f.flush()
    buckets.upload(Path(f.name), path)


@contextlib.contextmanager
def drawn(folder: Path, last: str) -> Iterator[Path]:
  """Yield a folder of this machine to write files into, which a bucket gets when all are written, `last` after others.

  What the bucket had in the folders that are written is removed.
  """
  if not buckets.inside(folder):
    yield folder
    return
  with tempfile.TemporaryDirectory() as scratch:
    yield Path(scratch)
    files = sorted((p for p in Path(scratch).rglob('*') if p.is_file()), key=lambda p: (p.name == last, p))
    made = [p.relative_to(scratch).as_posix() for p in files]
    tops = {name.split('/')[0] for name in made if '/' in name}
    buckets.remove(folder, [n for n in buckets.files(folder) if n.split('/')[0] in tops and n not in made])
    for name in made:
      buckets.upload(Path(scratch) / name, folder / name)


def sweep(path: Path):
  """Remove what writes of a file that were killed have left beside it."""
  for part in path.parent.glob(f'{glob.escape(path.name)}.*.part'):
    if is_part(part):
      part.unlink(missing_ok=True)


def is_part(path: Path) -> bool:
  """Tell whether a file is one that `write` had not written to its end."""
  return bool(_PART.fullmatch(''.join(path.suffixes[-2:])))
