"""The families that are read and written: each is one declaration (`family.Family` says of what)."""

from collections.abc import Callable
import functools
import math
from typing import Any

from speccascade.checkpoints.hf.checks import check
from speccascade.checkpoints.hf.family import ConfigFields, decoder, FAMILIES, family, Key, OWN
from speccascade.checkpoints.hf.spans import has_rope, learned, rotary
from speccascade.models.decoder import DecoderConfig
from speccascade.models.t5 import T5, T5Config, T5GemmaConfig

ACTIVATIONS = {
  'relu': 'relu',
  'silu': 'silu',
  'swish': 'silu',
  'gelu': 'gelu',
  'gelu_new': 'gelu_tanh',
  'gelu_fast': 'gelu_tanh',
  'gelu_pytorch_tanh': 'gelu_tanh',
}
_WRITTEN = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}  # the first of several names


# ---- fields that are stored in another form ----


def _named(name: str) -> str:
  """Return our name of an activation."""
  if name not in ACTIVATIONS:
    raise ValueError(f"activation '{name}' is not supported: choose from {', '.join(ACTIVATIONS)}")
  return ACTIVATIONS[name]


def _activation(key: str, gelu_tanh: str = 'gelu_new', **others: str) -> Key:
  """Return the field of a key, whose family writes `gelu_tanh` so, and gives other names another meaning."""
  written = _WRITTEN | {'gelu_tanh': gelu_tanh}
  return Key(lambda c: others.get(c[key]) or _named(c[key]), lambda x: {key: written[x.activation]})


def _or(field: str, key: str, other: Callable[[ConfigFields], Any]) -> Key:
  """Return a field whose key may be null, which stands for another value."""
  return Key(lambda c: c[key] or other(c), lambda x: {key: getattr(x, field)})


def _scale(c: ConfigFields) -> float:
  """Return Gemma's scale of the scores."""
  scalar = c['query_pre_attn_scalar']
  if scalar is None or scalar <= 0:
    raise ValueError(f"config.json: 'query_pre_attn_scalar' is {scalar!r}, expected a number above 0: correct it")
  return scalar**-0.5


def _power(scale: float | None) -> float | None:
  """Return the number whose power -½ is a scale, as an integer where it is one."""
  if scale is None:
    return None
  number = scale**-2
  return round(number) if round(number) ** -0.5 == scale else number


def _projection(x: T5Config) -> dict[str, str]:
  activation = 'gelu' if x.gated and x.activation == 'gelu_tanh' else _WRITTEN[x.activation]
  return {'feed_forward_proj': f'gated-{activation}' if x.gated else activation}


def _t5_activation(c: ConfigFields) -> str:
  gated, _, name = c['feed_forward_proj'].rpartition('-')
  return _named('gelu_new' if (gated, name) == ('gated', 'gelu') else name)


def t5(settings: ConfigFields, *, eos_ids: tuple[int, ...], dtype: str, scan: bool) -> T5:
  """Return the T5 that a config.json describes."""
  if (buckets := settings['relative_attention_num_buckets']) < 4:
    raise ValueError(f"config.json: 'relative_attention_num_buckets' is {buckets}, expected at least 4: correct it")
  config = T5Config(**settings.family.fields_of(settings))
  return T5(config, eos_ids, _start(settings, settings['pad_token_id'], config.vocab_size), dtype, scan)


def _start(settings: ConfigFields, other: int | None, size: int) -> int:
  """Return the token that a decoder's text begins with, by default another."""
  start = settings['decoder_start_token_id']
  start = other if start is None else start
  if type(start) is not int or not 0 <= start < size:
    raise ValueError(f"config.json: 'decoder_start_token_id' is {start!r}, no token id of 0 … {size - 1}: correct it")
  return start


def t5gemma(settings: ConfigFields, gemma: str = 'gemma2', *, eos_ids: tuple[int, ...], dtype: str, scan: bool) -> T5:
  """Return the T5Gemma that a config.json describes, whose stacks are those of a family."""
  own = _stack(gemma, settings, 'decoder')
  fields = settings.family.fields_of(settings)
  shared = [('vocab_size', 'vocab_size'), ('hidden_size', 'embed_dim')]  # by both, the width where a table is
  for key, name in shared[: 1 + ('merged' in fields)]:
    size, theirs = (getattr(stack, name) for stack in (own, fields['encoder']))
    if size != theirs:
      raise ValueError(f"config.json: '{key}' is {theirs} in 'encoder', {size} in 'decoder': correct it")
  config = T5GemmaConfig(**vars(own) | fields)
  begin = settings['decoder'].get('bos_token_id', 2) if settings['bos_token_id'] is None else settings['bos_token_id']
  return T5(config, eos_ids, _start(settings, begin, config.vocab_size), dtype, scan)


