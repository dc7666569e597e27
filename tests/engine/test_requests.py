"""Requests: each row as it wants to be decoded, whatever its batch mates want, and streams of rows."""

import contextlib
import dataclasses
import functools
from pathlib import Path
import warnings

from cases import Letters
from emitted import traces
import jax
import jax.numpy as jnp
from matching import having
import numpy as np
import pytest
from tiers import long_but
from vocabularies import byte_level

import speccascade
from speccascade import embedded, methods, Request, rules, Sampler, stopping
from speccascade.backends import limits
from speccascade.drafters import ngram
from speccascade.engine import engine, inputs, loop, results
from speccascade.engine.job import DecodeJob
from speccascade.models import toy
from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.types import Model, Network

LARGE = toy.model(1, 7, scale=1.5)
PAIR = [toy.model(2, 7, near=LARGE, scale=0.7), LARGE]
WITH_EOS = [toy.model(2, 7, near=LARGE, scale=0.7, eos_ids=(6,)), toy.model(1, 7, scale=1.5, eos_ids=(6,))]
OPT = methods.speculative(functools.partial(rules.opt, alpha=0.1), 3)
METHODS = {
  'autoregressive': methods.autoregressive(1),
  'speculative': methods.speculative(block=3),
  'opt': OPT,
  'cos': methods.cos(functools.partial(rules.weighted, weights=(0.5, 0.5)), (3, 1)),
}
SEQUENCE = {
  'sequence cascade, first answers': methods.sequence_cascade(threshold=-np.inf),
  'sequence cascade, second answers': methods.sequence_cascade(threshold=np.inf),
}
DIFFERENT = [
  Request([1, 2], temperature=0.0),
  Request([3], temperature=1.3, seed=5, max_new_tokens=5),
  Request([4, 1, 1], top_k=2, min_new_tokens=3),
  Request([2], top_p=0.6, repetition_penalty=1.4, stop_tokens=[0, 3]),
  Request([5, 5], min_p=0.2, presence_penalty=0.7, frequency_penalty=0.2, example_id=77),
  Request([1], logit_bias={0: -np.inf, 4: 1.5}, temperature=0.7),
]
run = functools.partial(speccascade.decode, max_new_tokens=9)


LETTERED = [PAIR[0], LARGE.replace(tokenizer=Letters())]
say = functools.partial(run, models=LETTERED, max_new_tokens=40, sampler=Sampler(0.0))


ALONE = [(name, size, range(6)) for name in METHODS for size in (None, 2)]


@pytest.mark.full
@pytest.mark.parametrize('name, batch_size, rows', long_but([('opt', 2, (1, 3, 4)), *ALONE], [('opt', 2, (1, 3, 4))]))
def test_each_request_is_decoded_as_if_it_were_alone(name, batch_size, rows):
  together = run(METHODS[name], WITH_EOS, DIFFERENT, batch_size=batch_size, seed=3)
  for i in rows:
    request = DIFFERENT[i]
    ids = [i] if request.seed is None else None  # a seed of its own keys a request wherever it is
    alone = run(METHODS[name], WITH_EOS, request, seed=3, example_ids=ids)
    assert together.tokens[i] == alone.tokens[0]
    assert together.finish_reasons[i] == alone.finish_reasons[0]
    assert together.stats.emitted[i] == alone.stats.emitted[0]


@pytest.mark.full
def test_what_a_request_leaves_out_is_the_calls():
  sampler = Sampler(0.8, top_k=3)
  plain = run(OPT, PAIR, [[1, 2], [3]], sampler=sampler, seed=4)
  asked = run(OPT, PAIR, [Request([1, 2]), Request([3], max_new_tokens=4)], sampler=sampler, seed=4)
  assert asked.tokens == [plain.tokens[0], plain.tokens[1][:4]]
  said = [Request([1, 2], temperature=0.8, top_k=3, seed=4, max_new_tokens=9, example_id=0)]
  assert run(OPT, PAIR, said, max_new_tokens=None, seed=9, example_ids=[5]).tokens[0] == plain.tokens[0]


@pytest.mark.full
def test_rows_end_for_the_reason_that_is_given():
  requests = [
    Request([1, 2], temperature=0.0, max_new_tokens=2, logit_bias={6: -np.inf}),
    Request([1, 2], logit_bias={6: 50.0}),
    Request([1, 2], logit_bias={4: 50.0}, stop_tokens=[4]),
    Request([1, 2], logit_bias={6: 50.0, 4: 20.0}, min_new_tokens=3),
  ]
  out = run(METHODS['speculative'], WITH_EOS, requests)
  assert out.finish_reasons == ('length', 'eos', 'stop', 'eos')
  assert [len(x) for x in out.tokens] == [2, 1, 1, 4] and out.tokens[3] == [4, 4, 4, 6]


def test_a_text_ends_before_the_token_that_ended_it():
  """An EOS id may have a piece that is no special token, as `Letters` has for 5."""
  model = toy.model(1, 7, eos_ids=(5,))
  requests = [Request('bc', logit_bias={token: 50.0, 4: 20.0}, min_new_tokens=3, stop_tokens=[2]) for token in (2, 5)]
  out = run(methods.autoregressive(1), [model, model.replace(tokenizer=Letters())], requests)
  assert out.tokens == [[4, 4, 4, 2], [4, 4, 4, 5]]
  assert out.texts == ['eee', 'eee'] and out.finish_reasons == ('stop', 'eos')


