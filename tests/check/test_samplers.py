"""Samplers of others: known mistakes are found with their bias, and right ones pass."""

import inspect
import json
import math
import runpy
import sys

import faults
from faults import AFTER, arg_max_draft, draw, FAULTS, RIGHT, right
import jax
from matching import says
import numpy as np
import pytest
from tiers import long_but

import speccascade
from speccascade.check.sampler.cases import ALONE, ASKED, Case, cases, Setting, SETTINGS
from speccascade.check.sampler.evidence import Bet, excluded, FALSE_ALARM
from speccascade.check.sampler.samples import check_file, check_samples

SLOW = "the draft's noise draws the residual", 'residual for all unless all accept', 'one key for two rows'
FIRST = 'by the papers', 'block verification'


@pytest.mark.parametrize('name', long_but(FAULTS, [name for name in FAULTS if name not in SLOW]))
def test_each_mistake_is_found_with_its_bias(name):
  sampler, p, q, block, tokens, distance, options = FAULTS[name]
  options = dict(options)
  after = options.pop('after', AFTER if len(p) == 2 else p)
  if distance is not None:
    given = [np.array([x] * options['rows'] if 'rows' in options else x) for x in ([p] * block + [after], [q] * block)]
    report = speccascade.check_sampler(sampler, given=[Case(*given, tokens)], **options)
    assert not report.ok and 'emits' in report.text
    assert report.distance == pytest.approx(
      distance, rel=0.06 if distance < 0.01 else 0.01, abs='runs' in report.text and 0.03
    )
  report = speccascade.check_sampler(sampler, runs=8_000, **options)
  assert not report.ok and 'emits' in report.text


@pytest.mark.full
@pytest.mark.parametrize('name', long_but(RIGHT, [*FIRST, 'with settings']))
def test_right_samplers_pass_by_enumeration(name):
  sampler, options = RIGHT[name]
  report = speccascade.check_sampler(sampler, runs=2_000, **options)
  assert report.ok and report.excluded == 1e-6 and 'runs' not in report.text, report


@pytest.mark.parametrize('choices', long_but([2, 3], [2]))
def test_samplers_of_several_drafts_are_judged(choices):
  given = [x for x in cases(choices=choices) if x.tokens == 1]
  report = speccascade.check_sampler(faults.of_lists(), choices=choices, given=given)
  assert report.ok and report.excluded == 1e-6, report
  for fault in (dict(next_target=lambda p, left: p), dict(last=lambda p, left: p)):
    wrong = speccascade.check_sampler(faults.of_lists(**fault), choices=choices)
    assert not wrong.ok and f', {choices} drafts of each token: emits' in wrong.text
  rows = lambda tokens, q, p, rng: [faults.of_lists()(*row, rng) for row in zip(tokens, q, p, strict=True)]
  first = [next(cases(2, choices=choices))]
  assert speccascade.check_sampler(rows, choices=choices, rows=2, runs=600, given=first).ok
  with pytest.raises(ValueError, match=f'choices={choices} are of drafts that a sampler is given'):
    speccascade.check_sampler(lambda q, p, rng: [0], choices=choices, drafts=True)


def test_the_verdict_states_the_smallest_bias_that_it_excludes():
  given = [*cases()][:2]
  exact = speccascade.check_sampler(right, given=given)
  assert 'in 2 cases: 2 enumerated, which excludes a bias above 1e-06' in exact.text and exact.excluded == 1e-6
  near, far = (speccascade.check_sampler(faults.by_rejection, runs=runs, given=given) for runs in (4_000, 400))
  assert 'run 4000 times, which excludes a bias above .0' in near.text
  assert 0.04 < near.excluded < 0.08 < far.excluded < 0.2


@pytest.mark.parametrize('bias', [0.02, 0.1])
def test_a_bias_above_what_is_excluded_is_never_there(bias):
  law, runs = np.array([0.3, 0.7]), 2_000
  drawn = np.random.default_rng(0).binomial(runs, 0.3 + bias, 2_000) / runs
  assert min(excluded(np.array([x, 1 - x]), law, runs) for x in drawn) > bias


