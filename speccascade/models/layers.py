"""Blocks that all model families share: norms, dense layers, attention, and the loop over layers.

Axis letters: B batch, L new tokens, T slots, S source, N layers, E embedding, F inner width, H heads,
K key-value heads, G queries for each of them (H = K·G), D head dimension.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

from flax import linen as nn
from flax import struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from speccascade.backends import Backend, View
from speccascade.backends.quantised import product, Quantised, widened
from speccascade.models import cache as cache_lib
from speccascade.models import packing as packing_lib
from speccascade.models import rope as rope_lib
from speccascade.types import Array, Params

Dtype = Any

ACTIVATIONS = {
  'relu': jax.nn.relu,
  'silu': jax.nn.silu,
  'gelu': lambda x: jax.nn.gelu(x, approximate=False),
  'gelu_tanh': lambda x: jax.nn.gelu(x, approximate=True),
}


class Drawn(nn.LogicallyPartitioned):
  """A parameter, what its axes are named for sharding, and the mean and standard deviation that it is drawn with."""

  mean: float = struct.field(default=0.0, pytree_node=False)
  std: float = struct.field(default=0.0, pytree_node=False)


def parameter(
  module: nn.Module,
  name: str,
  axes: tuple[str, ...],
  shape: tuple[int, ...],
  *,
  mean: float = 0.0,
  std: float = 0.0,
) -> Array:
  """Return a parameter of a module; one that is not there is zero, and says how `Base.init` draws it."""
  if not module.has_variable('params', name):
    return module.variable(
      'params', name, lambda: Drawn(jnp.zeros(shape, module.dtype), axes, mean=mean, std=std)
    ).value
  value = nn.unbox(module.get_variable('params', name))
  if value.shape != shape:
    raise ValueError(f'the parameter {"/".join((*module.path, name))} is {value.shape}; the network has {shape}.')
  return value


def _along_last(v: Array, x: Array) -> Array:
  """Return v [E] in float32 with as many axes as x [..., E]."""
  return v.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + v.shape)


def softcap(x: Array, cap: float | None) -> Array:
  """Return cap · tanh(x / cap), or x where there is no cap."""
  return x if cap is None else cap * jnp.tanh(x / cap)


class Norm(nn.Module):
  """Divide by the root mean square and scale; with `centred` subtract the mean before it, and shift (LayerNorm).

  `offset` 1 stores the scale as its difference from one (Gemma).
  """

  eps: float = 1e-6
  offset: float = 0.0
  centred: bool = False
  axis: str = 'embed'
  dtype: Dtype = jnp.float32

  @nn.compact
  def __call__(self, x: Array) -> Array:
    scale = parameter(self, 'scale', (self.axis,), x.shape[-1:], mean=1 - self.offset)
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True) if self.centred else y
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
    y = y * (_along_last(scale, y) + self.offset)
    if self.centred:
      y = y + _along_last(parameter(self, 'bias', (self.axis,), x.shape[-1:]), y)
    return y.astype(x.dtype)


class Dense(nn.Module):
  """Multiply by a kernel (in, out) in the kernel's dtype; `axes` names its two axes for sharding.

  Parameters that a backend has prepared have the kernel's transpose, `rows`, whose dtype may be shorter. Either may be
  `Quantised`.
  """

  features: int
  axes: tuple[str, str]
  use_bias: bool = False
  init_scale: float = 1.0
  out_dtype: Dtype | None = None  # None: the input's
  dtype: Dtype = jnp.float32
  backend: Backend = Backend()

  @nn.compact
  def __call__(self, x: Array) -> Array:
    out_dtype = self.out_dtype or x.dtype
    if self.has_variable('params', 'rows'):
      y = product(self.backend.matmul_rows, x, self.get_variable('params', 'rows'), out_dtype)
    else:
      std = (self.init_scale / x.shape[-1]) ** 0.5
      kernel = parameter(self, 'kernel', self.axes, (x.shape[-1], self.features), std=std)
      y = product(self.backend.matmul, x, widened(kernel, x.dtype), self.out_dtype)
    if self.use_bias:
      bias = parameter(self, 'bias', self.axes[1:], (self.features,))
      y = y + bias.astype(y.dtype).reshape((1,) * (y.ndim - 1) + (-1,))
    return y.astype(out_dtype)


class Embed(nn.Module):
  """Look rows of a table up, multiplied by `scale`, and score them all with `attend`, for a tied head."""

  rows: int
  features: int
  axes: tuple[str, str] = ('vocab', 'embed')
  scale: float | None = None
  dtype: Dtype = jnp.float32
  backend: Backend = Backend()

  def setup(self):
    self.embedding = parameter(self, 'embedding', self.axes, (self.rows, self.features), std=1.0)

  def __call__(self, index: Array, packing: packing_lib.Packing | None = None) -> Array:
    found = self._found(packing_lib.pack(packing, index))
    return found * jnp.asarray(self.scale, found.dtype) if self.scale else found

  def _found(self, index: Array) -> Array:
    if self.has_variable('params', 'bits'):
      bits = jnp.take(self.get_variable('params', 'bits'), index, axis=0, mode='clip')
      return lax.bitcast_convert_type(bits, jnp.bfloat16)
    if not isinstance(self.embedding, Quantised):
      return jnp.take(self.embedding, index, axis=0, mode='clip')
    # One row alone would be a slice, for which a TPU lays out a table of int8 anew.
    rows = jnp.concatenate([index, jnp.zeros_like(index)], -1) if index.size == 1 else index
    values, scale = (jnp.take(x, rows, axis=0, mode='clip') for x in self.embedding)
    found = (values.astype(jnp.float32) * scale[..., None]).astype(self.dtype)
    return found[..., : index.shape[-1], :]

  def attend(self, x: Array) -> Array:
    """Return x · embeddingᵀ [B, L, rows] in float32, without a transpose of the table."""
    rows = self.get_variable('params', 'rows') if self.has_variable('params', 'rows') else self.embedding
    x = x if isinstance(rows, Quantised) else x.astype(self.embedding.dtype)
    return product(self.backend.matmul_rows, x, rows, jnp.float32)


class Mlp(nn.Module):
  """Return wo(act(wi x)), or gated wo(act(wi_0 x) · wi_1 x)."""

  inner: int
  activation: str
  gated: bool
  use_bias: bool = False
  dtype: Dtype = jnp.float32
  backend: Backend = Backend()

  @nn.compact
  def __call__(self, x: Array) -> Array:
    def dense(features, axes, name):
      return Dense(features, axes, self.use_bias, dtype=self.dtype, backend=self.backend, name=name)

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
  joined_norm: bool = False  # over all heads together
  dtype: Dtype = jnp.float32
  backend: Backend = Backend()

  def setup(self):
    shared = self.kv_heads * self.head_dim
    every = self.heads * self.head_dim
    # Without 1/√D in the scores, small initial queries make up for it (T5).
    init_scale = 1 / self.head_dim if self.scale == 1 else 1.0
    dense = functools.partial(Dense, dtype=self.dtype, backend=self.backend)
    self.query = dense(every, ('embed', 'joined_kv'), self.qkv_bias, init_scale)
    self.key = dense(shared, ('embed', 'joined_kv_heads'), self.qkv_bias)
    self.value = dense(shared, ('embed', 'joined_kv_heads'), self.qkv_bias)
    self.out = dense(self.features, ('joined_kv', 'embed'), self.out_bias)
    if self.qk_norm:
      axes = ('joined_kv', 'joined_kv_heads') if self.joined_norm else ('kv', 'kv')
      self.query_norm, self.key_norm = (self.qk_norm(axis=axis) for axis in axes)

  def queries(self, x: Array, rope: tuple[Array, Array] | None = None, packing=None) -> Array:
    """Return queries [B, L, H, D] of x [B, L, E]."""
    q = self._by_head(self._normed('query', self.query(x), joined=True), self.heads, rope, packing)
    q = self._normed('query', q, joined=False)
    return rope_lib.rotate(q, rope) if rope else q

  def keys_values(self, x: Array, rope: tuple[Array, Array] | None, packing=None) -> tuple[Array, Array]:
    k = self._by_head(self._normed('key', self.key(x), joined=True), self.kv_heads, rope, packing)
    v = self._by_head(self.value(x), self.kv_heads, None, packing)
    k = self._normed('key', k, joined=False)
    return (rope_lib.rotate(k, rope) if rope else k), v

  def entry(self, x: Array, rope: tuple[Array, Array] | None = None) -> cache_lib.Entry:
    """Return the cache entry of x [B, T, E]."""
    return self.backend.entry(*self.keys_values(x, rope))

  def attend(
    self, x: Array, cache, visible: Array, bias: Array | None = None, rope=None, packing=None, layer=None
  ) -> Array:
    """Attend from x [B, L, E] to the first slots [B] of a layer, or those of a mask [B, 1 or L, T]; return [B, L, E].

    The cache is of that layer alone where it has no number.
    """
    y = self.backend.attend(self.queries(x, rope, packing), cache, visible, bias, layer=layer, **self._scores)
    return self._project(y, packing)

  def extend(self, x: Array, cache, layer: Array | int, view: View, bias: Array | None = None, rope=None):
    """Write x [B, L, E] into the cache of a layer and attend to what `view` shows; return [B, L, E] and the cache."""
    k, v = self.keys_values(x, rope, view.packing)
    q = self.queries(x, rope, view.packing)
    y, cache = self.backend.extend(q, k, v, cache, layer, view, bias, **self._scores)
    return self._project(y, view.packing), cache

  @property
  def _scores(self) -> dict:
    return dict(kv_heads=self.kv_heads, scale=self.scale, cap=self.cap)

  def _by_head(self, y: Array, heads: int, rope, packing) -> Array:
    y = packing_lib.unpack(packing, y if rope is None else self.backend.product(y))
    return y.reshape(*y.shape[:2], heads, self.head_dim)

  def _normed(self, name: str, y: Array, joined: bool) -> Array:
    """Return y normalised if the norm is over the heads as they are there, joined [B, L, H·D] or not [B, L, H, D]."""
    return getattr(self, f'{name}_norm')(y) if self.qk_norm and self.joined_norm == joined else y

  def _project(self, y: Array, packing) -> Array:
    return self.out(packing_lib.pack(packing, y.reshape(*y.shape[:2], -1)))


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
  def __call__(self, distance: Array) -> Array:
    """Return [B, H, L, T] for how far before each query each slot is [B, L, T]."""
    slots = distance.shape[-1]
    axes = 'heads', 'relpos_buckets'
    embedding = parameter(self, 'rel_embedding', axes, (self.heads, self.buckets), std=1.0)
    offsets = np.arange(-slots, slots + 1)
    bucket = relative_bucket(
      offsets, bidirectional=self.bidirectional, buckets=self.buckets, max_distance=self.max_distance
    )
    first = offsets[np.flatnonzero(np.diff(bucket, prepend=-1))]  # of each run of offsets in one bucket
    offset = -distance[:, None]  # [B, 1, L, T]
    edges = np.append(first, slots + 1)[None, :, None, None]
    here = (offset >= edges[:, :-1]) & (offset < edges[:, 1:])  # [B, runs, L, T]
    values = embedding.astype(jnp.float32)[:, bucket[first + slots]]  # [H, runs]
    # A gather would go row by row. Of each sum one term is not zero: at the highest precision that is a value as it is.
    return jnp.einsum('hr,brlt->bhlt', values, here.astype(jnp.float32), precision='highest')


def choose(options: list, index: Array | int):
  """Return options[index] of equally shaped trees, also where the index is an array."""
  if isinstance(index, int) or len(options) == 1:
    return options[index if isinstance(index, int) else 0]

  def pick(*xs):
    return lax.dynamic_index_in_dim(jnp.stack([jnp.asarray(x) for x in xs]), index, keepdims=False)

  return jax.tree.map(pick, *options)


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


def kept_states(kept: tuple[int, ...], first: Array, after: Sequence[Array] | Array, normed: Array) -> Array:
  """Return hidden states next to each other [B, L, n·E]: j ≥ 0 is what enters layer j, -1 what the head reads.

  `first` enters the first layer, `after` are what the layers made, in a tuple or stacked, `normed` is what the head
  reads.
  """
  chosen = [normed if j < 0 else first if j == 0 else after[j - 1] for j in kept]
  return jnp.concatenate(chosen, -1)


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
