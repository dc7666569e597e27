"""Benchmarks and files in seqio's registry hand out the prompts, tokens and judgements that speccascade uses itself."""

import json
import pathlib
import warnings

from matching import having
import pytest

with warnings.catch_warnings():
  warnings.simplefilter('ignore')  # of TensorFlow's and seqio's imports
  seqio = pytest.importorskip('seqio')
  import tensorflow as tf
  import tensorflow_datasets as tfds

from speccascade.data.examples import Example
from speccascade.data.metrics import METRICS
from speccascade.data.seqio import tasks
from speccascade.data.tokenizers import find
from speccascade.evaluate import tasks as named_tasks

pytestmark = pytest.mark.filterwarnings('ignore::DeprecationWarning')
TEXT = tfds.features.Text()
ROOT = pathlib.Path(__file__).parents[2]
# The beginning of a program, its completion and its tests.
CODE = {
  'python': ('def twice(x):\n', '    return 2 * x\n'),
  'go': ('func twice(x float64) float64 {\n', '    return 2 * x\n}\n'),
}
TABLES = {
  ('wmt14_translate', 'de-en'): {
    'validation': [dict(en=f'Sentence {i}.', de=f'Satz {i}.') for i in range(4)],
    'test': [dict(en='The end.', de='Das Ende.')],
  },
  ('xsum', None): {'validation': [dict(document='A long story of a dog. ' * 40, summary='A dog.')]},
  ('cnn_dailymail', None): {'validation': [dict(article='News from the coast.', highlights='Coast .\nNews .')]},
  ('gsm8k', None): {
    'train': [
      dict(question=f'What is {i} + {i}?', answer=f'It is <<{i}+{i}={2 * i}>>{2 * i}.\n#### {2 * i}')
      for i in range(1, 9)
    ],
    'test': [dict(question='What is 9 + 9?', answer='18.\n#### 18')],
  },
  ('openai__openai_humaneval', None): {
    'test': [
      dict(
        prompt='def double(x):\n',
        canonical_solution='    return 2 * x\n',
        entry_point='double',
        test='def check(f):\n  assert f(2) == 4\n',
        task_id='0',
      )
    ],
  },
  ('cais__mmlu', 'all'): {
    'dev': [
      dict(question=f'{s} {i}?', subject=s, choices=['w', 'x', 'y', 'z'], answer=i % 4)
      for i in range(6)
      for s in ('world_religions', 'distribution')
    ],
    'test': [dict(question='Which?', subject='world_religions', choices=['p', 'q', 'r', 's'], answer=2)],
  },
  ('google_research_datasets__mbpp', 'full'): {
    'prompt': [
      dict(
        text=f'Write add{i}.',
        code=f'def add{i}(x):\n  return x + {i}',
        test_setup_code='',
        test_list=[f'assert add{i}(1) == {i + 1}'],
      )
      for i in range(4)
    ],
    'test': [
      dict(
        text='Write half.',
        code='def half(x):\n  return x / TWO',
        test_setup_code='TWO = 2',
        test_list=['assert half(4) == 2', 'assert half(2) == 1'],
      )
    ],
  },
  ('squad', 'v2.0'): {
    'train': [dict(context='Ada has a red cat.', question='What has Ada?', answers=dict(text=['a red cat']))],
    'validation': [
      dict(
        context='Bo swam in the lake. ' * 9,
        question='Where did Bo swim?',
        answers=dict(text=['the lake', 'in the lake', 'the lake']),
      ),
      dict(context='Bo swam.', question='When did Bo swim?', answers=dict(text=[])),
    ],
  },
  ('web_questions', None): {
    'train': [dict(question='who wrote the song?', answers=['Lu', 'Mo'])],
    'test': [dict(question='where is the tower?', answers=['East Town'])],
  },
  ('natural_questions_open', None): {
    'train': [dict(question='how many legs has a spider', answer=['eight'])],
    'validation': [dict(question='when was the bridge built', answer=['1901', 'in 1901'])],
  },
  ('trivia_qa', 'unfiltered.nocontext'): {
    'train': [dict(question='Which bird cannot fly?', answer=dict(value='Ostrich', aliases=['Ostrich', 'Ostriches']))],
    'validation': [dict(question='Which sea?', answer=dict(value='Dead Sea', aliases=['Dead-Sea', 'The Dead Sea']))],
  },
  **{
    ('bigcode__humanevalpack', language): {'test': [dict(prompt=prompt, canonical_solution=solution)]}
    for language, (prompt, solution) in CODE.items()
  },
}


def features(value):
  if isinstance(value, dict):
    return tfds.features.FeaturesDict({key: features(x) for key, x in value.items()})
  if isinstance(value, list):
    return tfds.features.Sequence(TEXT)
  return TEXT if isinstance(value, str) else tfds.features.ClassLabel(num_classes=4)


