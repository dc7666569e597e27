"""A profile is what was observed, is saved in a plan, and predicts what pays."""

import dataclasses

import numpy as np
import pytest

from experiments.sv import sv_costs
from speccascade import decode, methods, Sampler
from speccascade.data.examples import Example, Task
from speccascade.evaluate.curves import Curve
from speccascade.evaluate.experiment import Experiment
from speccascade.models import toy
from speccascade.planning import fitting, planner, profiling, sv_model
from speccascade.sv import plans, predictors
from speccascade.sv.predictors import AcceptanceTable

EOS = 6
LARGE = toy.model(21, 7, scale=1.5, eos_ids=(EOS,))
TRIO = [toy.model(22, 7, scale=0.7, near=LARGE, eos_ids=(EOS,)), toy.model(23, 7, scale=0.5, near=LARGE), LARGE]
PROMPTS = [[1, 2], [3], [5, 4, 3, 2, 1, 0], [2, 2, 2], [0, 5]] * 8
CALL = dict(max_new_tokens=13, sampler=Sampler(), seed=0)
TIMES = {n: {n * t: 1 + n * t / 50 for t in range(1, 5)} for n in (1, 2)}
SIGNALS = predictors.margin, predictors.drawn_q
STEPS = {n: (0.05, 0.06, 1.0, 0.1) for n in (1, 2)}


@pytest.fixture(scope='module')
def made():
  """Return a profile of which the times are given, and its models."""
  named = [m.replace(digest=name) for m, name in zip(TRIO, 'abc')]
  origin = plans.Origin(
    tuple(m.name for m in named), tuple('abc'), (('temperature', 1.0),), plans.device_of(named), 'prompts', 3
  )
  samples = profiling.samples_of(named, PROMPTS, block=3, batch_size=16, signals=SIGNALS, **CALL)
  return profiling.profile(origin, samples, TIMES, STEPS, bins=(4, 3), signals=SIGNALS), named


def with_costs(profile, times, steps):
  """Return a profile with other times of a batch of two."""
  return profiling.profile(profile.origin, profile.samples, {2: times}, {2: steps})


def planned(profile, choices=((1, ('sv_exact', 3)),)):
  """Return a plan with a profile."""
  made = {n: plans.Choice(*choice) for n, choice in dict(choices).items()}
  speeds = {1: (plans.Speed('autoregressive', 0, 10.0, 9.0, 11.0, 10.0), plans.Speed('sv_exact', 3, 20.0, 18, 22, 19))}
  return plans.Plan(profile.origin, made, speeds, profile)


def test_speculative_rounds_take_what_was_timed_and_are_saved(made, tmp_path):
  found, _ = made
  rounds = {n: {k: 1.2 + 0.3 * k for k in (1, 2, 3)} for n in (1, 2)}
  timed = profiling.profile(found.origin, found.samples, TIMES, STEPS, rounds, bins=(4, 3))
  planned(timed).save(tmp_path / 'plan.json')
  loaded = plans.load(tmp_path / 'plan.json').profile
  assert loaded.rounds == rounds
  for k in (1, 2, 3):
    assert sv_costs.costs(loaded, 2).round(k, k + 1) == pytest.approx(rounds[2][k])
  slower = sv_costs.speedup(loaded, 2, 'speculative, γ = 3', 3), sv_costs.speedup(found, 2, 'speculative, γ = 3', 3)
  assert slower[0] < slower[1]
  exact = sv_costs.speedup(found, 2, 'SV exact', 3)
  without = dataclasses.replace(loaded, rounds=None)
  assert sv_costs.speedup(loaded, 2, 'SV exact', 3) == pytest.approx(sv_costs.speedup(without, 2, 'SV exact', 3))
  assert sv_costs.speedup(loaded, 2, 'SV exact', 3) == pytest.approx(exact, rel=1e-3)  # a file has rounded chances


def distribution(model, prefix):
  table = np.asarray(model.params['table'])
  return np.exp(table[7 * prefix[-2] + prefix[-1]]) / np.exp(table[7 * prefix[-2] + prefix[-1]]).sum()


def test_every_token_of_the_output_is_observed_once(made):
  found, models = made
  texts = decode(methods.sv_exact(found, 3), models, PROMPTS, max_new_tokens=13, batch_size=2).tokens
  count = np.bincount(found.samples['request'].astype(int), minlength=len(PROMPTS))
  assert count.tolist() == [len(t) for t in texts]
  q, c, p = (distribution(m, [0, *PROMPTS[1]]) for m in TRIO)
  first = np.flatnonzero(found.samples['request'] == 1)[0]
  assert found.samples['position'][first] == 0
  assert found.samples['s'][first] == pytest.approx(np.minimum(q, c).sum(), abs=1e-5)
  assert found.samples['s_target'][first] == pytest.approx(np.minimum(q, p).sum(), abs=1e-5)
  assert min(abs(found.samples['a'][first] - np.minimum(1, c / q))) < 1e-5
  assert min(abs(found.samples['accept'][first] - np.minimum(1, p / q))) < 1e-5


