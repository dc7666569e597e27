"""Check anyone's speculative sampler: does what it emits follow the verifier's distribution?

The sampler is a function of small, given distributions. Where it asks its `rng` for nothing but uniform numbers, all of
them are tried, and its law is computed; else it is run many times, and an anytime-valid test bets against it
(Waudby-Smith and Ramdas 2024): the chance that a right sampler is ever refused is `FALSE_ALARM`.

Axis letters: K drafted tokens, V vocabulary, L tokens whose joint law is compared.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import inspect
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from speccascade.types import checked_int

FALSE_ALARM = 1e-6
SHIFTS = tuple(sign * x for x in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2) for sign in (1, -1))
RNGS = ('generator', 'jax', 'torch')
_CALLS = 300_000  # of an enumeration
_ROUNDING = 1e-6
_ENDS = 0.01, 0.99  # of a cell: where chances are multiples of one, its ends give what its middle gives
_TOGETHER = 100  # runs between two looks at the evidence


@dataclasses.dataclass(frozen=True)
class Case:
  """What a sampler is given: its verifier's distributions p [K + 1, V] and its drafter's q [K, V], in `rows` rows."""

  p: np.ndarray
  q: np.ndarray
  tokens: int  # L
  rows: int = 1

  @property
  def cells(self) -> int:
    """Into how many cells each uniform number is divided: chances of `cases` are multiples of one."""
    if self.rows > 1:
      return 12
    return 60 if self.p.shape[1] > 2 else 30

  @property
  def law(self) -> np.ndarray:
    """The law of the first L tokens of all rows, [V] * (rows · L)."""
    return _product([self.p[i] for _ in range(self.rows) for i in range(self.tokens)])

  def __str__(self):
    texts = [f'{name} = {" then ".join(map(_numbers, x))}' for name, x in (('p', self.p[: self.tokens]), ('q', self.q))]
    return ', '.join(texts) + (f', {self.rows} rows' if self.rows > 1 else '')


@dataclasses.dataclass(frozen=True)
class SamplerReport:
  """Whether a sampler is right.

  Attributes:
    ok: Whether no case shows a bias.
    text: A sentence; of a wrong sampler with its smallest counter-example.
    distance: The total variation distance of what it emits there; 0 where it is right.
  """

  ok: bool
  text: str
  distance: float = 0.0

  def __str__(self):
    return self.text


def cases(rows: int = 1) -> Iterator[Case]:
  """Yield cases from small to large: two tokens, three, the token after the draft, a draft of two."""
  two = [(0.6, 0.4), (0.9, 0.1)], [(0.2, 0.8), (0.4, 0.6)], [(0.3, 0.7), (0.3, 0.7)], [(1.0, 0.0), (0.5, 0.5)]
  three = [(0.2, 0.4, 0.4), (0.6, 0.3, 0.1)], [(0.5, 0.5, 0.0), (0.5, 0.0, 0.5)]
  after = (0.1, 0.9)

  def make(p, q, tokens):
    return Case(np.array(p), np.array(q), tokens, rows)

  yield from (make([p, p], [q], 1) for p, q in two)
  if rows > 1:
    return
  yield from (make([p, p], [q], 1) for p, q in three)
  yield from (make([p, after], [q], 2) for p, q in two)
  yield from (make([p, p, after], [q, q], 2) for p, q in (two[0], two[2]))


def check_sampler(
  sampler: Callable,
  *,
  rng: str = 'generator',
  drafts: bool = False,
  rows: int = 1,
  runs: int = 20_000,
  given: Sequence[Case] | None = None,
) -> SamplerReport:
  """Check a function that verifies drafted tokens.

  Args:
    sampler: `sampler(tokens [K], q [K, V], p [K + 1, V], rng)` returns the tokens that it emits, 1 to K + 1 of them:
      those that it accepts and one more.
    rng: What `rng` is: 'generator', a numpy Generator, which is enumerated if only its `random` is asked; 'jax', a key;
      'torch', a Generator.
    drafts: Whether the sampler draws the draft itself: `sampler(q, p, rng)`.
    rows: Of a batch: `sampler(tokens [rows, K], q [rows, K, V], p [rows, K + 1, V], rng)` returns a list for each row.
    runs: How often it is run for each case where it cannot be enumerated.
    given: The cases; None for those of `cases`.

  Returns:
    A report, whose text has the smallest counter-example.

  Raises:
    ValueError: If an argument is invalid, or the sampler emits what is no token.

  Example:
    >>> def verify(tokens, q, p, rng):
    ...   x = tokens[0]
    ...   if rng.random() < min(1, p[0, x] / q[0, x]):
    ...     return [x]
    ...   return [int(p[0].argmax())]
    >>> print(check_sampler(verify))
    p = (.6, .4), q = (.9, .1): emits (.9, .1), total variation .3
  """
  if rng not in RNGS:
    raise ValueError(f'rng={rng!r} is none of {", ".join(RNGS)}.')
  checked_int('rows', rows)
  checked_int('runs', runs)
  _check_arguments(sampler, drafts)
  enumerated = 0
  every = [*cases(rows)] if given is None else given
  for case in every:
    call = _Call(sampler, case, drafts)
    law = _enumerated(call) if rng == 'generator' else None
    enumerated += law is not None
    found = _sampled(call, _maker(rng), runs) if law is None else _compared(case, law)
    if found is not None:
      return found
  how = f'{enumerated} enumerated' + ('' if enumerated == len(every) else f', the others run {runs} times')
  return SamplerReport(True, f"emits the verifier's distribution in {len(every)} cases, {how}")


def _check_arguments(sampler: Callable, drafts: bool):
  """Refuse a function that cannot be called as a sampler is."""
  names = ('q', 'p', 'rng') if drafts else ('tokens', 'q', 'p', 'rng')
  try:
    signature = inspect.signature(sampler)
  except ValueError:  # of a function in C, which does not tell
    return
  try:
    signature.bind(*names)
  except TypeError:
    other = 'one that is given its draft' if drafts else 'one that draws its draft itself'
    how = 'without' if drafts else 'with'
    raise ValueError(
      f'the sampler is called with ({", ".join(names)}), and takes {signature}; {other} is checked '
      f'{how} drafts=True, in a command {how} --drafts.'
    ) from None


# ---- one call ----


@dataclasses.dataclass(frozen=True)
class _Call:
  """A sampler in one case."""

  sampler: Callable
  case: Case
  drafts: bool
  laws: dict = dataclasses.field(default_factory=dict)  # by what is emitted

  def drafted(self) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield each draft of all rows with its chance."""
    if self.drafts:
      yield (), 1.0
      return
    q = [self.case.q[i] for _ in range(self.case.rows) for i in range(len(self.case.q))]
    for tokens in itertools.product(range(self.case.p.shape[1]), repeat=len(q)):
      chance = math.prod(x[t] for x, t in zip(q, tokens, strict=True))
      if chance:
        yield tokens, chance

  def __call__(self, tokens: Sequence[int], rng: Any) -> np.ndarray:
    """Return the law of the first L tokens given what is emitted: what is missing follows p."""
    p, q = self.case.p, self.case.q
    rows = self.case.rows
    if rows > 1:
      p, q = (np.stack([x] * rows) for x in (p, q))
    given = () if self.drafts else (np.array(tokens, int).reshape((rows, -1) if rows > 1 else -1),)
    emitted = self.sampler(*given, q, p, rng)
    by_row = emitted if rows > 1 else [emitted]
    if len(by_row) != rows:
      raise ValueError(f'the sampler returns {len(by_row)} lists for {rows} rows.')
    texts = tuple(tuple(map(int, np.asarray(row).reshape(-1))) for row in by_row)
    if texts not in self.laws:
      self.laws[texts] = _product([x for tokens in texts for x in self._completed(tokens)])
    return self.laws[texts]

  def _completed(self, tokens: Sequence[int]) -> list[np.ndarray]:
    """Return the law of each of a row's first L tokens."""
    vocab = self.case.p.shape[1]
    if not 1 <= len(tokens) <= len(self.case.p) or not all(0 <= t < vocab for t in tokens):
      raise ValueError(
        f'the sampler emits {[*tokens]} for {len(self.case.q)} drafted of {vocab} tokens: give 1 … K + 1 ids.'
      )
    return [np.eye(vocab)[tokens[i]] if i < len(tokens) else self.case.p[i] for i in range(self.case.tokens)]