# A tower for images of the least size: transformers has none without one, and it reads no text.
_NO_VISION = dict(model_type='siglip_vision_model', hidden_size=2, intermediate_size=2, num_hidden_layers=1)
_NO_VISION |= dict(num_attention_heads=1, image_size=16, patch_size=1, vision_use_head=False)


def _stack(gemma: str, settings: ConfigFields, *path: str) -> DecoderConfig:
  """Return the stack under the keys of a path, whose settings are those of a family."""
  for key in path:
    check(settings.get(key, {}), key, dict, 'an object')
    settings = settings.get(key, {})
  FAMILIES[gemma].check(settings)
  return decoder(ConfigFields(settings, FAMILIES[gemma]), eos_ids=(), dtype='', scan=False).config


def _stacks(gemma: str, *path: str) -> Key:
  """Return the key `encoder` of stacks of a family; config.json has the encoder under the keys of the path."""

  def write(x: T5GemmaConfig) -> dict[str, Any]:
    encoder, own = (FAMILIES[gemma].config_of(stack) for stack in (x.encoder, x))
    for key in path[:0:-1]:
      encoder = {key: encoder, 'vision_config': _NO_VISION}
    return {path[0]: encoder, 'decoder': own, 'vocab_size': x.vocab_size, 'pad_token_id': 0}

  return Key(lambda c: _stack(gemma, c, *path), write)


# ---- Llama, and what is like it ----

_BIASES = ('qkv_bias', 'out_bias', 'mlp_bias')
_ATTENTION_BIASES = dict.fromkeys(('qkv_bias', 'out_bias'), 'attention_bias')
_MULTIPLIERS = {
  'embed_scale': 'embedding_multiplier',
  'attention_scale': 'attention_multiplier',
  'block_scale': 'residual_multiplier',
  'logits_divisor': 'logits_scaling',
}

_GPT_NEOX = {
  'token_embedder': 'gpt_neox.embed_in',
  'final_norm': 'gpt_neox.final_layer_norm',
  'logits_dense': 'embed_out',
  'layers.pre_attention_layer_norm': 'gpt_neox.layers.{}.input_layernorm',
  'layers.pre_mlp_layer_norm': 'gpt_neox.layers.{}.post_attention_layernorm',
  **{f'layers.attention.{name}': 'gpt_neox.layers.{}.attention.query_key_value' for name in ('query', 'key', 'value')},
  'layers.attention.out': 'gpt_neox.layers.{}.attention.dense',
  'layers.mlp.wi': 'gpt_neox.layers.{}.mlp.dense_h_to_4h',
  'layers.mlp.wo': 'gpt_neox.layers.{}.mlp.dense_4h_to_h',
}
_MIXTRAL = {'wi_0': 'w1', 'wi_1': 'w3', 'wo': 'w2'}
_QWEN3_MOE = {'wi_0': 'gate', 'wi_1': 'up', 'wo': 'down'}

