"""Small networks of each kind, with a prompt and four tokens behind it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from speccascade.models import rope
from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.models.t5 import T5, T5Config, T5GemmaConfig
from speccascade.types import Prompt

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
GEMMA2 = T5(dataclasses.replace(GEMMA.config, encoder=dataclasses.replace(STACK, embed_dim=16), merged=True))
NETWORKS = {'llama': LLAMA, 'opt': OPT, 't5': ENCDEC, 't5gemma': GEMMA, 't5gemma2': GEMMA2}
TOKENS = np.random.default_rng(0).integers(0, 23, (3, 12))
LENGTH = np.array([7, 4, 1])


prefill = jax.jit(lambda network, *args: network.prefill(*args), static_argnums=(0, 3))
step = jax.jit(lambda network, *args: network.extend(*args), static_argnums=0)


@functools.cache
def params_of(network):
  return network.init(jax.random.key(0))


def extend(network, params, prompt: Prompt, rows=slice(None)):
  """Return logits of four tokens behind the prompt, in two windows."""
  cache = prefill(network, params, prompt, 20)
  first = jnp.zeros_like(prompt.length) if network.start_id is not None else prompt.length - 1
  logits = []
  for i in (0, 2):
    positions = first[:, None] + jnp.arange(i, i + 2)[None]
    out, cache = step(network, params, cache, jnp.asarray(TOKENS[rows, i : i + 2]), positions)
    logits.append(out)
  return jnp.concatenate(logits, axis=1)


def prompt_of(rows=slice(None), width=7, junk=0) -> Prompt:
  padded = np.where(np.arange(width)[None] < LENGTH[rows, None], TOKENS[rows, :width], junk)
  return Prompt(jnp.asarray(padded), jnp.asarray(LENGTH[rows]))
