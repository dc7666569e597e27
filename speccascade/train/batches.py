"""Padded batches of (source tokens, target tokens).

Pairs of similar length share a batch: a pool of some batches is sorted by length, split, and its batches shuffled.
Source and target are padded to one of a few widths, since each width compiles a program.

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
  """Token lists padded on the right with 0; what lies beyond the lengths is padding.

  Attributes:
    source: [B, S] tokens.
    source_length: [B].
    target: [B, L] tokens.
    target_length: [B].
  """

  source: np.ndarray
  source_length: np.ndarray
  target: np.ndarray
  target_length: np.ndarray


def batches(
  pairs: Iterable[Pair],
  size: int,
  widths: Sequence[int],
  *,
  networks: Sequence[Network] = (),
  seed: int = 0,
  pool: int = 16,
) -> Iterator[Batch]:
  """Yield batches of pairs.

  Args:
    pairs: (source tokens, target tokens), none longer than the last width.
    size: pairs in a batch; a remainder is dropped.
    widths: lengths to which batches are padded.
    networks: networks that must have embeddings for all tokens and positions.
    seed: of the order of batches.
    pool: number of batches whose pairs are sorted together.

  Raises:
    ValueError: if a pair does not fit the widths or a network.
  """
  rng = np.random.default_rng(seed)
  pairs = _checked(pairs, max(widths), networks)
  while rows := list(itertools.islice(pairs, size * pool)):
    rows.sort(key=_length)
    groups = [rows[i : i + size] for i in range(0, len(rows) - size + 1, size)]
    for i in rng.permutation(len(groups)):
      yield collate(groups[i], widths)


def collate(rows: Sequence[Pair], widths: Sequence[int]) -> Batch:
  """Return one batch, padded to the smallest of `widths` that suffices."""
  longest = max(map(_length, rows))
  width = min(width for width in widths if width >= longest)
  sources, targets = zip(*rows, strict=True)
  return Batch(*_padded(sources, width), *_padded(targets, width))


def _length(pair: Pair) -> int:
  return max(len(pair[0]), len(pair[1]))


def _padded(rows: Sequence[Sequence[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
  lengths = np.array([len(row) for row in rows], np.int32)
  tokens = np.zeros((len(rows), width), np.int32)
  for i, row in enumerate(rows):
    tokens[i, : len(row)] = row
  return tokens, lengths


def _checked(pairs: Iterable[Pair], longest: int, networks: Sequence[Network]) -> Iterator[Pair]:
  """Yield pairs, checked to fit the widths and the networks."""
  for i, (source, target) in enumerate(pairs):
    for side, row in (('source', source), ('target', target)):
      if not 0 < len(row) <= longest:
        raise ValueError(
          f'the {side} of pair {i} has {len(row)} tokens, not between 1 and {longest}: add a larger width to '
          'Settings.widths, or remove such pairs from the data'
        )
      for network in networks:
        _check_tokens(f'the {side} of pair {i}', row, network)
    for network in networks:
      length = len(source) + len(target)
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
