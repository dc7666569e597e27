"""Families: models of one vocabulary with the texts that they learn from, as `family:NAME/MEMBER`.

A member is a model or a file of texts. It is looked for as NAME/MEMBER in the folder that SPECCASCADE_FAMILIES names,
then in the cache of this machine. Texts that are nowhere are made or fetched into the cache; a model is trained there
by the recipe of the family, `python -m speccascade.train family:NAME/MEMBER`, once its hours are agreed to.
"""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import functools
import gzip
import http.client
import itertools
import os
from pathlib import Path
import subprocess
import sys
from typing import Any, NamedTuple
import urllib.request
import zlib

from speccascade.data import sums
from speccascade.host import names, storage
from speccascade.host.errors import first_line, RunError

FOLDER = 'SPECCASCADE_FAMILIES'
PREFIX = 'family:'


@dataclasses.dataclass(frozen=True)
class Fetched:
  """A file of texts that its publisher has."""

  address: str
  lines: int

  def __call__(self) -> list[bytes]:
    with urllib.request.urlopen(self.address, timeout=60) as answer:
      data = answer.read()
    lines = (gzip.decompress(data) if self.address.endswith('.gz') else data).count(b'\n')
    if lines != self.lines:
      raise OSError(f'{self.address} has {lines} lines, not {self.lines}')
    return [data]


@dataclasses.dataclass(frozen=True)
class TrainedFamily:
  """Models of one vocabulary with their texts.

  Attributes:
    models: The hours that a CPU core trains each, in the order in which they are trained.
    files: What makes each file of texts.
    recipe: The gin file that trains the models, of which macro `VOCABULARY` is the file of their vocabulary.
    vocabulary: The name of that file.
    licence: What the texts of other people may be used for.
  """

  models: Mapping[str, float]
  files: Mapping[str, Callable[[], Iterable[bytes]]]
  recipe: str
  vocabulary: str = 'tokenizer.model'
  licence: str = ''


_MULTI30K = 'https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw'
_GSM8K = 'https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data'
_SPLITS = {'train': 29_000, 'val': 1014, 'test_2016_flickr': 1000}
FAMILIES = {
  'sums': TrainedFamily(
    {'draft': 0.15, 'companion': 0.4, 'target': 2.1},
    {
      'train.jsonl': functools.partial(sums.lines, 0, sums.TRAIN),
      'test.jsonl': functools.partial(sums.lines, sums.TRAIN, sums.TRAIN + sums.TEST),
    },
    'train/sums_trio.gin',
  ),
  'multi30k': TrainedFamily(
    {'small': 1.5, 'base': 5.0, 'large': 8.0},
    {
      f'{split}.{side}.gz': Fetched(f'{_MULTI30K}/{split}.{side}.gz', lines)
      for split, lines in _SPLITS.items()
      for side in ('en', 'de')
    },
    'train/multi30k_trio.gin',
    'spiece.model',
    'for research (Elliott et al. 2016)',
  ),
  'gsm8k': TrainedFamily(
    {'draft': 1.0, 'companion': 2.0, 'target': 11.0},
    {f'{split}.jsonl': Fetched(f'{_GSM8K}/{split}.jsonl', n) for split, n in (('train', 7473), ('test', 1319))},
    'train/gsm8k_trio.gin',
    licence='MIT (Cobbe et al. 2021)',
  ),
}


def is_member(given: Any) -> bool:
  """Tell whether a text names a member of a family."""
  return isinstance(given, str) and given.startswith(PREFIX)


def parse(text: str) -> tuple[str, str]:
  """Return the names of a family and of a member of it, '' for the family alone; raise ValueError for another."""
  name, _, member = text.removeprefix(PREFIX).rstrip('/').partition('/')
  if name not in FAMILIES:
    raise ValueError(f'{text}: there is no family {name!r}{_like(name, FAMILIES)}')
  family = FAMILIES[name]
  members = [*family.models, *map(_plain, family.files)]
  if member and _plain(member) not in members:
    raise ValueError(f'{text}: the family has no {member!r}{_like(member, members)}')
  return name, _plain(member)


def _like(name: str, known: Iterable[str]) -> str:
  return names.meant(name, known) or f'; it is one of {", ".join(known)}'


def _plain(name: str) -> str:
  """Return the name of a file without that it is packed."""
  return name.removesuffix('.gz')


