"""A plan names the fastest method or says why none pays, is the same from its file, and decodes by it."""

import dataclasses
import functools
import itertools
import json
from pathlib import Path
import re
from types import SimpleNamespace
import warnings

from cases import profile
import jax
from known_costs import costs, EVEN, OPT, pair, PROMPTS, seconds_of
from matching import having, says
import numpy as np
import pytest

from speccascade import decode, drafters, embedded, methods, plan, Request, rules, Sampler
from speccascade.decode import __main__ as command
from speccascade.drafters.eagle import Eagle, HeadConfig
from speccascade.drafters.layerskip import layerskip
from speccascade.engine import requests, stats
from speccascade.host.errors import RunError
from speccascade.host.progress import Progress
from speccascade.models import toy
from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.planning import budget, cost_model, engines, plan_report, planner, profiling, timing
from speccascade.planning.elsewhere import Compiled
from speccascade.sv import plans, predictors, verification
from speccascade.types import Model

RULES = {'opt': OPT, 'even': EVEN}


def planned(models, prompts, found, blocks, **more):
  """Return the plan of a batch of one at known costs."""
  call = dict(sampler=Sampler(0.0), max_new_tokens=100) | more
  return planner.plan(models, prompts, blocks=blocks, costs={1: found}, **call)


# ---- what a plan says ----


@pytest.mark.long
def test_a_plan_predicts_the_speed_of_a_shorter_block_and_names_the_best():
  models, found = pair(), costs(0.05, slope=0.02)
  made = planned(models, PROMPTS, found, (1, 3, 5), sampler=Sampler(1.0), rules=RULES)
  (batch,) = made.batches
  assert batch.pays and len(batch.rows) == 4 * 3
  out = decode(methods.speculative(block=3), models, PROMPTS, max_new_tokens=100, sampler=Sampler(1.0))
  row = next(r for r in batch.rows if str(r) == 'speculative at γ = 3')
  assert row.speedup == pytest.approx(out.stats.emitted.sum() / seconds_of(out, found), rel=0.06)
  plain = lambda candidate: candidate.name == 'speculative'
  best = batch.best(plain)
  assert best.speedup == max(r.speedup for r in batch.rows if plain(r.candidate))
  assert batch.choice[:2] == ('speculative', best.block)
  assert str(best) in batch.verdict and 'the standard ensemble' in batch.verdict
  assert all(f'{r.speedup:.2f}×' in str(made) for r in batch.rows)


@pytest.mark.long
def test_a_head_is_planned_beside_its_verifier_whose_rounds_have_its_calls():
  layer = DecoderConfig(64, 32, 4, 2, 8, 64, (Span(),), tied=True)
  networks = Eagle(HeadConfig('eagle', layer, (-1,))), Decoder(layer, (1,))
  made = (n.init(jax.random.key(i)) for i, n in enumerate(networks))
  head, large = map(Model, made, networks, (None, None), ('head', 'large'))
  made = planner.plan([head, large], PROMPTS, blocks=(1, 3), sampler=Sampler(1.0), max_new_tokens=12, trials=1)
  (batch,) = made.batches
  assert batch.costs.draft < 1e-5 * batch.costs.token < batch.costs.window(4)
  assert says(str(made), 'head drafts beside it alone', "its drafter's calls in it")
  with pytest.raises(ValueError, match='head only drafts, .* plan it without predictors'):
    planner.plan([head, large], PROMPTS, predictors=[predictors.margin])
  with pytest.raises(ValueError, match='looks ahead'):
    decode(profiling.scoring_all(1, 2), [head, large], PROMPTS, max_new_tokens=4)
  with pytest.raises(ValueError, match="looks ahead .* coupling='gumbel'"):
    planner.plan([drafters.one_pass(large, 0), large], PROMPTS, predictors=[predictors.margin], sampler=Sampler(1.0))


def test_networks_around_another_are_timed_without_ends_too():
  small, large = embedded.models()
  layer = DecoderConfig(64, 32, 4, 2, 8, 64, (Span(),), tied=True)
  head, verifier = (Model({}, n, name='any') for n in (Eagle(HeadConfig('eagle', layer, (-1,))), Decoder(layer, (1,))))
  around = [drafters.frequent(small, [3]), drafters.translated(small, for_=large), layerskip(large, 1)]
  assert all(m.network.eos_ids for m in (*around, verifier))
  assert not any(m.network.eos_ids for m in timing.endless([*around, *drafters.beside(head, verifier)]))


def test_a_model_that_drafts_for_itself_does_not_pay_and_the_plan_says_why():
  large = toy.model(1, scale=2.0)
  made = planned([large, large], PROMPTS, costs(1.0), (1, 5))
  (batch,) = made.batches
  assert batch.best().candidate.acceptance[0] == 1.0 and batch.best().speedup == pytest.approx(1.0)
  assert not batch.pays and batch.choice[:2] == ('autoregressive', 0)
  assert batch.verdict.startswith('Speculation will not pay here: the drafter is too dear (a call costs 1.00')


