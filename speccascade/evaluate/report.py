"""One HTML file that tells what an experiment found; it loads nothing and works where it lies.

Tables, outputs and findings are written here, charts are drawn by report.js from the numbers that stand in the page.
Whatever comes from the data is escaped: prompts may hold any text.
"""

from collections.abc import Sequence
import functools
import html
import json
from pathlib import Path
import string
from typing import Any

from speccascade.evaluate import formats, plots, tables, verdict
from speccascade.host import storage

HERE = Path(__file__).parent
# The class and what it means of each source of a token.
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

_esc = functools.partial(html.escape, quote=True)


def write(results: dict, path: Path | str):
  """Write the report."""
  storage.write(Path(path), page(results))


def page(results: dict) -> str:
  """Return the report as HTML."""
  drawn = Drawn(results)
  sections = [
    ('Quality and time', drawn.tradeoffs()),
    ('Tables', _tables(results)),
    ('Quality by deferral', drawn.deferrals()),
    ('Acceptance', drawn.acceptance()),
    ('Parameters', drawn.sweeps()),
    ('Prediction and measurement', drawn.predictions()),
    ('Outputs, token by token', _traces(results['traces'] or [])),
    ('How it was run', _environment(results)),
  ]
  sections = [(name, body) for name, body in sections if body]
  template = string.Template((HERE / 'report.html').read_text(encoding='utf-8'))
  return template.substitute(
    css=(HERE / 'report.css').read_text(encoding='utf-8'),
    js=(HERE / 'report.js').read_text(encoding='utf-8'),
    data=_json(drawn.data),
    title=_esc(str(results['name'])),
    kicker=_esc(str(results['task'])),
    findings=''.join(
      f'<li class="{kind}"><span>{_esc(title)}</span>{_esc(text)}</li>'
      for title, kind, text in verdict.findings(results)
    ),
    compared=_esc(verdict.compared(results)),
    nav=' '.join(f'<a href="#{_slug(name)}">{_esc(name)}</a>' for name, _ in sections),
    sections='\n'.join(f'<section id="{_slug(n)}"><h2>{_esc(n)}</h2>\n{body}</section>' for n, body in sections),
  )


def _slug(name: str) -> str:
  return ''.join(c if c.isalnum() else '-' for c in name.lower())


def _json(value: Any) -> str:
  """Return JSON that cannot end the element that it stands in."""
  text = json.dumps(value, ensure_ascii=True, allow_nan=False)
  return text.replace('<', '\\u003c').replace('>', '\\u003e').replace('&', '\\u0026')


# ---- tables ----


def _tables(results: dict) -> str:
  found = results['tables'] or tables.tables(results)
  return ''.join(_table(t, results['reference']) for t in found)


def _table(table: dict, reference: str) -> str:
  numbers = formats.numeric(table)
  head = ''.join(
    f'<th scope="col"{" class=n" if n else ""}><button type="button">{_unbroken(c)}</button></th>'
    for c, n in zip(table['columns'], numbers, strict=True)
  )
  rows = []
  for row, shown in zip(table['rows'], formats.shown(table), strict=True):
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


# ---- charts ----


