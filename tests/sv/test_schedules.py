"""The table of docs/methods/scheduled.md: which schedules keep the distribution, by enumeration."""

import functools

from flax import struct
import jax
import jax.numpy as jnp
from matching import having
import numpy as np
import pytest
import test_verification
from tiers import long_but

from speccascade import decode, methods, Request, rules, Sampler, sampling, stopping
from speccascade.backends.ops import take1
from speccascade.check import enumeration
from speccascade.drafters import ngram, one_pass
from speccascade.engine.job import DecodeJob
from speccascade.engine.limits import Limit
from speccascade.engine.lowering import lower
from speccascade.engine.method import Method
from speccascade.engine.phases import Propose, Score, Verify
from speccascade.models import toy
from speccascade.sv import predictors
from speccascade.sv.plans import Profile
from speccascade.sv.verification import Budget, Causal, Goodput, Stale, TopK
from speccascade.types import DRAFT, Model, Prompt, static, Told

TENTHS = 10


@struct.dataclass
class Numbered(enumeration.Enumerated):
  """Draws a drafted token by a number of its position, of which q̃ makes the token, and all by that if it is coupled."""

  coupled: bool = static(default=False)

  def draw(self, weights, position, purpose, start):
    if self.by_round or not self.coupled and purpose != DRAFT:
      return super().draw(weights, position, purpose, start)
    rows = jnp.arange(position.shape[0]).reshape((-1,) + (1,) * (position.ndim - 1))
    digit = self.digits[rows, 0, position - self.base, DRAFT]
    first = jnp.round(TENTHS * weights[..., 0] / weights.sum(-1)).astype(jnp.int32)
    noise = self if self.coupled else self._note(self._cell(position, start), purpose, 1 / TENTHS)
    return (digit >= first).astype(jnp.int32), noise


def law(method, models, numbers, measured=2, most=3, mate=None):
  """Return the joint distribution of the first tokens of two, of a text of `most`, by round, position or coupling."""
  method = method.accepting(test_verification.keyed_by_round) if numbers == 'round' else method
  rounds = measured if numbers == 'round' else 1
  draft = 2 if numbers == 'round' else TENTHS
  cells = [(r, p) for r in range(rounds) for p in range(r, most)]
  # Of a token beyond those measured it is only drawn what a choice may look at.
  radix = {(r, p, k): draft if k == 0 else 2 for r, p in cells for k in range(3) if k == 0 or p < measured}
  radix = {key: n for key, n in radix.items() if numbers != 'coupled' or key[2] == 0}
  rest = np.arange(int(np.prod(list(radix.values()))))
  digits = np.zeros((rest.size, most, most, 3), np.int32)
  chances = np.ones(digits.shape, np.float32)
  for key, n in radix.items():
    rest, digits[(slice(None), *key)] = np.divmod(rest, n)
    chances[(slice(None), *key)] = 1 / n
  total = len(digits)
  noise = Numbered(jnp.asarray(digits), jnp.asarray(chances), 1, numbers == 'round', numbers == 'coupled')
  batch = Prompt(jnp.zeros((total, 1), jnp.int32), jnp.ones(total, jnp.int32))
  run = test_verification.in_company(mate, [])
  state = run(method, models, batch, max_new_tokens=most, sampler=Sampler(), noise=noise)
  used = np.zeros(digits.shape[1:], bool)
  for key in radix:
    used[key] = True
  weight = np.where(used, np.float64(state.noise.chances), 1).prod((1, 2, 3))
  tokens = np.asarray(state.tokens)[:, 1 : 1 + measured]
  return np.bincount(tokens @ 2 ** np.arange(measured)[::-1], weight, 2**measured).reshape((2,) * measured)


def coin(*of):
  """Return a model of two tokens: the chance of the first, in tenths, after each."""
  chances = np.array([[x, 10 - x] for x in of]) / 10
  order = int(len(of) > 1)
  return Model({'table': jnp.log(jnp.asarray(chances, jnp.float32))}, toy.Table(2, order), name='coin')


PAIR = [coin(7, 4), coin(8, 5)]  # either reads the token before
P = np.array([[0.8, 0.2], [0.5, 0.5]])
TRUE = P[0][:, None] * P
MATE = jnp.zeros((3, 3, 3), jnp.int32)  # decisions of the other row of the batch


