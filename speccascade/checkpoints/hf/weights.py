"""The tensors of a Hugging Face folder: those of one file, or of the shards that an index lists."""

from collections.abc import Callable
from pathlib import Path

from speccascade.checkpoints import assemble, safetensors_files, torch_files
from speccascade.checkpoints.files import AGAIN, GGUF, OTHERS, read_json

TORCH = 'pytorch_model*.bin'
Reader = Callable[[Path], dict[str, assemble.Tensor]]
_READERS: dict[str, Reader] = {  # by the name of a single file; the first that is there is read
  'model.safetensors': safetensors_files.tensors,
  'pytorch_model.bin': torch_files.tensors,
}


def find(folder: Path) -> tuple[Path, Reader] | None:
  """Return the file of a folder's weights, or their index, and what reads a file of that kind; None without weights."""
  found = ((folder / f'{name}{end}', read) for name, read in _READERS.items() for end in ('', '.index.json'))
  return next(((file, read) for file, read in found if file.exists()), None)


def pattern(folder: Path) -> str:
  """Return the pattern of the files from which the weights of a folder are read."""
  found = find(folder)
  return TORCH if found and found[1] is torch_files.tensors else '*.safetensors'


def tensors(folder: Path) -> dict[str, assemble.Tensor]:
  """Return every tensor of a folder."""
  found = find(folder)
  if found is None:
    raise FileNotFoundError(_nothing(folder))
  file, read = found
  return _sharded(file, read) if file.suffix == '.json' else read(file)


def _nothing(folder: Path) -> str:
  """Return what is wrong with a folder without weights that are read."""
  names = sorted(p.name for p in folder.iterdir() if p.suffix in {'.safetensors', *OTHERS})
  shards = [name for name in names if name.endswith('.safetensors')]
  remedy = 'save it with model.save_pretrained(path, safe_serialization=True)' if names else 'is this the right folder?'
  if shards:
    remedy = f'the index is missing, so perhaps shards are too: {AGAIN}'
  elif any(name.endswith('.gguf') for name in names):
    remedy = GGUF
  single = folder / 'model.safetensors'
  has = ', '.join(shards or names) or 'no weights'
  return f'{single} and {single.name}.index.json do not exist (it has {has}): {remedy}'


def _sharded(path: Path, read: Reader) -> dict[str, assemble.Tensor]:
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
  result: dict[str, assemble.Tensor] = {}
  for file in sorted(set(weight_map.values())):
    found = read(path.parent / file)
    result |= {name: tensor for name, tensor in found.items() if weight_map.get(name, file) == file}
  return result
