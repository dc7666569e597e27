"""Padded batches of (source tokens, target tokens).

Pairs of similar length share a batch: a pool of some batches is sorted by length, split, and its batches shuffled.
Source and target are padded to one of a few widths, since each width compiles a program.

Axis letters: B batch, S source, L target.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
import itertools

from flax import struct
import numpy as np

from speccascade.types import Network

Pair = tuple[Sequence[int], Sequence[int]]
Width = int | tuple[int, int]  # of source and target, or of both


@struct.dataclass
class Batch:
  """Token lists padded on the right with 0; what lies beyond the lengths is padding.

  Attributes:
    source: [B, S] tokens.
    source_length: [B].
    target: [B, L] tokens.
    target_length: [B].
    truncated: [2] numbers of sources and targets that are shorter than in the data; None on a device.
  """

  source: np.ndarray
  source_length: np.ndarray
  target: np.ndarray
  target_length: np.ndarray
  truncated: np.ndarray | None = None


def by_size(widths: Sequence[Width]) -> list[tuple[int, int]]:
  """Return (source, target) widths, the smallest first.

  Args:
    widths: Token counts, each for source and target alike, or pairs of them.

  Raises:
    ValueError: a width is below 1, or none has both the largest source and the largest target.
  """
  pairs = [(width, width) if isinstance(width, int) else tuple(width) for width in widths]
  if not pairs or any(len(pair) != 2 or min(pair) < 1 for pair in pairs):
    raise ValueError(f'widths={widths} must be token counts of at least 1, or pairs (source, target) of them')
  largest = tuple(map(max, zip(*pairs, strict=True)))
  if largest not in pairs:
    raise ValueError(f'widths={widths} lack {largest}, the largest source with the largest target: add it')
  return sorted(pairs, key=sum)


def batches(
  pairs: Iterable[Pair],
  size: int,
  widths: Sequence[Width],
  *,
  networks: Sequence[Network] = (),
  seed: int = 0,
  pool: int = 16,
  truncate: bool = False,
) -> Iterator[Batch]:
  """Yield batches of pairs.

  Args:
    pairs: (source tokens, target tokens), none longer than the last width unless `truncate`.
    size: Pairs in a batch; a remainder is dropped.
    widths: Lengths to which batches are padded, for source and target alike or as (source, target).
    networks: Networks that must have embeddings for all tokens and positions.
    seed: Of the order of batches.
    pool: Number of batches whose pairs are sorted together.
    truncate: Shorten what is longer than the largest width; a final end of sequence stays.

  Raises:
    ValueError: if a pair does not fit the widths or a network.
  """
  rng = np.random.default_rng(seed)
  shapes = by_size(widths)
  ends = {token for network in networks for token in network.eos_ids}
  pairs = _checked(pairs, shapes[-1], networks, truncate)
  while rows := list(itertools.islice(pairs, size * pool)):
    rows.sort(key=lambda row: (_shape_of([row], shapes), max(map(len, row))))
    groups = [rows[i : i + size] for i in range(0, len(rows) - size + 1, size)]
    for i in rng.permutation(len(groups)):
      yield collate(groups[i], shapes, ends)


def collate(rows: Sequence[Pair], widths: Sequence[Width], ends: Collection[int] = ()) -> Batch:
  """Return one batch, padded to the smallest of `widths` that suffices, or truncated to the largest.

  Args:
    rows: (source tokens, target tokens).
    widths: Widths, as `batches` takes them.
    ends: Tokens that end a text, which truncation leaves in place.
  """
  shapes = by_size(widths)
  shape = shapes[_shape_of(rows, shapes)]
  sides = list(zip(*rows, strict=True))
  truncated = np.array([sum(len(row) > width for row in side) for side, width in zip(sides, shape, strict=True)])
  return Batch(*_padded(sides[0], shape[0], ends), *_padded(sides[1], shape[1], ends), truncated)


def _shape_of(rows: Sequence[Pair], shapes: Sequence[tuple[int, int]]) -> int:
  """Return the index of the first shape that fits some rows, or the last one."""
  source, target = (max(map(len, side)) for side in zip(*rows, strict=True))
  fits = (i for i, shape in enumerate(shapes) if source <= shape[0] and target <= shape[1])
  return next(fits, len(shapes) - 1)


def _padded(rows: Sequence[Sequence[int]], width: int, ends: Collection[int]) -> tuple[np.ndarray, np.ndarray]:
  lengths = np.array([min(len(row), width) for row in rows], np.int32)
  tokens = np.zeros((len(rows), width), np.int32)
  for i, row in enumerate(rows):
    tokens[i, : lengths[i]] = row[:width]
    if len(row) > width and row[-1] in ends:
      tokens[i, -1] = row[-1]
  return tokens, lengths


def _checked(
  pairs: Iterable[Pair], limits: tuple[int, int], networks: Sequence[Network], truncate: bool
) -> Iterator[Pair]:
  """Yield pairs, checked to fit the widths and the networks."""
  for i, (source, target) in enumerate(pairs):
    for side, row, limit in (('source', source, limits[0]), ('target', target, limits[1])):
      if not row or (len(row) > limit and not truncate):
        raise ValueError(
          f'the {side} of pair {i} has {len(row)} tokens, not between 1 and {limit}: add a larger width to '
          'Settings.widths, set Settings.truncate, or remove such pairs from the data'
        )
      for network in networks:
        _check_tokens(f'the {side} of pair {i}', row, network)
    for network in networks:
      length = min(len(source), limits[0]) + min(len(target), limits[1])
      if network.start_id is None and network.max_positions is not None and length > network.max_positions:
        raise ValueError(
          f'source and target of pair {i} have {length} tokens together, and the {type(network).__name__} has '
          f'{network.max_positions} positions: remove such pairs, or train a network with more positions'
        )
    yield source, target


def _check_tokens(where: str, row: Sequence[int], network: Network) -> None:
  for token in (min(row), max(row)):
    if not 0 <= token < network.vocab_size:
      raise ValueError(
        f'{where} has token {token}, but the {type(network).__name__} has vocab_size={network.vocab_size}: make the '
        'pairs with its own tokenizer, or raise vocab_size'
      )
