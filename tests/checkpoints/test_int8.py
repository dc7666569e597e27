"""Weights of 8 bits: what is read, what a model of them computes, and that decoding is exact for that model."""

import dataclasses
import functools
import json
import tracemalloc

from emitted import emitted_distribution
import jax
import jax.numpy as jnp
from matching import having
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiers import long_but
import tiny

import speccascade
from speccascade import checkpoints, decode, methods, Sampler
from speccascade.backends import by_name, cpu
from speccascade.backends.quantised import quantise, Quantised, quantised
from speccascade.check.enumeration import distance
from speccascade.checkpoints import hf, t5x
from speccascade.drafters.layerskip import layerskip
from speccascade.models import shapes
from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.models.layers import stack_layers
from speccascade.models.t5 import T5, T5Config
from speccascade.planning import aot
from speccascade.planning.synthetic import random_model, tree_bytes
from speccascade.types import Model, Prompt

FAMILIES = {name: {'model_type': name, **family.tiny} for name, family in hf.FAMILIES.items() if family.tiny}
WIDER = {'llama': Decoder(DecoderConfig(40, 256, 4, 2, 64, 512, (Span(),) * 2, tied=True))}
WIDER['t5'] = T5(T5Config(40, 128, 4, 32, 256, encoder_layers=2, decoder_layers=2))


def is_quantised(x) -> bool:
  return isinstance(x, Quantised)


def widened(params):
  """Return the floats that quantised parameters stand for, in float64."""

  def wide(path, x):
    if not is_quantised(x):
      return np.asarray(x)
    by_row = path[-1].key == 'embedding'
    scale = np.asarray(x.scale, np.float64)
    return np.asarray(x.values, np.float64) * (scale[..., None] if by_row else scale[..., None, :])

  return jax.tree_util.tree_map_with_path(wide, params, is_leaf=is_quantised)


def folder_of(folder, config) -> Model:
  """Write a model of random weights as a Hugging Face folder."""
  model = tiny.model_of(config)
  (folder / 'config.json').write_text(json.dumps(config))
  save_file(hf.export(model.network, config['model_type'], jax.device_get(model.params)), folder / 'model.safetensors')
  return model


@functools.partial(jax.jit, static_argnums=0)
def logits_of(network, params):
  tokens = jnp.arange(1, 13)[None] % network.vocab_size
  prompt = Prompt(tokens[:, :5], jnp.array([5]))
  first = 4 if network.start_id is None else 0
  cache = network.prefill(params, prompt, 16)
  return network.extend(params, cache, tokens[:, first:], first + jnp.arange(12 - first)[None])[0]


@pytest.mark.full
@pytest.mark.parametrize('name', long_but(FAMILIES, ['t5']))
def test_logits_are_those_of_the_floats_that_the_weights_stand_for(tmp_path, name):
  model = folder_of(tmp_path, FAMILIES[name])
  loaded = speccascade.load(tmp_path, dtype='int8')
  assert loaded.network == dataclasses.replace(model.network, quantised=True) and loaded.network.dtype == 'float32'
  assert loaded.digest == f'{checkpoints.digest(tmp_path)}-int8'
  stated = jax.tree.map(lambda x: (x.shape, x.dtype), loaded.network.param_shapes())
  assert jax.tree.map(lambda x: (x.shape, x.dtype), loaded.params) == stated
  kernels = [x for x in jax.tree.leaves(model.params) if x.ndim > 1]
  assert tree_bytes(loaded.params) < 0.5 * tree_bytes(model.params) and len(kernels) > 3
  floats = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), widened(loaded.params))
  expected, far = logits_of(model.network, floats), logits_of(model.network, model.params)
  scale = np.abs(expected).max()
  np.testing.assert_allclose(logits_of(loaded.network, loaded.params) / scale, expected / scale, atol=2e-5)
  assert 1e-5 < np.abs(far - expected).max() / scale < 0.2


