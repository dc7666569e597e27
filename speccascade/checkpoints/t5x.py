"""T5X checkpoints: read `checkpoint_<step>` of any origin, write what T5X reads.

`checkpoint_<step>/checkpoint` is flax msgpack, whose leaves are arrays or the specs of zarr arrays beside it, in
`target.<name>/`; T5X's Orbax manager writes `checkpoint_<step>/state/` instead. The kvstore of a spec says where the
array was once written, perhaps on another file system: only its last name counts here.
"""

from collections import Counter
from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import math
import mmap
import os
from pathlib import Path, PurePosixPath
import re
from typing import Any

from flax import serialization
import jax
import jax.numpy as jnp
import numpy as np

from speccascade.backends import sharding
from speccascade.checkpoints import files, hf, hf_write, shards, t5x_names
from speccascade.checkpoints.tensor_files import AGAIN
from speccascade.models.layers import unstack_layers
from speccascade.models.t5 import T5
from speccascade.types import Model, Network, Params

_STEP = re.compile(r'checkpoint_(\d+)')
_CHUNK_BYTES = 1 << 26
_ROOTS = (('optimizer', 'target'), ('target',), ('params',))


@dataclasses.dataclass(frozen=True)
class _Leaf:
  """One tensor of a checkpoint, not read yet."""

  file: Path
  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[..., np.ndarray]  # (box or None)


def is_checkpoint(path: Path) -> bool:
  """Tell whether a folder looks like a T5X checkpoint, or holds some."""
  return bool(_STEP.fullmatch(path.name) or _steps(path) or _content(path))


def find(path: Path) -> Path:
  """Return a checkpoint's folder: the path itself, or the latest step in it."""
  steps = _steps(path)
  if _content(path) or not steps:
    return path
  return path / f'checkpoint_{max(steps)}'


def model_files(folder: Path) -> list[Path]:
  """Return the files that a checkpoint's model is read from, and those beside it that describe the model."""
  tensors = [p for p in folder.rglob('*') if not p.relative_to(folder).parts[0].startswith('state.')]  # the optimizer's
  return tensors + [p for pattern in ('*.gin', 'config.json') for p in folder.parent.glob(pattern)]


def read(
  path, *, dtype: str | None = None, scan: bool = False, activation: str | None = None, mesh=None, rules=None
) -> tuple[Network, Params]:
  """Return the network of a checkpoint and its parameters in `dtype`, or as stored where that is None.

  On a mesh they are cut as `rules` say, and each process reads its own part of them.
  `activation` is the MLPs', in T5X's words, where no gin file beside the checkpoint says it.
  """
  folder = find(Path(path))
  files.check_finished(folder)
  leaves = _leaves(folder)
  parts = t5x_names.parts({name: leaf.shape for name, leaf in leaves.items()}, folder, _own_bias(leaves, folder))
  shapes = {part.name: part.shape for part in parts}
  gated = 'encoder.layers_0.mlp.wi_0.kernel' in shapes
  config = t5x_names.complete(t5x_names.config_of(shapes, folder), folder, gated, activation)
  stored = leaves['token_embedder.embedding'].dtype.name
  network = hf.network_from_config(config, dtype=dtype or stored, scan=scan)
  files.check_shapes(shapes, dataclasses.replace(network, scan=False), folder)
  cut = None if mesh is None else sharding.shardings(network, mesh, rules)
  return network, _load(parts, leaves, dtype, scan, cut)


def _own_bias(leaves: dict[str, _Leaf], folder: Path) -> bool:
  """Tell whether scanned layers have relative biases that differ."""
  shapes = {name: leaf.shape for name, leaf in leaves.items()}
  axis = t5x_names.scan_axis(shapes, folder) if t5x_names.scanned(shapes) else 0
  biases = {name: leaves[name].read() for name in t5x_names.scanned_biases(shapes)}
  leaves |= {name: _of_array(leaves[name].file, x) for name, x in biases.items()}  # read once
  return any((x != x.take([0], axis)).any() for x in biases.values())


