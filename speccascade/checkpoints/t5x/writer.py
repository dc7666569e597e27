"""Write T5X checkpoints, as T5X itself reads them."""

import os
from pathlib import Path

from flax import serialization
import jax
import jax.numpy as jnp
import numpy as np

from speccascade.checkpoints import files, stored
from speccascade.checkpoints.hf.writer import write_config
from speccascade.checkpoints.t5x import axes
from speccascade.checkpoints.t5x.config import other_kind
from speccascade.data.sources import STEP
from speccascade.models.layers import unstack_layers
from speccascade.types import Model, Params

_CHUNK_BYTES = 1 << 26


def write(path, model: Model, *, step: int | None = None, scan: bool = False, overwrite: bool = False) -> Path:
  """Write a T5 as T5X does, with config.json and the tokenizer, which T5X ignores; there are no `param_states`.

  Args:
    path: Folder `checkpoint_<step>`, or the one to write it into.
    model: The model.
    step: Number of the checkpoint, by default 1, the first that T5X restores by itself.
    scan: Stack the layers, as T5X's scalable_t5 reads them.
    overwrite: Replace a checkpoint that is there.

  Returns:
    The folder `checkpoint_<step>`.

  Raises:
    ValueError: the model is no T5, or `step` is negative or not that of `path`.
    FileExistsError: the folder exists and may not be replaced.
  """
  path = Path(os.path.abspath(path))
  files.check_floats(model)
  if other := other_kind(model.network):
    raise ValueError(f'T5X checkpoints are for T5, and {model.name} is a {other}: write hf')
  folder, step = _destination(path, step)
  params = unstack_layers(model.params) if model.network.scan else model.params
  if scan:
    params = axes.scan(params, model.network.config)
  with files.atomic_dir(folder, overwrite=overwrite) as scratch:
    target = _write_tree(scratch, params, 'target.')
    tree = {'version': 3, 'optimizer': {'target': target, 'state': {'step': np.int32(step)}}}
    (scratch / 'checkpoint').write_bytes(serialization.msgpack_serialize(tree))
    write_config(scratch, model.network)
    files.copy_tokenizer(model.tokenizer, scratch)
  return folder


def _destination(path: Path, step: int | None) -> tuple[Path, int]:
  """Return a checkpoint's folder and its step."""
  match = STEP.fullmatch(path.name)
  if match and step not in (None, int(match[1])):
    raise ValueError(f'{path} is not the folder of step {step}: leave one of the two out')
  if step is not None and step < 0:
    raise ValueError(f'step={step} is negative: T5X counts from 0')
  if match:
    return path, int(match[1])
  step = 1 if step is None else step
  return path / f'checkpoint_{step}', step


def _write_tree(folder: Path, params: Params, prefix: str) -> dict:
  """Write every array into its folder, and return the tree of their specs."""
  if isinstance(params, dict):
    return {key: _write_tree(folder, tree, f'{prefix}{key}.') for key, tree in params.items()}
  name = prefix.removesuffix('.')
  rows = max(1, _CHUNK_BYTES // max(1, params.nbytes // max(1, params.shape[0])))
  chunks = [min(rows, params.shape[0]), *params.shape[1:]]
  metadata = {'shape': list(params.shape), 'chunks': chunks, 'compressor': {'id': 'gzip', 'level': 1}}
  spec = {'driver': 'zarr', 'dtype': jnp.dtype(params.dtype).name, 'metadata': metadata}
  store = {'kvstore': {'driver': 'file', 'path': f'{folder / name}/'}, 'create': True}
  stored.tensorstore().open(spec | store).result().write(np.asarray(jax.device_get(params))).result()
  return spec | {'kvstore': {'driver': 'file', 'path': f'{name}/'}}
