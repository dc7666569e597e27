"""Where arrays lie on a mesh of devices: the rows of a batch over one of its axes, shards of a model over the other.

A mesh has the axes 'data' and 'model', or one of them, and 'expert' if it is given. Rows are sharded over 'data', a
model's parameters by its rules, ((logical axis, axis of the mesh or None), …): `SHARDED` divides heads, inner widths
and the vocabulary over 'model' and 'expert' together, experts over 'expert' and their inner widths over 'model',
`REPLICATED` nothing. `mesh` makes 'model' of its prime factors, 'model', 'model_2', …: what does not divide over all of
them is sharded over the first few, as 8 key-value heads are over 32 devices. What divides over none is replicated, with
one warning; it is the heads that have to divide where an axis joins them with their dimensions. A program for several
devices has a `Layout` as a static part, made of the shardings of its models' parameters; nothing else names an axis of
a mesh.

Axis letters: B batch, W window, V vocabulary, K key-value heads, T slots, D head dimension.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
import itertools
import math
import numbers
import operator
from typing import Any
import warnings

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
import numpy as np

from speccascade.backends import links

Array = jax.Array
Rules = tuple[tuple[str, Any], ...]

DATA = 'data'
MODEL = 'model'
EXPERT = 'expert'
_DENSE = 'vocab', 'mlp', 'heads', 'joined_kv', 'joined_kv_heads', 'kv_heads'
SHARDED: Rules = (*((n, (MODEL, EXPERT)) for n in _DENSE), ('expert', EXPERT), ('expert_mlp', MODEL))
REPLICATED: Rules = ()
NAMED_RULES = {'sharded': SHARDED, 'replicated': REPLICATED}
_MESSAGE = 1 << 18  # bytes of a window's activations, about
_READ = 819e9  # bytes of weights that a chip reads in a second


# ---- meshes and models ----


def mesh(shape: Mapping[str, int], devices: Sequence | None = None) -> Mesh:
  """Make a mesh of devices; neighbours are along the last axis.

  Args:
    shape: How many devices along each axis, as {'data': 2, 'model': 4}; an axis that is left out has one. With 'expert'
      the experts of a layer are divided over that axis, and all else over 'model' and it together.
    devices: The devices; None for all, of which the first are used.

  Returns:
    The mesh with the axes 'data' and 'model', and 'expert' if it is given.

  Raises:
    ValueError: If the shape does not fit the devices, or leaves a process without one.
  """
  size = _sizes(shape)
  available = jax.devices() if devices is None else devices
  count = math.prod(size.values())
  if set(size) - {DATA, MODEL, EXPERT} or not 0 < min(size.values()) or count > len(available):
    raise ValueError(f'mesh {dict(shape)}: give data and model, at most {_counted(available)} in all.')
  used = available[:count]
  split = {}
  for axis, n in size.items():
    split |= _prime(n) if axis == MODEL else {axis: n}
  if devices is None and (lost := {d.process_index for d in available} - {d.process_index for d in used}):
    raise ValueError(
      f'mesh {dict(shape)} has no device of process {min(lost)}: give it some of each, {_counted(available)} in all.'
    )
  return Mesh(np.array(used).reshape(*split.values()), tuple(split))


def _prime(n: int) -> dict[str, int]:
  """Return the axes of a mesh that 'model' is made of, so that what n devices do not divide some of them may."""
  return {MODEL if i == 0 else f'{MODEL}_{i + 1}': k for i, k in enumerate(links.prime_factors(n) or [1])}


def _counted(some: Sequence) -> str:
  return f'{len(some)} device{"s" * (len(some) != 1)}'


def meshes(*shapes: Mapping[str, int], devices: Sequence | None = None) -> tuple[Mesh, ...]:
  """Make a mesh of each shape, each of devices that no other has: of the models that draft, and of the verifier.

  Args:
    *shapes: The shapes, as of `mesh`.
    devices: The devices; None for all, of which the first are used.

  Raises:
    ValueError: If a shape does not fit the devices that are left.
  """
  if len(shapes) == 1:
    return (mesh(shapes[0], devices),)
  free = list(jax.devices() if devices is None else devices)
  made = []
  for shape in shapes:
    made.append(mesh(shape, free))
    free = free[made[-1].size :]
  return tuple(made)


def of_each(where: Any, models: int) -> list[Mesh | None]:
  """Return the mesh of each of some models.

  Args:
    where: A mesh or its shape, for all; two, of the models that draft and of the last; None: one device.
    models: How many there are.
  """
  given = tuple(where) if isinstance(where, tuple | list) else (where,)
  if len(given) > 2:
    raise ValueError(f'{len(given)} meshes: give one for all models, or two, of the drafters and of the verifier.')
  shapes = [x.shape if isinstance(x, AbstractMesh) else x for x in given]
  if None not in shapes and not any(isinstance(x, Mesh) for x in shapes):
    given = meshes(*shapes)
  return [given[0]] * (models - 1) + [given[-1]]


def unplaced(shape: Mapping[str, int]) -> AbstractMesh:
  """Return a mesh of this shape whose devices need not be there; `mesh` of its shape finds them."""
  size = _sizes(shape)
  return AbstractMesh(tuple(size.values()), tuple(size))


def _sizes(shape: Mapping[str, int]) -> dict[str, int]:
  if not isinstance(shape, Mapping):
    raise ValueError(f"mesh {shape!r}: give {{'data': 2, 'model': 4}}, how many devices along each axis.")
  size = {DATA: 1, MODEL: 1} | dict(shape)
  for axis, n in size.items():
    if not isinstance(n, numbers.Integral) or isinstance(n, bool):
      raise ValueError(f'mesh {dict(shape)}: {axis}={n!r} is not a whole number of devices.')
  return size


def place(model: Any, on: Mesh, rules: Rules | str | None = None) -> Any:
  """Move a model to a mesh.

  Args:
    model: A model.
    on: The mesh, as `mesh` makes it.
    rules: 'sharded', 'replicated', or pairs (logical axis, axis of the mesh or None). None chooses what is faster.

  Returns:
    The model with its parameters on the mesh.
  """
  return model.replace(params=jax.device_put(model.params, shardings(model.network, on, rules, model.params)))


def shardings(
  network: Any, on: Mesh, rules: Rules | str | None = None, params: Any = None, undivided: Callable | None = None
) -> Any:
  """Return the tree of the parameters' shardings; those of a network that names no axes are replicated.

  Args:
    network: The network.
    on: The mesh.
    rules: As of `place`.
    params: The parameters, of which a network without named axes needs the structure.
    undivided: As of `specs`.
  """
  if parameters(network)[1] is None:
    return jax.tree.map(lambda _: NamedSharding(on, PartitionSpec()), params)
  return jax.tree.map(lambda s: NamedSharding(on, s), specs(network, on, rules, undivided), is_leaf=_is_spec)


def _names(axis: Any) -> tuple[str, ...]:
  """Return the axes of a mesh that a rule or a spec names."""
  return axis if isinstance(axis, tuple) else (axis,) if axis else ()


def _parts(axis: Any, on: Mesh) -> list[str]:
  """Return the axes of this mesh that a rule names: of 'model' all that `mesh` made of it."""
  return [part for name in _names(axis) for part in on.shape if part == name or name == part.split('_')[0] == MODEL]


def _dividing(parts: Sequence[str], on: Mesh, *sizes: int) -> tuple[str, ...]:
  """Return the first axes of a mesh, as many as possible, whose devices divide all of some sizes."""
  shards = itertools.accumulate((on.shape[part] for part in parts), operator.mul)
  return tuple(parts[: sum(1 for n in shards if not any(size % n for size in sizes))])


def shape_of(on: Mesh) -> dict[str, int]:
  """Return the shape of a mesh as it is given to `mesh`, what that made of 'model' as one axis again."""
  named = dict.fromkeys(MODEL if part in _parts(MODEL, on) else part for part in on.shape)
  return {axis: math.prod(on.shape[part] for part in _parts(axis, on)) for axis in named}


def _shards(on: Mesh) -> int:
  """Return over how many devices a model is sharded."""
  return math.prod(on.shape[part] for part in _parts((MODEL, EXPERT), on))


def _is_spec(x: Any) -> bool:
  return isinstance(x, PartitionSpec)


def specs(network: Any, on: Mesh, rules: Rules | str | None = None, undivided: Callable | None = None) -> Any:
  """Return the tree of the parameters' `PartitionSpec`s; no axis of the mesh shards two axes of one.

  Args:
    network: The network, whose parameters have logical axes.
    on: The mesh.
    rules: As of `place`.
    undivided: Called with the axis and its size, the number of shards and the network, for an axis that does not
      divide and is replicated; by default it warns.
  """
  rules = default_rules(network, on) if rules is None else _checked(rules, on)
  undivided = undivided or _warn
  return jax.tree.map(lambda x, axes: _spec(network, x.shape, axes, rules, on, undivided), *parameters(network))


def _spec(network, shape: Sequence[int], axes, rules: Rules, on: Mesh, undivided: Callable) -> PartitionSpec:
  heads, shared = network.head_counts
  # Axes that join heads with their dimensions have to divide by heads.
  counts = {'heads': heads, 'joined_kv': heads, 'kv_heads': shared, 'joined_kv_heads': shared}
  to = dict(rules)
  used = set()
  spec = []
  for name, size in zip(axes, shape, strict=True):
    parts = [part for part in _parts(to.get(name), on) if part not in used]
    count = counts.get(name, size)
    over = _dividing(parts, on, count)
    if (shards := math.prod(on.shape[part] for part in parts)) > 1 and not over:
      undivided(f"'{name}' of {count}", shards, network)
    used |= set(over)
    spec.append(_axis(over))
  return PartitionSpec(*spec)


def _axis(names: Sequence[str]) -> Any:
  """Return an entry of a spec."""
  return names[0] if len(names) == 1 else tuple(names) or None


@functools.lru_cache(maxsize=64)
def parameters(network) -> tuple[Any, Any]:
  """Return the shapes and the logical axes of a network's parameters."""
  return network.param_shapes(), network.param_axes()


