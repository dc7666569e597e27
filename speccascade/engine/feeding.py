"""What a phase does to a model and to the window: feed tokens, store logits, draw tokens, commit them.

To feed a model is to write tokens into its cache and to compute the logits after each. Where a phase stores those
logits is its own choice: the slot of the window is either the same in all rows, or differs by row. A phase of one's own
is made of these functions, as those of `engine.phases` are.

Axis letters: B batch, L new tokens, W window of pending tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
import functools

import jax
from jax import lax
import jax.numpy as jnp

from speccascade.backends import ops
from speccascade.backends.ops import take, with_column
from speccascade.engine.state import Commit, Context, sampler_for_window, State
from speccascade.models.packing import Packing
from speccascade.stopping import Draft
from speccascade.types import Array, DRAFT, iota, Window


def feed(
  context: Context,
  state: State,
  m: int,
  width: int,
  need: Array,
  packing: Sequence[Packing] = (),
) -> tuple[State, Array]:
  """Feed model m the next `need` [B] tokens of each row; return the state, and logits [B, width, V] after each token.

  Rows are padded to `width` tokens, at least as many as any needs; where there is a packing, by it.
  """
  position = state.fed[:, m][:, None] + iota(width)
  state, logits = read(context, state, m, state.tokens, width, need, packing)
  logits = process(context, state, logits, position, state.tokens[:, None])
  return state, context.backend.layout.as_head(logits, m)


def read(
  context: Context, state: State, m: int, tokens: Array, width: int, need: Array, packing: Sequence[Packing] = ()
) -> tuple[State, Array]:
  """Feed model m as `feed` does, of tokens [B, T]; return the state, and logits as the model has them."""
  # Slot = absolute position, so a model goes on where it stopped. What padding writes beyond a row's need lies beyond
  # `fed`, and is written again before any query sees it.
  position = state.fed[:, m][:, None] + iota(width)
  c = context.cache_of[m]
  fed, beside = state.window.leaves.beside(m, state.length, take(tokens, position), position)
  with jax.named_scope(f'feed_{m}'):
    logits, cache = context.extend[m](state.caches[c], *fed, *packing, **beside)
  for packed in packing:
    logits = packed.unpack(logits)
  # Embeddings may be padded beyond the vocabulary that the models share.
  logits = context.backend.layout.as_head(logits, m)[..., : state.window.vocab]
  logits = filled(context.lacks[m], logits.astype(jnp.float32))
  state, logits = state.window.leaves.after(context, state, m, logits)
  state = state.replace(
    fed=with_column(state.fed, m, state.fed[:, m] + need),
    caches=state.caches[:c] + (cache,) + state.caches[c + 1 :],
  )
  return state, context.backend.layout.as_head(logits, m)


def _store_logits(context: Context, state: State, m: int, write: Callable[[Array], Array]) -> State:
  """Write into the window's logits of model m, where a later phase reads them."""
  w = state.window
  if w.logits[m] is None:
    return state
  logits = context.backend.layout.as_head(write(w.logits[m]), m)
  return state.replace(window=w.replace(logits=w.logits[:m] + (logits,) + w.logits[m + 1 :]))


def store_from_slot(context: Context, state: State, m: int, logits: Array, slot: Array | int) -> State:
  """Store logits [B, L, V] from a slot on that is the same in every row; slots beyond a row's tokens are undefined."""
  return _store_logits(context, state, m, lambda old: lax.dynamic_update_slice_in_dim(old, logits, slot, 1))


def store_by_row(context: Context, state: State, m: int, logits: Array, first: Array, need: Array) -> State:
  """Store the first `need` [B] of logits [B, L, V] from slot `first` [B] on, which may be before the window."""
  width = logits.shape[1]
  if width == 1:
    return _store_logits(context, state, m, lambda old: ops.put(old, first, logits[:, 0], (need > 0) & (first >= 0)))

  def write(old):
    j = iota(old.shape[1]) - first[:, None]
    fresh = (j >= 0) & (j < need[:, None])
    return jnp.where(fresh[..., None], take(logits, jnp.clip(j, 0, width - 1)), old)

  return _store_logits(context, state, m, write)


def draw(
  context: Context, state: State, m: int, logits: Array, going: Array, slot: Array | int | None = None
) -> tuple[Array, State]:
  """Draw a token of model m in each row that is going and does not stop before it; it becomes pending.

  Args:
    context: What is fixed while decoding.
    state: The state.
    m: The slot of the model.
    logits: Its logits [B, V] after the last pending token.
    going: Which rows draw [B].
    slot: The slot of the token where it is the same in all rows that are going; None: the end of each row's window.

  Returns:
    The rows that may draw another token after it [B], and the state.
  """
  w = state.window
  end = state.length + w.size
  logits = context.masked(m, logits)
  sampler = sampler_for_window(state).at(w.size)
  going = going & (end < state.limit) & finite(logits) & ~context.policy.before(logits, sampler)
  q = context.backend.layout.as_head(sampler(logits), m)
  token, noise = state.noise.draw(q, end, DRAFT, state.length)
  order = functools.partial(state.noise.order, sampler.penalised(logits), q, end)

  def write(x, new):
    if slot is None:
      return ops.put(x, w.size, new, going)
    return lax.dynamic_update_slice_in_dim(x, new[:, None], slot, 1)  # undefined in rows that are not going

  state = state.replace(
    tokens=ops.put(state.tokens, end, token, going),
    window=w.replace(
      size=w.size + going.astype(jnp.int32),
      probs=None if w.probs is None else write(w.probs, q),
      source=write(w.source, jnp.full_like(end, m)),
      leaves=w.leaves.drawn(order, token, write),
    ),
    noise=noise,
  )
  stops = context.policy.ends(state.policy, Draft(logits, q, token, end, sampler, state.noise))
  return going & ~(stops | is_end(context, state, token) | (end + 1 >= state.limit)), state