@pytest.mark.long
def test_prompts_that_end_as_faults_are_left_out_of_a_plan_and_named():
  models = pair()
  vocab, (first, last) = models[1].network.vocab_size, PROMPTS[1][-2:]
  sick = models[1].params['table'].at[first * vocab + last].set(np.nan)
  models[1] = models[1].replace(params=models[1].params | {'table': sick})
  made = planned(models, PROMPTS[:3], costs(0.05), (2,), max_new_tokens=1)
  assert [fault.split(':')[0] for fault in made.faults] == ['example 1'] and made.batches[0].rows[0].speedup > 0
  assert '1 prompts. example 1: the logits of model 1' in str(made)
  with pytest.raises(ValueError, match='example 0: the logits of model 1'):
    planned(models, PROMPTS[1:2], costs(0.05), (2,), max_new_tokens=1)
  with pytest.raises(ValueError, match=having('2 of 3 prompts', 'batch of 3', 'example 1: the logits of model 1')):
    planner.plan(models, PROMPTS[:3], batches=(3,), blocks=(2,), max_new_tokens=1)


@pytest.mark.parametrize(
  'rate, drafter, slope, reason',
  [
    (0.05, 0.1, 0.0, 'acceptance is too low'),
    (0.8, 0.9, 0.0, 'the drafter is too dear'),
    (0.7, 0.01, 1.0, "the verifier's window is too dear"),
  ],
)
def test_the_reason_is_what_would_gain_most_if_it_were_ideal(rate, drafter, slope, reason):
  batch = of_rate(rate, costs(drafter, slope=slope))
  assert not batch.pays and reason in batch.verdict


def of_rate(rate, found, blocks=(1, 2, 4), alone=None):
  """Return the plan of plain speculative decoding where each token is accepted with this chance."""
  candidate = plan_report.Candidate('speculative', lambda n: methods.speculative(block=n), (rate,))
  rows = [
    plan_report.PlanRow(candidate, n, cost_model.speedup(candidate.make(n), (rate,), found), found) for n in blocks
  ]
  return plan_report.BatchReport(1, ('small', 'large'), found, tuple(rows), alone)


@pytest.mark.full
def test_a_plan_says_which_choices_keep_the_distribution():
  made = planned(pair(), PROMPTS, costs(0.01), (2,), rules=RULES)
  assert 'keep the distribution of toy1 or of the ensemble: speculative, naive_cos even, cos even\n' in str(made)
  assert "so that the output is not toy1's: opt\n" in str(made)
  exact, cascade, ensemble = made.batches[0].verdict.split('. ')
  assert 'speculative at γ = 2' in exact and exact.endswith('it keeps the distribution')
  assert 'opt at γ = 2' in cascade and cascade.endswith("its output is the rule's, not toy1's")
  assert ensemble.endswith('it keeps the distribution.')


# ---- what is tried ----


def clocked(seconds):
  """Return the tokens a second of methods that take so long by their names and γ, and the order they were asked in."""
  asked = []

  def speeds(made):
    asked.append(list(made))
    return {name: [x / seconds(method) for x in (2.0, 1.0, 3.0)] for name, method in made.items()}

  return speeds, asked


@pytest.mark.parametrize('fastest', [1, 3, 6])
def test_blocks_beside_the_fastest_are_tried_until_both_are_slower(fastest):
  found = of_rate(0.8, costs(0.1), range(1, 7))
  start = found.best().block
  speeds, asked = clocked(lambda m: 2.0 if m.about.is_baseline else 1 + abs(m.block - fastest) / 9)
  made = planner.try_best(found, {'alone': methods.autoregressive(1)}, speeds)
  tried = {row.block: row.measured.median for row in made.rows if row.measured is not None}
  assert {n for n in (fastest - 1, fastest, fastest + 1) if 1 <= n <= 6} <= tried.keys()
  assert set(tried) == set(range(min(tried), max(tried) + 1)) and start in tried
  assert tried[fastest] == pytest.approx(2.0) and made.choice[:2] == ('speculative', fastest)
  assert all(runs[0] == 'alone' for runs in asked)
  (row,) = (r for r in made.rows if r.block == fastest)
  assert row.measured == pytest.approx((2, 2, 2)) and row.speed == pytest.approx((2, 1.5, 2.5))


