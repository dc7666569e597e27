"""Attention over a cache on a TPU, as one Pallas kernel: it writes a window's slots in place and reads used slots only.

A cache is [B, N, G, T, P]: N layers, P lanes (a multiple of 128) with n key-value heads next to each other, G groups of
them. Queries come as the projection leaves them, [B, L, G·g·P], g tiles for each group. In the kernel each is masked to
the lanes of its head, so that one matmul over P lanes scores it. Blocks of slots are visited in turn with a running
softmax (Milakov and Gimelshein 2018; Dao et al. 2022). A step of the grid costs as much as a small visit, so where
caches are small, as a drafter's, it visits a block of several rows of the batch.

Axis letters: B batch, L window, R rows of queries of a group (g · n heads × the window, in steps of 8), T slots.
"""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

Array = jax.Array

BLOCK = 128  # slots of a block
STEP = 8  # rows of a tile
_TILE = 16  # slots of a tile of bfloat16: slots are written by tiles
MOST = BLOCK - _TILE + 1  # tokens of a window, so that wherever it begins, its tiles are no more than a block
_LOWEST = -1e30
_SHARED = 2048  # lanes of the rows of the batch that share a step
_VMEM = 31 << 19  # bytes that a call may use of the 16 MiB that it may have


@functools.partial(jax.jit, static_argnames=('heads', 'causal', 'scale', 'cap', 'interpret'))
def attend(
  q: Array,
  key: Array,
  value: Array,
  bias: Array | None,
  *,
  layer,
  first: Array,
  length: Array,
  window,
  heads: int,
  causal: bool,
  scale: float,
  cap: float | None,
  new=None,
  positions: Array | None = None,
  interpret: bool = False,
):
  """Return the attention of queries over a layer's slots, having written a window into them.

  Args:
    q: Queries [B, L, G·g·P].
    key: Keys [B, N, G, T, P].
    value: Values [B, N, G, T, P].
    bias: [1 or B, G, R, T], added to the scores; None for none.
    layer: The number of the layer.
    first: [B] the position of the first query.
    length: [B] how many slots are seen at most.
    window: The last positions that a causal query sees; 0 for all.
    heads: How many heads share a tile.
    causal: Whether a query sees slots up to its position only, else every slot before `length`.
    scale: Multiplied with q·k.
    cap: Scores become cap · tanh(score / cap); None for none.
    new: Keys and values [B, L, G·P] that are written from slot `first` on; None for none.
    positions: [B, L] of the queries where leaves are among them, which see the slots before it and their own.
    interpret: Whether the kernel runs without a TPU.

  Returns:
    The attention [B, L, G·g·P] and, where keys and values were written, the caches of both.
  """
  if new is not None and not interpret:  # else XLA moves what fits to VMEM, and back
    key, value = (pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (key, value))
  settings = _Settings(heads, causal, scale, cap, bias is not None, new is not None, positions is not None)
  result = jax.ShapeDtypeStruct(q.shape, q.dtype)
  batch, width, lanes = q.shape
  q, new = _without_axis(q, new)
  groups, _, tile = key.shape[2:]
  rows = lanes // (groups * tile) * heads * -(-width // STEP) * STEP
  share = _rows_of_a_step(batch, groups * tile)
  window = jnp.asarray(window, jnp.int32)
  spans = _spans(first, length, window, causal, share)
  scalars = jnp.asarray(layer, jnp.int32).reshape(1), first, length, window.reshape(1), *spans
  places = [] if positions is None else [_in_lanes(positions)]
  inputs = [q, key, value, *([] if bias is None else [bias]), *places, *(new or ())]
  outputs = [result, *((jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (key, value)) if settings.writes else ())]
  return pl.pallas_call(
    functools.partial(_kernel, settings),
    out_shape=outputs,
    input_output_aliases={len(scalars) + 1: 1, len(scalars) + 2: 2} if settings.writes else {},
    interpret=interpret,
    name='cached_attention',
    compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'arbitrary')),
    grid_spec=_grid_spec(settings, len(scalars), rows, share, inputs, result),
    cost_estimate=_cost(batch * groups * rows, key, causal),
    metadata={'cycles': str(_cycles(settings, width, rows, share, key))},  # which planning.rounds reads
  )(*scalars, *inputs)


