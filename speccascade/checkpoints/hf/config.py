"""From a Hugging Face `config.json` to a network: one function for each family.

Defaults are those of the families' own configuration classes, since a saved config may leave them out.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import math
from pathlib import Path
import reprlib
import sys

from speccascade.host.errors import first_line
from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.models.rope import KINDS, Rope
from speccascade.models.t5 import T5, T5Config
from speccascade.types import Network

ACTIVATIONS = {
  'relu': 'relu',
  'silu': 'silu',
  'swish': 'silu',
  'gelu': 'gelu',
  'gelu_new': 'gelu_tanh',
  'gelu_fast': 'gelu_tanh',
  'gelu_pytorch_tanh': 'gelu_tanh',
}

T5_FAMILIES = ('t5', 'mt5', 'umt5')

_LLAMA = {
  'num_key_value_heads': None,
  'head_dim': None,
  'hidden_act': 'silu',
  'rms_norm_eps': 1e-6,
  'rope_theta': 10000.0,
  'max_position_embeddings': 2048,
  'attention_bias': False,
  'mlp_bias': False,
  'tie_word_embeddings': False,
  'eos_token_id': 2,
}
_QWEN2 = _LLAMA | {
  'max_position_embeddings': 32768,
  'use_sliding_window': False,
  'sliding_window': 4096,
  'max_window_layers': 28,
  'eos_token_id': None,
}
_GEMMA2 = {
  'vocab_size': 256000,
  'hidden_size': 2304,
  'intermediate_size': 9216,
  'num_hidden_layers': 26,
  'num_attention_heads': 8,
  'num_key_value_heads': 4,
  'head_dim': 256,
  'hidden_activation': 'gelu_pytorch_tanh',
  'max_position_embeddings': 8192,
  'rms_norm_eps': 1e-6,
  'rope_theta': 10000.0,
  'attention_bias': False,
  'query_pre_attn_scalar': 256.0,
  'sliding_window': 4096,
  'final_logit_softcapping': 30.0,
  'attn_logit_softcapping': 50.0,
  'tie_word_embeddings': True,
  'eos_token_id': 1,
}
_T5 = {
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
}
DEFAULTS = {
  'llama': _LLAMA,
  'mistral': _LLAMA | {'num_key_value_heads': 8, 'sliding_window': 4096, 'max_position_embeddings': 131072},
  'qwen2': _QWEN2,
  'qwen3': _QWEN2 | {'head_dim': 128},
  'gemma2': _GEMMA2,
  'gemma3_text': _GEMMA2
  | {
    'vocab_size': 262208,
    'max_position_embeddings': 131072,
    'rope_theta': 1000000.0,
    'rope_local_base_freq': 10000.0,
    'sliding_window_pattern': 6,
    'final_logit_softcapping': None,
    'attn_logit_softcapping': None,
  },
  'opt': {
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
    'layer_norm_elementwise_affine': True,
    'tie_word_embeddings': True,
    'eos_token_id': 2,
  },
  'gpt2': {
    'vocab_size': 50257,
    'n_positions': 1024,
    'n_embd': 768,
    'n_layer': 12,
    'n_head': 12,
    'n_inner': None,
    'activation_function': 'gelu_new',
    'layer_norm_epsilon': 1e-5,
    'scale_attn_weights': True,
    'scale_attn_by_inverse_layer_idx': False,
    'tie_word_embeddings': True,
    'eos_token_id': 50256,
  },
  't5': _T5,
  'mt5': _T5
  | {
    'vocab_size': 250112,
    'd_ff': 1024,
    'num_layers': 8,
    'num_heads': 6,
    'feed_forward_proj': 'gated-gelu',
    'scale_decoder_outputs': False,
  },
}
_ROTARY = {
  'embed_dim': 'hidden_size',
  'heads': 'num_attention_heads',
  'kv_heads': 'num_key_value_heads',
  'head_dim': 'head_dim',
  'mlp_dim': 'intermediate_size',
  'norm_eps': 'rms_norm_eps',
  'context': 'max_position_embeddings',
}
_FIELDS = {
  'opt': {
    'embed_dim': 'hidden_size',
    'heads': 'num_attention_heads',
    'mlp_dim': 'ffn_dim',
    'positions': 'max_position_embeddings',
  },
  'gpt2': {
    'embed_dim': 'n_embd',
    'heads': 'n_head',
    'mlp_dim': 'n_inner',
    'positions': 'n_positions',
    'norm_eps': 'layer_norm_epsilon',
  },
} | dict.fromkeys(
  T5_FAMILIES,
  {
    'embed_dim': 'd_model',
    'heads': 'num_heads',
    'head_dim': 'd_kv',
    'mlp_dim': 'd_ff',
    'encoder_layers': 'num_layers',
    'decoder_layers': 'num_decoder_layers',
    'buckets': 'relative_attention_num_buckets',
    'max_distance': 'relative_attention_max_distance',
    'norm_eps': 'layer_norm_epsilon',
    'scale_outputs': 'scale_decoder_outputs',
  },
)
REGISTERED: dict[str, Callable[..., Network]] = {}  # model_type: the function that makes its network
DEFAULTS['umt5'] = DEFAULTS['mt5'] | {'scale_decoder_outputs': None}
# A value of each key, of whatever family; it says what type the key has.
_EXAMPLES = {key: value for family in DEFAULTS.values() for key, value in family.items() if value is not None}
_SIZES = frozenset(
  'vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim '
  'max_position_embeddings d_model d_kv d_ff num_layers num_decoder_layers num_heads relative_attention_num_buckets '
  'relative_attention_max_distance ffn_dim word_embed_proj_dim n_positions n_embd n_layer n_head n_inner '
  'sliding_window_pattern'.split()
)
_NEEDED = _SIZES | {'rms_norm_eps', 'layer_norm_epsilon', 'max_window_layers'}  # which are not null
_LAYERS = frozenset('num_hidden_layers num_layers num_decoder_layers n_layer'.split())
_MOST_LAYERS = 10_000  # more than any model has, few enough to list their parameters
_LARGEST = 2**31 - 1  # of a size, a window or an id
_ROPE_NUMBERS = frozenset(
  'rope_theta factor original_max_position_embeddings low_freq_factor high_freq_factor beta_fast beta_slow '
  'attention_factor mscale mscale_all_dim partial_rotary_factor'.split()
)


def fields(family: str) -> dict[str, str]:
  """Return the names in a family's config.json of the fields of our configurations, for reading and writing alike."""
  return {'vocab_size': 'vocab_size', 'tied': 'tie_word_embeddings'} | _FIELDS.get(family, _ROTARY)


