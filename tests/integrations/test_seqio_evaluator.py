"""seqio's Evaluator judges our decoding as our own loop does, whatever the architecture."""

import functools
import json
from pathlib import Path
import shutil
import sys
import types
import warnings

import jax
from matching import having
import numpy as np
import pytest
from tiers import quick

with warnings.catch_warnings():
  warnings.simplefilter('ignore')  # of TensorFlow's and seqio's imports
  seqio = pytest.importorskip('seqio')

from speccascade import decode, embedded, methods, Model, Sampler
from speccascade.checkpoints import hf
from speccascade.data import metrics
from speccascade.data.examples import Example, Task
from speccascade.data.seqio import pipeline, tasks
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


@pytest.fixture
def task(byt5):
  """Register a task and forget it again."""
  examples = [Example(i, prompt, 'abc') for i, prompt in enumerate(PROMPTS)]
  plain = Task('echo', examples, 20, NEW, {'seen': Seen(), 'exact_match': metrics.exact_match})
  Seen.calls.clear()
  pipeline.add_task(plain, tokenizer=byt5)
  yield plain
  seqio.TaskRegistry.remove('echo')


@pytest.fixture
def mixture(task, byt5):
  """Register a mixture of that task and another, and forget both again."""
  other = Task('echo2', [Example(0, 'b', 'xyz')], 20, NEW, {'exact_match': metrics.exact_match})
  pipeline.add_task(other, tokenizer=byt5)
  yield seqio.MixtureRegistry.add('echoes', ['echo', 'echo2'], default_rate=1.0)
  seqio.MixtureRegistry.remove('echoes')
  seqio.TaskRegistry.remove('echo2')


class Seen:
  """A metric that notes what it was given."""

  calls = []

  def __call__(self, examples, predictions):
    self.calls.append((list(examples), list(predictions)))
    return float(len(predictions))


@pytest.mark.parametrize('encoder', [False, True], ids=['decoder', 'encoder-decoder'])
@pytest.mark.parametrize('temperature', quick([0.0, 1.0], [1.0]))
def test_an_evaluator_sees_what_decode_gives(task, byt5, encoder, temperature):
  pair = models(byt5, encoder)
  method, settings = methods.speculative(block=2), dict(max_new_tokens=NEW, sampler=Sampler(temperature), seed=3)
  found = seqio_evaluator.evaluate('echo', method, pair, **settings)
  assert found == {'seen': len(PROMPTS), 'exact_match': 0}
  ((examples, predictions),) = Seen.calls
  assert examples == task.examples
  assert predictions == decode(method, pair, PROMPTS, **settings).texts


def test_a_part_of_a_split_is_its_beginning_and_the_log_holds_it(task, byt5, tmp_path):
  pair = models(byt5, True)
  seqio_evaluator.evaluate(
    'echo', methods.autoregressive(1), pair, max_new_tokens=2, count=2, log_dir=str(tmp_path / 'new' / 'log')
  )
  assert Seen.calls[0][0] == task.examples[:2]
  logged = (tmp_path / 'new' / 'log' / 'echo-000000.jsonl').read_text().splitlines()
  assert [json.loads(line)['prediction'] for line in logged] == Seen.calls[0][1]


def test_prompts_are_cut_where_that_is_asked_for(task, byt5):
  pair = models(byt5, True)
  seqio_evaluator.evaluate('echo', methods.autoregressive(1), pair, max_new_tokens=3, max_prompt_tokens=4)
  ids = [row if len(row) <= 4 else [*row[:3], 1] for row in map(pair[1].tokenizer.encode, PROMPTS)]
  assert Seen.calls[0][1] == decode(methods.autoregressive(1), pair, ids, max_new_tokens=3).texts


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


def test_a_mixture_is_judged_task_by_task(mixture, byt5):
  found = seqio_evaluator.evaluate('echoes', methods.autoregressive(1), models(byt5, True), max_new_tokens=2)
  assert found == {'echo/seen': len(PROMPTS), 'echo/exact_match': 0, 'echo2/exact_match': 0}


@pytest.mark.parametrize('name', ['echo', 'echoes'])
def test_a_split_that_is_not_there_is_named(mixture, byt5, name):
  with pytest.raises(ValueError, match=having(name, "'test'", 'validation')):
    seqio_evaluator.evaluate(name, methods.autoregressive(1), models(byt5, True), max_new_tokens=2, split='test')


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


def test_other_features_are_refused():
  with pytest.raises(ValueError, match=having('prompt', 'targets')):
    seqio_evaluator.prompt_tokens(dict(targets=np.arange(3)))


def test_a_task_of_other_tokens_is_refused(task, byt5, tmp_path):
  from tokenizers import models as kinds
  from tokenizers import Tokenizer

  Tokenizer(kinds.WordLevel({'a': 0, 'b': 1}, unk_token='a')).save(str(tmp_path / 'tokenizer.json'))
  (_, large) = models(byt5, True)
  other = large.replace(tokenizer=find(tmp_path))
  with pytest.raises(ValueError, match=having('echo', 'toy0')):
    seqio_evaluator.evaluate('echo', methods.autoregressive(0), [other], max_new_tokens=2)


def test_a_task_with_a_vocabulary_of_seqios_own_is_refused_too(byt5):
  vocabulary = seqio.SentencePieceVocabulary(str(embedded.vocabulary()), extra_ids=0)
  own = types.SimpleNamespace(name='own', output_features={'inputs': seqio.Feature(vocabulary)})
  with pytest.raises(ValueError, match=having('own', 'toy0')):
    seqio_evaluator._check_tokens(own, models(byt5, True)[1])
  seqio_evaluator._check_tokens(own, embedded.models()[1])


def test_sentinels_of_t5x_are_those_of_transformers_wherever_the_vocabulary_is(tmp_path):
  shutil.copy(embedded.vocabulary(), tmp_path / 'spiece.model')
  (tmp_path / 'tokenizer_config.json').write_text('{"tokenizer_class": "T5Tokenizer", "extra_ids": 3}')
  vocabulary = seqio.SentencePieceVocabulary(str(embedded.vocabulary()), extra_ids=3)
  assert vocabulary.tokenizer  # which reads the file
  vocabulary._sentencepiece_model_file = 'gs://t5-data/vocabs/sentencepiece.model'  # without access
  own = types.SimpleNamespace(name='own', output_features={'inputs': seqio.Feature(vocabulary)})
  seqio_evaluator._check_tokens(own, embedded.models()[1].replace(tokenizer=find(tmp_path)))


@pytest.mark.parametrize('count, some, said', [(0, slice(None), 'count=0'), (None, 1, 'models=toy0')])
def test_an_argument_that_is_wrong_is_named(task, byt5, count, some, said):
  with pytest.raises(ValueError, match=said):
    seqio_evaluator.evaluate('echo', methods.speculative(), models(byt5, True)[some], max_new_tokens=2, count=count)


def test_an_evaluation_goes_on_where_a_sequence_ends_as_a_fault():
  large = toy.model(0, 11, 1, eos_ids=(1,), encoder=True)
  sick = large.replace(params={**large.params, 'source': large.params['source'].at[5].set(np.nan)})
  records = [(i, {'encoder_input_tokens': np.array(tokens)}) for i, tokens in enumerate([[2, 3], [4, 3]])]
  dataset = types.SimpleNamespace(as_numpy_iterator=lambda: iter(records))
  predict = seqio_evaluator.predict_fn(methods.autoregressive(), [sick], max_new_tokens=3)
  with pytest.warns(UserWarning, match=having('1 of 2', 'example 0')):
    assert [index for index, _ in predict(dataset)] == [0, 1]
