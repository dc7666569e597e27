"""Draws charts with matplotlib, as SVG and PNG files and as SVG inside a page; bytes depend on the chart alone."""

from collections.abc import Mapping, Sequence
import dataclasses
import io
from pathlib import Path
import re
from typing import Any
from xml.etree import ElementTree

from speccascade.evaluate.report.charts import Chart, Panel, Series

# Paul Tol's "bright" and "muted" hues, distinct for any kind of colour vision; markers distinguish them in grey.
COLOURS = ('#4477aa', '#cc3311', '#228833', '#aa3377', '#ee7733', '#009988', '#332288', '#999933', '#882255', '#66a5d9')
INK = '#1f2430'
QUIET = '#6b7280'
GRID = '#e5e7eb'
EDGE = '#ffffff'
LOOKS = (*COLOURS, INK, QUIET)
MARKERS = ('o', 's', '^', 'D', 'v', 'P', 'X', '<', '>', 'p', '*', '*')
# The page's colours, which differ by light and dark.
VARIABLES = {c: f'var(--c{i})' for i, c in enumerate(COLOURS)}
VARIABLES |= {INK: 'var(--ink)', QUIET: 'var(--quiet)', GRID: 'var(--line)', EDGE: 'var(--card)'}
DASHED = dict(linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
INTERVALS = '-intervals'  # ends the id of what shows the intervals of a series
SIZE = (5.6, 4.0)  # of a panel in inches; the page shows one at about 500 pixels
STYLE = Path(__file__).parent / 'report.mplstyle'


@dataclasses.dataclass(frozen=True)
class Drawing:
  """A drawn chart: an SVG element for a page, and the contents of files by name."""

  chart: Chart
  svg: str
  files: Mapping[str, bytes]


def draw(chart: Chart) -> Drawing:
  """Draw a chart.

  Args:
    chart: what is drawn.

  Returns:
    The SVG element has every series, in the colours of the page, with the text of each mark as `data-tip`; the files
    have a legend and the selected series.
  """
  from matplotlib import style  # lazily: nothing else here draws
  from matplotlib.figure import Figure  # without pyplot: no global state, and any thread may draw

  with style.context(STYLE):
    figure = Figure(figsize=(SIZE[0] * len(chart.panels), SIZE[1]), layout='constrained')
    cells = figure.subplots(1, len(chart.panels), squeeze=False)[0]
    groups: dict[str, Series] = {}
    for axes, panel in zip(cells, chart.panels, strict=True):
      groups |= _draw_panel(axes, panel, prefix=f'series{len(groups)}')
    figure.draw_without_rendering()
    figure.set_layout_engine('none')  # or every file would be laid out again
    svg = _element(_saved(figure, 'svg', transparent=True), chart, groups)
    _keep_selected(figure, groups)
    _add_legend(figure, cells)
    bounds = figure.get_tightbbox().padded(0.1)
    files = {f'{chart.name}.{kind}': _saved(figure, kind, bbox_inches=bounds) for kind in ('svg', 'png')}
    return Drawing(chart, svg, files)


def _saved(figure: Any, kind: str, **more: Any) -> bytes:
  undated = {'svg': {'Date': None, 'Creator': None}, 'png': {'Software': None}}[kind]
  content = io.BytesIO()
  figure.savefig(content, format=kind, metadata=undated, **more)
  return content.getvalue()


def _draw_panel(axes: Any, panel: Panel, prefix: str) -> dict[str, Series]:
  """Draw a panel; return the series by the id of the group that has its artists."""
  groups = {f'{prefix}-{i}': series for i, series in enumerate(panel.series)}
  for name, series in groups.items():
    _draw_series(axes, series, name, '-' if panel.lines else 'none')
  if panel.level is not None:
    axes.axhline(panel.level, color=INK, **DASHED)
  if panel.diagonal:
    _draw_diagonal(axes, panel)
  if panel.note:
    axes.text(0.01, 0.02, panel.note, transform=axes.transAxes, color=QUIET, fontsize=9)
  if panel.whole_x:
    axes.xaxis.get_major_locator().set_params(integer=True)
  if panel.y_limits:
    axes.set_ylim(*panel.y_limits)
  axes.set_title(panel.title)
  axes.set_xlabel(panel.x)
  axes.set_ylabel(panel.y)
  return groups


def _draw_series(axes: Any, series: Series, name: str, line: str):
  xs = [m.x for m in series.marks]
  ys = [m.y for m in series.marks]
  colour = LOOKS[series.look]
  marker = MARKERS[series.look]
  bars = dict(
    xerr=_lengths(xs, [m.x_interval for m in series.marks]),
    yerr=_lengths(ys, [m.y_interval for m in series.marks]),
  )
  axes.errorbar(xs, ys, **bars, fmt='none', ecolor=colour, elinewidth=0.8, alpha=0.35, zorder=2, gid=name + INTERVALS)
  size = 13 if marker == '*' else None
  label = series.label or series.curve
  axes.plot(xs, ys, ls=line, color=colour, marker=marker, markersize=size, label=label, zorder=3, gid=name)


def _lengths(values: Sequence[float], intervals: Sequence) -> list[list[float]] | None:
  """Return how far intervals reach below and above their values, None where there is no interval."""
  if not any(intervals):
    return None
  pairs = [(v, interval or (v, v)) for v, interval in zip(values, intervals, strict=True)]
  return [[max(v - low, 0) for v, (low, _) in pairs], [max(high - v, 0) for v, (_, high) in pairs]]


def _draw_diagonal(axes: Any, panel: Panel):
  values = [v for s in panel.series for m in s.marks for v in (m.x, m.y)]
  pad = 0.06 * (max(values) - min(values)) or 0.1
  ends = [min(values) - pad, max(values) + pad]
  axes.plot(ends, ends, color=QUIET, **DASHED)


def _keep_selected(figure: Any, groups: Mapping[str, Series]):
  others = {name for name, series in groups.items() if not series.selected}
  for artist in figure.findobj(lambda a: (a.get_gid() or '').removesuffix(INTERVALS) in others):
    artist.remove()


def _add_legend(figure: Any, cells: Sequence[Any]):
  """Add a legend with each name once."""
  handles: dict[str, Any] = {}
  for axes in cells:
    handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
  figure.legend(handles.values(), handles.keys(), loc='upper left', bbox_to_anchor=(1, 1))


# ---- inside a page ----


def _element(svg: bytes, chart: Chart, groups: Mapping[str, Series]) -> str:
  """Return the element of an SVG file, in the page's colours, with the names and texts of its series."""
  root = ElementTree.fromstring(svg)
  for parent in list(root.iter()):
    for child in list(parent):
      if child.tag.endswith(('metadata', 'style', 'clipPath')):
        parent.remove(child)
  for node in root.iter():
    node.tag = node.tag.split('}')[-1]
    node.tail = None
    node.text = node.text if node.tag == 'text' else None
  for group in root.iter('g'):
    name = group.attrib.pop('id', '')
    if name in groups:
      _describe_series(group, groups[name])
    if name.removesuffix(INTERVALS) in groups:
      _name_series(group, groups[name.removesuffix(INTERVALS)])
  for node in root.iter():
    node.attrib = {k.split('}')[-1]: _value(k, v, chart.name) for k, v in node.attrib.items() if k != 'clip-path'}
  label = '; '.join(f'{p.title}: {p.y} by {p.x}' for p in chart.panels)
  about = {'role': 'group', 'tabindex': '0', 'aria-label': label, 'class': 'wide' if len(chart.panels) > 1 else 'one'}
  root.attrib = {'viewBox': root.get('viewBox')} | about
  return ElementTree.tostring(root, encoding='unicode')


def _value(name: str, value: str, prefix: str) -> str:
  """Return the value of an attribute for a page: short numbers, colours that differ by light and dark, unique ids."""
  if name == 'id':
    return f'{prefix}-{value}'
  if name.endswith('href'):
    return f'#{prefix}-{value[1:]}'
  if name == 'style':
    return re.sub('|'.join(VARIABLES), lambda match: VARIABLES[match[0]], value)
  return re.sub(r'(\d\.\d\d)\d+', r'\1', value) if name in ('d', 'x', 'y', 'transform') else value


def _describe_series(group: ElementTree.Element, series: Series):
  """Add the text of each mark."""
  for node, mark in zip(group.iter('use'), series.marks, strict=True):
    node.set('data-tip', mark.text)


def _name_series(group: ElementTree.Element, series: Series):
  """Add what the page finds a series by."""
  group.set('data-curve', series.curve)
  if series.label:
    group.set('data-setting', series.label)
  if not series.selected:
    group.set('hidden', '')