def _load(parts: list[t5x_names.Part], leaves: dict[str, _Leaf], dtype, scan: bool, cut: Any = None) -> Params:
  """Read every tensor once, the largest first, and put its parameters in place, on a mesh as they are cut."""
  params: Params = {}
  paths = {part.name: tuple(part.name.split('.')) for part in parts}
  depths = Counter(hf.stacked(path)[0] for path in paths.values()) if scan else {}
  by_source: dict[str, list[t5x_names.Part]] = {}
  for part in parts:
    by_source.setdefault(part.source, []).append(part)
  for source, its_parts in sorted(by_source.items(), key=lambda item: -math.prod(leaves[item[0]].shape)):
    leaf, first = leaves[source], its_parts[0]
    where = None if cut is None else hf.of_layer(cut, paths[first.name], scan)  # the same for all layers
    box = None if cut is None else first.box(shards.box(where, first.shape), leaf.shape)
    data = leaf.read(box)
    for part in its_parts:
      if cut is None:
        value, finite = hf.convert(part.take(data), False, dtype)
      else:
        take = lambda box, part=part, data=data: part.take(data, shards.size(box))
        value, finite = shards.read(part.shape, where, take, dtype)
      if not finite:
        raise ValueError(
          f"{leaf.file}: tensor '{source}' holds NaN or Inf as {value.dtype}: {AGAIN}, or try another dtype"
        )
      hf.place(params, paths[part.name], value, depths, cut)
  return params


def _steps(path: Path) -> list[int]:
  """Return the steps of the finished checkpoints in a folder."""
  found = (_STEP.fullmatch(p.name) for p in path.iterdir()) if path.is_dir() else ()
  return [int(match[1]) for match in found if match]


def _content(path: Path) -> Path | None:
  """Return what holds a checkpoint's tensors, or None."""
  if (path / 'checkpoint').is_file():
    return path / 'checkpoint'
  state = path / 'state'
  return state if state.is_dir() and next(state.iterdir(), None) else None


def _leaves(folder: Path) -> dict[str, _Leaf]:
  """Return the tensors of a checkpoint by their dotted names."""
  content = _content(folder)
  if content is None:
    unfinished = [p.name for p in folder.glob('*.tmp-*')] if folder.is_dir() else []
    found = ', '.join(unfinished or sorted(p.name for p in folder.glob('*'))[:5]) or 'nothing'
    raise FileNotFoundError(
      f"{folder}: a T5X checkpoint has a file 'checkpoint' or a folder 'state', found {found}: {AGAIN}"
    )
  leaves = dict(_msgpack_leaves(content) if content.is_file() else _state_leaves(content))
  if not leaves:
    raise ValueError(f'{content}: no tensor under optimizer/target, target or params: is this a T5X checkpoint?')
  return leaves


def _msgpack_leaves(file: Path) -> Iterator[tuple[str, _Leaf]]:
  """Yield the tensors of a `checkpoint` file and of the zarr folders that it names."""
  tree = _unpack(file)
  for root in _ROOTS:
    target: Any = tree
    for key in root:
      target = target.get(key) if isinstance(target, dict) else None
    if isinstance(target, dict):
      break
  else:
    return
  for name, leaf in _flat(target):
    if isinstance(leaf, dict):
      place = PurePosixPath(str(leaf['kvstore'].get('path') or leaf.get('path', ''))).name
      yield name, _zarr_leaf(name, file.parent / place)
    else:
      yield name, _of_array(file, np.asarray(leaf))


def _of_array(file: Path, x: np.ndarray) -> _Leaf:
  return _Leaf(file, x.shape, x.dtype, lambda box=None: x if box is None else x[box])


def _unpack(file: Path) -> dict:
  """Return what a msgpack file holds; its pages are mapped, so that arrays are not in memory twice."""
  try:
    with file.open('rb') as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
      tree = serialization.msgpack_restore(data)
  except (ValueError, TypeError, KeyError) as error:  # msgpack's own errors are ValueErrors
    size = file.stat().st_size
    raise ValueError(f'{file}: cut off or corrupt msgpack, {size} bytes ({error}): {AGAIN}') from None
  if not isinstance(tree, dict):
    raise ValueError(f'{file}: msgpack of a {type(tree).__name__}, not of a dict: is this a T5X checkpoint?')
  return tree


def _flat(tree: dict, prefix: str = '') -> Iterator[tuple[str, Any]]:
  """Yield the leaves of a target by dotted name: arrays, and specs as dicts."""
  for key, value in tree.items():
    if isinstance(value, dict) and 'kvstore' not in value:
      yield from _flat(value, f'{prefix}{key}.')
    elif value is not None:
      yield prefix + key, value


