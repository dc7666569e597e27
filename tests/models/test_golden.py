"""A few logits per family, computed once with transformers, hold without it (made by tests/models/make_golden.py)."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import long_but

from speccascade import backends, decode, methods, Sampler
from speccascade.checkpoints.hf import FAMILIES, network_from_config
from speccascade.types import Model, Prompt

GOLDEN = Path(__file__).parent / 'golden' / 'golden.json'
CASES = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
PROMPT = 4  # tokens of a decoder-only sequence that are prefilled


def weights(network, seed: int):
  """Return parameters from a generator whose numbers numpy has promised never to change."""
  random = np.random.RandomState(seed)

  def draw(path, leaf):
    noise = random.randn(*leaf.shape)
    kind = path[-1].key
    if kind in ('kernel', 'embedding'):
      noise = noise * leaf.shape[-2 if kind == 'kernel' else 1] ** -0.5
    if kind in ('bias', 'scale'):
      offset = getattr(network.config, 'norm_offset', 0)
      noise = 0.2 * noise + (1 - offset if kind == 'scale' else 0)
    return jnp.asarray(noise, jnp.float32)

  return jax.tree_util.tree_map_with_path(draw, network.param_shapes())


OF_EACH_KIND = ['t5_v1_1', 'llama2', 'opt', 'gemma3', 'mixtral', 'olmo2']


@pytest.mark.full
@pytest.mark.parametrize('name', long_but(CASES, OF_EACH_KIND))
def test_logits_are_the_reference_s(name):
  case = CASES[name]
  network = network_from_config(case['config'])
  params = weights(network, case['seed'])
  tokens = jnp.array([case['tokens']])
  prompt = jnp.array([case['source']]) if 'source' in case else tokens[:, :PROMPT]
  first = 0 if 'source' in case else PROMPT - 1

  @jax.jit
  def read(params):
    cache = network.prefill(params, Prompt(prompt, jnp.array([prompt.shape[1]])), tokens.shape[1])
    return network.extend(params, cache, tokens[:, first:], jnp.arange(first, tokens.shape[1])[None])[0]

  logits = read(params)
  np.testing.assert_allclose(logits[0][:, jnp.array(case['ids'])], case['logits'], atol=1e-4, rtol=0)
  assert np.asarray(logits[0].argmax(-1)).tolist() == case['argmax']


DECODERS = [name for name, case in CASES.items() if 'source' not in case]


@pytest.mark.full
@pytest.mark.parametrize('name', long_but(DECODERS, OF_EACH_KIND))
def test_an_empty_cache_has_the_shapes_of_one_that_has_read(name):
  network = network_from_config(CASES[name]['config']).on(backends.CPU())
  params = network.param_shapes()
  prompt = Prompt(jax.ShapeDtypeStruct((2, 32), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32))
  read = jax.eval_shape(lambda *x: network.prefill(*x, 48), params, prompt)
  assert jax.eval_shape(lambda params: network.empty_cache(params, 2, 48), params) == read


def test_every_family_of_transformers_has_golden_numbers():
  assert {case['config']['model_type'] for case in CASES.values()} >= {n for n, f in FAMILIES.items() if f.hf}


@pytest.mark.long
# experts, and windows and two ropes
@pytest.mark.parametrize('name', [n for n, f in FAMILIES.items() if f.tiny])
def test_drafts_of_a_family_leave_its_greedy_texts_as_they_are(name):
  network = network_from_config({'model_type': name, **FAMILIES[name].tiny})
  large = Model(weights(network, 0), network, name='large')
  noise = weights(network, 1)
  small = large.replace(params=jax.tree.map(lambda x, y: x + 0.1 * y, large.params, noise), name='small')
  prompts = np.random.default_rng(0).integers(3, network.vocab_size, (3, 5)).tolist()
  settings = dict(max_new_tokens=12, sampler=Sampler(0.0))
  plain = decode(methods.autoregressive(), [large], prompts, **settings)
  drafted = decode(methods.speculative(block=3), [small, large], prompts, **settings)
  assert drafted.tokens == plain.tokens and drafted.stats.accepted.sum() > 0
