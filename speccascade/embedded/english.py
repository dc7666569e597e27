"""English of the generated language: structures into text, and back."""

import functools

from speccascade.embedded import lexicon
from speccascade.embedded.law import text_of, words_of
from speccascade.embedded.lexicon import Entry
from speccascade.embedded.structure import Clause, LINKS, NounPhrase, Place, Relative, Sentence, Verbal

_SINGULAR = ('the', 'a', 'an', 'this', 'his', 'her', 'their')
_PLURAL = ('the', 'these', 'two', 'three', 'several', 'his', 'her', 'their')
_MODALS = {'can': 'can', 'must': 'must', 'wants to': 'want to', 'tries to': 'try to'}  # third person: base


def english(sentence: Sentence) -> str:
  """Return a structure as English text."""
  main = _clause(sentence.main)
  if sentence.subordinate is None:
    return text_of([*main, '.'])
  subordinate = [sentence.link, *_clause(sentence.subordinate)]
  words = [*subordinate, ',', *main] if sentence.subordinate_first else [*main, *subordinate]
  return text_of([*words, '.'])


def _clause(clause: Clause) -> list[str]:
  words = [*_noun_phrase(clause.subject), *_verbal(clause.verbal, clause.subject.plural)]
  if clause.second:
    words += ['and', *_verbal(clause.second, clause.subject.plural)]
  if clause.when:
    words = [clause.when.key, *words] if clause.when_first else [*words, clause.when.key]
  return words


def _noun_phrase(phrase: NounPhrase) -> list[str]:
  rest = [*(a.key for a in phrase.adjectives), phrase.noun.forms[phrase.plural]]
  determiner = 'an' if phrase.determiner == 'a' and rest[0][0] in 'aeiou' else phrase.determiner
  words = [determiner, *rest]
  if phrase.attribute:
    words += [phrase.attribute[0], *_noun_phrase(phrase.attribute[1])]
  if phrase.relative:
    subject, verbal = phrase.relative.subject, phrase.relative.verbal
    words.append(_pronoun(phrase.noun))
    words += _noun_phrase(subject) if subject else []
    words += _verbal(verbal, subject.plural if subject else phrase.plural)
  return words


def _pronoun(noun: Entry) -> str:
  return 'who' if noun.category == 'person' else 'that'


def _verbal(verbal: Verbal, plural: bool) -> list[str]:
  participle, base = verbal.verb.forms
  if verbal.modal:
    third = next(third for third, modal in _MODALS.items() if modal == verbal.modal)
    words = [verbal.modal if plural else third, base]
  else:
    words = ['are' if plural else 'is', participle]
  words += _noun_phrase(verbal.object) if verbal.object else []
  words += [verbal.place.preposition.key, *_noun_phrase(verbal.place.phrase)] if verbal.place else []
  return words + ([verbal.how.key] if verbal.how else [])


@functools.cache
def _tables() -> dict[str, dict[str, Entry]]:
  """Return the words by what they can be, under each form that they have there."""
  return {
    'singular noun': {e.forms[0]: e for e in lexicon.nouns()},
    'plural noun': {e.forms[1]: e for e in lexicon.nouns()},
    'adjective': {e.key: e for e in lexicon.adjectives()},
    'participle': {e.forms[0]: e for e in lexicon.verbs()},
    'verb': {e.forms[1]: e for e in lexicon.verbs()},
    'adverb': {e.key: e for e in lexicon.adverbs()},
    'preposition': {e.key: e for e in lexicon.prepositions()},
  }


@functools.cache
def _phrases() -> frozenset[str]:
  """Return the expressions of several words."""
  forms = [form for table in _tables().values() for form in table]
  return frozenset(form for form in (*forms, *_MODALS, *_MODALS.values()) if ' ' in form)


def parse(text: str) -> Sentence:
  """Return the structure of an English sentence of this language, or raise."""
  return _Parser(text).sentence()