def _state_leaves(state: Path) -> Iterator[tuple[str, _Leaf]]:
  """Yield the tensors that T5X's Orbax manager wrote, in one OCDBT store or in a folder each."""
  base = {'driver': 'file', 'path': f'{state}/'}
  if (state / 'manifest.ocdbt').is_file():
    with _clear('the store', state):
      keys = [
        key.decode() for key in _tensorstore().KvStore.open({'driver': 'ocdbt', 'base': base}).result().list().result()
      ]
    arrays = [key.removesuffix('/.zarray') for key in keys if key.endswith('/.zarray')]
    kvstores = {array: {'driver': 'ocdbt', 'base': base, 'path': f'{array}/'} for array in arrays}
  else:
    kvstores = {p.parent.name: {'driver': 'file', 'path': f'{p.parent}/'} for p in state.glob('*/.zarray')}
  for array, kvstore in sorted(kvstores.items()):
    root, _, name = array.partition('.')
    if root in ('target', 'params'):
      yield name, open_zarr(name, state, kvstore)


def _zarr_leaf(name: str, folder: Path) -> _Leaf:
  if not (folder / '.zarray').is_file():
    missing = folder / '.zarray' if folder.is_dir() else folder
    raise FileNotFoundError(f"{missing}: missing, it belongs to tensor '{name}': {AGAIN}")
  leaf = open_zarr(name, folder, {'driver': 'file', 'path': f'{folder}/'})
  if leaf.dtype != np.uint16:
    return leaf
  bfloat16 = np.dtype(jnp.bfloat16)  # in version 2 of the format its bits were stored as whole numbers
  return dataclasses.replace(leaf, dtype=bfloat16, read=lambda box=None: leaf.read(box).view(bfloat16))


def open_zarr(name: str, where: Path, kvstore: dict) -> _Leaf:
  """Return a zarr array as a leaf; a chunk that is not there is an error, never zeros."""
  spec = {'driver': 'zarr', 'kvstore': kvstore, 'fill_missing_data_reads': False}
  with _clear(f"tensor '{name}'", where):
    store = _tensorstore().open(spec, open=True).result()

  def read(box=None) -> np.ndarray:
    with _clear(f"tensor '{name}' {list(store.shape)}", where):
      return (store if box is None else store[box]).read().result()

  return _Leaf(where, store.shape, store.dtype.numpy_dtype, read)


def _tensorstore():
  import tensorstore  # lazily: the library is large, and only this format needs it by itself

  return tensorstore


@contextlib.contextmanager
def _clear(what: str, where: Path):
  """Turn tensorstore's errors, which carry their whole spec, into one sentence."""
  try:
    yield
  except (ValueError, OSError, KeyError) as error:
    reason = str(error).split(' [')[0].split(' when ')[0]
    raise ValueError(f'{where}: {what} cannot be read ({reason}): {AGAIN}') from None


def write(path, model: Model, *, step: int | None = None, scan: bool = False, overwrite: bool = False) -> Path:
  """Write a T5 as T5X does, and config.json and the tokenizer beside, which T5X ignores; return the folder.

  It is `path` where that is a `checkpoint_<step>`, else one in it. `scan` writes what T5X's scalable_t5 reads. The
  optimizer's `param_states` are not written, for there are none.
  """
  path = Path(os.path.abspath(path))
  if not isinstance(model.network, T5):
    raise ValueError(f'T5X checkpoints hold a T5, and {model.name} is a {type(model.network).__name__}: write orbax')
  folder, step = _destination(path, step)
  params = unstack_layers(model.params) if model.network.scan else model.params
  if scan:
    params = t5x_names.scan(params, model.network.config)
  with files.whole(folder, overwrite=overwrite) as scratch:
    target = _write_tree(scratch, params, 'target.')
    tree = {'version': 3, 'optimizer': {'target': target, 'state': {'step': np.int32(step)}}}
    (scratch / 'checkpoint').write_bytes(serialization.msgpack_serialize(tree))
    hf_write.write_config(scratch, model.network)
    files.copy_tokenizer(model.tokenizer, scratch)
  return folder


def _destination(path: Path, step: int | None) -> tuple[Path, int]:
  """Return a checkpoint's folder and its step, by default the first that T5X restores without being told: 1."""
  match = _STEP.fullmatch(path.name)
  if match and step not in (None, int(match[1])):
    raise ValueError(f'{path} is not the folder of step {step}: leave one of the two out')
  if step is not None and step < 0:
    raise ValueError(f'step={step} is negative: T5X counts from 0')
  return (
    (path, int(match[1]))
    if match
    else (path / f'checkpoint_{1 if step is None else step}', 1 if step is None else step)
  )


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
  _tensorstore().open(spec | store).result().write(np.asarray(jax.device_get(params))).result()
  return spec | {'kvstore': {'driver': 'file', 'path': f'{name}/'}}
