"""Compile a decode loop ahead of time: chips that need not be there, where arguments lie, and the program's floor."""

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import functools
import os
from pathlib import Path
import tempfile
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
import numpy as np

from speccascade import backends, checkpoints, Sampler, theory
from speccascade.backends import sharding
from speccascade.backends.links import Links, V5E
from speccascade.checkpoints.hf import network_of
from speccascade.data import sources
from speccascade.drafters import hidden
from speccascade.engine import loop, requests
from speccascade.engine.lowering import lower
from speccascade.engine.method import Method
from speccascade.engine.state import cache_slots
from speccascade.host.errors import first_line
from speccascade.models import shapes
from speccascade.planning.cost_model import calls_cost
from speccascade.planning.synthetic import tree_bytes, weight_bytes
from speccascade.types import Model, Network, Prompt


@dataclasses.dataclass(frozen=True)
class Chip:
  """What a floor is counted with."""

  bandwidth: float  # bytes a second
  clock: float  # cycles a second
  memory: float  # GiB that a program may use
  flops: float  # multiplications and additions a second, in bfloat16
  links: Links | None = None  # to the other chips of a slice, where its programs are simulated


CHIPS = {
  'v4': Chip(1228e9, 1.05e9, 31, 275e12, Links(45e9, 3, 4)),
  'v5e': Chip(819e9, 1.503e9, 15.75, 197e12, V5E),
  'v5p': Chip(2765e9, 1.75e9, 95, 459e12, Links(90e9, 3, 4)),
  'v6e': Chip(1640e9, 1.75e9, 31.25, 918e12, Links(90e9, 2, 16)),
  'h100': Chip(3352e9, 1.98e9, 79, 989e12),
}
# What XLA asks of a GPU that is not there.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448  shared_memory_per_core: 233472
  registers_per_block_limit: 65536  registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  driver_version: "12.9.0"  runtime_version: "12.9.0"  compile_time_toolkit_version: "12.9.0"
  memory_bandwidth: 3352320000000  l2_cache_size: 52428800  device_memory_size: 84942979072
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def chip_of(topology: str) -> Chip | None:
  """Return the chip of a topology."""
  return CHIPS.get(topology.partition(':')[0])


def models_of(models: Sequence[str], dtype: str, scan: bool = False, head: str | None = None) -> list[Model]:
  """Return models with shapes in the place of parameters.

  Args:
    models: A named pair; or config.json files or sources of models, with @4 at the end the first four layers of one.
      With @width=8 at the end calls of a model, or of a pair's verifier, have eight tokens a row.
    dtype: Dtypes as `load_all` takes them, that of a head first.
    scan: Whether layers are stacked.
    head: The checkpoint of a head, which drafts beside the last model.
  """
  paths, parts = zip(*map(sources.parse, models))
  if words := [part for part in parts if isinstance(part, str) and not part.startswith(sources.WIDTH)]:
    raise ValueError(f'@{words[0]}: a program is compiled for a head by --head, for frequent tokens by --frequent.')
  if head is None and len(models) == 1:
    networks, parts = shapes.pair(paths[0]), (None, *parts)
  else:
    networks = [network_of(config_in(path)) for path in paths]
  dtypes = checkpoints.dtype_of_each(dtype, len(networks) + (head is not None))
  each = zip(networks, dtypes[-len(networks) :], strict=True)
  networks = [dataclasses.replace(shapes.in_dtype(network, one), scan=scan) for network, one in each]
  complete = {network: shaped(network) for network in networks}  # an early exit has the arrays of its model
  made = [checkpoints.part_of(complete[n], part) for n, part in zip(networks, parts, strict=True)]
  return made if head is None else hidden.attached([checkpoints.load(head, dtype=dtypes[0]), *made], len(made))


def shaped(network: Network) -> Model:
  """Return a model with shapes in the place of parameters."""
  return Model(network.param_shapes(), network)


def config_in(source: str) -> Path:
  """Return a config.json, or that of the source of a model, of which nothing else is fetched."""
  found = sources.find(source, lambda names, _: [name for name in names if name.endswith('/config.json')]).path
  file = found / 'config.json' if found.is_dir() else found
  if not file.is_file():
    raise ValueError(
      f'{found} is no config.json, nor a folder with one; give one, or a hub id, for each model, or a pair by name.'
    )
  return file


