"""What the compiled loop keeps in memory: caches updated in place, and little beside weights, caches and window."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade import methods, rules, Sampler
from speccascade.decode import _loop, _Program, _Seeds, prefill
from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.models.t5 import T5, T5Config
from speccascade.types import Prompt

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


def compiled(method, networks, batch: int, slots: int = SLOTS, width: int = 8):
  """Compile a method's loop for networks without ever making their weights."""
  prompt = Prompt(jnp.ones((batch, width), jnp.int32), jnp.full(batch, width, jnp.int32))
  chosen = tuple(networks[m] for m in method.slots)
  shapes = tuple(n.param_shapes() for n in chosen)
  caches = jax.eval_shape(functools.partial(prefill, chosen, max_len=slots), shapes, prompt)
  noise = _Seeds(np.uint32(0), np.uint32(0), np.zeros(batch, np.uint32))
  program = _Program(chosen, tuple(range(len(chosen))), slots, 40, False)
  real = np.ones(batch, bool)
  return _loop.lower(
    program, method, shapes, caches, prompt, np.int32(9), Sampler(1.0), noise, real
  ).compile({'xla_cpu_use_fusion_emitters': True}), (shapes, caches)  # fmt: skip


@pytest.mark.parametrize('batch', [1, 2])
@pytest.mark.parametrize('name', METHODS)
@pytest.mark.parametrize('family', [t5, decoder])
def test_no_cache_is_copied_in_the_loop(family, name, batch):
  program, (_, caches) = compiled(METHODS[name], [family(1), family(2)], batch)
  shapes = {f'f32[{",".join(map(str, x.shape))}]' for x in jax.tree.leaves(caches) if SLOTS in x.shape}
  dim = DIM + (DIM % 2 if family is decoder else 0)
  assert shapes == {f'f32[{batch * HEADS},{SLOTS},{dim}]', f'f32[{batch * HEADS},{dim},{SLOTS}]'}
  text = program.as_text()
  inside = text[: text.index('\nENTRY ')]
  assert 'dynamic-update-slice' in inside or 'scatter' in inside
  copies = re.findall(r'= (f32\[[\d,]+\])\{[\d,]*\} copy\(', inside)
  assert not shapes & set(copies)


@pytest.mark.parametrize('name', ['autoregressive', 'speculative', 'cascade', 'cos'])
def test_a_decode_holds_little_beside_weights_caches_and_window(name):
  method = METHODS[name]
  program, used = compiled(method, [t5(1, 256), t5(2, 512)], batch=2, slots=512)
  window = 4 * 2 * 40 * (2 * method.window + 1) * len(method.slots)
  needed = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(used)) + window
  memory = program.memory_analysis()
  peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
  assert peak - memory.alias_size_in_bytes <= 1.15 * needed
