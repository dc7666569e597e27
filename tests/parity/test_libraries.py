"""Decoders of Tunix, gemma and keras-hub, as they are installed, decode as models of this package."""

import functools
import os

os.environ['KERAS_BACKEND'] = 'jax'

import jax
import jax.numpy as jnp
from matching import having
import numpy as np
import pytest

import speccascade
from speccascade import methods, Sampler
from speccascade.drafters import ngram
from speccascade.integrations import by_row

pytestmark = pytest.mark.filterwarnings('ignore')  # of the libraries
VOCAB, PAD, EOS, NEW = 37, 0, 1, 12
COMPILED = []
jax.monitoring.register_event_duration_secs_listener(
  lambda event, *_, **__: COMPILED.append(event) if event.endswith('backend_compile_duration') else None
)
PROMPTS = [[7, 8, 9, 7, 8, 9, 7], [5, 3], [20, 4, 31, 20, 4], [36]]
SMALL = dict(embed_dim=32, hidden_dim=48, num_heads=4, head_dim=8, num_kv_heads=2)


@pytest.fixture(autouse=True)
def libraries_promote():
  """Let the libraries mix dtypes and ranks, which tests of this package must not."""
  strict = {name: jax.config.values[name] for name in ('jax_numpy_dtype_promotion', 'jax_numpy_rank_promotion')}
  for name, value in zip(strict, ('standard', 'allow')):
    jax.config.update(name, value)
  yield
  for name, value in strict.items():
    jax.config.update(name, value)


class Numbers:
  """A tokenizer of Tunix: a text is its tokens."""

  def encode(self, text):
    return [int(x) for x in text.split()]

  def decode(self, ids):
    return ' '.join(map(str, ids))

  def bos_id(self):
    return 0  # none is put before a text

  def eos_id(self):
    return EOS

  def pad_id(self):
    return PAD


TEXTS = [Numbers().decode(p) for p in PROMPTS]


def ended(tokens) -> list[int]:
  """Return tokens up to the first EOS, without it."""
  tokens = [int(x) for x in tokens][:NEW]
  return tokens[: tokens.index(EOS)] if EOS in tokens else tokens


def tunix(family):
  pytest.importorskip('tunix', reason='needs google-tunix')
  from flax import nnx
  from tunix.generate import sampler

  if family == 'Qwen3':
    from tunix.models.qwen3 import model as of

    config = of.ModelConfig(num_layers=2, vocab_size=VOCAB, rope_theta=10_000, norm_eps=1e-6, **SMALL)
  elif family == 'Llama3':
    from tunix.models.llama3 import model as of

    config = of.ModelConfig(num_layers=2, vocab_size=VOCAB, rope_theta=10_000, norm_eps=1e-6, **SMALL)
  else:
    from tunix.models.gemma3 import model as of

    settings = dict(sliding_window_size=40, param_dtype=jnp.float32)
    config = of.ModelConfig(num_layers=6, num_embed=VOCAB, **settings, **SMALL)
  module = getattr(of, family)(config, rngs=nnx.Rngs(0))

  def own():
    cache = sampler.CacheConfig(64, config.num_layers, config.num_kv_heads, config.head_dim)
    return sampler.Sampler(module, Numbers(), cache)(TEXTS, max_generation_steps=NEW).tokens

  return by_row.tunix(module, tokenizer=Numbers(), eos_ids=(EOS,)), own


def gemma():
  pytest.importorskip('gemma', reason='needs gemma')
  from gemma import gm

  kinds = gm.nn.AttentionType
  config = gm.nn.config.TransformerConfig(
    num_embed=VOCAB,
    attention_types=(kinds.LOCAL_SLIDING, kinds.LOCAL_SLIDING, kinds.GLOBAL),
    sliding_window_size=8,
    final_logit_softcap=None,
    use_post_attn_norm=True,
    use_post_ffw_norm=True,
    use_qk_norm=True,
    **SMALL,
  )
  module = gm.nn.Transformer(config=config, dtype=jnp.float32)
  params = module.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))['params']

  class Tokenizer(gm.testing.DummyTokenizer):
    def encode(self, text, *, add_bos=False):
      return Numbers().encode(text)

    def decode(self, ids):
      return Numbers().decode(ids)

  def own():
    sampler = gm.text.Sampler(model=module, params=params, tokenizer=Tokenizer(), cache_length=64, pad_length=16)
    return sampler.sample(TEXTS, max_new_tokens=NEW, return_state=True).state.predicted_tokens

  return by_row.gemma(module, params, eos_ids=(EOS,)), own


