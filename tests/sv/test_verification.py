"""How much is verified: the best choice of all, and a distribution that no choice can change."""

import dataclasses
import functools
import itertools

from cases import own
from flax import struct
import jax
import jax.numpy as jnp
from matching import having
import numpy as np
import pytest
import reference
from tiers import long_but

from speccascade import acceptance, backends, decode, methods, Sampler
from speccascade.backends.ops import take
from speccascade.check import enumeration
from speccascade.check.enumeration import distance
from speccascade.drafters.layerskip import layerskip
from speccascade.engine.limits import Limit
from speccascade.engine.loop import decode_batch
from speccascade.models import packing, toy
from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.models.t5 import T5, T5Config
from speccascade.sv import verification
from speccascade.sv.plans import Profile
from speccascade.sv.predictors import AcceptanceTable
from speccascade.types import Model, Prompt, Told

COIN = toy.model(4, 2, scale=1.2)
COMPANION = toy.model(6, 2, scale=0.6, near=COIN)
COINS = [toy.model(5, 2, scale=0.8, near=COIN), COMPANION, COIN]
TABLE = AcceptanceTable(
  np.float32([0.8]), np.float32([[0.6, 0.95], [0.6, 0.95]]), np.float32([[0.05, 0.3, 0.6], [0.1, 0.6, 0.9]])
)
LARGE = toy.model(21, 7, scale=1.5)
TRIO = [toy.model(22, 7, scale=0.7, near=LARGE), toy.model(23, 7, scale=0.5, near=LARGE), LARGE]
# Of one row: two tokens of a draft cost as much as one, so that the second decides on the first.
STAIRCASE = Profile(TABLE, np.float32([1.0, 1.0, 2.2, 2.2, 3.5]))
FALLING = Profile(TABLE, np.float32([1.0, 1.0, 1.15, 1.4, 1.9]))
LINEAR = Profile(TABLE, np.float32(12 + np.arange(40)))  # of several rows, some tokens are worth it


@struct.dataclass
class Peek(Limit):
  """Score as many tokens as what was drafted says, by no sense: the tokens of all rows, to the last, decide."""

  def __call__(self, context, state):
    slot = jnp.arange(state.window.source.shape[1])[None]
    drafted = slot < state.window.size[:, None]
    tokens = jnp.where(drafted, take(state.tokens, state.length[:, None] + slot), 0)
    said = (tokens * (slot + 1)).sum() + 2 * tokens[:, -1:].sum(1) + tokens.sum(1)
    return said % jnp.maximum(state.window.size, 1)


def peeking(method, limit):
  """Return a method of three models whose verifier scores as much as a limit says."""
  return method.replace(phases=(*method.phases[:2], method.phases[2].replace(limit=limit), method.phases[3]))


# ---- the choice ----


def goodput_of(gains, seconds, certain, lengths):
  """Return the goodput of rows that are verified so far."""
  return (certain + sum(gains[b, :n].sum() for b, n in enumerate(lengths))) / seconds[sum(lengths)]


def by_brute_force(gains, seconds, certain):
  """Return the best goodput over all lengths of all rows."""
  options = itertools.product(range(gains.shape[1] + 1), repeat=gains.shape[0])
  return max(goodput_of(gains, seconds, certain, v) for v in options)


def before_the_first_fall(gains, seconds, certain):
  """Return the lengths of all rows when the best token left is added for as long as the goodput does not fall."""
  lengths, kept = [0] * len(gains), np.float64(certain)
  while left := [(gains[b, n], -b) for b, n in enumerate(lengths) if n < gains.shape[1]]:
    gain, row = max(left)
    total = sum(lengths)
    if (kept + gain) / seconds[total + 1] < kept / seconds[total]:
      break
    kept += gain
    lengths[-row] += 1
  return lengths


