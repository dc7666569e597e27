"""From T5X's parameters to ours: the sizes that a T5X checkpoint does not state, and its scanned variant.

Unscanned names are ours already. Scanned layers lie on axis 1 (`param_scan_axis`; 0 is read too) under
`encoder.encoder` and `decoder.decoder`, with heads apart: queries (E, L, H, D), outputs (H, L, D, E), relative biases
(H, L, buckets). There each layer has a relative bias of its own; where all are equal, they are T5's one.

Axis letters: E embedding, L layers, H heads, D head dimension, F MLP, V vocabulary.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import functools
from pathlib import Path
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speccascade.checkpoints.assemble import Box, full_box, InMemory, Shape, Tensor
from speccascade.checkpoints.files import AGAIN, read_json
from speccascade.checkpoints.t5x import activations
from speccascade.models.layers import stack_layers
from speccascade.models.t5 import T5Config
from speccascade.types import Array, Params

_SCANNED = re.compile(r'(encoder\.encoder|decoder\.decoder)\.(.+)')
_ATTENTION = re.compile(r'attention\.(query|key|value|out)\.kernel$')
_BIAS = 'relpos_bias.rel_embedding'
_SIZES = {  # what config.json may state: the tensor and axis that tell it too
  'vocab_size': ('token_embedder.embedding', 0),
  'd_model': ('token_embedder.embedding', 1),
  'd_ff': ('encoder.layers_0.mlp.wo.kernel', 0),
  'num_heads': (f'encoder.{_BIAS}', 0),
  'relative_attention_num_buckets': (f'encoder.{_BIAS}', 1),
}


@dataclasses.dataclass(frozen=True)
class _View:
  """A tensor of T5X with the axes of ours: layers on axis 0, heads and their dimension joined."""

  tensor: Tensor
  axis: int | None  # of the layers
  heads: int | None  # axis of the heads, layers not counted

  @property
  def file(self) -> Path:
    return self.tensor.file

  @property
  def name(self) -> str:
    return self.tensor.name

  @property
  def dtype(self) -> np.dtype:
    return self.tensor.dtype

  @property
  def _inner(self) -> Shape:
    """The shape of one layer."""
    return self.tensor.shape if self.axis is None else _without(self.tensor.shape, self.axis)

  @property
  def shape(self) -> Shape:
    shape = self._inner
    if self.heads is not None:
      heads, dim = shape[self.heads : self.heads + 2]
      shape = (*shape[: self.heads], heads * dim, *shape[self.heads + 2 :])
    return shape if self.axis is None else (self.tensor.shape[self.axis], *shape)

  def read(self, box: Box | None = None) -> Array:
    """Return the tensor, or the part of it in a box, which never cuts a head."""
    box = list(full_box(self.shape) if box is None else box)
    size = tuple(s.stop - s.start for s in box)
    layers = [] if self.axis is None else [box.pop(0)]
    if self.heads is not None:
      joined, dim = box[self.heads], self._inner[self.heads + 1]
      box[self.heads : self.heads + 1] = [slice(joined.start // dim, joined.stop // dim), slice(0, dim)]
    if not layers:
      return self.tensor.read(tuple(box)).reshape(size)
    x = self.tensor.read((*box[: self.axis], *layers, *box[self.axis :]))
    return x.transpose(self.axis, *_without(tuple(range(x.ndim)), self.axis)).reshape(size)


def with_our_axes(tensors: Mapping[str, Tensor], where: Any, compare_biases: bool = True) -> dict[str, Tensor]:
  """Return the tensors of a T5X checkpoint under our names and with our axes, layers stacked where they are scanned.

  Args:
    tensors: the stored tensors by T5X's names.
    where: what errors name.
    compare_biases: read the relative biases of scanned layers, and keep one of them where all are equal.
  """
  shapes = {name: x.shape for name, x in tensors.items()}
  check_kind(shapes, where)
  axis = scan_axis(shapes, where) if is_scanned(shapes) else None
  ours, biases = {}, []
  for name, tensor in tensors.items():
    match = _SCANNED.fullmatch(name)
    our_name = f'{match[1].split(".")[0]}.layers.{match[2]}' if match else name
    view = _View(tensor, axis if match else None, None)
    kernel = _ATTENTION.search(name)
    if kernel and len(view.shape) - bool(match) == 3:
      view = dataclasses.replace(view, heads=0 if kernel[1] == 'out' else 1)
    if match and match[2] == _BIAS and compare_biases:
      view = InMemory(tensor.file, tensor.name, view.read())
      biases.append(our_name)
    ours[our_name] = view
  if all((ours[name].array == ours[name].array[:1]).all() for name in biases):
    for name in biases:
      stacked = ours.pop(name)
      ours[name.replace('.layers', '')] = dataclasses.replace(stacked, array=stacked.array[0])
  return ours


def shapes_by_layer(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
  """Return the shapes of tensors with our names, those of stacked layers for each layer."""
  shapes = {}
  for name, tensor in tensors.items():
    if '.layers.' in name:
      depth, *inner = tensor.shape
      shapes |= {name.replace('.layers.', f'.layers_{i}.'): tuple(inner) for i in range(depth)}
    else:
      shapes[name] = tuple(tensor.shape)
  return shapes


def check_kind(shapes: Mapping[str, Shape], where: Path | str) -> None:
  """Raise where the tensors are those of T5X's decoder_only."""
  if not any(name.startswith('encoder.') for name in shapes) and any('decoder.layers_' in name for name in shapes):
    raise ValueError(
      f"{where}: a decoder_only model of T5X, without an encoder's tensors, is not supported: of T5X's, only "
      'encoder–decoders are'
    )