def _in_lanes(positions: Array) -> Array:
  """Return positions [B, L] in all lanes of the rows of a head [B, R, 128]."""
  padded = jnp.pad(positions, ((0, 0), (0, -positions.shape[1] % STEP)))
  return jnp.broadcast_to(padded[:, :, None], (*padded.shape, BLOCK))


def most_tokens(key: Array, heads: int) -> int:
  """Return how many tokens of a window a call has memory for, by what its schedules use.

  Args:
    key: Keys [..., G, T, P].
    heads: Of a query.
  """
  groups, _, tile = key.shape[-3:]
  block = groups * BLOCK * tile * (4 + 13 * key.dtype.itemsize // 2)
  rows = 33 * heads * tile * STEP
  return max(2 * STEP, min(MOST, (_VMEM - block) // rows * STEP))


def _rows_of_a_step(batch: int, lanes: int) -> int:
  """Return how many rows of the batch share a step of the grid, by the lanes of their slots."""
  most = max(1, min(_SHARED // lanes, batch // 2))  # two steps at least, for chips of two cores
  return next(n for n in (8, 4, 2, 1) if n <= most and batch % n == 0)


def _spans(first: Array, length: Array, window: Array, causal: bool, share: int) -> tuple[Array, Array]:
  """Return the first and the last block of slots that any row of each step sees."""
  last = jnp.maximum(length - 1, 0) // BLOCK
  seen = jnp.where(window > 0, jnp.maximum(first - window + 1, 0), 0) // BLOCK if causal else jnp.zeros_like(last)
  return seen.reshape(-1, share).min(1), last.reshape(-1, share).max(1)


def _cycles(settings: '_Settings', width: int, rows: int, share: int, key: Array) -> int:
  """Return about the cycles of a v5e that a call takes, which its schedules count.

  A step of the grid has 200, a row of the batch 8 for each register of queries; a block that is visited has 13 for each
  of them and 22 for each tile of lanes, and 72 more where a part of the window is merged into it.
  """
  batch, _, groups, slots, tile = key.shape
  blocks = slots // BLOCK
  visited = (blocks + 1) / 2 if settings.causal else blocks  # while a text grows, half of them
  registers = groups * rows * tile / (STEP * 128)
  tiles = groups * tile / 128
  merged = 1 + (width - 1) / BLOCK if settings.writes else 0  # of the visited blocks
  a_row = 8 * registers + visited * (13 * registers + 22 * tiles) + merged * 72 * tiles
  return round(batch * (200 * blocks / share + a_row))


def _grid_spec(settings: '_Settings', scalars: int, rows: int, share: int, inputs: Sequence[Array], result: Any):
  """Return the grid over the rows of the batch and the blocks of slots, with what of each array a step sees."""
  q, key, _, *more = inputs
  batch, _, groups, slots, tile = key.shape
  cache = pl.BlockSpec((share, 1, groups, BLOCK, tile), _index_map('b', 'l', 0, 'j', 0))
  in_specs = [_window_spec(share, q), cache, cache]
  if settings.biased:
    own = more.pop(0).shape[0] > 1
    in_specs.append(pl.BlockSpec((share if own else 1, groups, rows, BLOCK), _index_map('b' if own else 0, 0, 0, 'j')))
  if settings.leaves:
    in_specs.append(_window_spec(share, more.pop(0)))
  return pltpu.PrefetchScalarGridSpec(
    num_scalar_prefetch=scalars,
    grid=(batch // share, slots // BLOCK),
    in_specs=in_specs + [_window_spec(share, x) for x in more],
    out_specs=[_window_spec(share, result), *[pl.BlockSpec(memory_space=pltpu.HBM)] * (2 * settings.writes)],
    scratch_shapes=_scratch(settings, key, rows, share),
  )


def _window_spec(share: int, x: Any) -> pl.BlockSpec:
  """Return the block of a window: that of a step's rows, or where it has no axis of tokens, those of all rows."""
  if x.ndim == 3:
    return pl.BlockSpec((share, *x.shape[1:]), _index_map('b', 0, 0))
  return pl.BlockSpec(x.shape, _index_map(0, 0))


def _scratch(settings: '_Settings', key: Array, rows: int, share: int) -> list:
  """Return the memory of the kernel: queries and the sums of the running softmax, and what slots are written from."""
  groups, _, tile = key.shape[2:]
  wide, one = (pltpu.VMEM((share, groups, rows, lanes), jnp.float32) for lanes in (tile, 128))
  staging = [pltpu.VMEM((share, groups, BLOCK, tile), key.dtype)] * 2 + [pltpu.SemaphoreType.DMA((share,))] * 2
  return [wide] * 2 + [one] * 2 + staging * settings.writes


def _without_axis(q: Array, new) -> tuple:
  """Return a window of one token without its axis, in float32: a row is then read where it lies, else moved before."""
  if q.shape[1] > 1:
    return q, new

  def flat(x):
    return x[:, 0].astype(jnp.float32)

  return flat(q), None if new is None else tuple(map(flat, new))


def _index_map(*index):
  """Return the index map of a block: 'b' is the step's rows of the batch, 'j' the block of slots, 'l' the layer.

  Blocks that nothing sees are those at the ends of what is seen, which are there already.
  """

  def block(b, j, layer, first, length, window, seen, last):
    known = {'b': b, 'j': jnp.clip(j, seen[b], last[b]), 'l': layer[0]}
    return tuple(known.get(i, i) for i in index)

  return block


def _cost(rows: int, key: Array, causal: bool) -> pl.CostEstimate:
  """Return the work on one layer over all slots or, while a text grows, over the blocks in use, half of them."""
  batch, _, groups, slots, tile = key.shape
  slots = (slots + BLOCK) // 2 if causal else slots
  read = 2 * batch * groups * slots * tile * key.dtype.itemsize
  return pl.CostEstimate(flops=4 * rows * slots * tile, transcendentals=rows * slots, bytes_accessed=read)


class _Settings(NamedTuple):
  heads: int
  causal: bool
  scale: float
  cap: float | None
  biased: bool
  writes: bool
  leaves: bool


class _Refs(NamedTuple):
  """The references of the kernel by name; what it was not given is None."""

  q: Any
  key: Any
  value: Any
  bias: Any
  positions: Any  # of the queries where there are leaves
  new: Any  # keys and values of the window
  y: Any
  caches: Any  # where they are written
  queries: Any
  sums: Any  # of the running softmax: values, the largest score, the mass
  staging: Any  # two buffers and their semaphores

  @classmethod
  def of(cls, settings: _Settings, q, key, value, *rest) -> '_Refs':
    """Name references in the order of inputs, outputs and scratch."""
    rest = iter(rest)

    def take(n):
      return [next(rest) for _ in range(n)]

    writes = 2 * settings.writes
    bias = next(rest) if settings.biased else None
    positions = next(rest) if settings.leaves else None
    more = take(writes), next(rest), take(writes), next(rest), take(3), take(2 * writes)
    return cls(q, key, value, bias, positions, *more)

  def row(self, r: int, b) -> '_Refs':
    """Return the references of row r of a step, which is row b of the batch."""

    def window(x):  # [L, …]; a block has a step's rows or, where it has no axis of tokens, those of all steps
      return x.at[r] if len(x.shape) == 3 else x.at[pl.ds(b, 1)]

    return _Refs(
      q=window(self.q),
      key=self.key.at[r, 0],
      value=self.value.at[r, 0],
      bias=None if self.bias is None else self.bias.at[min(r, self.bias.shape[0] - 1)],
      positions=None if self.positions is None else self.positions.at[r],
      new=[window(x) for x in self.new],
      y=self.y.at[r],
      caches=[x.at[b] for x in self.caches],
      queries=self.queries.at[r],
      sums=[x.at[r] for x in self.sums],
      staging=[x.at[r] for x in self.staging],
    )


def _kernel(settings: _Settings, layer, first, length, window, _seen, _last, *refs):
  """Visit block j of the slots of a step's rows; the grid visits the blocks of these rows in turn."""
  refs = _Refs.of(settings, *refs)
  share, width, _ = refs.y.shape
  j = pl.program_id(1)
  back = window[0]
  batch = [pl.program_id(0) * share + r for r in range(share)]
  rows = [(refs.row(r, b), first[b], length[b]) for r, b in enumerate(batch)]

  @pl.when(j == 0)
  def _():
    for row, _, _ in rows:
      _spread(row.q, row.queries, settings.heads)
      for x, least in zip(row.sums, (0, _LOWEST, 0), strict=True):
        x[...] = jnp.full_like(x, least)

  for row, start, end in rows:
    in_sight = j * BLOCK < end
    if settings.causal:
      in_sight &= (back == 0) | ((j + 1) * BLOCK > start - back + 1)
    visit = functools.partial(_visit, settings, row, layer[0], j, start, end, back)
    pl.when(in_sight)(visit)

  for row, start, _ in rows if settings.writes else ():

    @pl.when(_lies_in(j, start, width))
    def _(row=row, start=start):
      for copy in _copies(row, width, layer[0], j, start):
        copy.wait()

  @pl.when(j == pl.num_programs(1) - 1)
  def _():
    for row, _, _ in rows:
      total, _, mass = row.sums
      total[...] = total[...] / jnp.maximum(mass[:, :, :1], 1e-30)
      _gather(total, row.y, settings.heads)


def _lies_in(j, start, width: int):
  """Return whether a part of the window lies in block j."""
  return (start < (j + 1) * BLOCK) & (start + width > j * BLOCK)


def _visit(settings: _Settings, row: _Refs, layer, j, start, end, back):
  """Add a block of slots to the running softmax; where the window lies in it, it is merged and stored before."""
  width = row.y.shape[0]
  visible = functools.partial(_visible, settings.causal, j, width, start, end, back, row.positions)

  def add(k: Array, v: Array):  # [G, BLOCK, P]
    bias = None if row.bias is None else row.bias[...]
    _add(settings, row.queries[...].astype(k.dtype), k, v, bias, visible, row.sums)

  def write_and_add():
    merged = [_merge(x[...], new[...], start - j * BLOCK) for x, new in zip((row.key, row.value), row.new, strict=True)]
    for buffer, slots in zip(row.staging[:2], merged, strict=True):
      buffer[...] = slots
    for copy in _copies(row, width, layer, j, start):
      copy.start()
    add(*merged)

  def add_stored():
    add(row.key[...], row.value[...])

  if settings.writes:
    lax.cond(_lies_in(j, start, width), write_and_add, add_stored)
  else:
    add_stored()


def _visible(causal: bool, j, width: int, start, end, back, positions, shape) -> Array:
  """Return which slots of block j each query sees."""
  slot = j * BLOCK + lax.broadcasted_iota(jnp.int32, shape, 2)
  if not causal:
    return slot < end
  rows = -(-width // STEP) * STEP  # of a head
  own = start + lax.rem(lax.broadcasted_iota(jnp.int32, shape, 1), rows)
  if positions is None:
    return (slot <= own) & ((back == 0) | (own - slot < back))
  at = jnp.tile(positions[...], (shape[1] // rows, 1))[None]
  before = (slot < jnp.minimum(at, own)) & ((back == 0) | (at - slot < back))
  return before | (slot == own)


def _add(settings: _Settings, x: Array, k: Array, v: Array, bias: Array | None, visible, sums) -> None:
  """Add a block of slots k, v [G, BLOCK, P] to the running softmax of queries x [G, R, P]."""
  total, best, mass = sums
  s = lax.dot_general(x, k, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32) * settings.scale
  s = s if settings.cap is None else settings.cap * jnp.tanh(s / settings.cap)
  s = s if bias is None else s + bias
  seen = visible(s.shape)
  s = jnp.where(seen, s, _LOWEST)
  old = best[:, :, :1]
  now = jnp.maximum(old, s.max(2, keepdims=True))
  weights = jnp.where(seen, jnp.exp(s - now), 0)
  shrink = jnp.exp(old - now)
  y = lax.dot_general(weights.astype(v.dtype), v, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32)
  total[...] = shrink * total[...] + y
  best[...] = jnp.broadcast_to(now, best.shape)
  mass[...] = jnp.broadcast_to(shrink * mass[:, :, :1] + weights.sum(2, keepdims=True), mass.shape)


def _tiles(shape: tuple[int, ...], groups: int, tile: int, heads: int):
  """Yield for every head of windows [..., L, G·g·P] its group, its first row, its tile, and its number in that tile."""
  width, lanes = shape[-2:]
  share = lanes // (groups * tile)
  step = -(-width // STEP) * STEP
  for group in range(groups):
    for j in range(share):
      for m in range(heads):
        start = (group * share + j) * tile
        yield group, (m * share + j) * step, slice(start, start + tile), m


def _spread(q, queries, heads: int):
  """Write each head's queries of a window [L, G·g·P] to rows of its group, zero in the lanes of the others."""
  groups, _, tile = queries.shape
  q = q[...]
  width = q.shape[0]
  lane = lax.broadcasted_iota(jnp.int32, (width, tile), 1)
  queries[...] = jnp.zeros_like(queries)
  for group, row, lanes, m in _tiles(q.shape, groups, tile, heads):
    x = q[:, lanes].astype(jnp.float32)
    own = (lane >= m * (tile // heads)) & (lane < (m + 1) * (tile // heads))
    queries[group, pl.ds(row, width), :] = x if heads == 1 else jnp.where(own, x, 0)


def _gather(total, y, heads: int):
  """Undo `_spread`: put the heads of a tile next to each other."""
  groups, _, tile = total.shape
  width = y.shape[0]
  lane = lax.broadcasted_iota(jnp.int32, (width, tile), 1)
  joined = None
  for group, row, lanes, m in _tiles(y.shape, groups, tile, heads):
    x = total[group, pl.ds(row, width), :]
    joined = jnp.where(lane >= m * (tile // heads), x, joined) if m else x
    if m == heads - 1:
      y[:, lanes] = joined.astype(y.dtype)


def _merge(slots: Array, new: Array, at: Array) -> Array:
  """Return slots [G, BLOCK, P] with the window new [L, G·P] put in from slot `at` on, as far as they reach."""
  groups, _, tile = slots.shape
  width = new.shape[0]
  index = lax.broadcasted_iota(jnp.int32, (BLOCK, width), 0) - at
  hit = (index == lax.broadcasted_iota(jnp.int32, (BLOCK, width), 1)).astype(slots.dtype)
  put = jnp.dot(hit, new.astype(slots.dtype), preferred_element_type=jnp.float32)  # [BLOCK, G·P]
  put = jnp.stack([put[:, g * tile : (g + 1) * tile] for g in range(groups)])
  inside = lax.broadcasted_iota(jnp.int32, slots.shape, 1) - at
  return jnp.where((inside >= 0) & (inside < width), put, slots.astype(jnp.float32)).astype(slots.dtype)


def _copies(row: _Refs, width: int, layer, j, start) -> list:
  """Return the copies of the tiles that a window may lie in from a merged block of slots to the caches."""
  size = -(-(width - 1) // _TILE) * _TILE + _TILE
  first = jnp.clip(lax.div(jnp.maximum(start - j * BLOCK, 0), _TILE) * _TILE, 0, BLOCK - size)
  first = pl.multiple_of(first, _TILE)
  slots = pl.ds(pl.multiple_of(j * BLOCK + first, _TILE), size)
  return [
    pltpu.make_async_copy(buffer.at[:, pl.ds(first, size), :], cache.at[layer, :, slots, :], done)
    for buffer, cache, done in zip(row.staging[:2], row.caches, row.staging[2:], strict=True)
  ]
