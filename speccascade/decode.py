"""Decode prompts with a method: prefill every model, then one jitted `lax.while_loop` around the method's phases.

Shapes are static: prompts share one padded length, rows end by mask. Seeds, α, thresholds and weights are traced.
Between the start of a batch and its end nothing crosses to the host.
"""

from collections.abc import Sequence
import dataclasses
import functools
import numbers
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speccascade import methods, probs, tokenizers
from speccascade.phases import run
from speccascade.types import Array, BONUS, Context, Model, Network, NOWHERE, Prompt, RESIDUAL, State, Stats, Window

_PER_MODEL = ('calls', 'positions', 'computed', 'drafted')  # statistics with an axis of models


@dataclasses.dataclass(frozen=True)
class Decoded:
  """What `decode` returns, in the order of the prompts.

  `tokens[i]` ends with EOS where the model ended it. `stats` holds numpy arrays, rows being examples, `source[i]` the
  origin of each token of `tokens[i]`. `logprobs[i]` is [M, n] when `trace` was asked for.
  """

  texts: list[str] | None
  tokens: list[list[int]]
  stats: Stats
  logprobs: list[np.ndarray] | None = None


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
) -> Decoded:
  """Continue each prompt by at most `max_new_tokens` tokens.

  Prompts are texts or token lists. The last model's EOS ids end a text. `example_ids` key the randomness: an example's
  output does not depend on its place or its company. `max_prompt_tokens` fixes the padded prompt length, so that calls
  with other prompts compile nothing. `trace` records each output token's log-probability under every model that scored
  it.
  """
  models = _check_models(method, models)
  rows = _encode(models, prompts)
  ids = _check_ids(example_ids, len(rows))
  _at_least_one('max_new_tokens', max_new_tokens)
  width = _prompt_width(models, rows, max_new_tokens, max_prompt_tokens)
  size = len(rows) if batch_size is None else _at_least_one('batch_size', batch_size)
  if isinstance(method, methods.SequenceCascade):
    return _sequence_cascade(method, models, rows, ids, size, width, max_new_tokens, sampler, seed)
  return _decode(method, models, rows, ids, size, width, max_new_tokens, sampler, seed, trace=trace)


def _decode(method, models, rows, ids, size, width, max_new_tokens, sampler, seed, *, stream=0, trace=False) -> Decoded:
  """Decode checked rows batch by batch; streams of one seed are independent."""
  outs, buffer = [], _buffer(method, models, width, max_new_tokens)
  for first in range(0, len(rows), size):
    some = slice(first, first + size)
    prompt, ids_here, real = _pad(rows[some], ids[some], min(size, len(rows)), width)
    noise = _keyed(seed, stream, ids_here, buffer, method.window + 1 if method.by_round else 1)
    state = decode_batch(
      method, models, prompt, max_new_tokens=max_new_tokens, sampler=sampler, noise=noise, trace=trace, real=real
    )
    outs.append(jax.device_get({k: getattr(state, k) for k in ('tokens', 'length', 'fault', 'stats', 'logprobs')}))
    _check_finite(method, models, outs[-1], ids_here)
  return _collect(method, models, rows, outs)


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
  slots = [models[m] for m in method.slots]
  buffer = _buffer(method, models, prompt.tokens.shape[1], max_new_tokens)
  owners = _cache_owners(slots)
  kept = sorted(set(owners))
  caches = tuple(_prefill(slots[s].network, slots[s].params, prompt, buffer) for s in kept)
  real = np.ones(prompt.length.shape, bool) if real is None else real
  fixed = _Program(tuple(s.network for s in slots), tuple(kept.index(s) for s in owners), buffer, _vocabulary(models), trace)
  params = tuple(s.params for s in slots)
  return _loop(fixed, method, params, caches, prompt, np.int32(max_new_tokens), sampler, noise, real)


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


def _buffer(method, models, width: int, max_new_tokens: int) -> int:
  """Return T: the slots of the token buffer and the caches, with room for a padded window after the last token."""
  start = width if models[-1].network.start_id is None else 1
  return start + _bucket(max_new_tokens) + method.window + 2


