"""Learned deferral: its losses, its data, which the loop makes, and its files."""

import dataclasses
import functools
import json
import pathlib
import re

from cases import FOREIGN_PAIR
import jax
import jax.numpy as jnp
from matching import having
import numpy as np
import pytest
from tiers import quick

from speccascade import decode, embedded, methods, rules, Sampler
from speccascade.decode.scoring import score
from speccascade.models.continued import Continued
from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.train import by_slot, held_out, router
from speccascade.train.data import tokenised
from speccascade.types import Model

WIDTH = len(rules.FEATURES)


@pytest.fixture(scope='module')
def models():
  return embedded.models()


@pytest.fixture(scope='module')
def labelled(models):
  return router.swaps(models, embedded.task(count=4), batch_size=4)


def tokens(count=600, seed=0):
  """Return tokens at which the drafter errs where its entropy is over 1, and is surer than the verifier elsewhere."""
  rng = np.random.default_rng(seed)
  features = np.float32(rng.normal(size=(count, WIDTH)))
  errs = features[:, rules.TOP] > 1
  token = np.full(count, 3)
  sure, likely, unlikely = np.float32(np.log([0.99, 0.6, 0.1]))
  return router.Tokens(
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
  expected = dict.fromkeys(router.LOSSES, 0.0)
  for (a, b), y, q, first, lq, lp in zip(
    outputs, some.token, some.matters, some.first_q, some.logq, some.logp, strict=True
  ):
    gate = 1 / (1 + np.exp(b - a))
    expected['swap'] -= np.log(gate if q else 1 - gate) / 5
    expected['expected'] += ((a - (first != y)) ** 2 + b**2) / 5
    expected['expected_log'] += ((a + lq) ** 2 + (b + lp) ** 2) / 5
    expected['expected_draw'] += ((a - 1 + np.exp(lq)) ** 2 + (b - 1 + np.exp(lp)) ** 2) / 5
    expected['marginal'] -= np.log((1 - gate) * np.exp(lq) + gate * np.exp(lp)) / 5
  for name, loss in router.LOSSES.items():
    np.testing.assert_allclose(loss(jnp.float32(outputs), some), expected[name], rtol=1e-5)


@pytest.mark.parametrize('alone', [False, True])
@pytest.mark.parametrize('loss', quick(router.LOSSES, ['expected'], ['swap']))
def test_a_head_learns_where_the_drafter_errs(loss, alone):
  weights = router.fit(router.LOSSES[loss], tokens(4000), alone=alone, steps=600)
  new = tokens(300, seed=1)
  x = new.features[:, : rules.TOP + 1] if alone else new.features
  gain = np.asarray(rules.head(weights, x)) @ [1, -1]
  assert gain[new.matters].mean() > gain[~new.matters].mean()
  wrong = (gain > np.quantile(gain, 1 - new.matters.mean())) != new.matters
  assert wrong.mean() < 0.06


def test_what_is_read_is_what_the_models_make_of_the_texts(models):
  small, large = models
  pairs = list(tokenised(embedded.sentences('validation', 3), large.tokenizer))
  found = router.read(models, pairs, batch_size=2)
  assert found.token.tolist() == [t for _, target in pairs for t in target]
  assert found.text.tolist() == [i for i, (_, target) in enumerate(pairs) for _ in target]
  prompts = [source for source, _ in pairs]
  targets = [target for _, target in pairs]
  for model, logs, first in ((small, found.logq, found.first_q), (large, found.logp, found.first_p)):
    scored = score(methods.autoregressive(), [model], prompts, targets)
    np.testing.assert_allclose(logs, np.concatenate([s.logprobs for s in scored]), atol=1e-3)
    np.testing.assert_array_equal(first == found.token, np.concatenate([s.greedy for s in scored]))
  np.testing.assert_array_equal(found.features[:, -1] == 1, found.first_q == found.first_p)
  assert (found.features[:, 0] >= found.logq - 1e-5).all()  # the first is the largest log-probability


def test_a_translated_drafter_and_a_network_of_ones_own_are_read_too():
  prompts, targets = [[1, 1], [2]], [[0, 2, 1], [1, 1]]
  found = router.read(FOREIGN_PAIR, list(zip(prompts, targets, strict=True)), batch_size=2)
  for model, logs in zip(FOREIGN_PAIR, (found.logq, found.logp), strict=True):
    scored = score(methods.autoregressive(), [model], prompts, targets)
    np.testing.assert_allclose(logs, np.concatenate([s.logprobs for s in scored]), atol=1e-5)


def test_a_source_with_an_end_in_it_is_read_whole_and_one_without_is_refused(models):
  large, task = models[1], embedded.task(count=1)
  encode = large.tokenizer.encode
  prompt = encode('A dog runs.') + encode(task.examples[0].prompt)
  limits = dict(max_new_tokens=task.max_new_tokens, sampler=Sampler(0.0))
  (expected,) = decode(methods.autoregressive(), [large], [prompt], **limits).tokens
  texts, outputs = router._continued(large, [prompt], task, 1, {0: []})
  assert outputs[0] == list(expected) and texts[0] == large.tokenizer.decode(outputs[0])
  with pytest.raises(ValueError, match=having('example 0', str(prompt[-2]), 'ids that end with 1')):
    router._continued(large, [prompt[:-1]], task, 1, {0: []})


@pytest.mark.parametrize(
  'source, message', [([], having('prompt 0', 'empty')), ([2] * 7, having('7 tokens', '9 positions', 'tiny', '8'))]
)
def test_what_a_decoder_cannot_read_is_refused(source, message):
  network = Decoder(DecoderConfig(12, 8, 2, 2, 4, 16, (Span(0, None),), positions=8))
  tiny = Model(jax.jit(network.init)(jax.random.key(0)), network, name='tiny')
  router.read([tiny, tiny], [([2] * 6, [3, 4, 1])], batch_size=1)  # its last token is never fed
  with pytest.raises(ValueError, match=message):
    router.read([tiny, tiny], [(source, [3, 4, 1])], batch_size=1)


def test_references_follow_every_kind_of_prompt(models, monkeypatch):
  tokenizer = models[-1].tokenizer
  monkeypatch.setattr(
    type(tokenizer), 'chat', lambda self, messages: self.encode(messages[0]['content']), raising=False
  )
  task = embedded.task(count=1)
  of = lambda **changes: router.of_references(
    models, dataclasses.replace(task, examples=[dataclasses.replace(task.examples[0], **changes)]), 1
  )
  text = task.examples[0].prompt
  for prompt in (tokenizer.encode(text), [{'role': 'user', 'content': text}]):
    jax.tree.map(np.testing.assert_array_equal, of(prompt=prompt), of())
  with pytest.raises(ValueError, match=having('example 0', 'target=[]')):
    of(target=[])


@pytest.mark.full
@pytest.mark.parametrize('read', [router.swaps, functools.partial(router.of_references, batch_size=1)])
def test_token_ids_alone_need_a_tokenizer_too(read, models):
  task = embedded.task(count=1)
  ids = [dataclasses.replace(e, prompt=models[1].tokenizer.encode(e.prompt)) for e in task.examples]
  with pytest.raises(ValueError, match=having('nameless has no tokenizer', 'tokenizer.json')):
    read([models[0], models[1].replace(tokenizer=None, name='nameless')], dataclasses.replace(task, examples=ids))


def test_an_encoder_decoder_goes_on_from_any_part_of_its_output(models):
  large = models[1]
  source = large.tokenizer.encode(embedded.sentences('validation', 1)[0][0])
  settings = dict(max_new_tokens=48, sampler=Sampler(0.0))
  (expected,) = decode(methods.autoregressive(), [large], [source], **settings).tokens
  continued = large.replace(network=Continued(large.network, large.tokenizer.eos_ids[0]))
  cuts = range(len(expected))
  out = decode(methods.autoregressive(), [continued], [source + list(expected[:n]) for n in cuts], **settings)
  assert [list(expected[:n]) + list(tokens) for n, tokens in zip(cuts, out.tokens)] == [list(expected)] * len(expected)


@pytest.mark.full
def test_a_text_has_the_drafters_tokens_wherever_they_do_not_matter(labelled, models):
  found, texts = labelled
  assert found.matters.any() and not found.matters.all()
  for i, text in enumerate(texts):
    of_text = found[found.text == i]
    of_text = of_text[np.argsort(of_text.at)]
    np.testing.assert_array_equal(of_text.at, np.arange(of_text.at.size))
    emitted = np.where(of_text.matters, of_text.first_p, of_text.first_q)
    assert models[1].tokenizer.decode(emitted.tolist()) == text


@pytest.mark.full
def test_a_token_matters_where_the_metric_falls(labelled, models):
  """The last label of a text, whose swap is decoded again by the verifier alone."""
  found, texts = labelled
  task = embedded.task(count=4)
  last = found[found.matters]
  i = int(last.text[-1])
  at = last.at[last.text == i].max()
  of_text = found[(found.text == i) & (found.at < at)]
  before = np.where(of_text.matters, of_text.first_p, of_text.first_q)[np.argsort(of_text.at)].tolist()
  swapped = [*before, int(found[(found.text == i) & (found.at == at)].first_q[0])]
  large = models[1]
  continued = large.replace(network=Continued(large.network, large.tokenizer.eos_ids[0]))
  prompt = large.tokenizer.encode(task.examples[i].prompt)
  limits = dict(max_new_tokens=task.max_new_tokens - len(swapped), sampler=Sampler(0.0))
  out = decode(methods.autoregressive(), [continued], [prompt + swapped], **limits)
  worse = large.tokenizer.decode(swapped + list(map(int, out.tokens[0])))
  bleu = lambda text: task.metrics['bleu']([task.examples[i]], [text])
  assert bleu(worse) < bleu(texts[i])  # which later swaps did not lower


@pytest.mark.parametrize('alone', quick([False, True], [False]))
def test_a_job_trains_saves_and_loads_a_rule_that_the_loop_follows(alone, models, tmp_path):
  said = []
  task = embedded.task(count=8)
  job = router.Router('r', models, task, loss='expected', alone=alone, steps=50, batch_size=8)
  job.run(tmp_path, said.append)
  assert len(said) == 7 and all(line.startswith('α = ') for line in said)
  rule = router.load(tmp_path / 'r', models)
  assert rule.func is (rules.learned_alone if alone else rules.learned)
  alpha = json.loads((tmp_path / 'r' / router.FILE).read_text())['quantiles']['20%']
  method = methods.token_cascade if alone else methods.speculative
  prompts = [e.prompt for e in task.examples]
  settings = dict(max_new_tokens=16, sampler=Sampler(0.0), batch_size=8)
  some, every, none = (
    decode(method(functools.partial(rule, alpha=a)), models, prompts, **settings) for a in (alpha, -np.inf, np.inf)
  )
  verifier, drafter = (decode(methods.autoregressive(m), models, prompts, **settings) for m in (1, 0))
  assert every.tokens == verifier.tokens
  assert alone or none.tokens == drafter.tokens  # a token cascade asks the verifier after `max_draft` tokens too
  calls = [out.stats.calls.sum(0)[1] for out in (none, some, every)]
  assert calls[0] < calls[1] <= calls[2]


def test_models_of_a_job_are_loaded_when_its_turn_has_come_and_not_before(models, tmp_path):
  loads = []
  lazy = [lambda m=m: loads.append(m.name) or m for m in models]
  about = dict(models=lazy, task=embedded.task(count=2), batch_size=2)
  made = [router.Router(name, steps=2, hidden=2, **about) for name in ('a', 'b')]
  made += [
    held_out.HeldOut('held_out', routers=['a', 'b'], losses=['0-1'], **about),
    by_slot.BySlot('by_slot', **about),
  ]
  assert loads == []
  for i, job in enumerate(made, 1):
    job.run(tmp_path, lambda _: None)
    assert loads == [m.name for m in models] * i


@pytest.mark.parametrize('name', ['router_sums', 'router_multi30k', 'by_slot_multi30k'])
def test_a_config_of_rules_loads_no_model_while_it_is_read(name):
  text = (pathlib.Path(__file__).parents[2] / 'gin_configs' / 'train' / f'{name}.gin').read_text()
  assert re.search(r'models = \[@\w+/train.load, @\w+/train.load\]', text) and 'train.load()' not in text


def test_a_trained_job_is_not_trained_again_and_refuses_what_would_change_it(models, tmp_path, monkeypatch):
  job = router.Router('r', models, embedded.task(count=2), steps=2, batch_size=2)
  first = job.run(tmp_path, str)
  monkeypatch.setattr(router, 'fit', None)
  again = dataclasses.replace(job, batch_size=4).run(tmp_path, str)
  jax.tree.map(np.testing.assert_array_equal, again.keywords, first.keywords)
  noise = [m.replace(params=jax.tree.map(lambda x: x + 1, m.params)) for m in models]
  others = {'loss': 'marginal', 'seed': 7, 'alone': True, 'steps': 3}
  others |= {'task': embedded.task(count=3), 'models': [models[0], noise[1]]}
  for name, value in others.items():
    name_there = 'verifier' if name == 'models' else name
    with pytest.raises(ValueError, match=having(str(tmp_path), f'trained with {name_there} ', 'another folder')):
      dataclasses.replace(job, **{name: value}).run(tmp_path, str)
  router.save(tmp_path / 'r', first.keywords['weights'], models, alone=False)  # as an older version
  with pytest.raises(ValueError, match=having('None', 'another folder')):
    job.run(tmp_path, str)


def test_what_is_loaded_and_what_is_refused(tmp_path):
  named = [Model({}, None, name=name) for name in ('small', 'large')]
  weights = router.fit(router.LOSSES['marginal'], tokens(50), steps=2)
  router.save(tmp_path, weights, named, alone=False)
  rule = router.load(tmp_path, named)
  jax.tree.map(np.testing.assert_array_equal, rule.keywords['weights'], jax.tree.map(np.float32, weights))
  by_rejections = router.load(tmp_path, named, rejections=True)
  assert by_rejections.func is rules.learned_opt
  jax.tree.map(np.testing.assert_array_equal, by_rejections.keywords, rule.keywords)
  (kernel, bias), last = weights
  router.save(tmp_path / 'alone', ((kernel[: rules.TOP + 1], bias), last), named, alone=True)
  with pytest.raises(ValueError, match=having('drafter alone', 'without rejections')):
    router.load(tmp_path / 'alone', named, rejections=True)
  with pytest.raises(ValueError, match=having('small and large', 'large and small')):
    router.load(tmp_path, named[::-1])
  (tmp_path / 'torn.json').write_text('{"models": [')
  (tmp_path / 'other.json').write_text('{"models": ["small", "large"]}')
  router.save(tmp_path / 'narrow', ((kernel[1:], bias), last), named, alone=False)
  for name in ('torn.json', 'other.json', 'narrow'):
    with pytest.raises(ValueError, match=having(name, 'no router', 'train it anew')):
      router.load(tmp_path / name, named)
  with pytest.raises(FileNotFoundError, match=having('absent', 'speccascade.train')):
    router.load(tmp_path / 'absent', named)


@pytest.mark.parametrize(
  'changes, message',
  [
    (dict(loss='l2'), having("loss='l2'", 'swap, expected, expected_log, expected_draw, marginal')),
    (dict(texts='drafter'), having("texts='drafter'", 'references', 'verifier')),
    (dict(models=[None]), having('1 models')),
    (dict(hidden=0), having('hidden=0')),
  ],
)
def test_errors_of_a_job(changes, message):
  with pytest.raises(ValueError, match=message):
    router.Router(**{**dict(name='r', models=[None, None], task=None), **changes})
