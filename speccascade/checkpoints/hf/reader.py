"""Read a Hugging Face folder, whose tensors lie in one file or in the shards that an index lists."""

from collections.abc import Callable, Sequence
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from speccascade.checkpoints import assemble, stored
from speccascade.checkpoints.files import AGAIN, GENERATION, GGUF, OTHERS, read_json
from speccascade.checkpoints.hf import gguf, heads, names
from speccascade.checkpoints.hf.checks import errors_of
from speccascade.checkpoints.hf.family import FAMILIES, network_from_config, OWN, settings
from speccascade.checkpoints.stored import Tensor
from speccascade.data.gguf import WEIGHTS
from speccascade.models.t5 import T5
from speccascade.types import Network, Params

_READERS = {  # by the name of a single file; the first that is there is read
  'model.safetensors': stored.of_safetensors,
  'pytorch_model.bin': stored.of_torch,
  'medusa_lm_head.safetensors': stored.of_safetensors,
  'medusa_lm_head.pt': stored.of_torch,
  WEIGHTS: gguf.tensors,
}


def read(
  path, *, dtype: str | None = None, quantised: bool = False, scan: bool = False, mesh=None, rules=None
) -> tuple[Network, Params]:
  """Return the network of a folder and its parameters.

  Args:
    path: Folder with config.json and safetensors.
    dtype: Dtype of the parameters; None for that of each stored tensor.
    quantised: Whether kernels and the table of tokens become int8.
    scan: Stack the layers.
    mesh: Mesh to shard the parameters over, each process reading its own part of them.
    rules: Sharding rules, as `load` takes them.

  Raises:
    ValueError: the configuration or a tensor is damaged, not supported, or does not belong to the other.
    FileNotFoundError: a file is missing.
  """
  folder = Path(path)
  how = dict(dtype=dtype, quantised=quantised, mesh=mesh, rules=rules)
  config = read_json(folder / 'config.json')
  with errors_of(folder / 'config.json'):
    if head := _head(config):
      return heads.read(folder, config, _stored(folder), head, **how)
    family = settings(config).family
    eos_ids = (generation_config(folder) or {}).get('eos_token_id')
    network = network_from_config(config, eos_ids=eos_ids, scan=scan)
  tensors = _stored(folder)
  if 'fc.weight' in tensors and not _is_of_user(config):
    with errors_of(folder / 'config.json'):
      return heads.read(folder, config, tensors, 'eagle', **how)
  tensors = {names.canonical(family, name): tensor for name, tensor in tensors.items()}
  entries = names.entries(family, network)
  embeddings = (entry.source for entry in entries if entry.path == ('token_embedder', 'embedding'))
  embedding = next(embeddings, entries[0].source)
  head = names.head(family)
  tied = _is_tied(network.tied, isinstance(network, T5), tensors, head, embedding)
  entries = names.entries(family, _with_head(network, tied))
  expected = {entry.source for entry in entries}
  ignored = {name for name in tensors if name == head or names.ignored(name)} - expected
  tensors = {name: x for name, x in tensors.items() if name not in ignored}
  where = ', '.join(sorted({str(tensor.file) for tensor in tensors.values()})) or folder
  assemble.check(entries, tensors, network, where)
  network = network_from_config(config, eos_ids=eos_ids, dtype=dtype or tensors[embedding].dtype.name, scan=scan)
  network = _with_head(network, tied)
  network = assemble.quantised(network) if quantised else network
  return network, assemble.read(network, entries, tensors, dtype=dtype, mesh=mesh, rules=rules)


def read_mtp(path, *, scan: bool = False, **how: Any) -> tuple[Network, Params]:
  """Return the network of a folder's layer of multi-token prediction and its parameters; arguments as of `read`."""
  folder = Path(path)
  file = folder / 'config.json'
  config = read_json(file)
  with errors_of(file):
    return heads.read_mtp(folder, config, _stored(folder), **how)


def _is_of_user(config: dict) -> bool:
  """Tell whether a config.json is of a family that a user has declared."""
  return config.get('model_type') in [*FAMILIES.keys() - OWN]


def _head(config: dict) -> str | None:
  """Return which head a config.json describes, as `heads.kind` does; a family of a user's is none."""
  return None if _is_of_user(config) else heads.kind(config)


def _with_head(network: Network, tied: bool) -> Network:
  """Return a network whose head is the embedding, or is not."""
  if network.tied == tied:
    return network
  return dataclasses.replace(network, config=dataclasses.replace(network.config, tied=tied))


