"""Weights of 8 bits: whole numbers, and a scale for each output.

A kernel [in, out], that of each expert too, has a scale for each column, a token's embedding one of its own, which is
that of an output where the table is the head. Activations keep their dtype, in which the whole numbers are exact: a
product sums them as they are and scales the sums, so that a device reads one byte a weight. A router keeps its floats.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from flax.traverse_util import flatten_dict, unflatten_dict
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

Array = jax.Array
Params = Any
MOST = 127  # the largest number


class Quantised(NamedTuple):
  """The weights `values` · `scale` in the place of a parameter, or what stands for either: a shape, a sharding."""

  values: Array  # [in, out] or [out, in], int8; layers and experts that are stacked are in front of both
  scale: Array  # [out], float32

  @property
  def shape(self) -> tuple[int, ...]:
    return self.values.shape


def summed_axis(path: tuple[str, ...]) -> int | None:
  """Return the axis that a product sums over, of a parameter that is quantised; None for one that is not."""
  if path[-1] == 'kernel':
    return None if path[-2] == 'router' else -2
  return -1 if path[-2:] == ('token_embedder', 'embedding') else None


def quantise(x: Array, axis: int, xp: Any = jnp) -> Quantised:
  """Return weights as the nearest multiples of 1/127 of the largest in their output.

  Args:
    x: [..., in, out] or [..., out, in].
    axis: The axis of the inputs.
    xp: The library that computes, jax.numpy or numpy.
  """
  x = xp.asarray(x, xp.float32)
  scale = abs(x).max(axis, keepdims=True) * xp.float32(1 / MOST)
  scale = xp.where(scale == 0, xp.float32(1), scale)
  return Quantised(xp.rint(x / scale).astype(xp.int8), scale.squeeze(axis))


def quantised(params: Params) -> Params:
  """Return parameters, their kernels and the table of tokens quantised."""
  return _map(quantise, params)


def quantised_axes(specs: Params) -> Params:
  """Return the names of the axes of quantised parameters by those of the parameters."""

  def axes_of(spec: PartitionSpec, axis: int) -> Quantised:
    names = list(spec)
    del names[axis]
    return Quantised(spec, PartitionSpec(*names))

  return _map(axes_of, specs)


def _map(change: Callable[[Any, int], Quantised], params: Params) -> Params:
  def changed(path, x):
    axis = summed_axis(path)
    return x if axis is None else change(x, axis)

  return unflatten_dict({path: changed(path, x) for path, x in flatten_dict(params).items()})


def widened(weights: Array | Quantised, dtype: Any) -> Array | Quantised:
  """Return weights with their whole numbers in the dtype of activations; others as they are."""
  return weights._replace(values=weights.values.astype(dtype)) if isinstance(weights, Quantised) else weights


def product(multiply: Callable, x: Array, weights: Array | Quantised, out_dtype: Any) -> Array:
  """Return multiply(x, weights, out_dtype), a backend's `matmul` or `matmul_rows`; sums are scaled in float32."""
  if not isinstance(weights, Quantised):
    return multiply(x, weights, out_dtype)
  y = multiply(x, weights.values, jnp.float32)
  return (y * weights.scale.reshape((1,) * (y.ndim - 1) + (-1,))).astype(out_dtype or x.dtype)
