"""Drafters of several tokens: they are trained on what a round asks of them, and draft when they are loaded again."""

import dataclasses
import functools
import json
import pathlib

from flax.traverse_util import flatten_dict
import jax
import jax.numpy as jnp
from matching import having
import numpy as np
import pytest
from small import copies, DECODER, quiet, settings, T5_NET
from tiers import long_but

import speccascade
from speccascade import decode, drafters, methods, Sampler
from speccascade.checkpoints import hf
from speccascade.drafters.eagle import Eagle, HeadConfig
from speccascade.drafters.hidden import Head
from speccascade.drafters.medusa import Medusa, MedusaConfig
from speccascade.host.errors import RunError
from speccascade.models.decoder import DecoderConfig, Span
from speccascade.train import compiled, forcing, jobs, loop, losses
from speccascade.train.batches import collate
from speccascade.train.forcing import Drafting
from speccascade.train.loop import train
from speccascade.train.losses import Distillation
from speccascade.types import Model, Prompt

FOLDER = pathlib.Path(__file__).parents[2] / 'gin_configs' / 'train'
LAYER = DecoderConfig(12, 16, 2, 2, 8, 32, (Span(),))
TWO = dataclasses.replace(LAYER, spans=(Span(), Span()))
VERIFIERS = {'t5': T5_NET, 'decoder': DECODER}
MASK = 11
HEADS = {
  'eagle': Eagle(HeadConfig('eagle', LAYER, (-1,))),
  'eagle3': Eagle(HeadConfig('eagle3', LAYER, (0, 1, 1), states=3)),
  "eagle3 with the verifier's scores": Eagle(HeadConfig('eagle3', LAYER, (0, 1, 1), states=3, own_scores=False)),
  'p-eagle': Eagle(HeadConfig('eagle3', TWO, (0, 1, 1), 3, mask_token=MASK)),
  'mtp': Eagle(HeadConfig('mtp', LAYER, (1,))),
  'medusa': Medusa(MedusaConfig(16, 12, 3, own_scores=False)),
  'medusa with its own scores': Medusa(MedusaConfig(16, 12, 3)),
}
CASES = [(kind, family) for kind in ('one pass', *HEADS) for family in VERIFIERS]
FEW = [('eagle', 'decoder'), ('p-eagle', 't5')]
PAIRS = [([3, 4, 1], [5, 6, 7, 8, 9, 2, 3, 1]), ([9, 8, 7, 6, 1], [2, 3, 4, 5, 1])]


@functools.cache
def model(family, seed=7):
  network = VERIFIERS[family]
  return Model(jax.jit(network.init)(jax.random.key(seed)), network, name='teacher')


def drafter(kind, family):
  """Return a drafter with random parameters."""
  network = drafters.one_pass(model(family), MASK).network if kind == 'one pass' else HEADS[kind]
  return Model(jax.jit(network.init)(jax.random.key(1)), network, name='drafter')


def in_a_round(some, verifier, source, target, end, count):
  """Return the logits [count, V] of a draft behind the tokens up to target[end - 1], which is then target[end:]."""
  drafts, reads = (some, None) if not isinstance(some.network, Head) else drafters.beside(some, verifier)
  is_decoder = verifier.network.start_id is None
  text, at = ([*source, *target], len(source) - 1) if is_decoder else ([0, *target], 0)
  last = at + end
  prompt = Prompt(jnp.array([source]), jnp.array([len(source)]))

  def feed(one, cache, tokens, start):
    positions = start + jnp.arange(len(tokens))[None]
    return extended(one.network, one.params, cache, jnp.array([tokens]), positions)

  cache = prefilled((reads or drafts).network, drafts.params, prompt)
  for slot in range(at, last):  # the verifier's features replace the head's own
    for one in (drafts, reads):
      if one is not None:
        _, cache = feed(one, cache, text[slot : slot + 1], slot)
  if (mask := drafts.network.mask_token) is not None:
    return feed(drafts, cache, [text[last], *[mask] * (count - 1)], last)[0][0]
  out = []
  for slot in range(last, min(last + count, len(text))):
    logits, cache = feed(drafts, cache, text[slot : slot + 1], slot)
    out.append(logits[0, 0])
  return jnp.stack(out)


@functools.partial(jax.jit, static_argnums=0)
def extended(network, *args):
  return network.extend(*args)