@pytest.mark.full
def test_greedy_drafts_are_judged_by_what_the_models_are_sure_of():
  found = profiling.samples_of(TRIO, PROMPTS, block=3, batch_size=16, **CALL | dict(sampler=Sampler(0.0)))
  texts = decode(methods.autoregressive(), [LARGE], PROMPTS[:5], max_new_tokens=13, sampler=Sampler(0.0)).tokens
  assert max(found['position'][found['request'] < 5]) > 0 and set(found['accept']) == {0, 1}
  for number, (prompt, text) in enumerate(zip(PROMPTS[:5], texts, strict=True)):
    for i, sample in enumerate(np.flatnonzero(found['request'] == number)):
      q, c, p = (distribution(m, [0, *prompt, *text[:i]]) for m in TRIO)
      x = q.argmax()
      expected = np.minimum(q, c).sum(), min(1, c[x] / q[x]), np.minimum(q, p).sum(), p.argmax() == x
      observed = [found[name][sample] for name in ('s', 'a', 's_target', 'accept')]
      np.testing.assert_allclose(observed, expected, atol=1e-5)


def test_a_profile_is_the_same_from_the_file_of_its_plan(made, tmp_path):
  found, _ = made
  planned(found).save(tmp_path / 'p.json')
  again = plans.load(tmp_path / 'p.json').profile
  assert again.origin == found.origin and again.times == found.times and again.steps == found.steps
  np.testing.assert_allclose(again.table.means, found.table.means)
  np.testing.assert_array_equal(again.table.a_edges, found.table.a_edges)
  assert all(np.allclose(again.samples[n], found.samples[n], atol=1e-5) for n in found.samples)
  assert str(methods.sv_exact(str(tmp_path / 'p.json'), 3)) == str(methods.sv_exact(found, 3))


@pytest.mark.full
def test_any_predictor_is_fitted_with_a_companion_or_without(made, tmp_path):
  found, models = made
  planned(found, {1: ('scheduled', 3, 'margin')}).save(tmp_path / 'p.json')
  again = plans.load(tmp_path / 'p.json')
  curve, table = (again.profile.fits[name] for name in ('margin', 'drawn_q'))
  assert float(curve.slope) == pytest.approx(float(found.fits['margin'].slope))
  np.testing.assert_allclose(table.means, found.fits['drawn_q'].means)
  chosen = methods.planned(again)
  assert chosen.phases[1].limit.predictor.fit.slope == curve.slope
  assert str(chosen) == str(methods.scheduled(predictors.margin, 3, plan=found, pair=(0, 2)))
  assert (
    decode(chosen, models, PROMPTS[:1], max_new_tokens=13).tokens
    == decode(methods.sv_exact(found, 3), models, PROMPTS[:1], max_new_tokens=13).tokens
  )
  of_two = profiling.samples_of(TRIO[::2], PROMPTS, block=3, batch_size=16, signals=(predictors.max_q,), **CALL)
  assert of_two.keys() == {'accept', 'position', 'max_q', 'request'}
  np.testing.assert_allclose(of_two['accept'], found.samples['accept'], atol=1e-5)  # one text, by the same numbers
  q = distribution(TRIO[0], [0, *PROMPTS[1]])
  first = np.flatnonzero(found.samples['request'] == 1)[0]
  assert of_two['max_q'][first] == pytest.approx(q.max(), abs=1e-5)
  assert min(abs(found.samples['drawn_q'][first] - q)) < 1e-5
  profile = profiling.profile(found.origin, of_two, TIMES, STEPS, signals=(predictors.max_q,))
  assert profile.table is None and sv_model.simulate(profile, 2, variant=sv_model.Variant('max_q'))['sv'] > 0
  with pytest.raises(ValueError, match='three models'):
    methods.sv_exact(profile, 3)


@pytest.mark.full
def test_a_batch_of_more_rows_than_were_measured_is_warned_of(made):
  found, models = made
  with pytest.warns(UserWarning, match='times of up to 2 rows, and this batch has 4'):
    decode(methods.sv_exact(found, 3), models, PROMPTS[:4], max_new_tokens=5, batch_size=4)


@pytest.mark.parametrize(
  'edges, means, part',
  [
    (([0.5], [[0.5], [0.5]]), [[0.2, 0.5], [0.4, 5]], 'means has 5'),
    (([0.5], [[0.5], [0.5]]), [[0.2, 0.5], [0.4, np.nan]], 'means has nan'),
    (([0.5], [[0.5], [0.5]]), [[0.2, 0.5]], 'a row for each bin'),
    (([0.5, 0.2], [[0.5], [0.5], [0.5]]), [[0.2, 0.5]] * 3, 's_edges'),
    (([0.5], [[0.5, 0.3], [0.5]]), [[0.2, 0.5, 0.5]] * 2, 'a_edges'),
  ],
)
def test_a_table_that_cannot_have_been_measured_is_refused(edges, means, part):
  with pytest.raises(ValueError, match=part):
    plans.Profile(AcceptanceTable.of(*edges, means), [1.0, 2.0])


