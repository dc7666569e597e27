"""Rules and combiners: distributions, limits in α, the papers' lemmas, float32 extremes, errors.

A rule that the package declares is in every test that is parametrised over rules, at values of α found by bisection and
at the ends of its range; one program serves all of them at temperature 0, and one above.
"""

import contextlib
from functools import cache, partial
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
import jax.numpy as jnp
from matching import having
import numpy as np
import pytest
import reference
from reference import bound, RULES
import scipy.optimize
from tiers import long_but

from speccascade import methods, rules, Sampler, sampling

ROWS, V = 40, 7
TEMPERATURES = [0.0, 0.7, 1.0]
over_rules = pytest.mark.parametrize('name', RULES)


@contextlib.contextmanager
def at(*where):
  """Add to an assertion that fails what it was about."""
  try:
    yield
  except AssertionError as error:
    error.add_note(f'at {", ".join(map(str, where))}')
    raise


def pairs(seed, shape=(ROWS, V), scale=1.5):
  """Return logits of two models that often agree."""
  rng = np.random.default_rng(seed)
  p = rng.normal(scale=scale, size=shape)
  return tuple(np.float32(x) for x in (p + rng.normal(scale=0.7 * scale, size=shape), p))


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


def three(seed):
  p, q = pairs(seed)
  other, _ = pairs(seed + 100)
  return q, (q + 0.5 * other).astype(np.float32), p


INPUTS = {f'seed {seed}': pairs(seed) for seed in range(1, 7)}
INPUTS |= {'extremes': extremes()[:2], 'of three': three(12)[:2]}


def target(name, lq, lp, alpha, sampler):
  return np.asarray(rules.target(bound(name, alpha), (jnp.asarray(lq), jnp.asarray(lp)), sampler).probs)


@cache
def telling(name):
  """Return values of α at which a quarter, a half and three quarters of the mass that can be rejected is rejected."""
  few = list(zip(*(x[:12].astype(np.float64) for x in pairs(1))))
  return [reference.telling(name, few, share) for share in (0.75, 0.5, 0.25)]


@cache
def alphas(name):
  """Return the values of α that tell, and the ends of the range."""
  _, _, *ends, _ = RULES[name].declaration.alpha or rules.Range()
  return [a for a in dict.fromkeys([*telling(name), *ends]) if a is not None] or [None]


@partial(jax.jit, static_argnums=0)
def compiled(name, numbers, logits):
  """Return the target and the deferrals of a rule for each α and temperature."""

  def found(alpha, temperature):
    return rules.target(bound(name, alpha), logits, Sampler(temperature))[:2]

  over = jax.vmap(lambda alpha: jax.vmap(lambda t: found(alpha, t))(jnp.float32(TEMPERATURES[1:])))
  return jax.vmap(lambda alpha: found(alpha, 0.0))(numbers), over(numbers)


def each(name, values, *logits):
  """Return [(α, temperature, π, deferrals)]."""
  given = np.float32([0.0 if a is None else a for a in values])
  cold, warm = jax.device_get(compiled(name, given, logits))
  at = lambda x, *index: None if x is None else x[index]
  return [
    (alpha, t, *(at(x, i) if t == 0 else at(y, i, j - 1) for x, y in zip(cold, warm)))
    for i, alpha in enumerate(values)
    for j, t in enumerate(TEMPERATURES)
  ]


@cache
def everywhere(name):
  return each(name, alphas(name), *(np.stack(x) for x in zip(*INPUTS.values())))


def targets(name, inputs, values=None, temperatures=TEMPERATURES):
  """Yield α, temperature, π and deferrals of a rule for some of the inputs, at the values of α that tell or these."""
  values, k = telling(name) if values is None else values, list(INPUTS).index(inputs)
  found = [x for x in everywhere(name) if x[0] in values and x[1] in temperatures]
  assert len(found) == len(set(values)) * len(temperatures)
  for alpha, temperature, pi, deferred in found:
    yield alpha, temperature, pi[k], None if deferred is None else deferred[k]


def traced(function):
  """Return the target of a rule or a combiner as it is traced."""
  found = []
  jax.eval_shape(lambda logits: found.append(rules.target(function, logits)), jnp.zeros((2, V)))
  return found[0]


