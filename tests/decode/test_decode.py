"""The loop's promises: lockstep equality at temperature 0, rows that do not know of each other, counts, errors."""

import functools

from cases import alpha, bound, cascaded, mean, of_bild, of_rule, own, profile
from emitted import traces
from flax import struct
import jax
import jax.numpy as jnp
from matching import having
import numpy as np
import pytest
import reference
from reference import RULES
import scipy.stats
from tiers import long_but

import speccascade
from speccascade import acceptance, decode, methods, rules, Sampler, stopping
from speccascade.check import enumeration
from speccascade.drafters import ngram
from speccascade.engine import engine
from speccascade.engine.lowering import lower
from speccascade.engine.phases import Phase, Score
from speccascade.models import toy
from speccascade.types import BONUS, Prompt, RESIDUAL

EOS = 6
LARGE = toy.model(21, 7, scale=1.2, eos_ids=(EOS,))
SMALL = toy.model(22, 7, scale=0.7, near=LARGE, eos_ids=(EOS,))
MIDDLE = toy.model(23, 7, scale=0.5, near=LARGE, eos_ids=(EOS,))
PAIR, TRIO = [SMALL, LARGE], [SMALL, MIDDLE, LARGE]
PROMPTS = [[1, 2], [3], [5, 4, 3, 2, 1, 0], [2, 2, 2], [0, 5], [4, 4, 1, 5]]
EVEN, UNEVEN = (0.5, 0.5), (0.5, 0.3, 0.2)
weighted2 = functools.partial(rules.weighted, weights=EVEN)
weighted3 = functools.partial(rules.weighted, weights=UNEVEN)
opt, diff = bound('opt'), bound('diff')


# name: (method, models, step of its lockstep version)
METHODS = {
  'autoregressive': (methods.autoregressive(0), PAIR, lambda models, **s: own(models[:1], **s)),
  'ensemble': (methods.ensemble(weighted2), PAIR, mean(EVEN)),
  'ensemble_parallel': (methods.ensemble_parallel(weighted3, models=3), TRIO, mean(UNEVEN)),
  'oracle': (methods.oracle(diff), PAIR, of_rule('diff')),
  'block verification': (methods.speculative(opt, 3, accept=acceptance.block), PAIR, of_rule('opt')),
  'heuristic lengths': (methods.speculative(diff, 4, policy=stopping.Heuristic(2)), PAIR, of_rule('diff')),
  'moving average': (methods.speculative(block=4, policy=stopping.MovingAverage(0.5, 0.7)), PAIR, own),
  'token_cascade': (
    methods.token_cascade(functools.partial(rules.chow, alpha=0.6), 4),
    PAIR,
    cascaded('chow', 0.6, 4),
  ),
  'bild': (methods.bild(0.4, 1.2, 4), PAIR, of_bild(0.4, 1.2, 4)),
  'naive_cos': (methods.naive_cos(weighted2, 3), PAIR, mean(EVEN)),
  'ensemble_sd': (methods.ensemble_sd(weighted2, 3), PAIR, mean(EVEN)),
  'cos of 2': (methods.cos(weighted2, (4, 1)), PAIR, mean(EVEN)),
  'cos of 3': (methods.cos(weighted3, (3, 2, 1)), TRIO, mean(UNEVEN)),
  'sv': (methods.sv(profile(6), 4), TRIO, own),
  'sv_exact': (methods.sv_exact(profile(6), 4), TRIO, own),
  'prompt lookup': (
    methods.speculative(block=4, policy=stopping.Fallback(0.5)),
    [ngram.drafter(LARGE), LARGE],
    own,
  ),
  **{f'speculative {name}': (methods.speculative(bound(name), 3), PAIR, of_rule(name)) for name in RULES},
}
# One of each kind of phases; the others are of the long tier.
FIRST = ('speculative opt', 'block verification', 'token_cascade', 'cos of 3', 'sv')


def greedily(method, models=PAIR, **settings):
  return decode(method, models, PROMPTS, max_new_tokens=9, sampler=Sampler(0.0), **settings)


