"""Read a Hugging Face folder into a network and its parameters, without torch or transformers.

Everything is checked against the headers first. Then the tensors are read one by one, the largest first: each needs
room for itself two or three times over while it is put in place, which is free as long as the others are not there.
"""

from collections import Counter
import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from speccascade.backends import sharding
from speccascade.checkpoints import hf_names, shards
from speccascade.checkpoints.hf_config import network_from_config, settings
from speccascade.checkpoints.hf_names import canonical, ignored, Source, source
from speccascade.checkpoints.tensor_files import AGAIN, index, read_json, Stored
from speccascade.types import Network, Params

__all__ = ['export', 'generation', 'network_from_config', 'read']

HEAD = 'lm_head.weight'
T5_FAMILIES = ('t5', 'mt5', 'umt5')


@dataclasses.dataclass(frozen=True)
class _Item:
  """One parameter: its path in the unrolled tree, its shape, and where it comes from."""

  path: tuple[str, ...]
  shape: tuple[int, ...]
  source: Source


def read(path, *, dtype: str | None = None, scan: bool = False, mesh=None, rules=None) -> tuple[Network, Params]:
  """Return the network of a folder and its parameters in `dtype`, or as stored where that is None.

  On a mesh they are cut as `rules` say, and each process reads its own part of them.
  """
  folder = Path(path)
  config = read_json(folder / 'config.json')
  family = settings(config)['model_type']
  family = hf_names.LIKE.get(family, family)
  stored = _tensors(folder, family)
  network = network_from_config(config, eos_ids=(generation(folder) or {}).get('eos_token_id'))
  plan = _plan(family, network)
  embedding = next((i.source.name for i in plan if i.path == ('token_embedder', 'embedding')), plan[0].source.name)
  tied = _tied(network, family, stored, embedding)
  if tied != _says_tied(network):
    network = dataclasses.replace(network, config=dataclasses.replace(network.config, tied=tied))
    plan = _plan(family, network)
  _check(folder, plan, stored)
  network = _replaced(network, dtype=dtype or stored[embedding].dtype.name, scan=scan)
  scan = getattr(network, 'scan', False)
  cut = None if mesh is None else sharding.shardings(network, mesh, rules)
  return network, _load(plan, stored, dtype, scan, cut)


def _tensors(folder: Path, family: str) -> dict[str, Stored]:
  """Return the folder's tensors under their usual names."""
  stored = {canonical(family, name): tensor for name, tensor in index(folder).items()}
  for name in ('encoder.embed_tokens.weight', 'decoder.embed_tokens.weight'):
    if family in T5_FAMILIES and name in stored:
      stored.setdefault('shared.weight', stored[name])  # of several equal tensors any one may have been saved
  return stored


def generation(folder: Path) -> dict | None:
  """Return what `generation_config.json` says, or None."""
  file = folder / 'generation_config.json'
  return read_json(file) if file.exists() else None


def _plan(family: str, network: Network) -> list[_Item]:
  """Return an item for every parameter."""
  unrolled = _replaced(network, scan=False)
  leaves = jax.tree_util.tree_leaves_with_path(unrolled.param_shapes())
  paths = [(tuple(key.key for key in path), leaf.shape) for path, leaf in leaves]
  return [_Item(path, shape, source(family, path)) for path, shape in paths]


def _replaced(network: Network, **changes) -> Network:
  """Return a network with those of the changes that it has fields for."""
  fields = {field.name for field in dataclasses.fields(network)}
  return dataclasses.replace(network, **{name: x for name, x in changes.items() if name in fields})


def _says_tied(network: Network) -> bool:
  return getattr(getattr(network, 'config', None), 'tied', False)


def _tied(network: Network, family: str, stored: dict[str, Stored], embedding: str) -> bool:
  """Tell whether the head is the embedding: what the file holds decides before what the config says."""
  said = _says_tied(network)
  if HEAD not in stored:
    return said or family in T5_FAMILIES
  if not said or embedding not in stored:
    return said
  head, table = stored[HEAD], stored[embedding]
  return head.shape == table.shape and np.array_equal(head.read(), table.read())


def _check(folder: Path, plan: list[_Item], stored: dict[str, Stored]) -> None:
  """Raise one error for the first tensor that is missing, unexpected or of another shape."""
  expected = {item.source.name: item.source.shape(item.shape) for item in plan}
  files = ', '.join(sorted({str(tensor.file) for tensor in stored.values()})) or str(folder)
  missing = [name for name in expected if name not in stored]
  if missing:
    name = missing[0]
    raise ValueError(f"{files}: tensor '{name}' {list(expected[name])} is missing{_more(missing)}: {AGAIN}")
  for name, shape in expected.items():
    if stored[name].shape != shape:
      raise ValueError(
        f"{stored[name].file}: tensor '{name}' has shape {list(stored[name].shape)}, but by config.json it should "
        f'have {list(shape)}: weights and config.json do not belong together, {AGAIN}'
      )
  tied = HEAD not in expected
  extra = [name for name in stored if name not in expected and not ignored(name) and not (tied and name == HEAD)]
  if extra:
    tensor = stored[extra[0]]
    raise ValueError(
      f"{tensor.file}: tensor '{tensor.name}' {list(tensor.shape)} is unexpected{_more(extra)}: config.json describes "
      f'a model without it; if it is an adapter, merge it first, else {AGAIN}'
    )