def signature(value):
  if isinstance(value, dict):
    return {key: signature(x) for key, x in value.items()}
  shape = (None,) if isinstance(value, list) else ()
  return tf.TensorSpec(shape, tf.int64 if isinstance(value, int) else tf.string)


@pytest.fixture(scope='session')
def data_dir(tmp_path_factory):
  """Return a folder of data sets, prepared as TensorFlow Datasets prepares them."""
  folder = tmp_path_factory.mktemp('tfds')
  for (name, config), splits in TABLES.items():
    for records in splits.values():
      kinds = features(records[0])
    tfds.dataset_builders.store_as_tfds_dataset(
      name=name,
      version='1.0.0',
      config=config,
      features=kinds,
      data_dir=folder,
      disable_shuffling=True,
      split_datasets={
        s: tf.data.Dataset.from_generator(records.__iter__, output_signature=signature(records[0]))
        for s, records in splits.items()
      },
    )
  return str(folder)


@pytest.fixture(autouse=True)
def registry():
  """Forget what a test has registered."""
  before = set(seqio.TaskRegistry.names())
  yield
  for name in set(seqio.TaskRegistry.names()) - before:
    seqio.TaskRegistry.remove(name)


# ---- benchmarks ----


def test_translation_keeps_order_indices_and_the_papers_lengths(data_dir):
  task = tasks.seqio_task('wmt14_ende', data_dir=data_dir)
  assert task.examples == [Example(i, f'Sentence {i}.', f'Satz {i}.') for i in range(4)]
  assert (task.max_prompt_tokens, task.max_new_tokens, list(task.metrics)) == (80, 80, ['bleu'])
  part = tasks.seqio_task('wmt14_ende', data_dir=data_dir, count=2, prefix='translate: ')
  assert part.examples == [Example(i, f'translate: Sentence {i}.', f'Satz {i}.') for i in (0, 1)]
  assert tasks.seqio_task('wmt14_ende', data_dir=data_dir, split='test').examples[0].target == 'Das Ende.'


def test_articles_are_cut_to_the_prompt_length(data_dir, byt5):
  task = tasks.seqio_task('xsum', data_dir=data_dir, tokenizer=byt5, max_prompt_tokens=100, prefix='summarize: ')
  prompt = task.examples[0].prompt
  assert prompt.startswith('summarize: A long story') and len(find(byt5).encode(prompt)) == 100
  news = tasks.seqio_task('cnn_dailymail', data_dir=data_dir)
  assert news.examples[0].target == 'Coast .\nNews .' and news.max_prompt_tokens == 2048


def test_worked_examples_come_from_training_without_calculator_notes(data_dir):
  task = tasks.seqio_task('gsm8k', data_dir=data_dir, split='test', shots=2)
  assert task.examples[0].prompt == (
    'Question: What is 1 + 1?\nAnswer: It is 2.\n#### 2\n\n'
    'Question: What is 2 + 2?\nAnswer: It is 4.\n#### 4\n\n'
    'Question: What is 9 + 9?\nAnswer:'
  )
  five, none = (tasks.seqio_task('gsm8k', data_dir=data_dir, split='test', shots=n) for n in (None, 0))
  assert five.examples[0].prompt.count('####') == 5 and none.examples[0].prompt == 'Question: What is 9 + 9?\nAnswer:'
  text = none.postprocess(' 18\n#### 18\n\nQuestion: What is 7?', none.examples[0])
  assert text == ' 18\n#### 18\n' and none.metrics['final_number'](none.examples, [text]) == 100


def test_a_question_is_no_worked_example_of_its_own(data_dir):
  examples = tasks.seqio_task('gsm8k', data_dir=data_dir, split='train', shots=2).examples
  assert examples[1].prompt == 'Question: What is 1 + 1?\nAnswer: It is 2.\n#### 2\n\nQuestion: What is 2 + 2?\nAnswer:'
  assert [e.prompt.count('####') for e in examples] == [1, 1, *6 * [2]]


def test_a_choice_is_asked_with_examples_of_its_own_subject(data_dir):
  task = tasks.seqio_task('mmlu', data_dir=data_dir, split='test', shots=2)
  (example,) = task.examples
  assert json.dumps(vars(example)) and type(example.prompt) is str  # plain Python
  assert (
    example.target == 'C' and example.info == {'subject': 'world religions'} and 'distribution' not in example.prompt
  )
  assert example.prompt.endswith('\nA. w\nB. x\nC. y\nD. z\nAnswer: B\n\nWhich?\nA. p\nB. q\nC. r\nD. s\nAnswer:')
  assert task.metrics['accuracy'](task.examples, [' C']) == 100


