"""Blocks against plain NumPy, and what networks promise to the decode loop."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from matching import having
import numpy as np
import pytest
from tiers import long_but

from speccascade import backends
from speccascade.drafters.layerskip import layerskip
from speccascade.models import layers, rope
from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.models.t5 import T5, T5Config, T5GemmaConfig
from speccascade.types import Model, Prompt

LLAMA = Decoder(DecoderConfig(23, 16, 4, 2, 8, 24, spans=(Span(3), Span(0, rope.Rope(1e5)), Span(3), Span())))
OPT = Decoder(
  DecoderConfig(
    23,
    16,
    2,
    2,
    8,
    24,
    spans=(Span(0, None),) * 2,
    gated=False,
    layer_norm=True,
    qkv_bias=True,
    tied=True,
    projected_dim=12,
    positions=32,
    position_offset=2,
  )
)
ENCDEC = T5(T5Config(23, 16, 2, 12, 24, encoder_layers=2, decoder_layers=3))
STACK = DecoderConfig(23, 12, 2, 2, 8, 20, (Span(2), Span()), norms='sandwich', norm_offset=1.0, attention_cap=2.0)
GEMMA = T5(T5GemmaConfig(23, 16, 4, 2, 8, 24, (Span(3), Span(), Span(3)), encoder=STACK, embed_scale=4.0, tied=True))
NETWORKS = {'llama': LLAMA, 'opt': OPT, 't5': ENCDEC, 't5gemma': GEMMA}
TOKENS = np.random.default_rng(0).integers(0, 23, (3, 12))
LENGTH = np.array([7, 4, 1])


_prefill = jax.jit(lambda network, *args: network.prefill(*args), static_argnums=(0, 3))
_step = jax.jit(lambda network, *args: network.extend(*args), static_argnums=0)


@functools.cache
def params_of(network):
  return network.init(jax.random.key(0))


@pytest.fixture(params=list(NETWORKS))
def network(request):
  return NETWORKS[request.param]


def _extend(network, params, prompt: Prompt, rows=slice(None)):
  """Return logits of four tokens behind the prompt, in two windows."""
  cache = _prefill(network, params, prompt, 20)
  first = jnp.zeros_like(prompt.length) if network.start_id is not None else prompt.length - 1
  logits = []
  for i in (0, 2):
    positions = first[:, None] + jnp.arange(i, i + 2)[None]
    out, cache = _step(network, params, cache, jnp.asarray(TOKENS[rows, i : i + 2]), positions)
    logits.append(out)
  return jnp.concatenate(logits, axis=1)


def _prompt(rows=slice(None), width=7, junk=0) -> Prompt:
  padded = np.where(np.arange(width)[None] < LENGTH[rows, None], TOKENS[rows, :width], junk)
  return Prompt(jnp.asarray(padded), jnp.asarray(LENGTH[rows]))


@pytest.mark.parametrize('name', long_but(NETWORKS, ['opt']))
def test_rows_do_not_depend_on_their_batch_or_on_padding(name):
  network, params = NETWORKS[name], params_of(NETWORKS[name])
  batch = _extend(network, params, _prompt())
  rows = slice(1, 2)
  padded = _extend(network, params, _prompt(rows, width=11, junk=9), rows)
  np.testing.assert_allclose(padded[0], batch[1], atol=1e-5)


@pytest.mark.parametrize('scan', long_but([False, True], [False]))
def test_parameters_begin_with_the_spread_of_their_inputs_and_no_two_are_alike(network, scan):
  drawn = []
  for path, x in jax.tree_util.tree_leaves_with_path(params_of(dataclasses.replace(network, scan=scan))):
    module, name = (key.key for key in path[-2:])
    if name in ('scale', 'bias'):
      assert set(np.unique(x)) in ([{0.0}, {1.0}] if name == 'scale' else [{0.0}])
      continue
    inputs = x.shape[-2] if name == 'kernel' else 1
    inputs *= 12 if network == ENCDEC and module == 'query' else 1  # whose products are not divided by √12
    assert abs(np.std(x) * inputs**0.5 - 1) < 5 * (2 * x.size) ** -0.5, path
    drawn.append(float(x.ravel()[0] * inputs**0.5))
  assert len({*drawn}) == len(drawn) > 5


@pytest.mark.full
def test_scan_is_the_same_function_of_the_same_tree(network):
  params = params_of(network)
  scanned = dataclasses.replace(network, scan=True)
  stacked = layers.stack_layers(params)
  assert jax.tree.map(jnp.shape, stacked) == jax.tree.map(lambda x: x.shape, scanned.param_shapes())
  np.testing.assert_allclose(_extend(scanned, stacked, _prompt()), _extend(network, params, _prompt()), atol=1e-5)
  back = layers.unstack_layers(stacked)
  assert jax.tree.structure(back) == jax.tree.structure(params)
  jax.tree.map(np.testing.assert_array_equal, back, params)


@pytest.mark.parametrize('scan', [False, True])
@pytest.mark.parametrize('backend', [backends.CPU(), backends.TPU(), backends.Backend()])
def test_rows_are_the_first_axis_of_every_cache_leaf(network, scan, backend):
  network = dataclasses.replace(network, scan=scan)
  network = network.on(backend)
  cache = jax.eval_shape(lambda p: network.prefill(p, _prompt(), 20), network.param_shapes())
  heads = network.head_counts[1] if backend == backends.CPU() else 1
  assert {leaf.shape[0] for leaf in jax.tree.leaves(cache) if leaf.ndim > 1} == {3 * heads}


@pytest.mark.full
@pytest.mark.parametrize('name', long_but(NETWORKS, ['opt']))
def test_bfloat16_keeps_parameters_and_cache_and_returns_float32_logits(name):
  network = dataclasses.replace(NETWORKS[name], dtype='bfloat16')
  params = params_of(network)
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype('bfloat16')}
  cache = _prefill(network, params, _prompt(), 20)
  assert {x.dtype for x in jax.tree.leaves(cache) if x.ndim > 1} == {jnp.dtype('bfloat16')}
  logits = _extend(network, params, _prompt())
  exact = _extend(network, jax.tree.map(lambda x: x.astype(jnp.float32), params), _prompt())
  assert logits.dtype == jnp.float32
  np.testing.assert_allclose(logits, exact, atol=0.05 * float(exact.std()) + 0.1)


def test_every_parameter_has_logical_axes(network):
  for net in (network, dataclasses.replace(network, scan=True)):
    shapes, axes = net.param_shapes(), net.param_axes()
    specs = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec))
    for shape, spec in zip(jax.tree.leaves(shapes), specs, strict=True):
      assert len(spec) == len(shape.shape) and None not in spec


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


@pytest.mark.parametrize('network, layers', [(LLAMA, 2), (ENCDEC, 1), (GEMMA, 1)])
def test_layerskip_equals_the_first_layers(network, layers):
  params = params_of(network)
  draft = layerskip(Model(params, network), layers)
  zeroed = jax.tree.map(lambda x: x, params)
  stack = zeroed.get('decoder', zeroed)
  for i in range(layers, network.depth):  # a layer that adds nothing
    stack[f'layers_{i}'] = jax.tree.map(jnp.zeros_like, stack[f'layers_{i}'])
  expected = _extend(network, zeroed, _prompt())
  np.testing.assert_allclose(_extend(draft.network, draft.params, _prompt()), expected, atol=1e-5)


@pytest.mark.parametrize('network', [ENCDEC, GEMMA])
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


@pytest.mark.parametrize('backend', [backends.CPU(), backends.Backend()])
def test_writing_touches_just_the_window_of_each_row(backend):
  slots = np.random.default_rng(1).normal(size=(3, 9, 2, 4)).astype(np.float32)
  new = np.random.default_rng(2).normal(size=(3, 2, 2, 4)).astype(np.float32)
  expected = slots.copy()
  for row, start in enumerate((0, 7, 3)):
    expected[row, start : start + 2] = new[row]
  start = jnp.array([0, 7, 3])
  slots, new, expected = (backend.entry(x, x) for x in map(jnp.asarray, (slots, new, expected)))
  check = functools.partial(jax.tree.map, np.testing.assert_array_equal)
  second = lambda tree: jax.tree.map(lambda x: jnp.split(x, 3)[1], tree)
  check(backend.write(slots, new, start), expected)
  check(backend.write(second(slots), second(new), start[1:2]), second(expected))


def test_a_window_of_an_encoder_reaches_as_far_ahead_as_back():
  encoder = dataclasses.replace(GEMMA.config.encoder, spans=(Span(2),))
  module = dataclasses.replace(GEMMA, config=dataclasses.replace(GEMMA.config, encoder=encoder)).module

  @jax.jit
  def encode(tokens):
    read = lambda module: module.encoder(module.encoder.token_embedder(tokens), jnp.array([9]))
    return module.apply({'params': params_of(GEMMA)}, method=read)

  tokens = jnp.arange(9)[None]
  changed = np.abs(encode(tokens) - encode(tokens.at[0, 4].set(20))).max((0, 2)) > 0
  assert np.flatnonzero(changed).tolist() == [2, 3, 4, 5, 6]


def test_a_parameter_of_another_shape_is_named():
  params = params_of(ENCDEC) | {'encoder': {**params_of(ENCDEC)['encoder'], 'encoder_norm': {'scale': jnp.ones(8)}}}
  with pytest.raises(ValueError, match=having('encoder/encoder_norm/scale', '(8,)', '(16,)')):
    _prefill(ENCDEC, params, _prompt(), 4)