# of the file of lossy rules all but `fuzzy`, which makes a decision
LOSSY = [name for name, x in RULES.items() if x.__module__ == rules.lossy.__module__ and name != 'fuzzy']
BINARY = [name for name in RULES if traced(bound(name, 0.5)).deferred is not None]


def distributions(lq, lp, temperature):
  """Return q̃, p̃ in float64 by the reference."""
  s = reference.Sampler(temperature)
  return tuple(np.array([s(row) for row in x]) for x in (lq, lp))


def reference_tv(a, b):
  return np.array([reference.tv(x, y) for x, y in zip(a, b)])


def assert_distribution(pi, tolerance=1e-5):
  assert np.isfinite(pi).all() and (pi >= -1e-7).all()
  assert abs(pi.astype(np.float64).sum(-1) - 1).max() < tolerance


def test_what_the_loop_does_not_check_declares_it_or_makes_a_choice():
  """A decision or a set of tokens makes a distribution; of float arrays these are a sampler's, or means of such."""
  assert all(traced(bound(name, telling(name)[0])).normalized for name in RULES)
  assert not traced(lambda q, p: q.logits).normalized


def test_every_rule_of_the_package_has_a_range_and_a_definition():
  package = {name for name, x in rules.known().items() if x.declaration.is_rule and not x.declaration.by_prefix}
  for name in package:
    assert RULES[name].declaration.definition is not None
    assert name == 'speculative' or RULES[name].declaration.alpha is not None
  assert RULES.keys() == package


@settings(deadline=None, max_examples=6, derandomize=True, database=None)
@given(st.data())
@over_rules
def test_a_target_is_a_distribution(name, data):
  logits = hnp.arrays(np.float32, (ROWS, V), elements=st.floats(-60, 60, width=32))
  lq, lp = data.draw(logits), data.draw(logits)
  others = [np.stack([np.roll(x, i * shift, 0) for i in range(len(INPUTS))]) for x, shift in ((lq, 0), (lp, 1))]
  for alpha, temperature, pi, _ in each(name, alphas(name), *others):
    with at(alpha, temperature):
      assert_distribution(pi)


@over_rules
def test_a_target_equals_its_definition_in_float64(name):
  for alpha, temperature, pi, _ in targets(name, 'seed 1'):
    s = reference.Sampler(temperature)
    with at(alpha, temperature):
      expected = [reference.target(name, q, p, alpha, s) for q, p in zip(*INPUTS['seed 1'])]
      np.testing.assert_allclose(pi, expected, atol=5e-6)


def test_the_values_of_alpha_are_telling():
  """Every rule of a decision defers in some of the rows and not in others, so that the test above sees both."""
  for name in BINARY:
    for alpha, _, _, deferred in targets(name, 'seed 1', temperatures=[1.0]):
      with at(name, alpha):
        assert 0 < deferred.sum() < ROWS
  assert sum(len(set(telling(name))) for name in RULES) == 3 * (len(RULES) - 1) + 1


@over_rules
def test_the_ends_of_alpha_are_plain_speculation_and_the_drafter(name):
  low, high, alone, plain, _ = RULES[name].declaration.alpha or rules.Range()
  assert plain in (None, low) and alone in (None, high)
  for temperature in TEMPERATURES:
    q, p = distributions(*INPUTS['seed 3'], temperature)
    for end, expected in ((plain, p), (alone, q)):
      if end is not None:
        ((*_, pi, _),) = targets(name, 'seed 3', [end], [temperature])
        with at(end, temperature):
          np.testing.assert_allclose(pi, expected, atol=2e-6)


# The redrawn token of these two is often the drafter's, so that at a position a larger α may reject more.
@pytest.mark.parametrize('name', [*BINARY, *(name for name in LOSSY if name not in ('typical', 'thresholds'))])
def test_larger_alpha_rejects_less(name):
  q, _ = distributions(*INPUTS['seed 4'], 1.0)
  found = sorted(targets(name, 'seed 4', alphas(name), [1.0]), key=lambda x: x[0])
  rejected = [reference_tv(q, pi) for _, _, pi, _ in found]
  for less, more in zip(rejected, rejected[1:]):
    assert (less >= more - 1e-5).all()
  assert rejected[0].sum() > rejected[-1].sum() + 0.1


