"""From the lines of the protocols to results: quality, latency and counts of every point, with confidence intervals."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import itertools
from typing import Any, NamedTuple

import numpy as np

from speccascade.data.examples import Example, Task
from speccascade.engine.stats import PER_MODEL
from speccascade.evaluate import breakdown, intervals, plugins, protocols
from speccascade.evaluate.curves import Point
from speccascade.evaluate.experiment import Experiment
from speccascade.evaluate.protocols import BY_POSITION, PER_ROW
from speccascade.evaluate.report import points as pts
from speccascade.evaluate.report.points import PointResult, Times

OF_METHOD = ('deferral_rate', 'acceptance', 'tokens_per_round', 'calls_per_token', *BY_POSITION, *breakdown.NAMES)
Resampled = dict[str, np.ndarray | None]  # a metric on each resample of the examples, None where it has no sums
Key = tuple[float, str, str]  # temperature, curve, value


class Timed(NamedTuple):
  """The times of one group of examples: medians over trials, where not said otherwise."""

  seconds: float
  tokens: int
  trials: int
  prefill: float | None = None  # seconds of the prefill alone, measured once
  steady: tuple[float, int] | None = None  # seconds and tokens of the steady part of a queue


ByGroup = dict[tuple[int, ...], Timed]  # by the examples of a group
Trials = dict[tuple[int, ...], list[dict]]  # the same as lines of the latency protocol


class Judged(NamedTuple):
  """The quality of a point, and for each metric that is a function of sums what intervals are made of."""

  result: PointResult
  resampled: Resampled
  statistics: Mapping[str, np.ndarray]  # [N, K], in the order of the quality protocol


def points(
  experiment: Experiment,
  lines: Iterable[dict],
  timings: Sequence[dict],
  judged: Mapping[Key, Judged] | None = None,
) -> list[PointResult]:
  """Return a result for each temperature, latency batch size and point.

  Args:
    experiment: What was measured.
    lines: Those of the quality protocol.
    timings: The lines of the latency protocol.
    judged: What `judge` has returned before, by temperature and name of the point.
  """
  by_key: dict[Key, Judged] = {}
  points_by_name = {p.name: p for p in experiment.points}

  def key_of(line):
    return (line['temperature'], line['curve'], str(line['value']))

  for key, some in itertools.groupby(lines, key_of):  # the lines of a point follow each other
    by_key[key] = (judged or {}).get(key) or judge(experiment, points_by_name[key[1:]], list(some))
  trials = _trials(timings)
  results = []
  for temperature in experiment.temperatures:

    def unjudged(p, t=temperature):
      return Judged(PointResult(**p.about, temperature=t, batch=0), {}, {})

    quality = {p.name: by_key.get((temperature, *p.name)) or unjudged(p) for p in experiment.points}
    for batch in experiment.latency_batches if timings else (experiment.quality_batch,):
      timed = {key[2:]: some for key, some in trials.items() if key[:2] == (temperature, batch)} if timings else None
      results += _at(experiment, batch, quality, timed)
  return results


def _at(
  experiment: Experiment,
  batch: int,
  quality: Mapping[tuple, Judged],
  trials: Mapping[tuple, Trials] | None,
) -> list[PointResult]:
  """Return the results of all points at one temperature and batch size; `trials` is None where nothing was timed."""
  results = []
  for point in experiment.points:
    result = quality[point.name].result
    counted = result.counts if trials is None else _at_batch(experiment, point, batch, result.counts)
    results.append(dataclasses.replace(result, batch=batch, counts=counted))
  timed = _pooled(results, trials or {})
  matched = _matched(experiment, results, quality, timed)
  for i, (point, result) in enumerate(zip(experiment.points, results, strict=True)):
    base = experiment.reference_of(point)
    results[i] = dataclasses.replace(
      result,
      quality_gain_ci={} if base is None else _gains(*(quality[p.name].resampled for p in (point, base))),
      latency=_latency(timed.get(point.name), base and timed.get(base.name), experiment),
      matched_ci=matched.get(point.curve.name),
    )
  return results


def _at_batch(experiment: Experiment, point: Point, batch: int, counted: dict | None) -> dict | None:
  """Return counts without those that do not hold for a batch of this size, which another method decodes."""
  if counted is None:
    return None
  method = point.build()
  mine, theirs = (plugins.described(method.at(n)) for n in (batch, protocols.quality_batch(experiment)))
  if mine == theirs:
    return counted
  return counted | dict.fromkeys(name for name in counted if name in OF_METHOD)


# ---- quality and counts ----


def judge(experiment: Experiment, point: Point, lines: list[dict]) -> Judged:
  """Return the quality and counts of a point, from its lines."""
  examples, texts = predicted_texts(experiment.task, lines)
  quality: dict[str, float | None] = {}
  resampled: Resampled = {}
  statistics = {}
  for name, metric in experiment.task.metrics.items():
    resampled[name] = None
    if not hasattr(metric, 'statistics'):
      quality[name] = _finite(float(metric(examples, texts)))
      continue
    statistics[name] = np.asarray(metric.statistics(examples, texts), np.float64)
    quality[name] = _finite(float(metric.combine(statistics[name].sum(0), len(texts))))
    if len(texts) > 1 and quality[name] is not None:
      resampled[name] = _on(metric, statistics[name], intervals.draws(experiment.seed, len(texts)))
  interval = {name: None if values is None else intervals.interval(values) for name, values in resampled.items()}
  faults = [line['fault'] for line in lines if 'fault' in line]
  result = PointResult(
    **point.about,
    temperature=lines[0]['temperature'],
    batch=protocols.quality_batch(experiment),
    examples=len(lines),
    faults=len(faults),
    fault=next(iter(faults), None),
    quality=quality,
    quality_ci=interval,
    counts=counts(experiment, point, lines),
  )
  return Judged(result, resampled, statistics)


def predicted_texts(task: Task, lines: Sequence[dict]) -> tuple[list[Example], list[str]]:
  """Return the examples of some lines, and their predictions as metrics judge them."""
  by_index = {e.index: e for e in task.examples}
  examples = [by_index[line['example']] for line in lines]
  return examples, task.judged(examples, [line['prediction'] for line in lines])


def _on(metric: Callable, statistics: np.ndarray, weights: np.ndarray) -> np.ndarray | None:
  """Return a metric on examples with weights [R, N], None where it is no finite number for all of them."""
  sizes = weights.sum(1).astype(int).tolist()
  values = np.array([metric.combine(*some) for some in zip(intervals.totals(weights, statistics), sizes, strict=True)])
  return values if np.isfinite(values).all() else None


def _finite(value: float) -> float | None:
  return value if np.isfinite(value) else None


def _gains(mine: Resampled, base: Resampled) -> dict[str, list[float]]:
  """Return the interval of each metric's difference to the reference on the very same examples."""
  both = [name for name in mine if mine[name] is not None and base.get(name) is not None]
  return {name: intervals.interval(mine[name] - base[name]) for name in both}