# ---- the table ----


def test_bins_have_equal_counts_and_thin_ones_lean_on_their_row():
  rng = np.random.default_rng(0)
  s, a = rng.random(6000), rng.random(6000) ** 3
  table = fitting.table(s * a, s, a, (5, 4))
  row, column = table.cells(s, a)
  counts = np.bincount(row * 4 + column, minlength=20)
  assert counts.size == 20 and counts.min() > 290 and counts.max() < 310
  assert np.abs(table.predict(s, a) - s * a).mean() < 0.1
  few = fitting.table(np.float64(np.arange(8) == 0), s[:8], a[:8], (2, 2))
  assert few.means.max() < 0.5  # the bin with the only accepted token has two


def test_a_curve_is_that_of_its_samples():
  x = np.random.default_rng(0).normal(size=20000) * 2
  found = fitting.curve(1 / (1 + np.exp(1 - 0.7 * x)), x)
  assert float(found.bias) == pytest.approx(-1, abs=0.01) and float(found.slope) == pytest.approx(0.7, abs=0.01)


def test_equal_values_stay_in_one_bin():
  s, a = np.array([0.0, 1.0] * 50), np.array([1.0] * 100)
  table = fitting.table(s, s, a, (20, 15))
  assert np.shape(table.means) == (2, 1)
  assert table.predict(np.array([0.0, 1.0]), np.ones(2)) == pytest.approx([1 / 29, 28 / 29], abs=0.05)
  assert np.asarray(table(np.float32([0.0, 1.0]), np.float32([1.0, 1.0]))).tolist() == table.means[:, 0].tolist()


# ---- experiments and costs ----


def test_an_experiment_refuses_a_plan_of_another_sampler_and_knows_its_file(made, tmp_path):
  found, models = made
  planned(found).save(tmp_path / 'p.json')
  task = Task('t', [Example(0, [1, 2], 'x')], 4, 3, {'exact': lambda examples, texts: 0.0})
  target = Curve('target only', methods.autoregressive, settings={'model': 2})
  curves = [target, Curve('planned', methods.planned, settings={'plan': str(tmp_path / 'p.json')})]
  with pytest.raises(ValueError, match='planned, T = 0: the plan was made with temperature 1, not'):
    Experiment(task, models, curves, temperatures=[1.0, 0.0])
  experiment = Experiment(task, models, curves, temperatures=[1.0])
  before = experiment.describe()
  planned(found, choices={1: ('autoregressive',)}).save(tmp_path / 'p.json')
  assert experiment.describe() != before
  planned(found).save(tmp_path / 'p.json')
  with pytest.raises(ValueError, match=r'as model 0, not with'):
    Experiment(task, [models[1], *models[1:]], curves, temperatures=[1.0]).load()


def test_the_cost_model_finds_where_speculation_stops_paying(made):
  found, _ = made
  flat, steep = dict.fromkeys((2, 4, 6, 8), 1.0), {2 * n: float(n) for n in range(1, 5)}
  cheap = with_costs(found, flat, (1e-3, 1e-3, 1.0, 0.0))
  dear = with_costs(found, steep, (0.5, 0.5, 1.0, 0.0))
  gains = []
  for some in (cheap, dear):
    x = sv_model.simulate(some, 2)
    gains.append(x['sv'] / sv_costs.plain(some, 2))
  assert gains[0] > 1.5 and gains[1] < 1
  slow = with_costs(found, flat, (1e-3, 1e-3, 1.0, 1.0))  # every round but the verifier's own
  assert sv_costs.speculative(slow, 2, 3) == pytest.approx(sv_costs.speculative(cheap, 2, 3) / 2, rel=0.01)


# ---- of three models ----


@pytest.mark.long
def test_a_plan_of_three_models_tries_speculative_verification_too_and_shows_nothing(capsys):
  models = [m.replace(digest=name) for m, name in zip(TRIO, 'abc')]
  asked = dict(blocks=(2,), batches=(2,), max_new_tokens=8, trials=1, predictors=[predictors.drawn_q])
  found = planner.plan(models, PROMPTS[:4], sampler=Sampler(0.7), **asked).saved()
  assert not capsys.readouterr().err
  names = {speed.name for speed in found.speeds[2]}
  assert names == {'autoregressive', 'speculative', 'sv_exact', 'scheduled by drawn_q'}
  assert set(found.profile.times) == {2}
  assert all(len(steps) == 4 and min(steps[:3]) > 0 for steps in found.profile.steps.values())
  assert decode(methods.planned(found), models, PROMPTS[:1], max_new_tokens=8, sampler=Sampler(0.7)).tokens


@pytest.mark.long
def test_three_models_need_texts_that_hold_a_whole_draft():
  with pytest.raises(ValueError, match='long enough for a draft'):
    planner.plan(TRIO, PROMPTS[:2], blocks=(2,), max_new_tokens=2, sampler=Sampler(0.0), trials=0)
