"""Phases in orders of one's own: the distribution of what they emit, by enumeration."""

import functools

from emitted import emitted_distribution
from matching import having
import pytest
from tiers import long_but

from speccascade import acceptance, decode, methods, rules, Sampler, stopping
from speccascade.check.enumeration import distance, lockstep_distribution
from speccascade.engine.job import DecodeJob
from speccascade.engine.limits import First
from speccascade.engine.lowering import lower
from speccascade.engine.phases import Alternate, Propose, Score, Verify
from speccascade.models import toy
from speccascade.sv import predictors
from speccascade.sv.verification import Stale, TopK
from speccascade.types import Told

LARGE = toy.model(1, 3, scale=1.2, eos_ids=(2,))
MODELS = [toy.model(2, 3, scale=0.8, near=LARGE, eos_ids=(2,)), LARGE]
OPT = rules.bind_rule(functools.partial(rules.opt, alpha=0.1))
OWN = rules.bind(rules.own)


def of_phases(*phases):
  return methods.speculative(OPT, 1).replace(phases=phases)


ROUNDS = {
  'the drafter is read again': (Propose(0, 2), Score(0), Score(1), Verify(OPT, (0, 1))),
  'a model is read twice': (Propose(0, 2), Score(1), Score(1), Verify(OWN, (1,))),
  'a model is read in two parts': (Propose(0, 3), Score(1, First(1)), Score(1), Verify(OWN, (1,))),
  'two tests': (Propose(0, 3), Score(1, First(1)), Verify(OWN, (1,), keep=True), Score(1), Verify(OWN, (1,))),
  'read before the draft': (Score(0), Propose(0, 2), Score(1), Verify(OWN, (1,))),
  'the verifier before the draft': (Score(1), Propose(0, 2), Score(1), Verify(OWN, (1,))),
}


@pytest.mark.parametrize('name', long_but(ROUNDS, ['the drafter is read again', 'a model is read twice', 'two tests']))
def test_phases_in_another_order_emit_the_target(name):
  *_, test = phases = ROUNDS[name]
  found = emitted_distribution(of_phases(*phases), MODELS, [1, 0], 3, Sampler())
  expected = lockstep_distribution(test.combiner, [MODELS[m] for m in test.models], [1, 0], 3, Sampler())
  assert max(distance(found, expected)) < 1e-5


@acceptance.acceptor(reads=(), told=Told.NOTHING, exact=False)
def too_many(trial):
  """Accept more tokens than are tested, where a test accepts all."""
  verdict, noise = acceptance.token_wise(trial)
  return verdict._replace(accepted=verdict.accepted + 5 * (verdict.accepted == trial.tested).astype('int32')), noise


def test_no_more_tokens_are_accepted_than_were_tested():
  method = methods.speculative(OPT, 2)
  found, expected = (
    emitted_distribution(m, MODELS, [1, 0], 3, Sampler()) for m in (method.accepting(too_many), method)
  )
  assert max(distance(found, expected)) < 1e-6


def in_turns(**of_drafter):
  """Models that take turns, and pending tokens that stay."""
  test = Verify(OWN, (1,), keep=True)
  return Alternate(((Score(0), test, Propose(0, 1, **of_drafter)), (Score(1), test, Propose(1, 1))))


REFUSED = {
  'tokens stay pending before a draft': ((Propose(0, 2), Score(1, First(0)), Verify(OWN, (1,), keep=True)), 'score(0)'),
  'a head that takes turns': ((in_turns(provisional=True),), 'propose(0, 1)'),
}


@pytest.mark.parametrize('name', REFUSED)
def test_a_phase_that_cannot_do_its_work_is_refused(name):
  phases, names = REFUSED[name]
  with pytest.raises(ValueError, match=having('drafts behind tokens', names)):
    lower(of_phases(*phases))


def test_a_round_that_leaves_ever_more_tokens_pending_is_refused():
  weighted = rules.bind_combiner(functools.partial(rules.weighted, weights=(0.5, 0.2, 0.3)))
  phases = Propose(0, 1), Score(0), Score(1), Verify(weighted, (0, 1, 2), keep=True)
  method = methods.naive_cos(weighted, 1, models=3).replace(phases=phases)
  with pytest.raises(ValueError, match=having('verify', 'drafted tokens pending')):
    lower(method)
  with pytest.raises(ValueError, match=having('verify', 'slot 2')):
    DecodeJob.of_models(method, [MODELS[0], *MODELS])


def test_a_policy_has_the_logits_that_it_learns_from():
  scheduled = methods.scheduled(predictors.margin, 2, budget=TopK(1), fit=predictors.Logistic(), ending='bonus')
  plain = methods.speculative(block=2)
  run = lambda method: decode(method, MODELS, [[0], [1]], max_new_tokens=5, seed=1).tokens
  assert run(plain.replace(policy=scheduled.policy)) == run(plain)  # of which no phase reads the drafter's


def test_a_schedule_that_remembers_needs_its_policy():
  method = methods.scheduled(predictors.margin, 3, budget=Stale(TopK(2)))
  with pytest.raises(ValueError, match=having('Scheduling', 'policy')):
    DecodeJob.of_models(method.replace(policy=stopping.Policy()), MODELS)
