"""The charts of a report, each described once as data: panels, series, marks, intervals and labels."""

from collections.abc import Callable, Sequence
import dataclasses
import itertools
import re

from speccascade.evaluate import sv_studies
from speccascade.evaluate.report import points as pts

# looks of the models alone, after those of ten curves
INK = 10
QUIET = 11

Interval = Sequence[float] | None


@dataclasses.dataclass(frozen=True)
class Mark:
  """A point of a chart: its coordinates, their 95 % intervals, and the text that the page shows at it."""

  x: float
  y: float
  text: str
  x_interval: Interval = None
  y_interval: Interval = None


@dataclasses.dataclass(frozen=True)
class Series:
  """The marks of one curve."""

  curve: str
  look: int  # the number of its colour and marker, up to QUIET
  marks: Sequence[Mark]
  label: str = ''  # in a legend, where it is not the curve's name
  selected: bool = True  # False: in the page alone, once a reader selects it


@dataclasses.dataclass(frozen=True)
class Panel:
  """Two axes with series."""

  title: str
  x: str
  y: str
  series: Sequence[Series]
  lines: bool = True  # whether the marks of a series are connected
  line_at: float | None = None  # a dashed horizontal line
  diagonal: bool = False  # whether the line of equal x and y is drawn
  integer_x: bool = False  # whether x has integers alone
  y_limits: tuple[float, float] | None = None
  note: str = ''  # text in a corner


@dataclasses.dataclass(frozen=True)
class Chart:
  """Panels next to each other, in a section of the page and in files of a name."""

  section: str
  name: str
  panels: Sequence[Panel]


def charts(results: dict) -> list[Chart]:
  """Describe every chart that the results have the numbers for.

  Args:
    results: the results of an experiment.

  Returns:
    The charts by section, in each section in the order of temperatures and batch sizes.
  """
  described = []
  for section, (name, describe) in CHARTS.items():
    for title, points in pts.groups(results):
      panels = describe(results, title, points)
      if panels:
        described.append(Chart(section, f'{name}_{slug(title)}', panels))
  return described + _studies(results.get('studies') or [])


def slug(title: str) -> str:
  """Return a title as part of a file's name or of an address."""
  return re.sub(r'[^\w.]+', '_', title.replace(' = ', '')).strip('_')


# ---- charts of the points: (results, title, points) -> panels, none without the numbers ----


def _quality_by_time(results: dict, title: str, points: Sequence[dict]) -> list[Panel]:
  """Describe quality against time relative to the reference."""
  metric = results['metric']
  name = pts.metric_name(metric)

  def mark(p):
    speed = pts.ratio(p)
    interval = pts.ratio_interval(p)
    times = interval and [1 / r for r in reversed(interval)]
    text = f'{name} {pts.quality(p, metric):.2f}\n{speed:.2f}× the speed, {1 / speed:.2f} of the time'
    return Mark(1 / speed, pts.quality(p, metric), _text(p, text), times, pts.quality_interval(p, metric))

  timed = [p for p in points if None not in (pts.quality(p, metric), pts.ratio(p))]
  if len(timed) < 2:
    return []
  axis = f'time relative to {results["reference"]} (faster to the left)'
  return [_tradeoff(results, timed, mark, f'{name} against time, {title}', axis, always=None)]


def _quality_by_deferral(results: dict, title: str, points: Sequence[dict]) -> list[Panel]:
  """Describe quality against the share of tokens that the large model was asked for."""
  metric = results['metric']
  ends = {pts.SMALL: 0.0, pts.LARGE: 1.0}
  name = pts.metric_name(metric)

  def share(p):
    return ends.get(p['curve'], pts.count(p, 'deferral_rate'))

  def mark(p):
    text = f'{name} {pts.quality(p, metric):.2f}\n{share(p):.0%} deferred'
    return Mark(share(p), pts.quality(p, metric), _text(p, text), None, pts.quality_interval(p, metric))

  known = [p for p in points if None not in (pts.quality(p, metric), share(p))]
  if not {p['curve'] for p in known} - ends.keys():
    return []
  axis = 'share of tokens deferred to the large model'
  return [_tradeoff(results, known, mark, f'{name} by deferral, {title}', axis, always=results['reference'])]


