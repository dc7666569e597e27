"""Predictions agree with theory where theory applies, and with the loop's own counts where it does not."""

import functools
import itertools

from known_costs import costs, EVEN, OPT, pair, PROMPTS, seconds_of
import numpy as np
import pytest

from speccascade import decode, methods, rules, Sampler, theory
from speccascade.engine.method import LOCKSTEP
from speccascade.planning import cost_model

GRID = list(itertools.product((0.0, 0.3, 0.9, 1.0), (0.05, 0.5, 1.0), (1, 2, 5)))


# ---- predictions ----


MADE = {  # by γ
  'speculative': lambda n: methods.speculative(block=n),
  'cascade': lambda n: methods.speculative(OPT, n),
  'token_cascade': lambda n: methods.token_cascade(functools.partial(rules.chow, alpha=0.4), n),
  'naive_cos': lambda n: methods.naive_cos(EVEN, n),
  'ensemble_sd': lambda n: methods.ensemble_sd(EVEN, n),
  'cos': lambda n: methods.cos(EVEN, (n, 1)),
}


def predict(kind, acceptance, cost_ratio, block, *costs, **more):
  return cost_model.predict(MADE[kind](block), acceptance, cost_ratio, *costs, **more)


@pytest.mark.parametrize(
  'kind, formula',
  [
    ('speculative', theory.speedup_speculative),
    ('cascade', theory.speedup_cascade),
    ('token_cascade', theory.speedup_token_cascade),
    ('naive_cos', theory.speedup_naive_cos),
    ('ensemble_sd', theory.speedup_ensemble_sd),
    ('cos', lambda a, g, c: theory.speedup_cos_steady(a, a, g, 1, c)),
  ],
)
def test_predictions_are_the_formulas_of_theory_when_windows_cost_one_token(kind, formula):
  for alpha, c, gamma in GRID:
    assert predict(kind, alpha, c, gamma) == pytest.approx(float(formula(alpha, gamma, c)), rel=1e-12)


def test_two_block_sizes_of_cos_are_both_counted():
  for alpha, c, (q, p) in itertools.product((0.0, 0.6, 1.0), (0.1, 1.0), ((5, 1), (2, 3))):
    expected = theory.speedup_cos_steady(alpha, alpha, q, p, c)
    assert cost_model.predict(methods.cos(EVEN, (q, p)), alpha, c) == pytest.approx(float(expected))


def test_rates_by_place_that_are_equal_are_one_rate():
  for kind in MADE:
    for alpha, c, gamma in GRID:
      one = predict(kind, alpha, c, gamma)
      assert predict(kind, [alpha, alpha], c, gamma) == pytest.approx(one)


def test_a_drafter_that_goes_astray_gains_less_from_a_long_block():
  rates = (0.9, 0.5, 0.1)
  assert predict('speculative', rates, 0.1, 3) == pytest.approx((1 + 0.9 + 0.45 + 0.045) / 1.3)
  assert predict('cascade', rates, 0.1, 3) == pytest.approx((1 + 0.9 + 0.45 + 0.045) / 1.4)
  assert predict('naive_cos', rates, 0.1, 3) == pytest.approx((1 + 0.9 + 0.45) * 1.1 / 1.3)


def test_a_dear_window_is_paid_each_round_and_overhead_by_the_reference_too():
  assert predict('speculative', 1.0, 0.1, 5, 1.5, 0.5) == pytest.approx(6 * 1.5 / (0.5 + 1.5 + 0.5))
  assert predict('naive_cos', 1.0, 0.1, 5, 1.5, 0.5) == pytest.approx(5 * 1.6 / (0.5 + 1.5 + 0.5))
  assert predict('ensemble_sd', 1.0, 0.1, 5, 1.5) == pytest.approx(6 * 1.1 / (0.5 + 1.1 * 1.5))


def test_a_token_cascade_pays_the_drafter_for_what_it_reached_only():
  assert predict('token_cascade', 0.0, 0.1, 10) == pytest.approx(1 / 1.1)
  assert predict('token_cascade', 1.0, 0.1, 10) == pytest.approx(11 / 2)
  assert predict('token_cascade', 0.5, 0.1, 2) == pytest.approx(1.75 / (1 + 0.1 * 1.5))


def test_what_stands_for_itself_has_a_speed_of_one_and_what_has_no_formula_none():
  none = lambda method: cost_model.predict(method, 0.5, 0.1)
  assert none(methods.autoregressive(1)) == none(methods.ensemble(EVEN)) == 1.0
  assert none(methods.bild()) is None and none(methods.cos(OPT, (1, 1, 1))) is None
  assert none(methods.naive_cos(OPT, models=3)) is None and none(methods.speculative(pair=(0, 2))) is not None


