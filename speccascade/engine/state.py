"""The state that every phase reads and writes, and how it is before the first round.

Axis letters: B batch, M models of a method, W window of pending tokens, V vocabulary, T token buffer, K stop tokens.

Every array of the state has the rows of the batch on axis 0. Three facts are true between any two phases:
  * slot = absolute position, in the caches and in `State.tokens`; nothing stores an index;
  * `fed[b, m]` tokens of row b are in the cache of model m, so it knows the distributions up to position `fed[b, m]`;
  * the last committed token is fed to no model: `fed <= length - 1` when nothing is pending.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import NamedTuple

from flax import struct
import jax
import jax.numpy as jnp

from speccascade import sampling, stopping
from speccascade.backends import Backend
from speccascade.backends.ops import take
from speccascade.engine.records import Emitted, LogProbs, Record, Seen, Top
from speccascade.engine.stats import Counts
from speccascade.types import Array, Cache, Carry, iota, Model, NO_FAULT, Prompt, Window


@struct.dataclass
class Limits:
  """What a row's request changes of its logits and of its end, where any request of the batch does so."""

  stop_ids: Array  # [B, K] tokens that end the row, as EOS does; -1 is none
  least: Array | None = None  # [B] the position before which the row must not end
  bias: Array | None = None  # [B, V] added to every model's logits


@struct.dataclass
class Arrays:
  """Rows as arrays, padded to a batch."""

  prompt: Prompt
  key: Array  # [B, 4] seed, stream, example, sample
  max_new: Array  # [B]
  sampler: sampling.Sampler  # its numbers [B]
  limits: Limits
  real: Array  # [B] rows that are not padding


@struct.dataclass
class Fault:
  """Why a row has no next token."""

  code: Array  # [B] of `types`, or NO_FAULT
  value: Array  # [B] what the target sums to, or its least entry

  @classmethod
  def none(cls, batch: int) -> 'Fault':
    """Return that of rows that go on."""
    return cls(jnp.full(batch, NO_FAULT, jnp.int32), jnp.zeros(batch))


@struct.dataclass
class State:
  """All that the decode loop carries."""

  tokens: Array  # [B, T]
  length: Array  # [B] committed tokens
  limit: Array  # [B] the length at which a row ends
  done: Array  # [B]
  active: Array  # [B] rows that the phases work on now
  fed: Array  # [B, M]
  caches: tuple[Cache, ...]
  window: Window
  sampler: sampling.Sampler  # its numbers [B]
  limits: Limits
  noise: sampling.Noise
  policy: Carry  # of the draft-length policy
  idle: Array  # [B] rounds since the row, or where models take turns any row, grew
  fault: Fault
  records: dict[str, Record]  # of the committed tokens

  @property
  def stats(self) -> Counts:
    """What is counted."""
    return self.records['stats']

  def charge(self, slot: int, **counts: Array | int) -> 'State':
    """Add to the counts of a model: `calls`, `positions`, `computed`, `drafted`, each [B] or one for all rows."""
    return self.replace(records=self.records | {'stats': self.stats.charge(slot, **counts)})


class Context(NamedTuple):
  """What is fixed while decoding: the models with their parameters bound, and what the program is compiled for."""

  extend: tuple[Callable[..., tuple[Array, Cache]], ...]  # (cache, tokens, positions[, packing]) -> logits, cache
  packs: tuple[bool, ...]  # whether each model takes a packed window
  corrected: tuple[Callable[[Array, Array], Array] | None, ...]  # (logits [B, V], token [B]) -> logits
  cache_of: tuple[int | None, ...]  # the cache that each model reads and writes; None where it lies elsewhere
  policy: stopping.Policy
  eos_ids: tuple[int, ...]
  processor: Callable[[Array, Array, Array], Array] | None = None  # (logits [V], tokens [T], how many) -> logits [V]
  backend: Backend = Backend()
  # [V] by slot: the tokens that a translated drafter lacks, where a combiner of logits reads it, else None. The window
  # stores its lowest logit for them, and `masked` makes a distribution of the drafter of that.
  lacks: tuple[Array | None, ...] = ()

  def masked(self, m: int, logits: Array | None) -> Array | None:
    """Return logits [..., V] of slot m whose distribution leaves out the tokens that the model lacks."""
    return logits if logits is None or self.lacks[m] is None else jnp.where(self.lacks[m], -jnp.inf, logits)


def sampler_for_window(state: State, slots: int | None = None) -> sampling.Sampler:
  """Bind the sampler to the first slots of the window, or all: a penalty at slot j sees the pending tokens before j."""
  sampler = state.sampler.by_number(lambda x: x[:, None])
  if not sampler.penalises:
    return sampler
  width = state.window.source.shape[1]
  vocab = state.window.vocab
  pending = take(state.tokens, state.length[:, None] + iota(width))
  real = iota(width) < state.window.size[:, None]
  drafted = jnp.where(real[..., None], jax.nn.one_hot(pending, vocab, dtype=jnp.int32), 0)
  before = jnp.pad(jnp.cumsum(drafted, 1), ((0, 0), (1, 0), (0, 0)))[:, :slots]  # [B, W+1, V]
  seen, counts = (state.records.get(name) for name in ('seen', 'counts'))
  return sampler.bind(
    None if seen is None else (before > 0) | seen.tokens[:, None],
    None if counts is None else before + counts.times[:, None],
  )


