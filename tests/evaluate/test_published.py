"""Published values are well formed, and shown only next to what they are values of."""

import csv
import io
import math

import made
from made import point
import pytest

from speccascade.evaluate import published, report
from speccascade.evaluate.report import formats, tables

ROW = dict(
  cell='paper/table1/en-de',
  curve='a',
  value='0.3',
  temperature='1',
  batch='',
  measure='speedup',
  published='1.5',
  source='table',
)


def write(path, *rows):
  with open(path, 'w', newline='', encoding='utf-8') as file:
    writer = csv.DictWriter(file, list(ROW))
    writer.writeheader()
    writer.writerows(rows)
  return path


def test_the_values_that_come_with_the_package_can_be_read():
  rows = published.read()
  for row in rows:
    assert [*row] == [*ROW] and row['cell'] and row['curve'] and math.isfinite(row['published']), row
    assert row['source'] in ('paper', 'table', 'reading'), row
    assert row['measure'] in published.MEASURES or row['measure'].startswith(published.QUALITY), row
  keys = [str({name: x for name, x in row.items() if name not in ('published', 'source')}) for row in rows]
  assert len(set(keys)) == len(keys) > 0
  assert published.of_cell(rows[0]['cell'])[0] == rows[0]
  assert published.of_cell('') == published.of_cell(rows[0]['cell'][:-1]) == []
  assert {*published.OF_POINTS} <= {'speedup', *tables.COUNTS.values(), *tables.TIMES.values()}


def test_values_are_numbers_lists_or_names(tmp_path):
  given = ['0.3', '[0.5, 0.5]', 'mean', '', '5']
  rows = published.read(write(tmp_path / 'p.csv', *(ROW | {'value': value} for value in given)))
  assert [row['value'] for row in rows] == [0.3, [0.5, 0.5], 'mean', None, 5]
  assert (rows[0]['temperature'], rows[0]['batch'], rows[0]['published']) == (1.0, None, 1.5)


def test_a_value_is_of_its_curve_setting_temperature_and_batch_alone(tmp_path):
  rows = published.read(write(tmp_path / 'p.csv', ROW, ROW | {'cell': 'paper/table1/de-en', 'published': '9'}))
  own = published.of_cell('paper/table1/en-de', rows)
  mine = point('a', 0.3, temperature=1.0, batch=4).to_json()
  assert published.match(own, mine, 'speedup') == 1.5
  for other in (mine | {'value': 0.4}, mine | {'curve': 'b'}, mine | {'temperature': 0.0}, mine | {'value': None}):
    assert published.match(own, other, 'speedup') is None
  assert published.match(own, mine, 'tokens_per_s') is None
  assert published.match(published.of_cell('paper/table1', rows), mine, 'speedup') is None  # of two cells neither
  assert published.of_cell('paper/table', rows) == []


def compared(cell):
  counts = made.counts(0.5) | {'calls_per_token': 0.4}
  points = [
    point('target only', quality=28.0, ratio=1.0, temperature=1.0),
    point('a', 0.3, 28.5, 1.25, temperature=1.0, counts=counts),
    point('a', 0.6, 26.0, 2.0, temperature=1.0, counts=made.counts(0.6)),
  ]
  known = dict(cell='x/y', curve='a', temperature=1.0, batch=1, source='table')
  rows = [
    known | dict(value=0.3, measure='quality/bleu', published=29.1),
    known | dict(value=0.3, measure='calls_per_token', published=0.45),
    known | dict(value=None, measure='speedup_at_quality', published=1.95),
    known | dict(value=None, measure='best_quality', published=18.33),
  ]
  results = made.results(points, published=published.of_cell(cell, rows))
  return results | {'tables': tables.tables(results)}


def test_published_values_are_in_a_column_next_to_the_measured_ones():
  results = compared('x/y')
  summary, cascades = (
    next(t for t in results['tables'] if t['title'].startswith(x)) for x in ('Summary', 'Quality ag')
  )
  for table, name, row, values in (
    (summary, 'BLEU', 1, [28.5, 29.1]),
    (summary, 'large calls/token', 1, [0.4, 0.45]),
    (cascades, "speed-up at the large model's quality", 0, [pytest.approx(1.4), 1.95]),
    (cascades, 'best BLEU in its time', 0, [28.5, 18.33]),
  ):
    at = table['columns'].index(name)
    assert table['columns'][at + 1] == f'{name}, published' and table['rows'][row][at : at + 2] == values
  assert summary['rows'][2][summary['columns'].index('BLEU, published')] is None  # of the other setting nothing
  text = formats.as_markdown(results, every_table=True)
  assert text.count('BLEU, published') == 1 and '18.33' in text


def test_no_value_is_shown_of_another_cell(tmp_path):
  results = compared('')
  assert 'published' not in formats.as_markdown(results, every_table=True)
  report.write(results, tmp_path)
  assert 'published' not in (tmp_path / 'report.html').read_text()


def test_programs_can_read_published_values_too(tmp_path):
  results = compared('x')
  report.write(results, tmp_path)
  assert 'BLEU, published' in (tmp_path / 'report.html').read_text().replace('\u2011', '-')
  rows = list(csv.DictReader(io.StringIO((tmp_path / 'summary.csv').read_text())))
  assert [row['published_quality'] for row in rows] == ['', '29.1', ''] and rows[1][
    'published_calls_per_token'
  ] == '0.45'