def find(text: str) -> Path:
  """Return the file, or the folder of the model, of a member; it is made, fetched or trained where it is nowhere.

  Raises:
    RunError: It is not here, and cannot be made now.
  """
  name, member = parse(text)
  if not member:
    raise ValueError(f'{text} is a family: name a member, as {PREFIX}{name}/{next(iter(FAMILIES[name].models))}')
  if found := _here(name, member):
    return found
  if member in FAMILIES[name].models:
    _train_if_agreed(name, member)
    return folder(name) / member / 'model'
  return _made(name, member)


def folder(name: str) -> Path:
  """Return the folder of a family in the cache."""
  cache = storage.cache_folder('families')
  if cache is None:
    raise RunError(f'family {name} has no place here, for no home folder is known: set {FOLDER} or XDG_CACHE_HOME.')
  return cache / name


def _here(name: str, member: str) -> Path | None:
  """Return the place of a member that is here."""
  roots = [root for root in (_given(name), storage.cache_folder('families')) if root]
  ways = (member, f'{member}.gz', f'{member}/model')
  places = (root / name / way for root, way in itertools.product(roots, ways))
  is_model = member in FAMILIES[name].models
  return next((p for p in places if (p / 'config.json' if is_model else p).is_file()), None)


def _given(name: str) -> Path | None:
  """Return the folder that a user names for families."""
  given = os.environ.get(FOLDER)
  if not given:
    return None
  root = Path(given).expanduser()
  if not root.is_dir():
    raise RunError(f'{FOLDER}={given} is no folder: name one that has {name}/, or leave it unset.')
  return root


# ---- texts ----


def _made(name: str, member: str) -> Path:
  """Write a file of texts into the cache."""
  family = FAMILIES[name]
  file, pieces = next((file, made) for file, made in family.files.items() if _plain(file) == member)
  path = folder(name) / file
  if not isinstance(pieces, Fetched):
    storage.write(path, pieces())
    return path
  print(f'fetching {pieces.address} ({family.licence}) to {path}', file=sys.stderr)
  try:
    data = pieces()
  except (OSError, EOFError, http.client.HTTPException, zlib.error) as error:
    raise RunError(
      f'{PREFIX}{name}/{member} could not be fetched ({first_line(error)}): copy {pieces.address} to {path}, or to '
      f'{name}/{file} in a folder that {FOLDER} names.'
    ) from None
  storage.write(path, data)
  return path


# ---- models ----


class Training(NamedTuple):
  """How models of a family are trained: a gin file, bindings of it, a folder, and the jobs, all if none."""

  gin_file: str
  bindings: list[str]
  out: Path
  jobs: list[str]


def training(text: str) -> Training:
  """Return how a family, or one of its models, is trained."""
  if not is_member(text):
    raise ValueError(f'{text} is no family: write {PREFIX}{text}')
  name, member = parse(text)
  family = FAMILIES[name]
  if member and member not in family.models:
    models = ', '.join(f'{PREFIX}{name}/{model}' for model in family.models)
    raise ValueError(f'{text} is no model: train {models}')
  out = folder(name)
  vocabulary = f'VOCABULARY = {str(out / family.vocabulary)!r}'
  given = _given(name)
  if given and any((given / name / model).exists() for model in family.models):
    raise RunError(
      f'{FOLDER}={given} has models of {PREFIX}{name}, with a vocabulary of their own: leave it unset to train others.'
    )
  return Training(family.recipe, [vocabulary], out, [member] if member else [])


def _train_if_agreed(name: str, member: str):
  """Train a model in a process of its own if a user at a terminal agrees.

  Raises:
    RunError: Nobody was asked, did not agree, or the training failed.
  """
  hours = FAMILIES[name].models[member]
  command = [sys.executable, '-m', 'speccascade.train', f'{PREFIX}{name}/{member}']
  told = f'{PREFIX}{name}/{member} is not here, and takes {hours:g} hours of a CPU core to train'
  remedy = f'python -m speccascade.train {command[-1]}, or {FOLDER}=FOLDER with {name}/{member} in it.'
  if not (sys.stdin.isatty() and sys.stderr.isatty()):
    raise RunError(f'{told}: {remedy}')
  print(f'{told}. Train it now? [y/N] ', end='', file=sys.stderr, flush=True)
  if sys.stdin.readline().strip().lower() not in ('y', 'yes'):
    raise RunError(f'{PREFIX}{name}/{member} is not here: {remedy}')
  if code := subprocess.run(command).returncode:
    raise RunError(f'{" ".join(command[1:])} ended with exit code {code}: the same command goes on.')