def counts(experiment: Experiment, point: Point, lines: list[dict]) -> dict:
  """Return what decoding cost, summed over examples, and the rates that follow from it."""
  total: dict[str, Any] = {name: _sum(lines, name) for name in (*PER_MODEL, *PER_ROW, *BY_POSITION)}
  large = experiment.references[0].build().slots[-1]
  total['deferral_rate'] = _deferral_rate(point, lines, total)
  total['acceptance'] = total['accepted'] / total['tested'] if total['tested'] else None
  total['tokens_per_round'] = total['emitted'] / total['rounds'] if total['rounds'] else None
  total['calls_per_token'] = total['calls'][large] / total['emitted'] if total['emitted'] else None
  total['length'] = total['emitted'] / len(lines)
  total['cut_off'] = sum(line['cut_off'] for line in lines) / len(lines)
  return total | breakdown.acceptance(experiment, lines)


def _sum(lines: list[dict], name: str) -> int | list[int] | None:
  """Sum a count over lines, None where it is unknown; a histogram may be longer in one line than in another."""
  first = lines[0][name]
  if first is None:
    return None
  if not isinstance(first, list):
    return sum(line[name] for line in lines)
  total = [0] * max(len(line[name]) for line in lines)
  for line in lines:
    for i, n in enumerate(line[name]):
      total[i] += n
  return total


