"""By how much one curve of a run is above the others, at the same calls of the large model or the same deferral.

  python -m experiments.learned_deferral.paired RUN 'Learned OPT [expected draw]' calls .25 .27
  python -m experiments.learned_deferral.paired RUN 'Learned [expected loss]' deferred .1 .2

RUN is a finished run of one experiment at one temperature. Quality is on a line between the settings of a curve; "nan":
the curve does not reach. The intervals of 95 % are over resampled texts, the same for all curves.
"""

import json
from pathlib import Path
import sys

import numpy as np

from speccascade.evaluate import config

RESAMPLES = 1000
BOUNDS = (2.5, 97.5)


def weighted(experiment, lines, axis):
  """Return quality and position on the axis of all texts, and of each resample: two arrays [1 + R]."""
  lines = sorted(lines, key=lambda line: line['example'])
  by_index = {e.index: e for e in experiment.task.examples}
  examples = [by_index[line['example']] for line in lines]
  n = len(lines)
  metric = next(iter(experiment.task.metrics.values()))
  texts = experiment.task.judged(examples, [line['prediction'] for line in lines])
  of_line = lambda line: line['deferred'] if axis == 'deferred' else line['calls'][-1]
  both = np.array([[of_line(line), line['emitted']] for line in lines])
  drawn = np.random.default_rng(experiment.seed).multinomial(n, np.full(n, 1 / n), RESAMPLES)
  times = np.vstack([np.ones(n, int), drawn])  # how often each text is in each resample
  quality = [metric.combine(sums, n) for sums in times @ np.asarray(metric.statistics(examples, texts), np.float64)]
  rows = times @ both
  return np.array(quality), rows[:, 0] / rows[:, 1]


def at(quality, position, value):
  """Return a curve's quality [1 + R] at a position, from those of its settings [P, 1 + R]."""
  found = []
  for x, y in zip(position.T, quality.T, strict=True):
    order = np.argsort(x)
    found.append(np.interp(value, x[order], y[order], left=np.nan, right=np.nan))
  return np.array(found)


def main():
  """Print a line for each value and each other curve."""
  run, name, axis, *values = sys.argv[1:]
  config.parse([str(Path(run) / 'config.gin')])
  (experiment,) = config.build(placed=False)
  lines = [json.loads(line) for line in (Path(run) / 'examples.jsonl').read_text().splitlines()]
  curves = {}
  for point in experiment.points:
    if point.value is not None:
      of_point = [x for x in lines if (x['curve'], x['value']) == (point.curve.name, point.value)]
      curves.setdefault(point.curve.name, []).append(weighted(experiment, of_point, axis))
  curves = {curve: tuple(map(np.array, zip(*points, strict=True))) for curve, points in curves.items()}
  for value in map(float, values):
    reached = {curve: at(*points, value) for curve, points in curves.items()}
    for curve, quality in reached.items():
      print(f'{axis} {value:g}: {quality[0]:.2f} by {curve}')
    for curve in (x for x in reached if x != name):
      above = reached[name] - reached[curve]
      low, high = np.nanpercentile(above[1:], BOUNDS) if np.isfinite(above[0]) else (np.nan, np.nan)
      print(f'{axis} {value:g}: {name} is above {curve} by {above[0]:.2f} [{low:.2f} … {high:.2f}]', flush=True)


if __name__ == '__main__':
  main()
