"""What each layer of a decoder sees, and how positions turn: `DecoderConfig.spans` from config.json, and back."""

from collections.abc import Callable, Sequence
import math
from typing import Any

from speccascade.checkpoints.hf.checks import check, check_number
from speccascade.checkpoints.hf.family import ConfigFields, Key
from speccascade.models.decoder import DecoderConfig, Span
from speccascade.models.rope import KINDS, Rope

_FULL = 'full_attention'
_SLIDING = 'sliding_attention'
_KEYS = {  # of the fields of a rope
  'theta': 'rope_theta',
  'factor': 'factor',
  'original': 'original_max_position_embeddings',
  'low': 'low_freq_factor',
  'high': 'high_freq_factor',
  'beta_fast': 'beta_fast',
  'beta_slow': 'beta_slow',
  'truncate': 'truncate',
  'magnitude': 'attention_factor',
  'share': 'partial_rotary_factor',
}
_THETAS = 'rope_theta', 'rotary_emb_base'  # names of the base and of the turned share of each head
_SHARES = 'partial_rotary_factor', 'rotary_pct'
_NUMBERS = {*_KEYS.values(), 'mscale', 'mscale_all_dim'} - {'truncate'}
_FIELDS = {  # that a kind of rope has beyond `theta` and `share`
  'default': (),
  'linear': ('factor',),
  'llama3': ('factor', 'original', 'low', 'high'),
  'yarn': ('factor', 'original', 'beta_fast', 'beta_slow', 'truncate', 'magnitude'),
}
Choice = Callable[[ConfigFields, int], bool]  # of a config and the number of a layer


def rotary(local: Choice | None = None, rotates: Choice = lambda c, i: True, ropes: Sequence[str] = KINDS) -> Key:
  """Return the key `spans` of a family with rotary positions.

  Args:
    local: Whether a layer looks through the sliding window where config.json has no `layer_types`; None: none does.
    rotates: Whether a layer turns queries and keys.
    ropes: The kinds of ropes that the family has.
  """

  def read(c: ConfigFields) -> tuple[Span, ...]:
    window = c.get('sliding_window') or 0
    kinds = {False: Span(0, _rope(c, _FULL, ropes)), True: Span(window, _rope(c, _SLIDING, ropes))}
    spans = (kinds[is_local] for is_local in _local(c, local))
    return tuple(span if rotates(c, i) else Span(span.window, None) for i, span in enumerate(spans))

  return Key(read, _written)


def learned(layers: str) -> Key:
  """Return the key `spans` of a family with learned positions, whose number of layers is under the key `layers`."""
  return Key(lambda c: (Span(0, None),) * c[layers], lambda x: {layers: len(x.spans)})


def has_rope(c: ConfigFields, layer: int) -> bool:
  """Return whether a layer of SmolLM3 turns queries and keys."""
  if c['no_rope_layers']:
    return bool(c.by_layer('no_rope_layers', c['num_hidden_layers'], (0, 1))[layer])
  return (layer + 1) % c['no_rope_layer_interval'] != 0


def _local(c: ConfigFields, local: Choice | None) -> list[bool]:
  """Return which layers look through the sliding window."""
  count = c['num_hidden_layers']
  switch = 'use_sliding_window'
  if local is None or not c['sliding_window'] or (switch in c.family.defaults and not c[switch]):
    return [False] * count
  if 'layer_types' in c.family.defaults and c['layer_types']:
    return [kind == _SLIDING for kind in c.by_layer('layer_types', count, (_FULL, _SLIDING))]
  return [local(c, i) for i in range(count)]


