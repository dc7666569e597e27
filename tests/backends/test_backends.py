"""Every backend computes what plain XLA computes; a TPU's kernel runs here in interpret mode."""

import dataclasses
import functools
import os
import re
import subprocess
import sys

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import AbstractMesh
import numpy as np
import pytest
from tiers import long_but

from speccascade import backends, decode, methods, rules, sampling
from speccascade.backends import base, cpu, ops, registry, sharding, tpu_attention, View
from speccascade.backends.quantised import quantise
from speccascade.engine.loop import decode_batch
from speccascade.models import layers as blocks
from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.models.rope import Rope
from speccascade.models.t5 import T5, T5Config, T5GemmaConfig
from speccascade.planning import aot
from speccascade.types import Model, Prompt

BACKENDS = {name: backend.emulated() for name, backend in backends.by_name().items()}
LLAMA = Decoder(DecoderConfig(23, 16, 4, 2, 8, 24, spans=(Span(3), Span(0, Rope(1e5)))))
OPT = Decoder(DecoderConfig(23, 16, 2, 2, 8, 24, spans=(Span(0, None),) * 2, tied=True, positions=32))
EXPERTS = Decoder(DecoderConfig(23, 16, 4, 2, 8, 24, (Span(),) * 2, experts=20, experts_per_token=3))
ENCDEC = T5(T5Config(23, 16, 2, 12, 24, encoder_layers=1, decoder_layers=2))
GEMMA = T5(T5GemmaConfig(**vars(LLAMA.config) | dict(attention_cap=2.0, tied=True), encoder=LLAMA.config))
MERGED = T5(dataclasses.replace(GEMMA.config, merged=True))
NETWORKS = {'llama': LLAMA, 'opt': OPT, 'experts': EXPERTS, 't5': ENCDEC, 't5gemma': GEMMA, 't5gemma2': MERGED}
NETWORKS['experts of int8'] = dataclasses.replace(EXPERTS, quantised=True)
#        batch, window, heads, key-value heads, dimension, slots, sight, cap
SHAPES = {
  'a pair of heads in a tile': (2, 3, 4, 2, 64, 256, 0, None),
  'a tile a head, capped': (2, 1, 4, 4, 128, 128, 0, 30.0),
  'an odd number of heads, the last slots only': (3, 6, 6, 3, 64, 384, 100, None),
  'lanes that stay empty': (1, 2, 4, 2, 80, 256, 0, None),
  'two tiles a head': (2, 2, 2, 1, 256, 256, 0, 20.0),
  'a wide window': (3, 40, 4, 2, 64, 384, 100, None),
  'the widest window': (1, tpu_attention.MOST, 4, 4, 64, 384, 0, None),
  'rows that share a step': (8, 2, 4, 2, 64, 384, 100, None),
  'a window in pieces': (1, 33, 32, 32, 128, 256, 0, None),
}


def _random(seed: int, *shapes):
  rng = np.random.default_rng(seed)
  return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def starts(batch: int, last: int) -> jax.Array:
  """Return where windows of rows start: anywhere, across blocks, at the end."""
  found = jnp.array([[5, 70, 33], [127, 126, 128], [last, last, 0]], jnp.int32)
  return jnp.minimum(jnp.tile(found, 3)[:, :batch], last)


OF_WINDOWS = [('gpu', 'an odd number of heads, the last slots only'), *(('tpu', shape) for shape in SHAPES)]