def test_no_two_positions_and_no_two_rows_of_a_case_are_alike():
  for rows in (1, 2, 3):
    for case in cases(rows, ASKED):
      p, q = (x if case.batch else x[None] for x in (case.p, case.q))
      assert all(len(np.unique(x, axis=0)) == len(x) for row in zip(p, q) for x in row)
      assert len(np.unique(p, axis=0)) == min(rows, len(p)) or rows > 2
  assert {len(case.q) for case in cases()} == {0, 1, 2}
  assert {n for case in cases(2, ASKED) for n in case.drafted} == {0, 1}


# ---- what a sampler does with what it is given ----


@pytest.mark.parametrize('sampler', [faults.writing_p, faults.writing_q])
def test_a_sampler_that_writes_into_its_arrays_is_judged_by_ours(sampler):
  report = speccascade.check_sampler(sampler)
  assert not report.ok and report.distance == pytest.approx(0.4)


def test_a_sampler_may_write_into_its_copies():
  def verify(tokens, q, p, rng):
    emitted = right(list(tokens), q, p, rng)
    for array in (tokens, q, p):
      array[:] = 0
    return emitted

  assert speccascade.check_sampler(verify, given=[*cases()][::4]).excluded == 1e-6


def counted(sampler):
  """Return a sampler, and a list of one number, how often it was called."""
  calls = [0]

  def verify(tokens, q, p, rng):
    calls[0] += 1
    return sampler(tokens, q, p, rng)

  return verify, calls


@pytest.mark.parametrize('sampler', [faults.by_rejection, faults.by_race])
def test_a_sampler_that_cannot_be_enumerated_is_given_up_early(sampler):
  verify, calls = counted(sampler)
  given = [[*cases()][i] for i in (4, 0, 10)]
  report = speccascade.check_sampler(verify, runs=500, given=given)
  assert report.ok and '3 run 500 times' in report.text and calls[0] < 4_000


def test_a_sampler_that_does_not_end_is_refused():
  def verify(tokens, q, p, rng):
    while rng.random() >= 0:
      pass

  with pytest.raises(ValueError, match='more than 100000 random numbers'):
    speccascade.check_sampler(verify)


def test_a_sampler_that_catches_everything_is_enumerated_right():
  def verify(tokens, q, p, rng):
    try:
      return right(tokens, q, p, rng)
    except:  # noqa: E722
      return [0]

  assert speccascade.check_sampler(verify, given=[*cases()][:6]).excluded == 1e-6


# ---- what its surroundings do ----


def test_filters_before_the_temperature_are_found():
  given = [case for case in cases(1, SETTINGS) if case.settings]
  report = speccascade.check_sampler(faults.filters_before_temperature, given=given)
  assert not report.ok and 'temperature=2, top_p=0.78' in report.text
  assert speccascade.check_sampler(faults.by_settings, given=given).ok


def test_the_target_of_settings_is_that_of_the_package():
  p = np.array([0.5, 0.3, 0.2])
  for setting in (*ALONE, Setting(0.7, 2, 0.6)):
    sampler = speccascade.Sampler(setting.temperature, top_k=setting.top_k, top_p=setting.top_p)
    assert np.allclose(setting(p), sampler(np.log(p)[None])[0], atol=1e-6)


def run_only(sampler):
  """Return a sampler that is run and not enumerated, since it asks for other numbers."""

  def verify(tokens, q, p, rng, temperature, top_k, top_p, lengths):
    rng.integers(2)
    return sampler(tokens, q, p, rng, temperature, top_k, top_p, lengths)

  return verify


def test_a_greedy_row_that_a_sampled_row_turns_over_is_found():
  given = [case for case in cases(2, SETTINGS) if case.settings]
  report = speccascade.check_sampler(run_only(faults.greedy_turned), rows=2, runs=500, given=given)
  assert not report.ok and 'temperature=0; row 1' in report.text and report.distance > 0.5
  assert speccascade.check_sampler(run_only(faults.batch_by_settings), rows=2, runs=500, given=given).ok


def test_a_row_without_a_draft_is_asked():
  given = [case for case in cases(2, ['lengths']) if case.lengths]
  report = speccascade.check_sampler(faults.no_draft_forgotten, rows=2, given=given)
  assert not report.ok and 'row 0: p = (.5, .3, .2), q = nothing' in report.text
  assert speccascade.check_sampler(run_only(faults.batch_by_settings), rows=2, runs=500, given=given).ok