@functools.lru_cache(maxsize=256)
def _warn(what: str, shards: int, network: Any = None) -> None:
  if network is None:
    where = 'a batch'
  else:
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(parameters(network)[0]))
    where = f'{type(network).__name__} of {count:,} parameters'
  warnings.warn(f'{where}: {what} does not divide over {shards} devices and is replicated.', stacklevel=2)


def _checked(rules: Rules | str, on: Mesh) -> Rules:
  if isinstance(rules, str) and rules not in NAMED_RULES:
    raise ValueError(
      f"rules={rules!r} is neither 'sharded' nor 'replicated' nor pairs (logical axis, axis of the mesh)."
    )
  rules = NAMED_RULES[rules] if isinstance(rules, str) else rules
  for _, over in rules if rules != SHARDED else ():  # whose axes a mesh need not have
    if lost := [axis for axis in _names(over) if not _parts(axis, on)]:
      raise ValueError(f'rules {rules}: the mesh has no axis {lost[0]!r}, only {", ".join(map(repr, shape_of(on)))}.')
  return tuple(rules)


def default_rules(network: Any, on: Mesh) -> Rules:
  """Return `SHARDED` where a step saves more time in reading weights than collectives add, else `REPLICATED`.

  A collective follows each product over a sharded axis. It takes as long as reading some megabytes, more on more chips,
  so that small drafters are replicated. The times are those of a v5e, which other chips have in about this proportion.
  """
  shards = _shards(on)
  if shards == 1 or parameters(network)[1] is None:
    return REPLICATED
  saved = 0.0
  collectives = 0
  for x, axes in zip(jax.tree.leaves(parameters(network)[0]), _axes(network), strict=True):
    spec = _spec(network, x.shape, axes, SHARDED, on, lambda *_: None)
    if any(spec):
      own = math.prod(on.shape[part] for axis in spec for part in _names(axis))
      saved += math.prod(x.shape) * x.dtype.itemsize * (1 - 1 / own)
      inside = any(tuple(spec)[-2:-1])  # what a product sums over
      collectives += inside * (x.shape[0] if axes[0] == 'layers' else 1)
  collective = _READ * links.V5E.seconds('all-reduce', _MESSAGE, shards)
  return SHARDED if saved > collective * collectives else REPLICATED


