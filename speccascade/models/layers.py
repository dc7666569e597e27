"""Blocks that all model families share: norms, dense layers, attention, and the loop over layers.

Axis letters: B batch, L new tokens, T slots, S source, N layers, E embedding, F inner width, H heads,
K key-value heads, G queries for each of them (H = K·G), D head dimension.
"""

from collections.abc import Callable
import functools
import math
import pathlib
from typing import Any

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from speccascade.models import rope as rope_lib
from speccascade.types import Array, Params

Dtype = Any

ACTIVATIONS = {
  'relu': jax.nn.relu,
  'silu': jax.nn.silu,
  'gelu': lambda x: jax.nn.gelu(x, approximate=False),
  'gelu_tanh': lambda x: jax.nn.gelu(x, approximate=True),
}


def _along_last(v: Array, x: Array) -> Array:
  """Return v [E] in float32 with as many axes as x [..., E]."""
  return v.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + v.shape)


def softcap(x: Array, cap: float | None) -> Array:
  """Return cap · tanh(x / cap), or x where there is no cap."""
  return x if cap is None else cap * jnp.tanh(x / cap)


class RMSNorm(nn.Module):
  """Divide by the root mean square; `offset` 1 stores the scale as its difference from one (Gemma)."""

  eps: float = 1e-6
  offset: float = 0.0
  axis: str = 'embed'
  dtype: Dtype = jnp.float32

  @nn.compact
  def __call__(self, x: Array) -> Array:
    init = nn.initializers.constant(1 - self.offset)
    scale = self.param('scale', nn.with_logical_partitioning(init, (self.axis,)), x.shape[-1:], self.dtype)
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
    return (y * (_along_last(scale, y) + self.offset)).astype(x.dtype)


class LayerNorm(nn.Module):
  """Subtract the mean, divide by the standard deviation, scale and shift."""

  eps: float = 1e-5
  axis: str = 'embed'
  dtype: Dtype = jnp.float32

  @nn.compact
  def __call__(self, x: Array) -> Array:
    ones = nn.with_logical_partitioning(nn.initializers.ones, (self.axis,))
    zeros = nn.with_logical_partitioning(nn.initializers.zeros, (self.axis,))
    scale = self.param('scale', ones, x.shape[-1:], self.dtype)
    bias = self.param('bias', zeros, x.shape[-1:], self.dtype)
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
    return (y * _along_last(scale, y) + _along_last(bias, y)).astype(x.dtype)


class Dense(nn.Module):
  """Multiply by a kernel (in, out) in the kernel's dtype; `axes` names its two axes for sharding.

  Parameters that `keep_by_rows` has changed hold the kernel's transpose, `rows`, whose dtype may be shorter.
  """

  features: int
  axes: tuple[str, str]
  use_bias: bool = False
  init_scale: float = 1.0
  out_dtype: Dtype | None = None  # None: the input's
  dtype: Dtype = jnp.float32

  @nn.compact
  def __call__(self, x: Array) -> Array:
    out_dtype = self.out_dtype or x.dtype
    if self.has_variable('params', 'rows'):
      rows = self.get_variable('params', 'rows')
      y = matmul_rows(x, rows, out_dtype)
    else:
      init = nn.initializers.variance_scaling(self.init_scale, 'fan_in', 'normal')
      init = nn.with_logical_partitioning(init, self.axes)
      kernel = self.param('kernel', init, (x.shape[-1], self.features), self.dtype)
      y = jnp.matmul(x.astype(kernel.dtype), kernel, preferred_element_type=self.out_dtype)
    if self.use_bias:
      zeros = nn.with_logical_partitioning(nn.initializers.zeros, self.axes[1:])
      bias = self.param('bias', zeros, (self.features,), self.dtype)
      y = y + bias.astype(y.dtype).reshape((1,) * (y.ndim - 1) + (-1,))
    return y.astype(out_dtype)


