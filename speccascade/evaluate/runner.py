"""One run: take the directory, measure each experiment into it, write the results in every form."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import importlib.metadata
import os
from pathlib import Path
import platform
import subprocess
import sys
import time
from typing import Any

import jax

from speccascade.evaluate import protocols, published, report, rundir, shards, summary, trace
from speccascade.evaluate.curves import Point
from speccascade.evaluate.experiment import Experiment
from speccascade.evaluate.shards import Shard
from speccascade.host import multihost, runs, storage
from speccascade.host.errors import RunError
from speccascade.host.runs import Journal, RunDir

ENVIRONMENT = 'environment.json'
MODELS = 'models.json'
PACKAGES = ('speccascade', 'jax', 'jaxlib', 'flax', 'numpy')


def run(
  experiments: Sequence[Experiment],
  folder: Path,
  *,
  config: str,
  command: str = '',
  only: Sequence[str] = (),
  shard: Shard | None = None,
) -> list[Path]:
  """Measure all experiments, or what is left of them, and return the folders of the results that are written.

  One experiment has the run directory for itself; several have a folder in it each. `only` names those to measure now,
  and the same run may measure the others later. With a shard only its share is measured, and results are written by
  the last to end.
  """
  studies = studies_of(experiments, only)
  text = config_text(config, experiments)
  run = RunDir(folder)
  if shard is not None:
    return _run_shard(studies, run, text, command, shard)
  with rundir.locked(run):
    shards.check_none(run, [study.folder(run) for study in studies])
    _prepare(run, text)
    return [_finish(study, run, command) for study in studies]


def merge(
  experiments: Sequence[Experiment], folder: Path, *, config: str, command: str = '', only: Sequence[str] = ()
) -> list[Path]:
  """Write the results of a run of shards, as one process would have, and return their folders."""
  studies = studies_of(experiments, only)
  text = config_text(config, experiments)
  run = RunDir(folder)
  if not (count := shards.count(run)):
    raise RunError(f'{folder} has no shards; run them first, each with --shard=i/n, as in --shard=0/4.')
  with rundir.locked(run):
    rundir.write_config(run, text)
    if missing := _missing(studies, run, count):
      raise RunError(
        f'{folder} lacks {len(missing)} of {count} shards: {", ".join(missing)}; run each with --shard=i/{count}, and '
        'the last to end writes the results.'
      )
    return [_merge(study, run, command, count) for study in studies]


@dataclasses.dataclass(frozen=True)
class Study:
  """An experiment in its run: the folder that it has in the run directory, and its models, loaded when asked for."""

  experiment: Experiment
  subfolder: str
  judged: dict[summary.Key, summary.Judged] = dataclasses.field(
    default_factory=dict
  )  # the quality of points that have it already

  @functools.cached_property
  def loaded(self) -> protocols.Loaded:
    """The models and prompts."""
    start = time.perf_counter()
    loaded = protocols.Loaded.of(self.experiment)
    names = ', '.join(m.name for m in loaded.models)
    if multihost.is_writer():
      print(f'models loaded in {time.perf_counter() - start:.1f} s: {names}', file=sys.stderr)
    return loaded

  def folder(self, run: RunDir) -> RunDir:
    """Return its folder in a run directory, or in a shard's."""
    return run / self.subfolder if self.subfolder else run

  def row(self, temperature: float, point: Point, lines: list[dict]) -> str:
    """Judge a point and return its row of the summary, and after the last before any time is measured all of them."""
    judged = self.judged[temperature, *point.name] = summary.judge(self.experiment, point, lines)
    all_judged = [self.judged.get((temperature, *p.name)) for p in self.experiment.points]

    def text():
      results = _metrics(self.experiment)
      row = f'T = {temperature:g}: {report.formats.row(results, judged.result)}'
      if None in all_judged or not self.experiment.latency_examples:
        return row
      points = [x.result for x in all_judged]
      title = f'Quality, T = {temperature:g}; times follow'
      return f'{row}\n\n{report.formats.markdown(report.tables.brief(results, title, points))}'

    return report.warned('a row of the summary', text) or f'T = {temperature:g}: {point.label}'


def studies_of(experiments: Sequence[Experiment], only: Sequence[str]) -> list[Study]:
  """Return what is to be measured now, having checked the names."""
  names = [storage.file_name(e.name) for e in experiments]
  if not experiments or len(set(names)) < len(names):
    raise RunError(
      'run.experiments is empty.' if not experiments else f'Names of experiments must differ: {", ".join(names)}.'
    )
  if len(names) > 1 and (taken := sorted({*names} & {rundir.CONFIG, runs.LOCK, runs.SHARDS, *rundir.OURS})):
    raise RunError(f'An experiment cannot be called {taken[0]}, which is a file of every run: give it another name.')
  if unknown := [name for name in only if name not in (e.name for e in experiments)]:
    raise RunError(f'only={unknown[0]}: the experiments here are {", ".join(e.name for e in experiments)}.')
  subfolders = names if len(names) > 1 else ['']
  return [Study(e, folder) for e, folder in zip(experiments, subfolders, strict=True) if not only or e.name in only]


def _prepare(run: RunDir, config: str):
  """Write the config and the environment of a new run; refuse another config, and warn of another environment."""
  rundir.write_config(run, config)
  here = environment()
  if not run.exists(ENVIRONMENT):
    run.write(ENVIRONMENT, runs.as_json(here))
  then = run.read_json(ENVIRONMENT)
  if (changed := [k for k in here if then.get(k) != here[k]]) and multihost.is_writer():
    was = ', '.join(f'{k}: {then.get(k)} → {here[k]}' for k in changed)
    print(f'warning: this run began in another environment ({was}); its timings may not compare', file=sys.stderr)


