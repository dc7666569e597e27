"""Networks of published sizes, without weights: what timings and ahead-of-time compilation are made for."""

import dataclasses

from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.models.rope import Rope
from speccascade.models.t5 import T5, T5Config, T5GemmaConfig
from speccascade.types import Network

T5_V1_1 = {  # embedding, heads, MLP, layers
  'small': (512, 6, 1024, 8),
  'base': (768, 12, 2048, 12),
  'large': (1024, 16, 2816, 24),
  'xl': (2048, 32, 5120, 24),
  'xxl': (4096, 64, 10240, 24),
}
LLAMA = {  # embedding, heads, key-value heads, MLP, layers
  '68m': (768, 12, 12, 3072, 2),
  '160m': (768, 12, 12, 3072, 12),
  '7b': (4096, 32, 32, 11008, 32),
  '13b': (5120, 40, 40, 13824, 40),
  '70b': (8192, 64, 8, 28672, 80),
}
MISTRAL = {'7b': 0, '8x7b': 8}  # experts of a layer
QWEN3 = {  # embedding, heads, key-value heads, MLP, layers, experts
  '0.6b': (1024, 16, 8, 3072, 28, 0),
  '30b_a3b': (2048, 32, 4, 768, 48, 128),
}
GEMMA2 = {  # embedding, heads, key-value heads, head dimension, MLP, layers, 1/(scale of the scores)²
  '2b': (2304, 8, 4, 256, 9216, 26, 256),
  '9b': (3584, 16, 8, 256, 14336, 42, 256),
  '27b': (4608, 32, 16, 128, 36864, 46, 144),
}
GEMMA3 = {  # embedding, heads, key-value heads, MLP, layers, window, stretching of the others
  '270m': (640, 4, 1, 2048, 18, 512, 1),
  '1b': (1152, 4, 1, 6912, 26, 512, 1),
  '4b': (2560, 8, 4, 10240, 34, 1024, 8),
}
T5GEMMA = {'2b': ('2b', '2b'), '9b-2b': ('9b', '2b'), '9b': ('9b', '9b')}  # encoder and decoder


def in_dtype(network: Network, dtype: str) -> Network:
  """Return a network in a dtype; int8 is that of its weights, next to which it computes in bfloat16."""
  return dataclasses.replace(network, dtype='bfloat16' if dtype == 'int8' else dtype, quantised=dtype == 'int8')


def t5(size: str, dtype: str = 'bfloat16', layers: int | None = None) -> T5:
  """Return T5 v1.1 of a published size, or with another number of layers."""
  embed, heads, mlp, published = T5_V1_1[size]
  layers = layers or published
  return in_dtype(T5(T5Config(32128, embed, heads, 64, mlp, layers, layers)), dtype)


def llama(size: str, dtype: str = 'bfloat16', layers: int | None = None) -> Decoder:
  """Return Llama of a published size, or with another number of layers; of 68 M and 160 M those that draft for it."""
  embed, heads, kv_heads, mlp, published = LLAMA[size]
  config = DecoderConfig(32000, embed, heads, kv_heads, embed // heads, mlp, (Span(),) * (layers or published))
  return in_dtype(Decoder(config, (2,)), dtype)


def mistral(size: str, dtype: str = 'bfloat16') -> Decoder:
  """Return Mistral 7B, or Mixtral, which has its sizes and experts."""
  routed = dict(experts=MISTRAL[size], experts_per_token=2) if MISTRAL[size] else {}
  config = DecoderConfig(32000, 4096, 32, 8, 128, 14336, (Span(0, Rope(1e6)),) * 32, **routed)
  return in_dtype(Decoder(config, (2,)), dtype)


def qwen3(size: str, dtype: str = 'bfloat16') -> Decoder:
  """Return Qwen3 of a published size."""
  embed, heads, kv_heads, mlp, layers, experts = QWEN3[size]
  more = dict(experts=experts, experts_per_token=8) if experts else dict(tied=True)
  spans = (Span(0, Rope(1e6)),) * layers
  config = DecoderConfig(151936, embed, heads, kv_heads, 128, mlp, spans, qk_norm=True, **more)
  return in_dtype(Decoder(config, (151645,)), dtype)


def gemma2(size: str, dtype: str = 'bfloat16') -> Decoder:
  """Return Gemma 2 of a published size."""
  embed, heads, kv_heads, dim, mlp, layers, scale = GEMMA2[size]
  spans = tuple(Span(0 if i % 2 else 4096) for i in range(layers))
  config = DecoderConfig(
    256000,
    embed,
    heads,
    kv_heads,
    dim,
    mlp,
    spans,
    activation='gelu_tanh',
    norm_offset=1.0,
    norms='sandwich',
    tied=True,
    embed_scale=embed**0.5,
    attention_scale=scale**-0.5,
    attention_cap=50.0,
    final_cap=30.0,
  )
  return in_dtype(Decoder(config, (1,)), dtype)


def t5gemma(size: str, dtype: str = 'bfloat16') -> T5:
  """Return T5Gemma of a published size."""
  encoder, decoder = (gemma2(stack).config for stack in T5GEMMA[size])
  return in_dtype(T5(T5GemmaConfig(**vars(decoder), encoder=encoder), start_id=2), dtype)


def t5gemma2(size: str, dtype: str = 'bfloat16') -> T5:
  """Return the text model of T5Gemma 2 of a published size, whose two stacks are Gemma 3's."""
  embed, heads, kv_heads, mlp, layers, window, factor = GEMMA3[size]
  full = Span(0, Rope(1e6, 'linear', factor) if factor > 1 else Rope(1e6))
  spans = tuple(Span(window) if (i + 1) % 6 else full for i in range(layers))
  switches = dict(
    activation='gelu_tanh', norm_offset=1.0, norms='sandwich', qk_norm=True, tied=True, attention_scale=1 / 16
  )
  stack = DecoderConfig(262144, embed, heads, kv_heads, 256, mlp, spans, embed_scale=embed**0.5, **switches)
  return in_dtype(T5(T5GemmaConfig(**vars(stack), encoder=stack, merged=True), start_id=2), dtype)


PAIRS = {  # drafter and verifier
  't5_small_xl': (t5, 'small', 'xl'),
  't5_small_xxl': (t5, 'small', 'xxl'),
  'llama_68m_7b': (llama, '68m', '7b'),
  'llama_68m_13b': (llama, '68m', '13b'),
  'llama_7b_70b': (llama, '7b', '70b'),
  'mistral_7b_8x7b': (mistral, '7b', '8x7b'),
  'qwen3_0.6b_30b_a3b': (qwen3, '0.6b', '30b_a3b'),
  'gemma2_2b_9b': (gemma2, '2b', '9b'),
  'gemma2_2b_27b': (gemma2, '2b', '27b'),
  't5gemma_2b_9b': (t5gemma, '2b', '9b'),
  't5gemma2_270m_4b': (t5gemma2, '270m', '4b'),
}


def pair(name: str, dtype: str = 'bfloat16') -> tuple[Network, Network]:
  """Return the drafter and the verifier of a pair in `PAIRS`."""
  if name not in PAIRS:
    raise ValueError(f"no pair '{name}': choose from {', '.join(PAIRS)}")
  family, *sizes = PAIRS[name]
  return tuple(family(size, dtype) for size in sizes)