def test_a_stop_string_that_the_last_token_would_complete_cuts_nothing():
  models = [toy.model(1, 7), toy.model(1, 7).replace(tokenizer=Letters())]
  either = Request('bc', logit_bias={4: 50.0, 2: 50.0}, stop_tokens=[2], n=8)
  plain, stopped = (run(methods.autoregressive(1), models, dataclasses.replace(either, stop=x)) for x in (None, 'ec'))
  assert (stopped.tokens, stopped.texts) == (plain.tokens, plain.texts) and any(plain.texts)


@pytest.mark.parametrize('stop', ['<end>', np.array(['never', '<end>'])], ids=['text', 'array'])
def test_a_stop_string_that_is_a_special_token_is_a_stop_token(tmp_path, stop):
  tokenizer = byte_level(tmp_path, before=['<eos>', '<end>'], additional_special_tokens=['<end>'])
  model = toy.model(1, len(tokenizer.pieces()), 1).replace(tokenizer=tokenizer)
  request = Request('b', stop=stop, min_new_tokens=2, logit_bias={1: 50.0, 4: 20.0})
  out = run(methods.autoregressive(0), [model], request, sampler=Sampler(0.0))
  assert out.tokens == [[4, 4, 1]] and out.finish_reasons == ('stop',) and out.texts == [tokenizer.decode([4, 4])]


def test_a_stop_string_cuts_the_text_before_it():
  whole = say(OPT, prompts='bc')
  text = whole.texts[0]
  stop = text[21:23]
  at = text.index(stop)
  out = say(OPT, prompts=[Request('bc', stop=[stop, 'never']), 'bc'])
  assert out.texts == [text[:at], text] and out.finish_reasons == ('stop', 'length')
  assert out.tokens[0] == whole.tokens[0][: at + 2]
  assert out.stats.rounds[0] <= whole.stats.rounds[0]


@pytest.mark.parametrize('where', [slice(0, 1), slice(11, 13), slice(12, 14)])
def test_stop_strings_are_looked_for_behind_the_least_length(where):
  whole = say(OPT, prompts='bc')
  text, tokens, spell = whole.texts[0], whole.tokens[0], Letters().decode
  least = next(n for n in range(40) if len(spell(tokens[:n])) == 12)
  at = text.find(text[where], 12)
  out = say(OPT, prompts=Request('bc', stop=text[where], min_new_tokens=least))
  assert out.texts == [text[:at] if at >= 0 else text] and out.finish_reasons == ('stop' if at >= 0 else 'length',)
  assert at < 0 or spell(out.tokens[0]) == text[: at + len(text[where])]


@pytest.mark.long
def test_a_stop_string_before_a_fault_ends_a_row_and_one_behind_it_does_not():
  method = METHODS['speculative']
  text = say(method, prompts='bc').texts[0]
  broken = lambda logits, tokens, count: jnp.where((count > 12) & (jnp.arange(7) == 0), jnp.inf, logits)
  sound = text[:11]  # the prompt has two tokens, so this is what the models' distributions up to position 12 give
  prompts = [Request('bc', stop=stop) for stop in (text[4:6], sound, f'{sound}a')]
  with pytest.warns(UserWarning, match='1 of 3'):
    out = say(method, prompts=prompts, processor=broken)
  assert out.finish_reasons == ('stop', 'stop', 'fault') and out.faults[:2] == (None, None)
  assert out.texts == [text[: text.index(text[4:6])], '', sound]  # what a fault gave is not in the text


def test_a_drafter_whose_parameters_are_not_finite_is_warned_of():
  large = toy.model(1)
  small = toy.model(2, near=large)
  bad = small.replace(params=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), small.params), name='bad')
  run = lambda drafter: speccascade.decode(
    methods.speculative(block=3), [drafter, large], [[1, 2]], max_new_tokens=5, sampler=Sampler(0.0)
  )
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    expected = run(small).tokens
  with pytest.warns(UserWarning, match=having('model 0 (bad)', 'not finite')):
    assert run(bad).tokens == expected


def test_models_with_a_tokenizer_of_ones_own_share_tokens_where_they_have_as_many():
  drafter = ngram.drafter(LETTERED[1])  # which has the tokenizer of its model
  assert run(METHODS['speculative'], [drafter, LETTERED[1]], 'bc').texts[0]
  other = toy.model(2, 8).replace(tokenizer=Letters())
  with pytest.raises(ValueError, match=having('differ in vocabulary', '8 tokens', '7')):
    run(METHODS['speculative'], [other, LETTERED[1]], 'bc')


def test_a_tokenizer_of_ones_own_without_a_chat_reads_texts_alone():
  class Plain:
    encode, decode = Letters.encode, Letters.decode

  models = [PAIR[0], LARGE.replace(tokenizer=Plain())]
  assert run(METHODS['speculative'], models, 'bc').tokens == run(METHODS['speculative'], LETTERED, 'bc').tokens
  with pytest.raises(ValueError, match=having('prompt 0', 'chat messages', LARGE.name, '`chat`')):
    run(METHODS['speculative'], models, [[{'role': 'user', 'content': 'bc'}]])


