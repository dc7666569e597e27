"""German of the generated language: the law of the translations of a structure.

Clauses are built from parts, each a law with the fact whether a relative clause ends it: what follows such a part
begins with a comma. A choice stands as high as what depends on it: a noun's gender decides the whole phrase, a
verb's prefix the end of the clause.
"""

from collections.abc import Sequence
from typing import NamedTuple

from speccascade.embedded.law import Law, one_of
from speccascade.embedded.lexicon import Entry, Noun
from speccascade.embedded.structure import Clause, LINKS, NounPhrase, Place, Relative, Sentence, Verbal

CASES = ('nom', 'acc', 'dat')
_THE = {'m': ('der', 'den', 'dem'), 'f': ('die', 'die', 'der'), 'n': ('das', 'das', 'dem'), 'p': ('die', 'die', 'den')}
_DER = {'m': ('er', 'en', 'em'), 'f': ('e', 'e', 'er'), 'n': ('es', 'es', 'em'), 'p': ('e', 'e', 'en')}
_EIN = {'m': ('', 'en', 'em'), 'f': ('e', 'e', 'er'), 'n': ('', '', 'em'), 'p': ('e', 'e', 'en')}
_WEAK = {'m': ('e', 'en', 'en'), 'f': ('e', 'e', 'en'), 'n': ('e', 'e', 'en'), 'p': ('en', 'en', 'en')}
_MIXED = {'m': ('er', 'en', 'en'), 'f': ('e', 'e', 'en'), 'n': ('es', 'es', 'en'), 'p': ('en', 'en', 'en')}
_STRONG = {'p': ('e', 'e', 'en')}
_WHO = _THE | {'p': ('die', 'die', 'denen')}
_DETERMINERS = {  # stem, its endings, those of the adjective
  'a': ('ein', _EIN, _MIXED),
  'his': ('sein', _EIN, _MIXED),
  'her': ('ihr', _EIN, _MIXED),
  'their': ('ihr', _EIN, _MIXED),
  'this': ('dies', _DER, _WEAK),
  'these': ('dies', _DER, _WEAK),
  'two': ('zwei', None, _STRONG),
  'three': ('drei', None, _STRONG),
}
_CONTRACTED = {  # how often a preposition and its article become one word
  'in dem': ('im', 9), 'in das': ('ins', 4), 'zu dem': ('zum', 9), 'zu der': ('zur', 9), 'von dem': ('vom', 9),
  'bei dem': ('beim', 9), 'durch das': ('durchs', 1), 'um das': ('ums', 1), 'weit von dem': ('weit vom', 9),
}  # fmt: skip
_MODALS = {'can': ('kann', 'können'), 'must': ('muss', 'müssen'), 'want to': ('will', 'wollen')}


class Part(NamedTuple):
  """A law, and whether what it gives ends with a relative clause, open for a comma."""

  law: Law
  open: bool = False


def sentence(structure: Sentence) -> Law:
  """Return the law of a sentence's translations."""
  if structure.subordinate is None:
    return [_main(structure.main), '.']
  link = Part(LINKS[structure.link])
  subordinate = _joined([link, *_subordinate(structure.subordinate.subject, structure.subordinate.verbal)])
  if structure.subordinate_first:
    return [subordinate.law, ',', _main(structure.main, inverted=True), '.']
  return [_main(structure.main), ',', subordinate.law, '.']


def _joined(parts: Sequence[Part]) -> Part:
  """Return parts one after the other, with commas behind the relative clauses inside."""
  laws = []
  for i, part in enumerate(parts):
    laws += [',', part.law] if i and parts[i - 1].open else [part.law]
  return Part(laws, bool(parts) and parts[-1].open)


def _words(entry: Entry) -> Part:
  return Part(one_of(*entry.german))


def _main(clause: Clause, inverted: bool = False) -> Law:
  """Return a main clause: the finite verb is second, whatever is first; `inverted` where that came before."""
  subject = [noun_phrase(clause.subject, 'nom')]
  when = [_words(clause.when)] if clause.when else []
  if inverted:
    orders = [(1, [], subject + when)]
  elif not when:
    orders = [(1, subject, [])]
  else:
    front = 9 if clause.when_first else 3
    orders = [(front, when, subject), (10 - front, subject, when)]
  plural, second = clause.subject.plural, clause.second
  first = one_of(*((w, _finite(clause.verbal, plural, *order, followed=second is not None)) for w, *order in orders))
  return [first, 'und', _finite(second, plural, [], [])] if second else first


def _finite(verbal: Verbal, plural: bool, before: list[Part], after: list[Part], followed: bool = False) -> Law:
  """Return `before`, the finite verb, `after`, what depends on the verb, and its rest.

  A clause that is not `followed` by more of the sentence than its punctuation needs no closing comma.
  """
  middle, closing = _middle(verbal), [Part([])] if followed else []
  if verbal.modal == 'try to':
    start = _joined([*before, Part('versuchen' if plural else 'versucht'), *after])
    return _joined([Part(start.law, open=True), *middle, _attempt(verbal), *closing]).law
  if verbal.modal:
    return _joined([*before, Part(_MODALS[verbal.modal][plural]), *after, *middle, _infinitive(verbal)]).law
  options = []
  for weight, verb in verbal.verb.german:
    finite = Part(verb.infinitive if plural else verb.third)
    prefix = [Part(verb.prefix)] if verb.prefix else []
    options.append((weight, _joined([*before, finite, *after, *middle, *prefix, *closing]).law))
  return one_of(*options)


