"""Results in every form that a run leaves: JSON, CSV, Markdown, TensorBoard, charts and the page."""

from collections.abc import Callable, Collection
import functools
from pathlib import Path
import re
import sys
from typing import Any

from speccascade.evaluate import rundir
from speccascade.evaluate.report import charts, drawing, formats, page, points, tables
from speccascade.host import storage
from speccascade.host.errors import first_line
from speccascade.host.journal import GO_ON

TEXTS: dict[str, Callable[[dict], str]] = {
  'summary.csv': formats.as_csv,
  'acceptance.csv': formats.acceptance_csv,
  'published.csv': formats.published_csv,  # '' where nothing was published
  'summary.md': functools.partial(formats.as_markdown, every_table=False),
  'tables.md': functools.partial(formats.as_markdown, every_table=True),
}


def write(results: dict, folder: Path, extra: Collection[str] = ()):
  """Write the results in every form: JSON, then what shows them: CSV, Markdown, charts and, last, the page.

  Nothing is written to a folder that has these results already. Of what cannot be made there is a warning.

  Args:
    results: the results of an experiment; its tables are added.
    folder: where the files go, on a disk or in a bucket.
    extra: what is written too: 'png', the charts as PNG; 'tensorboard', quality and speed-up as scalars.
  """
  results['tables'] = warned('tables.md', lambda: tables.tables(results)) or []
  known = folder / 'results.json'
  if rundir.exists(folder / 'report.html') and rundir.exists(known) and rundir.read(known) == rundir.as_json(results):
    return
  rundir.write_json(known, results)
  for name, make in TEXTS.items():
    if text := warned(name, functools.partial(make, results)):
      rundir.write(folder / name, text)
  with storage.one_sentence(f'{folder} cannot be written', GO_ON):
    with storage.staged(folder, last='report.html') as scratch:
      if 'tensorboard' in extra:
        warned('tensorboard/', lambda: _tensorboard(results, scratch / 'tensorboard'))
      draw = functools.partial(drawing.draw, png='png' in extra)
      drawings = warned('curves/', lambda: list(map(draw, charts.charts(results)))) or []
      warned('curves/', lambda: _curves(drawings, scratch / 'curves'))
      if text := warned('report.html', lambda: page.page(results, drawings)):
        storage.write(scratch / 'report.html', text)


def warned(name: str, make: Callable[[], Any]) -> Any:
  """Make what the results do not depend on; print a warning where that fails."""
  try:
    return make()
  except Exception as error:  # of whichever library draws
    print(f'warning: {name} is not all written ({first_line(error)}); results.json has all numbers', file=sys.stderr)


def _curves(drawings: list[drawing.Drawing], folder: Path):
  folder.mkdir(exist_ok=True)
  for drawn in drawings:
    for name, content in drawn.files.items():
      (folder / name).write_bytes(content)


def _tensorboard(results: dict, folder: Path):
  """Write quality and speed-up of every curve as scalars, the step being the number of the value in the curve."""
  import tensorboardX  # lazily: a third of a second

  folder.mkdir(exist_ok=True)
  for old in folder.glob('events.out.tfevents.*'):
    old.unlink()
  with tensorboardX.SummaryWriter(str(folder)) as writer:
    steps: dict[tuple, int] = {}
    for point in results['points']:
      key = point['curve'], point['temperature'], point['batch']
      step = steps[key] = steps.get(key, -1) + 1
      tag = re.sub(r'[^\w./-]+', '_', f'{point["curve"]}/T{point["temperature"]:g}/batch{point["batch"]}')
      for name, value in [*(point['quality'] or {}).items(), ('speed-up', points.ratio(point))]:
        if value is not None:
          writer.add_scalar(f'{tag}/{name}', value, step)
