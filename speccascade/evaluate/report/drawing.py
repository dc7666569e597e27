"""Draws charts with matplotlib, as SVG and PNG files and as SVG inside a page; bytes depend on the chart alone."""

from collections.abc import Callable, Collection, Mapping, Sequence
import copy
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
INTERVALS = '-intervals'  # ends the id of what shows the intervals or bars of a series
BACKGROUND = 'background'  # starts the ids of what a page has a colour of its own for
LEGEND = 'legend'
SIZE = (5.6, 4.0)  # of a panel in inches; the page shows one at about 500 pixels
STYLE = Path(__file__).parent / 'report.mplstyle'
POINTS = 72  # of an inch, the unit of an SVG file
ElementTree.register_namespace('', 'http://www.w3.org/2000/svg')
ElementTree.register_namespace('xlink', 'http://www.w3.org/1999/xlink')


@dataclasses.dataclass(frozen=True)
class Drawing:
  """A drawn chart: an SVG element for a page, and the contents of files by name."""

  chart: Chart
  svg: str
  files: Mapping[str, bytes]


def draw(chart: Chart, *, png: bool = False) -> Drawing:
  """Draw a chart once, for a page and for files.

  Args:
    chart: what is drawn.
    png: whether the files have a PNG next to the SVG, which takes as long as all the rest.

  Returns:
    The SVG element has every series, in the colours of the page, with the text of each mark as `data-tip`; the files
    have a legend and the selected series.
  """
  from matplotlib import style  # lazily: nothing else here draws
  from matplotlib.figure import Figure  # without pyplot: no global state, and any thread may draw

  width = SIZE[0] * len(chart.panels)
  with style.context(STYLE):
    figure = Figure(figsize=(width, SIZE[1]), layout='constrained')
    cells = figure.subplots(1, len(chart.panels), squeeze=False)[0]
    groups: dict[str, Series] = {}
    for axes, panel in zip(cells, chart.panels, strict=True):
      groups |= _draw_panel(axes, panel, prefix=f'series{len(groups)}')
    hidden = {f'{name}{end}' for name, series in groups.items() if not series.selected for end in ('', INTERVALS)}
    _add_legend(figure, cells, hidden)
    for i, patch in enumerate([figure.patch, *(axes.patch for axes in cells)]):
      patch.set_gid(f'{BACKGROUND}{i}')
    figure.draw_without_rendering()
    figure.set_layout_engine('none')  # or saving would lay it out again
    bounds = figure.get_tightbbox().padded(0.1)
    svg = ElementTree.fromstring(_saved(figure, 'svg', bounds))
    files = {}
    if png:
      for artist in figure.findobj(lambda a: a.get_gid() in hidden):
        artist.remove()
      files[f'{chart.name}.png'] = _saved(figure, 'png', bounds)
  element = _element(copy.deepcopy(svg), chart, groups)
  corner = (-POINTS * bounds.x0, POINTS * (bounds.y1 - SIZE[1]))  # of the panels in the file, which has a legend too
  element.set('viewBox', ' '.join(f'{x:.2f}' for x in (*corner, POINTS * width, POINTS * SIZE[1])))
  _remove(svg, lambda node: node.tag.endswith('metadata') or node.get('id') in hidden)
  files[f'{chart.name}.svg'] = ElementTree.tostring(svg, encoding='utf-8', xml_declaration=True)
  return Drawing(chart, ElementTree.tostring(element, encoding='unicode'), files)


def _saved(figure: Any, kind: str, bounds: Any) -> bytes:
  undated = {'svg': {'Date': None, 'Creator': None}, 'png': {'Software': None}}[kind]
  content = io.BytesIO()
  figure.savefig(content, format=kind, metadata=undated, bbox_inches=bounds)
  return content.getvalue()


def _draw_panel(axes: Any, panel: Panel, prefix: str) -> dict[str, Series]:
  """Draw a panel; return the series by the id of the group that has its artists."""
  groups = {f'{prefix}-{i}': series for i, series in enumerate(panel.series)}
  for name, series in groups.items():
    _draw_series(axes, series, name, panel)
  if panel.line_at is not None:
    axes.axhline(panel.line_at, color=INK, **DASHED)
  if panel.diagonal:
    values = [v for s in panel.series for m in s.marks for v in (m.x, m.y)]
    pad = 0.06 * (max(values) - min(values)) or 0.1
    ends = [min(values) - pad, max(values) + pad]
    axes.plot(ends, ends, color=QUIET, **DASHED)
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
  axes.set_title(panel.title)
  axes.set_xlabel(panel.x)
  axes.set_ylabel(panel.y)
  return groups