@pytest.mark.full
@pytest.mark.parametrize(
  'name, shape', long_but(OF_WINDOWS, [('tpu', 'a pair of heads in a tile'), ('tpu', 'a window in pieces')])
)
def test_a_window_is_written_and_attended_to_alike(name, shape):
  batch, width, heads, kv, dim, slots, sight, cap = SHAPES[shape]
  window, slots_of_row = (batch, width, kv, dim), (batch, slots, kv, dim)
  given = _random(0, (batch, width, heads, dim), window, window, slots_of_row, slots_of_row)
  bias = _random(1, (batch, heads, width, slots))[0] if sight == 0 else None
  settings = dict(kv_heads=kv, scale=0.1, cap=cap)

  def programs(backend):
    """Return how a backend extends slots by windows that begin at `start`, and how it attends to what it wrote."""

    def extend(q, k, v, keys, values, start):
      view = View(start[:, None] + jnp.arange(width)[None], sight)
      return backend.extend(q, k, v, (backend.entry(keys, values),), 0, view, bias, **settings)

    return jax.jit(extend), jax.jit(lambda entry, visible: backend.attend(given[0], entry, visible, None, **settings))

  other = BACKENDS[name]
  (extend, attend), (extend_other, attend_other) = programs(backends.Backend()), programs(other)
  for start in starts(batch, slots - width):
    (y, (written,)), (found, (entry,)) = extend(*given, start), extend_other(*given, start)
    np.testing.assert_allclose(found, y, atol=2e-6)
    expected = other.entry(*(jnp.swapaxes(written[x], 1, 2) for x in ('key', 'value')))
    jax.tree.map(np.testing.assert_array_equal, entry, expected)
    place = jnp.arange(slots)[None, None]
    first, other_slots = place <= start[:, None, None], place % 3 != start[:, None, None] % 3
    for visible, mask in ((start + 1, first), (first, first), (other_slots, other_slots)):
      expected = attend(written, mask)
      np.testing.assert_allclose(attend_other(entry, visible), expected, atol=2e-6, err_msg=f'{start}')


@pytest.mark.parametrize('name', BACKENDS)
def test_slots_of_one_of_several_layers_are_attended_to_alike(name):
  backend, settings = BACKENDS[name], dict(kv_heads=4, scale=0.1, cap=None)
  q, *slots = _random(2, (2, 3, 4, 64), *[(2, 128, 4, 64)] * 4)
  entries = tuple(backend.entry(*slots[i : i + 2]) for i in (0, 2))
  stacked = {part: jnp.stack([entry[part] for entry in entries], 1) for part in entries[0]}
  visible = jnp.array([5, 128])
  for layer, entry in enumerate(entries):
    expected = backend.attend(q, entry, visible, None, **settings)
    for cache, number in ((entries, layer), (stacked, jnp.int32(layer))):
      found = backend.attend(q, cache, visible, None, layer=number, **settings)
      np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
  'width, heads, dim, calls', [(21, 32, 64, 1), (64, 32, 64, 1), (113, 8, 64, 1), (33, 40, 128, 2)]
)
def test_a_wide_window_stays_in_the_kernel_in_as_few_calls_as_there_is_memory_for(width, heads, dim, calls):
  window, slots = [jax.ShapeDtypeStruct((2, n, heads, dim), jnp.bfloat16) for n in (width, 256)]

  def extend(q, k, v, keys, values):
    view = View(jnp.zeros((2, 1), jnp.int32) + jnp.arange(width)[None])
    tpu, settings = BACKENDS['tpu'], dict(kv_heads=heads, scale=1.0, cap=None)
    y, (entry,) = tpu.extend(q, k, v, (tpu.entry(keys, values),), 0, view, None, **settings)
    return y, tpu.attend(q, entry, jnp.array([7, 9]), None, **settings)

  program = str(jax.make_jaxpr(extend)(*[window] * 3, *[slots] * 2))
  assert program.count('name=attend') == 2 * calls and 'softmax' not in program


SOME = [[3, 1, 1000, 200], [1, 1, 20000, 9000], [2, 9, 5000, 5000]]  # B, L, V, D


@pytest.mark.full
@pytest.mark.parametrize('shape', long_but(SOME, SOME[2:]))
@pytest.mark.parametrize('name', BACKENDS)
def test_the_scores_of_some_tokens_are_spread_over_the_vocabulary(name, shape):
  *rows, vocab, some = shape
  ids = np.sort(np.random.default_rng(0).choice(vocab, some, replace=False))
  write = np.full(vocab, -1, np.int32)
  write[ids] = np.arange(some)
  (logits,) = _random(0, (*rows, some))
  expected = np.full((*rows, vocab), -np.inf, np.float32)
  expected[..., ids] = logits
  np.testing.assert_array_equal(jax.jit(BACKENDS[name].spread)(logits, write), expected)