def follow(step, prompt, count):
  """Return the only sequence that a deterministic step emits."""
  return list(*reference.joint_distribution(step, prompt, count, (EOS,)))


def check_statistics(method, out):
  """Check that what is counted of texts adds up."""
  s = out.stats
  assert s.emitted.tolist() == [len(t) for t in out.tokens] == [len(x) for x in s.source]
  assert all(EOS not in t[:-1] for t in out.tokens)
  by_draft = np.array([(x >= 0).sum() * (len(method.slots) > 1) for x in s.source])
  assert s.accepted.tolist() == by_draft.tolist()
  assert (s.accepted <= s.tested).all() and (s.tested <= s.drafted.sum(0)).all()
  assert (s.tested_at.sum(1) == s.tested).all() and (s.accepted_at.sum(1) == s.accepted).all()
  width = np.arange(s.accepted_lengths.shape[1])
  assert ((s.accepted_lengths * width).sum(1) == s.accepted).all()
  assert (s.verified_lengths.sum(1) == s.rounds).all()
  assert ((s.verified_lengths * width).sum(1) <= s.drafted.sum(0)).all()
  assert (s.calls <= s.positions).all() and (s.positions <= s.computed).all()
  others = s.emitted - by_draft
  if len(method.slots) > 1:
    assert others.tolist() == [np.isin(x, (RESIDUAL, BONUS)).sum() for x in s.source]
  assert (others <= s.rounds).all()


@pytest.mark.parametrize('name', long_but(METHODS, FIRST))
def test_greedy_decoding_is_the_lockstep_version_token_for_token(name):
  method, models, step = METHODS[name]
  out = decode(method, models, PROMPTS, max_new_tokens=16, sampler=Sampler(0.0))
  assert out.tokens == [follow(step(models, temperature=0), p, 16) for p in PROMPTS]
  check_statistics(method, out)


def test_greedy_sequence_cascade_keeps_or_rewrites_whole_answers():
  small, large = greedily(methods.autoregressive(0), trace=True), greedily(methods.autoregressive(1))
  scores = [x[0].mean() for x in small.logprobs]
  threshold = float(np.median(scores))
  out = greedily(methods.sequence_cascade(np.mean, threshold))
  assert out.tokens == [a if s >= threshold else b for a, b, s in zip(small.tokens, large.tokens, scores)]
  rewritten = np.array(scores) < threshold
  assert 0 < rewritten.sum() < len(PROMPTS)
  assert (out.stats.calls[1] > 0).tolist() == rewritten.tolist()
  assert out.stats.emitted.tolist() == [len(t) for t in out.tokens]
  assert [set(x.tolist()) for x in out.stats.source] == [{int(a)} for a in rewritten]


def test_the_eos_ids_of_the_last_model_end_both_answers_of_a_sequence_cascade():
  small = toy.model(22, 7, scale=0.7, near=LARGE, eos_ids=(2,))
  out = greedily(methods.sequence_cascade(threshold=-np.inf), [small, LARGE])
  expected = greedily(methods.autoregressive(0))
  other = greedily(methods.autoregressive(0), [small, LARGE])
  assert out.tokens == expected.tokens != other.tokens and out.finish_reasons == expected.finish_reasons


def test_prompt_lookup_is_refused_where_it_verifies_and_nowhere_else():
  lookup = ngram.drafter(LARGE)
  method = methods.speculative(pair=(1, 0))
  out = greedily(method, [LARGE, lookup])
  assert out.tokens == greedily(methods.autoregressive(), [LARGE]).tokens
  for wrong in (method, methods.by_batch({1: method, 8: methods.autoregressive(1)})):
    with pytest.raises(ValueError, match=having('ngram', 'as the verifier')):
      greedily(wrong, [lookup, LARGE])