@pytest.mark.parametrize(
  'seconds, verdict', [(1.1, 'Speculation will not pay here: '), (0.5, 'Speculation pays: 2.00×')]
)
def test_what_was_measured_has_the_last_word(seconds, verdict):
  speeds, _ = clocked(lambda m: 1.0 if m.about.is_baseline else seconds)
  made = planner.try_best(of_rate(0.8, costs(0.01)), {'alone': methods.autoregressive(1)}, speeds)
  assert made.verdict.startswith(verdict) and made.pays == (seconds < 1)
  assert f'{1 / seconds:.2f}× the speed of large alone was measured' in made.verdict
  assert made.choice.method == ('speculative' if seconds < 1 else 'autoregressive')


def test_an_ensemble_is_compared_to_the_standard_one_whatever_its_name():
  made = planned(pair(), PROMPTS, costs(0.01), (2,), rules={'even': EVEN, 'my cos even': OPT})
  speeds, _ = clocked(lambda m: {'autoregressive': 1.0, 'ensemble': 4.0}.get(m.name, 2.0))
  references = {'alone': methods.autoregressive(1), 'even': methods.ensemble(EVEN)}
  tried = planner.try_best(made.batches[0], references, speeds)
  gains = {r.candidate.name: r.measured.median for r in tried.rows}
  assert gains == {'speculative': 0.5, 'my cos even': 0.5, 'naive_cos even': 2.0, 'cos even': 2.0}


def test_a_method_with_more_to_it_has_to_be_faster_by_five_per_cent():
  exact = plan_report.Candidate('sv_exact', lambda n: methods.sv_exact(profile(1), n))
  batch = of_rate(0.8, costs(0.1))
  best = batch.best()
  for gain, chosen in ((1.04, 'speculative'), (1.06, 'sv_exact')):
    row = plan_report.PlanRow(exact, 2, best.speedup * gain)
    assert dataclasses.replace(batch, rows=(*batch.rows, row)).choice.method == chosen


# ---- the budget ----


def ticking(step):
  """Return a clock that is so much later each time it is read."""
  times = itertools.count(0, step)
  return lambda: next(times)


def test_runs_that_matter_less_are_left_out_after_half_the_time_and_turns_after_all_of_it():
  made = []
  runs = {name: lambda name=name: made.append(name) or len(made) for name in 'abcd'}
  left = iter([True, False, True, False])
  found = timing.interleave(runs, 5, lambda share: next(left), least=1)
  assert list(found) == ['a', 'b'] and made == ['a', 'b'] * 3 and found['b'] == [4, 6]
  assert list(timing.interleave(runs, 1, lambda share: False, least=2)) == ['a', 'b']
  assert list(timing.interleave(runs, 2)) == list('abcd')


def test_each_phase_has_an_even_share_of_what_is_left():
  time = budget.TimeBudget(60.0, 3, 9, clock=iter([0.0, 0.0, 19.0, 20.0, 40.0, 49.0, 51.0, 70.0, 70.0]).__next__)
  time.begin()
  assert time.allows() and not time.allows()  # 20 of 60 seconds
  time.begin()
  assert time.allows() and not time.allows()  # half of the 20 that are left
  time.begin()
  assert not time.allows()
  assert budget.TimeBudget(None, 0, 1).allows()


@pytest.mark.full
def test_a_plan_keeps_to_its_budget_and_says_what_it_left_out(monkeypatch):
  ran = []
  monkeypatch.setattr(planner._Timer, '_full', lambda timer, method: lambda: ran.append(method) or 1e-3)
  monkeypatch.setattr(planner._Timer, '_first_token', lambda timer, method: lambda: ran.append(method) or 1e-3)
  monkeypatch.setattr(planner._Timer, '_speed', lambda timer, method: lambda: ran.append(method) or 1.0)
  ask = functools.partial(planner.plan, pair(), PROMPTS, max_new_tokens=8, rules={'opt': OPT, 'even': EVEN})
  everything = ask()
  steps, complete = len(ran), str(everything)
  ran.clear()
  short = ask(budget=1e-9)
  assert not everything.left_out and '--budget' not in complete
  assert len(ran) == 2 * 3 + 2 * 2 <= steps / 10  # each uncounted once: alone, drafter and a γ; then alone and a γ
  (batch,) = short.batches
  assert set(batch.costs.verify) == {1, 9} and len(batch.rows) == len(everything.batches[0].rows)
  assert [r.candidate.name for r in batch.rows if r.measured] == ['speculative']
  text = str(short)
  for part in ('8 of 16 prompts', 'speculative at γ = 4', 'opt at γ = 8', '2 of 3 trials', '--budget'):
    assert part in text, part
  assert ask(budget=1e9).left_out == ()


# ---- times ----


