"""Files that are there whole or not at all, and paths that this machine can open."""

import os
from pathlib import Path
import re
import uuid

_PART = re.compile(r'\.[0-9a-f]{8}\.part')


def local(path: str | os.PathLike) -> Path:
  """Return a path of this machine's file system, `~` written out; an address, as gs://…, is refused."""
  if re.match(r'[A-Za-z][\w+.-]*://', os.fspath(path)):
    raise ValueError(
      f'{path} is an address, and only files of this machine are opened: copy or mount it, and give that.'
    )
  return Path(path).expanduser()


def write(path: Path, content: str | bytes):
  """Write a file beside its place and rename it into it, when the disk has all of it."""
  data = content.encode() if isinstance(content, str) else content
  path.parent.mkdir(parents=True, exist_ok=True)
  part = path.with_name(f'{path.name}.{uuid.uuid4().hex[:8]}.part')
  try:
    with open(part, 'xb') as f:
      f.write(data)
      f.flush()
      os.fsync(f.fileno())
    os.replace(part, path)
  finally:
    part.unlink(missing_ok=True)


def is_part(path: Path) -> bool:
  """Tell whether a file is one that `write` had not written to its end."""
  return bool(_PART.fullmatch(''.join(path.suffixes[-2:])))