@functools.partial(jax.jit, static_argnums=(0, 3))
def _prefill(network, params, prompt, max_len):
  return network.prefill(params, prompt, max_len)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _loop(fixed, method, params, caches, prompt, max_new, sampler, noise, real):
  """Run the method's phases until every row has ended."""
  networks = fixed.networks
  extend = tuple(functools.partial(n.extend, p) for n, p in zip(networks, params, strict=True))
  context = Context(extend, fixed.cache_of, sampler, method.policy, networks[-1].eos_ids)
  tokens, length = _begin(networks[-1].start_id, prompt, fixed.buffer)
  state = _first_state(method, tokens, length, length + max_new, fixed.vocab, caches, noise, real, sampler, fixed.trace)

  def step(state: State) -> State:
    return run(method.phases, context, state.replace(active=~state.done))

  return jax.lax.while_loop(lambda s: ~s.done.all(), step, state)


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
  per_model = dict.fromkeys(_PER_MODEL, zeros(slots, rows))
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
    fault=jnp.full((slots, rows), -1, jnp.int32),
    stats=stats,
    logprobs=jnp.full((slots, rows, buffer), jnp.nan) if trace else None,
  )


@functools.partial(jax.jit, static_argnums=(3, 4))
def _keyed(seed, stream, ids, positions, in_block):
  key = jax.random.fold_in(jax.random.key(seed), stream)
  keys = jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(key, ids))
  return probs.Keyed.make(keys, positions, in_block)


# ---- what a user gave ----


def _at_least_one(name: str, value: int) -> int:
  if not isinstance(value, numbers.Integral) or value < 1:
    raise ValueError(f'{name}={value!r} is not a whole number of at least 1.')
  return int(value)


def _check_models(method, models: Sequence[Model]) -> list[Model]:
  models = list(models)
  few = len(models) < method.models
  if few or (len(models) > method.models and method.name != 'autoregressive'):
    raise ValueError(f'{method.name} decodes with {method.models} models, but {len(models)} were given.')
  first, *others = (models[m] for m in getattr(method, 'slots', range(len(models))))
  for other in others:
    if (first.network.start_id is None) != (other.network.start_id is None):
      raise ValueError(f'{first.name} and {other.name} cannot share a text: one is an encoder–decoder, one is not.')
  return models


def _vocabulary(models: Sequence[Model]) -> int:
  """Return how many token ids the models share; logits beyond them are padding, cut off for all alike."""
  if all(m.tokenizer is not None for m in models):
    return tokenizers.check_vocabularies(models)
  first = models[0]
  for other in models[1:]:
    if other.network.vocab_size != first.network.vocab_size:
      raise ValueError(
        f'The models differ in vocabulary: {first.name} has {first.network.vocab_size} tokens, {other.name} '
        f'{other.network.vocab_size}. Models of one run must share it.'
      )
  return first.network.vocab_size


def _encode(models: Sequence[Model], prompts) -> list[np.ndarray]:
  """Return prompts as arrays of token ids, each checked."""
  if isinstance(prompts, str) or not len(prompts):
    raise ValueError('prompts must be a list of texts or of token lists, with one prompt at least.')
  vocab, tokenizer = _vocabulary(models), models[-1].tokenizer
  rows = []
  for i, prompt in enumerate(prompts):
    if isinstance(prompt, str):
      if tokenizer is None:
        raise ValueError(f'prompt {i} is a text, but {models[-1].name} has no tokenizer; give token lists.')
      prompt = tokenizer.encode(prompt)
    row = np.asarray(prompt)
    if row.ndim != 1 or not row.size:
      raise ValueError(f'prompt {i} is empty; a model needs one token at least.')
    if not np.issubdtype(row.dtype, np.integer) or row.min() < 0 or row.max() >= vocab:
      raise ValueError(f'prompt {i} holds values that are not token ids of 0 … {vocab - 1}: {row[:10].tolist()} …')
    rows.append(row.astype(np.int32))
  return rows


def _check_ids(example_ids, count: int) -> np.ndarray:
  ids = np.arange(count) if example_ids is None else np.asarray(example_ids)
  if ids.shape != (count,):
    raise ValueError(f'{count} prompts need as many example_ids, not {ids.shape[0] if ids.ndim else "a single one"}.')
  if not np.issubdtype(ids.dtype, np.integer) or (ids < 0).any() or (ids >= 2**32).any():
    raise ValueError('example_ids must be whole numbers of 0 … 2^32 - 1.')
  return ids.astype(np.uint32)


def _bucket(n: int) -> int:
  """Round up to 8, 12, 16, 24, 32, 48, … so that few shapes are compiled and at most a third is padding."""
  power = 8
  while power < n:
    power *= 2
  return power * 3 // 4 if power > 8 and n <= power * 3 // 4 else power


