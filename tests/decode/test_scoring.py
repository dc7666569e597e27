"""The log-probability of a text is that of the distribution which the loop emits."""

import itertools

from cases import COINS, METHODS, PAIR, PROMPT, V
from matching import having
import numpy as np
import pytest
import reference
from tiers import quick

from speccascade import decode, embedded, methods, Sampler
from speccascade.decode import scoring
from speccascade.models import toy

UNSCORED = ('token_cascade chow', 'token_cascade chow_log', 'token_cascade learned_alone', 'bild', 'cascade by slot')
SCORED = [name for name in METHODS if name not in UNSCORED]
FIRST = ['autoregressive', 'speculative opt', 'speculative lossy', 'oracle diff', 'cos 3', 'cos user', 'sv_exact']


@pytest.mark.parametrize('name', quick(SCORED, FIRST))
def test_scores_are_the_joint_distribution(name):
  method, models, step = METHODS[name]
  prompt = PROMPT if models is not COINS else [1, 0]
  expected = reference.joint_distribution(step(), prompt, 3)
  greedy = reference.joint_distribution(step(temperature=0.0), prompt, 3)
  vocab = V if models is not COINS else 2
  texts = list(itertools.product(range(vocab), repeat=3))
  scores = scoring.score(method, models, [prompt] * len(texts), texts, batch_size=10)
  got = np.exp([s.logprobs.sum() for s in scores])
  np.testing.assert_allclose(got, [expected.get(text, 0) for text in texts], atol=1e-5)
  for text, s in zip(texts, scores, strict=True):
    if greedy.get(text, 0) == 1:
      assert s.greedy.all()


@pytest.mark.parametrize('name', UNSCORED)
def test_a_text_has_no_log_probability_where_the_draft_decides(name):
  method, models, _ = METHODS[name]
  with pytest.raises(ValueError, match=having(method.name, 'log-probability')):
    scoring.score(method, models, [PROMPT], [[1]])


def test_a_long_text_is_read_in_pieces_and_ragged_rows_at_once(monkeypatch):
  large = toy.model(3, 17)
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 17, n).tolist() for n in (1, 9, 4, 30)]
  outputs = [rng.integers(0, 17, n).tolist() for n in (40, 1, 0, 21)]
  whole = scoring.score(methods.autoregressive(0), [large], prompts, outputs)
  monkeypatch.setattr(scoring, '_CHUNK', 8)
  pieces = scoring.score(methods.autoregressive(0), [large], prompts, outputs, batch_size=2)
  for tokens, a, b in zip(outputs, whole, pieces, strict=True):
    assert a.logprobs.shape == (len(tokens),)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
    np.testing.assert_array_equal(a.greedy, b.greedy)


@pytest.mark.parametrize('prompts, outputs', [([[1]], []), ([[1], [2]], [[1]])])
def test_prompts_and_outputs_are_as_many(prompts, outputs):
  with pytest.raises(ValueError, match=f'{len(prompts)} prompts need as many outputs, not {len(outputs)}'):
    scoring.score(methods.speculative(), PAIR, prompts, outputs)


def test_greedy_texts_of_an_encoder_decoder_are_greedy():
  models = embedded.models()
  texts = ['A dog runs.', 'Two women are reading a book in the park.']
  out = decode(methods.speculative(), models, texts, max_new_tokens=24, sampler=Sampler(0.0), trace=True)
  scores = scoring.score(methods.speculative(), models, texts, out.tokens)
  for s, logprobs in zip(scores, out.logprobs, strict=True):
    assert s.greedy.all()
    np.testing.assert_allclose(s.logprobs, logprobs[1], atol=1e-4)
  other = [[*tokens[:-2], 9, tokens[-1]] for tokens in out.tokens]
  assert not any(s.greedy.all() for s in scoring.score(methods.speculative(), models, texts, other))
