"""Speculative verification, an experiment on the public API: simulated rounds, and studies of plans and runs."""

import argparse
import json

from matching import having
import numpy as np
import pytest

from experiments.sv import sv_costs, sv_simulated, sv_simulation, sv_studies
from experiments.sv.compiled_times import PassTimes
from experiments.sv.sv_simulation import Trio
from speccascade import methods
from speccascade.evaluate import Curve
from speccascade.planning import profiling, sv_model
from speccascade.sv import plans


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
  expected = sv_costs.tokens_a_round(profile.samples, 5, 5)
  assert expected == pytest.approx(tokens / rounds, rel=0.01)
  anywhere = 1 + np.cumprod(sv_model.windows(profile.samples, 5)['accept'][:, :5], 1).sum(1).mean()
  assert anywhere > 1.15 * expected
  # speculative verification that scores everything is speculative decoding; its round takes 6 drafts of .02 and a step
  exact = sv_model.simulate(trio(0.0).profile(profile, 8, 5), 8, 5)
  assert exact['verified'] == 5
  assert 1.12 * exact['sv'] / 8 == pytest.approx(expected, rel=0.01)


@pytest.mark.full
def test_a_companion_pays_where_tokens_cost_and_it_knows_which():
  known = sv_simulation.compare(observed(), trio(0.3), 8, (1, 3, 5))
  unknown = sv_simulation.compare(observed(informed=False), trio(0.3), 8, (1, 3, 5))
  for name in sv_costs.VARIANTS:
    assert known[name].speed > 1.2 * known['speculative'].speed and known[name].may_read > 0.3
    assert unknown[name].speed < 1.05 * unknown['speculative'].speed and unknown[name].may_read < 0.1


def test_a_companion_never_pays_where_more_tokens_cost_nothing():
  results = sv_simulation.compare(observed(), trio(0.0), 8, (1, 3, 5))
  assert max(results[name].may_read for name in sv_costs.VARIANTS) < 0.01  # the error of simulated rounds
  assert results['speculative'].block == 5 and results['speculative'].speed > 2


# ---- files ----

TIMES = PassTimes((8, 16, 48), (1.0, 1.0, 2.0), 0.125)


def test_a_file_has_the_times_of_one_topology(tmp_path, monkeypatch):
  for name in ('compiled', 'roofline'):
    monkeypatch.setattr(sv_simulated.compiled_times, name, lambda *_: TIMES)
  asked = argparse.Namespace(out=tmp_path / 'times.json', topology='v5e:2x2')
  sv_simulated.compile_times(asked)
  sv_simulated.compile_times(asked)
  sv_simulated.print_tables(argparse.Namespace(times=[asked.out], llama=[], t5=[], slopes=()))
  with pytest.raises(SystemExit, match=having('v5e:2x2', 'v6e:2x2', str(asked.out), '--out')):
    sv_simulated.compile_times(argparse.Namespace(out=asked.out, topology='v6e:2x2'))
  with pytest.raises(SystemExit, match=having('v5e:2x2, roofline', str(asked.out))):
    sv_simulated.roofline_times(asked)
  asked.out = tmp_path / 'roofline.json'
  sv_simulated.roofline_times(asked)
  with pytest.raises(SystemExit, match=having('v5e:2x2, roofline', '--out')):
    sv_simulated.compile_times(asked)


# ---- studies ----


def plan_of(profile):
  """Return a plan with a profile."""
  choices = {1: plans.Choice('sv_exact', 5)}
  speeds = {1: (plans.Speed('autoregressive', 0, 10.0, 9.0, 11.0, 10.0), plans.Speed('sv_exact', 5, 20.0, 18, 22, 19))}
  return plans.Plan(profile.origin, choices, speeds, profile)


def test_a_run_may_have_its_profile_from_python_or_a_plan(tmp_path):
  found = observed()
  plan_of(found).save(tmp_path / 'p.json')
  given = Curve('given', methods.sv_exact, settings={'plan': found, 'block': 5})
  varied = Curve('varied', methods.sv_exact, parameter='plan', values=[str(tmp_path / 'p.json')])
  by_batch = Curve('by batch', methods.planned, settings={'plan': str(tmp_path / 'p.json')})
  line = dict(value=None, temperature=1.0, example=0, positions=[1, 1, 3], calls=[1, 1, 2], emitted=2, rounds=2)
  lines = [line | dict(curve='given', verified_lengths=[1, 1])]
  points = [point for curve in (given, varied, by_batch) for point in curve.points()]
  tables = sv_studies.of_run(points, lines, batches=(1, 8))
  titles = [t['title'] for t in tables]
  assert titles.count('Break-even by batch') == 2 and titles.count('Methods by batch') == 1
  (speeds,) = (t['rows'] for t in tables if t['title'] == 'Methods by batch')
  assert speeds == [[1, 'autoregressive', 10, 1, 10, ''], [1, 'sv_exact, γ = 5', 20, 2, 19, 'yes']]
  (chosen,) = (t['rows'] for t in tables if t['title'] == 'Method by batch')
  assert chosen == [['by batch', 1, 'sv_exact'], ['by batch', 8, 'sv_exact']]


def test_a_folder_of_a_run_gives_tables_and_drawings(tmp_path):
  plan_of(observed()).save(tmp_path / 'p.json')
  (tmp_path / 'config.gin').write_text(
    'embedded.task.count = 2\nExperiment.task = @embedded.task()\nExperiment.models = @embedded.models\n'
    'Experiment.temperatures = [1.0]\nExperiment.curves = [@target/Curve(), @sv/Curve()]\n'
    "target/Curve.name = 'target only'\ntarget/Curve.method = @methods.autoregressive\n"
    "sv/Curve.name = 'SV'\nsv/Curve.method = @methods.sv_exact\n"
    f"sv/Curve.settings = {{'plan': '{tmp_path / 'p.json'}', 'block': 5}}\nrun.experiments = [@Experiment()]\n"
  )
  line = dict(curve='SV', value=None, temperature=1.0, calls=[1, 1, 2], emitted=4, rounds=2, verified_lengths=[1, 0, 1])
  lines = [line | dict(example=i, positions=[1, 1, 4 + i]) for i in range(2)]
  (tmp_path / 'examples.jsonl').write_text(''.join(json.dumps(x) + '\n' for x in lines))
  tables = sv_studies.of_folder(tmp_path)
  titles = {table['title'] for table in tables}
  assert {'Information gain of the companion', 'Wasted verification', 'Verified lengths by request: SV 1.0'} < titles
  (fewest, most, every) = next(t['rows'] for t in tables if t['title'].startswith(sv_studies.FAIRNESS))
  assert fewest[:3] == ['fewest', 0, 1.0] and most[:3] == ['most', 1, 1.5] and every[4:] == [2, 0, 2]
  sv_studies.draw(tables, tmp_path / 'out')
  assert {file.name for file in (tmp_path / 'out').iterdir()} == {'reliability_1.svg', 'verified_lengths_1.svg'}
