"""Write a model as a Hugging Face folder, for tools that read nothing else."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any
import warnings

from flax.traverse_util import flatten_dict
import jax
import numpy as np

from speccascade.checkpoints import files
from speccascade.checkpoints.hf import names
from speccascade.checkpoints.hf.family import FAMILIES, Family, network_from_config
from speccascade.models.decoder import Decoder, DecoderConfig
from speccascade.models.layers import unstack_layers
from speccascade.models.t5 import T5, T5GemmaConfig
from speccascade.types import Model, Network, Params

_CONTEXT = 2048  # written where it is not known for how many positions a model was made


def config_of(network: Network) -> dict[str, Any]:
  """Return the config.json of a network: that of the first family which gives it back."""
  network = settled(network)
  for family in FAMILIES.values():
    if family.hf and isinstance(network.config, family.config):
      config = _common(network, family) | family.config_of(network.config)
      try:
        if network_from_config(config, dtype=network.dtype) == network:
          return config
      except (ValueError, TypeError):  # a size that the family does not have, or has and this network not
        continue
  raise ValueError(f'no model_type of Hugging Face is a {network.config}: write orbax')


def settled(network: Network) -> Network:
  """Return a network as it is read back: its layers apart, and its context a number, as Hugging Face's has to be."""
  config = network.config
  if isinstance(config, T5GemmaConfig):
    config = dataclasses.replace(config, encoder=_known(config.encoder))
  return dataclasses.replace(network, config=_known(config), scan=False)


def _known(config: Any) -> Any:
  if isinstance(config, DecoderConfig) and not config.positions and not config.context:
    return dataclasses.replace(config, context=_CONTEXT)
  return config


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
    path: Folder to write.
    model: The model, a T5 or a decoder.
    overwrite: Replace a checkpoint of ours that is there.

  Returns:
    The folder.

  Raises:
    ValueError: no model_type of Hugging Face describes the model.
    FileExistsError: the folder exists and may not be replaced.
  """
  from safetensors.numpy import save_file  # lazily: reading needs no safetensors library

  files.check_floats(model)
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
    network: Their network.
    family: Model_type of the checkpoint.
    params: The parameters, layers not stacked.
  """
  leaves = flatten_dict(params)
  parts = {}
  entries = names.entries(FAMILIES[family], dataclasses.replace(network, scan=False))
  for entry in sorted(entries, key=lambda entry: entry.offset):
    x = np.asarray(leaves[entry.path])[entry.row]
    x = x.reshape(*x.shape[:-1], -1, entry.heads[0] if entry.heads else x.shape[-1])  # by head, where they lie so
    parts.setdefault((entry.source, entry.transpose), []).append(x)
  joined = {key: np.concatenate(values, axis=-1) for key, values in parts.items()}
  joined = {key: x.reshape(*x.shape[:-2], -1) for key, x in joined.items()}
  return {name: np.ascontiguousarray(x.T if transpose else x) for (name, transpose), x in joined.items()}


def _common(network: Network, family: Family) -> dict[str, Any]:
  """Return what every config has."""
  ids = network.eos_ids
  return {
    'architectures': [family.hf],
    'model_type': family.model_type,
    'is_encoder_decoder': network.start_id is not None,
    'bos_token_id': None,
    'pad_token_id': network.start_id,
    'decoder_start_token_id': network.start_id,
    'eos_token_id': list(ids) if len(ids) > 1 else next(iter(ids), None),
    'dtype': network.dtype,
  }