@pytest.mark.parametrize('axis', [-1, -2])
def test_weights_are_the_nearest_multiples_of_their_output_s_scale(axis):
  x = np.random.default_rng(0).normal(size=(3, 40, 30)).astype(np.float32) * np.logspace(-30, 5, 30, dtype=np.float32)
  x = np.moveaxis(np.moveaxis(x, axis, -1) * np.r_[0, np.ones(x.shape[axis] - 1)], -1, axis).astype(np.float32)
  x[1] = 0
  for values, scale in (quantise(x, axis), quantise(x, axis, np)):
    assert values.dtype == jnp.int8 and scale.dtype == jnp.float32 and np.isfinite(scale).all()
    wide = np.asarray(values, np.float64) * np.expand_dims(scale, axis)
    assert (np.abs(wide - x) <= 0.501 * np.expand_dims(scale, axis)).all()
    largest = np.abs(values).max(axis)
    assert set(np.unique(largest)) == {0, 127} and (largest[1] == 0).all()
    np.testing.assert_array_equal(quantise(wide, axis).values, values)


@pytest.mark.full
@pytest.mark.parametrize(
  'kind, scan',
  long_but([(k, s) for k in ('hf', 't5x') for s in (False, True)], [('hf', True)]),
)
def test_every_format_is_read_as_the_same_whole_numbers(tmp_path, kind, scan):
  config = tiny.T5_V1_1 | {'num_layers': 2, 'num_heads': 2}
  model = folder_of(tmp_path, config)
  write = {'hf': hf.write, 't5x': t5x.write}[kind]
  found = checkpoints.read(write(tmp_path / 'other', model), dtype='int8', scan=scan)
  expected = checkpoints.read(tmp_path, dtype='int8').params
  tiny.assert_equal(found.params, stack_layers(expected) if scan else expected)
  assert jax.tree.structure(found.network.param_axes()) == jax.tree.structure(found.params)
  one, other = (logits_of(n, p) for n, p in ((found.network, found.params), (_whole(found.network), expected)))
  np.testing.assert_allclose(one, other, atol=1e-5)


def _whole(network):
  return dataclasses.replace(network, scan=False)


@pytest.mark.full
def test_no_more_than_a_tensor_is_in_memory_as_floats(tmp_path):
  config = tiny.LLAMA | {'hidden_size': 256, 'intermediate_size': 512, 'num_hidden_layers': 8, 'vocab_size': 512}
  model = folder_of(tmp_path, config)
  floats = tree_bytes(model.params)
  checkpoints.read(tmp_path, dtype='int8')  # what is imported and compiled once
  tracemalloc.start()
  try:
    loaded = checkpoints.read(tmp_path, dtype='int8')
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
  assert floats > 18e6 and peak < tree_bytes(loaded.params) + 5 * 512 * 256 * 4


@pytest.mark.full
@pytest.mark.parametrize(
  'family, name',
  long_but([(f, n) for f in WIDER for n in by_name()], [('llama', 'cpu')]),
)
def test_quantised_weights_give_the_same_on_every_backend(family, name, monkeypatch):
  monkeypatch.setattr(cpu, '_CACHED', 0)
  monkeypatch.setattr(cpu, '_fuses_sums', lambda: True)
  network = dataclasses.replace(WIDER[family], quantised=True)
  params = network.init(jax.random.key(0))
  backend = by_name()[name].emulated()
  ready = backend.prepare(params)
  held = [x.dtype for x in jax.tree.leaves(ready) if x.ndim > 1]
  assert held.count(jnp.int8) == len(held) - held.count(jnp.float32) > 7
  assert tree_bytes(ready) == tree_bytes(params)
  expected = logits_of(WIDER[family], jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), widened(params)))
  np.testing.assert_allclose(logits_of(network.on(backend), ready), expected, atol=2e-4)


# ---- decoding ----

NETWORK = Decoder(DecoderConfig(4, 16, 2, 1, 8, 24, (Span(),)))


@functools.cache
def pair(drafter_is: str = 'int8', target_is: str = 'float32', network=NETWORK) -> list[Model]:
  """Return a drafter and a target whose weights are near each other."""
  target = network.init(jax.random.key(1))
  keys = iter(jax.random.split(jax.random.key(2), 100))
  drafter = jax.tree.map(lambda x: x + 0.2 * jnp.std(x) * jax.random.normal(next(keys), x.shape), target)
  of = {'int8': lambda p: quantised_model(network, p), 'float32': lambda p: Model(p, network)}
  made = of[drafter_is](drafter), of[target_is](target)
  return [model.replace(name=name) for model, name in zip(made, ('drafter', 'target'), strict=True)]


