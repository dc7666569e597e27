"""The charts of a report, each described once as data: panels, series, marks, intervals and labels."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
import re

from speccascade.evaluate import breakdown
from speccascade.evaluate.report import points as pts

# looks of the models alone, after those of ten curves
INK = 10
QUIET = 11
FEW = 10  # texts, whose mean is not drawn; half of all texts where those are fewer than twice as many
ROUNDS = dict(lines=False, bars=1.0, integer_x=True)  # of a histogram of tokens in a round

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
  bars: float = 0.0  # of a histogram, whose marks are the middles of bars so wide
  line_at: float | None = None  # a dashed horizontal line
  diagonal: bool = False  # whether the line of equal x and y is drawn
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


def _quality_by_time(results: dict, title: str, points: Sequence[dict]) -> list[Panel]:
  """Describe quality against time relative to the reference."""
  cost = lambda p: None if pts.ratio(p) is None else 1 / pts.ratio(p)
  interval = lambda p: pts.ratio_interval(p) and [1 / r for r in reversed(pts.ratio_interval(p))]
  timed = _priced(results, points, cost)
  if len(timed) < 2:
    return []
  text = lambda x: f'{1 / x:.2f}× the speed, {x:.2f} of the time'
  axis = f'time relative to {results["reference"]} (faster to the left)'
  return [_tradeoff(results, timed, cost, text, f'against time, {title}', axis, always=None, interval=interval)]


def _quality_by_deferral(results: dict, title: str, points: Sequence[dict]) -> list[Panel]:
  """Describe quality against the share of tokens that the large model was asked for."""
  ends = {pts.SMALL: 0.0, pts.LARGE: 1.0}
  share = lambda p: ends.get(p['curve'], pts.count(p, 'deferral_rate'))
  text = lambda x: f'{x:.0%} deferred'
  return _quality_by_use(
    results, points, share, text, f'by deferral, {title}', 'share of tokens deferred to the large model'
  )


def _quality_by_calls(results: dict, title: str, points: Sequence[dict]) -> list[Panel]:
  """Describe quality against the calls of the large model."""
  calls = functools.partial(pts.count, name='calls_per_token')
  text = lambda x: f'{x:.3f} calls of the large model by token'
  return _quality_by_use(results, points, calls, text, f'by calls, {title}', 'calls of the large model by token')


def _quality_by_use(results: dict, points: Sequence[dict], use: Callable, text: Callable, title: str, axis: str):
  """Describe quality against the use of the large model, where more than the models alone has it."""
  known = _priced(results, points, use)
  if not {p['curve'] for p in known} - {pts.SMALL, pts.LARGE}:
    return []
  return [_tradeoff(results, known, use, text, title, axis, always=results['reference'])]


def _priced(results: dict, points: Sequence[dict], cost: Callable[[dict], float | None]) -> list[dict]:
  """Return the points whose quality and cost are known; of a metric that judges nothing there are none."""
  if results['metric'] in pts.DESCRIPTIONS:
    return []
  return [p for p in points if None not in (pts.quality(p, results['metric']), cost(p))]


def _tradeoff(
  results: dict,
  points: Sequence[dict],
  cost: Callable[[dict], float],
  describe: Callable[[float], str],
  title: str,
  axis: str,
  always: str | None,
  interval: Callable[[dict], Interval] = lambda p: None,
) -> Panel:
  """Describe quality against a cost, of which `describe` makes text; `always` is drawn however far from the rest."""
  metric = results['metric']
  name = pts.metric_name(metric)

  def mark(p):
    text = f'{name} {pts.quality(p, metric):.2f}\n{describe(cost(p))}'
    return Mark(cost(p), pts.quality(p, metric), _text(p, text), interval(p), pts.quality_interval(p, metric))

  far = _far(points, mark, always)
  series = _series(results, [p for p in points if p not in far], mark)
  references = [p for p in points if p['curve'] == results['reference']]
  line_at = pts.quality(references[0], metric) if len(references) == 1 else None
  note = '\n'.join(f'{p["curve"]}: {mark(p).y:.2f} at {mark(p).x:.2f}' for p in far)
  return Panel(f'{name} {title}', axis, name, series, line_at=line_at, note=note)


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
  drafted = [p for p in points if sum(pts.count(p, 'tested_at') or [0])]
  if not drafted:
    return []
  rates = _selected(results, drafted, 'tested_at', _rates)
  lengths = _selected(results, drafted, 'tested_at', _lengths)
  about = dict(integer_x=True, y_limits=(0, 1.03))
  return [
    Panel(f'acceptance, given all before, {title}', 'position in the block', 'acceptance', rates, **about),
    Panel(f'accepted lengths, {title}', 'tokens accepted in a round', 'share of rounds', lengths, **ROUNDS),
  ]


def _acceptance_by_round(results: dict, title: str, points: Sequence[dict]) -> list[Panel]:
  """Describe the tokens accepted in the first, second, … round of a text, and how many texts have such a round."""

  def rounds(p):
    texts = pts.count(p, 'texts_by_round')
    known = itertools.takewhile(lambda n: n >= min(FEW, texts[0] / 2), texts)
    return [(i, a / n, n) for i, (a, n) in enumerate(zip(pts.count(p, 'accepted_by_round'), known), 1)]

  def marks(y):
    text = '{}\nround {}: {:.2f} accepted\n{} texts'
    return lambda p: [Mark(row[0], row[y], text.format(pts.named(p), *row)) for row in rounds(p)]

  means, texts = (_selected(results, points, 'accepted_by_round', marks(y)) for y in (1, 2))
  axis = 'tokens accepted, mean over texts'
  return (
    [
      Panel(f'accepted tokens by round, {title}', 'round', axis, means, integer_x=True),
      Panel(f'texts by round, {title}', 'round', 'texts that have such a round', texts, integer_x=True),
    ]
    if means
    else []
  )


def _acceptance_by_prompt(results: dict, title: str, points: Sequence[dict]) -> list[Panel]:
  """Describe how the acceptance of a prompt is distributed, and the acceptance in each domain."""

  def marks(p):
    bins = pts.count(p, 'acceptance_by_prompt')
    shares = [n / sum(bins) for n in bins]
    middles = [(i + 0.5) / len(bins) for i in range(len(bins))]
    text = lambda x, share: f'{pts.named(p)}\nacceptance about {x:.2f}: {share:.0%} of prompts'
    return [Mark(x, share, text(x, share)) for x, share in zip(middles, shares, strict=True)]

  def rates(p):
    counted = pts.count(p, 'acceptance_by_domain')
    text = lambda name, c, rate: f'{pts.named(p)}\n{name}: {rate:.3f}\n{c["examples"]} texts, {c["tested"]} tested'
    pairs = [(name, c, c['accepted'] / c['tested']) for name, c in counted.items()]
    return [Mark(domains.index(name), rate, text(name, c, rate)) for name, c, rate in pairs]

  domains = sorted({name for p in points for name in pts.count(p, 'acceptance_by_domain') or {}})
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
  results: dict, points: Sequence[dict], count: str, marks: Callable[[dict], Sequence[Mark]]
) -> list[Series]:
  """Return a series for each setting that has a count; one setting of each curve is selected."""
  looks = _looks(results)
  series = []
  for curve, some in pts.curves(points).items():
    known = [p for p in pts.distinct(some) if pts.count(p, count)]
    for i, p in enumerate(known):
      series.append(Series(curve, looks[curve], marks(p), pts.named(p), i == (len(known) - 1) // 2))
  return series


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
  'Prediction and measurement': {'prediction': _prediction},
}


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
