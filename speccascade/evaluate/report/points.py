"""The points of `results.json`, one for each setting of a curve, temperature and batch size: how to read them."""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import json
from typing import Any

from speccascade.evaluate.published import match

LARGE = 'target only'
SMALL = 'draft only'
DESCRIPTIONS = ('words',)  # metrics of which more is not better
DISCRETE = ('block', 'blocks', 'max_draft')  # between two of these values there is no method
LETTERS = {'alpha': 'α', 'block': 'γ', 'blocks': 'γ', 'mu': 'μ', 'weights': 'λ', 'lam': 'λ'}

Interval = Sequence[float] | None


@dataclasses.dataclass(frozen=True)
class Times:
  """The times of a point, and their ratios to the reference's on the very same examples, None where there are none.

  `ratio` is of times, `tokens_per_s_ratio` of tokens per second, `steady_ratio` of those while every row is in use;
  `groups` is how many times of each the ratios and their intervals are of.
  """

  median_s: float
  iqr_s: Sequence[float]
  tokens_per_s: float
  trials: int
  examples: int
  steady_tokens_per_s: float | None = None
  prefill_share: float | None = None
  decode_tokens_per_s: float | None = None
  groups: int | None = None
  ratio: float | None = None
  ratio_ci: Interval = None
  tokens_per_s_ratio: float | None = None
  tokens_per_s_ratio_ci: Interval = None
  steady_ratio: float | None = None
  ratio_by_domain: Mapping[str, float | None] | None = None


@dataclasses.dataclass(frozen=True)
class PointResult:
  """What was measured of a point at a temperature and a batch size, None where it was not.

  Its quality and the 95 % intervals of that and of the difference to the reference's are by metric; counts and rates
  are by name.
  """

  curve: str
  parameter: str | None
  value: Any
  temperature: float
  batch: int
  examples: int = 0  # of the quality
  faults: int = 0
  fault: str | None = None  # the first
  quality: Mapping[str, float | None] | None = None
  quality_ci: Mapping[str, Interval] | None = None
  counts: Mapping[str, Any] | None = None
  quality_gain_ci: Mapping[str, Interval] = dataclasses.field(default_factory=dict)
  latency: Times | None = None
  matched_ci: Sequence[float | None] | None = None  # of the curve's speed-up at the reference's quality
  values: Sequence[Any] = ()  # of points that are one, for they decoded alike

  @classmethod
  def from_json(cls, record: Mapping[str, Any]) -> 'PointResult':
    """Return a point of `results.json`."""
    return cls(**{**record, 'latency': record['latency'] and Times(**record['latency'])})

  def to_json(self) -> dict[str, Any]:
    """Return the point for `results.json`."""
    return {name: value for name, value in dataclasses.asdict(self).items() if name != 'values'}

  def quality_of(self, metric: str) -> float | None:
    """Return the value of a metric."""
    return (self.quality or {}).get(metric)

  def interval_of(self, metric: str) -> Interval:
    """Return the 95 % interval of a metric."""
    return (self.quality_ci or {}).get(metric)

  def count(self, name: str) -> Any:
    """Return one of the counts and rates."""
    return (self.counts or {}).get(name)

  def time(self, name: str) -> Any:
    """Return one of the times and ratios."""
    return None if self.latency is None else getattr(self.latency, name)

  @property
  def ratio(self) -> float | None:
    """The speed-up over the reference."""
    return self.time('ratio')

  @property
  def number(self) -> float | None:
    """The value of the parameter as one number, the first of several; None if it is no number."""
    value = self.value[0] if isinstance(self.value, (list, tuple)) and self.value else self.value
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

  @property
  def setting(self) -> str:
    """The parameter and value, or all values of merged points; '' for a curve of one point."""
    values = ', '.join(map(text, self.values or [self.value]))
    return '' if self.value is None else f'{letter(self.parameter)} = {values}'

  @property
  def label(self) -> str:
    """The curve and the setting."""
    return f'{self.curve} at {self.setting}' if self.setting else self.curve


# ---- groups of points ----


def read(text: str) -> dict[str, Any]:
  """Return the results in the text of `results.json`."""
  results = json.loads(text)
  return results | {'points': list(map(PointResult.from_json, results['points']))}


def groups(results: dict) -> list[tuple[str, list[PointResult]]]:
  """Return the title and the points of each temperature and batch size."""
  batches = {p.batch for p in results['points']}
  grouped: dict[tuple, list] = {}
  for p in results['points']:
    grouped.setdefault((p.temperature, p.batch), []).append(p)
  return [(f'T = {t:g}' + (f', batch {b}' if len(batches) > 1 else ''), points) for (t, b), points in grouped.items()]


def curves(points: Sequence[PointResult]) -> dict[str, list[PointResult]]:
  """Return the points of each curve, ordered by its parameter if that is a number and as listed if not."""
  grouped: dict[str, list] = {}
  for p in points:
    grouped.setdefault(p.curve, []).append(p)
  for name, some in grouped.items():
    if all(p.number is not None for p in some):
      grouped[name] = sorted(some, key=lambda p: p.number)
  return grouped


def between(points: Sequence[PointResult]) -> bool:
  """Return whether there are methods between the points of a curve, so that their numbers may be interpolated."""
  return points[0].parameter not in DISCRETE and all(p.number is not None for p in points)


def alike(points: Sequence[PointResult]) -> list[list[PointResult]]:
  """Return points of any curves in groups of neighbours of a curve that decoded alike.

  Those have the same counts and qualities, as a lossy rule's at T = 0.
  """

  def decoded(numbered: tuple[int, PointResult]) -> str:
    index, p = numbered
    return json.dumps([p.curve, p.quality, p.counts] if p.counts else index)

  return [[p for _, p in some] for _, some in itertools.groupby(enumerate(points), decoded)]


def distinct(points: Sequence[PointResult]) -> list[PointResult]:
  """Return one point of all that decoded `alike`, and so have the same times too; it gets all their `values`."""
  some = alike(points)

  def merged(same):
    return dataclasses.replace(same[0], values=[p.value for p in same])

  return [merged(same) if len(same) > 1 else same[0] for same in some]


def reference(results: dict, points: Sequence[PointResult], point: PointResult) -> PointResult | None:
  """Return what a point is compared with among points of its temperature and batch size, None without one.

  It is the reference curve's one point or, where that curve has several, the one of the same value.
  """
  some = [p for p in points if p.curve == results['reference']]
  return some[0] if len(some) == 1 else next((p for p in some if p.value == point.value), None)


def first(points: Sequence[PointResult], curve: str) -> PointResult | None:
  """Return the first point of a curve, None if there is no such curve."""
  return next((p for p in points if p.curve == curve), None)


def published(results: dict, point: PointResult, measure: str, *, of_curve: bool = False) -> float | None:
  """Return the published value of a measure of a point or of its complete curve, None without one."""
  return match(results.get('published') or [], vars(point) | ({'value': None} if of_curve else {}), measure)


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


def metric_name(metric: str) -> str:
  """Return a metric as the papers write it."""
  return {'bleu': 'BLEU', 'chrf': 'chrF', 'rouge2': 'ROUGE-2'}.get(metric, metric.replace('_', ' '))
