"""Padded batches out of any iterator of (source tokens, target tokens).

Pairs of like length share a batch: a pool of some batches is sorted by length, cut, and its batches shuffled. Source
and target are padded to one of a few widths, since every width is a program to compile.

Axis letters: B batch, S source, L target.
"""

from collections.abc import Iterable, Iterator, Sequence
import itertools

from flax import struct
import numpy as np

from speccascade.types import Network

Pair = tuple[Sequence[int], Sequence[int]]


@struct.dataclass
class Batch:
  """Token lists, padded on the right with 0; what is padding is known by the lengths alone."""

  source: np.ndarray  # [B, S]
  source_length: np.ndarray  # [B]
  target: np.ndarray  # [B, L]
  target_length: np.ndarray  # [B]


def batches(
  pairs: Iterable[Pair], size: int, widths: Sequence[int], *, networks: Sequence[Network] = (), seed: int = 0,
  pool: int = 16,
) -> Iterator[Batch]:  # fmt: skip
  """Yield batches of `size` pairs; a rest below `size` is left out.

  Pairs longer than the last width, or with tokens or positions that one of `networks` lacks, are an error.
  """
  rng, pairs = np.random.default_rng(seed), _checked(pairs, max(widths), networks)
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


def _checked(pairs: Iterable[Pair], widest: int, networks: Sequence[Network]) -> Iterator[Pair]:
  for i, (source, target) in enumerate(pairs):
    for what, row in (('source', source), ('target', target)):
      if not 0 < len(row) <= widest:
        raise ValueError(
          f'the {what} of pair {i} has {len(row)} tokens, not between 1 and {widest}: add a larger width to '
          'Settings.widths, or leave such pairs out of the data'
        )
    for network in networks:
      _check_fits(i, source, target, network)
    yield source, target


def _check_fits(i: int, source: Sequence[int], target: Sequence[int], network: Network) -> None:
  """Raise where a pair has tokens or positions for which a network has no embedding."""
  kind = type(network).__name__
  for what, row in (('source', source), ('target', target)):
    for token in (min(row), max(row)):
      if not 0 <= token < network.vocab_size:
        raise ValueError(
          f'the {what} of pair {i} has token {token}, and the {kind} those below vocab_size={network.vocab_size}: '
          'make the pairs with its own tokenizer, or raise vocab_size'
        )
  needed, most = len(source) + len(target), network.max_positions
  if network.start_id is None and most is not None and needed > most:
    raise ValueError(
      f'source and target of pair {i} have {needed} tokens together, and the {kind} has {most} positions: leave such '
      'pairs out of the data, or train a network with more positions'
    )
