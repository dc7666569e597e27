"""A plan names the best method or says why none pays, tries what it recommends, and prints it from the command line."""

import re
from types import SimpleNamespace

from cases import Letters
from matching import having, says
import numpy as np
from planning import EVEN, OPT, pair, PROMPTS, seconds_of, times
import pytest

from speccascade import decode, methods, plan, Sampler
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
  assert says(found.verdict, str(best), 'the standard ensemble')
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
  with pytest.raises(ValueError, match=having('example 0', 'model 1')):
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


@pytest.fixture
def timed(monkeypatch):
  """Return a plan of a pair whose forward passes and decodes take given times, and what was tried with how many rows.

  A decode of the verifier alone takes 4.4 s, any other 4.4 s over its speed-up; 40 calls of the verifier are of a text,
  and a method makes 50 calls of the drafter and as many rounds as leave 0.3 of a token of the verifier beside them.
  """
  real, tried, now = plan.decode, [], [0.0]

  def planned(gain, forward, prompts=PROMPTS, **settings):
    small, large = forward[0][1], forward[1][1]

    def decode(method, models, prompts, keep_faults=False, **call):
      if keep_faults:  # to measure acceptance
        return real(method, models, prompts, keep_faults=True, **call)
      alone = method.kind == 'autoregressive'
      seconds = 4.4 if alone else 4.4 / gain(method.kind)
      now[0] += seconds
      tried.append((method, len(prompts)))
      rounds = 40 if alone else (4.4 / gain('speculative') - 50 * small) / (1.3 * large)
      calls = np.array([[0 if alone else 50], [rounds]])
      return SimpleNamespace(stats=SimpleNamespace(calls=calls, rounds=np.array([rounds])))

    monkeypatch.setattr(plan, 'decode', decode)
    monkeypatch.setattr(plan.floor, 'measure', lambda *_, **__: dict(zip(('small', 'large'), forward, strict=True)))
    found = plan.plan(pair(), prompts, max_new_tokens=100, clock=lambda: now[0], **settings)
    return found, tried

  return planned


FORWARD = [{1: 0.001}, {w: 0.1 for w in range(1, 12)}]


@pytest.mark.parametrize('measured, verdict', [(0.9, 'will not pay here: 0.90×'), (1.5, 'pays: 1.50×')])
def test_what_was_measured_comes_first_and_has_the_last_word(measured, verdict, timed):
  gain = lambda kind: measured + 0.1 * (kind == 'cascade')
  found, tried = timed(gain, FORWARD, blocks=(2, 5), cascades={'opt': OPT})
  exact, cascade = (found.best(kind) for kind in ('speculative', 'cascade'))
  assert verdict in found.verdict.split('. ')[0] and found.pays == (measured > plan.PAYS)
  assert (exact.measured, cascade.measured) == (pytest.approx(measured), pytest.approx(measured + 0.1))
  first = [m.kind for m, _ in tried[: 2 * (plan.TRIALS + 1)]]
  last = {(m.kind, m.window) for m, _ in tried[2 * (plan.TRIALS + 1) :]}
  assert {*first} == {'autoregressive', 'speculative'}
  expected = methods.speculative(block=exact.block), methods.speculative(OPT, block=cascade.block)
  assert last == {(m.kind, m.window) for m in (methods.autoregressive(1), *expected)}
  assert says(found.verdict, f'{exact.speedup:.2f}×') and says(str(found), '0.10', '0.30')


def test_a_prediction_counts_what_a_round_and_a_token_cost_beside_their_calls(timed):
  found, _ = timed(lambda kind: 1.5, FORWARD, blocks=(3,), combiners={'even': EVEN})
  assert (found.overhead.token, found.overhead.round) == (pytest.approx(0.1), pytest.approx(0.3))
  exact, even = (next(r for r in found.rows if r.candidate.kind == kind) for kind in ('speculative', 'naive_cos'))
  for row, reference, most in ((exact, 1.0, 3), (even, 1.01, 2)):
    rates = [*row.candidate.acceptance, *[row.candidate.acceptance[-1]] * 3]
    tokens = 1 + np.cumprod(rates)[:most].sum()
    assert row.speedup == pytest.approx(tokens * (reference + 0.1) / (3 * 0.01 + 1 + 0.3))


@pytest.mark.parametrize('batch, rows', [(1, 4), (3, 3), (4, 4), (7, 7)])
def test_methods_are_tried_on_whole_batches(batch, rows, timed):
  _, tried = timed(lambda kind: 1.5, FORWARD, PROMPTS[: max(4, batch)], blocks=(2,), batch_size=batch)
  assert {n for _, n in tried} == {rows}


def test_times_of_a_batch_that_the_prompts_do_not_fill_are_not_measured():
  with pytest.raises(ValueError, match=having('3 prompts', '4')):
    plan.plan(pair(), PROMPTS[:3], batch_size=4)
  assert plan.plan(pair(), PROMPTS[:3], batch_size=4, blocks=(1,), max_new_tokens=9, forward=times(0.1)).rows


@pytest.mark.parametrize('wrong, said', [(dict(blocks=[0]), 'blocks'), (dict(models=1), 'drafter')])
def test_a_plan_of_nothing_is_refused(wrong, said):
  models = pair()[: wrong.pop('models', 2)]
  with pytest.raises(ValueError, match=said):
    plan.plan(models, PROMPTS, forward=times(0.1), **wrong)


# ---- the command ----


@pytest.fixture
def files_of(tmp_path, monkeypatch):
  """Return the arguments of a pair that loads, and of prompts that a file of such a text has."""
  models = dict(zip(('SMALL', 'LARGE'), pair(), strict=True))
  models['LARGE'] = models['LARGE'].replace(tokenizer=Letters())
  monkeypatch.setattr(plan.checkpoints, 'load', lambda path, dtype, mesh: models[str(path)])
  monkeypatch.setattr(plan.checkpoints, 'digest', str)

  def arguments(text: str) -> list[str]:
    (tmp_path / 'prompts.txt').write_text(text, encoding='utf-8')
    return ['SMALL', 'LARGE', '--prompts', str(tmp_path / 'prompts.txt')]

  return arguments


def test_the_command_prints_the_plan_of_a_pair(files_of, monkeypatch, capsys):
  measured = dict(zip(('small', 'large'), times(0.1), strict=True))
  monkeypatch.setattr(plan.floor, 'measure', lambda *_, tell, **__: [tell('any', 1) for _ in range(8)] and measured)
  lines = '\n'.join('abcde'[a] + 'abcde'[b] for a, b in PROMPTS)
  arguments = [*files_of(lines), '--blocks', '1-2,5', '--rule', 'opt:0.3', '--count', '16']
  assert plan.main([*arguments, '--tokens', '100', '--temperature', '1']) == 0
  printed, said = capsys.readouterr()
  (progress,) = said.splitlines()
  assert re.fullmatch(r'plan: (\d+)/\1 steps .*', progress)
  assert says(printed, '0.100', 'opt 0.3', 'Speculation')
  assert [line.split()[0] for line in printed.splitlines() if line.strip()[:2] in ('1 ', '2 ', '5 ')] == ['1', '2', '5']


def test_prompts_are_the_lines_with_text(files_of, monkeypatch, capsys):
  given = []
  monkeypatch.setattr(plan, 'plan', lambda models, prompts, **_: given.append(prompts))
  assert plan.main([*files_of('one\n\ntwo\nthree\n'), '--count', '2']) == 0
  assert given == [['one', 'two']]
  for text in ('\n', ' \n\t\n'):
    assert plan.main(files_of(text)) == 1 and 'prompts.txt' in capsys.readouterr().err
