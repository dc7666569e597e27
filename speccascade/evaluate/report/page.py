"""One HTML page with the findings of an experiment; it loads nothing, and opens from any folder.

All of it is written here, charts as SVG; report.js shows texts at the pointer, selects curves and sorts tables. Texts
of the data are escaped: prompts may hold any text.
"""

from collections.abc import Sequence
import functools
import html
from pathlib import Path
import string
from typing import Any

from speccascade.evaluate.report import formats, tables, verdict
from speccascade.evaluate.report import points as pts
from speccascade.evaluate.report.drawing import Drawing

HERE = Path(__file__).parent
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
FOLDED = ('Quality by deferral', 'Prediction')  # tables whose numbers a chart shows
SYMBOLS = '●■▲◆▼✚✕◄►⬟★★'  # of the looks of curves, as drawing.MARKERS
LEADS = {
  'Quality and time': (
    'Left is faster, up is better; the dashed line is the quality of {reference}. Bars are 95 % intervals. Settings '
    'that decoded alike are drawn once; a model alone far from the rest has its numbers in the corner.'
  ),
  'Quality by deferral': 'What the rule is worth whatever it costs: quality by how often the large model is asked.',
  'Acceptance': (
    'How often the token at each place of a drafted block is accepted, given that all before it were, and how many are '
    'accepted in a round that drafted any.'
  ),
  'Parameters': 'Speed-up over {reference} by the value that each curve varies.',
  'Prediction and measurement': (
    'Predicted from acceptance, the times of forward passes and of a token of the drafter alone, and what a token of '
    'the reference costs beside its calls. On the line they agree; under it, a round costs more, for its block is '
    'tested, or gives less, for short texts end inside a block.'
  ),
  'Speculative verification': 'What the companion predicts, and how many drafted tokens are verified in a round.',
}

_esc = functools.partial(html.escape, quote=True)


def page(results: dict, drawings: Sequence[Drawing]) -> str:
  """Write the page.

  Args:
    results: the results of an experiment.
    drawings: its drawn charts.

  Returns:
    HTML.
  """
  first, *others = ((name, _charts(results, name, drawings)) for name in LEADS)
  sections = [
    first,
    ('Tables', _tables(results)),
    *others,
    ('Outputs, token by token', _traces(results['traces'] or [])),
    ('How it was run', _environment(results)),
  ]
  sections = [(name, body) for name, body in sections if body]
  template = string.Template((HERE / 'report.html').read_text(encoding='utf-8'))
  return template.substitute(
    css=(HERE / 'report.css').read_text(encoding='utf-8'),
    js=(HERE / 'report.js').read_text(encoding='utf-8'),
    title=_esc(str(results['name'])),
    kicker=_esc(str(results['task'])),
    findings=''.join(
      f'<li class="{kind}"><span>{_esc(title)}</span>{_esc(text)}</li>'
      for title, kind, text in verdict.findings(results)
    ),
    compared=_esc(verdict.compared(results)),
    nav=' '.join(f'<a href="#{_slug(name)}">{name}</a>' for name, _ in sections),
    sections='\n'.join(f'<section id="{_slug(n)}"><h2>{n}</h2>\n{body}</section>' for n, body in sections),
  )


def _slug(name: str) -> str:
  return ''.join(c if c.isalnum() else '-' for c in name.lower())


# ---- charts ----


def _charts(results: dict, section: str, drawings: Sequence[Drawing]) -> str:
  """Write the charts of a section, with one legend."""
  drawings = [d for d in drawings if d.chart.section == section]
  if not drawings:
    return ''
  series = [s for d in drawings for panel in d.chart.panels for s in panel.series]
  legend = ''.join(
    f'<button type="button" aria-pressed="true" data-curve="{_esc(curve)}">'
    f'<span style="color:var(--c{look})">{SYMBOLS[look]}</span>{_esc(curve)}</button>'
    for curve, look in {s.curve: s.look for s in series}.items()
  )
  cards = ''.join(map(_chart, drawings))
  lead = LEADS[section].format(reference=results['reference'])
  return f'<p class="lead">{_esc(lead)}</p><div class="legend">{legend}</div><div class="grid">{cards}</div>'


def _chart(drawing: Drawing) -> str:
  panels = drawing.chart.panels
  labels = dict.fromkeys(s.label for s in panels[0].series if s.label)
  options = ''.join(f'<option>{_esc(label)}</option>' for label in labels)
  select = f'<select aria-label="Setting"><option value="">one setting of each</option>{options}</select>'
  kind = 'card wide' if len(panels) > 1 else 'card'
  return f'<div class="{kind}">{select if options else ""}<div class="chart">{drawing.svg}</div></div>'


# ---- tables ----


def _tables(results: dict) -> str:
  made = results['tables'] or tables.tables(results)
  return ''.join(_table(t, results['reference']) for t in made)


