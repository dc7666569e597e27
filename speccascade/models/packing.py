"""Packed windows: the needed tokens of a batch one after another, where rows need different numbers of them.

A window [B, W] is padded to the longest row. A network that is given a `Packing` runs its embedding, dense layers,
norms and head on the N packed tokens [1, N, …] instead, and attention, which reads a cache by row, on the window:
`models.layers` packs ids and what an attention gives, and unpacks queries, keys and values. N is one of a few static
totals.

Axis letters: B batch, W window, N packed tokens.
"""

from flax import struct
import jax.numpy as jnp

from speccascade.backends import ops
from speccascade.types import Array, iota

MOST = 1024  # rows that are packed: packing compares every token with every row
_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@struct.dataclass
class Packing:
  """Where each token of a window is packed, and where each packed token comes from."""

  slot: Array  # [B, W] the packed token of each
  source: Array  # [N] among the B·W of the window

  @classmethod
  def of(cls, need: Array, width: int, total: int) -> 'Packing':
    """Pack the first `need` [B] tokens of each row, at most `total` in all."""
    ends = jnp.cumsum(need)
    starts = ends - need
    slot = starts[:, None] + jnp.minimum(iota(width), jnp.maximum(need[:, None] - 1, 0))  # padding repeats the last one
    at = jnp.arange(total)[:, None]
    mine = (starts[None] <= at) & (at < ends[None])  # [N, B]
    source = jnp.where(mine, iota(need.shape[0]) * width + at - starts[None], 0).sum(1)
    return cls(jnp.minimum(slot, total - 1), source)

  def pack(self, x: Array) -> Array:
    """Return x [B, W, …] as [1, N, …]."""
    return ops.pick(x.reshape(-1, *x.shape[2:]), self.source)[None]

  def unpack(self, x: Array) -> Array:
    """Return x [1, N, …] as [B, W, …]; what lies beyond a row's tokens is undefined."""
    found = ops.pick(x[0], self.slot.reshape(-1))
    return found.reshape(*self.slot.shape, *x.shape[2:])


def pack(packing: Packing | None, x: Array) -> Array:
  """Return x [B, W, …] packed, where there is a packing."""
  return x if packing is None else packing.pack(x)


def unpack(packing: Packing | None, x: Array) -> Array:
  """Return x [1, N, …] by row, where there is a packing."""
  return x if packing is None else packing.unpack(x)


def coarse_widths(most: int) -> tuple[int, ...]:
  """Return how many tokens a row to compile for where the need varies: a third of the most, two thirds, and all."""
  return tuple(sorted({-(-most * i // 3) for i in (1, 2, 3)}))


def fine_widths(most: int) -> tuple[int, ...]:
  """Return the same in finer steps, for a choice that goes by what each costs."""
  return (*(n for n in _STEPS if n < most), most)
