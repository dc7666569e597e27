"""The key-value cache: slot = absolute position, and no index.

An entry has the slots of one layer, {'key', 'value'}, in the layout of the backend, the rows on axis 0: one index
each, or several that follow each other. The cache of a network whose layers are unrolled is a tuple of entries; that of
one that scans is a single entry, with the layers on axis 1.

Axis letters: B batch, N layers, K key-value heads, T slots, D head dimension.
"""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from speccascade.backends import Backend, Entry, entry_of

Dtype = Any
__all__ = ['Entry', 'empty', 'entry_of', 'resize', 'slots_of', 'stack']


def stack(entries):
  """Return what a pass over the layers gave, a tuple of entries or arrays with the layers in front, as a cache."""
  return entries if isinstance(entries, tuple) else {name: jnp.moveaxis(x, 0, 1) for name, x in entries.items()}


def empty(backend: Backend, layers: int, batch: int, heads: int, slots: int, dim: int, dtype: Dtype, scan: bool):
  """Return zeros for every layer."""
  zeros = jax.ShapeDtypeStruct((batch, backend.slots(slots), heads, dim), dtype)
  shapes = jax.eval_shape(backend.entry, zeros, zeros)

  def make(*n):
    return {name: jnp.zeros((x.shape[0], *n, *x.shape[1:]), x.dtype) for name, x in shapes.items()}

  return make(layers) if scan else tuple(make() for _ in range(layers))


def slots_of(backend: Backend, cache) -> int:
  """Return T."""
  return backend.slots_of(cache[0] if isinstance(cache, tuple) else cache)


def resize(backend: Backend, cache, slots: int):
  """Append empty slots, or drop the last, so that there are as many as a backend has for `slots`."""
  if isinstance(cache, tuple):
    return tuple(resize(backend, entry, slots) for entry in cache)

  def pad(x, axis):
    tails = [(0, 0, 0)] * x.ndim
    tails[axis] = (0, backend.slots(slots) - x.shape[axis], 0)
    return lax.pad(x, jnp.zeros((), x.dtype), tails)

  return {name: pad(x, backend.slot_axis[name]) for name, x in cache.items()}
