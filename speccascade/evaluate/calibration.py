"""The fastest setting of a run's curves whose loss of quality against the reference is certified on its prompts.

For each setting a test asks whether its expected loss is more than `at_most`. The settings of a curve are tested in the
order of its values, until the first that may lose more. That order is known before the data, so the chance that any
setting is certified wrongly is that of one test (fixed-sequence testing, a form of "Learn then Test").

Axis letters: N prompts.
"""

import bisect
from collections.abc import Mapping, Sequence
import dataclasses
import json
from typing import Any

import numpy as np

from speccascade.data import metrics
from speccascade.evaluate import config, rundir, runner, summary
from speccascade.evaluate.curves import Point
from speccascade.evaluate.experiment import Experiment
from speccascade.evaluate.report import formats
from speccascade.host import storage
from speccascade.host.errors import RunError
from speccascade.host.runs import RunDir
from speccascade.types import checked_int

PRIOR = 0.04  # the variance of losses that the first bets expect
MOST = 0.9  # of its wealth, the share that a bet can lose
PER_CENT = 100  # of a metric's points in a loss of 1
COLUMNS = ('label', 'time', 'loss', 'bound', 'certified', 'test_loss')
GUARANTEE = (
  'Guarantee, in finite samples: over draws of {prompts} independent prompts, the chance that any certified setting '
  'has an expected loss above {at_most:g} is at most {error:g}. Each is tested by betting, in the order of its curve. '
  'Even a setting that changes no text is certified only for a loss of {least:g} or more.'
)


# ---- the test ----


def betting_p_value(losses: np.ndarray, at_most: float, level: float) -> float:
  """Return a p-value of the hypothesis that the expected loss is `at_most` or more.

  It is valid for every number of losses and every distribution of them (Waudby-Smith and Ramdas 2024): someone bets on
  each loss that it is less than `at_most`, at odds that are fair where the hypothesis is true. Then the wealth, 1 at
  the beginning, ever reaches 1/p with a chance of p at most. The bets are sized by the variance of the losses before.

  Args:
    losses: [N], each in −1 … 1, independent of each other and in an order that does not depend on them.
    at_most: Between −1 and 1.
    level: That p is to be compared with, for which the bets are sized; p is valid for any.

  Returns:
    The p-value.

  Raises:
    ValueError: If a loss is not in −1 … 1, or `at_most` not between them.
  """
  losses = np.asarray(losses, np.float64)
  if not (np.abs(losses) <= 1).all():
    raise ValueError(f'a loss is {losses[~(np.abs(losses) <= 1)][0]}; scale losses to −1 … 1.')
  if not -1 < at_most < 1:
    raise ValueError(f'at_most={at_most} is not between −1 and 1.')
  count = np.arange(1, len(losses) + 1)
  means = np.cumsum(losses) / (count + 1)
  variances = (PRIOR + np.cumsum((losses - means) ** 2)) / (count + 1)
  before = np.concatenate([[PRIOR], variances[:-1]])  # a bet must not know the loss that it is on
  bets = np.minimum(np.sqrt(2 * np.log(1 / level) / (len(losses) * before)), MOST / (1 - at_most))
  wealth = np.cumsum(np.log1p(bets * (at_most - losses)))
  return float(np.exp(-max(0.0, wealth.max(initial=0.0))))


def bound(losses: np.ndarray, level: float) -> float:
  """Return the least hundredth of a point at which the hypothesis is rejected, an upper bound of the expected loss."""
  hundredths = range(1 - PER_CENT**2, PER_CENT**2)

  # p falls as `at_most` grows, for every bet on a loss then gains more
  def rejected(i):
    return betting_p_value(losses, i / PER_CENT**2, level) <= level

  return (hundredths[0] + bisect.bisect_left(hundredths, True, key=rejected)) / PER_CENT


# ---- the losses of a run ----


