"""How often the intervals of speed-ups have the true one, on simulated times and qualities of groups of examples.

Prints the table of docs/experiments/protocols.md.
"""

import argparse

import numpy as np

from speccascade.evaluate import intervals

BATCHES = (1, 4, 16)
GROUPS = (2, 4, 6, 8, 16, 32)
SPEEDS = np.array([1.0, 1.5, 2.5])  # the reference, and two settings of a curve
QUALITIES = np.array([0.0, 0.6, -0.6])  # of the same; at the reference's, half way, the true speed-up is 2
TRUE = {'ratio': SPEEDS[1], 'matched': SPEEDS[1:].mean()}


def simulated(rng: np.random.Generator, groups: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
  """Return the seconds [G, 3] of groups, and the qualities [G * batch, 3] of their examples.

  Examples differ in length and in what a method gains on them, and the machine in speed from call to call.
  """
  spread = lambda sigma, *shape: rng.lognormal(-(sigma**2) / 2, sigma, shape)  # of mean 1
  seconds = spread(0.5, groups, batch, 1) * spread(0.3, groups, batch, 3)
  seconds = seconds.mean(1) * spread(0.1, groups, 3) / SPEEDS
  difficulty = rng.normal(size=(groups * batch, 1))
  return seconds, QUALITIES + difficulty + rng.normal(size=(groups * batch, 3)) / 2


def of_both(seconds: np.ndarray, quality: np.ndarray, batch: int) -> dict[str, list[float | None] | None]:
  """Return the interval of the first setting's speed-up, and that of the curve's at the reference's quality."""
  groups = np.arange(len(quality)).reshape(-1, batch)
  by_group, by_example = intervals.weights(0, groups, len(quality))
  values = by_example @ quality
  sums = by_group @ seconds
  speeds = intervals.reaching(values[:, 1:], sums[:, :1] / sums[:, 1:], values[:, 0], between=True)
  ratio = intervals.of_ratio(seconds[:, :2], (1, -1))
  return dict(ratio=ratio, matched=intervals.reached(speeds, len(groups)))


def coverage(groups: int, batch: int, times: int, seed: int = 0) -> dict[str, float | None]:
  """Return the share of simulated measurements whose interval has the true speed-up, None where there is none."""
  rng = np.random.default_rng(seed)
  covered = dict.fromkeys(TRUE, 0)
  for _ in range(times):
    for name, interval in of_both(*simulated(rng, groups, batch), batch).items():
      if interval is None:
        covered[name] = None
      else:
        low, high = interval
        covered[name] += (low is None or low <= TRUE[name]) and TRUE[name] <= high
  return {name: None if count is None else count / times for name, count in covered.items()}


def main():
  """Print the coverage for each number of groups and each batch size, as Markdown."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--times', type=int, default=2000, help='simulated measurements for each cell')
  times = parser.parse_args().times
  print('| timed groups | speed-up, batch 1 | 4 | 16 | at the quality, batch 1 | 4 | 16 |')
  print('| --: | --: | --: | --: | --: | --: | --: |')
  for groups in GROUPS:
    cells = [coverage(groups, batch, times) for batch in BATCHES]
    shown = ['–' if c[name] is None else f'{c[name]:.3f}'.lstrip('0') for name in TRUE for c in cells]
    print(f'| {groups} | {" | ".join(shown)} |')


if __name__ == '__main__':
  main()