def test_worked_examples_give_way_before_the_question_does(data_dir, byt5):
  settings = dict(data_dir=data_dir, split='test', tokenizer=byt5)
  ask = 'Question: What is 9 + 9?\nAnswer:'
  for limit, shots in ((999, 5), (150, 2), (40, 0)):
    (example,) = tasks.seqio_task('gsm8k', max_prompt_tokens=limit, **settings).examples
    assert example.prompt.count('####') == shots and example.prompt.endswith(ask)
  (example,) = tasks.seqio_task('gsm8k', max_prompt_tokens=30, **settings).examples
  assert example.prompt == 'Question: What is 9 +\nAnswer:'


def test_programs_are_prompts_that_end_with_their_function(data_dir):
  task = tasks.seqio_task('humaneval', data_dir=data_dir, split='test')
  assert list(task.metrics) == ['words'] and task.examples[0].prompt == 'def double(x):\n'
  assert task.postprocess('    return 2 * x\n\ndef other():\n    broken', task.examples[0]) == '    return 2 * x\n'


@pytest.mark.parametrize('name', ['wmt14_ende', 'humaneval'])
def test_missing_data_is_named_with_the_remedy(name, tmp_path):
  dataset = tasks.BENCHMARKS[name].dataset
  with pytest.raises(FileNotFoundError, match=having(dataset, str(tmp_path))):
    tasks.seqio_task(name, data_dir=str(tmp_path))


@pytest.mark.parametrize(
  'name, settings, match',
  [
    ('wmt14_ende', dict(split='dev'), having("'dev'", 'test, train, validation')),
    ('wmt14_ende', dict(count=0), 'count=0'),
    ('wmt14_ende', dict(shots=3), 'split'),
    ('wmt15', dict(max_prompt_tokens=8, max_new_tokens=8, metrics=('bleu',)), 'wmt15'),
    ('mine', dict(), 'max_prompt_tokens'),
    ('mine', dict(data_dir='/'), 'data_dir'),
    ('mine', dict(shots=3, max_prompt_tokens=8, max_new_tokens=8, metrics=('bleu',)), 'shots=3'),
    ('wmt14_ende', dict(language='go'), having("'go'", 'none')),
    ('humanevalpack', dict(language='c'), having("'c'", 'python, js, java, go, cpp, rust')),
    ('wmt14_ende', dict(stop='x'), 'stop='),
    ('wmt14_ende', dict(prompt_field='{fr}'), having("'fr'", 'de, en')),
  ],
)
def test_wrong_settings_are_named(data_dir, name, settings, match):
  where = dict(data_dir=data_dir) if name in tasks.BENCHMARKS else {}
  with pytest.raises(ValueError, match=match):
    tasks.seqio_task(name, **where, **settings)


def test_a_template_makes_a_benchmark_a_task_for_other_models(data_dir):
  settings = dict(data_dir=data_dir, prompt_field='Article: {article}\nSummary:', prefix='> ')
  (example,) = tasks.seqio_task('cnn_dailymail', **settings).examples
  assert example.prompt == '> Article: News from the coast.\nSummary:' and example.target == 'Coast .\nNews .'
  (asked,) = tasks.seqio_task('cnn_dailymail', **settings, chat='Be brief.').examples
  assert asked.prompt == [dict(role='system', content='Be brief.'), dict(role='user', content=example.prompt)]


def test_a_seed_takes_a_random_subset_that_grows_with_its_count(data_dir):
  read = lambda **settings: [
    e.index for e in tasks.seqio_task('gsm8k', data_dir=data_dir, split='train', shots=0, **settings).examples
  ]
  assert read(count=3) == [0, 1, 2] and read(seed=1) == list(range(8))
  three, five = read(count=3, seed=1), read(count=5, seed=1)
  assert three == read(count=3, seed=1) == sorted(three) and set(three) < set(five) and len(five) == 5
  assert len({tuple(read(count=3, seed=seed)) for seed in range(6)}) > 1


def test_stop_strings_end_decoding_and_may_be_dropped(data_dir):
  assert tasks.seqio_task('mmlu', data_dir=data_dir, split='test').stop == ('\n',)
  fast = tasks.seqio_task('mmlu', data_dir=data_dir, split='test', stop=[], max_new_tokens=100)
  assert not fast.stop and fast.postprocess is None and fast.max_new_tokens == 100


