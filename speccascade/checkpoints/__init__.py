"""Checkpoints of every format: `load` looks at what a path is."""

from collections.abc import Callable, Sequence
import json
import os
from pathlib import Path, PurePosixPath
from typing import Any

import jax
import jax.numpy as jnp

from speccascade.backends import sharding
from speccascade.checkpoints import digests, files, hf, stored, t5x
from speccascade.checkpoints.hf.family import Family, family, Key
from speccascade.data import files as data_files
from speccascade.data import sources, tokenizers
from speccascade.data.sources import FREQUENT, LOOKUP, MTP, WIDTH
from speccascade.drafters import frequent, frequent_tokens, layerskip, ngram
from speccascade.host import packaged, storage
from speccascade.host.errors import known_as
from speccascade.host.names import meant
from speccascade.models.one_width import one_width
from speccascade.types import check_bits, Model, named_apart

_HF_FILES = '*.json', '*.model', 'merges.txt', '*.jinja'
_DESCRIPTIONS = {'.gin', *tokenizers.SUFFIXES}  # kinds of files next to a checkpoint that describe it
_FORMATS = {'hf': hf, 't5x': t5x}
DTYPES = ('float32', 'bfloat16', 'float16', 'int8')
_EXPECTED = (
  "expected a Hugging Face folder (config.json and *.safetensors), or T5X's checkpoint_<step> or a folder of them"
)
_OF_ORBAX = '_METADATA', '_CHECKPOINT_METADATA', 'manifest.ocdbt'  # one of them is in every checkpoint or item
_ELSEWHERE = 'read it with its own library and pass the module, by speccascade.integrations.by_row.'


@known_as('load', torch_dtype='dtype=…', device_map='mesh=…')
def load(
  path,
  *,
  dtype=None,
  scan: bool = False,
  tokenizer=None,
  name: str | None = None,
  revision: str | None = None,
  activation: str | None = None,
  mesh=None,
  rules=None,
) -> Model:
  """Return the model of a checkpoint, with its tokenizer if there is one, in a dtype that suits this machine.

  Args:
    path: Folder, GGUF file, hub id, as org/name or org/name@REVISION, name of a model of an installed package
      (smollm2), address in a bucket, as gs://…, of which a copy is cached on this machine, or member of a family, as
      family:sums/draft. With @4 at its end it is the first four layers of that model; `load_all` lets them share the
      arrays of the complete model. With @lookup it is prompt lookup, a drafter for that model (`drafters.ngram`). With
      @mtp it is the model's layer of multi-token prediction, a head; with @frequent=FILE it scores only the tokens that
      occur in a text file (`drafters.frequent`); with @width=8 each of its calls has eight tokens a row
      (`models.one_width`).
    dtype: Float32, bfloat16 or float16. None is as stored, but float32 on a CPU, which computes many times slower with
      shorter numbers. Int8 is that of the weights alone, with a scale for each output; activations are as with None.
    scan: Stack the layers, so that one layer is compiled for all.
    tokenizer: Tokenizer, or the path of one, instead of the checkpoint's own.
    name: Name of the model, by default that of its folder.
    revision: Branch, tag or commit of a hub model.
    activation: Activation of the MLPs of a T5X checkpoint, where no gin file next to it has it.
    mesh: Mesh, as `speccascade.mesh` makes it. Each tensor is read straight into its shards; a process reads those of
      its devices.
    rules: `'replicated'`, `'sharded'` or ((logical axis, axis of the mesh or None), …). None shards a model if that
      saves more of a step's time than the collectives take.

  Raises:
    FileNotFoundError: there is no checkpoint at the path, or it lacks a file.
    ValueError: the checkpoint is damaged or not supported, or an argument does not fit it.
  """
  dtype = None if dtype is None else _dtype(dtype)
  quantised = dtype == 'int8'
  if dtype is None or quantised:
    dtype = 'float32' if jax.default_backend() == 'cpu' else None
  settings = dict(scan=scan, tokenizer=tokenizer, name=name, revision=revision, activation=activation)
  model = read(path, dtype=dtype, quantised=quantised, mesh=mesh, rules=rules, **settings)
  if model.tokenizer is not None:
    tokenizers.check_special(model)
  return model


def load_all(paths: Sequence, *, dtype=None, mesh=None, **settings) -> list[Model]:
  """Return the models at paths, with names that differ, those of one checkpoint with the same arrays.

  Args:
    paths: Paths, as `load` takes them.
    dtype: Dtype of all, or one for each, as in 'int8,float32'.
    mesh: As `sharding.of_each` takes it.
    **settings: Settings of `load`.
  """
  loaded: list = []
  each = zip(paths, dtype_of_each(dtype, len(paths)), sharding.of_each(mesh, len(paths)), strict=True)
  return named_apart([load_shared(path, loaded, dtype=own, mesh=on, **settings) for path, own, on in each])


