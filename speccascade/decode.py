"""Decode prompts with a method: prefill every model, then one jitted `lax.while_loop` around the method's phases.

Shapes are static: prompts share one padded length, rows end by mask. Seeds, α, thresholds and weights are traced.
Between the start of a batch and its end nothing crosses to the host. More prompts than a batch holds wait in line: the
loop is left when a share of its rows has ended, and goes on with the next prompts in their places.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speccascade import inputs, methods, probs, results
from speccascade.phases import run
from speccascade.types import Array, Context, Model, Network, NOWHERE, Prompt, State, Stats, whole, Window


def decode(
  method: methods.Method | methods.SequenceCascade,
  models: Sequence[Model],
  prompts: Sequence[str] | Sequence[Sequence[int]],
  *,
  max_new_tokens: int,
  sampler: probs.Sampler = probs.Sampler(),
  seed: int = 0,
  example_ids: Sequence[int] | None = None,
  batch_size: int | None = None,
  max_prompt_tokens: int | None = None,
  trace: bool = False,
) -> results.Decoded:
  """Continue each prompt by at most `max_new_tokens` tokens.

  Prompts are texts or token lists. The EOS ids of the last model that the method runs end a text. `example_ids` key the
  randomness: an example's output does not depend on its place or its company. Of more prompts than `batch_size`
  the next in line takes the place of one whose text has ended. A batch is padded to 1, 2, 3, 4, 6, 8, 12, … rows, its
  prompts to a length of such steps; `max_prompt_tokens` fixes the padded length, so that calls with other prompts
  compile nothing. `trace` records each output token's log-probability under every model that scored it.
  """
  models = inputs.check_models(method, models)
  rows = inputs.encode(models, prompts)
  ids, seed = inputs.check_ids(example_ids, len(rows)), inputs.check_seed(seed)
  whole('max_new_tokens', max_new_tokens)
  width = inputs.prompt_width(models, rows, max_new_tokens, max_prompt_tokens)
  size = inputs.bucket(len(rows), 1)
  if batch_size is not None:
    size = min(size, whole('batch_size', batch_size))
  shape = _Shape(size, 1 < size < len(rows), width, max_new_tokens)
  if isinstance(method, methods.SequenceCascade):
    if trace:
      raise ValueError('trace records one decode, and a sequence cascade is two; trace each with autoregressive().')
    return _sequence_cascade(method, models, rows, ids, shape, sampler, seed)
  return _decode(method, models, rows, ids, shape, sampler, seed, trace=trace)


class _Shape(NamedTuple):
  """The static sizes of a call."""

  size: int  # rows of a batch
  line: bool  # whether prompts wait in line for a place in the batch
  width: int  # tokens of a prompt
  max_new: int


def _decode(method, models, rows, ids, shape, sampler, seed, *, stream=0, trace=False) -> results.Decoded:
  """Decode checked rows, the longest prompts first; streams of one seed are independent."""
  fixed, params = _program(method, models, shape.width, shape.max_new, trace)
  size = shape.size if shape.line else min(shape.size, inputs.bucket(len(rows), 1))

  def read(some: Sequence[int]) -> '_Batch':
    prompt, ids_here, real = inputs.pad([rows[i] for i in some], ids[some], size, shape.width)
    noise = _Seeds(seed, np.uint32(stream), ids_here)
    return _Batch(_read(fixed, params, prompt), prompt, np.int32(shape.max_new), sampler, noise, real)

  decode_rows = _in_line if shape.line else _by_batch
  outs, order = [], []
  for some, places, fetched in decode_rows(fixed, method, params, read, inputs.by_length(rows), size):
    out = _unpack(fetched, places)
    results.check_finite(method, models, out, ids[some])
    outs.append(out)
    order += some
  return results.collect(method, models, rows, outs, order)


def _by_batch(fixed, method, params, read, order: list[int], size: int):
  """Yield (rows, their places, what came to the host) batch by batch, each while the device works on the next."""
  ended = ()
  for first in range(0, len(order), size):
    some = order[first : first + size]
    state, packed = _loop(fixed, method, params, *read(some))
    yield from ended
    ended = [(some, list(range(len(some))), _fetch(state, packed))]
    del state  # before the next batch is read: its caches take as much memory
  yield from ended


def _in_line(fixed, method, params, read, order: list[int], size: int):
  """Yield (rows, their places, what came to the host) as rows end and the next in line take their places.

  They come by the eighth of a batch: to leave the loop and move a row costs less than a place that is idle.
  """
  batch, held, waiting, order = read(order[:size]), np.array(order[:size]), [], order[size:]
  sampler, state, ended = batch.sampler, _begin(fixed, method, *batch), ()  # held: the row in each place, or -1
  while (held >= 0).any():
    enough = max(1, size // 8) if order or waiting else size
    state, packed = _go_on(fixed, method, params, sampler, state, np.int32(enough))
    yield from ended
    fetched = _fetch(state, packed)
    places = np.flatnonzero((held >= 0) & fetched.packed[:size]).tolist()
    ended = [(held[places].tolist(), places, fetched)]
    held[places] = -1
    while (order or waiting) and (held < 0).any():
      if not waiting:
        some, order, batch = order[:size], order[size:], None  # whose caches would take memory while others are read
        batch, waiting = read(some), list(enumerate(some))  # (place among those read, row)
      free = np.flatnonzero(held < 0)[: len(waiting)]
      come, waiting = waiting[: len(free)], waiting[len(free) :]
      moves = np.zeros((2, size), np.int32)
      moves[:, : len(free)] = [source for source, _ in come], free
      held[free] = [row for _, row in come]
      state = _refill(fixed, method, params, batch, moves, np.int32(len(free)), state)
  yield from ended


def _wanted(state: State) -> dict[str, Any]:
  """Return what comes to the host, whole numbers all."""
  return {k: getattr(state, k) for k in ('tokens', 'length', 'fault', 'stats')}


class _Fetched(NamedTuple):
  """What came to the host of a state, still joined: to part it can wait until the device is busy again."""

  packed: np.ndarray
  logprobs: np.ndarray | None
  wanted: dict[str, Any]  # the arrays that were joined, for their shapes


def _pack(state: State) -> Array:
  """Join what comes to the host in one array: each array that is fetched costs as much as a small model's step."""
  return jnp.concatenate([state.done.astype(jnp.int32), *(x.ravel() for x in jax.tree.leaves(_wanted(state)))])