def test_the_verdict_says_what_was_not_asked():
  text = speccascade.check_sampler(faults.by_row, rows=2, runs=50).text
  assert text.endswith('not asked: temperature, top_k, top_p, lengths, which it does not take')


def test_a_sampler_that_takes_no_empty_draft_is_no_wrong_one():
  def verify(tokens, q, p, rng):
    assert len(tokens)
    return right(tokens, q, p, rng)

  report = speccascade.check_sampler(verify)
  assert report.ok and says(report.text, 'where nothing is drafted', 'AssertionError', 'test_samplers.py')


@pytest.mark.parametrize('biased', [False, True])
def test_a_sampler_by_a_key_of_jax_is_run(biased):
  def verify(tokens, q, p, key):
    test, last = np.asarray(jax.random.uniform(key, (2,)))
    x = int(tokens[0])
    if test * q[0, x] < p[0, x]:
      return [x]
    return [draw(p[0] if biased else np.maximum(p[0] - q[0], 0), last)]

  cases = [Case(np.array([[0.6, 0.4], [0.5, 0.5]]), np.array([[0.9, 0.1]]), 1)]
  assert speccascade.check_sampler(verify, rng='jax', runs=600, given=cases).ok != biased


def test_what_is_no_sampler_is_refused():
  with pytest.raises(ValueError, match=r'emits \[\]'):
    speccascade.check_sampler(lambda tokens, q, p, rng: [])
  with pytest.raises(ValueError, match=r'emits \[7\]'):
    speccascade.check_sampler(lambda tokens, q, p, rng: [7])
  with pytest.raises(ValueError, match='1 lists for 2 rows'):
    speccascade.check_sampler(lambda tokens, q, p, rng: [[0]], rows=2)
  with pytest.raises(ValueError, match=r'called with \(tokens, q, p, rng\), and takes \(q, p, rng\).* with --drafts'):
    speccascade.check_sampler(arg_max_draft)
  with pytest.raises(ValueError, match=r'called with \(q, p, rng\), .* without --drafts'):
    speccascade.check_sampler(right, drafts=True)
  with pytest.raises(ValueError, match='truth value'):  # a function in C, which does not tell what it takes, is called
    speccascade.check_sampler(min)
  with pytest.raises(ValueError, match="rng='dice'"):
    speccascade.check_sampler(right, rng='dice')


@pytest.mark.parametrize('token', [1.0, True, None, '1', float('nan'), np.float32(1), np.bool_(True), np.array([0.0])])
def test_what_is_no_whole_number_is_no_token(token):
  with pytest.raises(ValueError, match=r'the sampler emits \[.* give 1 … K \+ 1 whole ids'):
    speccascade.check_sampler(lambda tokens, q, p, rng: [token])


@pytest.mark.parametrize('tokens', [[np.int64(0)], np.array([0]), jax.numpy.array([0]), (0,), [np.array([0])]])
def test_whole_numbers_of_every_library_are_tokens(tokens):
  case = Case(np.array([[1.0, 0.0], [0.5, 0.5]]), np.array([[0.5, 0.5]]), 1)
  assert speccascade.check_sampler(lambda *_: tokens, given=[case]).ok


def test_an_error_of_the_sampler_has_its_file_and_line():
  def verify(tokens, q, p, rng):
    return [tokens[7]]

  with pytest.raises(ValueError) as caught:
    speccascade.check_sampler(verify)
  line = inspect.getsourcelines(verify)[1] + 1
  assert says(str(caught.value), f'test_samplers.py:{line}', 'return [tokens[7]]', 'IndexError')


@pytest.mark.parametrize('code', [0, None, 'done'])
def test_a_sampler_that_exits_is_an_error(code):
  with pytest.raises(ValueError, match='test_samplers.py.* it ends the program by exit'):
    speccascade.check_sampler(lambda tokens, q, p, rng: sys.exit(code))


