"""Named cases by which other projects test their rejection samplers and rollouts, here for the whole loop.

A case is what is drafted, what the target's arg max is at each place, and what one round emits. The files, in the state
of November 2026:

- tpu-inference: tests/layers/jax/sample/test_rejection_sampler.py
- vLLM: tests/v1/sample/test_rejection_sampler.py, and the case of block verification in its pull request of that name
- DeepSpec: tests/test_sampling.py

Padding of theirs has no counterpart, since a window here is of rows. A bonus token that they mock is the target's here.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade import acceptance, decode, methods, Request, Sampler, sampling, stopping
from speccascade.engine.state import Window
from speccascade.planning import timing
from speccascade.types import Model, Network

VOCAB = 128
WIDEST = 32  # places of a script
LARGE = 40  # of logits; their 100 would make a chance of exp(-200), which is 0 in float32
OTHER = 15  # the second likeliest token, which is written where the likeliest may not be
# name: for each sequence what is drafted, the target's tokens there and behind, and what is emitted
TPU_INFERENCE = {
  'perfect_match': [([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4])],
  'early_mismatch': [([1, 2, 3], [1, 5, 3, 4], [1, 5])],
  'multiple_sequences': [([1, 2], [1, 2, 5], [1, 2, 5]), ([3, 4], [3, 7, 6], [3, 7])],
  'single_token_sequence': [([1], [1, 2], [1, 2])],
  'empty_sequence': [([], [5], [5])],
  'variable_length_sequences': [([1, 2], [1, 5, 6], [1, 5]), ([3], [3, 7], [3, 7])],
  'all_different_lengths': [
    ([1], [1, 7], [1, 7]),
    ([2, 3], [2, 3, 9], [2, 3, 9]),
    ([4, 5, 6], [4, 5, 6, 10], [4, 5, 6, 10]),
  ],
  'mixed_sequence_lengths': [([1, 2], [1, 2, 6], [1, 2, 6]), ([3, 4, 5], [3, 7, 5, 8], [3, 7])],
  'zero_length_mixed': [([], [5], [5]), ([1, 2], [1, 2, 6], [1, 2, 6])],
  'all_zero_length': [([], [5], [5]), ([], [6], [6])],
  'immediate_rejection': [
    ([1, 2, 3], [9, 2, 3, 10], [9]),
    ([4, 5], [4, 5, 11], [4, 5, 11]),
    ([6], [6, 12], [6, 12]),
  ],
  'first_token_mismatch': [([1], [2, 3], [2])],
  'multiple_mismatches': [([1, 2, 3], [1, 2, 7, 8], [1, 2, 7]), ([4, 5, 6], [4, 8, 6, 9], [4, 8])],
  'padding_test, extreme_padding': [([1, 2], [1, 5, 3], [1, 5])],
  'all_immediate_mismatch': [
    ([1, 2, 3], [10, 2, 3, 20], [10]),
    ([4, 5, 6], [11, 5, 6, 21], [11]),
    ([7, 8, 9], [12, 8, 9, 22], [12]),
  ],
  'all_perfect_match': [
    ([1, 2, 3], [1, 2, 3, 10], [1, 2, 3, 10]),
    ([4, 5, 6], [4, 5, 6, 11], [4, 5, 6, 11]),
    ([7, 8, 9], [7, 8, 9, 12], [7, 8, 9, 12]),
  ],
  'extreme_length_imbalance': [
    ([*range(1, 16)], [*range(1, 16), 100], [*range(1, 16), 100]),
    ([16], [16, 101], [16, 101]),
    ([17, 18], [20, 18, 102], [20]),
  ],
  'mixed_accept_reject': [
    ([1, 2, 3], [1, 2, 3, 20], [1, 2, 3, 20]),
    ([4, 5, 6], [10, 5, 6, 21], [10]),
    ([7, 8, 9], [7, 8, 9, 22], [7, 8, 9, 22]),
  ],
  'same_position_mismatch': [
    ([1, 2, 3], [1, 10, 3, 20], [1, 10]),
    ([4, 5, 6], [4, 11, 6, 21], [4, 11]),
    ([7, 8, 9], [7, 12, 9, 22], [7, 12]),
  ],
  'single_long_sequence': [([*range(1, 31)], [*range(1, 28), 99, 29, 30, 100], [*range(1, 28), 99])],
  # of samples, whose logits leave no chance to anything else
  'non_greedy_basic_functionality': [([10, 20, 30], [10, 50, 30, 99], [10, 50])],
  'non_greedy_deterministic_with_seed': [([1, 2, 3, 4], [1, 5, 3, 6, 99], [1, 5])],
  'non_greedy_with_draft_probs_none': [([15, 25], [15, 35, 88], [15, 35])],
  'non_greedy_multiple_sequences': [
    ([1, 2], [1, 5, 11], [1, 5]),
    ([3, 4, 5], [3, 8, 5, 12], [3, 8]),
    ([6, 7], [6, 9, 13], [6, 9]),
  ],
  'non_greedy_with_all_accepted_tokens': [([10, 20, 30], [10, 20, 30, 99], [10, 20, 30, 99])],
  'non_greedy_empty_sequence': [([], [77], [77]), ([], [88], [88])],
  'non_greedy_vs_greedy_same_perfect_case': [([5, 15, 25], [5, 15, 25, 99], [5, 15, 25, 99])],
}
VLLM = {
  'perfect_match': [([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4])],
  'early_mismatch': [([1, 2, 3], [1, 5, 3, 4], [1, 5])],
  'multiple_sequences': [([1, 2], [1, 2, 5], [1, 2, 5]), ([3], [3, 4], [3, 4])],
  'single_token_sequence': [([1], [1, 2], [1, 2])],
  'empty_sequence': [([], [5], [5])],
  'multiple_mismatches': [([1, 2, 3], [1, 2, 7, 6], [1, 2, 7]), ([4, 5, 6], [4, 8, 6, 9], [4, 8])],
  'parametrized_cases 0': [([1, 2], [1, 2, 3], [1, 2, 3])],
  'parametrized_cases 1': [([1], [2, 3], [2])],
  'parametrized_cases 2': [([1, 2], [1, 5, 6], [1, 5]), ([3, 4], [3, 4, 7], [3, 4, 7])],
  'fly, by the standard test': [([1, 2, 3, 4], [9, 2, 3, 4, 5], [9])],
}
CASES = {f'tpu-inference: {name}': case for name, case in TPU_INFERENCE.items()}
CASES |= {f'vLLM: {name}': case for name, case in VLLM.items()}
# the same with a number of each request: (the tokens before, the request, drafted, the target's, emitted)
CONSTRAINED = {
  'frequency_penalties': [
    ([5, 6, 7], dict(frequency_penalty=1.5), [1, 1, 1], [1, 1, 1, 1], [1, OTHER]),
    ([6, 7, 8], dict(frequency_penalty=1.5), [], [7], [7]),
    ([7, 8, 9], dict(frequency_penalty=0.7), [1, 1, 1], [1, 1, 1, 1], [1, 1, OTHER]),
  ],
  'bad_words': [
    ([2], dict(logit_bias={2: -1e6}), [1, 2, 3], [1, 2, 3, 4], [1, OTHER]),
    ([3], {}, [1, OTHER, 3], [1, OTHER, 3, 4], [1, OTHER, 3, 4]),
    ([4], dict(logit_bias={2: -1e6}), [1, 2, 3], [1, 2, 3, 4], [1, OTHER]),
  ],
  'allowed_token_ids': [  # of its odd rows all; the bonus token of the last is mocked, and would not be allowed
    ([2], dict(logit_bias=dict.fromkeys(range(5), -1e6)), [1, 2, 10], [1, 2, 10, 5], [OTHER]),
    ([3], {}, [10, 5, 3], [10, 5, 10, 5], [10, 5, 10]),
    ([4], dict(logit_bias=dict.fromkeys(range(2, 7), -1e6)), [7, 10, 12], [7, 10, 12, 5], [7, 10, 12, OTHER]),
  ],
}


@dataclasses.dataclass(frozen=True)
class Script(Network):
  """Predicts by the first token of its prompt and the position alone."""

  vocab_size: int

  def prefill(self, params, prompt, max_len):
    return {'row': prompt.tokens[:, 0]}

  def extend(self, params, cache, tokens, positions):
    return params[cache['row'][:, None], positions], cache


def scripts(rows, first=1, spare=None) -> jax.Array:
  """Return the logits [row, position, V] of texts behind so many tokens, after which no token is likely."""
  logits = np.zeros((len(rows), first + WIDEST, VOCAB), np.float32)
  for row, tokens in zip(logits, rows, strict=True):
    for place, token in enumerate(tokens):
      row[first - 1 + place] = -LARGE
      if spare is not None:
        row[first - 1 + place, spare] = LARGE - 1
      row[first - 1 + place, token] = LARGE
  return jnp.asarray(logits)


def run(drafted, targets, requests, sampler, accept=acceptance.token_wise, first=1, spare=None, **changes):
  """Return what one round of each row emits, with statistics."""
  models = [
    Model(scripts(rows, first, spare), Script(VOCAB), name=name) for name, rows in (('q', drafted), ('p', targets))
  ]
  models[1] = models[1].replace(**changes)
  # a draft ends where the drafter is unsure, which it is behind its script
  method = methods.speculative(block=max(1, *map(len, drafted)), policy=stopping.Fallback(0.5), accept=accept)
  return decode(method, models, requests, sampler=sampler)


ACCEPTORS = {
  'greedy': (Sampler(0.0), acceptance.token_wise),
  'sampled': (Sampler(1.0), acceptance.token_wise),
  'coupled': (Sampler(1.0, coupling='gumbel'), acceptance.token_wise),
  'block verification': (Sampler(1.0), acceptance.block),
}


@pytest.mark.full
@pytest.mark.parametrize('how', ACCEPTORS)
def test_a_round_emits_what_the_cases_of_others_say(how):
  sampler, accept = ACCEPTORS[how]
  every = [(name, *sequence) for name, sequences in CASES.items() for sequence in sequences]
  names, drafted, targets, expected = zip(*every, strict=True)
  requests = [Request([row], max_new_tokens=len(tokens)) for row, tokens in enumerate(expected)]
  out = run(drafted, targets, requests, sampler, accept)
  for name, tokens, emitted, rounds in zip(names, expected, out.tokens, out.stats.rounds, strict=True):
    assert emitted == tokens and rounds == 1, name


@pytest.mark.parametrize('name', CONSTRAINED)
def test_a_round_keeps_to_the_numbers_of_a_request(name):
  before, numbers, drafted, targets, expected = zip(*CONSTRAINED[name], strict=True)
  first = 1 + len(before[0])
  requests = [
    Request([row, *tokens], max_new_tokens=len(new), **more)
    for row, (tokens, more, new) in enumerate(zip(before, numbers, expected, strict=True))
  ]
  out = run(drafted, targets, requests, Sampler(0.0), first=first, spare=OTHER)
  assert out.tokens == [*expected]
  assert out.stats.rounds.tolist() == [1, 1, 1]


FLY = {  # window, limit, drafted, the target's tokens, logits of its first place, what is emitted
  'rescues_mismatch_after_native_acceptance_window': (2, 0.0, [1, 2, 3, 4], [9, 2, 3, 4, 5], {}, [1, 2, 3, 4, 5]),
  'requires_full_lookahead': (2, 0.3, [1, 2, 3, 4, 5], [9, 2, 3, 8, 5, 6], {}, [9]),
  'passes_entropy_gate': (2, 0.3, [1, 2, 3, 4, 5], [9, 2, 3, 8, 5, 6], {9: 1, 1: 0.9, 0: 0.8}, [1, 2, 3, 8]),
  'does_not_override_target_constraint': (1, 0.3, [1, 2, 3], [9, 2, 3, 4], {9: 1, 0: 0.9, 8: 0.8, 1: -np.inf}, [9]),
}


@pytest.mark.parametrize('name', FLY)
def test_fly_accepts_what_the_cases_of_vllm_say(name):
  window, limit, drafted, targets, first, expected = FLY[name]
  logits = scripts([targets])
  if first:
    logits = logits.at[0, 0].set(-LARGE).at[0, 0, jnp.array([*first])].set(jnp.array([*first.values()], jnp.float32))
  request = Request([0], max_new_tokens=len(expected))
  out = run([drafted], [targets], [request], Sampler(0.0), acceptance.FLy(limit, window), params=logits)
  assert out.tokens == [expected] and out.stats.rounds.tolist() == [1]


@pytest.mark.parametrize('rate, expected', [(1.0, [[1, 2, 50], [3, 40]]), (0.0, [[10], [30]])])
def test_synthetic_acceptance_is_that_of_vllm(rate, expected):
  requests = [Request([row], max_new_tokens=len(tokens)) for row, tokens in enumerate(expected)]
  out = run([[1, 2], [3]], [[10, 20, 50], [30, 40]], requests, Sampler(1.0), timing.forced(rate))
  assert out.tokens == expected and out.stats.rounds.tolist() == [1, 1]


@pytest.mark.parametrize('numbers', [dict(top_k=k) for k in (1, 5, 99)] + [dict(top_p=p) for p in (0.5, 0.9, 0.99)])
def test_no_token_is_emitted_that_a_filter_leaves_out(numbers):
  q, p = jax.random.normal(jax.random.key(0), (2, 100, 4, 100))
  models = [Model(q, Script(100), name='q'), Model(p, Script(100), name='p')]
  sampler = Sampler(**numbers)
  out = decode(methods.speculative(block=3), models, [[row] for row in range(100)], max_new_tokens=4, sampler=sampler)
  allowed = np.asarray(sampler(p)) > 0
  assert allowed[np.arange(100)[:, None], np.arange(4)[None], np.array(out.tokens)].all()
  assert 0 < out.stats.accepted.sum() < out.stats.tested.sum()


class Uniform(sampling.Noise):
  """Noise of given numbers."""

  def __init__(self, numbers):
    self.numbers = jnp.asarray(numbers)

  def accept(self, numerator, denominator, position, start):
    return self.numbers * denominator < numerator, self


def test_block_verification_accepts_what_the_case_of_vllm_says():
  q = jnp.array([[[0.0, 0.6, 0.0, 0.4], [0.1, 0.2, 0.3, 0.4]]])
  p = jnp.array([[[0.0, 0.8, 0.0, 0.2], [0.2, 0.1, 0.3, 0.4], [0.25] * 4]])
  zero = jnp.zeros(1, jnp.int32)
  window = Window(zero + 2, q, jnp.zeros((1, 2), jnp.int32), ())
  of = lambda numbers: acceptance.Trial(
    window, jnp.array([[1, 0]]), zero + 2, p, jnp.array([[0, 1]]), zero, Uniform([numbers]), Sampler(), (1,)
  )
  assert acceptance.block(of([0.7, 0.6]))[0].accepted.tolist() == [2]
  # its second request drafts a token that its drafter gives no chance, which no draft here holds
  assert acceptance.token_wise(of([0.7, 0.6]))[0].accepted.tolist() == [2]


DEEPSPEC = {  # the sampler's numbers, logits, and the distribution that is sampled from
  'top_k_filters_and_renormalizes_in_float32': (dict(top_k=2), [1, 4, 3, 2], [0, 0.7310586, 0.2689414, 0]),
  'top_p_keeps_crossing_token': (dict(top_p=0.6), np.log([0.4, 0.3, 0.2, 0.1]), [4 / 7, 3 / 7, 0, 0]),
  'top_p_keeps_at_least_one': (dict(top_p=1e-12), np.log([0.4, 0.3, 0.2, 0.1]), [1, 0, 0, 0]),
  'top_k_and_top_p_compose': (dict(temperature=0.01, top_k=3, top_p=0.9), [12, 11, 10, -100, -200], [1, 0, 0, 0, 0]),
  'greedy': (dict(temperature=0.0), [1, 3, 2], [0, 1, 0]),
}


@pytest.mark.parametrize('name', DEEPSPEC)
def test_the_sampler_has_the_distributions_of_deepspec(name):
  numbers, logits, expected = DEEPSPEC[name]
  for dtype in (jnp.float32, jnp.bfloat16):
    if dtype == jnp.bfloat16 and 'top_p_keeps' in name:
      continue  # whose logits it rounds
    probs = Sampler(**numbers)(jnp.asarray(logits, dtype)[None])[0]
    assert probs.dtype == jnp.float32
    np.testing.assert_allclose(probs, expected, atol=1e-6)


def test_a_tiny_residual_is_not_replaced_by_the_target():  # DeepSpec
  left = sampling.residual(jnp.array([1e-9, 1.0]), jnp.array([0.0, 1.0]))
  np.testing.assert_array_equal(left, [1, 0])
