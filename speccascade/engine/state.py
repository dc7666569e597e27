"""The state of rows before their first round, and which models share a cache.

Axis letters: B batch, M models of a method, W window of pending tokens, V vocabulary, T token buffer.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from speccascade import backends, sampling
from speccascade.engine import requests
from speccascade.types import Array, Limits, Model, NOWHERE, Prompt, State, Stats, Top, Window

PER_MODEL = ('calls', 'positions', 'computed', 'drafted')  # statistics with an axis of models


def first_state(program, method, caches: tuple, rows: requests.Arrays, noise: sampling.Noise | None = None) -> State:
  """Return the state of rows whose prompts are in the caches; noise is keyed unless given."""
  with backends.use(program.backend):
    tokens, length = _opening(program.networks[-1].start_id, rows.prompt, program.buffer)
    if noise is None:
      noise = _keyed(rows.key, program.buffer, method.window + 1 if method.by_round else 1, rows.sampler.greedy)
  count, slots = length.shape[0], len(method.slots)
  numbers = lambda *shape: jnp.zeros(shape, jnp.int32)
  committed = jnp.arange(program.buffer)[None] < length[:, None]
  tally = jnp.zeros((count, program.vocab), bool)
  seen = tally.at[jnp.arange(count)[:, None], tokens].max(committed) if rows.sampler.repeats else None
  least = None if rows.limits.least is None else length + rows.limits.least
  shape = (count, slots, program.buffer)
  return State(
    tokens=tokens,
    length=length,
    limit=length + rows.max_new,
    done=~rows.real,
    active=rows.real,
    fed=jnp.tile(length[:, None] - 1, (1, slots)),
    caches=caches,
    window=_window(program, method, count, rows.sampler.greedy),
    sampler=jax.tree.map(jnp.asarray, rows.sampler),
    limits=jax.tree.map(jnp.asarray, Limits(rows.limits.stop_ids, least, rows.limits.bias)),
    noise=noise,
    policy=method.policy.init(count),
    seen=seen,
    counts=numbers(count, program.vocab) if rows.sampler.counting else None,
    fault=jnp.full((count, slots + 1), -1, jnp.int32),
    no_law=jnp.zeros((count, 2)),
    stats=_no_stats(count, slots, method.window, program.buffer),
    logprobs=jnp.full(shape, jnp.nan) if program.trace else None,
    top=_no_top(count, program.buffer, program.top),
  )


def _window(program, method, count: int, greedy: bool) -> Window:
  width, vocab = method.window, program.vocab
  return Window(
    size=jnp.zeros(count, jnp.int32),
    probs=None if greedy else jnp.zeros((count, width, vocab)),
    source=jnp.zeros((count, width), jnp.int32),
    logits=tuple(jnp.zeros((count, width + 1, vocab)) for _ in method.slots),
  )


def _no_stats(count: int, slots: int, width: int, buffer: int) -> Stats:
  zeros = lambda *shape: jnp.zeros((count, *shape), jnp.int32)
  return Stats(
    **dict.fromkeys(PER_MODEL, zeros(slots)),
    **dict.fromkeys(('rounds', 'tested', 'accepted', 'emitted', 'deferred'), zeros()),
    accepted_lengths=zeros(width + 1),
    verified_lengths=zeros(width + 1),
    tested_at=zeros(width),
    accepted_at=zeros(width),
    source=jnp.full((count, buffer), NOWHERE, jnp.int32),
  )


def _no_top(count: int, buffer: int, top: int) -> Top | None:
  shape = (count, buffer, top)
  return Top(jnp.zeros(shape, jnp.int32), jnp.full(shape, jnp.nan)) if top else None


def _opening(start_id: int | None, prompt: Prompt, buffer: int) -> tuple[Array, Array]:
  """Return the token buffer [B, T] and the committed length: the prompt, or an encoder–decoder's start token."""
  rows, width = prompt.tokens.shape
  if start_id is None:
    return jnp.pad(prompt.tokens, ((0, 0), (0, buffer - width))), jnp.asarray(prompt.length)
  return jnp.full((rows, buffer), start_id, jnp.int32), jnp.ones(rows, jnp.int32)


def _keyed(keys: Array, positions: int, in_block: int, greedy: bool) -> sampling.Keyed:
  """Return the noise of rows keyed by [B, 4]: seed, stream, example and sample."""

  def one(seed, stream, example, sample):
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), example)
    return jnp.where(sample > 0, jax.random.key_data(jax.random.fold_in(key, sample)), jax.random.key_data(key))

  return sampling.Keyed.make(jax.vmap(one)(*jnp.asarray(keys).T), positions, in_block, greedy)


def cache_owners(slots: Sequence[Model]) -> tuple[int, ...]:
  """Return for each slot the slot whose cache it works in: its own, or that of a network that it is a part of."""
  owning = [slot for slot in range(len(slots)) if not shares_any(slots[slot], slots)]
  owners = []
  for i, s in enumerate(slots):
    shares = getattr(s.network, 'shares_cache', None)
    owners.append(next((j for j in owning if shares and shares(s.params, slots[j].network, slots[j].params)), i))
  return tuple(owners)


def shares_any(model: Model, slots: Sequence[Model]) -> bool:
  """Tell whether a model finds its state in the cache of another one."""
  shares = getattr(model.network, 'shares_cache', None)
  return shares is not None and any(shares(model.params, s.network, s.params) for s in slots)