def test_the_bet_refutes_a_right_claim_as_rarely_as_it_says():
  rng = np.random.default_rng(0)
  p = np.array([0.5, 0.3, 0.2])
  largest = []
  for _ in range(2_000):
    bet = Bet(3)
    outcomes = rng.choice(3, 200, p=p)
    bet.add(outcomes[:, None] == np.arange(3), p)
    largest.append(bet.evidence)
  assert max(largest) < -np.log(FALSE_ALARM) and np.mean(np.exp(largest)) < 1.5
  assert np.mean(np.array(largest) > np.log(20)) <= 0.05  # Markov's inequality, which it may not break


def log(p):
  return np.log(np.maximum(p, 1e-300)).astype(float)


def top_p(p, share):
  order = np.argsort(-p)
  return np.where(np.isin(np.arange(len(p)), order[np.cumsum(p[order]) - p[order] < share]), p, 0)


def samples(count, drawn=lambda p: p, vocab=4, listed=None, appended=False):
  """Yield tokens that are drawn from other weights than their log-probabilities say."""
  rng = np.random.default_rng(1)
  for _ in range(count):
    p = rng.dirichlet(np.full(vocab, 4 / vocab))
    weights = drawn(p)
    token = int(rng.choice(vocab, p=weights / weights.sum()))
    top = np.argsort(-p)[:listed].tolist() + [token] * appended
    yield {'token': token, 'top_logprobs': {str(i): log(p)[i] for i in top}}


def test_samples_of_a_server_are_held_against_its_log_probabilities():
  assert check_samples(samples(3_000)).ok
  with pytest.raises(ValueError, match='no samples'):
    check_samples([])


LOST = {
  'p^.8': (lambda p: p**0.8, 'p^.8, by a temperature of 1.25 that is missing'),
  'T = .7': (lambda p: p ** (1 / 0.7), 'by a temperature of .7 that is missing'),
  'top-p': (lambda p: top_p(p, 0.9), 'a top-p of .9 that is missing'),
  'top-k': (lambda p: np.where(p >= np.sort(p)[-3], p, 0), 'a top-k of 3 that is missing'),
}


@pytest.mark.parametrize('name', LOST)
def test_what_the_log_probabilities_lack_is_found_in_4000_tokens_and_named(name):
  drawn, said = LOST[name]
  report = check_samples(samples(4_000, drawn))
  assert not report.ok and said in report.text, report


def test_a_token_that_is_listed_because_it_was_drawn_is_no_evidence():
  assert check_samples(samples(3_000, vocab=30, listed=3, appended=True)).ok
  assert not check_samples(samples(3_000, LOST['top-k'][0], 30, 2, appended=True)).ok


def test_a_token_that_cannot_be_drawn_refutes_at_once_and_one_that_is_rounded_away_does_not():
  given = {'a': -0.0001, 'b': -9999.0}
  assert 'after 1 samples' in check_samples([{'token': 'b', 'top_logprobs': given}]).text
  one = [{'token': 'a', 'top_logprobs': given}] * 5_000 + [{'token': 'c', 'top_logprobs': given}]
  assert check_samples(one).ok and not check_samples([*one, *one[-1:] * 30]).ok


def response(sample, **more):
  """Return a sample as a response in OpenAI's form."""
  pairs = [{'token': k, 'logprob': x, 'bytes': None} for k, x in sample['top_logprobs'].items()]
  token = str(sample['token'])
  entry = {'token': token, 'logprob': sample['top_logprobs'][token], 'top_logprobs': pairs} | more
  return {'id': 'x', 'choices': [{'index': 0, 'logprobs': {'content': [entry]}}]}


def test_the_form_of_openai_is_read():
  given = [*samples(1_000, LOST['T = .7'][0])]
  assert str(check_samples(map(response, given))) == str(check_samples(given))


def test_of_two_tokens_of_one_text_the_one_that_was_drawn_is_taken():
  two = [('�', math.log(0.6)), ('�', math.log(0.4))]
  pairs = [{'token': t, 'logprob': x} for t, x in two]
  rng = np.random.default_rng(0)
  drawn = [two[int(rng.random() < 0.4)] for _ in range(2_000)]
  content = [{'token': t, 'logprob': x, 'top_logprobs': pairs} for t, x in drawn]
  assert check_samples([{'choices': [{'logprobs': {'content': content}}]}]).ok


