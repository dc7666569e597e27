"""Learned deferral, an experiment on the public API: its rules, its data, its training and its comparison."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import long_but

from experiments.learned_deferral import by_slot, held_out, paired, reading, train_rules
from experiments.learned_deferral.learned import (
  FEATURES,
  features,
  head,
  learned,
  learned_alone,
  learned_mixture,
  learned_opt,
  load,
  TOP,
)
from experiments.learned_deferral.reading import Tokens
from experiments.learned_deferral.train_rules import fit, LOSSES
from speccascade import decode, embedded, methods, rules, Sampler, sampling
from speccascade.decode.scoring import score
from speccascade.evaluate import config

FOLDER = pathlib.Path(__file__).parents[2] / 'experiments' / 'learned_deferral'


@pytest.fixture(scope='module')
def models():
  return embedded.models()


@pytest.fixture(scope='module')
def read(models):
  """Return the tokens of some references."""
  return reading.read(models, reading.references(models, embedded.task(count=4)), batch_size=4)


# ---- rules and losses ----


def test_features_stand_in_the_order_of_their_names():
  q, p = np.random.default_rng(0).normal(size=(2, 4, 9)).astype(np.float32)
  read = dict(zip(FEATURES, np.asarray(features(q, p)).T, strict=True))
  distribution = {name: np.exp(x) / np.exp(x).sum(-1, keepdims=True) for name, x in (('q', q), ('p', p))}
  for name, x in distribution.items():
    largest = np.log(np.sort(x, -1)[:, ::-1])
    for n in range(TOP):
      np.testing.assert_allclose(read[f'log {name} {n + 1}'], largest[:, n], rtol=1e-5)
    np.testing.assert_allclose(read[f'entropy {name}'], -(x * np.log(x)).sum(-1), rtol=1e-5)
  first_q, first_p = (x.argmax(-1) for x in (q, p))
  rows = np.arange(4)
  np.testing.assert_allclose(read['tv'], abs(distribution['q'] - distribution['p']).sum(-1) / 2, rtol=1e-5)
  np.testing.assert_allclose(read['log p at arg max q'], np.log(distribution['p'][rows, first_q]), rtol=1e-5)
  np.testing.assert_allclose(read['log q at arg max p'], np.log(distribution['q'][rows, first_p]), rtol=1e-5)
  np.testing.assert_array_equal(read['agree'], first_q == first_p)


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_rules_defer_by_what_the_head_expects(temperature):
  rng = np.random.default_rng(0)
  q, p = rng.normal(0, 2, (2, 40, 6)).astype(np.float32)
  widths = {learned: len(FEATURES), learned_opt: len(FEATURES), learned_alone: TOP + 1}
  sampler = Sampler(temperature)
  for rule, width in widths.items():
    weights = tuple((rng.normal(size=(a, b)), rng.normal(size=b)) for a, b in ((width, 8), (8, 2)))
    weights = jax.tree.map(np.float32, weights)
    (kernel, bias), (last, last_bias) = weights
    losses = np.maximum(np.asarray(features(q, p))[:, :width] @ kernel + bias, 0) @ last + last_bias
    cost = np.asarray(sampling.tv(sampler(q), sampler(p))) if rule is learned_opt else 1
    alpha = np.float32(np.median(losses @ [1, -1] / np.maximum(cost, 1e-3)) + 1e-4)
    found = rules.target(functools.partial(rule, alpha=alpha, weights=weights), (q, p), sampler).deferred
    np.testing.assert_array_equal(found, losses @ [1, -1] > alpha * cost)
    assert found.any() and not found.all()


@pytest.mark.parametrize('temperature', [0.0, 0.7])
def test_a_learned_mixture_weighs_by_the_head(temperature):
  rng = np.random.default_rng(3)
  q, p = rng.normal(0, 2, (2, 40, 6)).astype(np.float32)
  weights = tuple(
    (rng.normal(size=s).astype(np.float32), rng.normal(size=s[1]).astype(np.float32))
    for s in ((len(FEATURES), 8), (8, 2))
  )
  gain, sampler = np.asarray(head(weights, features(q, p))) @ np.float32([1, -1]), Sampler(temperature)
  alpha = np.median(gain)
  w = 1 / (1 + np.exp(alpha - gain))[:, None]
  mixed = w * sampler.soft(p) + (1 - w) * sampler.soft(q)
  pi = rules.target(functools.partial(learned_mixture, alpha=alpha, weights=weights), (q, p), sampler).probs
  np.testing.assert_allclose(pi, mixed if temperature else np.eye(6)[np.argmax(mixed, -1)], atol=1e-5)
  assert 0.05 < w.mean() < 0.95


def tokens(count=600, seed=0):
  """Return tokens at which the drafter errs where its entropy is over 1, and is surer than the verifier elsewhere."""
  rng = np.random.default_rng(seed)
  features = np.float32(rng.normal(size=(count, len(FEATURES))))
  features[:, FEATURES.index('tv')] = 0.3
  errs = features[:, TOP] > 1
  token = np.full(count, 3)
  sure, likely, unlikely = np.float32(np.log([0.99, 0.6, 0.1]))
  return Tokens(
    features=features,
    logq=np.where(errs, unlikely, sure),
    logp=np.full(count, likely),
    token=token,
    first_q=np.where(errs, 4, token),
    first_p=token,
    text=np.zeros(count, int),
    at=np.arange(count),
    matters=errs,
  )


def test_losses_are_their_definitions():
  some = tokens(5)
  some = some.replace(matters=np.array([1, 0, 0, 1, 0], bool), first_q=np.array([4, 3, 3, 4, 3]))
  outputs = np.random.default_rng(1).normal(size=(5, 2))
  expected = dict.fromkeys(LOSSES, 0.0)
  tvs = some.features[:, FEATURES.index('tv')]
  for (a, b), y, q, first, lq, lp, tv in zip(
    outputs, some.token, some.matters, some.first_q, some.logq, some.logp, tvs, strict=True
  ):
    gate = 1 / (1 + np.exp(b - a))
    expected['swap'] -= np.log(gate if q else 1 - gate) / 5
    expected['expected'] += ((a - (first != y)) ** 2 + b**2) / 5
    expected['expected_log'] += ((a + lq) ** 2 + (b + lp) ** 2) / 5
    expected['expected_draw'] += ((a - 1 + np.exp(lq)) ** 2 + (b - 1 + np.exp(lp)) ** 2) / 5
    expected['marginal'] -= np.log((1 - gate) * np.exp(lq) + gate * np.exp(lp)) / 5
    expected['mixture'] += train_rules.REJECTION * gate * tv / 5
  expected['mixture'] += expected['marginal']
  for name, loss in LOSSES.items():
    np.testing.assert_allclose(loss(jnp.float32(outputs), some), expected[name], rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize('loss, alone', long_but([(n, x) for n in LOSSES for x in (0, 1)], [('expected', 1)]))
def test_a_head_learns_where_the_drafter_errs(loss, alone):
  weights = fit(LOSSES[loss], tokens(4000), alone=alone, steps=600)
  new = tokens(300, seed=1)
  x = new.features[:, : TOP + 1] if alone else new.features
  gain = np.asarray(head(weights, x)) @ [1, -1]
  assert gain[new.matters].mean() > gain[~new.matters].mean()
  wrong = (gain > np.quantile(gain, 1 - new.matters.mean())) != new.matters
  assert wrong.mean() < 0.06


# ---- what both models make of texts ----


@pytest.mark.long
def test_what_is_read_is_what_the_models_make_of_the_texts(models, read):
  texts = reading.references(models, embedded.task(count=4))
  assert read.token.tolist() == [t for _, target in texts for t in target]
  assert read.text.tolist() == [i for i, (_, target) in enumerate(texts) for _ in target]
  for model, logs, first in zip(models, (read.logq, read.logp), (read.first_q, read.first_p), strict=True):
    scored = score(methods.autoregressive(), [model], *zip(*texts, strict=True))
    np.testing.assert_allclose(logs, np.concatenate([s.logprobs for s in scored]), atol=1e-3)
    np.testing.assert_array_equal(first == read.token, np.concatenate([s.greedy for s in scored]))
  np.testing.assert_array_equal(read.features[:, -1] == 1, read.first_q == read.first_p)


@pytest.mark.long
def test_a_text_has_the_drafters_tokens_wherever_they_do_not_matter(models):
  found, texts = reading.swaps(models, embedded.task(count=4), batch_size=4)
  assert found.matters.any() and not found.matters.all()
  for i, text in enumerate(texts):
    of_text = found[found.text == i]
    of_text = of_text[np.argsort(of_text.at)]
    np.testing.assert_array_equal(of_text.at, np.arange(of_text.at.size))
    emitted = np.where(of_text.matters, of_text.first_p, of_text.first_q)
    assert models[1].tokenizer.decode(emitted.tolist()) == text


# ---- the comparison ----


# ---- training, and decoding by what was trained ----


@pytest.mark.long
def test_a_rule_is_trained_compared_and_decoded_by(models, read, tmp_path, monkeypatch, capsys):
  train_rules.train('expected', read, tmp_path / 'expected.json', steps=20, hidden=4)
  train_rules.train('alone', read, tmp_path / 'alone.json', steps=2, hidden=4)
  assert load(tmp_path / 'alone.json').func is learned_alone
  assert load(tmp_path / 'expected.json', rejections=True).func is learned_opt
  monkeypatch.setattr(held_out, 'LOSSES', ('0-1', 'draw'))
  task = embedded.task(count=4)
  found = train_rules.compare(models, task, tmp_path, ['expected', 'alone'])
  assert json.loads((tmp_path / 'held_out.json').read_text()) == found and list(found) == ['0-1', 'draw']
  said = capsys.readouterr().out
  assert 'expected: α = ' in said and 'gap closed by alone' in said
  rule = load(tmp_path / 'expected.json')
  alpha = json.loads((tmp_path / 'expected.json').read_text())['quantiles']['20%']
  run = lambda method: decode(
    method, models, [e.prompt for e in task.examples], max_new_tokens=12, sampler=Sampler(0.0), batch_size=4
  )
  none, some, every = (run(methods.speculative(functools.partial(rule, alpha=a))) for a in (np.inf, alpha, -np.inf))
  assert every.tokens == run(methods.autoregressive(1)).tokens
  assert none.tokens == run(methods.autoregressive(0)).tokens
  assert none.stats.deferred.sum() < some.stats.deferred.sum() < every.stats.deferred.sum()


def test_commands_and_configs_know_a_rule_that_was_trained(tmp_path, monkeypatch):
  train_rules.train('expected', tokens(50), file := tmp_path / 'expected.json', steps=2, hidden=4)
  (tmp_path / 'trained_rules.py').write_text(
    f'from functools import partial\nfrom experiments.learned_deferral import learned\n'
    f"mine = partial(learned.load('{file}'), alpha=0.1)\n"
  )
  monkeypatch.syspath_prepend(tmp_path)
  assert rules.inside(rules.find('trained_rules:mine')) is learned
  names = 'learned_expected', 'learned_expected_draw_opt'
  (tmp_path / 'expected_draw.json').write_text(file.read_text())
  values = ''.join(f'{name}/Curve.values = [0.0, 0.1]\n' for name in names)
  curves = ', '.join(f'@{name}/Curve()' for name in names)
  (tmp_path / 'page.gin').write_text(
    f"include '{FOLDER}/curves.gin'\nROUTERS = '{tmp_path}'\n{values}run.experiments = [{curves}]\n"
  )
  config.parse([str(tmp_path / 'page.gin')])
  for curve in config.build():
    assert all(point.build().name.startswith('speculative[learned') for point in curve.points())


def test_curves_of_a_run_are_compared_on_the_same_texts(tmp_path, monkeypatch, capsys):
  (tmp_path / 'config.gin').write_text(
    'embedded.task.count = 3\nExperiment.task = @embedded.task()\nExperiment.models = @embedded.models\n'
    "Experiment.curves = [@target/Curve(), @a/Curve(), @b/Curve()]\ntarget/Curve.name = 'target only'\n"
    'target/Curve.method = @methods.autoregressive\nrun.experiments = [@Experiment()]\n'
    + ''.join(
      f"{name}/Curve.name = '{name}'\n{name}/Curve.method = @methods.speculative\n{name}/Curve.rule = @rules.{rule}\n"
      f"{name}/Curve.parameter = 'alpha'\n{name}/Curve.values = [0.1, 0.3]\n"
      for name, rule in (('a', 'diff'), ('b', 'opt'))
    )
  )
  examples = embedded.task(count=3).examples
  lines = [
    dict(curve=curve, value=value, example=e.index, prediction=e.references[0] if curve == 'a' else 'Ein', emitted=4)
    | dict(deferred=1 + 2 * (value == 0.1), calls=[4, 1 + (value == 0.1)])
    for curve in 'ab'
    for value in (0.1, 0.3)
    for e in examples
  ]
  (tmp_path / 'examples.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
  monkeypatch.setattr('sys.argv', ['paired.py', str(tmp_path), 'a', 'deferred', '.5'])
  paired.main()
  said = capsys.readouterr().out
  assert 'deferred 0.5: 100.00 by a' in said and 'a is above b by 100.00 [100.00 … 100.00]' in said


# ---- an α for each slot ----


@pytest.mark.long
def test_the_loop_decodes_by_the_alphas_that_were_chosen(models, read, tmp_path, capsys):
  rows = by_slot.choose(read, tmp_path / 'greedy.json', greedy=True, costs=(0.2, 0.5), block=3)
  assert json.loads((tmp_path / 'greedy.json').read_text()) == rows and 'cost 0.5: α = (' in capsys.readouterr().out
  assert all(row['calls'] <= row['same_loss_calls'] + 1e-6 for row in rows)
  assert rows[0]['calls'] > rows[1]['calls']
  prompts = [e.prompt for e in embedded.task(count=4).examples]
  calls = []
  for row in rows:
    method = methods.speculative(functools.partial(by_slot.opt_by_slot, alpha=tuple(row['alphas'])), block=3)
    assert not method.keeps_distribution
    stats = decode(method, models, prompts, max_new_tokens=12, sampler=Sampler(0.0), batch_size=4).stats
    calls.append(stats.rounds.sum() / stats.emitted.sum())
  assert calls[0] >= calls[1]