def _product(distributions: Sequence[np.ndarray]) -> np.ndarray:
  law = np.ones(())
  for x in distributions:
    law = law[..., None] * x
  return law


# ---- enumeration ----


class _Exhausted(BaseException):
  """More uniform numbers are asked for than there are; no code of a user's catches it by `except Exception`."""


class _Fed:
  """An rng whose uniform numbers are given."""

  def __init__(self, values: Sequence[float]):
    self.values = values
    self.used = 0

  def random(self, size: Any = None, *_, **__) -> Any:
    """Return the next numbers."""
    count = 1 if size is None else int(np.prod(size))
    if self.used + count > len(self.values):
      raise _Exhausted
    taken = self.values[self.used : self.used + count]
    self.used += count
    return taken[0] if size is None else np.reshape(taken, size)


def _enumerated(call: _Call) -> np.ndarray | None:
  """Return the law of the first L tokens, None where it cannot be enumerated."""

  def law(place):
    return sum(chance * _over_numbers(call, tokens, place) for tokens, chance in call.drafted())

  try:
    found = law(0.5)
    if _far(found, call.case.law) and any(_far(found, law(end)) for end in _ENDS):
      return None  # its chances are no multiples of a cell
  except (AttributeError, OverflowError):  # it asks for other numbers than uniform ones, or for too many
    return None
  return found