BAD = {
  'no JSON': ('{"token": 1', ['no JSON']),
  'deep': ('[' * 100_000, ['no JSON']),
  'no object': ('3', ['neither']),
  'no log-probabilities': ('{"token": 1}', ['top_logprobs']),
  'a text for a number': ('{"token": "a", "top_logprobs": {"a": "-1"}}', ["top_logprobs['a']", "'-1'"]),
  'true': ('{"token": "a", "top_logprobs": {"a": true}}', ["top_logprobs['a']", 'True']),
  'NaN': ('{"token": "a", "top_logprobs": {"a": NaN}}', ["top_logprobs['a']", 'nan']),
  'a probability': ('{"token": "a", "top_logprobs": {"a": 0.5}}', ["top_logprobs['a']", '0.5', 'at most 0']),
  'sum': ('{"token": "a", "top_logprobs": {"a": -0.1, "b": -0.1}}', ['sum to 1.81']),
  'a token that is none': ('{"token": null, "top_logprobs": {"a": -0.1}}', ['None', 'neither an id nor a text']),
  'empty': ('{"token": "a", "top_logprobs": {}}', ['lists no token']),
  'a large number': ('{"token": "a", "top_logprobs": {"a": 1%s}}' % ('0' * 400), ["top_logprobs['a']"]),
  'a response without': ('{"choices": [{"logprobs": null}]}', ['choices[].logprobs', 'logprobs=true']),
  'choices': ('{"choices": 5}', ['choices[].logprobs']),
  'a value of a response': (
    json.dumps(response({'token': 'a', 'top_logprobs': {'a': -0.1}}, logprob=None)),
    ['choices[0].logprobs.content[0].logprob', 'None'],
  ),
}


@pytest.mark.parametrize('name', BAD)
def test_each_value_of_a_file_is_checked_with_its_line(name, tmp_path):
  text, parts = BAD[name]
  file = tmp_path / 'samples.jsonl'
  file.write_text('{"token": "a", "top_logprobs": {"a": -0.1}}\n\n' + text + '\n')
  with pytest.raises(ValueError) as caught:
    check_file(file)
  assert says(str(caught.value), f'{file}, line 3', *parts) and '\n' not in str(caught.value)


def test_the_help_names_the_flag_of_a_server():
  parser = runpy.run_module('speccascade.check.__main__')['_parser']()
  assert '--logprobs-mode processed_logprobs' in ' '.join(parser.format_help().split())


# ---- the command ----


@pytest.mark.full
def test_the_command(tmp_path, monkeypatch, capsys):
  (tmp_path / 'my_samplers.py').write_text('from faults import arg_max_draft, right\n')
  file = tmp_path / 'samples.jsonl'
  file.write_text('\n'.join(json.dumps(x) for x in samples(300)))
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.chdir(tmp_path)
  main = runpy.run_module('speccascade.check.__main__')['main']
  assert main(['--sampler', 'my_samplers:right']) == 0
  assert main(['--sampler', 'my_samplers:arg_max_draft', '--drafts']) == 1
  assert 'total variation .067' in capsys.readouterr().out
  assert main(['--samples', str(file)]) == 0
  file.write_text('{"token": 1}\n')
  assert main(['--samples', str(file)]) == 1 and 'line 1' in capsys.readouterr().err
  assert main([]) == 1 and '--sampler' in capsys.readouterr().err


def test_a_sampler_that_exits_does_not_end_the_command_well(tmp_path, monkeypatch, capsys):
  (tmp_path / 'exits.py').write_text('import sys\n\n\ndef verify(tokens, q, p, rng):\n  sys.exit(0)\n')
  (tmp_path / 'exits_at_once.py').write_text('import sys\n\nsys.exit(0)\n')
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.chdir(tmp_path)
  main = runpy.run_module('speccascade.check.__main__')['main']
  assert main(['--sampler', 'exits:verify']) == 1 and says(capsys.readouterr().err, 'exits.py:5', 'exit(0)')
  assert main(['--sampler', 'exits_at_once:verify']) == 1 and 'exits_at_once' in capsys.readouterr().err