def config_text(config: str, experiments: Sequence[Experiment]) -> str:
  """Return a config file that repeats the run, with what it came to as comments."""
  lines = [f'# {line}' for e in experiments for line in (*e.describe().splitlines(), '')]
  return '\n'.join([config.rstrip(), '', *(line.rstrip() for line in lines)]) + '\n'


def environment() -> dict:
  """Return what the run runs on."""
  versions = {}
  for name in PACKAGES:
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      versions[name] = None
  device = jax.devices()[0]
  return dict(
    versions=versions,
    python=platform.python_version(),
    platform=platform.platform(),
    device=device.device_kind,
    backend=device.platform,
    devices=jax.device_count(),
    cpus=multihost.cpus(),
    commit=_commit(),
  )


def _commit() -> str | None:
  """Return the commit of the clone that the package lies in, if it does."""
  root = Path(__file__).parents[2]
  if not (root / '.git').exists():
    return None
  ask = functools.partial(subprocess.run, cwd=root, capture_output=True, text=True, timeout=10)
  try:
    head = ask(['git', 'rev-parse', 'HEAD'])
    changed = ask(['git', 'status', '--porcelain', '--untracked-files=no'])
  except (OSError, subprocess.TimeoutExpired):
    return None
  return None if head.returncode else head.stdout.strip() + ('+changes' if changed.stdout.strip() else '')


def _run_shard(studies: Sequence[Study], run: RunDir, config: str, command: str, shard: Shard) -> list[Path]:
  """Measure a share, then, where it was the last, write the results."""
  own = shard.folder(run)
  with shards.locked(run, shard, functools.partial(_prepare, run, config)):
    for study in studies:
      _measure(study, own, shard)
      if shard.index == 0:
        _names(study, study.folder(own))
    if missing := _missing(studies, run, shard.count):
      if multihost.is_writer():
        print(f'shard {shard} is done; the results wait for {", ".join(missing)}', file=sys.stderr)
      return []
    return [_merge(study, run, command, shard.count) for study in studies]


def _missing(studies: Sequence[Study], run: RunDir, count: int) -> list[str]:
  """Return in words which shards are not done."""
  plans = {}
  files = []
  for study in studies:
    for protocol in protocols.PROTOCOLS:
      plans[os.path.join(study.subfolder, protocol.journal)] = [turn for turn, _ in protocol.lines(study.experiment)]
    files.append(os.path.join(study.subfolder, MODELS))
  return shards.missing(run, plans, files, count)


def _merge(study: Study, run: RunDir, command: str, count: int) -> Path:
  """Write the journals and results that one process would have written."""
  folder = study.folder(run)
  first = study.folder(shards.Shard(0, count).folder(run))
  for protocol in protocols.PROTOCOLS:
    if not folder.exists(protocol.journal):
      _merge_journal(protocol, study, run, count)
  if not folder.exists(MODELS):
    folder.write(MODELS, first.read(MODELS))
  return _finish(study, run, command)  # which finds everything measured


def _merge_journal(protocol: protocols.Protocol, study: Study, run: RunDir, count: int):
  """Write the lines of all shards in the order of the plan, having checked that they are those of the plan."""
  plan = protocol.lines(study.experiment)
  parts = []
  for shard in shards.all_of(count):
    parts.append(study.folder(shard.folder(run)).journal(protocol.journal))
    parts[-1].agree(protocol.keys, [key for turn, key in plan if shard.has(turn)])
  study.folder(run).write(protocol.journal, shards.merged(parts, (turn for turn, _ in plan)))


def _measure(study: Study, run: RunDir, shard: Shard) -> list[Journal]:
  """Run what the journals lack of a share; return those of both protocols."""
  quality, timings = (study.folder(run).journal(p.journal) for p in protocols.PROTOCOLS)

  def load():
    return study.loaded

  protocols.quality(study.experiment, load, quality, shard, study.row)
  protocols.latency(study.experiment, load, timings, shard)
  return [quality, timings]


def _finish(study: Study, run: RunDir, command: str) -> Path:
  """Measure what the journals lack, then write the results; return their folder."""
  quality, timings = _measure(study, run, shards.ALL)
  experiment = study.experiment
  folder = study.folder(run)
  names = _names(study, folder)

  def asked():
    return multihost.once(lambda: list(trace.wanted(experiment, quality.lines())))

  def made():
    wanted = quality.count and experiment.trace_examples
    return trace.traces(experiment, study.loaded, asked()) if wanted else []

  traced = _once(folder, 'traces.jsonl', made)

  def results():
    record = _metrics(experiment) | dict(
      name=' → '.join(names) if experiment.name == Experiment.name else experiment.name,
      task=experiment.task.name,
      models=names,
      points=summary.points(experiment, quality.lines(), list(timings.lines()), study.judged),
      published=published.of_cell(experiment.cell),
      tables=[],
      traces=traced,
      environment=run.read_json(ENVIRONMENT),
      command=command,
    )
    report.write(record, folder.path)

  quality.seal()
  timings.seal()
  multihost.once(results)
  return folder.path


def _metrics(experiment: Experiment) -> dict:
  names = list(experiment.task.metrics)
  return dict(metric=names[0], metrics=names, reference=experiment.reference)


def _names(study: Study, folder: RunDir) -> list[str]:
  """Return the names of the models, of all shards as the first has them."""
  return _once(folder, MODELS, lambda: [m.name for m in study.loaded.models])


def _once(folder: RunDir, name: str, make: Callable[[], Any]) -> Any:
  """Return the value of a file of the run, which is made where it is missing."""
  if not folder.exists(name):
    value = make()
    folder.write(name, ''.join(map(runs.as_line, value)) if name.endswith('.jsonl') else runs.as_json(value))
  return folder.read_json(name)
