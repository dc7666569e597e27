"""GGUF files, the format of llama.cpp, as Hugging Face folders: what their metadata says becomes config.json.

The folder is in the cache: config.json, the tokenizer's files, tensors.json, which says where each tensor lies in the
file, and a link to the file. What reads Hugging Face folders goes on from there. The package `gguf` reads a file once,
since it takes seconds for a vocabulary.
"""

from collections.abc import Callable, Mapping
import importlib.metadata
import json
import math
from pathlib import Path
import tempfile
from typing import Any, NamedTuple

import numpy as np

from speccascade.data import gguf_tokenizer
from speccascade.data.gguf_metadata import Metadata
from speccascade.host import storage
from speccascade.host.errors import first_line, RunError

WEIGHTS = 'model.gguf'  # the link in the folder
TENSORS = 'tensors.json'
_AGAIN = 'copy or download it again'
_NO_MATTER = ('vocab_size', 'tensor_data_layout', 'rope.scaling.finetuned', 'expert_used_count')  # for the texts
_LLAMA3 = {'low_freq_factor': 1.0, 'high_freq_factor': 4.0}  # of every Llama 3
_LLAMA3_CONTEXT = 8192  # before stretching
_WIDE = {'gemma2': 46, 'gemma3': 62}  # layers of the 27B, whose scores are scaled by the width of the model


class Architecture(NamedTuple):
  """An architecture of llama.cpp that is read: its model_type of Hugging Face, and the keys of config.json it adds."""

  model_type: str
  more: Callable[[Metadata, Mapping[str, Any]], dict[str, Any]]  # of the metadata and the tensors by name


def folder(file: Path) -> Path:
  """Return the Hugging Face folder of a GGUF file, made once for each version of the file and of this module.

  Raises:
    ValueError: the file is damaged or not supported, or the package `gguf` is not installed.
  """
  cache = storage.cache_folder('gguf')
  if cache is None:
    raise RunError(f'{file} has no place for its config.json, for no home is known: set XDG_CACHE_HOME to a folder.')
  about = file.stat()
  made = cache / storage.digest_of_json([str(file), about.st_size, about.st_mtime_ns, _version()]) / file.stem
  if not made.exists():
    contents = _contents(file)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
      part = Path(scratch) / 'made' / file.stem
      for name, content in contents.items():
        (part / name).parent.mkdir(parents=True, exist_ok=True)
        storage.write(part / name, content)
      (part / WEIGHTS).symlink_to(file)
      storage.rename_new(part.parent, made.parent)
  return made


def _version() -> str:
  """Return what changes with the modules that write the folder."""
  modules = (Path(__file__).with_name(name) for name in ('gguf.py', 'gguf_metadata.py', 'gguf_tokenizer.py'))
  return storage.digest(b''.join(module.read_bytes() for module in modules))


# ---- the file ----


def library() -> Any:
  """Return the package that reads GGUF files, or raise where it is not installed."""
  try:
    import gguf  # lazily: it is an extra
  except ImportError as error:
    raise ValueError(f"GGUF files are read by the package gguf ({error}): pip install 'speccascade[gguf]'") from None
  return gguf


def _opened(file: Path) -> Any:
  """Return the library's reader of a file, which has read the metadata and no weights."""
  with file.open('rb') as f:
    if (begin := f.read(4)) != b'GGUF':
      raise ValueError(f'{file} is no GGUF file, it begins with {begin!r}: {_AGAIN}')
  gguf = library()
  try:
    reader = gguf.GGUFReader(file)
  except Exception as error:  # the library raises whatever numpy does
    reason = first_line(error, named=True)
    if gguf.GGMLQuantizationType.__name__ in reason:
      raise ValueError(
        f'{file} has tensors of a type that gguf {importlib.metadata.version("gguf")} does not know ({reason}): '
        'pip install -U gguf, or give a file of another quantisation'
      ) from None
    raise ValueError(
      f'{file} is truncated or corrupt, it has {file.stat().st_size} bytes ({reason}): {_AGAIN}'
    ) from None
  if reader.byte_order != 'I':
    raise ValueError(f'{file} has its numbers in the other order of bytes: give one that was made for this machine')
  return reader


