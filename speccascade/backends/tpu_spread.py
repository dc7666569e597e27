"""The kernel that spreads scores of some tokens over the vocabulary on a TPU.

XLA gathers one number after the other. The tokens ascend, so that the scores of 128 neighbours lie in two registers,
one after the other, and one permutation of the lanes of each puts them where they belong.
"""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

Array = jax.Array

LANES = 128
_ROWS = 8  # of a register
_TILES = 64  # of 128 tokens, that a step of the grid writes
_STEP = 1050  # about the cycles of a v5e that a step takes, by its schedule
_SPARE = 4 << 20  # bytes of VMEM beside the scores


def spread(x: Array, write: Array, *, interpret: bool = False) -> Array:
  """Return the scores [N, V] of those [N, D] of some tokens, -inf for all others.

  Args:
    x: [N, D] of float32.
    write: [V] the number of a token's score, -1 for none; the others ascend.
    interpret: Whether the kernel runs without a TPU.
  """
  rows, vocab = x.shape[0], write.shape[0]
  step = _TILES * LANES
  write = jnp.pad(write, (0, -vocab % step), constant_values=-1).reshape(-1, LANES)
  first = jnp.where(write < 0, x.shape[1], write).min(1) // LANES * LANES  # where each tile's scores begin
  x = jnp.pad(x, ((0, -rows % _ROWS), (0, -x.shape[1] % LANES + 2 * LANES)))
  y = pl.pallas_call(
    _kernel,
    out_shape=jax.ShapeDtypeStruct((x.shape[0], vocab), x.dtype),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(x.shape[0] // _ROWS, write.shape[0] // _TILES),
      in_specs=[
        pl.BlockSpec((_ROWS, x.shape[1]), lambda i, j, _: (i, 0)),
        pl.BlockSpec((_TILES, LANES), lambda i, j, _: (j, 0)),
      ],
      out_specs=pl.BlockSpec((_ROWS, step), lambda i, j, _: (i, j)),
    ),
    interpret=interpret,
    name='spread',
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'parallel'), vmem_limit_bytes=2 * _ROWS * (x.shape[1] + step) * 4 + _SPARE
    ),
    cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=4 * x.shape[0] * (x.shape[1] + vocab)),
    metadata={'cycles': str(_STEP * x.shape[0] // _ROWS * write.shape[0] // _TILES)},
  )(first, x, write)
  return y[:rows]


def _kernel(first, x, write, y):
  """Write the scores of some tiles of 128 tokens."""
  tile = pl.program_id(1) * _TILES
  for i in range(_TILES):
    start = pl.multiple_of(first[tile + i], LANES)
    index = jnp.broadcast_to(write[i][None], (_ROWS, LANES))
    parts = [x[:, pl.ds(start + k, LANES)] for k in (0, LANES)]
    low, high = (jnp.take_along_axis(part, index & (LANES - 1), 1, mode='promise_in_bounds') for part in parts)
    found = jnp.where(index < start + LANES, low, high)
    y[:, i * LANES : (i + 1) * LANES] = jnp.where(index < 0, -jnp.inf, found)
