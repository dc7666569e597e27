"""Simulated rounds: what a companion may read makes speeds equal, and it may read nothing where it cannot pay."""

import numpy as np
import pytest

from speccascade.engine import plans
from speccascade.evaluate import sv_simulation
from speccascade.evaluate.report.formats import markdown
from speccascade.evaluate.sv_simulation import Trio
from speccascade.planning import profiling, sv_model
from speccascade.planning.compiled_times import PassTimes


def observed(informed=True, accept=None, text=0):
  """Return a profile of texts whose tokens are accepted or not, as S and A predict it or independently of them."""
  rng = np.random.default_rng(0)
  accept = (rng.random(4000) < 0.7).astype(float) if accept is None else accept
  seen = accept if informed else rng.permutation(accept)
  noise = lambda: 0.1 * rng.random(4000)
  samples = dict(s=0.2 + 0.6 * seen + noise(), a=0.2 + 0.6 * seen + noise(), s_target=seen, accept=accept)
  samples |= dict(position=np.zeros(4000), request=np.broadcast_to(text, 4000))
  origin = plans.Origin(('d', 'c', 'v'), (None,) * 3, (('temperature', 1.0),), 'cpu', 'made', 5)
  return profiling.profile(origin, samples, {1: {1: 1.0, 6: 1.0}}, {1: (0.1, 0.1, 1.0, 0.0)}, bins=(4, 4))


def trio(slope, reads=0.0, any_total=True):
  """Return models at a batch of 8 whose verifier takes 1, and a token more of each row so much more."""
  flat = lambda seconds: PassTimes((1, 2), (seconds, seconds), 0.0)
  return Trio(flat(0.02), flat(reads), PassTimes((8, 16), (1.0, 1.0 + slope), 0.0), any_total)


def test_rounds_begin_where_texts_are_hard():
  """In turn 40 tokens that are nearly always accepted and 20 that seldom are: most rounds begin in the latter."""
  accept = np.tile(np.repeat([0.95, 0.1], [40, 20]), 67)[:4000]
  profile = observed(accept=accept, text=np.repeat([5, 1, 3, 2], 1000))
  rng = np.random.default_rng(1)
  rounds = 0
  tokens = 0
  for text in accept.reshape(4, -1).repeat(50, 0):
    at = 0
    while at < 995:  # where a window of γ and one more ends with its text
      accepted = int(np.cumprod(rng.random(5) < text[at : at + 5]).sum())
      at += 1 + accepted
      tokens += 1 + accepted
      rounds += 1
  expected = sv_model.tokens_a_round(profile.samples, 5, 5)
  assert expected == pytest.approx(tokens / rounds, rel=0.01)
  anywhere = 1 + np.cumprod(sv_model.windows(profile.samples, 5)['accept'][:, :5], 1).sum(1).mean()
  assert anywhere > 1.15 * expected
  # speculative verification that scores everything is speculative decoding; its round takes 6 drafts of .02 and a step
  exact = sv_model.simulate(trio(0.0).profile(profile, 8, 5), 8, 5)
  assert exact['verified'] == 5
  assert 1.12 * exact['sv'] / 8 == pytest.approx(expected, rel=0.01)


def test_a_companion_pays_where_tokens_cost_and_it_knows_which():
  known = sv_simulation.compare(observed(), trio(0.3), 8, (1, 3, 5))
  unknown = sv_simulation.compare(observed(informed=False), trio(0.3), 8, (1, 3, 5))
  for name in sv_model.VARIANTS:
    assert known[name].speed > 1.2 * known['speculative'].speed and known[name].may_read > 0.3
    assert unknown[name].speed < 1.05 * unknown['speculative'].speed and unknown[name].may_read < 0.1


def test_a_companion_never_pays_where_more_tokens_cost_nothing():
  results = sv_simulation.compare(observed(), trio(0.0), 8, (1, 3, 5))
  assert max(results[name].may_read for name in sv_model.VARIANTS) < 0.01  # the error of simulated rounds
  assert results['speculative'].block == 5 and results['speculative'].speed > 2


@pytest.mark.parametrize('name', sv_model.VARIANTS)
def test_a_companion_that_reads_for_what_it_may_makes_the_speeds_equal(name):
  free = sv_simulation.compare(observed(), trio(0.3), 8, (5,))
  full = sv_simulation.compare(observed(), trio(0.3, reads=free[name].may_read), 8, (5,))
  assert full[name].speed == pytest.approx(max(1, full['speculative'].speed), rel=0.01)
  assert full[name].reads == pytest.approx(free[name].may_read)


def test_the_reading_of_all_tokens_stops_at_a_step_that_the_other_passes():
  loop = trio(0.6, any_total=False)
  made = loop.profile(observed(), 64, 5)
  assert sorted(made.times[64]) == [64, 128, 192, 256, 384]
  few, some = (sv_model.simulate(made, 64, 5, sv_model.VARIANTS[f'SV, {x} tokens']) for x in ('all', 'accepted'))
  assert few['verified'] == 0 < some['verified']
  assert sorted(loop.profile(observed(), 8, 5).times[8]) == [48]  # too few to be packed


def test_tables_have_a_row_for_each_batch_and_each_slope(monkeypatch):
  monkeypatch.setattr(sv_simulation, 'BLOCKS', (1, 5))
  table = sv_simulation.table('t', observed(), trio(0.3, 0.05), (8, 16))
  assert [row[0] for row in table['rows']] == [8, 16]
  assert all(len(row) == len(table['columns']) for row in table['rows'])
  slopes = sv_simulation.by_slope(observed(), (0, 0.5), drafter=0.02, batch=8)
  assert [row[0] for row in slopes['rows']] == [0, 0.5] and 'SV exact' in markdown(slopes)