def test_rounds_of_a_full_batch_end_with_its_first_text():
  method = methods.speculative(block=3).accepting(timing.forced(1.0))
  prompts = [dataclasses.replace(Request(p), max_new_tokens=n) for p, n in zip(PROMPTS, (16, 5, 16))]
  sizes = dict(max_new_tokens=16, max_prompt_tokens=None, sampler=Sampler(1.0))
  run = timing.full_rounds(method, pair(), prompts, 3, **sizes)
  found, again = run(), run()
  assert found.seconds > 0 and found[1:] == again[1:] == (2, 8 + 5 + 8)
  twice = timing.full_rounds(method, pair(), [*prompts, *prompts, PROMPTS[3]], 3, **sizes)()
  assert twice[1:] == (4, 2 * (8 + 5 + 8)) and twice.speed == twice.tokens / twice.seconds


def test_acceptance_that_is_not_forced_is_that_of_the_method():
  method = methods.speculative(block=3)
  call = dict(models=pair(), prompts=PROMPTS[:3], max_new_tokens=12, sampler=Sampler(1.0))
  free, own = (decode(m, **call) for m in (method.accepting(timing.forced(None)), method))
  assert free.tokens == own.tokens and (free.stats.accepted == own.stats.accepted).all()


@pytest.mark.long
@pytest.mark.parametrize('rate, rounds', [(0.0, 12), (1.0, 3)])
def test_forced_acceptance_keeps_all_or_none_whatever_the_models_say(rate, rounds):
  models = [toy.model(1, scale=2.0), toy.model(2, scale=2.0)]
  for method in (methods.speculative(block=3), methods.speculative(OPT, block=3), methods.naive_cos(EVEN, 4)):
    out = decode(method.accepting(timing.forced(rate)), models, PROMPTS[:3], max_new_tokens=12)
    assert out.stats.rounds.tolist() == [rounds] * 3


@pytest.mark.parametrize(
  'wrong, part',
  [
    (dict(blocks=[0]), 'blocks'),
    (dict(models=1), 'not 1'),
    (dict(batches=(99,)), '16 prompts'),
    (dict(sampler=Sampler(coupling='gumbel')), 'accepted by chance; plan with'),
    (dict(batches=(0,)), 'batches=0'),
    (dict(prompts=[[1], Request([2], n=2)]), 'prompt 1 has n > 1'),
    (dict(prompts=[[1], Request([2], temperature=0.3)]), 'prompt 1 .*temperature.*0.3'),
    (dict(prompts=[[1], Request([2], stop_tokens=[3])]), r'prompt 1 .*stop_tokens=\(3,\)'),
    (dict(prompts=[[1], Request([2], logit_bias={3: 1.0})]), 'prompt 1 .*logit_bias={3: 1.0}'),
    (dict(models=embedded.models, prompts=[Request('a', stop='b')], batches=(1,)), r"prompt 0 .*stop=\('b',\)"),
  ],
)
def test_a_plan_of_nothing_is_refused(wrong, part):
  models = wrong.pop('models', 2)
  models = models() if callable(models) else pair()[:models]
  with pytest.raises(ValueError, match=part):
    planner.plan(models, **dict(prompts=PROMPTS) | wrong)


def test_requests_are_timed_at_the_lengths_that_are_asked_whatever_their_own(monkeypatch):
  asked = []
  monkeypatch.setattr(planner, 'decode', lambda *given, **call: asked.append({p.max_new_tokens for p in given[2]}))
  call = dict(max_new_tokens=64, sampler=Sampler(0.0), seed=0)
  prompts = [Request([1], max_new_tokens=5, min_new_tokens=2), [2]]
  measured = SimpleNamespace(prompts=prompts, rows=requests.rows(pair(), prompts, **call), lengths=[5, 7])
  timer = planner._Timer(pair(), measured, (2,), call, 2, 1, budget.TimeBudget(None, 1, 1))
  timer._first_token(timer.alone)()
  assert asked == [{8}, {8}, {1}]


# ---- the file ----


ORIGIN = plans.Origin(('s', 'l'), ('a', 'b'), (('temperature', 0.0),), 'cpu, float32', 'prompts', 5)
CHOICES = {1: plans.Choice('speculative', 3, leaves=2), 8: plans.Choice('autoregressive')}
SAVED = plans.Plan(ORIGIN, CHOICES, {1: (plans.Speed('speculative', 3, 2.0, 1.5, 2.5, 1.9),), 8: ()})


def test_a_plan_is_the_same_from_its_file_and_decodes_by_its_choices(tmp_path):
  SAVED.save(tmp_path / 'plan.json')
  assert plans.load(tmp_path / 'plan.json') == SAVED
  models = pair()
  method = methods.planned(str(tmp_path / 'plan.json'))
  greedy = dict(max_new_tokens=9, sampler=Sampler(0.0))
  for rows, name in ((1, 'speculative'), (4, 'autoregressive'), (9, 'autoregressive')):
    out = decode(method, models, PROMPTS[:rows], **greedy)
    assert out.tokens == decode(methods.autoregressive(1), models, PROMPTS[:rows], **greedy).tokens
    assert method.at(rows).about.name == name and (out.stats.drafted.sum() > 0) == (name == 'speculative')
    assert (out.stats.hits.sum() > 0) == (name == 'speculative')