def quantised_model(network, params) -> Model:
  return Model(quantised(params), dataclasses.replace(network, quantised=True))


@pytest.mark.full
@pytest.mark.parametrize('target_is', long_but(['float32', 'int8'], ['float32']))
def test_the_distribution_is_exactly_the_target_s(target_is):
  models = pair('int8', target_is)
  method = methods.speculative(block=2)
  drafted, alone = (
    emitted_distribution(m, models, [1, 3, 2], 2, Sampler(1.0)) for m in (method, methods.autoregressive(1))
  )
  assert distance(drafted, alone)[0] < 1e-5
  assert distance(alone, emitted_distribution(method, pair('int8', 'float32'), [1, 3, 2], 2, Sampler(1.0)))[0] < (
    1e-5 if target_is == 'float32' else 0.1
  )


@pytest.mark.long
def test_the_first_layers_share_the_numbers_and_the_cache():
  network = dataclasses.replace(WIDER['llama'], quantised=True)
  large = random_model(network, 'large')
  small = layerskip(large, 1)
  assert small.network.quantised and small.network.shares_cache(small.params, network, large.params)
  found = decode(methods.speculative(block=2), [small, large], [[3, 4, 5]], max_new_tokens=6, sampler=Sampler(0.0))
  expected = decode(methods.autoregressive(), [large], [[3, 4, 5]], max_new_tokens=6, sampler=Sampler(0.0))
  assert found.tokens == expected.tokens


# ---- what is refused, and what is stated ----


@pytest.mark.parametrize('write', long_but([hf.write, t5x.write], [hf.write]))
def test_whole_numbers_are_not_written(tmp_path, write):
  model = quantised_model(*[getattr(tiny.model_of(tiny.T5_V1_1), name) for name in ('network', 'params')])
  with pytest.raises(ValueError, match=having('int8', 'float32')):
    write(tmp_path / 'out', model)
  assert not (tmp_path / 'out').exists()


def test_a_dtype_is_one_for_all_or_one_for_each_model(tmp_path):
  folder_of(tmp_path, tiny.LLAMA)
  both = checkpoints.load_all([tmp_path, tmp_path], dtype='int8,float32')
  assert [m.network.quantised for m in both] == [True, False]
  assert checkpoints.load_all([tmp_path] * 2, dtype='int8')[1].network.quantised
  with pytest.raises(ValueError, match=having('int8,int8', '3 models')):
    checkpoints.load_all([tmp_path] * 3, dtype='int8,int8')
  networks = [m.network for m in aot.models_of([str(tmp_path / 'config.json')] * 2, 'int8,bfloat16')]
  assert [(n.quantised, n.dtype) for n in networks] == [(True, 'bfloat16'), (False, 'bfloat16')]


def test_a_round_s_floor_counts_a_byte_a_weight(tmp_path):
  config = tiny.LLAMA | {'vocab_size': 32000, 'hidden_size': 4096, 'intermediate_size': 11008, 'num_hidden_layers': 2}
  (tmp_path / 'config.json').write_text(json.dumps(config | {'num_attention_heads': 32}))
  path, sizes = str(tmp_path / 'config.json'), aot.Sizes(batch=1, source=100, tokens=60)
  short, long = (aot.models_of([path] * 2, dtype) for dtype in ('bfloat16,int8', 'bfloat16'))
  step = lambda models: aot.floor_bytes(methods.autoregressive(1), models, sizes)
  cache = 2 * 2 * 2 * 4096 * 130
  assert step(short) - cache == pytest.approx((step(long) - cache) / 2, rel=0.001)


@pytest.mark.parametrize('name', list(shapes.PAIRS))
def test_every_pair_of_published_sizes_has_weights_of_int8(name):
  for network in shapes.pair(name, 'int8'):
    assert network.quantised and network.dtype == 'bfloat16'