class Settings(dict):
  """A config with its family's defaults; asking for what is in neither is a clear error."""

  def __missing__(self, key):
    raise ValueError(
      f"config.json of a {self['model_type']} model has no '{key}': copy or download the checkpoint again"
    )


def settings(config: dict) -> Settings:
  """Return the text model's settings; a multi-modal config has them in `text_config`."""
  if 'model_type' not in config:
    raise ValueError("config.json has no 'model_type': is this a Hugging Face model folder?")
  if config['model_type'] == 'gemma3':
    _check(config.get('text_config', {}), 'text_config', dict, 'an object')
    text = {'tie_word_embeddings': config.get('tie_word_embeddings', True), **config.get('text_config', {})}
    config = {**text, 'model_type': 'gemma3_text', 'eos_token_id': config.get('eos_token_id', text.get('eos_token_id'))}
  family = config['model_type']
  _check(family, 'model_type', str, 'a name')
  if family not in DEFAULTS and family not in REGISTERED:
    known = ', '.join([*DEFAULTS, 'gemma3', *REGISTERED])
    raise ValueError(
      f"model_type '{family}' is not supported: choose from {known}, or add it by speccascade.checkpoints.register"
    )
  if config.get('quantization_config'):
    _refuse_quantised(config['quantization_config'])
  if family in REGISTERED:
    return Settings(config)
  config = DEFAULTS[family] | config
  for key, value in config.items():
    needed = key in _NEEDED and DEFAULTS[family].get(key) is not None
    if (key in _SIZES or key in DEFAULTS[family]) and (needed or value is not None):
      _check_number(key, value, _EXAMPLES.get(key))
  return Settings(config)


@contextlib.contextmanager
def errors_of(file: Path) -> Iterator[None]:
  """Let the errors of a configuration have the path of its file."""
  try:
    yield
  except ValueError as error:
    text = str(error)
    if text.startswith('generation_config.json'):
      raise ValueError(str(file.parent / text)) from error
    text = text.removeprefix('config.json') if text.startswith('config.json') else f': {text}'
    raise ValueError(f'{file}{text}') from error