def _prompt_width(models, rows, max_new_tokens: int, given: int | None) -> int:
  """Return the padded prompt length, having checked that every prompt fits it and the models' positions."""
  longest = max(range(len(rows)), key=lambda i: rows[i].size)
  length = rows[longest].size
  if given is not None and length > _at_least_one('max_prompt_tokens', given):
    raise ValueError(
      f'prompt {longest} has {length} tokens, more than max_prompt_tokens={given}; shorten it or raise the limit.'
    )
  for model in models:
    network = model.network
    most = network.max_positions
    needed = max_new_tokens + 1 if network.start_id is not None else length + max_new_tokens
    if most is not None and needed > most:
      raise ValueError(
        f'prompt {longest} ({length} tokens) and max_new_tokens={max_new_tokens} need {needed} positions, but '
        f'{model.name} has {most}; shorten one of them.'
      )
  return given or _bucket(length)


def _pad(rows, ids, size: int, width: int) -> tuple[Prompt, np.ndarray, np.ndarray]:
  """Return a batch of `size` rows; those beyond the real ones repeat the first."""
  tokens = np.zeros((size, width), np.int32)
  length, real, all_ids = np.ones(size, np.int32), np.zeros(size, bool), np.zeros(size, np.uint32)
  for i, row in enumerate(rows):
    tokens[i, : row.size], length[i], real[i], all_ids[i] = row, row.size, True, ids[i]
  return Prompt(tokens, length), all_ids, real


# ---- what a user gets ----


def _check_finite(method, models, out: dict, ids: np.ndarray):
  for slot, row in np.argwhere(out['fault'] >= 0):
    name = models[method.slots[slot]].name
    raise ValueError(
      f'example {ids[row]}: the logits of model {method.slots[slot]} ({name}) are not finite after position '
      f'{out["fault"][slot, row]}. Check its weights for NaN, or decode in float32 if they overflow.'
    )


def _collect(method, models, rows, outs: list[dict]) -> Decoded:
  """Join batches; sum slots that run the same model."""
  count = len(rows)
  start = [1] * count if models[-1].network.start_id is not None else [r.size for r in rows]

  def join(name, axis):
    return np.concatenate([getattr(o['stats'], name) for o in outs], axis)

  fields = {}
  for field in dataclasses.fields(Stats):
    if field.name in _PER_MODEL:
      by_model = np.zeros((method.models, count), np.int64)
      np.add.at(by_model, list(method.slots), join(field.name, 1)[:, :count])
      fields[field.name] = by_model
    else:
      fields[field.name] = join(field.name, 0)[:count]
  tokens, length = (np.concatenate([o[k] for o in outs])[:count] for k in ('tokens', 'length'))
  spans = [slice(a, b) for a, b in zip(start, length, strict=True)]
  number = np.array([*method.slots, NOWHERE, BONUS, RESIDUAL])  # the codes -3, -2, -1 stand for themselves
  fields['source'] = [number[row[span]] for row, span in zip(fields['source'], spans, strict=True)]
  texts = None
  lists = [row[span].tolist() for row, span in zip(tokens, spans, strict=True)]
  if models[-1].tokenizer is not None:
    texts = [models[-1].tokenizer.decode(x) for x in lists]
  logprobs = None
  if outs[0]['logprobs'] is not None:
    noted = np.concatenate([o['logprobs'] for o in outs], 1)
    logprobs = [noted[:, i, span] for i, span in enumerate(spans)]
  return Decoded(texts, lists, Stats(**fields), logprobs)


def _sequence_cascade(method, models, rows, ids, size, width, max_new_tokens, sampler, seed) -> Decoded:
  """Answer with model 0; answer anew with model 1 where the score is low; add up what both cost.

  The second answer has a stream of random numbers of its own, for the first one's have chosen it.
  """
  small = _decode(methods.autoregressive(0), models, rows, ids, size, width, max_new_tokens, sampler, seed, trace=True)
  scores = [float(method.score(x[0])) for x in small.logprobs]
  anew = [i for i, score in enumerate(scores) if score < method.threshold]
  fields = {f.name: getattr(small.stats, f.name) for f in dataclasses.fields(Stats)}
  for name in _PER_MODEL:
    fields[name] = np.pad(fields[name], ((0, 1), (0, 0)))
  tokens, texts = list(small.tokens), small.texts
  if anew:
    again = _decode(
      methods.autoregressive(1), models, [rows[i] for i in anew], ids[anew], min(size, len(anew)), width,
      max_new_tokens, sampler, seed, stream=1,
    )  # fmt: skip
    for name, value in fields.items():
      new = getattr(again.stats, name)
      if name in _PER_MODEL:
        value[:, anew] += new
      elif name != 'source':
        value[anew] = new if name == 'emitted' else value[anew] + new
    for i, new, source in zip(anew, again.tokens, again.stats.source, strict=True):
      tokens[i], fields['source'][i] = new, source
    if texts is not None:
      texts = [again.texts[anew.index(i)] if i in anew else text for i, text in enumerate(texts)]
  return Decoded(texts, tokens, Stats(**fields))
