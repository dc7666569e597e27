"""Published heads: EAGLE-1, EAGLE-3, P-EAGLE, MTP, Medusa, DFlash and DSpark, by what their folders have.

A head has no embedding and often no scores of its own: `drafters.beside(head, verifier)` puts it beside its verifier.
"""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import itertools
import math
from pathlib import Path
import re
from typing import Any

import numpy as np

from speccascade.checkpoints import assemble, stored
from speccascade.checkpoints.files import AGAIN
from speccascade.checkpoints.hf.checks import check_keys, refuse_quantised
from speccascade.checkpoints.hf.family import MASK, network_from_config, token_id
from speccascade.checkpoints.stored import Tensor
from speccascade.drafters.dflash import DFlash, DFlashConfig
from speccascade.drafters.eagle import Eagle, HeadConfig
from speccascade.drafters.hidden import Head
from speccascade.drafters.medusa import Medusa, MedusaConfig
from speccascade.models.decoder import DecoderConfig
from speccascade.types import Params

_LAYER = {  # our modules, by the names behind the layer's prefix
  'attention.query': 'self_attn.q_proj',
  'attention.key': 'self_attn.k_proj',
  'attention.value': 'self_attn.v_proj',
  'attention.out': 'self_attn.o_proj',
  'attention.query_norm': 'self_attn.q_norm',
  'attention.key_norm': 'self_attn.k_norm',
  'mlp.wi_0': 'mlp.gate_proj',
  'mlp.wi_1': 'mlp.up_proj',
  'mlp.wo': 'mlp.down_proj',
  'pre_mlp_layer_norm': 'post_attention_layernorm',
  'token_norm': 'input_layernorm',
  'feature_norm': 'hidden_norm',
}
_PLAIN = _LAYER | {'pre_attention_layer_norm': 'input_layernorm'}  # of a layer that reads no features
_MTP = {  # of MiMo
  **_LAYER,
  'fc': 'input_proj',
  'token_norm': 'token_layernorm',
  'feature_norm': 'hidden_layernorm',
  'pre_attention_layer_norm': 'input_layernorm',
  'final_norm': 'final_layernorm',
}
_AROUND = {
  'fc': 'fc',
  'final_norm': 'norm',
  'logits_dense': 'lm_head',
  'token_embedder': 'embed_tokens',
  'states_norm': 'input_norm',
}


_KINDS = {  # what the keys of each layout are, each by an example, at the top of config.json and in its objects
  'eagle': dict(transformer_layer_config={}, eagle_config={}, eagle_aux_hidden_state_layer_ids=[0])
  | dict(draft_vocab_size=1, target_hidden_size=1, norm_before_residual=False, norm_output=False)
  | dict(mask_token_id=0, ptd_token_id=0),
  'dflash': dict(transformer_layer_config={}, dflash_config={}, aux_hidden_state_layer_ids=[0], target_layer_ids=[0])
  | dict(block_size=1, mask_token_id=0, markov_rank=0, markov_head_type='vanilla'),
  'medusa': dict(medusa_num_heads=1, medusa_num_layers=1),
}
_SIZES = {'draft_vocab_size', 'target_hidden_size', 'block_size', 'medusa_num_heads', 'medusa_num_layers'}
_OBJECTS = 'eagle_config', 'dflash_config'


def _check_config(config: Mapping, found: str) -> None:
  """Raise for the first value of a head's config.json that is of another kind, or out of range."""
  kinds = _KINDS.get(found, _KINDS['eagle'])
  check_keys(config, kinds, _SIZES)
  for key in _OBJECTS:
    if key in kinds:
      check_keys(config.get(key) or {}, kinds, _SIZES)
  if config.get('quantization_config'):
    refuse_quantised(config['quantization_config'])


def _check_width(config: Mapping, tensors: Mapping[str, Tensor], size: int) -> tuple[int, int]:
  """Return what 'fc.weight' makes of what, having checked that it makes the states of a layer."""
  if 'fc.weight' not in tensors:
    raise ValueError(f"the head has no tensor 'fc.weight': {AGAIN}")
  shape = tensors['fc.weight'].shape
  reads = config.get('target_hidden_size') or size
  if len(shape) != 2 or shape[0] != size or shape[1] % reads or not shape[1]:
    raise ValueError(
      f"config.json: 'hidden_size' is {size}, of the verifier {reads}, and fc.weight has the shape {list(shape)}, "
      'expected the first, and a multiple of the second: correct it'
    )
  return shape


def _check_heads(tensors: Mapping[str, Tensor], prefix: str, layer: DecoderConfig) -> None:
  """Raise where a layer has queries of another size, before tables of that size are made."""
  name = f'{prefix}self_attn.q_proj.weight'
  expected = layer.heads * layer.head_dim
  if name in tensors and tensors[name].shape[:1] != (expected,):
    raise ValueError(
      f"config.json: 'num_attention_heads' is {layer.heads} and 'head_dim' {layer.head_dim}, and {name} has the shape "
      f'{list(tensors[name].shape)}, expected {expected} rows: correct it'
    )


