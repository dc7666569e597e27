"""Rules and combiners: distributions, limits in α, the papers' lemmas, float32 extremes, errors.

A rule that the package declares is in every test that is parametrised over rules, at values of α found by bisection.
"""

from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
import jax.numpy as jnp
from matching import having
import numpy as np
import pytest
import reference
import scipy.optimize

from speccascade import methods, rules, Sampler, sampling

ROWS, V = 40, 7
RULES = [x for x in vars(rules).values() if callable(x) and hasattr(x, 'declaration') and x.declaration.is_rule]
PACKAGE = [x for x in rules.known().values() if x.declaration.is_rule]


def pairs(seed, shape=(ROWS, V), scale=1.5):
  """Return logits of two models that often agree."""
  rng = np.random.default_rng(seed)
  p = rng.normal(scale=scale, size=shape)
  return (np.float32(x) for x in (p + rng.normal(scale=0.7 * scale, size=shape), p))


def numbers(rule, alpha):
  name = rules.name_of(rule)
  weights = {'weights': reference.HEADS[name]} if name in reference.HEADS else {}
  return weights if alpha is None else {'alpha': alpha, **weights}


def bound(rule, alpha):
  return partial(rule, **numbers(rule, alpha))


def targeted(rule, lq, lp, alpha, sampler):
  return rules.target(bound(rule, alpha), (jnp.asarray(lq), jnp.asarray(lp)), sampler)


def target(rule, lq, lp, alpha, sampler):
  return np.asarray(targeted(rule, lq, lp, alpha, sampler).probs)


def telling(rule):
  """Return values of α at which a quarter, a half and three quarters of the mass that can be rejected is rejected."""
  alpha = rule.declaration.alpha
  if alpha is None:
    return [None]
  lq, lp = (jnp.asarray(x) for x in pairs(1))
  q = sampling.softmax(lq)
  ask = jax.jit(lambda a: sampling.tv(q, rules.target(bound(rule, a), (lq, lp)).probs).sum())
  low, high = max(alpha.low, -8.0), min(alpha.high, 8.0)
  most, least = ask(low), ask(high)

  def bisected(share):
    a, b = low, high
    for _ in range(20):
      middle = (a + b) / 2
      a, b = (middle, b) if ask(middle) > least + share * (most - least) else (a, middle)
    return round((a + b) / 2, 3)

  return [bisected(share) for share in (0.75, 0.5, 0.25)]


ALPHAS = {rule: telling(rule) for rule in RULES}
BINARY = [x for x in RULES if targeted(x, *pairs(1), ALPHAS[x][0], Sampler()).deferred is not None]
CASES = [(rule, alpha) for rule, alphas in ALPHAS.items() for alpha in alphas]
TEMPERATURES = [0.0, 0.7, 1.0]
over_rules = pytest.mark.parametrize('rule', RULES, ids=rules.name_of)
over_cases = pytest.mark.parametrize('rule, alpha', CASES, ids=lambda x: rules.name_of(x) if callable(x) else str(x))
over_temperatures = pytest.mark.parametrize('temperature', TEMPERATURES)


def definition(rule, lq, lp, alpha, sampler):
  """Return the reference's π, row by row; a rule without α ignores the 0."""
  return np.array([reference.target(rules.name_of(rule), q, p, alpha or 0.0, sampler) for q, p in zip(lq, lp)])


def distributions(lq, lp, temperature):
  """Return q̃, p̃ in float64 by the reference."""
  s = reference.Sampler(temperature)
  return tuple(np.array([s(row) for row in x]) for x in (lq, lp))


def assert_distribution(pi, tolerance=1e-5):
  assert np.isfinite(pi).all() and (pi >= -1e-7).all()
  assert abs(pi.astype(np.float64).sum(-1) - 1).max() < tolerance


def test_what_the_loop_does_not_check_declares_it_or_makes_a_choice():
  """A decision or a set of tokens makes a distribution; of float arrays these are a sampler's, or means of such."""
  declared = {x for x in vars(rules).values() if callable(x) and hasattr(x, 'declaration') and x.declaration.normalized}
  assert declared == {rules.speculative, rules.lossy, rules.lossy_star, rules.own, rules.weighted}
  assert all(targeted(rule, *pairs(1), ALPHAS[rule][0], Sampler()).normalized for rule in RULES)
  assert not rules.target(lambda q, p: q.logits, list(pairs(1))).normalized


