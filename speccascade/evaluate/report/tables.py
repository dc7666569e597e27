"""The papers' tables from results.

A table is {'title', 'columns', 'rows', 'note'}; cells are texts, numbers, or None for an empty cell.
Narasimhan et al. 2024, "Faster Cascades via Speculative Decoding", Table 2;
Fu et al. 2025, "Fast Large Language Model Collaborative Decoding via Speculation", Tables 2, 3 and 5.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

from speccascade.evaluate.report import points as pts

Cell = str | float | int | None
Table = dict[str, Any]

COUNTS = {
  'tokens': 'length',
  'cut off': 'cut_off',
  'accepted': 'acceptance',
  'tokens/round': 'tokens_per_round',
  'deferred': 'deferral_rate',
}


def tables(results: dict) -> list[Table]:
  """Return every table that the results have the numbers for, by temperature and batch size, then the studies'."""
  made = []
  for title, points in pts.groups(results):
    made.append(summary(results, title, points))
    if results['reference'] == pts.LARGE:
      made.append(_cascades(results, title, points))
    made.append(_collaborative(results, title, points))
    made.append(_deferral(results, title, points))
    made.append(_prediction(title, points))
  return [t for t in made if t is not None] + results.get('studies', [])


# ---- along a curve ----


def matching_speed(points: Sequence[dict], metric: str, wanted: float) -> float | None:
  """Find the largest speed-up at which a curve has at least the wanted quality.

  Between neighbours both quality and speed-up are taken to be linear in the parameter, unless it counts tokens: then
  only the points exist. Of the stretches where the quality reaches the wanted one, the fastest place is at a measured
  point or where the curve crosses the wanted quality. A curve that comes back up, or touches, counts; so does one
  that is above all along.

  Args:
    points: the points of one curve, in the order of its parameter.
    metric: the name of the quality.
    wanted: the quality to reach.

  Returns:
    The speed-up, None if the curve never reaches the quality.
  """
  known = _measured(points, metric)
  reached = [speed for value, speed in known if value >= wanted]
  if points and points[0]['parameter'] not in pts.DISCRETE:
    reached += [
      s0 + (s1 - s0) * (wanted - v0) / (v1 - v0)
      for (v0, s0), (v1, s1) in zip(known, known[1:])
      if min(v0, v1) < wanted <= max(v0, v1)
    ]
  return max(reached, default=None)


def best_within(points: Sequence[dict], metric: str, speed: float = 1.0) -> dict | None:
  """Find the measured point of best quality that is fast enough, the faster of equals.

  Args:
    points: points of any curves.
    metric: the name of the quality.
    speed: the least speed-up.

  Returns:
    The point, None if none is fast enough.
  """
  able = [p for p in points if None not in (pts.quality(p, metric), pts.ratio(p)) and pts.ratio(p) >= speed]
  return max(able, key=lambda p: (pts.quality(p, metric), pts.ratio(p)), default=None)


def _measured(points: Sequence[dict], metric: str) -> list[tuple[float, float]]:
  pairs = [(pts.quality(p, metric), pts.ratio(p)) for p in points]
  return [pair for pair in pairs if None not in pair]


# ---- the tables, None without their numbers ----


def summary(results: dict, title: str, points: Sequence[dict]) -> Table:
  """Make one row for each point."""
  timed = any(pts.ratio(p) is not None for p in points)
  faulty = any(p.get('faults') for p in points)
  columns = _summary_columns(results, timed, faulty)
  rows = [[cell(p) for _, cell in columns] for some in pts.curves(points).values() for p in some]
  note = f'{points[0]["examples"]} examples. tokens: mean length of an output; cut off: share that reached the limit '
  note += 'of new tokens without an end.'
  if timed:
    note += f' Speed-up: time of {results["reference"]} over time, on the same examples.'
  if faulty:
    note += ' faults: outputs that ended where nothing could be drawn; judged by what they had until there, not timed.'
  return _table(f'Summary, {title}', [name for name, _ in columns], rows, note)


def _summary_columns(results: dict, timed: bool, faulty: bool) -> list[tuple[str, Callable[[dict], Cell]]]:
  metric = results['metric']
  columns = [('method', lambda p: p['curve']), ('setting', pts.setting)]
  columns += [('speed-up', pts.ratio)] if timed else []
  columns += [(pts.metric_name(m), functools.partial(pts.quality, metric=m)) for m in results['metrics']]
  columns += [('95 % of speed-up', lambda p: _interval(pts.ratio_interval(p)))] if timed else []
  columns += [(f'95 % of {pts.metric_name(metric)}', lambda p: _interval(pts.quality_interval(p, metric)))]
  columns += [(name, functools.partial(pts.count, name=key)) for name, key in COUNTS.items()]
  columns += [('tokens/s', lambda p: (p.get('latency') or {}).get('tokens_per_s'))] if timed else []
  return columns + ([('faults', lambda p: p['faults'])] if faulty else [])


