"""Check the tokens of a server against the log-probabilities that come with them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import json
import math
import numbers
from pathlib import Path
from typing import Any

import numpy as np

from speccascade.check.sampler.cases import number
from speccascade.check.sampler.evidence import Bet, FALSE_ALARM, SHIFTS
from speccascade.check.sampler.judge import SamplerReport

POWERS = tuple(1 / t for t in (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5, 2.0))
TOP_P = 0.5, 0.7, 0.8, 0.9, 0.95, 0.98
TOP_K = 1, 2, 3, 5, 10, 20, 40
_SETS = (
  'the likeliest token',
  'one of the two likeliest tokens',
  'a token of odd rank',
  'a token that is not listed',
  'a token of probability 0',
)
_KEPT = 0.95  # the share of an alternative law in a bet on it, the rest being what is claimed
_ROUNDED = 1e-4  # what tokens may have that are not listed, though those listed sum to 1: log-probabilities are rounded
_FORM = '{"token": …, "top_logprobs": {TOKEN: LOGPROB}}'


@dataclasses.dataclass(frozen=True)
class Sample:
  """A token, and the likeliest tokens of the distribution that it is said to follow.

  Attributes:
    place: The token's place among them, `len(chances)` where it is not listed.
    chances: Their probabilities, the likeliest first.
    where: Where it was read, for errors.
  """

  place: int
  chances: np.ndarray
  where: str

  @property
  def last(self) -> bool:
    """Whether the token is the least likely of those listed."""
    return self.place == len(self.chances) - 1

  def cut(self, count: int) -> 'Sample':
    """Return the sample with so many listed."""
    return Sample(min(self.place, count), self.chances[:count], self.where)

  @property
  def whole(self) -> np.ndarray:
    """The probabilities, that of all other tokens together as the last one; they sum to 1."""
    every = np.append(self.chances, max(_ROUNDED, 1 - self.chances.sum()))
    return every / every.sum()


def check_samples(samples: Iterable[Mapping[str, Any]]) -> SamplerReport:
  """Check tokens against the log-probabilities that a server gives with them.

  The bets are on a temperature, a top-p or a top-k that is not in the log-probabilities, and on tokens that come too
  often or too rarely; a report of a wrong server names the one that won most.

  Args:
    samples: Objects with `token`, an id or text, and `top_logprobs`, {token: log-probability} of the likeliest tokens
      of the distribution that was sampled from, after temperature and filters; or responses of a chat in OpenAI's form,
      with `choices[].logprobs.content[]`.

  Returns:
    A report.

  Raises:
    ValueError: A value is none of these, or there are no samples.

  Example:
    >>> print(check_samples([{'token': 'a', 'top_logprobs': {'a': -0.7, 'b': -0.7}}] * 200))
    after 28 samples: their chance under the log-probabilities is below 1e-06; they follow a top-k of 1 that is missing
    in the log-probabilities
  """
  return _checked([x for i, sample in enumerate(samples) for x in _samples(sample, f'sample {i}')])


def check_file(path: Path) -> SamplerReport:
  """Check the samples of a file of JSON lines, as `check_samples` takes them."""
  return _checked([x for where, sample in _lines(path) for x in _samples(sample, where)])


def _checked(samples: Sequence[Sample]) -> SamplerReport:
  if not samples:
    raise ValueError('there are no samples: give at least one, of {"token": …, "top_logprobs": {TOKEN: LOGPROB}}.')
  bet = Bet(len(_SETS), len(_LAWS))
  for count, sample in enumerate(_without_appended(samples), 1):
    _add(bet, sample)
    if bet.refuted:
      why = f'after {count} samples: their chance under the log-probabilities is below {FALSE_ALARM:g}'
      return SamplerReport(False, f'{why}; {_won(bet)}', float('nan'))
  return SamplerReport(True, f'{len(samples)} samples show no other distribution than their log-probabilities')


def _without_appended(samples: Sequence[Sample]) -> Sequence[Sample]:
  """Return samples without what a server lists because it was drawn: a list may not depend on that."""
  fewest, most = (f(len(x.chances) for x in samples) for f in (min, max))
  appended = most == fewest + 1 and all(x.last for x in samples if len(x.chances) == most)
  return [x.cut(fewest) for x in samples] if appended else samples


# ---- the bets ----


def _power(whole: np.ndarray, a: float) -> np.ndarray:
  """Return p^a, where tokens that are not listed count as many as there are if each is like the last listed one."""
  listed, rest = whole[:-1], whole[-1]
  least = listed[listed > 0].min(initial=1.0)
  return np.append(np.where(listed > 0, listed, 0) ** a, rest * least ** (a - 1))


def _top_p(whole: np.ndarray, p: float) -> np.ndarray:
  return np.where(np.cumsum(whole) - whole < p, whole, 0)


def _top_k(whole: np.ndarray, k: int) -> np.ndarray:
  return np.where(np.arange(whole.size) < k, whole, 0)


_MISSING = 'that is missing in the log-probabilities'
_LAWS = (
  *((_power, a, f'they follow p^{number(a, 2)}, by a temperature of {number(1 / a, 2)} {_MISSING}') for a in POWERS),
  *((_top_p, p, f'they follow a top-p of {number(p)} {_MISSING}') for p in TOP_P),
  *((_top_k, k, f'they follow a top-k of {k} {_MISSING}') for k in TOP_K),
)


def _add(bet: Bet, sample: Sample):
  """Let all bets see a sample."""
  whole, place = sample.whole, sample.place
  members = [[0], [0, 1], [*range(0, whole.size - 1, 2)], [whole.size - 1]]
  members.append(np.flatnonzero(whole == 0).tolist())
  inside = np.array([[place in of for of in members]])
  chance = np.array([min(1.0, whole[of].sum()) for of in members])
  bet.add(inside, chance, [_ratio(law(whole, x), whole, place) for law, x, _ in _LAWS])


def _ratio(weights: np.ndarray, whole: np.ndarray, place: int) -> float:
  """Return how much likelier a token is under a law, mixed with what is claimed."""
  if not whole[place]:
    return 1.0  # the set of such tokens refutes that
  return _KEPT * float(weights[place] / weights.sum() / whole[place]) + 1 - _KEPT


def _won(bet: Bet) -> str:
  """Return what the bet says that won most."""
  best, shifts = int(np.argmax(bet.every)), len(SHIFTS)
  if best >= bet.logs.size:
    return _LAWS[best - bet.logs.size][2]
  more = 'often' if SHIFTS[best % shifts] > 0 else 'rarely'
  return f'{_SETS[best // shifts]} comes too {more}'


# ---- what is read ----


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
  """Yield where each object of a file is, and the object."""
  with open(path, encoding='utf-8', errors='surrogateescape') as file:
    for i, line in enumerate(file, 1):
      if line.strip():
        where = f'{path}, line {i}'
        try:
          yield where, json.loads(line)
        except (ValueError, RecursionError):
          raise ValueError(
            f'{where}: no JSON; give {_FORM}, or a response in the form of OpenAI, a line each.'
          ) from None


def _samples(given: Any, where: str) -> Iterator[Sample]:
  """Yield the samples of an object: one, or those of a response."""
  if isinstance(given, Mapping) and 'choices' in given:
    yield from _of_response(given, where)
  elif isinstance(given, Mapping) and 'token' in given and isinstance(given.get('top_logprobs'), Mapping):
    listed = [_entry(str(token), x, f'{where}: top_logprobs[{token!r}]') for token, x in given['top_logprobs'].items()]
    yield _sample(_name(given['token'], where), None, listed, where)
  else:
    raise ValueError(f'{where}: neither {_FORM} nor a response with choices[].logprobs.content[].')


def _of_response(response: Mapping[str, Any], where: str) -> Iterator[Sample]:
  """Yield the samples of a response in OpenAI's form."""
  try:
    content = [[_pairs(token) for token in choice['logprobs']['content']] for choice in response['choices']]
  except (KeyError, TypeError, IndexError):
    raise ValueError(
      f'{where}: choices[].logprobs.content[] has no tokens with top_logprobs: ask for logprobs=true, top_logprobs=20.'
    ) from None
  for c, tokens in enumerate(content):
    for i, pairs in enumerate(tokens):
      at = f'{where}: choices[{c}].logprobs.content[{i}]'
      (token, own), *listed = [_entry(*pair, f'{at}{name}') for name, pair in pairs]
      yield _sample(token, own, listed, at)


