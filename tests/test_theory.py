"""The formulas of theory.py and `experiments/three_models` against simulations, brute force and the compiled loop."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from tiers import long_but

from experiments.three_models import middle
from speccascade import methods, rules, theory
from speccascade.decode import decode
from speccascade.models import toy
from speccascade.types import Model

CYCLES = 200_000


def accepted_run(rng, alpha, n, shape=CYCLES):
  """Return how many of n tokens are accepted before the first that is not."""
  return np.cumprod(rng.random((shape, n)) < alpha, 1).sum(1)


def ratio_close(tokens, time, formula):
  """Tell the same of Σ tokens / Σ time, by the delta method."""
  ratio = tokens.mean() / time.mean()
  error = (tokens - ratio * time).std() / np.sqrt(len(tokens)) / time.mean()
  return abs(ratio - formula) <= 5 * error + 1e-12 and error < 0.02 * formula


GRID = [(0.0, 3), (0.3, 1), (0.7, 4), (0.9, 4), (0.9, 12), (1.0, 5)]


@pytest.mark.parametrize('alpha, gamma', GRID)
@pytest.mark.parametrize('c', [0.05, 0.5, 1.5])
def test_speed_ups_are_tokens_over_time_of_simulated_rounds(alpha, gamma, c):
  run = accepted_run(np.random.default_rng(2), alpha, gamma)
  one = np.ones(CYCLES)
  assert ratio_close(run + 1.0, one * (gamma * c + 1), theory.speedup_speculative(alpha, gamma, c))
  tested = accepted_run(np.random.default_rng(3), alpha, gamma + 1)
  cascade = np.minimum(tested + 1.0, gamma + 1)
  assert ratio_close(cascade, one * ((gamma + 1) * c + 1), theory.speedup_cascade(alpha, gamma, c))
  naive = np.minimum(run + 1.0, gamma)
  assert ratio_close(naive * (1 + c), one * (gamma * c + 1), theory.speedup_naive_cos(alpha, gamma, c))


@pytest.mark.parametrize('alpha, gamma_q', GRID)
@pytest.mark.parametrize('gamma_p, c', [(1, 0.2), (3, 0.7)])
def test_speed_up_of_cos_is_that_of_the_papers_cycle(alpha, gamma_q, gamma_p, c):
  rng = np.random.default_rng(4)
  had_bonus = accepted_run(rng, alpha, gamma_p) == gamma_p  # the cycle before
  tokens = np.minimum(accepted_run(rng, alpha, gamma_q) + 1.0, gamma_q)
  time = 1 + c * (gamma_q - had_bonus)
  assert ratio_close(tokens * (1 + c), time, theory.speedup_cos(alpha, gamma_q, gamma_p, c))


def alternate(rng, alpha_q, alpha_p, gamma_q, gamma_p, c):
  """Play the alternate proposals; return tokens and time of each turn of q with the turn of p that may follow."""
  q_kept, p_kept = (accepted_run(rng, a, g) for a, g in ((alpha_q, gamma_q), (alpha_p, gamma_p)))
  tokens, time, ahead = [], [], 0
  for q, p in zip(q_kept, p_kept):
    tokens.append(min(q + 1, gamma_q))
    time.append(c * (gamma_q - ahead) + 1)  # q proposes, p scores
    ahead = 0
    if q == gamma_q:
      tokens[-1] += min(p + 1, gamma_p)
      time[-1] += gamma_p - 1 + c  # p proposes after its bonus token, q scores
      ahead = int(p == gamma_p)
  return np.array(tokens, float), np.array(time)


CYCLES_OF_TWO = [(0.7, 0.7, 5, 1, 0.2), (0.9, 0.5, 2, 3, 0.6), (0.3, 0.8, 1, 1, 1.0), (1, 1, 3, 2, 0.5)]


@pytest.mark.parametrize('setting', CYCLES_OF_TWO)
def test_steady_speed_up_of_cos_is_that_of_the_whole_process(setting):
  tokens, time = alternate(np.random.default_rng(5), *setting)
  whole = len(tokens) // 100 * 100  # batch means: a turn's time depends on the turn before
  tokens, time = (x[:whole].reshape(-1, 100).sum(1) for x in (tokens, time))
  assert ratio_close(tokens * (1 + setting[-1]), time, theory.speedup_cos_steady(*setting))


def test_distinct_experts_are_those_that_tokens_choose_evenly():
  rng = np.random.default_rng(0)
  chosen = [len({x for _ in range(5) for x in rng.permutation(12)[:3]}) for _ in range(4000)]
  assert theory.distinct_experts(12, 3, 5) == pytest.approx(np.mean(chosen), abs=0.06)
  assert theory.distinct_experts(8, 2, [0, 1]).tolist() == [0, 2] and theory.distinct_experts(1, 1, 7) == 1


# ---- the loop ----

V, ROWS = 4, 2000


def constant(name, logits):
  """Return a toy model whose distribution is the same after every prefix, and that distribution."""
  model = toy.model(0, V, order=1)
  distribution = np.exp(logits.astype(np.float64))
  table = jnp.tile(logits.astype(np.float32), (V, 1))
  return Model({**model.params, 'table': table}, model.network, name=name), distribution / distribution.sum()


SMALL, Q = constant('small', np.array([0.9, 0.2, -0.4, 0.1]))
MIDDLE, M = constant('middle', np.array([0.7, 0.5, -0.6, 0.2]))
LARGE, P = constant('large', np.array([0.3, 1.1, -0.9, 0.4]))


@functools.cache
def cost_of_more(method):
  """Return per row the rounds [B] and calls [M, B] that the later of 92 tokens cost, and how many those are.

  Two runs with the same random numbers, one 24 tokens longer: a row's beginning and end drop out of the difference.
  """
  models = [SMALL, LARGE] if method.models == 2 else [SMALL, MIDDLE, LARGE]
  short, long = (decode(method, models, [[1]] * ROWS, max_new_tokens=n, seed=7).stats for n in (68, 92))
  return long.rounds - short.rounds, long.calls - short.calls, (long.emitted - short.emitted).astype(float)


def weighted(lam):
  return functools.partial(rules.weighted, weights=(lam, 1 - lam))


LOOPS = {
  'speculative': (methods.speculative(block=4), P, theory.tokens_per_round, 4),
  'cascade': (methods.speculative(functools.partial(rules.token_v3, alpha=0.6), 2), None, theory.tokens_per_round, 2),
  'naive_cos': (methods.naive_cos(weighted(0.3), 4), 0.3 * Q + 0.7 * P, theory.tokens_per_round_without_bonus, 4),
}


def target_of(name):
  if name != 'cascade':
    return LOOPS[name][1]
  kept = Q * (P >= 0.4 * P.max())
  return kept + P * (1 - kept.sum())


@pytest.mark.full
@pytest.mark.parametrize('name', long_but(LOOPS, ['cascade']))
def test_tokens_per_round_of_the_loop_are_the_formulas(name):
  method, _, formula, gamma = LOOPS[name]
  alpha = theory.acceptance_rate(Q, target_of(name))
  assert 0.6 < alpha < 0.95  # else a wrong formula would hardly show
  rounds, _, emitted = cost_of_more(method)
  assert ratio_close(emitted, rounds, formula(alpha, gamma))


@pytest.mark.parametrize('c', [0.1, 0.8])
@pytest.mark.parametrize('name', LOOPS)
def test_speed_up_by_the_loops_own_calls_is_the_formula(name, c):
  method, _, _, gamma = LOOPS[name]
  formula = getattr(theory, f'speedup_{name}')
  _, calls, emitted = cost_of_more(method)
  token = 1 + c if name == 'naive_cos' else 1  # what a token costs without speculation
  alpha = theory.acceptance_rate(Q, target_of(name))
  assert ratio_close(emitted * token, c * calls[0] + calls[1], formula(alpha, gamma, c))


@pytest.mark.long
@pytest.mark.parametrize('lam, blocks, c', [(0.3, (2, 2), 0.7), pytest.param(0.5, (4, 1), 0.2, marks=pytest.mark.long)])
def test_speed_up_of_the_cos_loop_is_the_steady_formula(lam, blocks, c):
  r = lam * Q + (1 - lam) * P
  rates = theory.acceptance_rate(Q, r), theory.acceptance_rate(P, r)
  _, calls, emitted = cost_of_more(methods.cos(weighted(lam), blocks))
  assert ratio_close(emitted * (1 + c), c * calls[0] + calls[1], theory.speedup_cos_steady(*rates, *blocks, c))


# ---- three models ----

THIRDS = (0.3, 0.3, 0.4)
COS_OF_3 = functools.partial(rules.weighted, weights=THIRDS)


@pytest.mark.parametrize('setting', CYCLES_OF_TWO)
def test_calls_of_cos_by_turns_are_the_steady_formula_for_two_models(setting):
  *rates, gamma_q, gamma_p, c = setting
  calls = middle.calls_cos(rates, (gamma_q, gamma_p))
  assert (1 + c) / (calls @ [c, 1]) == pytest.approx(theory.speedup_cos_steady(*setting))


@pytest.mark.long
@pytest.mark.parametrize('blocks', [(3, 2, 1), pytest.param((1, 1, 3), marks=pytest.mark.long)])
def test_calls_of_the_cos_loop_of_three_are_those_of_its_turns(blocks):
  r = sum(w * x for w, x in zip(THIRDS, (Q, M, P)))
  expected = middle.calls_cos([theory.acceptance_rate(x, r) for x in (Q, M, P)], blocks)
  _, calls, emitted = cost_of_more(methods.cos(COS_OF_3, blocks))
  assert all(ratio_close(n, emitted, x) for n, x in zip(calls, expected))


def test_calls_of_cos_at_the_ends_of_the_rates():
  np.testing.assert_allclose(middle.calls_cos((1, 1, 1), (5, 3, 2)), (0.5, 0.3, 0.2))  # one call for each own token
  np.testing.assert_allclose(middle.calls_cos((0, 0, 0), (5, 3, 2)), (5, 3, 1))  # a token is the residual


@pytest.mark.full
def test_speed_up_of_a_chain_is_that_of_the_loops_calls():
  rule = functools.partial(rules.lossy, alpha=0.2)
  logits = jnp.log(jnp.float32([Q, M, P]))
  alpha = theory.acceptance_rate(Q, rules.target(rule, logits).probs)
  assert 0.6 < alpha < 0.98
  _, calls, emitted = cost_of_more(methods.naive_cos(rule, 3, models=3))
  costs = 0.2, 0.5, 1.3
  assert ratio_close(emitted, costs @ calls, middle.speedup_chain(alpha, 3, costs))
  pair = theory.speedup_cascade(alpha, 2, 0.2, 1.3, 0.1)
  assert middle.speedup_chain(alpha, 3, (0.2, 1.3), 0.1) == pytest.approx(pair)


@pytest.mark.parametrize('pair, chain, c, v', [(0.7, 0.8, 0.1, 1), (0.5, 0.9, 0.02, 1.4), (0.9, 0.85, 0.3, 1)])
def test_at_the_break_even_the_chain_is_as_fast_as_the_pair(pair, chain, c, v):
  cost = middle.middle_break_even(pair, chain, c, v)
  assert (cost > 0) == (chain > pair)
  best = lambda alpha, costs: max(middle.speedup_chain(alpha, n, costs) for n in range(1, 65))
  if cost > 0:
    assert best(chain, (c, cost, v)) == pytest.approx(best(pair, (c, v)))
  assert middle.middle_break_even(pair, pair, c, v) == pytest.approx(0, abs=1e-12)


def nested(rng, alphas, blocks, costs):
  """Play a round of the last model, each model drafting for the next; return its tokens and time."""
  if not alphas:
    return 1, costs[0]
  rounds = [nested(rng, alphas[:-1], blocks[:-1], costs[:-1]) for _ in range(blocks[-1])]
  draft = sum(tokens for tokens, _ in rounds)
  rejected = np.flatnonzero(rng.random(draft) >= alphas[-1])
  return (rejected[0] if rejected.size else draft) + 1, sum(time for _, time in rounds) + costs[-1]


NESTED = [
  ((0.8, 0.7), (3, 2), (0.02, 0.2, 1.0)),
  ((0.5, 1.0), (4, 3), (0.1, 0.3, 1.2)),
  ((1.0, 0.9), (2, 2), (0.05, 0.1, 1.0)),
  ((0.9, 0.6, 0.8), (2, 1, 2), (0.01, 0.05, 0.2, 1.0)),
]


@pytest.mark.parametrize('setting', NESTED)
def test_speed_up_of_nested_speculation_is_that_of_simulated_rounds(setting):
  rng = np.random.default_rng(6)
  tokens, time = np.array([nested(rng, *setting) for _ in range(20_000)], float).T
  assert ratio_close(tokens, time, middle.speedup_nested(*setting))


def test_the_best_nested_chain_is_the_best_of_all_blocks():
  acceptance = np.array([[0, 0.85, 0.6], [0, 0, 0.8], [0, 0, 0]])
  pays = set()
  for cost in (0.015, 0.1, 0.4, 0.9):
    costs = 0.02, cost, 1.0
    found = middle.best_nested(acceptance, costs, most=8)
    grid = [(a, b) for a in range(1, 9) for b in range(1, 9)]
    assert found[0, 1, 2][0] == max(middle.speedup_nested((0.85, 0.8), blocks, costs) for blocks in grid)
    assert found[0, 2][0] == max(theory.speedup_speculative(0.6, n, 0.02) for n in range(1, 9))
    assert [s for s, _ in found.values()] == sorted((s for s, _ in found.values()), reverse=True)
    pays.add(next(iter(found)))
  assert pays == {(1, 2), (0, 1, 2), (0, 2)}  # dear, it is left out; cheap, it drafts alone


# ---- values and errors ----


@pytest.mark.parametrize('alpha', [0.0, 1e-300, 0.4, 1 - 1e-6, 1 - 1e-12, np.nextafter(1, 0), 1.0])
@pytest.mark.parametrize('gamma', [1, 7, 64])
def test_tokens_are_the_sum_of_powers_up_to_alpha_1(alpha, gamma):
  powers = np.array([alpha**i for i in range(gamma + 1)])
  assert theory.tokens_per_round(alpha, gamma) == pytest.approx(powers.sum(), rel=1e-13)
  assert theory.tokens_per_round_without_bonus(alpha, gamma) == pytest.approx(powers[:-1].sum(), rel=1e-13)


def test_arguments_broadcast():
  alpha, gamma, c = np.array([0.2, 0.9, 1.0])[:, None, None], np.array([1, 5])[:, None], np.array([0.1, 0.5, 1, 2])
  table = theory.speedup_cos(alpha, gamma, 2, c)
  assert table.shape == (3, 2, 4)
  for (i, j, k), value in np.ndenumerate(table):
    assert value == theory.speedup_cos(alpha[i, 0, 0], gamma[j, 0], 2, c[k])
  assert theory.tokens_per_round(jnp.float32(0.5), 2) == 1.75


SPEEDUPS = {
  'speculative': theory.speedup_speculative,
  'cascade': theory.speedup_cascade,
  'naive_cos': theory.speedup_naive_cos,
  'cos': lambda alpha, gamma, c: theory.speedup_cos(alpha, gamma, 1, c),
}


@pytest.mark.parametrize('name', SPEEDUPS)
def test_best_block_is_the_arg_max_by_brute_force(name):
  alphas, costs = [0.0, 0.1, 0.5, 0.8, 0.95, 1.0], [0.01, 0.1, 0.5, 1.0, 3.0]
  found = set()
  for alpha in alphas:
    for c in costs:
      by_hand = [SPEEDUPS[name](alpha, gamma, c) for gamma in range(1, 21)]
      best = theory.best_block(SPEEDUPS[name], alpha, c, most=20)
      assert isinstance(best, int) and by_hand[best - 1] == max(by_hand)
      assert all(value < by_hand[best - 1] for value in by_hand[: best - 1])
      found.add(best)
  assert {1, 20} < found
  grid = theory.best_block(SPEEDUPS[name], np.array(alphas)[:, None], np.array(costs), most=20)
  assert grid.shape == (6, 5) and grid[3, 1] == theory.best_block(SPEEDUPS[name], 0.8, 0.1, most=20)


@pytest.mark.parametrize('name', ['speculative', 'cascade', 'naive_cos', 'ensemble_sd', 'token_cascade'])
def test_rates_by_place_that_are_equal_are_one_rate_in_every_formula(name):
  formula, gammas = getattr(theory, f'speedup_{name}'), np.arange(1, 9)
  one = formula(0.7, gammas, 0.1, 1.2, 0.3)
  np.testing.assert_allclose(formula(theory.ByPosition((0.7, 0.7)), gammas, 0.1, 1.2, 0.3), one, rtol=1e-12)
  by_position = theory.best_block(formula, theory.ByPosition((0.7,)), 0.1, most=8)
  assert by_position == theory.best_block(formula, 0.7, 0.1, most=8)
  assert theory.best_block(formula, theory.ByPosition((0.9, 0.8, 0.0)), 0.1, most=8) <= 3  # a wall after two tokens


def test_acceptance_rate_is_one_minus_tv_and_never_over_1():
  rng = np.random.default_rng(0)
  q, pi = rng.dirichlet(np.ones(6), (2, 100))
  np.testing.assert_allclose(theory.acceptance_rate(q, pi), 1 - 0.5 * abs(q - pi).sum(-1), atol=1e-12)
  same = rng.dirichlet(np.ones(1000), 50).astype(np.float32)
  assert (same.astype(np.float64).sum(-1) > 1).any()
  assert (theory.acceptance_rate(same, same) <= 1).all()


@pytest.mark.parametrize(
  'call, message',
  [
    (lambda: theory.tokens_per_round(1.2, 4), 'alpha=1.2 '),
    (lambda: theory.tokens_per_round_without_bonus(np.nan, 4), 'alpha=nan '),
    (lambda: theory.tokens_per_round(0.5, 0), 'gamma=0 '),
    (lambda: theory.tokens_per_round(0.5, 2.5), 'gamma=2.5 '),
    (lambda: theory.speedup_speculative(0.5, 3, 0.0), 'c=0 '),
    (lambda: theory.speedup_cos(0.5, 0, 1, 0.5), 'gamma_q=0 '),
    (lambda: theory.speedup_cos_steady(0.5, 1.5, 1, 1, 0.5), 'alpha_p=1.5 '),
    (lambda: theory.best_block(theory.speedup_cascade, 0.5, -0.5), 'c=-0.5 '),
    (lambda: theory.best_block(theory.speedup_cascade, 0.5, 0.5, most=0), 'most=0 '),
    (lambda: theory.acceptance_rate([0.5, 0.6], [0.5, 0.5]), 'q='),
    (lambda: theory.acceptance_rate([0.5, 0.5], [-1, 2]), 'pi='),
    (lambda: theory.acceptance_rate([1.0], [0.5, 0.5]), 'vocabular'),
  ],
)
def test_errors_name_the_value(call, message):
  with pytest.raises(ValueError, match=message):
    call()


def close(sample, formula):
  """Tell whether the mean of a sample is within five standard errors of a formula, and the errors are small."""
  error = sample.std() / np.sqrt(len(sample))
  return abs(sample.mean() - formula) <= 5 * error + 1e-12 and error < 0.02 * formula


@pytest.mark.parametrize('alpha, gamma', GRID)
def test_tokens_per_round_are_the_mean_of_simulated_rounds(alpha, gamma):
  run = accepted_run(np.random.default_rng(1), alpha, gamma)
  assert close(run + 1.0, theory.tokens_per_round(alpha, gamma))  # a rejection or the bonus gives one more
  no_bonus = np.minimum(run + 1.0, gamma)
  assert close(no_bonus, theory.tokens_per_round_without_bonus(alpha, gamma))


@pytest.mark.parametrize('vocab', [3, 6, 40])
def test_the_choices_of_one_noise_have_the_token_as_often_as_is_simulated(vocab):
  rng = np.random.default_rng(vocab)
  q, pi = rng.dirichlet(np.full(vocab, 0.5), 2)
  clocks = rng.exponential(size=(200_000, vocab))
  token = np.argmin(clocks / pi, 1)
  of_drafter = clocks / q
  before = (of_drafter < np.take_along_axis(of_drafter, token[:, None], 1)).sum(1)
  np.testing.assert_allclose(theory.acceptance_of_list(q, pi, 1), theory.acceptance_rate(q, pi, 'gumbel'), atol=1e-9)
  for k in (1, 2, 4, 8):
    chance = theory.acceptance_of_list(q, pi, k)
    assert abs((before < k).mean() - chance) < 5 * (chance * (1 - chance) / len(clocks)) ** 0.5 + 1e-9


def test_schemes_of_lists_are_what_they_are_by_definition():
  rng = np.random.default_rng(0)
  q, pi = rng.dirichlet(np.ones(4), (2, 3))
  np.testing.assert_allclose(theory.acceptance_of_list(q, pi, 1, 'iid'), theory.acceptance_rate(q, pi))
  np.testing.assert_allclose(theory.acceptance_of_list(q, pi, 1, 'greedy'), theory.acceptance_rate(q, pi))
  # The best test of two independent drafts, by linear programming: the mass that a plan moves to a draft of the pair.
  for q_, pi_ in zip(q, pi, strict=True):
    pairs = list(itertools.product(range(4), repeat=2))
    sends = [(p, v) for p in range(len(pairs)) for v in {*pairs[p]}]
    limits = [[float(p == n) for p, _ in sends] for n in range(len(pairs))]
    limits += [[float(v == n) for _, v in sends] for n in range(4)]
    most = [q_[a] * q_[b] for a, b in pairs] + list(pi_)
    best = -scipy.optimize.linprog([-1.0] * len(sends), limits, most).fun
    np.testing.assert_allclose(theory.acceptance_of_list(q_, pi_, 2, 'iid'), best, atol=1e-9)
  for scheme in ('gumbel', 'greedy', 'top'):
    np.testing.assert_allclose(theory.acceptance_of_list(q, pi, 4, scheme), 1, atol=1e-9)
  with pytest.raises(ValueError, match="scheme='best' is none of gumbel, iid, greedy, top"):
    theory.acceptance_of_list(q, pi, 2, 'best')


def test_leaves_are_divided_where_they_are_hit_most():
  assert theory.divide_leaves(0, 5) == ()
  assert sum(theory.divide_leaves(10, 5)) - len(theory.divide_leaves(10, 5)) == 10
  assert theory.divide_leaves(6, 3, [1.0, 0.5, 1.0]) == (1, 7)  # nothing is rejected elsewhere
