"""From the axes of T5X's parameters to those of ours, and back.

Unscanned names are ours already. Scanned layers lie on axis 1 (`param_scan_axis`; 0 is read too) under
`encoder.encoder` and `decoder.decoder`, with heads apart: queries (E, L, H, D), outputs (H, L, D, E), relative biases
(H, L, buckets). There each layer has a relative bias of its own; where all are equal, they are T5's one.

Axis letters: E embedding, L layers, H heads, D head dimension, F MLP, V vocabulary.
"""

from collections.abc import Mapping
import dataclasses
import functools
from pathlib import Path
import re
from typing import Any

import jax
import jax.numpy as jnp

from speccascade.checkpoints.stored import Box, full_box, in_memory, Shape, Tensor
from speccascade.models.layers import stack_layers
from speccascade.models.t5 import T5Config
from speccascade.types import Array, Params

_SCANNED = re.compile(r'(encoder\.encoder|decoder\.decoder)\.(.+)')
_ATTENTION = re.compile(r'attention\.(query|key|value|out)\.kernel$')
BIAS = 'relpos_bias.rel_embedding'


def _view(tensor: Tensor, axis: int | None, heads: int | None) -> Tensor:
  """Return a tensor of T5X with the axes of ours: layers, its `axis`, on axis 0; heads and their dimension joined.

  `heads` is their axis, layers not counted.
  """
  layer = tensor.shape if axis is None else _without(tensor.shape, axis)
  shape = layer
  if heads is not None:
    shape = (*layer[:heads], layer[heads] * layer[heads + 1], *layer[heads + 2 :])
  if axis is not None:
    shape = (tensor.shape[axis], *shape)

  def read(box: Box | None = None) -> Array:
    """Return a part of it, with complete heads."""
    box = list(full_box(shape) if box is None else box)
    size = tuple(s.stop - s.start for s in box)
    layers = [] if axis is None else [box.pop(0)]
    if heads is not None:
      joined = box[heads]
      dim = layer[heads + 1]
      box[heads : heads + 1] = [slice(joined.start // dim, joined.stop // dim), slice(0, dim)]
    if not layers:
      return tensor.read(tuple(box)).reshape(size)
    x = tensor.read((*box[:axis], *layers, *box[axis:]))
    return x.transpose(axis, *_without(tuple(range(x.ndim)), axis)).reshape(size)

  return dataclasses.replace(tensor, shape=shape, read=read)


def with_our_axes(tensors: Mapping[str, Tensor], where: Any, compare_biases: bool = True) -> dict[str, Tensor]:
  """Return the tensors of a T5X checkpoint under our names and with our axes, layers stacked where they are scanned.

  Args:
    tensors: The stored tensors by T5X's names.
    where: What errors name.
    compare_biases: Read the relative biases of scanned layers, and return a single one where all are equal.
  """
  shapes = {name: x.shape for name, x in tensors.items()}
  missing = [stack for stack in ('encoder', 'decoder') if not any(name.startswith(f'{stack}.') for name in shapes)]
  if len(missing) == 1:
    kind = 'a decoder_only' if missing == ['encoder'] else 'an encoder-only'
    raise ValueError(
      f"{where}: {kind} model of T5X, without {missing[0]} tensors, is not supported: of T5X's, only "
      'encoder–decoders are'
    )
  axis = _scan_axis(shapes, where) if any(map(_SCANNED.fullmatch, shapes)) else None
  ours = {}
  biases = {}
  for name, tensor in tensors.items():
    match = _SCANNED.fullmatch(name)
    our_name = f'{match[1].split(".")[0]}.layers.{match[2]}' if match else name
    kernel = _ATTENTION.search(name)
    apart = kernel and len(tensor.shape) - bool(match) == 3
    heads = (0 if kernel[1] == 'out' else 1) if apart else None
    ours[our_name] = _view(tensor, axis if match else None, heads)
    if match and match[2] == BIAS and compare_biases:
      biases[our_name] = ours[our_name].read()
  if all((x == x[:1]).all() for x in biases.values()):
    for name, x in biases.items():
      stacked = ours.pop(name)
      ours[name.replace('.layers', '')] = in_memory(stacked.file, stacked.name, x[0])
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


def _scan_axis(shapes: Mapping[str, Shape], where: Path | str) -> int:
  """Return the axis of the layers in scanned tensors, which T5X calls `param_scan_axis`."""
  names = ('pre_mlp_layer_norm.scale', 'mlp.wo.kernel')
  scale, kernel = (shapes.get(f'encoder.encoder.{name}', ()) for name in names)
  inner = next((shape[-1] for name, shape in shapes.items() if re.fullmatch(r'encoder\.encoder\.mlp\.wi.*', name)), 0)
  width = shapes.get('token_embedder.embedding', (0, 0))[-1]
  fits = [axis for axis in (1, 0) if _without(scale, axis) == (width,) and _without(kernel, axis) == (inner, width)]
  if len(fits) == 2:
    raise ValueError(
      f'{where}: {width} layers of width {width} and {inner} are scanned, so that the axis of the layers is '
      'ambiguous: save the model with scan_layers=False'
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
      bias = own.pop('relpos_bias')
      depth = len(params[stack]) - len(own) - 1
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
