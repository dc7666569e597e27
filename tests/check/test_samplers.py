"""Samplers of others: known mistakes are found with their bias, and right ones pass."""

import json
import runpy

from faults import AFTER, arg_max_draft, draw, FAULTS, RIGHT, right
import jax
import numpy as np
import pytest
from tiers import long_but

import speccascade
from speccascade.check import samplers
from speccascade.check.samplers import Bet, Case, cases, check_samples, FALSE_ALARM

FIRST = 'by the papers', 'whatever drew x'
SLOW = (
  "the draft's noise draws the residual",
  'accepts counted, not the prefix',
  'block verification tests with s_1',
  'residual for all unless all accept',
)


@pytest.fixture(autouse=True)
def fewer_calls(monkeypatch):
  """Give up sooner what cannot be enumerated; three numbers of 30 cells can."""
  monkeypatch.setattr(samplers, '_CALLS', 30_000)


@pytest.mark.parametrize('name', long_but(FAULTS, [name for name in FAULTS if name not in SLOW]))
def test_each_mistake_is_found_with_its_bias(name):
  sampler, p, q, block, tokens, distance, options = FAULTS[name]
  options = dict(options)
  after = options.pop('after', AFTER if len(p) == 2 else p)
  case = Case(np.array([p] * block + [after]), np.array([q] * block), tokens, options.get('rows', 1))
  if distance is not None:
    report = speccascade.check_sampler(sampler, given=[case], **options)
    assert not report.ok and 'emits' in report.text
    sampled = 'runs' in report.text
    assert report.distance == pytest.approx(distance, abs=0.03 if sampled else 1e-3)
  report = speccascade.check_sampler(sampler, runs=8_000, **options)
  assert not report.ok and 'emits' in report.text


@pytest.mark.full
@pytest.mark.parametrize('name', long_but(RIGHT, [*FIRST, 'with its draft']))
def test_right_samplers_pass(name):
  sampler, options = RIGHT[name]
  given = [*cases(options.get('rows', 1))]
  if name not in FIRST:  # a case of two tokens, of three, with the one after the draft, of a draft of two
    given = [given[i] for i in ((0, 1) if 'rows' in options else (0, 4, 6, 10))]
  report = speccascade.check_sampler(sampler, runs=2_000, given=given, **options)
  assert report.ok, report


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


def samples(count, temperature=1.0):
  rng = np.random.default_rng(1)
  for _ in range(count):
    p = rng.dirichlet(np.ones(4))
    drawn = p ** (1 / temperature)
    token = rng.choice(4, p=drawn / drawn.sum())
    yield {'token': int(token), 'top_logprobs': {str(i): float(np.log(x)) for i, x in enumerate(p)}}


def test_samples_of_a_server_are_held_against_its_log_probabilities():
  assert check_samples(samples(3_000)).ok
  assert not check_samples(samples(3_000, temperature=0.7)).ok
  with pytest.raises(ValueError, match='no samples'):
    check_samples([])


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