def _metadata_of(file: Path, reader: Any) -> Metadata:
  """Return the metadata of a file that is complete and of an architecture that is read, or raise."""
  metadata = Metadata(file, {key: field.contents() for key, field in reader.fields.items()})
  parts = metadata.integer('split.count', 0)
  if parts > 1:
    raise ValueError(
      f'{file} is one of {parts} files of a model: join them, by llama-gguf-split --merge FIRST OUT.gguf, and give OUT'
    )
  if (kind := metadata.text('general.type', 'model')) != 'model':
    raise ValueError(f"{file} is of the type '{kind}' and no model: give the file of the model")
  if metadata.architecture not in ARCHITECTURES:
    raise ValueError(
      f"{file} has the architecture '{metadata.architecture}', and {', '.join(ARCHITECTURES)} are read of GGUF: give "
      'the Hugging Face folder that it was made of'
    )
  return metadata


def _contents(file: Path) -> dict[str, str | bytes]:
  """Return the files of the folder by name."""
  reader = _opened(file)
  metadata = _metadata_of(file, reader)
  config = config_of(metadata, {tensor.name: tensor for tensor in reader.tensors})
  written = {'config.json': config, TENSORS: {tensor.name: _place(tensor) for tensor in reader.tensors}}
  return {name: json.dumps(x, indent=2) + '\n' for name, x in written.items()} | gguf_tokenizer.files(metadata)


def _place(tensor: Any) -> dict[str, Any]:
  """Return where a tensor lies, its type, the shape and dtype of what lies there, and its shape."""
  lies = {'offset': int(tensor.data_offset), 'stored': tensor.data.shape, 'dtype': tensor.data.dtype.name}
  return {'kind': tensor.tensor_type.name, **lies, 'shape': [int(n) for n in reversed(tensor.shape)]}


# ---- config.json ----


