"""The charts of a report, each described once as data: panels, series, marks and intervals."""

from collections.abc import Callable, Sequence
import dataclasses
import itertools
import re

from speccascade.evaluate import breakdown
from speccascade.evaluate.report import points as pts
from speccascade.evaluate.report.points import Interval, PointResult

# looks of the models alone, after those of ten curves
INK = 10
QUIET = 11
FEW = 10  # texts, whose mean is not drawn; half of all texts where those are fewer than twice as many
ROUNDS = dict(lines=False, bars=1.0, integer_x=True)  # of a histogram of tokens in a round


@dataclasses.dataclass(frozen=True)
class Mark:
  """A point of a chart: its coordinates and their 95 % intervals."""

  x: float
  y: float
  x_interval: Interval = None
  y_interval: Interval = None


@dataclasses.dataclass(frozen=True)
class Series:
  """The marks of one curve."""

  curve: str
  look: int  # the number of its colour and marker, up to QUIET
  marks: Sequence[Mark]
  label: str = ''  # in the legend, where it is not the curve's name


@dataclasses.dataclass(frozen=True)
class Panel:
  """Two axes with series."""

  title: str
  x: str
  y: str
  series: Sequence[Series]
  lines: bool = True  # whether the marks of a series are connected
  bars: float = 0.0  # of a histogram, whose marks are the middles of bars so wide
  line_at: float | None = None  # a dashed horizontal line
  integer_x: bool = False  # whether x has integers alone
  x_names: Sequence[str] = ()  # of 0, 1, …, where x is no number
  y_limits: tuple[float, float] | None = None
  note: str = ''  # text in a corner


@dataclasses.dataclass(frozen=True)
class Chart:
  """Panels next to each other, in a section of the page and in files of a name."""

  section: str
  name: str
  panels: Sequence[Panel]


def charts(results: dict) -> list[Chart]:
  """Describe every chart that the results have the numbers for, by section, in each by temperature and batch size."""
  described = []
  for section, kinds in CHARTS.items():
    for title, points in pts.groups(results):
      for name, describe in kinds.items():
        if panels := describe(results, title, points):
          described.append(Chart(section, f'{name}_{slug(title)}', panels))
  return described


def slug(title: str) -> str:
  """Return a title as part of a file's name or of an address."""
  return re.sub(r'[^\w.]+', '_', title.replace(' = ', '')).strip('_')


# ---- charts of the points: (results, title, points) -> panels, none without the numbers ----


def _quality_by_time(results: dict, title: str, points: Sequence[PointResult]) -> list[Panel]:
  """Describe quality against time relative to the reference."""

  def interval(p):
    return p.time('ratio_ci') and [1 / r for r in reversed(p.time('ratio_ci'))]

  axis = f'time relative to {results["reference"]} (faster to the left)'
  return _tradeoff(
    results, points, lambda p: p.ratio and 1 / p.ratio, f'against time, {title}', axis, interval=interval
  )


def _quality_by_deferral(results: dict, title: str, points: Sequence[PointResult]) -> list[Panel]:
  """Describe quality against the share of tokens that the large model was asked for."""
  ends = {pts.SMALL: 0.0, pts.LARGE: 1.0}

  def share(p):
    return ends.get(p.curve, p.count('deferral_rate'))

  axis = 'share of tokens deferred to the large model'
  return _tradeoff(results, points, share, f'by deferral, {title}', axis, always=results['reference'])


def _quality_by_calls(results: dict, title: str, points: Sequence[PointResult]) -> list[Panel]:
  """Describe quality against the calls of the large model."""

  def calls(p):
    return p.count('calls_per_token')

  axis = 'calls of the large model by token'
  return _tradeoff(results, points, calls, f'by calls, {title}', axis, always=results['reference'])


