"""Padded batches out of any iterator of (source tokens, target tokens).

Pairs of like length share a batch: a pool of some batches is sorted by length, cut, and its batches shuffled. Source
and target are padded to one of a few widths, since every width is a program to compile.

Axis letters: B batch, S source, L target.
"""

from collections.abc import Iterable, Iterator, Sequence
import itertools

from flax import struct
import numpy as np

Pair = tuple[Sequence[int], Sequence[int]]


@struct.dataclass
class Batch:
  """Token lists, padded on the right with 0; what is padding is known by the lengths alone."""

  source: np.ndarray  # [B, S]
  source_length: np.ndarray  # [B]
  target: np.ndarray  # [B, L]
  target_length: np.ndarray  # [B]


def batches(
  pairs: Iterable[Pair], size: int, widths: Sequence[int], *, seed: int = 0, pool: int = 16
) -> Iterator[Batch]:
  """Yield batches of `size` pairs; pairs longer than the last width are an error, a rest below `size` is left out."""
  rng, pairs = np.random.default_rng(seed), _checked(pairs, max(widths))
  while rows := list(itertools.islice(pairs, size * pool)):
    rows.sort(key=_longer)
    groups = [rows[i : i + size] for i in range(0, len(rows) - size + 1, size)]
    for i in rng.permutation(len(groups)):
      yield collate(groups[i], widths)


def collate(rows: Sequence[Pair], widths: Sequence[int]) -> Batch:
  """Return one batch, as wide as the smallest of `widths` that holds it."""
  longest = max(map(_longer, rows))
  width = min(width for width in widths if width >= longest)
  sources, targets = zip(*rows, strict=True)
  return Batch(*_padded(sources, width), *_padded(targets, width))


def _longer(pair: Pair) -> int:
  return max(len(pair[0]), len(pair[1]))


def _padded(rows: Sequence[Sequence[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
  lengths = np.array([len(row) for row in rows], np.int32)
  tokens = np.zeros((len(rows), width), np.int32)
  for row, given in zip(tokens, rows, strict=True):
    row[: len(given)] = given
  return tokens, lengths


def _checked(pairs: Iterable[Pair], widest: int) -> Iterator[Pair]:
  for i, (source, target) in enumerate(pairs):
    for what, row in (('source', source), ('target', target)):
      if not 0 < len(row) <= widest:
        raise ValueError(
          f'the {what} of pair {i} has {len(row)} tokens, not between 1 and {widest}: add a larger width to '
          'Settings.widths, or leave such pairs out of the data'
        )
    yield source, target
