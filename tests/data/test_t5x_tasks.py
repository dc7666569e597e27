"""Tasks and mixtures of seqio are read as T5X evaluates them, under its names."""

from pathlib import Path
import sys
import warnings

import pytest

with warnings.catch_warnings():
  warnings.simplefilter('ignore')  # of TensorFlow's and seqio's imports
  seqio = pytest.importorskip('seqio')

from speccascade.data.seqio import tasks
from speccascade.data.tokenizers import find
from speccascade.evaluate import config

pytestmark = pytest.mark.filterwarnings('ignore::DeprecationWarning')
NEW = 6
PROMPTS = ['a', 'two words', 'ä', '', 'something longer']


def add(name, prompts, target):
  def dataset(split, shuffle_files, seed=None):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(dict(inputs=prompts, targets=[target] * len(prompts)))

  seqio.TaskRegistry.add(
    name,
    source=seqio.FunctionDataSource(dataset, splits=['validation']),
    preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
    output_features={key: seqio.Feature(seqio.ByteVocabulary()) for key in ('inputs', 'targets')},
    metric_fns=[],
  )


@pytest.fixture
def task():
  """Register a task and forget it again."""
  add('echo', PROMPTS, 'abc')
  yield
  seqio.TaskRegistry.remove('echo')


@pytest.fixture
def mixture(task):
  """Register a mixture of that task and another, and forget both again."""
  add('echo2', ['b'], 'xyz')
  yield seqio.MixtureRegistry.add('echoes', ['echo', 'echo2'], default_rate=1.0)
  seqio.MixtureRegistry.remove('echoes')
  seqio.TaskRegistry.remove('echo2')


def test_t5xs_macros_make_an_experiment(task, byt5, tmp_path, monkeypatch):
  (tmp_path / 'my_tasks.py').write_text('IMPORTED = True')
  monkeypatch.syspath_prepend(str(tmp_path))
  macros = dict(
    MIXTURE_OR_TASK_NAME='echo',
    MIXTURE_OR_TASK_MODULE='my_tasks',
    CHECKPOINT_PATH='large/checkpoint_9',
    DRAFTER_PATH='small/checkpoint_9',
    EVAL_OUTPUT_DIR='out',
  )
  bindings = [f'{name} = {value!r}' for name, value in macros.items()]
  bindings += ["TASK_FEATURE_LENGTHS = {'inputs': 6, 'targets': 9}", "data.t5x_task.split = 'validation'"]
  file = Path(__file__).parents[2] / 'gin_configs' / 'runs' / 't5x_eval.gin'
  config.parse([str(file)], bindings)
  (experiment,) = config.build()
  assert config.folder('x.gin', '') == Path('out') and sys.modules['my_tasks'].IMPORTED
  assert [m.path for m in experiment.models] == ['small/checkpoint_9', 'large/checkpoint_9']
  assert (experiment.task.max_prompt_tokens, experiment.task.max_new_tokens) == (6, 9)
  ids = list(map(find(byt5).encode, PROMPTS))  # cut before the end of text is put behind
  assert [e.prompt for e in experiment.task.examples] == [row if len(row) <= 6 else [*row[:5], 1] for row in ids]
  assert [e.target for e in experiment.task.examples] == ['abc'] * len(PROMPTS)
  with pytest.raises(ValueError, match="'none'"):
    tasks.t5x_task('none', task_feature_lengths=dict(inputs=6, targets=9), metrics=['bleu'])
  with pytest.raises(ValueError, match='task_feature_lengths=None'):
    tasks.t5x_task('echo', task_feature_lengths=None, metrics=['bleu'])


def test_a_mixture_is_read_task_by_task(mixture):
  lengths = dict(max_prompt_tokens=20, max_new_tokens=NEW, metrics=['exact_match'])
  read = tasks.seqio_task('echoes', start=3, **lengths)
  assert [(e.index, e.prompt) for e in read.examples] == [*enumerate([*PROMPTS[3:], 'b'], 3)]
  assert [e.prompt for e in tasks.seqio_task('echoes', count=2, **lengths).examples] == PROMPTS[:2]
  lengths = dict(inputs=9, targets=9)
  by_tokens = tasks.t5x_task('echoes', task_feature_lengths=lengths, metrics=['exact_match'], split='validation')
  assert [e.index for e in by_tokens.examples] == list(range(len(PROMPTS) + 1))
