"""Load a checkpoint onto meshes of 8 devices, in one process or one of two, and say what was read and what it took.

python tests/backends/mesh_load.py PATH DATAxMODEL:DTYPE[:scan] … [PROCESS PORT]

It prints a line for each case.
"""

import json
import os
import resource
import sys

PATH, *REST = sys.argv[1:]
CASES = [arg.split(':') for arg in REST if ':' in arg]
REST = REST[len(CASES) :]
COUNT = 4 if REST else 8
os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count={COUNT}'

import jax  # noqa: E402
import numpy as np  # noqa: E402

from speccascade.backends import sharding  # noqa: E402
from speccascade.checkpoints import load, stored  # noqa: E402

TAKEN: dict[str, np.ndarray] = {}  # how often each element of each tensor was read


def counted(name: str, shape, box) -> None:
  seen = TAKEN.setdefault(name, np.zeros(shape, np.uint8))
  seen[... if box is None else box] += 1


def watch() -> None:
  """Count what is read of safetensors and of zarr arrays."""
  of_file, of_array = stored._read_safetensors, stored._read_zarr

  def read_safetensors(file, name, shape, box=None):
    counted(name, shape, box)
    return of_file(file, name, shape, box)

  def read_zarr(where, name, store, box=None):
    counted(name, store.shape, box)
    return of_array(where, name, store, box)

  stored._read_safetensors, stored._read_zarr = read_safetensors, read_zarr


def own_size(x: jax.Array) -> int:
  """Return how many elements this process holds, of each once."""
  own = np.zeros(x.shape, bool)
  for index in x.sharding.addressable_devices_indices_map(x.shape).values():
    own[index] = True
  return int(own.sum())


def own_bytes(x: jax.Array) -> int:
  return sum(shard.data.nbytes for shard in x.addressable_shards)


def by_path(model) -> dict[str, jax.Array]:
  return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(model.params)}


def measured(shape: str, dtype: str, scan: str = '') -> dict:
  """Return what was read of the checkpoint, what is held of it and what that took."""
  mesh = sharding.mesh(dict(zip(('data', 'model'), map(int, shape.split('x')), strict=True)))
  alone = None if REST else by_path(load(PATH, dtype=dtype, scan=bool(scan)))
  TAKEN.clear()
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  model = load(PATH, dtype=dtype, scan=bool(scan), mesh=mesh, rules='sharded')
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
  leaves = by_path(model)
  return {
    'equal': None if REST else all(np.array_equal(x, alone[name]) for name, x in leaves.items()),
    'sharded': sum(not x.is_fully_replicated for x in leaves.values()),
    'most': max(int(seen.max()) for seen in TAKEN.values()),
    'read': sum(int(seen.sum()) for seen in TAKEN.values()),
    'tensors': len(TAKEN),
    'held': sum(map(own_size, leaves.values())),
    'all': sum(x.size for x in leaves.values()),
    'shard_bytes': sum(map(own_bytes, leaves.values())),
    'peak_bytes': 1024 * peak,
    'largest_bytes': max(seen.size * 4 for seen in TAKEN.values()),
  }


if __name__ == '__main__':
  if REST:
    jax.distributed.initialize(f'localhost:{REST[1]}', 2, int(REST[0]))
  watch()
  for each in CASES:
    print(json.dumps(measured(*each)), flush=True)
