"""At one width texts and log-probabilities are the same bit by bit, in bfloat16 too, whatever drafts."""

import collections
import functools
import re

import jax
import numpy as np
import pytest
from tiers import long_but

from experiments.helpers import families as texts
from speccascade import decode, methods, Request, rules, Sampler, stopping
from speccascade.drafters import ngram
from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.models.one_width import one_width
from speccascade.models.t5 import T5, T5Config
from speccascade.planning import aot, hlo
from speccascade.sv import predictors
from speccascade.types import Model

NETWORKS = {
  'decoder': [
    Decoder(DecoderConfig(96, 32 * n, 4, 2, 16, 64 * n, spans=(Span(),) * n), (1,), 'bfloat16') for n in (1, 3)
  ],
  't5': [T5(T5Config(96, 32 * n, 4, 16, 64 * n, 1, n), dtype='bfloat16') for n in (1, 3)],
}
WIDTH = 8
UNROUNDED = (hlo.MOVES - {'convert'}) | hlo.CONTROL | hlo.PASSING | {'fusion', 'broadcast', 'slice', 'pad'}
METHODS = {
  'γ = 1': methods.speculative(block=1),
  'γ = 5': methods.speculative(block=5),
  'a policy': methods.speculative(block=4, policy=stopping.Heuristic(2)),
  'a schedule': methods.scheduled(predictors.margin, block=3),
  'prompt lookup': methods.speculative(block=5),
}


@functools.cache
def pair(name):
  made = [Model(n.init(jax.random.key(i)), n, name=f'm{i}') for i, n in enumerate(NETWORKS[name])]
  rng = np.random.default_rng(0)
  prompts = [rng.integers(2, 96, rng.integers(3, 9)).tolist() for _ in range(8)]
  return made, [Request(p, max_new_tokens=24) for p in prompts]


def decoded(name, method, sampler, models):
  _, asked = pair(name)
  return decode(method, models, asked, sampler=sampler, batch_size=4, seed=2, trace=True)


CASES = [(name, method) for name in NETWORKS for method in METHODS]


@pytest.mark.full
@pytest.mark.parametrize('name, method', long_but(CASES, [('decoder', 'γ = 5'), ('t5', 'a policy')]))
def test_no_bit_depends_on_what_drafts(name, method):
  (small, large), _ = pair(name)
  sampler = Sampler(1.0, coupling='gumbel')
  wide = one_width(large, WIDTH)
  drafter = ngram.drafter(wide) if method == 'prompt lookup' else small
  alone, found = (decoded(name, m, sampler, [drafter, wide]) for m in (methods.autoregressive(1), METHODS[method]))
  assert [list(x) for x in found.tokens] == [list(x) for x in alone.tokens]
  for a, b in zip(found.logprobs, alone.logprobs, strict=True):
    np.testing.assert_array_equal(a[-1], b[-1])


@pytest.mark.full
@pytest.mark.parametrize('family', long_but(['multi30k', 'gsm8k'], ['multi30k']))
def test_bits_of_a_trained_model_differ_without_it(families, family):
  small, large = texts.pair(family, 'bfloat16')
  asked = [Request(x, max_new_tokens=12) for x in texts.prompts(family, 8)]
  how = dict(sampler=Sampler(1.0, coupling='gumbel'), batch_size=8, seed=0, trace=True)

  def bits(method, verifier):
    found = decode(method, [small, verifier], asked, **how)
    return [(list(t), p[-1].tobytes()) for t, p in zip(found.tokens, found.logprobs, strict=True)]

  made = methods.autoregressive(1), methods.speculative(block=5), methods.speculative(block=2)
  alone, *others = (bits(method, one_width(large, WIDTH)) for method in made)
  assert all(other == alone for other in others)
  assert bits(made[1], large) != bits(made[0], large)


def test_leaves_whose_keys_lie_in_other_slots_are_refused():
  small, large = pair('decoder')[0]
  with pytest.raises(ValueError, match='leaves, which model 1, a OneWidth, does not score'):
    decoded('decoder', methods.speculative(block=2, leaves=3), Sampler(1.0), [small, one_width(large, WIDTH)])


@pytest.mark.full
def test_a_target_of_two_models_of_one_width_is_the_same_bit_by_bit():
  models = [one_width(m, WIDTH) for m in pair('decoder')[0]]
  halves = functools.partial(rules.weighted, weights=(0.5, 0.5))
  sampler = Sampler(1.0, coupling='gumbel')
  both = [decoded('decoder', m, sampler, models) for m in (methods.ensemble(halves), methods.ensemble_sd(halves, 4))]
  assert [list(x) for x in both[0].tokens] == [list(x) for x in both[1].tokens]


def test_a_call_that_is_too_wide_or_a_drafter_is_refused():
  (small, large), asked = pair('decoder')
  with pytest.raises(ValueError, match='one width 4 is fed 6 tokens at once: give it a width of 6 or more'):
    decode(methods.speculative(block=5), [small, one_width(large, 4)], asked, seed=0)
  with pytest.raises(ValueError, match='ngram only drafts'):
    one_width(ngram.drafter(large), 4)


def floating(module: hlo.Module, x: hlo.Instruction) -> list[str]:
  """Return what an instruction and those that it calls compute of floating-point numbers, and a product's windows."""
  product = '"kernel_window_bounds":["' in x.rest
  found = re.findall(r'"(?:kernel|output)_window_bounds":\[[^\]]*\]', x.rest) if product else []
  if x.op not in UNROUNDED:
    found += [f'{x.op} {a.dtype}{a.dims}' for a in hlo.arrays(x.shape) if a.dtype[0] in 'bf']
  called = [z for names in x.called.values() for c in names for z in module.computations[c]]
  return found + [y for z in called for y in floating(module, z)]


@pytest.mark.full
@pytest.mark.parametrize('name', long_but(NETWORKS, ['decoder']))
def test_all_methods_have_one_compiled_pass_on_a_tpu(name):
  pytest.importorskip('libtpu')
  small, large = map(aot.shaped, NETWORKS[name])
  placement = aot.Placement(aot.describe('v5e:2x2').devices[:1], {'data': 1})

  def computed(method, verifier):
    sizes = aot.Sizes(batch=4, source=16, tokens=16)
    program = aot.compiled(method, [small, verifier], sizes, Sampler(), placement, 'tpu')
    module = hlo.Module(program.as_text())
    inside = [x for c in module.closure(module.body) for x in module.computations[c] if '/one_width/' in x.path]
    return collections.Counter(y for x in inside for y in floating(module, x))

  made = [methods.autoregressive(1), *(m for name, m in METHODS.items() if name != 'prompt lookup')]
  alone, *others = (computed(method, one_width(large, WIDTH)) for method in made)
  assert any('convolution' in x for x in alone)
  assert all(found == alone for found in others)
