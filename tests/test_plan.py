"""The planner agrees with theory where theory applies, and with the loop's own counts where it does not."""

import functools
import itertools

import numpy as np
import pytest

from speccascade import decode, methods, plan, rules, Sampler, stopping, theory
from speccascade.models import toy

GRID = list(itertools.product((0.0, 0.3, 0.9, 1.0), (0.05, 0.5, 1.0), (1, 2, 5)))
PROMPTS = [[i % 5, (3 * i + 1) % 5] for i in range(16)]
OPT = functools.partial(rules.opt, alpha=0.3)
EVEN = functools.partial(rules.weighted, weights=(0.5, 0.5))


def pair(scale=0.6):
  large = toy.model(1, scale=2.0)
  return [toy.model(2, scale=scale, near=large), large]


def times(drafter, verifier=1.0, slope=0.0):
  """Return forward times of a drafter, and of a verifier whose windows cost more by a slope."""
  return [{1: drafter}, {w: verifier * (1 + slope * (w - 1)) for w in range(1, 12)}]


# ---- predictions ----


@pytest.mark.parametrize(
  'kind, formula',
  [
    ('speculative', theory.speedup_speculative),
    ('speculative[speculative]', theory.speedup_speculative),
    ('cascade', theory.speedup_cascade),
    ('speculative[opt]', theory.speedup_cascade),
    ('naive_cos', theory.speedup_naive_cos),
    ('cos', lambda a, g, c: theory.speedup_cos_steady(a, a, g, 1, c)),
  ],
)
def test_predictions_are_the_formulas_of_theory_when_windows_cost_one_token(kind, formula):
  for alpha, c, gamma in GRID:
    assert plan.predict(kind, alpha, c, gamma) == pytest.approx(float(formula(alpha, gamma, c)), rel=1e-12)


def test_two_block_sizes_of_cos_are_both_counted():
  for alpha, c, (q, p) in itertools.product((0.0, 0.6, 1.0), (0.1, 1.0), ((5, 1), (2, 3))):
    expected = theory.speedup_cos_steady(alpha, alpha, q, p, c)
    assert plan.predict('cos', acceptance=alpha, cost_ratio=c, block=(q, p)) == pytest.approx(float(expected))


def test_rates_by_place_that_are_equal_are_one_rate():
  for kind in ('speculative', 'cascade', 'naive_cos', 'ensemble_sd', 'token_cascade', 'cos'):
    for alpha, c, gamma in GRID:
      assert plan.predict(kind, [alpha, alpha], c, gamma) == pytest.approx(plan.predict(kind, alpha, c, gamma))


def test_a_drafter_that_goes_astray_gains_less_from_a_long_block():
  rates = (0.9, 0.5, 0.1)
  assert plan.predict('speculative', rates, 0.1, 3) == pytest.approx((1 + 0.9 + 0.45 + 0.045) / 1.3)
  assert plan.predict('cascade', rates, 0.1, 3) == pytest.approx((1 + 0.9 + 0.45 + 0.045) / 1.4)
  assert plan.predict('naive_cos', rates, 0.1, 3) == pytest.approx((1 + 0.9 + 0.45) * 1.1 / 1.3)


def test_a_dear_window_and_overhead_are_paid_each_round():
  assert plan.predict('speculative', 1.0, 0.1, 5, 1.5, 0.5) == pytest.approx(6 / (0.5 + 1.5 + 0.5))
  assert plan.predict('ensemble_sd', 1.0, 0.1, 5, 1.5) == pytest.approx(6 * 1.1 / (0.5 + 1.1 * 1.5))


def test_a_token_cascade_pays_the_drafter_for_what_it_reached_only():
  assert plan.predict('token_cascade', 0.0, 0.1, 10) == pytest.approx(1 / 1.1)
  assert plan.predict('token_cascade', 1.0, 0.1, 10) == pytest.approx(11 / 2)
  assert plan.predict('token_cascade', 0.5, 0.1, 2) == pytest.approx(1.75 / (1 + 0.1 * 1.5))


def test_what_stands_for_itself_has_a_speed_of_one_and_what_has_no_formula_none():
  assert plan.predict('autoregressive', 0.5, 0.1, 1) == plan.predict('ensemble', 0.5, 0.1, 1) == 1.0
  assert plan.predict('bild', 0.5, 0.1, 5) is None and plan.predict('cos', 0.5, 0.1, (1, 1, 1)) is None


@pytest.mark.parametrize('wrong', [dict(cost_ratio=0.0), dict(verify_cost=np.inf), dict(acceptance=[1.2])])
def test_impossible_numbers_are_refused_by_name(wrong):
  (name,) = wrong
  with pytest.raises(ValueError, match=name):
    plan.predict('speculative', **dict(acceptance=0.5, cost_ratio=0.1, block=5) | wrong)


