"""Speculative decoding and speculative cascades in one file: the idea of speccascade, with nothing but JAX.

A small model, the drafter, writes γ tokens one by one. A large one, the verifier, reads all γ in a single call, and a
test accepts some of them. Whatever was drafted, the output follows a target distribution π. Write q̃ and p̃ for the
distributions of the drafter and the verifier, at the temperature that is asked for:

* speculative decoding has π = p̃: the text is the verifier's (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192);
* a speculative cascade has π = q̃ where the drafter is good enough, and π = p̃ where a rule defers to the verifier
  (Narasimhan et al. 2024, https://arxiv.org/abs/2405.19261). `opt` is such a rule.

All of it is one jitted `lax.while_loop` over arrays of fixed shape. Four ideas keep it simple:

1. Slot = absolute position. The token at position i is `tokens[i]`, and its key and value are in slot i of each cache.
2. `fed[m]` counts the tokens that model m has read. To make it forget the last ones, lower `fed[m]`: the model goes on
   from there, and overwrites their slots before it looks at them.
3. Pending tokens, drafted but not yet tested, are in `tokens` from `length` on. To accept one is to raise `length`.
4. Random numbers are keyed by row, position and purpose, so that the text of a row does not depend on the other rows.

Read from top to bottom: rules, random choices, a round and its phases, the loop, the model. The code is that of one
row; `vmap` in `decode` adds the others. Given the same parameters and seed, the package emits the same tokens.

Axis letters: L tokens of one call, V vocabulary, T positions of a row, E embedding, H heads, D head dimension.
"""

import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.extend
import jax.numpy as jnp
import numpy as np

VOCAB, EMBED, MLP, HEAD_DIM, NORM_EPS, ROPE_THETA = 64, 32, 48, 8, 1e-6, 1e4
EOS = 1
DRAFTER, VERIFIER = 0, 1  # numbers of the models
DRAFT, ACCEPT, FINAL = 0, 1, 2  # purposes of random numbers


# ---- rules: from two predictions, q of the drafter and p of the verifier, to the target π ----
class Prediction(NamedTuple):
  """What a model predicts of the next token."""

  probs: jax.Array  # [..., V] the distribution that is sampled from: q̃ or p̃
  confidence: jax.Array  # [...] the largest probability at temperature 1, whatever the temperature of `probs`


def predict(logits, temperature):
  """Return the prediction of logits [..., V]. At temperature 0 `probs` is one-hot, so no other code knows of it."""
  greedy = jax.nn.one_hot(logits.argmax(-1), VOCAB)
  sampled = jax.nn.softmax(logits / jnp.where(temperature > 0, temperature, 1))
  return Prediction(jnp.where(temperature > 0, sampled, greedy), jax.nn.softmax(logits).max(-1))


def speculative(q, p):
  """Follow the verifier: π = p̃."""
  return p.probs


def opt(q, p, *, alpha):
  """Defer to the verifier where it is more confident by over α times the probability of a rejection."""
  rejection = jnp.maximum(q.probs - p.probs, 0).sum(-1)  # [...] the total variation distance of q̃ and p̃
  defer = q.confidence < p.confidence - alpha * rejection  # [...]
  return jnp.where(defer[..., None], p.probs, q.probs)


# ---- random choices ----
def uniform(key, position, purpose):
  """Return the random number in [0, 1) of a row's key for one position and purpose."""
  count = jnp.stack([3 * position + purpose, 0]).astype(jnp.uint32)
  bits = jax.extend.random.threefry_2x32(tuple(jax.random.key_data(key)), count)[0]
  return (bits >> 8).astype(jnp.float32) * 2.0**-24


def draw(weights, u):
  """Return the token that a random number u selects from weights [V], which need not sum to 1."""
  total = jnp.cumsum(weights)  # the package does the same in two steps where V is over 128
  hit = (total > u * total[-1]) & (weights > 0)
  return jnp.where(hit, jnp.inf, weights).argmax()  # the first hit; the likeliest token if rounding leaves none


# ---- a round: propose, score, verify ----
class State(NamedTuple):
  """What the loop carries, for one row."""

  tokens: jax.Array  # [T] committed tokens (prompt and output), then pending ones
  length: jax.Array  # how many are committed
  fed: jax.Array  # [2] how many each model has read
  caches: tuple  # by model, then by layer: [2, T, H, D] keys and values
  done: jax.Array
  counts: jax.Array  # [3] rounds, drafted tokens that were tested, and of these those accepted


