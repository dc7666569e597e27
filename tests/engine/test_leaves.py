"""Leaves change how many rounds there are, and nothing of what is emitted; known mistakes with them are caught."""

import functools

from compositions import world
from found_out import Case, CLOSE, find_law, TELLING
import jax
import jax.numpy as jnp
from law_of_a_row import Size
import numpy as np
import pytest

from speccascade import decode, methods, Request, rules, Sampler, theory
from speccascade.drafters import ngram
from speccascade.engine import leaves as leafy
from speccascade.engine.limits import First
from speccascade.engine.method import Method
from speccascade.engine.phases import Propose, Score, Verify
from speccascade.models import toy
from speccascade.sv import predictors
from speccascade.types import Model, Prompt

LARGE = toy.model(1, 5, eos_ids=(4,))
MODELS = [toy.model(2, 5, near=LARGE, scale=0.8, eos_ids=(4,)), LARGE]
OPT = functools.partial(rules.opt, alpha=0.1)
HALVES = functools.partial(rules.weighted, weights=(0.5, 0.5))
MADE = {
  'speculative': lambda **leaves: methods.speculative(block=3, **leaves),
  'a rule that reads the drafter': lambda **leaves: methods.speculative(OPT, block=3, **leaves),
  'an ensemble': lambda **leaves: methods.ensemble_sd(HALVES, block=3, **leaves),
  'a schedule': lambda **leaves: methods.scheduled(predictors.margin, block=3, **leaves),
}
RARE = {4: -2.5}  # the end of a text
REQUESTS = [
  Request(prompt, logit_bias=RARE, logprobs=2, **how)
  for prompt, how in [
    ([1, 2], dict(max_new_tokens=24, n=6)),
    ([3], dict(max_new_tokens=19, repetition_penalty=1.4, frequency_penalty=0.3)),
    ([0, 1, 2], dict(max_new_tokens=21, temperature=0.7, min_new_tokens=4)),
    ([2, 2], dict(max_new_tokens=12, temperature=0.0, stop_tokens=[0])),
    ([1], dict(max_new_tokens=20, top_p=0.8)),
  ]
]


def shifted(logits, tokens, count):
  """Make a token less likely that depends on the place in the text and on the last token."""
  there = jnp.arange(logits.shape[0]) == (tokens[count - 1] + count) % logits.shape[0]
  return logits - 0.7 * there.astype(logits.dtype)


@pytest.mark.parametrize('trace', [True, 'target'])
@pytest.mark.parametrize('name', MADE)
def test_texts_and_log_probabilities_are_those_without(name, trace):
  how = dict(sampler=Sampler(coupling='gumbel'), seed=3, batch_size=2, processor=shifted, trace=trace)
  plain, leafy = (decode(MADE[name](leaves=leaves), MODELS, REQUESTS, **how) for leaves in ((), (3, 2)))
  assert [list(x) for x in leafy.tokens] == [list(x) for x in plain.tokens]
  assert plain.stats.hits.sum() == 0 < leafy.stats.hits.sum() and leafy.stats.rounds.sum() < plain.stats.rounds.sum()
  assert leafy.stats.emitted.sum() == plain.stats.emitted.sum()
  of = lambda found: [x[-1] for x in found.logprobs] if trace is True else found.target_logprobs
  for some, others in zip(of(leafy), of(plain), strict=True):
    np.testing.assert_allclose(some, others, atol=1e-5)
  for some, others in zip(leafy.top_logprobs, plain.top_logprobs, strict=True):
    np.testing.assert_allclose([[*x.values()] for x in some], [[*x.values()] for x in others], atol=1e-5)


def test_other_choices_are_not_the_drafted_token_and_the_first_are_the_likeliest(monkeypatch):
  seen = []
  others = leafy.others

  def watched(order, token, count):
    found = others(order, token, count)
    jax.debug.callback(lambda *x: seen.append([np.asarray(i) for i in x]), order, token, found)
    return found

  monkeypatch.setattr(leafy, 'others', watched)
  jax.clear_caches()
  decode(methods.speculative(block=2, leaves=(3, 2)), MODELS, [[1], [2]] * 4, max_new_tokens=8, seed=1)
  jax.effects_barrier()
  jax.clear_caches()
  for order, token, found in seen:
    for row, drawn, choices in zip(order, token, found, strict=True):
      ranked = [int(v) for v in np.argsort(-row, kind='stable') if v != drawn]
      assert list(choices) == ranked[: len(choices)]
  assert len(seen) > 4


# ---- planted mistakes ----


