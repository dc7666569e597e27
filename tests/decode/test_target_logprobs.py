"""The log-probability of each token under the distribution that it was drawn from."""

import functools
import json
import pathlib
import subprocess
import sys

from cases import bound, profile
import jax.numpy as jnp
from matching import having
import numpy as np
import pytest

from speccascade import acceptance, decode, methods, Request, rules, Sampler, stopping
from speccascade.decode import __main__ as command
from speccascade.decode.scoring import read, score
from speccascade.drafters import ngram
from speccascade.models import toy
from speccascade.sampling import at_token

LARGE = toy.model(21, 7, scale=1.2, eos_ids=(6,))
SMALL = toy.model(22, 7, scale=0.7, near=LARGE, eos_ids=(6,))
PAIR = [SMALL, LARGE]
PROMPTS = [[1, 2], [3], [5, 4, 3, 2, 1, 0], [2, 2, 2]]
weighted = functools.partial(rules.weighted, weights=(0.5, 0.5))
METHODS = {
  'autoregressive': methods.autoregressive(1),
  'speculative': methods.speculative(block=3),
  'block verification': methods.speculative(block=3, accept=acceptance.block),
  'opt': methods.speculative(bound('opt'), 3),
  'drafts that end': methods.speculative(bound('diff'), 4, policy=stopping.Heuristic(2)),
  'ensemble': methods.ensemble(weighted),
  'ensemble_sd': methods.ensemble_sd(weighted, 3),
  'cos': methods.cos(weighted, (4, 1)),
}
run = functools.partial(decode, trace='target', max_new_tokens=9, seed=5, batch_size=3)


@pytest.mark.parametrize('name', METHODS)
def test_log_probabilities_are_those_of_the_text_under_the_target(name):
  out = run(METHODS[name], PAIR, PROMPTS)
  scored = score(METHODS[name], PAIR, PROMPTS, out.tokens)
  for found, expected in zip(out.target_logprobs, scored, strict=True):
    np.testing.assert_allclose(found, expected.logprobs, atol=1e-5)


@pytest.mark.parametrize('sampler', [Sampler(0.7), Sampler(1.3, top_p=0.8), Sampler(1.0, top_k=3, min_p=0.05)], ids=str)
@pytest.mark.parametrize('coupling', ['maximal', 'gumbel'])
def test_temperature_and_filters_are_in_it(sampler, coupling):
  rule = bound('opt')
  out = run(methods.speculative(rule, 3), PAIR, PROMPTS, sampler=Sampler(**vars_of(sampler), coupling=coupling))
  of = lambda logits, tokens: jnp.log(at_token(rules.target(rule, logits, sampler).probs, tokens))
  for found, expected in zip(out.target_logprobs, read(PAIR, PROMPTS, out.tokens, of), strict=True):
    np.testing.assert_allclose(found, expected, atol=1e-5)


def vars_of(sampler: Sampler) -> dict:
  return {name: getattr(sampler, name) for name in ('temperature', 'top_k', 'top_p', 'min_p')}


def test_a_request_changes_it_and_its_penalties_count_what_was_drafted():
  asked = [Request([1, 2], logit_bias={3: 2.0, 5: -1.0}, temperature=0.8), Request([4], temperature=0.8)]
  alone = run(methods.autoregressive(1), PAIR, asked, sampler=Sampler(0.8, presence_penalty=0.6, coupling='gumbel'))
  for block in (1, 4):
    sampler = Sampler(0.8, presence_penalty=0.6, coupling='gumbel')
    out = run(methods.speculative(block=block), PAIR, asked, sampler=sampler)
    assert out.tokens == alone.tokens
    for found, expected in zip(out.target_logprobs, alone.target_logprobs, strict=True):
      np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_greedy_token_is_certain_and_a_drafter_of_any_kind_changes_nothing():
  out = run(methods.speculative(block=3), [ngram.drafter(LARGE), LARGE], PROMPTS, sampler=Sampler(0.0))
  assert out.stats.accepted.sum() and all((x == 0).all() for x in out.target_logprobs)
  call = dict(sampler=Sampler(1.0, coupling='gumbel'))
  one, other = (run(methods.speculative(block=3), [d, LARGE], PROMPTS, **call) for d in (SMALL, ngram.drafter(LARGE)))
  assert one.tokens == other.tokens
  np.testing.assert_allclose(np.concatenate(one.target_logprobs), np.concatenate(other.target_logprobs), atol=1e-5)