def commit(context: Context, state: State, c: Commit, *, keep: bool = False) -> State:
  """Append the accepted tokens and the one more; end rows at EOS and at their limit; record what was committed.

  Args:
    context: What is fixed while decoding.
    state: The state.
    c: Which tokens are committed.
    keep: Whether pending tokens after them stay pending, in rows that got no token more.

  Returns:
    The state, in which every model has read no token that is dropped, nor the last that is committed.
  """
  w = state.window
  length = state.length
  width = w.source.shape[1]
  slot = iota(width + 1)
  tokens = ops.put(state.tokens, length + c.accepted, c.token, c.more)
  tokens = c.leaf.put(tokens, length + c.accepted)
  new = take(tokens, length[:, None] + slot)  # [B, W+1]

  # An EOS inside the block ends the row there; so does its limit.
  emitted = c.accepted + c.more.astype(jnp.int32) + c.leaf.count
  ends = is_end(context, state, new) & (slot < emitted[:, None])
  emitted = jnp.where(ends.any(1), ends.argmax(1) + 1, emitted)
  emitted = jnp.minimum(emitted, state.limit - length)
  after = length + emitted

  # Rolling back is lowering `fed`: a slot beyond it is written again before it is seen.
  stay = keep & ~c.more
  right = c.leaf.read((length + c.accepted)[:, None], state.fed.shape[1])
  valid = jnp.minimum(state.fed, jnp.minimum(right, (after - 1)[:, None]))
  valid = jnp.where(stay[:, None], state.fed, valid)
  if keep:
    moved = jax.tree.map(lambda x: take(x, slot[:, : x.shape[1]] + c.accepted[:, None]) if x.ndim > 1 else x, w)
    w = moved.replace(leaves=w.leaves)  # of this round alone
  left = jnp.where(stay, w.size - c.accepted, 0)

  live = state.active & (c.tested > 0)
  done = state.done | ends.any(1) | (after >= state.limit)
  before = state.replace(window=masked_window(context, state.window))
  seen = c.leaf.shown(context, before, c.accepted)
  return state.replace(
    tokens=tokens,
    length=after,
    done=done,
    active=state.active & ~done,  # for the phases of the round that follow
    fed=jnp.where(state.active[:, None], valid, state.fed),
    window=w.replace(size=jnp.where(state.active, left, w.size)),
    policy=context.policy.learn(before, jnp.minimum(c.tested, c.accepted + 1), c.accepted, live, width),
    records={name: record.after(seen, c, new, emitted) for name, record in state.records.items()},
  )


def drawn_window(state: State) -> Window:
  """Return the window with the distribution that each pending token was drawn from; the greedy one is one-hot."""
  w = state.window
  if w.probs is not None:
    return w
  pending = take(state.tokens, state.length[:, None] + iota(w.source.shape[1]))
  return w.replace(probs=jax.nn.one_hot(pending, w.vocab, dtype=jnp.float32))


def filled(lacks: Array | None, logits: Array) -> Array:
  """Return logits [B, L, V], those of tokens that the model lacks its lowest, before the requests change any."""
  if lacks is None:
    return logits
  lowest = jnp.min(jnp.where(lacks, jnp.inf, logits), -1, keepdims=True)
  return jnp.where(lacks, lowest, logits)


def process(context: Context, state: State, logits: Array, position: Array, tokens: Array) -> Array:
  """Return the logits [B, L, V] of the tokens after `position` [B, L] as the requests want every model's.

  What stands up to `position` is in `tokens` [B, 1 or L, T]. Where the requests leave no distribution, NaN marks logits
  that made none before, and an infinity what the request made.
  """
  limits = state.limits
  if limits.bias is None and limits.least is None and context.processor is None:
    return logits
  own = finite(logits)[..., None]
  if limits.bias is not None:
    logits = logits + limits.bias[:, None]
  if limits.least is not None:
    early = (position + 1 < limits.least[:, None])[..., None]
    vocab = jnp.broadcast_to(iota(logits.shape[-1]), (logits.shape[0], logits.shape[-1]))
    logits = jnp.where(early & is_end(context, state, vocab)[:, None], -jnp.inf, logits)
  if context.processor is not None:
    tokens = jnp.broadcast_to(tokens, (*position.shape, tokens.shape[2]))
    logits = jax.vmap(jax.vmap(context.processor))(logits, tokens, position + 1).astype(jnp.float32)
  return jnp.where(own, jnp.where(jnp.isnan(logits), jnp.inf, logits), jnp.nan)


def finite(logits: Array) -> Array:
  """Return [...]: whether the largest of logits [..., V] is finite: none is NaN or +inf, nor all -inf."""
  return jnp.isfinite(logits.max(-1))


def is_end(context: Context, state: State, tokens: Array) -> Array:
  """Return which of the tokens [B, ...] end their row: EOS, and what its request stops at."""
  ends = functools.reduce(jnp.logical_or, [tokens == i for i in context.eos_ids], jnp.zeros(tokens.shape, bool))
  stops = state.limits.stop_ids
  for k in range(stops.shape[1]):
    ends = ends | (tokens == stops[:, k].reshape((-1,) + (1,) * (tokens.ndim - 1)))
  return ends


def masked_window(context: Context, window: Window) -> Window:
  """Return a window of which every model's logits are those of its distribution."""
  return window.replace(logits=tuple(context.masked(m, x) for m, x in enumerate(window.logits)))
