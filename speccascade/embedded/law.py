"""Laws over texts that are known in closed form: trees of words, sequences and weighted choices.

A law is a word, a list of laws (one after the other) or a `Choice` (one of several). Different choices may give the
same text: `log_prob` and `next_words` sum over all of them.
"""

from collections import defaultdict
from collections.abc import Sequence
import dataclasses
import math
import random
import re
from typing import Union


@dataclasses.dataclass(frozen=True)
class Choice:
  """One of several laws, with their weights."""

  options: tuple[tuple[float, 'Law'], ...]

  @property
  def total(self) -> float:
    return sum(weight for weight, _ in self.options)


Law = Union[str, list, Choice]  # noqa: UP007  # `str | list | Choice` cannot be written before Law is defined
_WORDS = re.compile(r'[^\s,.]+|[,.]')


def one_of(*options: tuple[float, Law]) -> Law:
  """Return a choice, or the only option itself."""
  return options[0][1] if len(options) == 1 else Choice(options)


def words_of(text: str) -> list[str]:
  """Return the words and punctuation marks of a text."""
  return _WORDS.findall(text)


def text_of(words: Sequence[str]) -> str:
  """Return the text of words: marks stand directly after a word, and the first letter is a capital."""
  text = ' '.join(words).replace(' ,', ',').replace(' .', '.')
  return text[:1].upper() + text[1:]


def sample(law: Law, rng: random.Random) -> list[str]:
  """Return the words of a draw."""
  if isinstance(law, str):
    return law.split()
  if isinstance(law, list):
    return [word for part in law for word in sample(part, rng)]
  weights = [weight for weight, _ in law.options]
  return sample(rng.choices(law.options, weights)[0][1], rng)


def most_likely(law: Law) -> tuple[float, list[str]]:
  """Return the most likely choices: their log-probability and words."""
  if isinstance(law, str):
    return 0.0, law.split()
  if isinstance(law, list):
    parts = [most_likely(part) for part in law]
    return sum(p for p, _ in parts), [word for _, words in parts for word in words]
  total = law.total
  best = (most_likely(option) for _, option in law.options)
  return max((p + math.log(w / total), words) for (p, words), (w, _) in zip(best, law.options, strict=True))


def log_prob(law: Law, text: str) -> float:
  """Return the log-probability of a text, -inf where the law cannot give it."""
  words = words_of(text)
  p = _advance(law, words, {0: 1.0}, None).get(len(words), 0.0)
  return math.log(p) if p else -math.inf


def next_words(law: Law, prefix: str) -> dict[str | None, float]:
  """Return the law of the word after a prefix, None for the end; empty where the prefix cannot come about."""
  words, following = words_of(prefix), defaultdict(float)
  end = _advance(law, words, {0: 1.0}, following).get(len(words), 0.0)
  mass = {**following} | ({None: end} if end else {})
  total = sum(mass.values())
  return {word: p / total for word, p in mass.items()}


def _advance(law: Law, words: list[str], at: dict[int, float], following: dict | None) -> dict[int, float]:
  """Return where in the words each start leads to, with probabilities; what would come next goes to `following`."""
  if isinstance(law, list):
    for part in law:
      at = _advance(part, words, at, following)
    return at
  reached = defaultdict(float)
  if isinstance(law, Choice):
    for weight, option in law.options:
      share = {i: p * weight / law.total for i, p in at.items()}
      for i, p in _advance(option, words, share, following).items():
        reached[i] += p
    return reached
  for i, p in at.items():
    parts = law.split()
    for n, part in enumerate(parts):
      part = part if i + n else text_of([part])
      if i + n >= len(words):
        if following is not None:
          following[part] += p
        break
      if words[i + n] != part:
        break
    else:
      reached[i + len(parts)] += p
  return reached