@pytest.mark.full
def test_samples_of_a_prompt_share_its_prefill_and_differ(monkeypatch):
  read = []
  real = engine.Engine.prefill
  monkeypatch.setattr(
    engine.Engine, 'prefill', lambda self, prompts, size: read.append(len(prompts)) or real(self, prompts, size)
  )
  out = run(OPT, PAIR, [Request([1, 2], n=5), Request([3], n=2)], sampler=Sampler(1.0), seed=1)
  assert sum(read) == 2 and len(out.tokens) == 7
  assert len({tuple(x) for x in out.tokens[:5]}) > 2
  assert out.tokens[0] == run(OPT, PAIR, [[1, 2]], sampler=Sampler(1.0), seed=1).tokens[0]
  queued = run(OPT, PAIR, [Request([1, 2], n=5), Request([3], n=2)], sampler=Sampler(1.0), seed=1, batch_size=2)
  assert queued.tokens == out.tokens


@pytest.mark.long
def test_samples_of_a_prompt_lookup_share_its_empty_cache():
  models = [ngram.drafter(LARGE), LARGE]
  both = run(METHODS['speculative'], models, Request([1, 2, 1], n=2), seed=1)
  assert both.tokens[0] == run(METHODS['speculative'], models, Request([1, 2, 1]), seed=1).tokens[0]


def looked_up(drafters, sampler, encoder=False):
  """Return what a model decodes with each of these drafters of prompt lookup, a task three times."""
  large = toy.model(3, 61, order=2, scale=3.0, encoder=encoder)
  method = methods.speculative(block=4, policy=stopping.Fallback(0.5))
  call = dict(prompts=[[i, i + 1] for i in range(4)] * 3, max_new_tokens=24, batch_size=2, sampler=sampler)
  return [run(method, [drafter(large), large], **call) for drafter in drafters]


def of_size(memory):
  return functools.partial(ngram.drafter, memory=memory)


@pytest.mark.long
@pytest.mark.parametrize('encoder', [False, True])
def test_a_smaller_memory_drafts_less_and_no_memory_changes_a_coupled_text(encoder):
  kept, little = looked_up([of_size(512), of_size(16)], Sampler(0.0), encoder)
  assert little.tokens == kept.tokens and little.stats.accepted[4:].sum() < kept.stats.accepted[4:].sum()
  one, other = looked_up([of_size(0), of_size(512)], Sampler(1.0, coupling='gumbel'), encoder)
  assert one.tokens == other.tokens


@pytest.mark.long
@pytest.mark.parametrize('encoder', [False, True])
def test_a_prompt_lookup_that_remembers_drafts_repeated_tasks_and_changes_no_greedy_text(encoder):
  plain, kept = looked_up([of_size(0), of_size(512)], Sampler(0.0), encoder)
  assert plain.tokens == kept.tokens
  first, later = (lambda x: x.stats.accepted[:4].sum(), lambda x: x.stats.accepted[4:].sum())
  assert later(kept) > 2 * later(plain) + 40 and later(kept) > first(kept)
  knowing = lambda large: ngram.remembering(ngram.drafter(large, memory=512), plain.tokens, seed=0)
  (again,) = looked_up([knowing], Sampler(0.0), encoder)
  assert again.tokens == plain.tokens and first(again) > first(kept) + 10


def test_a_text_is_not_drafted_from_one_that_its_own_random_numbers_made():
  # A drafted token that a number has accepted, it would accept again; one that followed a rejection, it would reject.
  asked = [Request([1, 2], seed=7), Request([1, 2], seed=7)]
  job = lambda memory, *asked, **how: DecodeJob.of(
    METHODS['speculative'], [ngram.drafter(LARGE, memory=memory), LARGE], asked, **settings | how
  )
  settings = dict(sampler=Sampler(), seed=0, max_new_tokens=4)
  with pytest.raises(ValueError, match=having('prompts 0 and 1', 'seed 7', "coupling='gumbel'")):
    job(8, *asked)
  job(0, *asked)
  job(8, *asked, sampler=Sampler(coupling='gumbel'))
  again = [ngram.remembering(ngram.drafter(LARGE, memory=8), [[1, 2]], seed=3), LARGE]
  later = lambda seed, **how: DecodeJob.of(METHODS['speculative'], again, [[1, 2]], **settings | dict(seed=seed) | how)
  with pytest.raises(ValueError, match=having('ngram', 'seed 3', 'prompt 0', 'another seed')):
    later(3)
  later(4)
  later(3, sampler=Sampler(coupling='gumbel'))
  job(8, Request([1, 2], seed=7, n=2), Request([1, 2], seed=7, example_id=1), Request([1, 2], seed=7, temperature=0.0))


def test_a_memory_has_the_latest_texts_and_none_follows_another():
  model = ngram.drafter(LARGE, 2, memory=6)
  ended = [(np.array([5, 4, 3, 2, 1]), 3), (np.array([6]), 0)]
  assert model.network.remember(model.params, ended)['memory'].tolist() == [3, 2, 1, -1, 6, -1]
  positions = jnp.arange(2)[None]
  cache = model.network.empty_cache(model.params, 1, 4)
  after = lambda *tokens: model.network.extend(
    model.network.remember(model.params, ended), cache, jnp.array([tokens]), positions
  )[0][0, -1]
  assert after(3, 2).argmax() == 1 and after(0, 2).argmax() == 1
  assert (after(0, 1) == 0).all() and (after(1, 6) == 0).all()  # the ends of texts