def _deferral_rate(point: Point, lines: list[dict], total: dict) -> float | None:
  """Return the share of tokens (where whole texts are judged: of texts) at which the large model was asked to write."""
  method = point.build()
  if method.whole_texts:
    return sum(line['calls'][1] > 0 for line in lines) / len(lines)
  if not total['emitted'] or total['deferred'] is None:
    return None
  return total['deferred'] / total['emitted']


# ---- latency ----


def _trials(timings: Sequence[dict]) -> dict[tuple, Trials]:
  """Return the lines of each temperature, batch size and point.

  Examples of which a sequence ended as a fault in any trial are left out.
  """
  made: dict[tuple, Trials] = {}

  def named(line):
    return (line['temperature'], line['batch'], line['curve'], str(line['value']))

  faulty = {(*named(line), *line['examples']) for line in timings if line.get('faults')}
  for line in timings:
    key = named(line)
    if (*key, *line['examples']) not in faulty:
      made.setdefault(key, {}).setdefault(tuple(line['examples']), []).append(line)
  return made


def _pooled(results: Sequence[PointResult], trials: Mapping[tuple, Trials]) -> dict[tuple, ByGroup]:
  """Return the times of each point, for settings that decoded alike those of all of them."""
  times = {}
  for curve in pts.curves(results).values():
    for same in pts.alike(curve):
      names = [(result.curve, str(result.value)) for result in same]
      pool: Trials = {}
      for name in names:
        for group, lines in trials.get(name, {}).items():
          pool[group] = pool.get(group, []) + lines
      times |= dict.fromkeys(names, {group: _timed(lines) for group, lines in pool.items()})
  return {name: some for name, some in times.items() if some}


def _timed(trials: list[dict]) -> Timed:
  """Return the times of a group from the lines of its trials."""

  def median(name):
    return float(np.median([line[name] for line in trials]))

  prefill = next((line['prefill_seconds'] for line in trials if 'prefill_seconds' in line), None)
  steady = (median('steady_seconds'), trials[0]['steady_tokens']) if 'steady_seconds' in trials[0] else None
  return Timed(median('seconds'), trials[0]['tokens'], len(trials), prefill, steady)


def _latency(mine: ByGroup | None, reference: ByGroup | None, experiment: Experiment | None = None) -> Times | None:
  """Return the times of a point and their ratios to the reference's on the very same examples, also by domain."""
  if not mine:
    return None
  some = list(mine.values())
  seconds = np.array([x.seconds for x in some])
  low, middle, high = np.percentile(seconds, (25, 50, 75))
  times = Times(
    median_s=float(middle),
    iqr_s=[float(low), float(high)],
    tokens_per_s=float(sum(x.tokens for x in some) / seconds.sum()),
    trials=max(x.trials for x in some),
    examples=sum(map(len, mine)),
    steady_tokens_per_s=_steady_rate(some),
  )
  more: dict[str, Any] = {}
  if all(x.prefill is not None for x in some):
    share = sum(x.prefill for x in some) / seconds.sum()
    if share < 1:  # else reading the prompts again took longer than all of the call: too short to be told apart
      more['prefill_share'] = float(share)
      more['decode_tokens_per_s'] = times.tokens_per_s / (1 - share)
  if both := [group for group in mine if group in (reference or {})]:
    pairs = np.array([(*reference[g][:2], *mine[g][:2]) for g in both])  # [G, 4]: seconds and tokens of both
    more['groups'] = len(pairs)
    for name, powers in (('ratio', (1, 0, -1, 0)), ('tokens_per_s_ratio', (1, -1, -1, 1))):
      over, under = (pairs.sum(0)[np.array(powers) == sign].prod() for sign in (1, -1))
      more[name] = float(over / under)
      more[f'{name}_ci'] = intervals.of_ratio(pairs, powers)
    rates = [_steady_rate([some[g] for g in both]) for some in (mine, reference)]
    more['steady_ratio'] = None if None in rates else rates[0] / rates[1]
    if experiment is not None:
      more['ratio_by_domain'] = _ratio_by_domain(experiment, mine, reference)
  return dataclasses.replace(times, **more)


