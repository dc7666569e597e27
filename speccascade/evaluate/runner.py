"""One run: take the directory, measure each experiment into it, write what was found in every form."""

from collections.abc import Callable, Sequence
import contextlib
import functools
import importlib.metadata
import json
import os
from pathlib import Path
import platform
import re
import subprocess
import sys
import time
from typing import Any

import jax

from speccascade.errors import RunError
from speccascade.evaluate import floor, formats, protocols, rundir, summary, trace
from speccascade.evaluate.experiment import Experiment
from speccascade.progress import Progress

PACKAGES = ('speccascade', 'jax', 'jaxlib', 'flax', 'numpy')


def run(
  experiments: Sequence[Experiment], folder: Path, *, config: str, command: str = '', only: Sequence[str] = ()
) -> list[Path]:
  """Measure all experiments, or what is left of them, and return the folder of each one's results.

  One experiment has the run directory for itself; several have a folder in it each. `only` names those to measure now,
  and the same run goes on with the others later.
  """
  experiments = list(experiments)
  names = [re.sub(r'[^\w.-]+', '_', e.name) for e in experiments]
  if not experiments or len(set(names)) < len(names):
    raise RunError(
      'run.experiments is empty.' if not experiments else f'Names of experiments must differ: {", ".join(names)}.'
    )
  if unknown := [name for name in only if name not in (e.name for e in experiments)]:
    raise RunError(f'only={unknown[0]}: the experiments here are {", ".join(e.name for e in experiments)}.')
  with rundir.locked(folder):
    rundir.keep_config(folder, config_text(config, experiments))
    here = environment()
    known = folder / 'environment.json'
    if known.exists():
      _compare(rundir.read_json(known, _is_object), here)
    else:
      rundir.write_json(known, here)
    folders = [folder if len(experiments) == 1 else folder / name for name in names]
    wanted = [(e, f) for e, f in zip(experiments, folders, strict=True) if not only or e.name in only]
    for experiment, place in wanted:
      _measure(experiment, place, rundir.read_json(known, _is_object), command)
  return [place for _, place in wanted]


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
    versions=versions, python=platform.python_version(), platform=platform.platform(), device=device.device_kind,
    backend=device.platform, devices=jax.device_count(), cpus=os.cpu_count(), commit=_commit(),
  )  # fmt: skip


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


def _compare(then: dict, now: dict):
  """Say where a run goes on in another environment than it began in: its numbers may not be comparable."""
  changed = [k for k in now if then.get(k) != now[k]]
  if changed:
    was = ', '.join(f'{k}: {then.get(k)} → {now[k]}' for k in changed)
    print(f'warning: this run began in another environment ({was}); its timings may not compare', file=sys.stderr)


def _measure(experiment: Experiment, folder: Path, environment: dict, command: str):
  """Run what the journals lack, then write the results."""
  with rundir.told(f'{folder} cannot be made', 'choose another --run_dir'):
    folder.mkdir(parents=True, exist_ok=True)

  @functools.cache
  def load():
    start = time.perf_counter()
    loaded = protocols.Loaded.of(experiment)
    names = ', '.join(m.name for m in loaded.models)
    print(f'models loaded in {time.perf_counter() - start:.1f} s: {names}', file=sys.stderr)
    return loaded

  with contextlib.ExitStack() as opened:
    quality, timings = (
      opened.enter_context(contextlib.closing(rundir.Journal(folder / name, fields)))
      for name, fields in (
        ('examples.jsonl', protocols.QUALITY_FIELDS), ('latency.jsonl', protocols.LATENCY_FIELDS),
      )
    )  # fmt: skip
    if experiment.quality_examples != 0:
      protocols.quality(experiment, load, quality)
    if experiment.latency_examples:
      protocols.latency(experiment, load, timings)
    results = _results(experiment, folder, load, quality, timings)
  write(results | dict(environment=environment, command=command), folder)


