"""Results as text: the tables in Markdown for people, a flat table in CSV for programs."""

from collections.abc import Sequence
import csv
import io
from pathlib import Path

from speccascade.evaluate import tables, verdict

NEXT = """
Next:
  one temperature of your own   python -m speccascade.run --gin.Experiment.temperatures=[0.7]
  another seed, longer timing   python -m speccascade.run --gin.Experiment.seed=1 --gin.Experiment.latency_trials=5
  your models and sentences     gin_configs/runs/ has experiments to start from; each file opens with its command
  a rule of your own            "Add a rule" in README.md; a config takes it with `import my_rules`
  every flag                    python -m speccascade.run --help"""

COLUMNS = (
  'curve', 'parameter', 'value', 'temperature', 'batch', 'examples', 'quality', 'quality_low', 'quality_high',
  'length', 'cut_off', 'deferral_rate', 'acceptance', 'tokens_per_round', 'speedup', 'speedup_low', 'speedup_high',
  'median_ms', 'tokens_per_s',
)  # fmt: skip


def rows(results: dict) -> list[dict]:
  """Return the points as flat rows of COLUMNS."""
  flat = []
  for p in results['points']:
    counted, took = p['counts'] or {}, p['latency'] or {}
    row = {k: p[k] for k in ('curve', 'parameter', 'value', 'temperature', 'batch', 'examples')}
    row['quality'] = (p['quality'] or {}).get(results['metric'])
    row['quality_low'], row['quality_high'] = (p['quality_ci'] or {}).get(results['metric']) or (None, None)
    row |= {k: counted.get(k) for k in ('length', 'cut_off', 'deferral_rate', 'acceptance', 'tokens_per_round')}
    row['speedup'] = took.get('ratio')
    row['speedup_low'], row['speedup_high'] = took.get('ratio_ci') or (None, None)
    row['median_ms'] = 1e3 * took['median_s'] if took else None
    row['tokens_per_s'] = took.get('tokens_per_s')
    flat.append(row)
  return flat


def as_csv(results: dict) -> str:
  """Return the points as a CSV table."""
  out = io.StringIO()
  writer = csv.DictWriter(out, COLUMNS, lineterminator='\n')
  writer.writeheader()
  writer.writerows({k: '' if v is None else v for k, v in row.items()} for row in rows(results))
  return out.getvalue()


def as_markdown(results: dict, *, whole: bool) -> str:
  """Return what was found and one row a point, as Markdown; the `whole` has every table."""
  parts = [f'# {results["name"]}: {results["task"]}']
  parts += [f'{title}: {said}' for title, _, said in verdict.findings(results)]
  parts += [markdown(t) for t in results['tables'] if whole or t['title'].startswith('Summary')]
  return '\n\n'.join(parts)


def markdown(table: tables.Table) -> str:
  """Return a table as Markdown whose columns line up."""
  head, *body = [[c.replace('|', '\\|') for c in row] for row in (table['columns'], *shown(table))]
  parts = [f'### {table["title"]}', aligned(head, body, numeric(table)), table['note']]
  return '\n\n'.join(filter(None, parts)) + '\n'


def shown(table: tables.Table) -> list[list[str]]:
  """Return the rows for reading: floats with two decimals, with one in a column that has them over 100."""
  columns = [[row[i] for row in table['rows']] for i in range(len(table['columns']))]
  digits = [2 - any(isinstance(x, float) and abs(x) >= 100 for x in column) for column in columns]
  return [
    [f'{c:.{d}f}' if isinstance(c, float) else tables.text(c) for c, d in zip(row, digits, strict=True)]
    for row in table['rows']
  ]


def numeric(table: tables.Table) -> list[bool]:
  """Return for each column whether it holds numbers."""
  return [any(isinstance(row[i], (int, float)) for row in table['rows']) for i in range(len(table['columns']))]


def aligned(head: Sequence[str], body: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
  """Return a Markdown table whose columns line up, those of numbers on the `right`."""
  widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]

  def line(row):
    return f'| {" | ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))} |'

  rule = '|'.join('-' * (w + 1) + (':' if r else '-') for w, r in zip(widths, right, strict=True))
  return '\n'.join([line(head), f'|{rule}|', *map(line, body)])


def closing(folders: Sequence[Path], *, shown: bool) -> str:
  """Return what a run ends with: its tables, where the rest is, and, for the default, what to try next."""
  parts = []
  for folder in folders:
    parts += [(folder / 'summary.md').read_text(encoding='utf-8'), f'Report: {folder / "report.html"}']
  parts.append(f'Data: results.json, summary.csv and examples.jsonl in {", ".join(map(str, folders))}')
  return '\n'.join(parts + ([NEXT] if shown else []))