def describe(topology: str):
  """Return the topology of a name: 'v5e:2x2', 'v6e:8x8', 'h100', 'h100:1x1x4'."""
  chip, _, grid = topology.partition(':')
  if chip not in CHIPS:
    raise ValueError(f"no chip '{chip}': choose from {', '.join(CHIPS)}")
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')  # else it looks for the TPU of a cloud
  os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')  # for compilations side by side
  try:
    if chip == 'h100':
      return topologies.get_topology_desc('h100', 'cuda', target_config=H100, topology=grid or '1x1x1')
    with _quiet():  # it says at length that there is no TPU
      return topologies.get_topology_desc(platform='tpu', topology_name=topology)
  except (jax.errors.JaxRuntimeError, RuntimeError, NotImplementedError) as error:  # a compiler missing, or too old
    extra = 'cuda' if chip == 'h100' else 'tpu'
    need = f"pip install 'speccascade[{extra}]'"
    raise ValueError(f'{topology} cannot be described ({first_line(error)}); it needs {need}.') from error


@contextlib.contextmanager
def _quiet():
  """Keep back what a library writes to standard error, unless it raises."""
  try:
    kept = os.dup(2)
  except OSError:  # there is no standard error
    yield
    return
  with tempfile.TemporaryFile() as said:
    os.dup2(said.fileno(), 2)
    try:
      yield
    except BaseException:
      said.seek(0)
      os.write(kept, said.read())
      raise
    finally:
      os.dup2(kept, 2)
      os.close(kept)


@dataclasses.dataclass(frozen=True)
class Sizes:
  """The static sizes of a decode."""

  batch: int
  source: int
  tokens: int


class Placement:
  """Where arguments lie: on one chip, or on a mesh as `sharding` shards them, each model by its rules."""

  def __init__(self, devices: Sequence, mesh: dict[str, int], rules: Sequence[sharding.Rules | str | None] = ()):
    self.mesh = sharding.mesh(mesh, devices)
    self.rules = tuple(rules)  # none where they follow the size of each model
    unknown = [rule for rule in self.rules if isinstance(rule, str) and rule not in sharding.NAMED_RULES]
    if unknown:
      raise ValueError(
        f'rules: {unknown[0]!r} is neither replicated nor sharded; give one for each model, as in replicated,sharded.'
      )

  def put(self, tree: Any, specs: Any = None) -> Any:
    """Return the shapes of a tree with a sharding: that of the specs, or replicated on every chip."""
    if self.mesh.size == 1:
      return jax.tree.map(lambda x: _shape(x, SingleDeviceSharding(self.mesh.devices.item())), tree)
    specs = jax.tree.map(lambda _: PartitionSpec(), tree) if specs is None else specs
    return jax.tree.map(lambda x, s: _shape(x, NamedSharding(self.mesh, s)), tree, specs)

  def put_each(self, params: backends.Parameters, specs: Sequence) -> backends.Parameters:
    """Return the shapes of models' parameters with shardings; an array of several models is one."""
    placed = jax.tree.leaves(tuple(map(self.put, params, specs)))
    return jax.tree.unflatten(jax.tree.structure(params), params.once(placed))


def _shape(x: Any, sharding) -> jax.ShapeDtypeStruct:
  x = x if hasattr(x, 'dtype') else np.asarray(x, np.float32 if isinstance(x, float) else None)
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def program(
  method: Method,
  models: Sequence[Model],
  sizes: Sizes,
  sampler: Sampler,
  placement: Placement,
  backend: backends.Backend,
):
  """Return the jitted loop and the shapes that it is compiled for."""
  if placement.rules and len(placement.rules) != len(models):
    raise ValueError(
      f'rules={list(placement.rules)} for {len(models)} models: give one for each, as in replicated,sharded.'
    )
  method = lower(method.for_networks([m.network for m in models]))
  slots = tuple(models[m].network for m in method.slots)
  vocab = min(network.vocab_size for network in slots)  # tables are padded beyond what the models share
  rules = placement.rules or [None] * len(models)
  specs = [sharding.specs(models[m].network, placement.mesh, rules[m]) for m in method.slots]
  layout = sharding.planned(slots, placement.mesh, specs)
  backend = backend.on_mesh(layout) if layout.devices > 1 else backend
  buffer = loop.positions(slots[-1], sizes.source, sizes.tokens, method.beyond)
  fixed = loop.Program(slots, cache_slots([models[m] for m in method.slots]), buffer, vocab, backend)
  prompt = np.zeros(sizes.source, np.int32)
  zero = np.uint32(0)
  row = requests.RequestRow(prompt, 0, 0, 0, sizes.tokens, 0, zero, zero, sampler, (), (), (), 0)
  rows = requests.arrays([row] * sizes.batch, requests.features([row]), sizes.batch, sizes.source, vocab)
  given = backends.Parameters(models[m].params for m in method.slots)
  shapes = jax.eval_shape(lambda params: backends.Parameters(map(backend.prepare, params)), given)
  params = placement.put_each(shapes, specs)
  state = jax.eval_shape(lambda p: loop.blank(fixed, method.start, p, rows), shapes)
  state = placement.put(state, fixed.specs(state))
  stop = np.zeros(sizes.batch, bool)
  stop = placement.put(stop, layout.rows(stop))
  return loop.run, (fixed, placement.put(method), params, state, stop, placement.put(np.zeros(2, np.int32)))


