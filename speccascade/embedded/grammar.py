"""A generated language pair: English captions and their German translations, with p(German | English) known exactly.

An English sentence has one structure, which `parse` finds. Its German is a `Law`: gender, case, agreement and word
order follow from the structure, synonyms, contractions and the place of adverbials are drawn with known weights.
The split of a sentence is a hash of its English, so that splits never share one.
"""

from collections.abc import Iterator
import dataclasses
import functools
import itertools
import random
import zlib

from speccascade.data.examples import Example
from speccascade.embedded import german, law
from speccascade.embedded.english import english, parse
from speccascade.embedded.lexicon import adjectives, adverbs, Entry, nouns, prepositions, verbs
from speccascade.embedded.structure import Clause, LINKS, NounPhrase, Place, Relative, Sentence, Verbal

SPLITS = {'train': range(0, 24), 'validation': range(24, 28), 'test': range(28, 32)}  # of 32 hash values
LENGTHS = range(8, 25)  # English words


def translations(sentence: str) -> law.Law:
  """Return the law of the German translations of an English sentence of this language."""
  return german.sentence(parse(sentence))


def log_prob(sentence: str, translation: str) -> float:
  """Return log p(German | English), -inf for what is no translation; of natural logarithms."""
  return law.log_prob(translations(sentence), translation)


def next_words(sentence: str, prefix: str = '') -> dict[str | None, float]:
  """Return the law of the German word after a prefix, None for the end."""
  return law.next_words(translations(sentence), prefix)


def split_of(sentence: str) -> str:
  """Return the split that an English sentence belongs to."""
  place = zlib.crc32(sentence.encode()) % 32
  return next(name for name, places in SPLITS.items() if place in places)


def sentences(split: str = 'train', seed: int = 0) -> Iterator[tuple[str, law.Law]]:
  """Yield English sentences of a split without end, each with the law of its translations."""
  if split not in SPLITS:
    raise ValueError(f'split {split!r}: choose from {", ".join(SPLITS)}')
  rng = random.Random(f'{split} {seed}')
  while True:
    structure = _sentence(rng)
    text = english(structure)
    if split_of(text) == split and len(law.words_of(text)) in LENGTHS and _unambiguous(text, structure):
      yield text, german.sentence(structure)


def pairs(split: str = 'train', seed: int = 0) -> Iterator[tuple[str, str]]:
  """Yield English sentences and a drawn translation of each, without end."""
  rng = random.Random(f'{split} {seed} translations')
  for text, target in sentences(split, seed):
    yield text, law.text_of(law.sample(target, rng))


@functools.lru_cache(maxsize=8)
def examples(split: str = 'validation', count: int = 500, seed: int = 0) -> tuple[Example, ...]:
  """Return the first `count` different sentences of a split, each with one drawn translation."""
  if count < 1:
    raise ValueError(f'count={count} is not a whole number of at least 1')
  found = {}
  for text, translation in pairs(split, seed):
    found.setdefault(text, translation)
    if len(found) == count:
      return tuple(Example(i, text, target) for i, (text, target) in enumerate(found.items()))


def _unambiguous(text: str, structure: Sentence) -> bool:
  """Tell whether a text is read as it was meant: a relative clause takes all that can belong to it."""
  try:
    return parse(text) == structure
  except ValueError:
    return False


@functools.cache
def _by_kind(words, kinds: tuple[str, ...]) -> list[Entry]:
  return [word for word in words() if set(word.kinds) & set(kinds)]


@functools.cache
def _by_category(words, categories: tuple[str, ...]) -> list[Entry]:
  return [word for word in words() if word.category in categories]


def _sentence(rng: random.Random) -> Sentence:
  main = _clause(rng)
  if rng.random() < 0.7:
    return Sentence(main)
  link, first = rng.choice(list(LINKS)), rng.random() < 0.25
  return Sentence(main, link, _clause(rng, short=True), first)


def _clause(rng: random.Random, short: bool = False) -> Clause:
  subject = _noun_phrase(rng, ('person',) * 3 + ('animal',), tail=0.2 if short else 0.5)
  second = None if short or rng.random() < 0.85 else _verbal(rng, short=True)
  when = rng.choice(_by_category(adverbs, ('when',))) if not short and rng.random() < 0.3 else None
  return Clause(subject, _verbal(rng, short), second, when, when is not None and rng.random() < 0.5)


def _verbal(rng: random.Random, short: bool = False, frames: tuple[str, ...] = ()) -> Verbal:
  frame = rng.choice(frames or ('at', 'at', 'to', 'what', 'what', 'what', 'whom', 'put'))
  verb = rng.choice(_by_category(verbs, (frame,)))
  modal = rng.choice(('can', 'must', 'want to', 'try to')) if rng.random() < 0.2 else ''
  noun = _noun_phrase(rng, verb.kinds, tail=0 if short else 0.25) if frame in ('what', 'whom', 'put') else None
  likely = {'at': 0.6, 'to': 1, 'put': 1}.get(frame, 0.2)
  place = _place(rng, frame) if rng.random() < likely else None
  how = rng.choice(_by_category(adverbs, ('how',))) if rng.random() < 0.15 else None
  return Verbal(verb, modal, noun, place, how)


def _place(rng: random.Random, frame: str) -> Place:
  moves = frame in ('to', 'put')
  allowed = ('both', 'both', 'to-acc', 'to-dat') if moves else ('both', 'both', 'at-dat')
  preposition = rng.choice(_by_category(prepositions, (rng.choice(allowed),)))
  return Place(preposition, _noun_phrase(rng, preposition.kinds, tail=0), moves)


def _noun_phrase(rng: random.Random, kinds: tuple[str, ...], tail: float) -> NounPhrase:
  """Return a phrase about a noun of one of the kinds, followed with probability `tail` by more about it."""
  noun = rng.choice(_by_kind(nouns, (rng.choice(kinds),)))
  plural = rng.random() < 0.25
  options = ('the', 'these', 'two', 'three', 'several') if plural else ('the', 'the', 'a', 'a', 'a', 'this')
  determiner = rng.choice(options + ('his', 'her', 'their') if rng.random() < 0.2 else options)
  fits = {'person': 'living', 'animal': 'living'}.get(noun.category)
  fits = fits or ('site' if noun.category in ('inside', 'surface', 'landmark') else 'object')
  count = rng.choices((0, 1, 2), (55, 38, 7))[0]
  chosen = rng.sample(_by_category(adjectives, ('any', fits)), count)
  attribute = relative = None
  if rng.random() < tail:
    if rng.random() < 0.4:
      attribute = (rng.choice(('with', 'with', 'without')), _noun_phrase(rng, ('clothes', 'thing'), tail=0))
    else:
      relative = _relative(rng)
  return NounPhrase(noun, plural, determiner, tuple(chosen), attribute, relative)


def _relative(rng: random.Random) -> Relative:
  if rng.random() < 0.75:
    return Relative(None, _verbal(rng, short=True))
  verbal = dataclasses.replace(_verbal(rng, short=True, frames=('what', 'whom')), object=None, place=None)
  return Relative(_noun_phrase(rng, ('person',), tail=0), verbal)


def take(split: str, count: int, seed: int = 0) -> list[tuple[str, str]]:
  """Return the first `count` pairs of a split."""
  return list(itertools.islice(pairs(split, seed), count))
