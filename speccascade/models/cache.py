"""The key-value cache: slot = absolute position, and no index.

An entry holds the slots of one layer, {'key', 'value'}, each [B, K, T, D]. A network whose layers are unrolled keeps
a tuple of entries; one that scans keeps a single entry of [B, N, K, T, D]. Axis 0 of every leaf is the batch.

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
  """Put new [B, K, L, D] into slots [B, K, T, D] from slot start [B] on; `layer` selects from [B, N, K, T, D]."""
  new = new.astype(slots.dtype)
  new = new if layer is None else new[:, None]

  def row(slots, new, start):
    at = (0, start, 0) if layer is None else (layer, 0, start, 0)
    return lax.dynamic_update_slice(slots, new, at)

  if slots.shape[0] == 1:
    return row(slots[0], new[0], start[0])[None]
  return jax.vmap(row)(slots, new, start)


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
  return {name: lax.dynamic_index_in_dim(x, layer, axis=1, keepdims=False) for name, x in cache.items()}


def empty(layers: int, shape: tuple[int, int, int, int], dtype: Dtype, scan: bool):
  """Return zeros for every layer, with slots of the shape [B, K, T, D]."""
  if scan:
    shape = (shape[0], layers, *shape[1:])
    return {'key': jnp.zeros(shape, dtype), 'value': jnp.zeros(shape, dtype)}
  return tuple({'key': jnp.zeros(shape, dtype), 'value': jnp.zeros(shape, dtype)} for _ in range(layers))


def resize(cache, slots: int):
  """Append empty slots, or drop the last, so that there are `slots` of them."""

  def pad(x):
    tail = (0, slots - x.shape[-2], 0)
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * (x.ndim - 2) + [tail, (0, 0, 0)])

  return jax.tree.map(pad, cache)