def chain_row(self, test, context, state, c, *, right=leafy.Leaves.go_on):
  """Read what follows a leaf from the row of the pending token in its place."""
  after = jnp.array(self.depths) + 1
  return right(self.replace(logits={m: state.window.logits[m][:, after] for m in self.logits}), test, context, state, c)


def same_number(self, test, context, state, c, *, right=leafy.Leaves.go_on):
  """Draw the token after a leaf by the number of the leaf."""
  draw = type(state.noise).draw
  with pytest.MonkeyPatch.context() as patch:
    before = lambda self, weights, position, *rest: draw(self, weights, position - 1, *rest)
    patch.setattr(type(state.noise), 'draw', before)
    return right(self, test, context, state, c)


def written(self, params, cache, tokens, positions, packing=None, leaves=0, *, right=toy.Table.extend):
  """Keep leaves in the slots of the pending tokens in whose place they stand."""
  logits, cache = right(self, params, cache, tokens, positions, packing, leaves)
  slots = cache['slots']
  for i in range(tokens.shape[1] - leaves, tokens.shape[1]):
    slots = jax.vmap(jax.lax.dynamic_update_slice)(slots, tokens[:, i : i + 1], positions[:, i : i + 1])
  return logits, {**cache, 'slots': slots}


def one_deeper(self, m, length, *fed, right=leafy.Leaves.beside):
  """Score leaves one place behind their own."""
  return right(self, m, length + 1, *fed)


FAULTS = {
  'the row of the pending token': (leafy.Leaves, 'go_on', chain_row),
  'the number of the leaf': (leafy.Leaves, 'go_on', same_number),
  'a leaf that is kept': (toy.Table, 'extend', written),
  'another depth': (leafy.Leaves, 'beside', one_deeper),
}


def off(vocab, leaves):
  """Return how far the law of speculative decoding is from its target."""
  here = world(vocab)
  requests = (Request([1, 0], max_new_tokens=7), Request([0], max_new_tokens=7))
  method = methods.speculative(block=len(leaves), leaves=leaves)
  return find_law(Case(method, (here.small, here.large), requests), Size(3, 7)).off


@pytest.mark.full
@pytest.mark.parametrize('fault', [None, *FAULTS])
def test_a_known_mistake_shows(fault, monkeypatch):
  jax.clear_caches()
  if fault is not None:
    monkeypatch.setattr(*FAULTS[fault])
  found = max(off(2, (2, 1)), off(2, (2, 2)), off(3, (3,)))  # of two tokens a residual has one
  jax.clear_caches()
  assert found < CLOSE if fault is None else found > TELLING


# ---- their order ----


@pytest.mark.parametrize('coupling', ['gumbel', 'maximal'])
def test_leaves_of_prompt_lookup_are_what_followed_before(coupling):
  how = dict(sampler=Sampler(coupling=coupling), seed=3, max_new_tokens=40, batch_size=8)
  lookup = [ngram.drafter(LARGE), LARGE]
  prompts = [[1, 2, 3, 1, 2, 0, 1, 2, 1, 1, 3, 2]] * 8
  asked = [Request(p, logit_bias=RARE, example_id=i) for i, p in enumerate(prompts)]
  plain, leafy = (decode(methods.speculative(block=2, leaves=x), lookup, asked, **how) for x in ((), (3, 3)))
  assert leafy.stats.hits.sum() > 20 and leafy.stats.rounds.sum() < plain.stats.rounds.sum()
  if coupling == 'gumbel':
    assert [list(x) for x in leafy.tokens] == [list(x) for x in plain.tokens]


def test_prompt_lookup_orders_what_followed_by_its_match_and_age():
  model = ngram.drafter(toy.model(0, 6))
  text = jnp.array([[1, 2, 3, 0, 2, 4, 1, 2, 5, 1, 2]])
  cache = model.network.prefill(None, Prompt(text, jnp.array([11])), 16)
  logits = model.network.extend(model.params, cache, text[:, -1:], jnp.array([[10]]))[0][0, 0]
  assert jax.nn.softmax(logits).tolist() == [0, 0, 0, 0, 0, 1]
  assert jnp.argsort(-logits)[:3].tolist() == [5, 3, 4]  # the longest match, the latest of two


