"""Metrics agree with the libraries and conventions that they are named after, and can be resampled."""

from fractions import Fraction
import functools

from matching import having
import numpy as np
import pytest

from speccascade.data import metrics
from speccascade.data.examples import Example

GERMAN = ['Der Hund läuft am Strand entlang.', 'Zwei Kinder spielen im Schnee.', 'Eine Frau liest &quot;X&quot;.']
GUESSES = ['Der Hund läuft schnell am Strand.', 'Zwei Kinder spielen draußen im Schnee.', 'Eine Frau liest "X".']
ANSWER = 'She has 3 bags of 4, so 3 * 4 = <<3*4=12>>12 and 12 + 6 = 18.\n#### 18'


def examples(targets, **info):
  return [Example(i, f'prompt {i}', target, info) for i, target in enumerate(targets)]


def test_bleu_is_sacrebleus():
  sacrebleu = pytest.importorskip('sacrebleu')
  expected = sacrebleu.corpus_bleu(GUESSES, [GERMAN], tokenize='13a').score
  assert 20 < expected < 100
  assert metrics.bleu(examples(GERMAN), GUESSES) == pytest.approx(expected)
  assert metrics.bleu(examples(GERMAN), [''] * 3) == 0


def test_bleu_takes_several_references_even_where_their_number_varies():
  sacrebleu = pytest.importorskip('sacrebleu')
  second = ['Ein Hund rennt am Strand.', 'Kinder spielen draußen im Schnee.', 'Sie liest.']
  both = metrics.bleu(examples([list(pair) for pair in zip(GERMAN, second)]), GUESSES)
  assert both == pytest.approx(sacrebleu.corpus_bleu(GUESSES, [GERMAN, second]).score)
  uneven = metrics.bleu(examples([[GERMAN[0], second[0]], GERMAN[1], GERMAN[2]]), GUESSES)
  assert metrics.bleu(examples(GERMAN), GUESSES) < uneven < both


@pytest.mark.parametrize('name', metrics.METRICS)
def test_a_resampled_metric_is_the_metric_of_the_resample(name):
  metric = metrics.METRICS[name]
  targets, guesses = [*GERMAN, ANSWER, 'B'], [*GUESSES, 'So 18', 'B']
  rows = metric.statistics(examples(targets), guesses)
  assert rows.shape[0] == 5 and rows.ndim == 2
  drawn = [3, 0, 2, 2, 1, 4]
  direct = metric(examples([targets[i] for i in drawn]), [guesses[i] for i in drawn])
  assert metric.combine(rows[drawn].sum(0), len(drawn)) == pytest.approx(direct)
  assert direct > 0


def test_chrf_is_the_mean_of_sacrebleus_over_sentences():
  sacrebleu = pytest.importorskip('sacrebleu')
  scores = [sacrebleu.sentence_chrf(guess, [target]).score for guess, target in zip(GUESSES, GERMAN, strict=True)]
  assert metrics.chrf(examples(GERMAN), GUESSES) == pytest.approx(np.mean(scores)) and 40 < np.mean(scores) < 95
  both = [[target, guess] for target, guess in zip(GERMAN, GUESSES, strict=True)]
  assert metrics.chrf(examples(both), GUESSES) == pytest.approx(100)


@pytest.mark.parametrize(
  'name, targets, guesses, value',
  [
    ('rouge2', ['the dogs run home'], ['the dogs run home'], 100),
    ('rouge2', ['the dogs run home'], ['the dogs run'], 100 * 2 * 1 * (2 / 3) / (1 + 2 / 3)),
    ('rouge2', ['the dogs run home'], ['the dog runs home'], 0),  # no stemming
    ('rouge2', [['something else', 'the dogs run']], ['the dogs run'], 100),  # the nearest reference
    ('final_number', ['#### 1,000', '#### 3', '#### 5'], ['$1000.00', 'so 4', 'none'], 100 / 3),
    ('accuracy', ['A', 'B'], [' A\n', 'C'], 50),
    ('exact_match', ['yes', ['no', 'never']], ['yes ', 'never'], 100),
    ('words', [[], []], ['one two', 'three'], 1.5),
  ],
)
def test_a_metric_judges_as_it_is_defined(name, targets, guesses, value):
  assert metrics.METRICS[name](examples(targets), guesses) == pytest.approx(value)


@pytest.mark.parametrize(
  'text, value',
  [
    (ANSWER, '18'),
    ('He pays $1,234.50 in all.', '1234.50'),
    ('#### $1,000\nQuestion: 7 and 8?', '1000'),
    ('It falls to -3 degrees', '-3'),
    ('a loss of -$20', '-20'),
    ('3 * 4 = <<3*4=12>>12', '12'),
    ('#### none, but 4', '4'),
    ('5e3', '5000'),
    ('1/2', '1/2'),
    ('-1 1/2 miles', '-3/2'),
    ('10/2 = 5', '5'),
    ('on 3/4/2020', '2020'),
    ('4/0', '0'),
    ('2eggs', '2'),
    ('', None),
    pytest.param('so ' + '9' * 5000, None, id='more digits than Python converts'),
    ('so \u22125', '-5'),  # the typographic minus
    ('so \u20115', '-5'),  # the hyphen that does not break
    ('so 1234567,890', '1234567890'),
    ('1234,5678', '5678'),
  ],
)
def test_the_final_number_is_read_as_people_write_it(text, value):
  found = metrics.number(text)
  assert found is None if value is None else found == Fraction(value)