def test_every_rule_of_the_package_has_a_range_and_a_definition():
  for rule in PACKAGE:
    assert rule.declaration.definition is not None
    assert rule is rules.speculative or rule.declaration.alpha is not None
  assert {rules.name_of(rule) for rule in RULES} == {r.__name__ for r in PACKAGE} | reference.HEADS.keys()


@settings(deadline=None, max_examples=6, derandomize=True, database=None)
@given(st.data())
@over_temperatures
@over_cases
def test_a_target_is_a_distribution(rule, alpha, temperature, data):
  logits = hnp.arrays(np.float32, (ROWS, V), elements=st.floats(-60, 60, width=32))
  lq, lp = data.draw(logits), data.draw(logits)
  assert_distribution(target(rule, lq, lp, alpha, Sampler(temperature)))


@over_temperatures
@over_cases
def test_a_target_equals_its_definition_in_float64(rule, alpha, temperature):
  lq, lp = pairs(1)
  pi = target(rule, lq, lp, alpha, Sampler(temperature))
  expected = definition(rule, lq, lp, alpha, reference.Sampler(temperature))
  np.testing.assert_allclose(pi, expected, atol=5e-6)


def test_the_values_of_alpha_are_telling():
  """Every rule of a decision defers in some of the rows and not in others, so that the test above sees both."""
  lq, lp = pairs(1)
  for rule, alpha in CASES:
    if rule in BINARY:
      assert 0 < targeted(rule, lq, lp, alpha, Sampler()).deferred.sum() < ROWS, (rule, alpha)
  assert len(set(CASES)) == 3 * (len(RULES) - 1) + 1


@over_cases
def test_leading_axes_are_rows(rule, alpha):
  lq, lp = pairs(2, (2, 3, V))
  whole = target(rule, lq, lp, alpha, Sampler(0.7))
  for i in range(2):
    np.testing.assert_allclose(target(rule, lq[i], lp[i], alpha, Sampler(0.7)), whole[i], atol=1e-6)
    for j in range(3):
      np.testing.assert_allclose(target(rule, lq[i, j], lp[i, j], alpha, Sampler(0.7)), whole[i, j], atol=1e-6)


@over_temperatures
@over_rules
def test_the_ends_of_alpha_are_plain_speculation_and_the_drafter(rule, temperature):
  low, high, alone, plain = rule.declaration.alpha or rules.Range()
  lq, lp = pairs(3)
  q, p = distributions(lq, lp, temperature)
  if plain is not None:
    assert plain == low
    np.testing.assert_allclose(target(rule, lq, lp, plain, Sampler(temperature)), p, atol=2e-6)
  if alone is not None:
    assert alone == high
    np.testing.assert_allclose(target(rule, lq, lp, alone, Sampler(temperature)), q, atol=2e-6)


@pytest.mark.parametrize('rule', [*BINARY, rules.lossy, rules.lossy_star], ids=rules.name_of)
def test_larger_alpha_rejects_less(rule):
  _, _, alone, plain = rule.declaration.alpha
  lq, lp = pairs(4)
  q, _ = distributions(lq, lp, 1.0)
  ends = [a for a in (plain, *ALPHAS[rule], alone) if a is not None]
  rejected = [reference_tv(q, target(rule, lq, lp, a, Sampler())) for a in ends]
  for less, more in zip(rejected, rejected[1:]):
    assert (less >= more - 1e-5).all()
  assert rejected[0].sum() > rejected[-1].sum() + 0.1


def reference_tv(a, b):
  return np.array([reference.tv(x, y) for x, y in zip(a, b)])


@over_cases
def test_a_target_at_temperature_0_is_one_hot(rule, alpha):
  pi = target(rule, *pairs(5), alpha, Sampler(0.0))
  assert ((pi == 0) | (pi == 1)).all() and (pi.sum(-1) == 1).all()


