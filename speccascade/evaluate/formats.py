"""Results as a flat table: CSV for programs, Markdown for people."""

from collections.abc import Sequence
import csv
import io
from pathlib import Path
from typing import Any

NEXT = """
Next:
  texts drawn at temperature 1  python -m speccascade.run --gin.Experiment.temperatures=[1.0]
  another seed, longer timing   python -m speccascade.run --gin.Experiment.seed=1 --gin.Experiment.latency_trials=5
  your models and sentences     gin_configs/runs/ has experiments to start from; each file opens with its command
  a rule of your own            "Add a rule" in README.md; a config takes it with `import my_rules`
  every flag                    python -m speccascade.run --help"""

COLUMNS = (
  'curve', 'parameter', 'value', 'temperature', 'batch', 'examples', 'quality', 'quality_low', 'quality_high',
  'deferral_rate', 'acceptance', 'tokens_per_round', 'speedup', 'speedup_low', 'speedup_high', 'median_ms',
  'tokens_per_s',
)  # fmt: skip


def rows(results: dict) -> list[dict]:
  """Return the points as flat rows of COLUMNS."""
  flat = []
  for p in results['points']:
    counted, took = p['counts'] or {}, p['latency'] or {}
    row = {k: p[k] for k in ('curve', 'parameter', 'value', 'temperature', 'batch', 'examples')}
    row['quality'] = (p['quality'] or {}).get(results['metric'])
    row['quality_low'], row['quality_high'] = (p['quality_ci'] or {}).get(results['metric']) or (None, None)
    row |= {k: counted.get(k) for k in ('deferral_rate', 'acceptance', 'tokens_per_round')}
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


def as_markdown(results: dict) -> str:
  """Return the points as tables for reading, one for each temperature and batch size."""
  flat, parts = rows(results), [f'# {results["name"]}: {results["task"]}']
  groups = dict.fromkeys((r['temperature'], r['batch']) for r in flat)
  for temperature, batch in groups:
    some = [r for r in flat if (r['temperature'], r['batch']) == (temperature, batch)]
    parts.append(f'T = {temperature:g}, batch {batch}, {some[0]["examples"]} examples')
    parts.append(table(some, results['metric']))
  return '\n\n'.join(parts) + '\n'


def table(flat: Sequence[dict], metric: str) -> str:
  """Return rows as a Markdown table whose columns line up."""
  timed = any(r['speedup'] is not None for r in flat)
  head = ['curve', 'value', metric, '95 %', 'deferred', 'accepted', 'tokens/round']
  head += ['speed-up', '95 %', 'ms', 'tokens/s'] if timed else []
  body = []
  for r in flat:
    value = '' if r['value'] is None else f'{r["parameter"]} {_short(r["value"])}'
    cells = [r['curve'], value, _number(r['quality'], 2), _range(r['quality_low'], r['quality_high'], 1)]
    cells += [_number(r[k], 2) for k in ('deferral_rate', 'acceptance', 'tokens_per_round')]
    if timed:
      cells += [_number(r['speedup'], 2), _range(r['speedup_low'], r['speedup_high'], 2)]
      cells += [_number(r['median_ms'], 1), _number(r['tokens_per_s'], 0)]
    body.append(cells)
  return aligned(head, body, [i >= 2 for i in range(len(head))])


def aligned(head: Sequence[str], body: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
  """Return a Markdown table whose columns line up, those of numbers on the `right`."""
  widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]

  def line(row):
    return f'| {" | ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))} |'

  rule = '|'.join('-' * (w + 1) + (':' if r else '-') for w, r in zip(widths, right, strict=True))
  return '\n'.join([line(head), f'|{rule}|', *map(line, body)])


def _number(x: float | None, digits: int) -> str:
  return '–' if x is None else f'{x:.{digits}f}'


def _range(low: float | None, high: float | None, digits: int) -> str:
  return '' if low is None or high is None else f'{low:.{digits}f}–{high:.{digits}f}'


def _short(value: Any) -> str:
  if isinstance(value, list):
    return ' '.join(map(_short, value))
  return f'{value:g}' if isinstance(value, float) else str(value)


def closing(folders: Sequence[Path], *, shown: bool) -> str:
  """Return what a run ends with: its tables, where the rest is, and, for the default, what to try next."""
  parts = []
  for folder in folders:
    parts += [(folder / 'summary.md').read_text(encoding='utf-8'), f'Report: {folder / "report.html"}']
  parts.append(f'Data: results.json, summary.csv and examples.jsonl in {", ".join(map(str, folders))}')
  return '\n'.join(parts + ([NEXT] if shown else []))