@over_rules
def test_a_target_at_temperature_0_is_one_hot(name):
  for alpha, _, pi, _ in targets(name, 'seed 5', temperatures=[0.0]):
    with at(alpha):
      assert ((pi == 0) | (pi == 1)).all() and (pi.sum(-1) == 1).all()


# ---- lemmas ----


@pytest.mark.parametrize('name', BINARY)
def test_a_rejection_has_probability_delta_times_tv(name):
  """Lemma 3 of the cascades paper."""
  lq, lp = INPUTS['seed 6']
  for alpha, temperature, pi, _ in targets(name, 'seed 6'):
    q, p = distributions(lq, lp, temperature)
    s = reference.Sampler(temperature)
    delta = [reference.deferral(name, a, b, alpha, s) for a, b in zip(lq, lp)]
    with at(alpha, temperature):
      np.testing.assert_allclose(np.maximum(0, q - pi).sum(-1), delta * reference_tv(q, p), atol=5e-6)


@pytest.mark.parametrize('names', [('opt', 'diff'), ('opt_log', 'diff_log')], ids='-'.join)
def test_opt_and_diff_emit_the_same_at_temperature_0(names):
  """Lemma 8, for every finite α: TV is 1 where the arg maxes differ, and where they agree so do q̃ and p̃."""
  values = [-1.0, -0.2, 0.0, 0.1, 0.4, 1.0]
  for one, other in zip(*(each(name, values, *pairs(7, (400, V))) for name in names)):
    alpha, temperature = one[:2]
    with at(alpha, temperature):
      if temperature == 0:
        np.testing.assert_array_equal(one[2], other[2])
      else:  # the lemma does not hold
        assert alpha == 0 or not np.array_equal(one[2], other[2])


@pytest.mark.parametrize('alpha', [0.1, 0.5, 0.8])
def test_lossy_star_is_the_max_of_two_scaled_distributions(alpha):
  """Lemma 2, with β found by another method."""
  lq, lp = pairs(8)
  q, p = distributions(lq, lp, 1.0)
  pi = target('lossy_star', lq, lp, alpha, Sampler())
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


@pytest.mark.parametrize('temperature', TEMPERATURES)
@pytest.mark.parametrize('alpha', [0.0, 0.3, 0.8])
def test_lossy_accepts_and_resamples_as_it_is_defined(alpha, temperature):
  lq, lp = pairs(9)
  q, p = distributions(lq, lp, temperature)
  pi = target('lossy', lq, lp, alpha, Sampler(temperature)).astype(np.float64)
  drafted = q > 0
  accept = np.minimum(1, p / ((1 - alpha) * np.where(drafted, q, 1)))
  got = np.minimum(1, pi / np.where(drafted, q, 1))
  np.testing.assert_allclose(np.where(drafted, q * got, 0), np.where(drafted, q * accept, 0), atol=2e-6)
  rest, own = np.maximum(0, pi - q), np.maximum(0, p - q)
  some = (rest.sum(-1) > 1e-2) & (own.sum(-1) > 1e-2)
  assert some.sum() >= 5
  rest, own = (x[some] / x[some].sum(-1, keepdims=True) for x in (rest, own))
  np.testing.assert_allclose(rest, own, atol=1e-4)


def test_lossy_rules_have_the_distributions_of_the_published_tests():
  """Of q = (.9, .1) and p = (.6, .4); `relaxed` with all tokens is `token_v2` greedily, and one token is p's best."""
  logits = jnp.log(jnp.float32([[0.9, 0.1], [0.6, 0.4]]))
  for rule, expected in (
    (partial(rules.lossy, alpha=0.2), 0.75),
    (partial(rules.typical, alpha=0.3), 0.96),
    (partial(rules.medusa, alpha=0.3), 1.0),
    (partial(rules.relaxed, alpha=0.1), 1.0),
    (partial(rules.relaxed, alpha=0.3), 0.9),
    (partial(rules.relaxed, alpha=0.3, top_k=1), 1.0),
    (partial(rules.thresholds, alpha=0.5), 0.92),
    (partial(rules.thresholds, alpha=0.0, single=0.5), 0.96),
    (partial(rules.mentored, alpha=0.05), 0.74473),
    (partial(rules.token_v3_tested, alpha=0.3), 0.9),
  ):
    np.testing.assert_allclose(rules.target(rule, logits).probs, [expected, 1 - expected], atol=1e-4)
  for alpha in (0.1, 0.4):
    relaxed, token = (target(name, *pairs(7, (400, V)), alpha, Sampler(0.0)) for name in ('relaxed', 'token_v2'))
    np.testing.assert_array_equal(relaxed, token)


