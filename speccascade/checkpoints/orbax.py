"""Our own checkpoints: parameters as Orbax writes them, their network, the tokenizer and the generation config.

  <path>/speccascade.json   the network; shape, dtype and CRC-32 of every tensor; size and CRC-32 of every file; its own
  <path>/params/            Orbax
  <path>/…                  the tokenizer's files and generation_config.json

A process reads the shards of its devices, so a mesh can load a model that fits on no single device.
"""

import contextlib
import dataclasses
import json
import os
from pathlib import Path
from typing import Any
import zlib

import jax
import numpy as np

from speccascade.checkpoints import assemble, files, stored
from speccascade.checkpoints.files import AGAIN, read_json
from speccascade.drafters.eagle import Eagle, HeadConfig
from speccascade.drafters.hidden import Head
from speccascade.drafters.medusa import Medusa, MedusaConfig
from speccascade.host import multihost, streams
from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.models.rope import Rope
from speccascade.models.t5 import T5, T5Config, T5GemmaConfig
from speccascade.types import Model, Network, Params

SIDECAR = 'speccascade.json'
_FORMAT = 1
_NETWORKS = T5, T5Config, T5GemmaConfig, Decoder, DecoderConfig, Span, Rope, Eagle, HeadConfig, Medusa, MedusaConfig
_CLASSES = {cls.__name__: cls for cls in _NETWORKS}


def is_checkpoint(path: Path) -> bool:
  """Tell whether a folder is a checkpoint of ours, complete or damaged."""
  return (path / SIDECAR).is_file() or (path / 'params' / '_METADATA').is_file()


def save(path, model: Model, *, overwrite: bool = False) -> Path:
  """Write a model, all of it or nothing. Several processes all call this, and the first writes.

  Args:
    path: Folder to write.
    model: The model.
    overwrite: Replace a checkpoint of ours that is there.

  Returns:
    The folder.

  Raises:
    FileExistsError: the folder exists and may not be replaced.
    ValueError: the model's network has no parameters of its own.
  """
  files.check_floats(model)
  path = Path(os.path.abspath(path))  # a relative path fails in Orbax's background thread, without an error
  model = model.replace(params=multihost.to_host(model.params))
  multihost.once(lambda: _save(path, model, overwrite))
  return path


def _save(path: Path, model: Model, overwrite: bool):
  sidecar = {'format': _FORMAT, 'network': _encode(model.network)}
  with files.atomic_dir(path, overwrite=overwrite) as scratch:
    with _checkpointer() as checkpointer:
      checkpointer.save(scratch / 'params', model.params)
    files.copy_tokenizer(model.tokenizer, scratch)
    files.write_generation(model, scratch)
    sidecar['tensors'] = files.facts(model.params)
    sidecar['files'] = {
      str(p.relative_to(scratch)): [p.stat().st_size, files.file_checksum(p)]
      for p in sorted(scratch.rglob('*'))
      if p.is_file()
    }
    sidecar['crc32'] = _own_checksum(sidecar)
    (scratch / SIDECAR).write_text(json.dumps(sidecar, indent=1) + '\n', encoding='utf-8')


def read(
  path, *, mesh=None, rules=None, dtype: str | None = None, quantised: bool = False, scan: bool | None = None
) -> tuple[Network, Params]:
  """Return the network of a checkpoint and its parameters; the other arguments are those of `hf.read`.

  Args:
    path: Folder of the checkpoint.
    dtype: Dtype of the parameters and the network; None for those that were saved.
    scan: Stack the layers or not; None for as they were saved.

  Raises:
    ValueError: the checkpoint is damaged or of another version.
  """
  path = Path(os.path.abspath(path))
  sidecar = _sidecar(path)
  network = _decode(sidecar['network'], path)
  network = dataclasses.replace(network, dtype=dtype or network.dtype)
  if scan is not None and not isinstance(network, Head):  # a head has no layers to stack
    network = dataclasses.replace(network, scan=scan)
  network = assemble.quantised(network) if quantised else network
  tensors = {name: _checked(path, name, sidecar) for name in sidecar['tensors']}
  entries = assemble.plan_by_own_names(network, tensors)
  assemble.check(entries, tensors, network, path / SIDECAR)
  params = assemble.read(network, entries, tensors, dtype=dtype, mesh=mesh, rules=rules)
  if damage := _damage(path, sidecar, tensors=False):
    raise ValueError(f'{damage}: {AGAIN}')
  return network, params


