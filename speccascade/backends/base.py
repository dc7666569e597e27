"""Plain XLA, as every backend does it unless it does better.

Axis letters: B batch, L new tokens, T slots, E embedding, H heads, K key-value heads, G queries for each of them,
D head dimension, N layers.
"""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any, NamedTuple
import weakref

import jax
from jax import lax
import jax.numpy as jnp

from speccascade.backends import ops, sharding
from speccascade.backends.quantised import product, Quantised, widened

Array = jax.Array
Params = Any  # a pytree of arrays; those of the package's networks are dicts
Entry = dict[str, Array]  # the slots of one layer, {'key', 'value'}, in the backend's own layout, rows first

_SCORES = 1 << 27  # scores of a layer that a device computes at once; queries beyond go in chunks
_CHUNK = 128  # the most queries of a chunk
_LEAST = 8  # the fewest
_CACHE: dict[tuple, tuple] = {}  # (id of an array, what is made of it): (weak reference to it, what was made)


class View(NamedTuple):
  """Which slots each query sees: those up to its position and, unless `window` is 0, no further back than that.

  Queries lie in consecutive slots. A leaf, whose position is that of another query, sees the slots before its position,
  and its own; what it leaves there lies behind the others, and is written again before it is seen.
  """

  positions: Array  # [B, L] consecutive in each row, but for leaves
  window: Array | int = 0
  packing: Any = None  # models.packing.Packing of what is computed by token
  source: tuple[Entry, Array] | None = None  # slots beside the cache's, of which every query sees the first [B]
  leaves: int = 0  # how many of the last queries are leaves

  def distance(self, slots: int) -> Array:
    """Return how far before each query each slot is [B, L, T]; negative for what it does not see."""
    slot = jnp.arange(slots)[None, None]
    distance = self.positions[:, :, None] - slot
    if not self.leaves:
      return distance
    own = (self.positions[:, :1] + jnp.arange(self.positions.shape[1])[None])[:, :, None]  # the slot of each query
    return jnp.where(slot == own, 0, jnp.where(slot < jnp.minimum(own, self.positions[:, :, None]), distance, -1))

  def mask(self, slots: int) -> Array:
    """Return [B, L, T]."""
    distance = self.distance(slots)
    if isinstance(self.window, int) and self.window == 0:
      return distance >= 0
    return (distance >= 0) & ((distance < self.window) | (jnp.asarray(self.window) == 0))


class Offsets(NamedTuple):
  """A bias on the scores of S queries and as many slots, by slot minus query: [1, H, 2·S - 1], of 1 - S … S - 1."""

  values: Array

  def of_queries(self, first: Array | int, count: int) -> Array:
    """Return the bias of some queries [1, H, count, S]; those beyond S have any."""
    slots = (self.values.shape[-1] + 1) // 2
    length = slots + count - 1
    padded = jnp.pad(self.values, ((0, 0), (0, 0), (count, 0)))
    part = lax.dynamic_slice_in_dim(padded, slots - first, length, -1)  # of query i it is [count - 1 - i :][:slots]
    rows = jnp.tile(part, (1, 1, count + 1))[..., count - 1 :][..., : count * (length - 1)]  # each begins one earlier
    return rows.reshape(*part.shape[:-1], count, length - 1)[..., :slots]


