"""Heads that read hidden states: the published forward passes and formats, and texts that are the verifier's."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
from matching import having
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiers import long_but
import tiny

import speccascade
from speccascade import acceptance, drafters, methods, Request, rules, Sampler
from speccascade.checkpoints import hf
from speccascade.drafters.eagle import Eagle, HeadConfig
import speccascade.drafters.medusa
from speccascade.engine.job import DecodeJob
from speccascade.models.decoder import DecoderConfig, Span
import speccascade.models.toy

SIZES = dict(hidden_size=8, intermediate_size=12, num_attention_heads=4, num_key_value_heads=2, vocab_size=11)
CONFIG = tiny.LLAMA | SIZES | {'num_hidden_layers': 6, 'tie_word_embeddings': False}
E, H, K, D, F, V, DRAFTED, EPS = 8, 4, 2, 2, 12, 11, 5, 1e-6
PROMPTS = [[1, 2, 3, 4], [5, 6], [3, 4, 5, 6, 7, 8, 9, 1, 2]]
MIMO = CONFIG | {'model_type': 'mimo', 'num_nextn_predict_layers': 1, 'rms_norm_eps': EPS}
OPT = functools.partial(rules.opt, alpha=0.1)


@functools.cache
def verifier():
  return tiny.model_of(CONFIG)


def mimo():
  return tiny.model_of(MIMO)


@functools.partial(jax.jit, static_argnums=0)
def extend(network, params, cache, tokens, positions):
  return network.extend(params, cache, tokens, positions)


@functools.partial(jax.jit, static_argnums=(0, 3))
def prefill(network, params, prompt, slots):
  return network.prefill(params, prompt, slots)


@functools.partial(jax.jit, static_argnums=(0, 3))
def observed_prompt(network, params, prompt, kept):
  return network.observe_prompt(params, prompt, prompt.tokens.shape[1], kept)


def tensors_of(shapes, seed=0):
  rng = np.random.default_rng(seed)
  made = {name: rng.normal(scale=0.5, size=shape).astype(np.float32) for name, shape in shapes.items()}
  return {name: 1 + 0.2 * x if x.ndim == 1 and 'bias' not in name else x for name, x in made.items()}


def layer_shapes(prefix, inside):
  attention = {'q_proj': (H * D, inside), 'k_proj': (K * D, inside), 'v_proj': (K * D, inside), 'o_proj': (E, H * D)}
  mlp = {'gate_proj': (F, E), 'up_proj': (F, E), 'down_proj': (E, F)}
  return {
    **{f'{prefix}self_attn.{name}.weight': shape for name, shape in attention.items()},
    **{f'{prefix}mlp.{name}.weight': shape for name, shape in mlp.items()},
    f'{prefix}post_attention_layernorm.weight': (E,),
  }


def eagle_1(folder):
  tensors = tensors_of({'fc.weight': (E, 2 * E), 'fc.bias': (E,)} | layer_shapes('layers.0.', E))
  return saved(folder, CONFIG | {'num_hidden_layers': 1}, tensors)


def eagle_3(folder, prefix='midlayer.', drafted=DRAFTED, **config):
  norms = {f'{prefix}{name}.weight': (E,) for name in ('hidden_norm', 'input_layernorm')}
  shapes = {'fc.weight': (E, 3 * E), 'norm.weight': (E,), 'lm_head.weight': (drafted, E)}
  tensors = tensors_of(shapes | norms | layer_shapes(prefix, 2 * E))
  if drafted < V:
    ids = np.array([1, 3, 4, 8, 9])
    tensors |= {'d2t': ids - np.arange(drafted), 't2d': np.isin(np.arange(V), ids)}
  own = {'architectures': ['LlamaForCausalLMEagle3'], 'draft_vocab_size': drafted, 'num_hidden_layers': 1}
  return saved(folder, CONFIG | own | config, tensors)


def speculators(folder):
  inner = {'transformer_layer_config': CONFIG, 'speculators_model_type': 'eagle3', 'draft_vocab_size': DRAFTED}
  ids = {'eagle_aux_hidden_state_layer_ids': [1, 3, 5], 'norm_before_residual': True}
  path, tensors, config = eagle_3(folder, 'layers.0.')
  return saved(folder, inner | ids, tensors)[0], tensors, config | ids


def p_eagle(folder, drafted=DRAFTED):
  """Return EAGLE-3's folder with a second layer, an embedding of its own and what stands for a mask's features."""
  _, tensors, config = eagle_3(folder, 'layers.0.', drafted)
  more = layer_shapes('layers.1.', E) | {'layers.1.input_layernorm.weight': (E,), 'mask_hidden': (1, 1, 3 * E)}
  tensors |= tensors_of(more | {'embed_tokens.weight': (V, E)}, seed=1)
  own = {'architectures': ['PEagleDraftModel'], 'num_hidden_layers': 2, 'mask_token_id': 10}
  return saved(folder, config | own, tensors)


def medusa(folder, scores=True, depth=2):
  shapes = {}
  for k in range(3):
    for j in range(depth):
      shapes |= {f'{k}.{j}.linear.weight': (E, E), f'{k}.{j}.linear.bias': (E,)}
    shapes |= {f'{k}.{depth}.weight': (V, E)} if scores else {}
  config = {'medusa_num_heads': 2, 'medusa_num_layers': depth, 'base_model_name_or_path': 'verifier'}
  return saved(folder, config, tensors_of(shapes), 'medusa_lm_head.safetensors')


def dspark(folder, layers=2):
  _, tensors, config = dflash(folder, layers)
  tensors |= tensors_of({'markov_head.markov_w1.weight': (V, 3), 'markov_head.markov_w2.weight': (V, 3)}, seed=1)
  own = {'architectures': ['Qwen3DSparkModel'], 'markov_rank': 3, 'enable_confidence_head': True, 'block_size': 4}
  copies = {'embed_tokens.weight': np.zeros((V, E), np.float32), 'confidence_head.proj.weight': np.zeros((1, E + 3))}
  saved(folder, config | own, tensors | copies)
  return folder, tensors, config | own


def dflash(folder, layers=2):
  shapes = {'fc.weight': (E, 2 * E), 'hidden_norm.weight': (E,), 'norm.weight': (E,)}
  for i in range(layers):
    prefix = f'layers.{i}.'
    shapes |= layer_shapes(prefix, E) | {f'{prefix}input_layernorm.weight': (E,)}
    shapes |= {f'{prefix}self_attn.{n}_norm.weight': (D,) for n in 'qk'}
  config = CONFIG | {'model_type': 'qwen3', 'head_dim': D, 'num_hidden_layers': layers, 'rms_norm_eps': EPS}
  config |= {'architectures': ['DFlashDraftModel'], 'block_size': 4}
  config |= {'dflash_config': {'mask_token_id': 10, 'target_layer_ids': [1, 4]}}
  return saved(folder, config, tensors_of(shapes))


def mtp(folder):
  """Return the verifier's folder with a layer of multi-token prediction."""
  prefix = 'model.mtp_layers.0.'
  norms = ('token_layernorm', 'hidden_layernorm', 'input_layernorm', 'final_layernorm')
  biases = {f'{prefix}self_attn.{n}_proj.bias': (size,) for n, size in (('q', H * D), ('k', K * D), ('v', K * D))}
  shapes = {f'{prefix}{name}.weight': (E,) for name in norms} | {f'{prefix}input_proj.weight': (E, 2 * E)}
  tensors = tensors_of(shapes | layer_shapes(prefix, E) | biases)
  own = hf.export(mimo().network, 'mimo', mimo().params)
  return saved(folder, MIMO, tensors | own)[0], {k.removeprefix(prefix): x for k, x in tensors.items()}


