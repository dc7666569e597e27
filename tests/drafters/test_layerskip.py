"""The first layers of a model as a drafter, which shares its arrays and its cache."""

import jax
import jax.numpy as jnp
from networks import ENCDEC, extend, GEMMA, GEMMA2, LLAMA, params_of, prompt_of
import numpy as np
import pytest

from speccascade import backends
from speccascade.drafters.layerskip import layerskip
from speccascade.types import Model


def test_layerskip_shares_the_arrays():
  params = params_of(LLAMA)
  draft = layerskip(Model(params=params, network=LLAMA, name='big'), 2)
  assert set(draft.params) == {'layers_0', 'layers_1', 'token_embedder', 'final_norm', 'logits_dense'}
  for name, leaf in jax.tree_util.tree_leaves_with_path(draft.params):
    original = params
    for key in name:
      original = original[key.key]
    assert leaf is original


@pytest.mark.parametrize('kind', [jnp.asarray, np.asarray])
def test_a_program_takes_an_array_of_two_models_once(kind):
  whole = Model(params=jax.tree.map(kind, params_of(LLAMA)), network=LLAMA, name='big')
  _, both = backends.prepared([layerskip(whole, 2), whole])
  assert len(jax.tree.leaves(both)) == len(jax.tree.leaves(whole.params))
  doubled, ones = jax.jit(lambda given: jax.tree.map(lambda x: 2 * x, given))(both), jax.tree.map(lambda _: 1, both)
  assert jax.tree.structure(doubled) == jax.tree.structure(both) == jax.tree.structure(ones)
  for given, twice in zip(both, doubled, strict=True):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(2 * x, y), given, twice)
  paths = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(both)}
  assert "['0/layers_0/attention/key/kernel']" in paths and "['1/layers_2/attention/key/kernel']" in paths


@pytest.mark.parametrize('network, layers', [(LLAMA, 2), (ENCDEC, 1), (GEMMA, 1), (GEMMA2, 1)])
def test_layerskip_equals_the_first_layers(network, layers):
  params = params_of(network)
  draft = layerskip(Model(params, network), layers)
  zeroed = jax.tree.map(lambda x: x, params)
  stack = zeroed.get('decoder', zeroed)
  for i in range(layers, network.depth):  # a layer that adds nothing
    stack[f'layers_{i}'] = jax.tree.map(jnp.zeros_like, stack[f'layers_{i}'])
  expected = extend(network, zeroed, prompt_of())
  np.testing.assert_allclose(extend(draft.network, draft.params, prompt_of()), expected, atol=1e-5)


@pytest.mark.parametrize('network', [ENCDEC, GEMMA, GEMMA2])
def test_an_exit_of_an_encoder_decoder_shares_its_cache(network):
  params = params_of(network)
  draft = layerskip(Model(params=params, network=network, name='big', digest='d'), 1)
  assert (draft.name, draft.digest) == ('big-first1', 'd-first1')
  assert draft.network.shares_cache(draft.params, network, params)
  assert not network.shares_cache(params, network, params)
  copied = {**draft.params, 'encoder': jax.tree.map(jnp.copy, draft.params['encoder'])}
  assert not draft.network.shares_cache(copied, network, params)
  own_head = {**draft.params, 'decoder': jax.tree.map(lambda x: x, draft.params['decoder'])}
  own_head['decoder']['decoder_norm'] = jax.tree.map(jnp.copy, own_head['decoder']['decoder_norm'])
  assert draft.network.shares_cache(own_head, network, params)  # which no cache depends on


@pytest.mark.parametrize('depth', [0, 4])
def test_layerskip_says_which_depths_there_are(depth):
  model = Model(params=LLAMA.param_shapes(), network=LLAMA)
  with pytest.raises(ValueError, match='1 to 3'):
    layerskip(model, depth)
