"""A training step compiled for chips that need not be there: its memory on a chip, and its collectives.

python -m speccascade.train --gin_file=FILE --compile=v5e:4x4
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from speccascade.backends import sharding
from speccascade.checkpoints.checkpoint import Checkpoint
from speccascade.checkpoints.hf import network_of
from speccascade.planning import aot, hlo
from speccascade.train import layout
from speccascade.train.batches import Batch, by_size
from speccascade.train.jobs import Job
from speccascade.train.loop import Settings
from speccascade.train.losses import Distillation
from speccascade.train.step import make_step
from speccascade.types import Model, Network

GIB = 2**30
MIB = 2**20


class _Program(hlo.Module):
  """All of a program, of which `hlo.Module` reads the decode loop."""

  body = property(lambda self: self.entry)


def compile_step(
  network: Network,
  settings: Settings,
  mesh: Mesh,
  *,
  teacher: Model | None = None,
  companion: Model | None = None,
  rules=None,
  drafted: tuple[int, ...] | None = None,
) -> jax.stages.Compiled:
  """Return the step that `train` runs on a mesh, for the largest width.

  Args:
    network: The network, in float32.
    settings: How to train.
    mesh: Mesh of devices, which may be those of a topology (`planning.aot.describe`).
    teacher: The teacher, whose parameters may be shapes.
    companion: The companion, likewise.
    rules: Sharding rules of all networks, as `load` takes them.
    drafted: The ids of the tokens that a head scores; None for all.

  Raises:
    ValueError: the mesh does not divide the network or the batches.
  """
  layout.check_rows(mesh, settings.batch_size, settings.microbatches)
  transform = settings.optimizer.build(network, settings.steps)
  state = layout.of_state('the network', network, transform, mesh, rules)
  others = [other and _placed(other, mesh, rules) for other in (teacher, companion)]
  distillation = None if teacher is None else settings.distillation or Distillation()
  options = {name: getattr(settings, name) for name in ('drafting', 'microbatches', 'remat')}
  options |= {'shardings': layout.shardings(state), 'drafted': drafted}
  step = make_step(network, transform, distillation, **options)
  source, target = by_size(settings.widths)[-1]
  rows = settings.batch_size

  def tokens(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=layout.rows(mesh))

  batch = Batch(tokens(rows, source), tokens(rows), tokens(rows, target), tokens(rows))
  return aot.compile_for(mesh.devices.flat[0].platform, step, (state, batch, *others))


def _placed(model: Model, mesh: Mesh, rules) -> Model:
  """Return a model whose parameters are shapes on a mesh."""
  shardings = layout.of_params(model.name, model.network, model.params, mesh, rules)
  return model.replace(params=layout.with_shardings(model.params, shardings))


def measure(compiled: jax.stages.Compiled) -> dict[str, Any]:
  """Return the bytes of a compiled step on each device, and its collectives.

  `state` are parameters, optimizer state, batch and teacher, `temporaries` all else, `total` both together. Of each
  collective operation there are the times in a step, the bytes of all its results, and those of the largest one.
  """
  memory = compiled.memory_analysis()
  program = _Program(compiled.as_text())
  collectives = {
    op: {'times': times, 'bytes': size, 'largest': 0} for op, (_, times, size) in program.collectives().items()
  }
  for _, x, _ in program.runs(1):
    found = collectives.get(x.op.removesuffix('-start'))
    if found is not None:
      found['largest'] = max(found['largest'], program.result_bytes(x))
  state = memory.argument_size_in_bytes
  added = memory.output_size_in_bytes - memory.alias_size_in_bytes  # what does not replace the state that it was
  return {
    'state': state,
    'temporaries': memory.temp_size_in_bytes,
    'total': state + memory.temp_size_in_bytes + added,
    'collectives': collectives,
  }


def report(job: Job, devices: Sequence, jobs: Sequence[Job] = ()) -> Iterator[str]:
  """Yield lines on the step of a job; a job without a mesh has one of all the devices.

  Args:
    job: The job.
    devices: Those to compile for.
    jobs: All of the config, among which its teacher and companion may be.
  """
  mesh = job.mesh or sharding.mesh({sharding.DATA: len(devices)}, devices)
  network = job.network
  if network is None:
    raise ValueError(f'job {job.name}: --compile reads no checkpoint: give the network, as @train.t5()')
  drafted = None
  if job.frequent:
    network, drafted = job.over_frequent(network), tuple(range(job.frequent))
  settings = job.settings
  others = {name: _shapes_of(job, getattr(job, name), jobs) for name in ('teacher', 'companion')}
  size = measure(compile_step(network, settings, mesh, rules=job.rules, drafted=drafted, **others))
  count = sum(x.size for x in jax.tree.leaves(network.param_shapes()))
  source, target = by_size(settings.widths)[-1]
  yield (
    f'{count:,} parameters on {sharding.shape_of(mesh)}, {settings.batch_size} pairs of {source} and {target} tokens '
    f'in {settings.microbatches} microbatches, {settings.optimizer.name}'
  )
  memory = {name: f'{size[name] / GIB:.2f} GiB' for name in ('state', 'temporaries', 'total')}
  yield f'a chip: state {memory["state"]}, temporaries {memory["temporaries"]}, total {memory["total"]}'
  for op, of in sorted(size['collectives'].items()):
    results = f'{of["bytes"] / GIB:.2f} GiB of results, {of["largest"] / MIB:.1f} MiB the largest'
    yield f'{op}: {of["times"]} a step, {results}'


def _shapes_of(job: Job, given: str | Checkpoint | None, jobs: Sequence[Job]) -> Model | None:
  """Return another model of a job, an earlier job's or a checkpoint's by its config.json, with shapes as parameters."""
  if given is None:
    return None
  name = given if isinstance(given, str) else given.path
  network = next((x.network for x in jobs if x.name == name), None)
  if network is None:
    try:
      network = network_of(aot.config_in(name), dtype='float32')
    except (ValueError, OSError) as error:
      raise ValueError(f'job {job.name}: --compile needs the network of {name}: {error}') from error
  return Model(network.param_shapes(), network, name=name)