def dtype_of_each(dtype, models: int) -> list:
  """Return the dtype of each model by one for all or, separated by commas, one for each."""
  dtypes = dtype.split(',') if isinstance(dtype, str) else [dtype]
  if len(dtypes) not in (1, models):
    raise ValueError(f'dtype {dtype} has {len(dtypes)} for {models} models: give one for all, or one for each')
  return dtypes * (models if len(dtypes) == 1 else 1)


def load_shared(path, loaded: list, **settings) -> Model:
  """Return the model at a path, with the arrays of the same checkpoint where that was loaded before.

  Args:
    path: Path, as `load` takes it.
    loaded: The checkpoints that were loaded so far, with their settings; this one is added.
    **settings: Settings of `load`.
  """
  base, part = sources.parse(path)
  if part == MTP:
    return load(path, **settings)
  key = (base, settings)
  model = next((model for known, model in loaded if known == key), None)
  if model is None:
    model = load(base, **settings)
    loaded.append((key, model))
  return part_of(model, part)


def part_of(model: Model, part: int | str | None) -> Model:
  """Return the first layers of a model, prompt lookup for it, or it with a cut head or one width; with None all."""
  if part is None:
    return model
  if isinstance(part, int):
    return layerskip.layerskip(model, part)
  if part == LOOKUP:
    made = ngram.drafter(model)
  elif part.startswith(WIDTH):
    made = one_width(model, int(part.removeprefix(WIDTH)))
  else:
    lines = data_files.read_text(part.removeprefix(FREQUENT)).splitlines(keepends=True)
    made = frequent(model, frequent_tokens(model, lines))
  return made.replace(digest=model.digest and _digest_of_part(model.digest, part))


def _digest_of_part(complete: str, part: int | str | None) -> str:
  """Return the digest of a part of a checkpoint by that of the checkpoint."""
  if part is None:
    return complete
  if isinstance(part, int):
    return layerskip.called(complete, part)
  if part.startswith(FREQUENT):
    return storage.digest((complete + data_files.read_text(part.removeprefix(FREQUENT))).encode())
  return f'{complete}@{part}'


def read(
  path,
  *,
  dtype=None,
  quantised=False,
  scan=False,
  tokenizer=None,
  name=None,
  revision=None,
  activation=None,
  **layout,
) -> Model:
  """Return the model of a checkpoint as it is stored, with the arguments of `load`, which decodes faster.

  With `quantised` its weights are int8, and `dtype` is that of the rest.
  """
  check_bits()
  dtype = None if dtype is None else _dtype(dtype)
  if dtype == 'int8':
    dtype, quantised = None, True
  settings = {'dtype': dtype, 'quantised': quantised, 'scan': scan, **layout}
  path, part = sources.parse(path)
  folder, default = _source(path, revision)
  form = kind(folder)
  if form == 't5x':
    folder = t5x.find(folder)
    settings['activation'] = activation
  elif activation is not None:
    raise ValueError(f'activation={activation!r} is for T5X checkpoints, and {folder} is {form}: leave it out')
  files.check_plain(folder.iterdir() if form == 'hf' else folder.rglob('*'))
  if part == MTP and form != 'hf':
    raise ValueError(f'{folder} is {form}, and a layer of multi-token prediction is read of Hugging Face folders')
  network, params = hf.read_mtp(folder, **settings) if part == MTP else _FORMATS[form].read(folder, **settings)
  tokenizer = tokenizers.find(folder) if tokenizer is None else tokenizers.load(tokenizer)
  generation = None if form == 't5x' else hf.generation_config(folder)
  digest_of_files = digest(folder, tokenizer=tokenizer) + '-int8' * quantised
  model = Model(params, network, tokenizer, default, digest_of_files, generation and json.dumps(generation))
  model = model.replace(name=f'{default}@{MTP}') if part == MTP else part_of(model, part)
  return model if name is None else model.replace(name=name)


def digest(path, revision: str | None = None, tokenizer: Any = None) -> str:
  """Return 16 hex digits that identify a checkpoint and its tokenizer, quickly however large it is.

  It reads sizes and heads of files, small files completely, and samples of each tensor.

  Args:
    path: Path, as `load` takes it.
    revision: Branch, tag or commit of a hub model.
    tokenizer: Tokenizer, or the path of one, instead of the checkpoint's own.
  """
  path, part = sources.parse(path)
  folder, _ = _source(path, revision)
  form = kind(folder)
  folder = t5x.find(folder) if form == 't5x' else folder
  files_of_model = {'hf': _files_of_hf, 't5x': t5x.model_files}[form](folder)
  by_name = {os.path.relpath(p, folder): p for p in files_of_model if p.is_file()}
  tokenizer = tokenizers.find(folder) if tokenizer is None else tokenizers.load(tokenizer)
  for file in map(Path, tokenizer.files() if isinstance(tokenizer, tokenizers.Tokenizer) else ()):
    inside = file.is_relative_to(folder)  # the folder of one elsewhere does not count
    by_name[os.path.relpath(file, folder) if inside else f'tokenizer/{file.name}'] = file
  return _digest_of_part(digests.of_files(by_name), part)