def test_second_answers_that_all_fail_leave_the_first_ones():
  first = greedily(methods.autoregressive(0), trace=True)
  scores = [x[0].mean() for x in first.logprobs]
  sick = LARGE.replace(params={**LARGE.params, 'table': LARGE.params['table'] * np.float32('nan')})
  with pytest.warns(UserWarning, match=having('1 of 6', 'model 1')):
    out = greedily(methods.sequence_cascade(np.mean, sorted(scores)[1]), [SMALL, sick])
  low = int(np.argmin(scores))
  expected = [(first.tokens[i], first.finish_reasons[i]) for i in range(6) if i != low]
  assert [(out.tokens[i], out.finish_reasons[i]) for i in range(6) if i != low] == expected
  assert out.finish_reasons[low] == 'fault' and [i for i, fault in enumerate(out.faults) if fault] == [low]
  with pytest.raises(ValueError, match='not finite'):
    greedily(methods.sequence_cascade(threshold=np.inf), [SMALL, sick])


def test_traced_log_probabilities_are_the_models_own():
  out = decode(methods.speculative(opt, 3), PAIR, PROMPTS, max_new_tokens=9, trace=True)
  for prompt, tokens, noted in zip(PROMPTS, out.tokens, out.logprobs):
    for i, token in enumerate(tokens):
      for m in range(2):
        p = reference.softmax(reference.table_logits(PAIR[m], prompt + tokens[:i]))
        assert abs(noted[m, i] - np.log(p[token])) < 1e-5


@pytest.mark.full
def test_the_second_answer_of_a_sequence_cascade_has_numbers_of_its_own():
  run = functools.partial(decode, models=[LARGE, LARGE], prompts=PROMPTS, max_new_tokens=9, seed=3)
  first, second = run(methods.autoregressive(0)), run(methods.sequence_cascade(threshold=np.inf))
  assert (second.stats.calls[1] > 0).all() and sum(a == b for a, b in zip(first.tokens, second.tokens)) < 2


@pytest.mark.long
def test_the_second_answer_of_a_sequence_cascade_does_not_depend_on_why_it_was_asked_for():
  # With one random stream for both answers the rewritten ones would follow another distribution than the large model's.
  rows, step = 10_000, own(PAIR)
  cascade = methods.sequence_cascade(np.mean, -1.5)
  out = decode(cascade, PAIR, [[1, 2]] * rows, max_new_tokens=1)
  anew = out.stats.calls[1] > 0
  observed = np.bincount([t[0] for t, a in zip(out.tokens, anew) if a], minlength=7)
  ((distribution, _),) = step([1, 2], None)
  assert 500 < anew.sum() < rows - 500
  statistic = ((observed - distribution * anew.sum()) ** 2 / (distribution * anew.sum())).sum()
  assert statistic < 40  # χ² of 6 degrees of freedom: false alarms 5e-7


OTHERS = {'sv', *(f'speculative {name}' for name in RULES if name not in ('opt', 'lossy'))}
EVERY = [(n, t) for n in METHODS if n not in OTHERS for t in (1.0, 0.0)]


@pytest.mark.parametrize('name, temperature', long_but(EVERY, [('speculative opt', 1.0)]))
def test_a_row_is_the_same_in_any_company(name, temperature):
  method, models, _ = METHODS[name]
  run = functools.partial(decode, method, models, max_new_tokens=16, sampler=Sampler(temperature), seed=3)
  ids = [7, 1, 0, 4, 9, 2]
  whole = run(PROMPTS, example_ids=ids)
  check_statistics(method, whole)
  together = whole.tokens
  assert run(PROMPTS, example_ids=ids, batch_size=4).tokens == together
  alone = [run([p], example_ids=[i], max_prompt_tokens=24).tokens[0] for p, i in zip(PROMPTS, ids)]
  assert alone == together