def test_places_with_few_tests_share_a_rate():
  assert plan.by_place([100, 50, 10, 2], [50, 40, 6, 0]) == (0.5, 0.8, 0.5)
  assert plan.by_place([10, 5], [5, 4]) == (0.6,)
  assert plan.by_place([100, 0], [0, 0]) == (0.0,)
  with pytest.raises(ValueError, match='more prompts'):
    plan.by_place([0, 0], [0, 0])


# ---- against the loop ----


def seconds_of(out, forward):
  """Return what the calls of a decode would take at these forward times, each as wide as its positions are a call."""
  calls, positions = out.stats.calls.sum(1), out.stats.positions.sum(1)
  small, large = forward
  return calls[0] * small[1] + calls[1] * plan.at_width(large, positions[1] / calls[1])


@pytest.mark.parametrize(
  'method',
  [
    methods.speculative(block=3),
    methods.speculative(OPT, block=3),
    methods.token_cascade(functools.partial(rules.chow, alpha=0.4), max_draft=6),
    methods.naive_cos(EVEN, block=3),
  ],
  ids=lambda m: m.name,
)
def test_a_prediction_from_counts_is_the_speed_of_the_calls_that_were_counted(method):
  models, forward = pair(), times(0.1, slope=0.05)
  out = decode(method, models, PROMPTS, max_new_tokens=120, sampler=Sampler(1.0))
  counts = {k: getattr(out.stats, k).sum(0) for k in ('rounds', 'tested_at', 'accepted_at')}
  said = plan.predict_method(method, counts, forward)
  standard = 1.1 if method.name == 'naive_cos' else 1.0
  measured = out.stats.emitted.sum() * standard / seconds_of(out, forward)
  assert said['cost_ratio'] == 0.1 and said['ratio'] == pytest.approx(measured, rel=0.03)


def test_methods_of_other_kinds_have_no_prediction():
  counts = dict(rounds=10, tested_at=[10], accepted_at=[5])
  adaptive = methods.speculative(block=3, policy=stopping.Heuristic())
  for method in (methods.autoregressive(1), methods.sequence_cascade(), methods.bild(), adaptive):
    assert plan.predict_method(method, counts, times(0.1)) is None
  assert plan.predict_method(methods.cos(EVEN, (5, 1)), counts, times(0.1))['ratio'] == plan.predict(
    'cos', [0.5], 0.1, (5, 1)
  )
  assert plan.predict_method(methods.speculative(), counts | {'tested_at': [0]}, times(0.1)) is None


# ---- plans ----


def test_a_plan_predicts_the_speed_of_a_shorter_block_and_names_the_best():
  models, forward = pair(), times(0.05, slope=0.02)
  found = plan.plan(
    models, PROMPTS, blocks=(1, 3, 5), temperature=1.0, max_new_tokens=100, forward=forward, cascades={'opt': OPT},
    combiners={'even': EVEN},
  )  # fmt: skip
  assert found.pays and len(found.rows) == 4 * 3
  out = decode(methods.speculative(block=3), models, PROMPTS, max_new_tokens=120, sampler=Sampler(1.0))
  row = next(r for r in found.rows if r.candidate.name == 'speculative' and r.block == 3)
  assert row.speedup == pytest.approx(out.stats.emitted.sum() / seconds_of(out, forward), rel=0.06)
  best = found.best()
  assert best.speedup == max(r.speedup for r in found.rows if r.candidate.kind in ('speculative', 'cascade'))
  assert f'{best.candidate.name} at γ = {best.block}' in found.verdict and 'the standard ensemble' in found.verdict
  assert all(f'{r.speedup:.2f}×' in str(found) for r in found.rows)


def test_a_model_that_drafts_for_itself_does_not_pay_and_is_told_why():
  large = toy.model(1, scale=2.0)
  found = plan.plan([large, large], PROMPTS, blocks=(1, 5), max_new_tokens=100, forward=times(1.0))
  assert found.best().candidate.acceptance[0] == 1.0 and found.best().speedup == pytest.approx(1.0)
  assert not found.pays
  assert found.verdict.startswith('Speculation will not pay here: the drafter is too dear (a call costs 1.00')


@pytest.mark.parametrize(
  'rate, drafter, slope, reason',
  [(0.05, 0.1, 0.0, 'acceptance is too low'), (0.8, 0.9, 0.0, 'the drafter is too dear'),
   (0.7, 0.01, 1.0, "the verifier's window is too dear")],
)  # fmt: skip
def test_the_reason_is_what_would_gain_most_if_it_were_ideal(rate, drafter, slope, reason):
  candidate = plan.Candidate('speculative', 'speculative', (rate,))
  seconds = tuple(times(drafter, slope=slope))
  rows = []
  for block in (1, 2, 4):
    verify = plan.at_width(seconds[1], block + 1)
    rows.append(plan.Row(candidate, block, verify, plan.predict('speculative', rate, drafter, block, verify)))
  found = plan.Plan(('small', 'large'), 0.0, seconds, tuple(rows))
  assert not found.pays and reason in found.verdict


