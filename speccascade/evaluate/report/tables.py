"""The papers' tables from results.

A table is {'title', 'columns', 'rows', 'note'}; cells are texts, numbers, or None for an empty cell.
Narasimhan et al. 2024, "Faster Cascades via Speculative Decoding", Table 2;
Fu et al. 2025, "Fast Large Language Model Collaborative Decoding via Speculation", Tables 2, 3 and 5.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import numpy as np

from speccascade.evaluate import intervals
from speccascade.evaluate.published import QUALITY
from speccascade.evaluate.report import points as pts
from speccascade.evaluate.report.points import Interval, PointResult

Cell = str | float | int | None
Table = dict[str, Any]

# The columns of a summary from counts and from times: their names, and what they are called in the results.
COUNTS = {
  'tokens': 'length',
  'cut off': 'cut_off',
  'accepted': 'acceptance',
  'tokens/round': 'tokens_per_round',
  'large calls/token': 'calls_per_token',
  'deferred': 'deferral_rate',
}
TIMES = {
  'tokens/s': 'tokens_per_s',
  'tokens/s ratio': 'tokens_per_s_ratio',
  'decode tokens/s': 'decode_tokens_per_s',
  'prefill': 'prefill_share',
  'steady tokens/s': 'steady_tokens_per_s',
  'steady ratio': 'steady_ratio',
}
NAMED = 3  # curves that a verdict names beside the first
PUBLISHED = 'published'  # ends the name of a column


class Column(NamedTuple):
  """A column of a table whose rows are points or curves.

  Attributes:
    name: Its title.
    cell: Returns the measured value of a row.
    published: Returns the published one, None where there is none.
  """

  name: str
  cell: Callable[[Any], Cell]
  published: Callable[[Any], Cell] | None = None


class _Along(NamedTuple):
  """What a table has of a curve."""

  point: PointResult  # the first
  speed: float | None  # at the wanted quality
  ci: Interval  # of the speed
  best: PointResult | None  # of those no slower than the reference


def tables(results: dict) -> list[Table]:
  """Return every table that the results have the numbers for, by temperature and batch size."""
  made = []
  for title, points in pts.groups(results):
    made.append(summary(results, title, points))
    if results['reference'] == pts.LARGE:
      made.append(_cascades(results, title, points))
    made.append(_collaborative(results, title, points))
    made.append(_deferral(results, title, points))
    made.append(_domains(title, points))
  return [t for t in made if t is not None]


def verdicts(results: dict) -> list[str]:
  """Return for each temperature and batch size a sentence on what was measured, where quality and time were."""
  said = (_verdict(results, title, points) for title, points in pts.groups(results))
  return [sentence for sentence in said if sentence is not None]


def _verdict(results: dict, title: str, points: Sequence[PointResult]) -> str | None:
  """Say which curves have a point with at least the reference's quality that is faster, and the fastest of each."""
  metric = results['metric']

  def reaches(p):
    base = pts.reference(results, points, p)
    known = base is not None and None not in (p.quality_of(metric), base.quality_of(metric), p.ratio)
    return p.quality_of(metric) >= base.quality_of(metric) if known else None

  judged = [p for p in pts.distinct(points) if p.curve != results['reference'] and reaches(p) is not None]
  if not judged or metric in pts.DESCRIPTIONS:
    return None
  name = pts.metric_name(metric)
  if not any(p.quality_of(metric) for p in judged):
    return f'{title}: The {name} is 0 at every point; examples.jsonl has the outputs: does the metric fit them?'
  wanted = f"the large model's {name}" if results['reference'] == pts.LARGE else f'the {name} of {results["reference"]}'
  wanted = f'{wanted} on these {judged[0].examples} examples'
  fastest: dict[str, PointResult] = {}
  for p in sorted(judged, key=lambda p: -p.ratio):
    if reaches(p) and p.ratio > 1:
      fastest.setdefault(p.curve, p)
  if not fastest:
    return f'{title}: No point is faster and has at least {wanted}.'
  best, *rest = fastest.values()
  first = f'{title}: {best.label} has at least {wanted} at {_times(best)}'
  if not rest:
    return f'{first}; no other curve does.' if len({p.curve for p in judged}) > 1 else f'{first}.'
  named = [f'{p.label} at {_times(p)}' for p in rest[:NAMED]]
  more = [f'{len(rest) - NAMED} more'] if len(rest) > NAMED else []
  return f'{first}; so {"has" if len(rest) == 1 else "have"} {_listed([*named, *more])}.'


