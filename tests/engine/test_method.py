"""What is derived of a method's phases holds for phases, limits and policies of one's own."""

import functools

from cases import profile
from flax import struct
import jax.numpy as jnp
from matching import having
import numpy as np
import pytest
import reference

import speccascade
from speccascade import acceptance, decode, methods, rules, Sampler, stopping
from speccascade.decode.scoring import score as score_texts
from speccascade.engine.limits import First, Limit
from speccascade.engine.lowering import lower, Phase
from speccascade.engine.method import Method
from speccascade.engine.phases import Alternate, Propose, Score, Verify
from speccascade.models import toy
from speccascade.planning import timing
from speccascade.sv import predictors, verification
from speccascade.types import Told

LARGE = toy.model(0, 7, scale=1.5)
MIDDLE, SMALL = (toy.model(i, 7, near=LARGE) for i in (1, 2))
run = functools.partial(decode, prompts=[[1, 2]], max_new_tokens=12, sampler=Sampler(0.0))


def own(model):
  return Verify(rules.bind(rules.own), (model,))


@struct.dataclass
class AtMostOne(Limit):
  """A limit of one's own."""

  def __call__(self, context, state):
    return jnp.minimum(state.window.size, 1)


@struct.dataclass
class NotAfter3(Limit):
  """A limit that feeds nothing, not even the last committed token, in rows that begin with 3."""

  def __call__(self, context, state):
    return jnp.where(state.tokens[:, 0] == 3, -1, state.window.size)


@struct.dataclass
class Two(stopping.Policy):
  """Drafts of two tokens."""

  def length(self, carry, n):
    return min(2, n)


@struct.dataclass
class Guess(Phase):
  """A phase of one's own that proposes the last token over and over."""

  draws: int = struct.field(pytree_node=False)

  def __call__(self, context, state):
    rows = jnp.arange(state.length.shape[0])
    last = state.tokens[rows, state.length - 1]
    tokens = state.tokens
    for i in range(self.draws):
      tokens = tokens.at[rows, state.length + i].set(jnp.where(state.active, last, tokens[rows, state.length + i]))
    size = jnp.where(state.active, self.draws, 0)
    source = jnp.zeros_like(state.window.source)
    return state.replace(tokens=tokens, window=state.window.replace(size=size, source=source))


def test_a_limit_of_ones_own_may_leave_tokens_unread():
  phases = Propose(0, 3), Score(1, AtMostOne()), Score(2), own(2)
  method = Method(phases, (0, 1, 2))
  lowered = lower(method)
  assert not lowered.phases[1].aligned and lowered.phases[2].aligned
  out = run(method, [LARGE, MIDDLE, LARGE], max_new_tokens=8, trace=True)
  noted, text = out.logprobs[0][1], [1, 2, *out.tokens[0]]
  logits = [reference.table_logits(MIDDLE, text[:i]) for i in range(2, 10)]
  expected = np.array([np.log(reference.softmax(x)[token]) for x, token in zip(logits, text[2:], strict=True)])
  known = np.isfinite(noted)
  assert known.any() and not known.all()
  np.testing.assert_allclose(noted[known], expected[known], rtol=1e-5)


