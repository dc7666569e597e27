"""Write a model as a Hugging Face folder, for tools that read nothing else."""

from collections.abc import Mapping
import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any
import warnings

from flax.traverse_util import flatten_dict
import jax
import numpy as np

from speccascade.checkpoints import assemble, files
from speccascade.checkpoints.hf import names
from speccascade.checkpoints.hf.config import ACTIVATIONS, DEFAULTS, fields, network_from_config, T5_FAMILIES
from speccascade.models.decoder import Decoder, DecoderConfig
from speccascade.models.layers import unstack_layers
from speccascade.models.rope import Rope
from speccascade.models.t5 import T5, T5Config
from speccascade.types import Model, Network, Params

_ACTIVATIONS = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}  # the first of several names
_CLASSES = {
  't5': 'T5ForConditionalGeneration',
  'umt5': 'UMT5ForConditionalGeneration',
  'gpt2': 'GPT2LMHeadModel',
  'opt': 'OPTForCausalLM',
  'llama': 'LlamaForCausalLM',
  'mistral': 'MistralForCausalLM',
  'qwen2': 'Qwen2ForCausalLM',
  'qwen3': 'Qwen3ForCausalLM',
  'gemma2': 'Gemma2ForCausalLM',
  'gemma3_text': 'Gemma3ForCausalLM',
}
_CONTEXT = 2048  # written where it is not known for how many positions a model was made


def config_of(network: Network) -> dict[str, Any]:
  """Return the config.json of a network: that of the first family which gives it back."""
  network = settled(network)
  for family in _CLASSES:
    if isinstance(network, T5) == (family in T5_FAMILIES):
      own = {theirs: getattr(network.config, ours) for ours, theirs in fields(family).items()}
      config = own | _OF_FAMILY.get(family, _rotary)(network.config, family) | _common(network, family)
      try:
        if network_from_config(config, dtype=network.dtype) == network:
          return config
      except (ValueError, TypeError):  # a size that the family does not have, or has and this network not
        continue
  raise ValueError(f'no model_type of Hugging Face is a {network.config}: write orbax')


def settled(network: Network) -> Network:
  """Return a network as it is read back: its layers apart, and its context a number, as Hugging Face's has to be."""
  if isinstance(network, Decoder) and not network.config.positions and not network.config.context:
    network = dataclasses.replace(network, config=dataclasses.replace(network.config, context=_CONTEXT))
  return dataclasses.replace(network, scan=False)


def write_config(folder: Path, network: Network) -> None:
  """Write a network's config.json into a folder."""
  (folder / 'config.json').write_text(json.dumps(config_of(network), indent=2) + '\n', encoding='utf-8')


def check(network: Network, name: str) -> None:
  """Raise for a network that is not written as Hugging Face."""
  if not isinstance(network, T5 | Decoder):
    raise ValueError(f'T5 and decoders are written as Hugging Face, and {name} is a {type(network).__name__}')
  config_of(network)


def write(path, model: Model, *, overwrite: bool = False) -> Path:
  """Write config.json, model.safetensors and the tokenizer's files.

  Args:
    path: folder to write.
    model: the model, a T5 or a decoder.
    overwrite: replace a checkpoint of ours that is there.

  Returns:
    The folder.

  Raises:
    ValueError: no model_type of Hugging Face describes the model.
    FileExistsError: the folder exists and may not be replaced.
  """
  from safetensors.numpy import save_file  # lazily: reading needs no safetensors library

  check(model.network, model.name)
  path = Path(os.path.abspath(path))
  params = unstack_layers(model.params) if model.network.scan else model.params
  family = config_of(model.network)['model_type']
  if family == 'umt5' and not model.network.config.scale_outputs:
    warnings.warn(
      f'{model.name} has a bias for each layer, as umt5, whose logits transformers 5 always divides by √d: '
      'there its greedy texts are those of this model, its probabilities are not',
      stacklevel=2,
    )
  with files.atomic_dir(path, overwrite=overwrite) as scratch:
    files.copy_tokenizer(model.tokenizer, scratch)
    files.write_generation(model, scratch)
    write_config(scratch, model.network)
    tensors = export(model.network, family, jax.device_get(params))
    save_file(tensors, scratch / 'model.safetensors', metadata={'format': 'pt'})
  return path