@pytest.mark.full
def test_likeliest_tokens_are_those_of_the_verifier():
  out = run(METHODS['speculative'], PAIR, [Request([1, 2], logprobs=3), Request([3], logprobs=1), [4]], trace=True)
  assert out.top_logprobs[2] is None and [len(x) for x in out.top_logprobs[1]] == [1] * 9
  for i in (0, 1):
    for token, top, chosen in zip(out.tokens[i], out.top_logprobs[i], out.logprobs[i][1], strict=True):
      values = list(top.values())
      assert values == sorted(values, reverse=True) and chosen <= values[0] + 1e-6
      assert token not in top or top[token] == pytest.approx(chosen, abs=1e-6)


@pytest.mark.long
def test_a_sequence_cascade_gives_the_likeliest_tokens_of_the_model_that_answered():
  ask = functools.partial(
    run, models=PAIR, prompts=[Request([1, 2], logprobs=2), [3], Request([4], logprobs=1)], sampler=Sampler(0.0)
  )
  by_model = [ask(methods.autoregressive(0), trace=True), ask(methods.autoregressive(1))]
  scores = [x[0].mean() for x in by_model[0].logprobs]
  out = ask(methods.sequence_cascade(threshold=(scores[0] + scores[2]) / 2))
  answered = [int(calls > 0) for calls in out.stats.calls[1]]
  assert sorted([answered[0], answered[2]]) == [0, 1] and out.top_logprobs[1] is None
  for i in (0, 2):
    for top, expected in zip(out.top_logprobs[i], by_model[answered[i]].top_logprobs[i], strict=True):
      assert list(top) == list(expected) and top == pytest.approx(expected)


@pytest.mark.parametrize('name', long_but(['opt', *SEQUENCE], ['opt']))
def test_a_processor_shapes_every_models_distribution(name):
  def alternate(logits, tokens, count):  # after an even token an odd one, and the other way round
    return jnp.where((jnp.arange(7) + tokens[count - 1]) % 2 == 1, logits, -jnp.inf)

  method = (METHODS | SEQUENCE)[name]
  out = run(method, PAIR, [[1, 2], [3], [4, 4]], sampler=Sampler(1.0), processor=alternate)
  for prompt, tokens in zip(([1, 2], [3], [4, 4]), out.tokens, strict=True):
    assert set(np.diff([prompt[-1], *tokens]) % 2) == {1}


@pytest.mark.full
def test_a_row_without_a_law_ends_as_a_fault_and_the_others_go_on():
  def half(q, p):
    return jnp.where(p.logits[..., :1] > 100, 0.5 * p.probs, p.probs)

  method = methods.speculative(half, 3)
  prompts = [Request([1, 2]), Request([3], logit_bias={0: 200.0}), Request([4])]
  with pytest.warns(UserWarning, match=having('1 of 3', 'example 1', 'position 1', '0.5')):
    out = run(method, PAIR, prompts, sampler=Sampler(0.0))
  assert out.finish_reasons == ('length', 'fault', 'length') and out.faults[0] is None
  assert out.stats.rounds[1] == out.stats.emitted[1] == 0 < out.stats.rounds[0]  # a round without a token is none
  plain = run(methods.speculative(block=3), PAIR, [[1, 2], [3], [4]], sampler=Sampler(0.0))
  assert [out.tokens[i] for i in (0, 2)] == [plain.tokens[i] for i in (0, 2)]
  with pytest.raises(ValueError, match='example 1'):
    out.raise_for_fault()


class Mine(Network):
  """A network of a user's, whose EOS ids are no field."""

  vocab_size = 7
  prefill, extend = PAIR[0].network.prefill, PAIR[0].network.extend


def test_the_ends_of_model_1_end_both_answers_whatever_model_0_is():
  first = functools.partial(run, methods.sequence_cascade(threshold=-np.inf), prompts=[[1, 2], [3]], max_new_tokens=40)
  out = first([WITH_EOS[0], WITH_EOS[1]])
  assert out.finish_reasons == ('eos', 'eos') == first([PAIR[0], WITH_EOS[1]]).finish_reasons
  assert first([PAIR[0].replace(network=Mine()), WITH_EOS[1]]).tokens == out.tokens
  assert first([WITH_EOS[0], LARGE]).finish_reasons == ('length', 'length')


def test_what_cannot_be_timed_without_ends_is_told():
  mine = Mine()
  assert mine.endless() is mine
  mine.eos_ids = (6,)
  with pytest.raises(ValueError, match=having('Mine', 'eos_ids=(6,)', 'endless')):
    mine.endless()


def only_end(logits, tokens, count):
  """Allow nothing but EOS."""
  return jnp.where(jnp.arange(7) == 6, logits, -jnp.inf)


def broken(logits, tokens, count):
  """Give what is no number."""
  return logits * jnp.nan


SICK = WITH_EOS[1].replace(params=jax.tree.map(lambda x: x * jnp.nan, LARGE.params))
WEIGHTS, REMEDY = having('1 (toy1)', 'position 0', 'weights'), 'finite logit'


