"""Calibration from a run: the losses and costs of its curves, the choice, and the report on it."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from speccascade import rules
from speccascade.data import metrics
from speccascade.decode import options
from speccascade.engine import plans
from speccascade.evaluate import calibration, config, intervals, protocols, rundir, runner, summary
from speccascade.evaluate.calibration import Candidate, CorpusLoss, MeanLoss
from speccascade.evaluate.curves import Point
from speccascade.evaluate.experiment import Experiment
from speccascade.evaluate.report import formats
from speccascade.host import storage
from speccascade.host.errors import RunError
from speccascade.types import checked_int

FILE = 'calibrated.json'
TIME = 'time'
CALLS = 'calls of the large model'
Key = tuple[str, str]  # curve, value


def read(run: Path, only: Sequence[str] = ()) -> tuple[Experiment, Path]:
  """Return an experiment of a finished run with its folder; its data is read again, no model is loaded.

  Args:
    run: the run directory. Its config is code, which is run.
    only: the name of the experiment, where the run has several.

  Raises:
    RunError: Where there is no such run, it is not finished, or its data changed.
  """
  if not rundir.exists(run / rundir.CONFIG):
    raise RunError(f'{run} is no run directory; give one that python -m speccascade.run wrote.')
  config.parse([str(storage.local_copy(run / rundir.CONFIG))])
  studies = runner.studies_of(config.build(placed=False), only)
  if len(studies) > 1:
    names = ', '.join(study.experiment.name for study in studies)
    raise RunError(f'{run} has several experiments; choose one with --only: {names}.')
  experiment = studies[0].experiment
  folder = studies[0].folder(run)
  if f'# {experiment.describe_data()}' not in rundir.read(run / rundir.CONFIG).splitlines():
    raise RunError(f'the data of {run} changed since it was decoded; restore it, or decode it anew.')
  if not rundir.exists(folder / 'results.json'):
    raise RunError(f'{folder} has no results.json, so the run is not finished; repeat its command to go on.')
  return experiment, folder


def lines(folder: Path) -> list[dict]:
  """Return the lines of the quality protocol."""
  valid = lambda some: all(isinstance(x, dict) and {*protocols.QUALITY_KEYS, 'prediction'} <= x.keys() for x in some)
  return rundir.read_json(folder / 'examples.jsonl', valid)


def records(folder: Path) -> list[dict]:
  """Return the points of results.json."""
  return rundir.read_json(folder / 'results.json', lambda x: isinstance(x, dict) and bool(x.get('points')))['points']


# ---- candidates ----


def candidates(
  experiment: Experiment,
  lines: Iterable[dict],
  records: Sequence[dict],
  loss: str,
  *,
  temperature: float | None = None,
  curves: Sequence[str] = (),
  batch: int | None = None,
) -> tuple[dict[str, list[Candidate]], dict[str, Any]]:
  """Return the settings of each curve with their losses and costs, and what these are of, as JSON has it.

  Examples of one prompt count as one, by their mean.

  Args:
    experiment: what was decoded.
    lines: of its quality protocol.
    records: of its results.
    loss: the name of a metric, the run's or one of `metrics.METRICS`.
    temperature: one of the run's; None: the only one.
    curves: their names; all that vary a parameter by default.
    batch: the batch size whose times are compared; the first of the run by default.

  Raises:
    RunError: If the run has something of these not.
  """
  temperature = _temperature(experiment, temperature)
  metric = _metric(experiment, loss)
  chosen = _curves(experiment, curves)
  by_point: dict[Key, list[dict]] = {}
  for line in lines:
    if line['temperature'] == temperature:
      by_point.setdefault((line['curve'], str(line['value'])), []).append(line)
  if not by_point:
    raise RunError('the run has no predictions; decode with quality_examples other than 0.')
  compared = [point for curve in chosen for point in curve.points()]
  if alone := [point for point in compared if experiment.reference_of(point) is None]:
    raise RunError(
      f'{alone[0].label} has no reference: {experiment.reference} has no point of its value; choose with --curve.'
    )
  cost, measure = _costs(experiment, records, temperature, batch, compared)
  names = {point.name for point in (*compared, *map(experiment.reference_of, compared))}
  scores = {name: _by_prompt(experiment, loss, metric, by_point[name]) for name in names}

  def candidate(point: Point) -> Candidate:
    reference = scores[experiment.reference_of(point).name]
    setting = scores[point.name]
    if isinstance(metric, metrics.Mean):
      return Candidate(point, cost(point), MeanLoss((reference[:, 0] - setting[:, 0]) / setting[:, 1]))
    return Candidate(point, cost(point), CorpusLoss(metric, reference, setting))

  sampler = dict(plans.sampler_of(experiment.sampler(temperature)))
  about = dict(loss=loss, temperature=temperature, sampler=sampler, reference=experiment.reference, measure=measure)
  return {curve.name: [candidate(point) for point in curve.points()] for curve in chosen}, about


def _temperature(experiment: Experiment, temperature: float | None) -> float:
  """Return the temperature that was asked for, or the only one."""
  known = ', '.join(f'{t:g}' for t in experiment.temperatures)
  if temperature is None and len(experiment.temperatures) > 1:
    raise RunError(f'the run has temperatures {known}; choose one with --temperature.')
  if temperature not in (None, *experiment.temperatures):
    raise RunError(f'temperature={temperature:g}: the run has {known}.')
  return experiment.temperatures[0] if temperature is None else temperature


def _metric(experiment: Experiment, name: str) -> Any:
  """Return a metric that has values of single examples or sums of statistics."""
  metric = experiment.task.metrics.get(name) or metrics.METRICS.get(name)
  if metric is None:
    known = ', '.join({**experiment.task.metrics, **metrics.METRICS})
    raise RunError(f'loss={name}: there is no such metric; choose from {known}.')
  if not hasattr(metric, 'statistics'):
    raise RunError(f'loss={name}: it is no function of sums over examples; make it one with metrics.mean.')
  if isinstance(metric, metrics.Summed):
    metrics.check({name: metric}, experiment.task.examples)
  return metric


def _curves(experiment: Experiment, names: Sequence[str]) -> list:
  """Return the curves of these names, all that vary a parameter by default."""
  known = {c.name: c for c in experiment.curves if c.name != experiment.reference}
  if unknown := [name for name in names if name not in known]:
    raise RunError(f'curve={unknown[0]}: the curves of the run are {", ".join(known) or "none"}.')
  chosen = [known[name] for name in names] or [c for c in known.values() if c.parameter is not None]
  if not chosen:
    raise RunError(f'no curve of the run varies a parameter; name some with --curve: {", ".join(known) or "none"}.')
  return chosen


def _by_prompt(experiment: Experiment, name: str, metric: Any, lines: list[dict]) -> np.ndarray:
  """Return the sums of statistics and the number of examples of each prompt [N, K + 1]."""
  examples, texts = summary.predicted_texts(experiment.task, lines)
  statistics = np.asarray(metric.statistics(examples, texts), np.float64)
  if isinstance(metric, metrics.Mean) and not ((statistics >= 0) & (statistics <= 1)).all():
    odd = statistics[~((statistics >= 0) & (statistics <= 1))][0]
    raise RunError(f'loss={name}: it scores a text {odd:g}, and only scores in 0 … 1 can be promised.')
  _, prompt = np.unique([json.dumps(e.prompt, default=str) for e in examples], return_inverse=True)
  sums = np.zeros((prompt.max() + 1, statistics.shape[1] + 1))
  np.add.at(sums, prompt, np.column_stack([statistics, np.ones(len(statistics))]))
  return sums


def _costs(
  experiment: Experiment, records: Sequence[dict], temperature: float, batch: int | None, compared: Sequence[Point]
) -> tuple[Callable[[Point], float], str]:
  """Return the cost of a point as a share of its reference's, and what it is: time or, without times, calls."""
  some = [r for r in records if r['temperature'] == temperature]
  sizes = list(dict.fromkeys(r['batch'] for r in some))
  if batch not in (None, *sizes):
    raise RunError(f'batch_size={batch}: the run has {", ".join(map(str, sizes))}.')
  by_key = {(r['curve'], str(r['value'])): r for r in some if r['batch'] == (batch or sizes[0])}
  latencies = [by_key[point.name]['latency'] for point in compared]
  if all(x and x['ratio'] for x in latencies):
    return lambda point: 1 / by_key[point.name]['latency']['ratio'], TIME

  def calls(point: Point) -> float:
    counted = by_key[point.name]['counts']
    if not counted or counted['calls_per_token'] is None:
      raise RunError(f'{point.label} has neither times nor calls at this batch size; choose others with --curve.')
    return counted['calls_per_token']

  return lambda point: calls(point) / calls(experiment.reference_of(point)), CALLS