@dataclasses.dataclass(frozen=True)
class SettingLosses:
  """A setting that may be chosen.

  Attributes:
    point: The setting.
    time: As a share of the reference's.
    losses: [N], for each prompt the score of the reference less that of the setting, in −1 … 1.
  """

  point: Point
  time: float
  losses: np.ndarray


def read(run: RunDir, only: Sequence[str] = ()) -> tuple[Experiment, list[dict], list[dict]]:
  """Return the experiment of a finished run, the one in `only` of several, its predictions and its points.

  The config of the run is code, which is run, and its data is read again. No model is loaded.

  Raises:
    RunError: Where there is no such run, it is not finished, or its data changed.
  """
  if not run.exists(rundir.CONFIG):
    raise RunError(f'{run} is no run directory; give one that python -m speccascade.run wrote.')
  config.parse([str(storage.local_copy(run.path / rundir.CONFIG))])
  studies = runner.studies_of(config.build(placed=False), only)
  if len(studies) > 1:
    names = ', '.join(study.experiment.name for study in studies)
    raise RunError(f'{run} has several experiments; choose one with --only: {names}.')
  experiment = studies[0].experiment
  folder = studies[0].folder(run)
  if f'# {experiment.describe_data()}' not in run.read(rundir.CONFIG).splitlines():
    raise RunError(f'the data of {run} changed since it was decoded; restore it, or decode it anew.')
  if not folder.exists('results.json'):
    raise RunError(f'{folder} has no results.json, so the run is not finished; repeat its command to go on.')
  return experiment, folder.read_json('examples.jsonl'), folder.read_json('results.json')['points']


def one_of(name: str, given: float | None, known: Sequence[float]) -> float:
  """Return a number that the run has, by default its only one."""
  if given not in known and (given is not None or len(known) > 1):
    raise RunError(f'{name}={given}: choose one of the run with --{name}: {", ".join(f"{x:g}" for x in known)}.')
  return known[0] if given is None else given


def candidates(
  experiment: Experiment,
  lines: Sequence[dict],
  points: Sequence[dict],
  loss: str,
  temperature: float,
  batch: int,
  curves: Sequence[str] = (),
) -> dict[str, list[SettingLosses]]:
  """Return the settings of each curve; examples of one prompt count as one, by their mean.

  Args:
    experiment: As `read` returns it, with its lines and points.
    lines: Its predictions.
    points: Its results.
    loss: The name of a metric that is a mean of scores, the run's or one of `metrics.METRICS`.
    temperature: One of the run's.
    batch: The batch size whose times are compared.
    curves: Their names; all that vary a parameter by default.

  Raises:
    RunError: If the run has something of these not.
  """
  metric = _metric(experiment, loss)
  of_run = {c.name: c for c in experiment.curves if c.name != experiment.reference}
  curves = curves or [name for name, curve in of_run.items() if curve.parameter is not None]
  for name in curves or [None]:
    if name not in of_run:
      raise RunError(f'curves={name}: choose curves of the run with --curves: {", ".join(of_run) or "there are none"}.')

  def scores(point: Point) -> np.ndarray:
    some = [x for x in lines if (x['temperature'], x['curve'], str(x['value'])) == (temperature, *point.name)]
    return _by_prompt(*summary.predicted_texts(experiment.task, some), loss, metric)

  times = {(p['temperature'], p['batch'], p['curve'], str(p['value'])): p['latency'] for p in points}

  def candidate(point: Point) -> SettingLosses:
    reference = experiment.reference_of(point)
    time = times.get((temperature, batch, *point.name))  # none in a run that times nothing
    if reference is None or not time or not time['ratio']:
      raise RunError(f'{point.label} has no {"time" if reference else "reference"} in the run; choose with --curves.')
    return SettingLosses(point, 1 / time['ratio'], scores(reference) - scores(point))

  return {name: [candidate(point) for point in of_run[name].points()] for name in curves}


