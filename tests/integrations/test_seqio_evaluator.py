"""seqio's Evaluator judges our decoding as our own loop does, whatever the architecture."""

import functools
from pathlib import Path
import sys
import types
import warnings

import jax
from matching import having
import numpy as np
import pytest
from tiers import long_but

with warnings.catch_warnings():
  warnings.simplefilter('ignore')  # of TensorFlow's and seqio's imports
  seqio = pytest.importorskip('seqio')

from speccascade import decode, methods, Model, Sampler
from speccascade.checkpoints import hf
from speccascade.data.seqio import tasks
from speccascade.data.tokenizers import find
from speccascade.evaluate import config
from speccascade.integrations import seqio_evaluator
from speccascade.models import toy

pytestmark = pytest.mark.filterwarnings('ignore::DeprecationWarning')
NEW = 6
T5 = {'model_type': 't5', 'vocab_size': 11, 'd_model': 8, 'd_kv': 4, 'd_ff': 6, 'num_layers': 1, 'num_heads': 2}
PROMPTS = ['a', 'two words', 'ä', '', 'something longer']


@functools.cache
def models(folder, encoder):
  tokenizer = find(folder)
  size = len(tokenizer.pieces())
  large = toy.model(0, size, 1, scale=3.0, eos_ids=(1,), encoder=encoder)
  bias = np.zeros((1, size), np.float32)
  bias[0, 1] = 6.0  # some texts end
  large = large.replace(params={**large.params, 'table': large.params['table'] + bias}, tokenizer=tokenizer)
  return [toy.model(1, size, 1, near=large, eos_ids=(1,), encoder=encoder).replace(tokenizer=tokenizer), large]


def add(name, prompts, target, **more):
  def dataset(split, shuffle_files, seed=None):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(dict(inputs=prompts, targets=[target] * len(prompts)))

  seqio.TaskRegistry.add(
    name,
    source=seqio.FunctionDataSource(dataset, splits=['validation']),
    preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
    output_features={key: seqio.Feature(seqio.ByteVocabulary()) for key in ('inputs', 'targets')},
    **more,
  )


@pytest.fixture
def task():
  """Register a task and forget it again."""
  Seen.calls.clear()

  def seen(targets, predictions):
    Seen.calls.append(predictions)
    return {'seen': len(predictions)}

  add('echo', PROMPTS, 'abc', metric_fns=[seen])
  yield
  seqio.TaskRegistry.remove('echo')


@pytest.fixture
def mixture(task):
  """Register a mixture of that task and another, and forget both again."""
  add('echo2', ['b'], 'xyz', metric_fns=[])
  yield seqio.MixtureRegistry.add('echoes', ['echo', 'echo2'], default_rate=1.0)
  seqio.MixtureRegistry.remove('echoes')
  seqio.TaskRegistry.remove('echo2')


class Seen:
  """Predictions that a metric was given."""

  calls = []


RUNS = [(0.0, True), (1.0, False)]


@pytest.mark.full
@pytest.mark.parametrize('temperature, encoder', long_but(RUNS, RUNS[:1]), ids=['encoder-decoder', 'decoder'])
def test_an_evaluator_sees_what_decode_gives(task, byt5, encoder, temperature):
  pair = models(byt5, encoder)
  method, settings = methods.speculative(block=2), dict(max_new_tokens=NEW, sampler=Sampler(temperature), seed=3)
  evaluator = seqio.Evaluator('echo', seqio_evaluator.converter(pair[1]), eval_split='validation', logger_cls=[])
  predict = seqio_evaluator.predict_fn(method, pair, **settings)
  found, _ = evaluator.evaluate(compute_metrics=True, step=0, predict_fn=predict)
  assert found.result()['echo']['seen'] == len(PROMPTS)
  (predictions,) = Seen.calls
  assert predictions == decode(method, pair, PROMPTS, **settings).texts


@pytest.mark.full
def test_predictions_are_in_order_and_rectangular(byt5):
  import tensorflow as tf

  pair = models(byt5, True)
  rows = np.int32([[5, 6, 1, 0], [7, 1, 0, 0], [8, 0, 9, 1]])
  dataset = tf.data.Dataset.from_tensor_slices(dict(encoder_input_tokens=rows)).enumerate().shuffle(3, seed=1)
  predict = seqio_evaluator.predict_fn(methods.autoregressive(1), pair, max_new_tokens=NEW, batch_size=2)
  found = dict(predict(dataset))
  direct = decode(methods.autoregressive(1), pair, [[5, 6, 1], [7, 1], [8, 0, 9, 1]], max_new_tokens=NEW)
  shortest, *_, longest = sorted(map(len, direct.tokens))
  assert shortest < longest
  assert found == {i: row + [1] * (longest - len(row)) for i, row in enumerate(direct.tokens)}


@pytest.mark.full
def test_t5xs_keywords_are_taken_and_its_parameters_used():
  import tensorflow as tf

  network = hf.network_from_config(T5)
  own, trained = (Model(network.init(jax.random.key(seed)), network) for seed in (0, 1))
  dataset = tf.data.Dataset.from_tensor_slices(dict(encoder_input_tokens=np.int32([[5, 6, 1], [7, 1, 0]]))).enumerate()
  settings = dict(max_new_tokens=NEW, sampler=Sampler(0.0))
  predict = seqio_evaluator.predict_fn(methods.autoregressive(0), [own], **settings)
  state = types.SimpleNamespace(params=trained.params)
  found = predict(dataset, train_state=state, rng=jax.random.PRNGKey(0), model_feature_shapes=None)
  direct = seqio_evaluator.predict_fn(methods.autoregressive(0), [trained], **settings)(dataset)
  assert found == direct != predict(dataset)


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
  read = tasks.seqio_task('echoes', **lengths)
  assert [(e.index, e.prompt) for e in read.examples] == [*enumerate([*PROMPTS, 'b'])]
  assert [e.prompt for e in tasks.seqio_task('echoes', count=2, **lengths).examples] == PROMPTS[:2]
  lengths = dict(inputs=9, targets=9)
  by_tokens = tasks.t5x_task('echoes', task_feature_lengths=lengths, metrics=['exact_match'], split='validation')
  assert [e.index for e in by_tokens.examples] == list(range(len(PROMPTS) + 1))


def test_other_features_are_refused():
  with pytest.raises(ValueError, match=having('prompt', 'targets')):
    seqio_evaluator.prompt_tokens(dict(targets=np.arange(3)))


def test_an_evaluation_goes_on_where_a_sequence_ends_as_a_fault():
  large = toy.model(0, 11, 1, eos_ids=(1,), encoder=True)
  sick = large.replace(params={**large.params, 'source': large.params['source'].at[5].set(np.nan)})
  records = [(i, {'encoder_input_tokens': np.array(tokens)}) for i, tokens in enumerate([[2, 3], [4, 3]])]
  dataset = types.SimpleNamespace(as_numpy_iterator=lambda: iter(records))
  predict = seqio_evaluator.predict_fn(methods.autoregressive(), [sick], max_new_tokens=3)
  with pytest.warns(UserWarning, match=having('1 of 2', 'example 0')):
    assert [index for index, _ in predict(dataset)] == [0, 1]
