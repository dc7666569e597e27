"""Logits and greedy tokens of tiny random models equal those of transformers, for every family and switch.

A row of the reference runs alone, or with an attention mask for the source of T5; ours run as one ragged batch.
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade.checkpoints import hf
from speccascade.models.layers import relative_bucket, stack_layers
from speccascade.types import Model, Prompt

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

torch.set_num_threads(1)  # tiny models: more threads only wait for each other

TOLERANCE = 1e-4
LENGTHS = np.array([7, 3, 1])  # prompt lengths
NEW = 12  # tokens after them
VOCAB = 67

_ROPE = {'rope_theta': 10000.0, 'original_max_position_embeddings': 8}
_LLAMA3 = {'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0}

_GEMMA2 = hf.FAMILIES['gemma2'].tiny
_GEMMA3 = hf.FAMILIES['gemma3_text'].tiny

# family: {further cases: what differs from its tiny config}
VARIANTS = {
  'llama': {
    'tied_mha': {'num_key_value_heads': 4, 'head_dim': 12, 'tie_word_embeddings': True},
    'mqa_padded_vocabulary': {'num_key_value_heads': 1, 'vocab_size': 128, 'attention_bias': False, 'mlp_bias': False},
    'linear_rope': {'rope_parameters': _ROPE | {'rope_type': 'linear', 'factor': 4.0}},
    'llama3_rope': {'rope_parameters': _ROPE | _LLAMA3},
    'yarn_rope': {'rope_parameters': _ROPE | {'rope_type': 'yarn', 'factor': 8.0}},
  },
  'mistral': {'no_window': {'sliding_window': None}},
  'qwen2': {
    'window': {
      'tie_word_embeddings': False,
      'use_sliding_window': True,
      'sliding_window': 4,
      'max_window_layers': 1,
    },
  },
  'smollm3': {'listed': {'no_rope_layers': [1, 0, 0], 'use_sliding_window': False}},
  'stablelm': {'parallel': {'use_parallel_residual': True}},
  'gpt_neox': {'in_turn': {'use_parallel_residual': False, 'attention_bias': False, 'tie_word_embeddings': True}},
  'mixtral': {'one_expert': {'num_experts_per_tok': 1, 'sliding_window': None}},
  'qwen3_moe': {'not_normalised': {'norm_topk_prob': False, 'use_sliding_window': True, 'sliding_window': 4}},
  'phi3': {'no_window': {'sliding_window': None, 'tie_word_embeddings': True}},
  'starcoder2': {'no_bias': {'use_bias': False, 'sliding_window': None, 'tie_word_embeddings': False}},
  'opt': {
    'post_norm_projected': {'do_layer_norm_before': False, 'word_embed_proj_dim': 32},
    'no_bias': {'enable_bias': False},
  },
  'gpt2': {'untied_unscaled': {'n_inner': 40, 'scale_attn_weights': False, 'tie_word_embeddings': False}},
  't5': {
    'v1_1': {'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False},
    'tied_unscaled': {
      'relative_attention_num_buckets': 8,
      'relative_attention_max_distance': 16,
      'scale_decoder_outputs': False,
    },
  },
  't5gemma': {
    'untied_uneven': {
      'tie_word_embeddings': False,
      'encoder': _GEMMA2 | {'num_hidden_layers': 4, 'sliding_window': 3, 'query_pre_attn_scalar': 16},
      'decoder': _GEMMA2 | {'num_hidden_layers': 2, 'attn_logit_softcapping': None, 'num_key_value_heads': 4},
    },
  },
  't5gemma2': {
    'capped_uneven': {
      'encoder': hf.FAMILIES['t5gemma2'].tiny['encoder'] | {'text_config': _GEMMA3 | {'sliding_window': 3}},
      'decoder': _GEMMA3 | {'num_key_value_heads': 1, 'sliding_window': 6, 'final_logit_softcapping': 3.0},
    },
  },
}
CASES = {name: (family, family.tiny) for name, family in hf.FAMILIES.items() if family.hf} | {
  f'{name}_{variant}': (hf.FAMILIES[name], hf.FAMILIES[name].tiny | changes)
  for name, variants in VARIANTS.items()
  for variant, changes in variants.items()
}


@dataclasses.dataclass(frozen=True)
class Case:
  """A reference, ours, and what to feed them."""

  reference: object
  network: object
  params: object
  tokens: np.ndarray  # [B, S + NEW] the prompt, and right behind it, row by row, the new tokens
  target: np.ndarray  # T5: [B, NEW], from the start token on
  folder: pathlib.Path  # as the reference was saved

  @property
  def prompt(self) -> Prompt:
    width = LENGTHS.max()
    junk = np.where(np.arange(width)[None] < LENGTHS[:, None], self.tokens[:, :width], 5)
    return Prompt(jnp.asarray(junk), jnp.asarray(LENGTHS))

  @property
  def fed(self) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens [B, NEW] that are fed after the prompt, and their positions."""
    if self.network.start_id is not None:
      return self.target, np.broadcast_to(np.arange(NEW)[None], self.target.shape)
    positions = (LENGTHS - 1)[:, None] + np.arange(NEW)[None]
    return np.take_along_axis(self.tokens, positions, axis=1), positions

  @functools.cached_property
  def expected(self) -> np.ndarray:
    """Return the reference's logits after each token that is fed, [B, NEW, V]."""
    rows = []
    for tokens, length in zip(self.tokens, LENGTHS, strict=True):
      with torch.no_grad():
        if self.network.start_id is not None:
          ids = torch.tensor(self.prompt.tokens.tolist())
          mask = torch.arange(ids.shape[1])[None] < torch.tensor(LENGTHS)[:, None]
          logits = self.reference(input_ids=ids, attention_mask=mask, decoder_input_ids=torch.tensor(self.target))
          return logits.logits.numpy()
        logits = self.reference(torch.tensor(tokens[None, : length + NEW])).logits[0].numpy()
      rows.append(logits[length - 1 : length - 1 + NEW])
    return np.stack(rows)

  @functools.cached_property
  def prefill(self):
    return jax.jit(self.network.prefill, static_argnums=2)

  @functools.cached_property
  def extend(self):
    return jax.jit(self.network.extend)