def _tradeoff(
  results: dict,
  points: Sequence[PointResult],
  cost: Callable[[PointResult], float | None],
  title: str,
  axis: str,
  always: str | None = None,
  interval: Callable[[PointResult], Interval] = lambda p: None,
) -> list[Panel]:
  """Describe quality against a cost, where more than the models alone has it; the curve `always` is always drawn."""
  metric = results['metric']
  known = [p for p in points if None not in (p.quality_of(metric), cost(p))]
  if metric in pts.DESCRIPTIONS or not {p.curve for p in known} - {pts.SMALL, pts.LARGE}:
    return []
  name = pts.metric_name(metric)

  def mark(p):
    return Mark(cost(p), p.quality_of(metric), interval(p), p.interval_of(metric))

  far = _far(known, mark, always)
  series = _series(results, [p for p in known if p not in far], mark)
  references = [p for p in known if p.curve == results['reference']]
  line_at = references[0].quality_of(metric) if len(references) == 1 else None
  note = '\n'.join(f'{p.curve}: {mark(p).y:.2f} at {mark(p).x:.2f}' for p in far)
  return [Panel(f'{name} {title}', axis, name, series, line_at=line_at, note=note)]


def _far(points: Sequence[PointResult], mark: Callable, always: str | None) -> list[PointResult]:
  """Return the models alone that would take more than a third of an axis; the chart notes their numbers instead."""
  alone = [p for p in points if p.curve in (pts.LARGE, pts.SMALL) and p.curve != always]
  rest = [mark(p) for p in points if p not in alone]
  if len(rest) < 2:
    return []

  def squeezed(values: Sequence[float], more: float) -> bool:
    together = [*values, more]
    return max(values) - min(values) < 2 / 3 * (max(together) - min(together))

  def far(m: Mark) -> bool:
    return squeezed([r.x for r in rest], m.x) or squeezed([r.y for r in rest], m.y)

  return [p for p in alone if far(mark(p))]


def _acceptance(results: dict, title: str, points: Sequence[PointResult]) -> list[Panel]:
  """Describe acceptance by position in the block and the accepted lengths."""
  drafted = [p for p in points if sum(p.count('tested_at') or [0])]
  if not drafted:
    return []
  rates = _selected(results, drafted, 'tested_at', _rates)
  lengths = _selected(results, drafted, 'tested_at', _lengths)
  about = dict(integer_x=True, y_limits=(0, 1.03))
  return [
    Panel(f'acceptance, given all before, {title}', 'position in the block', 'acceptance', rates, **about),
    Panel(f'accepted lengths, {title}', 'tokens accepted in a round', 'share of rounds', lengths, **ROUNDS),
  ]


def _acceptance_by_round(results: dict, title: str, points: Sequence[PointResult]) -> list[Panel]:
  """Describe the tokens accepted in the first, second, … round of a text, and how many texts have such a round."""

  def rounds(p):
    texts = p.count('texts_by_round')
    known = itertools.takewhile(lambda n: n >= min(FEW, texts[0] / 2), texts)
    return [(i, a / n, n) for i, (a, n) in enumerate(zip(p.count('accepted_by_round'), known), 1)]

  means = _selected(results, points, 'accepted_by_round', lambda p: [Mark(i, mean) for i, mean, _ in rounds(p)])
  texts = _selected(results, points, 'accepted_by_round', lambda p: [Mark(i, n) for i, _, n in rounds(p)])
  if not means:
    return []
  axis = 'tokens accepted, mean over texts'
  return [
    Panel(f'accepted tokens by round, {title}', 'round', axis, means, integer_x=True),
    Panel(f'texts by round, {title}', 'round', 'texts that have such a round', texts, integer_x=True),
  ]


