"""TPUs: caches in tiles of 128 lanes, attention as a kernel of our own."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from speccascade.backends import ops, sharding, tpu_attention, tpu_filters, tpu_spread
from speccascade.backends.base import Backend, cached, entry_of, tokens_of
from speccascade.backends.quantised import Quantised
from speccascade.backends.registry import backend

Array = jax.Array

_LANES = 128
# XLA chooses which weights to fetch to VMEM ahead of their use. With this it costs a fusion by its instructions instead
# of a rule of thumb, and fetches more of them where tokens are few. Of shards of weights it then fetches less.
_OPTIONS = (('xla_msa_use_bundle_aware_cost_model', 'true'),)


@backend('tpu')
@dataclasses.dataclass(frozen=True)
class TPU(Backend):
  """Entries are [B, G, T, P]: heads that share the lanes of a tile form a group."""

  short_products = True
  slot_multiple = tpu_attention.BLOCK
  pack_from = 192  # a v5e reads the weights in the time of some 240 tokens, but waits less for fewer
  mesh: bool = False  # XLA does not shard our kernel: where no layout does, attention on a mesh is plain
  interpret: bool = False  # run the kernel without a TPU, in tests

  def on_mesh(self, layout=sharding.Layout()):
    return dataclasses.replace(self, mesh=True, layout=layout)

  def emulated(self):
    return dataclasses.replace(self, interpret=True)

  @property
  def xla(self):
    return () if self.interpret or self.mesh else _OPTIONS

  def prepare(self, params):
    """Widen scales and biases, which the loop would do at each use."""

    def small(path, x):
      return jax.tree_util.keystr(path[-1:], simple=True) in ('scale', 'bias') and x.dtype == jnp.bfloat16

    return jax.tree.map_with_path(lambda path, x: cached(x, _widened) if small(path, x) else x, params)

  def matmul(self, x, kernel, out_dtype):
    return self._flat(super().matmul, x, kernel, out_dtype)

  def matmul_rows(self, x, rows, out_dtype):
    return self._flat(super().matmul_rows, x, rows, out_dtype)

  def experts(self, x, index, weights, into, out, act):
    """Multiply by the kernels of the chosen experts alone, whose tokens lie one after the other."""
    count, chosen = out.shape[0], index.shape[1]
    expert = jnp.where((index >= 0) & (index < count), index, count).reshape(-1)  # those of other devices come last
    order = jnp.argsort(expert)
    sizes = (expert[:, None] == jnp.arange(count)[None]).sum(0, dtype=jnp.int32)

    dtype = x.dtype

    def multiply(x, kernel):
      if not isinstance(kernel, Quantised):
        return jax.lax.ragged_dot(x.astype(kernel.dtype), kernel, sizes, preferred_element_type=jnp.float32)
      # The kernel of XLA reads whole numbers as they are; converted before it, all experts would be written as floats.
      y = jax.lax.ragged_dot(x.astype(dtype), kernel.values, sizes, preferred_element_type=jnp.float32)
      return y * ops.pick(kernel.scale, jnp.sort(expert))

    sorted_x = ops.pick(x, order // chosen)
    h, *others = (multiply(sorted_x, kernel) for kernel in into)
    y = ops.pick(multiply(math.prod(others, start=act(h)), out), jnp.argsort(order)).reshape(*index.shape, -1)
    return jnp.where(weights[..., None] > 0, y * weights[..., None], 0).sum(1)

  def product(self, y):
    """Separate a matmul from the rotation by position, for which XLA would lay out the kernel anew at each call."""
    return jax.lax.optimization_barrier(y)

  def _flat(self, multiply, x: Array, kernel: Array, out_dtype):
    """Multiply vectors as one matrix, and one vector as two, for one alone is not put on the matrix unit."""
    flat = x.reshape(-1, x.shape[-1])
    if tokens_of(x) == 1:
      flat = jnp.concatenate([flat, jnp.zeros_like(flat)])
    return multiply(flat, kernel, out_dtype)[: tokens_of(x)].reshape(*x.shape[:-1], -1)

  def entry(self, k, v):
    return {'key': _pack(k), 'value': _pack(v)}

  def _plain(self, q: Array) -> bool:
    return q.shape[1] > tpu_attention.MOST or (self.mesh and self.layout.devices == 1)

  def _pieces(self, q: Array, entry, bias) -> list[tuple[slice, Array | None]]:
    """Return the pieces of a window that the kernel has no memory for at once, each with its bias; else none."""
    width = q.shape[1]
    most = tpu_attention.most_tokens(entry['key'], q.shape[2])
    size = -(-width // -(-width // most))
    spans = [slice(i, i + size) for i in range(0, width, size)] if size < width else []
    return [(at, None if bias is None else bias[:, :, at]) for at in spans]

  def extend(self, q, k, v, cache, layer, view, bias, **scores):
    stacked, number = _stacked(cache, layer)
    pieces = self._pieces(q, stacked, bias)
    if self._plain(q) or view.source is not None or (pieces and view.leaves):
      return super().extend(q, k, v, cache, layer, view, bias, **scores)
    if pieces:
      found = []
      for at, some in pieces:
        seen = view._replace(positions=view.positions[:, at])
        y, cache = self.extend(q[:, at], k[:, at], v[:, at], cache, layer, seen, some, **scores)
        found.append(y)
      return jnp.concatenate(found, 1), cache
    at = dict(first=view.positions[:, 0], length=view.positions[:, 0] + q.shape[1], window=view.window)
    at['layer'] = number
    if view.leaves:
      at['positions'] = view.positions
    y, key, value = self._call(q, stacked, bias, {'k': k, 'v': v}, at, causal=True, **scores)
    entry = {'key': key, 'value': value}
    if isinstance(cache, tuple):
      entry = (*cache[:layer], {name: x[:, 0] for name, x in entry.items()}, *cache[layer + 1 :])
    return y, entry

  def attend(self, q, cache, visible, bias, *, layer=None, **scores):
    stacked, number = _stacked(cache, layer)
    if self._plain(q) or visible.ndim > 1 or self.slots_of(stacked) % tpu_attention.BLOCK:
      return super().attend(q, cache, visible, bias, layer=layer, **scores)
    if pieces := self._pieces(q, stacked, bias):
      attend = functools.partial(self.attend, layer=layer, **scores)
      return jnp.concatenate([attend(q[:, at], cache, visible, some) for at, some in pieces], 1)
    length = visible.astype(jnp.int32)
    at = dict(first=jnp.zeros_like(length), length=length, window=0, layer=number)
    return self._call(q, stacked, bias, {}, at, causal=False, **scores)[0]

  def _call(self, q, entry, bias, new, at, **settings):
    """Run the kernel, on a mesh for the rows and groups of heads of each device.

    Heads go to the devices side by side, as projections have them, or XLA would lay out anew the kernels of these.
    """
    heads = ('rows', None, 'heads')
    slots = ('rows', None, 'heads', None, None)
    arrays = {'q': (_joined(q), heads), **{name: (x, slots) for name, x in entry.items()}}
    arrays |= {name: (_joined(x), heads) for name, x in new.items()}
    arrays |= {name: (jnp.asarray(x, jnp.int32), ('rows', None)[: np.ndim(x)]) for name, x in at.items()}
    if bias is not None:
      arrays['bias'] = bias, ('rows', 'heads', None, None)
    packed = _packing(settings.pop('kv_heads'), q.shape[-1])[0]
    kernel = functools.partial(self._kernel, packed=packed, dim=q.shape[-1], **settings)
    y, *caches = self.layout.over_shards(kernel, arrays, [heads, slots, slots][: 3 if new else 1])
    return self.layout.by_head(y).reshape(q.shape), *caches

  def _kernel(self, q, key, value, bias=None, k=None, v=None, *, packed, dim, **settings):
    batch, width, _ = q.shape  # [B, L, H·D]
    heads = q.shape[2] // dim
    groups = key.shape[2]
    lanes = key.shape[4]
    share = heads // (groups * packed)
    x = q.reshape(batch, width, groups, packed, share, dim).swapaxes(3, 4)  # the heads of a tile next to each other
    x = _pad_last(x, lanes // packed).reshape(batch, width, -1)
    if bias is not None:  # [1 or B, H, L, T]
      bias = jnp.pad(bias, ((0, 0), (0, 0), (0, -width % tpu_attention.STEP), (0, 0)))
      bias = bias.reshape(bias.shape[0], groups, -1, bias.shape[3])
    new = None if k is None else tuple(_lanes(x.reshape(batch, width, -1, dim)) for x in (k, v))
    y, *caches = tpu_attention.attend(x, key, value, bias, heads=packed, new=new, interpret=self.interpret, **settings)
    y = y.reshape(batch, width, groups, share, packed, lanes // packed)[..., :dim]
    return y.swapaxes(3, 4).reshape(batch, width, -1), *caches

  def threshold(self, keys, limit, low, high, *, mass):
    if keys.ndim < 2 or (self.mesh and self.layout.devices == 1):
      return super().threshold(keys, limit, low, high, mass=mass)
    limit = jnp.broadcast_to(limit, (*keys.shape[:-1], 1))
    rows = ('rows', None)  # before a vocabulary is gathered, or a window would lie in its lanes
    arrays = {'keys': (keys.reshape(-1, keys.shape[-1]), rows), 'limit': (limit.reshape(-1, 1), rows)}

    def kernel(keys, limit):
      return (tpu_filters.threshold(keys, limit, low, high, mass=mass, interpret=self.interpret),)

    return self.layout.over_shards(kernel, arrays, [rows])[0].reshape(limit.shape)

  def spread(self, logits, write):
    if self.mesh and self.layout.devices == 1:
      return super().spread(logits, write)
    rows = ('rows', None, None)

    def kernel(logits, write):
      found = tpu_spread.spread(logits.reshape(-1, logits.shape[-1]), write, interpret=self.interpret)
      return (found.reshape(*logits.shape[:-1], -1),)

    return self.layout.over_shards(kernel, {'logits': (logits, rows), 'write': (write, (None,))}, [rows])[0]

  def _attend(self, q, entry, mask, bias, kv_heads, scale, cap):
    plain = {name: _unpack(x, kv_heads, q.shape[-1]) for name, x in entry.items()}
    return super()._attend(q, plain, mask, bias, kv_heads, scale, cap)


def _widened(x: Array) -> Array:
  return x.astype(jnp.float32)


def _packing(kv_heads: int, dim: int) -> tuple[int, int]:
  """Return how many heads share a tile of lanes, a power of 2, and how many lanes that has."""
  lanes = -(-dim // _LANES) * _LANES
  return math.gcd(kv_heads, 2 ** int(math.log2(lanes // dim))), lanes


def _pad_last(x: Array, size: int) -> Array:
  return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, size - x.shape[-1]),))


def _stacked(cache, layer: Array | int | None):
  """Return slots with the layers on axis 1, and the number of one, which the kernel finds; XLA would copy it."""
  if layer is None or isinstance(cache, tuple):
    return {name: x[:, None] for name, x in entry_of(cache, layer).items()}, 0
  return cache, layer


def _joined(x: Array) -> Array:
  """Return x [B, T, K, D] as [B, T, K·D]."""
  return x.reshape(*x.shape[:2], -1)


def _lanes(x: Array) -> Array:
  """Return x [B, T, K, D] as [B, T, G·P]."""
  packed, lanes = _packing(*x.shape[2:])
  return _joined(_pad_last(x, lanes // packed))


def _pack(x: Array) -> Array:
  """Return x [B, T, K, D] as [B, G, T, P]."""
  _, lanes = _packing(*x.shape[2:])
  return jnp.swapaxes(_lanes(x).reshape(*x.shape[:2], -1, lanes), 1, 2)


def _unpack(x: Array, kv_heads: int, dim: int) -> Array:
  """Return x [B, G, T, P] as [B, K, T, D]."""
  packed, lanes = _packing(kv_heads, dim)
  x = x.reshape(*x.shape[:3], packed, lanes // packed)[..., :dim]
  return x.transpose(0, 1, 3, 2, 4).reshape(x.shape[0], kv_heads, x.shape[2], dim)
