"""The public benchmarks: data set, prompt, reference, lengths and metric of each.

A prompt is the prefix, the header, `shots` worked examples and the question. If it is too long, worked examples are
dropped from the last on, then the text inside the question is truncated. `fields` is a record of TensorFlow Datasets
with its bytes decoded. This module needs no TensorFlow.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import re
from typing import Any

LETTERS = 'ABCDEFGHIJ'


@dataclasses.dataclass(frozen=True)
class Item:
  """One question.

  Attributes:
    before: the prompt before the text.
    text: the text, which may be truncated.
    after: the prompt after the text.
    target: the answer.
    info: further fields for metrics.
    shot: the answer in a worked example; by default the target.
  """

  before: str
  text: str
  after: str
  target: str
  info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  shot: str | None = None

  def render(self, text: str) -> str:
    """Return the question about a text."""
    return f'{self.before}{text}{self.after}'

  def worked(self) -> str:
    """Return the question with its answer, as a worked example."""
    return f'{self.render(self.text)} {self.target if self.shot is None else self.shot}\n\n'


@dataclasses.dataclass(frozen=True)
class Benchmark:
  """A data set of TensorFlow Datasets as a task.

  Attributes:
    dataset: name, and config, in TensorFlow Datasets.
    splits: names of splits, and the splits of the data set that they stand for.
    item: makes the question of a record.
    max_prompt_tokens: the longest prompt.
    max_new_tokens: tokens to generate at most.
    metrics: names of metrics.
    prefix: beginning of every prompt.
    stop: strings that end a prediction before it is judged.
    shots: number of worked examples.
    shots_split: the split of the worked examples, taken in order.
    group: the field in which a question and its worked examples agree.
    header: makes the instruction before the worked examples.
    prepare: the command that prepares the data, if `tfds build` cannot.
  """

  dataset: str
  splits: Mapping[str, str]
  item: Callable[[Mapping[str, Any]], Item]
  max_prompt_tokens: int
  max_new_tokens: int
  metrics: Sequence[str]
  prefix: str = ''
  stop: Sequence[str] = ()
  shots: int = 0
  shots_split: str | None = None
  group: str | None = None
  header: Callable[[Mapping[str, Any]], str] | None = None
  prepare: str = ''


def _text(source: str, target: str) -> Callable[[Mapping[str, Any]], Item]:
  """Return the maker of prompts that are one field alone."""
  return lambda fields: Item('', fields[source], '', fields[target])


def _gsm8k(fields: Mapping[str, Any]) -> Item:
  answer = fields['answer']  # worked examples drop the calculator's notes, as in 3 * 4 = <<3*4=12>>12
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


_ALL_SPLITS = {'train': 'train', 'validation': 'validation', 'test': 'test'}

BENCHMARKS = {
  'wmt14_ende': Benchmark('wmt14_translate/de-en', _ALL_SPLITS, _text('en', 'de'), 80, 80, ('bleu',)),
  'xsum': Benchmark('xsum', _ALL_SPLITS, _text('document', 'summary'), 1024, 64, ('rouge2',)),
  'cnn_dailymail': Benchmark('cnn_dailymail', _ALL_SPLITS, _text('article', 'highlights'), 2048, 128, ('rouge2',)),
  'gsm8k': Benchmark(
    'gsm8k',
    {'train': 'train', 'test': 'test'},
    _gsm8k,
    max_prompt_tokens=1536,
    max_new_tokens=256,
    metrics=('final_number',),
    stop=('\nQuestion:',),
    shots=5,
    shots_split='train',
  ),
  'humaneval': Benchmark(
    'openai__openai_humaneval',
    {'test': 'test'},
    _humaneval,
    max_prompt_tokens=768,
    max_new_tokens=384,
    metrics=('pass_at_1',),
    stop=('\nclass ', '\ndef ', '\n#', '\nif ', '\nprint('),
    prepare=_hugging_face('openai__openai_humaneval'),
  ),
  'mmlu': Benchmark(
    'cais__mmlu/all',
    {'validation': 'validation', 'test': 'test'},
    _mmlu,
    max_prompt_tokens=2040,
    max_new_tokens=8,
    metrics=('accuracy',),
    stop=('\n',),
    shots=5,
    shots_split='dev',
    group='subject',
    header=_mmlu_header,
    prepare=_hugging_face('cais__mmlu/all'),
  ),
}