@functools.partial(jax.jit, static_argnums=0)
def prefilled(network, params, prompt):
  return network.prefill(params, prompt, 32)


@functools.partial(jax.jit, static_argnums=(0, 4))
def forced(network, params, batch, verifier, drafting):
  return forcing.forced(network, params, batch, verifier, drafting)


@pytest.mark.full
@pytest.mark.parametrize('kind, family', long_but(CASES, FEW))
def test_a_chain_is_asked_for_what_a_round_drafts(kind, family):
  some, verifier, depth = drafter(kind, family), model(family), 3
  said = forced(some.network, some.params, collate(PAIRS, (8,)), verifier, Drafting(depth, keep=0.5))
  heads = kind.startswith('medusa')
  seen = {}
  for row, (source, target) in enumerate(PAIRS):
    for m in np.flatnonzero(said.weight[row]):
      behind = m % depth if heads else 0 if m < 8 else 1 + (m - 8) % (depth - 1)  # its depth in the draft
      end = int(said.at[row, m]) - behind
      assert float(said.weight[row, m]) == 0.5**behind and end + behind < len(target)
      wanted = in_a_round(some, verifier, source, target, end, depth)[behind]
      np.testing.assert_allclose(said.logits[row, m], wanted, atol=1e-5)
      seen.setdefault((row, behind), set()).add(end + behind)
  for row, (_, target) in enumerate(PAIRS):  # the first token of a draft is each token of the target
    assert seen[row, 0] == set(range(len(target)))
    if not heads:  # one chain has each of the others, but for those before the first chain
      deep = sorted(seen[row, 1] | seen[row, 2])
      assert deep == list(range(deep[0], len(target))) and deep[0] <= depth - 1
      assert not seen[row, 1] & seen[row, 2]


def trained(kind, family, folder, **changes):
  some = drafter(kind, family)
  start = {'start': model(family)} if kind == 'one pass' else {}
  usual = dict(steps=90, batch_size=16, log_every=30, save_every=30, drafting=Drafting(3))
  return train(folder, some.network, copies(), settings(**usual | changes), teacher=model(family), echo=quiet, **start)


@pytest.mark.full
@pytest.mark.parametrize('kind, family', long_but(CASES, [('eagle', 'decoder')]))
def test_it_learns_and_comes_back_as_it_was(kind, family, tmp_path):
  result = trained(kind, family, tmp_path / 'run')
  back = speccascade.load(tmp_path / 'run' / 'model')
  assert result.network == drafter(kind, family).network and back.network == hf.settled(result.network)
  jax.tree.map(np.testing.assert_array_equal, back.params, result.params)
  log = [json.loads(line) for line in (tmp_path / 'run' / 'log.jsonl').read_text().splitlines()]
  assert log[-1]['loss'] < 0.85 * log[0]['loss'] and log[-1]['acceptance'] > log[0]['acceptance']
  options = dict(max_new_tokens=12, sampler=Sampler(coupling='gumbel'))
  write = functools.partial(decode, prompts=[[3, 4, 5, 6], [7, 8, 1]], **options)
  expected = write(methods.autoregressive(), [model(family)]).tokens
  assert write(methods.speculative(block=3), [back, model(family)]).tokens == expected


@pytest.mark.long
@pytest.mark.parametrize('kind', ['one pass', *HEADS])
def test_a_stopped_run_goes_on_to_the_same_bits(kind, tmp_path):
  short = dict(steps=6, save_every=2, log_every=2, batch_size=4)
  whole = trained(kind, 't5', tmp_path / 'whole', **short)
  calls = []

  def stopping():
    for pair in copies():
      calls.append(pair)
      yield pair
      if len(calls) == 64:  # a pool of batches
        raise KeyboardInterrupt

  part = functools.partial(train, tmp_path / 'part', drafter(kind, 't5').network, teacher=model('t5'), echo=quiet)
  start = {'start': model('t5')} if kind == 'one pass' else {}
  long = settings(**short | {'steps': 20, 'drafting': Drafting(3)})
  with pytest.raises(KeyboardInterrupt):
    part(stopping(), long, **start)
  resumed = part(copies(), long, **start)
  again = trained(kind, 't5', tmp_path / 'again', **short | {'steps': 20})
  jax.tree.map(np.testing.assert_array_equal, resumed.params, again.params)
  assert not np.array_equal(*(jax.tree.leaves(x.params)[0] for x in (whole, again)))
  with pytest.raises(ValueError, match='drafting'):
    part(copies(), dataclasses.replace(long, drafting=Drafting(4)), **start)


