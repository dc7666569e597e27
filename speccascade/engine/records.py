"""What is kept of the committed tokens, each kept where something asks for it.

`State.records` has the records of a decode by name: 'stats' always, 'seen' and 'counts' where the sampler has
penalties, 'logprobs', 'target_logprobs' and 'top' where the caller asks for them, and those of its phases
(`Phase.records`).

Axis letters: B batch, M models of a method, W window of pending tokens, T token buffer, V vocabulary, K likeliest.
"""

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp

from speccascade import sampling
from speccascade.backends.ops import take
from speccascade.engine.state import Record
from speccascade.types import Array, iota


@struct.dataclass
class Seen(Record):
  """Which tokens a row has, those of its prompt among them, for a repetition penalty."""

  tokens: Array  # [B, V] of bool

  for_host = False

  def after(self, state, commit, new, emitted):
    return Seen(self.tokens | (tally(new, emitted, self.tokens.shape[1]) > 0))


@struct.dataclass
class Emitted(Record):
  """How often each token was emitted, for a presence or frequency penalty."""

  times: Array  # [B, V]

  for_host = False

  def after(self, state, commit, new, emitted):
    return Emitted(self.times + tally(new, emitted, self.times.shape[1]))


@struct.dataclass
class LogProbs(Record):
  """The unscaled log-probability of each output token under each model that has scored it, else NaN."""

  values: Array  # [B, M, T]

  def after(self, state, commit, new, emitted):
    width = new.shape[1]
    slot, fresh = fresh_slots(state.length, self.values.shape[2], emitted)
    models = []
    for m, logits in enumerate(state.window.logits):
      logp = sampling.at_token(sampling.log_softmax(logits), new)
      logp = jnp.where(iota(width) <= (state.fed[:, m] - state.length)[:, None], logp, jnp.nan)
      models.append(jnp.where(fresh, take(logp, jnp.minimum(slot, width - 1)), self.values[:, m]))
    return LogProbs(jnp.stack(models, 1))


@struct.dataclass
class TargetLogProbs(Record):
  """The log-probability of each output token under the target that was tested."""

  values: Array  # [B, T]

  def after(self, state, commit, new, emitted):
    slot, fresh = fresh_slots(state.length, self.values.shape[1], emitted)
    logp = jnp.log(sampling.at_token(commit.target, new))
    return TargetLogProbs(jnp.where(fresh, take(logp, jnp.minimum(slot, new.shape[1] - 1)), self.values))


@struct.dataclass
class Top(Record):
  """The likeliest tokens at each output position, under the last model or, where the request says so, the target."""

  ids: Array  # [B, T, K]
  logprobs: Array  # [B, T, K]

  def after(self, state, commit, new, emitted):
    logp = sampling.log_softmax(state.window.logits[commit.judge])
    if (processed := state.limits.processed) is not None:
      logp = jnp.where(processed[:, None, None], jnp.log(commit.target), logp)
    values, ids = lax.top_k(logp, self.ids.shape[2])  # [B, W+1, K]
    slot, fresh = fresh_slots(state.length, self.ids.shape[1], emitted)
    slot = jnp.minimum(slot, ids.shape[1] - 1)
    fresh = fresh[..., None]
    return Top(jnp.where(fresh, take(ids, slot), self.ids), jnp.where(fresh, take(values, slot), self.logprobs))


def tally(new: Array, emitted: Array, vocab: int) -> Array:
  """Count each token among the first `emitted` [B] of new [B, W+1]: [B, V]."""
  fresh = iota(new.shape[1]) < emitted[:, None]
  return jnp.where(fresh[..., None], jax.nn.one_hot(new, vocab, dtype=jnp.int32), 0).sum(1)


def fresh_slots(length: Array, buffer: int, count: Array) -> tuple[Array, Array]:
  """Return for every position of a buffer [B, T] its slot in the window, and whether it is one of the first `count`."""
  slot = iota(buffer) - length[:, None]
  return jnp.maximum(slot, 0), (slot >= 0) & (slot < count[:, None])
