"""The key-value cache: slot = absolute position, and no index.

An entry holds the slots of one layer, {'key': [B·K, D, T], 'value': [B·K, T, D]}: the heads of an example follow each
other, and the batched products of attention read these very arrays, so that the decode loop updates them in place. A
network whose layers are unrolled keeps a tuple of entries; one that scans a single entry, with an axis N in front.

Axis letters: B batch, N layers, K key-value heads, T slots, L new tokens, D head dimension.
"""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from speccascade.types import Array

Dtype = Any
Entry = dict[str, Array]


AXIS = {'key': -1, 'value': -2}  # where the slots are


def write(entry: Entry, new: Entry, start: Array) -> Entry:
  """Put new tokens, one layer's, into its entry from slot start [B] on."""
  return {name: _write(entry[name], new[name].astype(entry[name].dtype), start, AXIS[name]) for name in new}


def _write(slots: Array, new: Array, start: Array, axis: int) -> Array:
  def put(slots, new, start):
    at = [0, 0, 0]
    at[axis] = start
    return lax.dynamic_update_slice(slots, new, at)

  batch = start.shape[0]
  if batch == 1:
    return put(slots, new, start[0])
  by_row = [x.reshape(batch, -1, *x.shape[1:]) for x in (slots, new)]
  return jax.vmap(put)(*by_row, start).reshape(slots.shape)


def update(cache, layer: Array | int, new: Entry, start: Array):
  """Write one layer's new entry; return the cache and all slots of that layer."""
  entry = write(entry_of(cache, layer), new, start)
  if isinstance(cache, tuple):
    return (*cache[:layer], entry, *cache[layer + 1 :]), entry
  return {name: lax.dynamic_update_index_in_dim(cache[name], entry[name], layer, 0) for name in entry}, entry


def entry_of(cache, layer: Array | int) -> Entry:
  """Return the slots of one layer."""
  if isinstance(cache, tuple):
    return cache[layer]
  return {name: lax.dynamic_index_in_dim(x, layer, keepdims=False) for name, x in cache.items()}


def empty(layers: int, batch: int, heads: int, slots: int, dim: int, dtype: Dtype, scan: bool):
  """Return zeros for every layer."""
  n, front = batch * heads, (layers,) if scan else ()
  shapes = {'key': (*front, n, dim, slots), 'value': (*front, n, slots, dim)}
  make = lambda: {name: jnp.zeros(shape, dtype) for name, shape in shapes.items()}
  return make() if scan else tuple(make() for _ in range(layers))


def slots_of(cache) -> int:
  """Return T."""
  return (cache[0] if isinstance(cache, tuple) else cache)['key'].shape[AXIS['key']]


def resize(cache, slots: int):
  """Append empty slots, or drop the last, so that there are `slots` of them."""
  if isinstance(cache, tuple):
    return tuple(resize(entry, slots) for entry in cache)

  def pad(x, axis):
    tails = [(0, 0, 0)] * x.ndim
    tails[axis] = (0, slots - x.shape[axis], 0)
    return lax.pad(x, jnp.zeros((), x.dtype), tails)

  return {name: pad(x, AXIS[name]) for name, x in cache.items()}
