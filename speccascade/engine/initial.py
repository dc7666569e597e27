"""The state before the first round.

Axis letters: B batch, V vocabulary, T token buffer.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from speccascade import sampling
from speccascade.engine.leaves import Leaves
from speccascade.engine.records import Emitted, LogProbs, Seen, TargetLogProbs, Top
from speccascade.engine.state import Arrays, Fault, Record, State
from speccascade.engine.stats import Counts
from speccascade.types import Array, iota, Prompt, Window


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
    limits=jax.tree.map(jnp.asarray, dataclasses.replace(rows.limits, least=least)),
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
  traced = {
    'models': ('logprobs', LogProbs, (batch, models, buffer)),
    'target': ('target_logprobs', TargetLogProbs, (batch, buffer)),
  }
  if program.trace:
    name, record, shape = traced[program.trace]
    records[name] = record(jnp.full(shape, jnp.nan))
  if program.top:
    shape = (batch, buffer, program.top)
    records['top'] = Top(jnp.zeros(shape, jnp.int32), jnp.full(shape, jnp.nan))
  for phase in start.recorders:
    records |= phase.records(batch, buffer)
  return records


def _window(program, start, batch: int, greedy: bool) -> Window:
  shape = (batch, start.window + 1, program.vocab)
  read = {*(range(len(program.networks)) if program.trace == 'models' else start.logits_read)} & {*program.shown}
  return Window(
    size=jnp.zeros(batch, jnp.int32),
    probs=None if greedy or not program.drafts else jnp.zeros((batch, start.window, program.vocab)),
    source=jnp.zeros((batch, start.window), jnp.int32),
    logits=tuple(jnp.zeros(shape) if slot in read else None for slot in range(len(program.networks))),
    vocab=program.vocab,
    leaves=Leaves.empty(start, program.shown, batch, program.vocab),
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