@dataclasses.dataclass(frozen=True)
class Backend:
  """The operations that a backend may override; hashable, a static part of a program.

  A program for several devices has the `layout` of its arrays on the mesh; that of a network has its own model's alone.
  """

  layout: sharding.Layout = dataclasses.field(default=sharding.Layout(), kw_only=True, repr=False)

  short_products = False  # whether short numbers have a batched product into float32; a CPU has none
  slot_multiple = 1  # the number of slots of a cache is a multiple of it
  slot_axis = {'key': -2, 'value': -2}
  pack_from = 0  # tokens of a batch's windows from which fewer take less time; below, every window is the widest

  def on_mesh(self, layout: sharding.Layout = sharding.Layout()) -> 'Backend':
    """Return the backend for a mesh of such devices, with the layout of a program where there is one."""
    return dataclasses.replace(self, layout=layout)

  def emulated(self) -> 'Backend':
    """Return the backend as it computes on any device, for tests."""
    return self

  def for_slot(self, slot: int) -> 'Backend':
    """Return the backend for the network in a slot of the program's method."""
    return dataclasses.replace(self, layout=self.layout.only([slot]))

  def window_widths(self, rows: int, widths: Sequence[int]) -> Sequence[int]:
    """Return which of the ascending widths of a window are compiled: all, or the widest where others gain nothing."""
    return widths if rows * widths[-1] >= self.pack_from else widths[-1:]

  # ---- parameters ----

  @property
  def xla(self) -> tuple[tuple[str, str], ...]:
    """The options of XLA that the loop is compiled with."""
    return ()

  def prepare(self, params: Params) -> Params:
    """Return parameters as this backend computes with them; what is not changed is shared."""
    return params

  def matmul(self, x: Array, kernel: Array, out_dtype: Any) -> Array:
    """Return x · kernel in the kernel's dtype.

    Args:
      x: [..., in].
      kernel: [in, out].
      out_dtype: The dtype of the sums.

    Returns:
      [..., out].
    """
    return jnp.matmul(x.astype(kernel.dtype), kernel, preferred_element_type=out_dtype)

  def matmul_rows(self, x: Array, rows: Array, out_dtype: Any) -> Array:
    """Return x · rowsᵀ in the dtype of x.

    Args:
      x: [..., in].
      rows: [out, in], an embedding or a prepared kernel.
      out_dtype: The dtype of the sums.

    Returns:
      [..., out].
    """
    return jnp.einsum('...i,oi->...o', x, rows.astype(x.dtype), preferred_element_type=out_dtype)

  def experts(
    self, x: Array, index: Array, weights: Array, into: tuple[Array, ...], out: Array, act: Callable
  ) -> Array:
    """Return the weighted sums of what MLPs make of the tokens that they are chosen for.

    Few tokens read the kernels of their experts alone; where they may need all, one expert after the other has all
    tokens.

    Args:
      x: Tokens [N, E].
      index: [N, K] the experts of each token, out of 0 … X - 1 where one is not here.
      weights: [N, K] what each is multiplied by, 0 where it is not here.
      into: The first kernel, [X, E, F], and that of the gate's product where there is one; each may be `Quantised`.
      out: The last kernel, [X, F, E].
      act: The activation.

    Returns:
      [N, E] in float32.
    """
    count = out.shape[0]
    dtype = x.dtype

    def mlp(x, into, out, multiply):
      h, *others = (multiply(x, kernel) for kernel in into)
      return multiply(math.prod(others, start=act(h)), out)

    if index.size < count:

      def by_token(x, kernels):
        chosen = jax.tree.map(lambda kernel: jnp.take(kernel, index.reshape(-1), axis=0, mode='clip'), kernels)
        values, scale = chosen if isinstance(chosen, Quantised) else (chosen, 1.0)
        return (x[:, :, None].astype(jnp.float32) * values.astype(jnp.float32)).sum(1) * scale

      y = mlp(jnp.repeat(x, index.shape[1], axis=0), into, out, by_token).reshape(*index.shape, -1)
      return jnp.where(weights[..., None] > 0, y * weights[..., None], 0).sum(1)

    def add(total, expert):
      number, into, out = expert
      share = jnp.where(index == number, weights, 0).sum(1)[:, None]
      y = mlp(x, into, out, lambda x, kernel: product(self.matmul, x, widened(kernel, dtype), jnp.float32))
      return total + jnp.where(share > 0, y * share, 0), None

    return lax.scan(add, jnp.zeros(x.shape, jnp.float32), (jnp.arange(count), into, out))[0]

  def product(self, y: Array) -> Array:
    """Return the result of a matmul y, which a backend may keep apart from what is computed of it next."""
    return y

  # ---- the key-value cache ----

  def slots(self, needed: int) -> int:
    """Return how many slots a cache has that needs so many."""
    return -(-needed // self.slot_multiple) * self.slot_multiple

  def entry(self, k: Array, v: Array) -> Entry:
    """Return the slots of keys and values [B, T, K, D]."""
    return {'key': jnp.swapaxes(k, 1, 2), 'value': jnp.swapaxes(v, 1, 2)}  # [B, K, T, D]

  def slots_of(self, entry: Entry) -> int:
    """Return T."""
    return entry['key'].shape[self.slot_axis['key']]

  def write(self, entry: Entry, new: Entry, start: Array) -> Entry:
    """Write a window's slots into an entry.

    Args:
      entry: The slots of a layer.
      new: The slots of the window.
      start: [B] the slot of each row at which the window begins.

    Returns:
      The entry with the window.
    """
    put = jax.vmap(lambda slots, new, at: lax.dynamic_update_slice(slots, new, (0, at, 0)))
    return {name: put(entry[name], new[name].astype(entry[name].dtype), start) for name in new}

  def extend(self, q: Array, k: Array, v: Array, cache, layer, view: View, bias: Array | None, **scores):
    """Write a window's keys and values into a layer's slots, and attend to them.

    Args:
      q: Queries [B, L, H, D].
      k: Keys [B, L, K, D].
      v: Values [B, L, K, D].
      cache: A tuple of entries, or one entry with the layers on axis 1.
      layer: The number of the layer.
      view: Which slots each query sees.
      bias: [1 or B, H, L, T], added to the scores; None for none, as where there is a source.
      **scores: `kv_heads`, `scale` and `cap`, as of `attend`.

    Returns:
      The attention [B, L, H, D], and the cache.
    """
    entry = self.write(entry_of(cache, layer), self.entry(k, v), view.positions[:, 0])
    seen = entry
    mask = view.mask(self.slots_of(entry))
    if view.source is not None:
      source, length = view.source
      seen = {name: jnp.concatenate([x, source[name]], self.slot_axis[name]) for name, x in entry.items()}
      shown = (jnp.arange(self.slots_of(source))[None] < length[:, None])[:, None]
      mask = jnp.concatenate([mask, jnp.broadcast_to(shown, (*mask.shape[:2], shown.shape[2]))], -1)
    y = self.attend(q, seen, mask, bias, **scores)
    if isinstance(cache, tuple):
      return y, (*cache[:layer], entry, *cache[layer + 1 :])
    return y, {name: lax.dynamic_update_index_in_dim(cache[name], entry[name], layer, 1) for name in entry}

  def attend(
    self,
    q: Array,
    cache,
    visible: Array,
    bias: Array | Offsets | None,
    *,
    layer: Array | int | None = None,
    kv_heads: int,
    scale: float,
    cap: float | None,
  ):
    """Return softmax(scale · q·k + bias) · v, the softmax in float32.

    Memory grows with B · T, not with B · L · T: many queries go in chunks, of fewer where there are many rows.

    Args:
      q: Queries [B, L, H, D].
      cache: The slots of a layer, or those of all as `extend` takes them.
      visible: How many of the first slots each query of a row sees [B], or a mask [B, 1 or L, T] that is true where a
        slot is seen.
      bias: [1 or B, H, L, T] or `Offsets`, added to the scores; None for none.
      layer: The number of the layer, where there are all.
      kv_heads: K.
      scale: Multiplied with q·k.
      cap: Scores become cap · tanh(score / cap); None for none.

    Returns:
      [B, L, H, D].
    """
    entry = entry_of(cache, layer)
    mask = visible
    if visible.ndim == 1:
      mask = (jnp.arange(self.slots_of(entry))[None] < visible[:, None])[:, None]
    rows, length, heads, _ = q.shape
    a_query = rows * heads * mask.shape[-1] // self.layout.devices
    if length * a_query <= _SCORES or length <= _CHUNK:
      bias = bias.of_queries(0, length) if isinstance(bias, Offsets) else bias
      return self._attend(q, entry, mask, bias, kv_heads, scale, cap)
    size = max(_LEAST, min(_CHUNK, _SCORES // a_query // _LEAST * _LEAST))
    chunks = -(-length // size)

    def split(x, axis):  # one entry of the new first axis a chunk
      if x is None or isinstance(x, Offsets) or x.shape[axis] == 1:
        return None
      pad = [(0, 0)] * x.ndim
      pad[axis] = (0, chunks * size - length)
      x = jnp.pad(x, pad)
      return jnp.moveaxis(x.reshape(*x.shape[:axis], chunks, size, *x.shape[axis + 1 :]), axis, 0)

    def one(chunk):
      number, queries, masks, biases = chunk
      masks = mask if masks is None else masks
      if biases is None:
        biases = bias.of_queries(number * size, size) if isinstance(bias, Offsets) else bias
      return self._attend(queries, entry, masks, biases, kv_heads, scale, cap)

    y = lax.map(one, (jnp.arange(chunks), split(q, 1), split(mask, 1), split(bias, 2)))  # [chunks, B, size, H, D]
    return jnp.moveaxis(y, 0, 1).reshape(q.shape[0], -1, *q.shape[2:])[:, :length]

  def _attend(self, q, entry, mask, bias, kv_heads, scale, cap):
    k = entry['key']
    v = entry['value']
    batch, width, h, d = q.shape
    kv = kv_heads
    if not self.short_products:
      q = q.astype(jnp.float32)
      k = k.astype(jnp.float32)
    rows = q.reshape(batch, width, kv, -1, d).transpose(0, 2, 3, 1, 4).reshape(batch, kv, -1, d)  # [B, K, G·L, D]
    scores = jnp.einsum('bkxd,bktd->bkxt', rows, k, preferred_element_type=jnp.float32)
    weights = attention_weights(scores, mask, bias, width, scale, cap).astype(v.dtype)
    y = jnp.einsum('bkxt,bktd->bkxd', weights, v).reshape(batch, kv, h // kv, width, d)
    return y.transpose(0, 3, 1, 2, 4).reshape(batch, width, h, d)

  # ---- the loop ----

  def spread(self, logits: Array, write: Array) -> Array:
    """Return the logits of a vocabulary by those of some of its tokens, -inf for all others.

    Args:
      logits: [B, L, D].
      write: [V] the number of a token's logit, -1 for none; the others ascend.

    Returns:
      [B, L, V].
    """
    return ops.spread(logits, write)

  def threshold(self, keys: Array, limit: Array, low: int, high: int, *, mass: bool) -> Array:
    """Return the least key x, `low` < x <= `high`, for which the entries over x are not enough.

    This is a bisection, so that some thirty masked sums give what a sort of the vocabulary would.

    Args:
      keys: [..., V] whole numbers of more than `low`.
      limit: What is enough, a number or [..., 1].
      low: Of the bisection.
      high: Of the bisection.
      mass: Whether the keys are the bits of numbers that are added up; else entries are counted.

    Returns:
      [..., 1].
    """
    weights = lax.bitcast_convert_type(keys, jnp.float32) if mass else 1.0

    def halve(_, bounds):
      low, high = bounds
      middle = (low >> 1) + (high >> 1) + (low & high & 1)  # without overflow
      above = jnp.where(keys > middle, weights, 0.0).sum(-1, keepdims=True) >= limit
      return jnp.where(above, middle, low), jnp.where(above, high, middle)

    shape = keys.shape[:-1] + (1,)
    bounds = jnp.full(shape, low, jnp.int32), jnp.full(shape, high, jnp.int32)
    return lax.fori_loop(0, int(high - low).bit_length(), halve, bounds)[1]

  def choose(self, which: Array, branches: list, state: Any) -> Any:
    """Apply one of several branches, so that XLA updates caches in place.

    `lax.switch` copies what its branches change; a loop of at most one turn does not.

    Args:
      which: The number of the branch.
      branches: Functions of the state.
      state: A pytree.

    Returns:
      The state after the branch.
    """
    for i, branch in enumerate(branches):

      def once(carry, branch=branch):
        return (jnp.bool_(False), branch(carry[1]))

      with jax.named_scope(f'branch_{i}_of_{len(branches)}'):  # by which a compiled program says that one alone runs
        state = lax.while_loop(lambda carry: carry[0], once, (which == i, state))[1]
    return state


def entry_of(cache, layer: Array | int | None) -> Entry:
  """Return the slots of one layer, None where there is one alone."""
  if layer is None:
    return cache
  if isinstance(cache, tuple):
    return cache[layer]
  return {name: lax.dynamic_index_in_dim(x, layer, 1, keepdims=False) for name, x in cache.items()}


def attention_weights(scores: Array, mask: Array, bias: Array | None, width: int, scale: float, cap: float | None):
  """Return the softmax of scores [B, K, G·L, T] in float32."""
  batch, kv, _, slots = scores.shape
  scores = scores.reshape(batch, kv, -1, width, slots) * scale  # [B, K, G, L, T]
  if cap is not None:
    scores = cap * jnp.tanh(scores / cap)
  if bias is not None:
    scores = scores + bias.reshape(bias.shape[0], kv, -1, *bias.shape[2:])
  scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
  return jax.nn.softmax(scores, axis=-1).reshape(batch, kv, -1, slots)


def tokens_of(x: Array) -> int:
  """Return how many vectors x [..., E] has."""
  return math.prod(x.shape[:-1])


def cached(x: Array, make: Callable[[Array], Array]) -> Array:
  """Return what is made of an array; it is made once for each array, and lives as long as that."""
  if isinstance(x, jax.core.Tracer):
    return make(x)
  key = id(x), make
  if key not in _CACHE:
    _CACHE[key] = weakref.ref(x, lambda _: _CACHE.pop(key, None)), make(x)
  return _CACHE[key][1]
