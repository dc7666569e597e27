"""Distributions and equality on the device that JAX finds, in float32 and bfloat16.

On a GPU or TPU: JAX_PLATFORMS= pytest -n 0 -m '' tests/test_device.py
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from tiers import long_but

from speccascade import acceptance, decode, methods, rules, Sampler, stopping
from speccascade.models import toy
from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.models.t5 import T5, T5Config
from speccascade.types import Model

FALSE_ALARM = 1e-6  # of a distribution check; the seeds are fixed
TIE = {'float32': 1e-4, 'bfloat16': 0.25}  # log-probabilities so near each other may swap by rounding
ON_CPU = jax.default_backend() == 'cpu'
OPT = functools.partial(rules.opt, alpha=0.1)
WEIGHTED = functools.partial(rules.weighted, weights=(0.4, 0.6))
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [40, 3], [20, 21, 22, 23], [7, 7, 7], [90, 1, 50], [33]]
NETWORKS = {
  't5': lambda dtype: T5(T5Config(97, 32, 4, 8, 64, encoder_layers=1, decoder_layers=2), (96,), dtype=dtype),
  'decoder': lambda dtype: Decoder(DecoderConfig(97, 32, 4, 2, 8, 64, (Span(), Span(4)), tied=True), (96,), dtype),
}
CASES = {
  'speculative': methods.speculative(block=3),
  'cascade': methods.speculative(OPT, 3),
  'block verification': methods.speculative(block=3, accept=acceptance.block),
  'collaborative': methods.cos(WEIGHTED, (3, 1)),
}


@pytest.fixture(autouse=True)
def exact_products(request):
  """Give products of float32 the highest precision; an accelerator has a lower one by default."""
  with jax.default_matmul_precision('highest' if 'float32' in request.node.name else None):
    yield


@pytest.mark.parametrize('name, dtype', long_but(itertools.product(CASES, TIE), []))
def test_late_tokens_have_their_exact_distribution(name, dtype):
  large = toy.model(11, 5, scale=1.2)
  models = [toy.model(12, 5, scale=0.8, near=large), large]
  models = [m.replace(params=jax.tree.map(lambda x: x.astype(dtype), m.params)) for m in models]
  targets = {
    'cascade': (models, lambda logits, s: reference.target('opt', *logits, OPT.keywords['alpha'], s)),
    'collaborative': (models, lambda logits, s: reference.weighted(logits, WEIGHTED.keywords['weights'], s)),
  }
  step = reference.lockstep(*targets.get(name, (models[1:], lambda logits, s: s(logits[0]))))
  distribution = reference.late_distribution(step, [2, 2], 5, 2, first=6, count=3)
  tokens = decode(CASES[name], models, [[2, 2]] * (1 << (11 if ON_CPU else 16)), max_new_tokens=9).tokens
  p, _ = reference.goodness(np.array(tokens)[:, 6:], distribution)
  assert p > FALSE_ALARM


PAIRS = list(itertools.product(NETWORKS, TIE))


def pair(kind, dtype):
  """Return a random verifier and a drafter near it."""
  network = NETWORKS[kind](dtype)
  draw = lambda seed: jax.tree.map(lambda x: 3 * x.astype(jnp.float32), network.init(jax.random.key(seed)))
  large = draw(1)
  small = jax.tree.map(lambda x, y: 0.9 * x + 0.1 * y, large, draw(2))
  cast = lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree)
  return [Model(cast(p), network, name=name) for name, p in (('small', small), ('large', large))]


def first_gap(one, other):
  """Return the largest difference, over rows, of the verifier's log-probabilities of the first tokens that differ."""
  gaps = [0.0]
  for a, b, x, y in zip(one.tokens, other.tokens, one.logprobs, other.logprobs, strict=True):
    if a != b:
      at = next((i for i, (s, t) in enumerate(zip(a, b)) if s != t), min(len(a), len(b)) - 1)
      gaps.append(abs(float(x[-1, at] - y[-1, at])))
  return max(gaps)


@pytest.mark.long
@pytest.mark.parametrize('kind, dtype', PAIRS)
def test_greedy_tokens_are_those_of_the_verifier_and_of_lockstep(kind, dtype):
  run = functools.partial(decode, models=pair(kind, dtype), prompts=PROMPTS, sampler=Sampler(0.0), trace=True)
  run = functools.partial(run, max_new_tokens=8 if ON_CPU else 48, max_prompt_tokens=8)
  own, drafted = run(methods.autoregressive(1)), run(CASES['speculative'])
  assert 0 < drafted.stats.accepted.sum() < drafted.stats.tested.sum()
  assert first_gap(own, drafted) <= TIE[dtype]
  if dtype == 'float32':
    assert drafted.tokens == own.tokens and run(CASES['cascade']).tokens == run(methods.oracle(OPT)).tokens


@pytest.mark.parametrize('kind', long_but(NETWORKS, []))
def test_rows_of_a_batch_are_those_of_a_batch_of_one_in_float32(kind):
  run = functools.partial(decode, CASES['speculative'], pair(kind, 'float32'), max_prompt_tokens=8)
  run = functools.partial(run, max_new_tokens=8 if ON_CPU else 48)
  apart = [run([prompt], example_ids=[i]).tokens[0] for i, prompt in enumerate(PROMPTS)]
  assert run(PROMPTS).tokens == apart


@pytest.mark.parametrize('batch', long_but((1, 8), []))
def test_drafts_of_a_length_that_the_device_finds(batch):
  run = functools.partial(decode, models=pair('t5', 'float32'), prompts=PROMPTS, sampler=Sampler(0.0))
  run = functools.partial(run, max_new_tokens=8 if ON_CPU else 48, max_prompt_tokens=8, batch_size=batch)
  chow = functools.partial(rules.chow, alpha=0.8)
  short = methods.speculative(block=3, policy=stopping.Confidence(0.3))
  assert run(short).tokens == run(methods.autoregressive(1)).tokens
  assert run(methods.token_cascade(chow, max_draft=64)).tokens == run(methods.oracle(chow)).tokens