def _check(value, key: str, kind, expected: str) -> None:
  if not isinstance(value, kind):
    raise ValueError(f"config.json: '{key}' is {_shown(value)}, expected {expected}: correct it")


def _refuse_quantised(given) -> None:
  method = given.get('quant_method') if isinstance(given, dict) else given
  raise ValueError(
    f"config.json: 'quantization_config' has the method {_shown(method)}, and no quantised weights are read: load the "
    'model that it was made of, or write it unquantised, by model.dequantize().save_pretrained(PATH) in transformers'
  )


def _check_number(key: str, value, example) -> None:
  """Raise where a value has another type than an example, is not finite, or is out of a size's range."""
  most = _MOST_LAYERS if key in _LAYERS else _LARGEST
  whole = type(value) is int
  kinds = (  # the first that applies counts
    (isinstance(example, bool), isinstance(value, bool), 'true or false'),
    (key in _SIZES, whole and 1 <= value <= most, f'an integer of at least 1 and at most {most}'),
    (key == 'eos_token_id', True, ''),  # checked with that of the generation config
    (type(example) is int, whole and 0 <= value <= _LARGEST, f'an integer of 0 to {_LARGEST}'),
    (type(example) is float, type(value) in (int, float) and abs(value) <= sys.float_info.max, 'a finite number'),
    (isinstance(example, str), isinstance(value, str), 'a name'),
  )
  right, expected = next(((right, expected) for applies, right, expected in kinds if applies), (True, ''))
  if not right:
    raise ValueError(f"config.json: '{key}' is {_shown(value)}, expected {expected}: correct it")


def _shown(value) -> str:
  """Return a value as an error shows it; Python refuses to write very long numbers."""
  if type(value) is int and value.bit_length() > 1000:
    return f'a number of {value.bit_length()} bits'
  return reprlib.repr(value)


def network_from_config(config: dict, *, eos_ids=None, dtype: str = 'float32', scan: bool = False) -> Network:
  """Return the network that a config describes; `eos_ids` (an id, several, or None) overrides the config's."""
  c = settings(config)
  ids = c.get('eos_token_id') if eos_ids is None else eos_ids
  ids = () if ids is None else tuple(ids) if isinstance(ids, list | tuple) else (ids,)
  if wrong := [i for i in ids if type(i) is not int or not 0 <= i <= _LARGEST]:
    file = 'config.json' if eos_ids is None else 'generation_config.json'
    raise ValueError(f"{file}: 'eos_token_id' has {_shown(wrong[0])}, which is no token id: correct it")
  family = c['model_type']
  if family in REGISTERED:
    return _registered(family, c, eos_ids=ids, dtype=dtype, scan=scan)
  if family in T5_FAMILIES:
    start = c['pad_token_id'] if c['decoder_start_token_id'] is None else c['decoder_start_token_id']
    if type(start) is not int or not 0 <= start < c['vocab_size']:
      raise ValueError(
        f"config.json: 'decoder_start_token_id' is {start!r}, no token id of 0 … {c['vocab_size'] - 1}: correct it"
      )
    return T5(_t5(c), ids, start, dtype, scan)
  make = {'opt': _opt, 'gpt2': _gpt2, 'gemma2': _gemma, 'gemma3_text': _gemma}.get(family, _llama)
  return Decoder(make(c), ids, dtype, scan)


def _registered(family: str, c: Settings, **given) -> Network:
  """Return the network that a registered function makes of a config, with all that loading needs of it tried."""
  try:
    network = REGISTERED[family](c, **given)
    network.param_shapes(), dataclasses.fields(network), hash(network)
  except ValueError:
    raise
  except Exception as error:  # whatever that function raises
    reason = first_line(error, named=True)
    raise ValueError(f"the function of model_type '{family}' makes no network ({reason}): correct it") from error
  return network


def _activation(name: str) -> str:
  if name not in ACTIVATIONS:
    raise ValueError(f"activation '{name}' is not supported: choose from {', '.join(ACTIVATIONS)}")
  return ACTIVATIONS[name]


def _values(c: Settings) -> dict:
  """Return the fields of our configuration that a family's has under other names."""
  return {ours: c[theirs] for ours, theirs in fields(c['model_type']).items()}


