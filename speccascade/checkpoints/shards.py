"""Tensors read straight into their shards: of each tensor the part that devices of this process hold, once.

A box is a tuple of slices, one for each axis.
"""

from collections.abc import Callable
import math

import jax
from jax.sharding import Sharding
import numpy as np

Box = tuple[slice, ...]


def box(sharding: Sharding, shape: tuple[int, ...]) -> Box:
  """Return the least box that holds all shards of this process."""
  held = [_plain(index, shape) for index in sharding.addressable_devices_indices_map(shape).values()]
  return tuple(slice(min(s.start for s in some), max(s.stop for s in some)) for some in zip(*held, strict=True))


def size(part: Box) -> tuple[int, ...]:
  """Return the shape of what a box holds."""
  return tuple(s.stop - s.start for s in part)


def is_whole(part: Box, shape: tuple[int, ...]) -> bool:
  """Tell whether a box holds all of an array."""
  return size(part) == tuple(shape)


def read(
  shape: tuple[int, ...], sharding: Sharding, take: Callable[[Box], np.ndarray], dtype: str | None
) -> tuple[jax.Array, bool]:
  """Return an array of which take(box) reads a part, in `dtype` or as stored, and whether this part is finite.

  Each shard is converted by itself, so that no more than the part and one shard are in memory beside the array.
  """
  part = box(sharding, shape)
  held, finite = take(part), True

  def shard(index) -> np.ndarray:
    nonlocal finite
    inside = tuple(slice(s.start - b.start, s.stop - b.start) for s, b in zip(_plain(index, shape), part, strict=True))
    with np.errstate(over='ignore'):
      x = held[inside].astype(dtype or held.dtype, copy=False)
    finite = finite and bool(np.isfinite(x).all())
    return np.ascontiguousarray(x)

  return jax.make_array_from_callback(tuple(shape), sharding, shard), finite


def _plain(index, shape: tuple[int, ...]) -> Box:
  """Return a box whose slices have both ends."""
  return tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))


def runs(part: Box, shape: tuple[int, ...]) -> tuple[np.ndarray, int]:
  """Return where in an array's elements each run of a box begins, and the length of all runs."""
  last = max((i for i, (s, n) in enumerate(zip(part, shape, strict=True)) if s.stop - s.start < n), default=0)
  strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
  starts = np.array([sum(s.start * n for s, n in zip(part[last:], strides[last:], strict=True))])
  for i in reversed(range(last)):
    steps = np.arange(part[i].start, part[i].stop) * strides[i]
    starts = (steps[:, None] + starts).reshape(-1)
  return starts, math.prod(size(part[last:]))