@pytest.mark.parametrize('alpha', [0.0, 0.2, 0.5, 0.8])
@pytest.mark.parametrize('temperature', TEMPERATURES)
def test_testing_what_a_token_rule_does_not_keep_is_nearer_to_the_verifier_and_accepts_more(alpha, temperature):
  lq, lp = pairs(20, (400, V), scale=3.0)
  q, p = distributions(lq, lp, temperature)
  tested, kept = (target(name, lq, lp, alpha, Sampler(temperature)) for name in ('token_v3_tested', 'token_v3'))
  assert (reference_tv(tested, p) <= reference_tv(kept, p) + 1e-5).all()
  assert (reference_tv(tested, q) <= reference_tv(kept, q) + 1e-5).all()
  if temperature:
    assert (reference_tv(tested, p) < reference_tv(kept, p) - 0.01).mean() > 0.1
    np.testing.assert_allclose(reference_tv(tested, p) + reference_tv(tested, q), reference_tv(p, q), atol=1e-5)


def test_a_mentored_target_has_the_divergence_that_it_may_have():
  q, p = (np.float64(x) for x in distributions(*pairs(21, (400, V)), 1.0))
  divergence = lambda a, b: (a * np.log(a / b)).sum(-1)
  for alpha in (0.0, 0.01, 0.1, 0.5):
    pi = target('mentored', *pairs(21, (400, V)), alpha, Sampler()).astype(np.float64)
    np.testing.assert_allclose(divergence(p, pi), np.minimum(alpha, divergence(p, q)), atol=2e-5)
    assert (reference_tv(pi, q) + reference_tv(pi, p) <= reference_tv(p, q) + 1e-4).all()


def test_a_phased_rule_reads_the_tokens_before():
  rule = partial(rules.phased, inside=partial(rules.lossy, alpha=0.5), begin=(1,), end=(2, 3))
  logits = jnp.stack([jnp.float32(x) for x in pairs(23, (1, 6, V))])
  tokens = jnp.int32([[0, 1, 2, 2, 3, 1]])
  pi = rules.target(rule, logits, prefix=rules.Prefix(tokens, jnp.arange(1, 7)[None])).probs
  inner, outer = (rules.target(x, logits).probs for x in (partial(rules.lossy, alpha=0.5), rules.speculative))
  for i, inside in enumerate([False, True, True, True, False, True]):
    np.testing.assert_array_equal(pi[:, i], (inner if inside else outer)[:, i])
  assert rules.spelled(rules.find('phased(inside=lossy:0.5, begin=(1,), end=(2, 3))')) == rules.spelled(rule)


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


@pytest.mark.parametrize('name', long_but(RULES, ['opt', 'token_v3', 'lossy_star', 'mentored']))
def test_a_cascade_of_three_models_takes_the_tail_for_the_verifier(name):
  logits = three(12)
  for alpha, temperature, pi, deferred in each(name, telling(name), *map(jnp.asarray, logits)):
    ((*_, first),) = targets(name, 'of three', [alpha], [temperature])
    s = reference.Sampler(temperature)
    with at(alpha, temperature):
      np.testing.assert_allclose(pi, [reference.chained(name, row, alpha, s) for row in zip(*logits)], atol=1e-5)
      if first is not None and 'opt' not in name:  # whose cost is that of the rest
        np.testing.assert_array_equal(deferred, first)


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


def test_every_combiner_of_the_package_has_a_definition_here():
  known = {name for name, x in rules.known().items() if not rules.declaration(x).is_rule}
  assert known == {rules.name_of(combiner) for *_, combiner, _ in COMBINERS.values()}


