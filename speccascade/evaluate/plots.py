"""The papers' figures from results, as SVG and PNG whose bytes depend on the results alone."""

from collections.abc import Callable, Sequence
import itertools
from pathlib import Path
import re
from typing import Any

from speccascade.evaluate import tables

# Paul Tol's "bright" and "muted" hues, told apart with any kind of colour vision; markers tell them apart in grey.
COLOURS = ('#4477aa', '#cc3311', '#228833', '#aa3377', '#ee7733', '#009988', '#332288', '#999933', '#882255', '#66a5d9')
MARKERS = ('o', 's', '^', 'D', 'v', 'P', 'X', '<', '>', 'p')
INK, QUIET, GRID = '#1f2430', '#6b7280', '#e5e7eb'
STYLE = {
  'svg.hashsalt': 'speccascade', 'svg.fonttype': 'none', 'font.family': 'DejaVu Sans', 'font.size': 10,
  'axes.spines.top': False, 'axes.spines.right': False, 'axes.edgecolor': QUIET, 'axes.labelcolor': INK,
  'axes.titlelocation': 'left', 'axes.titlesize': 11, 'axes.titleweight': 'bold', 'axes.titlecolor': INK,
  'axes.grid': True, 'axes.axisbelow': True, 'grid.color': GRID, 'grid.linewidth': 0.8, 'xtick.color': QUIET,
  'ytick.color': QUIET, 'legend.frameon': False, 'legend.fontsize': 9, 'lines.linewidth': 1.6, 'lines.markersize': 5.5,
  'text.color': INK, 'text.parse_math': False, 'figure.dpi': 100, 'savefig.dpi': 160,
}  # fmt: skip


def write(results: dict, directory: Path | str) -> list[Path]:
  """Write every figure that the results have the numbers for; return the files."""
  import matplotlib  # lazily: nothing else here draws

  directory, written = Path(directory), []
  directory.mkdir(parents=True, exist_ok=True)
  looks = styles(results)
  with matplotlib.rc_context({'backend': 'Agg', **STYLE}):
    for title, points in tables.groups(results):
      for name, draw in FIGURES.items():
        figure = draw(results, title, points, looks)
        if figure is not None:
          written += _save(figure, directory / f'{name}_{_slug(title)}')
  return written


def styles(results: dict) -> dict[str, tuple[str, str]]:
  """Return each curve's colour and marker, the same in all figures; the models alone are black."""
  names = list(dict.fromkeys(p['curve'] for p in results['points']))
  alone = {tables.LARGE: (INK, '*'), tables.SMALL: (QUIET, '*')}
  others = [n for n in names if n not in alone]
  return alone | dict(zip(others, itertools.cycle(zip(COLOURS, MARKERS, strict=True))))


def _save(figure: Any, stem: Path) -> list[Path]:
  files = [stem.with_name(f'{stem.name}.{kind}') for kind in ('svg', 'png')]
  figure.savefig(files[0], metadata={'Date': None, 'Creator': None}, bbox_inches='tight')
  figure.savefig(files[1], metadata={'Software': None}, bbox_inches='tight')
  return files


def _slug(title: str) -> str:
  return re.sub(r'[^\w.]+', '_', title.replace(' = ', '')).strip('_')


def _figure(width: float = 7.2, height: float = 4.4, columns: int = 1, rows: int = 1):
  from matplotlib.figure import Figure  # without pyplot: no global state, and any thread may draw

  figure = Figure(figsize=(width, height), layout='constrained')
  return figure, figure.subplots(rows, columns, squeeze=False)


def _legend(figure: Any, axes: Any):
  handles, names = axes.get_legend_handles_labels()
  figure.legend(handles, names, loc='outside right upper')


# ---- figures: (results, title, points, looks) -> figure, or None without the numbers ----


def quality_latency(results, title, points, looks):
  """Draw quality against time relative to the reference, with both intervals."""
  metric = results['metric']
  known = [p for p in points if None not in (tables.quality(p, metric), tables.ratio(p))]
  if len(known) < 2:
    return None

  def x(p):
    return 1 / tables.ratio(p), [1 / r for r in reversed(p['latency'].get('ratio_ci') or [tables.ratio(p)] * 2)]

  figure, axes = _tradeoff(results, known, looks, x, broken=True)
  axes.set_title(f'{tables.metric_name(metric)} against time, {title}')
  axes.set_xlabel(f'time relative to {results["reference"]} (faster to the left)')
  return figure