def test_a_plan_refuses_other_models_and_samplers_and_warns_on_another_device():
  models = pair()
  run = lambda found, models, **more: decode(methods.planned(found), models, [[1, 2]], max_new_tokens=3, **more)
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    run(SAVED, models, sampler=Sampler(0.0))
  with pytest.raises(ValueError, match=r'plan was made with s \(a\) as model 0, not with toy2 \(x\)'):
    run(SAVED, [models[0].replace(digest='x'), models[1]], sampler=Sampler(0.0))
  with pytest.raises(ValueError, match='with temperature 0, not with temperature 1'):
    run(SAVED, models)
  moved = dataclasses.replace(SAVED, origin=dataclasses.replace(ORIGIN, device='TPU v9, bfloat16'))
  with pytest.warns(UserWarning, match='made on TPU v9, bfloat16, and this is cpu'):
    run(moved, models, sampler=Sampler(0.0))
  with pytest.raises(ValueError, match='is of s and l, without a predictor'):
    methods.sv_exact(SAVED, 3)


def test_a_plan_refuses_models_of_other_numbers_and_every_choice_by_batch_is_asked():
  latency = verification.Latency.of([1.0, 2.0])
  models = [*pair(), pair()[1].replace(digest=None)]
  of = lambda origin, **numbers: methods.scheduled(
    predictors.margin, 2, plan=plans.Profile(None, latency, origin), **numbers
  )
  run = lambda method, models: decode(method, models, [[1, 2]], max_new_tokens=3, sampler=Sampler(0.0))
  with pytest.raises(ValueError, match=having('s, l', 'model 1 verifies', 'models 0, 2', 'pair=(0, 1)')):
    run(of(ORIGIN, pair=(0, 2)), models)
  three = dataclasses.replace(ORIGIN, names=('s', 'l', 'xl'), digests=('a', 'b', 'c'))
  with pytest.raises(ValueError, match=having('s, l, xl', 'models 0, 1', 'pair=(0, 2)')):
    run(of(three), models[:2])
  warm = dataclasses.replace(ORIGIN, sampler=(('temperature', 1.0),))
  with pytest.raises(ValueError, match='with temperature 1, not with temperature 0'):
    run(methods.by_batch({1: of(ORIGIN), 8: of(warm)}), models[:2])


def test_samplers_of_one_distribution_are_one():
  of = lambda **numbers: dataclasses.replace(ORIGIN, sampler=tuple(numbers.items()))
  of(temperature=0.0).check_sampler(Sampler(0, top_p=0.9, top_k=3))
  of(temperature=0.7, top_p=0.9).check_sampler(Sampler(np.float32(0.7), top_p=np.float32(0.9)))
  with pytest.raises(ValueError, match='temperature 0, not with temperature 0, repetition_penalty 2'):
    of(temperature=0.0).check_sampler(Sampler(0, repetition_penalty=2.0))


@pytest.mark.parametrize(
  'path, value',
  [
    (['origin', 'block'], 0),
    (['choices', '1', 1], 99),
    (['choices'], {}),
    (['speeds', '1', 0, 2], float('nan')),
    (['digest'], '-'),
    (['speccascade_plan'], 0),
    (['profile'], {}),
  ],
)
def test_a_file_that_was_changed_is_refused_by_its_name(path, value, tmp_path):
  file = tmp_path / 'plan.json'
  SAVED.save(file)
  found = json.loads(file.read_text())
  part = functools.reduce(lambda x, name: x[name], path[:-1], found)
  part[path[-1]] = value
  file.write_text(json.dumps(found))
  with pytest.raises(ValueError, match=r'plan\.json is no plan of this version .*speccascade\.plan'):
    methods.planned(str(file))


@pytest.mark.parametrize('text', ['', '[]', '{"speccascade_profile": 3}'])
def test_a_file_that_is_no_plan_is_refused_by_its_name(text, tmp_path):
  with pytest.raises(FileNotFoundError, match='no such plan; make one'):
    methods.planned(str(tmp_path / 'plan.json'))
  (tmp_path / 'plan.json').write_text(text)
  with pytest.raises(ValueError, match=r'plan\.json is no plan of this version'):
    methods.planned(str(tmp_path / 'plan.json'))


# ---- the command ----


