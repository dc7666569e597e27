"""Read a Hugging Face folder."""

import dataclasses
from pathlib import Path

import numpy as np

from speccascade.checkpoints import assemble
from speccascade.checkpoints.files import GENERATION, read_json
from speccascade.checkpoints.hf import names, weights
from speccascade.checkpoints.hf.checks import errors_of
from speccascade.checkpoints.hf.config import network_from_config, settings
from speccascade.checkpoints.hf.family import FAMILIES, Family, OWN
from speccascade.models.t5 import T5
from speccascade.types import Network, Params

HEAD = 'lm_head.weight'
_HEADS = ('Medusa', 'Hydra', 'EAGLE')  # drafters that are parts of another model


def read(path, *, dtype: str | None = None, scan: bool = False, mesh=None, rules=None) -> tuple[Network, Params]:
  """Return the network of a folder and its parameters.

  Args:
    path: Folder with config.json and safetensors.
    dtype: Dtype of the parameters; None for that of each stored tensor.
    scan: Stack the layers.
    mesh: Mesh to shard the parameters over, each process reading its own part of them.
    rules: Sharding rules, as `load` takes them.

  Raises:
    ValueError: the configuration or a tensor is damaged, not supported, or does not belong to the other.
    FileNotFoundError: a file is missing.
  """
  folder = Path(path)
  config = read_json(folder / 'config.json')
  words = ' '.join([*config, str(config.get('architectures')), str(config.get('model_type'))]).lower()
  of_user = config.get('model_type') in [*FAMILIES.keys() - OWN]
  _refuse_heads(folder, [kind for kind in _HEADS if kind.lower() in words and not of_user])
  with errors_of(folder / 'config.json'):
    family = settings(config).family
    eos_ids = (generation_config(folder) or {}).get('eos_token_id')
    network = network_from_config(config, eos_ids=eos_ids)
  stored = _tensors(folder, family)
  _refuse_heads(folder, ['EAGLE'] if 'fc.weight' in stored and not of_user else [])
  entries = names.entries(family, network)
  embeddings = (entry.source for entry in entries if entry.path == ('token_embedder', 'embedding'))
  embedding = next(embeddings, entries[0].source)
  tied = _is_tied(network.tied, isinstance(network, T5), stored, embedding)
  entries = names.entries(family, _with_head(network, tied))
  expected = {entry.source for entry in entries}
  optional = {HEAD} if HEAD not in expected else set()
  stored = {name: x for name, x in stored.items() if name in expected or not (names.ignored(name) or name in optional)}
  where = ', '.join(sorted({str(tensor.file) for tensor in stored.values()})) or folder
  assemble.check(entries, stored, network, where)
  network = network_from_config(config, eos_ids=eos_ids, dtype=dtype or stored[embedding].dtype.name, scan=scan)
  network = _with_head(network, tied)
  entries = names.entries(family, network)
  return network, assemble.read(network, entries, stored, dtype=dtype, mesh=mesh, rules=rules)


def _with_head(network: Network, tied: bool) -> Network:
  """Return a network whose head is the embedding, or is not."""
  if network.tied == tied:
    return network
  return dataclasses.replace(network, config=dataclasses.replace(network.config, tied=tied))


def _refuse_heads(folder: Path, kinds: list[str]) -> None:
  """Raise for a folder of one of `kinds`, which are no models of their own."""
  if kinds:
    raise ValueError(
      f"{folder} is a head of {kinds[0]}, which drafts from another model's hidden states and cannot be loaded: draft "
      'with a small model of the same vocabulary, with models.ngram, or with MODEL@4, the first four layers of MODEL'
    )


def network_of(file: Path, **settings) -> Network:
  """Return the network that a config.json describes; `settings` are those of `network_from_config`."""
  config = read_json(file)
  with errors_of(file):
    return network_from_config(config, **settings)


def generation_config(folder: Path) -> dict | None:
  """Return the content of `generation_config.json`, None where there is none."""
  file = folder / GENERATION
  return read_json(file) if file.exists() else None


def _tensors(folder: Path, family: Family) -> dict[str, assemble.Tensor]:
  """Return the folder's tensors under their usual names."""
  stored = weights.tensors(folder)
  return {names.canonical(family, name): tensor for name, tensor in stored.items()}


def _is_tied(by_config: bool, is_t5: bool, stored: dict[str, assemble.Tensor], embedding: str) -> bool:
  """Tell whether the head is the embedding: the stored tensors decide before the config does."""
  if HEAD not in stored:
    return by_config or is_t5
  if not by_config or embedding not in stored:
    return by_config
  head = stored[HEAD]
  table = stored[embedding]
  return head.shape == table.shape and np.array_equal(head.read(), table.read())
