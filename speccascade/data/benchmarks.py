"""The public benchmarks: where each is found, its prompt, its reference, its lengths and its metric. No TensorFlow.

A prompt is the header, `shots` worked examples and the question. Where it is too long, worked examples are left out
from the last on, then the text inside the question is cut. `fields` is a record of TensorFlow Datasets, bytes decoded.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import re
from typing import Any

LETTERS = 'ABCDEFGHIJ'


@dataclasses.dataclass(frozen=True)
class Item:
  """One question: what stands before and after its text, the answer, and what metrics need besides."""

  before: str
  text: str
  after: str
  target: str
  info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  shot: str | None = None  # the answer as a worked example has it, where that differs

  def render(self, text: str) -> str:
    """Return the question with a text in its place."""
    return f'{self.before}{text}{self.after}'

  def worked(self) -> str:
    """Return the question with its answer, as an example for others."""
    return f'{self.render(self.text)} {self.target if self.shot is None else self.shot}\n\n'


@dataclasses.dataclass(frozen=True)
class Benchmark:
  """A data set of TensorFlow Datasets as a task. `prefix` opens every prompt."""

  dataset: str
  splits: Mapping[str, str]  # split -> what it is called there
  item: Callable[[Mapping[str, Any]], Item]
  max_prompt_tokens: int
  max_new_tokens: int
  metrics: Sequence[str]
  prefix: str = ''
  stop: Sequence[str] = ()
  shots: int = 0
  shots_split: str | None = None  # where worked examples are taken from, in order
  group: str | None = None  # the field that a question shares with its worked examples
  header: Callable[[Mapping[str, Any]], str] | None = None
  prepare: str = ''  # how to get the data, where `tfds build` cannot


def _wmt14(fields: Mapping[str, Any]) -> Item:
  return Item('', fields['en'], '', fields['de'])


def _xsum(fields: Mapping[str, Any]) -> Item:
  return Item('', fields['document'], '', fields['summary'])


def _cnn_dailymail(fields: Mapping[str, Any]) -> Item:
  return Item('', fields['article'], '', fields['highlights'])


def _gsm8k(fields: Mapping[str, Any]) -> Item:
  answer = fields['answer']  # a worked example goes without the calculator's notes, as in 3 * 4 = <<3*4=12>>12
  return Item('Question: ', fields['question'], '\nAnswer:', answer, shot=re.sub(r'<<.*?>>', '', answer))


def _humaneval(fields: Mapping[str, Any]) -> Item:
  info = {key: fields[key] for key in ('prompt', 'test', 'entry_point')}
  return Item('', fields['prompt'], '', fields['canonical_solution'], info)


def _mmlu(fields: Mapping[str, Any]) -> Item:
  choices = ''.join(f'\n{letter}. {choice}' for letter, choice in zip(LETTERS, fields['choices'], strict=False))
  answer = LETTERS[int(fields['answer'])]
  return Item('', fields['question'], f'{choices}\nAnswer:', answer, {'subject': _subject(fields)})


def _mmlu_header(fields: Mapping[str, Any]) -> str:
  return f'Multiple choice: {_subject(fields)}. Each question is followed by its answer.\n\n'


def _subject(fields: Mapping[str, Any]) -> str:
  return fields['subject'].replace('_', ' ')


def _hugging_face(name: str) -> str:
  return (
    f'pip install datasets && python -c "import tensorflow_datasets as tfds; '
    f"tfds.builder('huggingface:{name}', data_dir='{{data_dir}}').download_and_prepare()\""
  )


BENCHMARKS = {
  'wmt14_ende': Benchmark(
    'wmt14_translate/de-en', {s: s for s in ('train', 'validation', 'test')}, _wmt14, 80, 80, ('bleu',)
  ),
  'xsum': Benchmark('xsum', {s: s for s in ('train', 'validation', 'test')}, _xsum, 1024, 64, ('rouge2',)),
  'cnn_dailymail': Benchmark(
    'cnn_dailymail', {s: s for s in ('train', 'validation', 'test')}, _cnn_dailymail, 2048, 128, ('rouge2',)
  ),
  'gsm8k': Benchmark(
    'gsm8k', {'train': 'train', 'test': 'test'}, _gsm8k, 1536, 256, ('final_number',),
    stop=('\nQuestion:',), shots=5, shots_split='train',
  ),
  'humaneval': Benchmark(
    'openai__openai_humaneval', {'test': 'test'}, _humaneval, 768, 384, ('pass_at_1',),
    stop=('\nclass ', '\ndef ', '\n#', '\nif ', '\nprint('), prepare=_hugging_face('openai__openai_humaneval'),
  ),
  'mmlu': Benchmark(
    'cais__mmlu/all', {'validation': 'validation', 'test': 'test'}, _mmlu, 2040, 8, ('accuracy',),
    stop=('\n',), shots=5, shots_split='dev', group='subject', header=_mmlu_header,
    prepare=_hugging_face('cais__mmlu/all'),
  ),
}  # fmt: skip