@pytest.mark.full
def test_batches_hold_prompts_of_like_length_and_answers_come_in_the_order_of_the_prompts(monkeypatch):
  batches, read = [], engine.Engine.prefill
  noted = lambda self, rows, size: batches.append([len(r) for r in rows]) or read(self, rows, size)
  monkeypatch.setattr(engine.Engine, 'prefill', noted)
  run = functools.partial(decode, methods.speculative(opt, 3), PAIR, max_new_tokens=9, max_prompt_tokens=8, trace=True)
  prompts = [[1], [2, 3, 4, 5], [6, 0], [3, 2, 1]] + [[4, 4, 2, 1, 5]]
  out = run(prompts, batch_size=2)
  assert batches == [[5], [4], [3], [2], [1]]
  for i, prompt in enumerate(prompts):
    alone = run([prompt], example_ids=[i])
    assert out.tokens[i] == alone.tokens[0]
    assert out.stats.calls[:, i].tolist() == alone.stats.calls[:, 0].tolist()
    assert out.stats.emitted[i] == alone.stats.emitted[0]
    assert out.stats.source[i].tolist() == alone.stats.source[0].tolist()
    np.testing.assert_allclose(out.logprobs[i], alone.logprobs[0], atol=1e-6)


@pytest.mark.full
def test_speculative_verification_of_a_row_is_the_same_in_any_company_at_temperature_0():
  run = functools.partial(decode, methods.sv(profile(6), 4), TRIO, max_new_tokens=13, sampler=Sampler(0.0))
  together = run(PROMPTS)
  assert [run([p], max_prompt_tokens=8).tokens[0] for p in PROMPTS] == together.tokens
  scored, drafted = together.stats.positions[2].sum(), together.stats.positions[2].sum() + together.stats.drafted.sum()
  assert scored < drafted  # something was worth leaving out


@pytest.mark.full
@pytest.mark.parametrize('name', long_but(['chow', 'opt', 'token_v3', 'lossy'], ['opt']))
def test_a_cascade_writes_the_same_text_whatever_the_block(name):
  run = functools.partial(decode, models=PAIR, prompts=PROMPTS, max_new_tokens=15)
  texts = [run(methods.speculative(bound(name), block)).tokens for block in (1, 3, 6)]
  assert texts[0] == texts[1] == texts[2]


def test_encoder_decoder_rows_read_their_own_source():
  large = toy.model(31, 5, eos_ids=(4,), encoder=True)
  small = toy.model(32, 5, near=large, scale=0.5, eos_ids=(4,), encoder=True)
  prompts = [[3], [1, 2, 4, 4, 0], [2, 2, 2]]
  out = decode(methods.speculative(opt, 3), [small, large], prompts, max_new_tokens=12, sampler=Sampler(0.0))
  for prompt, tokens in zip(prompts, out.tokens):
    text = [0]
    for token in tokens:
      logits = [reference.table_logits(m, text, source=prompt) for m in (small, large)]
      assert reference.target('opt', *logits, alpha('opt'), reference.Sampler(0.0)).argmax() == token
      text.append(token)


# ---- statistics ----


def test_a_model_that_agrees_with_itself_is_never_rejected():
  twin = toy.model(21, 7, scale=1.2)
  full = decode(methods.speculative(block=4), [twin, twin], [[1, 2]], max_new_tokens=20)
  assert full.stats.accepted.tolist() == full.stats.tested.tolist()
  assert full.stats.accepted_lengths[0, 4] == 4 and full.stats.emitted[0] == 20
  assert full.stats.calls[1, 0] == 4 and full.stats.positions[1, 0] == 20
  # γ calls a round: the token that the drafter did not see rides along with the next round's first.
  assert full.stats.calls[0, 0] == 16 and full.stats.positions[0, 0] == 4 + 3 * 5
  assert full.stats.computed[:, 0].tolist() == [4 * (2 + 3), 4 * 5]
  assert full.stats.source[0].tolist() == [0, 0, 0, 0, BONUS] * 4


def test_a_draft_that_a_policy_ends_takes_no_further_step():
  policy = stopping.Confidence(1.0)  # one token a draft: no step after the window that catches up
  s = decode(methods.speculative(block=4, policy=policy), PAIR, PROMPTS, max_new_tokens=16).stats
  assert (s.computed[0] == 2 * s.rounds.max()).all()


def deferrals(out, models):
  """Return how many tokens of each text a cascade by `diff` leaves to a model after the first, by definition."""
  counts = []
  for prompt, tokens in zip(PROMPTS, out.tokens):
    logits = [[reference.table_logits(m, prompt + tokens[:i]) for m in models] for i in range(len(tokens))]
    counts.append(sum(reference.deferral('diff', lq, lp, alpha('diff'), reference.Sampler()) for lq, lp, *_ in logits))
  return counts


