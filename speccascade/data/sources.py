"""Sources: the texts by which commands, configs and functions name what lies outside of the program.

models/large  problems.jsonl.gz         a folder or a file of this machine
gs://bucket/models/large                an address in a bucket, of which a copy is cached here
org/name  org/name@REVISION             a model of the Hugging Face hub; of it only the files that are read are fetched
X.gguf  org/name/X.gguf[@REVISION]      a file of llama.cpp, on this machine or of the hub
smollm2                                 a model of an installed package (`host.packaged`)
family:NAME/MEMBER                      a model or a file of texts of a family (`data.families`)

After the source of a model stands which part of it is meant: @4, its first four layers; @lookup, prompt lookup for it;
@mtp, its layer of multi-token prediction; @frequent=FILE, with a head over the tokens of a file; @width=8, with calls
of eight tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
import contextlib
import functools
import os
from pathlib import Path, PurePath, PurePosixPath
import re
from typing import NamedTuple

from speccascade.data import families, gguf
from speccascade.host import packaged, storage
from speccascade.host.errors import first_line

MTP = 'mtp'
LOOKUP = 'lookup'
FREQUENT = 'frequent='
WIDTH = 'width='
GGUF = '.gguf'
STEP = re.compile(r'checkpoint_(\d+)')  # a folder of T5X
_PART = re.compile(rf'(.+)@(\d+|{MTP}|{LOOKUP}|{FREQUENT}.+|{WIDTH}\d+)')
_HUB = re.compile(rf'([A-Z0-9][\w.-]*/[A-Z0-9][\w.-]*)(?:/(.+\{GGUF}))?(?:@([\w./-]+))?', re.IGNORECASE)


class Source(NamedTuple):
  """What a text names: a file or folder of this machine, and the name that results give it."""

  path: Path
  name: str


def parse(text: str | os.PathLike) -> tuple[str, int | str | None]:
  """Return the source of a model and the part of it: for SOURCE@4 its number of layers, else what follows the @.

  A folder on this machine whose name ends in @4 is that folder.
  """
  text = os.fspath(text)
  local = not storage.is_address(text) and not families.is_member(text)
  text = os.path.normpath(os.path.expanduser(text)) if local else text
  match = None if local and os.path.exists(text) else _PART.fullmatch(text)
  if match is None:
    return text, None
  return os.path.normpath(match[1]) if local else match[1], int(match[2]) if match[2].isdigit() else match[2]


def check(text: str) -> None:
  """Raise ValueError for a text that can name nothing: an address without its package, a family that is none."""
  if families.is_member(text):
    families.parse(parse(text)[0])
  else:
    storage.resolve(text)


def resolve(path: str | os.PathLike):
  """Return the path of a file of texts, on this machine or in a bucket."""
  return families.find(path) if families.is_member(path) else storage.resolve(path)


def find(
  text: str | os.PathLike, choose: storage.Choose, siblings: Sequence[str] = (), *, revision: str | None = None
) -> Source:
  """Return the file or the folder that a source names; it need not be there if it is of this machine.

  Args:
    text: The source, without a part.
    choose: What is fetched of it, from the hub or a bucket.
    siblings: Folders next to it that are fetched from a bucket too.
    revision: Branch, tag or commit of a model of the hub.
  """
  text = os.fspath(text)
  local = Path(os.path.abspath(os.path.expanduser(text)))
  match = None if storage.is_address(text) or local.exists() else _HUB.fullmatch(text)
  if match and not Path(match[1]).exists():
    hub_id, file, given = match.groups()
    if given and revision not in (None, given):
      raise ValueError(f'{text} has a revision, and revision={revision!r} is another: leave one out')
    if file:
      return _of_gguf(_file_of_hub(hub_id, file, revision or given))
    return Source(_from_hub(hub_id, revision or given, choose), hub_id.partition('/')[2])
  if revision is not None:
    raise ValueError(f'{text} is no hub model, and revision={revision!r} is one of a hub model: leave it out')
  if families.is_member(text):
    return Source(families.find(text), text.rpartition('/')[2])
  if storage.is_address(text):
    with storage.client_errors():
      path = storage.local_copy(storage.resolve(text), storage.everything if is_gguf(text) else choose, siblings)
    return _of_gguf(path) if is_gguf(text) else Source(path, _called(PurePosixPath(text)))
  if text in packaged.MODELS and not local.exists():
    return Source(gguf.folder(packaged.MODELS[text].find()), text)
  return _of_gguf(local) if is_gguf(text) and local.is_file() else Source(local, _called(local))


def is_gguf(text: str) -> bool:
  """Tell whether a source ends as a file of llama.cpp does."""
  return text.lower().endswith(GGUF)


def _called(path: PurePath) -> str:
  """Return the last name of a path, of a step of T5X that of the folder above."""
  return path.parent.name if STEP.fullmatch(path.name) else path.name


def _of_gguf(file: Path) -> Source:
  return Source(gguf.folder(file), file.stem)


def _file_of_hub(hub_id: str, name: str, revision: str | None) -> Path:
  """Return the local copy of a file of the hub."""
  import huggingface_hub  # lazily: only hub ids need it

  with _reached(hub_id, revision):
    return Path(huggingface_hub.hf_hub_download(hub_id, name, revision=revision))


def _from_hub(hub_id: str, revision: str | None, choose: storage.Choose) -> Path:
  """Return the local copy of a model of the hub, fetching what it lacks."""
  import huggingface_hub  # lazily: only hub ids need it

  name = hub_id.partition('/')[2]
  try:
    listed = [f'{name}/{file}' for file in _listed(hub_id, revision)]
  except Exception as error:  # there may be a copy on this machine
    return _copy_of_hub(hub_id, revision, choose, error)

  def read(file: str) -> bytes:
    return _file_of_hub(hub_id, file.partition('/')[2], revision).read_bytes()

  chosen = [file.partition('/')[2] for file in choose(listed, read)]
  with _reached(hub_id, revision):
    return Path(huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=chosen))


@functools.lru_cache
def _listed(hub_id: str, revision: str | None) -> tuple[str, ...]:
  """Return the names of the files of a model of the hub, asked for once in a process."""
  import huggingface_hub

  return tuple(file.rfilename for file in huggingface_hub.model_info(hub_id, revision=revision).siblings)


def _copy_of_hub(hub_id: str, revision: str | None, choose: storage.Choose, reason: Exception) -> Path:
  """Return what this machine has of a model of the hub, where that cannot be asked."""
  import huggingface_hub

  settings = dict(allow_patterns=['config.json'], local_files_only=True)
  with _reached(hub_id, revision, reason):
    folder = Path(huggingface_hub.snapshot_download(hub_id, revision=revision, **settings))
    names = [f'{folder.name}/{file.relative_to(folder)}' for file in folder.rglob('*') if file.is_file()]
    choose(names, lambda name: (folder.parent / name).read_bytes())  # raises where it lacks what is read
  return folder


@contextlib.contextmanager
def _reached(hub_id: str, revision: str | None, reason: Exception | None = None) -> Iterator[None]:
  """Turn an error of the hub's client into one sentence."""
  try:
    yield
  except Exception as error:  # the client lets its HTTP library's errors through, whichever library that is
    at, option = ('', '') if revision is None else (f' at revision {revision!r}', f' --revision {revision}')
    why = first_line(reason or error)[:200]
    raise FileNotFoundError(
      f'{hub_id} is no folder here and could not be fetched{at} ({why}): download it by hand (hf download '
      f'{hub_id}{option} --local-dir FOLDER, where there is a network) and pass the folder'
    ) from None


def steps_in(folder: Path) -> list[int]:
  """Return the steps of T5X in a folder, of this machine or of a bucket, that are finished."""
  matches = (STEP.fullmatch(file.name) for file in folder.iterdir()) if folder.is_dir() else ()
  return [int(match[1]) for match in matches if match]


def described(names: Iterable[str], suffixes: Iterable[str]) -> list[str]:
  """Return the names of the files beside weights that describe a model, in its folder, in its steps and above it."""
  kept = {*suffixes}
  near = (n for n in names if n.count('/') < 2 or (n.count('/') == 2 and STEP.fullmatch(n.split('/')[1])))
  return [n for n in near if PurePosixPath(n).suffix in kept and not n.endswith('.index.json')]