def _written(config: DecoderConfig) -> dict[str, Any]:
  """Return all keys that any family with rotary positions has."""
  turned = [span for span in config.spans if span.rope] or [Span()]
  full = next((span.rope for span in turned if not span.window), turned[0].rope)
  local = next((span.rope for span in turned if span.window), full)
  windows = [span.window for span in config.spans]
  return {
    'num_hidden_layers': len(windows),
    'layer_types': [_SLIDING if window else _FULL for window in windows],
    'no_rope_layers': [int(span.rope is not None) for span in config.spans],
    'use_sliding_window': any(windows),
    'sliding_window': max(windows) or None,
    'max_window_layers': windows.index(max(windows)) if any(windows) else len(windows),
    **dict.fromkeys(_THETAS, full.theta),
    'rope_local_base_freq': local.theta,
    'rope_scaling': _scaling(full),
    'rope_parameters': {_FULL: _stated(full, 'theta'), _SLIDING: _stated(local, 'theta')},
    **dict.fromkeys(_SHARES, full.share),
  }


def _scaling(rope: Rope) -> dict[str, Any] | None:
  """Return how a rope is stretched."""
  return None if rope.kind == 'default' else _stated(rope)


def _stated(rope: Rope, *more: str) -> dict[str, Any]:
  """Return the kind of a rope, the fields that it has, and more."""
  return {'rope_type': rope.kind} | {_KEYS[field]: getattr(rope, field) for field in (*more, *_FIELDS[rope.kind])}


def _rope(c: ConfigFields, kind: str, ropes: Sequence[str]) -> Rope:
  """Return the rope of one kind of layer, from the new `rope_parameters` or the old `rope_theta` and `rope_scaling`."""
  local = 'rope_local_base_freq' in c.family.defaults and kind == _SLIDING
  theta, share = (_key(c, keys) for keys in (_THETAS, _SHARES))
  given = {'rope_theta': c['rope_local_base_freq' if local else theta]}
  for key in ('rope_parameters', 'rope_scaling'):  # where a user has added the old one, it decides, as in transformers
    stated = c.get(key) or {}
    check(stated, key, dict, 'an object')
    stated = stated.get(kind) or {} if kind in stated else {} if local else stated
    check(stated, key, dict, 'an object')
    given |= {'rope_type': stated.get('type') or given.get('rope_type', 'default')} | stated
  name = given['rope_type']
  if name not in ropes:
    raise ValueError(f"rope scaling '{name}' is not supported: choose from {', '.join(ropes)}")
  for key in sorted(given.keys() & _NUMBERS):
    if given[key] is not None:
      check_number(key, given[key], 1.0)
  check(given['rope_theta'], 'rope_theta', int | float, 'a number')
  turned = given.get('partial_rotary_factor', c.get(share)) or 1.0
  if turned != 1 and share not in c.family.defaults:
    raise ValueError('partial_rotary_factor other than 1 is not supported')
  return Rope(float(given['rope_theta']), name, **_scaled(c, given, name), share=turned)


def _key(c: ConfigFields, keys: Sequence[str]) -> str:
  """Return the last of some keys that a family has, else the first."""
  return next((key for key in reversed(keys) if key in c.family.defaults), keys[0])


def _scaled(c: ConfigFields, given: dict, name: str) -> dict[str, Any]:
  """Return the fields by which a rope of some kind is stretched."""
  if name in ('linear', 'llama3'):
    check(given.get('factor'), 'factor', int | float, f'the number by which {name} scales')
  if name != 'default' and (stated := given.get('factor')) is not None and stated <= 0:
    raise ValueError(f"config.json: 'factor' is {stated!r}, expected a number above 0: correct it")
  original = given.get('original_max_position_embeddings') or c['max_position_embeddings']
  factor = float(given.get('factor') or (c['max_position_embeddings'] / original if name == 'yarn' else 1.0))
  known = given | {'factor': factor, _KEYS['original']: original, 'attention_factor': _magnitude(given, factor)}
  return {field: known[_KEYS[field]] for field in _FIELDS[name] if known.get(_KEYS[field]) is not None}


def _magnitude(given: dict, factor: float) -> float:
  """Return YaRN's factor on cosines and sines."""

  def temperature(mscale):
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

  if given.get('attention_factor') is not None:
    return float(given['attention_factor'])
  if given.get('mscale') and given.get('mscale_all_dim'):
    return temperature(given['mscale']) / temperature(given['mscale_all_dim'])
  return temperature(1.0)
