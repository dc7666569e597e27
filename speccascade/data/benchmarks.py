r"""The public benchmarks: data set, prompt, reference, lengths and metrics of each.

A record is one of TensorFlow Datasets with its bytes decoded. This module needs no TensorFlow.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import re
from typing import Any

from speccascade.data.metrics import NO_ANSWER
from speccascade.data.prompts import Record, Template

LETTERS = 'ABCDEFGHIJ'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark(Template):
  """A data set of TensorFlow Datasets as a task.

  Attributes:
    dataset: Name, and config, in TensorFlow Datasets.
    splits: The names of its splits.
    split: The one that is decoded.
    max_prompt_tokens: The longest prompt.
    max_new_tokens: Tokens to generate at most.
    metrics: Names of metrics.
    fields: Makes the fields of the templates of a record; by default the record has them.
    stop: Strings that end decoding.
    shots: Number of worked examples.
    shots_split: The split of the worked examples, taken in order.
    group: The field in which a question and its worked examples agree.
    prepare: The command that prepares the data, if `tfds build` cannot.
    languages: The benchmark in each programming language, if it has several.
  """

  dataset: str
  splits: Sequence[str]
  split: str = 'test'
  max_prompt_tokens: int
  max_new_tokens: int
  metrics: Sequence[str]
  fields: Callable[[Record], Record] | None = None
  stop: Sequence[str] = ()
  shots: int = 0
  shots_split: str | None = None
  group: str | None = None
  prepare: str = ''
  languages: Mapping[str, 'Benchmark'] = dataclasses.field(default_factory=dict, repr=False)


def _hugging_face(name: str) -> str:
  """Return the command that prepares a data set of Hugging Face."""
  return (
    f'pip install datasets && python -c "import tensorflow_datasets as tfds; '
    f"tfds.builder('huggingface:{name}', data_dir='{{data_dir}}').download_and_prepare()\""
  )


# ---- texts ----


def _from_text(dataset: str, source: str, target: str, tokens: int, new: int, metric: str) -> Benchmark:
  """Return a benchmark whose prompt is a field alone."""
  return Benchmark(
    dataset=dataset,
    splits=('train', 'validation', 'test'),
    split='validation',
    prompt_field=source,
    target_field=target,
    max_prompt_tokens=tokens,
    max_new_tokens=new,
    metrics=(metric,),
  )


def _mmlu(record: Record) -> Record:
  choices = '\n'.join(f'{letter}. {choice}' for letter, choice in zip(LETTERS, record['choices'], strict=False))
  answer = LETTERS[int(record['answer'])]
  return {**record, 'subject': record['subject'].replace('_', ' '), 'choices': choices, 'answer': answer}


# ---- questions with short answers ----


def _questions(
  dataset: str, splits: Sequence[str], answers: Callable[[Record], Sequence[str]], metric: str, **more: Any
) -> Benchmark:
  """Return a benchmark of questions, each with one or more gold answers, after one worked example."""
  settings = dict(
    prompt_field='Question: {question}\nAnswer:',
    target_field='answers',
    max_prompt_tokens=256,
    max_new_tokens=32,
    fields=lambda record: {**record, 'answers': list(dict.fromkeys(answers(record)))},
    stop=('\n',),
    shots=1,
    shots_split='train',
  )
  return Benchmark(
    dataset=dataset,
    splits=splits,
    split=splits[-1],
    metrics=(f'{metric}_exact_match', f'{metric}_f1'),
    **{**settings, **more},
  )


# ---- programs ----


def _humanevalpack(language: str) -> Benchmark:
  """Return HumanEvalPack in a language; a function in braces ends with the first one that is not indented."""
  return Benchmark(
    dataset=f'bigcode__humanevalpack/{language}',
    splits=('test',),
    prompt_field='prompt',
    target_field='canonical_solution',
    max_prompt_tokens=1024,
    max_new_tokens=512,
    metrics=('words',),
    stop=('\nclass ', '\ndef ', '\n#', '\nif ', '\nprint(') if language == 'python' else ('\n}',),
    prepare=_hugging_face(f'bigcode__humanevalpack/{language}'),
  )


_PACK = {language: _humanevalpack(language) for language in ('python', 'js', 'java', 'go', 'cpp', 'rust')}

_OWN = {
  'wmt14_ende': _from_text('wmt14_translate/de-en', 'en', 'de', 80, 80, 'bleu'),
  'xsum': _from_text('xsum', 'document', 'summary', 1024, 64, 'rouge2'),
  'cnn_dailymail': _from_text('cnn_dailymail', 'article', 'highlights', 2048, 128, 'rouge2'),
  'gsm8k': Benchmark(
    dataset='gsm8k',
    splits=('train', 'test'),
    prompt_field='Question: {question}\nAnswer:',
    target_field='answer',
    worked_field='worked',
    # Without the calculator's notes, as in 3 * 4 = <<3*4=12>>12.
    fields=lambda record: {**record, 'worked': re.sub(r'<<.*?>>', '', record['answer'])},
    max_prompt_tokens=1536,
    max_new_tokens=256,
    metrics=('final_number',),
    stop=('\nQuestion:',),
    shots=5,
    shots_split='train',
  ),
  'mmlu': Benchmark(
    dataset='cais__mmlu/all',
    splits=('validation', 'test'),
    header='Multiple choice: {subject}. Each question is followed by its answer.\n\n',
    prompt_field='{question}\n{choices}\nAnswer:',
    target_field='answer',
    text_field='question',
    info_fields=('subject',),
    fields=_mmlu,
    max_prompt_tokens=2040,
    max_new_tokens=8,
    metrics=('accuracy',),
    stop=('\n',),
    shots=5,
    shots_split='dev',
    group='subject',
    prepare=_hugging_face('cais__mmlu/all'),
  ),
  'humaneval': dataclasses.replace(
    _PACK['python'],
    dataset='openai__openai_humaneval',
    max_prompt_tokens=768,
    max_new_tokens=384,
    prepare=_hugging_face('openai__openai_humaneval'),
  ),
  'humanevalpack': dataclasses.replace(_PACK['python'], languages=_PACK),
  'mbpp': Benchmark(
    dataset='google_research_datasets__mbpp/full',
    splits=('train', 'validation', 'test'),
    prompt_field='"""\n{text}\nThese tests pass:\n{tests}\n"""\n',
    target_field='code',
    text_field='text',
    fields=lambda record: {**record, 'tests': '\n'.join(record['test_list'])},
    max_prompt_tokens=1024,
    max_new_tokens=256,
    metrics=('words',),
    stop=('\n"""', '\nassert ', '\nprint('),
    shots=3,
    shots_split='prompt',
    prepare=_hugging_face('google_research_datasets__mbpp/full'),
  ),
  'squad': _questions(
    'squad/v2.0',
    ('train', 'validation'),
    lambda record: record['answers']['text'] or [NO_ANSWER],
    'squad',
    header=f'Answer each question with words of its passage. If the passage has no answer, write: {NO_ANSWER}.\n\n',
    prompt_field='Passage: {context}\nQuestion: {question}\nAnswer:',
    text_field='context',
    max_prompt_tokens=1024,
  ),
  'web_questions': _questions('web_questions', ('train', 'test'), lambda record: record['answers'], 'squad'),
  'natural_questions': _questions(
    'natural_questions_open', ('train', 'validation'), lambda record: record['answer'], 'squad'
  ),
  'trivia_qa': _questions(
    'trivia_qa/unfiltered.nocontext',
    ('train', 'validation'),
    lambda record: [record['answer']['value'], *record['answer']['aliases']],
    'trivia',
  ),
}

BENCHMARKS = _OWN | {
  # For models that were not trained on the task, for which a bare article is no question.
  'cnn_dailymail_prompted': dataclasses.replace(
    _OWN['cnn_dailymail'],
    prompt_field='Article: {article}\nSummary of the article in a few sentences:',
    max_prompt_tokens=1920,
    stop=('\n\n',),
  ),
  # For speed: only an end of text ends an answer, whose first letter counts.
  'mmlu_speed': dataclasses.replace(_OWN['mmlu'], max_prompt_tokens=1940, max_new_tokens=100, stop=()),
}