def is_scanned(names: Iterable[str]) -> bool:
  """Tell whether tensors are those of T5X's scanned variant."""
  return any(_SCANNED.fullmatch(name) for name in names)


def scan_axis(shapes: Mapping[str, Shape], where: Path | str) -> int:
  """Return the axis of the layers in scanned tensors, which T5X calls `param_scan_axis`."""
  names = ('pre_mlp_layer_norm.scale', 'mlp.wo.kernel')
  scale, kernel = (shapes.get(f'encoder.encoder.{name}', ()) for name in names)
  inner = next((shape[-1] for name, shape in shapes.items() if re.fullmatch(r'encoder\.encoder\.mlp\.wi.*', name)), 0)
  width = shapes.get('token_embedder.embedding', (0, 0))[-1]
  fits = [axis for axis in (1, 0) if _without(scale, axis) == (width,) and _without(kernel, axis) == (inner, width)]
  if len(fits) == 2:
    raise ValueError(
      f'{where}: {width} layers of width {width} and {inner} are scanned, so that the axis of the layers cannot be '
      'told from the others: save the model with scan_layers=False'
    )
  return fits[0] if fits else 1  # where nothing fits, the tensor that is wrong will be named


def _without(shape: Shape, axis: int) -> Shape:
  return shape[:axis] + shape[axis + 1 :]


def scan(params: Params, config: T5Config) -> Params:
  """Return unrolled parameters as T5X's scalable_t5 has them: layers on axis 1, heads apart, a bias for each layer."""
  tree = dict(params)
  for stack in ('encoder', 'decoder'):
    own = {name: x for name, x in params[stack].items() if not name.startswith('layers_')}
    layers = stack_layers(params[stack])['layers']
    if config.shared_bias:
      bias, depth = own.pop('relpos_bias'), len(params[stack]) - len(own) - 1
      layers = {**layers, 'relpos_bias': jax.tree.map(lambda x, n=depth: jnp.repeat(x[None], n, axis=0), bias)}
    tree[stack] = {**own, stack: jax.tree_util.tree_map_with_path(functools.partial(_apart, config), layers)}
  return tree


def _apart(config: T5Config, path, x: Array) -> Array:
  """Return a stacked parameter [L, …] with its heads apart and its layers on axis 1."""
  heads = (config.heads, config.head_dim)
  name = _ATTENTION.search('.'.join(key.key for key in path))
  if name:
    x = x.reshape(len(x), *heads, -1) if name[1] == 'out' else x.reshape(*x.shape[:2], *heads)
  return jnp.moveaxis(x, 0, 1)


def config_of(shapes: Mapping[str, Shape], where: Path) -> dict:
  """Return the Hugging Face config that our parameters' shapes tell, as far as they tell it."""
  own = f'encoder.layers_0.{_BIAS}' in shapes
  sizes = {key: (name.replace('encoder.rel', 'encoder.layers_0.rel') if own else name, axis)
           for key, (name, axis) in _SIZES.items()}  # fmt: skip
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
  """Return a config with what shapes do not tell: from `activation`, else config.json, else gin, here or one above.

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
  stated = activations.find(folder)
  if stated is None:
    raise ValueError(
      f"{folder} does not say which activation its MLPs have: put the model's config.gin beside it, or pass "
      f'activation={_usual(gated)}; it is one of {", ".join(activations.ACTIVATIONS)}'
    )
  return projection(stated.value, gated, f'{stated.file}: mlp_activations = {stated.value}')


def projection(stated, gated: bool, where: str) -> str:
  """Return `feed_forward_proj` for T5X's `mlp_activations`."""
  names = tuple(stated) if isinstance(stated, list | tuple) else (stated,)
  if names[0] not in activations.ACTIVATIONS or names[1:] not in ((), ('linear',)):
    raise ValueError(
      f"{where} is not supported: it is one of {', '.join(activations.ACTIVATIONS)}, in gin alone or before 'linear'"
    )
  if (len(names) == 2) != gated:
    raise ValueError(f'{where} has {len(names)} kernels wi, but the tensors have {1 + gated}: {AGAIN}')
  return 'gated-' * gated + activations.ACTIVATIONS[names[0]]


def _usual(gated: bool) -> str:
  return "'gelu' (T5 v1.1, Flan, mT5)" if gated else "'relu' (T5 v1.0)"


def _check_stated(file: Path, stated: dict, config: dict) -> None:
  """Raise where config.json is another family's or states another size than the tensors have."""
  if stated.get('model_type', 't5') not in ('t5', 'mt5', 'umt5'):
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