def test_forward_times_are_measured_where_none_are_given():
  found = plan.plan(pair(), PROMPTS, blocks=(5,), max_new_tokens=100)
  assert set(found.seconds[1]) == {1, 5, 6} and 0 < found.seconds[1][1] <= found.seconds[1][6]
  assert (found.measured is None) == (found.best().speedup <= plan.PAYS)


@pytest.mark.parametrize(
  'measured, verdict', [(0.9, 'will not pay here: the prediction is'), (1.5, 'Speculation pays')]
)
def test_what_was_measured_has_the_last_word(measured, verdict, monkeypatch):
  tried = []
  monkeypatch.setattr(plan, '_measure', lambda *_: times(0.01))
  monkeypatch.setattr(plan, '_tried', lambda _, method, *__: tried.append(method) or measured)
  found = plan.plan(pair(), PROMPTS, blocks=(2, 5), max_new_tokens=100, cascades={'opt': OPT})
  assert found.best().speedup > plan.PAYS and found.pays == (measured > plan.PAYS)
  assert verdict in found.verdict and f'{measured:.2f}× was measured' in found.verdict
  (method,) = tried
  assert plan._block(method) == found.best().block and plan._kind(method.name) == found.best().candidate.kind


def test_a_method_is_tried_beside_the_verifier(monkeypatch):
  clock = iter(np.cumsum([0, *[5, 0, 2, 0] * (plan.TRIALS + 1)]).tolist())  # alone takes 5, sped 2
  monkeypatch.setattr(plan.time, 'perf_counter', lambda: next(clock))
  monkeypatch.setattr(plan, 'decode', lambda *_, **__: None)
  settings = dict(max_new_tokens=4, sampler=Sampler(0.0), seed=0, batch_size=1)
  assert plan._tried(pair(), methods.speculative(), PROMPTS, settings) == 2.5


@pytest.mark.parametrize('wrong, said', [(dict(blocks=[0]), 'blocks'), (dict(models=1), 'a drafter and a verifier')])
def test_a_plan_of_nothing_is_refused(wrong, said):
  models = pair()[: wrong.pop('models', 2)]
  with pytest.raises(ValueError, match=said):
    plan.plan(models, PROMPTS, forward=times(0.1), **wrong)


# ---- the command ----


def test_the_command_prints_the_plan_of_a_pair(tmp_path, monkeypatch, capsys):
  models = dict(zip(('SMALL', 'LARGE'), pair(), strict=True))
  monkeypatch.setattr(plan.checkpoints, 'load', lambda path, dtype: models[path])
  monkeypatch.setattr(plan, '_prompts', lambda path, count: PROMPTS[:count])
  monkeypatch.setattr(plan, '_measure', lambda *_: times(0.1))
  arguments = ['SMALL', 'LARGE', '--prompts', 'x', '--blocks', '1-2,5', '--rule', 'opt:0.3', '--count', '16']
  arguments += ['--tokens', '100', '--temperature', '1']
  assert plan.main(arguments) == 0
  printed = capsys.readouterr().out
  assert 'cost ratio 0.100' in printed and 'opt 0.3' in printed and 'Speculation' in printed
  assert [line.split()[0] for line in printed.splitlines() if line.strip()[:2] in ('1 ', '2 ', '5 ')] == ['1', '2', '5']


@pytest.mark.parametrize(
  'more, said', [([], 'no such file'), (['--rule', 'op:1'], 'no rule is called op'), (['--rule', 'opt:x'], "'x'")]
)
def test_a_mistake_on_the_command_line_is_one_line(more, said, capsys):
  assert plan.main(['SMALL', 'LARGE', '--prompts', '/nowhere/prompts', *more]) == 1
  error = capsys.readouterr().err
  assert said in error and error.count('\n') == 1


def test_prompts_are_the_lines_with_text(tmp_path):
  path = tmp_path / 'prompts.txt'
  path.write_text('one\n\ntwo\nthree\n', encoding='utf-8')
  assert plan._prompts(path, 2) == ['one', 'two']
  path.write_text('\n')
  with pytest.raises(ValueError, match='the file is empty'):
    plan._prompts(path, 2)
  path.write_text(' \n\t\n')
  with pytest.raises(ValueError, match='the file is empty'):
    plan._prompts(path, 2)