def _metric(experiment: Experiment, name: str) -> metrics.Mean:
  """Return a metric whose loss on a prompt is bounded, as the test needs it."""
  known = {**experiment.task.metrics, **metrics.METRICS}
  means = {name: metric for name, metric in known.items() if isinstance(metric, metrics.Mean)}
  if name not in means:
    corpus = 'it has no value for a single text, so no bound holds in finite samples' if name in known else 'unknown'
    raise RunError(f'loss={name}: {corpus}; choose from {", ".join(means)}, or make one with metrics.mean.')
  metrics.check({name: means[name]}, experiment.task.examples)
  return means[name]


def _by_prompt(examples: Sequence[Any], texts: Sequence[str], name: str, metric: metrics.Mean) -> np.ndarray:
  """Return the mean score of each prompt [N]."""
  if not examples:
    raise RunError('the run has no predictions; decode with quality_examples other than 0.')
  scores = metric.statistics(examples, texts)[:, 0]
  if odd := [score for score in scores if not 0 <= score <= 1]:
    raise RunError(f'loss={name}: it scores a text {odd[0]:g}, and only scores in 0 … 1 can be promised.')
  _, prompt = np.unique([json.dumps(e.prompt, default=str) for e in examples], return_inverse=True)
  return np.bincount(prompt, scores) / np.bincount(prompt)


# ---- the choice ----


def report(
  curves: Mapping[str, Sequence[SettingLosses]], at_most: float, confidence: float = 0.95, seed: int = 0
) -> dict[str, Any]:
  """Return each setting with its bound, and the fastest that is certified, by one half of the prompts, as JSON has it.

  The guarantee holds for all certified settings at once, so one may be chosen by anything, times on the same prompts
  included. Curves divide the chance of error equally (Bonferroni).

  Args:
    curves: The settings of each curve, in the order of its values.
    at_most: The loss that is promised, in points of the metric.
    confidence: The chance that the guarantee holds, over draws of the calibration prompts.
    seed: By which prompts are divided and ordered; the other half tests the choice.

  Raises:
    RunError: If a number is out of range, or there are too few prompts; ValueError of a seed.
  """
  for name, value, low, high in (('at_most', at_most, -PER_CENT, PER_CENT), ('confidence', confidence, 0, 1)):
    if not low < value < high:
      raise RunError(f'{name}={value:g} is not between {low} and {high}.')
  prompts = len(next(iter(curves.values()))[0].losses)
  if prompts < 2:
    raise RunError('one prompt cannot calibrate and test; decode more of them.')
  test, rows = np.split(np.random.default_rng(checked_int('seed', seed, 0)).permutation(prompts), [prompts // 2])
  level = (1 - confidence) / len(curves)
  settings = []
  for some in curves.values():
    certified = True
    for x in some:
      most = bound(x.losses[rows], level)
      certified = certified and most <= at_most
      loss, test_loss = (PER_CENT * float(x.losses[part].mean()) for part in (rows, test))
      found = dict(time=x.time, loss=loss, bound=most, certified=certified, test_loss=test_loss)
      settings.append(dict(label=x.point.label, **x.point.about, **found))
  chosen = min((x for x in settings if x['certified']), key=lambda x: x['time'], default=None)
  about = dict(at_most=at_most, confidence=confidence, level=level, least=bound(np.zeros(len(rows)), level))
  return about | dict(seed=seed, prompts=len(rows), test_prompts=len(test), chosen=chosen, settings=settings)


def as_text(report: Mapping[str, Any]) -> str:
  """Return a report for people."""
  best = report['chosen']
  none = 'None is certified: decode with the reference, or with a method that has its distribution.'
  first = f'{best["label"]}: {best["time"]:.2f} of the time of the reference.' if best else none
  guarantee = GUARANTEE.format(error=round(1 - report['confidence'], 10), **report)
  rows = [[(x | {'certified': 'yes' if x['certified'] else 'no'})[key] for key in COLUMNS] for x in report['settings']]
  title = f'Losses against the reference; bounds hold with probability {1 - report["level"]:.4g}'
  table = formats.markdown(dict(title=title, columns=COLUMNS, rows=rows, note=''))
  return '\n\n'.join([first, guarantee, table])