def test_a_kernel_writes_one_layer_of_a_stack():
  tpu = BACKENDS['tpu']
  q, k, v, keys, values = _random(2, (2, 3, 2, 64), *[(2, 3, 2, 64)] * 2, *[(2, 128, 2, 64)] * 2)
  entry = tpu.entry(keys, values)
  stack = {name: jnp.stack([x, 2 * x, 3 * x], 1) for name, x in entry.items()}
  view = View(jnp.array([[4, 5, 6], [90, 91, 92]]))
  settings = dict(kv_heads=2, scale=0.1, cap=None)
  y, after = tpu.extend(q, k, v, stack, jnp.int32(1), view, None, **settings)
  alone, (one,) = tpu.extend(q, k, v, ({n: x[:, 1] for n, x in stack.items()},), 0, view, None, **settings)
  np.testing.assert_array_equal(y, alone)
  for name in stack:
    np.testing.assert_array_equal(after[name], jnp.stack([stack[name][:, 0], one[name], stack[name][:, 2]], 1))


@pytest.mark.long
def test_rows_run_on_both_cores_of_a_chip_that_has_two():
  q, k, v, keys, values = _random(9, (4, 3, 4, 64), *[(4, 3, 4, 64)] * 2, *[(4, 256, 4, 64)] * 2)
  view, cores = View(jnp.array([5, 126, 253, 127])[:, None] + jnp.arange(3)[None]), set()
  note = lambda token, point, core: cores.add(int(core)) or token
  two = pltpu.InterpretParams(num_cores_or_threads=2, random_seed=3, grid_point_recorder=note)
  found = []
  for backend in (BACKENDS['tpu'], backends.TPU(interpret=two)):
    entry = (backend.entry(keys, values),)
    found.append(backend.extend(q, k, v, entry, 0, view, None, kv_heads=4, scale=0.1, cap=None))
  jax.tree.map(np.testing.assert_array_equal, *found)
  assert cores == {0, 1}


def test_slots_that_are_not_used_are_not_looked_at():
  tpu, q, slots = BACKENDS['tpu'], *_random(3, (1, 1, 2, 64), (1, 512, 2, 64))
  stale = jnp.where(jnp.arange(512)[None, :, None, None] < 7, slots, jnp.nan)
  entry = tpu.entry(stale, stale)
  visible = jnp.array([7])
  y = tpu.attend(
    q,
    {n: jnp.where(jnp.isnan(x) & (jnp.arange(512) < 128)[None, None, :, None], 0, x) for n, x in entry.items()},
    visible,
    None,
    kv_heads=2,
    scale=1.0,
    cap=None,
  )
  assert np.isfinite(y).all()  # the blocks beyond the first hold nothing but NaN


@pytest.mark.parametrize('name', BACKENDS)
@pytest.mark.parametrize(
  'shape', long_but([[50], [9, 2050], [3, 2048], [2, 3, 50]], [[9, 2050], [3, 2048], [2, 3, 50]])
)
def test_filters_keep_the_tokens_that_plain_xla_keeps(name, shape):
  x = np.random.default_rng(len(shape)).normal(scale=3, size=shape).astype(np.float32)
  x[..., ::3] = np.round(x[..., ::3])  # ties
  x[..., 5:9] = -np.inf
  by_row = np.linspace(0.3, 1.0, shape[0], dtype=np.float32) if len(shape) > 1 else 0.8
  for numbers in (dict(top_p=by_row), dict(top_k=7, temperature=0.6), dict(top_k=20, top_p=0.7, min_p=0.02)):
    plain = sampling.Sampler(**numbers)
    numbers = {n: jnp.asarray(v)[:, None] if np.ndim(v) and len(shape) > 2 else v for n, v in numbers.items()}
    plain = dataclasses.replace(plain, **numbers)
    kept = dataclasses.replace(plain, backend=BACKENDS[name])(jnp.asarray(x))
    np.testing.assert_array_equal(kept > 0, plain(jnp.asarray(x)) > 0)