def _results(experiment: Experiment, folder: Path, load, quality: rundir.Journal, timings: rundir.Journal) -> dict:
  """Return what the journals and the files of the run come to."""
  names = _once(folder / 'models.json', lambda: [m.name for m in load().models], _is_names)
  floors = None
  if experiment.latency_examples:
    floors = _once(folder / 'floor.json', lambda: _floor(experiment, load().models), _is_floor)
  made = lambda: trace.traces(experiment, load(), quality.lines())
  traced = _once(
    folder / 'traces.jsonl', made, lambda lines: all(_is_object(x) and trace.FIELDS <= x.keys() for x in lines)
  )
  return dict(
    name=experiment.name, task=experiment.task.name, metric=next(iter(experiment.task.metrics)),
    metrics=list(experiment.task.metrics), models=names, reference=experiment.reference,
    points=summary.points(experiment, quality.lines(), list(timings.lines()), floors), floor=floors, tables=[],
    traces=traced,
  )  # fmt: skip


def _once(path: Path, make: Callable[[], Any], valid: Callable[[Any], bool]):
  """Return what a file of the run holds, making it first where it is missing."""
  if not path.exists():
    value = make()
    if path.suffix == '.jsonl':
      rundir.write(path, ''.join(json.dumps(v, ensure_ascii=False) + '\n' for v in value))
    else:
      rundir.write_json(path, value)
  return rundir.read_json(path, valid)


def _is_object(value: Any) -> bool:
  return isinstance(value, dict)


def _is_names(value: Any) -> bool:
  return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_floor(value: Any) -> bool:
  return _is_object(value) and _is_object(value.get('forward_s')) and all(map(_is_object, value['forward_s'].values()))


def _floor(experiment: Experiment, models) -> dict:
  protocols.few_executables()
  widths = protocols.widths(experiment)
  progress = Progress('forward passes', len(models), unit='models')
  task = experiment.task
  found = {}
  for model in models:
    wanted = widths if model is models[-1] else [1]  # only the last one's windows enter the prediction
    found |= floor.measure([model], wanted, source=task.max_prompt_tokens, tokens=task.max_new_tokens)
    progress.add(1, model.name)
  return {'forward_s': found}


def write(results: dict, folder: Path):
  """Write the results in every form: JSON, CSV, Markdown, TensorBoard, plots and, last, the report."""
  from speccascade.evaluate import plots, report, tables  # lazily: they draw

  results['tables'] = tables.tables(results)
  known = folder / 'results.json'
  if (folder / 'report.html').exists() and known.exists() and rundir.read(known) == rundir.as_json(results):
    return
  rundir.write_json(known, results)
  rundir.write(folder / 'summary.csv', formats.as_csv(results))
  rundir.write(folder / 'summary.md', formats.as_markdown(results, whole=False))
  rundir.write(folder / 'tables.md', formats.as_markdown(results, whole=True))
  with rundir.told(f'{folder} cannot be written', 'free some space, then run the same command to go on'):
    _tensorboard(results, folder / 'tensorboard')
    plots.write(results, folder / 'curves')
    report.write(results, folder / 'report.html')


def _tensorboard(results: dict, folder: Path):
  """Write quality and speed-up of every curve as scalars, the step being the value's place in the curve."""
  import tensorboardX  # lazily: a third of a second

  folder.mkdir(exist_ok=True)
  for old in folder.glob('events.out.tfevents.*'):
    old.unlink()
  with tensorboardX.SummaryWriter(str(folder)) as writer:
    steps: dict[tuple, int] = {}
    for point in results['points']:
      key = point['curve'], point['temperature'], point['batch']
      step = steps[key] = steps.get(key, -1) + 1
      tag = re.sub(r'[^\w./-]+', '_', f'{point["curve"]}/T{point["temperature"]:g}/batch{point["batch"]}')
      for name, value in (point['quality'] or {}).items():
        writer.add_scalar(f'{tag}/{name}', value, step)
      if point['latency'] and point['latency']['ratio'] is not None:
        writer.add_scalar(f'{tag}/speed-up', point['latency']['ratio'], step)
