"""Draws charts with matplotlib, as SVG; bytes depend on the chart alone."""

from collections.abc import Sequence
import dataclasses
import io
from pathlib import Path
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
    figure.savefig(content, format='svg', metadata={'Date': None, 'Creator': None}, bbox_inches='tight')
  return Drawing(chart, content.getvalue())


def _draw_panel(axes: Any, panel: Panel) -> dict[str, Any]:
  """Draw a panel; return the line of each series by its name in the legend."""
  handles = {series.label or series.curve: _draw_series(axes, series, panel) for series in panel.series}
  if panel.line_at is not None:
    axes.axhline(panel.line_at, color=INK, **DASHED)
  if panel.note:
    axes.text(0.01, 0.02, panel.note, transform=axes.transAxes, color=QUIET, fontsize=9)
  if panel.integer_x:
    axes.xaxis.get_major_locator().set_params(integer=True)
  if panel.x_names:
    room = 60 / len(panel.x_names)  # letters, of which so many are as wide as the axis
    upright = max(map(len, panel.x_names)) > room
    how = dict(rotation=90, fontsize=min(10, 5 * room)) if upright else {}
    axes.set_xticks(range(len(panel.x_names)), panel.x_names, **how)
    axes.set_xlim(-0.5, len(panel.x_names) - 0.5)
  if panel.y_limits:
    axes.set_ylim(*panel.y_limits)
  axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
  return handles


def _draw_series(axes: Any, series: Series, panel: Panel) -> Any:
  """Draw the marks of a curve; return their line."""
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
  size = 13 if marker == '*' else None
  style = '-' if panel.lines else 'none'
  (line,) = axes.plot(xs, ys, ls=style, color=colour, marker=marker, markersize=size, zorder=3)
  return line


def _lengths(values: Sequence[float], intervals: Sequence) -> list[list[float]] | None:
  """Return how far intervals reach below and above their values, None where there is no interval."""
  if not any(intervals):
    return None
  pairs = [(v, interval or (v, v)) for v, interval in zip(values, intervals, strict=True)]
  return [[max(v - low, 0) for v, (low, _) in pairs], [max(high - v, 0) for v, (_, high) in pairs]]
