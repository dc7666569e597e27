"""What a sentence of the generated language says, before it is put into English or German."""

import dataclasses

from speccascade.embedded.lexicon import Entry

LINKS = {'while': 'während', 'because': 'weil', 'before': 'bevor', 'although': 'obwohl'}


@dataclasses.dataclass(frozen=True)
class NounPhrase:
  """A noun with all that is said about it; `attribute` is 'with' or 'without' and a phrase."""

  noun: Entry
  plural: bool
  determiner: str
  adjectives: tuple[Entry, ...] = ()
  attribute: 'tuple[str, NounPhrase] | None' = None
  relative: 'Relative | None' = None


@dataclasses.dataclass(frozen=True)
class Place:
  """A preposition and its phrase: where something happens, or where it moves to."""

  preposition: Entry
  phrase: NounPhrase
  moves: bool


@dataclasses.dataclass(frozen=True)
class Verbal:
  """A verb and all that depends on it but the subject."""

  verb: Entry
  modal: str = ''
  object: NounPhrase | None = None
  place: Place | None = None
  how: Entry | None = None


@dataclasses.dataclass(frozen=True)
class Relative:
  """A relative clause: about the subject of its verb, or where it has a subject of its own, the object."""

  subject: NounPhrase | None
  verbal: Verbal


@dataclasses.dataclass(frozen=True)
class Clause:
  """A subject, what it does, perhaps what else, and when."""

  subject: NounPhrase
  verbal: Verbal
  second: Verbal | None = None
  when: Entry | None = None
  when_first: bool = False


@dataclasses.dataclass(frozen=True)
class Sentence:
  """A clause, perhaps with a subordinate one before or after it."""

  main: Clause
  link: str = ''
  subordinate: Clause | None = None
  subordinate_first: bool = False
