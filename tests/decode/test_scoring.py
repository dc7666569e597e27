"""The log-probability of a text is that of the distribution which the loop emits."""

import dataclasses
import functools
import itertools

from cases import FOREIGN_PAIR, METHODS, PAIR, PROMPT, V
import jax
import jax.numpy as jnp
from matching import having
import numpy as np
import pytest
import reference
from tiers import long_but

from speccascade import decode, embedded, methods, rules, Sampler
from speccascade.decode import scoring
from speccascade.drafters import hidden
from speccascade.drafters.eagle import Eagle, HeadConfig
from speccascade.models import toy
from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.types import Model

UNSCORED = ('token_cascade chow', 'token_cascade chow_log', 'bild', 'cascade by slot', 'cascade phased', 'FLy')
SCORED = [name for name in METHODS if name not in UNSCORED]
FIRST = ['autoregressive', 'speculative opt', 'speculative lossy', 'cos 3', 'cos user']


@pytest.mark.parametrize('name', long_but(SCORED, FIRST))
def test_scores_are_the_joint_distribution(name):
  method, models, step = METHODS[name]
  expected = reference.joint_distribution(step(models), PROMPT, 3)
  greedy = reference.joint_distribution(step(models, temperature=0.0), PROMPT, 3)
  texts = list(itertools.product(range(models[-1].network.vocab_size), repeat=3))
  scores = scoring.score(method, models, [PROMPT] * len(texts), texts, batch_size=10)
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


def test_a_sum_of_logits_has_one_of_a_token_that_a_drafter_lacks():
  method = methods.ensemble(functools.partial(rules.realign, lam=0.3))
  scores = scoring.score(method, FOREIGN_PAIR, [PROMPT] * V, [[v] for v in range(V)])
  own, large = (reference.table_logits(model, PROMPT) for model in FOREIGN_PAIR)
  own[~np.isfinite(own)] = own[np.isfinite(own)].min()
  expected = reference.realign([own, large], 0.3, reference.Sampler())
  np.testing.assert_allclose([np.exp(s.logprobs[0]) for s in scores], expected, atol=1e-5)


class Drafting(toy.Table):
  provisional = True  # as a head is


def test_a_text_has_no_score_by_a_head():
  with pytest.raises(ValueError, match='is a head'):
    scoring.score(METHODS['oracle diff'][0], [PAIR[0].replace(network=Drafting(V)), PAIR[1]], [PROMPT], [[1]])


def test_a_head_changes_no_score_of_its_verifier_however_long_a_text():
  layer = DecoderConfig(17, 8, 2, 2, 4, 8, (Span(),))
  large, head = (
    Model(n.init(jax.random.key(0)), n) for n in (Decoder(layer), Eagle(HeadConfig('eagle', layer, (-1,))))
  )
  text = [i % 17 for i in range(2 * hidden.MOST)]
  (alone,) = scoring.score(methods.autoregressive(), [large], [PROMPT], [text])
  for models in ([head, large], hidden.beside(head, large)):
    (score,) = scoring.score(methods.speculative(), models, [PROMPT], [text])
    np.testing.assert_array_equal(score.logprobs, alone.logprobs)


def test_the_logits_of_texts_are_those_that_are_scored():
  prompts, outputs = [[1, 1], [2]], [[0, 2, 1], [1, 1]]
  read = scoring.read(FOREIGN_PAIR, prompts, outputs, lambda logits, tokens: jnp.moveaxis(logits, 0, -1), batch_size=1)
  for m, model in enumerate(FOREIGN_PAIR):
    scores = scoring.score(methods.autoregressive(), [model], prompts, outputs)
    for logits, scored, output in zip(read, scores, outputs, strict=True):
      logp = logits[..., m] - np.logaddexp.reduce(logits[..., m], -1, keepdims=True)
      np.testing.assert_allclose(logp[np.arange(len(output)), output], scored.logprobs, atol=1e-5)


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


@pytest.mark.parametrize('output', [[V], [-1], [1.7], [[1, 2]], ['a'], 1], ids=str)
def test_what_is_no_list_of_token_ids_has_no_score(output):
  with pytest.raises(ValueError, match=having('output 1', str(output).strip('[]'))):
    scoring.score(methods.speculative(), PAIR, [PROMPT, PROMPT], [[], output])


@pytest.mark.parametrize('encoder, most', [(False, 6), (True, 4)])
def test_a_text_must_fit_the_positions_of_the_models_that_score_it(encoder, most):
  large = toy.model(0, encoder=encoder)
  short = large.replace(network=dataclasses.replace(large.network, max_positions=most))
  (score,) = scoring.score(methods.autoregressive(0), [short], [[1, 2, 3]], [[4, 3, 2, 1]])
  assert score.logprobs.shape == (4,)
  with pytest.raises(ValueError, match=having('output (5 tokens)', f'need {most + 1} positions', f'has {most}')):
    scoring.score(methods.speculative(), [large, short], [[1], [1, 2, 3]], [[4], [4, 3, 2, 1, 0]])
  scoring.score(methods.speculative(), [short, large], [[1, 2, 3]], [[4, 3, 2, 1, 0]])  # the drafter reads nothing


@pytest.mark.full
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