def test_token_v3_at_alpha_0_keeps_the_arg_max_of_the_verifier():
  lq, lp = pairs(3)
  q, p = distributions(lq, lp, 1.0)
  np.testing.assert_allclose(target(rules.token_v3, lq, lp, 0.0, Sampler(0.0)), distributions(lq, lp, 0.0)[1])
  best = p.argmax(-1)
  kept = q[np.arange(ROWS), best][:, None]
  expected = np.eye(V)[best] * kept + p * (1 - kept)
  np.testing.assert_allclose(target(rules.token_v3, lq, lp, 0.0, Sampler()), expected, atol=2e-6)


@pytest.mark.parametrize('rule', [rules.lossy, rules.lossy_star], ids=rules.name_of)
def test_lossy_near_alpha_1_keeps_every_token_that_the_verifier_allows(rule):
  lq, lp = pairs(3)
  np.testing.assert_allclose(target(rule, lq, lp, 0.9999, Sampler()), distributions(lq, lp, 1.0)[0], atol=1e-3)


# ---- lemmas ----


@over_temperatures
@pytest.mark.parametrize('rule', BINARY, ids=rules.name_of)
def test_a_rejection_has_probability_delta_times_tv(rule, temperature):
  """Lemma 3 of the cascades paper."""
  lq, lp = pairs(6)
  q, p = distributions(lq, lp, temperature)
  for alpha in ALPHAS[rule]:
    pi = target(rule, lq, lp, alpha, Sampler(temperature))
    sampler = reference.Sampler(temperature)
    delta = [reference.deferral(rules.name_of(rule), a, b, alpha, sampler) for a, b in zip(lq, lp)]
    np.testing.assert_allclose(np.maximum(0, q - pi).sum(-1), delta * reference_tv(q, p), atol=5e-6)


@pytest.mark.parametrize('one, other', [(rules.opt, rules.diff), (rules.opt_log, rules.diff_log)])
@pytest.mark.parametrize('alpha', [-1.0, -0.2, 0.0, 0.1, 0.4, 1.0])
def test_opt_and_diff_emit_the_same_at_temperature_0(one, other, alpha):
  """Lemma 8, for every finite α: TV is 1 where the arg maxes differ, and where they agree so do q̃ and p̃."""
  lq, lp = pairs(7, (400, V))
  greedy = Sampler(0.0)
  np.testing.assert_array_equal(target(one, lq, lp, alpha, greedy), target(other, lq, lp, alpha, greedy))
  soft = [target(rule, lq, lp, alpha, Sampler()) for rule in (one, other)]
  assert alpha == 0 or not np.array_equal(*soft)  # above temperature 0 the lemma does not hold


@pytest.mark.parametrize('alpha', [0.1, 0.5, 0.8])
def test_lossy_star_is_the_max_of_two_scaled_distributions(alpha):
  """Lemma 2, with β found by another method."""
  lq, lp = pairs(8)
  q, p = distributions(lq, lp, 1.0)
  pi = target(rules.lossy_star, lq, lp, alpha, Sampler())
  checked = 0
  for a, b, got in zip(q, p, pi):
    rejected = np.maximum(0, a - b / (1 - alpha)).sum()

    def excess(beta, a=a, b=b, rejected=rejected):
      return np.maximum(0, b / beta - a).sum() - rejected

    if excess(10) < 0 < rejected:
      beta = scipy.optimize.brentq(excess, 1 - alpha, 10, xtol=1e-14)
      expected = np.maximum(np.minimum(a, b / (1 - alpha)), b / beta)
      assert abs(expected.sum() - 1) < 1e-9
      np.testing.assert_allclose(got, expected, atol=5e-6)
      np.testing.assert_allclose(np.maximum(0, got - a).sum(), rejected, atol=5e-6)  # the residual holds just that
      checked += 1
  assert checked >= 5


