"""Predictions of an experiment are about its reference, its batch, and what a token of the reference really costs."""

import functools

import pytest
import toys

from speccascade import methods, rules, Sampler
from speccascade.evaluate import Curve, Experiment, summary
from speccascade.planning import cost_model
from speccascade.sv import plans

TARGET = Curve('target only', methods.autoregressive, settings={'model': 1})
DRAFT = Curve('draft only', methods.autoregressive, settings={'model': 0})
SPED = Curve('SpecDecode', methods.speculative, rules.speculative, settings={'block': 3})
CASCADE = Curve('opt', methods.speculative, functools.partial(rules.opt, alpha=0.1), settings={'block': 3})
FLOOR = {'forward_s': {'small': {'1': 0.1}, 'large': {'1': 1.0, '4': 1.2}}}
COUNTS = dict(rounds=100, tested_at=[100, 80, 60], accepted_at=[80, 60, 50])


def experiment(*curves, **more):
  return Experiment(toys.task(), toys.models, curves, reference='target only', temperatures=(0.0,), **more)


def predicted(run, curve, floor=FLOOR, **seconds):
  """Predict where curves were timed, each in so many seconds for 10 tokens."""
  timed = {(name.replace('_', ' '), 'None'): {(0,): (s, 10, 3)} for name, s in seconds.items()}
  return summary._predicted(run, curve.points()[0], COUNTS, floor, timed)


def test_the_overhead_of_a_reference_token_is_paid_by_every_round():
  run = experiment(TARGET, SPED, CASCADE)
  rates = cost_model.by_position(COUNTS['tested_at'], COUNTS['accepted_at'])
  for curve in (SPED, CASCADE):
    method = curve.build()
    assert predicted(run, curve)['ratio'] == pytest.approx(cost_model.predict(method, rates, 0.1, 1.2))
    result = predicted(run, curve, target_only=15.0)  # 1.5 s a token
    assert result['overhead'] == pytest.approx(0.5)
    assert result['ratio'] == pytest.approx(cost_model.predict(method, rates, 0.1, 1.2, 0.5))
  assert predicted(run, SPED, target_only=8.0)['overhead'] == 0  # no less than the calls


def test_a_call_of_the_drafter_costs_what_its_token_costs_where_it_was_timed_alone():
  rates = cost_model.by_position(COUNTS['tested_at'], COUNTS['accepted_at'])
  run = experiment(TARGET, DRAFT, SPED)
  result = predicted(run, SPED, draft_only=4.0, target_only=15.0)
  assert result['cost_ratio'] == pytest.approx(0.4) and result['overhead'] == pytest.approx(0.5)
  assert result['ratio'] == pytest.approx(cost_model.predict(SPED.build(), rates, 0.4, 1.2, 0.5))
  assert predicted(run, SPED, draft_only=0.5)['cost_ratio'] == pytest.approx(0.1)  # no less than its call
  assert FLOOR['forward_s']['small'] == {'1': 0.1}


@pytest.mark.parametrize(
  'pair, seconds', [((0, 1), (0.1, 0.5, 0.6)), ((1, 2), (0.5, 1.0, 1.2)), ((2, 0), (1.0, 0.1, 0.1))]
)
def test_a_prediction_is_of_the_models_that_decode(pair, seconds):
  floor = {'forward_s': {'a': {'1': 0.1}, 'b': {'1': 0.5, '4': 0.6}, 'c': {'1': 1.0, '4': 1.2}}}
  alone = Curve('target only', methods.autoregressive, settings={'model': pair[1]})
  sped = Curve('SpecDecode', methods.speculative, rules.speculative, settings={'block': 3, 'pair': pair})
  result = predicted(experiment(alone, sped), sped, floor=floor)
  draft, one, window = seconds
  rates = cost_model.by_position(COUNTS['tested_at'], COUNTS['accepted_at'])
  assert result['cost_ratio'] == pytest.approx(draft / one)
  assert result['ratio'] == pytest.approx(cost_model.predict(sped.build(), rates, draft / one, window / one))


def test_a_prediction_is_of_the_batch_whose_passes_were_timed_and_of_its_own_reference():
  run = experiment(TARGET, SPED, latency_examples=8, latency_batches=(1, 4))
  timings = [
    dict(temperature=0.0, batch=b, trial=0, examples=[*range(b)], curve=c.name, value=None, seconds=1.0, tokens=10)
    for b in (1, 4)
    for c in (TARGET, SPED)
  ]
  found = {(p.batch, p.curve): p.predicted for p in summary.points(run, [], timings, FLOOR)}
  assert found[4, 'SpecDecode'] is None
  even = Curve('cos', methods.cos, functools.partial(rules.weighted, weights=(0.5, 0.5)))
  assert predicted(experiment(TARGET, even), even) is None
  assert predicted(run, SPED, floor=None) is None


def test_a_batch_that_another_method_decodes_has_no_rates_of_the_quality_run():
  choices = {1: methods.speculative(block=3), 4: methods.speculative(block=1), 32: methods.autoregressive(1)}
  origin = plans.Origin(('a', 'b'), (None, None), plans.sampler_of(Sampler(0.0)), 'cpu, float32', 'x', 3)
  chosen = {1: plans.Choice('speculative', 3), 4: plans.Choice('speculative', 1), 32: plans.Choice('autoregressive')}
  own = Curve('own', methods.by_batch, settings={'choices': choices})
  planned = Curve('planned', methods.planned, settings={'plan': plans.Plan(origin, chosen, {})})
  run = experiment(TARGET, SPED, own, planned, quality_examples=3, quality_batch=32)  # decoded in a batch of 3
  kept = dict(examples=3, calls=[5, 2], length=4.0)
  rates = dict(acceptance=0.5, calls_per_token=0.4, tokens_per_round=2.0, deferral_rate=None, tested_at=[2])
  rates |= dict(accepted_by_round=[1], acceptance_by_prompt=[1])
  at = lambda curve, batch: summary._at_batch(run, curve.points()[0], batch, kept | rates)
  for curve in (own, planned):
    assert at(curve, 4) == kept | rates
    assert at(curve, 1) == at(curve, 32) == kept | dict.fromkeys(rates)
  assert at(SPED, 1) == at(SPED, 32) == kept | rates
  assert summary._at_batch(run, own.points()[0], 1, None) is None