def _fetch(state: State, packed: Array) -> _Fetched:
  """Wait for the device."""
  logprobs = None if state.logprobs is None else np.array(state.logprobs)  # a copy, for the state goes on
  return _Fetched(np.asarray(packed), logprobs, _wanted(state))


def _unpack(fetched: _Fetched, places: list[int]) -> dict:
  """Undo `_pack`, for the rows in these places."""
  leaves, structure = jax.tree.flatten(fetched.wanted)
  rows = fetched.wanted['length'].size  # of `done`, which is in front
  parts = np.split(fetched.packed[rows:], np.cumsum([x.size for x in leaves[:-1]]))
  out = structure.unflatten([part.reshape(x.shape) for part, x in zip(parts, leaves, strict=True)])
  return results.rows_of(out | {'logprobs': fetched.logprobs}, places)


def decode_batch(
  method: methods.Method,
  models: Sequence[Model],
  prompt: Prompt,
  *,
  max_new_tokens: int,
  sampler: probs.Sampler,
  noise: probs.Noise,
) -> State:
  """Decode one padded batch on the device and return the loop's last state."""
  fixed, params = _program(method, models, prompt.tokens.shape[1], max_new_tokens)
  real = np.ones(prompt.length.shape, bool)
  caches = _read(fixed, params, prompt)
  return _loop(fixed, method, params, caches, prompt, np.int32(max_new_tokens), sampler, noise, real)[0]


class _Seeds(NamedTuple):
  """What the noise of a batch is hashed from, in the loop's program."""

  seed: np.uint32
  stream: np.uint32
  ids: np.ndarray  # [B]


class _Batch(NamedTuple):
  """Prompts that every model has read, and what else a first state is made of."""

  caches: tuple
  prompt: Prompt
  max_new: np.int32
  sampler: probs.Sampler
  noise: _Seeds
  real: np.ndarray  # [B] rows that are not padding


class _Program(NamedTuple):
  """What is compiled in, beside the method's structure and the shapes."""

  networks: tuple[Network, ...]
  owners: tuple[int, ...]  # the slot in whose cache each slot works
  buffer: int
  vocab: int
  trace: bool

  @property
  def kept(self) -> list[int]:
    """The slots that have a cache."""
    return sorted(set(self.owners))


def _program(method, models, width: int, max_new_tokens: int, trace: bool = False) -> tuple[_Program, tuple]:
  """Return what is compiled in, and the parameters of every slot."""
  slots = [models[m] for m in method.slots]
  buffer = buffer_size(slots[-1].network, width, max_new_tokens, method.window)
  networks, owners = tuple(s.network for s in slots), tuple(_cache_owners(slots))
  return _Program(networks, owners, buffer, inputs.vocabulary(models), trace), tuple(s.params for s in slots)