def _far(a: np.ndarray, b: np.ndarray) -> bool:
  return 0.5 * abs(a - b).sum() > _ROUNDING


def _over_numbers(call: _Call, tokens: tuple[int, ...], place: float) -> np.ndarray:
  """Return the mean over all uniform numbers, each at that place of one of the case's cells."""
  left, cells = [_CALLS], call.case.cells
  numbers = [(i + place) / cells for i in range(cells)]

  def mean(values: list[float]) -> np.ndarray:
    left[0] -= 1
    if left[0] < 0:
      raise OverflowError
    try:
      return call(tokens, _Fed(values))
    except _Exhausted:
      return sum(mean([*values, u]) for u in numbers) / cells

  return mean([])


def _compared(case: Case, law: np.ndarray) -> SamplerReport | None:
  """Return what an enumerated law shows, None if it is right."""
  return _wrong(case, law, 0.5 * abs(law - case.law).sum(), '') if _far(law, case.law) else None


def _wrong(case: Case, law: np.ndarray, distance: float, how: str) -> SamplerReport:
  what = ('rows ' if case.rows > 1 else 'pairs ' if case.tokens > 1 else '') + _numbers(law.reshape(-1))
  return SamplerReport(False, f'{case}: emits {what}, total variation {_number(distance)}{how}', float(distance))


def _numbers(values: Iterable[float]) -> str:
  return f'({", ".join(map(_number, values))})'


def _number(value: float) -> str:
  text = f'{value:.3f}'.rstrip('0').rstrip('.')
  return text.removeprefix('0') if text.startswith('0.') else text


# ---- runs, and a bet against them ----


class Bet:
  """Evidence against "each outcome follows its distribution", valid whenever one stops.

  The mean, over sets A of outcomes and shifts δ, of the product of P(z | π(A) + δ) / P(z | π(A)), z whether an outcome
  is in A. Its expectation is 1 under the claim, so that it exceeds 1 / ε with a chance of at most ε.
  """

  def __init__(self, sets: int):
    self.logs = np.zeros((sets, len(SHIFTS)))

  def add(self, inside: np.ndarray, chance: np.ndarray):
    """Add outcomes: whether each was in each set [N, sets], and how likely that was [N, sets] or [sets]."""
    chance = np.broadcast_to(np.asarray(chance, np.float64), inside.shape)[..., None]
    shifted = np.clip(chance + np.array(SHIFTS), 1e-3, 1 - 1e-3)
    settled = (chance <= 0) | (chance >= 1)  # nothing to bet on; what cannot be refutes at once
    with np.errstate(divide='ignore'):
      ratio = np.where(inside[..., None], np.log(shifted / chance), np.log((1 - shifted) / (1 - chance)))
    impossible = np.where(inside[..., None], chance <= 0, chance >= 1)
    self.logs += np.where(impossible, np.inf, np.where(settled, 0, ratio)).sum(0)

  @property
  def evidence(self) -> float:
    """The logarithm of the evidence."""
    top = self.logs.max()
    return float(top if np.isinf(top) else top + np.log(np.mean(np.exp(self.logs - top))))

  @property
  def refuted(self) -> bool:
    """Whether the claim is refuted at `FALSE_ALARM`."""
    return self.evidence > -math.log(FALSE_ALARM)


