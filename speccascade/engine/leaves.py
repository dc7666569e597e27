"""Leaves: other choices of the drafter at the places of its draft, scored beside it and kept in no cache.

Where the token that follows a rejection is a leaf, the distribution after it is known, and one token more follows.
`NoLeaves` and `NoHit` stand in rounds without them, and change nothing.

Axis letters: B batch, M models of a method, L leaves, D places of a draft, K choices, W window, V vocabulary,
T token buffer.
"""

from collections.abc import Callable
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from speccascade import rules
from speccascade.backends import ops
from speccascade.backends.ops import take1
from speccascade.engine.feeding import feed, is_end, process, store_by_row
from speccascade.engine.state import Commit, Context, NoHit, NoLeaves, sampler_for_window, State
from speccascade.types import AFTER_LEAF, Array, FINAL, iota, static


@struct.dataclass
class Leaves(NoLeaves):
  """The leaves of a round: at place d there are `counts[d]` choices, the pending token among them.

  Leaf i is at place `depths[i]`, behind the pending tokens before it.
  """

  choices: Array  # [B, D, K] the likeliest at each place, without the pending token
  logits: dict[int, Array]  # {slot: [B, L, V]} next-token logits after each leaf, of the models that score them
  counts: tuple[int, ...] = static()

  @classmethod
  def empty(cls, start: Any, shown: tuple[int, ...], batch: int, vocab: int) -> NoLeaves:
    """Return those of rows that have not begun, as `lowering.Start` says, of the slots whose logits are shown."""
    if not start.leaves:
      return NoLeaves()
    logits = jnp.zeros((batch, sum(n - 1 for n in start.leaves), vocab))
    choices = jnp.zeros((batch, start.window, max(start.leaves) - 1), jnp.int32)
    return cls(choices, {slot: logits for slot in start.leaves_scored if slot in shown}, start.leaves)

  @property
  def depths(self) -> tuple[int, ...]:
    """Return the place of each leaf."""
    return tuple(d for d, count in enumerate(self.counts) for _ in range(count - 1))

  @property
  def tokens(self) -> Array:
    """Return the leaves [B, L]."""
    return jnp.concatenate([self.choices[:, d, : count - 1] for d, count in enumerate(self.counts)], 1)

  def scored_by(self, m: int) -> int:
    return len(self.depths) * (m in self.logits)

  def positions(self, length: Array) -> Array:
    """Return the positions [B, L] of leaves in rows of committed lengths [B]."""
    return length[:, None] + jnp.array(self.depths)[None]

  def beside(self, m: int, length: Array, *fed: Array) -> tuple[list[Array], dict[str, int]]:
    if m not in self.logits:
      return super().beside(m, length, *fed)
    both = zip(fed, (self.tokens, self.positions(length)), strict=True)
    return [jnp.concatenate(x, 1) for x in both], dict(leaves=len(self.depths))

  def after(self, context: Context, state: State, m: int, logits: Array) -> tuple[State, Array]:
    if m not in self.logits:
      return super().after(context, state, m, logits)
    width = logits.shape[1] - len(self.depths)
    at = self.positions(state.length)
    here = iota(state.tokens.shape[1])[None] == at[..., None]
    tokens = jnp.where(here, self.tokens[..., None], state.tokens[:, None])  # [B, L, T]
    found = context.backend.layout.as_head(process(context, state, logits[:, width:], at, tokens), m)
    window = state.window.replace(leaves=self.replace(logits=self.logits | {m: found}))
    return state.replace(window=window), logits[:, :width]

  def drawn(self, order: Callable[[], Array], token: Array, write: Callable[[Array, Array], Array]) -> 'Leaves':
    return self.replace(choices=write(self.choices, others(order(), token, self.choices.shape[2])))

  def specs(self, by_row: 'Leaves', by_vocabulary: Callable[[Array, int], Any]) -> 'Leaves':
    return by_row.replace(logits={slot: by_vocabulary(x, slot) for slot, x in self.logits.items()})

  def go_on(self, test: Any, context: Context, state: State, c: Commit) -> tuple[State, Commit]:
    drafted = state.tokens
    slots = range(state.fed.shape[1])
    end = state.length + c.accepted
    slot = c.accepted + 1
    mine = (self.tokens == c.token[:, None]) & (jnp.array(self.depths)[None] == c.accepted[:, None])  # [B, L]
    goes_on = ~is_end(context, state, c.token) & (end + 1 < state.limit)
    hit = state.active & c.rejected & goes_on & mine.any(1)

    # A model of the test that has not scored leaves reads it now, which is a part of what it reads before it drafts on.
    readers = tuple(m for m in test.models if m not in self.logits)
    dropped = hit[:, None] & jnp.array([m not in self.logits for m in slots])[None]
    fed = jnp.where(dropped, jnp.minimum(state.fed, end[:, None]), state.fed)
    state = state.replace(tokens=ops.put(drafted, end, c.token, hit), fed=fed)

    def read(state):
      for m in readers:
        need = hit.astype(jnp.int32)
        state = state.charge(m, calls=need, positions=need, computed=1)
        state, logits = feed(context, state, m, 1, need)
        state = store_by_row(context, state, m, logits, slot, need)
      return state

    state = context.backend.choose(jnp.where(hit.any(), 0, 1), [read][: len(readers)], state)
    known = {m: take1(x, mine.argmax(1)) for m, x in self.logits.items()}
    known |= {m: take1(state.window.logits[m], slot) for m in readers}

    logits = jnp.stack([known[m] for m in test.models])  # [M, B, V]
    before = rules.Prefix(state.tokens, end + 1)
    target = rules.target(test.combiner, logits, sampler_for_window(state).at(slot), slot, before)
    hit = hit & test.lawful(logits, target)
    token, noise = state.noise.draw(target.probs, end + 1, FINAL, state.length)
    there = target.probs, test.deferred(target, slot, c.accepted)
    pi, deferred = jax.tree.map(lambda some, one: ops.put(some, slot, one, hit), (c.target, c.deferred), there)
    outcome = c.replace(leaf=Hit(hit, token, known, readers), target=pi, deferred=deferred)
    return state.replace(tokens=drafted, noise=noise), outcome


