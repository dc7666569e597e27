"""The sampler against its definition, draws against their distribution, and the keyed numbers behind them."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import scipy.special
import scipy.stats

from speccascade import Sampler, sampling
from speccascade.types import ACCEPT, DRAFT, FINAL

FALSE_ALARM = 1e-6  # per χ² or KS test; the seeds are fixed, so a test that passes once passes always
LARGEST = np.nextafter(np.float32(1), np.float32(0))
ROWS, V = 60, 9
sampled = jax.jit(lambda sampler, logits: sampler(logits))


def some_logits(seed, ties):
  """Return logits [ROWS, V]; with `ties` they take few values, so that filters meet equal ones."""
  x = np.random.default_rng(seed).normal(scale=1.5, size=(ROWS, V)).astype(np.float32)
  return np.round(x) if ties else x


SETTINGS = {
  'T=0': dict(temperature=0.0),
  'T=.3': dict(temperature=0.3),
  'T=2': dict(temperature=2.0),
  'top-k 1': dict(top_k=1),
  'top-k 4, T=.7': dict(top_k=4, temperature=0.7),
  'top-k above V': dict(top_k=1000),
  'top-p tiny': dict(top_p=1e-6),
  'top-p': dict(top_p=0.73),
  'top-p, T=.5': dict(top_p=0.911, temperature=0.5),
  'top-k then top-p': dict(top_k=5, top_p=0.83, temperature=0.8),
  'top-p 1': dict(top_p=1.0),
  'penalty': dict(repetition_penalty=1.7),
  'penalty under 1': dict(repetition_penalty=0.6),
  'penalty, T=0': dict(repetition_penalty=1.7, temperature=0.0),
  'min-p': dict(min_p=0.31),
  'min-p after top-p, T=.7': dict(min_p=0.2, top_p=0.9, temperature=0.7),
  'presence': dict(presence_penalty=0.8),
  'frequency, T=0': dict(frequency_penalty=0.7, temperature=0.0),
  'all': dict(
    temperature=0.7,
    top_k=6,
    top_p=0.87,
    repetition_penalty=1.05,
    min_p=0.1,
    presence_penalty=0.3,
    frequency_penalty=-0.2,
  ),
}


@pytest.mark.parametrize('ties', [False, True])
@pytest.mark.parametrize('name', SETTINGS)
def test_the_sampler_is_its_definition(name, ties):
  logits = some_logits(1, ties)
  seen = np.random.default_rng(2).random((ROWS, V)) < 0.3
  counts = np.random.default_rng(3).integers(0, 3, (ROWS, V)) * seen
  got = np.asarray(sampled(Sampler(**SETTINGS[name]).bind(jnp.asarray(seen), jnp.asarray(counts)), logits))
  for row, tokens, times, distribution in zip(logits, seen, counts, got):
    emitted = np.repeat(np.arange(V), times)
    expected = reference.Sampler(**SETTINGS[name], seen=np.flatnonzero(tokens), emitted=emitted.tolist())(row)
    assert set(np.flatnonzero(distribution)) == set(np.flatnonzero(expected))
    np.testing.assert_allclose(distribution, expected, atol=3e-6)


@pytest.mark.parametrize('window', [False, True])
def test_rows_may_have_samplers_of_their_own(window):
  rows = [SETTINGS[name] for name in ('T=0', 'T=2', 'top-k 4, T=.7', 'top-p', 'min-p', 'penalty')]
  numbers = {}
  for name, neutral in sampling.NEUTRAL.items():
    values = np.float32([row.get(name, neutral) for row in rows])
    numbers[name] = jnp.asarray(values[:, None] if window else values)
  logits = jnp.asarray(some_logits(4, False)[:18].reshape(6, 3, V))
  logits, seen = (logits, jnp.ones((6, 3, V), bool)) if window else (logits[:, 0], jnp.ones((6, V), bool))
  counts = jnp.zeros(seen.shape, jnp.int32)
  got = sampled(Sampler(**numbers, mixed=True).bind(seen, counts), logits)
  for i, row in enumerate(rows):
    alone = sampled(Sampler(**row).bind(seen[i], counts[i]), logits[i])
    np.testing.assert_array_equal(got[i], alone)


def test_filters_keep_ties_together():
  logits = jnp.log(jnp.array([0.3, 0.1, 0.2, 0.2, 0.2]))
  assert (np.asarray(Sampler(top_k=2)(logits)) > 0).tolist() == [True, False, True, True, True]
  assert (np.asarray(Sampler(top_p=0.4)(logits)) > 0).tolist() == [True, False, True, True, True]
  assert (np.asarray(Sampler(top_p=0.25)(logits)) > 0).tolist() == [True, False, False, False, False]
  assert Sampler(temperature=0)(jnp.array([1.0, 3.0, 3.0])).tolist() == [0, 1, 0]


@pytest.mark.parametrize('vocab', [1, 7, 32_128])
def test_the_arg_max_is_the_lowest_of_the_highest(vocab):
  rng = np.random.default_rng(vocab)
  x = np.concatenate([rng.normal(size=(4, vocab)), rng.integers(0, 9, (4, vocab)), np.full((1, vocab), -np.inf)])
  x[1, : vocab // 2] = -np.inf
  x = x.astype(np.float32).reshape(3, 3, vocab)
  np.testing.assert_array_equal(jax.jit(sampling.argmax)(x), x.argmax(-1))


@pytest.mark.parametrize('top_p', [0.3, 0.9, 0.999])
def test_top_p_of_a_large_vocabulary_is_exact(top_p):
  logits = np.random.default_rng(3).normal(scale=3, size=50_000).astype(np.float32)
  distribution = np.asarray(sampled(Sampler(top_p=top_p), logits))
  p = scipy.special.softmax(logits.astype(np.float64))
  order = np.argsort(-p)
  before = np.cumsum(p[order]) - p[order]
  # float32 sums may put a token that stands within 1e-5 of the edge on either side
  surely, never = order[before < top_p - 1e-5], order[before > top_p + 1e-5]
  assert (distribution[surely] > 0).all() and (distribution[never] == 0).all()
  assert len(never) > 100 and len(p) - len(surely) - len(never) < 200


def test_masked_tokens_stay_masked():
  logits = jnp.array([-jnp.inf, 1.0, -jnp.inf, 0.5, 0.2])
  seen = jnp.array([True, True, False, False, False])
  for name, setting in SETTINGS.items():
    distribution = np.asarray(sampled(Sampler(**setting).bind(seen), logits))
    assert np.isfinite(distribution).all() and distribution[0] == distribution[2] == 0, name
    assert distribution.sum() == pytest.approx(1), name


@pytest.mark.parametrize(
  'setting, message',
  [
    (dict(temperature=-0.1), r'temperature=-0\.1'),
    (dict(temperature=float('nan')), 'temperature=nan'),
    (dict(top_p=0.0), r'top_p=0\.0'),
    (dict(top_k=0), 'top_k=0 .* leave it out'),
    (dict(min_p=1.0), r'min_p=1\.0'),
    (dict(presence_penalty=np.inf), 'presence_penalty=inf'),
    (dict(top_k=2.5), r'top_k=2\.5'),
    (dict(repetition_penalty=0), 'repetition_penalty=0'),
    (dict(temperature=1e39), r'temperature=1e\+39'),
    (dict(top_k=10**400), 'top_k=1000'),
    (dict(top_p=1e-39), 'top_p=1e-39'),
    (dict(presence_penalty=1e39), r'presence_penalty=1e\+39'),
    (dict(repetition_penalty=1e-39), 'repetition_penalty=1e-39'),
  ],
)
def test_sampler_errors_name_the_value(setting, message):
  with pytest.raises(ValueError, match=message):
    Sampler(**setting)


@pytest.mark.parametrize(
  'setting',
  [
    dict(temperature=1e30),
    dict(presence_penalty=1e30),
    dict(repetition_penalty=1e30),
    dict(top_p=1e-30),
    dict(top_k=10**30),
  ],
  ids=str,
)
def test_the_most_extreme_numbers_give_distributions(setting):
  sampler = Sampler(**setting).bind(jnp.array([True, False, True]), jnp.array([2, 0, 1]))
  distribution = np.asarray(sampled(sampler, jnp.array([3.0, -2.0, -jnp.inf])))
  assert distribution.sum() == pytest.approx(1) and distribution[2] == 0


def test_numbers_of_the_sampler_are_not_part_of_the_program():
  traces = []

  @jax.jit
  def run(sampler, logits):
    traces.append(sampler)
    return sampler(logits)

  logits, base = jnp.arange(5.0), dict(temperature=0.7, top_k=3, top_p=0.9, repetition_penalty=1.2)

  def count(**changes):
    run(Sampler(**{**base, **changes}), logits)
    return len(traces)

  assert count() == 1
  for change in ('temperature', 1), ('temperature', 1.0), ('top_p', 0.5), ('top_k', 4), ('repetition_penalty', 2):
    assert count(**dict([change])) == 1
  assert count(temperature=0.0) == 2
  assert count(temperature=0) == 2
  np.testing.assert_allclose(
    run(Sampler(temperature=2.0, top_k=3, top_p=0.9, repetition_penalty=1.2), logits),
    reference.Sampler(2.0, 3, 0.9)(np.arange(5.0)),
    atol=1e-6,
  )


# ---- draws ----


def draws(weights, count, seed=0):
  """Draw `count` tokens from one distribution."""
  u = jax.random.uniform(jax.random.key(seed), (count, 2))
  weights = jnp.asarray(weights, jnp.float32)
  return np.asarray(jax.jit(jax.vmap(sampling.draw, (None, 0)))(weights, u))


@pytest.mark.parametrize('vocab, count', [(3, 100_000), (200, 60_000), (3000, 20_000)])
def test_draws_follow_the_weights(vocab, count):
  weights = np.random.default_rng(vocab).dirichlet(np.full(vocab, 0.5)).astype(np.float32)
  weights[vocab // 3] = 0
  seen = np.bincount(draws(weights, count), minlength=vocab)
  expected = weights.astype(np.float64) / weights.sum(dtype=np.float64) * count
  assert seen[expected == 0].sum() == 0
  likely = expected >= 5
  seen, expected = (np.append(x[likely], x[~likely].sum()) for x in (seen, expected))
  seen, expected = (x if expected[-1] >= 5 else np.append(x[:-2], x[-2:].sum()) for x in (seen, expected))
  statistic = ((seen - expected) ** 2 / expected).sum()
  assert scipy.stats.chi2.sf(statistic, len(expected) - 1) > FALSE_ALARM


@pytest.mark.parametrize('vocab', [3, 300])
def test_draws_do_not_depend_on_the_scale(vocab):
  weights = np.random.default_rng(1).dirichlet(np.ones(vocab)).astype(np.float32)
  once = draws(weights, 500)
  assert len(set(once.tolist())) > 2
  for power in (-40, -3, 60):
    np.testing.assert_array_equal(draws(weights * np.float32(2.0**power), 500), once)


def corners(vocab):
  """Return weights with zeros in every awkward place."""
  distribution = np.random.default_rng(2).random(vocab).astype(np.float32) + 0.01
  place = np.arange(vocab)
  block = place // 128
  cases = [place == 0, place == vocab - 1, place < vocab // 2, place >= vocab // 2, place % 2 == 1]
  if vocab > 256:
    cases += [block == 1, block != 0, block != block.max(), (place == 127) | (place == 128), place % 7 == 3]
  tiny = np.where(place == vocab // 2, 1, np.where(place > vocab // 2, 0, np.float32(1e-30)))
  return [*(np.where(keep, distribution, 0).astype(np.float32) for keep in cases), tiny.astype(np.float32)]


@pytest.mark.parametrize('vocab', [2, 3, 128, 129, 300, 3000])
def test_a_token_of_weight_0_is_never_drawn(vocab):
  edges = np.float32([0.0, 2.0**-24, 0.5, 1 - 2.0**-24, LARGEST])
  u = jnp.asarray(np.stack(np.meshgrid(edges, edges), -1).reshape(-1, 2))
  draw = jax.jit(jax.vmap(sampling.draw, (None, 0)))
  for weights in corners(vocab):
    for scale in np.float32([1.0, 1e-20, 1e20]):
      drawn = np.asarray(draw(jnp.asarray(weights * scale), u))
      assert (drawn >= 0).all() and (drawn < vocab).all() and (weights[drawn] > 0).all()


@pytest.mark.parametrize('vocab', [2, 300, 3000])
def test_u_reaches_both_ends(vocab):
  ends = sampling.draw(jnp.ones((2, vocab)), jnp.array([[0.0, 0.0], [LARGEST, LARGEST]]))
  assert ends.tolist() == [0, vocab - 1]


def test_a_flat_distribution_of_256_000_tokens_keeps_its_resolution():
  """Each token can be reached, and no more often than the others."""
  vocab, count = 256_000, 4000
  u = jax.random.uniform(jax.random.key(3), (count, 2))
  drawn = np.asarray(jax.jit(lambda u: jax.lax.map(functools.partial(sampling.draw, jnp.ones(vocab)), u))(u))
  assert scipy.stats.kstest((drawn + 0.5) / vocab, 'uniform').pvalue > FALSE_ALARM
  within = np.bincount(drawn % 128, minlength=128)
  assert scipy.stats.chisquare(within).pvalue > FALSE_ALARM
  collisions = count - len(np.unique(drawn))
  expected = count * (count - 1) / 2 / vocab
  assert abs(collisions - expected) < 6 * np.sqrt(expected)
  # Neighbours within a block are told apart by the second number alone, each by its own 128th of it.
  u = jnp.stack([jnp.full(128, 0.7), (jnp.arange(128).astype(jnp.float32) + 0.5) / 128], -1)
  some = np.asarray(jax.vmap(sampling.draw, (None, 0))(jnp.ones(vocab), u))
  assert (np.diff(some) == 1).all()


# ---- distances ----


def test_residual_is_the_normalised_excess_and_falls_back_to_pi():
  rng = np.random.default_rng(4)
  pi, q = rng.dirichlet(np.ones(6), (2, 50)).astype(np.float32)
  excess = np.maximum(0, pi.astype(np.float64) - q)
  np.testing.assert_allclose(sampling.residual(pi, q), excess / excess.sum(-1, keepdims=True), rtol=1e-4, atol=1e-7)
  np.testing.assert_array_equal(sampling.residual(pi, pi), pi)
  np.testing.assert_array_equal(sampling.residual(pi * np.float32(0.9), q + pi), pi * np.float32(0.9))
  tiny = sampling.residual(jnp.float32([0.5 + 2**-24, 0.5]), jnp.float32([0.5, 0.5]))
  assert tiny.tolist() == [1, 0]


def test_tv_entropy_and_confidence_are_those_of_numpy():
  rng = np.random.default_rng(5)
  logits = rng.normal(scale=3, size=(50, 8)).astype(np.float32)
  logits[:10, 2] = -np.inf
  p = scipy.special.softmax(logits.astype(np.float64), -1)
  np.testing.assert_allclose(sampling.confidence(logits), p.max(-1), rtol=1e-5)
  np.testing.assert_allclose(sampling.entropy(logits), scipy.stats.entropy(p, axis=-1), rtol=1e-4, atol=1e-6)
  a, b = rng.dirichlet(np.ones(8), (2, 50))
  np.testing.assert_allclose(sampling.tv(jnp.float32(a), jnp.float32(b)), 0.5 * abs(a - b).sum(-1), atol=1e-6)
  one_hot = jnp.array([-jnp.inf, 0.0, -jnp.inf])
  assert sampling.entropy(one_hot) == 0 and sampling.confidence(one_hot) == 1
  assert sampling.entropy(jnp.zeros(1000)) == pytest.approx(np.log(1000), rel=1e-5)


# ---- keyed noise ----


def keys_of(ids):
  keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(7), jnp.asarray(ids, jnp.uint32))
  return jax.random.key_data(keys)


def table(noise, positions, in_block=1):
  """Return the numbers of positions, by place in the block and purpose [B, T, K, 3, 2]."""
  at = jnp.broadcast_to(jnp.arange(positions), (noise.keys.shape[0], positions))
  place = lambda k: jnp.stack([jnp.stack([noise.uniform(p, u, p - k) for u in range(3)], 1) for p in at.T], 1)
  return np.asarray(jnp.stack([place(k) for k in range(in_block)], 2))


def test_the_hash_is_that_of_jax():
  words = [jax.random.bits(jax.random.key(i), (7, 5), jnp.uint32) for i in range(4)]
  found = sampling.noise.hashed(tuple(words[:2]), tuple(words[2:]))
  for ours, theirs in zip(found, jax.extend.random.threefry2x32_p.bind(*words), strict=True):
    np.testing.assert_array_equal(ours, theirs)


def test_keyed_numbers_do_not_depend_on_company_or_place():
  whole = table(sampling.Keyed(keys_of(range(6))), 20)
  assert whole.shape == (6, 20, 1, 3, 2)
  np.testing.assert_array_equal(table(sampling.Keyed(keys_of([5, 2])), 9), whole[np.array([5, 2]), :9])
  by_round = table(sampling.Keyed(keys_of(range(6)), by_round=True), 20, 4)
  np.testing.assert_array_equal(by_round[:, :, :1], whole)
  noise = sampling.Keyed(keys_of(range(6)))
  np.testing.assert_array_equal(
    noise.uniform(jnp.full((6, 3), 7), ACCEPT, jnp.full(6, 2))[:, 1], whole[:, 7, 0, ACCEPT]
  )


def test_keyed_numbers_are_all_different_and_uniform():
  u = table(sampling.Keyed(keys_of(range(100)), by_round=True), 40, 4)
  pairs = np.unique(u.reshape(-1, 2), axis=0)
  assert len(pairs) == u.size // 2  # the two words of 24 bits together
  assert u.min() >= 0 and u.max() < 1
  assert scipy.stats.kstest(u.ravel(), 'uniform').pvalue > FALSE_ALARM
  for axis in range(1, 5):  # neighbours along any axis are unrelated
    a, b = (np.take(u, range(i, u.shape[axis] - 1 + i), axis).ravel() for i in (0, 1))
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(len(a))


def test_keyed_decisions_read_their_own_number():
  noise = sampling.Keyed(keys_of(range(5)))
  numbers = table(noise, 12)
  at, start = jnp.array([3, 4, 5, 6, 7]), jnp.array([3, 3, 3, 6, 6])
  weights = jnp.ones((5, 4))
  for purpose in (DRAFT, FINAL):
    token, same = noise.draw(weights, at, purpose, start)
    u = numbers[np.arange(5), np.asarray(at), 0, purpose, 0]
    assert same is noise and token.tolist() == np.floor(u * 4).tolist()
  position = at[:, None] + jnp.arange(3)[None]
  u = numbers[np.arange(5)[:, None], np.asarray(position), 0, ACCEPT, 0]
  ratio = jnp.full((5, 3), 0.5)
  ok, _ = noise.accept(ratio, jnp.ones((5, 3)), position, start)
  np.testing.assert_array_equal(ok, u < 0.5)
  never, _ = noise.accept(jnp.zeros((5, 3)), jnp.zeros((5, 3)), position, start)
  always, _ = noise.accept(ratio, ratio, position, start)
  assert not never.any() and always.all()