def kind(config: Mapping) -> str | None:
  """Return which head a config.json describes, None for a model, or for EAGLE-1, whose tensors tell.

  Raises:
    ValueError: It is a head that is not read.
  """
  words = _words(config)
  if 'hydra' in words:
    raise ValueError('config.json: a head of Hydra, and EAGLE, Medusa and DFlash are read: draft with one of them')
  if 'dflash' in words or 'dspark' in words:
    return 'dflash'
  if 'medusa_num_heads' in config or 'medusa' in words:
    return 'medusa'
  if 'eagle3' in words or 'peagle' in words or 'draft_vocab_size' in config:
    return 'eagle3'
  return 'eagle' if 'eagle' in words else None


def _words(config: Mapping) -> str:
  """Return what a config.json calls its model, in small letters."""
  keys = 'architectures', 'model_type', 'speculators_model_type', 'projector_type'
  return ' '.join(str(config.get(key)) for key in keys).lower()


def _numbered(names: Iterable[str], pattern: str, example: str) -> list[tuple[int, ...]]:
  """Return the numbers in the names of tensors, ascending; raise where some that come before others are missing."""
  matches = (re.match(pattern, name) for name in names)
  found = sorted({tuple(int(number[:9]) for number in m.groups()) for m in matches if m})
  counts = [1 + max(some) for some in zip(*found)] or [1] * example.count('{}')
  expected = (tuple(map(int, np.unravel_index(i, counts))) for i in range(math.prod(counts)))
  lacking = next((n for n, there in itertools.zip_longest(expected, found) if n != there), None)
  if lacking is not None:
    raise ValueError(f"the head has no tensor '{example.format(*lacking)}': {AGAIN}")
  return found


def _stored_as(name: str, leaf: str) -> dict[str, Any]:
  """Return where a parameter of a module is stored, as fields of its `assemble.Entry`."""
  return {'source': f'{name}.{"bias" if leaf == "bias" else "weight"}', 'transpose': leaf == 'kernel'}


def read(folder: Path, config: Mapping, tensors: Mapping[str, Tensor], found: str, **settings) -> tuple[Head, Params]:
  """Return a head and its parameters.

  Args:
    folder: The folder.
    config: Its config.json.
    tensors: Its tensors, by the names in the files.
    found: What `kind` says that it is.
    **settings: Those of `reader.read`.

  Raises:
    ValueError: A value is not supported, or a tensor is missing, unexpected or of another shape.
  """
  _check_config(config, found)
  tensors = {name.removeprefix('medusa_head.').removeprefix('model.'): x for name, x in tensors.items()}
  make = {'medusa': _medusa, 'dflash': _dflash}.get(found, _eagle)
  head, locate, tensors = make(config, tensors, found)
  return _assembled(head, locate, tensors, folder, **settings)


def _assembled(head: Head, locate: Callable, tensors: dict[str, Tensor], folder: Path, quantised: bool, **settings):
  """Return a head, in the dtype of its tensors unless another is given, and its parameters."""
  stored_as = next((x.dtype.name for x in tensors.values() if x.code[:1] in 'FBfb'), None)
  if stored_as is None:
    raise ValueError(f'the head has no tensor of floats: {AGAIN}')
  dtype = settings['dtype'] or stored_as
  head = dataclasses.replace(head, dtype=dtype)
  head = assemble.quantised(head) if quantised else head
  entries = assemble.plan(head, lambda path, shape: locate('.'.join(path[:-1]), path[-1]))
  assemble.check(entries, tensors, head, ', '.join(sorted({str(x.file) for x in tensors.values()})) or folder)
  return head, assemble.read(head, entries, tensors, **settings)