family(
  'llama',
  network=decoder,
  hf='LlamaForCausalLM',
  models='Llama 2/3, Vicuna, CodeLlama, TinyLlama',
  about='grouped queries; RoPE with linear, llama3 or yarn scaling',
  keys={
    'vocab_size': 'vocab_size',
    'embed_dim': 'hidden_size',
    'heads': 'num_attention_heads',
    'kv_heads': _or('kv_heads', 'num_key_value_heads', lambda c: c['num_attention_heads']),
    'head_dim': _or('head_dim', 'head_dim', lambda c: c.share('hidden_size', 'num_attention_heads')),
    'mlp_dim': 'intermediate_size',
    'spans': rotary(),
    'activation': _activation('hidden_act'),
    'norm_eps': 'rms_norm_eps',
    'context': 'max_position_embeddings',
    'mlp_bias': 'mlp_bias',
    **_ATTENTION_BIASES,
    'tied': 'tie_word_embeddings',
  },
  defaults={
    'num_key_value_heads': None,
    'head_dim': None,
    'hidden_act': 'silu',
    'rms_norm_eps': 1e-6,
    'rope_theta': 10000.0,
    'rope_scaling': None,
    'max_position_embeddings': 2048,
    'attention_bias': False,
    'mlp_bias': False,
    'tie_word_embeddings': False,
    'eos_token_id': 2,
  },
  names={
    'token_embedder': 'model.embed_tokens',
    'final_norm': 'model.norm',
    'logits_dense': 'lm_head',
    'layers.pre_attention_layer_norm': 'model.layers.{}.input_layernorm',
    'layers.pre_mlp_layer_norm': 'model.layers.{}.post_attention_layernorm',
    'layers.attention.query': 'model.layers.{}.self_attn.q_proj',
    'layers.attention.key': 'model.layers.{}.self_attn.k_proj',
    'layers.attention.value': 'model.layers.{}.self_attn.v_proj',
    'layers.attention.out': 'model.layers.{}.self_attn.o_proj',
    'layers.attention.query_norm': 'model.layers.{}.self_attn.q_norm',
    'layers.attention.key_norm': 'model.layers.{}.self_attn.k_norm',
    'layers.mlp.wi_0': 'model.layers.{}.mlp.gate_proj',
    'layers.mlp.wi_1': 'model.layers.{}.mlp.up_proj',
    'layers.mlp.wo': 'model.layers.{}.mlp.down_proj',
  },
  tiny={
    'vocab_size': 67,
    'hidden_size': 48,
    'intermediate_size': 40,
    'num_hidden_layers': 3,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'head_dim': 16,
    'max_position_embeddings': 64,
    'attention_bias': True,
    'mlp_bias': True,
    'bos_token_id': 1,
    'eos_token_id': 2,
    'pad_token_id': 0,
  },
)
family(
  'mistral',
  like='llama',
  hf='MistralForCausalLM',
  about='sliding window, of all layers or those of `layer_types`',
  defaults={
    'num_key_value_heads': 8,
    'sliding_window': 4096,
    'layer_types': None,
    'max_position_embeddings': 131072,
  },
  keys={'spans': rotary(local=lambda c, i: True)},
  tiny={'sliding_window': 5, 'attention_bias': False, 'mlp_bias': False},
)
family(
  'qwen2',
  like='llama',
  hf='Qwen2ForCausalLM',
  about='biases of q, k, v; windows',
  defaults={
    'max_position_embeddings': 32768,
    'use_sliding_window': False,
    'sliding_window': 4096,
    'max_window_layers': 28,
    'layer_types': None,
    'eos_token_id': None,
  },
  keys={'spans': rotary(local=lambda c, i: i >= c['max_window_layers'])},
  switches={'qkv_bias': True, 'out_bias': False},
  tiny={'head_dim': 12, 'tie_word_embeddings': True, 'attention_bias': False, 'mlp_bias': False},
)
family(
  'mimo',
  like='qwen2',
  about='biases of q, k, v; its layer of multi-token prediction is `FOLDER@mtp`',
  defaults={'attention_bias': True},
  tiny={'attention_bias': True},
)
family(
  'qwen3',
  like='qwen2',
  hf='Qwen3ForCausalLM',
  about='norms of q and k; windows',
  defaults={'head_dim': 128},
  keys=_ATTENTION_BIASES,
  switches={'qk_norm': True},
  tiny={'head_dim': 16, 'tie_word_embeddings': False, 'attention_bias': True},
)
family(
  'gemma',
  like='llama',
  hf='GemmaForCausalLM',
  about='scaled embeddings, scales of norms stored as their difference from one',
  defaults=dict(
    hidden_act='gelu_pytorch_tanh', max_position_embeddings=8192, head_dim=256, tie_word_embeddings=True, eos_token_id=1
  ),
  keys={
    'activation': _activation('hidden_act', 'gelu_pytorch_tanh', gelu='gelu_tanh'),
    'embed_scale': lambda c: math.sqrt(c['hidden_size']),
  },
  switches={'norm_offset': 1.0, 'mlp_bias': False},
  only={'use_bidirectional_attention': False},
)
family(
  'gemma2',
  like='gemma',
  hf='Gemma2ForCausalLM',
  about='soft caps, alternating local layers, norms around each block',
  defaults={
    'vocab_size': 256000,
    'hidden_size': 2304,
    'intermediate_size': 9216,
    'num_hidden_layers': 26,
    'num_attention_heads': 8,
    'num_key_value_heads': 4,
    'hidden_activation': 'gelu_pytorch_tanh',
    'query_pre_attn_scalar': 256.0,
    'sliding_window': 4096,
    'layer_types': None,
    'final_logit_softcapping': 30.0,
    'attn_logit_softcapping': 50.0,
  },
  keys={
    'activation': _activation('hidden_activation', 'gelu_pytorch_tanh'),
    'spans': rotary(local=lambda c, i: (i + 1) % 2 != 0),
    'attention_scale': Key(_scale, lambda x: {'query_pre_attn_scalar': _power(x.attention_scale)}),
    'attention_cap': 'attn_logit_softcapping',
    'final_cap': 'final_logit_softcapping',
  },
  switches={'norms': 'sandwich'},
  names={
    'layers.post_attention_layer_norm': 'model.layers.{}.post_attention_layernorm',
    'layers.pre_mlp_layer_norm': 'model.layers.{}.pre_feedforward_layernorm',
    'layers.post_mlp_layer_norm': 'model.layers.{}.post_feedforward_layernorm',
  },
  tiny={
    'query_pre_attn_scalar': 24,
    'sliding_window': 4,
    'final_logit_softcapping': 3.0,
    'attn_logit_softcapping': 2.0,
  },
)
family(
  'gemma3_text',
  like='gemma2',
  hf='Gemma3ForCausalLM',
  inside='gemma3',
  about='norms of q and k, local layers with a rope of their own; of `gemma3` the text model',
  defaults={
    'vocab_size': 262208,
    'max_position_embeddings': 131072,
    'rope_theta': 1000000.0,
    'rope_local_base_freq': 10000.0,
    'sliding_window_pattern': 6,
    'final_logit_softcapping': None,
    'attn_logit_softcapping': None,
  },
  keys={'spans': rotary(local=lambda c, i: (i + 1) % c['sliding_window_pattern'] != 0)},
  switches={'qk_norm': True, 'attention_cap': None},
  prefixes=(('language_model.model.', 'model.'), ('model.language_model.', 'model.'), ('language_model.', '')),
  tiny={
    'attn_logit_softcapping': None,
    'layer_types': ['sliding_attention', 'full_attention', 'sliding_attention'],
    'rope_parameters': {
      'full_attention': {'rope_type': 'linear', 'factor': 8.0, 'rope_theta': 1e6},
      'sliding_attention': {'rope_type': 'default', 'rope_theta': 1e4},
    },
  },
)

