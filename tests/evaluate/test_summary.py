"""Counts of a point are of the batch that it was decoded in."""

import toys

from speccascade import methods, rules, Sampler
from speccascade.evaluate import Curve, Experiment, summary
from speccascade.sv import plans

TARGET = Curve('target only', methods.autoregressive, settings={'model': 1})
SPED = Curve('SpecDecode', methods.speculative, rules.speculative, settings={'block': 3})


def experiment(*curves, **more):
  return Experiment(toys.task(), toys.models, curves, reference='target only', temperatures=(0.0,), **more)


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