@pytest.mark.parametrize('name', ['cpu', 'gpu'])
def test_many_queries_go_in_chunks(name, monkeypatch):
  backend = BACKENDS[name]
  q, k, v, bias = _random(4, (2, 300, 4, 8), *[(2, 300, 2, 8)] * 2, (1, 4, 300, 300))
  entry, settings = backend.entry(k, v), dict(kv_heads=2, scale=0.3, cap=None)
  positions = jnp.broadcast_to(jnp.arange(300)[None], (2, 300))
  mask = View(positions).mask(300)
  whole = backend.attend(q, entry, mask, bias, **settings)
  monkeypatch.setattr('speccascade.backends.base._SCORES', 1)
  np.testing.assert_allclose(backend.attend(q, entry, mask, bias, **settings), whole, atol=1e-6)
  np.testing.assert_allclose(
    backend.attend(q, entry, mask[:, :1], None, **settings)[:, :1],
    backend.attend(q[:, :1], entry, mask[:, :1], None, **settings),
    atol=1e-6,
  )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _logits(backend, network, params, prompt, tokens, positions):
  network = network.on(backend)
  cache = network.prefill(params, prompt, 40)
  first, cache = network.extend(params, cache, tokens[:, :3], positions[:, :3])
  second, cache = network.extend(params, cache, tokens[:, 3:4], positions[:, 3:4])
  return first, second, network.extend(params, cache, tokens[:, 4:], positions[:, 4:])[0]


def given(network):
  """Return parameters, prompts, and tokens that follow them."""
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, 23, (3, 14)), jnp.int32)
  prompt = Prompt(tokens[:, :9], jnp.array([9, 4, 6]))
  start = prompt.length - 1 if network.start_id is None else jnp.zeros(3, jnp.int32)
  return network.init(jax.random.key(0)), prompt, tokens[:, 9:], start[:, None] + jnp.arange(5)[None]


EVERY = [(name, family, scan) for name in BACKENDS for family in NETWORKS for scan in (False, True)]
FEW = [('cpu', 'experts of int8', False), ('tpu', 'llama', False)]


@pytest.mark.full
@pytest.mark.parametrize('name, family, scan', long_but(EVERY, FEW))
def test_a_network_is_the_same_on_every_backend(name, family, scan):
  network = dataclasses.replace(NETWORKS[family], scan=scan)
  both = (_logits(backend, network, *given(network)) for backend in (backends.Backend(), BACKENDS[name]))
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), *both)


@pytest.mark.parametrize('tokens', [1, 9])
@pytest.mark.parametrize('name', BACKENDS)
def test_experts_of_int8_are_the_floats_that_they_stand_for(name, tokens):
  x, gate, up, out = _random(0, (tokens, 8), (6, 8, 5), (6, 8, 5), (6, 5, 8))
  rng = np.random.default_rng(1)
  index = jnp.asarray([rng.choice(8, 3, replace=False) - 1 for _ in range(tokens)], jnp.int32)  # -1 and 6 are elsewhere
  weights = jnp.where((index >= 0) & (index < 6), 0.4, 0.0)
  kernels = [quantise(kernel, -2) for kernel in (gate, up, out)]
  floats = [k.values.astype(jnp.float32) * k.scale[:, None] for k in kernels]
  found, expected = (
    jax.jit(BACKENDS[name].experts, static_argnums=5)(x, index, weights, (gate, up), out, jax.nn.silu)
    for gate, up, out in (kernels, floats)
  )
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_parameters_are_changed_for_a_cpu_only_where_it_computes(monkeypatch):
  monkeypatch.setattr(cpu, '_CACHED', 0)
  monkeypatch.setattr(cpu, '_fuses_sums', lambda: True)
  for network, short in ((LLAMA, False), (OPT, True)):
    params, *tokens = given(network)
    if short:  # numbers that bfloat16 holds
      params = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    before = jax.tree.structure(params)
    ready = backends.CPU().prepare(params)
    assert jax.tree.structure(params) == before
    leaves = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(ready)}
    assert not any('kernel' in path for path in leaves)
    assert all(x.dtype == (jnp.bfloat16 if short else jnp.float32) for path, x in leaves.items() if 'rows' in path)
    assert ('rows' in ready['token_embedder']) == network.config.tied
    again = jax.tree.leaves(backends.CPU().prepare(params))
    assert all(a is b for a, b in zip(jax.tree.leaves(ready), again, strict=True))  # one copy for all engines
    both = (_logits(backends.CPU(), network, some, *tokens) for some in (ready, params))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), *both)


