"""Long prompts: read in chunks, as they are read at once, by a memory that does not grow with their square."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import long_but

from speccascade import backends, decode, methods, Sampler
from speccascade.backends import base, Offsets
from speccascade.models import decoder, t5
from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.models.t5 import T5, T5Config, T5GemmaConfig
from speccascade.planning.synthetic import random_model
from speccascade.types import Prompt

WINDOWED = Decoder(DecoderConfig(23, 32, 4, 2, 8, 48, (Span(7), Span(), Span(7, None))))
ENCDEC = T5(T5Config(23, 32, 4, 8, 48, encoder_layers=2, decoder_layers=1))
GEMMA = T5(T5GemmaConfig(**vars(WINDOWED.config), encoder=WINDOWED.config))
LAYOUTS = {'plain': backends.Backend(), **{name: x.emulated() for name, x in backends.by_name().items()}}


def logits_after(network, params, prompt: Prompt):
  """Return the logits of three tokens after the prompts, of which the last token is the first of them."""
  cache = network.prefill(params, prompt, prompt.tokens.shape[1] + 8)
  start = prompt.length - 1 if network.start_id is None else jnp.zeros_like(prompt.length)
  tokens = jnp.take_along_axis(prompt.tokens, (prompt.length - 1)[:, None], 1) + jnp.array([[0, 1, 2]])
  return network.extend(params, cache, tokens % 23, start[:, None] + jnp.arange(3)[None])[0]


def prompts(rows: int, width: int) -> Prompt:
  tokens = np.random.default_rng(0).integers(0, 23, (rows, width))
  return Prompt(jnp.asarray(tokens, jnp.int32), jnp.arange(width, width - 9 * rows, -9))


@pytest.mark.full
@pytest.mark.parametrize(
  'name, scan',
  long_but([(n, s) for n in LAYOUTS for s in (False, True)], [('plain', True)]),
)
def test_a_prompt_in_chunks_is_read_as_at_once(name, scan, monkeypatch):
  network = dataclasses.replace(WINDOWED, scan=scan, backend=LAYOUTS[name])
  params = network.init(jax.random.key(0))
  expected = logits_after(network, params, prompts(3, 45))
  read = []
  monkeypatch.setattr(decoder, 'CHUNK', 8)
  monkeypatch.setattr(Decoder, '_read_chunks', lambda *args, f=Decoder._read_chunks: read.append(1) or f(*args))
  np.testing.assert_allclose(logits_after(network, params, prompts(3, 45)), expected, atol=2e-5)
  assert read


OFFSETS = {
  'shared': ENCDEC,
  'by layer': T5(dataclasses.replace(ENCDEC.config, shared_bias=False)),
  'windows': GEMMA,
  'windows scanned': dataclasses.replace(GEMMA, scan=True),
}


@pytest.mark.long
@pytest.mark.parametrize('name', OFFSETS)
def test_a_bias_by_offsets_is_that_of_every_pair(name, monkeypatch):
  network = OFFSETS[name]
  params = network.init(jax.random.key(0))
  read = lambda: jax.jit(lambda params: logits_after(network, params, prompts(2, 171)))(params)
  found = [read()]
  monkeypatch.setattr(base, '_SCORES', 1 << 10)  # in chunks
  found.append(read())
  monkeypatch.setattr(t5, '_of_source', lambda bias, slots: bias(t5.View(jnp.arange(slots)[None]).distance(slots)))
  expected = read()
  for some in found:
    np.testing.assert_allclose(some, expected, atol=1e-6)


@pytest.mark.parametrize('first, count', [(0, 9), (0, 4), (4, 4), (6, 4), (8, 2)])
def test_offsets_are_expanded_for_some_queries(first, count):
  values = jnp.arange(17.0)[None, None]  # of nine slots
  expected = [[8 + t - q for t in range(9)] for q in range(first, min(first + count, 9))]
  found = Offsets(values).of_queries(jnp.int32(first), count)
  assert found.shape == (1, 1, count, 9)
  np.testing.assert_array_equal(found[0, 0, : len(expected)], expected)


@pytest.mark.full
@pytest.mark.parametrize('network', long_but([WINDOWED, ENCDEC, GEMMA], [ENCDEC]))
def test_memory_to_read_prompts_does_not_grow_with_the_square_of_their_length(network):
  def held(width):
    prompt = Prompt(*(jax.ShapeDtypeStruct(s, jnp.int32) for s in ((2, width), (2,))))
    run = jax.jit(network.prefill, static_argnums=2).lower(network.param_shapes(), prompt, width)
    return run.compile().memory_analysis().temp_size_in_bytes

  assert held(65536) < 4.5 * held(16384)


@pytest.mark.long
def test_a_text_after_a_prompt_of_4096_tokens_is_that_of_reading_it_at_once(monkeypatch):
  config = dataclasses.replace(WINDOWED.config, heads=2, kv_heads=1, spans=(Span(7), Span()))
  model = random_model(Decoder(config), 'long', seed=3)
  prompt = np.random.default_rng(1).integers(0, 23, 4096).tolist()
  texts = []
  for chunk in (decoder.CHUNK, 1 << 20):
    monkeypatch.setattr(decoder, 'CHUNK', chunk)
    jax.clear_caches()
    settings = dict(max_new_tokens=8, max_prompt_tokens=4096, sampler=Sampler(0.0))
    texts.append(decode(methods.autoregressive(), [model], [prompt], **settings).tokens)
  assert texts[0] == texts[1] and len({*texts[0][0]}) > 1
