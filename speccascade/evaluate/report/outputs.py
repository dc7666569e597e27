"""Results in every form that a run leaves: JSON, CSV, Markdown, charts and the page."""

from collections.abc import Callable
import functools
from pathlib import Path
import sys
from typing import Any

from speccascade.evaluate.report import charts, drawing, formats, page, tables
from speccascade.host.errors import first_line
from speccascade.host.runs import as_json, RunDir

TEXTS: dict[str, Callable[[dict], str]] = {
  'summary.csv': formats.as_csv,
  'summary.md': functools.partial(formats.as_markdown, every_table=False),
  'tables.md': functools.partial(formats.as_markdown, every_table=True),
}


def write(results: dict, folder: Path):
  """Write the results in every form: JSON, then what shows them: CSV, Markdown, charts and, last, the page.

  Nothing is written to a folder that has these results already. Of what cannot be made there is a warning.

  Args:
    results: The results of an experiment, with `PointResult`s; its tables are added.
    folder: Where the files go, on a disk or in a bucket.
  """
  results['tables'] = warned('tables.md', lambda: tables.tables(results)) or []
  run = RunDir(folder)
  content = as_json(results | {'points': [p.to_json() for p in results['points']]})
  if run.exists('report.html') and run.exists('results.json') and run.read('results.json') == content:
    return
  run.write('results.json', content)
  for name, make in TEXTS.items():
    if text := warned(name, functools.partial(make, results)):
      run.write(name, text)
  drawings = warned('curves/', lambda: list(map(drawing.draw, charts.charts(results)))) or []
  warned('curves/', lambda: [(run / 'curves').write(f'{x.chart.name}.svg', x.svg) for x in drawings])
  if text := warned('report.html', lambda: page.page(results, drawings)):
    run.write('report.html', text)


def warned(name: str, make: Callable[[], Any]) -> Any:
  """Make what the results do not depend on; print a warning where that fails."""
  try:
    return make()
  except Exception as error:  # of whichever library draws
    print(f'warning: {name} is not all written ({first_line(error)}); results.json has all numbers', file=sys.stderr)