def test_a_model_that_is_asked_twice_in_a_round_keeps_what_it_knows():
  mean = functools.partial(rules.weighted, weights=(0.4, 0.6))
  verify = Verify(rules.bind_combiner(mean), (0, 1), keep=True)
  method = Method((Propose(0, 1), Score(1, First(0)), Score(1), verify), (0, 1))
  assert not lower(method).phases[1].aligned  # what it knows of a pending token is not overwritten
  prompts = [[i % 7, i // 7] for i in range(9)]
  both = [SMALL, LARGE]
  assert run(method, both, prompts=prompts).tokens == run(methods.ensemble(mean), both, prompts=prompts).tokens


def test_tokens_that_a_phase_of_ones_own_adds_are_verified_together():
  method = Method((Guess(4), Score(1), own(1)), (0, 1))
  assert lower(method).phases[1].widths == (5,) and method.window == 4
  alone = methods.autoregressive(1)
  assert run(method, [SMALL, LARGE]).tokens == run(alone, [SMALL, LARGE]).tokens


def test_a_drafter_catches_up_after_drafts_that_a_policy_cut():
  method = Method((Propose(0, 4), Score(1, First(3)), own(1)), (0, 1), policy=Two())
  assert lower(method).phases[0].catch_up == 2
  out = run(method, [LARGE, LARGE], max_new_tokens=15)
  assert out.stats.rounds[0] == 5


def test_what_a_phase_is_given_does_not_count_but_what_its_round_needs():
  phases = Propose(0, 3, catch_up=1), Score(1, widths=(3,), aligned=True), own(1)
  found = lower(Method(phases, (0, 1))).phases
  assert found[0].catch_up == 2 and found[1].widths == (4,)


@struct.dataclass
class Never(stopping.Policy):
  """Drafts of no token."""

  def length(self, carry, n):
    return 0


def test_a_round_whose_draft_has_no_token_commits_one():
  rule = functools.partial(rules.opt, alpha=0.1)
  asked = functools.partial(run, models=[SMALL, LARGE], sampler=Sampler(1.0))
  out = asked(methods.speculative(rule, block=2, policy=Never()))
  assert out.tokens == asked(methods.ensemble(rule)).tokens
  assert out.stats.rounds[0] == 12


@pytest.mark.full
def test_branches_inside_branches_are_phases_of_the_method():
  weighted = functools.partial(rules.weighted, weights=(0.2, 0.3, 0.5))
  method = methods.cos(weighted, (3, 2, 1))
  [turns] = method.phases
  inner = tuple(turns.branches[i] for i in (1, 1, 2))
  nested = Method((Alternate((turns.branches[0], *[(Alternate(inner),)] * 2)),), (0, 1, 2))
  models = [SMALL, MIDDLE, LARGE]
  assert nested.window == method.window
  assert run(nested, models).tokens == run(methods.ensemble(weighted, 3), models).tokens
  assert sum(isinstance(p, Verify) for p in nested.all_phases) == 1 + 2 * 3
  verifies = [p for p in nested.accepting(acceptance.block).all_phases if isinstance(p, Verify)]
  assert all(p.accept.func is acceptance.block for p in verifies)


def test_a_stalled_row_ends_while_others_go_on():
  method = Method((Propose(0, 2), Score(1, NotAfter3()), own(1)), (0, 1))
  with pytest.warns(UserWarning, match=having('no token', 'position 2')):
    out = decode(method, [LARGE, LARGE], [[1, 2], [3, 2]], max_new_tokens=9, sampler=Sampler(0.0))
  assert out.finish_reasons == ('length', 'fault') and [len(x) for x in out.tokens] == [9, 0]


@pytest.mark.full
def test_each_choice_by_batch_is_checked():
  report = speccascade.check(methods.by_batch({1: methods.speculative(block=1), 8: methods.autoregressive(1)}))
  assert report.ok and {'batch 1', 'batch 8'} == {f.question.split(':')[0] for f in report.findings}


def test_what_is_timed_keeps_no_logits_that_decoding_does_not():
  method = methods.speculative(block=3)
  assert lower(method.accepting(timing.forced(0.5))).logits_read == lower(method).logits_read == {1}


def test_a_methods_numbers_are_one_program_for_functions_made_anew():
  """A method whose function is made at each call compiles again and is found again."""
  from speccascade.evaluate import programs
  from speccascade.evaluate.curves import Curve

  def mine(block):
    def pooled(models):
      return models[1].probs

    return methods.naive_cos(pooled, block)

  [point] = Curve('mine', mine, settings={'block': 2}).points()
  called = []
  runs = [(1.0, point.build())] * 2
  programs.compiled(lambda method, temperature: called.append(temperature), runs, 1, 'compiling')
  assert called == [1.0]


@pytest.mark.long
def test_methods_that_differ_by_their_rule_alone_share_a_program_and_decode_as_without():
  """Rules with a decision, a set of tokens or a distribution; what is counted of deferrals is that of each."""
  from speccascade.evaluate import programs

  made = [
    methods.speculative(functools.partial(rules.opt, alpha=0.1), 2),
    methods.speculative(functools.partial(rules.token_v3, alpha=0.3), 2),
    methods.speculative(functools.partial(rules.opt, alpha=0.4), 2),
    methods.speculative(functools.partial(rules.lossy, alpha=0.3), 2),
    methods.speculative(functools.partial(rules.opt, alpha=0.1), 3),  # another program
    methods.speculative(block=2),  # which reads the verifier alone
    methods.naive_cos(functools.partial(rules.weighted, weights=(0.5, 0.5)), 2),
  ]
  shared = programs.sharing(made)
  assert shared[4:] == made[4:]
  assert len({programs._program(lower(method)) for method in shared[:4]}) == 1
  samplers = {}, dict(temperature=0.0), dict(temperature=0.7, top_p=0.8)
  asked = [speccascade.Request(prompt, **numbers) for numbers in samplers for prompt in ([1, 2], [3])]
  for one, other in zip(made[:4], shared, strict=False):
    plain, ours = (decode(m, [SMALL, LARGE], asked, max_new_tokens=12) for m in (one, other))
    assert ours.tokens == plain.tokens
    for name, counted in vars(plain.stats).items():
      np.testing.assert_array_equal(counted, getattr(ours.stats, name), name)


def test_a_method_answers_whether_its_tokens_follow_a_distribution():
  exact = (
    methods.speculative(),
    methods.speculative(functools.partial(rules.opt, alpha=0.1)),
    methods.speculative(policy=stopping.Deferral(rules.bind(rules.chow, alpha=0.3))),
    methods.speculative(accept=acceptance.block),
    methods.sv_exact(profile(2), 2),
  )
  not_so = (
    methods.bild(),
    methods.sequence_cascade(),
    methods.token_cascade(functools.partial(rules.chow, alpha=0.3)),
    methods.speculative(accept=acceptance.everything),
    methods.speculative(accept=acceptance.Threshold(9.0)),
    methods.sv(profile(2), 2),
    methods.by_batch({1: methods.sv(profile(2), 2), 8: methods.autoregressive(2)}),
  )
  assert all(method.keeps_distribution for method in exact)
  assert not any(method.keeps_distribution for method in not_so)


@acceptance.acceptor(reads=(), told=Told.NOTHING)
def says_nothing(trial):
  return acceptance.token_wise(trial)


@struct.dataclass
class Peeks(stopping.Policy):
  """Learn from what it likes."""

  def learn(self, state, tested, accepted, live, most):
    return state.policy


@struct.dataclass
class Drops(Phase):
  """Drop what it likes."""

  def __call__(self, context, state):
    return state


def test_what_does_not_say_that_it_keeps_the_distribution_is_not_taken_to_do_so():
  plain = methods.speculative()
  draft, score, verify = plain.phases
  unknown = (
    methods.speculative(accept=says_nothing),
    methods.speculative(accept=lambda trial: acceptance.everything(trial)),
    methods.speculative(policy=Peeks()),
    plain.replace(phases=(draft, Drops(), score, verify)),
    plain.replace(phases=(draft, Score(1, Limit()), verify)),
    methods.by_batch({1: methods.speculative(policy=Peeks(), pair=(0, 1)), 8: methods.autoregressive(1)}),
  )
  assert [method.keeps_distribution for method in unknown] == [None] * len(unknown)
  models = [toy.model(1), toy.model(2)]
  with pytest.raises(ValueError, match=having('nothing says', 'exact=True')):
    score_texts(unknown[0], models, [[1]], [[2]])
  # Block verification keys numbers by round, and a choice that looks ahead needs them by position.
  ahead = methods.scheduled(predictors.drawn_q, 3, budget=verification.Goodput(), plan=profile(2))
  assert ahead.keeps_distribution and ahead.accepting(acceptance.block).keeps_distribution is False
  targets = {1: methods.speculative(functools.partial(rules.opt, alpha=0.1)), 8: methods.speculative()}
  assert methods.by_batch(targets).keeps_distribution is False
  assert methods.by_batch({1: methods.speculative(block=3), 8: methods.autoregressive(1)}).keeps_distribution


def test_drafts_that_a_rule_ends_are_verified_towards_the_verifier():
  method = methods.speculative(block=2, policy=stopping.Deferral(rules.bind(rules.chow, alpha=0.3)))
  assert method.target[0] == (1,) and speccascade.check(method).ok