def _middle(verbal: Verbal) -> list[Part]:
  """Return what stands between the finite verb and the end of the clause."""
  parts = []
  if verbal.object:
    parts.append(noun_phrase(verbal.object, _object_case(verbal.verb)))
  if verbal.how:
    parts.append(_words(verbal.how))
  return parts + ([_place(verbal.place)] if verbal.place else [])


def _object_case(verb: Entry) -> str:
  return 'dat' if verb.category == 'whom' else 'acc'


def _infinitive(verbal: Verbal) -> Part:
  return Part(one_of(*((w, verb.prefix + verb.infinitive) for w, verb in verbal.verb.german)))


def _attempt(verbal: Verbal) -> Part:
  """Return the infinitive with zu, which stands inside a separable verb; its clause is set off like a relative."""
  forms = ((w, f'{v.prefix}zu{v.infinitive}' if v.prefix else f'zu {v.infinitive}') for w, v in verbal.verb.german)
  return Part(one_of(*forms), open=True)


def _subordinate(subject: NounPhrase, verbal: Verbal) -> list[Part]:
  return [noun_phrase(subject, 'nom'), *_verb_last(verbal, subject.plural)]


def _verb_last(verbal: Verbal, plural: bool) -> list[Part]:
  """Return what depends on a verb, and the verb at the end."""
  middle = _middle(verbal)
  if verbal.modal == 'try to':
    return [Part('versuchen' if plural else 'versucht', open=True), *middle, _attempt(verbal)]
  if verbal.modal:
    return [*middle, _infinitive(verbal), Part(_MODALS[verbal.modal][plural])]
  forms = ((w, v.prefix + (v.infinitive if plural else v.third)) for w, v in verbal.verb.german)
  return [*middle, Part(one_of(*forms))]


def noun_phrase(phrase: NounPhrase, case: str, preposition: str = '') -> Part:
  """Return the law of a noun phrase in a case, with its preposition, which may melt into the article."""
  options = ((weight, _about(noun, phrase, case, preposition)) for weight, noun in phrase.noun.german)
  return Part(one_of(*options), open=phrase.relative is not None)


def _about(noun: Noun, phrase: NounPhrase, case: str, preposition: str) -> Law:
  gender = 'p' if phrase.plural else noun.gender
  determiner, endings = _determiner(phrase.determiner, gender, case)
  head = [_with_article(preposition, determiner, phrase.determiner == 'the' and not phrase.plural)]
  for adjective in phrase.adjectives:
    ending = endings[gender][CASES.index(case)]
    head.append(one_of(*((w, _inflected(stem, ending)) for w, stem in adjective.german)))
  head.append(_form(noun, phrase.plural, case))
  if phrase.attribute:
    word, inner = phrase.attribute
    head.append(noun_phrase(inner, 'dat', 'mit').law if word == 'with' else noun_phrase(inner, 'acc', 'ohne').law)
  return [*head, ',', _relative(phrase.relative, gender, phrase.plural)] if phrase.relative else head


def _determiner(word: str, gender: str, case: str) -> tuple[Law, dict[str, Sequence[str]]]:
  """Return a determiner and the endings that adjectives have after it."""
  i = CASES.index(case)
  if word == 'the':
    return _THE[gender][i], _WEAK
  if word == 'several':
    ending = _STRONG['p'][i]
    return one_of((2, f'mehrer{ending}'), (1, f'einig{ending}')), _STRONG
  stem, own, endings = _DETERMINERS[word]
  return stem + (own[gender][i] if own else ''), endings


def _with_article(preposition: str, determiner: Law, definite: bool) -> Law:
  if not preposition:
    return determiner
  if definite and f'{preposition} {determiner}' in _CONTRACTED:
    word, weight = _CONTRACTED[f'{preposition} {determiner}']
    return one_of((weight, word), (1, f'{preposition} {determiner}'))
  return [preposition, determiner]


def _inflected(stem: str, ending: str) -> str:
  return stem[:-1] if stem.endswith('!') else stem + ending


def _form(noun: Noun, plural: bool, case: str) -> str:
  if not plural:
    return noun.name if case == 'nom' else noun.oblique
  return noun.plural + ('n' if case == 'dat' and noun.plural[-1] not in 'ns' else '')


def _relative(relative: Relative, gender: str, plural: bool) -> Law:
  verbal = relative.verbal
  if relative.subject is None:
    return _joined([Part(_WHO[gender][0]), *_verb_last(verbal, plural)]).law
  pronoun = Part(_WHO[gender][CASES.index(_object_case(verbal.verb))])
  return _joined([pronoun, *_subordinate(relative.subject, verbal)]).law


def _place(place: Place) -> Part:
  category = place.preposition.category
  case = ('acc' if place.moves else 'dat') if category == 'both' else category.split('-')[1]
  ((_, word),) = place.preposition.german
  return noun_phrase(place.phrase, case, word)
