"""From the lines of the protocols to results: quality, latency and counts of every point, with confidence intervals."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import itertools
from typing import Any

import numpy as np

from speccascade.data.examples import Example
from speccascade.engine.method import SequenceCascade
from speccascade.engine.phases import Verify
from speccascade.engine.stats import PER_MODEL
from speccascade.evaluate.curves import Point
from speccascade.evaluate.experiment import Experiment
from speccascade.evaluate.protocols import BY_POSITION, PER_ROW
from speccascade.methods import autoregressive
from speccascade.planning import cost_model

RESAMPLES = 1000
NOTHING = dict(examples=0, faults=0, fault=None, quality=None, quality_ci=None, counts=None)
Resampled = dict[str, np.ndarray | None]  # a metric on each resample of the examples, None where it has no sums
BOUNDS = (2.5, 97.5)  # per cent: the bounds of every interval


def points(
  experiment: Experiment,
  lines: Iterable[dict],
  timings: Sequence[dict],
  floor: dict | None,
  judged: Mapping[tuple, tuple[dict, Resampled]] | None = None,
) -> list[dict]:
  """Return one record for each temperature, latency batch size and point.

  Args:
    experiment: what was measured.
    lines: those of the quality protocol.
    timings: the lines of the latency protocol.
    floor: the times of bare forward passes, None where none were measured.
    judged: what `judge` has returned before, by temperature and label.
  """
  by_point = {}
  resampled = {}
  points_by_name = {_named(p): p for p in experiment.points}
  for key, some in itertools.groupby(lines, _key):  # the lines of a point follow each other
    point = points_by_name[key[1:]]
    known = (judged or {}).get((key[0], point.label))
    by_point[key], resampled[key] = known or judge(experiment, point, list(some))
  times = _seconds(timings)
  records = []
  for temperature in experiment.temperatures:
    base = resampled.get((temperature, *_named(experiment.reference_point)), {})
    for batch in experiment.latency_batches if timings else (experiment.quality_batch,):
      reference = times.get((temperature, batch, *_named(experiment.reference_point)))
      for point in experiment.points:
        name, value = point.key
        record = dict(curve=name, parameter=point.curve.parameter, value=value, temperature=temperature, batch=batch)
        key = (temperature, *_named(point))
        record |= by_point.get(key, NOTHING)
        record['counts'] = _at_batch(experiment, point, batch, record['counts'])
        record['quality_gain_ci'] = _gains(resampled.get(key, {}), base)
        record['latency'] = _latency(times.get((temperature, batch, *_named(point))), reference, experiment.seed)
        timed = {key[2:]: some for key, some in times.items() if key[:2] == (temperature, batch)}
        record['predicted'] = _predicted(experiment, point, record['counts'], floor, timed) if batch == 1 else None
        records.append(record)
  return records


def _at_batch(experiment: Experiment, point: Point, batch: int, counted: dict | None) -> dict | None:
  """Return counts without rates that do not hold for a batch of this size, which another method decodes."""
  if point.plan is None or counted is None:
    return counted
  method = point.build()
  same = str(method.at(batch)) == str(method.at(min(experiment.quality_batch, len(experiment.task.examples))))
  return counted if same else counted | dict(acceptance=None, tokens_per_round=None)


def _named(point: Point) -> tuple[str, str]:
  name, value = point.key
  return name, str(value)


def _key(line: dict) -> tuple:
  return line['temperature'], line['curve'], str(line['value'])


# ---- quality and counts ----


def judge(experiment: Experiment, point: Point, lines: list[dict]) -> tuple[dict, Resampled]:
  """Return the quality and counts of a point, from its lines, and its metrics on resamples of the examples."""
  task = experiment.task
  by_index = {e.index: e for e in task.examples}
  examples = [by_index[line['example']] for line in lines]
  texts = [line['prediction'] for line in lines]
  if task.postprocess is not None:
    texts = [task.postprocess(text, example) for text, example in zip(texts, examples, strict=True)]
  judged = {name: _resampled(metric, examples, texts, experiment.seed) for name, metric in task.metrics.items()}
  quality, resampled = ({name: pair[i] for name, pair in judged.items()} for i in range(2))
  interval = {name: None if values is None else _interval(values) for name, values in resampled.items()}
  faults = [line['fault'] for line in lines if 'fault' in line]
  about = dict(examples=len(lines), faults=len(faults), fault=next(iter(faults), None))
  return about | dict(quality=quality, quality_ci=interval, counts=counts(point, lines)), resampled


def _resampled(
  metric: Callable, examples: list[Example], texts: list[str], seed: int
) -> tuple[float | None, np.ndarray | None]:
  """Return a metric and, where it is a function of sums of statistics, its values on resamples of the examples.

  What is no finite number is None.
  """
  if not hasattr(metric, 'statistics'):
    return _finite(float(metric(examples, texts))), None
  statistics = np.asarray(metric.statistics(examples, texts), np.float64)
  n = len(texts)  # [N, K]
  value = _finite(float(metric.combine(statistics.sum(0), n)))
  if n < 2 or value is None:
    return value, None
  drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), RESAMPLES)  # [R, N], of all points the same
  values = np.array([metric.combine(row, n) for row in drawn @ statistics])
  return value, values if np.isfinite(values).all() else None


def _finite(value: float) -> float | None:
  return value if np.isfinite(value) else None


def _gains(mine: Resampled, base: Resampled) -> dict[str, list[float]]:
  """Return the interval of each metric's difference to the reference on the very same examples."""
  both = [name for name in mine if mine[name] is not None and base.get(name) is not None]
  return {name: _interval(mine[name] - base[name]) for name in both}