def _tradeoff(
  results: dict, points: Sequence[dict], mark: Callable, title: str, axis: str, always: str | None
) -> Panel:
  """Describe quality against a cost; the curve `always` is drawn however far it is from the rest."""
  metric = results['metric']
  far = _far(points, mark, always)
  series = _series(results, [p for p in points if p not in far], mark)
  reference = pts.first(points, results['reference'])
  line_at = None if reference is None else pts.quality(reference, metric)
  note = '\n'.join(f'{p["curve"]}: {mark(p).y:.2f} at {mark(p).x:.2f}' for p in far)
  return Panel(title, axis, pts.metric_name(metric), series, line_at=line_at, note=note)


def _far(points: Sequence[dict], mark: Callable, always: str | None) -> list[dict]:
  """Return the models alone that would take more than a third of an axis; the chart notes their numbers instead."""
  alone = [p for p in points if p['curve'] in (pts.LARGE, pts.SMALL) and p['curve'] != always]
  rest = [mark(p) for p in points if p not in alone]
  if len(rest) < 2:
    return []

  def squeezed(values: Sequence[float], more: float) -> bool:
    together = [*values, more]
    return max(values) - min(values) < 2 / 3 * (max(together) - min(together))

  def far(m: Mark) -> bool:
    return squeezed([r.x for r in rest], m.x) or squeezed([r.y for r in rest], m.y)

  return [p for p in alone if far(mark(p))]


