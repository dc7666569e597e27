"""The memory of the compiled loop: caches updated in place, and little besides weights, caches and window."""

import functools
import re

from compiling import AS_USERS
import jax
import jax.numpy as jnp
from matching import having
import numpy as np
import pytest
from tiers import long_but

from speccascade import backends, decode, methods, rules, Sampler
from speccascade.backends import base, cpu
from speccascade.engine import engine, loop, requests
from speccascade.engine.lowering import lower
from speccascade.host.memo import memo
from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.models.t5 import T5, T5Config
from speccascade.planning.synthetic import random_model, tree_bytes
from speccascade.types import Model

SLOTS, HEADS, DIM = 48, 3, 7  # no other array has this shape


def t5(layers: int, embed: int = 20) -> T5:
  return T5(T5Config(40, embed, HEADS, DIM, 24, encoder_layers=1, decoder_layers=layers))


def decoder(layers: int, embed: int = 20) -> Decoder:
  config = DecoderConfig(40, embed, 2 * HEADS, HEADS, DIM + DIM % 2, 24, spans=(Span(0, None),) * layers)
  return Decoder(config)


weighted = functools.partial(rules.weighted, weights=(0.5, 0.5))
METHODS = {
  'autoregressive': methods.autoregressive(1),
  'speculative': methods.speculative(block=3),
  'cascade': methods.speculative(functools.partial(rules.opt, alpha=0.1), 3),
  'token cascade': methods.token_cascade(functools.partial(rules.chow, alpha=0.3), 3),
  'ensemble': methods.ensemble(weighted),
  'cos': methods.cos(weighted, (3, 1)),
}


def given(method, networks, rows: int, slots: int = SLOTS, width: int = 8):
  """Return what a run of these networks takes: what is compiled in, shapes of weights and state, and an insertion."""
  chosen = tuple(networks[m] for m in method.slots)
  program = loop.Program(chosen, tuple(range(len(chosen))), slots, 40, backends.CPU())
  row = requests.RequestRow(
    np.ones(width, np.int32), 0, 0, 0, 9, 0, np.uint32(0), np.uint32(0), Sampler(1.0), (), (), (), 0
  )
  arrays = requests.arrays([row] * rows, requests.features([row]), rows, width, 40)
  params = tuple(n.param_shapes() for n in chosen)
  state = jax.eval_shape(functools.partial(loop.blank, program, lower(method).start), params, arrays)
  prefix = jax.eval_shape(lambda p: loop.prefilled(program.networks, p, arrays.prompt, width), params)
  arrival = loop.InsertBatch(arrays, np.zeros(rows, np.int32), np.zeros(rows, np.int32), np.int32(1))
  return program, params, state, (prefix, arrival)


def run(program, method, params, state, rows: int):
  """Compile a run as users do."""
  rest = state, np.zeros(rows, bool), np.zeros(2, np.int32)
  return loop.run.lower(program, lower(method), params, *rest).compile(AS_USERS)


def copied(text: str) -> set[str]:
  """Return the shapes of what a program copies."""
  return set(re.findall(r'= (f32\[[\d,]+\])\{[\d,]*\} copy\(', text))


def shapes_of(caches) -> set[str]:
  """Return the shapes of the slots that grow with the text."""
  return {f'f32[{",".join(map(str, x.shape))}]' for x in jax.tree.leaves(caches) if SLOTS in x.shape}


CASES = [(family, n, b) for family in (t5, decoder) for n in METHODS for b in (1, 2)]


@pytest.mark.full
@pytest.mark.parametrize('family, name, batch', long_but(CASES, [(t5, 'cascade', 2)]))
def test_no_cache_is_copied_in_the_loop(family, name, batch):
  program, weights, state, _ = given(METHODS[name], [family(1), family(2)], batch)
  shapes = shapes_of(state.caches)
  dim = DIM + (DIM % 2 if family is decoder else 0)
  assert shapes == {f'f32[{batch * HEADS},{SLOTS},{dim}]', f'f32[{batch * HEADS},{dim},{SLOTS}]'}
  text = run(program, METHODS[name], weights, state, batch).as_text()
  inside = text[: text.index('\nENTRY ')]
  assert 'dynamic-update-slice' in inside or 'scatter' in inside
  assert not shapes & copied(inside)


@pytest.mark.parametrize('family', long_but([t5, decoder], [t5]))
def test_a_row_takes_its_place_without_a_copy_of_a_cache(family):
  method = METHODS['speculative']
  program, _, state, insert = given(method, [family(1), family(2)], 4)
  text = loop.insert.lower(program, lower(method).start, *insert, state).compile(AS_USERS).as_text()
  assert 'dynamic-update-slice' in text
  assert not shapes_of(state.caches) & copied(text)


def test_a_copy_of_a_cache_is_found_where_there_is_one():
  method = METHODS['speculative']
  program, _, state, insert = given(method, [t5(1), t5(2)], 4)
  kept = jax.jit(functools.partial(loop.put_rows, program, lower(method).start))  # the state is not donated
  assert shapes_of(state.caches) & copied(kept.lower(*insert, state).compile(AS_USERS).as_text())


@pytest.mark.long
@pytest.mark.parametrize('name', ['autoregressive', 'speculative', 'cascade', 'cos'])
def test_a_decode_holds_little_beside_weights_caches_and_window(name):
  method = METHODS[name]
  program, weights, state, _ = given(method, [t5(1, 256), t5(2, 512)], 2, slots=512)
  window = 4 * 2 * 40 * (2 * method.window + 1) * len(method.slots)
  memory = run(program, method, weights, state, 2).memory_analysis()
  needed = tree_bytes((weights, state.caches)) + window
  peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
  assert peak - memory.alias_size_in_bytes <= 1.15 * needed