def quality_deferral(results, title, points, looks):
  """Draw quality against the share of tokens that the large model was asked for."""
  metric, ends = results['metric'], {tables.SMALL: 0.0, tables.LARGE: 1.0}

  def share(p):
    return ends.get(p['curve'], (p.get('counts') or {}).get('deferral_rate'))

  known = [p for p in points if None not in (tables.quality(p, metric), share(p))]
  if not {p['curve'] for p in known} - ends.keys():
    return None
  figure, axes = _tradeoff(results, known, looks, lambda p: (share(p), [share(p)] * 2))
  axes.set_title(f'{tables.metric_name(metric)} by deferral, {title}')
  axes.set_xlabel('share of tokens deferred to the large model')
  return figure


def _tradeoff(results: dict, points: Sequence[dict], looks: dict, x: Callable, *, broken: bool = False):
  metric = results['metric']
  figure, ((axes,),) = _figure()
  spared = None if broken else results['reference']
  far = _far(points, lambda p: (x(p)[0], tables.quality(p, metric)), spared)
  for name, some in tables.curves([p for p in points if p not in far]).items():
    colour, marker = looks[name]
    some = tables.distinct(some)
    xs, ys = [x(p)[0] for p in some], [tables.quality(p, metric) for p in some]
    x_bars = _bars(xs, [x(p)[1] for p in some])
    y_bars = _bars(ys, [(p.get('quality_ci') or {}).get(metric) or [y, y] for p, y in zip(some, ys, strict=True)])
    axes.errorbar(xs, ys, y_bars, x_bars, fmt='none', ecolor=colour, elinewidth=0.8, alpha=0.35, zorder=2)
    size = 13 if marker == '*' else None
    axes.plot(xs, ys, color=colour, marker=marker, markersize=size, markeredgecolor='white', label=name, zorder=3)
  large = tables.at(points, results['reference'])
  if large is not None and tables.quality(large, metric) is not None:
    axes.axhline(tables.quality(large, metric), color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
  said = [f'{p["curve"]}: {tables.quality(p, metric):.2f} at {x(p)[0]:.2f}' for p in far]
  if said:
    axes.text(0.01, 0.02, '\n'.join(said), transform=axes.transAxes, color=QUIET, fontsize=9)
  axes.set_ylabel(tables.metric_name(metric))
  _legend(figure, axes)
  return figure, axes


def _far(points: Sequence[dict], place: Callable, spared: str | None) -> list[dict]:
  """Return the models alone that would take more than a third of an axis; the figure says their numbers instead."""
  alone = [p for p in points if p['curve'] in (tables.LARGE, tables.SMALL) and p['curve'] != spared]
  rest = [place(p) for p in points if p not in alone]
  if len(rest) < 2:
    return []

  def squeezed(values: Sequence[float], more: float) -> bool:
    together = [*values, more]
    return max(values) - min(values) < 2 / 3 * (max(together) - min(together))

  return [p for p in alone if any(squeezed(axis, v) for axis, v in zip(zip(*rest), place(p), strict=True))]


def _bars(values: Sequence[float], intervals: Sequence[Sequence[float]]) -> list[list[float]]:
  pairs = list(zip(values, intervals, strict=True))
  return [[max(v - low, 0) for v, (low, _) in pairs], [max(high - v, 0) for v, (_, high) in pairs]]


def acceptance(results, title, points, looks):
  """Draw acceptance by place in the block, and the accepted lengths, of the middle setting of each curve."""
  chosen = [some[(len(some) - 1) // 2] for some in tables.curves(points).values()]
  chosen = [p for p in chosen if sum((p.get('counts') or {}).get('tested_at') or [0])]
  if not chosen:
    return None
  figure, ((left, right),) = _figure(10.5, 4.0, columns=2)
  for i, p in enumerate(chosen):
    colour, marker = looks[p['curve']]
    label = ', '.join(filter(None, (p['curve'], tables.label(p))))
    rates = by_place(p['counts'])
    left.plot(range(1, len(rates) + 1), rates, color=colour, marker=marker, markeredgecolor='white', label=label)
    shares = shares_of(p['counts']['accepted_lengths'])
    width = 0.8 / len(chosen)
    places = [n - 0.4 + width * (i + 0.5) for n in range(len(shares))]
    right.bar(places, shares, width, color=colour)
  for axes, name in ((left, 'place in the block'), (right, 'tokens accepted in a round')):
    axes.set_xlabel(name)
    axes.xaxis.get_major_locator().set_params(integer=True)
  left.set_ylim(0, 1.03)
  left.set_title(f'acceptance, given all before, {title}')
  right.set_title('share of rounds')
  right.grid(axis='x', visible=False)
  _legend(figure, left)
  return figure


def by_place(counts: dict) -> list[float]:
  """Return acceptance at each place in the block, as far as any token was tested."""
  pairs = zip(counts['accepted_at'], counts['tested_at'], strict=True)
  return [a / t for a, t in itertools.takewhile(lambda pair: pair[1], pairs)]


def shares_of(lengths: Sequence[int]) -> list[float]:
  """Return a histogram as shares, without the empty end."""
  last = max((i for i, n in enumerate(lengths) if n), default=-1)
  return [n / sum(lengths) for n in lengths[: last + 1]]


def prediction(results, title, points, looks):
  """Draw measured speed-ups against predicted ones, beside the line where they agree."""
  known = [p for p in points if p.get('predicted') and tables.ratio(p) is not None]
  if not known:
    return None
  figure, ((axes,),) = _figure(6.2, 4.4)
  for name, some in tables.curves(known).items():
    colour, marker = looks[name]
    some = tables.distinct(some)
    xs, ys = [p['predicted']['ratio'] for p in some], [tables.ratio(p) for p in some]
    bars = _bars(ys, [p['latency'].get('ratio_ci') or [y, y] for p, y in zip(some, ys, strict=True)])
    axes.errorbar(xs, ys, bars, fmt=marker, color=colour, markeredgecolor='white', elinewidth=0.8, label=name)
  ends = [f(x for p in known for x in (p['predicted']['ratio'], tables.ratio(p))) for f in (min, max)]
  pad = 0.06 * (ends[1] - ends[0]) or 0.1
  ends = [ends[0] - pad, ends[1] + pad]
  axes.plot(ends, ends, color=QUIET, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
  axes.set_title(f'speed-up, {title}')
  axes.set_xlabel('predicted from acceptance, times of passes and overhead of a token')
  axes.set_ylabel('measured')
  _legend(figure, axes)
  return figure


def sweeps(results, title, points, looks):
  """Draw speed-up against each parameter that some curve varies."""
  varied = varying(points)
  if not varied:
    return None
  figure, ((*cells,),) = _figure(2.4 + 3.6 * len(varied), 3.6, columns=len(varied))
  for axes, (parameter, some) in zip(cells, varied.items(), strict=True):
    for name, curve in some.items():
      colour, marker = looks[name]
      xs, ys = [tables.place(p) for p in curve], [tables.ratio(p) for p in curve]
      bars = _bars(ys, [p['latency'].get('ratio_ci') or [y, y] for p, y in zip(curve, ys, strict=True)])
      axes.errorbar(xs, ys, bars, color=colour, marker=marker, markeredgecolor='white', elinewidth=0.8, label=name)
    axes.axhline(1, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    axes.set_xlabel(tables.letter(parameter))
    if parameter in tables.DISCRETE:
      axes.xaxis.get_major_locator().set_params(integer=True)
  cells[0].set_ylabel(f'speed-up over {results["reference"]}')
  cells[0].set_title(f'speed-up by parameter, {title}')
  handles = dict(zip(*reversed([sum(x, []) for x in zip(*(a.get_legend_handles_labels() for a in cells))])))
  figure.legend(handles.values(), handles.keys(), loc='outside right upper')
  return figure


def varying(points: Sequence[dict]) -> dict[str, dict[str, list[dict]]]:
  """Return {parameter: {curve: timed points}} of the curves along which a number varies."""
  found: dict[str, dict] = {}
  for name, some in tables.curves(points).items():
    timed = [p for p in some if tables.ratio(p) is not None and tables.place(p) is not None]
    if len({tables.place(p) for p in timed}) > 1:
      found.setdefault(timed[0]['parameter'], {})[name] = timed
  return found


FIGURES = {
  'quality_latency': quality_latency,
  'quality_deferral': quality_deferral,
  'acceptance': acceptance,
  'prediction': prediction,
  'speed_by_parameter': sweeps,
}