def matmul_rows(x: Array, rows: Array, out_dtype: Dtype) -> Array:
  """Return x · rowsᵀ for x [..., in], rows [out, in], whose dtype may be shorter; sums are float32.

  The CPU's matrix product packs the weights anew at each call, which for a few tokens costs as much again as reading
  them, and widens short ones in memory. A sum of products reads them once, as they are stored. For more tokens a CPU
  with tiles for bfloat16 multiplies in parts.
  """
  lead, n = x.shape[:-1], math.prod(x.shape[:-1])
  if n >= _SPLIT and rows.dtype == jnp.bfloat16 and _has_tiles():
    return matmul_parts(x.reshape(n, -1), rows).reshape(*lead, -1).astype(out_dtype)
  if n > _SUMMED or (n == 1 and rows.dtype == jnp.float32):
    return jnp.einsum('...i,oi->...o', x, rows.astype(x.dtype), preferred_element_type=out_dtype).astype(out_dtype)
  padded = n if n == 1 else 4 if n <= 4 else -(-n // 8) * 8  # columns that fill registers
  columns = jnp.pad(x.reshape(n, -1), ((0, padded - n), (0, 0))).T
  columns, rows = lax.optimization_barrier((columns, rows))  # shared with a sibling, the product would be stored
  columns, rows = columns.astype(jnp.float32), rows.astype(jnp.float32)
  if n == 1:
    y = jnp.sum(rows * columns.T, axis=1)[:, None]
  else:
    y = jnp.sum(rows[:, :, None] * columns[None], axis=1)  # [out, padded]
  return y[:, :n].T.reshape(*lead, -1).astype(out_dtype)


def matmul_parts(x: Array, rows: Array) -> Array:
  """Return x · rowsᵀ in float32 for x [n, in], rows [out, in] of bfloat16: three products of short numbers.

  A float32's 24 bits are those of three bfloat16s, so that no product is rounded before it is summed.
  """
  parts, rest = [], x.astype(jnp.float32)
  for _ in range(3):
    first = lax.bitcast_convert_type(rest, jnp.uint32) >> 16  # cut off, which is faster than rounded
    parts.append(lax.bitcast_convert_type(first.astype(jnp.uint16), jnp.bfloat16))
    rest = rest - parts[-1].astype(jnp.float32)
  y = jnp.einsum('ni,oi->no', jnp.concatenate(parts), rows, preferred_element_type=jnp.float32)
  high, middle, low = jnp.split(y, 3)
  return low + middle + high


_SPLIT = 24  # tokens from which parts are faster than sums, where the CPU has tiles
_SUMMED = 64  # tokens up to which sums of products are faster than a product
_CACHED = 16e6  # bytes of weights that stay in a CPU's cache from token to token, where packing costs little


def keep_by_rows(params: Params) -> None:
  """Store every kernel [in, out] as its transpose `rows` [out, in] where that is faster, in place of the kernel.

  It is on a CPU whose compiler has a kernel for the sums of `matmul_rows`, with more weights than its cache holds.
  Rows that bfloat16 holds exactly, as most checkpoints' are, are stored in it: half the bytes and the same sums. A head
  that is tied to the embedding gets rows of its own, for activations have the embedding's dtype.
  """
  decoder = params.get('decoder', params)
  if jax.default_backend() == 'cpu' and sum(x.nbytes for x in jax.tree.leaves(decoder)) > _CACHED and _fuses_sums():
    _transpose(params)
    if 'logits_dense' not in decoder:
      table = params['token_embedder']
      table['rows'] = jnp.asarray(_short(table['embedding']))


def _transpose(params: Params) -> None:
  if 'kernel' in params:
    params['rows'] = jnp.asarray(_short(params.pop('kernel')).T)
  for x in params.values():
    if isinstance(x, dict):
      _transpose(x)


def _short(x: Array) -> np.ndarray | Array:
  """Return float32 numbers as bfloat16 if none of them changes."""
  if x.dtype != jnp.float32:
    return x
  bits = np.asarray(x).view(np.uint32)
  return x if (bits & 0xFFFF).any() else (bits >> 16).astype(np.uint16).view(jnp.bfloat16)


@functools.cache
def _has_tiles() -> bool:
  info = pathlib.Path('/proc/cpuinfo')
  return info.exists() and 'amx_bf16' in info.read_text()


@functools.cache
def _fuses_sums() -> bool:
  x, rows = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((6, 128), (128, 128)))
  return 'ynn_fusion' in jax.jit(matmul_rows, static_argnums=2).lower(x, rows, jnp.float32).compile().as_text()


class Embed(nn.Module):
  """Look rows of a table up, and score them all with `attend`, for a tied head."""

  rows: int
  features: int
  axes: tuple[str, str] = ('vocab', 'embed')
  dtype: Dtype = jnp.float32

  def setup(self):
    init = nn.with_logical_partitioning(nn.initializers.normal(1.0), self.axes)
    self.embedding = self.param('embedding', init, (self.rows, self.features), self.dtype)

  def __call__(self, index: Array) -> Array:
    return jnp.take(self.embedding, index, axis=0, mode='clip')

  def attend(self, x: Array) -> Array:
    """Return x · embeddingᵀ [B, L, rows] in float32, without a transpose of the table."""
    x = x.astype(self.embedding.dtype)
    if self.has_variable('params', 'rows'):
      return matmul_rows(x, self.get_variable('params', 'rows'), jnp.float32)
    return jnp.einsum('ble,ve->blv', x, self.embedding, preferred_element_type=jnp.float32)