@pytest.mark.full
def test_a_batch_is_counted_with_its_prompts_and_the_copies_of_its_weights(monkeypatch):
  memo.cache_clear()
  counted = {name: [] for name in ('_cache_bytes', '_weight_bytes')}
  for name, found in counted.items():
    count = getattr(engine, name)
    monkeypatch.setattr(engine, name, lambda *args, count=count, found=found: found.append(count(*args)) or found[-1])
  model = random_model(T5(T5Config(40, 256, 4, 64, 1024, 1, 4)), 'large')
  decode(methods.autoregressive(), [model], [[3] * 20] * 3, max_new_tokens=4, max_prompt_tokens=256, batch_size=2)
  caches, weights = (found[0] for found in counted.values())
  source, target = (2 * 4 * n * 4 * 64 * 4 for n in (256, 16))  # of a row: keys and values of every layer
  assert caches == 3 * (source + target + 4)  # a batch of two, and a prompt that is read meanwhile
  _, (prepared,) = backends.prepared([model])
  rows = [x for path, x in jax.tree.leaves_with_path(prepared) if path[-1].key == 'rows']
  assert rows or not cpu._fuses_sums()
  assert weights == tree_bytes(model.params) + tree_bytes(rows)


def attended(rows: int, length: int, backend=backends.CPU()):
  """Return a layer's attention, and the shapes of what it takes."""
  entry = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in _entry(backend, rows, length).items()}
  shapes = [(rows, length, 8, 4), (rows, 1, length), (1, 8, length, length)]
  q, mask, bias = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, ('float32', 'bool', 'float32')))
  return functools.partial(backend.attend, kv_heads=8, scale=1.0, cap=None), (q, entry, mask, bias)


def _entry(backend, rows, length):
  zeros = jax.ShapeDtypeStruct((rows, length, 8, 4), 'float32')
  return jax.eval_shape(backend.entry, zeros, zeros)


def test_reading_more_prompts_at_once_takes_no_more_memory_for_scores():
  def held(rows):
    attend, shapes = attended(rows, 2048)
    return jax.jit(attend).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

  scores = 4 * base._SCORES
  assert scores <= held(4) < 2.2 * scores and held(32) < 2.2 * scores


@pytest.mark.parametrize('backend', [backends.Backend(), backends.CPU()])
def test_queries_in_chunks_of_few_give_what_all_give(backend, monkeypatch):
  attend, shapes = attended(3, 200, backend)
  keys = iter(jax.random.split(jax.random.key(0), 9))
  normal = lambda x: jax.random.normal(next(keys), x.shape) if x.dtype == jnp.float32 else jnp.arange(200) < 150
  args = jax.tree.map(lambda x: jnp.broadcast_to(normal(x), x.shape), shapes)
  whole = attend(*args)
  monkeypatch.setattr(base, '_SCORES', 24 * 3 * 8 * 200 + 99)
  text = str(jax.make_jaxpr(attend)(*args))
  assert re.search(r'f32\[9,3,24,8,4\]', text)
  np.testing.assert_allclose(attend(*args), whole, rtol=2e-5, atol=1e-6)


def test_what_reading_prompts_takes_is_counted(monkeypatch):
  memo.cache_clear()
  model = random_model(decoder(1, 8), 'large')
  run = functools.partial(decode, methods.autoregressive(), [model], [[3] * 500] * 4, max_new_tokens=4)
  scores = 4 * 2 * HEADS * 512 * 512 * 4
  monkeypatch.setattr(engine.backends, 'memory', lambda _: 2 * scores)
  with pytest.raises(ValueError, match=having('GiB to read 4 prompts', 'batch_size')):
    run()
  run(batch_size=1)


@pytest.mark.long
def test_a_queue_needs_memory_for_one_batch_and_one_prefill(monkeypatch):
  size = 4
  networks, alive = [t5(1), t5(2)], []
  models = [Model(n.init(jax.random.key(i)), n, name=str(i)) for i, n in enumerate(networks)]
  is_cache = lambda x: x.ndim == 3 and x.shape[0] % HEADS == 0 and DIM in x.shape
  caches = lambda: sum(x.nbytes for x in jax.live_arrays() if is_cache(x))
  for name in ('prefill', 'run'):
    real = getattr(engine.Engine, name)

    def noted(self, *args, real=real, **kwargs):
      alive.append(caches())
      found = real(self, *args, **kwargs)
      alive.append(caches())
      return found

    monkeypatch.setattr(engine.Engine, name, noted)
  out = decode(METHODS['speculative'], models, [[5, 6], [7], [8, 9]] * (2 * size), max_new_tokens=4, batch_size=size)
  assert out.stats.emitted.min() > 0 and caches() == 0
  chunk = max(1, size // 2)
  one = 3 * 2 * HEADS * DIM * 4  # bytes of a slot of a row: three layers, keys and values
  # A prefix has 16 slots of the source and 16 of the target: two positions are one step of a CPU's slots.
  batch, prefix = one * size * (16 + 32), one * chunk * (16 + 16)
  assert max(alive) <= batch + prefix and len(alive) > 4 * 3


def test_a_prompt_of_a_decoder_is_traced_once(monkeypatch):
  network, read = decoder(3), []
  prefill = Decoder.prefill

  def counted(self, params, prompt, max_len):
    read.append(max_len)
    return prefill(self, params, prompt, max_len)

  monkeypatch.setattr(Decoder, 'prefill', counted)
  decode(methods.autoregressive(), [Model(network.init(jax.random.key(0)), network)], [[1, 2]], max_new_tokens=4)
  assert read == [8]  # the padded width