def _interval(values: np.ndarray) -> list[float]:
  return [float(x) for x in np.percentile(values, BOUNDS)]


def counts(point: Point, lines: list[dict]) -> dict:
  """Return what decoding cost, summed over examples, and the rates that follow from it."""
  total: dict[str, Any] = {name: _sum(lines, name) for name in (*PER_MODEL, *PER_ROW, *BY_POSITION)}
  total['deferral_rate'] = _deferral_rate(point, lines, total)
  total['acceptance'] = total['accepted'] / total['tested'] if total['tested'] else None
  total['tokens_per_round'] = total['emitted'] / total['rounds'] if total['rounds'] else None
  total['length'] = total['emitted'] / len(lines)
  total['cut_off'] = sum(line['cut_off'] for line in lines) / len(lines)
  return total


def _sum(lines: list[dict], name: str) -> int | list[int]:
  """Sum a count over lines; a histogram may be longer in one line than in another."""
  first = lines[0][name]
  if not isinstance(first, list):
    return sum(line[name] for line in lines)
  total = [0] * max(len(line[name]) for line in lines)
  for line in lines:
    for i, n in enumerate(line[name]):
      total[i] += n
  return total


def _deferral_rate(point: Point, lines: list[dict], total: dict) -> float | None:
  """Return the share of tokens (of a sequence cascade: of texts) at which the large model was asked to write."""
  method = point.build()
  if isinstance(method, SequenceCascade):
    return sum(line['calls'][1] > 0 for line in lines) / len(lines)
  decides = any(isinstance(p, Verify) and p.defer is not None for p in method.phases)
  if not total['emitted']:
    return None
  if decides:
    return total['deferred'] / total['emitted']
  if method.kind == 'token_cascade':
    return sum(s < 0 for line in lines for s in line['source']) / total['emitted']
  return None


# ---- latency ----


def _seconds(timings: Sequence[dict]) -> dict[tuple, dict]:
  """Return for each batch size and point {examples: (median seconds over trials, tokens, trials)}.

  Examples of which a sequence ended as a fault in any trial are left out.
  """
  raw: dict[tuple, dict] = {}
  named = lambda line: (line['temperature'], line['batch'], line['curve'], str(line['value']))
  faulty = {(*named(line), *line['examples']) for line in timings if line.get('faults')}
  for line in timings:
    key = named(line)
    if (*key, *line['examples']) in faulty:
      continue
    raw.setdefault(key, {}).setdefault(tuple(line['examples']), []).append((line['seconds'], line['tokens']))
  return {
    key: {group: (float(np.median([s for s, _ in rows])), rows[0][1], len(rows)) for group, rows in groups.items()}
    for key, groups in raw.items()
  }


def _latency(mine: dict | None, reference: dict | None, seed: int) -> dict | None:
  """Return the times of a point and their ratio to the reference on the very same examples."""
  if not mine:
    return None
  seconds = np.array([s for s, _, _ in mine.values()])
  tokens = sum(t for _, t, _ in mine.values())
  low, middle, high = np.percentile(seconds, (25, 50, 75))
  record = dict(
    median_s=float(middle),
    iqr_s=[float(low), float(high)],
    tokens_per_s=float(tokens / seconds.sum()),
    trials=max(n for *_, n in mine.values()),
    examples=sum(len(g) for g in mine),
    ratio=None,
    ratio_ci=None,
  )
  if not reference:
    return record
  both = [g for g in mine if g in reference]
  if not both:
    return record
  pairs = np.array([(reference[g][0], mine[g][0]) for g in both])  # [N, 2]
  record['ratio'] = float(pairs[:, 0].sum() / pairs[:, 1].sum())
  n = len(pairs)
  if n > 1:
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), RESAMPLES) @ pairs
    record['ratio_ci'] = _interval(drawn[:, 0] / drawn[:, 1])
  return record


def _predicted(
  experiment: Experiment, point: Point, counted: dict | None, floor: dict | None, timed: dict[tuple, dict]
) -> dict | None:
  """Return what theory says of the measured acceptance and forward times, where it is about the same reference.

  The cost of a round on top of its calls is taken from the times of the reference, whose round is one token. That of a
  call of the drafter is taken from the times of the drafter alone, if it was timed: a loop of small steps costs more.
  """
  method = point.build()
  reference = experiment.reference_point.build()
  if counted is None or floor is None or isinstance(method, SequenceCascade):
    return None
  ensemble = method.kind in cost_model.ENSEMBLES
  over, models = ('ensemble', method.slots) if ensemble else ('autoregressive', method.slots[-1:])
  if reference.kind != over or {*reference.slots} != {*models}:
    return None
  forward = [cost_model.by_width(times) for times in floor['forward_s'].values()]
  a_token = lambda some: sum(s for s, _, _ in some.values()) / sum(t for _, t, _ in some.values())
  overhead = 0.0
  draft = forward[method.slots[0]][1]
  if mine := timed.get(_named(experiment.reference_point)):
    overhead = max(0.0, a_token(mine) - sum(forward[m][1] for m in reference.slots))
  alone = [p for p in experiment.points if p.curve.method is autoregressive and _named(p) in timed]
  for other in alone if method.slots[0] != method.slots[-1] else ():
    if other.build().slots == method.slots[:1]:
      draft = max(draft, a_token(timed[_named(other)]))
  return cost_model.predict_method(method, counted, cost_model.Costs(draft, forward[method.slots[-1]], overhead))