def caches(model: Model, sizes: Sizes, slots: int) -> Any:
  """Return the shapes of a model's caches, without a backend's padding."""
  i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
  prompt = Prompt(i32((sizes.batch, sizes.source)), i32((sizes.batch,)))
  return jax.eval_shape(lambda p, x: model.network.prefill(p, x, slots), model.params, prompt)


def compiled(method, models, sizes: Sizes, sampler: Sampler, placement: Placement, platform: str, options=None):
  """Return the compiled loop; options are XLA's, added to those of the platform's backend."""
  backend = backends.named(platform)
  run, args = program(method, models, sizes, sampler, placement, backend)
  return compile_for(platform, run, args, dict(args[0].backend.xla) | (options or {}))


def reading_bytes(models: Sequence[Model], sizes: Sizes, placement: Placement, platform: str, slots: int) -> int:
  """Return the bytes that a chip needs beside weights to read a batch's prompts: of the model that needs the most."""

  def of_model(number: int, model: Model) -> int:
    network = model.network
    rules = placement.rules[number] if placement.rules else None
    specs = sharding.specs(network, placement.mesh, rules)
    backend, layout = backends.named(platform), sharding.planned([network], placement.mesh, [specs])
    backend = backend.on_mesh(layout) if layout.devices > 1 else backend
    params = placement.put(jax.eval_shape(backend.prepare, model.params), specs)
    prompt = Prompt(np.zeros((sizes.batch, sizes.source), np.int32), np.zeros(sizes.batch, np.int32))
    prompt = placement.put(prompt, layout.rows(prompt))
    program = compile_for(platform, loop.prefill, (network.on(backend), params, prompt, slots, layout))
    memory = program.memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes

  return max(of_model(i, model) for i, model in enumerate(models))


def compile_for(platform: str, run: Any, args: Sequence, options: Mapping[str, Any] = {}):
  """Return a jitted function, compiled for the chips that its arguments lie on."""
  folder = jax.config.jax_compilation_cache_dir
  try:  # without the cache, from which JAX cannot read a program back without its chips
    jax.config.update('jax_compilation_cache_dir', None)
    compilation_cache.reset_cache()
    return run.trace(*args).lower(lowering_platforms=(platform,)).compile(compiler_options=dict(options))
  finally:
    jax.config.update('jax_compilation_cache_dir', folder)
    compilation_cache.reset_cache()


def floor_bytes(method: Method, models: Sequence[Model], sizes: Sizes, placement: Placement | None = None) -> int:
  """Return the bytes that a chip has to read in a round: weights and used caches, half of the new tokens being there.

  Of experts these are as many as the tokens of a call are expected to choose.

  Args:
    method: Whose calls are counted.
    models: Its models.
    sizes: Of the decode.
    placement: Of which a chip reads its shards; None for one chip.
  """

  def of_call(slot: int) -> int:
    model = models[method.slots[slot]]
    network, params = model.network, model.params
    used = sizes.tokens // 2 + (1 if network.start_id is not None else sizes.source)
    cached = caches(model, sizes, used)
    own = 1 if placement is None else placement.mesh.shape[sharding.DATA]
    tokens = -(-sizes.batch // own) * (method.verifier_width if slot == len(method.slots) - 1 else 1)
    experts = float(theory.distinct_experts(*network.experts, tokens)) / network.experts[0]
    if placement is None:
      params, cached = network.reads(params, cached)
      return weight_bytes(params, experts) + tree_bytes(cached)
    rules = placement.rules[method.slots[slot]] if placement.rules else None
    specs = sharding.specs(network, placement.mesh, rules)
    layout = sharding.planned([network], placement.mesh, [specs])

    def shard(x):
      return jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype)

    (over,) = layout.caches((cached,))
    params = jax.tree.map(shard, placement.put(params, specs))
    (read, cached), (_, over) = network.reads(params, cached), network.reads(params, over)
    return weight_bytes(read, experts) + layout.bytes(cached, over)

  return calls_cost(method, of_call)