def keras_hub(family):
  pytest.importorskip('keras_hub', reason='needs keras-hub')
  import keras
  from keras_hub import models

  keras.utils.set_random_seed(0)
  sizes = dict(vocabulary_size=VOCAB, num_query_heads=4, num_key_value_heads=2, head_dim=8, hidden_dim=32)
  if family == 'Qwen3':
    backbone = models.Qwen3Backbone(num_layers=2, intermediate_dim=48, **sizes)
    causal_lm = models.Qwen3CausalLM(backbone)
  else:
    windows = dict(use_sliding_window_attention=True, sliding_window_size=8)
    backbone = models.Gemma3Backbone(num_layers=6, intermediate_dim=96, image_size=16, **windows, **sizes)
    causal_lm = models.Gemma3CausalLM(backbone=backbone, preprocessor=None)

  def own():
    width = max(map(len, PROMPTS)) + NEW
    ids = np.array([p + [PAD] * (width - len(p)) for p in PROMPTS])
    given = np.array([[1] * len(p) + [0] * (width - len(p)) for p in PROMPTS])
    causal_lm.compile(sampler='greedy')
    made = causal_lm.make_generate_function()({'token_ids': ids, 'padding_mask': given == 1})['token_ids']
    return [row[len(p) :] for p, row in zip(PROMPTS, made, strict=True)]

  return by_row.keras_hub(causal_lm, eos_ids=(EOS,)), own


MODELS = {f'Tunix {name}': functools.partial(tunix, name) for name in ('Qwen3', 'Llama3', 'Gemma3')}
MODELS |= {'gemma': gemma} | {f'keras-hub {name}': functools.partial(keras_hub, name) for name in ('Qwen3', 'Gemma3')}


@pytest.mark.parametrize('library', MODELS)
def test_a_decoder_of_a_library_decodes(library):
  model, own = MODELS[library]()
  report = speccascade.check(model)
  assert report.ok, report
  greedy, coupled = (dict(max_new_tokens=NEW, sampler=s, seed=1) for s in (Sampler(0.0), Sampler(coupling='gumbel')))
  pair = [ngram.drafter(model), model]
  drafted = speccascade.decode(methods.speculative(block=3), pair, PROMPTS, batch_size=2, **greedy)
  assert drafted.stats.accepted.sum() > 0
  assert list(map(ended, drafted.tokens)) == list(map(ended, own()))
  alone = speccascade.decode(methods.autoregressive(), [model], PROMPTS, **coupled)
  assert speccascade.decode(methods.speculative(block=3), pair, PROMPTS, **coupled).tokens == alone.tokens


def test_a_decoder_of_tunix_that_reads_no_windows_is_refused():
  pytest.importorskip('tunix', reason='needs google-tunix')
  from flax import nnx
  from tunix.models.gemma4 import model as of

  config = of.ModelConfig(num_layers=2, num_embed=VOCAB, sliding_window_size=8, **SMALL)
  with pytest.raises(ValueError, match=having('Gemma4', 'window')):
    by_row.tunix(of.Gemma4(config, rngs=nnx.Rngs(0)))


class Rollouts:
  """A small Qwen 3 of Tunix, and what its rollouts are asked for."""

  def __init__(self):
    pytest.importorskip('tunix', reason='needs google-tunix')
    from flax import nnx
    from tunix.models.qwen3 import model as of
    from tunix.rl.rollout import base_rollout

    from speccascade.integrations import tunix

    sizes = dict(vocab_size=VOCAB, rope_theta=10_000, norm_eps=1e-6, **SMALL)
    made = lambda seed, layers=2: of.Qwen3(of.ModelConfig(num_layers=layers, **sizes), rngs=nnx.Rngs(seed))
    self.made = made
    self.module, self.nnx, self.Rollout = self.made(0), nnx, tunix.Rollout
    self.config = functools.partial(
      base_rollout.RolloutConfig,
      max_tokens_to_generate=NEW,
      max_prompt_length=8,
      temperature=0.7,
      seed=jax.random.key(3),
      return_logprobs=True,
    )

  def generate(self, rollout, prompts, **changes):
    return rollout.generate(prompts, self.config(**changes))


@pytest.fixture(scope='module')
def rollouts():
  return Rollouts()


def same(a, b) -> bool:
  return [x.tolist() for x in a.tokens] == [x.tolist() for x in b.tokens] and a.text == b.text


def test_a_rollout_has_the_trainer_s_log_probabilities(rollouts):
  rollout = rollouts.Rollout(rollouts.module, Numbers())
  out = rollouts.generate(rollout, [TEXTS[0], TEXTS[1], TEXTS[0]])
  prompts = out.left_padded_prompt_tokens
  assert prompts.shape == (3, 8) and prompts[1].tolist() == [PAD] * 6 + PROMPTS[1]
  assert out.tokens[0].tolist() != out.tokens[2].tolist()
  padded = np.array([[*row, *[PAD] * (NEW - len(row))] for row in out.tokens])
  theirs = np.asarray(rollout.get_per_token_logps(jnp.asarray(prompts), jnp.asarray(padded)))
  for row, tokens, mine in zip(theirs, out.tokens, out.logprobs, strict=True):
    assert EOS not in tokens
    np.testing.assert_allclose(mine, row[: len(tokens)], atol=1e-5)