DEFERRING = {
  'oracle': methods.oracle(diff),
  'ensemble_parallel': methods.ensemble_parallel(diff),
  'speculative': methods.speculative(diff, 3),
  'naive_cos': methods.naive_cos(diff, 3),
  'cos': methods.cos(diff, (3, 1)),
  'ensemble_sd': methods.ensemble_sd(diff, 3),
  'ensemble of 3': methods.ensemble(diff, 3),
  'naive_cos of 3': methods.naive_cos(diff, 3, 3),
  'cos of 3': methods.cos(diff, (2, 1, 1)),
}


@pytest.mark.parametrize('name', long_but(DEFERRING, ['speculative', 'ensemble of 3']))
def test_deferrals_are_counted_where_the_rule_defers(name):
  method = DEFERRING[name]
  models = TRIO if method.models == 3 else PAIR
  out = decode(method, models, PROMPTS, max_new_tokens=16)
  assert out.stats.deferred.tolist() == deferrals(out, models) and out.stats.deferred.sum() > 0


def test_a_token_cascade_counts_the_tokens_that_the_verifier_wrote():
  out = decode(METHODS['token_cascade'][0], PAIR, PROMPTS, max_new_tokens=16, sampler=Sampler(0.0))
  written = [sum(source < 0 for source in of_text) for of_text in out.stats.source]
  assert out.stats.deferred.tolist() == written and sum(written) > 0


@pytest.mark.parametrize('method', [methods.autoregressive(1), METHODS['speculative lossy'][0]])
def test_deferrals_are_unknown_where_nothing_decides_them(method):
  assert np.isnan(decode(method, PAIR, PROMPTS, max_new_tokens=16, sampler=Sampler(0.0)).stats.deferred).all()


@pytest.mark.full
def test_what_is_recorded_of_tokens_is_of_the_round_that_tested_them():
  """Where models take turns, pending tokens move to the front of the window as soon as those before are committed."""
  out = decode(methods.cos(rules.speculative, (3, 1)), PAIR, PROMPTS, max_new_tokens=16, trace=True)
  assert {int(x) for of_text in out.stats.source for x in of_text} == {0, 1, RESIDUAL}
  for prompt, tokens, noted in zip(PROMPTS, out.tokens, out.logprobs):
    for m, model in enumerate(PAIR):
      logits = [reference.table_logits(model, prompt + tokens[:i]) for i in range(len(tokens))]
      expected = np.array([np.log(reference.softmax(x)[token]) for x, token in zip(logits, tokens, strict=True)])
      known = np.isfinite(noted[m])
      assert known.mean() > 0.8
      np.testing.assert_allclose(noted[m][known], expected[known], rtol=1e-4)


def looked_up(model, prompt, tokens, positions, length=None):
  """Return the logits of prompt lookup for a model after tokens behind a prompt, which may be padded."""
  network = ngram.drafter(model).network
  cache = network.prefill({}, Prompt(jnp.array([prompt]), jnp.array([length or len(prompt)])), 16)
  return network.extend({}, cache, jnp.array([tokens]), jnp.array([positions]))[0][0]


def test_prompt_lookup_drafts_what_followed_before():
  prompt = [1, 2, 3, 5, 1, 2]
  assert looked_up(LARGE, prompt, [2, 3], [5, 6]).argmax(-1).tolist() == [3, 5]
  assert (looked_up(LARGE, prompt, [6], [5]) == 0).all()  # never seen: uniform


