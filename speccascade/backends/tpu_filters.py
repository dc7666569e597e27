"""The kernel of filters on a TPU: the least number of each row over which the entries are not enough.

A bisection asks some thirty times how much lies over a number. XLA reads the rows anew each time, and sums along lanes;
here eight rows stay in VMEM, and are summed register by register.
"""

import functools
import itertools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

Array = jax.Array

ROWS = 8  # of a block: those of a register
LANES = 128
_STEP = 16 * LANES  # lanes that are summed side by side, each register of its own
_SPARE = 4 << 20  # bytes of VMEM beside the rows


def threshold(keys: Array, limit: Array, low: int, high: int, *, mass: bool, interpret: bool = False) -> Array:
  """Return the least key x, `low` < x <= `high`, for which the entries over x are not enough.

  Args:
    keys: [N, V] whole numbers of more than `low`.
    limit: [N, 1] what is enough.
    low: Of the bisection.
    high: Of the bisection.
    mass: Whether the keys are the bits of numbers that are added up; else entries are counted.
    interpret: Whether the kernel runs without a TPU.

  Returns:
    [N, 1].
  """
  alone = keys.shape[0] == 1  # one row is laid over all rows of a block
  if alone:
    keys = jnp.pad(keys, ((0, 0), (0, -keys.shape[1] % ROWS)), constant_values=low).reshape(ROWS, -1)
  rows, lanes = keys.shape  # a block may reach beyond the rows, whose numbers do not matter
  limit = jnp.broadcast_to(limit.astype(jnp.float32), (rows, LANES))
  bounds = pl.BlockSpec((ROWS, LANES), lambda i: (i, 0))
  blocks = pl.cdiv(rows, ROWS)
  steps = int(high - low).bit_length()
  found = pl.pallas_call(
    functools.partial(_kernel, low, high, steps, mass, alone),
    out_shape=jax.ShapeDtypeStruct(limit.shape, jnp.int32),
    grid=(blocks,),
    in_specs=[pl.BlockSpec((ROWS, lanes), lambda i: (i, 0)), bounds],
    out_specs=bounds,
    interpret=interpret,
    name='threshold',
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel',), vmem_limit_bytes=2 * ROWS * lanes * 4 + _SPARE
    ),
    cost_estimate=pl.CostEstimate(flops=3 * steps * keys.size, transcendentals=0, bytes_accessed=4 * keys.size),
    metadata={'cycles': str(_cycles(blocks, lanes, steps))},
  )(keys, limit)
  return found[: 1 if alone else rows, :1]


def _cycles(blocks: int, lanes: int, steps: int) -> int:
  """Return about the cycles of a v5e that a call takes: its schedule has 1.5 for a register and 150 for a pass."""
  return round(blocks * steps * (1.5 * lanes / LANES + 150))


def _kernel(low: int, high: int, steps: int, mass: bool, alone: bool, keys, limit, found):
  """Bisect for the rows of a block; every lane of a row has its bounds."""
  most = limit[...]

  def halve(_, bounds):
    low, high = bounds
    middle = (low >> 1) + (high >> 1) + (low & high & 1)  # without overflow

    def add(some, sums):  # [ROWS, up to _STEP]
      parts = [some[:, k : k + LANES] for k in range(0, some.shape[1], LANES)]
      weights = [lax.bitcast_convert_type(x, jnp.float32) if mass else jnp.float32(1) for x in parts]
      found = [jnp.where(x > middle[:, : x.shape[1]], w, 0.0) for x, w in zip(parts, weights, strict=True)]
      found = [jnp.pad(x, ((0, 0), (0, LANES - x.shape[1]))) for x in found]
      return tuple(s + x for s, x in itertools.zip_longest(sums, found, fillvalue=0.0))

    def step(i, sums):
      return add(keys[:, pl.ds(pl.multiple_of(i * _STEP, _STEP), _STEP)], sums)

    zeros = jnp.zeros((ROWS, LANES), jnp.float32)
    sums = (zeros,) * (_STEP // LANES)
    whole = keys.shape[1] // _STEP
    if whole:
      sums = lax.fori_loop(0, whole, step, sums)
    if keys.shape[1] % _STEP:
      sums = add(keys[:, whole * _STEP :], sums)
    total = sum(sums[1:], sums[0]).sum(1, keepdims=True)
    total = jnp.broadcast_to(total.sum(0, keepdims=True) if alone else total, zeros.shape)
    above = total >= most
    return jnp.where(above, middle, low), jnp.where(above, high, middle)

  bounds = jnp.full((ROWS, LANES), low, jnp.int32), jnp.full((ROWS, LANES), high, jnp.int32)
  found[...] = lax.fori_loop(0, steps, halve, bounds)[1]
