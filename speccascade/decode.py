"""Decode prompts with a method: prefill every model, then one jitted `lax.while_loop` around the method's phases.

Shapes are static: prompts share one padded length, rows end by mask. Seeds, α, thresholds and weights are traced.
Between the start of a batch and its end nothing crosses to the host.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import NamedTuple

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
  randomness: an example's output does not depend on its place or its company. With `batch_size`, prompts of like length
  are decoded together, for a batch goes on until its last row ends. A batch is padded to 1, 2, 3, 4, 6, 8, 12, … rows
  and its prompts to a length of such steps; `max_prompt_tokens` fixes the padded length, so that calls with other
  prompts compile nothing. `trace` records each output token's log-probability under every model that scored it.
  """
  models = inputs.check_models(method, models)
  rows = inputs.encode(models, prompts)
  ids, seed = inputs.check_ids(example_ids, len(rows)), inputs.check_seed(seed)
  whole('max_new_tokens', max_new_tokens)
  width = inputs.prompt_width(models, rows, max_new_tokens, max_prompt_tokens)
  size = inputs.bucket(len(rows), 1) if batch_size is None else whole('batch_size', batch_size)
  if isinstance(method, methods.SequenceCascade):
    if trace:
      raise ValueError('trace records one decode, and a sequence cascade is two; trace each with autoregressive().')
    return _sequence_cascade(method, models, rows, ids, size, width, max_new_tokens, sampler, seed)
  return _decode(method, models, rows, ids, size, width, max_new_tokens, sampler, seed, trace=trace)


def _decode(
  method, models, rows, ids, size, width, max_new_tokens, sampler, seed, *, stream=0, trace=False
) -> results.Decoded:
  """Decode checked rows batch by batch, the longest prompts first; streams of one seed are independent."""
  outs, order = [], inputs.by_length(rows)
  for first in range(0, len(rows), size):
    some = order[first : first + size]
    batch = [rows[i] for i in some]
    prompt, ids_here, real = inputs.pad(batch, ids[some], min(size, inputs.bucket(len(rows), 1)), width)
    noise = _Seeds(seed, np.uint32(stream), ids_here)
    state, packed = _decode_batch(method, models, prompt, max_new_tokens, sampler, noise, trace, real)
    outs.append(_unpack({k: getattr(state, k) for k in _WHOLE}, packed))
    outs[-1]['logprobs'] = None if state.logprobs is None else np.asarray(state.logprobs)
    results.check_finite(method, models, outs[-1], ids_here)
  return results.collect(method, models, rows, outs, order)


_WHOLE = ('tokens', 'length', 'fault', 'stats')  # what comes to the host, whole numbers all


def _pack(state: State) -> Array:
  """Join what comes to the host in one array: each array that is fetched costs as much as a small model's step."""
  return jnp.concatenate([x.ravel() for x in jax.tree.leaves({k: getattr(state, k) for k in _WHOLE})])


def _unpack(shapes: dict, packed: Array) -> dict:
  """Undo `_pack` on the host."""
  leaves, structure = jax.tree.flatten(shapes)
  parts = np.split(np.asarray(packed), np.cumsum([x.size for x in leaves[:-1]]))
  return structure.unflatten([part.reshape(x.shape) for part, x in zip(parts, leaves, strict=True)])


def decode_batch(
  method: methods.Method,
  models: Sequence[Model],
  prompt: Prompt,
  *,
  max_new_tokens: int,
  sampler: probs.Sampler,
  noise: probs.Noise,
  trace: bool = False,
  real: Array | None = None,
) -> State:
  """Decode one padded batch on the device and return the loop's last state; rows that are not `real` do nothing."""
  return _decode_batch(method, models, prompt, max_new_tokens, sampler, noise, trace, real)[0]