def feed(models, state, m, end, width):
  """Let model m read the tokens before position `end`; return the state, and the logits [width, V] after each."""
  start = state.fed[m]
  # Shapes are fixed: if fewer than `width` tokens are unread, it also reads some from `end` on. `fed` leaves them out.
  tokens = lax.dynamic_slice_in_dim(state.tokens, start, width)
  logits, cache = transformer(models[m], state.caches[m], tokens, start)
  caches = tuple(cache if i == m else other for i, other in enumerate(state.caches))
  return state._replace(fed=state.fed.at[m].set(end), caches=caches), logits


def propose(models, state, key, temperature, n):
  """Draw n tokens from the drafter, one after another; return the state, and the predictions [n, V] of these tokens."""
  q = []
  for j in range(n):
    end = state.length + j
    # At first two tokens may be unread: after a round that accepted all γ drafts, the last of them and the bonus token.
    last = end - state.fed[DRAFTER] - 1
    state, logits = feed(models, state, DRAFTER, end, width=2 if j == 0 else 1)
    q.append(predict(logits[last], temperature))
    token = draw(q[j].probs, uniform(key, end, DRAFT))
    state = state._replace(tokens=state.tokens.at[end].set(token))
  return state, jax.tree.map(lambda *x: jnp.stack(x), *q)


def score(models, state, temperature, gamma):
  """Let the verifier read the last committed token and γ pending ones; return the state and predictions [γ+1, V]."""
  state, logits = feed(models, state, VERIFIER, state.length + gamma, width=gamma + 1)
  return state, predict(logits, temperature)


def verify(state, q, p, rule, key, limit):
  """Test the pending tokens in order; commit those before the first rejection, and one token more."""
  pi = rule(q, p)  # [γ+1, V]
  drafts, slots = len(q.probs), len(pi)  # γ or γ + 1 (see `decode`), and γ + 1
  slot = jnp.arange(slots)
  position = state.length + slot
  q_probs = jnp.pad(q.probs, ((0, slots - drafts), (0, 0)))  # [γ+1, V] q̃, and 0 where nothing was drafted

  # Accept a token x with probability min(1, π(x) / q̃(x)).
  x = state.tokens[position]
  u = jax.vmap(uniform, (None, 0, None))(key, position, ACCEPT)
  passed = (u * q_probs[slot, x] < pi[slot, x]) & (slot < drafts)
  accepted = jnp.cumprod(passed).sum()

  # After a rejection, draw from the residual max(0, π - q̃). If all γ drafts are accepted, draw the bonus token from π,
  # which is the residual where q̃ = 0. If all γ + 1 are, no target is known after them: what is drawn is not committed.
  rest = jnp.maximum(pi[accepted] - q_probs[accepted], 0)
  rest = jnp.where(rest.any(), rest, pi[accepted])  # all 0 only by rounding
  final = draw(rest, uniform(key, state.length + accepted, FINAL))
  tokens = state.tokens.at[state.length + accepted].set(final)

  # Commit up to EOS or the limit.
  emitted = jnp.minimum(accepted + 1, slots)
  ends = (tokens[position] == EOS) & (slot < emitted)
  emitted = jnp.minimum(jnp.where(ends.any(), ends.argmax() + 1, emitted), limit - state.length)
  length = state.length + emitted
  tested = jnp.minimum(jnp.minimum(accepted + 1, drafts), emitted)
  counts = state.counts + jnp.stack([1, tested, jnp.minimum(accepted, emitted)])
  fed = jnp.minimum(state.fed, length - 1)  # forget what was dropped; the last token is read in the next round
  return State(tokens, length, fed, state.caches, ends.any() | (length == limit), counts)