# ---- before the first round ----


def first_state(program, start, caches: tuple, rows: Arrays, noise: sampling.Noise | None = None) -> State:
  """Return the state before the first round of rows whose prompts are in the caches, () where those are inserted later.

  Without `noise` random numbers are keyed by row.
  """
  layout = program.backend.layout
  tokens, length = _opening(program.networks[-1].start_id, rows.prompt, program.buffer)
  if noise is None:
    noise = sampling.noise.make(_key_data(rows.key), start.by_round, rows.sampler)
  if isinstance(noise, sampling.Keyed):
    noise = noise.replace(layout=layout)
  batch = length.shape[0]
  models = len(program.networks)
  least = None if rows.limits.least is None else length + rows.limits.least
  return State(
    tokens=tokens,
    length=length,
    limit=length + rows.max_new,
    done=~rows.real,
    active=rows.real,
    fed=jnp.tile(length[:, None] - 1, (1, models)),
    caches=caches,
    window=_window(program, start, batch, rows.sampler.greedy),
    sampler=dataclasses.replace(jax.tree.map(jnp.asarray, rows.sampler), backend=program.backend),
    limits=jax.tree.map(jnp.asarray, Limits(rows.limits.stop_ids, least, rows.limits.bias)),
    noise=noise,
    policy=start.policy.init(batch),
    idle=jnp.zeros(batch, jnp.int32),
    fault=Fault.none(batch),
    records=_records(program, start, rows.sampler, tokens, length),
  )


def _records(program, start, sampler: sampling.Sampler, tokens: Array, length: Array) -> dict[str, Record]:
  """Return what is recorded in rows that begin with these tokens [B, T]."""
  batch, buffer = tokens.shape
  models = len(program.networks)
  records: dict[str, Record] = {'stats': Counts.zeros(batch, models, start.window, buffer)}
  if sampler.repeats:
    none = jnp.zeros((batch, program.vocab), bool)
    records['seen'] = Seen(none.at[jnp.arange(batch)[:, None], tokens].max(iota(buffer) < length[:, None]))
  if sampler.counting:
    records['counts'] = Emitted(jnp.zeros((batch, program.vocab), jnp.int32))
  if program.trace:
    records['logprobs'] = LogProbs(jnp.full((batch, models, buffer), jnp.nan))
  if program.top:
    shape = (batch, buffer, program.top)
    records['top'] = Top(jnp.zeros(shape, jnp.int32), jnp.full(shape, jnp.nan))
  for phase in start.recorders:
    records |= phase.records(batch, buffer)
  return records


def _window(program, start, batch: int, greedy: bool) -> Window:
  shape = (batch, start.window + 1, program.vocab)
  read = {*(range(len(program.networks)) if program.trace else start.logits_read)} & {*program.shown}
  return Window(
    size=jnp.zeros(batch, jnp.int32),
    probs=None if greedy or not program.drafts else jnp.zeros((batch, start.window, program.vocab)),
    source=jnp.zeros((batch, start.window), jnp.int32),
    logits=tuple(jnp.zeros(shape) if slot in read else None for slot in range(len(program.networks))),
    vocab=program.vocab,
  )


def _opening(start_id: int | None, prompt: Prompt, buffer: int) -> tuple[Array, Array]:
  """Return the token buffer [B, T] and the committed length: the prompt, or an encoder–decoder's start token."""
  rows, width = prompt.tokens.shape
  if start_id is None:
    return jnp.pad(prompt.tokens, ((0, 0), (0, buffer - width))), jnp.asarray(prompt.length)
  return jnp.full((rows, buffer), start_id, jnp.int32), jnp.ones(rows, jnp.int32)


def _key_data(keys: Array) -> Array:
  """Return the key data [B, 2] of rows keyed by [B, 4]: seed, stream, example and sample.

  It is that of `jax.random`: the key of the seed, with the other numbers folded in, a sample of 0 left out.
  """
  seed, stream, example, sample = jnp.asarray(keys).T
  zero = jnp.zeros_like(seed)
  words = functools.reduce(lambda key, x: sampling.noise.hashed(key, (zero, x)), (stream, example), (zero, seed))
  again = sampling.noise.hashed(words, (zero, sample))
  return jnp.stack([jnp.where(sample > 0, x, y) for x, y in zip(again, words, strict=True)], 1)


# ---- models that share a cache ----


def cache_slots(slots: Sequence[Model]) -> tuple[int, ...]:
  """Return for each slot the slot whose cache it uses: its own, or that of a network that it is a part of."""

  def shares(model: Model, other: Model) -> bool:
    return model.network.shares_cache(model.params, other.network, other.params)

  own = [slot for slot, model in enumerate(slots) if not any(shares(model, other) for other in slots)]
  return tuple(next((j for j in own if shares(model, slots[j])), slot) for slot, model in enumerate(slots))
