"""What the compiled loop keeps in memory: caches updated in place, and little beside weights, caches and window."""

import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade import methods, rules, Sampler
from speccascade.decode import _Batch, _first_state, _loop, _Program, _refill, _Seeds, prefill
from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.models.t5 import T5, T5Config
from speccascade.types import Model, Prompt

SLOTS, HEADS, DIM = 53, 3, 7  # no other array has this shape


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


OPTIONS = {'xla_cpu_use_fusion_emitters': True}  # as users compile


def given(method, networks, rows: int, slots: int = SLOTS, width: int = 8):
  """Return what a loop of these networks takes: what is compiled in, and shapes for their weights and a batch."""
  prompt = Prompt(jnp.ones((rows, width), jnp.int32), jnp.full(rows, width, jnp.int32))
  chosen = tuple(networks[m] for m in method.slots)
  shapes = tuple(n.param_shapes() for n in chosen)
  caches = jax.eval_shape(functools.partial(prefill, chosen, max_len=slots), shapes, prompt)
  noise = _Seeds(np.uint32(0), np.uint32(0), np.zeros(rows, np.uint32))
  program = _Program(chosen, tuple(range(len(chosen))), slots, 40, False)
  return program, shapes, _Batch(caches, prompt, np.int32(9), Sampler(1.0), noise, np.ones(rows, bool))


def copied(text: str) -> set[str]:
  """Return the shapes of what a program copies."""
  return set(re.findall(r'= (f32\[[\d,]+\])\{[\d,]*\} copy\(', text))


def shapes_of(caches) -> set[str]:
  """Return the shapes of the slots that grow with the text."""
  return {f'f32[{",".join(map(str, x.shape))}]' for x in jax.tree.leaves(caches) if SLOTS in x.shape}


@pytest.mark.parametrize('batch', [1, 2])
@pytest.mark.parametrize('name', METHODS)
@pytest.mark.parametrize('family', [t5, decoder])
def test_no_cache_is_copied_in_the_loop(family, name, batch):
  program, weights, given_batch = given(METHODS[name], [family(1), family(2)], batch)
  shapes = shapes_of(given_batch.caches)
  dim = DIM + (DIM % 2 if family is decoder else 0)
  assert shapes == {f'f32[{batch * HEADS},{SLOTS},{dim}]', f'f32[{batch * HEADS},{dim},{SLOTS}]'}
  text = _loop.lower(program, METHODS[name], weights, *given_batch).compile(OPTIONS).as_text()
  inside = text[: text.index('\nENTRY ')]
  assert 'dynamic-update-slice' in inside or 'scatter' in inside
  assert not shapes & copied(inside)


@pytest.mark.parametrize('family', [t5, decoder])
def test_a_row_takes_its_place_without_a_copy_of_a_cache(family):
  method, moves = METHODS['speculative'], np.zeros((2, 4), np.int32)
  program, weights, batch = given(method, [family(1), family(2)], 4)
  state = jax.eval_shape(functools.partial(_first_state, program, method), *batch)
  text = _refill.lower(program, method, weights, batch, moves, np.int32(1), state).compile(OPTIONS).as_text()
  assert 'dynamic-update-slice' in text
  assert not shapes_of(batch.caches) & copied(text)


@pytest.mark.parametrize('name', ['autoregressive', 'speculative', 'cascade', 'cos'])
def test_a_decode_holds_little_beside_weights_caches_and_window(name):
  method = METHODS[name]
  program, weights, batch = given(method, [t5(1, 256), t5(2, 512)], 2, slots=512)
  window = 4 * 2 * 40 * (2 * method.window + 1) * len(method.slots)
  needed = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((weights, batch.caches))) + window
  memory = _loop.lower(program, method, weights, *batch).compile(OPTIONS).memory_analysis()
  peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
  assert peak - memory.alias_size_in_bytes <= 1.15 * needed


# What there is of caches before and after each of three readings: 12 arrays are keys and values of one layer and of
# two, for the target and the source. Rows that wait in line are read beside those that are decoded.
ALIVE = {1: [0, 12, 0, 12, 0, 12], 2: [0, 12, 12, 24, 12, 24]}


@pytest.mark.parametrize('size', ALIVE)
def test_a_batch_is_forgotten_before_the_next_is_read(size, monkeypatch):
  networks, module = [t5(1), t5(2)], sys.modules[_loop.__module__]
  models = [Model(n.init(jax.random.key(i)), n, name=str(i)) for i, n in enumerate(networks)]
  alive, read = [], module._read

  def count():
    alive.append(sum(x.ndim == 3 and {size * HEADS, DIM} < {*x.shape} for x in jax.live_arrays()))

  def noted(fixed, params, prompt):
    if not isinstance(prompt.tokens, np.ndarray):  # `_refill` is being traced
      return read(fixed, params, prompt)
    count()
    caches = read(fixed, params, prompt)
    count()
    return caches

  monkeypatch.setattr(module, '_read', noted)
  prompts = [[5, 6], [7], [8, 9]] * size
  out = module.decode(METHODS['speculative'], models, prompts, max_new_tokens=4, batch_size=size)
  assert out.stats.emitted.min() > 0
  assert alive == ALIVE[size]