def _ratio_by_domain(experiment: Experiment, mine: ByGroup, reference: ByGroup) -> dict[str, float] | None:
  """Return the ratio of times in each domain, over groups of examples that have one domain."""
  domains = breakdown.domains_of(experiment)
  examples = experiment.task.examples
  by_domain: dict[str, ByGroup] = {}
  for group in mine:
    of_group = {domains[examples[i].index] for i in group}
    if len(of_group) == 1 and (domain := of_group.pop()) is not None:
      by_domain.setdefault(domain, {})[group] = mine[group]
  return {domain: _latency(some, reference).ratio for domain, some in sorted(by_domain.items())} or None


def _steady_rate(some: Sequence[Timed]) -> float | None:
  """Return the tokens per second of the steady parts of some queues."""
  if any(x.steady is None for x in some):
    return None
  seconds, tokens = (sum(part) for part in zip(*(x.steady for x in some), strict=True))
  return tokens / seconds if seconds > 0 else None


def _matched(
  experiment: Experiment,
  results: Sequence[PointResult],
  quality: Mapping[tuple, Judged],
  timed: Mapping[tuple, ByGroup],
) -> dict[str, list[float | None] | None]:
  """Return for each curve the interval of its speed-up at the reference's quality.

  Quality and time are of the same resamples, in which a group that was timed together is drawn together. The
  speed-up is a maximum over points that are noisy, and so larger than on examples without end; the interval has the
  spread of that maximum.
  """
  name, metric = next(iter(experiment.task.metrics.items()))
  base = experiment.references[0].name
  if len(experiment.references) > 1 or quality[base].resampled.get(name) is None or base not in timed:
    return {}
  position = {e.index: i for i, e in enumerate(protocols.quality_examples(experiment))}
  index = [e.index for e in experiment.task.examples]
  groups = list(timed[base])
  places = [[position.get(index[i], -1) for i in group] for group in groups]
  by_group, by_example = intervals.weights(experiment.seed, places, len(position))
  by_group, by_example = (x[by_example.any(1)] for x in (by_group, by_example))

  def judged(key):
    return _on(metric, quality[key].statistics[name], by_example)

  wanted = judged(base)
  matched = {}
  for curve, points in pts.curves(results).items() if wanted is not None else ():
    drawn = []
    for result in pts.distinct(points):
      key = result.curve, str(result.value)
      both = [i for i, group in enumerate(groups) if group in timed.get(key, {})]
      known = quality[key].resampled.get(name) is not None and len(both) >= intervals.LEAST
      if known and (values := judged(key)) is not None:
        pairs = np.array([(timed[base][groups[i]].seconds, timed[key][groups[i]].seconds) for i in both])
        drawn.append((len(both), values, intervals.totals(by_group[:, both], pairs)))
    if drawn:
      values, sums = (np.stack(x, 1) for x in list(zip(*drawn, strict=True))[1:])  # [R, P] and [R, P, 2]
      timed_in = (sums[:, :, 1] > 0).all(1)  # a resample may have none of the groups that a fault has left
      speeds = sums[timed_in, :, 0] / sums[timed_in, :, 1]
      speedups = intervals.reaching(values[timed_in], speeds, wanted[timed_in], between=pts.between(points))
      matched[curve] = intervals.reached(speedups, min(some[0] for some in drawn))
  return matched
