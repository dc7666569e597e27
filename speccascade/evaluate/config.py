"""Experiments from gin files: the names that a config may use, and errors that name the closest known one.

A config binds `run.experiments`, by default one `Experiment`. Rules, combiners, methods, policies and acceptance tests
go by `rules.NAME`, `methods.NAME`, `stopping.NAME`, `acceptance.NAME` and `verification.NAME`, tasks by
`data.NAME` and `embedded.task`.
Functions of one's own come in with `import my_module` and `@gin.register`, or with gin's dynamic registration.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import copy
import dataclasses
import functools
import os
from pathlib import Path

import gin

from speccascade import acceptance, embedded, methods, rules, stopping
from speccascade.backends import sharding
from speccascade.checkpoints.checkpoint import Checkpoint
from speccascade.data import files, harness
from speccascade.data.seqio import tasks
from speccascade.data.spec_bench import spec_bench
from speccascade.evaluate import suites
from speccascade.evaluate.curves import Curve
from speccascade.evaluate.experiment import Experiment
from speccascade.host import gin_files, storage
from speccascade.host.errors import RunError
from speccascade.sv import verification


def _run(experiments: Sequence[Experiment], folder: str | None = None) -> list[Experiment]:
  """Return the experiments of a run, which a config binds as run.experiments; `run.folder` is where results go."""
  if not isinstance(folder, str | os.PathLike | None):
    raise ValueError(f'run.folder = {folder!r} is no path; bind one, as in --gin.run.folder=runs/mine.')
  return list(experiments)


def _mesh(shape: Mapping[str, int] | Sequence[Mapping[str, int]] | None = None):
  """Return the shape of a run's mesh, as in mesh.shape = {'data': 2, 'model': 4}; None is one device.

  With two, as in [{'data': 4}, {'model': 4}], the drafters lie on the first, and the last model on the other.
  """
  return shape


@functools.cache
def register():
  """Give gin the names that a config may use, once."""
  for name, thing in names():
    gin_files.register(thing, name)


def names() -> Iterator[tuple[str, Callable]]:
  """Yield each name with its value."""
  for thing in (Experiment, Curve, Checkpoint):
    yield f'speccascade.{thing.__name__}', thing
  yield 'speccascade.run', _run
  yield 'speccascade.mesh', _mesh
  of_files = files.parallel_text, files.jsonl, files.conversations
  for thing in (*of_files, spec_bench, tasks.seqio_task, tasks.t5x_task, harness.lm_eval_task):
    yield f'data.{thing.__name__}', thing
  for thing in (embedded.task, embedded.models):
    yield f'embedded.{thing.__name__}', thing
  for kind in (rules, methods, stopping, acceptance, suites, verification):
    yield from ((f'{kind.__name__.split(".")[-1]}.{name}', thing) for name, thing in kind.known().items())


def parse(files: Sequence[str], bindings: Sequence[str] = (), search_paths: Sequence[str] = ()) -> str:
  """Read gin files and bindings, check every name in them, and return the complete config; nothing is built.

  It ends with digests of the modules that it imports, for their code is a part of it.
  """
  register()
  gin_files.read(files, bindings, search_paths)
  if 'experiments' not in gin.get_bindings('speccascade.run', resolve_references=False):
    if not gin.get_bindings('speccascade.Experiment', resolve_references=False):
      raise RunError('The config has no run.experiments and binds nothing of Experiment, as Experiment.task.')
    with gin.unlock_config():
      gin.parse_config('run.experiments = [@Experiment()]')
  sources = [f'# source of {name}: {digest}\n' for name, digest in gin_files.sources().items()]
  return ''.join([gin.config_str(max_line_length=120), *sources])


def folder(file: str, text: str) -> Path:
  """Return the run directory of the config that was read: its own, else one named by the last file and all its text."""
  bound = gin.get_bindings('speccascade.run', resolve_references=False).get('folder')
  if own := copy.deepcopy(bound):  # which resolves a macro
    return storage.resolve(own)
  return Path('runs') / f'{Path(file).stem}-{storage.digest(text.encode())[:8]}'


def build(*, placed: bool = True) -> list[Experiment]:
  """Return the experiments of the config that was read: tasks read, models not loaded.

  The devices of their mesh must be there; if they are not to be `placed`, only once models are loaded.
  """
  with gin_files.building():
    shape = gin.get_configurable('speccascade.mesh')()
    shapes = tuple(shape) if isinstance(shape, list | tuple) else () if shape is None else (shape,)
    meshes = sharding.meshes(*shapes) if placed and shapes else tuple(map(sharding.unplaced, shapes))
    mesh = meshes if len(meshes) > 1 else next(iter(meshes), None)
    experiments = gin.get_configurable('speccascade.run')()
    return [e if mesh is None else dataclasses.replace(e, mesh=mesh) for e in experiments]