def _draw_series(axes: Any, series: Series, name: str, panel: Panel):
  xs = [m.x for m in series.marks]
  ys = [m.y for m in series.marks]
  colour = LOOKS[series.look]
  marker = MARKERS[series.look]
  bars = dict(
    xerr=_lengths(xs, [m.x_interval for m in series.marks]),
    yerr=_lengths(ys, [m.y_interval for m in series.marks]),
  )
  if panel.bars:
    edges = [xs[0] - panel.bars / 2, *(x + panel.bars / 2 for x in xs)]
    axes.stairs(ys, edges, fill=True, fc=(colour, 0.2), ec=colour, lw=1.2, zorder=2, gid=name + INTERVALS)
  axes.errorbar(xs, ys, **bars, fmt='none', ecolor=colour, elinewidth=0.8, alpha=0.35, zorder=2, gid=name + INTERVALS)
  size = 13 if marker == '*' else None
  label = series.label or series.curve
  axes.plot(
    xs,
    ys,
    ls='-' if panel.lines else 'none',
    color=colour,
    marker=marker,
    markersize=size,
    label=label,
    zorder=3,
    gid=name,
  )


def _lengths(values: Sequence[float], intervals: Sequence) -> list[list[float]] | None:
  """Return how far intervals reach below and above their values, None where there is no interval."""
  if not any(intervals):
    return None
  pairs = [(v, interval or (v, v)) for v, interval in zip(values, intervals, strict=True)]
  return [[max(v - low, 0) for v, (low, _) in pairs], [max(high - v, 0) for v, (_, high) in pairs]]


def _add_legend(figure: Any, cells: Sequence[Any], hidden: Collection[str]):
  """Add a legend with each name once, next to the panels."""
  handles: dict[str, Any] = {}
  for axes in cells:
    lines = [line for line in axes.get_lines() if line.get_gid()]  # of series; matplotlib's own list leaves out _names
    handles |= {line.get_label(): line for line in lines if line.get_gid() not in hidden}
  legend = figure.legend(handles.values(), handles.keys(), loc='upper left', bbox_to_anchor=(1, 1))
  legend.set_gid(LEGEND)


def _remove(root: ElementTree.Element, unwanted: Callable[[ElementTree.Element], bool]):
  """Remove elements with all that is in them."""
  for parent in list(root.iter()):
    for child in filter(unwanted, list(parent)):
      parent.remove(child)


# ---- inside a page ----


def _element(root: ElementTree.Element, chart: Chart, groups: Mapping[str, Series]) -> ElementTree.Element:
  """Make a drawing the element of a page: in its colours, without a legend, with the names and texts of series."""
  unused = ('metadata', 'style', 'clipPath')
  _remove(root, lambda node: node.tag.endswith(unused) or node.get('id', '').startswith((BACKGROUND, LEGEND)))
  for node in root.iter():
    node.tag = node.tag.split('}')[-1]
    node.tail = None
    node.text = node.text if node.tag == 'text' else None
  for group in root.iter('g'):
    name = group.attrib.pop('id', '')
    if name in groups:
      for node, mark in zip(group.iter('use'), groups[name].marks, strict=True):
        node.set('data-tip', mark.text)
    series = groups.get(name.removesuffix(INTERVALS))
    if series is not None:  # the page finds it by these
      group.set('data-curve', series.curve)
      if series.label:
        group.set('data-setting', series.label)
      if not series.selected:
        group.set('hidden', '')
  for node in root.iter():
    node.attrib = {k.split('}')[-1]: _value(k, v, chart.name) for k, v in node.attrib.items() if k != 'clip-path'}
  label = '; '.join(f'{p.title}: {p.y} by {p.x}' for p in chart.panels)
  kind = 'wide' if len(chart.panels) > 1 else 'one'
  root.attrib = {'role': 'group', 'tabindex': '0', 'aria-label': label, 'class': kind}
  return root


def _value(name: str, value: str, prefix: str) -> str:
  """Return the value of an attribute for a page: short numbers, colours that differ by light and dark, unique ids."""
  if name == 'id':
    return f'{prefix}-{value}'
  if name.endswith('href'):
    return f'#{prefix}-{value[1:]}'
  if name == 'style':
    return re.sub('|'.join(VARIABLES), lambda match: VARIABLES[match[0]], value)
  return re.sub(r'(\d\.\d\d)\d+', r'\1', value) if name in ('d', 'x', 'y', 'transform') else value
