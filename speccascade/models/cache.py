"""The key-value cache: slot = absolute position, and no index.

An entry holds the slots of one layer, {'key', 'value'}, each [B·K, T, D]: the heads of an example follow each other.
The batched products of attention read that very array, so that the decode loop updates it in place. A network whose
layers are unrolled keeps a tuple of entries; one that scans keeps a single entry of [N, B·K, T, D].

Axis letters: B batch, N layers, K key-value heads, T slots, L new tokens, D head dimension.
"""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from speccascade.types import Array

Dtype = Any
Entry = dict[str, Array]


def write(slots: Array, new: Array, start: Array, layer: Array | int | None = None) -> Array:
  """Put new [B·K, L, D] into slots [B·K, T, D] from slot start [B] on; `layer` selects from [N, B·K, T, D]."""
  new = new.astype(slots.dtype)
  if layer is not None:
    slots_here = lax.dynamic_index_in_dim(slots, layer, keepdims=False)
    return lax.dynamic_update_index_in_dim(slots, write(slots_here, new, start), layer, 0)
  batch = start.shape[0]
  if batch == 1:
    return lax.dynamic_update_slice(slots, new, (0, start[0], 0))
  by_row = (batch, -1, *slots.shape[1:]), (batch, -1, *new.shape[1:])
  put = jax.vmap(lambda slots, new, start: lax.dynamic_update_slice(slots, new, (0, start, 0)))
  return put(slots.reshape(by_row[0]), new.reshape(by_row[1]), start).reshape(slots.shape)


def update(cache, layer: Array | int, new: Entry, start: Array):
  """Write one layer's new entry; return the cache and all slots of that layer."""
  if isinstance(cache, tuple):
    entry = {name: write(cache[layer][name], new[name], start) for name in new}
    return (*cache[:layer], entry, *cache[layer + 1 :]), entry
  cache = {name: write(cache[name], new[name], start, layer) for name in new}
  return cache, entry_of(cache, layer)


def entry_of(cache, layer: Array | int) -> Entry:
  """Return the slots of one layer."""
  if isinstance(cache, tuple):
    return cache[layer]
  return {name: lax.dynamic_index_in_dim(x, layer, keepdims=False) for name, x in cache.items()}


def empty(layers: int, batch: int, heads: int, slots: int, dim: int, dtype: Dtype, scan: bool):
  """Return zeros for every layer."""
  shape = (batch * heads, slots, dim)
  shape = (layers, *shape) if scan else shape
  make = lambda: {'key': jnp.zeros(shape, dtype), 'value': jnp.zeros(shape, dtype)}
  return make() if scan else tuple(make() for _ in range(layers))


def resize(cache, slots: int):
  """Append empty slots, or drop the last, so that there are `slots` of them."""

  def pad(x):
    tail = (0, slots - x.shape[-2], 0)
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * (x.ndim - 2) + [tail, (0, 0, 0)])

  return jax.tree.map(pad, cache)