@over_temperatures
@pytest.mark.parametrize('alpha', [0.0, 0.3, 0.8])
def test_lossy_accepts_and_resamples_as_it_is_defined(alpha, temperature):
  lq, lp = pairs(9)
  q, p = distributions(lq, lp, temperature)
  pi = target(rules.lossy, lq, lp, alpha, Sampler(temperature)).astype(np.float64)
  drafted = q > 0
  accept = np.minimum(1, p / ((1 - alpha) * np.where(drafted, q, 1)))
  got = np.minimum(1, pi / np.where(drafted, q, 1))
  np.testing.assert_allclose(np.where(drafted, q * got, 0), np.where(drafted, q * accept, 0), atol=2e-6)
  rest, own = np.maximum(0, pi - q), np.maximum(0, p - q)
  some = (rest.sum(-1) > 1e-2) & (own.sum(-1) > 1e-2)
  assert some.sum() >= 5
  rest, own = (x[some] / x[some].sum(-1, keepdims=True) for x in (rest, own))
  np.testing.assert_allclose(rest, own, atol=1e-4)


@pytest.mark.parametrize('weight', [0.0, 0.1, 0.5, 0.9, 1.0])
def test_a_weighted_ensemble_accepts_at_least_the_proposers_weight(weight):
  """Theorem 3.2 of the CoS paper, and acceptance = 1 - TV(q, r)."""
  lq, lp = pairs(10, (400, V), scale=3.0)
  for temperature in (0.7, 1.0):
    q, p = distributions(lq, lp, temperature)
    r = rules.target(partial(rules.weighted, weights=(weight, 1 - weight)), (lq, lp), Sampler(temperature)).probs
    accepted = np.minimum(q, r).sum(-1)
    assert accepted.min() >= weight - 1e-5
    np.testing.assert_allclose(accepted, 1 - (1 - weight) * reference_tv(q, p), atol=1e-5)
    np.testing.assert_allclose(sampling.tv(jnp.float32(q), r), 1 - accepted, atol=1e-5)


# ---- n models ----


def three(seed):
  p, q = pairs(seed)
  other, _ = pairs(seed + 100)
  return q, (q + 0.5 * other).astype(np.float32), p


@over_temperatures
@over_cases
def test_a_cascade_of_three_models_takes_the_tail_for_the_verifier(rule, alpha, temperature):
  logits = three(12)
  found = rules.target(bound(rule, alpha), logits, Sampler(temperature))
  s = reference.Sampler(temperature)
  expected = [reference.chained(rules.name_of(rule), row, alpha or 0.0, s) for row in zip(*logits)]
  np.testing.assert_allclose(found.probs, expected, atol=1e-5)
  first = targeted(rule, *logits[:2], alpha, Sampler(temperature)).deferred
  if first is not None and 'opt' not in rules.name_of(rule):  # whose cost is that of the rest
    np.testing.assert_array_equal(found.deferred, first)


def test_a_rule_of_ones_own_cascades_three_models():
  def half(q, p):
    return (q.probs + p.probs) / 2

  logits, soft = jnp.stack([jnp.float32(x) for x in three(12)]), Sampler(0.7)
  pi = rules.target(half, logits, soft).probs
  np.testing.assert_allclose(pi, soft(logits[0]) / 2 + (soft(logits[1]) + soft(logits[2])) / 4, atol=1e-6)


def weights(*values):
  return dict(weights=values), rules.weighted, lambda x, s: reference.weighted(x, values, s)


# name: (models, numbers, combiner, definition)
COMBINERS = {
  'weighted 2': (2, *weights(0.3, 0.7)),
  'weighted 3': (3, *weights(0.2, 0.5, 0.3)),
  'contrastive': (2, dict(mu=0.4), rules.contrastive, lambda x, s: reference.contrastive(x, 0.4, s)),
  'contrastive, no amateur': (2, dict(mu=0.0), rules.contrastive, lambda x, s: s(x[1])),
  'realign': (2, dict(lam=0.3), rules.realign, lambda x, s: reference.realign(x, 0.3, s)),
  'realign, aligned': (2, dict(lam=1.0), rules.realign, lambda x, s: s(x[1])),
}


