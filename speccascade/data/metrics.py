"""Metrics by name. Higher is better, and each runs from 0 to 100.

Every metric here is called as `metric(examples, predictions) -> float`, and is a function of sums over examples::

  metric.statistics(examples, predictions) -> [N, K]   one row for each example
  metric.combine(row, n) -> float                      the value of n examples whose rows add up to `row`

so that calling it is `combine(statistics.sum(0), N)`, and a bootstrap draws rows anew without scoring a text twice.

`bleu` is sacrebleu's corpus BLEU (13a); `rouge2` the mean F1 of rouge-score without stemming; `final_number` compares
the last number, or the one after '####'; `accuracy` the letter of a multiple choice; `pass_at_1` runs programs.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
import dataclasses
from fractions import Fraction
import functools
import inspect
import os
import re
from typing import Any

import numpy as np

from speccascade.data import sandbox
from speccascade.data.examples import Example, Metric

ORDER = 4  # BLEU's longest n-gram
_WHOLE = r'(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)'
_NUMBER = re.compile(
  rf'(?:(?<![\w).])-\$?)?(?:(?:{_WHOLE} +)?\d+/0*[1-9]\d*|(?:{_WHOLE}(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{{1,3}}(?!\w))?)',
  re.ASCII,
)  # 1,234.5 · 5e3 · 1/2 · 1 1/2
_STATED = re.compile(r'\banswer(?: is|:)\s*\(?([A-D])\b', re.IGNORECASE)
_LETTER = re.compile(r'\b([A-D])\b')
_FENCE = re.compile(r'```(?:python)?\n(.*?)(?:```|\Z)', re.DOTALL)


def references(example: Example) -> list[str]:
  """Return the reference texts of an example."""
  return [example.target] if isinstance(example.target, str) else list(example.target)


@dataclasses.dataclass(frozen=True)
class Summed:
  """A metric that is a function of sums over examples."""

  def statistics(self, examples: Sequence[Example], predictions: Sequence[str]) -> np.ndarray:
    raise NotImplementedError

  def combine(self, row: np.ndarray, n: int) -> float:
    raise NotImplementedError

  def lacks(self, example: Example) -> str | None:
    """Return what an example lacks without which no prediction is right, None where it has all."""
    return None if references(example) else 'a reference'

  def __call__(self, examples: Sequence[Example], predictions: Sequence[str]) -> float:
    if not len(examples):
      raise ValueError('a metric needs one example at least, but none was given.')
    return self.combine(self.statistics(examples, predictions).sum(0), len(examples))


@dataclasses.dataclass(frozen=True)
class Bleu(Summed):
  """Corpus BLEU of sacrebleu, tokenizer 13a, exponential smoothing; rows are lengths, matches and n-gram counts."""

  def statistics(self, examples, predictions):
    scorer = _bleu()
    scores = [scorer.sentence_score(text, references(e)) for e, text in zip(examples, predictions, strict=True)]
    rows = [[s.sys_len, s.ref_len, *s.counts, *s.totals] for s in scores]
    return np.array(rows, np.int64).reshape(len(rows), 2 + 2 * ORDER)

  def combine(self, row, n):
    sys_len, ref_len, *ngrams = (int(round(x)) for x in row)
    score = type(_bleu()).compute_bleu(
      ngrams[:ORDER], ngrams[ORDER:], sys_len, ref_len, smooth_method='exp', max_ngram_order=ORDER
    )
    return float(score.score)


@functools.cache
def _bleu():
  from sacrebleu.metrics import BLEU  # lazily: decoding needs no metric library

  # The order concerns single sentences, whose score is not used, and silences a warning about it.
  return BLEU(tokenize='13a', effective_order=True)


@dataclasses.dataclass(frozen=True)
class Mean(Summed):
  """The mean over examples of a score of 0 … 1, in per cent."""

  score: Callable[[Example, str], float]
  reads: Callable[[str], Any] | None = None  # what is compared of a reference, None where it has none
  wanted: str = 'a reference'  # that, in words

  def lacks(self, example):
    given = references(example)
    return self.wanted if not given or (self.reads and all(self.reads(r) is None for r in given)) else None

  def statistics(self, examples, predictions):
    scores = [self.score(e, text) for e, text in zip(examples, predictions, strict=True)]
    return np.array(scores, np.float64)[:, None]

  def combine(self, row, n):
    return float(100 * row[0] / n)


def rouge2_f1(example: Example, prediction: str) -> float:
  """Return the bigram F1 of a prediction against its nearest reference."""
  return max(_rouge().score(reference, prediction)['rouge2'].fmeasure for reference in references(example))


@functools.cache
def _rouge():
  from rouge_score import rouge_scorer  # lazily: decoding needs no metric library

  return rouge_scorer.RougeScorer(['rouge2'], use_stemmer=False)  # T5's evaluation does not stem either


def number(text: str) -> Fraction | None:
  """Return the number that a worked answer ends with: the one after '####' if there is one, else the last."""
  text = text.replace('\u2212', '-')  # the sign that typesetters use
  _, mark, after = text.partition('####')
  found = _NUMBER.findall(after)[:1] if mark else []
  found = found or _NUMBER.findall(text)[-1:]
  return _value(re.sub(r'[$,]', '', found[0])) if found else None


def _value(written: str) -> Fraction:
  """Return the value of a number, a mixed one (1 1/2) included."""
  *whole, last = written.split()
  sign = -1 if written.startswith('-') else 1
  return sign * sum(abs(Fraction(part)) for part in (*whole, last))


def same_number(example: Example, prediction: str) -> float:
  """Return 1 where the prediction ends with a reference's number."""
  given = number(prediction)
  return float(given is not None and any(given == number(r) for r in references(example)))