@pytest.mark.parametrize('name', COMBINERS)
def test_a_combiner_equals_its_definition_in_float64(name):
  models, numbers, combiner, definition = COMBINERS[name]
  logits = three(13)[:models]
  run = jax.jit(lambda sampler: rules.target(partial(combiner, **numbers), logits, sampler).probs)
  for temperature, filters in itertools.product(TEMPERATURES, [{}, dict(top_k=3), dict(top_p=0.8)]):
    s, pi = reference.Sampler(temperature, **filters), run(Sampler(temperature, **filters))
    expected = [definition([np.asarray(x, np.float64) for x in row], s) for row in zip(*logits)]
    with at(temperature, filters):
      np.testing.assert_allclose(pi, expected, atol=5e-6)


def test_weighted_at_temperature_0_is_not_a_mixture_of_arg_maxes():
  a, b = np.log([0.45, 0.4, 0.15]), np.log([0.1, 0.4, 0.5])  # arg maxes 0 and 2; the mean's is 1
  pi = rules.target(partial(rules.weighted, weights=(0.5, 0.5)), jnp.float32([a, b]), Sampler(0.0)).probs
  assert pi.tolist() == [0, 1, 0]


# ---- float32 extremes ----


@over_rules
def test_masked_and_extreme_logits_give_distributions(name):
  lq, lp, masked = extremes()
  assert masked.any()
  for alpha, temperature, pi, _ in targets(name, 'extremes', alphas(name)):
    q, p = distributions(lq, lp, temperature)
    with at(alpha, temperature):
      assert_distribution(pi)
      assert (pi[masked] == 0).all()
      assert (pi[(q == 0) & (p == 0)] == 0).all()
      if name not in LOSSY:
        assert (pi <= q + p + 1e-6).all()  # what one model masks, only the other's distribution can give
      assert_distribution(np.asarray(sampling.residual(jnp.asarray(pi), jnp.float32(q))))


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


@pytest.mark.full
@pytest.mark.parametrize('name', long_but(RULES, ['opt', 'token_v3', 'lossy_star', 'mentored']))
def test_a_large_vocabulary_keeps_its_distribution(name):
  quadratic = name in ('mentored', 'thresholds')  # in the vocabulary, by definition
  lq, lp = pairs(14, (1, 16_000 if quadratic else 256_000), scale=3.0)
  alpha = telling(name)[-1]
  pi = target(name, lq, lp, alpha, Sampler())
  assert_distribution(pi, 1e-4)
  expected = reference.target(name, lq[0].astype(np.float64), lp[0].astype(np.float64), alpha, reference.Sampler())
  np.testing.assert_allclose(pi[0], expected, rtol=1e-3, atol=1e-9)


# ---- errors ----


@pytest.mark.parametrize(
  'make, message',
  [
    (lambda: rules.bind_rule(partial(rules.opt, 0.1)), having('opt', 'keyword')),
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


def test_alpha_is_bound_up_to_both_ends_of_its_range_and_refused_beyond():
  for name in RULES.keys() - {'speculative'}:
    low, high, *_ = RULES[name].declaration.alpha
    for alpha in (low, high):
      assert rules.bind_rule(bound(name, alpha)).keywords['alpha'] == np.float32(alpha)
    for alpha in {low - 0.01, high + 0.01, np.nan} - {-np.inf, np.inf}:
      with pytest.raises(ValueError, match=having(name, f'{low} <= alpha <= {high}', f'alpha={np.float32(alpha)!s}')):
        rules.bind_rule(bound(name, alpha))


def test_a_rule_takes_numbers_of_any_name():
  def surer(q, p, *, alpha, factor):
    return factor * jnp.exp(p.logits.max(-1)) > jnp.exp(q.logits.max(-1)) + alpha

  logits = jnp.log(jnp.array([[0.6, 0.4], [0.2, 0.8]]))
  rule = rules.bind_rule(partial(surer, alpha=0.1, factor=1.0))
  np.testing.assert_allclose(rules.target(rule, logits).probs, [0.2, 0.8], rtol=1e-6)
  np.testing.assert_allclose(rules.target(partial(rule, factor=0.5), logits).probs, [0.6, 0.4], rtol=1e-6)
  with pytest.raises(ValueError, match=having('surer', 'factor')):
    rules.bind_rule(partial(surer, alpha=0.1))


def test_what_depends_on_the_place_in_a_draft_says_so():
  logits = jnp.zeros((2, 3, V))
  with pytest.raises(ValueError, match=having('slot', 'by_slot=True')):
    rules.target(lambda q, p: q.slot > 0, logits, slot=jnp.arange(3))
