"""A drafter of another vocabulary: its tables, its distribution, and decoding with it."""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path

from cases import FOREIGN, FOREIGN_PAIR, PROMPT
import jax
import jax.numpy as jnp
from matching import having, says
import numpy as np
import pytest
import reference
from tiers import long_but
from trained import NEW

from experiments.helpers.families import corpus, PAIRS, prompts
from experiments.translated import give_vocabulary
import speccascade
from speccascade import decode, drafters, embedded, methods, rules, Sampler
from speccascade.check import enumeration
from speccascade.data import tokenizer_formats, tokenizers
from speccascade.drafters import ngram, one_pass, translation
from speccascade.drafters.hidden import Drafter, Observed
from speccascade.engine.loop import decode_batch
from speccascade.models import toy
from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.planning.cost_model import Costs
from speccascade.planning.planner import plan
from speccascade.types import Model, Prompt


def tokens_of(path, size: int) -> Model:
  """Return a model of one logit table with the tokens of a tokenizer."""
  tokenizer = tokenizers.load(path)
  model = toy.model(len(tokenizer.pieces()), size, order=1, scale=2.0)
  return model.replace(network=dataclasses.replace(model.network, eos_ids=tokenizer.eos_ids), tokenizer=tokenizer)


@pytest.fixture(scope='module')
def verifiers(tmp_path_factory) -> dict[str, Model]:
  """Return a model of each kind of tokenizer, trained on the package's sentences, and of another by German alone."""
  folder = tmp_path_factory.mktemp('tokenizers')
  english, german = zip(*embedded.sentences('train', 600))
  for name, kind in give_vocabulary.KINDS.items():
    kind(folder / name, [*english, *german], 500, begins=True)
  give_vocabulary.byte_level(folder / 'german', german, 500, begins=True)
  return {name: tokens_of(folder / name, 500) for name in (*give_vocabulary.KINDS, 'german')}


def written(model: Model, i: int) -> str:
  """Return what a token adds to a text that begins with a letter, by the tokenizer's own decoder."""
  before = model.tokenizer.encode('a')
  return model.tokenizer.decode([*before, i]).removeprefix(model.tokenizer.decode(before))


DIRECTIONS = [('sentencepiece', 'byte_level'), ('byte_level', 'sentencepiece')]


@pytest.mark.parametrize('large, small', DIRECTIONS)
def test_common_tokens_are_those_that_write_the_same(verifiers, large, small):
  large, small = verifiers[large], verifiers[small]
  made = drafters.translated(small, for_=large)
  read, write = (np.asarray(made.params[translation.TABLES][name]) for name in ('read', 'write'))
  common = np.flatnonzero(translation.common(made))
  assert 200 < common.size < 500 and len({*write[common]}) == common.size
  special = {*large.tokenizer.eos_ids, *tokenizer_formats.read(large.tokenizer.path).prefix}
  ours, theirs = ([written(m, i) for i in range(500)] for m in (large, small))
  for i in common:
    assert read[i] == write[i]
    if i not in special:
      assert ours[i] == theirs[write[i]], ours[i]
  known = {text for text in theirs if text and '�' not in text}
  lacking = [i for i in range(500) if write[i] < 0 and ours[i] and '�' not in ours[i]]
  assert len(lacking) > 50
  for i in lacking:
    if ours[i] not in known:  # else a byte that has a piece as well
      ends = [ours[i][start:] for start in range(len(ours[i]))]
      assert theirs[read[i]] == next((end for end in ends if end in known), ' ')


@pytest.mark.parametrize('large, small', DIRECTIONS)
def test_sequences_begin_and_end_alike(verifiers, large, small):
  large, small = verifiers[large], verifiers[small]
  made = drafters.translated(small, for_=large)
  for name in ('read', 'write'):
    table = np.asarray(made.params[translation.TABLES][name])
    assert table[large.tokenizer.eos_ids[0]] == small.tokenizer.eos_ids[0]
    assert table[large.tokenizer.encode('a')[0]] == small.tokenizer.encode('a')[0]
  assert made.tokenizer is large.tokenizer and made.network.eos_ids == large.network.eos_ids