# ---- the loop ----
@functools.partial(jax.jit, static_argnames=('gamma', 'max_new'))
def decode(models, prompts, lengths, rule, *, seed, temperature, gamma, max_new):
  """Continue prompts [rows, S], padded beyond `lengths` [rows]; return the last state of each row."""
  # `rule` is a `jax.tree_util.Partial`, so that its function is static and its α is traced.
  # `opt` reads q in all γ + 1 slots, so the drafter makes one draft more. It is tested too, in place of a bonus token.
  drafts = gamma if rule.func is speculative else gamma + 1

  def one_row(row, prompt, length):
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 0), row)  # 0: the package's default stream
    tokens = jnp.pad(prompt, (0, max_new + gamma + 1))  # [T]
    entry = jnp.zeros((2, len(tokens), EMBED // HEAD_DIM, HEAD_DIM))  # of one layer
    empty = [[entry for name in params if name.startswith('layers_')] for params in models]
    caches = tuple(transformer(params, cache, prompt, 0)[1] for params, cache in zip(models, empty))
    state = State(tokens, length, jnp.stack([length - 1] * 2), caches, jnp.bool_(False), jnp.zeros(3, jnp.int32))

    def one_round(state):
      state, q = propose(models, state, key, temperature, drafts)
      state, p = score(models, state, temperature, gamma)
      return verify(state, q, p, rule, key, length + max_new)

    return lax.while_loop(lambda state: ~state.done, one_round, state)

  return jax.vmap(one_row)(jnp.arange(len(prompts)), prompts, lengths)


# ---- the model: a decoder like Llama's ----
def norm(params, x):
  """Divide x [L, E] by its root mean square."""
  return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + NORM_EPS) * params['scale']


def attention(params, x, cache, start):
  """Write x [L, E] into a layer's cache [2, T, H, D] from slot `start` on, and attend to it up to each position."""
  position = start + jnp.arange(len(x))
  angle = position[:, None, None] * ROPE_THETA ** (-jnp.arange(0, HEAD_DIM, 2) / HEAD_DIM)  # [L, 1, D/2]
  heads = lambda name: (x @ params[name]['kernel']).reshape(len(x), -1, HEAD_DIM)  # [L, H, D]

  def rotated(y):  # each pair (y_i, y_{i + D/2}) by the angle of its position
    a, b = jnp.split(y, 2, -1)
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1)

  new = jnp.stack([rotated(heads('key')), heads('value')])
  cache = lax.dynamic_update_slice_in_dim(cache, new, start, axis=1)
  scores = jnp.einsum('lhd,thd->hlt', rotated(heads('query')), cache[0]) * HEAD_DIM**-0.5
  visible = jnp.arange(scores.shape[-1]) <= position[:, None]  # [L, T]
  weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
  return jnp.einsum('hlt,thd->lhd', weights, cache[1]).reshape(len(x), -1) @ params['out']['kernel'], cache


def transformer(params, cache, tokens, start):
  """Read tokens [L] at positions start, start + 1, …; return the logits [L, V] after each, and the cache."""
  x = params['token_embedder']['embedding'][tokens]  # [L, E]
  cache = list(cache)
  for i in range(len(cache)):
    layer = params[f'layers_{i}']
    y, cache[i] = attention(layer['attention'], norm(layer['pre_attention_layer_norm'], x), cache[i], start)
    x = x + y
    y = norm(layer['pre_mlp_layer_norm'], x)
    gate, up, down = (layer['mlp'][name]['kernel'] for name in ('wi_0', 'wi_1', 'wo'))
    x = x + (jax.nn.silu(y @ gate) * (y @ up)) @ down
  return norm(params['final_norm'], x) @ params['logits_dense']['kernel'], cache


def random_params(seed, layers):
  """Return random parameters, named as in the package."""
  keys = iter(jax.random.split(jax.random.key(seed), 7 * layers + 2))
  dense = lambda n, m: {'kernel': jax.random.normal(next(keys), (n, m)) * n**-0.5}
  one = {'scale': jnp.ones(EMBED)}
  params = {'final_norm': {'scale': jnp.full(EMBED, 3.0)}, 'logits_dense': dense(EMBED, VOCAB)}  # 3: sharp predictions
  params['token_embedder'] = {'embedding': jax.random.normal(next(keys), (VOCAB, EMBED)) * 2}
  for i in range(layers):
    attend = {name: dense(EMBED, EMBED) for name in ('query', 'key', 'value', 'out')}
    mlp = {'wi_0': dense(EMBED, MLP), 'wi_1': dense(EMBED, MLP), 'wo': dense(MLP, EMBED)}
    norms = {'pre_attention_layer_norm': one, 'pre_mlp_layer_norm': one}
    params[f'layers_{i}'] = norms | {'attention': attend, 'mlp': mlp}
  return params


def main():
  """Print how two rules continue three prompts, greedily and sampled."""
  verifier = random_params(seed=0, layers=2)
  drafter = {name: x for name, x in verifier.items() if name != 'layers_1'}  # the verifier without its second layer
  prompts, lengths = np.array([[5, 6, 7, 8], [9, 0, 0, 0], [3, 2, 0, 0]]), np.array([4, 1, 2])
  for rule in (jax.tree_util.Partial(speculative), jax.tree_util.Partial(opt, alpha=0.1)):
    for temperature in (0.0, 1.0):
      print(f'\n{rule.func.__name__} at temperature {temperature:g}')
      state = decode((drafter, verifier), prompts, lengths, rule, seed=0, temperature=temperature, gamma=4, max_new=20)
      for tokens, start, end, counts in zip(*map(np.asarray, (state.tokens, lengths, state.length, state.counts))):
        print(f'  {tokens[:start]} → {tokens[start:end]}')
        print(f'    {end - start} tokens in {counts[0]} rounds, {counts[2]} of {counts[1]} drafted tokens accepted')


if __name__ == '__main__':
  main()
