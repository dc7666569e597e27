"""The activation of the MLPs, which T5X's tensors do not show, from the gin files next to a checkpoint.

T5X writes `config.gin` into the folder of the checkpoints. Files are parsed, not run: nothing they name is imported.
"""

from pathlib import Path
from typing import Any

ACTIVATIONS = {'relu': 'relu', 'gelu': 'gelu_new', 'silu': 'silu', 'swish': 'silu'}  # Flax's names: config.json's
_FIRST = ('config.gin', 'operative_config.gin')
_KEY = 'mlp_activations'


class _Macro(str):
  """The name of a %macro."""


def find(folder: Path) -> tuple[Path, Any] | None:
  """Return the file next to a checkpoint or one folder up that binds `mlp_activations`, and the value.

  T5X's own files count first; without one, all other gin files of the folder, which must agree.
  """
  for parent in (folder, folder.parent):
    first = [[parent / name] for name in _FIRST if (parent / name).is_file()]
    for group in (*first, sorted(parent.glob('*.gin'))):
      bound = [(file, value) for file in group for value in _bound(file)]
      if other := [x for x in bound if x[1] != bound[0][1]]:
        raise ValueError(
          f'{bound[0][0]} has {_KEY} = {bound[0][1]}, but {other[0][0]} {other[0][1]}: pass activation=, or '
          'leave only the config.gin of this checkpoint there'
        )
      if bound:
        return bound[0]
  return None


def _bound(file: Path) -> list[Any]:
  """Return the values that a file binds, macros resolved; of bindings of the same name the last counts."""
  macros = {}
  values = {}
  for statement in _statements(file):
    key = getattr(statement, 'arg_name', None)
    if key == '':
      macros[statement.selector] = statement.value
    elif key == _KEY:
      values[statement.scope, statement.selector] = statement.value
  return [_resolved(value, macros) for value in values.values()]


def _statements(file: Path) -> list:
  from gin import config_parser  # lazily: only these files need it

  class Delegate(config_parser.ParserDelegate):
    def configurable_reference(self, name, evaluate):
      return f'@{name}'

    def macro(self, name):
      return _Macro(name)

  try:
    return list(config_parser.ConfigParser(file.read_text(encoding='utf-8'), Delegate()))
  except (SyntaxError, ValueError) as error:
    reason = ' '.join(str(error).split())[:100]
    raise ValueError(f'{file} is no gin file that can be read ({reason}): correct it, or pass activation=') from None


def _resolved(value: Any, macros: dict[str, Any]) -> Any:
  """Return a value with its macros replaced, a macro that is bound nowhere by its name."""
  if isinstance(value, list | tuple):
    return tuple(_resolved(x, macros) for x in value)
  if not isinstance(value, _Macro):
    return value
  rest = {name: x for name, x in macros.items() if name != value}  # so that a circle ends
  return _resolved(macros[value], rest) if value in macros else str(value)
