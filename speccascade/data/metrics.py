"""Metrics by name, which docs/tasks.md defines; higher is better, and all but `words` run from 0 to 100.

Each is called as `metric(examples, predictions)` and is a function of sums over examples (`Summed`), so that a
bootstrap scores every text once. `mean` makes such a metric of a function that scores one prediction.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
import dataclasses
from fractions import Fraction
import functools
import inspect
import re
import string

import numpy as np

from speccascade.data.examples import Example, Metric
from speccascade.host.errors import first_line

ORDER = 4  # BLEU's longest n-gram
NO_ANSWER = 'unanswerable'  # the answer of a question that has none
_INTEGER = r'(?:\d+(?:,\d{3})+(?!\d)|\d+)'
_FRACTION = rf'(?:{_INTEGER} +)?\d+/0*[1-9]\d*'  # 1/2 · 1 1/2
_DECIMAL = rf'(?:{_INTEGER}(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{{1,3}}(?!\w))?'  # 1,234.5 · 5e3
_NUMBER = re.compile(rf'(?:(?<![\w).])-\$?)?(?:{_FRACTION}|{_DECIMAL})', re.ASCII)
_STATED = re.compile(r'\b(?i:answer(?: is|:))\s*\(?([A-Db-d]|a(?! +\w))\b')  # `a` before a word is an article
_LETTER = re.compile(r'\b([A-D])\b')
_TRIVIA_PUNCTUATION = {*string.punctuation, *'‘’´'}
_ARTICLE = re.compile(r'\b(?:a|an|the)\b')


def _lacks_reference(example: Example) -> str | None:
  return None if example.references else 'a reference'


class Summed:
  """A metric that is a function of sums over examples: `combine(statistics(…).sum(0), N)`.

  Attributes:
    lacks: Returns what an example must have for any prediction to be right and has not, or None. Where this is None,
      the metric is tried on references instead.
  """

  lacks: Callable[[Example], str | None] | None = staticmethod(_lacks_reference)

  def statistics(self, examples: Sequence[Example], predictions: Sequence[str]) -> np.ndarray:
    """Return the statistics [N, K] of N predictions, a row for each."""
    raise NotImplementedError

  def combine(self, row: np.ndarray, n: int) -> float:
    """Return the value of `n` examples whose statistics sum to `row` [K]."""
    raise NotImplementedError

  def __call__(self, examples: Sequence[Example], predictions: Sequence[str]) -> float:
    """Return the value of predictions, one for each example."""
    if not len(examples):
      raise ValueError('a metric needs one example at least, but none was given.')
    return self.combine(self.statistics(examples, predictions).sum(0), len(examples))


class Bleu(Summed):
  """Corpus BLEU with exponential smoothing; statistics are lengths, matches and n-gram counts."""

  def statistics(self, examples, predictions):
    scorer = _bleu_scorer()
    scores = [scorer.sentence_score(text, e.references) for e, text in zip(examples, predictions, strict=True)]
    rows = [[s.sys_len, s.ref_len, *s.counts, *s.totals] for s in scores]
    return np.array(rows, np.int64).reshape(len(rows), 2 + 2 * ORDER)

  def combine(self, row, n):
    sys_len, ref_len, *ngrams = (int(round(x)) for x in row)
    score = _bleu_scorer().compute_bleu(
      ngrams[:ORDER], ngrams[ORDER:], sys_len, ref_len, smooth_method='exp', max_ngram_order=ORDER
    )
    return float(score.score)


@functools.cache
def _bleu_scorer():
  from sacrebleu.metrics import BLEU  # lazily: decoding needs no metric library

  # effective_order changes scores of single sentences only, which are not used; it silences a warning about them.
  return BLEU(tokenize='13a', effective_order=True)


@dataclasses.dataclass(frozen=True)
class Mean(Summed):
  """The mean over examples of a score.

  Attributes:
    score: (example, prediction) -> score, in 0 … 1 where the metric is in per cent.
    lacks: As of `Summed`.
    scale: What the mean is multiplied by: 100 for per cent.
  """

  score: Callable[[Example, str], float]
  lacks: Callable[[Example], str | None] | None = None
  scale: float = 100

  def __post_init__(self):
    object.__setattr__(self, '__module__', self.score.__module__)  # by which gin names it

  @property
  def __name__(self) -> str:
    """The name of the metric in results."""
    return self.score.__name__

  def statistics(self, examples, predictions):
    scores = [self.score(e, text) for e, text in zip(examples, predictions, strict=True)]
    return np.array(scores, np.float64)[:, None]

  def combine(self, row, n):
    return float(self.scale * row[0] / n)


def mean(function: Callable[[Example, str], float]) -> Mean:
  """Return the metric that is the mean of a function's scores, as a decorator: it has bootstrap intervals.

  Args:
    function: (example, prediction) -> score in 0 … 1.
  """
  return Mean(function)


@functools.cache
def _chrf_scorer():
  from sacrebleu.metrics import CHRF  # lazily: decoding needs no metric library

  return CHRF()


def _chrf(example: Example, prediction: str) -> float:
  """Return chrF2 of a sentence against the nearest reference."""
  return _chrf_scorer().sentence_score(prediction, example.references).score / 100


@functools.cache
def _rouge_scorer():
  from rouge_score import rouge_scorer  # lazily: decoding needs no metric library

  return rouge_scorer.RougeScorer(['rouge2'], use_stemmer=False)  # as in T5's evaluation


def _rouge2(example: Example, prediction: str) -> float:
  """Return bigram F1 against the nearest reference."""
  return max(_rouge_scorer().score(reference, prediction)['rouge2'].fmeasure for reference in example.references)


def _match(answer: Callable[[str], Hashable | None], needed: str = 'a reference') -> Mean:
  """Return the metric of whether the answer read from a prediction equals the answer of a reference.

  Args:
    answer: Reads the answer of a text, None where it has none.
    needed: What a text without an answer lacks, in words.
  """

  def score(example: Example, prediction: str) -> float:
    given = answer(prediction)
    return float(given is not None and given in map(answer, example.references))

  return Mean(score, lambda example: needed if all(answer(x) is None for x in example.references) else None)


def number(text: str) -> Fraction | None:
  """Return the number that a worked answer ends with: the one after '####', or else the last one."""
  text = re.sub('[\u2011\u2212]', '-', text)  # the hyphen that does not break, the typographic minus
  _, mark, after = text.partition('####')
  numbers = (_NUMBER.findall(after)[:1] if mark else []) or _NUMBER.findall(text)[-1:]
  if not numbers:
    return None
  written = re.sub(r'[$,]', '', numbers[0])
  try:
    value = sum(abs(Fraction(part)) for part in written.split())  # 1 1/2 is a sum
  except ValueError:  # thousands of digits, as of a model that repeats itself: more than Python converts
    return None
  return -value if written.startswith('-') else value


def letter(text: str) -> str | None:
  """Return the choice A–D of a text: the one stated as the answer, or else the first letter on its own."""
  match = _STATED.search(text) or _LETTER.search(text)
  return match.group(1).upper() if match else None


def squad_answer(text: str) -> str:
  """Return an answer as SQuAD compares it: lower case, without punctuation, articles and double spaces."""
  answer = _without_articles(''.join(x for x in text.lower() if x not in string.punctuation))
  return '' if answer == NO_ANSWER else answer


def trivia_answer(text: str) -> str:
  """Return an answer as TriviaQA compares it: as SQuAD does, but punctuation separates words."""
  return _without_articles(''.join(' ' if x in _TRIVIA_PUNCTUATION else x for x in text.lower()))


def _without_articles(text: str) -> str:
  return ' '.join(_ARTICLE.sub(' ', text).split())


def _word_f1(answer: Callable[[str], str]) -> Mean:
  """Return the metric of F1 of the words that an answer shares with the nearest reference's.

  Of an empty answer it is whether both are empty.
  """

  def score(example: Example, prediction: str) -> float:
    given = answer(prediction).split()
    return max(_f1(given, answer(reference).split()) for reference in example.references)

  return Mean(score, _lacks_reference)


def _f1(given: Sequence[str], wanted: Sequence[str]) -> float:
  if not given or not wanted:
    return float(given == wanted)
  return 2 * (Counter(given) & Counter(wanted)).total() / (len(given) + len(wanted))


def _words(example: Example, prediction: str) -> int:
  return len(prediction.split())


bleu = Bleu()
chrf = Mean(_chrf, _lacks_reference)
rouge2 = Mean(_rouge2, _lacks_reference)
final_number = _match(number, 'a reference with a number')
accuracy = _match(letter, 'a reference with a letter A–D')
exact_match = _match(str.strip)

METRICS: dict[str, Summed] = dict(
  bleu=bleu,
  chrf=chrf,
  rouge2=rouge2,
  final_number=final_number,
  accuracy=accuracy,
  exact_match=exact_match,
  squad_exact_match=_match(squad_answer),
  squad_f1=_word_f1(squad_answer),
  trivia_exact_match=_match(trivia_answer),
  trivia_f1=_word_f1(trivia_answer),
  words=Mean(_words, lambda example: None, scale=1),
)


def named(metrics: Sequence[str | Metric]) -> dict[str, Metric]:
  """Return metrics by name.

  Args:
    metrics: Names of `METRICS`, functions, or objects that can be called.

  Returns:
    The metrics in order, each by its name in results.

  Raises:
    ValueError: if one is not a metric, or two have one name.
  """
  if isinstance(metrics, str) or callable(metrics) or not metrics:
    raise ValueError(f"metrics={metrics!r} is not a list of names and functions; write ('bleu',).")
  judged = {_name(metric): _metric(metric) for metric in metrics}
  if len(judged) < len(metrics):
    raise ValueError(f'two metrics of {", ".join(map(_name, metrics))} have one name; drop or rename one.')
  return judged


def _name(metric: str | Metric) -> str:
  """Return the name of a metric in results."""
  if isinstance(metric, str) and metric in METRICS:
    return metric
  if not callable(metric) or inspect.isclass(metric):
    raise ValueError(f'there is no metric {metric!r}; choose from {", ".join(METRICS)}, or give a function.')
  function = metric.func if isinstance(metric, functools.partial) else metric
  name = getattr(function, '__name__', type(function).__name__)
  if not name.isidentifier():
    raise ValueError(f'a metric is a {name}, which has no name for results; define it with def.')
  return name


def _metric(metric: str | Metric) -> Metric:
  """Return the metric of a name; gin hands over a wrapper of a metric, which hides its statistics."""
  if isinstance(metric, str):
    return METRICS[metric]
  inner = inspect.unwrap(metric)
  return inner if isinstance(inner, Summed) else metric


def check(
  metrics: Mapping[str, Metric],
  examples: Sequence[Example],
  where: Callable[[Example], str] = lambda example: f'example {example.index}',
):
  """Raise ValueError if no prediction can be right for an example, or a user's metric fails on references.

  Args:
    metrics: Metrics by name.
    examples: The examples of a task.
    where: Describes the origin of an example, for the error.
  """
  for name, metric in metrics.items():
    if not isinstance(metric, Summed) or metric.lacks is None:
      _try(name, metric, examples[:2])
      continue
    for example in examples:
      if missing := metric.lacks(example):
        raise ValueError(f'{where(example)} lacks {missing}, which {name} needs; correct or remove it.')


def _try(name: str, metric: Metric, examples: Sequence[Example]):
  """Let a user's metric judge references, so that it fails now rather than after decoding."""
  texts = [next(iter(example.references), '') for example in examples]
  try:
    float(metric(list(examples), texts))
  except Exception as error:  # whatever a metric of a user's raises
    reason = first_line(error, named=True)
    raise ValueError(f'the metric {name} cannot judge the first references by themselves ({reason}).') from error