def test_the_distribution_is_the_published_one_on_the_intersection(verifiers):
  # Timor et al. 2025, Algorithm 4: q(t) / Σ q over the tokens of both, which two of one format write alike.
  large, small = verifiers['byte_level'], verifiers['german']
  ours, theirs = large.tokenizer.pieces(), small.tokenizer.pieces()
  both = [(i, theirs.index(piece)) for i, piece in enumerate(ours) if piece in theirs]
  made = drafters.translated(small, for_=large)
  cache = made.network.prefill(made.params, Prompt(jnp.array([[3, 4]]), jnp.array([2])), 8)
  logits, _ = made.network.extend(made.params, cache, jnp.array([[4]]), jnp.array([[1]]))
  q = reference.softmax(np.asarray(small.params['table'], np.float64)[theirs.index(ours[4])])
  expected = np.zeros(500)
  for i, own in both:
    expected[i] = q[own]
  assert 300 < len(both) < 500
  np.testing.assert_allclose(Sampler()(logits[0, 0]), expected / expected.sum(), rtol=1e-4)
  p = reference.softmax(np.asarray(large.params['table'], np.float64)[4])
  assert np.minimum(p, expected / expected.sum()).sum() > np.minimum(p, expected).sum()  # than without renormalising


@pytest.mark.long
def test_the_first_draft_is_accepted_as_often_as_the_intersection_allows():
  q, p = (reference.softmax(reference.table_logits(m, PROMPT)) for m in FOREIGN_PAIR)
  rows = 4000
  out = decode(methods.speculative(block=1), FOREIGN_PAIR, [PROMPT] * rows, max_new_tokens=1)
  rate = out.stats.accepted_at[:, 0].sum() / out.stats.tested_at[:, 0].sum()
  assert abs(rate - np.minimum(q, p).sum()) < 4 * 0.5 / rows**0.5


# ---- models with another vocabulary ----


def with_bytes(model: Model, folder: Path, texts: list[str], size: int) -> Model:
  """Return a model with a byte-level vocabulary of these texts."""
  begins = model.network.start_id is None
  return give_vocabulary.with_vocabulary(model, give_vocabulary.byte_level(folder, texts, size, begins=begins))


@pytest.mark.long
def test_a_translated_drafter_changes_nothing_but_acceptance(tmp_path):
  small, large = embedded.models()
  english, german = zip(*embedded.sentences('train', 2000))
  foreign = with_bytes(small, tmp_path, [*english, *german], 900)
  run = functools.partial(decode, prompts=list(english[:24]), max_new_tokens=40, sampler=Sampler(0.0), batch_size=24)
  alone = run(methods.autoregressive(), [large])
  rates = {}
  for drafter in (small, drafters.translated(foreign, for_=large)):
    out = run(methods.speculative(block=3), [drafter, large])
    assert out.tokens == alone.tokens
    rates[drafter.name] = out.stats.accepted.sum() / out.stats.tested.sum()
  assert list(rates) == ['small', 'small-900-translated']
  before, after = rates.values()
  assert 0 < after < before


GREEDY = json.loads((Path(__file__).parents[1] / 'models' / 'golden' / 'greedy.json').read_text())


@pytest.mark.parametrize('family', long_but(PAIRS, []))
def test_200_prompts_are_continued_as_by_the_verifier_alone(family, families, tmp_path):
  folder = families / family
  small, large = (speccascade.load(folder / name, dtype='float32') for name in PAIRS[family])
  foreign = drafters.translated(with_bytes(small, tmp_path, corpus(family, 2000), 3000), for_=large)
  settings = dict(max_new_tokens=NEW, sampler=Sampler(0.0), batch_size=50)
  run = functools.partial(decode, prompts=prompts(family, 200, 'val'), **settings)
  out = run(methods.speculative(block=3), [foreign, large])
  if (name := f'{family}/{PAIRS[family][1]}') in GREEDY['digests']:
    assert hashlib.sha256(json.dumps(out.tokens).encode()).hexdigest() == GREEDY['digests'][name]
  else:
    assert out.tokens == run(methods.autoregressive(), [large]).tokens
  assert 0 < out.stats.accepted.sum() < out.stats.tested.sum()


