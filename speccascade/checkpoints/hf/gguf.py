"""The weights of a GGUF file under the names of its Hugging Face family, each dequantised when it is read.

`data.gguf` makes the folder that has the file. Here is what llama.cpp does to tensors, undone: it gives them names of
its own, orders the rows of Llama's queries and keys by the pairs that positions turn, and adds one to Gemma's norms.
"""

from collections.abc import Mapping
import functools
import importlib.metadata
import os
from pathlib import Path
import re
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from speccascade.checkpoints.files import read_json
from speccascade.checkpoints.hf.family import FAMILIES
from speccascade.checkpoints.stored import Box, full_box, Shape, Tensor
from speccascade.data import gguf

_NAME = re.compile(r'(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)')
_MODULES = {  # of the families' names
  'token_embd': 'token_embedder',
  'output_norm': 'final_norm',
  'output': 'logits_dense',
  'attn_norm': 'layers.pre_attention_layer_norm',
  'attn_q': 'layers.attention.query',
  'attn_k': 'layers.attention.key',
  'attn_v': 'layers.attention.value',
  'attn_output': 'layers.attention.out',
  'attn_q_norm': 'layers.attention.query_norm',
  'attn_k_norm': 'layers.attention.key_norm',
  'post_attention_norm': 'layers.post_attention_layer_norm',
  'ffn_norm': 'layers.pre_mlp_layer_norm',
  'ffn_gate': 'layers.mlp.wi_0',
  'ffn_up': 'layers.mlp.wi_1',
  'ffn_down': 'layers.mlp.wo',
  'post_ffw_norm': 'layers.post_mlp_layer_norm',
}
_DERIVED = {'rope_freqs.weight'}  # of the configuration
_INTERLEAVED = {'llama'}  # families whose queries and keys lie pair by pair
_FLOATS = {'F32': np.dtype(np.float32), 'F16': np.dtype(np.float16), 'BF16': np.dtype(ml_dtypes.bfloat16)}


class _Place(NamedTuple):
  """Where a tensor lies in a file, and how it is stored: the shape and dtype are those before it is dequantised."""

  file: str
  offset: int
  shape: Shape
  dtype: str
  kind: str  # the name of the type


def tensors(link: Path) -> dict[str, Tensor]:
  """Return the tensors of a GGUF file by the names of its family.

  Args:
    link: The link to the file, in the folder that `data.gguf` made of it.

  Raises:
    ValueError: the file has a quantisation that the package `gguf` does not dequantise.
  """
  file = Path(os.path.realpath(link))  # in errors the user's, not the link to it
  config = read_json(link.with_name('config.json'))
  family = FAMILIES[config['model_type']]
  found = {}
  for name, x in read_json(link.with_name(gguf.TENSORS)).items():
    if name in _DERIVED:
      continue
    _check_kind(file, name, x['kind'])
    shape = tuple(x['shape'])
    place = _Place(str(file), x['offset'], tuple(x['stored']), x['dtype'], x['kind'])
    added = 1.0 if family.switches.get('norm_offset') and name.endswith('norm.weight') else 0.0
    read = functools.partial(_read, place, shape, _rows(file, config, name, shape), added)
    code = _FLOATS.get(x['kind'], _FLOATS['F32']).name
    found[_named(name, family.names)] = Tensor(file, name, shape, code, read)
  return found


def _named(name: str, names: dict[str, str]) -> str:
  """Return the name of a tensor in a family's folder; one that the family does not have keeps its own."""
  match = _NAME.fullmatch(name)
  module = _MODULES.get(match[2]) if match else None
  return f'{names[module].format(match[1])}.{match[3]}' if module in names else name


def _check_kind(file: Path, name: str, kind: str) -> None:
  """Raise for a type of which the library has no numbers."""
  library = gguf.library()
  try:
    size = library.GGML_QUANT_SIZES[library.GGMLQuantizationType[kind]][1]
    _dequantised(np.zeros(size, np.uint8), kind)
  except (NotImplementedError, KeyError):  # perhaps of a newer one
    raise ValueError(
      f"{file}: tensor '{name}' has the type {kind}, which gguf {importlib.metadata.version('gguf')} does not "
      'dequantise: give a file of another quantisation, as Q8_0, Q4_K_M or F16'
    ) from None


def _dequantised(data: np.ndarray, kind: str) -> np.ndarray:
  """Return the numbers of bytes that are stored as a type of the library."""
  library = gguf.library()
  return library.quants.dequantize(data, library.GGMLQuantizationType[kind])


def _rows(file: Path, config: Mapping[str, Any], name: str, shape: Shape) -> np.ndarray | None:
  """Return which row of the file each row of a tensor is; None where they are in the order of Hugging Face.

  Of each head Hugging Face has the first of all pairs that are turned and then the second, llama.cpp pair by pair.
  """
  match = _NAME.fullmatch(name)
  if config['model_type'] not in _INTERLEAVED or not match or match[2] not in ('attn_q', 'attn_k'):
    return None
  heads = config['num_attention_heads' if match[2] == 'attn_q' else 'num_key_value_heads']
  if not heads or shape[0] % (2 * heads):
    raise ValueError(f"{file}: tensor '{name}' has {shape[0]} rows for {heads} heads: download it again")
  return np.arange(shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _read(place: _Place, shape: Shape, rows: np.ndarray | None, added: float, box: Box | None = None) -> np.ndarray:
  """Return a box of a tensor, of which only its rows are read; the file is in memory no longer than that."""
  first, *others = full_box(shape) if box is None else box
  data = np.memmap(place.file, place.dtype, 'r', place.offset, place.shape)
  data = np.array(data[first if rows is None or len(shape) == 0 else rows[first]])
  if place.kind == 'BF16':
    x = data.view(_FLOATS['BF16'])
  else:
    x = data if place.kind in _FLOATS else _dequantised(data, place.kind)
  x = x[(slice(None), *others)]
  return x - np.asarray(added, x.dtype) if added else x
