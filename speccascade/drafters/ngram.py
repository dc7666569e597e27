"""Prompt lookup: a drafter without weights that repeats what followed the latest earlier occurrence of the last tokens.

Its proposals are certain, q̃ one-hot. What followed other occurrences has probability 0 and stands behind it, as leaves,
and as the proposal where the first is forbidden. Where the last token has not occurred before, or all that followed is
forbidden, q̃ is uniform over what is allowed: with `policy=stopping.Fallback(0.5)` nothing is drafted.

With a memory it also looks in earlier outputs, of which the latest tokens are kept in `params`. Before it starts
further rounds, the host adds those that have ended.
"""

from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from speccascade.backends import sharding
from speccascade.backends.ops import take
from speccascade.types import Array, checked_int, Model, Network, Prompt

_LOW = -1e4  # of what is not proposed: probability 0, but finite, for where the proposal is forbidden
_CONTINUATIONS = 4  # that are told apart


@dataclasses.dataclass(frozen=True)
class NGram(Network):
  """Match up to `longest` last tokens, the longest match first, the latest on ties, own text before the memory's."""

  vocab_size: int
  longest: int = 3
  eos_ids: tuple[int, ...] = ()
  start_id: int | None = None
  max_positions: int | None = None
  memory: int = 0  # tokens of earlier outputs that are kept

  drafts_only = True

  @property
  def remembers(self) -> bool:
    return self.memory > 0

  def remember(self, params, texts: Sequence[tuple[np.ndarray, int]]):
    """Return the parameters with further texts, each behind the last tokens of its prompt, the oldest left out."""
    if not texts:
      return params
    parts = (np.append(tokens[max(0, start - self.longest) :], -1) for tokens, start in texts)
    kept = np.concatenate([np.asarray(params['memory']), *parts])[-self.memory :].astype(np.int32)
    before = params['memory']  # what is on no device by choice stays so, or the program would be another
    return {'memory': jax.device_put(kept, before.sharding if before.committed else None)}

  def prefill(self, params, prompt: Prompt, max_len: int):
    """Keep the text: a source of S + 1 slots (empty for a decoder-only run), then `max_len` slots."""
    rows, width = prompt.tokens.shape
    slots = jnp.full((rows, max_len), -1, jnp.int32)
    if self.start_id is None:
      return {'source': jnp.zeros((rows, 0), jnp.int32), 'slots': slots.at[:, :width].set(prompt.tokens)}
    real = jnp.arange(width)[None] < prompt.length[:, None]
    source = jnp.where(real, prompt.tokens, -1)
    return {'source': jnp.pad(source, ((0, 0), (0, 1)), constant_values=-1), 'slots': slots}  # nothing follows its end

  def extend(self, params, cache, tokens: Array, positions: Array):
    slots = jax.vmap(jax.lax.dynamic_update_slice)(cache['slots'], tokens, positions[:, :1])
    before = cache['source']
    if self.remembers:
      memory = jnp.broadcast_to(params['memory'][None], (tokens.shape[0], self.memory))
      before = jnp.concatenate([memory, before], 1)
    text = jnp.concatenate([before, slots], 1)  # [B, N]
    end = positions + before.shape[1]
    after = jnp.roll(text, -1, axis=1)[:, None]  # [B, 1, N] the token after each slot
    length = self._matches(text, after, end)  # [B, L, N]
    slot = jnp.arange(text.shape[1])[None, None]
    order = jnp.where(length > 0, length * text.shape[1] + slot, 0)
    logits = jnp.full((*positions.shape, self.vocab_size), _LOW)
    for rank in range(_CONTINUATIONS):
      best = take(text, jnp.argmax(order, -1) + 1)
      there = jax.nn.one_hot(best, self.vocab_size, dtype=bool) & (order.max(-1) > 0)[..., None]
      logits = jnp.where(there, _LOW * rank / _CONTINUATIONS, logits)
      order = jnp.where(after == best[..., None], 0, order)
    return jnp.where((length.max(-1) > 0)[..., None], logits, 0.0), {**cache, 'slots': slots}

  def _matches(self, text: Array, after: Array, end: Array) -> Array:
    """Return how many tokens up to each earlier slot [B, L, N] equal those up to `end` [B, L]."""
    slot = jnp.arange(text.shape[1])[None, None]
    running = slot < end[..., None]
    length = jnp.zeros(running.shape, jnp.int32)
    for back in range(self.longest):
      last = take(text, jnp.maximum(end - back, 0))[..., None]
      there = jnp.roll(text, back, axis=1)[:, None]  # the token `back` slots before each
      running = running & (there == last) & (there >= 0) & (slot >= back) & (end[..., None] >= back)
      length = length + running.astype(jnp.int32)
    # The token after the match must be one of the text, not padding.
    return jnp.where((after >= 0) & (slot < end[..., None]), length, 0)


def drafter(model: Model, longest: int = 3, *, memory: int = 0) -> Model:
  """Make a prompt-lookup drafter for a model: same vocabulary, same tokenizer.

  Args:
    model: The model that it drafts for.
    longest: How many of the last tokens are compared at most.
    memory: How many tokens of earlier outputs are kept to look them up, too; those of a call are forgotten after it.
  """
  net = model.network
  memory = checked_int('memory', memory, least=0)
  network = NGram(net.vocab_size, longest, net.eos_ids, net.start_id, net.max_positions, memory)
  params = {'memory': jnp.full(memory, -1, jnp.int32)} if memory else {}
  if (mesh := sharding.shared([model])) is not None:
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
  return Model(params, network, model.tokenizer, name='ngram')


def remembering(drafter: Model, outputs: Sequence[Sequence[int]], *, seed: int) -> Model:
  """Return a prompt-lookup drafter whose memory has further outputs, those of an earlier call.

  Args:
    drafter: The drafter.
    outputs: The outputs, lists of tokens.
    seed: The seed of the call that made them. Random numbers that made a text must not test drafts from it.
  """
  params = drafter.network.remember(drafter.params, [(np.asarray(x), 0) for x in outputs])
  return drafter.replace(params=params, seeds=(*drafter.seeds, checked_int('seed', seed, 0, 2**32 - 1)))