def test_tokens_are_looked_up_in_the_bits_of_a_short_table(monkeypatch):
  monkeypatch.setattr(cpu, '_CACHED', 0)
  monkeypatch.setattr(cpu, '_fuses_sums', lambda: True)
  wide = jax.random.normal(jax.random.key(0), (7, 4))
  for table, kept in ((wide, False), (wide.astype(jnp.bfloat16), True)):
    params = {'token_embedder': {'embedding': table}}
    ready, beside = (backends.CPU().prepare(x) for x in (params, {'model': params, 'head': {}}))
    jax.tree.map(np.testing.assert_array_equal, beside['model'], ready)
    ready = ready['token_embedder']
    assert ('bits' in ready) == kept and list(params['token_embedder']) == ['embedding']
    found = blocks.Embed(7, 4, dtype=table.dtype).apply({'params': ready}, jnp.array([[6, 0, 9]]))
    assert found.dtype == table.dtype
    np.testing.assert_array_equal(found[0], table[jnp.array([6, 0, 6])])


def test_prepared_kernels_go_with_the_parameters_they_come_from(monkeypatch):
  monkeypatch.setattr(cpu, '_CACHED', 0)
  monkeypatch.setattr(cpu, '_fuses_sums', lambda: True)
  before = len(base._CACHE)
  params = LLAMA.init(jax.random.key(7))
  backends.CPU().prepare(params)
  assert len(base._CACHE) > before
  del params
  assert len(base._CACHE) == before


@pytest.mark.full
def test_scales_and_biases_are_widened_for_a_tpu_once():
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), ENCDEC.init(jax.random.key(8)))
  before, tpu = len(base._CACHE), BACKENDS['tpu']
  jax.eval_shape(tpu.prepare, params)
  assert len(base._CACHE) == before  # what is traced is not cached
  ready, again = tpu.prepare(params), tpu.prepare(params)
  wide = {path[-1].key for path, x in jax.tree_util.tree_leaves_with_path(ready) if x.dtype == jnp.float32}
  assert wide == {'scale'} and len(base._CACHE) > before
  assert all(a is b for a, b in zip(jax.tree.leaves(ready), jax.tree.leaves(again), strict=True))
  del params, ready, again
  assert len(base._CACHE) == before


@pytest.mark.parametrize('dtype, given_in', [('float32', 'float32'), ('bfloat16', 'float32'), ('bfloat16', 'bfloat16')])
@pytest.mark.parametrize('name', BACKENDS)
def test_products_by_rows_are_the_products(name, dtype, given_in):
  rows = np.random.default_rng(4).normal(size=(40, 24)).astype(dtype)
  wide = rows.astype(np.float32).T
  counts = 1, 2, 4, 6, 8, 9, 16, 17, 64, 65
  given = [np.random.default_rng(3).normal(size=(n, 1, 24)).astype(given_in) for n in counts]

  @jax.jit
  def products(given, rows, kernel):
    both = BACKENDS[name].matmul_rows, BACKENDS[name].matmul
    return [[by(x, of, jnp.float32) for by, of in zip(both, (rows, kernel))] for x in given]

  for x, found in zip(given, products(given, rows, wide), strict=True):
    for y in found:
      np.testing.assert_allclose(y, x.astype(np.float32) @ wide, rtol=1e-4, atol=1e-5, err_msg=f'{len(x)} tokens')


