"""Shardings of a training run: parameters, optimizer state and teacher over the mesh of decoding, batches by rows."""

from typing import Any

from flax.traverse_util import flatten_dict
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import optax

from speccascade.backends import sharding
from speccascade.types import Network


def check_rows(mesh: Mesh, batch_size: int, microbatches: int) -> None:
  """Raise where the mesh and the microbatches do not divide a batch."""
  shards = mesh.shape[sharding.DATA]
  if batch_size % (shards * microbatches):
    raise ValueError(
      f'batch_size={batch_size} does not divide into microbatches={microbatches} of the data={shards} of the mesh: '
      f'give a multiple of {shards * microbatches}, or another mesh.shape'
    )


def of_params(name: str, network: Network, params: Any, mesh: Mesh, rules: sharding.Rules | str | None = None) -> Any:
  """Return the sharding of each parameter.

  Args:
    name: The model's name in errors.
    network: The network; one without `param_axes` is replicated.
    params: Its parameters, or their shapes.
    mesh: The mesh.
    rules: Sharding rules, as `load` takes them.

  Raises:
    ValueError: an axis of a parameter that the rules shard does not divide over the mesh.
  """

  def refuse(axis: str, shards: int, _) -> None:
    raise ValueError(
      f'{name}: {axis} does not divide over {shards} devices of {sharding.shape_of(mesh)}: give mesh.shape a model '
      "axis that divides the heads, the MLP and the vocabulary, or Job.rules = 'replicated'"
    )

  return sharding.shardings(network, mesh, rules, params, refuse)


def of_state(
  name: str,
  network: Network,
  transform: optax.GradientTransformation,
  mesh: Mesh,
  rules: sharding.Rules | str | None = None,
) -> dict[str, Any]:
  """Return the shapes and shardings of {'params', 'optimizer'}, as `jax.ShapeDtypeStruct`.

  What has a parameter's shape is sharded like it; Adafactor's means over rows and columns are replicated, as T5X's.

  Args:
    name: The model's name in errors.
    network: The network.
    transform: The optimizer.
    mesh: The mesh.
    rules: Sharding rules of the network, as `load` takes them.

  Raises:
    ValueError: an axis of a parameter that the rules shard does not divide over the mesh.
  """
  params = jax.eval_shape(network.init, jax.random.key(0))
  params = with_shardings(params, of_params(name, network, params, mesh, rules))
  by_path = flatten_dict(params)

  def sharded(path, x) -> jax.ShapeDtypeStruct:
    keys = tuple(getattr(key, 'key', None) for key in path)  # a path in the parameters ends that of their statistics
    param = next((by_path[keys[i:]] for i in range(len(keys)) if keys[i:] in by_path), None)
    alike = param is not None and param.shape == x.shape
    to = param.sharding if alike else NamedSharding(mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to)

  optimizer = jax.tree_util.tree_map_with_path(sharded, jax.eval_shape(transform.init, params))
  return {'params': params, 'optimizer': optimizer}


def with_shardings(tree: Any, shardings: Any) -> Any:
  """Return the shapes of arrays with their shardings."""
  return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def shardings(tree: Any) -> Any:
  """Return the shardings of arrays or shapes."""
  return jax.tree.map(lambda x: x.sharding, tree)


def put(tree: Any, shardings: Any, *, copy: bool = True) -> Any:
  """Return a tree, which all processes have alike, as arrays with the shardings.

  Args:
    tree: Arrays, on a device of each process or sharded over all of them.
    shardings: A sharding for each.
    copy: Share no memory with the tree.
  """

  def one(x, to: NamedSharding):
    if isinstance(x, jax.Array) and (to.is_fully_addressable or not x.is_fully_addressable):
      return jax.device_put(x.copy() if copy else x, to)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, to, lambda index: x[index])

  return jax.tree.map(one, tree, shardings)


def rows(mesh: Mesh) -> NamedSharding:
  """Return the sharding of a batch."""
  return NamedSharding(mesh, PartitionSpec(sharding.DATA))


def put_rows(tree: Any, mesh: Mesh) -> Any:
  """Return host arrays, which all processes have alike, with axis 0 sharded over the rows of the mesh."""
  return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, rows(mesh), lambda index: x[index]), tree)