def all_or_none(least):
  """Return a budget that verifies all four tokens of two rows if their gains sum to so much, else none."""
  return dict(budget=Goodput(), plan=Profile(None, np.float32([1, 1, 1, 4, 4, 4, 1 + least / 2])))


# The other row's gains are .7 and .49. Each budget decides by what its predictor tells of both tokens, if it may.
BUDGETS = {
  'causal': lambda _: dict(budget=Causal(0.65)),
  'greedy': lambda _: dict(budget=Goodput(greedy=True), plan=Profile(None, np.float32([1, 1, 1, 1.25, 1.6, 2.2, 3]))),
  'top-K': lambda _: dict(budget=TopK(1)),
  'global': lambda signal: all_or_none({'before': 2.345, 'after': 2.24}[signal]),
  'stale': lambda _: all_or_none(1.64) | dict(budget=Stale(Goodput())),
}
SIGNALS = {'before': predictors.max_q, 'after': predictors.drawn_q}
COLUMNS = [('round', 'bonus'), ('round', 'test'), ('position', 'bonus'), ('position', 'test'), ('coupled', 'bonus')]
CELLS = [(signal, budget, *column) for signal in SIGNALS for budget in BUDGETS for column in COLUMNS]
FEW = [
  ('before', 'causal', 'position', 'bonus'),
  ('after', 'greedy', 'round', 'test'),
  ('after', 'global', 'coupled', 'bonus'),
]


def exact(signal, budget, numbers, ending):
  """Return the entry of the table."""
  if numbers == 'coupled' or (numbers, ending) == ('position', 'test'):
    return True
  if budget == 'stale':  # here what is predicted before the draw is of tested tokens; see d
    return numbers == 'round' or signal == 'before'
  if budget == 'global':
    return (signal, numbers, ending) == ('before', 'round', 'test')  # of a third token, see below
  return ending == 'test' or signal == 'before'


def keyed(method):
  """Return by what the loop keys random numbers."""
  return 'round' if lower(method).by_round else 'position'


@pytest.mark.full
@pytest.mark.parametrize('signal, budget, numbers, ending', long_but(CELLS, FEW))
def test_a_schedule_keeps_the_distribution_where_the_table_says_so(signal, budget, numbers, ending):
  method = methods.scheduled(SIGNALS[signal], 2, **BUDGETS[budget](signal), ending=ending)
  off = np.abs(law(method, PAIR, numbers, mate=MATE) - TRUE).sum() / 2
  assert off < 1e-6 if exact(signal, budget, numbers, ending) else off > 1e-3
  if numbers == keyed(method):
    assert method.keeps_distribution == exact(signal, budget, numbers, ending)


@pytest.mark.parametrize('drafted', [0, 1])
def test_a_schedule_may_be_made_for_more_tokens_than_a_round_drafts(drafted):
  made = methods.scheduled(predictors.margin, 3, budget=Stale(TopK(2)), ending='bonus')
  score = next(phase for phase in made.phases if isinstance(phase, Score))
  draft = [Propose(0, drafted)] if drafted else []
  method = Method((*draft, score, Verify(rules.bind(rules.own), (1,))), (0, 1), made.policy)
  how = dict(prompts=[[0], [1], [0, 1]], sampler=Sampler(coupling='gumbel'), max_new_tokens=8)
  assert decode(method, PAIR, **how).tokens == decode(methods.autoregressive(), PAIR[1:], **how).tokens


# ---- the counter-examples, with their numbers ----


def first(draft):
  """The chance of the first token is high, of the second low."""
  return jnp.where(draft.tokens == 0, 0.99, 0.01)


def second(draft):
  """That of the second drafted token is high if it is the first of the two tokens."""
  return first(draft).at[:, 0].set(0.5)


@predictors.signal(drawn=False)
def before(draft):
  """That of the last drafted token is high if the one before it is the first of the two tokens."""
  steps = jnp.array([0.5, 0.9, 0.5])[: draft.tokens.shape[1]]
  return jnp.broadcast_to(steps, draft.tokens.shape).at[:, -1].set(first(draft)[:, -2])


