"""Rules are compared at the same share of deferred tokens, and the label oracle bounds them."""

import json

from matching import having
import numpy as np
import pytest

from speccascade import embedded, rules
from speccascade.train import held_out, router

WIDTH = len(rules.FEATURES)


def test_features_stand_in_the_order_of_their_names():
  q, p = np.random.default_rng(0).normal(size=(2, 4, 9)).astype(np.float32)
  read = dict(zip(rules.FEATURES, np.asarray(rules.features(q, p)).T, strict=True))
  law = {name: np.exp(x) / np.exp(x).sum(-1, keepdims=True) for name, x in (('q', q), ('p', p))}
  for name, x in law.items():
    largest = np.log(np.sort(x, -1)[:, ::-1])
    for n in range(rules.TOP):
      np.testing.assert_allclose(read[f'log {name} {n + 1}'], largest[:, n], rtol=1e-5)
    np.testing.assert_allclose(read[f'entropy {name}'], -(x * np.log(x)).sum(-1), rtol=1e-5)
  first_q, first_p = (x.argmax(-1) for x in (q, p))
  rows = np.arange(4)
  np.testing.assert_allclose(read['tv'], abs(law['q'] - law['p']).sum(-1) / 2, rtol=1e-5)
  np.testing.assert_allclose(read['log p at arg max q'], np.log(law['p'][rows, first_q]), rtol=1e-5)
  np.testing.assert_allclose(read['log q at arg max p'], np.log(law['q'][rows, first_p]), rtol=1e-5)
  np.testing.assert_array_equal(read['agree'], first_q == first_p)


def tokens(count=300, seed=0):
  """Return tokens of 30 texts at which the two models know more or less."""
  rng = np.random.default_rng(seed)
  features = -np.abs(rng.normal(size=(count, WIDTH)))
  first_q, first_p, token = rng.integers(3, size=(3, count))
  features[:, rules.FEATURES.index('entropy q')] *= -1
  features[:, rules.FEATURES.index('entropy p')] *= -1
  features[:, rules.FEATURES.index('tv')] *= -0.3
  features[:, -1] = first_q == first_p
  return router.Tokens(
    features=features,
    logq=-rng.exponential(size=count),
    logp=-rng.exponential(size=count) / 2,
    first_q=first_q,
    first_p=first_p,
    token=token,
    text=np.arange(count) // 10,
    at=np.arange(count) % 10,
    matters=rng.random(count) < 0.2,
  )


def test_mean_losses_are_those_of_the_largest_scores():
  rng = np.random.default_rng(1)
  loss_q, loss_p = rng.random((2, 20))
  scores = rng.normal(size=20)
  for share in (0.0, 0.25, 1.0):
    deferred = np.isin(np.arange(20), np.argsort(-scores)[: int(20 * share)])
    found = held_out.mean_losses(scores, loss_q, loss_p, [share])
    np.testing.assert_allclose(found, [np.where(deferred, loss_p, loss_q).mean()])


def test_tied_scores_share_their_mean():
  loss_q = np.array([1.0, 0.0, 1.0, 1.0])
  found = held_out.mean_losses(np.array([-np.inf, -np.inf, 2.0, -np.inf]), loss_q, np.zeros(4), [0.25, 0.5])
  np.testing.assert_allclose(found, [0.5, 0.5 - 2 / 3 / 4])


@pytest.mark.parametrize('kind', ['0-1', 'log', 'draw', 'swap'])
def test_the_oracle_bounds_every_rule_and_closes_the_gap(kind):
  some = tokens()
  loss_q, loss_p = held_out.losses_of(some, kind)
  learned = {'oracle': loss_q - loss_p, 'noise': np.random.default_rng(2).normal(size=300)}
  found = held_out.compare(some, kind, learned, shares=(0.1, 0.3))
  least = np.array(found['loss'][held_out.ORACLE])
  rows = {name: np.array(x) for name, x in found['loss'].items() if isinstance(x, list)}
  assert all((least <= x + 1e-5).all() for x in rows.values())
  assert found['tokens'] == 300 and found['texts'] == 30
  for value, low, high in found['closed']['oracle']:
    assert low <= value <= high and value == pytest.approx(1)
  assert all(value < 1 for value, _, _ in found['closed']['noise'])
  assert any('oracle' in line for line in held_out.table(found))


def test_a_restricted_rule_defers_where_the_models_differ_first():
  some = tokens()
  scores = held_out.plug_in_scores(some.features)
  differ = some.first_q != some.first_p
  for name in ('chow', 'diff', 'opt_log'):
    np.testing.assert_array_equal(scores[f'{name}, where they differ'][differ], scores[name][differ])
    assert np.isneginf(scores[f'{name}, where they differ'][~differ]).all()


def test_a_job_compares_what_earlier_jobs_trained(tmp_path):
  models = embedded.models()
  task = embedded.task(count=4)
  router.Router('expected', models, task, steps=20, hidden=4).run(tmp_path, lambda _: None)
  lines = []
  job = held_out.HeldOut('compared', models, task, ['expected'], losses=('0-1', 'draw'))
  found = job.run(tmp_path, lines.append)
  assert json.loads((tmp_path / 'compared' / 'held_out.json').read_text()) == found
  assert list(found) == ['0-1', 'draw'] and any('gap closed by expected' in line for line in lines)
  with pytest.raises(FileNotFoundError, match=having('absent')):
    held_out.HeldOut('compared', models, task, ['absent']).run(tmp_path, lines.append)