def _eagle(config: Mapping, tensors: dict[str, Tensor], found: str) -> tuple[Eagle, Callable, dict[str, Tensor]]:
  """Return an EAGLE head, where its parameters are stored, and the tensors that are read."""
  inner = dict(config.get('transformer_layer_config') or config)
  sizes = {
    'num_hidden_layers': len(_numbered([*tensors, 'layers.0.'], r'layers\.(\d+)\.', 'layers.{}.')),
    'tie_word_embeddings': False,
    'layer_types': None,
  }
  layer = network_from_config(inner | sizes | {'model_type': inner.get('model_type', 'llama')}).config
  _, width = _check_width(config, tensors, layer.embed_dim)
  prefix = 'midlayer.' if any(name.startswith('midlayer.') for name in tensors) else 'layers.0.'
  _check_heads(tensors, prefix, layer)
  third = found == 'eagle3'
  drafted = config.get('draft_vocab_size') or layer.vocab_size
  each = 'fc_norm.0.weight' in tensors
  head = HeadConfig(
    found,
    dataclasses.replace(layer, qkv_bias=f'{prefix}self_attn.q_proj.bias' in tensors),
    _kept(config, width, layer.embed_dim) if third else (-1,),
    states=width // (config.get('target_hidden_size') or layer.embed_dim) if third else 1,
    fc_bias='fc.bias' in tensors,
    draft_vocab=drafted if third and drafted != layer.vocab_size else 0,
    own_embedding='embed_tokens.weight' in tensors,
    target_dim=config.get('target_hidden_size') or 0,
    norms_residual=bool(config.get('norm_before_residual', False)),
    norms_output=bool(config.get('norm_output', False)) and 'speculators_model_type' in config,
    norms_states='each' if each else 'all' if 'input_norm.weight' in tensors else '',
    mask_token=_mask_token(config, layer.vocab_size) if 'mask_hidden' in tensors else None,
  )
  if 'peagle' in _words(config) and head.mask_token is None:
    raise ValueError(f"the head of P-EAGLE has no tensor 'mask_hidden': {AGAIN}")

  def locate(module: str, leaf: str) -> dict[str, Any]:
    if leaf in ('write', 'mask_hidden'):
      return {'source': 'd2t' if leaf == 'write' else leaf}
    if stack := re.match(r'layers_(\d+)\.', module):
      return _stored_as(f'layers.{int(stack[1]) + 1}.{_PLAIN[module[stack.end() :]]}', leaf)
    source = prefix + _LAYER[module] if module in _LAYER else _AROUND.get(module)
    source = source or re.sub(r'states_norms_(\d+)', r'fc_norm.\1', module)
    return _stored_as(source, leaf)

  return Eagle(head), locate, _of_eagle(tensors, head)


def _of_eagle(tensors: dict[str, Tensor], head: HeadConfig) -> dict[str, Tensor]:
  """Return the tensors that an EAGLE head reads, as its parameters are."""
  tensors = {name: x for name, x in tensors.items() if name != 't2d'}
  if (offsets := tensors.pop('d2t', None)) is not None and head.draft_vocab:
    tensors['d2t'] = stored.in_memory(offsets.file, 'd2t', _numbers(offsets, head))
  if (masked := tensors.get('mask_hidden')) is not None:
    tensors['mask_hidden'] = stored.in_memory(masked.file, 'mask_hidden', masked.read().reshape(-1))
  if head.kind != 'eagle3':
    tensors.pop('lm_head.weight', None)  # the verifier's
  return tensors


def _numbers(offsets: Tensor, head: HeadConfig) -> np.ndarray:
  """Return [V]: the number of each token among those that EAGLE-3 drafts, -1 for the others."""
  if offsets.shape != (head.draft_vocab,) or offsets.code.lower() not in ('i64', 'i32', 'int64', 'int32'):
    raise ValueError(
      f"'d2t' has shape {list(offsets.shape)} and dtype {offsets.code}, expected [{head.draft_vocab}], of "
      f"'draft_vocab_size', and whole numbers: {AGAIN}"
    )
  ids = np.arange(head.draft_vocab) + np.asarray(offsets.read(), np.int64)
  if (np.diff(ids) <= 0).any() or not 0 <= ids[0] <= ids[-1] < head.vocab_size:
    raise ValueError(f"'d2t' names no ascending ids of 0 … {head.vocab_size - 1}: {AGAIN}")
  write = np.full(head.vocab_size, -1, np.int32)
  write[ids] = np.arange(head.draft_vocab)
  return write


def read_mtp(folder: Path, config: Mapping, tensors: Mapping[str, Tensor], **settings) -> tuple[Eagle, Params]:
  """Return the layer of multi-token prediction that a model's folder has, and its parameters.

  Raises:
    ValueError: The folder has none, or it is damaged.
  """
  prefix = 'model.mtp_layers.0.'
  tensors = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
  if not tensors:
    raise ValueError(f"{folder} has no tensors '{prefix}…', so no layer of multi-token prediction: leave @mtp out")
  whole = network_from_config(dict(config))
  layer = dataclasses.replace(whole.config, spans=whole.config.spans[:1])

  def locate(module: str, leaf: str) -> dict[str, Any]:
    return _stored_as(_MTP[module], leaf)

  return _assembled(Eagle(HeadConfig('mtp', layer, (whole.depth,))), locate, tensors, folder, **settings)