@struct.dataclass
class One(Budget):
  """Verify one token if the last is likely to be accepted, none else."""

  told = Told.LATER | Told.OTHERS

  def __call__(self, chances, active):
    return jnp.int32(chances[:, -1] >= 0.5)


def times(*seconds):
  return dict(budget=Goodput(), plan=Profile(None, np.float32([1, 1, *seconds])))


@struct.dataclass
class ByPlace(Propose):
  """Draft by distributions that change with the place in the draft, as a drafter of blocks does."""

  def __call__(self, context, state):
    def extend(cache, tokens, position, *packing):
      logits, cache = context.extend[0](cache, tokens, position, *packing)
      place = position - state.length[:, None] + 1
      later = jnp.log(jnp.array([0.5, 0.5]))
      return jnp.where((place > 0)[..., None], later, logits), cache

    return super().__call__(context._replace(extend=(extend, *context.extend[1:])), state)


FAIR, LIKELY = [coin(5), coin(9)], [coin(5), coin(7)]
BIASED = {  # of what is measured the chance of the first of two tokens, which is .9 of the verifier unless said
  'a, by round': (methods.scheduled(first, 1, budget=Causal(), ending='bonus'), FAIR, 'round', 0, 0.95),
  'a, by position': (methods.scheduled(first, 1, budget=Causal(), ending='bonus'), FAIR, 'position', 0, 0.95),
  'a, global': (methods.scheduled(first, 1, **times(1.2), ending='bonus'), FAIR, 'position', 0, 0.95),
  'b, by round, .7': (methods.scheduled(before, 2, **times(2, 1.7), ending='bonus'), LIKELY, 'round', 0, 0.85),
  'b, by position, .7': (methods.scheduled(before, 2, **times(2, 1.7), ending='bonus'), LIKELY, 'position', 0, 0.85),
  'c, after the draw': (methods.scheduled(second, 2, **times(2, 1.7)), FAIR, 'round', 1, 0.93),
  'c, before the draw': (methods.scheduled(before, 3, **times(2, 2, 2.1)), FAIR, 'round', 1, 0.93),
  'd, after the draw': (methods.scheduled(second, 2, budget=Stale(One()), ending='bonus'), FAIR, 'position', 1, 0.92),
  'd, before the draw': (methods.scheduled(before, 3, budget=Stale(One()), ending='bonus'), FAIR, 'position', 1, 0.92),
}


FIRST = ('a, by position', 'c, after the draw')


@pytest.mark.full
@pytest.mark.parametrize('name', long_but(BIASED, FIRST))
def test_the_counter_examples_are_off_by_what_is_said(name):
  method, models, numbers, at, expected = BIASED[name]
  found = law(method, models, numbers, most=max(2, method.window))
  assert found.sum(1 - at)[0] == pytest.approx(expected, abs=1e-6)
  assert not method.keeps_distribution or numbers != keyed(method)


@struct.dataclass
class Ahead(Limit):
  """Score one token if the second, which is tested without it, is the first of the two tokens."""

  def __call__(self, context, state):
    return (take1(state.tokens, state.length + 1) == 0).astype(jnp.int32)


@pytest.mark.long
def test_a_draft_that_changes_with_the_round_must_not_be_looked_at_ahead():
  # p = (.6, .4); q is (.9, .1) at the first place of a draft and (.5, .5) behind it.
  models = [coin(9), coin(6)]
  method = methods.scheduled(first, 1)
  ahead = method.replace(phases=(ByPlace(0, 2), Score(1, Ahead()), method.phases[-1]), policy=stopping.Policy())
  accepted = 0.5 + 0.5 * 0.8 * (0.6 / 0.9)  # of 1 in the first round, 4 of 5 are 0 in the next, by the same number
  assert law(ahead, models, 'position', most=2).sum(0)[0] == pytest.approx(0.7 * accepted + 0.3 * 0.6, abs=1e-6)
  assert law(ahead, models, 'coupled', most=2).sum(0)[0] == pytest.approx(0.6, abs=1e-6)
  same = ahead.replace(phases=(Propose(0, 2), *ahead.phases[1:]))
  assert law(same, models, 'position', most=2).sum(0)[0] == pytest.approx(0.6, abs=1e-6)