def network_of(file: Path, **settings) -> Network:
  """Return the network that a config.json describes; `settings` are those of `network_from_config`."""
  config = read_json(file)
  with errors_of(file):
    if head := _head(config):
      raise ValueError(
        f'it describes a head ({head}) and no model: give its checkpoint, as --head where a command has it'
      )
    return network_from_config(config, **settings)


def generation_config(folder: Path) -> dict | None:
  """Return the content of `generation_config.json`, None where there is none."""
  file = folder / GENERATION
  return read_json(file) if file.exists() else None


def _is_tied(by_config: bool, is_t5: bool, tensors: dict[str, Tensor], name: str, embedding: str) -> bool:
  """Tell whether the head is the embedding: the stored tensors decide before the config does."""
  if name not in tensors:
    return by_config or is_t5
  if not by_config or embedding not in tensors:
    return by_config
  head = tensors[name]
  table = tensors[embedding]
  return head.shape == table.shape and np.array_equal(head.read(), table.read())


# ---- the files of the weights ----


def find(folder: Path) -> tuple[Path, Callable] | None:
  """Return the file of a folder's weights, or their index, and what reads a file of that kind; None without weights."""
  found = ((folder / f'{name}{end}', of_file) for name, of_file in _READERS.items() for end in ('', '.index.json'))
  return next(((file, of_file) for file, of_file in found if file.exists()), None)


def choose(names: Sequence[str], read: Callable[[str], bytes]) -> list[str]:
  """Return, of the files of a folder, its weights with their index, of the first format that it has.

  Args:
    names: The paths of the files from the folder above.
    read: Reads one of them.
  """
  for end in (f'{name}{end}' for name in _READERS for end in ('', '.index.json')):
    if file := next((name for name in names if name.partition('/')[2] == end), None):
      return [file, *(_shards_of(file, names, read) if end.endswith('.json') else ())]
  return []


def _shards_of(index: str, names: Sequence[str], read: Callable[[str], bytes]) -> list[str]:
  """Return the files that an index names, as far as they are there; a damaged index is told of when it is read."""
  try:
    files = {*json.loads(read(index))['weight_map'].values()}
  except (ValueError, KeyError, AttributeError, TypeError):
    return []
  return [name for name in names if name.partition('/')[2] in files]


def _stored(folder: Path) -> dict[str, Tensor]:
  """Return the tensors of a folder by the names in its files."""
  found = find(folder)
  if found is None:
    raise FileNotFoundError(_nothing(folder))
  file, of_file = found
  return _sharded(file, of_file) if file.suffix == '.json' else of_file(file)


def _nothing(folder: Path) -> str:
  """Return what is wrong with a folder without weights that are read."""
  here = sorted(p.name for p in folder.iterdir() if p.suffix in {'.safetensors', *OTHERS})
  shards = [name for name in here if name.endswith('.safetensors')]
  remedy = 'save it with model.save_pretrained(path, safe_serialization=True)' if here else 'is this the right folder?'
  if any(name.endswith(('.bin', '.pt', '.pth')) for name in here):
    remedy = 'of PyTorch pytorch_model.bin is read, with the tensors by name: rename it if it has them'
  if shards:
    remedy = f'the index is missing, so perhaps shards are too: {AGAIN}'
  elif any(name.endswith('.gguf') for name in here):
    remedy = GGUF
  single = folder / 'model.safetensors'
  has = ', '.join(shards or here) or 'no weights'
  return f'{single} and {single.name}.index.json do not exist (it has {has}): {remedy}'


def _sharded(path: Path, of_file: Callable) -> dict[str, Tensor]:
  """Return the tensors of an index, each looked up in its shard."""
  suffix = Path(path.name.removesuffix('.index.json')).suffix
  weight_map = read_json(path).get('weight_map')
  if not weight_map or not isinstance(weight_map, dict):
    raise ValueError(f"{path} has no 'weight_map' of tensors to files: {AGAIN}")
  for tensor, name in weight_map.items():
    if not isinstance(name, str) or name != Path(name).name or not name.endswith(suffix):
      raise ValueError(f"{path}: 'weight_map' puts '{tensor}' into {name!r}, not a file of this folder: {AGAIN}")
    if not (path.parent / name).exists():
      raise FileNotFoundError(f"{path.parent / name} does not exist, and {path.name} puts '{tensor}' there: {AGAIN}")
  result: dict[str, Tensor] = {}
  for file in sorted(set(weight_map.values())):
    found = of_file(path.parent / file)
    result |= {name: tensor for name, tensor in found.items() if weight_map.get(name, file) == file}
  return result