def test_a_text_of_a_rollout_depends_on_its_prompt_and_the_seed(rollouts):
  plain = rollouts.generate(rollouts.Rollout(rollouts.module, Numbers()), TEXTS + TEXTS[:1])
  others = {'block': 2}, {'memory': 64}, {'drafter': rollouts.made(1)}
  for how in others:
    rollout = rollouts.Rollout(rollouts.module, Numbers(), **how)
    assert same(rollouts.generate(rollout, TEXTS + TEXTS[:1]), plain)
    assert same(rollouts.generate(rollout, TEXTS + TEXTS[:1]), plain)  # now with a memory of it
    alone = rollouts.generate(rollout, [TEXTS[2]])
    assert alone.tokens[0].tolist() == plain.tokens[2].tolist()
  key = rollouts.generate(rollout, TEXTS, seed=jax.random.PRNGKey(3))
  assert same(key, rollouts.generate(rollout, TEXTS))
  unseeded = [rollouts.generate(rollout, TEXTS, seed=None) for _ in range(2)]
  assert not same(*unseeded)


def test_numbers_of_a_rollout_have_the_meanings_of_tunix(rollouts):
  rollout = rollouts.Rollout(rollouts.module, Numbers())
  plain = rollouts.generate(rollout, TEXTS)
  assert all(same(rollouts.generate(rollout, TEXTS, top_k=off), plain) for off in (-1, 0))
  greedy = rollouts.generate(rollout, TEXTS, top_k=1)
  assert same(greedy, rollouts.generate(rollout, TEXTS, temperature=0.0)) and not same(greedy, plain)
  stop = int(plain.tokens[0][2])
  stopped = rollouts.generate(rollout, TEXTS, eos_tokens=[stop])
  assert stopped.tokens[0].tolist() == plain.tokens[0][: plain.tokens[0].tolist().index(stop)].tolist()
  assert len(stopped.logprobs[0]) == len(stopped.tokens[0])
  assert rollouts.generate(rollout, TEXTS, return_logprobs=False).logprobs is None
  with pytest.raises(ValueError, match=having('top_p=None', 'temperature=0')):
    rollouts.generate(rollout, TEXTS, top_p=None)
  with pytest.raises(ValueError, match=having('9 tokens', 'max_prompt_tokens')):
    rollouts.generate(rollout, [Numbers().decode([5] * 9)])
  with pytest.raises(ValueError, match=having('memory=9', 'drafter')):
    rollouts.Rollout(rollouts.module, Numbers(), drafter=rollouts.module, memory=9)


def test_weights_are_replaced_as_tests_of_tunix_replace_them(rollouts):
  """Those of tests/generate/sampler_test.py: all or a kind of them, in another dtype, and of another module."""
  nnx, new = rollouts.nnx, rollouts.made(1)
  expected = rollouts.generate(rollouts.Rollout(new, Numbers()), TEXTS)
  short = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(new, nnx.Param))
  for params, kinds in ((nnx.state(new), None), (nnx.state(new, nnx.Param), (nnx.Param,)), (short, (nnx.Param,))):
    rollout = rollouts.Rollout(rollouts.made(0), Numbers())
    before = rollouts.generate(rollout, TEXTS)
    rollout.update_params(params, kinds)
    after = rollouts.generate(rollout, TEXTS)
    assert not same(before, after)
    if params is not short:
      assert same(after, expected)
    assert {x.dtype for x in jax.tree.leaves(nnx.state(rollout.model(), nnx.Param))} == {jnp.dtype('float32')}
  more = rollouts.made(1, layers=3)
  with pytest.raises(ValueError, match=having('Qwen3', 'layers.2')):
    rollout.update_params(nnx.state(more, nnx.Param), (nnx.Param,))


def test_three_steps_of_grpo_compile_nothing_after_the_first_rollout(rollouts):
  import optax
  from tunix.rl import rl_cluster
  from tunix.rl.grpo import grpo_learner

  compiled, weights = [], []

  class Watched(rollouts.Rollout):
    def generate(self, prompts, config):
      before = len(COMPILED)
      out = super().generate(prompts, config)
      compiled.append(len(COMPILED) - before)
      weights.append(
        sum(float(jnp.abs(x).sum()) for x in jax.tree.leaves(rollouts.nnx.state(self.model(), rollouts.nnx.Param)))
      )
      return out

  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ('fsdp', 'tp'))
  role = rl_cluster.Role
  training = rl_cluster.RLTrainingConfig(actor_optimizer=optax.sgd(0.1), eval_every_n_steps=10, max_steps=3)
  cluster = rl_cluster.RLCluster(
    actor=rollouts.made(0),
    reference=rollouts.made(0),
    tokenizer=Numbers(),
    cluster_config=rl_cluster.ClusterConfig(
      role_to_mesh=dict.fromkeys((role.ACTOR, role.REFERENCE, role.ROLLOUT), mesh),
      rollout_engine=functools.partial(Watched, memory=64),
      offload_to_cpu=False,
      training_config=training,
      rollout_config=rollouts.config(seed=None),
    ),
  )
  learner = grpo_learner.GRPOLearner(
    rl_cluster=cluster,
    reward_fns=lambda prompts, completions, **_: [float(len({*text.split()})) for text in completions],
    algo_config=grpo_learner.GRPOConfig(num_generations=4, num_iterations=1),
  )
  learner.train([{'prompts': np.array(TEXTS[:2])}] * 3)
  assert compiled[0] and compiled[1:] == [0, 0], compiled
  assert len({*weights}) == 3  # the trainer's, live