def _acceptance_by_prompt(results: dict, title: str, points: Sequence[PointResult]) -> list[Panel]:
  """Describe how the acceptance of a prompt is distributed, and the acceptance in each domain."""

  def marks(p):
    bins = p.count('acceptance_by_prompt')
    return [Mark((i + 0.5) / len(bins), n / sum(bins)) for i, n in enumerate(bins)]

  def rates(p):
    counted = p.count('acceptance_by_domain').items()
    return [Mark(domains.index(name), c['accepted'] / c['tested']) for name, c in counted]

  domains = sorted({name for p in points for name in p.count('acceptance_by_domain') or {}})
  panels = []
  if series := _selected(results, points, 'acceptance_by_prompt', marks):
    about = dict(lines=False, bars=1 / breakdown.BINS)
    panels.append(
      Panel(f'acceptance by prompt, {title}', 'acceptance of a prompt', 'share of prompts', series, **about)
    )
  if series := _selected(results, points, 'acceptance_by_domain', rates):
    about = dict(lines=False, x_names=domains, y_limits=(0, 1.03))
    panels.append(Panel(f'acceptance by domain, {title}', 'domain', 'acceptance', series, **about))
  return panels


def _selected(
  results: dict, points: Sequence[PointResult], count: str, marks: Callable[[PointResult], Sequence[Mark]]
) -> list[Series]:
  """Return a series for each curve that has a count: its middle setting."""
  looks = _looks(results)
  series = []
  for curve, some in pts.curves(points).items():
    known = [p for p in pts.distinct(some) if p.count(count)]
    if known:
      middle = known[(len(known) - 1) // 2]
      series.append(Series(curve, looks[curve], marks(middle), middle.label))
  return series


def _rates(point: PointResult) -> list[Mark]:
  """Return acceptance at each position in the block, as far as any token was tested."""
  pairs = zip(point.counts['accepted_at'], point.counts['tested_at'], strict=True)
  return [Mark(i, a / t) for i, (a, t) in enumerate(itertools.takewhile(lambda pair: pair[1], pairs), 1)]


def _lengths(point: PointResult) -> list[Mark]:
  """Return the share of rounds by accepted tokens, without the empty end."""
  lengths = point.counts['accepted_lengths']
  last = max((i for i, n in enumerate(lengths) if n), default=-1)
  return [Mark(i, n / sum(lengths)) for i, n in enumerate(lengths[: last + 1])]


def _speed_by_parameter(results: dict, title: str, points: Sequence[PointResult]) -> list[Panel]:
  """Describe speed-up against each parameter that some curve varies."""
  looks = _looks(results)
  varied: dict[str, list[Series]] = {}
  for curve, some in pts.curves(points).items():
    timed = [p for p in some if None not in (p.ratio, p.number)]
    if len({p.number for p in timed}) > 1:
      marks = [_speed(p, p.number) for p in timed]
      varied.setdefault(timed[0].parameter, []).append(Series(curve, looks[curve], marks))
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


CHARTS: dict[str, dict[str, Callable]] = {
  'Quality and time': {'quality_latency': _quality_by_time},
  'Quality by deferral': {'quality_deferral': _quality_by_deferral},
  'Quality by calls': {'quality_calls': _quality_by_calls},
  'Acceptance': {
    'acceptance': _acceptance,
    'acceptance_by_round': _acceptance_by_round,
    'acceptance_by_prompt': _acceptance_by_prompt,
  },
  'Parameters': {'speed_by_parameter': _speed_by_parameter},
}


def _speed(point: PointResult, x: float) -> Mark:
  """Return a mark of a speed-up."""
  return Mark(x, point.ratio, y_interval=point.time('ratio_ci'))


def _series(results: dict, points: Sequence[PointResult], mark: Callable[[PointResult], Mark]) -> list[Series]:
  """Return a series for each curve; settings that decoded alike are one mark."""
  looks = _looks(results)
  return [Series(name, looks[name], list(map(mark, pts.distinct(some)))) for name, some in pts.curves(points).items()]


def _looks(results: dict) -> dict[str, int]:
  """Return the look of each curve, the same in all charts."""
  alone = {pts.LARGE: INK, pts.SMALL: QUIET}
  names = dict.fromkeys(p.curve for p in results['points'])
  others = [name for name in names if name not in alone]
  return alone | {name: i % INK for i, name in enumerate(others)}