def _table(table: dict, reference: str) -> str:
  numbers = formats.numeric(table)
  head = ''.join(
    f'<th scope="col"{" class=n" if n else ""}><button type="button">{_unbroken(c)}</button></th>'
    for c, n in zip(table['columns'], numbers, strict=True)
  )
  rows = []
  for row, shown in zip(table['rows'], formats.cells(table), strict=True):
    cells = ''.join(
      f'<td{" class=n" if n else ""} data-value="{_esc("" if c is None else str(c))}">{_esc(s)}</td>'
      for c, s, n in zip(row, shown, numbers, strict=True)
    )
    rows.append(f'<tr{" class=reference" if row[0] == reference else ""}>{cells}</tr>')
  note = f'<p class="note">{_esc(table["note"])}</p>' if table['note'] else ''
  body = (
    f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>'
    f'<tbody>{"".join(rows)}</tbody></table></div>{note}'
  )
  title = _esc(table['title'])
  if table['title'].startswith(FOLDED):
    return f'<details class="card"><summary>{title}</summary>{body}</details>\n'
  return f'<div class="card"><h3>{title}</h3>{body}</div>\n'


def _unbroken(text: str) -> str:
  return _esc(text).replace('-', '\u2011')


# ---- outputs ----


def _traces(traces: Sequence[dict]) -> str:
  if not traces:
    return ''
  used = {t['source'] for trace in traces for t in trace['tokens']}
  known = [(s, *SOURCES[s]) for s in SOURCES if s in used] + [(s, *OTHER) for s in sorted(used - SOURCES.keys())]
  key = ''.join(f'<li><span class="t {kind}">{_esc(name)}</span>{meaning}</li>' for name, kind, meaning in known)
  by_example: dict[tuple, list] = {}
  for trace in traces:
    by_example.setdefault((trace['temperature'], trace['example']), []).append(trace)
  groups = [_example(*which, some, first=not i) for i, (which, some) in enumerate(by_example.items())]
  return (
    '<p class="lead">Every token coloured by where it came from. Point at one, tap it, or move to it with Tab, for its '
    'chance under the drafter (q), the verifier (p) and the target (π).</p>'
    f'<ul class="key">{key}</ul>{"".join(groups)}'
  )


def _example(temperature: float, example: Any, traces: Sequence[dict], *, first: bool) -> str:
  target = traces[0]['target']
  wanted = target if isinstance(target, str) else ' / '.join(map(str, target))
  return (
    f'<details class="card"{" open" if first else ""}><summary>Example {_esc(str(example))}, T = {temperature:g}'
    f'</summary><dl class="texts"><dt>prompt</dt><dd>{_esc(str(traces[0]["prompt"]))}</dd>'
    f'<dt>reference</dt><dd>{_esc(wanted)}</dd></dl>{"".join(map(_trace, traces))}</details>'
  )


def _trace(trace: dict) -> str:
  tokens = trace['tokens']
  named = '' if trace['value'] is None else pts.text(trace['value'])
  sources = list(dict.fromkeys(t['source'] for t in tokens))
  counts = {s: sum(t['source'] == s for t in tokens) for s in sources}
  share = ''.join(f'<span class="{_kind(s)}" style="flex:{n}"></span>' for s, n in counts.items())
  listed = ' · '.join(f'{n} {_esc(s)}' for s, n in counts.items())
  return (
    f'<div class="trace"><div class="who">{_esc(trace["curve"])} {_esc(named)}<div class="share">{share}</div>'
    f'<small>{listed}</small></div><p class="tokens">{"".join(map(_token, tokens))}</p></div>'
  )


def _token(token: dict) -> str:
  chances = [f'{name} {token[k]:.3g}' for name, k in (('q', 'q'), ('p', 'p'), ('π', 'pi')) if token.get(k) is not None]
  tip = '\n'.join(filter(None, (token['source'], ', '.join(chances))))
  text = token['text'].replace('▁', ' ').replace('Ġ', ' ').replace('Ċ', '⏎').replace('\n', '⏎')
  before = ' ' if text.startswith(' ') else '<wbr>'  # a word's space stays uncoloured, or lines would end with it
  text = _esc(text.removeprefix(' ') or ('␣' if text else '∅'))
  return f'{before}<span class="t {_kind(token["source"])}" tabindex="0" data-tip="{_esc(tip)}">{text}</span>'


def _kind(source: str) -> str:
  return SOURCES.get(source, OTHER)[0]


# ---- how it was run ----


def _environment(results: dict) -> str:
  rows = [('models', ', '.join(results['models']))]
  for name, value in (results['environment'] or {}).items():
    if isinstance(value, dict):
      value = ', '.join(f'{k} {v}' for k, v in value.items() if v is not None)
    if value is not None:
      rows.append((name, value))
  for name, forward in ((results['floor'] or {}).get('forward_s') or {}).items():
    listed = ', '.join(f'{1e3 * s:.3g} ms for {w}' for w, s in forward.items())
    rows.append((f'forward pass of {name}', f'{listed} token(s) at once'))
  listed = ''.join(f'<dt>{_esc(str(k))}</dt><dd>{_esc(str(v))}</dd>' for k, v in rows)
  command = f'<pre>{_esc(results["command"])}</pre>' if results['command'] else ''
  return f'<div class="card"><dl>{listed}</dl>{command}</div>'