@pytest.mark.parametrize(
  'text, letter',
  [
    (' B', 'B'),
    ('B. Because', 'B'),
    ('(C)', 'C'),
    ('A good answer is D', 'D'),
    ('Answer: (b)', 'B'),
    ('The ANSWER is a.', 'A'),
    ('The answer is a polygon: C', 'C'),
    ('Every', None),
  ],
)
def test_a_choice_is_the_letter_that_is_stated(text, letter):
  assert metrics.letter(text) == letter


def test_a_metric_needs_an_example_and_a_prediction_for_each():
  with pytest.raises(ValueError, match='example'):
    metrics.bleu([], [])
  with pytest.raises(ValueError):
    metrics.exact_match(examples(['a', 'b']), ['a'])


def test_metrics_are_found_by_name_and_keep_their_order():
  assert list(metrics.named(['rouge2', 'bleu'])) == ['rouge2', 'bleu']
  with pytest.raises(ValueError, match=having("'blue'", 'bleu')):
    metrics.named(['blue'])
  for wrong in ('bleu', [], metrics.bleu):
    with pytest.raises(ValueError, match='list'):
      metrics.named(wrong)


def shortness(examples, predictions):
  return -sum(map(len, predictions)) / len(predictions)


@metrics.mean
def same_length(example, prediction):
  return len(prediction) == len(example.target)


class Longer:
  def __init__(self, value=None):
    self.value = value

  def __call__(self, examples, predictions):
    return float(len(predictions[0])) if self.value is None else self.value


def test_a_metric_of_the_users_is_a_function_or_an_object_that_can_be_called():
  found = metrics.named([shortness, 'bleu', functools.partial(metrics.final_number), Longer()])
  assert list(found) == ['shortness', 'bleu', 'score', 'Longer'] and found['shortness'] is shortness
  metrics.check(found, examples(['4 cats']))
  lambda_ = lambda examples, predictions: 1
  for wrong, part in (
    ([lambda_], '<lambda>'),
    ([Longer], 'Longer'),
    ([3], 'metric 3'),
    ([shortness, functools.partial(shortness)], 'shortness'),
  ):
    with pytest.raises(ValueError, match=part):
      metrics.named(wrong)
  with pytest.raises(ValueError, match=r'\(ValueError: could not'):
    metrics.check({'mine': Longer('x')}, examples(['4']))


def test_a_score_of_one_example_becomes_a_mean_that_can_be_resampled():
  judged = metrics.named([same_length, 'exact_match'])
  assert list(judged) == ['same_length', 'exact_match'] and judged['same_length'] is same_length
  three = examples(['yes', 'no', 'yes'])
  assert same_length(three, ['may', 'never', 'yes']) == pytest.approx(200 / 3)
  assert same_length.statistics(three, ['may', 'never', 'yes']).tolist() == [[1], [0], [1]]
  metrics.check(judged, three)
  broken = metrics.mean(lambda example, prediction: example.info['missing'])
  with pytest.raises(ValueError, match=having('broken', 'missing')):
    metrics.check({'broken': broken}, three)


def test_a_gin_file_hands_over_a_metric_with_its_statistics(tmp_path):
  gin = pytest.importorskip('gin')
  from speccascade.evaluate import config

  (tmp_path / 'lines.jsonl').write_text('{"prompt": "a", "target": "b"}\n')
  gin.register(same_length)
  with gin.unlock_config():
    config.register()
    gin.parse_config(f'data.jsonl.path = {str(tmp_path / "lines.jsonl")!r}')
    gin.parse_config('data.jsonl.metrics = [@test_metrics.same_length]')
  task = gin.get_configurable('data.jsonl')()
  assert task.metrics == {'same_length': same_length}


@pytest.mark.parametrize(
  'kind, gold, text, exact, f1',
  [
    ('squad', ['The Red-Cat!'], ' a redcat', 100, 100),
    ('trivia', ['The Red-Cat!'], 'red_cat', 100, 100),
    ('squad', ['red', 'the old red cat'], 'an old cat', 0, 100 * 4 / 5),
    ('trivia', ['old cat'], 'an old, old dog', 0, 100 * 2 / 5),
    ('squad', ['unanswerable'], 'Unanswerable.', 100, 100),
    ('squad', ['unanswerable'], 'It is unanswerable.', 0, 0),
    ('squad', ['a cat'], '', 0, 0),
  ],
)
def test_short_answers_are_compared_as_their_benchmarks_do(kind, gold, text, exact, f1):
  judged = metrics.named([f'{kind}_exact_match', f'{kind}_f1'])
  values = [metric(examples([gold]), [text]) for metric in judged.values()]
  assert values == pytest.approx([exact, f1])


@pytest.mark.parametrize(
  'name, target, part',
  [
    ('bleu', [], 'reference'),
    ('rouge2', [], 'reference'),
    ('final_number', 'none', 'number'),
    ('final_number', ['none', 'no'], 'number'),
    ('accuracy', 'G', 'A–D'),
  ],
)
def test_references_that_no_prediction_can_match_are_refused(name, target, part):
  judged = {name: metrics.METRICS[name]}
  with pytest.raises(ValueError, match=having('example 1', part, name)):
    metrics.check(judged, examples(['A 4', target]))
  metrics.check(judged, examples(['A 4', ['none', 'B 5']]))
