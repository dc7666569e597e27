"""The papers' tables from results: pure functions of the dict that `results.json` holds.

A table is {'title', 'columns', 'rows', 'note'}; cells are texts, numbers, or None where there is nothing to say.
Narasimhan et al. 2024, "Faster Cascades via Speculative Decoding", Table 2;
Fu et al. 2025, "Fast Large Language Model Collaborative Decoding via Speculation", Tables 2, 3 and 5.
"""

from collections.abc import Sequence
import json
from typing import Any

LARGE, SMALL = 'target only', 'draft only'
DISCRETE = ('block', 'blocks', 'max_draft')  # between two of these values there is no method

Cell = str | float | int | None
Table = dict[str, Any]


def tables(results: dict) -> list[Table]:
  """Return every table that the results have the numbers for."""
  found = []
  for title, points in groups(results):
    found.append(summary(results, title, points))
    if results['reference'] == LARGE:
      found.append(cascades(results, title, points))
    found.append(collaborative(results, title, points))
    found.append(deferral(results, title, points))
    found.append(prediction(title, points))
  return [t for t in found if t is not None] + results.get('studies', [])


# ---- the points ----


def groups(results: dict) -> list[tuple[str, list[dict]]]:
  """Return the points by temperature and batch size, each group with its title."""
  batches = {p['batch'] for p in results['points']}
  found: dict[tuple, list] = {}
  for p in results['points']:
    found.setdefault((p['temperature'], p['batch']), []).append(p)
  return [(f'T = {t:g}' + (f', batch {b}' if len(batches) > 1 else ''), points) for (t, b), points in found.items()]


def curves(points: Sequence[dict]) -> dict[str, list[dict]]:
  """Return the points by curve, in the order of the parameter where it is a number, else as they were listed."""
  found: dict[str, list] = {}
  for p in points:
    found.setdefault(p['curve'], []).append(p)
  return {name: sorted(some, key=place) if _ordered(some) else some for name, some in found.items()}


def place(point: dict) -> float | None:
  """Return a point's value as one number, the first of several (the γ of the drafter, its λ), None without one."""
  value = point['value']
  value = value[0] if isinstance(value, (list, tuple)) and value else value
  return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def label(point: dict) -> str:
  """Return the parameter and value of a point, '' for a curve of one point; of one that stands for several, theirs."""
  values = ', '.join(map(text, point.get('values', [point['value']])))
  return '' if point['value'] is None else f'{letter(point["parameter"])} = {values}'


def distinct(points: Sequence[dict]) -> list[dict]:
  """Return the points of curves without repetition: settings that decoded alike are the one of median speed.

  They decoded alike where every count and every quality is the same, as those of a lossy rule do at T = 0. Such a
  point has their `values`.
  """
  found: dict[str, list[dict]] = {}
  for number, p in enumerate(points):
    decoded = [p['curve'], p['quality'], p['counts']] if p.get('counts') else number
    found.setdefault(json.dumps(decoded), []).append(p)
  return [_middle(some) if len(some) > 1 else some[0] for some in found.values()]


