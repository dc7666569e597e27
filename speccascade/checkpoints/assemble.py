"""From the stored tensors of any format to a network's parameters: plan, check, read, convert, shard.

A format gives its stored tensors by name, and for each parameter the tensor and box that it is stored in. The rest is
the same for all. Tensors are read one by one, the largest first: while its parameters are made, each needs two or three
times its size, which is free as long as the others are not loaded. On a mesh a process reads the shards of its devices.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import functools
import math
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from speccascade.backends import sharding
from speccascade.backends.quantised import quantise, Quantised, summed_axis
from speccascade.checkpoints.files import AGAIN
from speccascade.checkpoints.stored import Box, full_box, Shape, Tensor
from speccascade.models.base import Base
from speccascade.types import Array, Network, Params


@dataclasses.dataclass(frozen=True)
class Entry:
  """A parameter, or the row of a layer, an expert or both in a stacked parameter, and where it is stored."""

  path: tuple[str, ...]
  shape: Shape  # of the row, where it is one
  row: tuple[int, ...]  # its numbers on the first axes of a stacked parameter; (): not stacked
  source: str  # name of the stored tensor
  transpose: bool = False
  offset: int = 0  # along the parameter's last axis, where several lie in one tensor
  layer: int | None = None  # on axis 0 of the stored tensor, where it stacks layers
  heads: tuple[int, int] | None = None  # where those of one tensor lie in it head by head: own width, that of all

  def stored_box(self, box: Box | None = None) -> Box:
    """Return where the parameter, or a box of it, lies in the stored tensor, between others' heads where it does."""
    *box, last = full_box(self.shape) if box is None else box
    if self.heads:
      own, every = self.heads
      last = slice(last.start // own * every, -(-last.stop // own) * every)
    else:
      last = slice(last.start + self.offset, last.stop + self.offset)
    box = (last, *box[::-1]) if self.transpose else (*box, last)
    return box if self.layer is None else (slice(self.layer, self.layer + 1), *box)

  def take(self, stored: Array, origin: Box, box: Box | None = None) -> Array:
    """Return the parameter, or a box of it, as stored; `stored` is the box `origin` of the tensor."""
    inside = zip(self.stored_box(box), origin, strict=True)
    part = stored[tuple(slice(s.start - o.start, s.stop - o.start) for s, o in inside)]
    part = part if self.layer is None else part[0]
    return part if self.heads is None else self._of_heads(part, full_box(self.shape) if box is None else box)

  def _of_heads(self, part: Array, box: Box) -> Array:
    """Return a box of what is stored between others' heads."""
    own, every = self.heads
    last = slice(box[-1].start % own, box[-1].start % own + box[-1].stop - box[-1].start)
    part = part.T if self.transpose else part
    part = part.reshape(*part.shape[:-1], -1, every)[..., self.offset : self.offset + own]
    part = part.reshape(*part.shape[:-2], -1)[..., last]
    return part.T if self.transpose else part


def plan(network: Network, locate: Callable[[tuple[str, ...], Shape], Mapping[str, Any] | list]) -> list[Entry]:
  """Return the entries of a network.

  Args:
    network: The network. Where it scans its layers, each layer's row in a stacked parameter has an entry.
    locate: Function from the path of a parameter in the tree of unstacked layers, and its shape, to the fields of its
      `Entry` that say where it is stored, or to a list of those of each row.
  """
  entries = []
  for path, x in flatten_dict(network.param_shapes()).items():
    stacked = network.scan and 'layers' in path
    for row in [(i,) for i in range(x.shape[0])] if stacked else [()]:
      shape = x.shape[len(row) :]
      found = locate(tuple(f'layers_{row[0]}' if name == 'layers' else name for name in path), shape)
      if isinstance(found, list):
        entries += [Entry(path, shape[1:], (*row, i), **fields) for i, fields in enumerate(found)]
      else:
        entries.append(Entry(path, shape, row, **found))
  return entries


def plan_by_own_names(network: Network, stored: Mapping[str, Tensor]) -> list[Entry]:
  """Return the entries of a network whose parameters are stored under their own names, layers stacked or not."""

  def locate(path: tuple[str, ...], _: Shape) -> dict[str, Any]:
    path_of_stack, layer = stacked_path(path)
    stack = '.'.join(path_of_stack)
    return {'source': stack, 'layer': layer} if stack in stored else {'source': '.'.join(path)}

  return plan(network, locate)


def stacked_path(path: tuple[str, ...]) -> tuple[tuple[str, ...], int | None]:
  """Return a parameter's path in the tree of stacked layers, and the number of its layer."""
  layer = next((int(name[7:]) for name in path if name.startswith('layers_')), None)
  return tuple('layers' if name.startswith('layers_') else name for name in path), layer


def check(entries: Iterable[Entry], stored: Mapping[str, Tensor], network: Network, where: Any) -> None:
  """Raise one error for the first stored tensor that is missing, of another shape, or unexpected."""
  expected: dict[str, Shape] = {}
  for entry in entries:
    ends = tuple(s.stop for s in entry.stored_box())
    expected[entry.source] = tuple(map(max, ends, expected.get(entry.source, ends)))
  if missing := [name for name in expected if name not in stored]:
    name = missing[0]
    raise ValueError(f"{where}: tensor '{name}' {list(expected[name])} is missing{_more(missing)}: {AGAIN}")
  for name, shape in expected.items():
    if tuple(stored[name].shape) != shape:
      raise ValueError(
        f"{stored[name].file}: tensor '{name}' has shape {list(stored[name].shape)}, but by the other tensors and "
        f'config.json or gin, where there is one, it should have {list(shape)}: correct that file, or {AGAIN}'
      )
  if extra := [name for name in stored if name not in expected]:
    tensor = stored[extra[0]]
    raise ValueError(
      f"{tensor.file}: tensor '{tensor.name}' {list(tensor.shape)} is unexpected{_more(extra)} in a "
      f'{type(network).__name__} of these sizes: if it is an adapter, merge it first; is it another architecture? '
      f'Else {AGAIN}'
    )


def _more(names: list[str]) -> str:
  return f' (and {len(names) - 1} more)' if len(names) > 1 else ''


def read(
  network: Network,
  entries: Iterable[Entry],
  stored: Mapping[str, Tensor],
  *,
  dtype: str | None = None,
  mesh=None,
  rules=None,
) -> Params:
  """Return the parameters of a network, each stored tensor read once.

  Args:
    network: The network, with its layers scanned or not as the parameters are to be.
    entries: The plan for it, checked.
    stored: The stored tensors by name.
    dtype: Dtype of the parameters; None for that of each stored tensor.
    mesh: Mesh to shard them over; None for the default device.
    rules: Sharding rules, as `load` takes them.

  Raises:
    ValueError: a tensor cannot be read, or is not finite in `dtype`.
  """
  shapes = network.param_shapes()
  shardings = {} if mesh is None else flatten_dict(sharding.shardings(network, mesh, rules, shapes))
  shapes = flatten_dict(shapes)
  leaves = {}
  by_source: dict[str, list[Entry]] = {}
  for entry in sorted(entries, key=lambda entry: -math.prod(stored[entry.source].shape)):
    by_source.setdefault(entry.source, []).append(entry)
  for source, group in by_source.items():
    for entry, value in _read_source(stored[source], group, shapes, shardings, dtype):
      if entry.row:
        stacked = shardings.get(entry.path)
        stack = leaves.get(entry.path)
        stack = _zeros(shapes[entry.path], value, stacked) if stack is None else stack
        value = _set_row(stack, value, entry.row, stacked)
      leaves[entry.path] = value
  return unflatten_dict({path: leaves.pop(path) for path in shapes})


def _read_source(
  tensor: Tensor, entries: Iterable[Entry], shapes: Mapping, shardings: Mapping, dtype: str | None
) -> Iterator[tuple[Entry, jax.Array | Quantised]]:
  """Yield the parameters in a stored tensor, of which this process reads what it needs."""
  parts = [(entry, _row_sharding(entry, shardings.get(entry.path))) for entry in entries]
  box = _hull(entry.stored_box(_local_box(entry, own)) for entry, own in parts)
  own_dtype = narrowed(tensor.dtype)  # or raise
  to = np.dtype(own_dtype if np.issubdtype(own_dtype, np.integer) else dtype or own_dtype)
  data = tensor.read(box)
  for entry, own in parts:
    take = functools.partial(entry.take, data, box)
    make = _quantised if isinstance(shapes[entry.path], Quantised) else _value
    yield entry, make(entry, tensor, take, own, to)


def quantised(network: Network) -> Network:
  """Return a network whose kernels and table of tokens are int8, or raise for one that is none of the package's."""
  if not isinstance(network, Base):
    raise ValueError(f'the weights of a {type(network).__name__} do not become int8: give another dtype')
  return dataclasses.replace(network, quantised=True)


def narrowed(dtype: np.dtype) -> np.dtype:
  """Return the dtype that a stored one is read as: JAX has no float64 here."""
  return np.dtype(np.float32) if dtype == np.float64 else dtype


def _value(entry: Entry, tensor: Tensor, take: Callable[..., np.ndarray], sharding, dtype: np.dtype) -> jax.Array:
  """Return a parameter; each shard is converted by itself, so that no more than one is in memory next to the array."""
  if sharding is None:
    return jnp.asarray(_converted(entry, tensor, take(), dtype, _library()))

  def shard(index):
    return np.ascontiguousarray(_converted(entry, tensor, take(_both_ends(index, entry.shape)), dtype))

  return jax.make_array_from_callback(entry.shape, sharding, shard)


def _quantised(entry: Entry, tensor: Tensor, take: Callable[..., np.ndarray], own, _: np.dtype) -> Quantised:
  """Return a parameter quantised; on a mesh, once for all shards of this process, each of which needs whole outputs."""
  xp = np if own else _library()
  box = _local_box(entry, own)
  axis = summed_axis(entry.path)
  parts = quantise(_converted(entry, tensor, take(box), np.dtype(np.float32), xp), axis, xp)
  if own is None:
    return jax.tree.map(jnp.asarray, parts)

  def array(part, sharding, shape, box):
    def shard(index):
      return part[tuple(slice(i.start - o.start, i.stop - o.start) for i, o in zip(_both_ends(index, shape), box))]

    return jax.make_array_from_callback(shape, sharding, shard)

  def outputs(xs):
    return tuple(x for i, x in enumerate(xs) if i != axis % len(xs))

  return Quantised(
    array(parts.values, own.values, entry.shape, box),
    array(parts.scale, own.scale, outputs(entry.shape), outputs(box)),
  )


def _library() -> Any:
  """Return what converts: on a CPU numpy, for XLA would compile for each shape, which takes longer there."""
  return np if jax.default_backend() == 'cpu' else jnp


def _converted(entry: Entry, tensor: Tensor, x: np.ndarray, dtype: np.dtype, xp=np) -> Array:
  """Return a part of a stored tensor as the parameter has it."""
  x = xp.asarray(x)
  x = x.T if entry.transpose else x
  with np.errstate(over='ignore'):
    x = x.astype(dtype, copy=False)
  if not xp.isfinite(x).all():
    raise ValueError(
      f"{tensor.file}: tensor '{entry.source}' has NaN or Inf as {x.dtype}: {AGAIN}, or try another dtype"
    )
  return x


def _zeros(shapes: Any, row: Any, sharding: Any) -> Any:
  """Return the stack of which a value is a row."""
  if sharding is None:
    return jax.tree.map(lambda s, x: jnp.zeros(s.shape, x.dtype), shapes, row)
  return jax.tree.map(lambda s, x, to: jnp.zeros(s.shape, x.dtype, device=to), shapes, row, sharding)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _set_row(stack: Any, row: Any, at: tuple[int, ...], sharding: Any) -> Any:
  def put(stack, row):
    return lax.dynamic_update_slice(stack, row.reshape(*[1] * len(at), *row.shape), (*at, *[0] * row.ndim))

  stack = jax.tree.map(put, stack, row)
  return stack if sharding is None else lax.with_sharding_constraint(stack, sharding)


def _row_sharding(entry: Entry, sharding: Any) -> Any:
  """Return the sharding of an entry's own array, that of one row where it is one."""
  if sharding is None or not entry.row:
    return sharding
  return jax.tree.map(lambda s: NamedSharding(s.mesh, PartitionSpec(*s.spec[len(entry.row) :])), sharding)


def _local_box(entry: Entry, sharding: Any) -> Box:
  """Return the least box with all shards of this process, of quantised weights with whole outputs."""
  shape = entry.shape
  if sharding is None:
    return full_box(shape)
  if isinstance(sharding, Quantised):
    box = list(_local_box(entry, sharding.values))
    axis = summed_axis(entry.path)
    box[axis] = slice(0, shape[axis])
    return tuple(box)
  return _hull(_both_ends(index, shape) for index in sharding.addressable_devices_indices_map(shape).values())


def _hull(boxes: Iterable[Box]) -> Box:
  """Return the least box around some."""
  return tuple(slice(min(s.start for s in axis), max(s.stop for s in axis)) for axis in zip(*boxes, strict=True))


def _both_ends(index: tuple[slice, ...], shape: Shape) -> Box:
  return tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))