family(
  'starcoder2',
  like='llama',
  hf='Starcoder2ForCausalLM',
  about='LayerNorm, biases, an MLP without a gate, a sliding window of all layers',
  defaults=dict(norm_epsilon=1e-5, use_bias=True, sliding_window=None, max_position_embeddings=4096)
  | dict(hidden_act='gelu_pytorch_tanh', tie_word_embeddings=True, eos_token_id=50256),
  keys={'norm_eps': 'norm_epsilon', 'spans': rotary(local=lambda c, i: True), **dict.fromkeys(_BIASES, 'use_bias')},
  switches={'layer_norm': True, 'gated': False},
  names={'layers.mlp.wi': 'model.layers.{}.mlp.c_fc', 'layers.mlp.wo': 'model.layers.{}.mlp.c_proj'},
  tiny={'head_dim': 12, 'sliding_window': 5},
)
family(
  'smollm3',
  like='qwen2',
  hf='SmolLM3ForCausalLM',
  about='layers that are not turned by position; windows',
  defaults=dict(no_rope_layers=None, no_rope_layer_interval=4, rope_theta=2000000.0)
  | dict(sliding_window=None, tie_word_embeddings=True, eos_token_id=128001),
  keys={'spans': rotary(local=lambda c, i: not has_rope(c, i), rotates=has_rope), **_ATTENTION_BIASES},
  tiny={'no_rope_layer_interval': 2, 'use_sliding_window': True, 'sliding_window': 4, 'attention_bias': True},
)
family(
  'olmo2',
  like='llama',
  hf='Olmo2ForCausalLM',
  about='norms behind each block, norms of q and k over all heads',
  defaults={'rms_norm_eps': 1e-5, 'eos_token_id': 50279},
  switches={'norms': 'after', 'qk_norm': True, 'joined_qk_norm': True, 'mlp_bias': False},
  names={
    'layers.post_attention_layer_norm': 'model.layers.{}.post_attention_layernorm',
    'layers.post_mlp_layer_norm': 'model.layers.{}.post_feedforward_layernorm',
  },
  tiny={'head_dim': 12},
)
family(
  'granite',
  like='llama',
  hf='GraniteForCausalLM',
  models='Granite 3',
  about='multipliers of embeddings, scores, blocks and logits',
  defaults=dict.fromkeys(_MULTIPLIERS.values(), 1.0),
  keys=_MULTIPLIERS,
  tiny={'embedding_multiplier': 3.0, 'attention_multiplier': 0.3, 'residual_multiplier': 0.7, 'logits_scaling': 2.0},
)
family(
  'phi3',
  like='llama',
  hf='Phi3ForCausalLM',
  models='Phi-3 of 4k positions, Phi-4',
  about='fused projections, a sliding window of all layers; not longrope, nor a rope of a part of each head',
  defaults={'rms_norm_eps': 1e-5, 'max_position_embeddings': 4096, 'sliding_window': None, 'eos_token_id': 32000},
  keys={'spans': rotary(local=lambda c, i: True, ropes=('default',))},
  switches=dict.fromkeys(_BIASES, False),
  names={
    **{f'layers.attention.{name}': 'model.layers.{}.self_attn.qkv_proj' for name in ('query', 'key', 'value')},
    **{f'layers.mlp.{name}': 'model.layers.{}.mlp.gate_up_proj' for name in ('wi_0', 'wi_1')},
  },
  tiny={'head_dim': 12, 'sliding_window': 5},
)
family(
  'olmo3',
  like='olmo2',
  hf='Olmo3ForCausalLM',
  about='as `olmo2`, with windows, whose layers have a rope of their own',
  defaults=dict(rope_theta=500000.0, rope_local_base_freq=500000.0, rope_parameters=None)
  | dict(sliding_window=4096, layer_types=None),
  keys={'spans': rotary(local=lambda c, i: (i + 1) % 4 != 0)},
  tiny={
    'sliding_window': 4,
    'layer_types': ['sliding_attention', 'full_attention', 'sliding_attention'],
    'rope_parameters': {
      'full_attention': {'rope_type': 'yarn', 'factor': 8.0, 'rope_theta': 1e5, 'original_max_position_embeddings': 8},
      'sliding_attention': {'rope_type': 'default', 'rope_theta': 1e4},
    },
  },
)
family(
  'stablelm',
  like='llama',
  hf='StableLmForCausalLM',
  models='StableLM 3B, StableLM 2 1.6B',
  about='LayerNorm, a rope of a part of each head, biases of q, k, v, parallel blocks; not norms of q and k',
  defaults=dict(layer_norm_eps=1e-5, partial_rotary_factor=0.25, use_qkv_bias=False, use_parallel_residual=False)
  | dict(max_position_embeddings=4096, eos_token_id=0),
  keys={'norm_eps': 'layer_norm_eps', 'qkv_bias': 'use_qkv_bias', 'parallel': 'use_parallel_residual'}
  | {'norms': lambda c: 'shared' if c['use_parallel_residual'] else 'pre'},
  switches={'layer_norm': True, 'out_bias': False, 'mlp_bias': False},
  only={'qk_layernorm': False},
  tiny={'head_dim': 12, 'partial_rotary_factor': 0.5, 'use_qkv_bias': True},
)
family(
  'gpt_neox',
  like='stablelm',
  hf='GPTNeoXForCausalLM',
  models='Pythia, GPT-NeoX 20B',
  about='LayerNorm, biases, parallel blocks, a rope of a part of each head, projections fused head by head',
  defaults=dict(hidden_act='gelu', use_parallel_residual=True, attention_bias=True, rotary_pct=0.25)
  | dict(rotary_emb_base=10000.0, max_position_embeddings=2048, eos_token_id=2),
  keys=dict(kv_heads='num_attention_heads', qkv_bias='attention_bias', out_bias='attention_bias')
  | {'head_dim': lambda c: c.share('hidden_size', 'num_attention_heads')},
  switches={'norms': 'pre', 'gated': False, 'mlp_bias': True},
  by_head=True,
  names=_GPT_NEOX,
  tiny={'rotary_pct': 0.5},
)

