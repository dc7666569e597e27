"""CPUs: large kernels are stored transposed, and multiply few tokens as columns.

XLA's matrix product on a CPU packs its right side anew at each call. Where that is the weights, it costs as much again
as reading them, so the weights are on the left, and the tokens are columns that fill registers. It widens short weights
in memory; a sum of products reads them once, as they are stored. A CPU with tiles for bfloat16 (AMX) multiplies tokens
of bfloat16 as they are, and those of float32 in three parts.
"""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from speccascade.backends import sharding
from speccascade.backends.base import attention_weights, Backend, cached, Entry, Params, tokens_of
from speccascade.backends.quantised import Quantised
from speccascade.backends.registry import backend

Array = jax.Array

_FEW = 64  # tokens up to which they are columns
_CACHED = 16e6  # bytes of weights that stay in a CPU's cache from token to token, where packing costs little


@dataclasses.dataclass(frozen=True)
class CPUs(Backend):
  """Plain XLA: no mesh shards heads that share an axis with the rows."""

  slot_multiple = 16


@backend('cpu')
@dataclasses.dataclass(frozen=True)
class CPU(Backend):
  """Attention's products and the cache are float32; entries are [B·K, D, T] and [B·K, T, D], a row's heads together.

  With an axis for the rows, XLA copies the caches of a batch of one in each round. It widens a short cache as a whole
  to write a slot of each row, narrows it again, and widens it to attend.
  """

  slot_multiple = 16
  slot_axis = {'key': -1, 'value': -2}
  tiles: bool = True  # use them where the CPU has them

  def on_mesh(self, layout=sharding.Layout()):
    return CPUs(layout=layout)

  def prepare(self, params: Params) -> Params:
    """Store every kernel [in, out] as its transpose `rows` [out, in] where the weights exceed the cache.

    Rows that are exact in bfloat16, as those of most checkpoints, are stored in it: half the bytes and the same sums. A
    head that is tied to the embedding gets rows of its own, for activations have the embedding's dtype. Tokens are
    looked up in the bits of a table of bfloat16, which XLA would widen as a whole before each loop.
    """
    if not isinstance(params, dict):
      return params  # of a network that is none of the package's
    decoder = params.get('decoder', params)
    leaves = jax.tree.leaves(decoder)
    if sum(x.nbytes for x in leaves) <= _CACHED or isinstance(leaves[0], jax.core.Tracer) or not _fuses_sums():
      return params
    return _with_rows(params)

  def matmul_rows(self, x: Array, rows: Array, out_dtype: Any) -> Array:
    n = tokens_of(x)
    flat = x.reshape(n, -1)
    tiled = rows.dtype == jnp.bfloat16 and self.tiles and _has_tiles()
    as_stored = rows.dtype == (jnp.bfloat16 if tiled else jnp.float32)
    if tiled and x.dtype != jnp.bfloat16:
      y = _in_parts(flat, rows)
    elif as_stored and n <= _FEW:
      y = _columns(flat.astype(rows.dtype), rows)
    elif as_stored or n > _FEW:
      return super().matmul_rows(x, rows, out_dtype)
    else:
      y = _summed(flat, rows)
    return y.reshape(*x.shape[:-1], -1).astype(out_dtype)

  def entry(self, k, v):
    k, v = (x.astype(jnp.float32) for x in (k, v))
    k, v = (jnp.swapaxes(x, 1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in (k, v))  # [B·K, T, D]
    return {'key': jnp.swapaxes(k, 1, 2), 'value': v}

  def write(self, entry: Entry, new: Entry, start: Array) -> Entry:
    return {name: _write(entry[name], new[name].astype(entry[name].dtype), start, self.slot_axis[name]) for name in new}

  def _attend(self, q, entry, mask, bias, kv_heads, scale, cap):
    k = entry['key']
    v = entry['value']
    batch, width, h, d = q.shape
    kv = kv_heads
    rows = q.reshape(batch, width, kv, -1, d).transpose(0, 2, 3, 1, 4).reshape(k.shape[0], -1, d)  # [B·K, G·L, D]
    scores = jnp.einsum('nxd,ndt->nxt', rows.astype(jnp.float32), k)
    scores = scores.reshape(batch, kv, *scores.shape[1:])
    weights = attention_weights(scores, mask, bias, width, scale, cap)
    y = jnp.einsum('nxt,ntd->nxd', weights.reshape(k.shape[0], *weights.shape[2:]), v).astype(q.dtype)
    return y.reshape(batch, kv, h // kv, width, d).transpose(0, 3, 1, 2, 4).reshape(q.shape)


def _columns(x: Array, rows: Array) -> Array:
  """Return x · rowsᵀ in float32 for few x [n, in] of the dtype of rows [out, in]."""
  n = x.shape[0]
  width = -(-n // 16) * 16 if rows.dtype == jnp.bfloat16 else _columns_of(n)  # tiles have 16 rows
  padded = jnp.pad(x, ((0, width - n), (0, 0)))
  y = jnp.einsum('ni,oi->on', padded, rows, preferred_element_type=jnp.float32)
  y = lax.optimization_barrier(y)  # transposed within the product, the weights would be its right side
  return y[:, :n].T


def _columns_of(n: int) -> int:
  """Return the columns of numbers of float32 that n tokens take: as many as fill registers."""
  return 1 if n == 1 else 4 if n <= 4 else -(-n // 8) * 8


def _summed(x: Array, rows: Array) -> Array:
  """Return the same as a sum of products, for short rows."""
  n = x.shape[0]
  columns = jnp.pad(x, ((0, _columns_of(n) - n), (0, 0))).T
  columns, rows = lax.optimization_barrier((columns, rows))  # shared with a sibling, the product would be stored
  columns = columns.astype(jnp.float32)
  rows = rows.astype(jnp.float32)
  if n == 1:
    return jnp.sum(rows * columns.T, axis=1)[None]
  return jnp.sum(rows[:, :, None] * columns[None], axis=1)[:, :n].T


def _in_parts(x: Array, rows: Array) -> Array:
  """Return x · rowsᵀ in float32 for x [n, in] and rows [out, in] of bfloat16, as three products of bfloat16.

  The 24 bits of a float32 are those of three bfloat16s, so that no product is rounded before it is summed.
  """
  parts = []
  rest = x.astype(jnp.float32)
  for _ in range(3):
    first = lax.bitcast_convert_type(rest, jnp.uint32) >> 16  # truncated, which is faster than rounded
    parts.append(lax.bitcast_convert_type(first.astype(jnp.uint16), jnp.bfloat16))
    rest = rest - parts[-1].astype(jnp.float32)
  stacked = jnp.concatenate(parts)
  few = stacked.shape[0] <= _FEW
  y = _columns(stacked, rows) if few else jnp.einsum('ni,oi->no', stacked, rows, preferred_element_type=jnp.float32)
  high, middle, low = jnp.split(y, 3)
  return low + middle + high


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


def _with_rows(params: dict) -> dict:
  """Return the parameters of a network, or of several by name, as `prepare` does."""
  tree = {name: _with_rows(x) if isinstance(x, dict) else x for name, x in params.items()}
  if 'kernel' in tree and len(tree['kernel'].shape) == 2:
    kernel = tree.pop('kernel')
    short = isinstance(kernel, Quantised)
    rows = cached(kernel.values if short else kernel, _transposed)
    tree['rows'] = kernel._replace(values=rows) if short else rows
  if 'token_embedder' in tree and not isinstance(table := tree['token_embedder']['embedding'], Quantised):
    tied = 'logits_dense' not in tree.get('decoder', tree)
    tree['token_embedder'] |= {'rows': cached(table, _copied)} if tied else {}
    tree['token_embedder'] |= {'bits': cached(table, _bits)} if table.dtype == jnp.bfloat16 else {}
  return tree


def _transposed(x: Array) -> Array:
  return _copied(np.asarray(x).T)


def _copied(x: Array) -> Array:
  return jnp.asarray(np.ascontiguousarray(_short(np.asarray(x))))


def _bits(x: Array) -> Array:
  return jnp.asarray(np.ascontiguousarray(np.asarray(x)).view(np.uint16))


def _short(x: np.ndarray) -> np.ndarray:
  """Return float32 numbers as bfloat16 if none of them changes."""
  if x.dtype != np.float32:
    return x
  bits = np.ascontiguousarray(x).view(np.uint32)
  return x if (bits & 0xFFFF).any() else (bits >> 16).astype(np.uint16).view(jnp.bfloat16)


@functools.cache
def _has_tiles() -> bool:
  info = pathlib.Path('/proc/cpuinfo')
  return info.exists() and 'amx_bf16' in info.read_text()


@functools.cache
def _fuses_sums() -> bool:
  """Tell whether the compiler makes one kernel of the sums of `matmul_rows`."""
  x, rows = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((6, 128), (128, 128)))
  with jax.default_device(jax.devices('cpu')[0]):
    text = jax.jit(CPU().matmul_rows, static_argnums=2).lower(x, rows, jnp.float32).compile().as_text()
  return 'ynn_fusion' in text
