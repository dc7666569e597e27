"""Distillation for the acceptance of a rule's target, and for the companion of speculative verification."""

import functools
import pathlib

from cases import bound
import jax
import jax.numpy as jnp
from matching import says
import numpy as np
import optax
import pytest
import reference
from small import copies, quiet, settings, T5_NET
from tiers import long_but

from speccascade import rules, Sampler, theory
from speccascade.models import toy
from speccascade.train import jobs, losses
from speccascade.train.batches import collate
from speccascade.train.loop import train
from speccascade.train.losses import Distillation
from speccascade.types import Model

FOLDER = pathlib.Path(__file__).parents[2] / 'gin_configs' / 'train'
V = 5
LARGE = toy.model(1, V, scale=1.5).params['table']  # [V², V], by the last two tokens
NEAR = LARGE + 0.5 * toy.model(2, V).params['table']
TEMPERATURE = 0.8
init = jax.jit(T5_NET.init)


def rate(rule, q_logits, p_logits=LARGE, temperature=1.0):
  """Return the acceptance rate of each position for the target of a rule."""
  sampler = Sampler(temperature)
  return losses.accepted(sampler(q_logits), rules.target(rule, (q_logits, p_logits), sampler).probs)


# a and β of mentored decoding are found by a search, whose steps have no gradient
SMOOTH = [name for name in reference.RULES if name != 'mentored']


@pytest.mark.parametrize('name', long_but(SMOOTH, ('opt', 'token_v3', 'lossy')))
def test_the_gradient_of_the_acceptance_is_that_of_finite_differences(name):
  q, way = np.random.default_rng(3).normal(size=(2, *LARGE.shape)).astype(np.float32)
  f = jax.jit(lambda q: -jnp.log(rate(bound(name), q, temperature=TEMPERATURE)))
  _, slope = jax.jit(lambda q: jax.jvp(f, (q,), (way,)))(q)
  coarse, fine = ((f(q + h * way) - f(q - h * way)) / (2 * h) for h in (1e-2, 3e-3))
  smooth = abs(coarse - fine) < 0.02  # else a decision of the rule, or a minimum, changes between the two
  assert smooth.mean() >= 0.8 and abs(slope[smooth]).max() > 0.05
  np.testing.assert_allclose(slope[smooth], fine[smooth], atol=0.02)


def trained(objective, steps=400):
  """Return the table of a drafter that sees one token only, trained on all contexts of two."""
  optimizer = optax.adam(0.05)
  each = lambda table: jnp.tile(table, (V, 1))  # [V², V]
  gradient = jax.grad(lambda table: objective(each(table)).mean())

  def step(carry, _):
    table, state = carry
    updates, state = optimizer.update(gradient(table), state)
    return (table + updates, state), None

  table = NEAR.reshape(V, V, V).mean(0)
  (table, _), _ = jax.jit(lambda x: jax.lax.scan(step, x, None, steps))((table, optimizer.init(table)))
  return each(table)


RULES = {
  'opt': functools.partial(rules.opt, alpha=0.1),
  'token_v3': functools.partial(rules.token_v3, alpha=0.5),
  'lossy': functools.partial(rules.lossy, alpha=0.4),
}


@functools.cache
def for_verifier():
  with jax.numpy_dtype_promotion('standard'):
    return trained(lambda q: -jnp.log(rate(rules.speculative, q)))


@pytest.mark.parametrize('name', long_but(RULES, ['opt']))
def test_a_drafter_trained_for_a_rule_is_accepted_more_often_by_it(name):
  with jax.numpy_dtype_promotion('standard'):
    for_rule = trained(lambda q: -jnp.log(rate(RULES[name], q)))
  mine, usual = (np.asarray(rate(RULES[name], q)).mean() for q in (for_rule, for_verifier()))
  assert mine > usual + 0.02
  pi = rules.target(RULES[name], (for_rule, LARGE)).probs
  assert theory.acceptance_rate(jax.nn.softmax(for_rule), pi).mean() == pytest.approx(mine, abs=1e-6)
  exact, other = (np.asarray(rate(rules.speculative, q)).mean() for q in (for_verifier(), for_rule))
  assert exact > other  # the one trained for the verifier is the better of the two there


def test_the_gap_of_a_companion_is_the_mean_error_of_its_prediction():
  q, c, p = (np.asarray(jax.nn.softmax(x)) for x in (NEAR, NEAR + 0.3 * jnp.flip(LARGE, 0), LARGE))
  gap = losses.companion_gap(q, c, p)
  at_token = abs(np.minimum(1, c / q) - np.minimum(1, p / q))
  np.testing.assert_allclose(gap, (q * at_token).sum(-1), rtol=1e-5)
  assert (gap >= abs(losses.accepted(q, c) - losses.accepted(q, p)) - 1e-6).all()
  assert abs(losses.companion_gap(q, p, p)).max() == 0


