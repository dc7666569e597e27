"""What the networks have in common: parameters from a key, their shapes and their logical axes."""

import collections
from collections.abc import Callable
import dataclasses
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from speccascade.backends import Backend, View
from speccascade.backends.quantised import Quantised, quantised, quantised_axes
from speccascade.models.layers import Drawn
from speccascade.types import Array, Cache, Network, Params


def at_width(longest: Array, width: int, read: Callable[[int], Cache]) -> Cache:
  """Return read(w) for a w of at least the longest prompt: a quarter of the padded width, half of it, or all.

  One program then serves every prompt, and a short one doesn't pay for the padding. Widths are rounded up to eights,
  which the product of a single row takes anyway.
  """
  widths = [-(-width // n // 8) * 8 for n in (4, 2) if width // n >= 8]
  which = sum(((longest > w).astype(jnp.int32) for w in widths), jnp.int32(0))
  return jax.lax.switch(which, [lambda w=w: read(w) for w in (*widths, width)])


def without_layers(stack: Params, layers: int) -> Params:
  """Return the parameters of a stack without its layers from number `layers` on."""
  return {name: x for name, x in stack.items() if not (name.startswith('layers_') and int(name[7:]) >= layers)}


@functools.partial(jax.jit, static_argnums=0)
def _made(network: 'Base') -> Params:
  """Return boxed parameters of zeros, for their shapes, which equal networks share."""
  return network._init()


@functools.partial(jax.jit, static_argnums=1)
def _drawn(key: Array, kinds: tuple[tuple[tuple[int, ...], str, float, float], ...]) -> list[Array]:
  """Return an array of each shape, dtype, mean and standard deviation.

  All of one shape are drawn at once, so that the program doesn't grow with the number of layers.
  """
  keys, alike = jax.random.split(key, len(kinds)), collections.defaultdict(list)
  for i, (shape, _, _, std) in enumerate(kinds):
    if std:
      alike[shape].append(i)
  normal = {}
  for shape, which in alike.items():
    normal |= zip(which, jax.lax.map(lambda key, shape=shape: jax.random.normal(key, shape), keys[np.array(which)]))
  return [
    (mean + std * normal[i]).astype(dtype) if std else jnp.full(shape, mean, dtype)
    for i, (shape, dtype, mean, std) in enumerate(kinds)
  ]


@dataclasses.dataclass(frozen=True)
class Base(Network):
  """Derive what a `Network` has from a network's `config`, `module`, `_init`, `depth`, `first_layers` and `_cached`.

  `backend` is what a network computes on, `quantised` whether its kernels and its table of tokens are int8; they are
  part of no checkpoint.
  """

  backend: Backend = dataclasses.field(default=Backend(), kw_only=True, repr=False)
  mask_token: int | None = dataclasses.field(default=None, kw_only=True)
  quantised: bool = dataclasses.field(default=False, kw_only=True, repr=False)

  packs = True
  takes_leaves = True
  dense_head = ('logits_dense',)  # where the parameters have a head that is not the embedding

  @property
  def head_path(self) -> tuple[str, ...]:
    """Where the parameters have what `scores` multiplies by."""
    return ('token_embedder',) if self.tied else self.dense_head

  def reads(self, params: Params, cache: Cache) -> tuple[Params, Cache]:
    """Leave out a table of which a call takes a row a token."""
    return params if self.tied else {name: x for name, x in params.items() if name != 'token_embedder'}, cache

  def on(self, backend: Backend) -> 'Base':
    """Return the network for a backend."""
    return dataclasses.replace(self, backend=backend)

  @property
  def vocab_size(self) -> int:
    return self.config.vocab_size

  @property
  def tied(self) -> bool:
    return self.config.tied

  @property
  def head_counts(self) -> tuple[int, int]:
    return self.config.heads, self.config.heads

  def extend(
    self, params: Params, cache: Cache, tokens: Array, positions: Array, packing=None, leaves: int = 0
  ) -> tuple[Array, Cache]:
    """Feed tokens [B, L] at consecutive positions [B, L]; return logits [B, L, V] of the tokens after them."""
    return self.module.apply({'params': params}, cache, tokens, View(positions, packing=packing, leaves=leaves))

  def observe(
    self, params: Params, cache: Cache, tokens: Array, positions: Array, kept: tuple, leaves: int = 0
  ) -> tuple:
    """Do as `extend` does; return the states of `layers.kept_states` [B, L, …], too."""
    return self.module.apply({'params': params}, cache, tokens, View(positions, leaves=leaves), kept)

  def scores(self, params: Params, x: Array) -> Array:
    """Return the head's logits [B, L, V] of normed states [B, L, E]."""
    return self.module.apply({'params': params}, x, method='scores')

  def init(self, key: Array) -> Params:
    """Return random parameters in the network's dtype."""
    leaves, tree = jax.tree.flatten(self._boxed(), is_leaf=lambda x: isinstance(x, Drawn))
    kinds = tuple((x.value.shape, x.value.dtype.name, x.mean, x.std) for x in leaves)
    params = tree.unflatten(_drawn(key, kinds))
    return quantised(params) if self.quantised else params

  def param_shapes(self) -> Params:
    """Return the parameters' shapes and dtypes, without making them."""
    shapes = nn.unbox(self._boxed())
    return jax.eval_shape(quantised, shapes) if self.quantised else shapes

  def param_axes(self) -> Params:
    """Return a PartitionSpec of logical axis names for each parameter."""
    axes = nn.get_partition_spec(self._boxed())
    return quantised_axes(axes) if self.quantised else axes

  def shares_cache(self, params: Params, other, other_params: Params) -> bool:
    """Tell whether this is the first layers of the other network, the very same arrays, so that one cache does."""
    if type(other) is not type(self) or self.scan or other.scan or self.depth >= other.depth:
      return False
    first, first_params = other.first_layers(other_params, self.depth)
    if first.config != self.config:
      return False
    mine, theirs = (jax.tree.leaves(self._cached(p)) for p in (params, first_params))
    return len(mine) == len(theirs) and all(a is b for a, b in zip(mine, theirs))

  def _activations(self, params: Params):
    """Return the dtype of activations: that of the embeddings."""
    table = params['token_embedder']['embedding']
    return self.dtype if isinstance(table, Quantised) else table.dtype

  def _boxed(self) -> Params:
    return _made.eval_shape(self)