@pytest.mark.parametrize('filters', [{}, dict(top_k=3), dict(top_p=0.8)], ids=str)
@over_temperatures
@pytest.mark.parametrize('name', COMBINERS)
def test_a_combiner_equals_its_definition_in_float64(name, temperature, filters):
  models, numbers, combiner, definition = COMBINERS[name]
  logits = three(13)[:models]
  pi = rules.target(partial(combiner, **numbers), logits, Sampler(temperature, **filters)).probs
  s = reference.Sampler(temperature, **filters)
  expected = [definition([np.asarray(x, np.float64) for x in row], s) for row in zip(*logits)]
  np.testing.assert_allclose(pi, expected, atol=5e-6)


def test_weighted_at_temperature_0_is_not_a_mixture_of_arg_maxes():
  a, b = np.log([0.45, 0.4, 0.15]), np.log([0.1, 0.4, 0.5])  # arg maxes 0 and 2; the mean's is 1
  pi = rules.target(partial(rules.weighted, weights=(0.5, 0.5)), jnp.float32([a, b]), Sampler(0.0)).probs
  assert pi.tolist() == [0, 1, 0]


# ---- float32 extremes ----


def extremes():
  """Return pairs of logits [ROWS, V], with every kind of row against every other, and what is masked in both."""
  base = np.linspace(-1, 1, V).astype(np.float32)
  half, other = (np.where(np.isin(np.arange(V), cut), -np.inf, base) for cut in ((0, 1, 2), (2, 3, 6)))
  single = np.where(np.arange(V) == 4, 0, -np.inf)
  kinds = [base, half, other, single, base * 1e4, -base * 1e4]
  rows = [(a, b) for a in kinds for b in kinds]
  rows += [(base * 0, base), (base, base * 0), (base * 0 + 1e4, half), (single[::-1], half)]
  lq, lp = (np.float32([row[i] for row in rows]) for i in range(2))
  assert lq.shape == (ROWS, V)
  return lq, lp, np.isneginf(lq) & np.isneginf(lp)


@over_temperatures
@over_rules
def test_masked_and_extreme_logits_give_distributions(rule, temperature):
  _, _, alone, plain = rule.declaration.alpha or rules.Range()
  lq, lp, masked = extremes()
  q, p = distributions(lq, lp, temperature)
  for alpha in {*ALPHAS[rule], plain, alone} - {None} or [None]:
    pi = target(rule, lq, lp, alpha, Sampler(temperature))
    assert_distribution(pi)
    assert masked.any() and (pi[masked] == 0).all()
    if not rules.name_of(rule).startswith('lossy'):
      assert (pi <= q + p + 1e-6).all()  # what one model masks, only the other's distribution can give
    rest = np.asarray(sampling.residual(jnp.asarray(pi), jnp.float32(q)))
    assert_distribution(rest)


@over_temperatures
@over_cases
def test_tokens_masked_in_both_models_change_nothing(rule, alpha, temperature):
  lq, lp = pairs(15)
  longer = (np.insert(x, [0, 3], -np.inf, axis=-1) for x in (lq, lp))
  pi = target(rule, *longer, alpha, Sampler(temperature))
  expected = np.insert(target(rule, lq, lp, alpha, Sampler(temperature)), [0, 3], 0, axis=-1)
  np.testing.assert_allclose(pi, expected, atol=1e-6)


@pytest.mark.parametrize('temperature', [0.0, 1.0])
@pytest.mark.parametrize('name', COMBINERS)
def test_combiners_mask_what_is_masked(name, temperature):
  models, numbers, combiner, _ = COMBINERS[name]
  lq, lp, masked = extremes()
  logits = np.stack([lq, lp, lp][:models])
  pi = np.asarray(rules.target(partial(combiner, **numbers), jnp.asarray(logits), Sampler(temperature)).probs)
  if name.startswith('realign, '):
    masked = np.isneginf(lp)
  elif name == 'realign':
    masked = np.isneginf(lq) | np.isneginf(lp)
  elif name.startswith('contrastive'):
    masked = np.isneginf(lp)
  possible = ~masked.all(-1)
  assert_distribution(pi[possible])
  assert (pi[possible][masked[possible]] == 0).all()


@over_rules
def test_a_large_vocabulary_keeps_its_distribution(rule):
  lq, lp = pairs(14, (1, 256_000), scale=3.0)
  alpha = ALPHAS[rule][-1]
  pi = target(rule, lq, lp, alpha, Sampler())
  assert_distribution(pi, 1e-4)
  expected = definition(rule, lq.astype(np.float64), lp.astype(np.float64), alpha, reference.Sampler())
  np.testing.assert_allclose(pi, expected, rtol=1e-3, atol=1e-9)


