"""From T5X's parameters to ours: the sizes that a T5X checkpoint does not state, and its scanned variant.

Unscanned names are ours already. Scanned layers lie on axis 1 under `encoder.encoder` and `decoder.decoder`, with
heads apart: queries (E, L, H, D), outputs (H, L, D, E), relative biases (H, L, buckets).

Axis letters: E embedding, L layers, H heads, D head dimension, F MLP, V vocabulary.
"""

import ast
from collections.abc import Mapping
import dataclasses
from pathlib import Path
import re

import numpy as np

from speccascade.checkpoints.tensor_files import AGAIN, read_json

_SCANNED = re.compile(r'(encoder\.encoder|decoder\.decoder)\.(.+)')
_ATTENTION = re.compile(r'attention\.(query|key|value|out)\.kernel$')
_ACTIVATIONS = re.compile(r'\bmlp_activations\s*=\s*(\([^)]*\)|\[[^\]]*\])')
_SIZES = {  # what config.json may state: the tensor and axis that tell it too
  'vocab_size': ('token_embedder.embedding', 0),
  'd_model': ('token_embedder.embedding', 1),
  'd_ff': ('encoder.layers_0.mlp.wo.kernel', 0),
  'num_heads': ('encoder.relpos_bias.rel_embedding', 0),
  'relative_attention_num_buckets': ('encoder.relpos_bias.rel_embedding', 1),
}

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Part:
  """One of our parameters: the T5X tensor that holds it, its layer there (None: all of it), and its shape."""

  name: str
  source: str
  layer: int | None
  shape: Shape

  def take(self, x: np.ndarray) -> np.ndarray:
    """Return the parameter out of its tensor."""
    return (x if self.layer is None else x[:, self.layer]).reshape(self.shape)


def parts(shapes: Mapping[str, Shape]) -> list[Part]:
  """Return our parameters for the tensors of a T5X checkpoint, scanned or not."""
  found = []
  for source, shape in shapes.items():
    scanned = _SCANNED.fullmatch(source)
    if not scanned:
      found.append(Part(source, source, None, _join(source, shape)))
      continue
    stack, rest = scanned[1].split('.')[0], scanned[2]
    inner = _join(rest, shape[:1] + shape[2:])
    if rest.startswith('relpos_bias.'):
      found.append(Part(f'{stack}.{rest}', source, 0, inner))  # T5 has one bias for all layers
      continue
    found += [Part(f'{stack}.layers_{i}.{rest}', source, i, inner) for i in range(shape[1])]
  return found


def check_shared_bias(name: str, x: np.ndarray, where: Path) -> None:
  """Raise where scanned layers have relative biases of their own, which T5 has not."""
  if _SCANNED.fullmatch(name) and 'relpos_bias.' in name and (x != x[:, :1]).any():
    layer = int(np.argwhere((x != x[:, :1]).any(axis=(0, 2)))[0, 0])
    raise ValueError(
      f"{where}: tensor '{name}' differs between layers 0 and {layer}: relative biases for each layer (umT5) are not "
      'supported, only those that all layers share'
    )


def _join(name: str, shape: Shape) -> Shape:
  """Return a shape with the heads and their dimension as one axis."""
  attention = _ATTENTION.search(name)
  if not attention or len(shape) != 3:
    return shape
  a, b, c = shape
  return (a * b, c) if attention[1] == 'out' else (a, b * c)


def config_of(shapes: Mapping[str, Shape], where: Path) -> dict:
  """Return the Hugging Face config that our parameters' shapes tell, as far as they tell it."""
  config = {key: _axis(shapes, name, axis, where) for key, (name, axis) in _SIZES.items()}
  kernel = 'encoder.layers_0.attention.query.kernel'
  joined = _axis(shapes, kernel, 1, where)
  if joined % config['num_heads']:
    raise ValueError(
      f"{where}: tensor '{kernel}' {list(shapes[kernel])} does not divide into the {config['num_heads']} heads of "
      f"'encoder.relpos_bias.rel_embedding': {AGAIN}"
    )
  gated, tied = 'encoder.layers_0.mlp.wi_0.kernel' in shapes, 'decoder.logits_dense.kernel' not in shapes
  return config | {
    'model_type': 't5',
    'd_kv': joined // config['num_heads'],
    'num_layers': _depth(shapes, 'encoder'),
    'num_decoder_layers': _depth(shapes, 'decoder'),
    'feed_forward_proj': 'gated-gelu' if gated else 'relu',
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


def overrides(folder: Path, config: dict) -> dict:
  """Return a config corrected by gin, then by config.json, of the folder or the one above it.

  Whether the head is tied is seen in the tensors, so config.json decides the scaling only.
  """
  places = [place for place in (folder, folder.parent) if place.is_dir()]
  config = dict(config)
  for file in [file for place in places for file in sorted(place.glob('*.gin'))][:1]:
    config.update(_from_gin(file))
  for file in [place / 'config.json' for place in places if (place / 'config.json').is_file()][:1]:
    stated = read_json(file)
    _check_stated(file, stated, config)
    if stated.get('scale_decoder_outputs') is None:
      stated['scale_decoder_outputs'] = stated.get('tie_word_embeddings', config['tie_word_embeddings'])
    config |= stated | {'tie_word_embeddings': config['tie_word_embeddings']}
  return config


def _from_gin(file: Path) -> dict:
  """Return the MLP's activation, the one thing that gin states and shapes do not."""
  found = _ACTIVATIONS.findall(file.read_text(encoding='utf-8', errors='replace'))
  if not found:
    return {}
  try:
    names = list(ast.literal_eval(found[-1]))
  except (ValueError, SyntaxError, TypeError):
    names = []
  activations = [name for name in names if name != 'linear']
  if len(activations) == 1 and len(names) in (1, 2):
    return {'feed_forward_proj': 'gated-' * (len(names) - 1) + activations[0]}
  raise ValueError(f'{file}: mlp_activations = {found[-1]} is not supported, only one activation, or one and linear')


def _check_stated(file: Path, stated: dict, config: dict) -> None:
  """Raise where config.json is another family's or states another size than the tensors have."""
  if stated.get('model_type', 't5') not in ('t5', 'mt5'):
    raise ValueError(
      f"{file}: model_type '{stated['model_type']}' beside a T5X checkpoint, which holds a T5: remove it"
    )
  for key in (*_SIZES, 'd_kv', 'num_layers', 'num_decoder_layers'):
    if stated.get(key) is not None and stated[key] != config[key]:
      tensor = _SIZES.get(key, ('',))[0]
      raise ValueError(
        f'{file}: {key} is {stated[key]}, but the tensors{f" ({tensor!r})" if tensor else ""} have {config[key]}: '
        'weights and config.json do not belong together, correct or remove config.json'
      )