class Mlp(nn.Module):
  """Return wo(act(wi x)), or gated wo(act(wi_0 x) · wi_1 x)."""

  inner: int
  activation: str
  gated: bool
  use_bias: bool = False
  dtype: Dtype = jnp.float32

  @nn.compact
  def __call__(self, x: Array) -> Array:
    def dense(features, axes, name):
      return Dense(features, axes, self.use_bias, dtype=self.dtype, name=name)

    h = dense(self.inner, ('embed', 'mlp'), 'wi_0' if self.gated else 'wi')(x)
    h = ACTIVATIONS[self.activation](h)
    if self.gated:
      h = h * dense(self.inner, ('embed', 'mlp'), 'wi_1')(x)
    h = nn.with_logical_constraint(h, ('batch', 'length', 'mlp'))
    return dense(x.shape[-1], ('mlp', 'embed'), 'wo')(h)


class Attention(nn.Module):
  """The projections around `attend`, apart from each other so that keys and values can be computed just once."""

  features: int
  heads: int
  kv_heads: int
  head_dim: int
  scale: float
  cap: float | None = None
  qkv_bias: bool = False
  out_bias: bool = False
  qk_norm: Callable[..., nn.Module] | None = None
  dtype: Dtype = jnp.float32

  def setup(self):
    shared = self.kv_heads * self.head_dim
    every = self.heads * self.head_dim
    # Without 1/√D in the scores, small initial queries make up for it (T5).
    init_scale = 1 / self.head_dim if self.scale == 1 else 1.0
    self.query = Dense(every, ('embed', 'joined_kv'), self.qkv_bias, init_scale, dtype=self.dtype)
    self.key = Dense(shared, ('embed', 'joined_kv_heads'), self.qkv_bias, dtype=self.dtype)
    self.value = Dense(shared, ('embed', 'joined_kv_heads'), self.qkv_bias, dtype=self.dtype)
    self.out = Dense(self.features, ('joined_kv', 'embed'), self.out_bias, dtype=self.dtype)
    if self.qk_norm:
      self.query_norm, self.key_norm = self.qk_norm(axis='kv'), self.qk_norm(axis='kv')

  def queries(self, x: Array, rope: tuple[Array, Array] | None = None) -> Array:
    """Return queries [B, L, H, D] of x [B, L, E]."""
    q = self.query(x).reshape(*x.shape[:2], self.heads, self.head_dim)
    q = self.query_norm(q) if self.qk_norm else q
    return rope_lib.rotate(q, rope) if rope else q

  def keys_values(self, x: Array, rope: tuple[Array, Array] | None = None) -> dict[str, Array]:
    """Return the cache entry of x [B, L, E]: keys [B·K, D, L] and values [B·K, L, D]."""
    k, v = (dense(x).reshape(*x.shape[:2], self.kv_heads, self.head_dim) for dense in (self.key, self.value))
    k = self.key_norm(k) if self.qk_norm else k
    k = rope_lib.rotate(k, rope) if rope else k
    return {'key': _slots(k).swapaxes(1, 2), 'value': _slots(v)}

  def mix(self, q: Array, entry: dict[str, Array], mask: Array | None, bias: Array | None = None) -> Array:
    """Attend and project back to [B, L, E]."""
    y = attend(q, entry['key'], entry['value'], mask, bias, scale=self.scale, cap=self.cap)
    return self.out(y.reshape(*y.shape[:2], -1))


def _slots(x: Array) -> Array:
  """Return x [B, L, K, D] as slots [B·K, L, D]."""
  x = nn.with_logical_constraint(jnp.swapaxes(x, 1, 2), ('batch', 'kv_heads', 'length', 'kv'))
  return x.reshape(-1, *x.shape[2:])


def attend(q: Array, k: Array, v: Array, mask: Array | None, bias: Array | None, *, scale: float, cap: float | None):
  """Return softmax(scale · q·k + bias) · v for q [B, L, H, D], k [B·K, D, T], v [B·K, T, D]: [B, L, H, D].

  mask [B, 1 or L, T] is true where a slot is visible; bias is [1 or B, H, L, T]. The softmax is float32.
  """
  batch, width, h, d = q.shape
  heads = (k.shape[0] // batch, h * batch // k.shape[0])  # K, G
  rows = q.reshape(batch, width, *heads, d).transpose(0, 2, 3, 1, 4).reshape(k.shape[0], -1, d)  # [B·K, G·L, D]
  if jax.default_backend() == 'cpu':  # which has no batched product of short numbers into float32
    k, rows = k.astype(jnp.float32), rows.astype(jnp.float32)
  scores = jnp.einsum('nxd,ndt->nxt', rows, k, preferred_element_type=jnp.float32)
  scores = softcap(scores.reshape(batch, *heads, width, -1) * scale, cap)  # [B, K, G, L, T]
  if bias is not None:
    scores = scores + bias.reshape(bias.shape[0], *heads, *bias.shape[2:])
  if mask is not None:
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype).reshape(k.shape[0], -1, k.shape[2])  # [B·K, G·L, T]
  y = jnp.einsum('nxt,ntd->nxd', weights, v).reshape(batch, *heads, width, d)
  return y.transpose(0, 3, 1, 2, 4).reshape(q.shape)