def _t5(c: Settings) -> T5Config:
  values = _values(c)
  gated, _, name = c['feed_forward_proj'].rpartition('-')
  if values['scale_outputs'] is None:
    values['scale_outputs'] = values['tied']  # older configs mean v1.1, which neither ties nor scales, by one of them
  values['decoder_layers'] = values['decoder_layers'] or values['encoder_layers']
  return T5Config(
    **values,
    activation=_activation('gelu_new' if (gated, name) == ('gated', 'gelu') else name),
    gated=gated == 'gated',
    shared_bias=c['model_type'] != 'umt5',
  )


def _rotary(c: Settings) -> dict:
  """Return the fields that Llama and families like it have in common."""
  values = _values(c)
  values['kv_heads'] = values['kv_heads'] or values['heads']
  values['head_dim'] = values['head_dim'] or values['embed_dim'] // values['heads']
  heads, kv_heads, head_dim = (values[name] for name in ('heads', 'kv_heads', 'head_dim'))
  if heads % kv_heads:
    raise ValueError(
      f"config.json: 'num_key_value_heads' is {kv_heads}, expected a divisor of {heads}, the heads: correct it"
    )
  if head_dim % 2:
    raise ValueError(f"config.json: 'head_dim' is {head_dim}, expected an even number: correct it")
  window = c.get('sliding_window') or 0
  kinds = {False: Span(0, _rope(c, 'full_attention')), True: Span(window, _rope(c, 'sliding_attention'))}
  return values | {'spans': tuple(kinds[local] for local in _local(c))}


def _llama(c: Settings) -> DecoderConfig:
  biased = c['model_type'] == 'qwen2'
  return DecoderConfig(
    **_rotary(c),
    activation=_activation(c['hidden_act']),
    qk_norm=c['model_type'] == 'qwen3',
    qkv_bias=biased or c['attention_bias'],
    out_bias=not biased and c['attention_bias'],
    mlp_bias=c['mlp_bias'],
  )


def _gemma(c: Settings) -> DecoderConfig:
  if c.get('use_bidirectional_attention'):
    raise ValueError('use_bidirectional_attention is not supported: an encoder cannot decode')
  scalar = c['query_pre_attn_scalar']
  if scalar is None or scalar <= 0:
    raise ValueError(f"config.json: 'query_pre_attn_scalar' is {scalar!r}, expected a number above 0: correct it")
  return DecoderConfig(
    **_rotary(c),
    activation=_activation(c['hidden_activation']),
    norm_offset=1.0,
    norms='sandwich',
    qk_norm=c['model_type'] == 'gemma3_text',
    qkv_bias=c['attention_bias'],
    out_bias=c['attention_bias'],
    embed_scale=math.sqrt(c['hidden_size']),
    attention_scale=scalar**-0.5,
    attention_cap=c['attn_logit_softcapping'] if c['model_type'] == 'gemma2' else None,
    final_cap=c['final_logit_softcapping'],
  )


def _opt(c: Settings) -> DecoderConfig:
  if not c['layer_norm_elementwise_affine']:
    raise ValueError('layer_norm_elementwise_affine=false is not supported')
  table = c['word_embed_proj_dim'] or c['hidden_size']
  before = c['do_layer_norm_before']
  return DecoderConfig(
    **_learned(c, c['num_hidden_layers']),
    **dict.fromkeys(('qkv_bias', 'out_bias', 'mlp_bias'), c['enable_bias']),
    norm_eps=1e-5,
    norms='pre' if before else 'post',
    final_norm=before and not c['_remove_final_layer_norm'],
    projected_dim=table if table != c['hidden_size'] else None,
    position_offset=2,
  )


def _gpt2(c: Settings) -> DecoderConfig:
  if c['scale_attn_by_inverse_layer_idx']:
    raise ValueError('scale_attn_by_inverse_layer_idx=true is not supported')
  values = _learned(c, c['n_layer'])
  values['mlp_dim'] = values['mlp_dim'] or 4 * c['n_embd']
  return DecoderConfig(
    **values,
    **dict.fromkeys(('qkv_bias', 'out_bias', 'mlp_bias'), True),
    attention_scale=None if c['scale_attn_weights'] else 1.0,
  )