# ---- errors ----


@pytest.mark.parametrize(
  'make, message',
  [
    (lambda: rules.bind_rule(partial(rules.diff, alpha=-1.01)), having('diff', '-1 <=', 'alpha=-1.01')),
    (lambda: rules.bind_rule(partial(rules.chow_log, alpha=-0.1)), r'alpha=-0\.1'),
    (lambda: rules.bind_rule(partial(rules.token_v3, alpha=-0.1)), r'alpha=-0\.1'),
    (lambda: rules.bind_rule(partial(rules.lossy, alpha=1)), having('lossy', '<= 0.9999', 'alpha=1')),
    (lambda: rules.bind_rule(partial(rules.lossy_star, alpha=-0.1)), r'alpha=-0\.1'),
    (lambda: rules.bind_rule(partial(rules.opt, alpha=np.nan)), 'alpha=nan'),
    (lambda: rules.bind_rule(partial(rules.bild_star, alpha=np.nan)), 'alpha=nan'),
    (lambda: rules.bind_rule(partial(rules.opt, 0.1)), having('opt', 'keyword')),
    (lambda: methods.ensemble(partial(rules.opt, alpha=np.nan)), 'alpha=nan'),
    (lambda: rules.bind_combiner(partial(rules.weighted, weights=(0.5, 0.6))), 'weights'),
    (lambda: rules.bind_combiner(partial(rules.weighted, weights=(-0.5, 1.5))), 'weights'),
    (lambda: rules.bind_combiner(rules.weighted), having('weighted', 'weights')),
    (lambda: methods.ensemble(partial(rules.weighted, weights=(0.5, 0.5)), models=3), having('2', '3 models')),
    (lambda: methods.cos(partial(rules.weighted, weights=(0.2, 0.3, 0.5)), (2, 1)), having('3', '2 models')),
    (
      lambda: rules.target(partial(rules.weighted, weights=(0.5, 0.5)), jnp.zeros((3, 1, V))),
      having('2', '3 models'),
    ),
    (lambda: rules.bind_combiner(partial(rules.contrastive, mu=np.nan)), having('contrastive', 'mu', 'nan')),
    (lambda: rules.bind_combiner(rules.contrastive), having('contrastive', 'mu')),
    (lambda: rules.target(partial(rules.contrastive, mu=0.1), jnp.zeros((3, 1, V))), 'not 3'),
  ],
)
def test_errors_name_the_value_and_the_remedy(make, message):
  with pytest.raises(ValueError, match=message):
    make()


@over_rules
def test_both_ends_of_alpha_can_be_bound(rule):
  _, _, *ends = rule.declaration.alpha or rules.Range()
  for alpha in ends:
    if alpha is not None:
      assert rules.bind_rule(bound(rule, alpha)).keywords['alpha'] == np.float32(alpha)


def test_a_rule_takes_numbers_of_any_name():
  def surer(q, p, *, alpha, factor):
    return factor * jnp.exp(p.logits.max(-1)) > jnp.exp(q.logits.max(-1)) + alpha

  logits = jnp.log(jnp.array([[0.6, 0.4], [0.2, 0.8]]))
  bound = rules.bind_rule(partial(surer, alpha=0.1, factor=1.0))
  np.testing.assert_allclose(rules.target(bound, logits).probs, [0.2, 0.8], rtol=1e-6)
  np.testing.assert_allclose(rules.target(partial(bound, factor=0.5), logits).probs, [0.6, 0.4], rtol=1e-6)
  with pytest.raises(ValueError, match=having('surer', 'factor')):
    rules.bind_rule(partial(surer, alpha=0.1))


def test_what_depends_on_the_place_in_a_draft_says_so():
  logits = jnp.zeros((2, 3, V))
  with pytest.raises(ValueError, match=having('slot', 'by_slot=True')):
    rules.target(lambda q, p: q.slot > 0, logits, slot=jnp.arange(3))
