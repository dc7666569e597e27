"""A head over some tokens: its logits, the exact distribution of what it drafts for, and greedy texts."""

import functools
from pathlib import Path

from cases import LARGE, PROMPT
import jax
import jax.numpy as jnp
from matching import having, says
import numpy as np
import pytest
import reference
from tiers import long_but

from speccascade import checkpoints, decode, drafters, embedded, methods, rules, Sampler
from speccascade.backends.quantised import quantised
from speccascade.check import enumeration
from speccascade.drafters import layerskip
from speccascade.drafters.eagle import Eagle, HeadConfig
from speccascade.drafters.hidden import Reading
from speccascade.models import toy
from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.models.t5 import T5, T5Config
from speccascade.planning.cost_model import Costs
from speccascade.planning.planner import plan
from speccascade.types import Model, Prompt

SIZES = (23, 16, 4, 2, 8, 24, (Span(),) * 2)
NETWORKS = {
  'a head of its own': Decoder(DecoderConfig(*SIZES)),
  'a tied head, capped': Decoder(DecoderConfig(*SIZES, tied=True, final_cap=3.0)),
  'a projected head': Decoder(DecoderConfig(*SIZES, tied=True, projected_dim=6)),
  'scanned layers': Decoder(DecoderConfig(*SIZES), scan=True),
  'int8': Decoder(DecoderConfig(*SIZES), quantised=True),
  'int8, tied': Decoder(DecoderConfig(*SIZES, tied=True), quantised=True),
  'T5': T5(T5Config(23, 16, 2, 12, 24, encoder_layers=1, decoder_layers=2)),
  'T5, tied': T5(T5Config(23, 16, 2, 12, 24, encoder_layers=1, decoder_layers=2, tied=True)),
}
TOKENS = [22, 3, 7, 8, 1, 3]
TINY = Decoder(DecoderConfig(3, 8, 2, 2, 4, 8, (Span(),)))
DRAFTER = drafters.frequent(Model(TINY.init(jax.random.key(0)), TINY, name='tiny'), [2, 1])


@functools.partial(jax.jit, static_argnums=0)
def _logits(network, params, tokens):
  cache = network.prefill(params, Prompt(jnp.array([[4, 5, 6]]), jnp.array([1])), 16)
  return network.extend(params, cache, tokens[None], jnp.arange(len(tokens))[None])[0][0]


def logits_of(model: Model, tokens) -> np.ndarray:
  """Return the logits [L, V] after each of some tokens."""
  return np.asarray(_logits(model.network, model.params, jnp.array(tokens)))


@pytest.mark.full
@pytest.mark.parametrize('name', long_but(NETWORKS, ['int8, tied']))
def test_it_has_the_models_logits_at_its_tokens_and_no_others(name):
  network = NETWORKS[name]
  model = Model(network.init(jax.random.key(0)), network)
  made = drafters.frequent(model, TOKENS)
  kept = sorted({*TOKENS, *network.eos_ids})
  expected = np.full((4, 23), -np.inf, np.float32)
  expected[:, kept] = logits_of(model, [2, 9, 11, 3])[:, kept]
  np.testing.assert_allclose(logits_of(made, [2, 9, 11, 3]), expected, rtol=1e-5, atol=1e-6)
  shapes = jax.tree.map(lambda x: (x.shape, x.dtype), made.params)
  assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), made.network.param_shapes())
  assert jax.tree.structure(made.network.param_axes()) == jax.tree.structure(shapes, is_leaf=lambda x: type(x) is tuple)


@pytest.mark.full
def test_a_program_reads_no_row_of_another_token():
  model = Model(NETWORKS['a head of its own'].init(jax.random.key(0)), NETWORKS['a head of its own'])
  made = drafters.frequent(model, TOKENS)
  cache = made.network.empty_cache(made.params, 1, 16)
  args = made.params, cache, jnp.array([[2]]), jnp.array([[0]])
  text = jax.jit(made.network.extend).lower(*args).compile().as_text()
  assert 'f32[16,5]' in text and 'f32[16,23]' not in text


# ---- the distribution of what is emitted ----


SAMPLERS = {}, dict(temperature=0.7, top_k=2)
DRAWN = [(name, sampler) for name in ('speculative', 'opt', 'token_v3') for sampler in SAMPLERS]


@pytest.mark.full
@pytest.mark.parametrize('name, sampler', long_but(DRAWN, DRAWN[3:4]))
def test_what_is_emitted_follows_the_target_of_the_renormalised_distribution(name, sampler):
  rule = functools.partial(getattr(rules, name), **({} if name == 'speculative' else {'alpha': 0.3}))
  pair = [DRAFTER, LARGE]
  found = enumeration.emitted_distribution(methods.speculative(rule, block=2), pair, PROMPT, 2, Sampler(**sampler))

  def step(tokens, _):
    q = np.where([False, True, True], logits_of(whole(DRAFTER), tokens)[-1], -np.inf)
    s = reference.at_prefix(tokens, **sampler)
    return [(reference.target(name, q, reference.table_logits(LARGE, tokens), 0.3, s), None)]

  assert max(enumeration.distance(found, reference.joint_distribution(step, PROMPT, 2))) < 1e-5


def whole(made: Model) -> Model:
  """Return the model that a head is cut of."""
  own = {name: x for name, x in made.params.items() if name != 'frequent'}
  return Model(own, made.network.drafter)