def test_a_proposal_of_prompt_lookup_that_is_forbidden_is_no_fault():
  method = methods.speculative(functools.partial(rules.opt, alpha=0.1), 3)
  prompt = [1, 2, 5, 3, 1, 2]  # the proposal is 5
  large = toy.model(0, 6, eos_ids=(5,))
  requests = [speccascade.Request(prompt, min_new_tokens=4), speccascade.Request(prompt, logit_bias={5: -np.inf})]
  out = decode(method, [ngram.drafter(large), large], requests, max_new_tokens=6)
  assert 'fault' not in out.finish_reasons and all(5 not in tokens[:4] for tokens in out.tokens)
  logits = looked_up(large, prompt, [2], [5])
  for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
    x = logits[0].astype(dtype)
    assert Sampler()(x).tolist() == [0, 0, 0, 0, 0, 1]
    np.testing.assert_allclose(Sampler()(x.at[5].set(-jnp.inf)), [0.2] * 5 + [0], rtol=1e-6)


@pytest.mark.parametrize('width', [8, 12])
def test_prompt_lookup_proposes_nothing_after_the_end_of_a_source(width):
  source = [3, 5, 4, 6, 2, 1, 5, 4] + [0] * (width - 8)
  logits = looked_up(toy.model(0, 7, encoder=True), source, [0, 5, 4], [0, 1, 2], 8)
  assert logits[1:].argmax(-1).tolist() == [4, 6]


# ---- one compilation ----


SWEEPS = {
  'alpha': lambda x: methods.speculative(functools.partial(rules.opt, alpha=x), 3),
  'lambda': lambda x: methods.cos(functools.partial(rules.weighted, weights=(x, 1 - x)), (2, 1)),
  'mu': lambda x: methods.naive_cos(functools.partial(rules.contrastive, mu=x), 2),
  'thresholds': lambda x: methods.bild(x, 1 + x, 3),
  'token cascade': lambda x: methods.token_cascade(functools.partial(rules.chow, alpha=x), 3),
  'confidence': lambda x: methods.speculative(block=3, policy=stopping.Confidence(x)),
  'moving average': lambda x: methods.speculative(block=3, policy=stopping.MovingAverage(x, 1 - x)),
  'fallback': lambda x: methods.speculative(block=3, policy=stopping.Fallback(x)),
  'roll-back': lambda x: methods.speculative(block=3, accept=acceptance.Threshold(x)),
}
NUMBERS = (0.25, 0, 1, np.int64(1), np.float64(0.5), np.float32(0.3), np.array(0.75), jnp.asarray(0.5), jnp.float32(1))


@pytest.mark.parametrize('name', SWEEPS)
def test_a_number_of_any_type_is_an_argument_of_the_program(name):
  given = [jax.tree.flatten(lower(SWEEPS[name](x))) for x in NUMBERS]
  assert len({(static, *jax.eval_shape(lambda *x: x, *numbers)) for numbers, static in given}) == 1


def test_a_sweep_compiles_once():
  def sweep():
    for i, x in enumerate(NUMBERS):
      decode(SWEEPS['alpha'](x), PAIR, PROMPTS, max_new_tokens=5 + i % 3, sampler=Sampler(0.5 + x), seed=i)

  assert traces(sweep) == [1]


@pytest.mark.parametrize(
  'calls, settings',
  [
    ([[[1, 2]], [[3]], [[1] * 8]], {}),  # lengths of one bucket
    ([[[1]] * count for count in (5, 6)], {}),  # batches of one
    ([[[1]] * count for count in (5, 7, 12)], dict(batch_size=4)),  # a line of any length
  ],
)
def test_what_differs_in_size_alone_compiles_once(calls, settings):
  def run():
    for prompts in calls:
      out = decode(methods.autoregressive(), [LARGE], prompts, max_new_tokens=4, **settings)
      assert len(out.tokens) == len(prompts) == out.stats.emitted.size

  assert traces(run) == [1]


# ---- errors ----


@pytest.mark.parametrize('value, temperature', [(float('nan'), 1.0), (float('inf'), 0.0)])
def test_logits_that_are_not_finite_are_reported_with_the_example(value, temperature):
  # Token 3 after token 3 has no distribution; only the second example gets there.
  table = np.asarray(LARGE.params['table']).copy()
  table[3 * 7 + 3] = value
  sick = LARGE.replace(params={**LARGE.params, 'table': jnp.asarray(table)})
  run = functools.partial(
    decode, methods.speculative(block=3), [SMALL, sick], max_new_tokens=1, sampler=Sampler(temperature)
  )
  what = having('example 11', 'model 1', 'toy21', 'position 2')
  with pytest.raises(ValueError, match=what):
    run([[0, 3, 3]], example_ids=[11])
  with pytest.warns(UserWarning, match=what):
    out = run([[1, 2], [0, 3, 3]], example_ids=[10, 11])
  assert out.finish_reasons == ('length', 'fault') and out.tokens[0] == run([[1, 2]], example_ids=[10]).tokens[0]


