"""One HTML page with the results of an experiment; it loads nothing, and opens from any folder.

report.html is its Jinja template, which escapes all texts of the data: prompts may hold any text. Charts are images;
report.js sorts tables.
"""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from speccascade.evaluate.report import charts, formats, tables
from speccascade.evaluate.report import points as pts
from speccascade.evaluate.report.drawing import Drawing

# The class and the meaning of each source of a token.
SOURCES = {
  'drafter': ('drafter', 'drafted, and accepted'),
  'second drafter': ('drafter2', 'drafted by the second model, and accepted'),
  'third drafter': ('drafter3', 'drafted by the third model, and accepted'),
  'residual': ('residual', 'drawn anew after a rejection'),
  'bonus': ('bonus', 'drawn after a block that was accepted whole'),
  'verifier': ('verifier', 'written by the large model alone'),
  'combined': ('bonus', 'drawn from the combination of the models'),
}
OTHER = ('other', 'another source')


def page(results: dict, drawings: Sequence[Drawing]) -> str:
  """Return the page of an experiment's results, with its charts, which are drawn."""
  folder = Path(__file__).parent
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(folder),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
  )
  environment.filters['token'] = _token
  functions = dict(picture=_picture, numeric=formats.numeric, cells=formats.cells, as_text=pts.text)
  environment.globals |= functions | dict(counts=_counts, kind=_kind, slug=charts.slug)
  return environment.get_template('report.html').render(
    css=(folder / 'report.css').read_text(encoding='utf-8'),
    js=(folder / 'report.js').read_text(encoding='utf-8'),
    results=results,
    verdicts=tables.verdicts(results),
    sections=_sections(results, drawings),
    sources=_sources(results['traces'] or []),
  )


def _sections(results: dict, drawings: Sequence[Drawing]) -> dict[str, Any]:
  """Return what each section shows, those without anything left out."""
  drawn = {section: [d for d in drawings if d.chart.section == section] for section in charts.CHARTS}
  examples: dict[tuple, list] = {}
  for trace in results['traces'] or []:
    examples.setdefault((trace['temperature'], trace['example']), []).append(trace)
  quality = next(iter(charts.CHARTS))
  first = {quality: drawn.pop(quality), 'Tables': results['tables'] or tables.tables(results)}
  last = {'Outputs, token by token': examples, 'How it was run': _environment(results)}
  return {name: content for name, content in (first | drawn | last).items() if content}


def _picture(drawing: Drawing) -> tuple[str, str]:
  """Return a chart as an image that a page contains, and what is on it."""
  content = base64.b64encode(drawing.svg).decode()
  return f'data:image/svg+xml;base64,{content}', '; '.join(f'{p.title}: {p.y} by {p.x}' for p in drawing.chart.panels)


# ---- outputs ----


def _sources(traces: Sequence[dict]) -> list[tuple[str, str, str]]:
  """Return the name, class and meaning of each source of some tokens."""
  used = {t['source'] for trace in traces for t in trace['tokens']}
  return [(s, *SOURCES[s]) for s in SOURCES if s in used] + [(s, *OTHER) for s in sorted(used - SOURCES.keys())]


def _counts(trace: dict) -> dict[str, int]:
  """Return the number of tokens of each source."""
  sources = [t['source'] for t in trace['tokens']]
  return {s: sources.count(s) for s in dict.fromkeys(sources)}


def _token(token: dict) -> tuple[bool, str, str]:
  """Return whether a space is before a token, its text, and its class."""
  text = token['text'].replace('▁', ' ').replace('Ġ', ' ').replace('Ċ', '⏎').replace('\n', '⏎')
  spaced = text.startswith(' ')  # the space stays uncoloured, or lines would end with it
  return spaced, text.removeprefix(' ') or ('␣' if text else '∅'), _kind(token['source'])


def _kind(source: str) -> str:
  return SOURCES.get(source, OTHER)[0]


# ---- how it was run ----


def _environment(results: dict) -> list[tuple[str, str]]:
  rows = [('models', ', '.join(results['models']))]
  for name, value in (results['environment'] or {}).items():
    if isinstance(value, dict):
      value = ', '.join(f'{k} {v}' for k, v in value.items() if v is not None)
    if value is not None:
      rows.append((name, value))
  return rows
