"""Draws charts with matplotlib, for the page and for papers; bytes depend on the chart alone."""

from collections.abc import Sequence
import dataclasses
import io
import math
from pathlib import Path
import textwrap
from typing import Any

from speccascade.evaluate.report.charts import Chart, Panel, Series

# Paul Tol's "bright" and "muted" hues, distinct for any kind of colour vision; markers distinguish them in grey.
COLOURS = ('#4477aa', '#cc3311', '#228833', '#aa3377', '#ee7733', '#009988', '#332288', '#999933', '#882255', '#66a5d9')
INK = '#1f2430'
QUIET = '#6b7280'
LOOKS = (*COLOURS, INK, QUIET)
MARKERS = ('o', 's', '^', 'D', 'v', 'P', 'X', '<', '>', 'p', '*', '*')
DASHED = dict(linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
SIZE = (5.6, 4.0)  # of a panel in inches; the page shows one at about 500 pixels
STYLE = Path(__file__).parent / 'report.mplstyle'
FORMATS = {'pdf': {'CreationDate': None}, 'svg': {'Date': None, 'Creator': None}, 'png': {'Software': None}}
PAPER = {  # instead of what the style has
  'font.size': 7.5,
  'axes.titlesize': 7.5,
  'legend.fontsize': 7,
  'lines.linewidth': 1.0,
  'axes.linewidth': 0.6,
  'grid.linewidth': 0.5,
  'lines.markersize': 4,
  'lines.markeredgewidth': 0.5,
  'savefig.dpi': 600,
  'pdf.fonttype': 42,  # fonts that publishers take
}
NARROWEST = 2.4  # inches of a panel in a paper; narrower ones are below each other


@dataclasses.dataclass(frozen=True)
class Drawing:
  """A drawn chart."""

  chart: Chart
  svg: bytes


def draw(chart: Chart) -> Drawing:
  """Draw a chart."""
  from matplotlib import style  # lazily: nothing else here draws
  from matplotlib.figure import Figure  # without pyplot: no global state, and any thread may draw

  content = io.BytesIO()
  with style.context(STYLE):
    figure = Figure(figsize=(SIZE[0] * len(chart.panels), SIZE[1]), layout='constrained')
    handles: dict[str, Any] = {}
    for axes, panel in zip(figure.subplots(1, len(chart.panels), squeeze=False)[0], chart.panels, strict=True):
      handles |= _draw_panel(axes, panel)
    figure.legend(handles.values(), handles.keys(), loc='upper left', bbox_to_anchor=(1, 1))
    figure.savefig(content, format='svg', metadata=FORMATS['svg'], bbox_inches='tight')
  return Drawing(chart, content.getvalue())


def for_paper(chart: Chart, width: float, format: str) -> bytes:
  """Draw a chart for a paper, whose caption is its title: `width` inches wide, in small letters, its names below."""
  from matplotlib import style
  from matplotlib.figure import Figure

  content = io.BytesIO()
  columns = max(1, min(len(chart.panels), int(width / NARROWEST)))
  rows = math.ceil(len(chart.panels) / columns)
  names = [series.label or series.curve for panel in chart.panels for series in panel.series]
  beside = max(1, int(width / (0.4 + 0.05 * max(map(len, names)))))  # names in a line
  height = rows * 0.72 * width / columns + 0.13 * math.ceil(len(set(names)) / beside)
  with style.context([STYLE, PAPER]):
    figure = Figure(figsize=(width, height), layout='constrained')
    handles: dict[str, Any] = {}
    for i, panel in enumerate(chart.panels):
      letters = int(width / columns / 0.06)  # as many as an axis is long
      title = panel.title if len(chart.panels) > 1 else ''
      titles = dict(title=textwrap.fill(title, letters), x=textwrap.fill(panel.x, letters))
      handles |= _draw_panel(figure.add_subplot(rows, columns, i + 1), dataclasses.replace(panel, **titles))
    about = dict(loc='outside lower center', ncols=beside, handlelength=1.5, columnspacing=1, handletextpad=0.4)
    figure.legend(handles.values(), handles.keys(), **about)
    figure.savefig(content, format=format, metadata=FORMATS[format])
  return content.getvalue()


def _draw_panel(axes: Any, panel: Panel) -> dict[str, Any]:
  """Draw a panel; return the line of each series by its name in the legend."""
  from matplotlib import rcParams

  size = rcParams['font.size']
  handles = {series.label or series.curve: _draw_series(axes, series, panel) for series in panel.series}
  if panel.line_at is not None:
    axes.axhline(panel.line_at, color=INK, **DASHED)
  if panel.note:
    axes.text(0.01, 0.02, panel.note, transform=axes.transAxes, color=QUIET, fontsize=0.9 * size)
  if panel.integer_x:
    axes.xaxis.get_major_locator().set_params(integer=True)
  if panel.x_names:
    room = 60 / len(panel.x_names)  # letters, of which so many are as wide as the axis
    upright = max(map(len, panel.x_names)) > room
    how = dict(rotation=90, fontsize=min(size, 5 * room)) if upright else {}
    axes.set_xticks(range(len(panel.x_names)), panel.x_names, **how)
    axes.set_xlim(-0.5, len(panel.x_names) - 0.5)
  if panel.y_limits:
    axes.set_ylim(*panel.y_limits)
  axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
  return handles


def _draw_series(axes: Any, series: Series, panel: Panel) -> Any:
  """Draw the marks of a curve; return their line."""
  from matplotlib import rcParams

  xs = [m.x for m in series.marks]
  ys = [m.y for m in series.marks]
  colour = LOOKS[series.look]
  marker = MARKERS[series.look]
  if panel.bars:
    edges = [xs[0] - panel.bars / 2, *(x + panel.bars / 2 for x in xs)]
    axes.stairs(ys, edges, fill=True, fc=(colour, 0.2), ec=colour, lw=1.2, zorder=2)
  xerr = _lengths(xs, [m.x_interval for m in series.marks])
  yerr = _lengths(ys, [m.y_interval for m in series.marks])
  axes.errorbar(xs, ys, xerr=xerr, yerr=yerr, fmt='none', ecolor=colour, elinewidth=0.8, alpha=0.35, zorder=2)
  size = 13 / 6 * rcParams['lines.markersize'] if marker == '*' else None
  style = '-' if panel.lines else 'none'
  (line,) = axes.plot(xs, ys, ls=style, color=colour, marker=marker, markersize=size, zorder=3)
  return line


def _lengths(values: Sequence[float], intervals: Sequence) -> list[list[float]] | None:
  """Return how far intervals reach below and above their values, None where there is no interval."""
  if not any(intervals):
    return None
  pairs = [(v, interval or (v, v)) for v, interval in zip(values, intervals, strict=True)]
  return [[max(v - low, 0) for v, (low, _) in pairs], [max(high - v, 0) for v, (_, high) in pairs]]