@pytest.mark.full
def test_the_parts_of_the_loss_of_a_head():
  some, verifier = drafter('eagle', 't5'), model('t5')
  batch = collate(PAIRS, (8,))

  @functools.partial(jax.jit, static_argnums=0)
  def loss(drafting=None):
    return losses.loss(some.network, some.params, batch, verifier, Distillation(weight=1.0), None, drafting)

  plain, parts = loss()
  total, more = loss(Drafting(features=10.0))
  assert float(total) == pytest.approx(float(plain) + 10 * float(more['features']), rel=1e-5)
  assert set(more) - set(parts) == {'features'} and float(more['features']) > 0
  even, _ = loss(Drafting(keep=1.0))
  assert float(even) != pytest.approx(float(plain), rel=1e-3)


@pytest.mark.full
def test_a_head_over_some_tokens_has_the_loss_of_its_logits_over_all():
  verifier, ids = model('decoder'), (2, 3, 5, 8, 9)
  head = drafters.frequent(drafter("eagle3 with the verifier's scores", 'decoder'), ids, verifier)
  narrow = dataclasses.replace(head.network, spreads=False)
  params = {name: x for name, x in head.params.items() if name != 'write'}
  drafted = tuple(np.flatnonzero(np.asarray(head.params['write']) >= 0).tolist())
  batch = collate(PAIRS, (8,))
  for distance, of in losses.DISTANCES.items():
    d = Distillation(distance)
    _, parts = losses.loss(narrow, params, batch, verifier, d, drafted=drafted)
    said = forcing.forced(head.network, head.params, batch, verifier)
    log_q = jax.nn.log_softmax(said.logits)[..., np.array(drafted)]
    assert np.isin(said.logits.argmax(-1), drafted).all()
    p = jax.nn.log_softmax(jnp.take_along_axis(said.taught, said.at[..., None], 1))[..., np.array(drafted)]
    assert float(parts[distance]) == pytest.approx(float(said.mean(of(p, log_q))), rel=1e-5)
    rate = jnp.minimum(jnp.exp(p), jnp.exp(log_q)).sum(-1)
    assert float(parts['acceptance']) == pytest.approx(float(said.mean(rate)), rel=1e-5)
    labels = jnp.take_along_axis(jnp.asarray(batch.target), said.at, 1)
    inside = np.isin(labels, drafted)
    weight = jnp.where(inside, said.weight, 0.0)
    ce = -jnp.take_along_axis(jax.nn.log_softmax(said.logits), labels[..., None], -1)[..., 0]
    wanted = jnp.where(inside, ce * weight, 0.0).sum() / weight.sum()
    assert float(parts['cross_entropy']) == pytest.approx(float(wanted), rel=1e-5)


def test_a_head_has_its_tokens_in_the_order_of_their_numbers():
  assert loop._ids_of(np.array([-1, 2, -1, 0, 1])) == (3, 4, 1)


@pytest.mark.full
def test_a_job_trains_a_head_over_the_most_frequent_tokens(tmp_path):
  network, verifier = HEADS["eagle3 with the verifier's scores"], model('decoder')
  hf.write(tmp_path / 'verifier', verifier)
  job = jobs.Job('head', network, [*PAIRS] * 8, settings(), teacher=str(tmp_path / 'verifier'), frequent=4)
  trained = job.run(tmp_path, quiet)
  drafted = np.flatnonzero(np.asarray(trained.params['write']) >= 0)
  counts = np.bincount(np.concatenate([target for _, target in PAIRS]), minlength=12)
  ended = sorted(trained.network.eos_ids)
  assert set(ended) <= set(drafted.tolist()) and trained.network.config.draft_vocab == drafted.size
  assert counts[drafted].min() >= np.sort(counts)[-4]
  lines = list(compiled.report(dataclasses.replace(job, frequent=drafted.size), jax.devices()[:1]))
  size = sum(x.size for name, x in flatten_dict(trained.params).items() if name != ('write',))
  assert lines[0].startswith(f'{size:,} parameters')
  again = speccascade.load(tmp_path / 'head' / 'model')
  assert np.array_equal(np.asarray(again.params['write']), np.asarray(trained.params['write']))
  kernel = again.params['logits_dense']['kernel']
  assert np.allclose(kernel, trained.params['logits_dense']['kernel']) and kernel.shape == (16, drafted.size)
  assert not np.allclose(kernel, verifier.params['token_embedder']['embedding'][drafted].T)  # it learned
  how = dict(prompts=[[3, 4, 1]], sampler=Sampler(0.0), max_new_tokens=12)
  alone = decode(methods.autoregressive(), [verifier], **how)
  assert decode(methods.speculative(block=3), [again, verifier], **how).tokens == alone.tokens
  with pytest.raises(ValueError, match=having('frequent=4', 'EAGLE-3')):
    dataclasses.replace(job, name='one', network=DECODER).run(tmp_path, quiet)
  with pytest.raises(ValueError, match=having('frequent=4', 'a list')):
    dataclasses.replace(job, name='other', task=iter(PAIRS)).run(tmp_path, quiet)
  with pytest.raises(ValueError, match=having('rule')):
    d = Distillation('log_acceptance', rule='opt:0.1')
    dataclasses.replace(job, name='third', settings=settings(distillation=d)).run(tmp_path, quiet)