def _axes(network) -> list:
  return jax.tree.leaves(parameters(network)[1], is_leaf=_is_spec)


# ---- a program's layout ----


def layout_for(models: Sequence[Any]) -> 'Layout':
  """Return the layout of models that run together, by slot.

  Raises:
    ValueError: If they are not on the same mesh.
  """
  on = shared(models)
  if on is None:
    return Layout()

  def spec_of(m):
    return None if m.params is None else jax.tree.map(lambda x: x.sharding.spec, m.params)

  return planned([m.network for m in models], on, map(spec_of, models))


def layout_for_step(models: Sequence[Any], on: Mesh | None) -> 'Layout':
  """Return the layout of models in a step that is partitioned over a mesh.

  Args:
    models: The models, by slot: those whose parameters are traced are sharded, the others replicated.
    on: The mesh; None for that of the parameters.
  """
  if on is None:
    return layout_for(models)
  rules = [SHARDED if isinstance(_a_leaf(m.params), jax.core.Tracer) else REPLICATED for m in models]
  networks = [m.network for m in models]
  by_model = [specs(network, on, some) for network, some in zip(networks, rules, strict=True)]
  return planned(networks, on, by_model)


def planned(networks: Sequence[Any], on: Mesh, by_model: Iterable[Any]) -> 'Layout':
  """Return the layout on a mesh of networks whose parameters have these specs, None of one that lies elsewhere."""
  if on.size == 1:
    return Layout()
  return Sharded(on, tuple(_sharded_axes(n, some) for n, some in zip(networks, by_model, strict=True)))


