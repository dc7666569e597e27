"""Read T5X checkpoints: `checkpoint_<step>` of any origin.

`checkpoint_<step>/checkpoint` is flax msgpack, whose leaves are arrays or the specs of zarr arrays next to it, in
`target.<name>/`; T5X's Orbax manager writes `checkpoint_<step>/state/` instead. The kvstore of a spec is the path
at which the array was once written, perhaps on another file system: only its last name counts here.
"""

import mmap
from pathlib import Path, PurePosixPath
from typing import Any

from flax import serialization
from flax.traverse_util import flatten_dict
import numpy as np

from speccascade.checkpoints import assemble, files, stored
from speccascade.checkpoints.files import AGAIN
from speccascade.checkpoints.hf.checks import errors_of
from speccascade.checkpoints.hf.family import network_from_config
from speccascade.checkpoints.t5x import axes, config
from speccascade.data.sources import STEP, steps_in
from speccascade.types import Network, Params


def is_checkpoint(path: Path) -> bool:
  """Tell whether a folder looks like a T5X checkpoint, or has some in it."""
  return bool(STEP.fullmatch(path.name) or steps_in(path) or _content(path))


def find(path: Path) -> Path:
  """Return a checkpoint's folder: the path itself, or the latest step in it."""
  steps = steps_in(path)
  if _content(path) or not steps:
    return path
  return path / f'checkpoint_{max(steps)}'


def model_files(folder: Path) -> list[Path]:
  """Return the files that a checkpoint's model is read from, and those next to it that describe the model."""
  tensors = [p for p in folder.rglob('*') if not p.relative_to(folder).parts[0].startswith('state.')]  # the optimizer's
  return tensors + [p for pattern in ('*.gin', 'config.json') for p in folder.parent.glob(pattern)]


def read(
  path,
  *,
  dtype: str | None = None,
  quantised: bool = False,
  scan: bool = False,
  activation: str | None = None,
  mesh=None,
  rules=None,
) -> tuple[Network, Params]:
  """Return the network of a checkpoint and its parameters; the other arguments are those of `hf.read`.

  Args:
    path: `checkpoint_<step>`, or a folder of them, of which the latest is read.
    activation: Activation of the MLPs, in T5X's words, where no gin file next to the checkpoint has it.

  Raises:
    ValueError: the checkpoint is damaged, not supported, or does not record its activation.
    FileNotFoundError: a file is missing.
  """
  folder = find(Path(path))
  files.check_finished(folder)
  found = _tensors(folder)
  dtypes = {name: x.dtype for name, x in found.items()}  # or raise for integers, which a quantised model has
  tensors = axes.with_our_axes(found, folder)
  shapes = axes.shapes_by_layer(tensors)
  gated = 'encoder.layers_0.mlp.wi_0.kernel' in shapes
  hf_config = config.complete(config.config_of(shapes, folder), folder, gated, activation)
  dtype_of_network = dtype or assemble.narrowed(dtypes['token_embedder.embedding']).name
  with errors_of(folder):
    network = network_from_config(hf_config, dtype=dtype_of_network, scan=scan)
  network = assemble.quantised(network) if quantised else network
  entries = assemble.plan_by_own_names(network, tensors)
  assemble.check(entries, tensors, network, folder)
  return network, assemble.read(network, entries, tensors, dtype=dtype, mesh=mesh, rules=rules)


def _content(path: Path) -> Path | None:
  """Return the file or folder with a checkpoint's tensors, or None."""
  if (path / 'checkpoint').is_file():
    return path / 'checkpoint'
  state = path / 'state'
  return state if state.is_dir() and next(state.iterdir(), None) else None


def _tensors(folder: Path) -> dict[str, stored.Tensor]:
  """Return the tensors of a checkpoint by their dotted names."""
  content = _content(folder)
  if content is None:
    unfinished = [p.name for p in folder.glob('*.tmp-*')] if folder.is_dir() else []
    names = ', '.join(unfinished or sorted(p.name for p in folder.glob('*'))[:5]) or 'nothing'
    raise FileNotFoundError(
      f"{folder}: a T5X checkpoint has a file 'checkpoint' or a folder 'state', and this has {names}: {AGAIN}"
    )
  tensors = _of_msgpack(content) if content.is_file() else _of_state(content)
  if not tensors:
    raise ValueError(f'{content}: no tensor under optimizer/target, target or params: is this a T5X checkpoint?')
  return tensors


def _of_msgpack(file: Path) -> dict[str, stored.Tensor]:
  """Return the tensors of a `checkpoint` file and of the zarr folders that it names."""
  tree = _unpack(file)
  roots = [tree.get('optimizer'), tree]
  targets = [root.get('target') for root in roots if isinstance(root, dict)] + [tree.get('params')]
  target = next((target for target in targets if isinstance(target, dict)), {})
  leaves = flatten_dict(target, is_leaf=lambda _, x: 'kvstore' in x, sep='.')
  return {name: _of_leaf(name, leaf, file) for name, leaf in leaves.items() if leaf is not None}


def _of_leaf(name: str, leaf: Any, file: Path) -> stored.Tensor:
  """Return the tensor of a leaf, which is an array or the spec of a zarr array."""
  if not isinstance(leaf, dict):
    return stored.in_memory(file, name, np.asarray(leaf))
  folder = file.parent / PurePosixPath(str(leaf['kvstore'].get('path') or leaf.get('path', ''))).name
  if not (folder / '.zarray').is_file():
    missing = folder / '.zarray' if folder.is_dir() else folder
    raise FileNotFoundError(f"{missing}: missing, it belongs to tensor '{name}': {AGAIN}")
  return stored.of_zarr(name, folder, {'driver': 'file', 'path': f'{folder}/'})


def _unpack(file: Path) -> dict:
  """Return the tree of a msgpack file; its pages are mapped, so that arrays are not in memory twice."""
  try:
    with file.open('rb') as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
      tree = serialization.msgpack_restore(data)
  except (ValueError, TypeError, KeyError) as error:  # msgpack's own errors are ValueErrors
    size = file.stat().st_size
    raise ValueError(f'{file}: truncated or corrupt msgpack, {size} bytes ({error}): {AGAIN}') from None
  if not isinstance(tree, dict):
    raise ValueError(f'{file}: msgpack of a {type(tree).__name__}, not of a dict: is this a T5X checkpoint?')
  return tree


def _of_state(state: Path) -> dict[str, stored.Tensor]:
  """Return the tensors that T5X's Orbax manager wrote, in one OCDBT store or in a folder each."""
  if (state / 'manifest.ocdbt').is_file():
    kvstores = {name: stored.ocdbt(state, f'{name}/') for name in stored.names_in_ocdbt(state)}
  else:
    kvstores = {p.parent.name: {'driver': 'file', 'path': f'{p.parent}/'} for p in state.glob('*/.zarray')}
  tensors = {}
  for stored_name, kvstore in sorted(kvstores.items()):
    root, _, name = stored_name.partition('.')
    if root in ('target', 'params'):
      tensors[name] = stored.of_zarr(name, state, kvstore)
  return tensors