@pytest.mark.parametrize('counts', verification.COUNTS)
@pytest.mark.parametrize('seed', range(8))
def test_the_choice_is_the_best_of_all_allocations(seed, counts):
  rng = np.random.default_rng(seed)
  gains = np.float32(np.cumprod(np.where(rng.random((3, 3)) < 0.2, 1.0, rng.random((3, 3))), 1))
  steps = rng.integers(1, 4, 10).cumsum()
  seconds = np.float32(1 + rng.random(12).cumsum()[np.searchsorted(steps, np.arange(10))])  # a staircase
  certain = 3 if counts == 'tokens' else 0
  choose = functools.partial(
    verification.lengths, jnp.asarray(gains), jnp.asarray(seconds), verification.certain(counts, jnp.int32(3))
  )
  found = goodput_of(gains, seconds, certain, choose().tolist())
  assert found == pytest.approx(by_brute_force(gains, seconds, certain), rel=1e-6)
  assert choose(greedy=True).tolist() == before_the_first_fall(gains, seconds, certain)


@pytest.mark.parametrize('greedy', [False, True])
def test_where_only_accepted_tokens_count_more_are_verified(greedy):
  # A token of .3 costs 40 % more time: less speed, but without it nothing drafted is accepted at all.
  gains, seconds = jnp.array([[0.3, 0.1], [0.2, 0.1]]), jnp.array([1.0, 1.4, 1.8, 2.2, 2.6])
  choose = lambda counts: verification.lengths(gains, seconds, verification.certain(counts, jnp.int32(2)), greedy)
  assert choose('tokens').tolist() == [0, 0] and choose('accepted').tolist() == [1, 1]
  nothing = verification.lengths(jnp.zeros((2, 2)), seconds, 0, greedy)
  assert nothing.tolist() == [0, 0]


@pytest.mark.parametrize('make', [methods.sv, methods.sv_exact])
def test_goodput_that_counts_something_else_is_refused(make):
  with pytest.raises(ValueError, match=having("goodput='accept'", "'tokens'", "'accepted'")):
    make(FALLING, 2, goodput='accept')
  assert 'goodput of accepted tokens' in str(make(FALLING, 2, goodput='accepted'))