def letter(text: str) -> str | None:
  """Return the choice that a text makes: the one that it calls its answer, else the first letter that stands alone."""
  found = _STATED.search(text) or _LETTER.search(text)
  return found.group(1).upper() if found else None


def same_letter(example: Example, prediction: str) -> float:
  """Return 1 where the prediction chooses the reference's letter."""
  given = letter(prediction)
  return float(given is not None and any(given == letter(r) for r in references(example)))


def same_text(example: Example, prediction: str) -> float:
  """Return 1 where the prediction is a reference, white space around it aside."""
  return float(prediction.strip() in [r.strip() for r in references(example)])


@dataclasses.dataclass(frozen=True)
class PassAt1(Mean):
  """The share of programs that pass their tests; it runs what a model wrote, so it has to be allowed.

  An example's `info` holds `test`, `entry_point` and, where the prompt is not the program's beginning, `prompt`.
  """

  score: Callable[[Example, str], float] | None = None
  allow_execution: bool | str = False  # sandbox.WITHOUT_ISOLATION: also where namespaces are forbidden
  seconds: float = 5.0
  memory: int = 1 << 30  # bytes of address space

  def lacks(self, example):
    missing = [key for key in ('test', 'entry_point') if key not in example.info]
    return f'{" and ".join(missing)} in its info' if missing else None

  def statistics(self, examples, predictions):
    if not self.allow_execution:
      raise PermissionError(
        'pass_at_1 runs programs that a model wrote, which is not allowed unless you say so: give the task '
        "allow_execution=True (see speccascade.data.sandbox), or other metrics, as metrics=('exact_match',)."
      )
    programs = [program(e, text) for e, text in zip(examples, predictions, strict=True)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
      isolated = self.allow_execution != sandbox.WITHOUT_ISOLATION
      passed = list(pool.map(lambda p: _passes(p, self.seconds, self.memory, isolated), programs))
    return np.array(passed, np.float64)[:, None]


@functools.lru_cache(maxsize=4096)  # greedy outputs recur from point to point
def _passes(text: str, seconds: float, memory: int, isolated: bool) -> bool:
  return sandbox.run(text, seconds=seconds, memory=memory, isolated=isolated).passed


def program(example: Example, prediction: str) -> str:
  """Return the program that tests a completion: the prompt, the completion, the tests, and the call of them.

  Of an answer with a fenced block the block is taken; code that defines the function anew replaces the prompt's.
  Sentencepiece drops a text's first space, so an odd indentation of the first line is one space short.
  """
  if missing := pass_at_1.lacks(example):
    raise ValueError(f'example {example.index} lacks {missing}; pass_at_1 needs them.')
  fenced = _FENCE.search(prediction)
  code = fenced.group(1) if fenced else prediction
  indent = len(code) - len(code.lstrip(' '))
  code = ' ' + code if indent % 2 else code
  start, name = example.info.get('prompt', example.prompt), example.info['entry_point']
  code = f'    pass\n\n{code}' if f'def {name}(' in code else code
  return f'{start}{code}\n\n{example.info["test"]}\n\ncheck({name})\n'


bleu = Bleu()
rouge2 = Mean(rouge2_f1)
final_number = Mean(same_number, number, 'a reference with a number')
accuracy = Mean(same_letter, letter, 'a reference with a letter A–D')
exact_match = Mean(same_text)
pass_at_1 = PassAt1()

METRICS: dict[str, Summed] = dict(
  bleu=bleu, rouge2=rouge2, final_number=final_number, accuracy=accuracy, exact_match=exact_match, pass_at_1=pass_at_1
)


def named(wanted: Sequence[str | Metric], *, allow_execution: bool | str = False) -> dict[str, Metric]:
  """Return metrics by name, in order; one of one's own is a function, or an object that can be called.

  Whether programs may run is settled here, before anything is decoded.
  """
  if isinstance(wanted, str) or callable(wanted) or not wanted:
    raise ValueError(f"metrics={wanted!r} is not a list of names and functions; write ('bleu',).")
  if allow_execution not in (False, True, sandbox.WITHOUT_ISOLATION):
    raise ValueError(f'allow_execution={allow_execution!r} is not False, True or {sandbox.WITHOUT_ISOLATION!r}.')
  found = {name_of(metric): METRICS.get(metric, metric) if isinstance(metric, str) else metric for metric in wanted}
  if len(found) < len(wanted):
    raise ValueError(f'two metrics of {", ".join(map(name_of, wanted))} have one name; drop or rename one.')
  if found.get('pass_at_1') is pass_at_1:
    found['pass_at_1'] = dataclasses.replace(pass_at_1, allow_execution=allow_execution)
    if not allow_execution:
      found['pass_at_1'].statistics([], [])  # raises, and says how to allow it
    isolated = allow_execution != sandbox.WITHOUT_ISOLATION
    sandbox.run('', isolated=isolated)  # raises where the system cannot contain a program
  return found


def name_of(metric: str | Metric) -> str:
  """Return what a metric is called in results, having checked that it is one."""
  if isinstance(metric, str) and metric in METRICS:
    return metric
  if not callable(metric) or inspect.isclass(metric):
    raise ValueError(f'there is no metric {metric!r}; choose from {", ".join(METRICS)}, or give a function.')
  function = metric.func if isinstance(metric, functools.partial) else metric
  name = getattr(function, '__name__', type(function).__name__)
  if not name.isidentifier():
    raise ValueError(f'a metric is {name}, which names none in results; define it with def.')
  return name


def check(judged: Mapping[str, Metric], examples: Sequence[Example], where: Callable[[Example], str] | None = None):
  """Raise for the first example whose references no prediction can match, and for a metric that gives no number.

  `where` says where an example was read.
  """
  where = where or (lambda example: f'example {example.index}')
  for name, metric in judged.items():
    if not isinstance(metric, Summed):
      _try(name, metric, examples[:2])
      continue
    for example in examples:
      if missing := metric.lacks(example):
        raise ValueError(f'{where(example)} lacks {missing}, which {name} needs; correct it, or take it out.')


def _try(name: str, metric: Metric, examples: Sequence[Example]):
  """Let a metric of one's own judge references, so that it does not fail when all is decoded."""
  texts = [next(iter(references(example)), '') for example in examples]
  try:
    float(metric(list(examples), texts))
  except Exception as error:
    said = f'{type(error).__name__}: {str(error).strip()}'.splitlines()[0]
    raise ValueError(f'the metric {name} cannot judge the first references by themselves ({said}).') from error
