"""The generated language: its law is a law, its German is German, its splits are apart."""

import itertools
import math
import random

import pytest

from speccascade.embedded import grammar, law, lexicon
from speccascade.embedded.english import english, parse

CASES = {  # one rule of German each
  'A small boy is sleeping in the garden.': 'Ein kleiner Junge schläft im Garten.',
  'The boy is running in the garden.': 'Der Junge rennt in den Garten.',  # direction: accusative
  'A man is helping the boy.': 'Ein Mann hilft dem Jungen.',  # dative verb, n-declension
  'A woman is taking off the red hat.': 'Eine Frau zieht den roten Hut aus.',  # separable
  'A woman can take off the red hat.': 'Eine Frau kann den roten Hut ausziehen.',
  'A woman tries to take off a red hat.': 'Eine Frau versucht, einen roten Hut auszuziehen.',
  'A woman who is wearing a hat is sleeping.': 'Eine Frau, die einen Hut trägt, schläft.',
  'A man is sleeping because two women are singing.': 'Ein Mann schläft, weil zwei Frauen singen.',
  'While the girl is singing, a man is sleeping.': 'Während das Mädchen singt, schläft ein Mann.',
  'Today a man is sleeping.': 'Heute schläft ein Mann.',
  'The dog that the woman is calling is sleeping.': 'Der Hund, den die Frau ruft, schläft.',
  'A girl is sitting next to two trees.': 'Ein Mädchen sitzt neben zwei Bäumen.',  # -n of the dative plural
  'A man tries to sleep and is crying.': 'Ein Mann versucht, zu schlafen, und weint.',
}


@pytest.mark.parametrize('sentence', CASES)
def test_the_expected_translation_is_possible(sentence):
  assert grammar.log_prob(sentence, CASES[sentence]) > -10


@pytest.mark.parametrize(
  'sentence, wrong',
  [
    ('The boy is running in the garden.', 'Der Junge rennt in dem Garten.'),  # case
    ('A man is helping the boy.', 'Ein Mann hilft dem Junge.'),
    ('A woman is taking off the red hat.', 'Eine Frau auszieht den roten Hut.'),
    ('Today a man is sleeping.', 'Heute ein Mann schläft.'),
    ('A woman who is wearing a hat is sleeping.', 'Eine Frau, die trägt einen Hut, schläft.'),
    ('A woman who is wearing a hat is sleeping.', 'Eine Frau, der einen Hut trägt, schläft.'),
  ],
)
def test_wrong_german_is_impossible(sentence, wrong):
  assert grammar.log_prob(sentence, wrong) == -math.inf


def test_synonyms_have_their_weights():
  p = {t: math.exp(grammar.log_prob('A cat is sleeping.', t)) for t in ('Eine Katze schläft.', 'Ein Kater schläft.')}
  assert p == pytest.approx({'Eine Katze schläft.': 0.8, 'Ein Kater schläft.': 0.2})
  assert grammar.next_words('A cat is sleeping.') == pytest.approx({'Eine': 0.8, 'Ein': 0.2})
  assert grammar.next_words('A cat is sleeping.', 'Ein') == {'Kater': 1.0}
  assert grammar.next_words('A cat is sleeping.', 'Ein Kater schläft.') == {None: 1.0}


def test_different_choices_of_the_same_text_add_up():
  either = law.one_of((1, 'a b'), (1, ['a', law.one_of((1, 'b'), (3, 'c'))]))
  assert math.exp(law.log_prob(either, 'A b')) == pytest.approx(0.5 + 0.5 * 0.25)


def _everything(node, prefix=''):
  """Yield the probability of every text, by the law of each next word."""
  for word, p in law.next_words(node, prefix).items():
    if word is None:
      yield prefix, p
    else:
      for text, rest in _everything(node, law.text_of([*law.words_of(prefix), word])):
        yield text, p * rest


def test_the_law_of_the_next_word_gives_the_law_of_the_text():
  sentences = [e.prompt for e in grammar.examples('validation', 40)]
  sentence = next(s for s in sentences if 3 < len(list(_everything(grammar.translations(s)))) < 200)
  every = dict(_everything(grammar.translations(sentence)))
  assert sum(every.values()) == pytest.approx(1)
  for text, p in every.items():
    assert grammar.log_prob(sentence, text) == pytest.approx(math.log(p))


def test_draws_follow_the_law():
  text, node = next(grammar.sentences('train', 5))
  rng = random.Random(0)
  draws = [law.text_of(law.sample(node, rng)) for _ in range(4000)]
  best = law.text_of(law.most_likely(node)[1])
  assert draws.count(best) / 4000 == pytest.approx(math.exp(grammar.log_prob(text, best)), abs=0.04)


def test_every_drawn_translation_is_possible_and_every_sentence_parses():
  for sentence, translation in grammar.take('train', 300):
    assert grammar.log_prob(sentence, translation) > -math.inf, (sentence, translation)
    assert english(parse(sentence)) == sentence


def test_splits_are_disjoint_and_deterministic():
  drawn = {split: [s for s, _ in grammar.take(split, 200)] for split in grammar.SPLITS}
  for split, sentences in drawn.items():
    assert {grammar.split_of(s) for s in sentences} == {split}
    assert sentences == [s for s, _ in grammar.take(split, 200)]
    assert sentences != [s for s, _ in grammar.take(split, 200, seed=1)]


def test_examples_differ_and_a_shorter_list_is_the_beginning_of_a_longer_one():
  long, short = grammar.examples('validation', 60), grammar.examples('validation', 20)
  assert long[:20] == short and len({e.prompt for e in long}) == 60
  assert [e.index for e in long] == list(range(60))


def test_what_is_no_english_of_ours_is_named():
  with pytest.raises(ValueError, match="'qubit'"):
    grammar.log_prob('A qubit is sleeping.', 'Ein Qubit schläft.')
  with pytest.raises(ValueError, match="'dogs'"):
    parse('A man is sleeping dogs.')
  with pytest.raises(ValueError, match='agrees'):
    parse('A man are sleeping.')
  with pytest.raises(ValueError, match='train, validation, test'):
    next(grammar.pairs('dev'))


def test_no_word_of_one_part_of_speech_has_two_entries():
  for words in (lexicon.nouns, lexicon.adjectives, lexicon.verbs, lexicon.adverbs, lexicon.prepositions):
    forms = [form for entry in words() for form in dict.fromkeys(entry.forms)]
    assert len(forms) == len(set(forms)) == len(set(itertools.chain(*(e.forms for e in words()))))