ONE_PASS = [(numbers, budget) for numbers in ('position', 'round') for budget in ('causal', 'greedy', 'top-K')]


@pytest.mark.long
@pytest.mark.parametrize('numbers, budget', ONE_PASS)
def test_a_drafter_in_one_pass_goes_with_no_budget_that_looks_ahead(numbers, budget):
  # q is (.9, .1) after the first of the two tokens and (.5, .5) after the other, which is the mask; p = (.6, .4).
  models = [one_pass(coin(9, 5), 1), coin(6)]
  ahead = methods.scheduled(second, 2, budget=One())
  biased = {'position': 0.7, 'round': 0.74}
  assert law(ahead, models, numbers, most=3).sum(0)[0] == pytest.approx(biased[numbers], abs=1e-6)
  assert law(ahead, models, 'coupled', most=3).sum(0)[0] == pytest.approx(0.6, abs=1e-6)
  method = methods.scheduled(predictors.drawn_q, 2, **BUDGETS[budget]('after'))
  np.testing.assert_allclose(law(method, models, numbers, mate=MATE), [[0.36, 0.24], [0.24, 0.16]], atol=1e-6)
  asked = functools.partial(DecodeJob.of, ahead, prompts=[[0]], max_new_tokens=4, seed=0)
  with pytest.raises(ValueError, match=having('looks ahead', 'Goodput(greedy=True)', "coupling='gumbel'")):
    asked(models, sampler=Sampler())
  with pytest.raises(ValueError, match='looks ahead'):
    asked([ngram.drafter(coin(6), memory=8), coin(6)], sampler=Sampler())
  assert asked([ngram.drafter(coin(6)), coin(6)], sampler=Sampler())
  assert asked(models, sampler=Sampler(coupling='gumbel'))
  assert decode(ahead, models, [[0]], max_new_tokens=4, sampler=Sampler(0.0)).tokens == [[0, 0, 0, 0]]


def test_rows_of_the_same_random_numbers_go_with_no_budget_that_compares_drafts_before_a_bonus_token():
  # q = (.5, .5), p = (.9, .1): the first of two tokens is verified unless the other row's draft, the same, has it: .85.
  def job(budget, ending, *asked, **how):
    method = methods.scheduled(predictors.max_q, 2, budget=budget, ending=ending)
    DecodeJob.of(method, FAIR, asked, **dict(max_new_tokens=4, seed=0, sampler=Sampler()) | how)

  twice = Request([0], seed=1), Request([1], seed=1)
  with pytest.raises(ValueError, match=having('prompts 0 and 1', 'seed 1', 'top 1 by max_q', "coupling='gumbel'")):
    job(TopK(1), 'bonus', *twice)
  job(TopK(1), 'test', *twice)
  job(Causal(), 'bonus', *twice)
  job(TopK(1), 'bonus', *twice, sampler=Sampler(coupling='gumbel'))
  job(TopK(1), 'bonus', [0], [1])


# ---- predictors and budgets ----


def test_a_predictor_reads_what_it_says():
  logits = jnp.array([[[3.0, 1.0, 0.5], [0.0, 0.0, -jnp.inf], [5.0, -jnp.inf, -jnp.inf]]])
  draft = stopping.Draft(
    logits, jax.nn.softmax(logits), jnp.array([[1, 0, 0]]), jnp.array([[4, 5, 6]]), Sampler(), None
  )
  np.testing.assert_allclose(predictors.margin(draft), [[2, 0, predictors.MOST]])
  np.testing.assert_allclose(predictors.max_q(draft), [[0.821, 0.5, 1]], atol=1e-3)
  np.testing.assert_allclose(predictors.drawn_q(draft), [[0.111, 0.5, 1]], atol=1e-3)
  greedy = draft._replace(sampler=Sampler(0.0), probs=jax.nn.one_hot(draft.tokens, 3))
  np.testing.assert_allclose(predictors.drawn_q(greedy), [[0.111, 0.5, 1]], atol=1e-3)
  coupled = draft._replace(noise=sampling.noise.Coupled(jnp.array([[1, 2]], jnp.uint32)))
  gap = predictors.noisy_margin(coupled._replace(tokens=coupled.noise.draw(draft.probs, draft.position, 0, None)[0]))
  assert gap.shape == (1, 3) and (gap > 0).all() and gap[0, 2] == predictors.MOST


