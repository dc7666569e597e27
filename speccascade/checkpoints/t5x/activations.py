"""What the gin files beside a T5X checkpoint say that its tensors do not: the activation of the MLPs.

T5X writes `config.gin` into the folder of the checkpoints. Files are parsed, not run: nothing they name is imported.
"""

import dataclasses
from pathlib import Path
from typing import Any

ACTIVATIONS = {'relu': 'relu', 'gelu': 'gelu_new', 'silu': 'silu', 'swish': 'silu'}  # Flax's names: config.json's
_FIRST = ('config.gin', 'operative_config.gin')
_KEY = 'mlp_activations'


@dataclasses.dataclass(frozen=True)
class _Name:
  """A %macro or a @reference, as it is written."""

  text: str


@dataclasses.dataclass(frozen=True)
class Stated:
  """The `mlp_activations` of a file."""

  file: Path
  value: Any


def find(folder: Path) -> Stated | None:
  """Return what is said beside a checkpoint or in the folder above: by T5X's own files, else by all that say it."""
  for place in (folder, folder.parent):
    first = [[place / name] for name in _FIRST if (place / name).is_file()]
    for group in (*first, sorted(place.glob('*.gin'))):
      stated = [found for file in group for found in _stated(file)]
      other = next((x for x in stated if x.value != stated[0].value), None)
      if other:
        raise ValueError(
          f'{stated[0].file} has {_KEY} = {stated[0].value}, but {other.file} {other.value}: pass activation=, or '
          'leave only the config.gin of this checkpoint there'
        )
      if stated:
        return stated[0]
  return None


def _stated(file: Path) -> list[Stated]:
  """Return what a file binds, its macros resolved; of equal names the last counts."""
  macros, values = {}, {}
  for statement in _statements(file):
    key = getattr(statement, 'arg_name', None)
    if key == '':
      macros[statement.selector] = statement.value
    elif key == _KEY:
      values[statement.scope, statement.selector] = statement.value
  return [Stated(file, _resolved(value, macros)) for value in values.values()]


def _statements(file: Path) -> list:
  """Return the statements of a gin file."""
  from gin import config_parser  # lazily: only these files need it

  class Delegate(config_parser.ParserDelegate):
    def configurable_reference(self, name, evaluate):
      return _Name(f'@{name}')

    def macro(self, name):
      return _Name(name)

  try:
    return list(config_parser.ConfigParser(file.read_text(encoding='utf-8'), Delegate()))
  except (SyntaxError, ValueError) as error:
    reason = ' '.join(str(error).split())[:100]
    raise ValueError(f'{file} is no gin file that can be read ({reason}): correct it, or pass activation=') from None


def _resolved(value: Any, macros: dict[str, Any]) -> Any:
  """Return a value with its macros replaced, and as text what is bound nowhere here."""
  for _ in range(len(macros) + 1):
    if not isinstance(value, _Name):
      break
    value = macros.get(value.text, value.text)
  if isinstance(value, list | tuple):
    return tuple(_resolved(x, macros) for x in value)
  return value.text if isinstance(value, _Name) else value
