"""One round of each acceptor, by enumerating every draft and every outcome of its tests."""

import functools
import itertools

from flax import struct
import jax
from jax import tree_util
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade import acceptance, methods, sampling
from speccascade.engine.state import Window

V = 3


@struct.dataclass
class Told(sampling.Noise):
  """Noise whose tests end as told, and that notes the chance each had of succeeding."""

  outcomes: jax.Array  # [B, W]
  chances: jax.Array | None = None

  def accept(self, numerator, denominator, position, start):
    possible = denominator > 0
    ratio = jnp.where(possible, numerator / jnp.where(possible, denominator, 1), 0)
    return self.outcomes, self.replace(chances=jnp.minimum(1, ratio))


def random_distributions(seed, block, zeros=False):
  """Return q̃ and π after every prefix of at most `block` tokens: {prefix: distribution}."""
  rng = np.random.default_rng(seed)
  q, pi = {}, {}
  for n in range(block + 1):
    for prefix in itertools.product(range(V), repeat=n):
      for distributions in (q, pi):
        distribution = rng.dirichlet(np.full(V, 2.0))
        if zeros and rng.random() < 0.7:
          distribution = distribution * (np.arange(V) != rng.integers(V))
        distributions[prefix] = distribution / distribution.sum()
  return q, pi


def one_round(accept, q, pi, block, idle=0):
  """Yield (draft, kept, next distribution, probability) for every draft and outcome; `idle` slots are unused."""
  width = block + idle
  cases = list(itertools.product(itertools.product(range(V), repeat=block), itertools.product([0, 1], repeat=block)))
  rows = len(cases)
  tokens = np.zeros((rows, width), np.int32)
  outcomes = np.ones((rows, width), bool)
  distributions = np.full((rows, width, V), 1 / V, np.float32)
  targets = np.full((rows, width + 1, V), 1 / V, np.float32)
  for b, (draft, outcome) in enumerate(cases):
    tokens[b, :block], outcomes[b, :block] = draft, outcome
    for j in range(block + 1):
      targets[b, j] = pi[draft[:j]]
      if j < block:
        distributions[b, j] = q[draft[:j]]
  position = jnp.tile(jnp.arange(width), (rows, 1))
  window = Window(jnp.full(rows, block), jnp.asarray(distributions), jnp.zeros((rows, width), jnp.int32), ())
  trial = acceptance.Trial(
    window,
    jnp.asarray(tokens),
    jnp.full(rows, block),
    jnp.asarray(targets),
    position,
    jnp.zeros(rows, jnp.int32),
    Told(jnp.asarray(outcomes)),
    sampling.Sampler(),
    (1,),
  )
  verdict, noise = jax.jit(accept)(trial)
  at = np.asarray(verdict.accepted)
  here = np.arange(rows)
  after = jnp.asarray(np.concatenate([distributions, distributions[:, :1]], 1)[here, at])
  scale, subtract = (jnp.broadcast_to(jnp.asarray(x), (rows,))[:, None] for x in (verdict.scale, verdict.subtract))
  rest = sampling.residual(scale * targets[here, at], subtract * after)
  final = np.where((at < block)[:, None], np.asarray(rest, np.float64), targets[here, at])
  chances = np.asarray(noise.chances, np.float64)[:, :block]
  assert np.isfinite(chances).all() and np.isfinite(verdict.scale).all()
  met = np.where(outcomes[:, :block], chances, 1 - chances).prod(1)
  for b, (draft, _) in enumerate(cases):
    drafted = np.prod([q[draft[:j]][draft[j]] for j in range(block)])
    yield draft, int(at[b]), final[b], drafted * met[b]


def emitted_distribution(accept, q, pi, block, idle=0):
  """Return the distribution [V]*(block+1) of the tokens kept, the one after them, and what π goes on with."""
  distribution = np.zeros((V,) * (block + 1))
  for draft, kept, final, chance in one_round(accept, q, pi, block, idle):
    for x in range(V):
      start = (*draft[:kept], x)
      for end in itertools.product(range(V), repeat=block + 1 - len(start)):
        whole = start + end
        distribution[whole] += (
          chance * final[x] * np.prod([pi[whole[:j]][whole[j]] for j in range(len(start), block + 1)])
        )
  return distribution


def target_distribution(pi, block):
  distribution = np.zeros((V,) * (block + 1))
  for whole in itertools.product(range(V), repeat=block + 1):
    distribution[whole] = np.prod([pi[whole[:j]][whole[j]] for j in range(block + 1)])
  return distribution


def mean_accepted(accept, q, pi, block):
  return sum(chance * kept for _, kept, _, chance in one_round(accept, q, pi, block))