def visible(positions: Array, slots: int, window: int = 0) -> Array:
  """Return [B, L, T]: slot <= position, and within the last `window` positions unless that is 0."""
  distance = positions[:, :, None] - jnp.arange(slots)[None, None]
  return (distance >= 0) & (distance < window) if window else distance >= 0


def relative_bucket(offset: np.ndarray, *, bidirectional: bool, buckets: int, max_distance: int) -> np.ndarray:
  """Return T5's bucket of key position minus query position: exact near zero, then logarithmic."""
  first = np.zeros_like(offset)
  if bidirectional:
    buckets //= 2
    first = np.where(offset > 0, buckets, 0)
    distance = np.abs(offset)
  else:
    distance = np.maximum(-offset, 0)
  exact = buckets // 2
  ratio = np.log(np.maximum(distance, 1).astype(np.float32) / exact) / np.float32(np.log(max_distance / exact))
  far = np.minimum(exact + (ratio * (buckets - exact)).astype(np.int32), buckets - 1)
  return first + np.where(distance < exact, distance, far)


class RelativeBias(nn.Module):
  """T5's bias on the scores, learned for each head and bucket of the distance."""

  heads: int
  buckets: int
  max_distance: int
  bidirectional: bool
  dtype: Dtype = jnp.float32

  @nn.compact
  def __call__(self, positions: Array, slots: int) -> Array:
    """Return [B, H, L, T] for queries at positions [B, L] and keys in slots 0 … T - 1.

    Each query's row is one contiguous piece of a table over the offsets 1 - T … T - 1.
    """
    init = nn.with_logical_partitioning(nn.initializers.normal(1.0), ('heads', 'relpos_buckets'))
    embedding = self.param('rel_embedding', init, (self.heads, self.buckets), self.dtype)
    offsets = np.arange(1 - slots, slots)
    bucket = relative_bucket(
      offsets, bidirectional=self.bidirectional, buckets=self.buckets, max_distance=self.max_distance
    )
    table = embedding.astype(jnp.float32)[:, bucket]  # [H, 2T - 1]
    rows = jax.vmap(lambda p: lax.dynamic_slice_in_dim(table, slots - 1 - p, slots, axis=1))(positions.reshape(-1))
    return jnp.swapaxes(rows.reshape(*positions.shape, self.heads, slots), 1, 2)


def choose(options: list, index: Array | int):
  """Return options[index] of equally shaped trees, also where the index is an array."""
  if isinstance(index, int) or len(options) == 1:
    return options[index if isinstance(index, int) else 0]
  return jax.tree.map(lambda *xs: lax.dynamic_index_in_dim(jnp.stack(xs), index, keepdims=False), *options)


def over_layers(layers, body: Callable, carry, kinds: tuple[int, ...]):
  """Run carry, out = body(module, carry, (number, kind)) for every layer: unrolled over a list, or as one scan.

  The outs come back as a tuple, or stacked on axis 0.
  """
  if isinstance(layers, nn.Module):
    scan = nn.scan(
      body, variable_axes={'params': 0}, split_rngs={'params': True}, metadata_params={nn.PARTITION_NAME: 'layers'}
    )
    return scan(layers, carry, (jnp.arange(len(kinds)), jnp.array(kinds)))
  outs = []
  for i, layer in enumerate(layers):
    carry, out = body(layer, carry, (i, kinds[i]))
    outs.append(out)
  return carry, tuple(outs)


def stack_layers(params: Params) -> Params:
  """Return the tree with all `layers_0`, `layers_1`, … stacked into `layers` on a new axis 0."""
  if not isinstance(params, dict):
    return params
  numbers = sorted(int(name[7:]) for name in params if name.startswith('layers_'))
  tree = {name: stack_layers(x) for name, x in params.items() if not name.startswith('layers_')}
  if numbers:
    tree['layers'] = jax.tree.map(lambda *xs: jnp.stack(xs), *(params[f'layers_{i}'] for i in numbers))
  return tree


def unstack_layers(params: Params) -> Params:
  """Undo `stack_layers`."""
  if not isinstance(params, dict):
    return params
  tree = {name: unstack_layers(x) for name, x in params.items() if name != 'layers'}
  if 'layers' in params:
    count = jax.tree.leaves(params['layers'])[0].shape[0]
    tree |= {f'layers_{i}': jax.tree.map(lambda x, i=i: x[i], params['layers']) for i in range(count)}
  return tree
