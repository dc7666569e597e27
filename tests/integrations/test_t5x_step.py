"""Decoding inside a step that T5X compiles, which has parameters, batch and key traced."""

import functools
from pathlib import Path
import re
import sys
from types import SimpleNamespace

from flax import core
import jax
import jax.numpy as jnp
from matching import having
import numpy as np
import pytest
from tiers import long_but

from speccascade import decode, methods, Sampler
from speccascade.checkpoints import hf
from speccascade.checkpoints.t5x import axes
from speccascade.integrations import t5x
from speccascade.types import Model

CONFIG = {'model_type': 't5', 'vocab_size': 13, 'd_model': 8, 'd_kv': 3, 'd_ff': 10, 'num_layers': 1, 'num_heads': 2}
CONFIG |= {'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False}
BATCH = {
  'encoder_input_tokens': np.int32([[3, 5, 2, 0], [7, 12, 1, 9], [4, 0, 0, 0]]),
  'decoder_input_tokens': np.zeros((3, 6), np.int32),
}
PROMPTS = [[3, 5, 2], [7, 12, 1, 9], [4]]
T5X = SimpleNamespace(mlp_activations=('gelu', 'linear'), dtype='float32')


def small(seed=1):
  network = hf.network_from_config(CONFIG)
  return Model(network.init(jax.random.key(seed)), network, name='small')


@functools.cache
def step(temperature=0.0):
  """Return a compiled step as T5X's: parameters, batch and key are traced."""
  drafter = small()

  def infer(params, batch, rng):
    models = [drafter, t5x.model(params, T5X)]
    return t5x.decode_batch(methods.speculative(block=2), models, batch, rng, sampler=Sampler(temperature))

  return jax.jit(infer)


@pytest.fixture(scope='module')
def large():
  return small(2)


@pytest.mark.full
def test_a_step_gives_what_decode_gives_padded_with_zeros(large):
  tokens, stats = step()(core.freeze(large.params), BATCH, jax.random.PRNGKey(0))
  out = decode(methods.speculative(block=2), [small(), large], PROMPTS, max_new_tokens=6, sampler=Sampler(0.0))
  assert tokens.tolist() == [row + [0] * (6 - len(row)) for row in out.tokens]
  assert stats['emitted'].tolist() == [len(row) for row in out.tokens]
  assert stats['calls'].shape == (3, 2) and not stats['fault'].any()


@pytest.mark.long
def test_calls_are_by_model_also_where_some_models_are_left_out(large):
  models, method = [small(), small(), large], methods.speculative(block=2, pair=(0, 2))
  _, stats = t5x.decode_batch(method, models, BATCH, sampler=Sampler(0.0))
  out = decode(method, models, PROMPTS, max_new_tokens=6, sampler=Sampler(0.0))
  assert stats['calls'].T.tolist() == out.stats.calls.tolist() and not out.stats.calls[1].any()


@pytest.mark.full
@pytest.mark.parametrize('make', long_but([jax.random.PRNGKey, jax.random.key], [jax.random.PRNGKey]))
def test_noise_comes_from_the_key_and_differs_between_rows(large, make):
  same = {**BATCH, 'encoder_input_tokens': np.tile(BATCH['encoder_input_tokens'][:1], (3, 1))}
  sampled = step(1.0)
  first, again, other = (sampled(large.params, same, make(seed))[0].tolist() for seed in (0, 0, 1))
  assert first == again != other
  assert len({tuple(row) for row in first}) > 1


@pytest.mark.long
def test_scanned_parameters_are_those_they_were_made_of(large):
  scanned = axes.scan(large.params, large.network.config)
  plain, found = (step()(params, BATCH, jax.random.PRNGKey(0))[0] for params in (large.params, scanned))
  assert plain.tolist() == found.tolist()
  model = t5x.with_params(large, scanned)
  assert not model.network.config.shared_bias and large.network.config.shared_bias
  assert model.params['decoder']['layers_0']['relpos_bias']['rel_embedding'].shape == (2, 32)


@pytest.mark.full
def test_the_model_of_the_page_decodes(large, monkeypatch):
  class EncoderDecoderModel:
    def __init__(self, module):
      self.module = module

  models = SimpleNamespace(EncoderDecoderModel=EncoderDecoderModel)
  monkeypatch.setitem(sys.modules, 't5x', SimpleNamespace(models=models))
  monkeypatch.setitem(sys.modules, 't5x.models', models)
  page = (Path(__file__).parents[2] / 'docs' / 't5x.md').read_text()
  (code,) = re.findall(r'^```python\n(.*?)^```$', page, re.DOTALL | re.MULTILINE)
  names = {}
  exec(code, names)
  settings = dict(drafter=small(), method=methods.speculative(block=2), sampler=Sampler(0.0))
  model = names['SpeculativeModel'](SimpleNamespace(config=T5X), **settings)
  tokens, _ = model.predict_batch_with_aux(large.params, BATCH, jax.random.PRNGKey(0), num_decodes=1)
  assert tokens.tolist() == step()(large.params, BATCH, jax.random.PRNGKey(0))[0].tolist()


def test_nan_is_told(large):
  broken = jax.tree.map(lambda x: x * jnp.nan, large.params)
  assert step()(broken, BATCH, jax.random.PRNGKey(0))[1]['fault'].all()


def test_what_a_step_cannot_do_is_said(large):
  with pytest.raises(ValueError, match='key'):
    t5x.decode_batch(methods.autoregressive(0), [large], BATCH, sampler=Sampler(1.0))
  T5X_other = SimpleNamespace(mlp_activations=('tanh',), dtype='float32')
  with pytest.raises(ValueError, match=having('mlp_activations', "('tanh',)")):
    t5x.model(large.params, T5X_other)
  wrong = {**large.params, 'extra': {'kernel': np.zeros(2)}}
  with pytest.raises(ValueError, match=having("'extra.kernel'", '[2]')):
    t5x.with_params(large, wrong)
