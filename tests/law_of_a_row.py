"""The exact law of what a row of the compiled loop emits, beside others that decide too.

A run is a function of uniform numbers, each known by its row, its round and position, and its purpose. `Noted` gives
the loop numbers from a table and notes, for every number that is read, between which bounds it could lie with the same
decision. All tables between the bounds of a run are the same run: a box, whose volume is its probability. What the box
leaves over of the cube is cut into boxes, each of which is run in its middle, until nothing is left. So nothing is
sampled, no cut is written by hand, and a number that is read twice is the same number.

The numbers of row 0 are enumerated. Those of the others are fixed, to some random tables in turn: given them, row 0
must follow its target, or the rows would not be independent. Rows with equal seeds read one table.
"""

from collections.abc import Callable
from typing import NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from speccascade import sampling
from speccascade.types import ACCEPT, Array, DRAFT, FINAL, static

AT_ONCE = 512  # boxes that are run at once
LEAST = 1e-7  # boxes that are narrower are left out: float32 tells no more
NEVER = 1e6
NOTHING = 0.0, -1.0, -NEVER  # what is noted of a number that nothing has read
FAULT = (-1,)  # the text of a row that ends without the tokens that it needs
Law = dict[tuple[int, ...], float]  # {emitted tokens: probability}


class Size(NamedTuple):
  """How much is looked at."""

  count: int  # tokens of row 0 that are measured
  most: int  # tokens that the rows emit at most
  tables: int = 4  # of the other rows
  boxes: int = 60_000  # at most, then it is given up


class TooMany(Exception):
  """There are more boxes than one may run."""


@struct.dataclass
class Noted(sampling.Keyed):
  """Numbers from tables [N, rounds, places, 3], with the bounds between which each decides the same.

  Attributes:
    table: The numbers.
    noted: Of each number [.., 3] the bounds between which it decides the same, and which reading was the first of it,
      the upper bound and the reading negative.
    base: [B] the position of the first token of each row.
    rows: Which table each row reads.
    count: How many tokens are measured: a round that begins behind them decides nothing.
    in_order: Whether a test counts only where those before it passed, and where its token is measured.
    near: Whether drafted tokens count only where they are measured.
  """

  table: Array | None = None
  noted: Array | None = None
  base: Array | None = None
  rows: tuple[int, ...] = static(default=())
  count: int = static(default=1)
  in_order: bool = static(default=True)
  near: bool = static(default=True)

  def _cells(self, position, start):
    """Return (row, round, place) of numbers, each of the shape of `position`."""
    spread = lambda x: jnp.broadcast_to(x.reshape(x.shape + (1,) * (position.ndim - x.ndim)), position.shape)
    begun = spread(start - self.base)
    rows = spread(jnp.asarray(self.rows))
    return (rows, begun if self.by_round else jnp.zeros_like(begun), position - spread(self.base)), begun

  def uniform(self, position, purpose, start):
    number = self.table.at[(*self._cells(position, start)[0], purpose)].get(mode='clip')
    return jnp.stack([number, number], -1)

  def _note(self, position, purpose, start, thresholds, counts):
    """Return the noise with what thresholds [..., K] tell of numbers, where they count."""
    cell, begun = self._cells(position, start)
    number = self.table.at[(*cell, purpose)].get(mode='clip')[..., None]
    low = jnp.max(jnp.where(thresholds <= number, thresholds, 0), -1)
    high = jnp.min(jnp.where(thresholds > number, thresholds, 1), -1)
    counts = counts & (begun < self.count)
    index = (*cell, purpose)
    told = jnp.stack([low, -high, jnp.broadcast_to(-self._now(), low.shape)], -1)
    told = jnp.where(counts[..., None], told, jnp.array(NOTHING))
    return self.replace(noted=self.noted.at[index].max(told, mode='drop'))

  def _now(self):
    """Return the number of a reading: one more than that of the last."""
    when = -self.noted[..., 2]
    return jnp.max(jnp.where(when < NEVER, when, -1)) + 1

  def draw(self, weights, position, purpose, start):
    token, _ = super().draw(weights, position, purpose, start)
    if self.greedy and purpose == DRAFT:
      return token, self
    total = jnp.cumsum(weights, -1)
    _, place = self._cells(position, start)[0][1:]
    counts = (place < self.count) | (not self.near and purpose == DRAFT)
    return token, self._note(position, purpose, start, total / total[..., -1:], counts)

  def accept(self, numerator, denominator, position, start):
    passed, _ = super().accept(numerator, denominator, position, start)
    threshold = jnp.where(denominator > 0, numerator / jnp.where(denominator > 0, denominator, 1), 2)[..., None]
    _, place = self._cells(position, start)[0][1:]
    counts = jnp.ones(position.shape, bool)
    if self.in_order:
      before = jnp.cumprod(jnp.pad(passed[:, :-1], ((0, 0), (1, 0)), constant_values=True), 1) > 0
      counts = before & (place < self.count)
    return passed, self._note(position, ACCEPT, start, threshold, counts)