def test_a_drafter_trained_with_its_companion_is_predicted_better():
  c, p = jax.nn.softmax(NEAR), jax.nn.softmax(LARGE)

  def objective(q, weight):
    q = jax.nn.softmax(q)
    return -jnp.log(losses.accepted(q, p)) + weight * losses.companion_gap(q, c, p)

  with jax.numpy_dtype_promotion('standard'):
    drafts = [jax.nn.softmax(trained(functools.partial(objective, weight=w))) for w in (0.0, 2.0)]
  without, with_gap = (float(losses.companion_gap(q, c, p).mean()) for q in drafts)
  assert with_gap < 0.9 * without


def test_the_loss_of_a_batch_is_for_the_rule_and_has_the_gap_by_its_weight():
  student, teacher, companion = (Model(init(jax.random.key(i)), T5_NET) for i in range(3))
  batch = collate([([3, 4, 1], [5, 1]), ([5, 1], [7, 8, 9, 1])], (8,))
  rule = functools.partial(rules.token_v3, alpha=0.7)
  d = Distillation('log_acceptance', rule=rule, companion=0.5)
  call = jax.jit(lambda *models: losses.loss(T5_NET, student.params, batch, models[0], d, models[1]))
  value, parts = call(teacher, companion)
  forced = jax.jit(lambda params: losses.logits_of(T5_NET, params, batch))
  logits = [forced(m.params) for m in (student, teacher, companion)]
  real = np.arange(8)[None] < batch.target_length[:, None]
  mean = lambda x: np.asarray(x)[real].mean()
  expected = rate(rule, *logits[:2])
  q, p, c = (jax.nn.softmax(x) for x in logits)
  gap = mean(losses.companion_gap(q, c, p))
  got = {name: float(parts[name]) for name in ('acceptance', 'log_acceptance', 'companion_gap', 'predicted')}
  means = [mean(expected), mean(-np.log(expected)), gap, mean(losses.accepted(q, c))]
  assert got == pytest.approx(dict(zip(got, means)), rel=1e-4)
  assert float(value) == pytest.approx(mean(-np.log(expected)) + 0.5 * gap, rel=1e-4)


@pytest.mark.full
def test_a_run_is_identified_by_its_rule_and_its_companion(tmp_path):
  models = [Model(init(jax.random.key(i)), T5_NET, name=f'm{i}') for i in (1, 2)]

  def run(alpha=0.5, companion=models[1]):
    d = Distillation('log_acceptance', rule=f'token_v3:{alpha}', companion=1.0)
    s = settings(steps=1, distillation=d)
    return train(tmp_path / 'run', T5_NET, copies(), s, teacher=models[0], companion=companion, echo=quiet)

  run()
  run()  # the same: it has ended
  assert 'companion_gap' in (tmp_path / 'run' / 'log.jsonl').read_text()
  for call, part in ((lambda: run(alpha=0.25), '0.25'), (lambda: run(companion=models[0]), 'companion')):
    with pytest.raises(ValueError, match=part):
      call()


def test_a_distillation_names_the_numbers_of_its_rule():
  def learned(q, p, *, alpha, weights):
    return q.probs @ weights[0][0] > alpha

  rule = functools.partial(learned, weights=[(np.full((4, 1), 0.25), np.zeros(4))], alpha=0.5)
  assert says(repr(Distillation(rule=rule)), 'learned', "'alpha': 0.5, 'weights': [[[[0.25], ")


def test_the_jobs_of_drafters_differ_in_their_rule_and_companion():
  given = [f'{name} = "x"' for name in ('START', 'TEACHER', 'COMPANION')]
  made = jobs.read([str(FOLDER / 'drafter.gin')], [*given, 'TASK = "problems"'])
  assert [job.name for job in made] == ['exact', 'opt', 'token', 'companion']
  found = [job.settings.distillation for job in made]
  assert {d.distance for d in found} == {'log_acceptance'}
  assert [rules.name_of(d.rule) for d in found] == ['speculative', 'opt', 'token_v3', 'speculative']
  assert [d.rule.keywords['alpha'] for d in found[1:3]] == [0.1, 0.5]
  assert [bool(d.companion) for d in found] == [job.companion is not None for job in made] == [False] * 3 + [True]