def test_greedy_leaves_stand_in_the_order_that_penalties_make():
  tables = np.array([[2.03, 1.71, 1.37, 0.19], [1.71, 2.11, 1.39, 0.53]], np.float32)  # the same after any text
  pair = [Model({'table': jnp.asarray(x[None])}, toy.Table(4, 0), name=n) for x, n in zip(tables, 'qp', strict=True)]
  ranked = lambda table, counts: np.argsort(-(table - 0.4337 * counts), kind='stable')
  counts, rejected, hits, text = np.zeros(4), 0, 0, []
  while len(text) < 40:  # γ = 1 with one leaf
    draft, leaf = ranked(tables[0], counts)[:2]
    takes = [ranked(tables[1], counts)[0]]
    rejected += takes[0] != draft
    hits += takes[0] == leaf != draft and len(text) < 39
    counts[takes[0]] += 1
    if takes[0] in (draft, leaf):
      takes.append(ranked(tables[1], counts)[0])
      counts[takes[1]] += 1
    text += map(int, takes)
  sampler = Sampler(temperature=0.0, frequency_penalty=0.4337)
  found = decode(methods.speculative(block=1, leaves=(2,)), pair, [[1]], max_new_tokens=40, sampler=sampler)
  assert found.tokens[0] == text[:40]
  assert (found.stats.tested - found.stats.accepted, found.stats.hits) == (rejected, hits)


def test_a_test_that_keeps_tokens_moves_no_leaf():
  phases = Propose(0, 1, leaves=(4,)), Score(1, First(0)), Verify(rules.bind(rules.own), (1,), keep=True)
  asked = [Request([i % 5, i // 5], logit_bias=RARE, example_id=i) for i in range(8)]
  how = dict(prompts=asked, sampler=Sampler(coupling='gumbel'), seed=2, max_new_tokens=20)
  found = decode(Method(phases, (0, 1)), MODELS, **how)
  assert found.tokens == decode(methods.autoregressive(), MODELS[1:], **how).tokens
  assert found.stats.hits.sum() > 10


# ---- what has no sense ----


def test_leaves_that_make_no_sense_are_refused():
  with pytest.raises(ValueError, match="leaves='many' is no number"):
    methods.speculative(leaves='many')
  with pytest.raises(ValueError, match=r'leaves=\(2, 2, 2\): there are 2 drafted tokens'):
    methods.speculative(block=2, leaves=(2, 2, 2))
  with pytest.raises(ValueError, match='leaves=-1 is not a whole number of at least 0'):
    methods.speculative(leaves=-1)
  assert str(methods.speculative(leaves=(1, 1))) == str(methods.speculative()) == str(methods.speculative(leaves=0))
  own = rules.bind(rules.own)
  unscored = Method((Propose(0, 2, leaves=(2,)), Verify(own, (0,))), (0, 1))
  with pytest.raises(ValueError, match='has leaves that no model of a test scores'):
    decode(unscored, MODELS, [[1]], max_new_tokens=3)
  twice = Method((Propose(0, 2, leaves=(2,)), Score(1), Verify(own, (1,)), Score(1), Verify(own, (1,))), (0, 1))
  with pytest.raises(ValueError, match='which are of rounds with one draft and one test'):
    decode(twice, MODELS, [[1]], max_new_tokens=3)
  for few in (1,), (2, 2, 2), (2, 1):
    with pytest.raises(ValueError, match='give choices at 2 places at most, the last of them 2 or more'):
      decode(Method((Propose(0, 2, leaves=few), Score(1), Verify(own, (1,))), (0, 1)), MODELS, [[1]], max_new_tokens=3)


@pytest.mark.full
@pytest.mark.parametrize('choices', [1, 2, 4])
def test_the_target_s_token_is_a_choice_as_often_as_theory_says(choices):
  tables = np.random.default_rng(2).normal(scale=1.2, size=(2, 1, 6)).astype(np.float32)  # the same after any text
  pair = [Model({'table': jnp.asarray(x)}, toy.Table(6, 0), name=n) for x, n in zip(tables, 'qp', strict=True)]
  method = methods.speculative(block=1, leaves=(choices,))
  found = decode(method, pair, [[1]] * 400, max_new_tokens=50, sampler=Sampler(coupling='gumbel'), batch_size=100).stats
  q, pi = np.exp(tables[:, 0]) / np.exp(tables[:, 0]).sum(-1, keepdims=True)
  chance = theory.acceptance_of_list(q, pi, choices)
  tested = found.tested.sum()
  among = (found.accepted.sum() + found.hits.sum()) / tested
  # At its last position a text has a leaf and nothing after it, which is no hit.
  assert -4 - 400 / tested * np.sqrt(tested) < (among - chance) / np.sqrt(chance * (1 - chance) / tested) < 4
