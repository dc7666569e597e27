"""By how much one curve of a run is above the others, at the same calls of the large model or the same deferral.

  python experiments/learned_deferral/paired.py RUN 'Learned OPT [expected draw]' calls .25 .27
  python experiments/learned_deferral/paired.py RUN 'Learned [expected loss]' deferred .1 .2

RUN is a finished run of one experiment at one temperature. Quality is on a line between the settings of a curve; "nan":
the curve does not reach. The intervals of 95 % are over resampled texts, the same for all curves.
"""

from pathlib import Path
import sys

import numpy as np

from speccascade.evaluate import calibration, intervals, summary


def weighted(experiment, point, lines, axis):
  """Return quality and position on the axis of all texts, and of each resample: two arrays [1 + R]."""
  lines = sorted(lines, key=lambda line: line['example'])
  found, resampled, _ = summary.judge(experiment, point, lines)
  metric = next(iter(found['quality']))
  of_line = lambda line: line['deferred'] if axis == 'deferred' else line['calls'][-1]
  both = np.array([[of_line(line), line['emitted']] for line in lines])
  rows = np.vstack([np.ones(len(lines), int), intervals.draws(experiment.seed, len(lines))]) @ both
  return np.append(found['quality'][metric], resampled[metric]), rows[:, 0] / rows[:, 1]


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
  experiment, lines, _ = calibration.read(Path(run))
  curves = {}
  for point in experiment.points:
    if point.value is not None:
      of_point = [x for x in lines if (x['curve'], x['value']) == (point.curve.name, point.value)]
      curves.setdefault(point.curve.name, []).append(weighted(experiment, point, of_point, axis))
  curves = {curve: tuple(map(np.array, zip(*points, strict=True))) for curve, points in curves.items()}
  for value in map(float, values):
    reached = {curve: at(*points, value) for curve, points in curves.items()}
    for curve, quality in reached.items():
      print(f'{axis} {value:g}: {quality[0]:.2f} by {curve}')
    for curve in (x for x in reached if x != name):
      above = reached[name] - reached[curve]
      tails = (intervals.TAIL, 1 - intervals.TAIL)
      low, high = np.nanquantile(above[1:], tails) if np.isfinite(above[0]) else (np.nan, np.nan)
      print(f'{axis} {value:g}: {name} is above {curve} by {above[0]:.2f} [{low:.2f} … {high:.2f}]', flush=True)


if __name__ == '__main__':
  main()