def test_a_curve_learns_from_tested_tokens_alone():
  fit = predictors.Logistic(bias=0.0, slope=0.0, rate=0.5)
  x, tested = jnp.array([[1.0, 3.0, 9.0]]), jnp.array([[True, True, False]])
  carry = fit.init(1)
  np.testing.assert_allclose(fit.chance(carry, x), 0.5)
  after = fit.update(carry, tested, jnp.array([[True, False, True]]), 0 * x, x)  # of two signals the last
  np.testing.assert_allclose(after, [[0.5 * (0.5 / 2 - 0.5 / 10), 0.5 * (0.5 / 2 - 1.5 / 10)]], rtol=1e-6)
  rng = np.random.default_rng(0)
  rows, update = fit.init(64), jax.jit(predictors.Logistic(rate=0.05).update)
  for _ in range(2000):  # online, from nothing, each row by itself
    z = jnp.asarray(rng.normal(size=(64, 1)) * 2, jnp.float32)
    accepted = jnp.asarray(rng.random((64, 1))) < jax.nn.sigmoid(0.7 * z - 1)
    rows = update(rows, z == z, accepted, z)
  np.testing.assert_allclose(rows.mean(0), [-1, 0.7], atol=0.15)


@pytest.mark.full
def test_a_predictor_in_the_loop_learns_and_a_stale_choice_is_a_round_old():
  models = test_verification.TRIO
  run = lambda method: decode(method, models, [[1, 2], [3]], max_new_tokens=12)
  plain = run(methods.speculative(block=3, pair=(0, 2)))
  margin = functools.partial(methods.scheduled, predictors.margin, 3, pair=(0, 2))
  learned, fixed, stale = (
    run(m)
    for m in (
      margin(fit=predictors.Logistic(-1.0, 1.0, rate=0.5)),
      margin(fit=predictors.Logistic(-1.0, 1.0, rate=0)),
      margin(budget=Stale(TopK(1))),
    )
  )
  assert learned.tokens == fixed.tokens == stale.tokens  # of test after test: numbers by position
  assert (learned.stats.verified_lengths != fixed.stats.verified_lengths).any()
  assert fixed.stats.drafted.sum() < plain.stats.drafted.sum()  # drafts end where nothing more is verified
  coupled = Sampler(coupling='gumbel')
  noisy = methods.scheduled(predictors.noisy_margin, 3, pair=(0, 2))
  run = lambda method, sampler: decode(method, models, [[1, 2], [3]], max_new_tokens=12, sampler=sampler)
  assert run(noisy, coupled).tokens == run(methods.autoregressive(2), coupled).tokens
  with pytest.raises(ValueError, match=having('noisy_margin', "coupling='gumbel'", 'margin')):
    run(noisy, Sampler())


@pytest.mark.full
def test_what_a_companion_tells_is_learned_from():
  method = functools.partial(methods.scheduled, predictors.companion, 3, budget=TopK(1))
  run = lambda fit: decode(method(fit=fit), test_verification.TRIO, [[1, 2], [3]], max_new_tokens=12)
  learned, fixed = (run(predictors.Logistic(-1.0, 1.0, rate=rate)) for rate in (0.9, 0))
  assert learned.tokens == fixed.tokens  # of test after test: numbers by position
  assert (learned.stats.verified_lengths != fixed.stats.verified_lengths).any()


def test_verification_with_a_companion_is_an_instance():
  profile = test_verification.FALLING
  exact = methods.scheduled(predictors.companion, 3, plan=profile)
  assert str(exact) == str(methods.sv_exact(profile, 3))
  published = methods.scheduled(predictors.companion, 3, plan=profile, budget=Goodput(greedy=True), ending='bonus')
  assert str(published) == str(methods.sv(profile, 3))
  for one, other in ((exact, methods.sv_exact(profile, 3)), (published, methods.sv(profile, 3))):
    assert jax.tree.all(jax.tree.map(np.array_equal, one.phases, other.phases))
