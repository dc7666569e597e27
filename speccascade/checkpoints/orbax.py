"""Our own checkpoints: parameters as Orbax keeps them, what they are parameters of, and the tokenizer.

  <path>/speccascade.json   the network; shape, dtype and CRC-32 of every tensor; size and CRC-32 of every file
  <path>/params/            Orbax
  <path>/…                  the tokenizer's files

Orbax restores each device's share only, so a model that fits on no single device can be read onto a mesh.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from speccascade.checkpoints import files, hf, t5x
from speccascade.checkpoints.tensor_files import AGAIN, read_json
from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.models.layers import stack_layers, unstack_layers
from speccascade.models.rope import Rope
from speccascade.models.t5 import T5, T5Config
from speccascade.types import Model, Network, Params

SIDECAR = 'speccascade.json'
_FORMAT = 1
_CLASSES = {cls.__name__: cls for cls in (T5, T5Config, Decoder, DecoderConfig, Span, Rope)}


def is_checkpoint(path: Path) -> bool:
  """Tell whether a folder is a checkpoint of ours, whole or damaged."""
  return (path / SIDECAR).is_file() or (path / 'params' / '_METADATA').is_file()


def save(path, model: Model, *, overwrite: bool = False) -> Path:
  """Write a model, all of it or nothing, from one process; return the folder."""
  if jax.process_count() > 1:
    raise ValueError(f'{path}: {jax.process_count()} processes cannot save together yet, save from one')
  sidecar = {'format': _FORMAT, 'network': _encode(model.network)}
  path = Path(os.path.abspath(path))  # a relative path fails in Orbax's background thread, unheard
  tensors = files.named(model.params)
  with files.whole(path, overwrite=overwrite) as scratch:
    with _checkpointer() as checkpointer:
      checkpointer.save(scratch / 'params', model.params)
    files.copy_tokenizer(model.tokenizer, scratch)
    sidecar['tensors'] = {
      name: {'shape': list(x.shape), 'dtype': x.dtype.name, 'crc32': files.checksum(np.asarray(x))}
      for name, x in tensors.items()
    }
    sidecar['files'] = {
      str(p.relative_to(scratch)): [p.stat().st_size, files.file_checksum(p)]
      for p in sorted(scratch.rglob('*'))
      if p.is_file()
    }
    (scratch / SIDECAR).write_text(json.dumps(sidecar, indent=1) + '\n', encoding='utf-8')
  return path


def read(path, *, mesh=None, rules=None, dtype: str | None = None, scan: bool | None = None) -> tuple[Network, Params]:
  """Return a checkpoint's network and parameters, in the dtype and the scan of their saving unless told otherwise.

  With a mesh, each parameter is sharded as `rules` map its logical axes, ((logical, mesh axis or None), …).
  """
  path = Path(os.path.abspath(path))
  sidecar = _sidecar(path)
  network = _decode(sidecar['network'], path)
  shapes = {name: tuple(tensor['shape']) for name, tensor in sidecar['tensors'].items()}
  files.check_shapes(shapes, network, path / SIDECAR)
  _check_sizes(path, sidecar)
  if mesh is None:
    params = _read_here(path, sidecar, dtype)
  else:
    params = _read_sharded(path, sidecar, network, mesh, rules, dtype)
  if scan is not None and scan != network.scan:
    params, network = (stack_layers if scan else unstack_layers)(params), dataclasses.replace(network, scan=scan)
  return (network if dtype is None else dataclasses.replace(network, dtype=dtype)), params


def _sidecar(path: Path) -> dict:
  """Return what a checkpoint says of itself, or raise where it is half-written or of another version."""
  files.check_finished(path)
  file = path / SIDECAR
  if not file.is_file():
    raise ValueError(f'{file} is missing: half-written or half-copied, {AGAIN}')
  sidecar = read_json(file)
  missing = [key for key in ('format', 'network', 'tensors', 'files') if key not in sidecar]
  if missing or sidecar['format'] != _FORMAT:
    found = f"lacks '{missing[0]}'" if missing else f'has format {sidecar["format"]}'
    raise ValueError(f'{file} {found}, expected format {_FORMAT}: update speccascade, or {AGAIN}')
  return sidecar


def _check_sizes(path: Path, sidecar: dict) -> None:
  """Raise for the first file that is missing or cut off, naming a tensor that is lost by it."""
  for name, (size, _) in sidecar['files'].items():
    file = path / name
    found = file.stat().st_size if file.is_file() else None
    if found != size:
      state = 'is missing, half-copied' if found is None else f'has {found} bytes, expected {size}, cut off'
      raise ValueError(f'{file} {state}{_first_lost(path, sidecar)}: {AGAIN}')


def _first_lost(path: Path, sidecar: dict) -> str:
  """Return words that name the first tensor that is not as it was written, if any."""
  lost = (name for name in sidecar['tensors'] if _read_tensor(path, sidecar, name) is None)
  return next((f" (tensor '{name}' is lost)" for name in lost), '')


def _read_tensor(path: Path, sidecar: dict, name: str) -> np.ndarray | None:
  """Return a tensor out of Orbax's store, or None where it is not what was written."""
  base = {'driver': 'file', 'path': f'{path / "params"}/'}
  try:
    x = t5x.open_zarr(name, path, {'driver': 'ocdbt', 'base': base, 'path': f'{name}/'}).read()
  except ValueError:
    return None
  return x if files.checksum(x) == sidecar['tensors'][name]['crc32'] else None