def _acceptance(results: dict, title: str, points: Sequence[dict]) -> list[Panel]:
  """Describe acceptance by position in the block and the accepted lengths; one setting of each curve is selected."""
  looks = _looks(results)
  rates = []
  lengths = []
  for curve, some in pts.curves(points).items():
    drafted = [p for p in pts.distinct(some) if sum(pts.count(p, 'tested_at') or [0])]
    for i, p in enumerate(drafted):
      about = dict(curve=curve, look=looks[curve], label=pts.named(p), selected=i == (len(drafted) - 1) // 2)
      rates.append(Series(marks=_rates(p), **about))
      lengths.append(Series(marks=_lengths(p), **about))
  if not rates:
    return []
  return [
    Panel(
      f'acceptance, given all before, {title}',
      'position in the block',
      'acceptance',
      rates,
      integer_x=True,
      y_limits=(0, 1.03),
    ),
    Panel(f'accepted lengths, {title}', 'tokens accepted in a round', 'share of rounds', lengths, integer_x=True),
  ]


def _rates(point: dict) -> list[Mark]:
  """Return acceptance at each position in the block, as far as any token was tested."""
  pairs = zip(point['counts']['accepted_at'], point['counts']['tested_at'], strict=True)
  tested = itertools.takewhile(lambda pair: pair[1], pairs)
  name = pts.named(point)
  return [Mark(i, a / t, f'{name}\nposition {i}: {a / t:.3f}\n{t} tested') for i, (a, t) in enumerate(tested, 1)]


def _lengths(point: dict) -> list[Mark]:
  """Return the share of rounds by accepted tokens, without the empty end."""
  lengths = point['counts']['accepted_lengths']
  last = max((i for i, n in enumerate(lengths) if n), default=-1)
  shares = [n / sum(lengths) for n in lengths[: last + 1]]
  name = pts.named(point)
  return [Mark(i, share, f'{name}\n{i} accepted: {share:.1%} of rounds') for i, share in enumerate(shares)]


def _speed_by_parameter(results: dict, title: str, points: Sequence[dict]) -> list[Panel]:
  """Describe speed-up against each parameter that some curve varies."""
  looks = _looks(results)
  varied: dict[str, list[Series]] = {}
  for curve, some in pts.curves(points).items():
    timed = [p for p in some if None not in (pts.ratio(p), pts.number(p))]
    if len({pts.number(p) for p in timed}) > 1:
      marks = [_speed(p, pts.number(p)) for p in timed]
      varied.setdefault(timed[0]['parameter'], []).append(Series(curve, looks[curve], marks))
  axis = f'speed-up over {results["reference"]}'
  return [
    Panel(
      f'speed-up by {pts.letter(parameter)}, {title}',
      pts.letter(parameter),
      axis,
      series,
      line_at=1.0,
      integer_x=parameter in pts.DISCRETE,
    )
    for parameter, series in varied.items()
  ]


def _prediction(results: dict, title: str, points: Sequence[dict]) -> list[Panel]:
  """Describe measured speed-ups against predicted ones."""
  known = [p for p in points if p.get('predicted') and pts.ratio(p) is not None]

  def mark(p):
    return _speed(p, p['predicted']['ratio'], f'\npredicted {p["predicted"]["ratio"]:.2f}×')

  axis = 'predicted from acceptance, times of passes and overhead of a token'
  series = _series(results, known, mark)
  return [Panel(f'speed-up, {title}', axis, 'measured', series, lines=False, diagonal=True)] if series else []


CHARTS: dict[str, tuple[str, Callable]] = {
  'Quality and time': ('quality_latency', _quality_by_time),
  'Quality by deferral': ('quality_deferral', _quality_by_deferral),
  'Acceptance': ('acceptance', _acceptance),
  'Parameters': ('speed_by_parameter', _speed_by_parameter),
  'Prediction and measurement': ('prediction', _prediction),
}


STUDIES = 'Speculative verification'
SECTIONS = (*CHARTS, STUDIES)


def _speed(point: dict, x: float, more: str = '') -> Mark:
  """Return a mark of a speed-up."""
  text = f'{pts.ratio(point):.2f}× the speed{more}'
  return Mark(x, pts.ratio(point), _text(point, text), y_interval=pts.ratio_interval(point))


def _text(point: dict, text: str) -> str:
  """Return what the page shows at a point."""
  length = pts.count(point, 'length')
  cut_off = pts.count(point, 'cut_off')
  outputs = '' if length is None else f'\n{length:.1f} tokens long, {cut_off:.0%} cut off'
  return f'{pts.named(point)}\n{text}{outputs}'


def _series(results: dict, points: Sequence[dict], mark: Callable[[dict], Mark]) -> list[Series]:
  """Return a series for each curve; settings that decoded alike are one mark."""
  looks = _looks(results)
  return [Series(name, looks[name], list(map(mark, pts.distinct(some)))) for name, some in pts.curves(points).items()]


def _looks(results: dict) -> dict[str, int]:
  """Return the look of each curve, the same in all charts."""
  alone = {pts.LARGE: INK, pts.SMALL: QUIET}
  names = dict.fromkeys(p['curve'] for p in results['points'])
  others = [name for name in names if name not in alone]
  return alone | {name: i % INK for i, name in enumerate(others)}


# ---- charts of the studies of speculative verification, from their tables ----


def _studies(studies: Sequence[dict]) -> list[Chart]:
  described = []
  for start, name, describe in (
    (sv_studies.RELIABILITY, 'reliability', _reliability),
    (sv_studies.FAIRNESS, 'verified_lengths', _verified_lengths),
  ):
    some = [t for t in studies if t['title'].startswith(start)]
    for i, table in enumerate(some, 1):
      panels = [describe(table)]
      described.append(Chart(STUDIES, f'{name}_{i}' if len(some) > 1 else name, panels))
  return described


def _reliability(table: dict) -> Panel:
  marks = [
    Mark(predicted, mean, f'predicted {predicted:.2f}, accepted {mean:.2f}', y_interval=(low, high))
    for _, predicted, mean, low, high, *_ in table['rows']
  ]
  series = [Series('accepted', 0, marks)]
  axis = 'accepted by the verifier'
  return Panel(table['title'], 'predicted acceptance', axis, series, lines=False, diagonal=True)


def _verified_lengths(table: dict) -> Panel:
  looks = {'fewest': ('verified fewest', 1), 'most': ('verified most', 0), 'all': ('all requests', QUIET)}
  series = []
  for kind, request, _, rounds, *counts in table['rows']:
    curve, look = looks[kind]
    about = curve if kind == 'all' else f'request {request}, {curve}'
    shares = [n / max(rounds, 1) for n in counts]
    marks = [Mark(i, share, f'{about}\n{i} tokens: {share:.1%} of rounds') for i, share in enumerate(shares)]
    series.append(Series(curve, look, marks))
  return Panel(table['title'], 'drafted tokens verified in a round', 'share of rounds', series, integer_x=True)