def test_the_probabilities_of_all_first_tokens_sum_to_one():
  out = run(methods.speculative(bound('opt'), 2), PAIR, [Request([1, 2], n=400, max_new_tokens=1)], batch_size=64)
  known = {tokens[0]: float(np.exp(x[0])) for tokens, x in zip(out.tokens, out.target_logprobs, strict=True)}
  assert len(known) == 7 and sum(known.values()) == pytest.approx(1, abs=1e-5)
  assert all(np.exp(x[0]) == pytest.approx(known[t[0]]) for t, x in zip(out.tokens, out.target_logprobs, strict=True))


def test_the_likeliest_tokens_are_the_targets_where_a_request_says_so():
  sampler = Sampler(0.7, top_k=3)
  asked = [Request([1, 2], logprobs=4, processed=True), Request([1, 2], logprobs=4)]
  out = run(METHODS['speculative'], PAIR, asked, sampler=sampler, example_ids=[0, 0])
  assert out.tokens[0] == out.tokens[1]
  for token, logprob, ours, plain in zip(out.tokens[0], out.target_logprobs[0], *out.top_logprobs, strict=True):
    assert ours[token] == pytest.approx(logprob, abs=1e-5)
    assert sum(np.exp([*ours.values()])) == pytest.approx(1, abs=1e-5) and sum(np.isfinite([*ours.values()])) == 3
    assert [*ours][:3] == [*plain][:3] and all(np.isfinite([*plain.values()]))


LOSSY = {
  'bild': (methods.bild(0.4, 1.2, 4), PAIR),
  'a lossy test': (methods.speculative(block=3, accept=acceptance.FLy(0.5)), PAIR),
  'a biased schedule': (methods.sv(profile(6), 3), [SMALL, SMALL, LARGE]),
}


@pytest.mark.parametrize('name', LOSSY)
def test_a_method_whose_tokens_follow_no_target_is_refused(name):
  method, models = LOSSY[name]
  with pytest.raises(ValueError, match=having("trace='target'", method.name, 'those of the models')):
    run(method, models, PROMPTS, sampler=Sampler(1.0))
  with pytest.raises(ValueError, match=having('processed=True', method.name)):
    decode(method, models, [Request([1], processed=True, logprobs=1)], max_new_tokens=2)


def test_what_is_no_trace_and_a_cascade_of_texts_are_refused():
  with pytest.raises(ValueError, match="'targets'"):
    decode(METHODS['speculative'], PAIR, PROMPTS, trace='targets', max_new_tokens=2)
  with pytest.raises(ValueError, match='trace records one decode'):
    run(methods.sequence_cascade(), PAIR, PROMPTS)


def test_the_command_writes_them(tmp_path, monkeypatch):
  (tmp_path / 'in.jsonl').write_text(''.join(json.dumps({'prompt': p}) + '\n' for p in PROMPTS))
  monkeypatch.setattr(command.options, 'load_models', lambda args: PAIR)
  monkeypatch.setattr(command.options, 'digests', lambda args: {})
  given = [str(tmp_path / 'in.jsonl'), str(tmp_path / 'out.jsonl'), '--models', 'a', 'b', '--target_logprobs']
  assert command.main([*given, '--max_new_tokens=9', '--seed=5', '--method=speculative', '--block=3']) == 0
  lines = [json.loads(line) for line in (tmp_path / 'out.jsonl').read_text().splitlines()]
  out = run(METHODS['speculative'], PAIR, PROMPTS)
  for line, found in zip(lines, out.target_logprobs, strict=True):
    np.testing.assert_allclose(line['target_logprobs'], found, atol=1e-5)


@pytest.mark.full
def test_rollouts_are_those_of_the_trainer_in_the_example_of_a_policy_gradient():
  file = pathlib.Path(__file__).parents[2] / 'examples' / 'rl.py'  # which asserts that the ratio is 1
  command = [sys.executable, str(file), '--steps=2', '--prompts=2', '--samples=2']
  out = subprocess.run(command, capture_output=True, text=True)
  assert [line.partition(':')[0] for line in out.stdout.splitlines()] == ['step 0', 'step 1'], out.stderr
