"""Our own checkpoints: parameters as Orbax keeps them, what they are parameters of, and the tokenizer.

  <path>/speccascade.json   the network; shape, dtype and CRC-32 of every tensor; size and CRC-32 of every file
  <path>/params/            Orbax
  <path>/…                  the tokenizer's files

Of each tensor a process reads what its devices hold, so a model that fits on no single device is read onto a mesh.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from speccascade.backends import sharding
from speccascade.checkpoints import files, hf, shards, t5x
from speccascade.checkpoints.tensor_files import AGAIN, read_json
from speccascade.host import multihost
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
  """Write a model, all of it or nothing; return the folder. Several processes all call this, and the first writes."""
  path = Path(os.path.abspath(path))  # a relative path fails in Orbax's background thread, unheard
  model = model.replace(params=multihost.to_host(model.params))
  multihost.once(lambda: _save(path, model, overwrite))
  return path


def _save(path: Path, model: Model, overwrite: bool):
  sidecar = {'format': _FORMAT, 'network': _encode(model.network)}
  tensors = files.named(model.params)
  with files.whole(path, overwrite=overwrite) as scratch:
    with _checkpointer(alone=True) as checkpointer:
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


def read(path, *, mesh=None, rules=None, dtype: str | None = None, scan: bool | None = None) -> tuple[Network, Params]:
  """Return a checkpoint's network and parameters, in the dtype and the scan of their saving unless told otherwise.

  On a mesh they are cut as `rules` say, and each process reads its own part of them.
  """
  path = Path(os.path.abspath(path))
  sidecar = _sidecar(path)
  network = _decode(sidecar['network'], path)
  shapes = {name: tuple(tensor['shape']) for name, tensor in sidecar['tensors'].items()}
  files.check_shapes(shapes, network, path / SIDECAR)
  _check_sizes(path, sidecar)
  params = _read_all(path, sidecar, dtype, None if mesh is None else sharding.shardings(network, mesh, rules))
  if scan is not None and scan != network.scan:
    params, network = (stack_layers if scan else unstack_layers)(params), dataclasses.replace(network, scan=scan)
    params = params if mesh is None else jax.device_put(params, sharding.shardings(network, mesh, rules))
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


def _read_tensor(path: Path, sidecar: dict, name: str, box: shards.Box | None = None) -> np.ndarray | None:
  """Return a tensor out of Orbax's store, or a part; None where it is not what was written, as far as that is told."""
  base = {'driver': 'file', 'path': f'{path / "params"}/'}
  try:
    x = t5x.open_zarr(name, path, {'driver': 'ocdbt', 'base': base, 'path': f'{name}/'}).read(box)
  except ValueError:
    return None
  tensor = sidecar['tensors'][name]
  return x if x.shape != tuple(tensor['shape']) or files.checksum(x) == tensor['crc32'] else None


def _read_all(path: Path, sidecar: dict, dtype: str | None, cut: Any = None) -> Params:
  """Return the parameters, on a mesh as they are cut, read one by one, the largest first.

  Orbax would hold half of them twice. What a process reads whole is compared with its checksum.
  """
  tensors = dict.fromkeys(sidecar['tensors'])
  cut = None if cut is None else files.named(cut)

  def take(name: str, box=None) -> np.ndarray:
    x = _read_tensor(path, sidecar, name, box)
    if x is None:
      file = _damaged(path, sidecar) or path / 'params'
      raise ValueError(f"{file}: tensor '{name}' is not as it was written, corrupt: {AGAIN}")
    return x

  for name in sorted(tensors, key=lambda name: -math.prod(sidecar['tensors'][name]['shape'])):
    if cut is None:
      value, finite = hf.convert(take(name), False, dtype)
    else:
      shape = tuple(sidecar['tensors'][name]['shape'])
      value, finite = shards.read(shape, cut[name], functools.partial(take, name), dtype)
    if not finite:
      raise ValueError(
        f"{path / 'params'}: tensor '{name}' holds NaN or Inf as {value.dtype}: {AGAIN}, or try another dtype"
      )
    tensors[name] = value
  return files.nested(tensors)


def _damaged(path: Path, sidecar: dict) -> Path | None:
  """Return the first file whose CRC-32 is not that of its writing."""
  damaged = (name for name, (_, crc) in sidecar['files'].items() if files.file_checksum(path / name) != crc)
  return next((path / name for name in damaged), None)


@contextlib.contextmanager
def _checkpointer(*, alone: bool = False):
  """Yield Orbax's checkpointer, without its remarks on how a single process should use it; `alone` among several."""
  import orbax.checkpoint as ocp  # lazily: a second of imports that other formats do not need

  logger = logging.getLogger('absl')
  level = logger.level
  logger.setLevel(logging.ERROR)
  try:
    options = {}
    if alone and multihost.count() > 1:
      index = jax.process_index()
      options['multiprocessing_options'] = ocp.options.MultiprocessingOptions(index, {index})
    with ocp.StandardCheckpointer(**options) as checkpointer:
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