@pytest.mark.full
def test_a_command_plans_and_another_decodes_by_it(tmp_path, capsys):
  folder = Path(embedded.__file__).parent / 'pretrained'
  models, out = [str(folder / name) for name in ('small', 'large')], tmp_path / 'plan.json'
  texts = [e.prompt for e in embedded.task(count=8).examples]
  given = [*texts[:4], *({'prompt': text, 'seed': 1} for text in texts[4:])]
  (tmp_path / 'in.jsonl').write_text('\n'.join(map(json.dumps, given)))
  asked = [*models, f'--prompts={tmp_path / "in.jsonl"}', '--blocks=2', '--temperature=0', '--trials=0']
  asked += ['--max-new-tokens=16', '--rule=opt:0.3', f'--out={out}']
  assert plan.main(asked) == 0
  printed, bar = capsys.readouterr()
  assert 'cost ratio' in printed and 'opt:0.3' in printed and 'Speculation' in printed
  assert re.fullmatch(r'plan: (\d+)/\1 steps .*', bar.splitlines()[-1])
  assert plan.main(asked) == 1 and 'plan.json exists; pass --overwrite' in capsys.readouterr().err
  paths = [str(tmp_path / name) for name in ('in.jsonl', 'out.jsonl')]
  run = ['--models', *models, f'--plan={out}', '--max_new_tokens=16', *paths]
  assert command.main(run) == 1 and 'with temperature 0, not with temperature 1' in capsys.readouterr().err
  assert command.main([*run, '--temperature=0']) == 0
  assert len((tmp_path / 'out.jsonl').read_text().splitlines()) == 8
  read = planner.digest_of([embedded.models()[0].tokenizer.encode(text) for text in texts])
  assert plans.load(out).origin.data == f'in.jsonl, 8 prompts {read}'


def test_a_plan_takes_the_sampler_that_all_requests_have(tmp_path, monkeypatch):
  asked = {}
  monkeypatch.setattr(plan, 'plan', lambda models, prompts, **settings: asked.update(settings))
  monkeypatch.setattr(plan.options, 'digests', lambda args: None)
  monkeypatch.setattr(plan.options, 'load_models', lambda args: [])
  given = [{'prompt': 'a', 'temperature': 0.7, 'top_p': 0.9}, {'prompt': 'b', 'top_p': 0.9}]
  (tmp_path / 'in.jsonl').write_text('\n'.join(map(json.dumps, given)))
  command = ['small', 'large', f'--prompts={tmp_path / "in.jsonl"}']
  assert plan.main([*command, '--temperature=0.7']) == 0
  assert (asked['sampler'].temperature, asked['sampler'].top_p) == (0.7, 0.9)


def test_requests_of_two_samplers_are_planned_by_themselves(tmp_path, capsys):
  (tmp_path / 'in.jsonl').write_text('"a"\n{"prompt": "b", "temperature": 0.7}')
  assert plan.main(['small', 'large', f'--prompts={tmp_path / "in.jsonl"}']) == 1
  assert says(capsys.readouterr().err, 'line 1 has temperature=1.0', 'line 2 0.7', 'one sampler')


def test_prompts_that_are_no_requests_need_a_field(tmp_path, capsys):
  (tmp_path / 'problems.jsonl').write_text('{"question": "1 + 1", "answer": "2"}')
  assert plan.main(['small', 'large', f'--prompts={tmp_path / "problems.jsonl"}']) == 1
  assert says(capsys.readouterr().err, 'line 1', "'question'", '--prompt_field')


@pytest.mark.long
def test_costs_and_speeds_are_measured_where_none_are_given(monkeypatch):
  shown = []

  class Shown(Progress):
    add = lambda bar, count, note: shown.append((bar.n + count, bar.total)) or bar.update(count)

  monkeypatch.setattr(budget, 'Progress', Shown)
  made = planner.plan(
    pair(), PROMPTS, blocks=(2,), batches=(2,), max_new_tokens=20, trials=1, rules={'opt': OPT}, progress=True
  )
  (batch,) = made.batches
  assert set(batch.costs.verify) == {1, 3} and min(batch.costs.verify.values()) > 0 and batch.costs.start > 0
  assert batch.alone.median > 0 and {r.candidate.name for r in batch.rows if r.measured} == {'speculative', 'opt'}
  saved = made.saved()
  assert set(saved.choices) == {2} and saved.origin.digests == ('a', 'b')
  assert {s.name for s in saved.speeds[2]} == {'autoregressive', 'speculative', 'opt'}
  assert shown == [(n, 21) for n in range(1, 21)]  # 2 acceptances and, of 9 runs, two turns; 1 is never reached


# ---- chips that are not here ----


@dataclasses.dataclass(frozen=True)
class Chips:
  """Chips on which a round takes a second a token of the verifier, a tenth a drafted one, and few rows fit."""

  rows: int = 8
  data: int = 1
  leaf: float = 0.0  # seconds that each takes
  chip = SimpleNamespace(memory=16.0)

  def __str__(self):
    return 'v9:2x2 data=2'

  def device(self, models):
    return '4 × TPU v9, bfloat16'

  def compiled(self, method, models, sizes, sampler):
    if sizes.batch > self.rows:
      return Compiled()
    drafts = method.block or 0
    alone = method.slots != (0,)
    leaves = self.leaf * sum(n - 1 for phase in method.all_phases for n in phase.leaves)
    return Compiled(alone * 1.0 + 0.1 * (drafts or not alone) + leaves, 0.25 * alone, 3 << 30)