def _decode_batch(method, models, prompt, max_new_tokens, sampler, noise, trace, real) -> tuple[State, Array]:
  """Return the loop's last state, and what the host wants of it packed."""
  slots = [models[m] for m in method.slots]
  buffer = buffer_size(models[method.slots[-1]].network, prompt.tokens.shape[1], max_new_tokens, method.window)
  owners = _cache_owners(slots)
  kept = sorted(set(owners))
  caches = prefill(tuple(slots[s].network for s in kept), tuple(slots[s].params for s in kept), prompt, buffer)
  real = np.ones(prompt.length.shape, bool) if real is None else real
  networks, cache_of = tuple(s.network for s in slots), tuple(kept.index(s) for s in owners)
  fixed = _Program(networks, cache_of, buffer, inputs.vocabulary(models), trace)
  params = tuple(s.params for s in slots)
  return _loop(fixed, method, params, caches, prompt, np.int32(max_new_tokens), sampler, noise, real)


class _Seeds(NamedTuple):
  """What the noise of a batch is hashed from, in the loop's program."""

  seed: np.uint32
  stream: np.uint32
  ids: np.ndarray  # [B]


class _Program(NamedTuple):
  """What is compiled in, beside the method's structure and the shapes."""

  networks: tuple[Network, ...]
  cache_of: tuple[int, ...]
  buffer: int
  vocab: int
  trace: bool


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


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _loop(fixed, method, params, caches, prompt, max_new, sampler, noise, real):
  """Run the method's phases until every row has ended; return the state, and what the host wants of it packed."""
  networks = fixed.networks
  if isinstance(noise, _Seeds):
    noise = _keyed(noise, fixed.buffer, method.window + 1 if method.by_round else 1, sampler.greedy)
  extend = tuple(functools.partial(n.extend, p) for n, p in zip(networks, params, strict=True))
  context = Context(extend, fixed.cache_of, sampler, method.policy, networks[-1].eos_ids)
  tokens, length = _begin(networks[-1].start_id, prompt, fixed.buffer)
  state = _first_state(method, tokens, length, length + max_new, fixed.vocab, caches, noise, real, sampler, fixed.trace)

  def step(state: State) -> State:
    return run(method.phases, context, state.replace(active=~state.done))

  state = jax.lax.while_loop(lambda s: ~s.done.all(), step, state)
  return state, _pack(state)


def _begin(start_id: int | None, prompt: Prompt, buffer: int) -> tuple[Array, Array]:
  """Return the token buffer [B, T] and the committed length: the prompt, or an encoder–decoder's start token."""
  rows, width = prompt.tokens.shape
  if start_id is None:
    return jnp.pad(prompt.tokens, ((0, 0), (0, buffer - width))), prompt.length
  return jnp.full((rows, buffer), start_id, jnp.int32), jnp.ones(rows, jnp.int32)


def _first_state(method, tokens, length, limit, vocab, caches, noise, real, sampler, trace) -> State:
  rows, buffer = tokens.shape
  slots, width = len(method.slots), method.window

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
    limit=limit,
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
    logprobs=jnp.full((slots, rows, buffer), jnp.nan) if trace else None,
  )


def _keyed(seeds: _Seeds, positions: int, in_block: int, greedy: bool) -> probs.Keyed:
  key = jax.random.fold_in(jax.random.key(seeds.seed), seeds.stream)
  keys = jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(key, seeds.ids))
  return probs.Keyed.make(keys, positions, in_block, greedy)


def _sequence_cascade(method, models, rows, ids, size, width, max_new_tokens, sampler, seed) -> results.Decoded:
  """Answer with model 0; answer anew with model 1 where the score is low; add up what both cost.

  The second answer has a stream of random numbers of its own, for the first one's have chosen it.
  """
  small = _decode(methods.autoregressive(0), models, rows, ids, size, width, max_new_tokens, sampler, seed, trace=True)
  scores = [float(method.score(x[0])) for x in small.logprobs]
  anew = [i for i, score in enumerate(scores) if score < method.threshold]
  fields = {f.name: getattr(small.stats, f.name) for f in dataclasses.fields(Stats)}
  for name in results.PER_MODEL:
    fields[name] = np.pad(fields[name], ((0, 1), (0, 0)))
  tokens, texts = list(small.tokens), small.texts and list(small.texts)
  if anew:
    again = _decode(
      methods.autoregressive(1), models, [rows[i] for i in anew], ids[anew], size, width,
      max_new_tokens, sampler, seed, stream=1,
    )  # fmt: skip
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
