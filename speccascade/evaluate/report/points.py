"""The points of `results.json`, a record for each setting of a curve, temperature and batch size: how to read them."""

from collections.abc import Sequence
import functools
import itertools
import json
from typing import Any

from speccascade.evaluate.published import match

LARGE = 'target only'
SMALL = 'draft only'
DESCRIPTIONS = ('words',)  # metrics of which more is not better
DISCRETE = ('block', 'blocks', 'max_draft')  # between two of these values there is no method
LETTERS = {'alpha': 'α', 'block': 'γ', 'blocks': 'γ', 'mu': 'μ', 'weights': 'λ', 'lam': 'λ'}

Point = dict[str, Any]


# ---- groups of points ----


def groups(results: dict) -> list[tuple[str, list[Point]]]:
  """Return the title and the points of each temperature and batch size."""
  batches = {p['batch'] for p in results['points']}
  grouped: dict[tuple, list] = {}
  for p in results['points']:
    grouped.setdefault((p['temperature'], p['batch']), []).append(p)
  return [(f'T = {t:g}' + (f', batch {b}' if len(batches) > 1 else ''), points) for (t, b), points in grouped.items()]


def curves(points: Sequence[Point]) -> dict[str, list[Point]]:
  """Return the points of each curve, ordered by its parameter if that is a number and as listed if not."""
  grouped: dict[str, list] = {}
  for p in points:
    grouped.setdefault(p['curve'], []).append(p)
  for name, some in grouped.items():
    if all(number(p) is not None for p in some):
      grouped[name] = sorted(some, key=number)
  return grouped


def between(points: Sequence[Point]) -> bool:
  """Return whether there are methods between the points of a curve, so that their numbers may be interpolated."""
  return points[0]['parameter'] not in DISCRETE and all(number(p) is not None for p in points)


def alike(points: Sequence[Point]) -> list[list[Point]]:
  """Return points of any curves in groups of neighbours of a curve that decoded alike.

  Those have the same counts and qualities, as a lossy rule's at T = 0.
  """

  def decoded(numbered: tuple[int, Point]) -> str:
    index, p = numbered
    return json.dumps([p['curve'], p['quality'], p['counts']] if p.get('counts') else index)

  return [[p for _, p in some] for _, some in itertools.groupby(enumerate(points), decoded)]


def distinct(points: Sequence[Point]) -> list[Point]:
  """Return one point of all that decoded `alike`, and so have the same times too; it gets all their `values`."""
  some = alike(points)
  return [same[0] | {'values': [p['value'] for p in same]} if len(same) > 1 else same[0] for same in some]


def reference(results: dict, points: Sequence[Point], point: Point) -> Point | None:
  """Return what a point is compared with among points of its temperature and batch size, None without one.

  It is the reference curve's one point or, where that curve has several, the one of the same value.
  """
  some = [p for p in points if p['curve'] == results['reference']]
  return some[0] if len(some) == 1 else next((p for p in some if p['value'] == point['value']), None)


def first(points: Sequence[Point], curve: str) -> Point | None:
  """Return the first point of a curve, None if there is no such curve."""
  return next((p for p in points if p['curve'] == curve), None)


# ---- what was measured of a point ----


def quality(point: Point, metric: str) -> float | None:
  """Return the value of a metric, None if it was not measured."""
  return (point.get('quality') or {}).get(metric)


def quality_interval(point: Point, metric: str) -> list[float] | None:
  """Return the 95 % interval of a metric, None without one."""
  return (point.get('quality_ci') or {}).get(metric)


def timing(point: Point, name: str) -> Any:
  """Return what was timed of a point by its name, None if it was not."""
  return (point.get('latency') or {}).get(name)


# The speed-up over the reference and its 95 % interval, None if they were not measured.
ratio = functools.partial(timing, name='ratio')
ratio_interval = functools.partial(timing, name='ratio_ci')


def count(point: Point, name: str) -> Any:
  """Return one of the counts and rates, None if nothing was counted."""
  return (point.get('counts') or {}).get(name)


def number(point: Point) -> float | None:
  """Return the value of the parameter as one number, the first of several; None if it is no number."""
  value = point['value']
  value = value[0] if isinstance(value, (list, tuple)) and value else value
  return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


# ---- what was published of a point ----


def published(results: dict, point: Point, measure: str, *, of_curve: bool = False) -> float | None:
  """Return the published value of a measure of a point or of its complete curve, None without one."""
  return match(results.get('published') or [], point | {'value': None} if of_curve else point, measure)


# ---- as text ----


def text(value: Any) -> str:
  """Return a value, a list of them, or a dash for None, to be read."""
  if value is None:
    return '–'
  if isinstance(value, (list, tuple)):
    return f'({", ".join(map(text, value))})'
  return f'{value:g}' if isinstance(value, float) else str(value)


def letter(parameter: str | None) -> str:
  """Return a parameter as the papers write it."""
  return LETTERS.get(parameter, str(parameter))


def setting(point: Point) -> str:
  """Return the parameter and value, or all values of merged points; '' for a curve of one point."""
  values = ', '.join(map(text, point.get('values', [point['value']])))
  return '' if point['value'] is None else f'{letter(point["parameter"])} = {values}'


def named(point: Point) -> str:
  """Return the curve and the setting."""
  return f'{point["curve"]} at {setting(point)}' if setting(point) else point['curve']


def metric_name(metric: str) -> str:
  """Return a metric as the papers write it."""
  return {'bleu': 'BLEU', 'chrf': 'chrF', 'rouge2': 'ROUGE-2'}.get(metric, metric.replace('_', ' '))