def _files_of_hf(folder: Path) -> list[Path]:
  """Return the files that describe a model and those of its weights that are read, whatever else is there."""
  names = {f'{folder.name}/{file.name}': file for file in folder.iterdir() if file.is_file()}
  described = [file for pattern in _HF_FILES for file in folder.glob(pattern) if not file.name.endswith('.index.json')]
  return [*described, *(names[name] for name in hf.reader.choose([*names], lambda name: names[name].read_bytes()))]


def kind(folder: Path) -> str:
  """Return the format of a folder, 'hf' or 't5x', or raise with a list of what is in it."""
  files.check_finished(folder)
  try:
    names = sorted(p.name + '/' * p.is_dir() for p in folder.iterdir())
  except PermissionError:
    raise PermissionError(f'{folder} cannot be read: change its permissions, or copy it') from None
  if 'adapter_config.json' in names:
    alone = 'is an adapter and no model' if 'config.json' not in names else 'has an adapter, which is not applied'
    remedy = "merge it, by peft's model.merge_and_unload().save_pretrained(PATH), and give PATH"
    without = '' if 'config.json' not in names else ', or move adapter_config.json away, for the model without it'
    raise ValueError(f'{folder} {alone}: {remedy}{without}')
  weights = any(name.endswith('.safetensors') for name in names)
  if 'task.json' in names or 'model.weights.h5' in names:
    raise ValueError(f'{folder} is a preset of Keras: {_ELSEWHERE}keras_hub(causal_lm)')
  if t5x.is_checkpoint(folder) and not weights:
    return 't5x'
  if 'config.json' in names or weights:
    return 'hf'
  if any(map(sources.is_gguf, names)):
    raise ValueError(f'{folder} is no checkpoint: {files.GGUF}')
  own = [p for p in sorted(folder.iterdir()) if (p / 'config.json').is_file()]
  if not own and any(x for depth in ('', '*/', '*/*/') for name in _OF_ORBAX for x in folder.glob(f'{depth}{name}')):
    raise ValueError(f'{folder} is of Orbax, as gemma, Tunix and MaxText write it: {_ELSEWHERE}tunix(module)')
  some = ', '.join(names[:8]) + (f' and {len(names) - 8} more' if len(names) > 8 else '')
  hint = f'; did you mean {own[0]}?' if own else ''
  raise ValueError(f'{folder} is no checkpoint: it has {some or "an empty folder"}, {_EXPECTED}{hint}')


def _source(path, revision: str | None = None) -> sources.Source:
  """Return an existing folder for the source of a model, with the name of the model."""
  if storage.is_address(path) and not sources.is_gguf(path):  # of a bucket, the latest step is copied here
    with storage.client_errors():
      path = str(t5x.find(storage.resolve(path)))
  found = sources.find(path, _read_files, ['hf_tokenizer'], revision=revision)
  if found.path.is_file():
    raise NotADirectoryError(f'{found.path} is a file: pass its folder, {found.path.parent}')
  if not found.path.is_dir():
    files.check_finished(found.path)
    named = ' or '.join(packaged.MODELS)
    near = meant(found.path.name, packaged.MODELS)
    raise FileNotFoundError(
      f'{found.path} does not exist: {_EXPECTED}, a GGUF file, a hub id as org/name, or the name {named}{near}'
    )
  return found


def folder_of(path) -> Path:
  """Return the folder of the source of a model, on this machine."""
  return _source(sources.parse(path)[0]).path


def _read_files(names: Sequence[str], read: Callable[[str], bytes]) -> list[str]:
  """Choose the files of a checkpoint that `load` reads, of weights in several formats those of one."""
  found = sources.described(names, _DESCRIPTIONS)
  inside = [name for name in names if name.count('/') == 1]
  if weights := hf.reader.choose(inside, read):
    return [*found, *weights]
  if any(map(sources.is_gguf, inside)):
    raise ValueError(f'{inside[0].partition("/")[0]} is no checkpoint: {files.GGUF}')
  if len(inside) == len(names) and any(name.endswith('/config.json') for name in inside):
    raise FileNotFoundError(f'{inside[0].partition("/")[0]} has no weights here')
  below = [name for name in names if '/' in name and not name.split('/')[1].startswith('state.')]
  return [*dict.fromkeys([*found, *(name for name in below if PurePosixPath(name).suffix not in files.OTHERS)])]


def _dtype(dtype) -> str:
  try:
    name = jnp.dtype(dtype).name
  except TypeError:
    name = str(dtype)
  if name not in DTYPES:
    raise ValueError(f'dtype {name}: choose from {", ".join(DTYPES)}')
  return name