def laws(
  run: Callable, shape: tuple[int, int], size: Size, final_prunes: bool, rows: int = 2, seed: int = 0
) -> list[Law]:
  """Return the law of row 0's first tokens, for each table of the others.

  Args:
    run: (table [N, rounds, places, 3]) -> (tokens [count], their number, whether a fault ended them, where each is
      from, `noted`), of row 0.
    shape: The rounds and places of a table; there is one of row 0, then one of each other row.
    size: How much is looked at.
    final_prunes: Whether a number for a last token counts only where that token came of it.
    rows: How many rows there are.
    seed: Of the others' tables.
  """
  width = int(np.prod(shape)) * 3
  others = np.random.default_rng(seed).random((size.tables, rows - 1, width)).astype(np.float32)
  at_once = jax.jit(jax.vmap(run))
  found: list[Law] = [{} for _ in range(size.tables)]
  low, high = np.zeros((size.tables, width)), np.ones((size.tables, width))
  which, ran = np.arange(size.tables), 0
  while len(which):
    ran += min(len(which), AT_ONCE)
    if ran > size.boxes:
      raise TooMany(f'{ran} boxes')
    now, which = which[-AT_ONCE:], which[:-AT_ONCE]
    a, low = low[-AT_ONCE:], low[:-AT_ONCE]
    b, high = high[-AT_ONCE:], high[:-AT_ONCE]
    table = np.full((AT_ONCE, rows, width), 0.5, np.float32)
    table[: len(now), 0], table[: len(now), 1:] = (a + b) / 2, others[now]
    out = at_once(jnp.asarray(table.reshape(AT_ONCE, rows, *shape, 3)))
    tokens, number, lost, source, noted = (np.asarray(x)[: len(now)] for x in out)
    c, d, when = (noted * np.array([1, -1, -1])).reshape(-1, width, 3).astype(float).transpose(2, 0, 1)
    if final_prunes:
      c, d = _without_unused(c, d, shape, source, number)
    c, d = np.maximum(a, c), np.minimum(b, d)
    for i, weight in enumerate(np.prod(d - c, 1)):
      text = FAULT if lost[i] else tuple(tokens[i, : number[i]].tolist())
      found[now[i]][text] = found[now[i]].get(text, 0) + weight
    more = _left_over(a, b, c, d, when)
    low = np.concatenate([low, *(x for x, _, _ in more)])
    high = np.concatenate([high, *(x for _, x, _ in more)])
    which = np.concatenate([which, *(now[i] for _, _, i in more)])
  return found


def _left_over(a, b, c, d, when):
  """Return boxes (low, high, of which) that together are what boxes [c, d] leave of boxes [a, b].

  What was read first is cut first, so that a number that is read after some outcomes alone is cut only in their boxes.
  """
  a, b, boxes = a.copy(), b.copy(), []
  when = np.where((abs(a - c) > LEAST) | (abs(b - d) > LEAST), when, np.inf)
  order = np.argsort(when, 1, kind='stable')
  for i in range(int(np.isfinite(when).sum(1).max())):
    at = np.arange(len(a)), order[:, i]
    for edge, other, is_low in ((a, c, True), (b, d, False)):
      some = np.flatnonzero(abs(edge[at] - other[at]) > LEAST)
      if len(some):
        low, high = a[some], b[some]
        (high if is_low else low)[np.arange(len(some)), at[1][some]] = other[at][some]
        boxes.append((low, high, some))
      edge[at] = other[at]
  return boxes


def _without_unused(c, d, shape, source, number):
  """Return bounds without those of numbers for last tokens of which no token came, but of another round or a draft."""
  rounds, places = shape
  c, d = (x.reshape(-1, rounds, places, 3).copy() for x in (c, d))
  read = (c[..., FINAL] > 0) | (d[..., FINAL] < 1)  # [N, rounds, places]
  later = np.flip(np.cumsum(np.flip(read, 1), 1), 1) - read > 0
  made = np.zeros(read.shape[::2], bool)  # [N, places]
  made[:, : source.shape[1]] = (source < 0) & (np.arange(source.shape[1]) < number[:, None])
  unused = ~made[:, None] | later
  c[..., FINAL][unused], d[..., FINAL][unused] = 0, 1
  return c.reshape(len(c), -1), d.reshape(len(d), -1)


def distance(found: Law, expected: Law) -> float:
  """Return the largest difference of a probability; what is missing of a law that is cut off counts as well."""
  return max(abs(found.get(text, 0) - expected.get(text, 0)) for text in found.keys() | expected.keys())