def _randomise(model) -> None:
  """Draw weights that make every part matter: the initial ones leave logits near zero and norms at one."""
  generator = torch.Generator().manual_seed(0)
  for name, p in model.named_parameters():
    noise = torch.randn(p.shape, generator=generator)
    gain = 1.5 if name.endswith(('shared.weight', 'wte.weight', 'embed_tokens.weight')) else 1.0
    p.data = gain * p.shape[-1] ** -0.5 * noise if p.ndim > 1 else p.data + 0.2 * noise


def _reference(name: str):
  family, arguments = CASES[name]
  config = transformers.AutoConfig.for_model(family.model_type, **arguments)
  config._attn_implementation = 'eager'
  model = getattr(transformers, family.hf)(config).eval()
  if name == 't5_v1_1':  # transformers ties it whatever the configuration says
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    model.config.tie_word_embeddings = False
  _randomise(model)
  return model


@pytest.fixture(scope='module', params=list(CASES))
def case(request, tmp_path_factory) -> Case:
  reference = _reference(request.param)
  folder = tmp_path_factory.mktemp(request.param)
  reference.save_pretrained(folder)
  network, params = hf.read(folder)
  random = np.random.default_rng(0)
  tokens = random.integers(3, VOCAB, (len(LENGTHS), LENGTHS.max() + NEW))
  target = random.integers(3, VOCAB, (len(LENGTHS), NEW))
  target[:, 0] = 0
  return Case(reference, network, params, tokens, target, folder)