def shared(models: Sequence[Any]) -> Mesh | None:
  """Return the mesh on which all the models lie, None for one device; raise where they lie apart."""
  on = None
  first = None
  for model in models:
    if (leaf := _a_leaf(model.params)) is None:
      continue
    here = _mesh_of(leaf)
    if first is not None and here != on:
      one, other = (first, model) if on is None else (model, first)
      raise ValueError(
        f'{one.name} and {other.name} do not lie on the same mesh: load both with one mesh=…, or move a model with '
        'speccascade.place(model, mesh).'
      )
    on = here
    first = model
  return on


def _a_leaf(params: Any) -> Any:
  """Return one of the parameters, None where there are none."""
  if not isinstance(params, Mapping | list | tuple):
    return next(iter(jax.tree.leaves(params)), None)
  parts = params.values() if isinstance(params, Mapping) else params
  return next((leaf for part in parts if (leaf := _a_leaf(part)) is not None), None)  # each decode asks for some


def _mesh_of(x: Any) -> Mesh | None:
  if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer) or not isinstance(x.sharding, NamedSharding):
    return None
  return x.sharding.mesh if x.sharding.mesh.size > 1 else None


def _sharded_axes(network, by_parameter: Any) -> tuple[tuple[str, Any], ...]:
  """Return which logical axes of a model's parameters are sharded, and over which axis of the mesh."""
  if by_parameter is None or parameters(network)[1] is None:
    return ()
  sharded = {}
  for axes, spec in zip(_axes(network), jax.tree.leaves(by_parameter, is_leaf=_is_spec), strict=True):
    sharded |= {name: over for name, over in zip(axes, spec) if over is not None}
  return tuple(sorted(sharded.items()))


def apart(models: Sequence[Any]) -> tuple[int, ...]:
  """Return which models lie on devices that the last has none of, those without parameters among them; or none.

  Raises:
    ValueError: If they do not share their devices.
  """
  homes = [_devices(m.params) for m in models]
  others = [i for i, home in enumerate(homes) if home and homes[-1] and home.isdisjoint(homes[-1])]
  for i in others[1:]:
    if homes[i] != homes[others[0]]:
      raise ValueError(
        f'{models[others[0]].name} and {models[i].name} draft on different devices: load both with one mesh=….'
      )
  return tuple(i for i, home in enumerate(homes) if i in others or not home) if others else ()


def _devices(params: Any) -> frozenset | None:
  """Return the devices of parameters, None where there are none or they are traced."""
  leaf = _a_leaf(params)
  if leaf is None or isinstance(leaf, jax.core.Tracer):
    return None
  return leaf.sharding.device_set if isinstance(leaf, jax.Array) else frozenset(jax.devices()[:1])


def row_shards(models: Sequence[Any]) -> int:
  """Return over how many devices the rows of a batch are sharded; twice as many where two halves of it take turns."""
  drafters = apart(models)
  others = [m for i, m in enumerate(models) if i not in drafters]
  shards = [
    1 if on is None else on.shape.get(DATA, 1) for on in (shared(others), shared([models[i] for i in drafters]))
  ]
  return math.lcm(*shards) * (2 if drafters else 1)