class Drawn:
  """The charts' numbers, gathered while the sections that show them are written."""

  def __init__(self, results: dict):
    self.results, self.metric = results, results['metric']
    self.shown, self.groups = tables.metric_name(self.metric), tables.groups(results)
    alone = {tables.LARGE: 'large', tables.SMALL: 'small'}
    names = list(dict.fromkeys(p['curve'] for p in results['points']))
    numbers = iter(range(len(names)))
    curves = {name: alone[name] if name in alone else next(numbers) for name in names}
    self.data: dict[str, Any] = dict(curves=curves, charts=[], blocks=[], reference=results['reference'])

  def tradeoffs(self) -> str:
    """Write quality against time."""
    reference, cards = self.results['reference'], ''
    for title, points in self.groups:
      base = tables.at(points, reference)
      level = None if base is None else tables.quality(base, self.metric)
      series = self._series(points, self._by_time)
      if sum(len(s['points']) for s in series) > 1:
        cards += self._card(
          title, series, f'time relative to {reference}', self.shown, lines=True,
          guide={} if level is None else {'y': level}, broken='x',
        )  # fmt: skip
    lead = (
      f'Left is faster, up is better; the dashed line is the quality of {reference}. Bars are 95 % intervals. Settings '
      'that decoded alike are drawn once; a model alone far from the rest stands with its numbers at the edge, where '
      'the axis is broken.'
    )
    return self._grid(lead, cards)

  def deferrals(self) -> str:
    """Write quality against the share deferred."""
    ends, cards = {tables.SMALL: 0.0, tables.LARGE: 1.0}, ''
    for title, points in self.groups:

      def place(p):
        share = ends.get(p['curve'], (p['counts'] or {}).get('deferral_rate'))
        quality = tables.quality(p, self.metric)
        if share is None or quality is None:
          return None
        record = dict(x=share, y=quality, tip=self._tip(p, f'{self.shown} {quality:.2f}\n{share:.0%} deferred'))
        return record | self._interval(p)

      series = self._series(points, place)
      if any(s['curve'] not in ends for s in series):
        cards += self._card(title, series, 'share of tokens deferred to the large model', self.shown, lines=True)
    return self._grid('What the rule is worth whatever it costs: quality by how often the large model is asked.', cards)

  def acceptance(self) -> str:
    """Write acceptance by place and accepted lengths of a setting that the reader chooses."""
    options, chosen = [], None
    for title, points in self.groups:
      best = verdict.fastest_as_good(self.results, points)
      for p in (p for some in tables.curves(points).values() for p in tables.distinct(some)):
        if not (p['counts'] and sum(p['counts']['tested_at'])):
          continue
        if p == best and chosen is None:
          chosen = len(options)
        self.data['blocks'].append(self._block(p))
        options.append(f'{verdict.named(p)}, {title}')
    if not options:
      return ''
    listed = ''.join(
      f'<option value="{i}"{" selected" if i == (chosen or 0) else ""}>{_esc(name)}</option>'
      for i, name in enumerate(options)
    )
    charts = ''.join(f'<div class="card"><div class="chart" data-block="{k}"></div></div>' for k in ('left', 'right'))
    return (
      '<p class="lead">How often the token at each place of a drafted block is accepted, given that all before it '
      'were, and how many are accepted in a round that drafted any.</p>'
      f'<select data-blocks aria-label="Setting">{listed}</select><div class="grid">{charts}</div>'
    )

  def _block(self, point: dict) -> dict:
    counts, curve = point['counts'], point['curve']
    rates = [
      dict(y=rate, tip=f'place {i}: {rate:.3f}\n{n} tested')
      for i, (rate, n) in enumerate(zip(plots.by_place(counts), counts['tested_at']), 1)
    ]
    shares = [
      dict(y=share, tip=f'{i} accepted: {share:.1%} of rounds')
      for i, share in enumerate(plots.shares_of(counts['accepted_lengths']))
    ]
    left = dict(title='Acceptance by place', curve=curve, bars=rates, first=1, most=1.05, x='place in the block')
    right = dict(title='Accepted lengths', curve=curve, bars=shares, first=0, x='tokens accepted in a round')
    return dict(acceptance=left | {'y': 'acceptance'}, lengths=right | {'y': 'share of rounds'})

  def sweeps(self) -> str:
    """Write speed-up against each parameter that varies."""
    cards = ''
    for title, points in self.groups:
      for parameter, some in plots.varying(points).items():
        series = [
          dict(curve=name, points=[self._timed(p, tables.place(p)) for p in curve]) for name, curve in some.items()
        ]
        letter = tables.letter(parameter)
        cards += self._card(f'{letter}, {title}', series, letter, 'speed-up', lines=True, guide={'y': 1})
    return self._grid(f'Speed-up over {self.results["reference"]} by the value that each curve varies.', cards)

  def predictions(self) -> str:
    """Write measured speed-ups against predicted ones."""
    cards = ''
    for title, points in self.groups:
      series = self._series(
        [p for p in points if p['predicted'] and tables.ratio(p) is not None],
        lambda p: self._timed(p, p['predicted']['ratio'], f'\npredicted {p["predicted"]["ratio"]:.2f}×'),
      )
      if series:
        cards += self._card(title, series, 'predicted speed-up', 'measured speed-up', diagonal=True)
    lead = (
      'Predicted from acceptance, the times of forward passes and of a token of the drafter alone, and what a token of '
      'the reference costs beside its calls. On the line they agree; under it, a round costs more, for its block is '
      'tested, or gives less, for short texts end inside a block.'
    )
    return self._grid(lead, cards)

  def _by_time(self, point: dict) -> dict | None:
    ratio, quality = tables.ratio(point), tables.quality(point, self.metric)
    if ratio is None or quality is None:
      return None
    tip = f'{self.shown} {quality:.2f}\n{ratio:.2f}× the speed, {1 / ratio:.2f} of the time'
    record = dict(x=1 / ratio, y=quality, tip=self._tip(point, tip)) | self._interval(point)
    interval = point['latency'].get('ratio_ci')
    return record | ({'x_ci': [1 / r for r in reversed(interval)]} if interval else {})

  def _timed(self, point: dict, x: float, more: str = '') -> dict:
    interval = point['latency'].get('ratio_ci')
    record = dict(x=x, y=tables.ratio(point), tip=self._tip(point, f'{tables.ratio(point):.2f}× the speed{more}'))
    return record | ({'y_ci': interval} if interval else {})

  def _tip(self, point: dict, said: str) -> str:
    counts = point['counts'] or {}
    outputs = f'\n{counts["length"]:.1f} tokens long, {counts["cut_off"]:.0%} cut off' if 'length' in counts else ''
    return f'{verdict.named(point)}\n{said}{outputs}'

  def _interval(self, point: dict) -> dict:
    interval = (point.get('quality_ci') or {}).get(self.metric)
    return {'y_ci': interval} if interval else {}

  def _series(self, points: Sequence[dict], place) -> list[dict]:
    found = []
    for name, some in tables.curves(points).items():
      known = [x for x in map(place, tables.distinct(some)) if x is not None]
      if known:
        found.append(dict(curve=name, points=known))
    return found

  def _card(self, title: str, series: list[dict], x: str, y: str, **more) -> str:
    self.data['charts'].append(dict(title=f'{y} by {x}, {title}', series=series, x=x, y=y, lines=False) | more)
    number = len(self.data['charts']) - 1
    return f'<div class="card"><h3>{_esc(title)}</h3><div class="chart" data-chart="{number}"></div></div>'

  def _grid(self, lead: str, cards: str) -> str:
    if not cards:
      return ''
    plain = '<noscript><p>The charts need JavaScript; the tables have the same numbers.</p></noscript>'
    return f'<p class="lead">{_esc(lead)}</p><div class="legend"></div>{plain}<div class="grid">{cards}</div>'


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
    f'</summary><dl class="said"><dt>prompt</dt><dd>{_esc(str(traces[0]["prompt"]))}</dd>'
    f'<dt>reference</dt><dd>{_esc(wanted)}</dd></dl>{"".join(map(_trace, traces))}</details>'
  )


def _trace(trace: dict) -> str:
  tokens = trace['tokens']
  named = '' if trace['value'] is None else tables.text(trace['value'])
  sources = list(dict.fromkeys(t['source'] for t in tokens))
  counts = {s: sum(t['source'] == s for t in tokens) for s in sources}
  share = ''.join(f'<span class="{_kind(s)}" style="flex:{n}"></span>' for s, n in counts.items())
  said = ' · '.join(f'{n} {_esc(s)}' for s, n in counts.items())
  return (
    f'<div class="trace"><div class="who">{_esc(trace["curve"])} {_esc(named)}<div class="share">{share}</div>'
    f'<small>{said}</small></div><p class="tokens">{"".join(map(_token, tokens))}</p></div>'
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
