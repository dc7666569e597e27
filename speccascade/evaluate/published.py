"""Published values of the papers' tables and figures, from `published.csv`, a number a row.

docs/experiments/protocols.md describes its columns. A number has the unit of the report: a share is 0 … 1, a metric as
the task has it.
"""

from collections.abc import Sequence
import csv
import functools
import json
import math
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / 'published.csv'
COLUMNS = ('cell', 'curve', 'value', 'temperature', 'batch', 'measure', 'published', 'source')
OF_POINTS = (
  'speedup',
  'tokens_per_s',
  'tokens_per_s_ratio',
  'calls_per_token',
  'acceptance',
  'tokens_per_round',
  'deferral_rate',
  'length',
)
OF_CURVES = (
  'speedup_at_quality',  # the largest speed-up with the reference's quality
  'best_quality',  # of a setting that is no slower than the reference
  'best_quality_speedup',  # the speed-up of that setting
  'best_speedup',  # of the fastest setting
  'best_tokens_per_s',
  'best_tokens_per_s_ratio',
)
MEASURES = (*OF_POINTS, *OF_CURVES)
SOURCES = ('paper', 'table', 'reading')
QUALITY = 'quality/'  # starts the measure of a metric


def read(path: Path = FILE) -> list[dict[str, Any]]:
  """Return the rows of a file of published values, numbers as numbers and what is empty as None.

  Raises:
    ValueError: a row is not as the columns require; it names the file and the line.
  """
  with open(path, newline='', encoding='utf-8') as file:
    reader = csv.DictReader(file, strict=True)
    if tuple(reader.fieldnames or ()) != COLUMNS:
      raise ValueError(f'{path}: the columns are {reader.fieldnames}; they must be {",".join(COLUMNS)}.')
    rows = []
    lines: dict[tuple, int] = {}
    for row in reader:
      try:
        rows.append(_checked(row))
      except ValueError as error:
        raise ValueError(f'{path}, line {reader.line_num}: {error}') from None
      key = tuple(row[name] for name in COLUMNS if name not in ('published', 'source'))
      if (first := lines.setdefault(key, reader.line_num)) != reader.line_num:
        raise ValueError(f'{path}, line {reader.line_num}: the same cell as line {first}; remove one.')
  return rows


def _checked(row: dict) -> dict[str, Any]:
  """Return a row with its numbers; raise where a column does not have what it must."""
  if None in row or None in row.values():
    raise ValueError(f'it has another number of columns than {len(COLUMNS)}; quote a value that has a comma.')
  if not (row['cell'] and row['curve']):
    raise ValueError('it has no cell or no curve; give both.')
  if row['measure'] not in MEASURES and not row['measure'].startswith(QUALITY):
    raise ValueError(f'measure={row["measure"]!r} is unknown; give {QUALITY}METRIC or one of {", ".join(MEASURES)}.')
  if row['source'] not in SOURCES:
    raise ValueError(f'source={row["source"]!r} is none of {", ".join(SOURCES)}.')
  numbers = {}
  for name, kind in (('temperature', float), ('batch', int), ('published', float)):
    try:
      numbers[name] = kind(row[name]) if row[name] else None
    except ValueError:
      raise ValueError(f'{name}={row[name]!r} is not a number.') from None
  if numbers['published'] is None or not math.isfinite(numbers['published']):
    raise ValueError(f'published={row["published"]!r} is not a number.')
  try:
    value = json.loads(row['value']) if row['value'] else None
  except ValueError:
    value = row['value']  # a name, as mean
  return row | numbers | dict(value=value)


@functools.cache
def _shipped() -> list[dict[str, Any]]:
  return read()


def of_cell(cell: str, rows: Sequence[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
  """Return the rows of a cell and of those below it, none for ''; `rows` are those of the package where not given."""
  if not cell:
    return []
  return [row for row in (_shipped() if rows is None else rows) if f'{row["cell"]}/'.startswith(f'{cell}/')]


def match(rows: Sequence[dict[str, Any]], point: dict[str, Any], measure: str) -> float | None:
  """Return the published value of a measure of a point, None where there is none, or several cells have one.

  For a measure of a complete curve the point's value is None.
  """
  wanted = point['curve'], point['value'], measure
  values = [
    row['published']
    for row in rows
    if (row['curve'], row['value'], row['measure']) == wanted
    and all(row[name] in (None, point[name]) for name in ('temperature', 'batch'))
  ]
  return values[0] if len(values) == 1 else None