def test_stopping_at_the_first_fall_loses_behind_a_step():
  # 8 rows of which each has a token of .8, then one of .64, …; the device computes 16 tokens at a time.
  gains = jnp.asarray(0.8 ** np.tile(np.arange(1, 6), (8, 1)), jnp.float32)
  tokens = np.arange(8, 49)
  seconds = 1 + 0.15 * (tokens > 8) + 0.15 * ((tokens - 1) // 16)
  choose = functools.partial(verification.lengths, gains, jnp.asarray(seconds, jnp.float32), jnp.int32(8))
  goodput = lambda v: goodput_of(gains, seconds, 8, v.tolist())
  best, greedy = goodput(choose()), goodput(choose(greedy=True))
  assert int(choose(greedy=True).sum()) == 0 and greedy == 8
  assert best > 2.4 * greedy


def test_rows_that_cannot_gain_get_nothing_and_equal_gains_go_to_the_first():
  gains = jnp.array([[0.5, 0.25], [0.5, 0.5], [0.0, 0.0]])
  v = verification.lengths(gains, jnp.array([1.0, 1.0, 1.0, 9.0, 9.0, 9.0, 9.0]), jnp.int32(3))
  assert v.tolist() == [1, 1, 0]
  v = verification.lengths(gains, jnp.ones(7), jnp.int32(3))
  assert v.tolist() == [2, 2, 0]


def test_a_time_that_was_not_measured_is_that_of_the_next_size():
  latency = verification.Latency.of({2: {2: 1.0, 4: 0.9, 8: 2.0}, 1: [1.0, 1.0, 3.0]}, {2: (0.5, 0.25)})
  seconds, steps = latency.at(2, jnp.int32(1), 10)
  assert seconds.tolist() == [1, 1, 1, 1, 2, 2, 2, 2, 2.125, 2.25] and steps.tolist() == [0.5, 0.25, 0]
  assert latency.at(7, jnp.int32(4), 3)[0].tolist() == [1, 2, 2]
  seconds, steps = latency.at(1, jnp.int32(1), 4)
  assert seconds.tolist() == [1, 3, 4, 5] and steps.tolist() == [0, 0, 0]


def test_times_of_smaller_batches_warn_and_times_of_any_batch_do_not():
  chances, active = jnp.full((4, 5), 0.8), jnp.ones(4, bool)
  any_batch = verification.Goodput(verification.Latency.of([1.0, 1.1]))
  of_one = verification.Goodput(verification.Latency.of({1: {1: 1.0, 6: 1.1}}))
  assert any_batch(chances, active).shape == (4,)
  with pytest.warns(UserWarning, match=having('up to 1 rows', 'batch has 4', '--batches')):
    of_one(chances, active)


def test_the_table_is_looked_up_by_its_edges():
  s, a = jnp.array([[0.1, 0.8, 0.9]]), jnp.array([[0.6, 0.59, 1.0]])
  np.testing.assert_allclose(TABLE(s, a), [[0.3, 0.1, 0.9]], rtol=1e-6)


# ---- the distribution ----


def in_company(mate, programs):
  """Return a decode for `emitted_distribution` in which each row shares its batch with one that decides as `mate`.

  The program that serves every mate is added to `programs`.
  """

  def run(method, models, batch, *, max_new_tokens, sampler, noise):
    def pair(digits, chances, mate):
      both = [jnp.stack([x, y]) if mate is not None else x[None] for x, y in ((digits, mate), (chances, chances))]
      rows = len(both[0])
      prompt = Prompt(batch.tokens[:rows], batch.length[:rows])
      made = noise.replace(digits=both[0], chances=both[1])
      return decode_batch(method, models, prompt, max_new_tokens=max_new_tokens, sampler=sampler, noise=made)

    if not programs:
      programs.append(jax.jit(jax.vmap(pair, (0, 0, None))))
    return jax.tree.map(lambda x: x[:, 0], programs[0](noise.digits, noise.chances, mate))

  return run


def mates(count, seed=0):
  """Return decisions of so many rows."""
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.integers(0, 2, (count, 1, 3, 3)), jnp.int32)


def off_by(method, mates=(None,)):
  """Return the largest distance of the distribution of three tokens, in such company, to the verifier's."""
  expected, programs = reference.joint_distribution(own(COINS), [1, 0], 3), []
  run = functools.partial(enumeration.emitted_distribution, method, COINS, [1, 0], 3, Sampler())
  return max(max(distance(run(in_company(mate, programs)), expected)) for mate in mates)


EXACT = {
  'best of a staircase': methods.sv_exact(STAIRCASE, block=2),
  'greedy': methods.sv_exact(FALLING, block=2, greedy=True),
  'best of accepted tokens': methods.sv_exact(STAIRCASE, block=2, goodput='accepted'),
  'greedy, accepted tokens': methods.sv_exact(FALLING, block=2, greedy=True, goodput='accepted'),
  'by what was drafted': peeking(methods.sv_exact(STAIRCASE, block=2), Peek()),
  'without the companion': methods.by_batch({1: methods.speculative(block=2, pair=(0, 2))}),
}


FIRST = ('greedy', 'by what was drafted')


@pytest.mark.full
@pytest.mark.parametrize('name', long_but(EXACT, FIRST))
def test_a_row_alone_follows_the_law_whatever_is_scored(name):
  assert off_by(EXACT[name]) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize('name', long_but(EXACT, [n for n in EXACT if n[:2] == 'by']))
def test_packed_with_any_other_row_it_follows_the_distribution(name):
  assert off_by(EXACT[name], mates(4)) < 1e-5


@acceptance.acceptor(reads=(), told=Told.LATER)
def keyed_by_round(trial):
  """Accept each token in turn, by numbers of the round."""
  return acceptance.token_wise(trial)