def export(network: Network, family: str, params: Params) -> dict[str, np.ndarray]:
  """Return parameters as the tensors of a Hugging Face checkpoint.

  Args:
    network: their network.
    family: model_type of the checkpoint.
    params: the parameters, layers not stacked.
  """
  leaves = flatten_dict(params)
  parts = {}
  entries = assemble.plan(dataclasses.replace(network, scan=False), functools.partial(names.source, family))
  for entry in sorted(entries, key=lambda entry: entry.offset):
    value = np.asarray(leaves[entry.path])
    parts.setdefault(entry.source, []).append(value.T if entry.transpose else value)
  return {name: np.ascontiguousarray(np.concatenate(values, axis=-1)) for name, values in parts.items()}


def _common(network: Network, family: str) -> dict[str, Any]:
  """Return what every config has."""
  ids = network.eos_ids
  return {
    'architectures': [_CLASSES[family]],
    'model_type': family,
    'bos_token_id': None,
    'pad_token_id': network.start_id,
    'decoder_start_token_id': network.start_id,
    'eos_token_id': list(ids) if len(ids) > 1 else next(iter(ids), None),
    'dtype': network.dtype,
  }


def _t5(c: T5Config, _: str) -> dict[str, Any]:
  activation = 'gelu' if c.gated and c.activation == 'gelu_tanh' else _ACTIVATIONS[c.activation]
  return {'is_encoder_decoder': True, 'feed_forward_proj': f'gated-{activation}' if c.gated else activation}


def _gpt2(c: DecoderConfig, _: str) -> dict[str, Any]:
  return {
    'n_layer': len(c.spans),
    'activation_function': _ACTIVATIONS[c.activation],
    'scale_attn_weights': c.attention_scale is None,
  }


def _opt(c: DecoderConfig, _: str) -> dict[str, Any]:
  return {
    'num_hidden_layers': len(c.spans),
    'do_layer_norm_before': c.norms == 'pre',
    '_remove_final_layer_norm': c.norms == 'pre' and not c.final_norm,
    'word_embed_proj_dim': c.projected_dim or c.embed_dim,
    'activation_function': _ACTIVATIONS[c.activation],
    'enable_bias': c.qkv_bias,
  }


def _rotary(c: DecoderConfig, family: str) -> dict[str, Any]:
  """Return the config of Llama or a family like it, with the keys that the family reads."""
  full = next((span.rope for span in c.spans if not span.window), c.spans[0].rope) or Rope()
  local = next((span.rope for span in c.spans if span.window), full) or full
  windows = [span.window for span in c.spans]
  of_some = {
    'hidden_act': _ACTIVATIONS[c.activation],
    'hidden_activation': 'gelu_pytorch_tanh' if c.activation == 'gelu_tanh' else c.activation,
    'rope_theta': full.theta,
    'rope_local_base_freq': local.theta,
    'attention_bias': c.out_bias,
    'mlp_bias': c.mlp_bias,
    'use_sliding_window': any(windows),
    'sliding_window': max(windows) or None,
    'max_window_layers': windows.index(max(windows)) if any(windows) else len(windows),
    'query_pre_attn_scalar': _power(c.attention_scale),
    'final_logit_softcapping': c.final_cap,
    'attn_logit_softcapping': c.attention_cap,
  }
  return {name: x for name, x in of_some.items() if name in DEFAULTS[family]} | {
    'num_hidden_layers': len(c.spans),
    'layer_types': ['sliding_attention' if window else 'full_attention' for window in windows],
    'rope_scaling': _scaling(full),
  }


def _power(scale: float | None) -> float | None:
  """Return the number whose power -½ is a scale, as an integer where it is one."""
  if scale is None:
    return None
  number = scale**-2
  return round(number) if round(number) ** -0.5 == scale else number


def _scaling(rope: Rope) -> Mapping[str, Any] | None:
  """Return how a rope is stretched."""
  if rope.kind == 'default':
    return None
  of_kind = {
    'linear': {'factor': rope.factor},
    'llama3': {'factor': rope.factor, 'low_freq_factor': rope.low, 'high_freq_factor': rope.high},
    'yarn': {
      'factor': rope.factor,
      'beta_fast': rope.beta_fast,
      'beta_slow': rope.beta_slow,
      'truncate': rope.truncate,
      'attention_factor': rope.magnitude,
    },
  }
  original = {'original_max_position_embeddings': rope.original} if rope.original else {}
  return {'rope_type': rope.kind, **of_kind[rope.kind], **original}


_OF_FAMILY = {'opt': _opt, 'gpt2': _gpt2} | dict.fromkeys(T5_FAMILIES, _t5)