def test_a_cpu_keeps_weights_on_the_left_of_every_product_of_few_tokens():
  product = jax.jit(BACKENDS['cpu'].matmul_rows, static_argnums=2)
  rows = jax.ShapeDtypeStruct((256, 128), jnp.float32)
  for tokens in (3, 8, 16):
    compiled = product.lower(jax.ShapeDtypeStruct((tokens, 128), jnp.float32), rows, jnp.float32).compile()
    assert re.search(r'f32\[256,\d+\]\S* dot\(', compiled.as_text()), f'{tokens} tokens'


@pytest.mark.full
def test_every_form_of_an_indexed_operation_gives_the_same():
  x = _random(5, (3, 6, 4))[0].at[0, 0, 0].set(-jnp.inf)
  index = jnp.array([[0, 5], [2, 2], [1, 9]])
  numbers, flags = jnp.arange(18).reshape(3, 6), _random(6, (3, 6))[0] > 0
  for values in (x, numbers, flags):
    np.testing.assert_array_equal(ops.masked_take(values, index), ops.gathered_take(values, index))
    np.testing.assert_array_equal(ops.take(values, index), ops.gathered_take(values, index))
  token = jnp.array([[0, 1, 2, 3, 0, 1]] * 3)
  np.testing.assert_array_equal(ops.masked_at_token(x, token), ops.gathered_at_token(x, token))
  ties = jnp.array([[1.0, 3.0, 3.0], [-jnp.inf, -jnp.inf, 0.0], [2.0, 2.0, 2.0]])
  for argmax in (ops.argmax, ops.plain_argmax, ops.argmax_of_maxima):
    assert argmax(ties).tolist() == [1, 2, 0]
  slot, mask = jnp.array([0, 5, 3]), jnp.array([True, True, False])
  for rows in (slice(0, 3), slice(1, 2)):
    given = x[rows], slot[rows], 2 * x[rows, 1], mask[rows]
    np.testing.assert_array_equal(ops.written_put(*given), ops.masked_put(*given))


def test_an_operation_has_the_form_of_the_platform_that_it_is_lowered_for():
  text = lambda platform: (
    ops.take.trace(jnp.ones((2, 3)), jnp.zeros((2, 1), int)).lower(lowering_platforms=(platform,)).as_text()
  )
  assert 'stablehlo.gather' in text('cpu') and 'stablehlo.gather' not in text('tpu')


OF_METHODS = [(n, t, m) for n in ('gpu', 'tpu') for t in (0.0, 1.0) for m in ('opt', 'cos')]


@pytest.mark.long
@pytest.mark.parametrize('name, temperature, method', OF_METHODS)
def test_methods_decode_the_same_on_every_backend(name, temperature, method, monkeypatch):
  networks = [Decoder(DecoderConfig(40, 16, 2, 2, 64, 24, (Span(),) * n)) for n in (1, 2)]
  models = [Model(n.init(jax.random.key(i)), n, name=str(i)) for i, n in enumerate(networks)]
  prompt = Prompt(jnp.array([[5, 6, 7], [8, 1, 1]]), jnp.array([3, 1]))
  keys = jax.random.key_data(jax.random.split(jax.random.key(0), 2))
  if method == 'opt':
    method = methods.speculative(functools.partial(rules.opt, alpha=0.1), 3)
  else:
    method = methods.cos(functools.partial(rules.weighted, weights=(0.5, 0.5)), (3, 1))
  sampler = sampling.Sampler(temperature, top_k=12, top_p=0.9)
  found = []
  for backend in (backends.Backend(), BACKENDS[name]):
    monkeypatch.setattr(backends, 'backend_for', lambda *_, backend=backend: backend)
    noise = sampling.Keyed(keys, temperature == 0)
    state = decode_batch(method, models, prompt, max_new_tokens=12, sampler=sampler, noise=noise)
    found.append((state.tokens.tolist(), state.stats.accepted_lengths.tolist(), state.stats.calls.tolist()))
  assert found[0] == found[1]


