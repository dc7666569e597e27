"""What a sampler is asked: small distributions in which no two positions and no two rows are alike.

Axis letters: K drafted tokens, V vocabulary, L tokens whose joint law is compared, R rows of a batch.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
import dataclasses
import functools
import itertools
from typing import NamedTuple

import numpy as np

SETTINGS = ('temperature', 'top_k', 'top_p')
ASKED = (*SETTINGS, 'lengths')  # arguments that a sampler may take beyond those that each takes

TWO = [(0.6, 0.4), (0.9, 0.1)], [(0.2, 0.8), (0.4, 0.6)], [(0.3, 0.7), (0.3, 0.7)], [(1.0, 0.0), (0.5, 0.5)]
THREE = [(0.2, 0.4, 0.4), (0.6, 0.3, 0.1)], [(0.5, 0.5, 0.0), (0.4, 0.0, 0.6)]
AFTER = {2: [(0.1, 0.9), (0.7, 0.3), (0.45, 0.55)], 3: [(0.3, 0.1, 0.6), (0.1, 0.7, 0.2), (0.25, 0.6, 0.15)]}
FILTERED = [(0.5, 0.3, 0.2), (0.15, 0.25, 0.6)], [(0.2, 0.5, 0.3)]  # p and q
TURNED = [(0.25, 0.15, 0.6), (0.5, 0.2, 0.3)], [(0.3, 0.3, 0.4)]  # of another row


class Setting(NamedTuple):
  """How a row is sampled; None is off."""

  temperature: float = 1.0
  top_k: int | None = None
  top_p: float = 1.0

  def __call__(self, p: np.ndarray) -> np.ndarray:
    """Return the distribution that a token follows: the temperature comes first, then top-k, then top-p."""
    if self.temperature == 0:
      return np.eye(len(p))[p.argmax()]
    p = p ** (1 / self.temperature)
    order = np.argsort(-p, kind='stable')
    p = np.where(np.isin(np.arange(len(p)), order[: self.top_k]), p, 0)
    p = p / p.sum()
    before = np.cumsum(p[order]) - p[order]
    kept = order[before < self.top_p - 1e-9]
    p = np.where(np.isin(np.arange(len(p)), kept), p, 0)
    return p / p.sum()

  def __str__(self):
    given = zip(SETTINGS, self, self._field_defaults.values(), strict=True)
    return ', '.join(f'{name}={value:g}' for name, value, default in given if value != default)


# The kept tokens of p, and of what follows it, are others where top-p is taken before the temperature.
GREEDY, LATE = Setting(0.0), Setting(2.0, top_p=0.78)
ALONE = [GREEDY, Setting(2.0), Setting(top_k=2), Setting(top_p=0.78), LATE, Setting(0.5, top_k=2)]
BESIDE = [(GREEDY, Setting()), (LATE, GREEDY), (Setting(0.5, top_k=2), Setting(2.0))]


@dataclasses.dataclass(frozen=True)
class Case:
  """What a sampler is given: p [K + 1, V] of its verifier and q [K, V] of its drafter, of a batch [R, …].

  Attributes:
    p: What the verifier says, before the settings.
    q: What each token was drafted from.
    tokens: L, how many tokens' joint law is compared.
    settings: Of each row; empty where all are off.
    lengths: How many tokens are drafted in each row of a batch; empty for K in all.
    choices: How many drafts there are for each of them, independent of each other.
  """

  p: np.ndarray
  q: np.ndarray
  tokens: int
  settings: Sequence[Setting] = ()
  lengths: Sequence[int] = ()
  choices: int = 1

  @property
  def batch(self) -> bool:
    """Whether it has rows."""
    return np.ndim(self.p) == 3

  @property
  def rows(self) -> int:
    """How many sequences it is of."""
    return len(self.p) if self.batch else 1

  @property
  def drafted(self) -> list[int]:
    """How many tokens are drafted in each row."""
    return [*self.lengths] or [np.shape(self.q)[-2]] * self.rows

  @property
  def setting(self) -> list[Setting]:
    """The settings of each row."""
    return [*self.settings] or [Setting()] * self.rows

  @functools.cached_property
  def targets(self) -> np.ndarray:
    """What each token is to follow, [R, K + 1, V]."""
    p = np.asarray(self.p, np.float64) if self.batch else np.asarray(self.p, np.float64)[None]
    return np.array([[setting(x) for x in row] for setting, row in zip(self.setting, p, strict=True)])

  @property
  def law(self) -> np.ndarray:
    """The law of the first L tokens of all rows, [V] * (R · L)."""
    return product(self.targets[:, : self.tokens].reshape(-1, self.targets.shape[-1]))

  def __str__(self):
    rows = [_described(*x) for x in zip(*self._by_row(), self.drafted, self.setting, strict=True)]
    said = '; '.join(f'row {i}: {row}' for i, row in enumerate(rows)) if self.batch else rows[0]
    return said if self.choices == 1 else f'{said}, {self.choices} drafts of each token'

  def _by_row(self):
    p, q = (x if self.batch else [x] for x in (self.p, self.q))
    return [x[: self.tokens] for x in p], q


def _described(p, q, drafted: int, setting: Setting) -> str:
  q = ' then '.join(map(numbers, q[:drafted])) or 'nothing'
  more = f', {setting}' if str(setting) else ''
  return f'p = {" then ".join(map(numbers, p))}, q = {q}{more}'


def product(distributions: Iterable[np.ndarray]) -> np.ndarray:
  """Return the joint law of independent tokens."""
  law = np.ones(())
  for x in distributions:
    law = law[..., None] * x
  return law


def numbers(values: Iterable[float]) -> str:
  """Return values as they are printed, (.6, .4)."""
  return f'({", ".join(map(number, values))})'


def number(value: float, digits: int = 3) -> str:
  """Return a value as it is printed, .6; one that would be 0, with an exponent."""
  if 0 < abs(value) < 10**-digits:
    return f'{value:.1g}'
  text = f'{value:.{digits}f}'.rstrip('0').rstrip('.')
  return text.removeprefix('0') if text.startswith('0.') else text


# ---- the cases ----


def cases(rows: int = 1, takes: Collection[str] = (), choices: int = 1) -> Iterator[Case]:
  """Yield cases from small to large.

  Args:
    rows: Of a batch; 1 for no batch.
    takes: What the sampler takes: of `SETTINGS`, and 'lengths' of a batch in which rows have no draft.
    choices: How many drafts there are for each token.
  """
  some = _batches(rows, takes) if rows > 1 else _alone(takes)
  return (dataclasses.replace(case, choices=choices) for case in some)


def _case(p, q, tokens: int, settings: Sequence[Setting] = ()) -> Case:
  return Case(np.array(p), np.array(q), tokens, settings)


def _alone(takes: Collection[str]) -> Iterator[Case]:
  """Yield two tokens, three, the token after the draft, drafts of two, settings, and nothing drafted."""
  two, three = AFTER[2], AFTER[3]
  yield from (_case([p, two[0]], [q], 1) for p, q in TWO)
  yield from (_case([p, three[0]], [q], 1) for p, q in THREE)
  yield from (_case([p, two[i % 2]], [q], 2) for i, (p, q) in enumerate(TWO))
  (p, q), (p_next, q_next) = TWO[:2]
  yield _case([p, p_next, two[0]], [q, q_next], 2)
  yield _case([p_next, p, two[2]], [q_next, q], 3)
  yield from (_case(*FILTERED, 2, settings) for settings in _taken([[x] for x in ALONE], takes))
  yield Case(np.array([p]), np.zeros((0, 2)), 1)


def _batches(rows: int, takes: Collection[str]) -> Iterator[Case]:
  """Yield rows of two tokens, of three, with the token after the draft, of different settings, and without a draft."""
  yield _rows(rows, [([p, AFTER[2][i % 3]], [q]) for i, (p, q) in enumerate(TWO)], 1)
  yield _rows(rows, [([p, AFTER[3][i % 3]], [q]) for i, (p, q) in enumerate(THREE)], 1)
  yield _rows(rows, [([p, AFTER[2][i % 3]], [q]) for i, (p, q) in enumerate(TWO)], 2)
  for settings in _taken(BESIDE, takes):
    yield _rows(rows, [FILTERED, TURNED], 1, settings)
  if 'lengths' in takes:
    for lengths in ((0, 1), (1, 0)):
      yield _rows(rows, [FILTERED, TURNED], 1, lengths=lengths)


def _rows(rows: int, given: Sequence, tokens: int, settings=(), lengths=()) -> Case:
  """Return a batch of rows that take what is given in turn."""
  p, q = (np.array(x) for x in zip(*_turns(given, rows), strict=True))
  return Case(p, q, tokens, _turns(settings, rows), _turns(lengths, rows))


def _turns(values: Sequence, count: int) -> tuple:
  """Return so many values, which come in turn; none of none."""
  return tuple(itertools.islice(itertools.cycle(values), count))


def _taken(settings: Iterable[Sequence[Setting]], takes: Collection[str]) -> Iterator[tuple[Setting, ...]]:
  """Yield settings once each, without those that the sampler does not take."""
  found = dict.fromkeys(tuple(_without(x, takes) for x in of_rows) for of_rows in settings)
  return (x for x in found if any(row != Setting() for row in x))


def _without(setting: Setting, takes: Collection[str]) -> Setting:
  return Setting(**{name: x for name, x in zip(SETTINGS, setting, strict=True) if name in takes})
