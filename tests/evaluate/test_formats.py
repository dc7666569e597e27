"""Results as text: Markdown that lines up, CSV that does not round."""

import csv
import io

import made
from made import point
import pytest

from speccascade.evaluate.report import formats, tables

TABLE = dict(title='Numbers', columns=['a|b', 'x', 'y'], rows=[['one', 1.234, 123.456], ['two', None, 2.0]], note='So.')


def test_markdown_lines_up_and_escapes_what_would_end_a_cell():
  assert formats.markdown(TABLE) == (
    '### Numbers\n\n'
    '| a\\|b |    x |     y |\n'
    '|------|-----:|------:|\n'
    '| one  | 1.23 | 123.5 |\n'
    '| two  |    – |   2.0 |\n\nSo.\n'
  )


def test_csv_does_not_round_numbers_and_quotes_texts():
  counts = made.counts(0.5, length=12.34567, cut_off=0.125)
  results = made.results([point('a, "b"', 0.1, 27.12345, 1.5, counts=counts), point('target only')])
  first, second = csv.DictReader(io.StringIO(formats.as_csv(results)))
  assert (first['curve'], first['quality'], first['speedup']) == ('a, "b"', '27.12345', '1.5')
  assert (first['length'], first['cut_off']) == ('12.34567', '0.125')
  assert second['quality'] == second['length'] == '' and tuple(first) == formats.COLUMNS
  assert (first['tokens_per_s'], first['steady_ratio']) == ('150.0', '')


def test_the_short_form_has_the_summary_and_the_long_form_every_table():
  results = made.cascades((0.0,))
  results['tables'] = tables.tables(results)
  short, long = (formats.as_markdown(results, every_table=every) for every in (False, True))
  assert short.count('### ') == 1 and [t['title'] in long for t in results['tables']] == [True] * 3


@pytest.mark.parametrize('name', ['=1+2', '+1', '-1', '@sum', '\t=1', '=cmd|"/c x"!A1'])
def test_no_cell_of_the_csv_is_a_formula(name):
  results = made.results([point(name, 0.1, 27.0, -1.5, counts=made.counts(0.5))])
  (row,) = csv.DictReader(io.StringIO(formats.as_csv(results)))
  assert row['curve'] == f"'{name}" and row['speedup'] == '-1.5'


def test_no_html_link_or_line_of_a_name_gets_into_the_markdown():
  bad = '<img src=x onerror=y> [a](javascript:b)\n# c'
  table = TABLE | {'title': bad, 'columns': [bad, 'x', 'y'], 'rows': [[bad, 1.0, 2.0]]}
  results = made.results([point('x')]) | {'name': bad, 'tables': [table | {'title': f'Summary {bad}'}]}
  for text in (formats.markdown(table), formats.as_markdown(results, every_table=True)):
    assert '\\<img' in text and text.count('<') == text.count('\\<')
    assert '](' not in text and '\n# c' not in text
