"""Heads as they are published: EAGLE-1, EAGLE-3, P-EAGLE, MTP, Medusa, DFlash and DSpark, read and written.

A head has no embedding and often no scores of its own: `drafters.beside(head, verifier)` puts it beside its verifier.
"""

from collections.abc import Iterable, Iterator, Mapping
import dataclasses
import itertools
import math
from pathlib import Path
import re
from typing import Any

import jax
import numpy as np

from speccascade.checkpoints import assemble, stored
from speccascade.checkpoints.files import AGAIN
from speccascade.checkpoints.hf.checks import check_keys, refuse_quantised
from speccascade.checkpoints.hf.family import config_of as model_config_of
from speccascade.checkpoints.hf.family import MASK, network_from_config, token_id, with_context
from speccascade.checkpoints.stored import Tensor
from speccascade.drafters.dflash import DFlash, DFlashConfig
from speccascade.drafters.eagle import Eagle, HeadConfig
from speccascade.drafters.hidden import Head
from speccascade.drafters.medusa import Medusa, MedusaConfig
from speccascade.models.decoder import Decoder, DecoderConfig
from speccascade.types import Params

KINDS = Eagle, Medusa, DFlash
_FIRST, _MIDDLE = 'layers.0.', 'midlayer.'  # what the names of EAGLE's first layer begin with
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
_OF_MTP = 'model.mtp_layers.0.'
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
_AROUND_BLOCK = {  # of DFlash
  'fc': 'fc',
  'feature_norm': 'hidden_norm',
  'final_norm': 'norm',
  'markov_embedder': 'markov_head.markov_w1',
  'markov_dense': 'markov_head.markov_w2',
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
  return next((found for found in ('eagle', 'mtp') if found in words), None)


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


# ---- where the parameters are ----


def _entries(head: Head, prefix: str) -> list[assemble.Entry]:
  """Return where each parameter of a head is stored, those of EAGLE's first layer under a prefix."""
  locate = {Medusa: _of_medusa, DFlash: _of_dflash, Eagle: _of_eagle}[type(head)]
  return assemble.plan(head, lambda path, _: locate(head.config, '.'.join(path[:-1]), path[-1], prefix))


def _of_eagle(head: HeadConfig, module: str, leaf: str, prefix: str) -> dict[str, Any]:
  """Return where a parameter of an EAGLE head or a layer of multi-token prediction is stored."""
  if leaf in ('write', 'mask_hidden'):
    return {'source': 'd2t' if leaf == 'write' else leaf}
  if head.kind == 'mtp':
    return _stored_as(_OF_MTP + _name(module, _MTP), leaf)
  if stack := re.match(r'layers_(\d+)\.', module):
    return _stored_as(f'layers.{int(stack[1]) + 1}.{_name(module[stack.end() :], _PLAIN)}', leaf)
  if norm := re.match(r'states_norms_(\d+)', module):
    return _stored_as(f'fc_norm.{norm[1]}', leaf)
  return _stored_as(prefix + _LAYER[module] if module in _LAYER else _name(module, _AROUND), leaf)


def _of_dflash(head: DFlashConfig, module: str, leaf: str, prefix: str) -> dict[str, Any]:
  """Return where a parameter of DFlash's head is stored."""
  stack, _, name = module.partition('.')
  if not name:
    return _stored_as(_name(module, _AROUND_BLOCK), leaf)
  return _stored_as(f'layers.{stack.removeprefix("layers_")}.{_name(name, _PLAIN)}', leaf)


def _of_medusa(head: MedusaConfig, module: str, leaf: str, prefix: str) -> dict[str, Any]:
  """Return where a parameter of Medusa's heads is stored."""
  name, _, number = module.rpartition('_')
  k, j = divmod(int(number), head.layers) if name == 'residual' else (number, head.layers)
  return _stored_as(f'{k}.{j}.linear' if name == 'residual' else f'{k}.{j}', leaf)


def _name(module: str, names: Mapping[str, str]) -> str:
  """Return the name of a module's tensors."""
  if module not in names:
    raise ValueError(f"no published head has a '{module}': give its layers other switches")
  return names[module]


def _stored_as(name: str, leaf: str) -> dict[str, Any]:
  """Return where a parameter of a module is stored, as fields of its `assemble.Entry`."""
  return {'source': f'{name}.{"bias" if leaf == "bias" else "weight"}', 'transpose': leaf == 'kernel'}


# ---- reading ----


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
  if found == 'mtp':
    return read_mtp(folder, config, tensors, **settings)
  tensors = {name.removeprefix('medusa_head.').removeprefix('model.'): x for name, x in tensors.items()}
  head = _made(config, tensors, found)
  return _assembled(head, _used(head, tensors), folder, **settings)


def _made(config: Mapping, tensors: Mapping[str, Tensor], found: str) -> Head:
  """Return the head that a config.json and the names and shapes of tensors describe."""
  _check_config(config, found)
  make = {'medusa': _medusa, 'dflash': _dflash, 'mtp': _mtp}.get(found, _eagle)
  return make(config, tensors, found)


def _assembled(head: Head, tensors: dict[str, Tensor], folder: Path, quantised: bool, **settings):
  """Return a head, in the dtype of its tensors unless another is given, and its parameters."""
  stored_as = next((x.dtype.name for x in tensors.values() if x.code[:1] in 'FBfb'), None)
  if stored_as is None:
    raise ValueError(f'the head has no tensor of floats: {AGAIN}')
  dtype = settings['dtype'] or stored_as
  head = dataclasses.replace(head, dtype=dtype)
  head = assemble.quantised(head) if quantised else head
  entries = _entries(head, _prefix(tensors))
  assemble.check(entries, tensors, head, ', '.join(sorted({str(x.file) for x in tensors.values()})) or folder)
  return head, assemble.read(head, entries, tensors, **settings)


def _prefix(tensors: Mapping[str, Tensor]) -> str:
  """Return what the names of EAGLE's first layer begin with."""
  return _MIDDLE if any(name.startswith(_MIDDLE) for name in tensors) else _FIRST


def _used(head: Head, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
  """Return the tensors that a head reads, as its parameters are."""
  if isinstance(head, DFlash):
    unused = {'embed_tokens.weight', 'lm_head.weight'}  # the verifier's, of which some folders have a copy
    return {name: x for name, x in tensors.items() if name not in unused and 'confidence_head' not in name}
  if isinstance(head, Medusa):
    return tensors
  unused = {'t2d', 'd2t'} if head.own_scores else {'t2d', 'd2t', 'lm_head.weight'}  # then the verifier's
  used = {name: x for name, x in tensors.items() if name not in unused}
  if 'd2t' in tensors and head.config.draft_vocab:
    offsets = tensors['d2t']
    used['d2t'] = stored.in_memory(offsets.file, 'd2t', _numbers(offsets, head.config))
  if (masked := tensors.get('mask_hidden')) is not None:
    used['mask_hidden'] = stored.in_memory(masked.file, 'mask_hidden', masked.read().reshape(-1))
  return used


def _eagle(config: Mapping, tensors: Mapping[str, Tensor], found: str) -> Eagle:
  inner = dict(config.get('transformer_layer_config') or config)
  sizes = {
    'num_hidden_layers': len(_numbered([*tensors, 'layers.0.'], r'layers\.(\d+)\.', 'layers.{}.')),
    'tie_word_embeddings': False,
    'layer_types': None,
  }
  layer = network_from_config(inner | sizes | {'model_type': inner.get('model_type', 'llama')}).config
  _, width = _check_width(config, tensors, layer.embed_dim)
  prefix = _prefix(tensors)
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
    own_scores=not third or drafted != layer.vocab_size or 'lm_head.weight' in tensors,
  )
  if 'peagle' in _words(config) and head.mask_token is None:
    raise ValueError(f"the head of P-EAGLE has no tensor 'mask_hidden': {AGAIN}")
  return Eagle(head)


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
  tensors = {name: x for name, x in tensors.items() if name.startswith(_OF_MTP)}
  if not tensors:
    raise ValueError(f"{folder} has no tensors '{_OF_MTP}…', so no layer of multi-token prediction: leave @mtp out")
  return _assembled(_made(config, tensors, 'mtp'), tensors, folder, **settings)


def _mtp(config: Mapping, *_: Any) -> Eagle:
  whole = network_from_config(dict(config))
  layer = dataclasses.replace(whole.config, spans=whole.config.spans[:1])
  return Eagle(HeadConfig('mtp', layer, (whole.depth,)))


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


def _dflash(config: Mapping, tensors: Mapping[str, Tensor], _: str) -> DFlash:
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
  return DFlash(DFlashConfig(layer, kept, *sizes))


def _medusa(config: Mapping, tensors: Mapping[str, Tensor], _: str) -> Medusa:
  """Return Medusa's heads; the files tell how many there are."""
  layers = _numbered(tensors, r'(\d+)\.(\d+)\.linear\.weight', '{}.{}.linear.weight')
  heads, depth = (1 + n for n in layers[-1])
  scores = tensors.get(f'0.{depth}.weight')
  for name, x in (('0.0.linear.weight', tensors['0.0.linear.weight']), (f'0.{depth}.weight', scores)):
    if x is not None and (len(x.shape) != 2 or not all(x.shape)):
      raise ValueError(f"tensor '{name}' has the shape {list(x.shape)}, expected that of a matrix: {AGAIN}")
  dim = tensors['0.0.linear.weight'].shape[0]
  return Medusa(MedusaConfig(dim, 0 if scores is None else scores.shape[0], heads, depth, scores is not None))


# ---- writing ----


def settled(head: Head) -> Head:
  """Return a head as it is read back."""
  if isinstance(head, Medusa):
    own = {} if head.own_scores else {'vocab_size': 0}  # which follows from the verifier
  elif isinstance(head, Eagle) and head.config.kind == 'mtp':
    own = {'layer': with_context(head.config.layer)}
  else:
    own = {'layer': dataclasses.replace(with_context(head.config.layer), tied=False)}
  return dataclasses.replace(head, config=dataclasses.replace(head.config, **own))


def config_of(head: Head) -> dict[str, Any]:
  """Return the config.json of a settled head, in the layout of its kind.

  Raises:
    ValueError: That layout does not have what the head has.
  """
  config = {Medusa: _config_of_medusa, DFlash: _config_of_dflash, Eagle: _config_of_eagle}[type(head)](head)
  ends = {entry.source: tuple(s.stop for s in entry.stored_box()) for entry in entries(head)}
  tensors = {name: stored.in_memory('', name, jax.ShapeDtypeStruct(shape, head.dtype)) for name, shape in ends.items()}
  back = dataclasses.replace(_made(config, tensors, kind(config)), dtype=head.dtype)
  for name, value in vars(head.config).items():
    if (other := vars(back.config)[name]) != value:
      raise ValueError(f'{name}={value!r} is in no folder of such a head, and would be read as {other!r}: change it')
  return config


def entries(head: Head) -> list[assemble.Entry]:
  """Return the tensors in which the parameters of a head are written."""
  third = isinstance(head, Eagle) and head.config.kind == 'eagle3'
  plain = third and head.mask_token is None and not head.config.norms_output
  return _entries(head, _MIDDLE if plain else _FIRST)


def published(tensors: Iterable[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
  """Yield the tensors of a head, of which those that `_used` makes others become what it reads."""
  for name, x in tensors:
    if name == 'd2t':
      ids = np.flatnonzero(x >= 0)
      yield 'd2t', ids - np.arange(len(ids))
      yield 't2d', x >= 0
    else:
      yield name, x[None, None] if name == 'mask_hidden' else x


def _config_of_layer(layer: DecoderConfig, head: Head) -> dict[str, Any]:
  """Return the config.json of a model with a head's layers."""
  return model_config_of(Decoder(layer, dtype=head.dtype))


def _config_of_eagle(head: Eagle) -> dict[str, Any]:
  own = head.config
  if own.kind == 'mtp':
    layer = dataclasses.replace(own.layer, spans=own.layer.spans * own.kept[0])
    return _config_of_layer(layer, head) | {'architectures': ['MiMoMTPModel'], 'num_nextn_predict_layers': 1}
  layer = _config_of_layer(own.layer, head)
  if own.kind == 'eagle':
    return layer | {'architectures': ['EagleLlamaForCausalLM']}
  name = 'LlamaForCausalLMEagle3' if own.mask_token is None else 'PEagleDraftModel'
  config = {'architectures': [name], 'draft_vocab_size': own.draft_vocab or own.vocab_size}
  config |= {'norm_before_residual': own.norms_residual} if own.norms_residual else {}
  config |= {'target_hidden_size': own.target_dim} if own.target_dim else {}
  config |= {'eagle_aux_hidden_state_layer_ids': [*own.kept]} if own.kept else {}
  config |= {'mask_token_id': own.mask_token} if own.mask_token is not None else {}
  if not own.norms_output:
    return layer | config
  return config | {'speculators_model_type': 'eagle3', 'norm_output': True, 'transformer_layer_config': layer}


def _config_of_dflash(head: DFlash) -> dict[str, Any]:
  own = head.config
  which = {'mask_token_id': own.mask_token, 'target_layer_ids': [j - 1 for j in own.kept]}
  name = 'Qwen3DSparkModel' if own.last_drafts else 'DFlashDraftModel'
  config = {'architectures': [name], 'block_size': own.block, 'dflash_config': which}
  return _config_of_layer(own.layer, head) | config | ({'markov_rank': own.rank} if own.rank else {})


def _config_of_medusa(head: Medusa) -> dict[str, Any]:
  own = head.config
  return {'architectures': ['MedusaModel'], 'medusa_num_heads': own.heads, 'medusa_num_layers': own.layers}