MU = 0.1
BIAS = np.array([-100.0, 0.0, 0.0])


MAKERS = {
  'ensemble': methods.ensemble,
  'naive_cos': functools.partial(methods.naive_cos, block=2),
  'cos': functools.partial(methods.cos, blocks=(2, 1)),
}


@pytest.mark.parametrize('name', long_but(MAKERS, ['naive_cos']))
def test_a_contrastive_target_gives_what_the_drafter_lacks_its_lowest_logit_before_a_request_changes_it(name):
  biased = lambda logits, tokens, count: logits + BIAS
  method = MAKERS[name](functools.partial(rules.contrastive, mu=MU))
  run = functools.partial(decode_batch, processor=biased)
  found = enumeration.emitted_distribution(method, FOREIGN_PAIR, PROMPT, 2, Sampler(), run)

  def pi(logits, sampler):
    q = np.where(np.isneginf(logits[0]), logits[0][np.isfinite(logits[0])].min(), logits[0])
    return sampler(logits[1] + BIAS - MU * (q + BIAS))

  expected = reference.joint_distribution(reference.lockstep(FOREIGN_PAIR, pi), PROMPT, 2)
  assert max(enumeration.distance(found, expected)) < 1e-5


@pytest.mark.long
def test_the_trace_of_a_contrastive_target_has_the_drafters_own_probabilities():
  combiner = functools.partial(rules.contrastive, mu=1.0)
  out = decode(methods.naive_cos(combiner, block=1), FOREIGN_PAIR, [PROMPT] * 8, max_new_tokens=1, trace=True)
  q = reference.softmax(reference.table_logits(FOREIGN, PROMPT))
  found = [(q[row[0]], np.exp(logprobs[0][0])) for row, logprobs in zip(out.tokens, out.logprobs, strict=True)]
  assert 0 in [chance for chance, _ in found]
  np.testing.assert_allclose(*zip(*found), rtol=1e-5)


def test_what_a_head_over_some_tokens_lacks_is_lacking_in_another_vocabulary_too():
  drafter = toy.model(3, 4)
  head = np.array([0, 1, -1, 2])  # the drafter lacks its token 2
  lacking = dataclasses.make_dataclass('Lacking', [], bases=(type(drafter.network),), frozen=True)
  lacking.lacks = lambda self, params: jnp.asarray(head < 0)
  drafter = drafter.replace(network=lacking(4))
  found = drafters.translated(drafter, for_=toy.model(0, 5), tables=([0] * 5, [3, -1, 2, 1, 0]))
  assert found.network.lacks(found.params).tolist() == [False, True, True, False, False]


# ---- what is refused, and what is said ----


@pytest.mark.parametrize('change, kind', [(dict(mask_token=1), 'in one pass'), (None, 'memory')])
def test_a_drafter_that_would_not_draft_as_it_does_is_not_translated(change, kind):
  toy0 = toy.model(3, 5)
  drafter = ngram.drafter(toy0, memory=8) if change is None else one_pass(toy0, **change)
  with pytest.raises(ValueError, match=having(drafter.name, kind)):
    drafters.translated(drafter, for_=toy.model(0, 5), tables=([0] * 5, [0] * 5))