def test_short_answers_have_all_their_gold_answers(data_dir):
  answered, impossible = tasks.seqio_task('squad', data_dir=data_dir).examples
  assert answered.prompt == (
    'Answer each question with words of its passage. If the passage has no answer, write: unanswerable.\n\n'
    'Passage: Ada has a red cat.\nQuestion: What has Ada?\nAnswer: a red cat\n\n'
    f'Passage: {"Bo swam in the lake. " * 9}\nQuestion: Where did Bo swim?\nAnswer:'
  )
  assert answered.target == ['the lake', 'in the lake'] and impossible.target == ['unanswerable']
  web = tasks.seqio_task('web_questions', data_dir=data_dir, split='test').examples[0]
  assert web.prompt == 'Question: who wrote the song?\nAnswer: Lu\n\nQuestion: where is the tower?\nAnswer:'
  assert tasks.seqio_task('natural_questions', data_dir=data_dir).examples[0].target == ['1901', 'in 1901']
  trivia = tasks.seqio_task('trivia_qa', data_dir=data_dir)
  assert trivia.examples[0].target == ['Dead Sea', 'Dead-Sea', 'The Dead Sea']
  assert (
    trivia.metrics['trivia_exact_match'](trivia.examples, [trivia.postprocess(' dead-sea.\nQuestion', None)]) == 100
  )


def test_the_passage_is_truncated_and_its_question_is_not(data_dir, byt5):
  task = tasks.seqio_task('squad', data_dir=data_dir, tokenizer=byt5, max_prompt_tokens=180)
  prompt = task.examples[0].prompt
  assert len(find(byt5).encode(prompt)) == 180 and 'Ada' not in prompt
  assert prompt.endswith('\nQuestion: Where did Bo swim?\nAnswer:')


def test_the_prompts_of_programs_have_their_tests_or_their_language(data_dir):
  task = tasks.seqio_task('mbpp', data_dir=data_dir, split='test')
  prompt = task.examples[0].prompt
  assert prompt.count('"""\ndef add') == 3 and prompt.endswith(
    '"""\nWrite half.\nThese tests pass:\nassert half(4) == 2\nassert half(2) == 1\n"""\n'
  )
  for language, (prompt, solution) in CODE.items():
    task = tasks.seqio_task('humanevalpack', data_dir=data_dir, split='test', language=language)
    (example,) = task.examples
    assert example.prompt == prompt and task.postprocess(f'{solution}\ndef more', example) in solution


# ---- the registry ----


def test_any_seqio_task_becomes_plain_examples(byt5):
  def dataset(split, shuffle_files, seed=None):
    return tf.data.Dataset.from_tensor_slices(dict(inputs=['a', 'b', 'c'], targets=['x', 'y', 'z']))

  seqio.TaskRegistry.add(
    'anyones',
    source=seqio.FunctionDataSource(dataset, splits=['test']),
    preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
    output_features={key: seqio.Feature(seqio.ByteVocabulary()) for key in ('inputs', 'targets')},
    metric_fns=[],
  )
  limits = dict(max_prompt_tokens=8, max_new_tokens=8, metrics=('bleu',))
  task = tasks.seqio_task('anyones', split='test', **limits)
  assert task.examples == [Example(0, 'a', 'x'), Example(1, 'b', 'y'), Example(2, 'c', 'z')]
  asked = tasks.seqio_task('anyones', split='test', prompt_field='Q: {inputs} A:', **limits)
  assert [e.prompt for e in asked.examples] == ['Q: a A:', 'Q: b A:', 'Q: c A:']
  with pytest.raises(ValueError, match='vocabular'):
    tasks.seqio_task('anyones', tokenizer=byt5, **limits)


# ---- documents and configurations ----


def test_the_page_lists_every_benchmark_with_its_lengths_and_metric():
  page = (ROOT / 'docs' / 'tasks.md').read_text()
  for name, benchmark in tasks.BENCHMARKS.items():
    (row,) = [line.split(' | ') for line in page.splitlines() if line.startswith(f'| `{name}` |')]
    assert row[1] == f'`{benchmark.dataset}`' and row[4] == ', '.join(f'`{m}`' for m in benchmark.metrics) + ' |'
    assert row[3] == f'{benchmark.max_prompt_tokens} / {benchmark.max_new_tokens}'
  assert [m for m in METRICS if f'| `{m}` |' not in page] == []


@pytest.mark.parametrize('name', tasks.BENCHMARKS)
def test_the_name_of_each_benchmark_is_its_task(name, data_dir):
  task = named_tasks.find(f'{name}(data_dir={data_dir!r})')
  benchmark = tasks.BENCHMARKS[name]
  assert task.name == name and task.examples and list(task.metrics) == list(benchmark.metrics)
  assert (task.max_prompt_tokens, task.max_new_tokens) == (benchmark.max_prompt_tokens, benchmark.max_new_tokens)


@pytest.mark.parametrize(
  'name, end, new', [('mmlu_speed', 'Answer:', 100), ('cnn_dailymail_prompted', 'few sentences:', 128)]
)
def test_a_benchmark_changes_the_prompt_or_the_length_of_another(name, end, new, data_dir):
  task = named_tasks.find(f'{name}(data_dir={data_dir!r})')
  assert all(e.prompt.endswith(end) for e in task.examples) and task.max_new_tokens == new