def _times(point: PointResult) -> str:
  """Return a speed-up and its interval, where there is one."""
  interval = _interval(point.time('ratio_ci'))
  return f'{point.ratio:.2f}×' + (f' ({interval})' if interval else '')


def _listed(parts: Sequence[str]) -> str:
  return parts[0] if len(parts) == 1 else f'{", ".join(parts[:-1])} and {parts[-1]}'


def brief(results: dict, title: str, points: Sequence[PointResult]) -> Table:
  """Make one row for each point, as narrow as a terminal: quality and speed-up, how far their intervals reach."""
  metric = results['metric']

  def within(value, interval):
    if value is None or interval is None:
      return value
    return f'{value:.2f} ± {max(value - interval[0], interval[1] - value):.2f}'

  columns = [Column('method', lambda p: p.curve), Column('setting', lambda p: p.setting)]
  columns.append(Column(pts.metric_name(metric), lambda p: within(p.quality_of(metric), p.interval_of(metric))))
  if any(p.ratio is not None for p in points):
    columns.append(Column('speed-up', lambda p: within(p.ratio, p.time('ratio_ci'))))
  columns += [Column('faults', lambda p: p.faults)] if any(p.faults for p in points) else []
  rows = [p for some in pts.curves(points).values() for p in some]
  return _filled(title, columns, rows, '± reaches to the farther end of the 95 % interval.')


# ---- along a curve ----


def matching_speed(points: Sequence[PointResult], metric: str, wanted: float) -> float | None:
  """Return the largest speed-up at which a curve has at least the wanted quality, None if it never has.

  Between neighbours both quality and speed-up are taken to be linear in the parameter, unless it counts tokens: then
  only the points exist. A curve that rises again, or touches, counts; so does one that is above all along.

  Args:
    points: The points of one curve, in the order of its parameter.
    metric: The name of the quality.
    wanted: The quality to reach.
  """
  measured = np.array(_measured(points, metric))
  if not len(measured):
    return None
  between = pts.between(points)
  speed = intervals.reaching(measured[None, :, 0], measured[None, :, 1], np.array([wanted]), between=between)[0]
  return float(speed) if np.isfinite(speed) else None


def best_within(points: Sequence[PointResult], metric: str) -> PointResult | None:
  """Return the point of best quality that is no slower than the reference, the faster of equals; None without one."""
  able = [p for p in points if None not in (p.quality_of(metric), p.ratio) and p.ratio >= 1]
  return max(able, key=lambda p: (p.quality_of(metric), p.ratio), default=None)


def _measured(points: Sequence[PointResult], metric: str) -> list[tuple[float, float]]:
  pairs = [(p.quality_of(metric), p.ratio) for p in points]
  return [pair for pair in pairs if None not in pair]


# ---- the tables, None without their numbers ----


def summary(results: dict, title: str, points: Sequence[PointResult]) -> Table:
  """Make one row for each point."""
  timed = any(p.ratio is not None for p in points)
  faulty = any(p.faults for p in points)
  columns = [Column('method', lambda p: p.curve), Column('setting', lambda p: p.setting)]
  columns += _measured_columns(results, points, timed)
  columns += [Column('faults', lambda p: p.faults)] if faulty else []
  rows = [p for some in pts.curves(points).values() for p in some]
  note = f'{points[0].examples} examples. tokens: mean length of an output; cut off: share that reached the limit '
  note += 'of new tokens without an end; large calls/token: calls of the large model by token of the output.'
  if timed:
    note += f' Speed-up: time of {results["reference"]} over time, on the same examples; tokens/s ratio: tokens per '
    note += f'second over those of {results["reference"]}. Its interval is over groups of examples that were timed '
    note += 'together, of six or more of them.'
  if _any_timed(points, 'prefill_share'):
    note += ' prefill: share of the time that reading the prompts takes; decode tokens/s: without that time.'
  if _any_timed(points, 'steady_tokens_per_s'):
    note += ' steady: of a queue, while every row is in use.'
  if faulty:
    note += ' faults: outputs that ended where nothing could be drawn; judged by what they had until there, not timed. '
    note += next(p.fault for p in points if p.fault)
  return _filled(f'Summary, {title}', columns, rows, note)


