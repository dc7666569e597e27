"""The loop on transformers: small random ones, and trained checkpoints where the folder of them is there."""

import functools
import hashlib
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import sacrebleu
from tiers import long_but
from trained import NAMES, NEW

from experiments.helpers.families import prompts
import speccascade
from speccascade import acceptance, decode, methods, Request, rules, Sampler
from speccascade.data import files
from speccascade.drafters.layerskip import layerskip
from speccascade.engine.state import cache_slots
from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.models.t5 import T5, T5Config
from speccascade.types import Model

WHOLE = DecoderConfig(97, 32, 4, 2, 8, 64, (Span(),) * 4, tied=True)
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14]]
weighted = functools.partial(rules.weighted, weights=(0.3, 0.3, 0.4))


@pytest.fixture(scope='module')
def whole() -> Model:
  network = Decoder(WHOLE, eos_ids=(96,))
  params = jax.tree.map(lambda x: 3 * x, network.init(jax.random.key(1)))
  return Model(params, network, name='whole')


@pytest.mark.long
def test_early_exits_have_the_cache_of_the_whole_model(whole):
  models = [layerskip(whole, 1), layerskip(whole, 2), whole]
  assert cache_slots(models) == (2, 2, 2)
  copies = [m.replace(params=jax.tree.map(jnp.array, m.params)) for m in models[:2]] + [whole]
  assert cache_slots(copies) == (0, 1, 2)
  assert cache_slots([whole, whole]) == (0, 1)
  other = jax.tree.map(lambda x: x[::-1], models[0].params['token_embedder'])
  foreign = models[0].replace(params={**models[0].params, 'token_embedder': other})  # its keys and values are its own
  assert cache_slots([foreign, whole]) == (0, 1)


@pytest.mark.long
def test_a_self_drafting_model_writes_what_it_writes_alone(whole):
  run = functools.partial(decode, prompts=PROMPTS, max_new_tokens=20, sampler=Sampler(0.0))
  alone = run(methods.autoregressive(), [whole])
  out = run(methods.speculative(block=3), [layerskip(whole, 2), whole])
  assert out.tokens == alone.tokens
  assert 0 < out.stats.accepted.sum() < out.stats.tested.sum()


def cold_and_warm(prompts) -> list[Request]:
  return [Request(prompt, temperature=t) for t in (0.0, 4.0) for prompt in prompts]


@pytest.mark.long
def test_early_exits_work_in_the_whole_models_cache(whole):
  models = [layerskip(whole, 1), layerskip(whole, 2), whole]
  copies = [m.replace(params=jax.tree.map(jnp.array, m.params)) for m in models[:2]] + [whole]
  run = functools.partial(decode, methods.cos(weighted, (3, 2, 1)), prompts=cold_and_warm(PROMPTS), max_new_tokens=14)
  shared, apart = run(models=models), run(models=copies)
  assert shared.tokens == apart.tokens
  assert (shared.stats.calls == apart.stats.calls).all()


@pytest.mark.long
def test_a_transformers_rows_are_the_same_in_any_company(whole):
  run = functools.partial(
    decode,
    methods.speculative(functools.partial(rules.opt, alpha=0.1), 3),
    [layerskip(whole, 2), whole],
    max_new_tokens=14,
    max_prompt_tokens=8,
  )
  requests = cold_and_warm(PROMPTS)
  together = run(requests).tokens
  assert [run([r], example_ids=[i]).tokens[0] for i, r in enumerate(requests)] == together
  assert run(requests, batch_size=2).tokens == together


@pytest.mark.long
@pytest.mark.parametrize('kind, scan', [(k, s) for k in ('t5', 'decoder') for s in (False, True)])
def test_the_next_in_line_takes_a_place_in_every_kind_of_cache(kind, scan):
  config = T5Config(97, 32, 4, 8, 64, encoder_layers=1, decoder_layers=2)
  ends = tuple(range(1, 12))
  network = T5(config, ends, scan=scan) if kind == 't5' else Decoder(WHOLE, ends, scan=scan)
  models = [Model(jax.tree.map(lambda x: 3 * x, network.init(jax.random.key(i))), network, name=str(i)) for i in (1, 2)]
  prompts = [[*p, i] for i in range(3) for p in PROMPTS]
  run = functools.partial(decode, methods.speculative(block=3), models, max_new_tokens=10, max_prompt_tokens=8)
  alone = [run([p], example_ids=[i]) for i, p in enumerate(prompts)]
  out = run(prompts, batch_size=4)
  assert out.tokens == [a.tokens[0] for a in alone]
  assert len({len(t) for t in out.tokens}) > 1  # places come free at different times
  assert out.stats.calls.tolist() == np.concatenate([a.stats.calls for a in alone], 1).tolist()


