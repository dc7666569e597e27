"""Write a model or a head as a Hugging Face folder, in the layout that it is published in."""

from collections.abc import Iterable, Iterator
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
from speccascade.checkpoints.assemble import Entry
from speccascade.checkpoints.hf import family as families
from speccascade.checkpoints.hf import heads, names
from speccascade.drafters.hidden import Head
from speccascade.host import multihost
from speccascade.models.decoder import Decoder
from speccascade.models.layers import unstack_layers
from speccascade.models.t5 import T5
from speccascade.types import Model, Network, Params

SHARD = 5 * 10**9  # bytes of a file, unless one tensor has more


def config_of(network: Network) -> dict[str, Any]:
  """Return the config.json by which a network is read back."""
  network = settled(network)
  return heads.config_of(network) if isinstance(network, Head) else families.config_of(network)


def settled(network: Network) -> Network:
  """Return a network as it is read back."""
  return heads.settled(network) if isinstance(network, Head) else families.settled(network)


def write_config(folder: Path, network: Network) -> None:
  """Write a network's config.json into a folder."""
  (folder / 'config.json').write_text(json.dumps(config_of(network), indent=2) + '\n', encoding='utf-8')


def check(network: Network, name: str) -> None:
  """Raise for a network that is not written as Hugging Face."""
  if not isinstance(network, T5 | Decoder) and type(network) not in heads.KINDS:
    raise ValueError(
      f'T5, decoders, EAGLE, Medusa and DFlash are written, and {name} is a {type(network).__name__}: write the model '
      'that it is made of'
    )
  try:
    config_of(network)
  except ValueError as error:
    raise ValueError(f'{name} cannot be written: {error}') from None


def write(path, model: Model, *, overwrite: bool = False) -> Path:
  """Write config.json, the weights and the tokenizer's files, all or nothing.

  Several processes all call this, and the first writes.

  Args:
    path: Folder to write.
    model: The model: a T5, a decoder or a head.
    overwrite: Replace a checkpoint of ours that is there.

  Returns:
    The folder.

  Raises:
    ValueError: no model_type of Hugging Face, and no layout of a head, describes the model.
    FileExistsError: the folder exists and may not be replaced.
  """
  files.check_floats(model)
  check(model.network, model.name)
  is_umt5 = config_of(model.network).get('model_type') == 'umt5'
  if is_umt5 and not model.network.config.scale_outputs:
    warnings.warn(
      f'{model.name} has a bias for each layer, as umt5, whose logits transformers 5 always divides by √d: '
      'there its greedy texts are those of this model, its probabilities are not',
      stacklevel=2,
    )
  path = Path(os.path.abspath(path))
  model = model.replace(params=multihost.to_host(model.params))
  multihost.once(lambda: _write(path, model, overwrite))
  return path


def _write(path: Path, model: Model, overwrite: bool) -> None:
  network = model.network
  with files.atomic_dir(path, overwrite=overwrite) as scratch:
    files.copy_tokenizer(model.tokenizer, scratch)
    files.write_generation(model, scratch)
    write_config(scratch, network)
    params = unstack_layers(model.params) if network.scan else model.params
    if isinstance(network, Head):
      tensors = heads.published(_tensors(heads.entries(network), params))
    else:
      tensors = _tensors(_entries(network, config_of(network)['model_type']), params)
    _save(scratch, tensors)


def _save(folder: Path, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
  """Write tensors into model.safetensors or, where they are many bytes, into shards and their index."""
  from safetensors.numpy import save_file  # lazily: reading needs no safetensors library

  shards: list[list[str]] = []
  part: dict[str, np.ndarray] = {}
  sizes = [0]  # of the files

  def end():
    file = folder / f'{len(shards)}.safetensors'
    save_file(part, file, metadata={'format': 'pt'})
    file.chmod((folder / 'config.json').stat().st_mode)  # the library lets nobody else read it
    shards.append([*part])
    part.clear()

  for name, x in tensors:
    if part and sizes[-1] + x.nbytes > SHARD:
      end()
      sizes.append(0)
    part[name] = x
    sizes[-1] += x.nbytes
  end()
  if len(shards) == 1:
    (folder / '0.safetensors').rename(folder / files.WEIGHTS)
    return
  weight_map = {}
  for i, some in enumerate(shards):
    file = f'model-{i + 1:05}-of-{len(shards):05}.safetensors'
    (folder / f'{i}.safetensors').rename(folder / file)
    weight_map |= dict.fromkeys(some, file)
  index = {'metadata': {'total_size': sum(sizes)}, 'weight_map': weight_map}
  (folder / files.INDEX).write_text(json.dumps(index, indent=2) + '\n', encoding='utf-8')


def export(network: Network, family: str, params: Params) -> dict[str, np.ndarray]:
  """Return parameters as the tensors of a Hugging Face checkpoint.

  Args:
    network: Their network.
    family: Model_type of the checkpoint.
    params: The parameters, layers not stacked.
  """
  return dict(_tensors(_entries(network, family), params))


def _entries(network: Network, family: str) -> list[Entry]:
  return names.entries(families.FAMILIES[family], dataclasses.replace(network, scan=False))


def _tensors(entries: Iterable[Entry], params: Params) -> Iterator[tuple[str, np.ndarray]]:
  """Yield the tensors in which parameters are stored, one at a time."""
  leaves = flatten_dict(params)
  by_source: dict[str, list[Entry]] = {}
  for entry in sorted(entries, key=lambda entry: entry.offset):
    by_source.setdefault(entry.source, []).append(entry)
  for source, group in by_source.items():
    parts = [np.asarray(jax.device_get(leaves[entry.path][entry.row])) for entry in group]
    # those of several tensors lie in one head by head, or one after the other
    widths = [entry.heads[0] if entry.heads else x.shape[-1] for entry, x in zip(group, parts, strict=True)]
    parts = [x.reshape(*x.shape[:-1], -1, width) for x, width in zip(parts, widths, strict=True)]
    joined = np.concatenate(parts, axis=-1)
    joined = joined.reshape(*joined.shape[:-2], -1)
    yield source, np.ascontiguousarray(joined.T if group[0].transpose else joined)