@pytest.mark.long
@pytest.mark.parametrize('early', [False, True])
def test_greedy_texts_are_the_verifiers(early):
  small, large = embedded.models()
  drafter = layerskip.layerskip(large, 1) if early else small
  english, german = zip(*embedded.sentences('train', 400))
  ids = drafters.frequent_tokens(small, german, 300)
  run = functools.partial(decode, prompts=list(english[:24]), max_new_tokens=40, sampler=Sampler(0.0), batch_size=24)
  alone = run(methods.autoregressive(), [large])
  out = run(methods.speculative(block=3), [drafters.frequent(drafter, ids), large])
  assert out.tokens == alone.tokens and out.stats.accepted.sum() > 0
  by_drafter = [np.asarray(tokens)[source == 0] for tokens, source in zip(out.tokens, out.stats.source, strict=True)]
  assert {*np.concatenate(by_drafter)} <= {*ids}


def test_an_early_exit_with_a_head_of_its_own_shares_the_models_cache():
  _, large = embedded.models()
  made = drafters.frequent(layerskip.layerskip(large, 1), [5, 6, 7])
  assert made.network.shares_cache(made.params, large.network, large.params)


@pytest.mark.long
def test_a_quantised_drafter_is_cut_as_it_is():
  network = NETWORKS['a head of its own']
  params = network.init(jax.random.key(0))
  cut_after = drafters.frequent(Model(quantised(params), NETWORKS['int8']), TOKENS)
  cut_before = drafters.frequent(Model(params, network), TOKENS)
  np.testing.assert_allclose(logits_of(cut_after, [3]), logits_of(cut_before, [3]), atol=0.05)


# ---- which tokens, and by what name ----


@pytest.mark.parametrize('own, tied', [(True, True), (False, True), (False, False)])
def test_a_head_of_eagle_3_has_the_rows_of_its_own_matrix_or_of_the_verifiers(own, tied):
  layer = DecoderConfig(*SIZES[:-1], (Span(),), tied=tied)
  of_verifier, of_head = Decoder(layer), Eagle(HeadConfig('eagle3', layer, (0, 1, -1), states=3, own_scores=own))
  verifier, head = (Model(n.init(jax.random.key(i)), n, name='head') for i, n in enumerate((of_verifier, of_head)))
  made = drafters.frequent(head, TOKENS, verifier)
  tokens = jnp.array([[3, 4, 5]])
  given = tokens, jnp.arange(3)[None], jax.random.normal(jax.random.key(2), (1, 3, 16))
  found, expected = (
    np.asarray(
      x.network.step(x.params, x.network.empty(x.params, 1, 4), Reading(*given, of_verifier, verifier.params))[0]
    )
    for x in (made, head)
  )
  kept = sorted({*TOKENS, *of_verifier.eos_ids})
  np.testing.assert_allclose(found[..., kept], expected[..., kept], rtol=1e-5, atol=1e-6)
  assert np.isneginf(np.delete(found, kept, axis=-1)).all() and made.name == f'head-frequent{len(kept)}'
  with pytest.raises(ValueError, match=having('head', 'verifier')):
    drafters.frequent(head, TOKENS)


def test_tokens_are_counted_and_special_ones_come_first():
  small, _ = embedded.models()
  dog, cat = (small.tokenizer.encode(text, begins=False)[:-1] for text in ('dog', 'cat'))
  ids = drafters.frequent_tokens(small, ['dog dog dog', 'cat cat', 'dog'])
  special = [*small.network.eos_ids, *small.tokenizer.special_ids.values()]
  assert {*ids[: len({*special})]} == {*special}
  assert min(map(ids.index, dog)) < min(map(ids.index, cat))
  assert drafters.frequent_tokens(small, ['dog dog', 'cat'], 3) == ids[:3]


def test_a_path_names_the_tokens_of_a_file(tmp_path):
  folder = Path(embedded.__file__).parent / 'pretrained' / 'small'
  (tmp_path / 'texts').write_text('Ein Hund läuft.\nEine Frau lacht.\n')
  path = f'{folder}@frequent={tmp_path}/texts'
  expected = drafters.frequent_tokens(embedded.models()[0], ['Ein Hund läuft.\n', 'Eine Frau lacht.\n'])
  found, complete = checkpoints.load_all([path, folder])
  assert np.flatnonzero(~np.asarray(found.network.lacks(found.params))).tolist() == sorted(expected)
  assert found.name == f'small-frequent{len(expected)}' and found.digest == checkpoints.digest(path) != complete.digest
  assert found.params['token_embedder']['embedding'] is complete.params['token_embedder']['embedding']
  (tmp_path / 'texts').write_text('Ein Hund')
  assert checkpoints.digest(path) != found.digest


@pytest.mark.long
def test_the_plan_says_how_many_tokens_it_has():
  costs = {1: Costs(0.1, {1: 1.0, 2: 1.0, 3: 1.0})}
  (line,) = plan([DRAFTER, LARGE], [[2, 2, 1], [2, 0]], blocks=(1, 2), max_new_tokens=6, costs=costs).overlaps
  assert says(line, 'tiny-frequent2', '2 of the 3 tokens', '80%')


def test_errors_name_what_is_wrong():
  tiny = Model(TINY.init(jax.random.key(0)), TINY, name='tiny')
  with pytest.raises(ValueError, match=having('toy0', 'T5, a decoder')):
    drafters.frequent(toy.model(0, 5), [1])
  with pytest.raises(ValueError, match=having('tokens=3', '2')):
    drafters.frequent(tiny, [1, 3])
  with pytest.raises(ValueError, match=having('tiny', 'tokenizer=')):
    drafters.frequent_tokens(tiny, ['a'])