def _measured_columns(results: dict, points: Sequence[PointResult], timed: bool) -> list[Column]:
  """Return the columns of a summary that have measures, each with what was published."""

  def known(measure):
    return functools.partial(pts.published, results, measure=measure)

  def quality(m):
    return Column(pts.metric_name(m), lambda p: p.quality_of(m), known(f'{QUALITY}{m}'))

  metric = results['metric']
  columns = [Column('speed-up', lambda p: p.ratio, known('speedup'))] if timed else []
  columns += map(quality, results['metrics'])
  if timed:
    columns.append(Column('95 % of speed-up', lambda p: _interval(p.time('ratio_ci'))))
    columns.append(Column('groups', lambda p: p.time('groups')))
  columns.append(Column(f'95 % of {pts.metric_name(metric)}', lambda p: _interval(p.interval_of(metric))))

  def counted(key):
    return lambda p: p.count(key)

  columns += [Column(name, counted(key), known(key)) for name, key in COUNTS.items()]

  def of_times(key):
    return lambda p: p.time(key)

  for name, key in TIMES.items() if timed else ():
    if key == 'tokens_per_s' or _any_timed(points, key):
      columns.append(Column(name, of_times(key), known(key)))
  return columns


def _any_timed(points: Sequence[PointResult], name: str) -> bool:
  return any(p.time(name) is not None for p in points)


def _cascades(results: dict, title: str, points: Sequence[PointResult]) -> Table | None:
  """Make both halves of the cascades paper's Table 2."""
  metric = results['metric']
  large = pts.first(points, results['reference'])
  if large is None or None in (large.quality_of(metric), large.ratio) or metric in pts.DESCRIPTIONS:
    return None
  wanted = large.quality_of(metric)
  rows = []
  for name, some in pts.curves(points).items():
    if name not in (results['reference'], pts.SMALL) and _measured(some, metric):
      alike = pts.distinct(some)
      speed = matching_speed(alike, metric, wanted)
      rows.append(_Along(some[0], speed, some[0].matched_ci, best_within(alike, metric)))
  if not rows:
    return None
  shown = pts.metric_name(metric)

  def known(measure):
    return lambda row: pts.published(results, row.point, measure, of_curve=True)

  def of_best(value):
    return lambda row: None if row.best is None else value(row.best)

  columns = [
    Column('method', lambda row: row.point.curve),
    Column("speed-up at the large model's quality", lambda row: row.speed, known('speedup_at_quality')),
  ]
  judged = any(row.ci for row in rows)
  if judged:
    ranks = _ranks(rows)
    columns.append(Column('95 % of it', lambda row: _interval(row.ci)))
    columns.append(Column('rank', lambda row: ranks.get(row.point.curve)))
  columns += [
    Column(f'best {shown} in its time', of_best(lambda p: p.quality_of(metric)), known('best_quality')),
    Column('at', of_best(lambda p: p.setting)),
    Column('speed-up there', of_best(lambda p: p.ratio), known('best_quality_speedup')),
  ]
  note = _cascades_note(rows, f'{shown}, {wanted:.2f}', judged)
  note += f' Then the best measured {shown} of a setting that is no slower than the large model.'
  return _filled(f"Quality against the large model's, {title}", columns, rows, note)


def _cascades_note(rows: Sequence[_Along], wanted: str, judged: bool) -> str:
  """Return what the first half of the table shows, and which methods are equal to others."""
  note = f"Speed-up at the fastest setting of each curve that has the large model's {wanted}, interpolated between "
  note += 'settings.'
  if missed := [row.point.curve for row in rows if row.speed is None]:
    note += f' –: never reaches it ({", ".join(missed)}).'
  if judged:
    note += ' A maximum over noisy points is too large; its interval is from resampled groups of examples, quality and '
    note += 'time together (–: some never reach the quality). rank: equal to the fastest where intervals overlap.'

  def within(low, high):
    return (low is None or low <= 1) and high >= 1

  if level := [row.point.curve for row in rows if row.ci and within(*row.ci)]:
    note += f' Equal in speed to the large model: {", ".join(level)}.'
  return note


def _ranks(rows: Sequence[_Along]) -> dict[str, str]:
  """Return by curve whether it is the fastest, or equal to that or slower by their intervals."""
  known = [row for row in rows if row.speed is not None and row.ci]
  if not known:
    return {}
  best = max(known, key=lambda row: row.speed)
  low = best.ci[0]
  ranks = {row.point.curve: 'equal' if low is None or row.ci[1] >= low else 'slower' for row in known}
  return ranks | {best.point.curve: 'fastest'}


