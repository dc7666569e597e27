"""One call of a sampler: it gets copies, its errors get their line, and what it returns must be tokens."""

from collections.abc import Callable, Collection, Iterator, Sequence
import dataclasses
import functools
import inspect
import itertools
import math
import numbers
import traceback
from typing import Any

import numpy as np

from speccascade.check.sampler.cases import ASKED, Case, product, SETTINGS
from speccascade.host.errors import first_line, line_of


class Failed(ValueError):
  """The sampler raised an error."""


def taken(sampler: Callable, drafts: bool) -> frozenset[str]:
  """Return which of the arguments in `ASKED` a sampler takes; refuse a function that cannot be called as one."""
  if not callable(sampler):
    raise ValueError(f'the sampler is {sampler!r}: give a function.')
  names = ('q', 'p', 'rng') if drafts else ('tokens', 'q', 'p', 'rng')
  try:
    signature = inspect.signature(sampler)
  except ValueError:  # of a function in C, which does not tell
    return frozenset()
  given = [name for name in ASKED if name in signature.parameters]
  try:
    signature.bind(*names, **dict.fromkeys(given))
  except TypeError:
    other = 'one that is given its draft' if drafts else 'one that draws its draft itself'
    how = 'without' if drafts else 'with'
    raise ValueError(
      f'the sampler is called with ({", ".join(names)}), and takes {signature}; {other} is checked '
      f'{how} drafts=True, in a command {how} --drafts.'
    ) from None
  return frozenset(given)


@dataclasses.dataclass(frozen=True)
class Call:
  """A sampler in one case."""

  sampler: Callable
  case: Case
  drafts: bool
  takes: Collection[str] = ()
  laws: dict = dataclasses.field(default_factory=dict)  # by what is emitted
  same: dict = dataclasses.field(default_factory=dict)  # equal laws are one array

  @functools.cached_property
  def drafted(self) -> list[tuple[tuple[int, ...], float]]:
    """Each draft of all rows, with its chance."""
    if self.drafts:
      return [((), 1.0)]
    q = self.case.q if self.case.batch else [self.case.q]
    places = [row[i] for row, length in zip(q, self.case.drafted, strict=True) for i in range(length)]
    places = [x for x in places for _ in range(self.case.choices)]
    every = itertools.product(*(np.flatnonzero(x).tolist() for x in places))
    return [(tokens, math.prod(x[t] for x, t in zip(places, tokens, strict=True))) for tokens in every]

  def __call__(self, tokens: Sequence[int], rng: Any) -> np.ndarray:
    """Return the law of the first L tokens given what is emitted: what is missing follows the target."""
    try:
      emitted = self.sampler(*self._given(tokens), rng, **self._settings())
      texts = tuple(map(tuple, self._texts(emitted)))
    except (Exception, SystemExit) as error:  # whatever a function of a user's raises
      if isinstance(error, Refused):
        raise
      raise Failed(f'the sampler fails{_line_of(error)}: {_said(error)}.') from error
    if texts not in self.laws:
      law = product([x for i, tokens in enumerate(texts) for x in self._completed(i, tokens)])
      self.laws[texts] = self.same.setdefault(law.tobytes(), law)
    return self.laws[texts]

  def _given(self, tokens: Sequence[int]) -> list[np.ndarray]:
    """Return the arrays of the case as copies, which the sampler may write into."""
    arrays = [np.array(self.case.q), np.array(self.case.p)]
    if self.drafts:
      return arrays
    choices = self.case.choices
    given = np.zeros((*arrays[0].shape[:-1], choices), int)
    given[self._tested()] = np.reshape(tokens, (-1, choices))
    return [given[..., 0] if choices == 1 else given, *arrays]

  def _tested(self) -> np.ndarray:
    """Return which tokens are drafted: all, but in rows with a shorter draft."""
    places = np.arange(np.shape(self.case.q)[-2])
    tested = places < np.array(self.case.drafted)[:, None]
    return tested if self.case.batch else tested[0]

  def _settings(self) -> dict[str, Any]:
    """Return the settings that the sampler takes, [R] in a batch; a top_k that is off is V."""
    vocab = np.shape(self.case.p)[-1]
    by_row = {name: [getattr(x, name) for x in self.case.setting] for name in SETTINGS}
    by_row['top_k'] = [vocab if k is None else k for k in by_row['top_k']]
    by_row['lengths'] = self.case.drafted
    return {name: np.array(x) if self.case.batch else x[0] for name, x in by_row.items() if name in self.takes}

  def _texts(self, emitted: Any) -> list[list[int]]:
    """Return the tokens of each row."""
    by_row = list(emitted) if self.case.batch else [emitted]
    if len(by_row) != self.case.rows:
      raise Refused(f'the sampler returns {len(by_row)} lists for {self.case.rows} rows.')
    return [self._tokens(i, row) for i, row in enumerate(by_row)]

  def _tokens(self, row: int, emitted: Any) -> list[int]:
    tokens, vocab, drafted = [*_flat(emitted)], np.shape(self.case.p)[-1], self.case.drafted[row]
    whole = all(isinstance(t, numbers.Integral) and not isinstance(t, bool) and 0 <= t < vocab for t in tokens)
    if whole and 1 <= len(tokens) <= drafted + 1:
      return tokens
    raise Refused(f'the sampler emits {tokens!r} for {drafted} drafted of {vocab} tokens: give 1 … K + 1 whole ids.')

  def _completed(self, row: int, tokens: Sequence[int]) -> Iterator[np.ndarray]:
    """Yield the law of each of a row's first L tokens."""
    for i, target in enumerate(self.case.targets[row, : self.case.tokens]):
      yield np.eye(len(target))[tokens[i]] if i < len(tokens) else target


class Refused(ValueError):
  """What a sampler returns is not what a sampler returns."""


def _flat(value: Any) -> Iterator[Any]:
  """Yield what lists and arrays hold, as values of Python."""
  value = value.tolist() if hasattr(value, 'tolist') else value
  if isinstance(value, list | tuple):
    for x in value:
      yield from _flat(x)
  else:
    yield value


def _line_of(error: BaseException) -> str:
  """Return the line of a sampler that led to an error, of its libraries where it is all theirs."""
  found = line_of(error)
  *_, frame = traceback.extract_tb(error.__traceback__)
  return found or ('' if frame.filename == __file__ else f' at {frame.filename}:{frame.lineno}')


def _said(error: BaseException) -> str:
  """Return what an error says."""
  if isinstance(error, SystemExit):
    return f'it ends the program by exit({error.code!r}), which a sampler may not'
  return first_line(error, named=True)
