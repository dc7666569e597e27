"""Published values of the papers' tables and figures, from `published.csv`, a number a row.

docs/experiments/protocols.md describes its columns. A number has the unit of the report: a share is 0 … 1, a metric as
the task has it.
"""

from collections.abc import Sequence
import csv
import functools
import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / 'published.csv'
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
QUALITY = 'quality/'  # starts the measure of a metric


def read(path: Path = FILE) -> list[dict[str, Any]]:
  """Return the rows of a file of published values, numbers as numbers and what is empty as None."""
  with open(path, newline='', encoding='utf-8') as file:
    return [_parsed(row) for row in csv.DictReader(file, strict=True)]


def _parsed(row: dict[str, str]) -> dict[str, Any]:
  kinds = {'temperature': float, 'batch': int, 'published': float, 'value': _value}
  return row | {name: kind(row[name]) if row[name] else None for name, kind in kinds.items()}


def _value(text: str) -> Any:
  try:
    return json.loads(text)
  except ValueError:
    return text  # a name, as mean


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