@pytest.mark.parametrize(
  'large, processor, settings, said',
  [
    (WITH_EOS[1], broken, {}, having('processor broken', 'model 1')),
    (
      WITH_EOS[1],
      only_end,
      dict(min_new_tokens=3, logit_bias={6: -np.inf}),
      having('min_new_tokens', 'logit_bias', 'processor only_end'),
    ),
    (SICK, None, {}, WEIGHTS),
    (SICK, only_end, dict(min_new_tokens=3, logit_bias={6: 1.0}), WEIGHTS),
  ],
)
def test_a_fault_names_its_cause(large, processor, settings, said):
  with pytest.raises(ValueError, match=said) as caught:
    run(METHODS['speculative'], [WITH_EOS[0], large], Request([3], **settings), processor=processor)
  assert ('weights' in str(caught.value)) == (large is SICK) != (REMEDY in str(caught.value))


@pytest.mark.full
@pytest.mark.parametrize('temperature', long_but([0.0, 1.0], [0.0]))
def test_a_drafter_without_a_law_drafts_nothing_there(temperature):
  table = np.asarray(PAIR[0].params['table']).copy()
  table[::3] = np.nan
  small = PAIR[0].replace(params=PAIR[0].params | {'table': jnp.asarray(table)})
  ask = functools.partial(run, prompts=[[1, 2], [3]], sampler=Sampler(temperature), max_new_tokens=30)
  out = ask(METHODS['speculative'], [small, LARGE])
  assert out.faults == (None, None) and (out.stats.drafted[0] > 0).all()
  assert temperature > 0 or out.tokens == ask(METHODS['autoregressive'], PAIR).tokens


@pytest.mark.parametrize(
  'rule, what',
  [
    (lambda q, p: jnp.nan * p.probs, 'nan'),
    (lambda q, p: 2 * p.probs - q.probs, 'entry -0'),
  ],
)
def test_a_rule_that_is_never_a_law_raises(rule, what):
  with pytest.raises(ValueError, match=what):
    run(methods.speculative(rule, 3), PAIR, [[1, 2], [3]])


def test_a_row_of_a_stream_says_of_which_request_and_sample_it_is():
  prompts = [Request([1, 2], n=3), [3], Request([4], n=2)]
  rows = dict(speccascade.stream(OPT, PAIR, prompts, max_new_tokens=4, batch_size=2))
  assert [(rows[i].request, rows[i].sample) for i in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]


def test_a_stream_yields_rows_as_they_end_and_all_that_decode_returns():
  prompts = [Request([1, 2], max_new_tokens=3), Request([3], max_new_tokens=200), *[[i] for i in range(7)]]
  out = run(OPT, PAIR, prompts, batch_size=2)
  rows = list(speccascade.stream(OPT, PAIR, prompts, max_new_tokens=9, batch_size=2))
  assert sorted(i for i, _ in rows) == list(range(9)) and rows[-1][0] == 1  # the long one ends last
  for i, row in rows:
    assert row.tokens == out.tokens[i] and row.finish_reason == out.finish_reasons[i]
    assert row.stats['calls'].tolist() == out.stats.calls[:, i].tolist()
  with contextlib.closing(speccascade.stream(OPT, PAIR, prompts, max_new_tokens=9, batch_size=2)) as some:
    next(some)
  assert not list(some)


class Bytes(Letters):
  """A tokenizer of bytes, two of which make a character."""

  def decode(self, ids):
    return b''.join((b'a', b'b', b'c', b'\xc3', b'\xa4', b'\xa4', b'd')[i] for i in ids).decode(errors='replace')


def test_a_text_that_goes_on_holds_back_what_may_change():
  models, settings = [PAIR[0], LARGE.replace(tokenizer=Bytes())], dict(max_new_tokens=40, sampler=Sampler(1.0))
  whole = run(OPT, models, [[1, 2], [3]], seed=1, **settings).texts
  assert any('ä' in text for text in whole)
  stop = next(t[i : i + 3] for t in whole for i in range(9, 30) if t.find(t[i : i + 3]) == i)
  asked = [Request(prompt, stop=stop) for prompt in ([1, 2], [3])]
  out = run(OPT, models, asked, seed=1, **settings)
  seen = {0: [], 1: []}
  for i, row in speccascade.stream(OPT, models, asked, seed=1, every=1, **settings):
    assert out.texts[i].startswith(row.text) and (not seen[i] or row.text.startswith(seen[i][-1].text))
    seen[i].append(row)
  assert [seen[i][-1].text for i in (0, 1)] == out.texts != whole
  for i, rows in seen.items():
    assert len(rows) > 2 and [row.finish_reason for row in rows] == [None] * (len(rows) - 1) + [out.finish_reasons[i]]


@pytest.mark.parametrize(
  ('text', 'kept'), [('a ST', 'a '), ('a STO', 'a '), ('a \ufffd\ufffd', 'a '), ('a S.', 'a S'), ('a END', 'a END')]
)
def test_the_beginning_of_a_stop_string_and_half_a_character_are_held_back(text, kept):
  assert results._complete_part(text, ('STOP', '.END')) == kept


@pytest.mark.full
def test_a_stream_and_stop_strings_compile_one_loop():
  prompts = [Request([1, 2]), Request([3], stop='gg'), *[[i] for i in range(5)]]
  settings = dict(prompts=prompts, max_new_tokens=40, batch_size=3)
  once = lambda: list(speccascade.stream(OPT, LETTERED, every=3, **settings))
  assert traces(once, lambda: run(OPT, LETTERED, **settings)) == [1, 0]