def _kept(config: Mapping, width: int, size: int) -> tuple[int, ...]:
  """Return the states that EAGLE-3 reads, () where they follow from the verifier's depth."""
  ids = config.get('eagle_aux_hidden_state_layer_ids')  # j is what enters layer j
  if ids is None:  # l is what layer l makes
    inner = (config.get('eagle_config') or {}).get('eagle_aux_hidden_state_layer_ids')
    ids = None if inner is None else [layer + 1 for layer in inner]
  if ids is None:
    return ()
  if len(ids) * (config.get('target_hidden_size') or size) != width:
    raise ValueError(f'config.json: {len(ids)} layer ids, and fc.weight reads {width} numbers: correct it')
  return tuple(ids)


def _mask_token(config: Mapping, vocab: int) -> int:
  """Return the id of the masks behind which P-EAGLE drafts."""
  mask = token_id(config, ('mask_token_id', 'ptd_token_id', MASK), vocab)
  if mask is None:
    raise ValueError(f"config.json: a head of P-EAGLE needs 'mask_token_id', a number: {AGAIN}")
  return mask


def _dflash(config: Mapping, tensors: dict[str, Tensor], _: str) -> tuple[DFlash, Callable, dict[str, Tensor]]:
  """Return DFlash's head, where its parameters are stored, and the tensors that are read."""
  inner = dict(config.get('transformer_layer_config') or config)
  layer = network_from_config(inner | {'tie_word_embeddings': False, 'layer_types': None}).config
  _check_width({}, tensors, layer.embed_dim)
  _check_heads(tensors, 'layers.0.', layer)
  if (count := len(_numbered(tensors, r'layers\.(\d+)\.', 'layers.{}.'))) != len(layer.spans):
    raise ValueError(f"config.json: 'num_hidden_layers' is {len(layer.spans)}, and {count} are stored: correct it")
  own = config | (config.get('dflash_config') or {})
  ids = own.get('aux_hidden_state_layer_ids')  # j is what enters layer j; of the other key what layer l makes
  kept = tuple(ids) if ids else tuple(n + 1 for n in own.get('target_layer_ids') or ())
  if lacking := [key for key in ('mask_token_id', 'block_size') if own.get(key) is None]:
    raise ValueError(f"config.json: a head of DFlash needs '{lacking[0]}', a number: {AGAIN}")
  if not kept:
    raise ValueError(f"config.json: a head of DFlash needs 'target_layer_ids', the layers that it reads: {AGAIN}")
  mask = token_id(own, ('mask_token_id',), layer.vocab_size)
  rank = own.get('markov_rank') or 0
  if rank and (own.get('markov_head_type') or 'vanilla') != 'vanilla':
    raise ValueError(f"config.json: 'markov_head_type' is {own['markov_head_type']!r}, and only 'vanilla' is supported")
  sizes = own['block_size'], mask, 'dspark' in _words(own), rank
  head = DFlash(DFlashConfig(layer, kept, *sizes))
  of_verifier = {'embed_tokens.weight', 'lm_head.weight'}  # which some folders have a copy of
  tensors = {name: x for name, x in tensors.items() if name not in of_verifier and 'confidence_head' not in name}
  around = {'fc': 'fc', 'feature_norm': 'hidden_norm', 'final_norm': 'norm'}
  around |= {'markov_embedder': 'markov_head.markov_w1', 'markov_dense': 'markov_head.markov_w2'}

  def locate(module: str, leaf: str) -> dict[str, Any]:
    stack, _, name = module.partition('.')
    source = around.get(module) or f'layers.{stack.removeprefix("layers_")}.{_PLAIN[name]}'
    return _stored_as(source, leaf)

  return head, locate, tensors


def _medusa(config: Mapping, tensors: dict[str, Tensor], _: str) -> tuple[Medusa, Callable, dict[str, Tensor]]:
  """Return Medusa's heads, where their parameters are stored, and the tensors; the files tell how many there are."""
  layers = _numbered(tensors, r'(\d+)\.(\d+)\.linear\.weight', '{}.{}.linear.weight')
  heads, depth = (1 + n for n in layers[-1])
  scores = tensors.get(f'0.{depth}.weight')
  for name, x in (('0.0.linear.weight', tensors['0.0.linear.weight']), (f'0.{depth}.weight', scores)):
    if x is not None and (len(x.shape) != 2 or not all(x.shape)):
      raise ValueError(f"tensor '{name}' has the shape {list(x.shape)}, expected that of a matrix: {AGAIN}")
  dim = tensors['0.0.linear.weight'].shape[0]
  own = MedusaConfig(dim, 0 if scores is None else scores.shape[0], heads, depth, scores is not None)

  def locate(module: str, leaf: str) -> dict[str, Any]:
    name, _, number = module.rpartition('_')
    n = int(number)
    source = f'{n // depth}.{n % depth}.linear' if name == 'residual' else f'{n}.{depth}'
    return _stored_as(source, leaf)

  return Medusa(own), locate, tensors