def _cascades(results: dict, title: str, points: Sequence[dict]) -> Table | None:
  """Make both halves of the cascades paper's Table 2."""
  metric = results['metric']
  large = pts.first(points, results['reference'])
  if large is None or None in (pts.quality(large, metric), pts.ratio(large)):
    return None
  wanted = pts.quality(large, metric)
  rows = []
  for name, some in pts.curves(points).items():
    if name not in (results['reference'], pts.SMALL) and _measured(some, metric):
      some = pts.distinct(some)
      best = best_within(some, metric)
      cells = [None] * 3 if best is None else [pts.quality(best, metric), pts.setting(best), pts.ratio(best)]
      rows.append([name, matching_speed(some, metric, wanted), *cells])
  if not rows:
    return None
  shown = pts.metric_name(metric)
  note = f"Speed-up at the fastest place of each curve that has the large model's {shown}, {wanted:.2f}, interpolated "
  note += 'between settings.'
  missed = [row[0] for row in rows if row[1] is None]
  if missed:
    note += f' –: never reaches it ({", ".join(missed)}).'
  note += f' Then the best measured {shown} of a setting that is no slower than the large model.'
  columns = ['method', "speed-up at the large model's quality", f'best {shown} in its time', 'at', 'speed-up there']
  return _table(f"Quality against the large model's, {title}", columns, rows, note)


def _collaborative(results: dict, title: str, points: Sequence[dict]) -> Table | None:
  """Make the table of each method of decoding the ensemble, at its best setting, over the standard one."""
  name = results['reference'] if results['reference'] != pts.LARGE else 'ensemble'
  standard = pts.first(points, name)
  if standard is None or not pts.ratio(standard):
    return None
  metric = results['metric']
  rows = []
  for curve, some in pts.curves(points).items():
    timed = [p for p in some if pts.ratio(p) is not None]
    if curve not in (pts.LARGE, pts.SMALL) and timed:
      p = max(timed, key=pts.ratio)
      speed = pts.ratio(p) / pts.ratio(standard)
      rows.append([curve, pts.setting(p), p['latency']['tokens_per_s'], speed, pts.quality(p, metric)])
  columns = ['method', 'best setting', 'tokens/s', f'speed-up over {name}', pts.metric_name(metric)]
  note = (
    'The fastest setting of each. Methods of one combination sample from one distribution; their quality differs by '
  )
  note += 'chance. The speed-up is of times on the same examples; Fu et al. divide tokens per second.'
  return _table(f'Collaborative decoding, {title}', columns, rows, note) if len(rows) > 1 else None


def _deferral(results: dict, title: str, points: Sequence[dict]) -> Table | None:
  """Make the table of quality by the share of tokens that are left to the large model."""
  metric = results['metric']
  ends = [(pts.first(points, name), share) for name, share in ((pts.SMALL, 0.0), (pts.LARGE, 1.0))]
  rows = [[p['curve'], '', share, pts.quality(p, metric)] for p, share in ends if p is not None]
  deferring = []
  for some in pts.curves(points).values():
    known = [p for p in some if pts.count(p, 'deferral_rate') is not None]
    deferring += sorted(known, key=lambda p: pts.count(p, 'deferral_rate'))
  rows += [[p['curve'], pts.setting(p), pts.count(p, 'deferral_rate'), pts.quality(p, metric)] for p in deferring]
  note = 'deferred: share of tokens (of a sequence cascade: of texts) at which the rule chose the large model.'
  columns = ['method', 'setting', 'deferred', pts.metric_name(metric)]
  return _table(f'Quality by deferral, {title}', columns, rows, note) if deferring else None


def _prediction(title: str, points: Sequence[dict]) -> Table | None:
  """Make the table of measured speed-ups next to those that acceptance and forward times predict."""
  rows = []
  for p in (p for some in pts.curves(points).values() for p in some):
    if p.get('predicted') and pts.ratio(p) is not None:
      predicted = [p['predicted'][k] for k in ('acceptance', 'cost_ratio', 'overhead', 'ratio')]
      rows.append([p['curve'], pts.setting(p), *predicted, pts.ratio(p), pts.ratio(p) / p['predicted']['ratio']])
  columns = ['method', 'setting', 'acceptance', 'cost ratio', 'overhead', 'predicted', 'measured']
  columns.append('measured / predicted')
  note = (
    'Predicted from acceptance, the times of forward passes and, where it was timed, of a token of the drafter alone '
    '(the cost ratio). Overhead is what a token of the reference costs on top of its calls, in forward passes of the '
    'large model, and is charged to every round. Not counted are the test of a block and the last round, in which a '
    'short text ends inside its block: where they matter measured falls short of predicted.'
  )
  return _table(f'Prediction and measurement, {title}', columns, rows, note) if rows else None


def _table(title: str, columns: list[str], rows: list[list[Cell]], note: str) -> Table:
  return dict(title=title, columns=columns, rows=rows, note=note)


def _interval(pair: Sequence[float] | None) -> str | None:
  return None if pair is None else f'{pair[0]:.2f} … {pair[1]:.2f}'