def even(rows: int, shards: int) -> int:
  """Return the least number of rows, no smaller, of which each of `shards` has as many."""
  return -(-rows // shards) * shards


@dataclasses.dataclass(frozen=True)
class Layout:
  """Where the arrays of a program lie, a static part of it: here on one device; the base of `Sharded`.

  What says how an array is sharded is None for one device.
  """

  @property
  def devices(self) -> int:
    """How many devices run the program."""
    return 1

  @property
  def row_shards(self) -> int:
    """Over how many devices the rows of a batch are sharded."""
    return 1

  @property
  def model_shards(self) -> int:
    """Over how many devices models may be sharded."""
    return 1

  @property
  def shards_models(self) -> bool:
    """Whether any model is sharded."""
    return False

  def only(self, slots: Sequence[int]) -> 'Layout':
    """Return the layout of some of the models."""
    return self

  def rows(self, tree: Any) -> Any:
    """Return the specs of arrays with rows on axis 0."""

  def caches(self, caches: Sequence[Any]) -> tuple:
    """Return the specs of the caches of all slots: entries [B, …, K, T, D] by rows and heads, the rest by rows."""
    return tuple(jax.tree.map(lambda _: None, cache) for cache in caches)

  def by_vocabulary(self, x: Array, slot: int) -> Any:
    """Return the spec of logits or distributions [B, …, V] of a model."""

  def state(self, state: Any, cached: Sequence[int]) -> Any:
    """Return the specs of the loop's state; the slots in `cached` have caches."""

  def pin(self, tree: Any, specs: Any = None) -> Any:
    """Constrain arrays of a traced program to their shardings, replicated unless specs are given."""
    return tree

  def bytes(self, tree: Any, specs: Any) -> int:
    """Return the bytes of arrays on one device."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))

  def over_shards(
    self,
    function: Callable,
    arrays: Mapping[str, tuple[Array, tuple]],
    outs: Sequence[tuple],
    summed: Sequence[str] = (),
  ) -> Any:
    """Call a function of named arrays for each device's shards of them, by the layout of one model.

    Args:
      function: A function of arrays by name, which returns a sequence of arrays.
      arrays: {name: (array, the names of its axes)}; an axis is 'rows', 'heads', a logical axis of parameters, or None.
      outs: The names of the axes of each array that the function returns.
      summed: Axes over whose shards these arrays are added up.

    Returns:
      What the function returns, as global arrays.
    """
    return function(**{name: x for name, (x, _) in arrays.items()})

  def by_head(self, x: Array) -> Array:
    """Return attention [B, L, H·D] in the shards of the kernel that it is multiplied by, of the first model."""
    return x

  def gathered(self, x: Array) -> Array:
    """Return x [B, …] sharded along its rows only."""
    return self.pin(x, self.rows(x))

  def as_head(self, x: Array, slot: int) -> Array:
    """Return a model's logits or distributions [B, …, V] in the shards that its head makes.

    They stay so: softmax, tests and residuals are small reductions over the shards, whereas logits that were gathered
    would lie with the window in the lanes of a TPU, most of which stay empty.
    """
    return self.pin(x, self.by_vocabulary(x, slot))

  def in_blocks(self, x: Array, size: int) -> Array:
    """Return x [B, …, V], its last axis sharded only where each shard consists of complete blocks."""
    shards = self.model_shards
    return x if shards == 1 or x.shape[-1] % (size * shards) == 0 else self.gathered(x)


@dataclasses.dataclass(frozen=True)
class Sharded(Layout):
  """A mesh and, by slot of a method, which axes of the model are sharded."""

  mesh: Mesh
  axes: tuple[tuple[tuple[str, Any], ...], ...]

  @property
  def devices(self) -> int:
    return self.mesh.size

  @property
  def row_shards(self) -> int:
    return self.mesh.shape.get(DATA, 1)

  @property
  def model_shards(self) -> int:
    return _shards(self.mesh)

  @property
  def shards_models(self) -> bool:
    return any(self.axes)

  def only(self, slots: Sequence[int]) -> 'Sharded':
    return dataclasses.replace(self, axes=tuple(self.axes[s] for s in slots))

  def _over(self, size: int, axis: Any, what: str) -> Any:
    """Return what of an axis shards so many, or None where nothing divides them or the mesh has no such axis."""
    parts = [part for part in _names(axis) if self.mesh.shape.get(part, 1) > 1]
    over = _dividing(parts, self.mesh, size)
    if parts and not over:
      _warn(f'{what} of {size}', math.prod(self.mesh.shape[part] for part in parts))
    return _axis(over)

  def rows(self, tree: Any) -> Any:
    return jax.tree.map(lambda x: PartitionSpec(self._over(x.shape[0], DATA, 'rows')), tree)

  def caches(self, caches: Sequence[Any]) -> tuple:
    def spec(over, path, x):
      rows = self._over(x.shape[0], DATA, 'rows')
      named = [getattr(part, 'key', None) for part in path[-1:]]  # none of a cache that is one array
      if named not in (['key'], ['value']) or x.ndim < 4 or over in (None, DATA):
        return PartitionSpec(rows)
      return PartitionSpec(rows, *[None] * (x.ndim - 4), self._over(x.shape[-3], over, 'groups of heads'))

    by_heads = [dict(axes).get('joined_kv_heads') for axes in self.axes]
    return tuple(
      jax.tree_util.tree_map_with_path(functools.partial(spec, over), cache)
      for over, cache in zip(by_heads, caches, strict=True)
    )

  def _head(self, slot: int) -> Any:
    """Return the axis that shards a model's vocabulary."""
    return dict(self.axes[slot]).get('vocab')

  def by_vocabulary(self, x: Array, slot: int) -> PartitionSpec:
    rows = self._over(x.shape[0], DATA, 'rows')
    between = [None] * (x.ndim - 2)
    return PartitionSpec(rows, *between, self._over(x.shape[-1], self._head(slot), 'a vocabulary'))

  def by_head(self, x: Array) -> Array:
    over = dict(self.axes[0])
    heads = over.get('joined_kv')
    if heads == over.get('joined_kv_heads'):  # as it is: to say so would keep XLA from simplifying what follows
      return x
    rows = self._over(x.shape[0], DATA, 'rows')
    return self.pin(x, PartitionSpec(rows, None, self._over(x.shape[2], heads, 'heads')))

  def state(self, state: Any, cached: Sequence[int]) -> Any:
    specs = self.rows(state.replace(caches=()))
    by_slot = enumerate(state.window.logits)
    logits = tuple(None if x is None else self.by_vocabulary(x, slot) for slot, x in by_slot)
    sharded = next((slot for slot in range(len(self.axes)) if self._head(slot)), 0)
    drafted = None if state.window.probs is None else self.by_vocabulary(state.window.probs, sharded)
    leaves = state.window.leaves.specs(specs.window.leaves, self.by_vocabulary)
    window = specs.window.replace(logits=logits, probs=drafted, leaves=leaves)
    return specs.replace(window=window, caches=self.only(cached).caches(state.caches) if state.caches else ())

  def pin(self, tree: Any, specs: Any = None) -> Any:
    specs = PartitionSpec() if specs is None else specs
    shardings = jax.tree.map(lambda s: NamedSharding(self.mesh, s), specs, is_leaf=_is_spec)
    return jax.lax.with_sharding_constraint(tree, shardings)

  def bytes(self, tree: Any, specs: Any) -> int:
    def shape(x, s):
      return math.prod(NamedSharding(self.mesh, s).shard_shape(x.shape)) * x.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(shape, tree, specs)))

  def over_shards(self, function, arrays, outs, summed=()):
    values = {name: x for name, (x, _) in arrays.items()}
    over = dict(self.axes[0])
    over |= {'rows': DATA if DATA in self.mesh.shape else None, 'heads': over.get('joined_kv_heads')}
    for kind, axis in over.items():
      parts = [part for part in _names(axis) if self.mesh.shape[part] > 1]
      sizes = {n for x, names in arrays.values() for n, name in zip(x.shape, names, strict=True) if name == kind}
      sizes -= {1} if kind == 'rows' else set()  # a bias may have one for all
      over[kind] = _axis(_dividing(parts, self.mesh, *sizes)) if sizes else None

    def spec(x, names):
      return PartitionSpec(*(over.get(n) if s > 1 else None for s, n in zip(x.shape, names, strict=True)))

    added = tuple(name for kind in summed for name in _names(over.get(kind)))

    def local(*xs):
      found = tuple(function(**dict(zip(values, xs, strict=True))))
      return jax.lax.psum(found, added) if added else found

    call = jax.shard_map(
      local,
      mesh=self.mesh,
      in_specs=tuple(spec(*given) for given in arrays.values()),
      out_specs=tuple(PartitionSpec(*map(over.get, names)) for names in outs),
      check_vma=False,
    )
    return call(*values.values())