def test_a_plan_for_chips_elsewhere_predicts_from_rounds_that_were_compiled_for_them():
  call = dict(sampler=Sampler(0.0), max_new_tokens=12, blocks=(1, 2, 3, 4, 5), rules={'opt': OPT, 'even': EVEN})
  made = planner.plan(pair(), PROMPTS, batches=(1, 2), where=Chips(), **call)
  for batch in made.batches:
    assert not batch.speeds and all(row.measured is None for row in batch.rows)
    assert [str(name) for name in batch.compiled][:5] == [
      'alone',
      'draft',
      *(f'speculative at γ = {n}' for n in (5, 1, 3)),
    ]
    for row in batch.rows[:5]:  # plain speculative decoding, its rounds between those of the compiled γ
      known = cost_model.Costs(0.1, {1: 1.0})
      assert row.speedup == pytest.approx(
        cost_model.speedup(row.candidate.make(row.block), row.candidate.acceptance, known, (12,)), rel=0.2
      )
    assert says(str(batch), 'v9:2x2 data=2', '1000.00 ms', '250.00 ms', '3.0 of 16.0 GiB', 'is predicted with')
  assert made.origin.device == '4 × TPU v9, bfloat16'
  assert {n: c.method for n, c in made.saved().choices.items()} == {1: 'speculative', 2: 'speculative'}
  even = planner.plan(pair(), PROMPTS, batches=(1,), where=Chips(data=2), **call)
  assert [batch.batch for batch in even.batches] == [2]


def test_leaves_are_planned_by_the_rejections_that_they_follow_and_what_their_rounds_cost():
  call = dict(sampler=Sampler(0.0), max_new_tokens=24, blocks=(1, 3), batches=(1,), leaves=(2,))
  speed = {}
  for extra in (0.0, 9.0):
    (batch,) = planner.plan(pair(), PROMPTS, where=Chips(leaf=extra), **call).batches
    row = batch.best(lambda candidate: candidate.leaves == 2)
    out = decode(methods.speculative(block=3, leaves=2), pair(), PROMPTS, sampler=Sampler(0.0), max_new_tokens=24)
    hits = out.stats.hits.sum() / (out.stats.tested - out.stats.accepted).sum()
    assert row.candidate.hits == pytest.approx(hits) and 0 < hits < 1
    assert (batch.choice.leaves, 'Leaves pay: ' in batch.verdict) == ((2, True) if not extra else (0, False))
    assert says(batch.verdict, 'speculative, 2 leaves at γ = ', f'{hits:.0%} of rejections')
    speed[extra] = row.speedup
  assert speed[0.0] > 2 * speed[9.0]
  with pytest.raises(ValueError, match='leaves is timed, and costs are given'):
    planned(pair(), PROMPTS, costs(0.1), (1,), leaves=(2,))


def test_a_plan_for_chips_elsewhere_refuses_what_does_not_fit_and_what_needs_the_device():
  call = dict(sampler=Sampler(0.0), max_new_tokens=4, blocks=(1,))
  with pytest.raises(ValueError, match=having('v9:2x2', '2 rows of toy2 and toy1', '--mesh')):
    planner.plan(pair(), PROMPTS, batches=(2,), where=Chips(rows=1), **call)
  with pytest.raises(ValueError, match=having('v9:2x2', 'without predictors')):
    planner.plan(pair(), PROMPTS, where=Chips(), predictors=[predictors.margin], **call)


def test_a_plan_speaks_of_its_acceptance_in_the_words_of_vllm():
  found = of_rate(0.8, costs(0.1))
  made = plan_report.PlanReport(None, (found,)).vllm()
  block = found.best().block
  expected = dict(num_speculative_tokens=block, rejection_sample_method='synthetic')
  expected |= dict(synthetic_acceptance_rates=[round(0.8 ** (i + 1), 4) for i in range(block)])
  assert made == {'speculative, batch 1': expected}


def rows_of(out):
  """Return the statistics of each row."""
  table = {field.name: getattr(out.stats, field.name) for field in dataclasses.fields(out.stats)}
  by_model = {name: x.T if name in stats.PER_MODEL else x for name, x in table.items() if name != 'source'}
  return [{name: x[i] for name, x in by_model.items()} for i in range(len(out.tokens))]


