"""Results in every form that a run leaves: JSON, CSV, Markdown, TensorBoard, plots and the report."""

from collections.abc import Callable
from pathlib import Path
import re
import sys

from speccascade.evaluate import formats, rundir, sv_studies
from speccascade.host import storage
from speccascade.host.journal import GO_ON


def write(results: dict, folder: Path):
  """Write the results in every form: JSON, CSV, Markdown, TensorBoard, plots and, last, the report.

  Scalars and plots that cannot be written are warned of.
  """
  from speccascade.evaluate import plots, report, tables  # lazily: they draw

  results['tables'] = tables.tables(results)
  known = folder / 'results.json'
  if rundir.exists(folder / 'report.html') and rundir.exists(known) and rundir.read(known) == rundir.as_json(results):
    return
  rundir.write_json(known, results)
  rundir.write(folder / 'summary.csv', formats.as_csv(results))
  rundir.write(folder / 'summary.md', formats.as_markdown(results, whole=False))
  rundir.write(folder / 'tables.md', formats.as_markdown(results, whole=True))
  with storage.one_sentence(f'{folder} cannot be written', GO_ON):
    with storage.staged(folder, last='report.html') as scratch:
      _tried('tensorboard/', lambda: _tensorboard(results, scratch / 'tensorboard'))
      _tried('curves/', lambda: plots.write(results, scratch / 'curves'))
      _tried('curves/', lambda: sv_studies.draw(results.get('studies', ()), scratch / 'curves'))
      report.write(results, scratch / 'report.html')


def _tried(name: str, write: Callable[[], object]):
  """Write what the results do not depend on."""
  try:
    write()
  except Exception as error:  # of whichever library draws
    said = str(error).strip().split('\n')[0] or type(error).__name__
    print(f'warning: {name} is not all written ({said}); the report and all numbers are', file=sys.stderr)


def _tensorboard(results: dict, folder: Path):
  """Write quality and speed-up of every curve as scalars, the step being the value's place in the curve."""
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
      for name, value in (point['quality'] or {}).items():
        if value is None:  # no number was had of these outputs
          continue
        writer.add_scalar(f'{tag}/{name}', value, step)
      if point['latency'] and point['latency']['ratio'] is not None:
        writer.add_scalar(f'{tag}/speed-up', point['latency']['ratio'], step)