@pytest.mark.long
@pytest.mark.parametrize('name, few', [('cpu', {3}), ('gpu', set()), ('tpu', set())])
def test_few_tokens_are_one_window_where_that_takes_no_longer(name, few, monkeypatch):
  asked, choose = set(), backends.Backend.choose
  note = lambda self, which, branches, state: asked.add(len(branches)) or choose(self, which, branches, state)
  monkeypatch.setattr(backends.Backend, 'choose', note)
  for rows, expected in ((8, few), (64, {3})):
    asked.clear()
    method, sizes, place = methods.bild(max_draft=4), aot.Sizes(rows, 8, 8), aot.Placement(jax.devices(), {})
    run, args = aot.program(method, [aot.shaped(OPT)] * 2, sizes, sampling.Sampler(0.0), place, BACKENDS[name])
    run.trace(*args)
    assert asked == expected


def test_heads_that_a_mesh_shards_are_replicated_where_a_cache_has_them_in_one_group():
  layout = sharding.Sharded(AbstractMesh((1, 2), ('data', 'model')), ((('joined_kv_heads', 'model'),),))
  tpu = BACKENDS['tpu'].on_mesh(layout)
  q, k, v, keys, values = _random(7, (2, 3, 14, 64), *[(2, 3, 2, 64)] * 2, *[(2, 128, 2, 64)] * 2)
  entry, view = tpu.entry(keys, values), View(jnp.array([[4, 5, 6], [90, 91, 92]]))
  extend = functools.partial(tpu.extend, bias=None, kv_heads=2, scale=0.1, cap=None)
  y, (written,) = jax.eval_shape(lambda q, k, v, entry: extend(q, k, v, (entry,), 0, view), q, k, v, entry)
  assert y.shape == q.shape and written['key'].shape == (2, 1, 128, 128)


def test_an_option_that_the_compiler_refuses_is_left_out_with_a_warning():
  assert backends.known(()) == ()
  with pytest.warns(UserWarning, match='xla_of_tomorrow'):
    assert backends.known((('xla_of_tomorrow', 'true'),)) == ()


def test_three_parts_are_the_whole_number():
  x = jax.random.normal(jax.random.key(0), (24, 512)) * jnp.exp2(jnp.arange(512.0) % 9 - 4)[None]
  rows = jax.random.normal(jax.random.key(1), (40, 512)).astype(jnp.bfloat16)
  exact = np.float64(x) @ np.float64(rows).T
  error = lambda y: np.abs(np.float64(y) - exact).max() / np.abs(exact).max()
  short = x.astype(jnp.bfloat16).astype(jnp.float32)
  assert error(cpu._in_parts(x, rows)) < 2e-6 < 1e-4 < error(short @ rows.T.astype(jnp.float32))


@pytest.mark.full
def test_a_backend_in_use_or_of_a_platform_is_the_one_that_decodes(monkeypatch):
  asked = []

  @dataclasses.dataclass(frozen=True)
  class Noting(backends.Backend):
    name: str

    def matmul(self, x, kernel, out_dtype):
      asked.append(self.name)
      return super().matmul(x, kernel, out_dtype)

  model = Model(OPT.init(jax.random.key(0)), OPT)
  one = lambda: decode(methods.autoregressive(), [model], [[1, 2]], max_new_tokens=2).tokens
  plain = one()
  assert not asked
  with backends.use(Noting('used')):
    assert one() == plain and set(asked) == {'used'}
  monkeypatch.setitem(registry.OF_PLATFORM, 'cpu', None)
  backends.register('cpu', Noting('registered'))
  assert one() == plain and set(asked) == {'used', 'registered'}


@pytest.mark.full
@pytest.mark.skipif(jax.__version_info__ < (0, 10, 2), reason='the compiler of JAX 0.10.0 makes none')
def test_the_compiler_still_makes_one_kernel_of_a_sum_of_products():
  program = 'from speccascade.backends import cpu; print(cpu._fuses_sums())'
  as_users = os.environ | {'XLA_FLAGS': ''}
  out = subprocess.run([sys.executable, '-c', program], env=as_users, capture_output=True, text=True)
  assert out.stdout == 'True\n', f'decoding on a CPU takes plain products: {out.stderr}'