def saved(folder, config, tensors, file='model.safetensors'):
  folder.mkdir(exist_ok=True)
  (folder / 'config.json').write_text(json.dumps(config))
  save_file(tensors, folder / file)
  return folder, tensors, config


FORMATS = {
  'EAGLE-1': eagle_1,
  'EAGLE-3': eagle_3,
  'EAGLE-3 of all tokens': functools.partial(eagle_3, drafted=V),
  'EAGLE-3, speculators': speculators,
  'P-EAGLE': p_eagle,
  'DFlash': dflash,
  'DSpark': dspark,
  'Medusa': medusa,
  'Medusa with the scores of the verifier': functools.partial(medusa, scores=False),
}


# ---- the forward passes once more, in numpy ----


def norm(x, scale):
  return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * scale


def silu(x):
  return x / (1 + np.exp(-x))


def rotated(x, positions):
  half = D // 2
  angle = positions[:, None] / CONFIG.get('rope_theta', 1e4) ** (np.arange(half) / half)
  cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
  a, b = x[..., :half], x[..., half:]
  return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(t, prefix, x):
  """Return what causal attention makes of rows 1 … n of a text."""
  n = len(x)
  at = np.arange(1, n + 1)
  projected = {m: x @ t[f'{prefix}self_attn.{m}_proj.weight'].T for m in 'qkv'}
  projected = {m: y + t.get(f'{prefix}self_attn.{m}_proj.bias', 0) for m, y in projected.items()}
  q, k, v = (projected[m].reshape(n, -1, D) for m in 'qkv')
  q, k, v = rotated(q, at), np.repeat(rotated(k, at), H // K, 1), np.repeat(v, H // K, 1)
  scores = np.where(np.tri(n), np.einsum('ihd,jhd->hij', q, k) / np.sqrt(D), -np.inf)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  y = np.einsum('hij,jhd->ihd', weights / weights.sum(-1, keepdims=True), v)
  return y.reshape(n, -1) @ t[f'{prefix}self_attn.o_proj.weight'].T


def mlp(t, prefix, y):
  z = norm(y, t[f'{prefix}post_attention_layernorm.weight'])
  gate, up, down = (t[f'{prefix}mlp.{name}_proj.weight'] for name in ('gate', 'up', 'down'))
  return y + (silu(z @ gate.T) * (z @ up.T)) @ down.T


def states(tokens, model=None):
  """Return the embeddings, what enters each layer and what the head reads, and the head's kernel."""
  model = model or verifier()
  network, params = model.network, model.params
  text = speccascade.types.Prompt(jnp.array([tokens]), jnp.array([len(tokens)]))
  kept = (0, *range(1, 7), -1)
  _, found = observed_prompt(network, params, text, kept)
  found = np.asarray(found[0], np.float64).reshape(len(tokens), len(kept), E)
  return found[:, 0], found[:, :7], found[:, -1], np.asarray(params['logits_dense']['kernel'], np.float64)


def chain(name, t, config, tokens, drafts):
  """Return the logits [drafts, V] of a head that drafts greedily after a text, as its authors' code has them."""
  t = {k: np.float64(x) for k, x in t.items()}
  embedded, entering, normed, kernel = states(tokens)
  table = np.asarray(verifier().params['token_embedder']['embedding'], np.float64)
  prefix = 'midlayer.' if any(k.startswith('midlayer') for k in t) else 'layers.0.'
  if name == 'EAGLE-1':
    features = list(normed[:-1])
  else:
    kept = config.get('eagle_aux_hidden_state_layer_ids', [2, 3, 3])  # the default of a depth of 6
    features = list(np.concatenate([entering[:-1, j] for j in kept], -1) @ t['fc.weight'].T)
  e, out = list(embedded[1:]), []
  for _ in range(drafts):
    x, g = np.array(e), np.array(features)
    if name == 'EAGLE-1':
      x = np.concatenate([x, g], -1) @ t['fc.weight'].T + t['fc.bias']
      y = mlp(t, prefix, x + attention(t, prefix, x))
      logits = y[-1] @ kernel
    else:
      tokens_normed, hidden_normed = (
        norm(z, t[f'{prefix}{n}.weight']) for z, n in ((x, 'input_layernorm'), (g, 'hidden_norm'))
      )
      added = hidden_normed if config.get('norm_before_residual') else g
      y = mlp(t, prefix, added + attention(t, prefix, np.concatenate([tokens_normed, hidden_normed], -1)))
      short = norm(y[-1], t['norm.weight']) @ t['lm_head.weight'].T
      logits = np.full(V, -np.inf)
      logits[np.arange(len(short)) + np.asarray(t.get('d2t', np.zeros(len(short))), int)] = short
    out.append(logits)
    features.append(y[-1])
    e.append(table[logits.argmax()])
  return np.array(out)


def behind_masks(t, tokens, drafts):
  """Return the logits [drafts, V] of P-EAGLE after a text."""
  t = {k: np.float64(x) for k, x in t.items()}
  entering = states(tokens)[1]
  read = np.concatenate([entering[:-1, j] for j in (2, 3, 3)], -1)
  g = np.concatenate([read, *[t['mask_hidden'][0]] * (drafts - 1)]) @ t['fc.weight'].T
  e = t['embed_tokens.weight'][[*tokens[1:], *[10] * (drafts - 1)]]
  both = norm(e, t['layers.0.input_layernorm.weight']), norm(g, t['layers.0.hidden_norm.weight'])
  y = mlp(t, 'layers.0.', g + attention(t, 'layers.0.', np.concatenate(both, -1)))
  y = mlp(t, 'layers.1.', y + attention(t, 'layers.1.', norm(y, t['layers.1.input_layernorm.weight'])))
  logits = np.full((drafts, V), -np.inf)
  logits[:, np.arange(DRAFTED) + t['d2t'].astype(int)] = norm(y[-drafts:], t['norm.weight']) @ t['lm_head.weight'].T
  return logits


def mtp_chain(t, tokens, drafts):
  """Return the same of a layer of multi-token prediction."""
  t = {k: np.float64(x) for k, x in t.items()}
  embedded, entering, _, kernel = states(tokens, mimo())
  table = np.asarray(mimo().params['token_embedder']['embedding'], np.float64)
  features, e, out = list(entering[:-1, 6]), list(embedded[1:]), []
  for _ in range(drafts):
    parts = norm(np.array(features), t['hidden_layernorm.weight']), norm(np.array(e), t['token_layernorm.weight'])
    x = np.concatenate(parts, -1) @ t['input_proj.weight'].T
    y = mlp(t, '', x + attention(t, '', norm(x, t['input_layernorm.weight'])))
    out.append(norm(y[-1], t['final_layernorm.weight']) @ kernel)
    features.append(y[-1])
    e.append(table[out[-1].argmax()])
  return np.array(out)


def filled(t, tokens):
  """Return the logits [4, V] of a block after a text, of DFlash and DSpark."""
  t = {k: np.float64(x) for k, x in t.items()}
  _, entering, _, kernel = states(tokens)
  table = np.asarray(verifier().params['token_embedder']['embedding'], np.float64)
  n = len(tokens)
  context = norm(np.concatenate([entering[: n - 1, j] for j in (2, 5)], -1) @ t['fc.weight'].T, t['hidden_norm.weight'])
  x = table[[tokens[-1], 10, 10, 10]]
  at = np.arange(n + 3)
  for i in range(2):
    p = f'layers.{i}.'
    inside = norm(x, t[f'{p}input_layernorm.weight'])
    every = np.concatenate([context, inside])
    q, k, v = (z @ t[f'{p}self_attn.{m}_proj.weight'].T for m, z in (('q', inside), ('k', every), ('v', every)))
    q, k, v = (z.reshape(len(z), -1, D) for z in (q, k, v))
    q = rotated(norm(q, t[f'{p}self_attn.q_norm.weight']), at[n - 1 :])
    k = rotated(norm(k, t[f'{p}self_attn.k_norm.weight']), at)
    k, v = np.repeat(k, H // K, 1), np.repeat(v, H // K, 1)
    scores = np.einsum('ihd,jhd->hij', q, k) / np.sqrt(D)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    y = np.einsum('hij,jhd->ihd', weights / weights.sum(-1, keepdims=True), v).reshape(4, -1)
    x = mlp(t, p, x + y @ t[f'{p}self_attn.o_proj.weight'].T)
  return norm(x, t['norm.weight']) @ kernel


def of_medusa(t, config, tokens):
  t = {k: np.float64(x) for k, x in t.items()}
  _, _, normed, kernel = states(tokens)
  depth, out = config['medusa_num_layers'], []
  for k in range(3):
    z = normed[-2]
    for j in range(depth):
      z = z + silu(z @ t[f'{k}.{j}.linear.weight'].T + t[f'{k}.{j}.linear.bias'])
    out.append(z @ t[f'{k}.{depth}.weight'].T if f'{k}.{depth}.weight' in t else z @ kernel)
  return np.array(out)


def drafted(head, prompt, text, count, large=None):
  """Return the greedy draft [count, V] of a head after a prompt and a text that was verified, fed in uneven parts."""
  drafter, large = drafters.beside(head, large or verifier())
  params = drafter.params
  pair, observed = drafter.network, large.network
  tokens = np.array([*prompt, *text])
  cache = prefill(observed, params, speccascade.types.Prompt(jnp.array([prompt]), jnp.array([len(prompt)])), 48)
  at, fed = len(prompt) - 1, len(prompt) - 1

  def feed(network, cache, some, start):
    positions = start + jnp.arange(len(some))[None]
    return extend(network, params, cache, jnp.array([some]), positions)

  for step in (1, 3, 2, 4):  # the verifier reads what it has accepted, and more that is dropped
    end = min(at + step, len(tokens) - 1)
    _, cache = feed(observed, cache, [*tokens[at:end], 7, 7][: max(end - at, 1)], at)
    at = end
    logits, cache = feed(pair, cache, tokens[fed : end + 1], fed)  # which drafts from its own features, too
    _, cache = feed(pair, cache, [9], end + 1)
    fed = end + 1
    if end == len(tokens) - 1:
      break
  out = [np.asarray(logits[0, -1])]
  while len(out) < count:
    logits, cache = feed(pair, cache, [int(out[-1].argmax())], fed)
    out.append(np.asarray(logits[0, -1]))
    fed += 1
  return np.array(out)


@pytest.mark.full
@pytest.mark.parametrize('name', long_but([*FORMATS][:4], ['EAGLE-1', 'EAGLE-3, speculators']))
def test_a_head_drafts_as_its_authors_code_does(tmp_path, name):
  path, tensors, config = FORMATS[name](tmp_path / 'head')
  head = speccascade.load(path)
  prompt, text = [1, 2, 3, 4, 5], [6, 7, 8, 3, 2, 1, 9]
  expected = chain(name, tensors, config, [*prompt, *text], 4)
  found = drafted(head, prompt, text, 4)
  np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
  np.testing.assert_allclose(found[np.isfinite(found)], expected[np.isfinite(expected)], atol=2e-4)


@pytest.mark.full
def test_a_layer_of_multi_token_prediction_is_read_beside_its_model(tmp_path):
  path, tensors = mtp(tmp_path / 'mimo')
  head, large = speccascade.checkpoints.load_all([f'{path}@mtp', path])
  prompt, text = [1, 2, 3, 4, 5], [6, 7, 8, 3, 2, 1, 9]
  np.testing.assert_allclose(drafted(head, prompt, text, 4, large), mtp_chain(tensors, [*prompt, *text], 4), atol=2e-4)
  assert write(methods.speculative(block=3), [head, large]) == write(methods.autoregressive(), [mimo()])
  with pytest.raises(ValueError, match='leave @mtp out'):
    speccascade.load(f'{eagle_1(tmp_path / "head")[0]}@mtp')


@pytest.mark.parametrize('scores', [True, False])
def test_medusa_drafts_as_its_authors_code_does(tmp_path, scores):
  path, tensors, config = medusa(tmp_path / 'head', scores)
  drafter, large = drafters.beside(speccascade.load(path), verifier())
  text = [1, 2, 3, 4, 5, 6]
  prompt = speccascade.types.Prompt(jnp.array([text[:5]]), jnp.array([5]))
  cache = prefill(large.network, drafter.params, prompt, 16)
  _, cache = extend(large.network, drafter.params, cache, jnp.array([text[4:5]]), jnp.array([[4]]))
  mask = drafter.network.mask_token
  tokens = jnp.array([[text[4], text[5], mask, mask, mask]])
  logits, _ = extend(drafter.network, drafter.params, cache, tokens, 4 + jnp.arange(5)[None])
  np.testing.assert_allclose(logits[0, 1:4], of_medusa(tensors, config, text), atol=1e-4)
  assert np.isneginf(logits[0, 4]).all()


@pytest.mark.full
def test_a_block_is_filled_as_its_authors_code_does(tmp_path):
  path, tensors, _ = dflash(tmp_path / 'head')
  drafter, large = drafters.beside(speccascade.load(path), verifier())
  params, pair = drafter.params, drafter.network
  text, mask = [1, 2, 3, 4, 5, 6, 7, 8, 3], drafter.network.mask_token
  cache = prefill(large.network, params, speccascade.types.Prompt(jnp.array([text[:5]]), jnp.array([4])), 24)
  at = lambda start, count: start + jnp.arange(count)[None]
  _, cache = extend(large.network, params, cache, jnp.array([[4, 5, 6, 9]]), at(3, 4))
  first = jnp.array([[4, mask, mask, mask]])
  logits, cache = extend(pair, params, cache, first, at(3, 4))
  np.testing.assert_allclose(logits[0, :3], filled(tensors, text[:4])[1:], atol=2e-4)
  logits, cache = extend(pair, params, cache, jnp.array([[5, 6, mask, mask]]), at(4, 4))
  np.testing.assert_allclose(logits[0, 1:4], filled(tensors, text[:6])[1:], atol=2e-4)
  _, cache = extend(large.network, params, cache, jnp.array([[6, 7, 8, 3]]), at(5, 4))
  logits, cache = extend(pair, params, cache, jnp.array([[7, 8, 3, mask, mask, mask]]), at(6, 6))
  np.testing.assert_allclose(logits[0, 2:5], filled(tensors, text)[1:], atol=2e-4)
  assert np.isneginf(logits[0, 5]).all()


def test_p_eagle_drafts_behind_masks_as_its_authors_code_does(tmp_path):
  path, tensors, config = p_eagle(tmp_path / 'head')
  drafter, large = drafters.beside(speccascade.load(path), verifier())
  params, pair = drafter.params, drafter.network
  text, mask = [1, 2, 3, 4, 5, 6, 7, 8, 3], 10
  at = lambda start, count: start + jnp.arange(count)[None]
  cache = prefill(large.network, params, speccascade.types.Prompt(jnp.array([text[:5]]), jnp.array([4])), 24)
  _, cache = extend(large.network, params, cache, jnp.array([[4, 5, 6, 9]]), at(3, 4))  # of which the last is dropped
  first, cache = extend(pair, params, cache, jnp.array([[4, mask, mask]]), at(3, 3))
  again, cache = extend(pair, params, cache, jnp.array([[5, 6, mask, mask]]), at(4, 4))
  np.testing.assert_allclose(first[0], behind_masks(tensors, text[:4], 3), atol=2e-4)
  np.testing.assert_allclose(again[0, 1:], behind_masks(tensors, text[:6], 3), atol=2e-4)
  for change, message in ({'mask_token_id': None}, "needs 'mask_token_id'"), ({'mask_token_id': 11}, 'is 11'):
    saved(path, config | change, tensors)
    with pytest.raises(ValueError, match=message):
      speccascade.load(path)
  del tensors['mask_hidden']
  saved(path, config, tensors)
  with pytest.raises(ValueError, match='mask_hidden'):
    speccascade.load(path)


@pytest.mark.long
def test_a_markov_head_corrects_each_token_by_the_one_before_it(tmp_path):
  path, tensors, _ = dspark(tmp_path / 'head')
  head, large = speccascade.load(path), verifier()
  method = methods.speculative(block=4, accept=acceptance.everything)  # so that the text is the draft
  texts = [[1, 3, 4, 5, 6, n] for n in range(3, 10)]
  expected, without = [], []
  for text in texts:
    logits, last, row = filled(tensors, text), text[-1], []
    for base in logits:
      more = tensors['markov_head.markov_w1.weight'][last] @ tensors['markov_head.markov_w2.weight'].T
      last = int((base + more).argmax())
      row.append(last)
    expected.append(row[: row.index(2) + 1] if 2 in row else row)  # 2 ends a text
    without.append(logits.argmax(-1).tolist())
  assert expected != without
  found = speccascade.decode(method, [head, large], texts, max_new_tokens=4, sampler=Sampler(temperature=0.0))
  assert found.tokens == expected


def decoded_by(method, some, batch_size=4):
  """Return coupled texts of greedy requests and others, of which two wait for rows that end."""
  requests = [Request(prompt, temperature=t) for prompt in PROMPTS for t in (0.0, 1.0)]
  settings = dict(max_new_tokens=20, sampler=Sampler(coupling='gumbel'), batch_size=batch_size)
  return speccascade.decode(method, some, requests, **settings)


def write(*args):
  return decoded_by(*args).tokens


def normed(folder):
  """Return a folder of speculators' whose head reads its normed results, and normed states, and has biases."""
  path, tensors, config = speculators(folder)
  tensors |= tensors_of({f'fc_norm.{i}.weight': (E,) for i in range(3)} | {'fc.bias': (E,)}, seed=2)
  tensors |= tensors_of(
    {f'layers.0.self_attn.{n}_proj.bias': (s,) for n, s in zip('qkv', (H * D, K * D, K * D))}, seed=3
  )
  inner = CONFIG | {'num_hidden_layers': 1, 'model_type': 'qwen2'}
  config = {'transformer_layer_config': inner, 'speculators_model_type': 'eagle3', 'draft_vocab_size': DRAFTED}
  return saved(folder, config | {'norm_output': True, 'norm_before_residual': True}, tensors)


def mtp_alone(folder):
  return f'{mtp(folder)[0]}@mtp', load_file(folder / 'model.safetensors'), None


WRITTEN = FORMATS | {'EAGLE-3 with norms and biases': normed, 'MTP': mtp_alone}


@pytest.mark.parametrize('dtype', [None, 'bfloat16'])
@pytest.mark.parametrize('name', WRITTEN)
def test_a_head_is_written_as_it_is_published(tmp_path, name, dtype):
  path, tensors, _ = WRITTEN[name](tmp_path / 'head')
  head = speccascade.checkpoints.read(path, dtype=dtype)
  folder = hf.write(tmp_path / 'again', head)
  back = speccascade.checkpoints.read(folder)
  assert back.network == head.network == hf.settled(head.network)
  tiny.assert_equal(back.params, head.params)
  (file,) = folder.glob('*.safetensors')
  published = {k: x for k, x in tensors.items() if not k.startswith(('confidence', 'embed')) or name == 'P-EAGLE'}
  published = {k: x for k, x in published.items() if name != 'MTP' or 'mtp' in k}
  written = {k.replace('midlayer.', 'layers.0.'): x for k, x in load_file(file).items()}
  assert written.keys() == {k.replace('midlayer.', 'layers.0.') for k in published}
  for key, x in published.items() if dtype is None else ():
    np.testing.assert_array_equal(written[key.replace('midlayer.', 'layers.0.')], x)


def test_what_no_published_head_has_is_not_written(tmp_path):
  layer = DecoderConfig(V, E, H, K, D, F, (Span(),))
  for config, parts in (
    (HeadConfig('eagle', dataclasses.replace(layer, gated=False), (-1,)), ('mine', 'gated=False')),
    (HeadConfig('eagle', layer, (-1,), norms_residual=True), ('mine', 'norms_residual=True')),
    (HeadConfig('mtp', dataclasses.replace(layer, spans=(Span(),) * 2), (6,)), ('mine', 'layers_0')),
  ):
    with pytest.raises(ValueError, match=having('cannot be written', *parts)):
      hf.write(tmp_path / 'head', speccascade.types.Model({}, Eagle(config), name='mine'))
  with pytest.raises(ValueError, match=having('mine is a Own')):
    hf.write(tmp_path / 'head', speccascade.types.Model({}, type('Own', (Eagle,), {})(config), name='mine'))
  assert not list(tmp_path.iterdir())


@functools.cache
def own():
  """Return the verifier's own texts."""
  return write(methods.autoregressive(), [verifier()], 6)


@pytest.mark.full
@pytest.mark.parametrize('name', long_but(FORMATS, ['EAGLE-3']))
def test_the_text_is_the_verifiers_also_of_a_head_of_int8(tmp_path, name):
  head = speccascade.load(FORMATS[name](tmp_path / 'head')[0], dtype='int8')
  assert head.digest.endswith('int8') and np.dtype(np.int8) in {x.dtype for x in jax.tree.leaves(head.params)}
  assert write(methods.speculative(block=4), [head, verifier()]) == own()


@pytest.mark.full
def test_a_cascade_may_have_a_head_for_its_drafter(tmp_path):
  small, head = tiny.model_of(CONFIG | {'num_hidden_layers': 2}), speccascade.load(eagle_3(tmp_path / 'head')[0])
  cascade = write(methods.oracle(OPT), [small, verifier()], 6)
  assert write(methods.speculative(OPT, block=3, drafter=2), [small, verifier(), head]) == cascade


def test_hidden_states_are_those_of_torch(tmp_path):
  transformers, torch = pytest.importorskip('transformers'), pytest.importorskip('torch')
  speccascade.checkpoints.hf.write(tmp_path / 'model', verifier())
  theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / 'model', dtype=torch.float32)
  tokens = [1, 2, 3, 4, 5, 6]
  found = theirs(torch.tensor([tokens]), output_hidden_states=True).hidden_states
  _, entering, normed, _ = states(tokens)
  for j in range(6):
    np.testing.assert_allclose(entering[:, j], found[j][0].detach().numpy(), atol=1e-4)
  np.testing.assert_allclose(normed, found[-1][0].detach().numpy(), atol=1e-4)


@pytest.mark.full
def test_a_head_finds_the_feature_of_a_leaf_that_its_verifier_has_not_read_again(tmp_path):
  drafter, large = drafters.beside(speccascade.load(eagle_1(tmp_path / 'head')[0]), verifier())
  prompt = speccascade.types.Prompt(jnp.array([[1, 2, 3, 4, 5]]), jnp.array([5]))
  cache = prefill(large.network, large.params, prompt, 48)
  at = 4 + jnp.arange(4)[None]

  def drafted_after(window, positions, **leaves):
    read = jax.jit(large.network.extend, static_argnames='leaves')
    _, after = read(large.params, cache, jnp.array([window]), positions, **leaves)
    return extend(drafter.network, drafter.params, after, jnp.array([[5, 6, 11, 3]]), at)[0]

  depths = jnp.concatenate([at, jnp.array([[5, 6, 6]])], 1)
  found = drafted_after([5, 6, 7, 8, 11, 9, 11], depths, leaves=3)
  np.testing.assert_allclose(found, drafted_after([5, 6, 11, 8], at), atol=1e-5)


@pytest.mark.long
def test_t5_shows_its_states_to_a_head():
  t5 = tiny.model_of(tiny.T5_V1_1 | {'num_layers': 2})
  size, vocab = t5.network.config.embed_dim, t5.network.vocab_size
  network = speccascade.drafters.medusa.Medusa(speccascade.drafters.medusa.MedusaConfig(size, vocab, 3))
  head = speccascade.types.Model(network.init(jax.random.key(0)), network, name='head')
  assert write(methods.speculative(block=3), [head, t5]) == write(methods.autoregressive(), [t5])


@pytest.mark.full
def test_what_does_not_fit_is_refused(tmp_path):
  head = speccascade.load(eagle_1(tmp_path / 'head')[0])
  other = tiny.model_of(CONFIG | {'hidden_size': 12, 'num_attention_heads': 6, 'num_key_value_heads': 6})
  for given, message in (
    ([head, other], having('8 numbers', '12', 'trained with')),
    ([other, head], having('is a head', 'last model')),
    ([head, dataclasses.replace(other, network=tiny_table())], having('shows no hidden states')),
  ):
    with pytest.raises(ValueError, match=message):
      speccascade.decode(methods.speculative(), given, PROMPTS, max_new_tokens=4)
  with pytest.raises(ValueError, match='drafters.beside'):
    head.network.prefill({}, None, 4)
  with pytest.raises(ValueError, match=having('describes a head (eagle3)', '--head')):
    hf.network_of(eagle_3(tmp_path / 'eagle3')[0] / 'config.json')
  with pytest.raises(ValueError, match='no head'):
    drafters.beside(other, other)
  with pytest.raises(ValueError, match='at most'):
    speccascade.decode(methods.speculative(block=40), [head, verifier()], PROMPTS, max_new_tokens=4)


def test_a_target_reads_a_head_in_lockstep_alone(tmp_path):
  given = [speccascade.load(eagle_1(tmp_path / 'head')[0]), verifier()]
  mean = functools.partial(rules.weighted, weights=(0.5, 0.5))
  for method in (
    methods.cos(mean, (2, 1)),
    methods.ensemble_sd(mean, 2),
    methods.naive_cos(OPT, 2),
    methods.speculative(OPT, 2),
    methods.token_cascade(functools.partial(rules.chow, alpha=0.3)),
  ):
    with pytest.raises(ValueError, match=having('model 0, a head', 'drafter=2')):
      DecodeJob.of_models(method, given)
  for method in (methods.ensemble(mean), methods.oracle(OPT), methods.speculative(block=2), methods.bild()):
    DecodeJob.of_models(method, given)


def tiny_table():
  return speccascade.models.toy.Table(11)


@pytest.mark.parametrize('change', ['missing', 'shape', 'ids', 'other head'])
def test_a_damaged_head_is_named(tmp_path, change):
  path, tensors, config = eagle_3(tmp_path / 'head')
  if change == 'missing':
    del tensors['midlayer.hidden_norm.weight']
  elif change == 'shape':
    tensors['lm_head.weight'] = tensors['lm_head.weight'][:3]
  elif change == 'ids':
    tensors['d2t'] = tensors['d2t'][::-1].copy()
  else:
    config |= {'architectures': ['HydraModel']}
  saved(path, config, tensors)
  message = {'missing': 'hidden_norm', 'shape': 'lm_head', 'ids': 'd2t', 'other head': 'Hydra'}[change]
  with pytest.raises(ValueError, match=message):
    speccascade.load(path)


@pytest.mark.full
def test_a_checkpoint_of_pard_drafts_in_one_pass(tmp_path):
  file = speccascade.checkpoints.hf.write(tmp_path / 'model', tiny.model_of(CONFIG)) / 'config.json'
  config = json.loads(file.read_text())
  file.write_text(json.dumps(config | {'pard_token': 10, 'spd_type': 'pard'}))
  drafter = speccascade.load(file.parent)
  again = speccascade.load(hf.write(tmp_path / 'again', drafter))
  assert drafter.network.mask_token == 10 and again.network == drafter.network
  result = decoded_by(methods.speculative(block=4), [drafter, verifier()])
  assert result.tokens == own()
  assert (result.stats.calls[0] == result.stats.rounds).all()
  tiny.assert_equal(again.params, drafter.params)
  file.write_text(json.dumps(config | {'pard_token': 11}))
  with pytest.raises(ValueError, match="'pard_token' is 11"):
    speccascade.load(file.parent)
