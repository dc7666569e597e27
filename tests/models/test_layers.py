"""Blocks against plain NumPy, and what networks promise to the decode loop."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from matching import having
from networks import ENCDEC, extend, GEMMA, GEMMA2, NETWORKS, params_of, prefill, prompt_of
import numpy as np
import pytest
from tiers import long_but

from speccascade import backends
from speccascade.models import layers
from speccascade.models.decoder import Span


@pytest.fixture(params=list(NETWORKS))
def network(request):
  return NETWORKS[request.param]


@pytest.mark.parametrize('name', long_but(NETWORKS, ['opt']))
def test_rows_do_not_depend_on_their_batch_or_on_padding(name):
  network, params = NETWORKS[name], params_of(NETWORKS[name])
  batch = extend(network, params, prompt_of())
  rows = slice(1, 2)
  padded = extend(network, params, prompt_of(rows, width=11, junk=9), rows)
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
  np.testing.assert_allclose(extend(scanned, stacked, prompt_of()), extend(network, params, prompt_of()), atol=1e-5)
  back = layers.unstack_layers(stacked)
  assert jax.tree.structure(back) == jax.tree.structure(params)
  jax.tree.map(np.testing.assert_array_equal, back, params)


@pytest.mark.parametrize('scan', [False, True])
@pytest.mark.parametrize('backend', [backends.CPU(), backends.TPU(), backends.Backend()])
def test_rows_are_the_first_axis_of_every_cache_leaf(network, scan, backend):
  network = dataclasses.replace(network, scan=scan)
  network = network.on(backend)
  cache = jax.eval_shape(lambda p: network.prefill(p, prompt_of(), 20), network.param_shapes())
  heads = network.head_counts[1] if backend == backends.CPU() else 1
  assert {leaf.shape[0] for leaf in jax.tree.leaves(cache) if leaf.ndim > 1} == {3 * heads}


@pytest.mark.full
@pytest.mark.parametrize('name', long_but(NETWORKS, ['opt']))
def test_bfloat16_keeps_parameters_and_cache_and_returns_float32_logits(name):
  network = dataclasses.replace(NETWORKS[name], dtype='bfloat16')
  params = params_of(network)
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype('bfloat16')}
  cache = prefill(network, params, prompt_of(), 20)
  assert {x.dtype for x in jax.tree.leaves(cache) if x.ndim > 1} == {jnp.dtype('bfloat16')}
  logits = extend(network, params, prompt_of())
  exact = extend(network, jax.tree.map(lambda x: x.astype(jnp.float32), params), prompt_of())
  assert logits.dtype == jnp.float32
  np.testing.assert_allclose(logits, exact, atol=0.05 * float(exact.std()) + 0.1)


def test_every_parameter_has_logical_axes(network):
  for net in (network, dataclasses.replace(network, scan=True)):
    shapes, axes = net.param_shapes(), net.param_axes()
    specs = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec))
    for shape, spec in zip(jax.tree.leaves(shapes), specs, strict=True):
      assert len(spec) == len(shape.shape) and None not in spec


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


@pytest.mark.parametrize(
  'network, window, seen', [(GEMMA, 2, [2, 3, 4, 5, 6]), (GEMMA2, 4, [2, 3, 4, 5]), (GEMMA2, 5, [2, 3, 4, 5, 6])]
)
def test_a_window_of_an_encoder_reaches_as_far_ahead_as_back_or_lies_around(network, window, seen):
  encoder = dataclasses.replace(network.config.encoder, spans=(Span(window),))
  module = dataclasses.replace(network, config=dataclasses.replace(network.config, encoder=encoder)).module

  params = params_of(network)

  @jax.jit
  def encode(tokens):
    table = lambda module: module.token_embedder if network.config.merged else module.encoder.token_embedder
    read = lambda module: module.encoder(table(module)(tokens), jnp.array([9]))
    return module.apply({'params': params}, method=read)

  tokens = jnp.arange(9)[None]
  changed = np.abs(encode(tokens) - encode(tokens.at[0, 4].set(20))).max((0, 2)) > 0
  assert np.flatnonzero(changed).tolist() == seen


def test_a_parameter_of_another_shape_is_named():
  params = params_of(ENCDEC) | {'encoder': {**params_of(ENCDEC)['encoder'], 'encoder_norm': {'scale': jnp.ones(8)}}}
  with pytest.raises(ValueError, match=having('encoder/encoder_norm/scale', '(8,)', '(16,)')):
    prefill(ENCDEC, params, prompt_of(), 4)
