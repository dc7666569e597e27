"""The tensor of a Hugging Face checkpoint in which each of our parameters is stored.

The tables name modules; the last part of a path gives the tensor's name and whether it is transposed:
PyTorch stores a dense kernel as (out, in), GPT-2's Conv1D as (in, out).
"""

import re
from typing import Any

from speccascade.checkpoints import assemble

_LLAMA = {
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
}
_GEMMA = _LLAMA | {
  'layers.post_attention_layer_norm': 'model.layers.{}.post_attention_layernorm',
  'layers.pre_mlp_layer_norm': 'model.layers.{}.pre_feedforward_layernorm',
  'layers.post_mlp_layer_norm': 'model.layers.{}.post_feedforward_layernorm',
}
_OPT_NORMS = {
  'attention_layer_norm': 'model.decoder.layers.{}.self_attn_layer_norm',
  'mlp_layer_norm': 'model.decoder.layers.{}.final_layer_norm',
}
_OPT = {
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
  **{f'layers.{side}_{name}': hf for name, hf in _OPT_NORMS.items() for side in ('pre', 'post')},
}
_GPT2 = {
  'token_embedder': 'transformer.wte',
  'position_embedder': 'transformer.wpe',
  'final_norm': 'transformer.ln_f',
  'logits_dense': 'lm_head',
  'layers.pre_attention_layer_norm': 'transformer.h.{}.ln_1',
  'layers.pre_mlp_layer_norm': 'transformer.h.{}.ln_2',
  'layers.attention.query': 'transformer.h.{}.attn.c_attn',
  'layers.attention.key': 'transformer.h.{}.attn.c_attn',
  'layers.attention.value': 'transformer.h.{}.attn.c_attn',
  'layers.attention.out': 'transformer.h.{}.attn.c_proj',
  'layers.mlp.wi': 'transformer.h.{}.mlp.c_fc',
  'layers.mlp.wo': 'transformer.h.{}.mlp.c_proj',
}
_LETTERS = {'query': 'q', 'key': 'k', 'value': 'v', 'out': 'o'}
_BLOCK = {'encoder': 'encoder.block.{}.layer.', 'decoder': 'decoder.block.{}.layer.'}
_T5 = {
  'token_embedder': 'shared',
  'decoder.logits_dense': 'lm_head',
  'encoder.encoder_norm': 'encoder.final_layer_norm',
  'decoder.decoder_norm': 'decoder.final_layer_norm',
  'encoder.relpos_bias': 'encoder.block.0.layer.0.SelfAttention.relative_attention_bias',
  'decoder.relpos_bias': 'decoder.block.0.layer.0.SelfAttention.relative_attention_bias',
  'encoder.layers.pre_attention_layer_norm': _BLOCK['encoder'] + '0.layer_norm',
  'encoder.layers.pre_mlp_layer_norm': _BLOCK['encoder'] + '1.layer_norm',
  'decoder.layers.pre_self_attention_layer_norm': _BLOCK['decoder'] + '0.layer_norm',
  'decoder.layers.pre_cross_attention_layer_norm': _BLOCK['decoder'] + '1.layer_norm',
  'decoder.layers.pre_mlp_layer_norm': _BLOCK['decoder'] + '2.layer_norm',
  **{
    f'{stack}.layers.{ours}.{name}': f'{_BLOCK[stack]}{number}.{theirs}.{letter}'
    for stack, ours, number, theirs in (
      ('encoder', 'attention', 0, 'SelfAttention'),
      ('decoder', 'self_attention', 0, 'SelfAttention'),
      ('decoder', 'encoder_decoder_attention', 1, 'EncDecAttention'),
    )
    for name, letter in _LETTERS.items()
  },
  **{
    f'{stack}.layers.mlp.{name}': f'{_BLOCK[stack]}{number}.DenseReluDense.{name}'
    for stack, number in (('encoder', 1), ('decoder', 2))
    for name in ('wi', 'wi_0', 'wi_1', 'wo')
  },
}
TABLES = {
  'llama': _LLAMA,
  'mistral': _LLAMA,
  'qwen2': _LLAMA,
  'qwen3': _LLAMA,
  'gemma2': _GEMMA,
  'gemma3_text': _GEMMA,
  'opt': _OPT,
  'gpt2': _GPT2,
  't5': _T5,
  'mt5': _T5,
  'umt5': _T5
  | {
    f'{stack}.layers.relpos_bias': _BLOCK[stack] + '0.SelfAttention.relative_attention_bias'
    for stack in ('encoder', 'decoder')
  },
}

_FUSED = ('query', 'key', 'value')  # one after the other on the last axis of GPT-2's c_attn
LIKE: dict[str, str] = {}  # {registered model_type: that of the package whose names it has}

# What older or enclosing classes put before a name, and what we expect instead.
_PREFIXES = {
  'opt': (('decoder.', 'model.decoder.'),),
  'gpt2': (('', 'transformer.'),),
  'gemma3_text': (('language_model.model.', 'model.'), ('model.language_model.', 'model.'), ('language_model.', '')),
}
_KNOWN = ('model.', 'transformer.', 'lm_head.')
_IGNORED = re.compile(
  r'rotary_emb\.inv_freq$|^transformer\.h\.\d+\.attn\.(masked_)?bias$|^(encoder|decoder)\.embed_tokens\.weight$'
  r'|EncDecAttention\.relative_attention_bias\.weight$|(^|\.)(vision_tower|multi_modal_projector)\.'
)


def source(family: str, path: tuple[str, ...], shape: tuple[int, ...]) -> dict[str, Any]:
  """Return where a parameter of the unstacked tree is stored, as fields of its `assemble.Entry`."""
  *modules, leaf = path
  layers, number = assemble.stacked_path(tuple(modules))
  module = '.'.join(layers)
  if module not in TABLES[family]:
    raise ValueError(f"'{module}' is no module of the names of model_type '{family}': add the names of its tensors")
  name = TABLES[family][module].format(number) + ('.bias' if leaf == 'bias' else '.weight')
  transpose = leaf == 'rel_embedding' or (leaf == 'kernel' and (family != 'gpt2' or module == 'logits_dense'))
  part = _FUSED.index(modules[-1]) if '.c_attn.' in name else 0
  return {'source': name, 'transpose': transpose, 'offset': part * shape[-1]}


def canonical(family: str, name: str) -> str:
  """Return a tensor's name with the family's usual prefix."""
  for old, new in _PREFIXES.get(family, ()):
    if name.startswith(old) and not (old == '' and name.startswith(_KNOWN)):
      return new + name.removeprefix(old)
  return name


def ignored(name: str) -> bool:
  """Tell whether a tensor is derived from others, or no part of the text model."""
  return bool(_IGNORED.search(name))