def config_of(metadata: Metadata, tensors: Mapping[str, Any]) -> dict[str, Any]:
  """Return the config.json of a file's metadata and tensors by name; a setting that is not known is an error."""
  architecture = ARCHITECTURES[metadata.architecture]
  if 'token_embd.weight' not in tensors:
    raise ValueError(f"{metadata.file} has no tensor 'token_embd.weight': {_AGAIN}")
  size, heads = metadata.own_integer('embedding_length'), metadata.own_integer('attention.head_count')
  head_dim = metadata.own_integer('attention.key_length', size // max(heads, 1))
  for key in ('attention.value_length', 'rope.dimension_count'):
    metadata.expect(key, metadata.own_integer(key, head_dim), head_dim)
  metadata.expect('expert_count', metadata.own_integer('expert_count', 0), 0)
  ids = {key: metadata.integer(f'tokenizer.ggml.{name}', None) for key, name in _IDS.items()}
  config = {
    'model_type': architecture.model_type,
    'vocab_size': int(tensors['token_embd.weight'].shape[-1]),
    'hidden_size': size,
    'intermediate_size': metadata.own_integer('feed_forward_length'),
    'num_hidden_layers': metadata.own_integer('block_count'),
    'num_attention_heads': heads,
    'num_key_value_heads': metadata.own_integer('attention.head_count_kv', heads),
    'head_dim': head_dim,
    'rms_norm_eps': metadata.own_number('attention.layer_norm_rms_epsilon'),
    'max_position_embeddings': metadata.own_integer('context_length'),
    'rope_scaling': _scaling(metadata, tensors, head_dim),
    'tie_word_embeddings': 'output.weight' not in tensors,
    **ids,
    'eos_token_id': gguf_tokenizer.eos_ids(metadata) or None,
    **architecture.more(metadata, tensors),
  }
  if (theta := metadata.own_number('rope.freq_base', None)) is not None:
    config['rope_theta'] = theta
  metadata.refuse_others(_NO_MATTER)
  return config


_IDS = {'bos_token_id': 'bos_token_id', 'pad_token_id': 'padding_token_id'}


def _scaling(m: Metadata, tensors: Mapping[str, Any], head_dim: int) -> dict[str, Any] | None:
  """Return how positions are stretched, as config.json has it."""
  kind = m.own_text('rope.scaling.type', 'none')
  factor = m.own_number('rope.scaling.factor', None)
  original = m.own_integer('rope.scaling.original_context_length', None)
  if (old := m.own_number('rope.scale_linear', None)) is not None:
    kind, factor = 'linear', old
  if 'rope_freqs.weight' in tensors:
    m.expect('rope.scaling.type', kind, 'none')
    return _llama3(m, np.asarray(tensors['rope_freqs.weight'].data), original or _LLAMA3_CONTEXT, head_dim)
  if kind == 'none':
    return None
  if kind not in ('linear', 'yarn') or factor is None:
    m.refuse('rope.scaling.type', f'{kind}' if factor is not None else f'{kind} without a factor', 'linear and yarn')
  stated = {'rope_type': kind, 'factor': factor}
  if kind == 'yarn':
    numbers = {key: m.own_number(f'rope.scaling.yarn_{key}', None) for key in ('beta_fast', 'beta_slow')}
    numbers['original_max_position_embeddings'] = original
    stated |= {key: number for key, number in numbers.items() if number is not None}
  return stated


def _llama3(m: Metadata, factors: np.ndarray, original: int, head_dim: int) -> dict[str, Any]:
  """Return the scaling of Llama 3: the file has no numbers of it, but what each frequency is divided by."""
  factor = float(factors.max(initial=1.0))
  theta = m.own_number('rope.freq_base', 10000.0)
  rotations = original * theta ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
  share = np.clip((rotations - _LLAMA3['low_freq_factor']) / np.diff([*_LLAMA3.values()])[0], 0, 1)
  expected = 1 / (share + (1 - share) / factor)
  if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
    raise ValueError(
      f"{m.file}: 'rope_freqs.weight' has other factors than Llama 3 has, {factors[-4:].tolist()} at its end: give the "
      'Hugging Face folder that it was made of'
    )
  return {'rope_type': 'llama3', 'factor': factor, 'original_max_position_embeddings': original, **_LLAMA3}


def _llama(m: Metadata, tensors: Mapping[str, Any]) -> dict[str, Any]:
  return {'attention_bias': 'blk.0.attn_q.bias' in tensors, 'mlp_bias': 'blk.0.ffn_up.bias' in tensors}


def _nothing(m: Metadata, tensors: Mapping[str, Any]) -> dict[str, Any]:
  return {}


def _gemma2(m: Metadata, tensors: Mapping[str, Any]) -> dict[str, Any]:
  size, heads = m.own_integer('embedding_length'), m.own_integer('attention.head_count')
  is_wide = m.own_integer('block_count') == _WIDE[m.architecture]
  caps = {key: m.own_number(key, None) for key in ('attn_logit_softcapping', 'final_logit_softcapping')}
  return {
    'query_pre_attn_scalar': size // heads if is_wide else m.own_integer('attention.key_length', size // heads),
    'sliding_window': m.own_integer('attention.sliding_window'),
    **{key: cap for key, cap in caps.items() if cap is not None},
  }


def _gemma3(m: Metadata, tensors: Mapping[str, Any]) -> dict[str, Any]:
  return _gemma2(m, tensors) | {
    'sliding_window_pattern': m.own_integer('attention.sliding_window_pattern', 6),
    'rope_local_base_freq': m.own_number('rope.freq_base_swa', 10000.0),
  }


ARCHITECTURES = {
  'llama': Architecture('llama', _llama),
  'qwen2': Architecture('qwen2', _nothing),
  'qwen3': Architecture('qwen3', _nothing),
  'gemma': Architecture('gemma', _nothing),
  'gemma2': Architecture('gemma2', _gemma2),
  'gemma3': Architecture('gemma3_text', _gemma3),
}