class _Parser:
  """Recursive descent; what can belong to the phrase at hand does."""

  def __init__(self, text: str):
    self._text, self._words, self._at = text, self._merged(words_of(text)), 0

  def _merged(self, words: list[str]) -> list[str]:
    """Return the words with expressions of two or three as one."""
    words = [words[0].lower(), *words[1:]] if words else []
    merged, i = [], 0
    while i < len(words):
      size = next((n for n in (3, 2) if ' '.join(words[i : i + n]) in _phrases()), 1)
      merged.append(' '.join(words[i : i + size]))
      i += size
    return [*merged, '']

  @property
  def _next(self) -> str:
    return self._words[self._at]

  def _accept(self, *words: str) -> str:
    """Return the next word and step over it if it is one of these, else ''."""
    found = self._next if self._next in words else ''
    self._at += bool(found)
    return found

  def _expect(self, what: str, *words: str) -> str:
    found = self._accept(*words)
    if not found:
      raise ValueError(f'{self._text!r} is not of the generated language: expected {what} at {self._next!r}')
    return found

  def _entry(self, table: str) -> Entry | None:
    found = _tables()[table].get(self._next)
    self._at += found is not None
    return found

  def _require(self, table: str) -> Entry:
    found = self._entry(table)
    if found is None:
      raise ValueError(f'{self._text!r} is not of the generated language: expected a {table} at {self._next!r}')
    return found

  def sentence(self) -> Sentence:
    link = self._accept(*LINKS)
    if link:
      subordinate = self._clause()
      self._expect('a comma', ',')
      sentence = Sentence(self._clause(), link, subordinate, True)
    else:
      main = self._clause()
      link = self._accept(*LINKS)
      sentence = Sentence(main, link, self._clause()) if link else Sentence(main)
    self._expect('a full stop', '.')
    self._expect('the end', '') if self._at < len(self._words) - 1 else None
    return sentence

  def _clause(self) -> Clause:
    when = self._when()
    subject = self._noun_phrase()
    verbal = self._verbal(subject.plural)
    second = self._verbal(subject.plural) if self._accept('and') else None
    late = None if when else self._when()
    return Clause(subject, verbal, second, when or late, when is not None)

  def _when(self) -> Entry | None:
    found = _tables()['adverb'].get(self._next)
    return self._entry('adverb') if found and found.category == 'when' else None

  def _noun_phrase(self) -> NounPhrase:
    determiner = self._expect('a determiner', *_SINGULAR, *_PLURAL)
    described = []
    while (adjective := self._entry('adjective')) is not None:
      described.append(adjective)
    noun = self._entry('singular noun') if determiner in _SINGULAR else None
    plural = noun is None
    noun = noun or self._require('plural noun' if determiner in _PLURAL else 'singular noun')
    attribute = relative = None
    if preposition := self._accept('with', 'without'):
      attribute = (preposition, self._noun_phrase())
    elif self._accept(_pronoun(noun)):
      relative = self._relative(plural)
    determiner = 'a' if determiner == 'an' else determiner
    return NounPhrase(noun, plural, determiner, tuple(described), attribute, relative)

  def _relative(self, plural: bool) -> Relative:
    if self._next in ('is', 'are', *_MODALS, *_MODALS.values()):
      return Relative(None, self._verbal(plural))
    subject = self._noun_phrase()
    return Relative(subject, self._verbal(subject.plural, gap=True))

  def _verbal(self, plural: bool, gap: bool = False) -> Verbal:
    forms = _MODALS.values() if plural else _MODALS
    first = self._expect('a verb that agrees with its subject', 'are' if plural else 'is', *forms)
    modal = '' if first in ('is', 'are') else _MODALS.get(first, first)
    verb = self._require('verb' if modal else 'participle')
    noun = self._noun_phrase() if verb.category in ('what', 'whom', 'put') and not gap else None
    preposition = self._require('preposition') if verb.category in ('to', 'put') else self._entry('preposition')
    moves = verb.category in ('to', 'put')
    place = Place(preposition, self._noun_phrase(), moves) if preposition else None
    found = _tables()['adverb'].get(self._next)
    how = self._entry('adverb') if found and found.category == 'how' else None
    return Verbal(verb, modal, noun, place, how)