# ---- trained checkpoints ----

T5_BLEU = {'small': 20.7, 'base': 30.0, 'large': 28.1}  # of the validation split, from the checkpoints' description


@pytest.fixture(scope='module')
def t5(families) -> dict[str, Model]:
  folder = families / 'multi30k'
  return {size: speccascade.load(folder / size, dtype='float32') for size in T5_BLEU}


@pytest.fixture(scope='module')
def llamas(families) -> list[Model]:
  folder = families / 'gsm8k'
  return [speccascade.load(folder / size, dtype='float32') for size in ('draft', 'companion', 'target')]


@pytest.mark.long
def test_the_call_of_the_readme_works_on_a_trained_pair(t5):
  out = decode(
    methods.speculative(rule=functools.partial(rules.opt, alpha=0.1), block=5),
    [t5['small'], t5['large']],
    ['Two dogs run along the beach.'],
    max_new_tokens=64,
    sampler=Sampler(temperature=1.0),
    seed=0,
  )
  assert 'Hunde' in out.texts[0] and out.tokens[0][-1] == 1
  assert out.stats.calls[1, 0] < out.stats.emitted[0] == len(out.tokens[0])


@pytest.mark.parametrize('size', long_but(T5_BLEU, []))
def test_bleu_is_the_published_one(t5, size):
  out = decode(
    methods.autoregressive(),
    [t5[size]],
    files.lines('family:multi30k/val.en'),
    max_new_tokens=80,
    sampler=Sampler(0.0),
    batch_size=128,
  )
  assert abs(sacrebleu.corpus_bleu(out.texts, [files.lines('family:multi30k/val.de')]).score - T5_BLEU[size]) <= 0.1


GREEDY = json.loads((pathlib.Path(__file__).parent / 'models' / 'golden' / 'greedy.json').read_text())


@pytest.mark.full
@pytest.mark.parametrize('name', long_but(NAMES, NAMES[:1]))
def test_greedy_tokens_are_those_of_the_reference_implementation(families, name):
  # One digest for all prompts: tests/make_greedy_digests.py.
  model = speccascade.load(families / name, dtype='float32')
  texts = prompts(name.partition('/')[0], GREEDY['count'], 'val')
  out = decode(methods.autoregressive(), [model], texts, max_new_tokens=NEW, sampler=Sampler(0.0), batch_size=50)
  assert hashlib.sha256(json.dumps(out.tokens).encode()).hexdigest() == GREEDY['digests'][name]


PLAIN = {name: (rule.declaration.alpha or rules.Range()).verifier for name, rule in reference.RULES.items()}
PLAIN |= dict(token_v2=0, token_v3=0, token_v3_tested=0, relaxed=0)  # which promise it greedily
PLAIN |= dict.fromkeys(('lossy', 'lossy_star', 'mentored', 'thresholds', 'typical', 'medusa'), 0.5)
LOSSLESS = {
  'speculative': methods.speculative(block=5),
  'block verification': methods.speculative(block=5, accept=acceptance.block),
  **{name: methods.speculative(reference.bound(name, x)) for name, x in PLAIN.items() if x is not None},
}


@pytest.fixture(scope='module')
def alone(t5):
  sentences = prompts('multi30k', 40, 'val')
  out = decode(
    methods.autoregressive(), [t5['large']], sentences, max_new_tokens=64, sampler=Sampler(0.0), batch_size=8
  )
  return sentences, out.tokens


@pytest.mark.parametrize('name', long_but(LOSSLESS, []))
def test_every_rule_that_promises_it_writes_what_the_large_model_writes(t5, alone, name):
  sentences, expected = alone
  out = decode(
    LOSSLESS[name], [t5['small'], t5['large']], sentences, max_new_tokens=64, sampler=Sampler(0.0), batch_size=8
  )
  assert out.tokens == expected
  assert out.stats.calls[1].sum() < 0.75 * out.stats.emitted.sum()


@pytest.mark.long
def test_collaborative_decoding_of_three_models_is_the_ensemble(llamas):
  run = functools.partial(decode, models=llamas, prompts=prompts('gsm8k', 8), max_new_tokens=40, sampler=Sampler(0.0))
  ensemble, cos = run(methods.ensemble(weighted, 3)), run(methods.cos(weighted, (3, 2, 1)))
  assert cos.tokens == ensemble.tokens
  assert cos.stats.calls[2].sum() < 0.75 * ensemble.stats.calls[2].sum()


@pytest.mark.long
def test_models_of_different_vocabularies_are_refused(t5, llamas):
  with pytest.raises(ValueError, match='vocabular|share a text'):
    decode(methods.speculative(), [llamas[0], t5['large']], ['Two dogs.'], max_new_tokens=4)
