"""The state that every phase reads and writes, and the protocols that models and plug-ins follow.

Axis letters, here and everywhere: B batch, M models of a method, L new tokens, W window of pending tokens,
V vocabulary, T token buffer, S prompt.

Every array of the state has the rows of the batch on axis 0. Three facts hold between any two phases:
  * slot = absolute position, in the caches and in `State.tokens`; nothing stores an index;
  * `fed[b, m]` tokens of row b are in the cache of model m, so it knows the laws of positions up to `fed[b, m]`;
  * the last committed token is fed to no model: `fed <= length - 1` when nothing is pending.
"""

from collections.abc import Callable
import numbers
from typing import Any, NamedTuple, Protocol

from flax import struct
import jax
import jax.numpy as jnp

from speccascade import backends

Array = jax.Array
Cache = Any
Params = Any

# Why a random number is drawn. One (example, position, purpose) is used for one decision only.
DRAFT, ACCEPT, FINAL = 0, 1, 2

# Where an output token came from: a model's number, or one of these.
RESIDUAL, BONUS, NOWHERE = -1, -2, -3

# Whose fault it is that a token has no law: the model's own logits, or what the request and the processor make of them.
OWN, ASKED = 0, 1


@struct.dataclass
class Prompt:
  """A batch of token lists, padded on the right."""

  tokens: Array  # [B, S]
  length: Array  # [B]


class Network(Protocol):
  """A model's architecture: hashable, without parameters.

  `vocab_size` is the width of the logits. `start_id` is the decoder's first token, or None for a decoder-only
  model, whose prompt opens the very buffer that decoding goes on with. `max_positions` is None where positions are
  unbounded. A network may have `shares_cache(params, other, other_params) -> bool`: whether it is a part of the other
  one that finds its own state in the other's cache, and leaves the rest of it as it is.
  """

  vocab_size: int
  eos_ids: tuple[int, ...]
  start_id: int | None
  max_positions: int | None

  def prefill(self, params: Params, prompt: Prompt, max_len: int) -> Cache:
    """Return a cache of `max_len` slots that has seen the prompt (decoder-only: all but its last token)."""

  def extend(self, params: Params, cache: Cache, tokens: Array, positions: Array) -> tuple[Array, Cache]:
    """Feed tokens [B, L] at consecutive positions [B, L]; return logits [B, L, V] of the tokens after them."""


@struct.dataclass
class Model:
  """A network with its parameters and, for texts, its tokenizer."""

  params: Params
  network: Network = struct.field(pytree_node=False)
  tokenizer: Any = struct.field(pytree_node=False, default=None)
  name: str = struct.field(pytree_node=False, default='model')
  digest: str | None = struct.field(pytree_node=False, default=None)  # of the checkpoint that it was loaded from
  generation: str | None = struct.field(pytree_node=False, default=None)  # its generation_config.json


@struct.dataclass
class Window:
  """The pending tokens: drafted, in `State.tokens`, not yet tested. Slot j belongs to position `length + j`."""

  size: Array  # [B] how many are pending
  probs: Array | None  # [B, W, V] the law that each was drawn from; None where all are greedy, so one-hot
  source: Array  # [B, W] the model that drew it
  logits: tuple[Array, ...]  # M × [B, W+1, V] next-token logits at each slot, as far as `fed` reaches


@struct.dataclass
class Stats:
  """What decoding cost and where its tokens came from. Nothing after a row's end is counted, but in `computed`.

  `positions` are those that the method needed; `computed` are those that the device worked on for the row,
  with padding and with the steps for which the row was idle or finished.
  """

  calls: Array  # [B, M]
  positions: Array  # [B, M]
  computed: Array  # [B, M]
  drafted: Array  # [B, M]
  rounds: Array  # [B] verifications
  tested: Array  # [B] drafted tokens that met the acceptance test
  accepted: Array  # [B]
  emitted: Array  # [B]
  deferred: Array  # [B] emitted tokens at which the deferral rule chose the verifier
  accepted_lengths: Array  # [B, W+1] histogram over rounds of the accepted length
  verified_lengths: Array  # [B, W+1] histogram over rounds of how many pending tokens all models of the test scored
  tested_at: Array  # [B, W] by place in the block
  accepted_at: Array  # [B, W]
  source: Array  # [B, T] for each output token: the model that drafted it (or wrote it alone), RESIDUAL or BONUS


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
  sampler: Any  # probs.Sampler, its numbers [B]
  limits: 'Limits'
  noise: Any  # where random choices come from, see probs.Noise
  policy: tuple  # carry of the draft-length policy
  seen: Array | None  # [B, V] committed tokens, where the sampler has a repetition penalty
  counts: Array | None  # [B, V] how often each token was emitted, where the sampler has a presence or frequency penalty
  fault: Array  # [B, M+1] why the next token has no law: OWN or ASKED by model, last OWN for the target; or -1
  no_law: Array  # [B, 2] the sum of the target there, and its least entry
  stats: Stats
  logprobs: Array | None  # [B, M, T] log-probability of each output token under each model, when asked for
  top: 'Top | None'


@struct.dataclass
class Limits:
  """What a row's request says of its logits and of its end, where a request of the batch says so at all."""

  stop_ids: Array  # [B, K] tokens that end the row beside EOS; -1 is none
  least: Array | None = None  # [B] the position before which the row must not end
  bias: Array | None = None  # [B, V] added to every model's logits


@struct.dataclass
class Top:
  """The likeliest tokens under the last model at each output position."""

  ids: Array  # [B, T, K]
  logprobs: Array  # [B, T, K]


class Context(NamedTuple):
  """What is fixed while decoding: the models with their parameters bound, and the policy."""

  extend: tuple[Callable[[Cache, Array, Array], tuple[Array, Cache]], ...]
  cache_of: tuple[int, ...]  # the cache that each model keeps its state in
  policy: Any  # stopping.Policy
  eos_ids: tuple[int, ...]
  processor: Callable[[Array, Array, Array], Array] | None = None  # (logits [V], tokens [T], how many) -> logits [V]


Phase = Callable[[Context, State], State]
Rule = Callable[..., Array]  # (q_logits, p_logits, *, alpha, sampler) -> probs [..., V]
Combiner = Callable[..., Array]  # (logits [M, ..., V], *, sampler) -> probs [..., V]


def whole(name: str, value: Any, least: int = 1) -> int:
  """Return a number that the user gave as `name`, having checked that it is whole and at least `least`."""
  if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
    raise ValueError(f'{name}={value!r} is not a whole number of at least {least}.')
  return int(value)


def check_bits():
  """Refuse numbers of 64 bits, which nothing here is written for."""
  if jax.config.jax_enable_x64:
    raise ValueError('everything here has 32 bits: set jax_enable_x64 to False, or JAX_ENABLE_X64=0, around it.')


def places(n: int) -> Array:
  """Return 0 … n-1 as a row [1, n], to stand beside [B, 1]."""
  return jnp.arange(n)[None]


def take(x: Array, index: Array) -> Array:
  """Gather along axis 1: x [B, N, ...] at index [B, K] gives [B, K, ...]."""
  return backends.current().take(x, index)


def take1(x: Array, index: Array) -> Array:
  """Gather one entry of axis 1 for each row: x [B, N, ...] at index [B] gives [B, ...]."""
  return take(x, index[:, None])[:, 0]
