"""What `experiments/predictors` says of signals whose worth is known."""

import numpy as np
import pytest

from experiments.predictors import measure_signals
from experiments.sv.sv_simulation import Trio

N = 6000


def samples():
  rng = np.random.default_rng(0)
  margin = rng.normal(size=N) * 3
  accept = 1 / (1 + np.exp(1 - margin))
  noise = rng.random(N)
  request = np.repeat(np.arange(N // 50), 50).astype(float)
  return dict(margin=margin, drawn_q=accept, max_q=noise, s=noise, a=accept, accept=accept, request=request)


def test_a_curve_and_a_table_that_were_held_out_tell_what_there_is_to_tell():
  some = samples()
  accept, hard = some['accept'], np.random.default_rng(1).random(N) < some['accept']
  best = measure_signals.explained(accept, accept)
  for name in ('margin', 'drawn_q', 'companion', 'A alone'):
    found = measure_signals.held_out(some, name)
    assert measure_signals.explained(accept, found) == pytest.approx(best, abs=0.07)
    assert measure_signals.area(accept, found) == pytest.approx(measure_signals.area(accept, accept), abs=0.01)
  nothing = measure_signals.held_out(some, 'max_q')
  assert measure_signals.explained(accept, nothing) == pytest.approx(0, abs=0.02)
  assert measure_signals.area(accept, nothing) == pytest.approx(0.5, abs=0.03)
  assert measure_signals.area(hard, accept) == pytest.approx(measure_signals.area(accept, accept), abs=0.02)
  assert measure_signals.area(hard, hard) == 1 and measure_signals.area(hard, np.ones(N)) == 0.5
  learned = measure_signals.learned(some, 'margin')
  assert measure_signals.explained(accept, learned) > best - 0.05


@pytest.mark.long
def test_speeds_are_over_plain_decoding_and_a_better_predictor_is_no_slower():
  some = samples()
  known = {name: some[name] for name in ('drawn_q', 'max_q')} | {'companion': some['a'], 'A alone': some['a']}
  some |= {f'chance {name}': x for name, x in known.items()}
  times = measure_signals.compiled_times.PassTimes
  trio = Trio(times((1, 2), (0.02, 0.02), 0), times((1, 2), (0.0, 0.0), 0), times((8, 512), (1.0, 30.0), 0), True)
  steps, flat = (
    {name: float(text.split()[0]) for name, text in measure_signals.speeds(some, trio, 8, flat).items()}
    for flat in (False, True)
  )
  assert steps['drawn_q'] > steps['max_q'] and steps['drawn_q'] > 0.98 * steps['best γ'] > 0.9
  assert flat['drawn_q'] > steps['drawn_q'] and flat['best γ'] >= steps['best γ']