def _more(names: list[str]) -> str:
  return f' (and {len(names) - 1} more)' if len(names) > 1 else ''


def _load(plan: list[_Item], stored: dict[str, Stored], dtype: str | None, scan: bool, cut: Any = None) -> Params:
  """Read every tensor once and put its parameters in place, on a mesh as they are cut."""
  params: Params = {}
  depths = Counter(stacked(item.path)[0] for item in plan) if scan else {}
  by_name: dict[str, list[_Item]] = {}
  for item in sorted(plan, key=lambda item: -math.prod(item.shape)):
    by_name.setdefault(item.source.name, []).append(item)
  for name, items in by_name.items():
    data = stored[name].read() if cut is None else None
    for item in items:
      if cut is None:
        part = np.split(data, item.source.parts, axis=-1)[item.source.part]
        value, finite = convert(part, item.source.transpose, dtype)
      else:
        value, finite = _shards(item, stored[name], dtype, of_layer(cut, item.path, scan))
      if not finite:
        raise ValueError(
          f"{stored[name].file}: tensor '{name}' holds NaN or Inf as {value.dtype}: {AGAIN}, or try another dtype"
        )
      place(params, item.path, value, depths, cut)
  return params


def _shards(item: _Item, tensor: Stored, dtype: str | None, sharding) -> tuple[jax.Array, bool]:
  def take(box: shards.Box) -> np.ndarray:
    part = tensor.read(item.source.box(box, item.shape))
    return part.T if item.source.transpose else part

  return shards.read(item.shape, sharding, take, dtype)


def of_layer(cut: Any, path: tuple[str, ...], scan: bool) -> NamedSharding:
  """Return a parameter's sharding in a tree of them, one layer's where layers are scanned."""
  target = stacked(path)[0] if scan else path
  sharding = functools.reduce(lambda tree, name: tree[name], target, cut)
  if not scan or 'layers' not in target:
    return sharding
  return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


def convert(x, transpose: bool, dtype: str | None):
  """Return the parameter, and whether all of it is finite."""
  if isinstance(x, np.ndarray) and jax.default_backend() == 'cpu':  # to compile for each shape would take longer
    with np.errstate(over='ignore'):
      x = x.astype(dtype or x.dtype, copy=False)
    return jnp.asarray(x.T if transpose else x), np.isfinite(x).all()
  return _convert(x, transpose, dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _convert(x, transpose: bool, dtype: str | None):
  x = x.T if transpose else x
  x = x if dtype is None else x.astype(dtype)
  return x, jnp.isfinite(x).all()


def stacked(path: tuple[str, ...]) -> tuple[tuple[str, ...], int]:
  """Return a parameter's path in the scanned tree, and the number of its layer."""
  number = next((int(name[7:]) for name in path if name.startswith('layers_')), 0)
  return tuple('layers' if name.startswith('layers_') else name for name in path), number


def place(params: Params, path: tuple[str, ...], value: jax.Array, depths: Counter, cut: Any = None) -> None:
  """Put a parameter into the tree; into its stack, in place, where layers are scanned, and as that is cut."""
  target, number = stacked(path) if depths else (path, 0)
  for name in target[:-1]:
    params, cut = params.setdefault(name, {}), None if cut is None else cut[name]
  if 'layers' in target:
    where = None if cut is None else cut[target[-1]]
    if target[-1] not in params:
      params[target[-1]] = jnp.zeros((depths[target], *value.shape), value.dtype, device=where)
    value = _set_row(params[target[-1]], value, number, where)
  params[target[-1]] = value


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _set_row(stack: jax.Array, row: jax.Array, number: int, where: NamedSharding | None) -> jax.Array:
  stack = lax.dynamic_update_index_in_dim(stack, row, number, axis=0)
  return stack if where is None else lax.with_sharding_constraint(stack, where)


def export(network: Network, family: str, params: Params) -> dict[str, np.ndarray]:
  """Return unrolled parameters as the tensors of a Hugging Face checkpoint of that model_type."""
  parts: dict[str, list[np.ndarray]] = {}
  for item in sorted(_plan(family, network), key=lambda item: item.source.part):
    value = np.asarray(functools.reduce(lambda tree, name: tree[name], item.path, params))
    parts.setdefault(item.source.name, []).append(value.T if item.source.transpose else value)
  return {name: np.ascontiguousarray(np.concatenate(values, axis=-1)) for name, values in parts.items()}