# ---- experts ----

family(
  'mixtral',
  like='llama',
  hf='MixtralForCausalLM',
  about='experts of a router, a sliding window of all layers',
  defaults=dict(num_local_experts=8, num_experts_per_tok=2, num_key_value_heads=8, sliding_window=None)
  | dict(rms_norm_eps=1e-5, rope_theta=1e6, max_position_embeddings=131072),
  keys=dict(
    experts='num_local_experts', experts_per_token='num_experts_per_tok', spans=rotary(local=lambda c, i: True)
  ),
  switches=dict.fromkeys(_BIASES, False),
  names={'layers.mlp.router': 'model.layers.{}.block_sparse_moe.gate'}
  | {f'layers.mlp.{n}': f'model.layers.{{}}.block_sparse_moe.experts.{{}}.{w}' for n, w in _MIXTRAL.items()},
  tiny={'num_local_experts': 4, 'sliding_window': 5},
)
family(
  'qwen3_moe',
  like='llama',
  hf='Qwen3MoeForCausalLM',
  models='Qwen3 30B-A3B, 235B-A22B',
  about='experts of a router in all layers, norms of q and k, a sliding window of all layers',
  defaults=dict(num_experts=None, num_local_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
  | dict(norm_topk_prob=False, use_sliding_window=False, sliding_window=4096, eos_token_id=None),
  keys=dict(
    experts_per_token='num_experts_per_tok', experts_normalised='norm_topk_prob', mlp_dim='moe_intermediate_size'
  )
  | dict(
    spans=rotary(local=lambda c, i: True), experts=_or('experts', 'num_experts', lambda c: c['num_local_experts'])
  ),
  switches={'qk_norm': True, 'mlp_bias': False},
  only={'decoder_sparse_step': 1, 'mlp_only_layers': []},
  names={'layers.mlp.router': 'model.layers.{}.mlp.gate'}
  | {f'layers.mlp.{n}': f'model.layers.{{}}.mlp.experts.{{}}.{w}_proj' for n, w in _QWEN3_MOE.items()},
  tiny={'moe_intermediate_size': 24, 'num_experts': 6, 'num_experts_per_tok': 3, 'norm_topk_prob': True},
)

# ---- learned positions ----

family(
  'opt',
  network=decoder,
  hf='OPTForCausalLM',
  about='learned positions, LayerNorm before or after each block',
  keys={
    'vocab_size': 'vocab_size',
    'embed_dim': 'hidden_size',
    'heads': 'num_attention_heads',
    'kv_heads': 'num_attention_heads',
    'head_dim': lambda c: c.share('hidden_size', 'num_attention_heads'),
    'mlp_dim': 'ffn_dim',
    'spans': learned('num_hidden_layers'),
    'positions': 'max_position_embeddings',
    'activation': _activation('activation_function'),
    'tied': 'tie_word_embeddings',
    'norms': Key(
      lambda c: 'pre' if c['do_layer_norm_before'] else 'post', lambda x: {'do_layer_norm_before': x.norms == 'pre'}
    ),
    'final_norm': Key(
      lambda c: c['do_layer_norm_before'] and not c['_remove_final_layer_norm'],
      lambda x: {'_remove_final_layer_norm': x.norms == 'pre' and not x.final_norm},
    ),
    'projected_dim': Key(
      lambda c: None if c['word_embed_proj_dim'] == c['hidden_size'] else c['word_embed_proj_dim'],
      lambda x: {'word_embed_proj_dim': x.projected_dim or x.embed_dim},
    ),
    **dict.fromkeys(_BIASES, 'enable_bias'),
  },
  switches={'layer_norm': True, 'norm_eps': 1e-5, 'gated': False, 'position_offset': 2},
  only={'layer_norm_elementwise_affine': True},
  defaults={
    'vocab_size': 50272,
    'hidden_size': 768,
    'num_hidden_layers': 12,
    'ffn_dim': 3072,
    'max_position_embeddings': 2048,
    'do_layer_norm_before': True,
    '_remove_final_layer_norm': False,
    'word_embed_proj_dim': None,
    'num_attention_heads': 12,
    'activation_function': 'relu',
    'enable_bias': True,
    'tie_word_embeddings': True,
    'eos_token_id': 2,
  },
  prefixes=(('decoder.', 'model.decoder.'),),
  names={
    'token_embedder': 'model.decoder.embed_tokens',
    'position_embedder': 'model.decoder.embed_positions',
    'input_projection': 'model.decoder.project_in',
    'output_projection': 'model.decoder.project_out',
    'final_norm': 'model.decoder.final_layer_norm',
    'logits_dense': 'lm_head',
    'layers.attention.query': 'model.decoder.layers.{}.self_attn.q_proj',
    'layers.attention.key': 'model.decoder.layers.{}.self_attn.k_proj',
    'layers.attention.value': 'model.decoder.layers.{}.self_attn.v_proj',
    'layers.attention.out': 'model.decoder.layers.{}.self_attn.out_proj',
    'layers.mlp.wi': 'model.decoder.layers.{}.fc1',
    'layers.mlp.wo': 'model.decoder.layers.{}.fc2',
    **{f'layers.{s}_attention_layer_norm': 'model.decoder.layers.{}.self_attn_layer_norm' for s in ('pre', 'post')},
    **{f'layers.{s}_mlp_layer_norm': 'model.decoder.layers.{}.final_layer_norm' for s in ('pre', 'post')},
  },
  tiny={
    'vocab_size': 67,
    'hidden_size': 48,
    'ffn_dim': 40,
    'num_hidden_layers': 3,
    'num_attention_heads': 4,
    'max_position_embeddings': 32,
    'word_embed_proj_dim': 48,
    'bos_token_id': 2,
    'eos_token_id': 2,
    'pad_token_id': 1,
  },
)
family(
  'gpt2',
  network=decoder,
  hf='GPT2LMHeadModel',
  about='learned positions, LayerNorm',
  keys={
    'vocab_size': 'vocab_size',
    'embed_dim': 'n_embd',
    'heads': 'n_head',
    'kv_heads': 'n_head',
    'head_dim': lambda c: c.share('n_embd', 'n_head'),
    'mlp_dim': _or('mlp_dim', 'n_inner', lambda c: 4 * c['n_embd']),
    'spans': learned('n_layer'),
    'positions': 'n_positions',
    'activation': _activation('activation_function'),
    'norm_eps': 'layer_norm_epsilon',
    'attention_scale': Key(
      lambda c: None if c['scale_attn_weights'] else 1.0, lambda x: {'scale_attn_weights': x.attention_scale is None}
    ),
    'tied': 'tie_word_embeddings',
  },
  switches={'layer_norm': True, 'gated': False, **dict.fromkeys(_BIASES, True)},
  only={'scale_attn_by_inverse_layer_idx': False},
  defaults={
    'vocab_size': 50257,
    'n_positions': 1024,
    'n_embd': 768,
    'n_layer': 12,
    'n_head': 12,
    'n_inner': None,
    'activation_function': 'gelu_new',
    'layer_norm_epsilon': 1e-5,
    'scale_attn_weights': True,
    'tie_word_embeddings': True,
    'eos_token_id': 50256,
  },
  prefixes=(('', 'transformer.'),),
  transposed=False,
  names={
    'token_embedder': 'transformer.wte',
    'position_embedder': 'transformer.wpe',
    'final_norm': 'transformer.ln_f',
    'logits_dense': 'lm_head',
    'layers.pre_attention_layer_norm': 'transformer.h.{}.ln_1',
    'layers.pre_mlp_layer_norm': 'transformer.h.{}.ln_2',
    **{f'layers.attention.{name}': 'transformer.h.{}.attn.c_attn' for name in ('query', 'key', 'value')},
    'layers.attention.out': 'transformer.h.{}.attn.c_proj',
    'layers.mlp.wi': 'transformer.h.{}.mlp.c_fc',
    'layers.mlp.wo': 'transformer.h.{}.mlp.c_proj',
  },
  tiny={'vocab_size': 67, 'n_embd': 48, 'n_head': 4, 'n_layer': 3, 'n_positions': 32, 'eos_token_id': 2},
)

# ---- T5 ----

_STACKS = {'encoder': ('attention', 'mlp'), 'decoder': ('self_attention', 'cross_attention', 'mlp')}

family(
  't5',
  network=t5,
  config=T5Config,
  hf='T5ForConditionalGeneration',
  models='Flan, ByT5',
  about='ReLU or gated GELU; tied or untied head; output scaling; relative position buckets; a bias for all layers or '
  'for each',
  keys={
    'vocab_size': 'vocab_size',
    'embed_dim': 'd_model',
    'heads': 'num_heads',
    'head_dim': 'd_kv',
    'mlp_dim': 'd_ff',
    'encoder_layers': 'num_layers',
    'decoder_layers': _or('decoder_layers', 'num_decoder_layers', lambda c: c['num_layers']),
    'activation': Key(_t5_activation, _projection),
    'gated': lambda c: c['feed_forward_proj'].startswith('gated-'),
    'tied': 'tie_word_embeddings',
    # Older configs mean v1.1, which neither ties nor scales, by one of them.
    'scale_outputs': Key(
      lambda c: c['tie_word_embeddings'] if c['scale_decoder_outputs'] is None else c['scale_decoder_outputs'],
      lambda x: {'scale_decoder_outputs': x.scale_outputs},
    ),
    'buckets': 'relative_attention_num_buckets',
    'max_distance': 'relative_attention_max_distance',
    'norm_eps': 'layer_norm_epsilon',
  },
  defaults={
    'vocab_size': 32128,
    'd_model': 512,
    'd_kv': 64,
    'd_ff': 2048,
    'num_layers': 6,
    'num_decoder_layers': None,
    'num_heads': 8,
    'relative_attention_num_buckets': 32,
    'relative_attention_max_distance': 128,
    'layer_norm_epsilon': 1e-6,
    'feed_forward_proj': 'relu',
    'tie_word_embeddings': True,
    'scale_decoder_outputs': None,
    'decoder_start_token_id': None,
    'pad_token_id': 0,
    'eos_token_id': 1,
  },
  # Of several equal tensors any one may have been saved.
  prefixes=(('encoder.embed_tokens.', 'shared.'), ('decoder.embed_tokens.', 'shared.')),
  names={
    'token_embedder': 'shared',
    'decoder.logits_dense': 'lm_head',
    **{f'{s}.{s}_norm': f'{s}.final_layer_norm' for s in _STACKS},
    **{f'{s}.relpos_bias': s + '.block.0.layer.0.SelfAttention.relative_attention_bias' for s in _STACKS},
    **{
      f'{stack}.layers.pre_{block}_layer_norm': f'{stack}.block.{{}}.layer.{number}.layer_norm'
      for stack, blocks in _STACKS.items()
      for number, block in enumerate(blocks)
    },
    **{
      f'{stack}.layers.{ours}.{name}': f'{stack}.block.{{}}.layer.{number}.{theirs}.{name[0]}'
      for stack, ours, number, theirs in (
        ('encoder', 'attention', 0, 'SelfAttention'),
        ('decoder', 'self_attention', 0, 'SelfAttention'),
        ('decoder', 'encoder_decoder_attention', 1, 'EncDecAttention'),
      )
      for name in ('query', 'key', 'value', 'out')
    },
    **{
      f'{stack}.layers.mlp.{name}': f'{stack}.block.{{}}.layer.{number}.DenseReluDense.{name}'
      for stack, number in (('encoder', 1), ('decoder', 2))
      for name in ('wi', 'wi_0', 'wi_1', 'wo')
    },
  },
  tiny={
    'vocab_size': 67,
    'd_model': 48,
    'd_kv': 16,
    'd_ff': 40,
    'num_layers': 2,
    'num_decoder_layers': 3,
    'num_heads': 4,
    'decoder_start_token_id': 0,
    'pad_token_id': 0,
    'eos_token_id': 1,
  },
)
family(
  'mt5',
  like='t5',
  hf='MT5ForConditionalGeneration',
  defaults={
    'vocab_size': 250112,
    'd_ff': 1024,
    'num_layers': 8,
    'num_heads': 6,
    'feed_forward_proj': 'gated-gelu',
    'scale_decoder_outputs': False,
  },
)
family(
  'umt5',
  like='mt5',
  hf='UMT5ForConditionalGeneration',
  defaults={'scale_decoder_outputs': None},
  switches={'shared_bias': False},
  names={f'{s}.layers.relpos_bias': s + '.block.{}.layer.0.SelfAttention.relative_attention_bias' for s in _STACKS},
)

_BLOCKS = dict(attention='self_attn', self_attention='self_attn', cross_attention='cross_attn', mlp='feedforward')
family(
  't5gemma',
  network=t5gemma,
  config=T5GemmaConfig,
  hf='T5GemmaForConditionalGeneration',
  about='two stacks of layers of `gemma2`, of equal sizes or not; windows of the encoder reach both ways',
  keys={'encoder': _stacks('gemma2', 'encoder'), 'tied': 'tie_word_embeddings'},
  defaults=dict(encoder={}, decoder={}, vocab_size=256000, tie_word_embeddings=True)
  | dict(decoder_start_token_id=None, bos_token_id=None, pad_token_id=0, eos_token_id=1),
  names={
    'token_embedder': 'model.decoder.embed_tokens',
    'encoder.token_embedder': 'model.encoder.embed_tokens',
    'decoder.logits_dense': 'lm_head.out_proj',
    **{f'{s}.{s}_norm': f'model.{s}.norm' for s in _STACKS},
    **{
      f'{stack}.layers.{side}_{block}_layer_norm': f'model.{stack}.layers.{{}}.{side}_{_BLOCKS[block]}_layernorm'
      for stack, blocks in _STACKS.items()
      for block in blocks
      for side in ('pre', 'post')
    },
    **{
      f'{stack}.layers.{ours}.{name}': f'model.{stack}.layers.{{}}.{theirs}.{name[0]}_proj'
      for stack, ours, theirs in (
        ('encoder', 'attention', 'self_attn'),
        ('decoder', 'self_attention', 'self_attn'),
        ('decoder', 'encoder_decoder_attention', 'cross_attn'),
      )
      for name in ('query', 'key', 'value', 'out')
    },
    **{
      f'{stack}.layers.mlp.{ours}': f'model.{stack}.layers.{{}}.mlp.{theirs}_proj'
      for stack in _STACKS
      for ours, theirs in (('wi_0', 'gate'), ('wi_1', 'up'), ('wo', 'down'))
    },
  },
  tiny={
    'encoder': FAMILIES['gemma2'].tiny | {'hidden_size': 40, 'num_attention_heads': 2, 'num_key_value_heads': 1},
    'decoder': FAMILIES['gemma2'].tiny | {'bos_token_id': 2, 'eos_token_id': 1},
    'eos_token_id': 1,
  },
)
_TEXT = 'model.encoder.text_model.'
_NORMS = {
  f'{s}.layers.attention.{name}_norm': f'model.{s}.layers.{{}}.self_attn.{name[0]}_norm'
  for s in _STACKS
  for name in ('query', 'key')
}
family(
  't5gemma2',
  like='t5gemma',
  network=functools.partial(t5gemma, gemma='gemma3_text'),
  hf='T5Gemma2ForConditionalGeneration',
  about='the text model: two stacks of layers of `gemma3_text`, one table of tokens; self- and cross-attention are one',
  keys={'encoder': _stacks('gemma3_text', 'encoder', 'text_config')},
  switches={'merged': True},
  defaults={'vocab_size': 262144},
  prefixes=(
    ('model.decoder.embed_tokens.', f'{_TEXT}embed_tokens.'),
    *((f'model.encoder.{module}.', f'{_TEXT}{module}.') for module in ('embed_tokens', 'layers', 'norm')),
  ),
  names={
    k.replace('self_attention', 'attention'): v.replace('model.encoder.', _TEXT)
    for k, v in (FAMILIES['t5gemma'].names | _NORMS).items()
  }
  | {'token_embedder': f'{_TEXT}embed_tokens'},
  tiny={
    'encoder': {
      'text_config': FAMILIES['gemma3_text'].tiny | {'num_attention_heads': 2, 'num_key_value_heads': 1},
      'vision_config': _NO_VISION,
    },
    'decoder': FAMILIES['gemma3_text'].tiny | {'bos_token_id': 2, 'eos_token_id': 1},
  },
)

OWN.update(FAMILIES)