def test_the_record_of_a_cascade_has_no_more_accepted_than_drafted_tokens_and_is_no_acceptance_for_a_plan():
  method = methods.speculative(functools.partial(rules.opt, alpha=0.6), block=3)
  out = decode(method, pair(), PROMPTS, max_new_tokens=40, sampler=Sampler(1.0))
  recorded = [stats.acceptance_record(row, method.name) for row in rows_of(out)]
  for i, record in enumerate(recorded):
    assert 0 < record['draft_acceptance_rate'] <= 1 and record['num_draft_tokens'] == out.stats.drafted[:, i].sum()
    assert record['mean_acceptance_length'] == pytest.approx(out.stats.emitted[i] / out.stats.rounds[i])
  with pytest.raises(ValueError, match=having('speculative[opt]', 'plain')):
    engines.rates(recorded)


def test_a_plan_takes_the_acceptance_that_an_engine_recorded(tmp_path):
  out = decode(methods.speculative(block=3), pair(), PROMPTS, max_new_tokens=40, sampler=Sampler(1.0))
  recorded = [stats.acceptance_record(row, methods.speculative().name) for row in rows_of(out)]
  for i, record in enumerate(recorded):
    assert record['mean_acceptance_length'] == pytest.approx(out.stats.emitted[i] / out.stats.rounds[i])
    assert sum(record['acceptance_histogram']) == record['num_spec_steps'] <= out.stats.rounds[i]
    assert record['num_accepted_draft_tokens'] == out.stats.accepted[i] <= record['num_draft_tokens']
  file = tmp_path / 'served.jsonl'
  file.write_text(
    ''.join(json.dumps({'id': i, 'metrics': {'speculative_decoding': r}}) + '\n' for i, r in enumerate(recorded))
  )
  rates = engines.acceptance(str(file))
  of_stats = cost_model.by_position(*(getattr(out.stats, name)[:8].sum(0) for name in ('tested_at', 'accepted_at')))
  np.testing.assert_allclose(rates, of_stats, atol=0.05)  # but for drafts that the end of a text cut short
  made = planned(pair(), PROMPTS, costs(0.1), (1, 2), acceptance=(0.5, 0.25))
  assert made.batches[0].candidates[0].acceptance == (0.5, 0.25)
  assert made.vllm()['speculative, batch 1']['synthetic_acceptance_rates'][0] == 0.5


# the numbers of a record are those of AIPerf's tests of its adapter for vLLM
SERVED = dict(
  acceptance_histogram={'0': 39, '1': 1, '3': 3}, num_spec_steps=43, num_draft_tokens=129, num_spec_tokens=3
)


def test_rates_by_position_follow_from_a_record_of_vllm(monkeypatch):
  monkeypatch.setattr(cost_model, 'LEAST', 1)
  dense = SERVED | {'acceptance_histogram': [39, 1, 0, 3]}
  assert engines.rates([SERVED]) == engines.rates([dense]) == pytest.approx((4 / 43, 3 / 4, 1))
  steps = dict(acceptance_histogram=[1, 2], per_step_accepted=[0, 1, 1], per_step_drafted=[2, 1, 2])
  assert engines.rates([steps]) == pytest.approx((2 / 3, 0))  # of the two that accepted one, one had drafted more


@pytest.mark.parametrize(
  'record, message',
  [
    ({'acceptance_histogram': {'x': 1}}, ('acceptance_histogram', "'x'")),
    ({'acceptance_histogram': [1, -1]}, ('acceptance_histogram', '-1')),
    ({'acceptance_histogram': 3}, ('acceptance_histogram', '3')),
    (SERVED | {'num_draft_tokens': 60}, ('60', '43', 'detailed')),
    (SERVED | {'num_spec_tokens': 'x'}, ('num_spec_tokens', "'x'")),
    (dict(acceptance_histogram=[1], per_step_accepted=['x']), ('per_step_accepted', "'x'")),
    (dict(acceptance_histogram=[1], per_step_accepted=[1]), ('per_step_accepted', 'contradicts')),
    (dict(acceptance_histogram=[0, 1], per_step_accepted=[1], per_step_drafted=[0]), ('per_step_drafted', '[0]')),
  ],
)
def test_a_record_that_contradicts_itself_is_refused(record, message):
  with pytest.raises(ValueError, match=having(*message)):
    engines.rates([record])


def test_a_file_without_records_is_refused(tmp_path):
  file = tmp_path / 'x.json'
  for text, parts in (('{"a": [1]}', ('x.json', 'acceptance_histogram')), ('{', ('x.json', 'JSON'))):
    file.write_text(text)
    with pytest.raises(RunError, match=having(*parts)):
      engines.acceptance(str(file))


def test_each_option_is_explained_by_a_text_of_its_own(capsys):
  with pytest.raises(SystemExit):
    plan.main(['--help'])
  said = ' '.join(capsys.readouterr().out.split())
  assert said.count('take the acceptance of plain speculative decoding') == 1
  assert said.count('--speculative-config by which vLLM times') == 1