def test_a_stream_refuses_what_is_wrong_when_it_is_called():
  with pytest.raises(ValueError, match='max_new_tokens=0'):
    speccascade.stream(OPT, PAIR, [[1]], max_new_tokens=0)
  with pytest.raises(ValueError, match='max_prompt_tokens=1'):
    speccascade.stream(OPT, PAIR, [[1, 2]], max_new_tokens=2, max_prompt_tokens=1)


def test_prompts_may_be_a_text_or_chat_or_a_generator():
  chat = [{'role': 'user', 'content': 'bc'}, {'role': 'user', 'content': 'd'}]
  mapped = type('Mapped', (), {'__len__': lambda _: 1, '__getitem__': lambda _, i: ['bcd'][i]})()
  forms = 'bcd', ['bcd'], (x for x in ['bcd']), mapped, Request('bcd'), chat, [chat]
  assert len({say(OPT, prompts=prompts).texts[0] for prompts in forms}) == 1


@pytest.mark.full
def test_requests_of_other_numbers_compile_nothing():
  some = lambda **numbers: lambda: run(OPT, PAIR, [Request([1, 2], **numbers), Request([3])], sampler=Sampler(1.0))
  assert traces(
    some(top_k=3, stop_tokens=[1]),
    some(top_k=5, stop_tokens=[4], seed=3),
    some(top_k=2, stop_tokens=[0], temperature=0.3),
  ) == [1, 0, 0]


@pytest.mark.long
def test_rules_share_what_makes_a_first_batch_and_methods_the_prefill_of_a_network():
  programs = loop.begin, loop.prefill
  for program in programs:
    program.clear_cache()
  made = []
  for method in (OPT, methods.speculative(functools.partial(rules.token_v3, alpha=0.3), 3), methods.autoregressive(1)):
    run(method, PAIR, [[1, 2], [3]], sampler=Sampler(1.0))
    made.append([program._cache_size() for program in programs])
  assert made == [[1, 1], [1, 1], [2, 1]]  # the toys are one network


@pytest.mark.long
@pytest.mark.parametrize('batch_size', [None, 3])
def test_how_many_second_answers_a_sequence_cascade_gives_compiles_nothing(batch_size):
  prompts = [Request([1, 2], max_new_tokens=40), Request([3], min_p=0.1), [4], [5, 4], [1] * 20]
  ask = lambda method, **more: run(method, PAIR, prompts, sampler=Sampler(1.0), batch_size=batch_size, **more)
  scores = sorted(x[0].mean() for x in ask(methods.autoregressive(0), trace=True).logprobs)
  for program in (programs := (loop.prefill, loop.begin, loop.insert, loop.run)):
    program.clear_cache()  # another test may have compiled the same
  made = []
  for count, threshold in [(5, np.inf), *enumerate(scores)]:  # as a warm-up does, the most first
    out = ask(methods.sequence_cascade(threshold=threshold))
    assert (out.stats.calls[1] > 0).sum() == count
    made.append([program._cache_size() for program in programs])
  assert all(x == made[0] for x in made)


@pytest.mark.parametrize('method', long_but([OPT, methods.sequence_cascade(threshold=np.inf)], [OPT]))
def test_a_bar_says_how_many_rows_have_ended(method, capsys):
  run(method, PAIR, [[i] for i in range(6)], batch_size=2, progress=True)
  assert '6/6' in capsys.readouterr().err


BAD_REQUESTS = [
  (dict(max_new_tokens=0), having('prompt 0', 'max_new_tokens=0')),
  (dict(min_new_tokens=12), having('min_new_tokens=12', 'max_new_tokens=9')),
  (dict(temperature=-1.0), r'temperature=-1\.0'),
  (dict(top_k=0), 'top_k=0'),
  (dict(n=0), 'n=0'),
  (dict(seed=-1), 'seed=-1'),
  (dict(stop='x'), 'tokenizer'),
  (dict(stop_tokens=[7]), having('stop_tokens', '7', '6')),
  (dict(logit_bias={9: 1.0}), having('logit_bias', '9')),
  (dict(logit_bias={1: np.nan}), having('logit_bias', 'nan')),
  (dict(logprobs=-1), 'logprobs=-1'),
]
BAD_CALLS = [
  (dict(prompts=3), 'prompts=3'),
  (dict(prompts=Path('in.txt')), 'prompts=.*in.txt'),
  (dict(prompts=[]), 'prompts'),
  (dict(prompts='text'), having('prompt 0', 'toy1', 'tokenizer')),
  (dict(prompts=['text']), having('prompt 0', 'toy1', 'tokenizer')),
  (dict(prompts=[[1], []]), 'prompt 1'),
  (dict(prompts=[1, 2]), having('prompt 0', '1')),
  (dict(prompts=[[7]]), having('prompt 0', '6', '[7]')),
  (dict(prompts=[[1], [1, 2, 3]], max_prompt_tokens=2), having('prompt 1', '3 tokens', 'max_prompt_tokens=2')),
  (dict(max_new_tokens=None), 'max_new_tokens=None'),
  (dict(batch_size=-1), 'batch_size=-1'),
  (dict(example_ids=[1, 2]), having('1 prompts', 'example_ids', '2')),
  (dict(example_ids=[-1]), 'example_ids'),
  (dict(seed=2**32), 'seed=4294967296'),
  (dict(seed=0.5), 'seed=0.5'),
]


