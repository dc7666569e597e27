"""A layer's experts: of many MLPs a router gives each token to a few, and adds up what they return.

Axis letters: B batch, L new tokens, N tokens, E embedding, X experts, K experts of a token, F inner width of an expert.
"""

from typing import Any

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp

from speccascade.backends import Backend
from speccascade.backends.quantised import Quantised
from speccascade.models import layers as blocks
from speccascade.types import Array

_SCALE = ' scale'  # behind the name of a kernel of int8


class _Kernels(nn.Module):
  """The kernels of all experts, [X, in, out]."""

  shape: tuple[int, int, int]
  axes: tuple[str, str, str]
  dtype: Any

  @nn.compact
  def __call__(self) -> Array:
    return blocks.parameter(self, 'kernel', self.axes, self.shape, std=self.shape[1] ** -0.5)


class Experts(nn.Module):
  """Give each token to the `chosen` experts of the largest probabilities, which are `normalised` to sum to 1 or not."""

  inner: int
  experts: int
  chosen: int
  normalised: bool
  activation: str
  gated: bool
  dtype: Any = jnp.float32
  backend: Backend = Backend()

  @nn.compact
  def __call__(self, x: Array) -> Array:
    """Return the weighted sum of what its experts make of each x [B, L, E]."""
    on = dict(dtype=self.dtype, backend=self.backend)
    logits = blocks.Dense(self.experts, ('embed', 'router'), out_dtype=jnp.float32, name='router', **on)(x)
    weights, index = lax.top_k(jax.nn.softmax(logits), self.chosen)  # [B, L, K]
    weights = weights / weights.sum(-1, keepdims=True) if self.normalised else weights
    sizes = self.experts, x.shape[-1], self.inner
    into, out = ('expert', 'embed', 'expert_mlp'), ('expert', 'expert_mlp', 'embed')
    made = {name: (sizes, into, 1) for name in (('wi_0', 'wi_1') if self.gated else ('wi',))}
    made['wo'] = (sizes[0], sizes[2], sizes[1]), out, 2
    kernels = {}
    for name, (shape, axes, whole) in made.items():
      names = [*axes]
      names[whole] = None  # which no rule divides
      kernels |= _parts(name, _Kernels(shape, axes, self.dtype, name=name)(), tuple(names))
    tokens = {name: (y, ('rows', None, None)) for name, y in dict(x=x, weights=weights, index=index).items()}
    numbers = {'numbers': (jnp.arange(self.experts), ('expert',))}
    return self.backend.layout.over_shards(
      self._local, tokens | kernels | numbers, [('rows', None, None)], ('expert', 'expert_mlp')
    )[0]

  def _local(self, x, weights, index, numbers, **parts) -> tuple[Array]:
    """Return the sum over the experts of a device, or over its part of the inner width of each."""
    index = index - numbers[0]
    weights = jnp.where((index >= 0) & (index < numbers.shape[0]), weights, 0)
    tokens, which, shares = (y.reshape(-1, y.shape[-1]) for y in (x, index, weights))
    scales = {name.removesuffix(_SCALE): y for name, y in parts.items() if name.endswith(_SCALE)}
    kernels = {name: y for name, y in parts.items() if not name.endswith(_SCALE)}
    *into, out = [Quantised(y, scales[name]) if scales else y for name, y in kernels.items()]
    y = self.backend.experts(tokens, which, shares, tuple(into), out, blocks.ACTIVATIONS[self.activation])
    return (y.astype(x.dtype).reshape(x.shape),)


def _parts(name: str, kernel: Array | Quantised, axes: tuple) -> dict[str, tuple[Array, tuple]]:
  """Return the arrays of a kernel by name, each with the names of its axes."""
  if not isinstance(kernel, Quantised):
    return {name: (kernel, axes)}
  return {name: (kernel.values, axes), name + _SCALE: (kernel.scale, (axes[0], axes[2]))}