def _learned(c: Settings, layers: int) -> dict:
  """Return the fields that OPT and GPT-2, with their learned positions, have in common."""
  values = _values(c)
  return values | {
    'kv_heads': values['heads'],
    'head_dim': values['embed_dim'] // values['heads'],
    'spans': (Span(0, None),) * layers,
    'activation': _activation(c['activation_function']),
    'gated': False,
    'layer_norm': True,
  }


def _local(c: Settings) -> list[bool]:
  """Return which layers look through the sliding window."""
  layers = range(c['num_hidden_layers'])
  family = c['model_type']
  is_qwen = family in ('qwen2', 'qwen3')
  if family == 'llama' or not c['sliding_window'] or (is_qwen and not c['use_sliding_window']):
    return [False for _ in layers]
  if c.get('layer_types'):
    kinds = c['layer_types']
    _check(kinds, 'layer_types', list, 'a list')
    wrong = [kind for kind in kinds if kind not in ('full_attention', 'sliding_attention')]
    if wrong or len(kinds) != len(layers):
      raise ValueError(
        f"config.json: 'layer_types' has {wrong[0] if wrong else len(kinds)!r}, expected full_attention or "
        f'sliding_attention for each of {len(layers)} layers: correct it'
      )
    return [kind == 'sliding_attention' for kind in kinds]
  if family == 'mistral':
    return [True for _ in layers]
  if is_qwen:
    return [i >= c['max_window_layers'] for i in layers]
  return [(i + 1) % (2 if family == 'gemma2' else c['sliding_window_pattern']) != 0 for i in layers]


def _rope(c: Settings, kind: str) -> Rope:
  """Return the rope of one kind of layer, from the new `rope_parameters` or the old `rope_theta` and `rope_scaling`."""
  local = c['model_type'] == 'gemma3_text' and kind == 'sliding_attention'
  given = {'rope_theta': c['rope_local_base_freq'] if local else c['rope_theta']}
  for key in ('rope_parameters', 'rope_scaling'):  # where a user has added the old one, it decides, as in transformers
    stated = c.get(key) or {}
    _check(stated, key, dict, 'an object')
    stated = stated.get(kind) or {} if kind in stated else {} if local else stated
    _check(stated, key, dict, 'an object')
    given |= {'rope_type': stated.get('type') or given.get('rope_type', 'default')} | stated
  name = given['rope_type']
  if name not in KINDS:
    raise ValueError(f"rope scaling '{name}' is not supported: choose from {', '.join(KINDS)}")
  for key in sorted(given.keys() & _ROPE_NUMBERS):
    if given[key] is not None:
      _check_number(key, given[key], 1.0)
  if (given.get('partial_rotary_factor', c.get('partial_rotary_factor')) or 1.0) != 1.0:
    raise ValueError('partial_rotary_factor other than 1 is not supported')
  return _scaled(c, given, name)


def _scaled(c: Settings, given: dict, name: str) -> Rope:
  _check(given['rope_theta'], 'rope_theta', int | float, 'a number')
  if name in ('linear', 'llama3'):
    _check(given.get('factor'), 'factor', int | float, f'the number by which {name} scales')
  if name != 'default' and (stated := given.get('factor')) is not None and stated <= 0:
    raise ValueError(f"config.json: 'factor' is {stated!r}, expected a number above 0: correct it")
  original = given.get('original_max_position_embeddings') or c['max_position_embeddings']
  factor = given.get('factor') or (c['max_position_embeddings'] / original if name == 'yarn' else 1.0)
  return Rope(
    theta=float(given['rope_theta']),
    kind=name,
    factor=float(factor) if name != 'default' else 1.0,
    original=original if name in ('llama3', 'yarn') else 0,
    low=float(given.get('low_freq_factor') or 1.0),
    high=float(given.get('high_freq_factor') or 4.0),
    beta_fast=float(given.get('beta_fast') or 32.0),
    beta_slow=float(given.get('beta_slow') or 1.0),
    truncate=given.get('truncate', True),
    magnitude=_magnitude(given, factor) if name == 'yarn' else 1.0,
  )


def _magnitude(given: dict, factor: float) -> float:
  """Return YaRN's factor on cosines and sines."""

  def temperature(mscale):
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

  if given.get('attention_factor') is not None:
    return float(given['attention_factor'])
  if given.get('mscale') and given.get('mscale_all_dim'):
    return temperature(given['mscale']) / temperature(given['mscale_all_dim'])
  return temperature(1.0)