@pytest.mark.parametrize(
  'call, message', [*((dict(prompts=[Request([1], **how)]), said) for how, said in BAD_REQUESTS), *BAD_CALLS]
)
def test_errors_name_the_prompt_and_the_value(call, message):
  with pytest.raises(ValueError, match=message):
    run(OPT, PAIR, **dict(prompts=[[1]]) | call)


@pytest.mark.full
def test_a_request_with_a_seed_of_its_own_is_the_same_in_any_company():
  mine, ask = Request([1, 2], seed=7, n=2), functools.partial(run, OPT, PAIR, sampler=Sampler(1.0))
  alone = ask(mine).tokens
  for company in range(5):
    others = [Request([company % 7] * (1 + company), max_new_tokens=3 + company), [3], mine, [4, 5]]
    prompts = [*others[: company % 5], mine, *others[: company % 3]]
    place = sum(getattr(x, 'n', 1) for x in prompts[: company % 5])
    out = ask(prompts, seed=company, batch_size=2 + company % 2)
    assert out.tokens[place : place + len(alone)] == alone
  assert ask([[3], [3]], seed=7).tokens[0] != ask([[3], [3]], seed=7).tokens[1]  # the call's seed keys by place
  by_id = ask([Request([1, 2], seed=7, example_id=1)]).tokens[0]
  assert by_id == ask([[3], [1, 2]], seed=7).tokens[1] != ask([mine], example_ids=[1]).tokens[0] == alone[0]


@pytest.mark.long
def test_a_row_holds_its_own_bytes_alone():
  prompts = [Request([1], max_new_tokens=400, logprobs=2), *[[2]] * 31]
  row = dict(speccascade.stream(OPT, PAIR, prompts, max_new_tokens=2, trace=True))[1]
  arrays = [x for x in (*row.stats.values(), row.logprobs) if isinstance(x, np.ndarray)]
  assert len(arrays) > 8 and all(x.base is None for x in arrays) and sum(x.nbytes for x in arrays) < 1000


@pytest.mark.long
def test_a_table_that_is_bound_to_a_processor_is_an_argument():
  def allow(logits, tokens, count, table):
    return jnp.where(table[tokens[count - 1]], logits, -jnp.inf)

  table, outs = np.zeros((7, 7), bool), []
  ask = lambda: outs.append(run(OPT, PAIR, [[1]], processor=functools.partial(allow, table=table)).tokens[0])
  table[:, 3] = True
  first = traces(ask)
  table[:] = np.eye(7, dtype=bool)[[4] * 7]
  ask()
  assert first == [1] and outs == [[3] * 9, [4] * 9] and loop.run._cache_size() == 1


def test_parameters_in_numpy_are_put_on_the_device_once():
  models = [x.replace(params=jax.tree.map(np.asarray, x.params)) for x in PAIR]
  assert run(OPT, models, [[1, 2]]).tokens == run(OPT, PAIR, [[1, 2]]).tokens
  made = engine.Engine(DecodeJob.of(OPT, models, [[1, 2]], max_new_tokens=9, sampler=Sampler(), seed=0))
  assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(made.params))


@pytest.mark.parametrize('call', [lambda: run(OPT, PAIR, [[1, 2]]), embedded.models, lambda: speccascade.check(OPT)])
def test_numbers_of_64_bits_are_refused(call):
  with jax.enable_x64(True), pytest.raises(ValueError, match='jax_enable_x64'):
    call()


def test_a_batch_that_no_memory_holds_is_refused_with_its_bytes():
  with pytest.raises(ValueError, match=r'[0-9.]+ GiB of caches.* [0-9.]+ GiB of weights.* lower max_new_tokens'):
    run(OPT, PAIR, [[1, 2]] * 64, max_new_tokens=10**9)


def test_the_memory_of_a_cpu_is_what_its_limits_leave(tmp_path, monkeypatch):
  cpu = jax.devices('cpu')[0]
  machine = limits.memory(cpu)
  (tmp_path / 'memory' / 'job').mkdir(parents=True)
  (tmp_path / 'memory' / 'memory.limit_in_bytes').write_text('5000000\n')
  (tmp_path / 'memory' / 'job' / 'memory.limit_in_bytes').write_text('max\n')
  (tmp_path / 'own').write_text('4:memory:/job\n0::/elsewhere\n')
  monkeypatch.setattr(limits, 'GROUPS', tmp_path)
  monkeypatch.setattr(limits, 'OWN', tmp_path / 'own')
  assert limits.memory(cpu) == 5_000_000 < machine
  (tmp_path / 'memory.max').write_text('3000000\n')
  assert limits.memory(cpu) == 3_000_000
  (tmp_path / 'own').write_text('')
  monkeypatch.setattr(limits.resource, 'getrlimit', lambda kind: (10**12, 10**12))
  assert limits.memory(cpu) == machine
  monkeypatch.setattr(limits.resource, 'getrlimit', lambda kind: (1 << 20, 1 << 20))
  assert limits.memory(cpu) == 0
  with pytest.raises(ValueError, match='0.0 GiB'):
    run(OPT, PAIR, [[1, 2]] * 64, max_new_tokens=10**4)