def _cache_owners(slots: Sequence[Model]) -> list[int]:
  """Return the slot in whose cache each slot works: its own, or that of the largest model that it is a part of."""
  owners = []
  for i, one in enumerate(slots):
    shares = getattr(one.network, 'shares_cache', lambda *_: False)
    wholes = [j for j, s in enumerate(slots) if j != i and shares(one.params, s.network, s.params)]
    owners.append(next((j for j in wholes if not _shares_any(slots[j], slots)), i))
  return owners


def _shares_any(model: Model, slots: Sequence[Model]) -> bool:
  return any(model.network.shares_cache(model.params, s.network, s.params) for s in slots)


def buffer_size(network: Network, width: int, max_new_tokens: int, window: int) -> int:
  """Return T: the slots of the token buffer and the caches, with room for a padded window after the last token.

  In steps of 16, so that methods of the same models share a compiled prefill.
  """
  start = width if network.start_id is None else 1
  return -(-(start + inputs.bucket(max_new_tokens) + window + 2) // 16) * 16


@functools.partial(jax.jit, static_argnums=(0, 3))
def prefill(networks, params, prompt, max_len):
  """Read the prompt with every network; return their caches of `max_len` slots."""
  return tuple(n.prefill(p, prompt, max_len) for n, p in zip(networks, params, strict=True))


def _read(fixed: _Program, params: tuple, prompt: Prompt) -> tuple:
  """Return the caches of a prompt."""
  networks, kept = tuple(fixed.networks[s] for s in fixed.kept), tuple(params[s] for s in fixed.kept)
  return prefill(networks, kept, prompt, fixed.buffer)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _loop(fixed, method, params, caches, prompt, max_new, sampler, noise, real):
  """Run the method's phases until every row has ended; return the state, and what the host wants of it packed."""
  state = _first_state(fixed, method, caches, prompt, max_new, sampler, noise, real)
  return _rounds(fixed, method, params, sampler, state, lambda done: done.all())


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _go_on(fixed, method, params, sampler, state, enough):
  """Do as `_loop` does from a given state, until `enough` rows have ended."""
  return _rounds(fixed, method, params, sampler, state, lambda done: done.sum() >= enough)


def _rounds(fixed, method, params, sampler, state, over) -> tuple[State, Array]:
  extend = tuple(functools.partial(n.extend, p) for n, p in zip(fixed.networks, params, strict=True))
  cache_of = tuple(fixed.kept.index(s) for s in fixed.owners)
  context = Context(extend, cache_of, sampler, method.policy, fixed.networks[-1].eos_ids)

  def step(state: State) -> State:
    return run(method.phases, context, state.replace(active=~state.done))

  state = jax.lax.while_loop(lambda s: ~over(s.done), step, state)
  return state, _pack(state)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=6)
def _refill(fixed, method, params, batch: _Batch, moves, count, state: State) -> State:
  """Put new rows into a state: the first `count` columns of `moves` [2, B] are a row of the batch and its place."""
  size = moves.shape[1]

  def first(prompt, ids, real):
    noise, caches = batch.noise._replace(ids=ids), _read(fixed, params, prompt)
    return _first_state(fixed, method, *batch._replace(caches=caches, prompt=prompt, noise=noise, real=real))

  def put(i, old: Array, new: Array, wider: jax.ShapeDtypeStruct) -> Array:
    axes = [axis for axis, (n, m) in enumerate(zip(old.shape, wider.shape, strict=True)) if n != m]
    if len(axes) != 1:
      raise ValueError(
        f'{method.name}: an array {old.shape} has no axis of rows; a cache and the carry of a policy need one.'
      )
    entries = old.shape[axes[0]] // size  # a row may have several
    source, place = moves[:, i] * entries
    row = jax.lax.dynamic_slice_in_dim(new, source, entries, axes[0])
    return jax.lax.dynamic_update_slice_in_dim(old, row, place, axes[0])

  one_more = lambda x: jax.ShapeDtypeStruct((x.shape[0] + 1, *x.shape[1:]), x.dtype)
  by_row = batch.prompt, batch.noise.ids, batch.real
  wider = jax.eval_shape(first, *jax.tree.map(one_more, by_row))  # an axis that grows is of rows
  new = _first_state(fixed, method, *batch)
  return jax.lax.fori_loop(0, count, lambda i, x: jax.tree.map(functools.partial(put, i), x, new, wider), state)


