"""With Gumbel coupling the text is one of prompt, seed and target; drawn compositions show it of every method."""

import functools

from cases import FALSE_ALARM, PAIR5, TRIO5
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import speccascade
from speccascade import acceptance, methods, rules, Sampler, sampling, theory
from speccascade.drafters import ngram, one_pass
from speccascade.drafters.layerskip import layerskip
from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.types import DRAFT, FINAL, Model

P = functools.partial
PROMPTS = [[1, 1], [2, 3, 1], [4], [0, 2], [3, 3, 3, 1]]
OPT, CHOW = P(rules.opt, alpha=0.1), P(rules.chow, alpha=0.4)


def written(method, numbers, coupling='gumbel', prompts=PROMPTS, models=TRIO5, **settings):
  models = models if method.extra_models else models[: method.models] if method.models == 3 else [models[0], models[-1]]
  sampler = Sampler(coupling=coupling, **numbers)
  return speccascade.decode(method, models, prompts, max_new_tokens=20, sampler=sampler, seed=3, **settings).tokens


@pytest.mark.long
def test_an_early_exit_drafts_the_text_of_the_whole_model():
  network = Decoder(DecoderConfig(97, 32, 2, 2, 8, 64, (Span(),) * 2, tied=True), eos_ids=(96,))
  whole = Model(jax.tree.map(lambda x: 3 * x, network.init(jax.random.key(1))), network)
  alone = written(methods.autoregressive(0), {}, models=[whole], prompts=[[5, 6, 7], [8]])
  drafted = written(methods.speculative(block=3), {}, models=[layerskip(whole, 1), whole], prompts=[[5, 6, 7], [8]])
  assert drafted == alone


def test_a_text_at_temperature_0_is_the_greedy_one():
  greedy = functools.partial(written, methods.autoregressive(1), dict(temperature=0.0), models=PAIR5)
  assert greedy() == greedy('maximal')


def test_a_long_draft_in_one_pass_stays_in_its_row():
  drafter, large = one_pass(PAIR5[0], 0), PAIR5[1]
  text = written(methods.speculative(block=24), {}, models=[drafter, large])
  assert text == written(methods.autoregressive(1), {}, models=PAIR5)


def test_a_target_that_reads_a_drafter_in_one_pass_is_refused():
  with pytest.raises(ValueError, match='drafts in one pass.*drafter=2'):
    written(methods.speculative(OPT), {}, models=[one_pass(PAIR5[0], 0), PAIR5[1]])
  with pytest.raises(ValueError, match='drafts in one pass'):
    written(methods.cos(OPT, (2, 1)), {}, models=[one_pass(PAIR5[0], 0), PAIR5[1]])
  with pytest.raises(ValueError, match='pair=.2, 1.'):
    methods.speculative(drafter=2)


def test_a_target_that_reads_what_remembers_is_refused():
  memory = ngram.drafter(PAIR5[1], memory=8)
  for method in (methods.oracle(OPT), methods.cos(OPT, (2, 1)), methods.token_cascade(CHOW)):
    with pytest.raises(ValueError, match='model 0, which remembers.*drafter=2'):
      written(method, {}, models=[memory, PAIR5[1]])


def test_what_tests_by_chance_is_refused():
  with pytest.raises(ValueError, match='gumbel.*token_wise'):
    written(methods.speculative(block=3, accept=acceptance.block), {}, models=PAIR5)
  with pytest.raises(ValueError, match="coupling='both'"):
    Sampler(coupling='both')


compiled = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 2})


def keys_of(rows):
  return jax.random.key_data(jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(0)))(jnp.arange(rows)))


@pytest.mark.full
@pytest.mark.parametrize('vocab, rows', [(5, 65_536), (700, 16_384)])
def test_draws_follow_the_weights_and_positions_are_independent(vocab, rows):
  weights = np.random.default_rng(0).dirichlet(np.full(vocab, 0.5)).astype(np.float32)
  noise = sampling.Coupled(keys_of(rows))
  draw = compiled(lambda at: noise.draw(jnp.broadcast_to(jnp.asarray(weights), (rows, vocab)), at, FINAL, at)[0])
  first, second = (np.asarray(draw(jnp.full(rows, at))) for at in (4, 5))
  assert (first == np.asarray(draw(jnp.full(rows, 4)))).all()
  likely = np.argsort(-weights)[:8]
  for tokens in (first, second):
    counts = np.array([*(np.sum(tokens == t) for t in likely), np.sum(~np.isin(tokens, likely))])
    chances = np.array([*weights[likely], 1 - weights[likely].sum()], np.float64)
    kept = chances * rows > 5
    expected = chances[kept] / chances[kept].sum() * counts[kept].sum()
    assert scipy.stats.chisquare(counts[kept], expected).pvalue > FALSE_ALARM
  table = np.array([[np.sum((first == a) & (second == b)) for b in likely[:3]] for a in likely[:3]])
  assert scipy.stats.chi2_contingency(table).pvalue > FALSE_ALARM


def test_acceptance_is_that_of_the_formula():
  pi, q = np.random.default_rng(1).dirichlet(np.ones(4), 2).astype(np.float32)
  rows = 65_536
  noise = sampling.Coupled(keys_of(rows))
  at = jnp.full(rows, 3)
  weighted = lambda weights, purpose: noise.draw(jnp.broadcast_to(weights, (rows, 4)), at, purpose, at)[0]
  draw = compiled(weighted, static_argnums=1)
  rate = float(theory.acceptance_rate(q, pi, 'gumbel'))
  found = float((draw(q, DRAFT) == draw(pi, FINAL)).mean())
  assert abs(found - rate) < 5 * np.sqrt(rate * (1 - rate) / rows)
  most = float(theory.acceptance_rate(q, pi))
  assert most / (2 - most) < rate < most


def test_the_least_acceptance_at_a_distance_is_reached():
  assert theory.acceptance_rate([0.5, 0, 0.5], [0.5, 0.5, 0], 'gumbel') == pytest.approx(1 / 3)
  assert theory.acceptance_rate([0.9, 0.1], [0.6, 0.4], 'gumbel') == pytest.approx(0.7)
  assert theory.acceptance_rate(np.eye(3), np.eye(3)[[0, 2, 2]], 'gumbel').tolist() == [1, 0, 1]


def test_the_noise_of_a_token_does_not_depend_on_the_vocabulary_and_is_never_0():
  noise = sampling.Coupled(keys_of(3))
  at = jnp.arange(3)
  whole = np.asarray(noise.exponential(at, 1000))
  np.testing.assert_array_equal(noise.exponential(at, 260), whole[:, :260])
  np.testing.assert_array_equal(noise.exponential(at[:, None] + jnp.arange(2)[None], 300)[:, 0], whole[:, :300])
  assert whole.min() > 0 and np.isfinite(whole).all()