def _middle(points: list[dict]) -> dict:
  by_speed = sorted(points, key=lambda p: ratio(p) or 0.0)
  return by_speed[(len(points) - 1) // 2] | {'values': [p['value'] for p in points]}


def metric_name(metric: str) -> str:
  """Return a metric as papers write it."""
  return {'bleu': 'BLEU', 'rouge2': 'ROUGE-2'}.get(metric, metric.replace('_', ' '))


def quality(point: dict, metric: str) -> float | None:
  """Return a point's quality, None where it was not measured."""
  return (point.get('quality') or {}).get(metric)


def ratio(point: dict) -> float | None:
  """Return a point's speed-up over the reference, None where it was not timed."""
  return (point.get('latency') or {}).get('ratio')


def at(points: Sequence[dict], curve: str) -> dict | None:
  """Return the first point of a curve, None where there is no such curve."""
  return next((p for p in points if p['curve'] == curve), None)


def _ordered(points: Sequence[dict]) -> bool:
  return all(place(p) is not None for p in points)


def letter(parameter: str | None) -> str:
  """Return a parameter as the papers write it."""
  letters = {'alpha': 'α', 'block': 'γ', 'blocks': 'γ', 'mu': 'μ', 'weights': 'λ', 'lam': 'λ'}
  return letters.get(parameter, str(parameter))


# ---- along a curve ----


def matching_speed(points: Sequence[dict], metric: str, wanted: float) -> float | None:
  """Return the largest speed-up at which a curve has at least the wanted quality, None where it never has.

  `points` stand in the order of their parameter; between neighbours both quality and speed-up are taken to be linear
  in it (not where the parameter counts tokens: then the points alone exist). Of the stretches where the quality
  reaches the wanted one, the fastest place is at a measured point or where the curve crosses the wanted quality. A
  curve that comes back up, or touches, counts; so does one that is above all along.
  """
  known = _measured(points, metric)
  reached = [speed for value, speed in known if value >= wanted]
  if points and points[0]['parameter'] not in DISCRETE:
    reached += [
      s0 + (s1 - s0) * (wanted - v0) / (v1 - v0)
      for (v0, s0), (v1, s1) in zip(known, known[1:])
      if min(v0, v1) < wanted <= max(v0, v1)
    ]
  return max(reached, default=None)


def best_within(points: Sequence[dict], metric: str, speed: float = 1.0) -> dict | None:
  """Return the measured point of best quality that is at least so fast, the faster of equals; None without one."""
  able = [p for p in points if None not in (quality(p, metric), ratio(p)) and ratio(p) >= speed]
  return max(able, key=lambda p: (quality(p, metric), ratio(p)), default=None)


def _measured(points: Sequence[dict], metric: str) -> list[tuple[float, float]]:
  pairs = [(quality(p, metric), ratio(p)) for p in points]
  return [pair for pair in pairs if None not in pair]


# ---- the tables ----


def summary(results: dict, title: str, points: Sequence[dict]) -> Table:
  """Return one row for each point."""
  first, metrics = metric_name(results['metric']), results['metrics']
  timed, faulty = any(ratio(p) is not None for p in points), any(p.get('faults') for p in points)
  columns = ['method', 'setting', *(['speed-up'] if timed else []), *map(metric_name, metrics)]
  columns += ['95 % of speed-up'] if timed else []
  columns += [f'95 % of {first}', 'tokens', 'cut off', 'accepted', 'tokens/round', 'deferred']
  columns += (['tokens/s'] if timed else []) + (['faults'] if faulty else [])
  shown = [p for some in curves(points).values() for p in some]
  rows = [_row(results, p, timed) + ([p['faults']] if faulty else []) for p in shown]
  note = f'{points[0]["examples"]} examples. tokens: mean length of an output; cut off: share that reached the limit '
  note += 'of new tokens without an end.'
  if timed:
    note += f' Speed-up: time of {results["reference"]} over time, on the same examples.'
  if faulty:
    note += ' faults: outputs that ended where nothing could be drawn; judged by what they had until there, not timed.'
  return _table(f'Summary, {title}', columns, rows, note)


def _row(results: dict, p: dict, timed: bool) -> list[Cell]:
  counted, took = p.get('counts') or {}, p.get('latency') or {}
  row = [p['curve'], label(p), *([ratio(p)] if timed else []), *(quality(p, m) for m in results['metrics'])]
  row += [_interval(took, 'ratio_ci')] if timed else []
  row += [_interval(p.get('quality_ci'), results['metric'])]
  row += [counted.get(k) for k in ('length', 'cut_off', 'acceptance', 'tokens_per_round', 'deferral_rate')]
  return row + ([took.get('tokens_per_s')] if timed else [])


def cascades(results: dict, title: str, points: Sequence[dict]) -> Table | None:
  """Return both halves of the cascades paper's Table 2, None where quality or time is missing."""
  metric, large = results['metric'], at(points, results['reference'])
  if large is None or quality(large, metric) is None or ratio(large) is None:
    return None
  rows, missed = [], []
  for name, some in curves(points).items():
    if name in (results['reference'], SMALL) or not _measured(some, metric):
      continue
    some = distinct(some)
    speed, best = matching_speed(some, metric, quality(large, metric)), best_within(some, metric)
    missed += [name] if speed is None else []
    row = [name, speed, *((None,) * 3 if best is None else (quality(best, metric), label(best), ratio(best)))]
    rows.append(row)
  shown = metric_name(metric)
  wanted = f"the large model's {shown}, {_number(quality(large, metric))}"
  note = f'Speed-up at the fastest place of each curve that has {wanted}, interpolated between settings.'
  if missed:
    note += f' –: never reaches it ({", ".join(missed)}).'
  note += f' Then the best measured {shown} of a setting that is no slower than the large model.'
  columns = ['method', "speed-up at the large model's quality", f'best {shown} in its time', 'at', 'speed-up there']
  return _table(f"Quality against the large model's, {title}", columns, rows, note) if rows else None


def collaborative(results: dict, title: str, points: Sequence[dict]) -> Table | None:
  """Return the speed of each way to decode the ensemble, at its best setting, over the standard one."""
  name = results['reference'] if results['reference'] != LARGE else 'ensemble'
  standard = at(points, name)
  if standard is None or not ratio(standard):
    return None
  rows = []
  for curve, some in curves(points).items():
    timed = [p for p in some if ratio(p) is not None]
    if curve in (LARGE, SMALL) or not timed:
      continue
    p = max(timed, key=ratio)
    row = [curve, label(p), p['latency']['tokens_per_s'], ratio(p) / ratio(standard), quality(p, results['metric'])]
    rows.append(row)
  columns = ['method', 'best setting', 'tokens/s', f'speed-up over {name}', metric_name(results['metric'])]
  note = 'The fastest setting of each. Methods of one combination have one law; their quality differs by chance. The '
  note += 'speed-up is of times on the same examples; Fu et al. divide tokens per second.'
  return _table(f'Collaborative decoding, {title}', columns, rows, note) if len(rows) > 1 else None


def deferral(results: dict, title: str, points: Sequence[dict]) -> Table | None:
  """Return quality by the share of tokens that are left to the large model, None where no method defers."""
  metric, rows = results['metric'], []
  for name, share in ((SMALL, 0.0), (LARGE, 1.0)):
    if at(points, name) is not None:
      rows.append([name, '', share, quality(at(points, name), metric)])
  ends = len(rows)
  for some in curves(points).values():
    known = [p for p in some if (p.get('counts') or {}).get('deferral_rate') is not None]
    known.sort(key=lambda p: p['counts']['deferral_rate'])
    rows += [[p['curve'], label(p), p['counts']['deferral_rate'], quality(p, metric)] for p in known]
  note = 'deferred: share of tokens (of a sequence cascade: of texts) at which the rule chose the large model.'
  columns = ['method', 'setting', 'deferred', metric_name(metric)]
  return _table(f'Quality by deferral, {title}', columns, rows, note) if len(rows) > ends else None


def prediction(title: str, points: Sequence[dict]) -> Table | None:
  """Return measured speed-ups beside those that acceptance and forward times predict, None without both."""
  rows = []
  for some in curves(points).values():
    for p in some:
      if p.get('predicted') and ratio(p) is not None:
        said = p['predicted']
        row = [p['curve'], label(p), said['acceptance'], said['cost_ratio'], said['overhead'], said['ratio'], ratio(p)]
        rows.append([*row, ratio(p) / said['ratio']])
  columns = ['method', 'setting', 'acceptance', 'cost ratio', 'overhead', 'predicted', 'measured']
  columns.append('measured / predicted')
  note = (
    'Predicted from acceptance, the times of forward passes and, where it was timed, of a token of the drafter alone '
    '(the cost ratio). Overhead is what a token of the reference costs beside its calls, in forward passes of the '
    'large model, and is charged to every round. Not counted are the test of a block and the last round, in which a '
    'short text ends inside its block: where they matter measured falls short of predicted.'
  )
  return _table(f'Prediction and measurement, {title}', columns, rows, note) if rows else None


def _table(title: str, columns: list[str], rows: list[list[Cell]], note: str) -> Table:
  return dict(title=title, columns=columns, rows=rows, note=note)


def _interval(record: dict | None, name: str) -> str | None:
  pair = (record or {}).get(name)
  return None if pair is None else f'{_number(pair[0])} … {_number(pair[1])}'


# ---- as text ----


def text(cell: Any) -> str:
  """Return a cell, a value or a list of them for reading."""
  if cell is None:
    return '–'
  if isinstance(cell, (list, tuple)):
    return f'({", ".join(map(text, cell))})'
  return f'{cell:g}' if isinstance(cell, float) else str(cell)


def _number(x: float) -> str:
  return f'{x:.2f}'