def _collaborative(results: dict, title: str, points: Sequence[PointResult]) -> Table | None:
  """Make the table of each method of decoding the ensemble, at its best setting, over the standard one."""
  name = results['reference'] if results['reference'] != pts.LARGE else 'ensemble'

  def standard(p):
    return pts.reference(results | {'reference': name}, points, p)

  metric = results['metric']
  rows = []
  for curve, some in pts.curves(points).items():
    timed = [p for p in some if p.ratio is not None and standard(p) is not None and standard(p).ratio]
    if curve not in (pts.LARGE, pts.SMALL) and timed:
      rows.append(max(timed, key=lambda p: p.ratio / standard(p).ratio))

  def known(measure):
    return lambda p: pts.published(results, p, measure, of_curve=True)

  def rate(p):
    return p.time('tokens_per_s')

  columns = [
    Column('method', lambda p: p.curve),
    Column('best setting', lambda p: p.setting),
    Column('tokens/s', rate, known('best_tokens_per_s')),
    Column(f'speed-up over {name}', lambda p: p.ratio / standard(p).ratio, known('best_speedup')),
    Column('tokens/s ratio', lambda p: rate(p) / rate(standard(p)), known('best_tokens_per_s_ratio')),
    Column(pts.metric_name(metric), lambda p: p.quality_of(metric)),
  ]
  note = (
    'The fastest setting of each. Methods of one combination sample from one distribution; their quality differs by '
  )
  note += 'chance. The speed-up is of times on the same examples; Fu et al. divide tokens per second.'
  if sum(p.curve == name for p in points) > 1:
    note += f' Each setting is compared with {name} at the same value.'
  return _filled(f'Collaborative decoding, {title}', columns, rows, note) if len(rows) > 1 else None


def _deferral(results: dict, title: str, points: Sequence[PointResult]) -> Table | None:
  """Make the table of quality by the share of tokens that are left to the large model."""
  metric = results['metric']
  ends = [(pts.first(points, name), share) for name, share in ((pts.SMALL, 0.0), (pts.LARGE, 1.0))]
  rows = [[p.curve, '', share, p.quality_of(metric)] for p, share in ends if p is not None]
  deferring = []
  for some in pts.curves(points).values():
    known = [p for p in some if p.count('deferral_rate') is not None]
    deferring += sorted(known, key=lambda p: p.count('deferral_rate'))
  rows += [[p.curve, p.setting, p.count('deferral_rate'), p.quality_of(metric)] for p in deferring]
  note = 'deferred: share of tokens (of a sequence cascade: of texts) at which the rule chose the large model.'
  columns = ['method', 'setting', 'deferred', pts.metric_name(metric)]
  return dict(title=f'Quality by deferral, {title}', columns=columns, rows=rows, note=note) if deferring else None


def _domains(title: str, points: Sequence[PointResult]) -> Table | None:
  """Make one row for each point and domain of the examples."""
  rows = []
  for p in (p for some in pts.curves(points).values() for p in some):
    speeds = p.time('ratio_by_domain') or {}
    for domain, c in sorted((p.count('acceptance_by_domain') or {}).items()):
      rates = [x / y if y else None for x, y in ((c['accepted'], c['tested']), (c['emitted'], c['rounds']))]
      rows.append([p.curve, p.setting, domain, c['examples'], *rates, speeds.get(domain)])
  columns = ['method', 'setting', 'domain', 'examples', 'accepted', 'tokens/round', 'speed-up']
  note = (
    "tokens/round: what a call of the large model yields, its own token included, Spec-Bench's mean accepted tokens. "
    'Speed-up: over the examples of the domain that were timed.'
  )
  return dict(title=f'By domain, {title}', columns=columns, rows=rows, note=note) if rows else None


def _filled(title: str, columns: Sequence[Column], rows: Sequence[Any], note: str) -> Table:
  """Make a table; next to a column for which a row has a published value is one with those."""
  shown = []
  for column in columns:
    shown.append(column)
    if column.published is not None and any(column.published(row) is not None for row in rows):
      shown.append(Column(f'{column.name}, {PUBLISHED}', column.published))
      note = note if PUBLISHED in note else f'{note} {PUBLISHED}: the value of the paper for this cell.'
  cells = [[c.cell(row) for c in shown] for row in rows]
  return dict(title=title, columns=[c.name for c in shown], rows=cells, note=note)


def _interval(pair: Sequence[float | None] | None) -> str | None:
  return None if pair is None else ' … '.join('–' if x is None else f'{x:.2f}' for x in pair)