ACCEPTORS = {'token_wise': acceptance.token_wise, 'block': acceptance.block}


@pytest.mark.parametrize('zeros', [False, True])
@pytest.mark.parametrize('block, idle', [(1, 0), (2, 0), (3, 0), (2, 1)])
@pytest.mark.parametrize('name', ACCEPTORS)
def test_a_round_emits_the_target_distribution(name, block, idle, zeros):
  for seed in range(6):
    q, pi = random_distributions(seed, block, zeros)
    distribution = emitted_distribution(ACCEPTORS[name], q, pi, block, idle)
    np.testing.assert_allclose(distribution, target_distribution(pi, block), atol=2e-6)


def test_the_enumeration_sees_a_wrong_acceptor():
  def careless(trial):
    verdict, noise = acceptance.block(trial)
    return verdict._replace(scale=1.0), noise

  worst = 0
  for q, pi in (random_distributions(seed, 2) for seed in range(6)):
    worst = max(worst, abs(emitted_distribution(careless, q, pi, 2) - target_distribution(pi, 2)).max())
  assert worst > 1e-3


@pytest.mark.parametrize('block', [2, 3])
def test_block_verification_keeps_no_fewer_tokens_than_token_wise(block):
  gains = []
  for seed in range(30):
    q, pi = random_distributions(100 + seed, block, zeros=seed % 2 == 1)
    joint, single = mean_accepted(acceptance.block, q, pi, block), mean_accepted(acceptance.token_wise, q, pi, block)
    gains.append(joint - single)
  assert min(gains) >= -1e-6
  assert np.mean(np.array(gains) > 0.01) > 0.5


def test_a_block_of_one_token_is_tested_as_token_wise():
  q, pi = random_distributions(5, 1)
  rounds = [list(one_round(accept, q, pi, 1)) for accept in ACCEPTORS.values()]
  for (draft, kept, final, chance), (_, kept2, final2, chance2) in zip(*rounds, strict=True):
    assert kept == kept2 and chance == pytest.approx(chance2, abs=1e-7), draft
    np.testing.assert_allclose(final, final2, atol=1e-6)


def test_a_drafted_token_of_probability_0_divides_nothing():
  """No draft holds one, but slots that are not in use may: their numbers must stay numbers."""
  q = jnp.array([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])
  pi = jnp.array([[[0.2, 0.8, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]])
  zero = jnp.zeros(1, jnp.int32)
  window = Window(zero + 2, q, jnp.zeros((1, 2), jnp.int32), ())
  with jax.debug_nans(True):
    for accept in ACCEPTORS.values():
      noise = Told(jnp.ones((1, 2), bool))
      position = jnp.array([[0, 1]])
      drafts = jnp.array([[1, 2]])
      trial = acceptance.Trial(window, drafts, zero + 2, pi, position, zero, noise, sampling.Sampler(), (1,))
      verdict, noise = accept(trial)
      assert np.isfinite(noise.chances).all() and np.isfinite(verdict.scale).all()


@pytest.mark.parametrize(
  'given', [lambda f: f, tree_util.Partial, functools.partial, lambda f: functools.partial(tree_util.Partial(f))]
)
def test_an_acceptor_keeps_its_keys_by_round_however_it_is_given(given):
  def of_a_user(trial):
    return acceptance.block(trial)

  for accept, by_round in ((acceptance.block, True), (acceptance.token_wise, False), (of_a_user, True)):
    assert methods.speculative(accept=given(accept)).by_round == by_round
  assert methods.speculative(accept=acceptance.Threshold(np.float32(1))).by_round is False


@pytest.mark.parametrize('accept', [acceptance.FLy(0.5, window=1), acceptance.Threshold(2.0)])
def test_an_acceptor_asks_the_verifier_of_its_test(accept):
  """Of models 1 and 2 one is unsure and like the drafter, the other is sure of another token."""
  unsure, sure = jnp.zeros((1, 4, 3)), jnp.tile(jnp.array([[[0.0, 0.0, 30.0]]]), (1, 4, 1))
  q = jnp.full((1, 3, 3), 1 / 3)
  zero = jnp.zeros(1, jnp.int32)
  accepted = []
  for logits in ((unsure, sure, unsure), (unsure, unsure, sure)):
    window = Window(zero + 3, q, jnp.zeros((1, 3), jnp.int32), logits)
    noise = Told(jnp.array([[False, True, True]]))
    args = jnp.array([[0, 1, 0]]), zero + 3, jnp.full((1, 4, 3), 1 / 3), jnp.array([[0, 1, 2]]), zero, noise
    accepted.append(int(accept(acceptance.Trial(window, *args, sampling.Sampler(), (1, 2)))[0].accepted[0]))
  assert accepted == [3, 0]
