"""Write a T5 as a Hugging Face folder, for tools that read nothing else."""

import json
import os
from pathlib import Path

import jax

from speccascade.checkpoints import files, hf
from speccascade.models.layers import unstack_layers
from speccascade.models.t5 import T5
from speccascade.types import Model, Network

_ACTIVATIONS = {'gelu_tanh': 'gelu_new', 'relu': 'relu', 'silu': 'silu', 'gelu': 'gelu'}


def config_of(network: T5) -> dict:
  """Return the config.json of a T5."""
  c = network.config
  activation = 'gelu' if c.gated and c.activation == 'gelu_tanh' else _ACTIVATIONS[c.activation]
  return {
    'architectures': ['T5ForConditionalGeneration' if c.shared_bias else 'UMT5ForConditionalGeneration'],
    'model_type': 't5' if c.shared_bias else 'umt5',
    'is_encoder_decoder': True,
    'vocab_size': c.vocab_size,
    'd_model': c.embed_dim,
    'd_kv': c.head_dim,
    'd_ff': c.mlp_dim,
    'num_heads': c.heads,
    'num_layers': c.encoder_layers,
    'num_decoder_layers': c.decoder_layers,
    'feed_forward_proj': f'gated-{activation}' if c.gated else activation,
    'tie_word_embeddings': c.tied,
    'scale_decoder_outputs': c.scale_outputs,
    'relative_attention_num_buckets': c.buckets,
    'relative_attention_max_distance': c.max_distance,
    'layer_norm_epsilon': c.norm_eps,
    'decoder_start_token_id': network.start_id,
    'pad_token_id': network.start_id,
    'eos_token_id': list(network.eos_ids) if len(network.eos_ids) > 1 else next(iter(network.eos_ids), None),
    'dtype': network.dtype,
  }


def write_config(folder: Path, network: T5) -> None:
  """Write a T5's config.json into a folder."""
  (folder / 'config.json').write_text(json.dumps(config_of(network), indent=2) + '\n', encoding='utf-8')


def check(network: Network, name: str) -> None:
  """Raise for a network that is not written as Hugging Face."""
  if not isinstance(network, T5):
    raise ValueError(f'only T5 is written as Hugging Face, and {name} is a {type(network).__name__}: write orbax')


def write(path, model: Model, *, overwrite: bool = False) -> Path:
  """Write config.json, model.safetensors and the tokenizer's files; return the folder."""
  from safetensors.numpy import save_file  # lazily: reading needs no safetensors library

  check(model.network, model.name)
  path = Path(os.path.abspath(path))
  params = unstack_layers(model.params) if model.network.scan else model.params
  family = config_of(model.network)['model_type']
  with files.whole(path, overwrite=overwrite) as scratch:
    files.copy_tokenizer(model.tokenizer, scratch)
    write_config(scratch, model.network)
    tensors = hf.export(model.network, family, jax.device_get(params))
    save_file(tensors, scratch / 'model.safetensors', metadata={'format': 'pt'})
  return path