def test_errors_name_what_is_missing(verifiers):
  small, large = verifiers['byte_level'], toy.model(0, 5)
  with pytest.raises(ValueError, match=having('toy0', 'tokenizer=', 'tables=')):
    drafters.translated(small, for_=large)
  with pytest.raises(ValueError, match=having('write', '0 … 499', '5 tokens', 'toy0')):
    drafters.translated(small, for_=large, tables=([0] * 5, [500] * 5))
  with pytest.raises(ValueError, match=having('read', '[4]')):
    drafters.translated(small, for_=large, tables=([0] * 4, [-1] * 5))
  with pytest.raises(ValueError, match=having('read', '-1')):
    drafters.translated(small, for_=large, tables=([-1] * 5, [-1] * 5))
  with pytest.raises(ValueError, match=having(small.name, 'toy0', '1 token')):
    drafters.translated(small, for_=large, tables=([0] * 5, [-1, -1, 7, -1, -1]))
  with pytest.raises(ValueError, match=having('write', '7', small.name, '2 times')):
    drafters.translated(small, for_=large, tables=([0] * 5, [-1, 7, 7, 3, -1]))
  with pytest.raises(ValueError, match=having(small.name, 'share a text')):
    drafters.translated(small, for_=toy.model(0, 5, encoder=True))


def test_models_of_two_vocabularies_are_refused_with_the_remedy(verifiers):
  with pytest.raises(ValueError, match=having('drafters.translated', '--translate')):
    decode(methods.speculative(), [verifiers['german'], verifiers['byte_level']], ['A dog.'], max_new_tokens=2)
  with pytest.raises(ValueError, match='drafters.translated'):
    decode(methods.speculative(), [toy.model(0, 4), toy.model(1, 3)], [[1]], max_new_tokens=2)


def test_models_with_the_last_ones_tokens_stay_as_they_are(verifiers):
  small, large = verifiers['german'], verifiers['byte_level']
  made = translation.for_the_last([small, large, large])
  assert made[1:] == [large, large] and made[0].network.drafter == small.network
  assert translation.common(large) is None


@pytest.mark.long
def test_the_plan_says_how_many_tokens_are_common():
  costs = {1: Costs(0.1, {1: 1.0, 2: 1.0, 3: 1.0})}
  report = plan(FOREIGN_PAIR, [[2, 2, 1, 0], [2, 0]], blocks=(1, 2), max_new_tokens=6, costs=costs)
  (line,) = report.overlaps
  assert says(line, FOREIGN.name, '2 of the 3 tokens', '83%') and line in str(report)


def test_a_network_with_named_axes_keeps_them_and_one_without_has_none():
  config = DecoderConfig(11, 8, 2, 2, 4, 8, (Span(),))
  made = drafters.translated(
    Model(Decoder(config).init(jax.random.key(0)), Decoder(config)), for_=toy.model(0, 5), tables=(range(5), range(5))
  )
  shapes = jax.tree.map(lambda x: (x.shape, x.dtype), made.params)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), made.network.param_shapes()) == shapes
  axes = jax.tree.leaves(made.network.param_axes(), is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec))
  assert [len(spec) for spec in axes] == [x.ndim for x in jax.tree.leaves(made.params)]
  assert FOREIGN.network.param_axes() is None


def test_the_same_tables_have_the_same_digest():
  small = toy.model(1, 4).replace(digest='abc')
  see = functools.partial(drafters.translated, small, for_=toy.model(0, 3))
  made = [see(tables=([0, 1, 2], write)) for write in ([0, 1, 2], [0, 1, 3])]
  again = see(tables=([0, 1, 2], [0, 1, 2]))
  assert again.digest == made[0].digest != made[1].digest and FOREIGN.digest is None


def test_a_network_around_another_has_its_positions_and_experts():
  routed = DecoderConfig(11, 8, 2, 2, 4, 6, (Span(),), context=64, experts=4, experts_per_token=2)
  inner = Decoder(routed)
  for network in (translation.Translated(inner, 7), Observed(inner, None), Drafter(inner, None)):
    assert network.experts == inner.experts == (4, 2)
    assert (network.context, network.max_positions, network.head_counts) == (64, None, (2, 2))