def _sampled(call: _Call, make: Callable[[int], Any], runs: int) -> SamplerReport | None:
  """Run a sampler; return what refutes it, None if nothing does."""
  case = call.case
  law = case.law.reshape(-1)
  drafts, chances = zip(*call.drafted(), strict=True)
  random = np.random.default_rng(0)
  which = random.choice(len(drafts), runs, p=np.array(chances) / sum(chances))
  last = random.random(runs)  # what the sampler left open follows p
  bet = Bet(law.size)
  counts = np.zeros(law.size)
  for start in range(0, runs, _TOGETHER):
    some = range(start, min(start + _TOGETHER, runs))
    given = np.stack([call(drafts[which[i]], make(i)).reshape(-1) for i in some])
    outcomes = np.argmax(given.cumsum(1) > last[some.start : some.stop, None], 1)
    counts += np.bincount(outcomes, minlength=law.size)
    bet.add(outcomes[:, None] == np.arange(law.size), law)
    if bet.refuted:
      found = counts / counts.sum()
      how = f" in {some.stop} runs, whose chance under the verifier's is below {FALSE_ALARM:g}"
      return _wrong(case, found.reshape(case.law.shape), 0.5 * abs(found - law).sum(), how)
  return None


def _maker(rng: str) -> Callable[[int], Any]:
  """Return what makes the rng of the n-th run."""
  if rng == 'jax':
    import jax

    return lambda n: jax.random.fold_in(jax.random.key(0), n)
  if rng == 'torch':
    import torch

    return lambda n: torch.Generator().manual_seed(n)
  return lambda n: np.random.default_rng(n)


# ---- samples of a server ----


def check_samples(samples: Iterable[Mapping[str, Any]]) -> SamplerReport:
  """Check tokens against the log-probabilities that a server gives with them.

  Args:
    samples: Objects with `token`, an id or text, and `top_logprobs`, {token: log-probability} of the likeliest tokens
      of the distribution that was sampled from, after temperature and filters.

  Returns:
    A report.

  Example:
    >>> print(check_samples([{'token': 'a', 'top_logprobs': {'a': -0.7, 'b': -0.7}}] * 200).ok)
    False
  """
  bet = Bet(4)
  count = 0
  for count, sample in enumerate(samples, 1):
    likely = sorted(sample['top_logprobs'].items(), key=lambda item: -item[1])
    chances = np.exp([x for _, x in likely])
    if chances.sum() > 1 + 1e-3:
      raise ValueError(
        f'sample {count - 1}: top_logprobs sum to {chances.sum():.4g}, more than 1; give log-probabilities.'
      )
    names = [str(token) for token, _ in likely]
    place = names.index(str(sample['token'])) if str(sample['token']) in names else len(names)
    rest = max(0.0, 1 - chances.sum())
    rest = rest if rest > 1e-4 else 0.0
    members = [[0], [0, 1], [*range(0, len(names), 2)], [len(names)]]
    whole = np.append(chances, rest) / (chances.sum() + rest)
    inside = np.array([[place in set_ for set_ in members]])
    bet.add(inside, np.array([min(1.0, whole[[i for i in set_ if i < whole.size]].sum()) for set_ in members]))
    if bet.refuted:
      text = f'after {count} samples: their chance under the log-probabilities is below {FALSE_ALARM:g}'
      return SamplerReport(False, text, float('nan'))
  if not count:
    raise ValueError('there are no samples.')
  return SamplerReport(True, f'{count} samples show no other distribution than their log-probabilities')


def read_samples(path: Path) -> Iterator[dict]:
  """Yield the objects of a file of JSON lines, as `check_samples` takes them."""
  with open(path, encoding='utf-8') as file:
    for number, line in enumerate(file, 1):
      try:
        sample = json.loads(line)
        assert isinstance(sample['top_logprobs'], dict) and 'token' in sample
      except (ValueError, KeyError, TypeError, AssertionError):
        raise ValueError(
          f'{path}, line {number}: not an object {{"token": …, "top_logprobs": {{TOKEN: LOGPROB}}}}.'
        ) from None
      yield sample