def _first_state(fixed, method, caches, prompt, max_new, sampler, noise, real) -> State:
  """Return the state before the first round."""
  buffer, vocab = fixed.buffer, fixed.vocab
  rows, slots, width = real.shape[0], len(method.slots), method.window
  if isinstance(noise, _Seeds):
    noise = _keyed(noise, buffer, width + 1 if method.by_round else 1, sampler.greedy)
  tokens, length = _opening(fixed.networks[-1].start_id, prompt, buffer)

  def zeros(*shape):
    return jnp.zeros(shape, jnp.int32)

  window = Window(
    size=zeros(rows),
    probs=jnp.zeros((rows, width, vocab)),
    source=zeros(rows, width),
    logits=tuple(jnp.zeros((rows, width + 1, vocab)) for _ in range(slots)),
  )
  per_model = dict.fromkeys(results.PER_MODEL, zeros(slots, rows))
  per_row = dict.fromkeys(('rounds', 'tested', 'accepted', 'emitted', 'deferred'), zeros(rows))
  stats = Stats(
    **per_model,
    **per_row,
    accepted_lengths=zeros(rows, width + 1),
    tested_at=zeros(rows, width),
    accepted_at=zeros(rows, width),
    source=jnp.full((rows, buffer), NOWHERE, jnp.int32),
  )
  seen = None
  if sampler.penalises:
    committed = jnp.arange(buffer)[None] < length[:, None]
    seen = (jax.nn.one_hot(tokens, vocab, dtype=bool) & committed[..., None]).any(1)
  return State(
    tokens=tokens,
    length=length,
    limit=length + max_new,
    done=~real,
    active=real,
    fed=jnp.tile(length[None] - 1, (slots, 1)),
    caches=caches,
    window=window,
    noise=noise,
    policy=method.policy.init(rows),
    seen=seen,
    fault=jnp.full((slots + 1, rows), -1, jnp.int32),
    stats=stats,
    logprobs=jnp.full((slots, rows, buffer), jnp.nan) if fixed.trace else None,
  )


_begin = jax.jit(_first_state, static_argnums=0, donate_argnums=2)


def _opening(start_id: int | None, prompt: Prompt, buffer: int) -> tuple[Array, Array]:
  """Return the token buffer [B, T] and the committed length: the prompt, or an encoder–decoder's start token."""
  rows, width = prompt.tokens.shape
  if start_id is None:
    return jnp.pad(prompt.tokens, ((0, 0), (0, buffer - width))), prompt.length
  return jnp.full((rows, buffer), start_id, jnp.int32), jnp.ones(rows, jnp.int32)


def _keyed(seeds: _Seeds, positions: int, in_block: int, greedy: bool) -> probs.Keyed:
  key = jax.random.fold_in(jax.random.key(seeds.seed), seeds.stream)
  keys = jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(key, seeds.ids))
  return probs.Keyed.make(keys, positions, in_block, greedy)


def _sequence_cascade(method, models, rows, ids, shape, sampler, seed) -> results.Decoded:
  """Answer with model 0; answer anew with model 1 where the score is low; add up what both cost.

  The second answer has a stream of random numbers of its own, for the first one's have chosen it.
  """
  small = _decode(methods.autoregressive(0), models, rows, ids, shape, sampler, seed, trace=True)
  scores = [float(method.score(x[0])) for x in small.logprobs]
  anew = [i for i, score in enumerate(scores) if score < method.threshold]
  fields = {f.name: getattr(small.stats, f.name) for f in dataclasses.fields(Stats)}
  for name in results.PER_MODEL:
    fields[name] = np.pad(fields[name], ((0, 1), (0, 0)))
  tokens, texts = list(small.tokens), small.texts and list(small.texts)
  if anew:
    again = _decode(
      methods.autoregressive(1), models, [rows[i] for i in anew], ids[anew], shape, sampler, seed, stream=1
    )
    for name, value in fields.items():
      new = getattr(again.stats, name)
      if name in results.PER_MODEL:
        value[:, anew] += new
      elif name != 'source':
        value[anew] = new if name == 'emitted' else value[anew] + new
    for j, i in enumerate(anew):
      tokens[i], fields['source'][i] = again.tokens[j], again.stats.source[j]
      if texts is not None:
        texts[i] = again.texts[j]
  return results.Decoded(texts, tokens, Stats(**fields))