@pytest.mark.long
@pytest.mark.parametrize('counts', verification.COUNTS)
def test_the_published_method_is_biased_and_by_how_much(counts):
  sv = methods.sv(FALLING, block=2, goodput=counts).accepting(keyed_by_round)  # every decision of every round counts
  bias = off_by(sv)
  assert 0.01 < bias < 0.2


@pytest.mark.full
def test_a_batch_is_decoded_by_the_method_for_its_size_and_feeds_no_other_model():
  drafted = methods.speculative(block=2, pair=(0, 2))
  method = methods.by_batch({1: methods.sv_exact(FALLING, 3), 2: drafted, 4: methods.autoregressive(2)})
  prompts = [[1, 2], [3], [4, 4, 1, 5], [0], [2, 2], [5]]
  step = own(TRIO, temperature=0.0)
  alone = [list(*reference.joint_distribution(step, prompt, 9)) for prompt in prompts]
  for rows, fed, window in ((1, [0, 1, 2], 4), (2, [0, 2], 2), (4, [2], 1), (6, [2], 1)):
    out = decode(method, TRIO, prompts[:rows], max_new_tokens=9, sampler=Sampler(0.0))
    assert out.tokens == alone[:rows]
    assert np.flatnonzero(out.stats.calls.any(1)).tolist() == fed
    assert sorted(method.at(rows).slots) == fed
    verified = out.stats.verified_lengths
    assert verified.shape == (rows, window + 1)
    assert ((verified * np.arange(window + 1)).sum(1) == out.stats.positions[2] - out.stats.rounds).all()
  of_two, drafted = (decode(m, TRIO, prompts[:2], max_new_tokens=9, sampler=Sampler(0.0)) for m in (method, drafted))
  assert of_two.tokens == drafted.tokens and (of_two.stats.drafted == drafted.stats.drafted).all()


def test_a_pair_among_three_models_decodes_as_those_two_alone():
  run = functools.partial(decode, prompts=[[1, 2], [3]], max_new_tokens=9)
  of_two = run(methods.speculative(block=2), TRIO[:2])
  assert run(methods.speculative(block=2, pair=(0, 1)), TRIO).tokens == of_two.tokens
  with pytest.raises(ValueError, match=having('2 models', '3 were given', 'pair=(0, 2)')):
    run(methods.speculative(block=2), TRIO)


@pytest.mark.full
def test_texts_do_not_depend_on_what_is_scored():
  run = functools.partial(decode, models=TRIO, prompts=[[1, 2], [3], [4, 4, 1, 5]], max_new_tokens=15)
  texts = [
    run(m).tokens
    for m in (
      methods.sv_exact(LINEAR, 2),
      methods.sv_exact(LINEAR, 5, goodput='accepted'),
      peeking(methods.sv_exact(STAIRCASE, 4), Peek()),
    )
  ]
  assert all(t == texts[0] for t in texts)


# ---- packing ----


PACKED = {'sv_exact': methods.sv_exact(LINEAR, 4), 'bild': methods.bild(0.4, 1.2, 4)}


@pytest.mark.long
@pytest.mark.parametrize('name', PACKED)
def test_packed_windows_decode_the_same_with_less_work(name, monkeypatch):
  method = PACKED[name]
  models = TRIO if method.models == 3 else TRIO[1:]
  run = functools.partial(decode, method, models, [[1, 2], [3], [4, 4, 1, 5], [0], [5, 5, 5]], max_new_tokens=15)
  packed = run()
  monkeypatch.setattr(backends.Backend, 'pack_from', 1000)
  monkeypatch.setattr(backends.Backend, 'choose', lambda *_: pytest.fail('one window is no choice'))
  jax.clear_caches()
  padded = run()
  assert packed.tokens == padded.tokens and (packed.stats.positions == padded.stats.positions).all()
  assert packed.stats.computed[-1].sum() < padded.stats.computed[-1].sum()
  assert (padded.stats.computed[-1] % 5 == 0).all()  # the widest window in each call