@struct.dataclass
class Hit(NoHit):
  """Where the token after a rejection is a leaf: what follows it, by row."""

  rows: Array  # [B] whether it is one
  token: Array  # [B] the token after it
  logits: dict[int, Array]  # {slot: [B, V]} after it, of the models of the test
  readers: tuple[int, ...] = static()  # the slots that have read it

  @property
  def count(self) -> Array:
    return self.rows.astype(jnp.int32)

  def put(self, tokens: Array, at: Array) -> Array:
    return ops.put(tokens, at + 1, self.token, self.rows)

  def read(self, accepted: Array, models: int) -> Array:
    return accepted + self.count[:, None] * jnp.array([int(m in self.readers) for m in range(models)])[None]

  def shown(self, context: Context, state: State, accepted: Array) -> State:
    slot = accepted + 1
    w = state.window
    logits = list(w.logits)
    for m, x in self.logits.items():
      logits[m] = ops.put(logits[m], slot, context.masked(m, x), self.rows)
    known = jnp.array([m in self.logits for m in range(state.fed.shape[1])])[None] & self.rows[:, None]
    fed = jnp.where(known, (state.length + slot)[:, None], state.fed)
    return state.replace(window=w.replace(logits=tuple(logits)), fed=fed)

  def sources(self, drawn: Array, after: Array) -> Array:
    return jnp.where(after, AFTER_LEAF, drawn)


def others(order: Array, token: Array, count: int) -> Array:
  """Return the tokens that stand first in an order [B, V], without one [B]: [B, count]."""
  vocab = iota(order.shape[1])
  found = [token]
  for _ in range(count):
    order = jnp.where(vocab == found[-1][:, None], -jnp.inf, order)
    found.append(ops.argmax(order))
  return jnp.stack(found[1:], 1)
