"""The configuration of a T5X checkpoint, as Hugging Face has it: from shapes, config.json and gin files."""

from collections.abc import Mapping
from pathlib import Path
import re
from typing import Any

from speccascade.checkpoints.files import AGAIN, read_json
from speccascade.checkpoints.hf.family import FAMILIES
from speccascade.checkpoints.stored import Shape
from speccascade.checkpoints.t5x.axes import BIAS
from speccascade.models.t5 import T5, T5Config
from speccascade.types import Network

ACTIVATIONS = {'relu': 'relu', 'gelu': 'gelu_new', 'silu': 'silu', 'swish': 'silu'}  # Flax's names: config.json's
_FIRST = ('config.gin', 'operative_config.gin')
_KEY = 'mlp_activations'
_SIZES = {  # sizes that config.json may state, and the tensor and axis that have them
  'vocab_size': ('token_embedder.embedding', 0),
  'd_model': ('token_embedder.embedding', 1),
  'd_ff': ('encoder.layers_0.mlp.wo.kernel', 0),
  'num_heads': (f'encoder.{BIAS}', 0),
  'relative_attention_num_buckets': (f'encoder.{BIAS}', 1),
}


def other_kind(network: Network) -> str | None:
  """Return what a network is that T5X does not have, None for a T5."""
  kind = network.config if isinstance(network, T5) else network
  return None if isinstance(kind, T5Config) else type(kind).__name__.removesuffix('Config')


def config_of(shapes: Mapping[str, Shape], where: Path) -> dict:
  """Return the Hugging Face config of our parameters' shapes, as far as they determine it."""
  own = f'encoder.layers_0.{BIAS}' in shapes
  sizes = _SIZES
  if own:
    sizes = {key: (name.replace('encoder.rel', 'encoder.layers_0.rel'), axis) for key, (name, axis) in _SIZES.items()}
  config = {key: _axis(shapes, name, axis, where) for key, (name, axis) in sizes.items()}
  kernel = 'encoder.layers_0.attention.query.kernel'
  joined = _axis(shapes, kernel, 1, where)
  if joined % config['num_heads']:
    raise ValueError(
      f"{where}: tensor '{kernel}' {list(shapes[kernel])} does not divide into the {config['num_heads']} heads of "
      f"'{sizes['num_heads'][0]}': {AGAIN}"
    )
  tied = 'decoder.logits_dense.kernel' not in shapes
  return config | {
    'model_type': 'umt5' if own else 't5',
    'd_kv': joined // config['num_heads'],
    'num_layers': _depth(shapes, 'encoder'),
    'num_decoder_layers': _depth(shapes, 'decoder'),
    'tie_word_embeddings': tied,
    'scale_decoder_outputs': tied,
  }


def _axis(shapes: Mapping[str, Shape], name: str, axis: int, where: Path) -> int:
  if name not in shapes:
    raise ValueError(f"{where}: tensor '{name}' is missing, and the model's size with it: is this a T5? Else {AGAIN}")
  if len(shapes[name]) != 2:
    raise ValueError(f"{where}: tensor '{name}' has shape {list(shapes[name])}, expected two axes: {AGAIN}")
  return shapes[name][axis]


def _depth(shapes: Mapping[str, Shape], stack: str) -> int:
  numbers = (re.match(rf'{stack}\.layers_(\d+)\.', name) for name in shapes)
  return 1 + max((int(match[1]) for match in numbers if match), default=-1)


def complete(config: dict, folder: Path, gated: bool, activation: str | None) -> dict:
  """Return a config completed from `activation`, else config.json, else gin files, here or one folder up.

  Whether the head is tied is seen in the tensors, so config.json decides the scaling only.
  """
  file = next((p / 'config.json' for p in (folder, folder.parent) if (p / 'config.json').is_file()), None)
  stated = {} if file is None else read_json(file)
  if file is not None:
    _check_stated(file, stated, config)
    if stated.get('scale_decoder_outputs') is None:
      stated['scale_decoder_outputs'] = stated.get('tie_word_embeddings', config['tie_word_embeddings'])
  known = {'tie_word_embeddings': config['tie_word_embeddings'], 'model_type': config['model_type']}
  if activation is not None or not stated.get('feed_forward_proj'):
    known['feed_forward_proj'] = _projection(folder, gated, activation)
  return config | stated | known


def _projection(folder: Path, gated: bool, activation: str | None) -> str:
  """Return `feed_forward_proj` for the activation that was given or that gin states."""
  if activation is not None:
    return projection((activation, 'linear')[: 1 + gated], gated, f'activation={activation!r}')
  if bound := _stated(folder):
    file, value = bound
    return projection(value, gated, f'{file}: mlp_activations = {value}')
  usual = "'gelu' (T5 v1.1, Flan, mT5)" if gated else "'relu' (T5 v1.0)"
  raise ValueError(
    f"{folder} does not record the activation of its MLPs: put the model's config.gin next to it, or pass "
    f'activation={usual}; it is one of {", ".join(ACTIVATIONS)}'
  )


def projection(stated, gated: bool, where: str) -> str:
  """Return `feed_forward_proj` for T5X's `mlp_activations`."""
  names = tuple(stated) if isinstance(stated, list | tuple) else (stated,)
  if names[0] not in ACTIVATIONS or names[1:] not in ((), ('linear',)):
    raise ValueError(
      f"{where} is not supported: it is one of {', '.join(ACTIVATIONS)}, in gin alone or before 'linear'"
    )
  if (len(names) == 2) != gated:
    raise ValueError(f'{where} has {len(names)} kernels wi, but the tensors have {1 + gated}: {AGAIN}')
  return 'gated-' * gated + ACTIVATIONS[names[0]]


def _check_stated(file: Path, stated: dict, config: dict) -> None:
  """Raise where config.json is another family's or states another size than the tensors have."""
  family = FAMILIES.get(stated.get('model_type', 't5'))
  if family is None or family.config is not T5Config:
    raise ValueError(f"{file}: model_type '{stated['model_type']}' next to a T5X checkpoint, which is a T5: remove it")
  for key in (*_SIZES, 'd_kv', 'num_layers', 'num_decoder_layers'):
    if stated.get(key) is not None and stated[key] != config[key]:
      tensor = _SIZES.get(key, ('',))[0]
      raise ValueError(
        f'{file}: {key} is {stated[key]}, but the tensors{f" ({tensor!r})" if tensor else ""} have {config[key]}: '
        'correct or remove config.json'
      )


# ---- gin files, which are parsed and not run: nothing that they name is imported ----


class _Macro(str):
  """The name of a %macro."""


def _stated(folder: Path) -> tuple[Path, Any] | None:
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
