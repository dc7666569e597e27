"""Print the figures behind the tests of distributions: exact distances, χ² of late tokens, compile and round times.

python scripts/distribution_report.py
"""

import functools
from pathlib import Path
import sys
import time

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / 'tests'))
from cases import LATE, METHODS, PROMPT, ROWS, SAMPLERS  # noqa: E402
from emitted import chi_square, emitted_distribution  # noqa: E402
import reference  # noqa: E402

from speccascade import decode, methods, rules, Sampler  # noqa: E402
from speccascade.check.enumeration import distance  # noqa: E402
from speccascade.models import toy  # noqa: E402


def exact():
  """Print, for each method, the largest distance over the samplers."""
  print(
    'Total variation distance of the enumerated distribution of 3 tokens to its definition, largest of the samplers'
  )
  for name, (method, models, step) in METHODS.items():
    worst = 0.0
    for setting in SAMPLERS.values():
      distribution = emitted_distribution(method, models, PROMPT, 3, Sampler(**setting))
      worst = max(worst, *distance(distribution, reference.joint_distribution(step(models, **setting), PROMPT, 3)))
    print(f'{name:<36}{worst:.1e}', flush=True)
    jax.clear_caches()


def late():
  """Print χ²/df and the p-value of tokens 7 to 9."""
  print(f'\nχ² of tokens 7–9, {ROWS} rows')
  for name, (method, models, step) in LATE.items():
    expected = reference.late_distribution(step(models), PROMPT, 5, 2, first=6, count=3)
    p_value, ratio = chi_square(method, models, PROMPT, Sampler(), expected, first=6, rows=ROWS)
    print(f'{name:<40}χ²/df {ratio:.2f}  p {p_value:.3f}', flush=True)


def times():
  """Print how long the toy pair's loop takes to compile, and a round of it to run."""
  print('\nToy pair of 64 tokens, one row: compile time, time of a round')
  large = toy.model(0, 64, scale=2.0)
  models = [toy.model(1, 64, scale=0.8, near=large), large]
  opt = functools.partial(rules.opt, alpha=0.3)
  for method in (methods.autoregressive(1), methods.speculative(block=5), methods.speculative(opt, 5)):
    jax.clear_caches()
    run = functools.partial(decode, method, models, [[1, 2]], max_new_tokens=512)
    start = time.perf_counter()
    run()
    compiled, seconds = time.perf_counter() - start, []
    for _ in range(5):
      start = time.perf_counter()
      out = run()
      seconds.append(time.perf_counter() - start)
    each = 1e6 * np.median(seconds) / out.stats.rounds[0]
    print(f'{method.name:<28}{compiled:6.2f} s {each:8.0f} µs', flush=True)


if __name__ == '__main__':
  exact()
  late()
  times()