def _checked(path: Path, name: str, sidecar: dict) -> stored.Tensor:
  """Return a tensor that is compared with its checksum where all of it is read."""
  folder = path / 'params'
  facts = sidecar['tensors'][name]
  shape = tuple(facts['shape'])

  def read(box: stored.Box | None = None) -> np.ndarray:
    try:
      x = stored.of_zarr(name, folder, stored.ocdbt(folder, f'{name}/')).read(box)
    except ValueError:
      x = None
    if x is None or x.shape == shape and files.checksum(x) != facts['crc32']:
      damage = _damage(path, sidecar, tensors=True) or folder
      raise ValueError(f"{damage}: tensor '{name}' cannot be read as it was: {AGAIN}")
    return x

  return stored.Tensor(folder, name, shape, facts['dtype'], read)


def _damage(path: Path, sidecar: dict, *, tensors: bool) -> str | None:
  """Return the first file that is not as it was written, and what is wrong; checksums of tensors' files on request."""
  for name, (size, crc) in sidecar['files'].items():
    file = path / name
    if not file.is_file():
      return f'{file} is missing, half-copied'
    if file.stat().st_size != size:
      return f'{file} has {file.stat().st_size} bytes, expected {size}, truncated'
    if (tensors or not name.startswith('params/')) and files.file_checksum(file) != crc:
      return f'{file} is not as it was written, corrupt'
  if sidecar.get('crc32') not in (None, _own_checksum(sidecar)):  # older checkpoints have none
    return f'{path / SIDECAR} is not as it was written, corrupt'
  return None


def _own_checksum(sidecar: dict) -> int:
  """Return the CRC-32 of what the sidecar states."""
  stated = {key: value for key, value in sidecar.items() if key != 'crc32'}
  return zlib.crc32(json.dumps(stated, sort_keys=True).encode())


def _sidecar(path: Path) -> dict:
  """Return the content of speccascade.json, or raise where the checkpoint is half-written or of another version."""
  files.check_finished(path)
  file = path / SIDECAR
  if not file.is_file():
    raise ValueError(f'{file} is missing: half-written or half-copied, {AGAIN}')
  sidecar = read_json(file)
  missing = [key for key in ('format', 'network', 'tensors', 'files') if key not in sidecar]
  if missing or sidecar['format'] != _FORMAT:
    problem = f"lacks '{missing[0]}'" if missing else f'has format {sidecar["format"]}'
    raise ValueError(f'{file} {problem}, expected format {_FORMAT}: update speccascade, or {AGAIN}')
  return sidecar


@contextlib.contextmanager
def _checkpointer():
  """Yield Orbax's checkpointer for this process alone, without its hints for a single process."""
  import orbax.checkpoint as ocp  # lazily: a second of imports that other formats do not need

  options = {}
  if multihost.count() > 1:
    index = jax.process_index()
    options['multiprocessing_options'] = ocp.options.MultiprocessingOptions(index, {index})
  with streams.errors_alone('absl'), ocp.StandardCheckpointer(**options) as checkpointer:
    yield checkpointer


def _encode(x: Any) -> Any:
  """Return a network as JSON: its classes by name, their fields by name."""
  if dataclasses.is_dataclass(x):
    if _CLASSES.get(type(x).__name__) is not type(x):
      raise ValueError(
        f'a {type(x).__name__} cannot be saved, only {", ".join(_CLASSES)}: save the model it is made of'
      )
    names = [f.name for f in dataclasses.fields(x) if f.repr]  # a backend is no part of a checkpoint
    return {'class': type(x).__name__} | {name: _encode(getattr(x, name)) for name in names}
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
