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
  r'rotary_emb\.inv_freq$|^transformer\.h\.\d+\.attn\.(masked_)?bias$'
  r'|EncDecAttention\.relative_attention_bias\.weight$|(^|\.)(vision_tower|multi_modal_projector)\.'
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
  return [dataclasses.replace(entry, offset=offsets[entry.path, entry.row]) for entry in found]


def _module(path: tuple[str, ...]) -> str:
  return '.'.join(assemble.stacked_path(path)[0][:-1])


def _source(family: Family, path: tuple[str, ...], _: tuple[int, ...]) -> dict[str, Any]:
  """Return where a parameter of the unstacked tree is stored, as fields of its `assemble.Entry`."""
  module, leaf = _module(path), path[-1]
  if module not in family.names:
    raise ValueError(
      f"'{module}' is no module of the names of model_type '{family.model_type}': add the names of its tensors"
    )
  _, number = assemble.stacked_path(path)
  kernel = leaf == 'kernel' and (family.transposed or module == _HEAD)
  return {
    'source': family.names[module].format(number) + ('.bias' if leaf == 'bias' else '.weight'),
    'transpose': kernel or leaf == 'rel_embedding',
  }


def canonical(family: Family, name: str) -> str:
  """Return a tensor's name with the family's usual prefix."""
  for old, new in family.prefixes:
    if name.startswith(old) and not (old == '' and name.startswith(_KNOWN)):
      return new + name.removeprefix(old)
  return name


def ignored(name: str) -> bool:
  """Tell whether a tensor is derived from others, or no part of the text model."""
  return bool(_IGNORED.search(name))