def _read_here(path: Path, sidecar: dict, dtype: str | None) -> Params:
  """Return the parameters on this device, read one by one, the largest first: Orbax would hold half of them twice."""
  tensors = dict.fromkeys(sidecar['tensors'])
  for name in sorted(tensors, key=lambda name: -math.prod(sidecar['tensors'][name]['shape'])):
    x = _read_tensor(path, sidecar, name)
    if x is None:
      file = _damaged(path, sidecar) or path / 'params'
      raise ValueError(f"{file}: tensor '{name}' is not as it was written, corrupt: {AGAIN}")
    tensors[name] = _finite(name, x, path, dtype)
  return files.nested(tensors)


def _read_sharded(path: Path, sidecar: dict, network: Network, mesh, rules, dtype: str | None) -> Params:
  """Return the parameters on a mesh, each device with its share.

  Files are checked before Orbax, which reports damage from many threads at once; not by several processes, each of
  which would read everything for it.
  """
  targets = _targets(network, sidecar['tensors'], mesh, rules)
  if jax.process_count() == 1 and (file := _damaged(path, sidecar)):
    raise ValueError(f'{file} does not have its CRC-32, corrupt{_first_lost(path, sidecar)}: {AGAIN}')
  with _checkpointer() as checkpointer:
    tensors = files.named(checkpointer.restore(path / 'params', targets))
  for name in list(tensors):
    tensors[name] = _finite(name, tensors[name], path, dtype)
  return files.nested(tensors)


def _damaged(path: Path, sidecar: dict) -> Path | None:
  """Return the first file whose CRC-32 is not that of its writing."""
  damaged = (name for name, (_, crc) in sidecar['files'].items() if files.file_checksum(path / name) != crc)
  return next((path / name for name in damaged), None)


def _finite(name: str, x, path: Path, dtype: str | None) -> jax.Array:
  value, finite = hf.convert(x, False, dtype)
  if not finite:
    raise ValueError(
      f"{path / 'params'}: tensor '{name}' holds NaN or Inf as {value.dtype}: {AGAIN}, or try another dtype"
    )
  return value


def _targets(network: Network, tensors: dict, mesh, rules) -> Params:
  """Return the shape, dtype and sharding with which each tensor is read."""
  axes = files.named(network.param_axes())
  targets = {}
  for name, tensor in tensors.items():
    sharding = _sharding(name, tensor['shape'], axes[name], mesh, rules)
    targets[name] = jax.ShapeDtypeStruct(tuple(tensor['shape']), jnp.dtype(tensor['dtype']), sharding=sharding)
  return files.nested(targets)


def _sharding(name: str, shape, axes, mesh, rules) -> jax.sharding.NamedSharding:
  """Return a tensor's sharding, or one clear error where its shape does not divide."""
  if rules is None:
    raise ValueError('a mesh needs rules=((logical axis, mesh axis or None), …) to shard parameters by')
  sharding = nn.logical_to_mesh_sharding(axes, mesh, list(rules))
  for size, logical, place in zip(shape, axes, sharding.spec):
    count = int(np.prod([mesh.shape[axis] for axis in (place if isinstance(place, tuple) else (place,)) if axis]))
    if size % count:
      raise ValueError(
        f"tensor '{name}' {list(shape)}: axis '{logical}' of {size} does not divide over {count} devices ({place}): "
        f"map '{logical}' to None in the rules, or use another mesh"
      )
  return sharding


@contextlib.contextmanager
def _checkpointer():
  """Yield Orbax's checkpointer, without its remarks on how a single process should use it."""
  import orbax.checkpoint as ocp  # lazily: a second of imports that other formats do not need

  logger = logging.getLogger('absl')
  level = logger.level
  logger.setLevel(logging.ERROR)
  try:
    with ocp.StandardCheckpointer() as checkpointer:
      yield checkpointer
  finally:
    logger.setLevel(level)


def _encode(x: Any) -> Any:
  """Return a network as JSON: its classes by name, their fields by name."""
  if dataclasses.is_dataclass(x):
    if _CLASSES.get(type(x).__name__) is not type(x):
      raise ValueError(
        f'a {type(x).__name__} cannot be saved, only {", ".join(_CLASSES)}: save the model it is made of'
      )
    return {'class': type(x).__name__} | {f.name: _encode(getattr(x, f.name)) for f in dataclasses.fields(x)}
  return [_encode(y) for y in x] if isinstance(x, tuple) else x


def _decode(x: Any, path: Path) -> Any:
  """Undo `_encode`."""
  if isinstance(x, list):
    return tuple(_decode(y, path) for y in x)
  if not isinstance(x, dict):
    return x
  fields = {name: _decode(y, path) for name, y in x.items() if name != 'class'}
  try:
    return _CLASSES[x['class']](**fields)
  except (KeyError, TypeError) as error:
    raise ValueError(f"{path / SIDECAR}: unknown network '{x.get('class')}' ({error}): update speccascade") from None