# ---- the report ----


def report(
  curves: Mapping[str, Sequence[Candidate]],
  at_most: float,
  confidence: float = 0.95,
  *,
  test_share: float = 0.5,
  resamplings: int = 0,
  seed: int = 0,
) -> dict[str, Any]:
  """Return the choice of a setting with all that led to it, as JSON has it.

  Args:
    curves: the settings of each curve, in the order of its values.
    at_most: the loss that is promised, in points of the metric.
    confidence: the chance that the guarantee holds, over draws of the calibration prompts.
    test_share: of the prompts, which the choice does not see; 0 for none.
    resamplings: how often prompts are divided anew, to count how often the guarantee holds.
    seed: by which prompts are divided and ordered.

  Raises:
    RunError: If a number is out of range, or there are too few prompts; ValueError of a seed.
  """
  rows, test = _split(curves, at_most, confidence, test_share, resamplings, checked_int('seed', seed, 0, 2**32 - 1))
  best, tested = calibration.fastest(curves, at_most, confidence, rows, seed)
  level = calibration.error_share(curves, confidence)
  rated = {}
  for name, some in curves.items():
    untested = [None] * (len(some) - len(tested[name]))
    for candidate, p_value in zip(some, tested[name] + untested, strict=True):
      rated[candidate.point.label] = _setting(candidate, p_value, level, rows, test, seed)
  finite = all(c.loss.finite for some in curves.values() for c in some)
  made = dict(
    at_most=at_most,
    confidence=confidence,
    level=level,
    finite=finite,
    least=MeanLoss(np.zeros(len(rows))).bound(level, seed) if finite else None,
    seed=seed,
    prompts=len(rows),
    test_prompts=len(test),
    chosen=best and rated[best.point.label],
    settings=list(rated.values()),
  )
  if resamplings:
    made['resampled'] = calibration.resampled(curves, at_most, confidence, test_share, resamplings)
  return made