@pytest.mark.parametrize('error', ['RESOURCE_EXHAUSTED: cannot take 9 bytes', 'INTERNAL: Out of memory, for 9 bytes'])
def test_a_batch_that_ends_out_of_memory_says_what_to_lower(error):
  class Failed:
    is_ready = lambda self: True

    def block_until_ready(self):
      raise jax.errors.JaxRuntimeError(error)

  made = engine.Engine(DecodeJob.of(OPT, PAIR, [[1]] * 2, max_new_tokens=4, sampler=Sampler(0.0), seed=0))
  with pytest.raises(MemoryError, match=having('2 rows', '8', '9 bytes', 'lower max')):
    made.collect(engine.Running(None, None, [Failed()], ended=2, left=0))


def test_runs_are_bounded_and_the_texts_are_the_same(monkeypatch):
  prompts, settings = [[1, 2], [3], [4, 4]], dict(max_new_tokens=40, sampler=Sampler(1.0))
  whole, compiled, bounds = run(OPT, PAIR, prompts, **settings), loop.compiled_with, []

  def noting(options):
    def started(*args):
      bounds.append(int(args[5][1]))
      return compiled(options)(*args)

    return started

  monkeypatch.setattr(loop, 'compiled_with', noting)
  monkeypatch.setattr(engine, 'ROUNDS', 2)
  monkeypatch.setattr(engine, 'SECONDS', 0.0)
  assert run(OPT, PAIR, prompts, **settings).tokens == whole.tokens
  assert set(bounds) == {2} and len(bounds) > 2
  bounds.clear()
  monkeypatch.setattr(engine, 'SECONDS', 60.0)
  assert run(OPT, PAIR, prompts, **settings).tokens == whole.tokens
  assert bounds[:3] == [2, 4, 8]


@pytest.mark.long
def test_texts_of_one_length_after_each_other_are_progress():
  prompts = [[1, 2], [2, 3], [3, 4], [4, 5]]
  ended = run(methods.autoregressive(), [LARGE], prompts, max_new_tokens=4)
  found = speccascade.stream(methods.autoregressive(), [LARGE], prompts, max_new_tokens=4, every=2, batch_size=1)
  assert {i: row.tokens for i, row in found} == dict(enumerate(ended.tokens))


def test_the_rounds_of_a_run_do_not_say_which_rows_are_decoded_together(monkeypatch):
  prompts, counts = [[1 + i % 5, i % 3] for i in range(12)], []
  for rounds in (1, engine.ROUNDS):
    monkeypatch.setattr(engine, 'ROUNDS', rounds)
    out = run(OPT, PAIR, prompts, max_new_tokens=12, sampler=Sampler(1.0), batch_size=3)
    counts.append((out.tokens, out.stats.computed.tolist()))
  assert counts[0] == counts[1]


def test_rows_that_ended_are_given_before_what_went_wrong(monkeypatch):
  real, calls = engine.Engine.insert, []

  def insert(self, *args):
    calls.append(args)
    if len(calls) == 3:
      raise KeyboardInterrupt
    return real(self, *args)

  monkeypatch.setattr(engine.Engine, 'insert', insert)
  found = []
  with pytest.raises(KeyboardInterrupt):
    for index, _ in speccascade.stream(OPT, PAIR, [[1, 2]] * 12, max_new_tokens=4, batch_size=2):
      found.append(index)
  assert len(found) >= 2


@pytest.mark.long
def test_a_rotary_model_warns_beyond_the_positions_it_was_made_for():
  network = Decoder(DecoderConfig(7, 8, 2, 2, 4, 8, spans=(Span(),), context=12))
  model = Model(network.init(jax.random.key(0)), network, name='short')
  with pytest.warns(UserWarning, match=having('13', 'short', '12')):
    run(methods.autoregressive(), [model], [[1, 2, 3, 4]])
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    run(methods.autoregressive(), [model], [[1, 2, 3]])


@pytest.mark.full
def test_a_prompt_beyond_the_positions_of_a_rotary_model_is_refused_or_truncated():
  network = Decoder(DecoderConfig(17, 8, 2, 2, 4, 8, spans=(Span(),), context=12))
  model = Model(network.init(jax.random.key(0)), network, name='short')
  alone = functools.partial(speccascade.decode, methods.autoregressive(), [model], max_new_tokens=4)
  long = list(range(1, 14))
  with pytest.raises(ValueError, match=having('prompt 1', '13 tokens', 'short', '12', 'truncate')):
    alone([[1], long])
  kept = [1, *range(7, 14)]
  assert alone([long], truncate=True).tokens == alone([kept]).tokens
  assert alone([long], truncate=True, max_prompt_tokens=3).tokens == alone([[1, 12, 13]], max_prompt_tokens=3).tokens


def test_a_truncated_source_keeps_its_beginning_and_its_end():
  model = toy.model(0, 11, encoder=True)
  assert inputs.truncated([model], np.arange(10), 99, 4).tolist() == [0, 1, 2, 9]
  assert inputs.truncated([model], np.arange(10), 99, None).size == 10
  assert inputs.truncated([toy.model(0, 11)], np.arange(10), 99, 1).tolist() == [0]
