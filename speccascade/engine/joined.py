"""Small arrays of a batch in one array, since each copy between devices, or to the host, has a cost of its own."""

import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from speccascade.types import Array


def join(tree: Any) -> Array:
  """Return arrays [B, …] of 32 bits, and booleans, as one array [B, N] of whole numbers."""

  def as_int32(x):
    x = x.astype(jnp.int32) if x.dtype in (bool, jnp.int32) else lax.bitcast_convert_type(x, jnp.int32)
    return x.reshape(x.shape[0], -1)

  return jnp.concatenate([as_int32(x) for x in jax.tree.leaves(tree)], 1)


def split(joined: Any, like: Any) -> Any:
  """Return the arrays that `join` has put into an array, here or on the host, by a tree of their shapes and dtypes."""
  leaves, structure = jax.tree.flatten(like)
  found = []
  first = 0
  for x in leaves:
    last = first + math.prod(x.shape[1:])
    piece = joined[:, first:last].reshape(-1, *x.shape[1:])
    found.append(piece != 0 if x.dtype == bool else piece.view(x.dtype))
    first = last
  return structure.unflatten(found)
