"""What is measured of a chat model's drafters and cascades, on toy models."""

import numpy as np

from experiments.smollm2 import cascades, measure
from speccascade import decode, methods, Sampler
from speccascade.decode import scoring
from speccascade.models import toy

PROMPTS = [[1, 2], [3], [0, 4, 1]]


def test_the_gap_is_that_of_the_two_tokens_where_texts_begin_to_differ():
  model = toy.model(1)
  texts = [[0, 1, 2, 3], [4, 4, 0, 1], [2, 0, 1, 1]]
  others = [texts[0], [4, 3, 2, 2], [2, 0, 1, 0]]

  def logprob(prompt: list[int], token: int) -> float:
    (found,) = scoring.score(methods.autoregressive(), [model], [prompt], [[token]])
    return found.logprobs[0]

  gaps = [
    abs(logprob([3, 4], 4) - logprob([3, 4], 3)),
    abs(logprob([0, 4, 1, 2, 0, 1], 1) - logprob([0, 4, 1, 2, 0, 1], 0)),
  ]
  np.testing.assert_allclose(measure.gap(model, PROMPTS, texts, others), max(gaps), rtol=1e-5)
  assert measure.gap(model, PROMPTS, texts, texts) == 0 < min(gaps)


def test_a_row_of_a_cascade_has_the_log_probability_of_its_texts_under_the_verifier():
  verifier = toy.model(1)
  models = [toy.model(2, near=verifier), verifier]
  made = cascades.methods_of(2)
  found = {}
  for name in (cascades.VERIFIER, 'speculative', 'chow:0.5'):
    method, which = made[name]
    out = decode(method, models[which], PROMPTS, max_new_tokens=8, sampler=Sampler(1.0), seed=0)
    found[name] = cascades.row_of(out, PROMPTS, verifier)
    scored = scoring.score(methods.autoregressive(), [verifier], PROMPTS, out.tokens)
    mean = np.concatenate([x.logprobs for x in scored]).mean()
    np.testing.assert_allclose(found[name]['logprob'], mean, rtol=1e-5)
  assert found[cascades.VERIFIER]['tokens_per_round'] == found[cascades.VERIFIER]['verifier_calls_per_token'] == 1
  assert found['speculative']['verifier_calls_per_token'] < 1