def _in_windows(case: Case, params, extend, cache, width: int, roll_back: bool = False) -> np.ndarray:
  """Feed everything in windows; with `roll_back`, feed junk there and beyond it first."""
  tokens, positions = case.fed
  logits = []
  for i in range(0, NEW, width):
    at = jnp.asarray(positions[:, i : i + width])
    if roll_back:
      _, cache = extend(params, cache, jnp.full_like(at, 9), at + 1)
      _, cache = extend(params, cache, jnp.full_like(at, 11), at)
    out, cache = extend(params, cache, jnp.asarray(tokens[:, i : i + width]), at)
    logits.append(np.asarray(out))
  return np.concatenate(logits, axis=1)


def test_logits_equal_the_reference_in_one_pass(case):
  cache = case.prefill(case.params, case.prompt, 40)
  logits = _in_windows(case, case.params, case.extend, cache, NEW)
  assert logits.shape == case.expected.shape and logits.dtype == np.float32
  assert case.expected.std() > 0.1  # else agreement means nothing
  np.testing.assert_allclose(logits, case.expected, atol=TOLERANCE, rtol=0)


def test_windows_and_roll_back_change_nothing(case):
  cache = case.prefill(case.params, case.prompt, 40)
  logits = _in_windows(case, case.params, case.extend, cache, 6, roll_back=True)
  np.testing.assert_allclose(logits, case.expected, atol=TOLERANCE, rtol=0)


def test_scanned_layers_equal_the_reference(case):
  network = dataclasses.replace(case.network, scan=True)
  params = stack_layers(case.params)
  cache = jax.jit(network.prefill, static_argnums=2)(params, case.prompt, 40)
  logits = _in_windows(case, params, jax.jit(network.extend), cache, 2)
  np.testing.assert_allclose(logits, case.expected, atol=TOLERANCE, rtol=0)


def test_greedy_tokens_equal_generate(case):
  b = len(LENGTHS)
  cache = case.prefill(case.params, case.prompt, 40)
  start = case.network.start_id
  tokens = case.tokens[np.arange(b), LENGTHS - 1] if start is None else np.full(b, start)
  positions = LENGTHS - 1 if start is None else np.zeros(b, int)
  ours = []
  for step in range(8):
    at = jnp.asarray(positions[:, None] + step)
    logits, cache = case.extend(case.params, cache, jnp.asarray(tokens[:, None]), at)
    tokens = np.asarray(logits[:, 0, 1:].argmax(-1)) + 1  # transformers masks T5Gemma's padding where it has no cache
    ours.append(tokens)
  for row, length in enumerate(LENGTHS):
    prompt = torch.tensor(case.tokens[row : row + 1, :length])
    theirs = case.reference.generate(
      prompt, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=False, suppress_tokens=[0]
    )
    skip = length if start is None else 1
    np.testing.assert_array_equal(np.stack(ours, 1)[row], theirs[0, skip:].numpy())


def test_what_is_written_is_the_reference_again(case, tmp_path):
  folder = hf.write(tmp_path / 'hf', Model(case.params, case.network))
  kind = transformers.AutoModelForCausalLM if case.network.start_id is None else transformers.AutoModelForSeq2SeqLM
  written = kind.from_pretrained(folder, attn_implementation='eager').eval()
  with torch.no_grad():
    theirs = dataclasses.replace(case, reference=written)
    np.testing.assert_allclose(theirs.expected, case.expected, atol=TOLERANCE, rtol=0)


def test_buckets_equal_the_reference():
  attention = transformers.models.t5.modeling_t5.T5Attention
  offsets = np.arange(-600, 601)
  for buckets, distance in ((32, 128), (8, 16), (16, 64), (32, 20)):
    for both in (True, False):
      expected = attention._relative_position_bucket(torch.tensor(offsets), both, buckets, distance).numpy()
      ours = relative_bucket(offsets, bidirectional=both, buckets=buckets, max_distance=distance)
      np.testing.assert_array_equal(ours, expected)
