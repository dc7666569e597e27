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


def write(results: dict, folder: Path, extra: Collection[str] = ()):
  """Write the results in every form: JSON, CSV, Markdown, charts and, last, the page.

  Nothing is written to a folder that has these results already. Scalars and charts that cannot be written are warned
  of.

  Args:
    results: the results of an experiment; its tables are added.
    folder: where the files go, on a disk or in a bucket.
    extra: what is written too: 'png', the charts as PNG; 'tensorboard', quality and speed-up as scalars.
  """
  results['tables'] = tables.tables(results)
  known = folder / 'results.json'
  if rundir.exists(folder / 'report.html') and rundir.exists(known) and rundir.read(known) == rundir.as_json(results):
    return
  rundir.write_json(known, results)
  rundir.write(folder / 'summary.csv', formats.as_csv(results))
  rundir.write(folder / 'acceptance.csv', formats.acceptance_csv(results))
  if compared := formats.published_csv(results):
    rundir.write(folder / 'published.csv', compared)
  rundir.write(folder / 'summary.md', formats.as_markdown(results, every_table=False))
  rundir.write(folder / 'tables.md', formats.as_markdown(results, every_table=True))
  with storage.one_sentence(f'{folder} cannot be written', GO_ON):
    with storage.staged(folder, last='report.html') as scratch:
      if 'tensorboard' in extra:
        _warned('tensorboard/', lambda: _tensorboard(results, scratch / 'tensorboard'))
      draw = functools.partial(drawing.draw, png='png' in extra)
      drawings = _warned('curves/', lambda: list(map(draw, charts.charts(results)))) or []
      _warned('curves/', lambda: _curves(drawings, scratch / 'curves'))
      storage.write(scratch / 'report.html', page.page(results, drawings))


def _warned(name: str, write: Callable[[], Any]) -> Any:
  """Write what the results do not depend on; print a warning where that fails."""
  try:
    return write()
  except Exception as error:  # of whichever library draws
    print(f'warning: {name} is not all written ({first_line(error)}); the report and all numbers are', file=sys.stderr)


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
