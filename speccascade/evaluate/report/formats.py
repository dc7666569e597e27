"""Results as text: the tables in Markdown for people, a flat table in CSV for programs."""

from collections.abc import Sequence
import csv
import io
from pathlib import Path
import re
from typing import Any

from speccascade.evaluate.published import OF_POINTS
from speccascade.evaluate.published import QUALITY as QUALITY_OF
from speccascade.evaluate.report import points as pts
from speccascade.evaluate.report import tables

NEXT = """
Next:
  one temperature of your own   python -m speccascade.run --gin.Experiment.temperatures=[0.7]
  another seed, longer timing   python -m speccascade.run --gin.Experiment.seed=1 --gin.Experiment.latency_trials=5
  your models and sentences     copy gin_configs/forkme.gin; gin_configs/runs/ has more, each with its command
  a rule of your own            "Add a rule" in README.md; --gin.Experiment.curves='my_rules:mine(alpha=[0.1, 0.3])'
  every flag                    python -m speccascade.run --help"""

ABOUT = ('curve', 'parameter', 'value', 'temperature', 'batch', 'examples')
QUALITY = ('quality', 'quality_low', 'quality_high')
COUNTS = ('length', 'cut_off', 'deferral_rate', 'acceptance', 'tokens_per_round', 'calls_per_token')
TIMES = ('speedup', 'speedup_low', 'speedup_high', 'groups', 'median_ms')
RATES = tuple(tables.TIMES.values())
PUBLISHED = ('published_quality', *(f'published_{name}' for name in OF_POINTS))
COLUMNS = (*ABOUT, *QUALITY, *COUNTS, *TIMES, *RATES, *PUBLISHED)


def as_csv(results: dict) -> str:
  """Return the points as CSV: a line of COLUMNS, then one for each point; what was not measured is empty."""
  rows = []
  measures = (f'{QUALITY_OF}{results["metric"]}', *OF_POINTS)
  for p in results['points']:
    seconds = p.time('median_s')
    rows.append(
      [
        *(getattr(p, k) for k in ABOUT),
        p.quality_of(results['metric']),
        *(p.interval_of(results['metric']) or (None, None)),
        *(p.count(k) for k in COUNTS),
        p.ratio,
        *(p.time('ratio_ci') or (None, None)),
        p.time('groups'),
        None if seconds is None else 1e3 * seconds,
        *(p.time(k) for k in RATES),
        *(pts.published(results, p, measure) for measure in measures),
      ]
    )
  out = io.StringIO()
  csv.writer(out, lineterminator='\n').writerows([COLUMNS, *(map(_plain, row) for row in rows)])  # None is ''
  return out.getvalue()


def _plain(cell: Any) -> Any:
  """Return a cell that no spreadsheet takes for a formula, by an apostrophe before it."""
  return f"'{cell}" if isinstance(cell, str) and cell.startswith(('=', '+', '-', '@', '\t', '\r')) else cell


def as_markdown(results: dict, *, every_table: bool) -> str:
  """Return the summaries, or every table, as Markdown."""
  parts = [_escaped(f'# {results["name"]}: {results["task"]}'), *map(_escaped, tables.verdicts(results))]
  parts += [markdown(t) for t in results['tables'] if every_table or t['title'].startswith('Summary')]
  return '\n\n'.join(parts)


def row(results: dict, point: pts.PointResult) -> str:
  """Return a point as a line: the cells of its row in the summary that are known, each with its column."""
  table = tables.summary(results, '', [point])
  (texts,) = cells(table)
  method, setting, *rest = zip(table['columns'], texts, table['rows'][0], strict=True)
  named = ' at '.join(filter(None, (method[1], setting[1])))
  return ', '.join([named, *(f'{column} {text}' for column, text, value in rest if value is not None)])


def markdown(table: tables.Table) -> str:
  """Return a table as Markdown with aligned columns, its title above and its note below."""
  head, *body = [[_escaped(c).replace('|', '\\|') for c in row] for row in (table['columns'], *cells(table))]
  parts = [f'### {_escaped(table["title"])}', _aligned(head, body, numeric(table)), table['note']]
  return '\n\n'.join(filter(None, parts)) + '\n'


def _escaped(text: str) -> str:
  """Return a text of one line without HTML, links or pictures, as Markdown has it."""
  return re.sub(r'<|(?<=\])(?=\()', r'\\\g<0>', ' '.join(text.splitlines()))


def cells(table: tables.Table) -> list[list[str]]:
  """Return the rows of a table as text: floats with two decimals, one in a column that has a float of 100 or more."""
  columns = [[row[i] for row in table['rows']] for i in range(len(table['columns']))]
  digits = [2 - any(isinstance(x, float) and abs(x) >= 100 for x in column) for column in columns]
  return [
    [f'{c:.{d}f}' if isinstance(c, float) else pts.text(c) for c, d in zip(row, digits, strict=True)]
    for row in table['rows']
  ]


def numeric(table: tables.Table) -> list[bool]:
  """Return for each column of a table whether it has numbers."""
  return [any(isinstance(row[i], (int, float)) for row in table['rows']) for i in range(len(table['columns']))]


def _aligned(head: Sequence[str], body: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
  """Return a Markdown table with columns of equal width, those of numbers aligned to the `right`."""
  widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]

  def line(row):
    return f'| {" | ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))} |'

  rule = '|'.join('-' * (w + 1) + (':' if r else '-') for w, r in zip(widths, right, strict=True))
  return '\n'.join([line(head), f'|{rule}|', *map(line, body)])


def terminal(results: dict) -> str:
  """Return what a terminal shows of results: the verdicts, then method, setting, quality and speed-up of each point."""
  parts = [f'# {results["name"]}: {results["task"]}', *tables.verdicts(results)]
  parts += [markdown(tables.brief(results, title, points)) for title, points in pts.groups(results)]
  return '\n\n'.join(parts)


def closing(folders: Sequence[Path], *, next_steps: bool) -> str:
  """Return what a run prints at its end: the results of each folder, its files and, if wanted, commands to try next."""
  parts = []
  for folder in folders:
    saved, report = folder / 'results.json', folder / 'report.html'
    if saved.exists():
      parts.append(terminal(pts.read(saved.read_text(encoding='utf-8'))))
    parts += [f'Report: {report}'] if report.exists() else []
  where = ', '.join(map(str, folders))
  parts.append(f'Data: results.json, summary.md and tables.md (every column), summary.csv, examples.jsonl in {where}')
  return '\n'.join(parts + ([NEXT] if next_steps else []))
