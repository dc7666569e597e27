"""Models with random weights, which do the work of real ones of the same shapes, and the bytes that a step reads."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speccascade.backends.quantised import MOST, Quantised
from speccascade.planning.timing import endless
from speccascade.types import Model, Network, Params


def random_model(network: Network, name: str, seed: int = 0) -> Model:
  """Return the network with noise for weights, without EOS, so that every text is as long as it may be."""
  return endless([Model(random_params(network, seed), network, name=name)])[0]


def random_params(network: Network, seed: int = 0) -> Params:
  """Return noise of the parameters' shapes and dtypes, made on the device: a host has no memory for large ones."""
  shapes = network.param_shapes()
  leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, Quantised))
  scale = np.float32((3 / network.config.embed_dim) ** 0.5)  # of uniform numbers: a variance of 1/embed_dim

  def noise(i, x):
    number = np.uint32(seed * len(leaves) + i)
    if not isinstance(x, Quantised):
      return _noise(number, scale, x.shape, x.dtype.name)
    return Quantised(_noise(number, np.float32(MOST), x.shape, 'int8'), jnp.full(x.scale.shape, scale / MOST))

  return tree.unflatten([noise(i, x) for i, x in enumerate(leaves)])


@functools.partial(jax.jit, static_argnums=(2, 3))
def _noise(seed, scale, shape: tuple[int, ...], dtype: str):
  """Return numbers between -scale and scale by hashing their indices."""
  index = jnp.full((1,) * len(shape), seed * np.uint32(2654435761), jnp.uint32)
  for axis, stride in enumerate(np.cumprod((1, *shape[:0:-1]), dtype=np.uint32)[::-1]):
    index = index + stride * jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
  for factor in (0x7FEB352D, 0x846CA68B):
    index = (index ^ (index >> 16)) * np.uint32(factor)
  unit = (index >> 8).astype(jnp.float32) * np.float32(2.0**-23) - 1
  return (unit * scale).astype(dtype)


def weight_bytes(params: Params, experts: float = 1.0) -> int:
  """Return the bytes of the parameters that a call reads (`Network.reads`), or of their shapes, of experts a share."""
  leaves = jax.tree_util.tree_leaves_with_path(params) if experts < 1 else ()
  routed = [x for path, x in leaves if re.search(r"\['mlp'\]\['w\w+'\]", jax.tree_util.keystr(path))]
  return round(tree_bytes(params) - (1 - experts) * tree_bytes(routed))


def tree_bytes(tree: Any) -> int:
  """Return the bytes of arrays, or of shapes that stand for them."""
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
