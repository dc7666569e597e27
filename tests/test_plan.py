"""A plan names the best method or says why none pays, tries what it recommends, and prints it from the command line."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from test_prediction import EVEN, OPT, pair, PROMPTS, seconds_of, times

from speccascade import decode, methods, plan, Sampler
from speccascade.host.progress import Progress
from speccascade.models import toy
from speccascade.planning import cost_model

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
  best = found.best('speculative', 'cascade')
  assert best.speedup == max(r.speedup for r in found.rows if r.candidate.kind in ('speculative', 'cascade'))
  assert best in found._choices and str(best) in found.verdict and 'the standard ensemble' in found.verdict
  assert all(f'{r.speedup:.2f}×' in str(found) for r in found.rows)


def test_a_model_that_drafts_for_itself_does_not_pay_and_is_told_why():
  large = toy.model(1, scale=2.0)
  found = plan.plan([large, large], PROMPTS, blocks=(1, 5), max_new_tokens=100, forward=times(1.0))
  assert found.best().candidate.acceptance[0] == 1.0 and found.best().speedup == pytest.approx(1.0)
  assert not found.pays
  assert found.verdict.startswith('Speculation will not pay here: the drafter is too dear (a call costs 1.00')


def test_prompts_that_end_as_faults_are_left_out_of_a_plan_and_said():
  models = pair()
  vocab, (first, last) = models[1].network.vocab_size, PROMPTS[1][-2:]
  sick = models[1].params['table'].at[first * vocab + last].set(np.nan)
  models[1] = models[1].replace(params=models[1].params | {'table': sick})
  found = plan.plan(models, PROMPTS[:3], blocks=(2,), max_new_tokens=1, forward=times(0.05))
  assert [fault.split(':')[0] for fault in found.faults] == ['example 1'] and found.rows[0].speedup > 0
  assert 'left out, for they ended as faults: 1 prompts. example 1: the logits of model 1' in str(found)
  with pytest.raises(ValueError, match='example 0: the logits of model 1'):
    plan.plan(models, PROMPTS[1:2], blocks=(2,), max_new_tokens=1, forward=times(0.05))


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
    verify = cost_model.at_width(seconds[1], block + 1)
    rows.append(plan.Row(candidate, block, verify, cost_model.predict('speculative', rate, drafter, block, verify)))
  found = plan.Plan(('small', 'large'), 0.0, seconds, tuple(rows))
  assert not found.pays and reason in found.verdict


def test_a_plan_says_which_choices_keep_the_law():
  found = plan.plan(
    pair(),
    PROMPTS,
    blocks=(2,),
    max_new_tokens=100,
    forward=times(0.01),
    cascades={'opt': OPT},
    combiners={'even': EVEN},
  )
  text = str(found)
  assert 'keep the law of toy1 or of the ensemble: speculative, naive_cos even, cos even\n' in text
  assert "follow a law of their own, so that the output is not toy1's: opt\n" in text
  exact, cascade, ensemble = found.verdict.split('. ')
  assert 'speculative at γ = 2' in exact and exact.endswith('it keeps the law')
  assert 'opt at γ = 2' in cascade and cascade.endswith("its output is the rule's, not toy1's")
  assert ensemble.endswith('it keeps the law.')


def test_forward_times_are_measured_where_none_are_given():
  found = plan.plan(pair(), PROMPTS, blocks=(5,), max_new_tokens=100)
  assert set(found.seconds[1]) == {1, 5, 6} and 0 < found.seconds[1][1] <= found.seconds[1][6]


@pytest.mark.parametrize(
  'measured, verdict', [(0.9, 'Speculation will not pay here: 0.90×'), (1.5, 'Speculation pays: 1.50×')]
)
def test_what_was_measured_comes_first_and_has_the_last_word(measured, verdict, monkeypatch):
  trials = []

  def tried(models, prompts, settings, methods, seconds, bar):
    trials.append(methods)
    return [measured + 0.1 * i for i in range(len(methods))], plan.Overhead(0.1, 0.3)

  monkeypatch.setattr(plan, '_measure', lambda *_: times(0.01))
  monkeypatch.setattr(plan, '_tried', tried)
  found = plan.plan(pair(), PROMPTS, blocks=(2, 5), max_new_tokens=100, cascades={'opt': OPT})
  exact, cascade = (found.best(kind) for kind in ('speculative', 'cascade'))
  assert found.verdict.startswith(verdict) and found.pays == (measured > plan.PAYS)
  assert (exact.measured, cascade.measured) == (measured, measured + 0.1)
  first, last = trials
  assert [m.kind for m in first] == ['speculative']
  assert [(m.kind, cost_model._block(m)) for m in last] == [('speculative', exact.block), ('cascade', cascade.block)]
  assert f'{exact.speedup:.2f}× predicted' in found.verdict
  assert '0.10 for a token of toy1 alone, 0.30 for a round' in str(found)


def test_a_prediction_counts_what_a_round_and_a_token_cost_beside_their_calls():
  rate = plan.Candidate('speculative', 'speculative', (0.8,))
  (row,) = plan._rows([rate], [3], tuple(times(0.1)), plan.Overhead(0.2, 0.5))
  tokens = 1 + 0.8 + 0.64 + 0.512
  assert row.speedup == pytest.approx(tokens * 1.2 / (3 * 0.1 + 1 + 0.5))
  even = plan.Candidate('even', 'naive_cos', (0.8,))
  (row,) = plan._rows([even], [3], tuple(times(0.1)), plan.Overhead(0.2, 0.5))
  assert row.speedup == pytest.approx((tokens - 0.512) * 1.3 / (3 * 0.1 + 1 + 0.5))


def test_methods_are_tried_beside_the_verifier_and_tell_what_a_round_costs(monkeypatch):
  spent = iter([5.0, 2.0, 4.0] * (plan.TRIALS + 1))  # the verifier alone, then the methods in turn
  clock = iter([x for seconds in spent for x in (0.0, seconds)])
  monkeypatch.setattr(plan.time, 'perf_counter', lambda: next(clock))
  models = pair()

  def counted(method, *_, **__):
    calls = {'autoregressive': [0, 40], 'speculative': [50, 10]}[method.kind]
    stats = SimpleNamespace(calls=np.array(calls)[:, None], rounds=np.array([calls[1]]))
    return SimpleNamespace(stats=stats)

  monkeypatch.setattr(plan, 'decode', counted)
  settings = dict(max_new_tokens=4, sampler=Sampler(0.0), seed=0, batch_size=1)
  seconds = tuple({w: 0.1 * s for w, s in by.items()} for by in times(0.1, slope=0.1))  # 0.1 s a token of the verifier
  tried = [methods.speculative(), methods.speculative(block=2)]
  gains, overhead = plan._tried(models, PROMPTS, settings, tried, seconds, bar=Progress('', 1, shown=False))
  assert gains == [2.5, 1.25]
  assert overhead.token == pytest.approx((5 / 0.1 - 40) / 40)
  assert overhead.round == pytest.approx((2 / 0.1 - 50 * 0.1 - 10 * 1.5) / 10)


@pytest.mark.parametrize('batch, rows', [(1, 4), (3, 3), (4, 4), (7, 7)])
def test_methods_are_tried_on_whole_batches(batch, rows, monkeypatch):
  decoded = []

  def counted(method, models, prompts, **_):
    decoded.append(len(prompts))
    return SimpleNamespace(stats=SimpleNamespace(calls=np.ones((2, 1)), rounds=np.ones(1)))

  monkeypatch.setattr(plan, 'decode', counted)
  settings = dict(max_new_tokens=4, sampler=Sampler(0.0), seed=0, batch_size=batch)
  made, bar = [methods.speculative(block=2)], Progress('', 1, shown=False)
  plan._tried(pair(), PROMPTS[: max(4, batch)], settings, made, tuple(times(0.1)), bar=bar)
  assert {*decoded} == {rows}


def test_times_of_a_batch_that_the_prompts_do_not_fill_are_not_measured():
  with pytest.raises(ValueError, match='3 prompts do not fill a batch of 4; give more, or a smaller batch'):
    plan.plan(pair(), PROMPTS[:3], batch_size=4)
  assert plan.plan(pair(), PROMPTS[:3], batch_size=4, blocks=(1,), max_new_tokens=9, forward=times(0.1)).rows


@pytest.mark.parametrize('wrong, said', [(dict(blocks=[0]), 'blocks'), (dict(models=1), 'a drafter and a verifier')])
def test_a_plan_of_nothing_is_refused(wrong, said):
  models = pair()[: wrong.pop('models', 2)]
  with pytest.raises(ValueError, match=said):
    plan.plan(models, PROMPTS, forward=times(0.1), **wrong)


# ---- the command ----


def test_the_command_prints_the_plan_of_a_pair(tmp_path, monkeypatch, capsys):
  models = dict(zip(('SMALL', 'LARGE'), pair(), strict=True))
  monkeypatch.setattr(plan.checkpoints, 'load', lambda path, dtype, mesh: models[str(path)])
  monkeypatch.setattr(plan.checkpoints, 'digest', str)
  monkeypatch.setattr(plan, '_prompts', lambda path, count: PROMPTS[:count])
  monkeypatch.setattr(plan, '_measure', lambda *_: times(0.1))
  arguments = ['SMALL', 'LARGE', '--prompts', 'x', '--blocks', '1-2,5', '--rule', 'opt:0.3', '--count', '16']
  arguments += ['--tokens', '100', '--temperature', '1']
  assert plan.main(arguments) == 0
  printed, said = capsys.readouterr()
  (progress,) = said.splitlines()
  assert re.fullmatch(r'plan: (\d+)/\1 steps .*', progress)
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