@struct.dataclass
class Nothing(Phase):
  """A phase that says that it commits tokens, and commits none."""

  tests = (0,)

  def __call__(self, context, state):
    return state


def test_rounds_that_commit_nothing_end_in_an_error_also_where_no_host_looks():
  method = lambda *slots: methods.Method((Score(0), Nothing()), slots, about=methods.About('mine'))
  with pytest.raises(ValueError, match=having('mine', 'example 0', 'no token', 'position 2')):
    decode(method(0, 1), PAIR, PROMPTS[:2], max_new_tokens=4)
  with pytest.raises(ValueError, match=having('mine', 'no token')):
    enumeration.emitted_distribution(method(0), [LARGE], [1, 0], 2, Sampler())


@pytest.mark.full
def test_a_user_rule_that_leaves_a_choice_at_temperature_0_is_drawn_from():
  def half(q, p):
    return (q.probs + p.probs) / 2

  pair, rows = [toy.model(41, 5), toy.model(42, 5)], 4096
  out = decode(methods.speculative(half, 2), pair, [[1]] * rows, max_new_tokens=3, sampler=Sampler(0.0), seed=3)
  found, counts = np.unique(out.tokens, axis=0, return_counts=True)
  step = reference.lockstep(pair, lambda l, s: (s(l[0]) + s(l[1])) / 2, temperature=0)
  expected = reference.joint_distribution(step, [1], 3)
  assert len(expected) > 2 and {tuple(map(int, t)) for t in found} == {t for t, p in expected.items() if p > 0}
  wanted = np.array([expected[tuple(map(int, t))] for t in found]) * rows
  assert scipy.stats.chisquare(counts, wanted).pvalue > 1e-6  # the false-alarm rate; the seed is fixed


def test_seeds_are_different_streams():
  outs = {
    tuple(decode(methods.autoregressive(0), PAIR, [[1]], max_new_tokens=16, seed=s).tokens[0]) for s in (0, 1, 2**31)
  }
  assert len(outs) == 3


@pytest.mark.parametrize('zero', [0, 0.0, np.float32(0), np.array(0.0), jnp.float32(0)])
def test_temperature_0_is_greedy_in_every_type(zero):
  run = functools.partial(decode, methods.autoregressive(1), PAIR, [[1, 2]], max_new_tokens=6)
  assert run(sampler=Sampler(zero)).tokens == [follow(own(PAIR, temperature=0), [1, 2], 6)]


@pytest.mark.full
def test_a_draft_does_not_feed_its_last_token():
  twin = toy.model(21, 7, scale=1.2)
  s = decode(methods.speculative(opt, 5), [twin, twin], [[1, 2]], max_new_tokens=4).stats
  assert s.calls[0, 0] == s.drafted[0, 0] == 4
  s = decode(methods.speculative(block=9, policy=stopping.Heuristic(3)), [twin, twin], [[1, 2]], max_new_tokens=4).stats
  assert s.calls[0, 0] == s.drafted[0, 0] == 3


def test_draft_lengths_follow_what_was_tested():
  policy = stopping.Heuristic(3)
  carry, live = jnp.array([3, 9, 4]), jnp.array([True, True, False])
  tested, accepted = jnp.array([3, 2, 1]), jnp.array([3, 1, 1])
  assert policy.update(carry, tested, accepted, live, 4).tolist() == [4, 4, 4]
  average = stopping.MovingAverage(np.float32(0.5), np.float32(0.0))
  rate = average.update(jnp.ones(1), jnp.array([5]), jnp.array([4]), jnp.array([True]), 5)
  assert rate.tolist() == pytest.approx([0.8])