LLAMA = DecoderConfig(97, 32, 4, 2, 8, 64, (Span(),) * 3, tied=True)
LEARNED = DecoderConfig(
  97,
  32,
  4,
  4,
  8,
  64,
  (Span(0, None),) * 3,
  gated=False,
  layer_norm=True,
  qkv_bias=True,
  positions=64,
  position_offset=2,
)
FAMILIES = {
  'llama': Decoder(LLAMA),
  'scanned windows': Decoder(dataclasses.replace(LLAMA, spans=(Span(4), Span(), Span(4)), qk_norm=True), scan=True),
  'learned positions': Decoder(LEARNED),
  't5': T5(T5Config(97, 32, 4, 8, 64, 2, 2), eos_ids=()),
  't5 scanned': T5(T5Config(97, 32, 4, 8, 64, 2, 2, shared_bias=False), eos_ids=(), scan=True),
}


@pytest.mark.full
@pytest.mark.parametrize('name', long_but(FAMILIES, ['llama']))
def test_a_transformer_packed_computes_what_it_computes_padded(name):
  network, need = FAMILIES[name], jnp.array([3, 1, 0, 4])
  params = network.init(jax.random.key(0))
  rng = np.random.default_rng(0)
  prompt = Prompt(jnp.asarray(rng.integers(0, 97, (4, 8)), jnp.int32), jnp.array([8, 3, 5, 1]))
  first = prompt.length - 1 if network.start_id is None else jnp.zeros(4, jnp.int32)
  tokens, position = jnp.asarray(rng.integers(0, 97, (4, 4)), jnp.int32), first[:, None] + jnp.arange(4)[None]
  extend = jax.jit(network.extend)
  cache = jax.jit(network.prefill, static_argnums=2)(params, prompt, 24)
  padded, after = extend(params, cache, tokens, position)
  packed = packing.Packing.of(need, 4, 9)
  logits, after_packed = extend(params, cache, tokens, position, packed)
  assert logits.shape == (1, 9, 97)
  real = np.arange(4)[None] < np.asarray(need)[:, None]
  np.testing.assert_allclose(packed.unpack(logits)[real], padded[real], atol=2e-5)
  again = [extend(params, c, tokens[:, :1], (first + need)[:, None])[0] for c in (after, after_packed)]
  np.testing.assert_allclose(again[1], again[0], atol=2e-5)  # the caches hold the same where it is looked at


WHOLE = {'decoder': Decoder(LLAMA), 't5': T5(T5Config(97, 32, 4, 8, 64, 1, 3), eos_ids=())}


@pytest.mark.long
@pytest.mark.parametrize('kind', WHOLE)
def test_a_models_first_layers_draft_its_next_are_the_companion(kind):
  network = WHOLE[kind]
  whole = Model(network.init(jax.random.key(1)), network, name='whole', digest='d')
  models = [layerskip(whole, 1), layerskip(whole, 2), whole]
  assert [m.digest for m in models] == ['d-first1', 'd-first2', 'd']
  run = functools.partial(decode, prompts=[[1, 2], [3], [4, 4, 1, 5]], max_new_tokens=11, sampler=Sampler(0.0))
  out = run(methods.sv_exact(LINEAR, 3), models)
  assert out.tokens == run(methods.autoregressive(), [whole]).tokens
  assert out.stats.accepted.sum() > 0


@pytest.mark.long
def test_numbers_of_its_own_each_round_would_make_a_look_ahead_biased():
  # What a round looks at beyond the tested token comes up again, by the same numbers, in the next: nothing is selected.
  # Drawn anew, the tokens that a choice went by would be others.
  look = lambda name: off_by(EXACT[name].accepting(keyed_by_round))
  assert look('best of a staircase') > 0.01 and look('greedy') < 1e-5
