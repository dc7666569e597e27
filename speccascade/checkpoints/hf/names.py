"""The tensor of a Hugging Face checkpoint in which each of our parameters is stored.

Families name modules; the last part of a path gives the tensor's name and whether it is transposed:
PyTorch stores a dense kernel as (out, in), GPT-2's Conv1D as (in, out).
"""

import dataclasses
import functools
import re
from typing import Any

from speccascade.checkpoints import assemble
from speccascade.checkpoints.hf.family import Family
from speccascade.types import Network

_HEAD = 'logits_dense'
_KNOWN = ('model.', 'transformer.', 'lm_head.')
_IGNORED = re.compile(
  r'rotary_emb\.inv_freq$|^(transformer\.h\.\d+\.attn|gpt_neox\.layers\.\d+\.attention)\.(masked_)?bias$'
  r'|^model\.mtp_layers\.|EncDecAttention\.relative_attention_bias\.weight$|(^|\.)(vision_tower|multi_modal_projector)\.'
  r'|\.eoi_embedding$'
)


def entries(family: Family, network: Network) -> list[assemble.Entry]:
  """Return where each parameter of a network is stored; several of one tensor lie in the order of the names."""
  found = assemble.plan(network, functools.partial(_source, family))
  order = {module: i for i, module in enumerate(family.names)}
  ends: dict[str, int] = {}
  offsets = {}
  for entry in sorted(found, key=lambda entry: order[_module(entry.path)]):
    key = entry.path, entry.row
    offsets[key] = ends.get(entry.source, 0)
    ends[entry.source] = offsets[key] + entry.shape[-1]
  heads = network.head_counts[0] if family.by_head else 1

  def placed(entry: assemble.Entry) -> assemble.Entry:
    offset, own, every = offsets[entry.path, entry.row], entry.shape[-1], ends[entry.source]
    if heads == 1 or own == every:
      return dataclasses.replace(entry, offset=offset)
    return dataclasses.replace(entry, offset=offset // heads, heads=(own // heads, every // heads))

  return [placed(entry) for entry in found]


def head(family: Family) -> str:
  """Return the name of the tensor of a family's head, where it is not tied."""
  return next((prefix for module, prefix in family.names.items() if module.endswith(_HEAD)), 'lm_head') + '.weight'


def _module(path: tuple[str, ...]) -> str:
  return '.'.join(assemble.stacked_path(path)[0][:-1])


def _source(family: Family, path: tuple[str, ...], shape: tuple[int, ...]) -> dict[str, Any] | list[dict[str, Any]]:
  """Return where a parameter of the unstacked tree, or each of its rows, is stored, as fields of `assemble.Entry`."""
  module, leaf = _module(path), path[-1]
  if module not in family.names:
    raise ValueError(
      f"'{module}' is no module of the names of model_type '{family.model_type}': add the names of its tensors"
    )
  _, number = assemble.stacked_path(path)
  kernel = leaf == 'kernel' and (family.transposed or module == _HEAD)
  prefix = family.names[module]

  def fields(row: int | None) -> dict[str, Any]:
    source = prefix.format(number, row) + ('.bias' if leaf == 'bias' else '.weight')
    return {'source': source, 'transpose': kernel or leaf == 'rel_embedding'}

  return [fields(row) for row in range(shape[0])] if prefix.count('{}') == 2 else fields(None)


def canonical(family: Family, name: str) -> str:
  """Return a tensor's name with the family's usual prefix."""
  for old, new in family.prefixes:
    if name.startswith(old) and not (old == '' and name.startswith(_KNOWN)):
      return new + name.removeprefix(old)
  return name


def ignored(name: str) -> bool:
  """Tell whether a tensor is derived from others, or no part of the text model."""
  return bool(_IGNORED.search(name))