def _pairs(token: Mapping[str, Any]) -> list[tuple[str, tuple[Any, Any]]]:
  """Return where each log-probability of an entry is, the token's own first, with the token."""
  listed = [(f'.top_logprobs[{i}].logprob', (x['token'], x['logprob'])) for i, x in enumerate(token['top_logprobs'])]
  return [('.logprob', (token['token'], token['logprob'])), *listed]


def _name(token: Any, where: str) -> str:
  if isinstance(token, bool) or not isinstance(token, str | numbers.Integral):
    raise ValueError(f'{where}: the token {token!r} is neither an id nor a text.')
  return str(token)


def _entry(token: Any, logprob: Any, where: str) -> tuple[str, float]:
  """Return a token and its log-probability."""
  if isinstance(logprob, bool) or not isinstance(logprob, numbers.Real) or not logprob <= 1e-6:
    raise ValueError(f'{where} = {logprob!r} is no log-probability: give a number of at most 0.')
  return _name(token, where), float(max(logprob, -1e4))


def _sample(token: str, own: float | None, listed: Sequence[tuple[str, float]], where: str) -> Sample:
  """Return a sample; of several listed tokens of one text it is the one whose log-probability is its own."""
  likely = sorted(listed, key=lambda item: -item[1])
  chances = np.exp([x for _, x in likely])
  if not likely:
    raise ValueError(f'{where}: top_logprobs lists no token; ask for some.')
  if chances.sum() > 1 + 1e-3:
    raise ValueError(f'{where}: top_logprobs sum to {chances.sum():.4g}, more than 1; give log-probabilities.')
  own = None if own is None else math.exp(own)
  at = [i for i, (name, _) in enumerate(likely) if name == token and (own is None or abs(chances[i] - own) < _ROUNDED)]
  return Sample(at[0] if at else len(likely), chances, where)