@pytest.mark.parametrize(
  'wrong, said',
  [
    (dict(cost_ratio=0.0), 'c=0 '),
    (dict(verify_cost=np.inf), 'v=inf '),
    (dict(acceptance=[1.2]), 'acceptance'),
    (dict(overhead=-1.0), 'overhead=-1 '),
  ],
)
def test_impossible_numbers_are_refused_by_name(wrong, said):
  with pytest.raises(ValueError, match=said):
    cost_model.predict(methods.speculative(), **dict(acceptance=0.5, cost_ratio=0.1) | wrong)


def test_places_with_few_tests_share_a_rate():
  assert cost_model.by_position([100, 50, 10, 2], [50, 40, 6, 0]) == (0.5, 0.8, 0.5)
  assert cost_model.by_position([10, 5], [5, 4]) == (0.6,)
  assert cost_model.by_position([100, 0], [0, 0]) == (0.0,)
  with pytest.raises(ValueError, match='prompts'):
    cost_model.by_position([0, 0], [0, 0])


@pytest.mark.parametrize('hits', [0.0, 0.6])
def test_texts_take_as_many_rounds_as_drafts_that_are_kept_by_chance_take(hits):
  rates, block, rng = (0.8, 0.5, 0.9), 3, np.random.default_rng(0)
  expected = cost_model.rounds(rates, block, 11, hits)
  assert expected[:2].tolist() == [0, 1]

  def once():
    left, count = 11, 0
    while left > 0:
      kept = next((i for i, rate in enumerate(rates) if rng.random() > rate), block)
      followed = kept < block and rng.random() < hits
      left, count = left - kept - 1 - followed, count + 1
    return count

  assert expected[11] == pytest.approx(np.mean([once() for _ in range(4000)]), rel=0.02)
  more = 1 + hits * cost_model._rejected(rates, block)
  assert cost_model.rounds(rates, block, 4000, hits)[-1] / 4000 == pytest.approx(
    1 / (theory.tokens_per_round(theory.ByPosition(rates), block) * more), rel=1e-3
  )


def test_the_mean_rate_counts_each_tested_token_once():
  assert cost_model.mean_rate((0.5, 1.0), 2) == pytest.approx((0.5 + 0.5) / (1 + 0.5))
  assert cost_model.mean_rate((0.7,), 4) == pytest.approx(0.7)


def test_what_starts_a_text_and_its_end_count_for_short_ones():
  found = costs(0.1, slope=0.1, start=3.0, start_alone=2.0)
  method = methods.speculative(block=3)
  long = cost_model.speedup(method, (0.8,), found, [5000])
  assert long == pytest.approx(cost_model.speedup(method, (0.8,), found), rel=2e-3)
  assert cost_model.speedup(method, (1.0,), found, [4, 5]) == pytest.approx(
    (2 + 4 + 2 + 5) / (3 + 3 + 3 * found.round(3, 4))
  )
  one = cost_model.speedup(methods.speculative(OPT, 3), (0.8,), found, [1])
  assert one == pytest.approx(3 / (3 + found.round(4, 4)))


def test_a_round_costs_its_calls_of_each_slot():
  cost = lambda slot: (1.0, 10.0, 100.0)[slot]
  assert cost_model.calls_cost(methods.autoregressive(1), cost) == 1
  assert cost_model.calls_cost(methods.speculative(block=5), cost) == 5 + 10
  assert cost_model.calls_cost(methods.ensemble_sd(EVEN, block=5), cost) == 5 + 10 + 100


# ---- against the loop ----


@pytest.mark.parametrize(
  'method',
  [
    methods.speculative(block=3),
    methods.speculative(OPT, block=3),
    methods.naive_cos(EVEN, block=3),
  ],
  ids=lambda m: m.name,
)
def test_a_prediction_from_counts_is_the_speed_of_the_calls_that_were_counted(method):
  models, found = pair(), costs(0.1, slope=0.05)
  out = decode(method, models, PROMPTS, max_new_tokens=120, sampler=Sampler(1.0))
  rates = cost_model.by_position(out.stats.tested_at.sum(0), out.stats.accepted_at.sum(0))
  standard = 1.1 if method.about.over == LOCKSTEP else 1.0
  measured = out.stats.emitted.sum() * standard / seconds_of(out, found)
  assert cost_model.speedup(method, rates, found) == pytest.approx(measured, rel=0.03)