def _split(
  curves: Mapping[str, Sequence[Candidate]],
  at_most: float,
  confidence: float,
  test_share: float,
  resamplings: int,
  seed: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Return the rows of calibration and of test prompts, having checked the numbers."""
  most = calibration.PER_CENT
  for name, value, low, high in (('at_most', at_most, -most, most), ('confidence', confidence, 0, 1)):
    if not low < value < high:
      raise RunError(f'{name}={value:g} is not between {low} and {high}.')
  if not 0 <= test_share < 1:
    raise RunError(f'test_share={test_share:g} is not in 0 … 1, without 1.')
  if resamplings and not test_share:
    raise RunError('resamplings need prompts to test on; give a test_share above 0.')
  rows, test = calibration.split(seed, calibration.prompts(curves), test_share)
  if len(rows) < 2 or (len(test) < 2 and test_share):
    raise RunError(f'{len(rows)} prompts calibrate and {len(test)} test; a run needs more of them.')
  return rows, test


def _setting(
  candidate: Candidate, p_value: float | None, level: float, rows: np.ndarray, test: np.ndarray, seed: int
) -> dict[str, Any]:
  """Return what is known of a setting; its p-value is None where an earlier setting ended the sequence."""
  on_rows = candidate.loss.take(rows)
  held_out = candidate.loss.take(test) if len(test) > 1 else None
  return candidate.point.about | dict(
    label=candidate.point.label,
    cost=candidate.cost,
    loss=on_rows.value(),
    bound=on_rows.bound(level, seed),
    p_value=p_value,
    certified=p_value is not None and p_value <= level,
    test_loss=held_out and held_out.value(),
    test_loss_ci=held_out and intervals.interval(held_out.resampled(seed)),
    decode=decode_options(candidate.point),
  )


def decode_options(point: Point) -> str | None:
  """Return the options of `speccascade.decode` for a setting, None where there are none for its method or rule."""
  curve = point.curve
  varied = {curve.parameter: point.value} if curve.parameter else {}
  settings = {**curve.settings, **({} if curve.of_rule else varied)}
  name = rules.name_of(curve.method)
  if name not in options.METHODS or not settings.keys() <= {*options.SETTINGS}:
    return None
  given = {}
  if curve.rule is not None:
    of_rule = {**curve.rule_settings, **(varied if curve.of_rule else {})}
    given['rule'] = rules.spelled(functools.partial(curve.rule, **of_rule))
    try:
      options.rule(given['rule'])
    except argparse.ArgumentTypeError:  # one that was typed in, or bound to arrays
      return None
  given |= {key: _number(value) for key, value in settings.items()}
  return ' '.join([f'--method={name}', *(f'--{key}={value}' for key, value in given.items())])


def _number(value: Any) -> str:
  """Return a number, or several of them, as options have them."""
  return ','.join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


GUARANTEE = (
  'Guarantee, in finite samples: over draws of {prompts} independent prompts, the chance that any certified setting '
  'has an expected loss above {at_most:g} is at most {error:g}. Each is tested by betting, in the order of its curve.'
)
BOOTSTRAP = (
  'No guarantee in finite samples: {loss} has no value for a single text, so the loss is bounded by a bootstrap, whose '
  'chance of error is {error:g} only as prompts grow many. A metric of single texts, as chrf, has the guarantee.'
)
LEAST = 'With {prompts} prompts, even a setting that changes no text is certified only for a loss of {least:g} or more.'
HELD_OUT = 'On {test_prompts} other prompts it loses {loss:.2f}, with a 95 % interval of {low:.2f} … {high:.2f}.'
RESAMPLED = (
  'Of {times} other divisions, the guarantee holds in {kept} on their test prompts, in {kept_by_mean} if the mean '
  'loss alone chooses. Chosen: {names}; none certified: {none}. The mean share of the {measure} is {cost:.2f}. Where '
  'the prompts of the run are all that there are, and calibration prompts are drawn from them, it holds in '
  '{kept_if_drawn} of {times}.'
)


def as_text(report: Mapping[str, Any]) -> str:
  """Return a report, with what `candidates` returned next to the settings in it, for people."""
  best = report['chosen']
  of_all = f'of the {report["measure"]} of {report["reference"]}'
  if best is None:
    parts = [f'None is certified: decode with {report["reference"]}, or with a method that has its distribution.']
    parts += [LEAST.format(**report)] if report['finite'] else []
  else:
    parts = [f'{best["label"]}: {best["cost"]:.2f} {of_all}.']
    sampler = ' '.join(f'--{name}={value:g}' for name, value in report['sampler'].items())
    parts += [f'python -m speccascade.decode --models … {best["decode"]} {sampler} -- …'] if best['decode'] else []
  error = round(1 - report['confidence'], 10)
  parts.append((GUARANTEE if report['finite'] else BOOTSTRAP).format(error=error, **report))
  if best is not None and best['test_loss'] is not None:
    low, high = best['test_loss_ci']
    parts.append(HELD_OUT.format(test_prompts=report['test_prompts'], loss=best['test_loss'], low=low, high=high))
  if again := report.get('resampled'):
    names = ', '.join(f'{label} {n}' for label, n in again['chosen'].items()) or '–'
    parts.append(RESAMPLED.format(names=names, measure=report['measure'], **again))
  return '\n\n'.join([*parts, formats.markdown(_table(report))])


def _table(report: Mapping[str, Any]) -> dict[str, Any]:
  """Return a row for each setting."""
  columns = (
    'setting',
    report['measure'],
    'loss',
    f'bound ({1 - report["level"]:.4g})',
    'certified',
    'loss on test prompts',
  )
  rows = [
    [
      s['label'],
      s['cost'],
      s['loss'],
      s['bound'],
      'not tested' if s['p_value'] is None else 'yes' if s['certified'] else 'no',
      s['test_loss'],
    ]
    for s in report['settings']
  ]
  title = f'Loss of {report["loss"]} against {report["reference"]}, T = {report["temperature"]:g}'
  return dict(title=title, columns=columns, rows=rows, note='')