def test_what_cannot_be_trained_is_named(tmp_path):
  head, of_part = HEADS['eagle'], HeadConfig('eagle3', LAYER, (0, 1, 1), states=3, draft_vocab=5)
  wide = Eagle(HeadConfig('eagle', dataclasses.replace(LAYER, embed_dim=24), (-1,)))
  shown = HeadConfig('eagle3', LAYER, (0, 1, -1), states=3)  # the last is no layer's
  for network, teacher, parts in (
    (head, None, having('Eagle', 'teacher')),
    (wide, model('t5'), having('24', '16', 'trained with')),
    (Eagle(of_part), model('t5'), having('draft_vocab=5')),
    (Eagle(shown), model('t5'), having('cannot be written', 'layer_ids', '[0, 1, -1]')),
  ):
    with pytest.raises(ValueError, match=parts):
      train(tmp_path / 'run', network, copies(), settings(), teacher=teacher, echo=quiet)
  for wrong in ({'depth': 1}, {'keep': 1.5}, {'least': -1}, {'features': -0.1}):
    with pytest.raises(ValueError, match=next(iter(wrong))):
      Drafting(**wrong)


def test_the_configs_have_the_drafters():
  given = ['TEACHER = "x"', 'START = "x"', 'TASK = "problems"']
  one_pass, eagle, p_eagle, medusa = jobs.read([str(FOLDER / 'drafters.gin')], [*given, 'MASK_TOKEN = 7', 'HEADS = 4'])
  assert (one_pass.mask_token, one_pass.start, one_pass.network) == (7, 'x', None)
  assert isinstance(eagle.network, Eagle) and eagle.network.config.layer.heads == 4
  assert p_eagle.network.mask_token == 7 and p_eagle.settings.drafting.features == 0
  assert isinstance(medusa.network, Medusa) and medusa.teacher == eagle.teacher == 'x'
  assert eagle.settings.drafting.features == 10 and medusa.settings.drafting.features == 0
  with pytest.raises(RunError, match='TEACHER'):
    jobs.read([str(FOLDER / 'drafters.gin')], given[1:])


def test_the_config_of_a_chat_model_has_its_drafters():
  read = jobs.read([str(FOLDER / 'smollm2.gin')], ['TASK = "problems"'])
  of = {job.name: job for job in read}
  assert list(of) == ['draft', 'accepted', 'cascade', 'one_pass', 'eagle3', 'p_eagle', 'medusa']
  assert all(of[name].start == 'draft' and of[name].network is None for name in ('accepted', 'cascade', 'one_pass'))
  assert of['one_pass'].mask_token == of['p_eagle'].network.mask_token == 16
  assert of['cascade'].settings.distillation.rule != of['accepted'].settings.distillation.rule
  assert not of['eagle3'].network.own_scores and of['medusa'].network.config.heads == 4


def test_a_job_makes_its_start_a_drafter_in_one_pass(tmp_path, monkeypatch):
  monkeypatch.setattr(jobs, 'train', lambda _, network, *__, **___: network)
  hf.write(tmp_path / 'start', model('t5'))
  job = jobs.Job('more', None, copies(), settings(), start=str(tmp_path / 'start'), mask_token=MASK)
  assert job.run(tmp_path, quiet) == dataclasses.replace(T5_NET, mask_token=MASK)
