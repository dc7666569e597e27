"""The protocols that models and plug-ins follow, and the words that all modules share.

Axis letters, here and everywhere: B batch, M models of a method, L new tokens, W window of pending tokens,
V vocabulary, T token buffer, S prompt.
"""

from collections.abc import Callable, Sequence
import dataclasses
import enum
import functools
import itertools
import numbers
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

Array = jax.Array
Cache = Any  # a pytree, rows on axis 0
Params = Any  # a pytree
Carry = Any  # a pytree: what a policy keeps from round to round, rows on axis 0

static = functools.partial(struct.field, pytree_node=False)  # a field that the program is compiled for

# Why a random number is drawn. One (example, position, purpose) is used for one decision only.
DRAFT = 0
ACCEPT = 1
FINAL = 2

# Where an output token came from: a model's number, or one of these.
RESIDUAL = -1
BONUS = -2
NO_SOURCE = -3
AFTER_LEAF = -4


class Told(enum.Flag):
  """What a decision about a drafted token may know beyond the committed text and the pending tokens before it.

  Attributes:
    NOTHING: No more.
    TOKEN: The token.
    LATER: Pending tokens behind it.
    OTHERS: The drafts of other rows.
    EARLIER: A draft of an earlier round.
    PLACE: How far it stands from the first pending token.
  """

  NOTHING = 0
  TOKEN = enum.auto()
  LATER = enum.auto()
  OTHERS = enum.auto()
  EARLIER = enum.auto()
  PLACE = enum.auto()


# Why a row has no next token: for a model, whose logits are not finite, the code of `of_logits`, or one of these.
NO_FAULT = -1
STALLED = -2  # no round commits one
SUM = -3  # the target does not sum to 1
NEGATIVE = -4  # the target has a negative entry


def of_logits(slot: int, asked: Array | int) -> Array | int:
  """Return the code of a slot whose logits are not finite, by its own or, if `asked`, by what the request made."""
  return 2 * slot + asked


@struct.dataclass
class Prompt:
  """A batch of token lists, padded on the right."""

  tokens: Array  # [B, S]
  length: Array  # [B]


@struct.dataclass
class Window:
  """The pending tokens: drafted, in `State.tokens`, not yet tested. Slot j belongs to position `length + j`."""

  size: Array  # [B] how many are pending
  probs: Array | None  # [B, W, V] the distribution that each was drawn from; None where all are greedy, so one-hot
  source: Array  # [B, W] the model that drew it
  # M × [B, W+1, V] next-token logits at each slot, as far as `fed` reaches; None where no phase reads a model's.
  logits: tuple[Array | None, ...]
  vocab: int = static(default=0)  # the number of tokens
  leaves: Any = ()  # `engine.leaves.Leaves` of the draft, or what stands for none


class Network:
  """The base of every network, a model's architecture: hashable, without parameters.

  A network has `vocab_size`, `prefill` and `extend`. All else has the defaults here.

  Attributes:
    vocab_size: The width of the logits.
    eos_ids: The tokens that end a text.
    start_id: The decoder's first token, or None for a decoder-only network, whose output continues the prompt in one
      buffer.
    max_positions: How many positions there are; None if they are unbounded.
    context: Beyond how many positions the distributions are not to be trusted; None if that is not known.
    packs: Whether `extend` takes another argument, a `models.packing.Packing` of its window.
    takes_leaves: Whether `extend` takes `leaves`.
    remembers: Whether `remember` changes the parameters.
    drafts_only: Whether the network proposes tokens and cannot verify.
    scan: Whether the parameters of all layers are stacked.
    depth: The number of layers that `first_layers` chooses from; 0 where there is no early exit.
    tied: Whether the head is the embedding.
    mask_token: The token that stands for one that is not drawn yet, where the network drafts in one pass: fed n - 1 of
      them behind a text, it returns a distribution for each of the next n tokens.
    corrects: Whether the logits of a token in such a draft are `corrected` by the token drawn before it.
    provisional: Whether what it keeps of the tokens that it drafts is made again once they are committed.
    experts: The number of experts of a layer, and how many of them a token is given to; (1, 1) for one MLP.
    head_counts: The numbers of query heads and of key-value heads; axes of parameters that join heads with their
      dimensions are sharded by heads.
  """

  vocab_size: int
  eos_ids: tuple[int, ...] = ()
  start_id: int | None = None
  max_positions: int | None = None
  context: int | None = None
  packs: bool = False
  takes_leaves: bool = False
  remembers: bool = False
  drafts_only: bool = False
  scan: bool = False
  depth: int = 0
  tied: bool = False
  mask_token: int | None = None
  corrects: bool = False
  provisional: bool = False
  experts: tuple[int, int] = (1, 1)
  head_counts: tuple[int, int] = (1, 1)

  def endless(self) -> 'Network':
    """Return the network without tokens that end a text."""
    if not self.eos_ids:
      return self
    if not (dataclasses.is_dataclass(self) and any(field.name == 'eos_ids' for field in dataclasses.fields(self))):
      raise ValueError(
        f'{type(self).__name__} is timed without its eos_ids={self.eos_ids}, which are no field of a dataclass: make '
        'them one, or override endless().'
      )
    return dataclasses.replace(self, eos_ids=())

  def prefill(self, params: Params, prompt: Prompt, max_len: int) -> Cache:
    """Read prompts.

    Args:
      params: The parameters.
      prompt: A batch of prompts.
      max_len: The number of slots of the cache.

    Returns:
      A cache, rows on axis 0, that has seen the prompts. That of a decoder-only network may leave out the last token of
      each, which the loop feeds to `extend`.
    """
    raise NotImplementedError

  def extend(self, params: Params, cache: Cache, tokens: Array, positions: Array) -> tuple[Array, Cache]:
    """Feed tokens.

    Args:
      params: The parameters.
      cache: The cache.
      tokens: [B, L].
      positions: [B, L], consecutive in each row.

    A network that `takes_leaves` has a keyword `leaves`, how many of the last tokens are leaves: one at position p sees
    what lies before p and itself, and no later token sees it.

    Returns:
      The logits [B, L, V] of the tokens after them, and the cache.
    """
    raise NotImplementedError

  def corrected(self, params: Params, logits: Array, token: Array) -> Array:
    """Return the logits [B, V] of a token in a draft of one pass by the token [B] before it."""
    raise NotImplementedError

  def lacks(self, params: Params) -> Array | None:
    """Return [V]: the tokens whose logit is always -∞; None where there are none."""
    return None

  def on(self, backend: Any) -> 'Network':
    """Return the network that computes on a `backends.Backend`; by default it computes as it is."""
    return self

  def empty_cache(self, params: Params, batch: int, slots: int) -> Cache:
    """Return a cache that has seen nothing, for a decoder-only network; by default one whose first slot is stale."""
    return self.prefill(params, Prompt(jnp.zeros((batch, 1), jnp.int32), jnp.ones(batch, jnp.int32)), slots)

  def shares_cache(self, params: Params, other: 'Network', other_params: Params) -> bool:
    """Tell whether this is a part of another network, which finds its state in that one's cache.

    It leaves the rest of that cache as it is.
    """
    return False

  def reads(self, params: Params, cache: Cache) -> tuple[Params, Cache]:
    """Return what a call reads of the parameters, or their shapes, and of the cache, or what stands for it."""
    return params, cache

  def first_layers(self, params: Params, layers: int) -> tuple['Network', Params]:
    """Return the network of the first layers, where it has `depth`, and its parameters."""
    raise NotImplementedError

  def remember(self, params: Params, texts: Sequence[tuple[Any, int]]) -> Params:
    """Return the parameters after texts of the same call that have ended: tokens, and where the output begins."""
    return params

  def param_shapes(self) -> Params | None:
    """Return the shapes and dtypes of the parameters, which reading checkpoints and meshes need; None if not known."""
    return None

  def param_axes(self) -> Params | None:
    """Return a `PartitionSpec` of logical axis names for each parameter; None to replicate all on a mesh."""
    return None


@struct.dataclass
class Model:
  """A network with its parameters and, to read and write texts, its tokenizer."""

  params: Params
  network: Network = static()
  tokenizer: Any = static(default=None)
  name: str = static(default='model')
  digest: str | None = static(default=None)  # of the checkpoint that it was loaded from
  generation: str | None = static(default=None)  # its generation_config.json
  seeds: tuple[int, ...] = static(default=())  # of the calls whose outputs it remembers


def named_apart(models: Sequence[Model]) -> list[Model]:
  """Return models whose names differ: a later one of the same name has a number behind it."""
  names: list[str] = []
  for model in models:
    numbered = (f'{model.name} {n}' for n in itertools.count(2))
    names.append(next(name for name in itertools.chain([model.name], numbered) if name not in names))
  return [m.replace(name=n) for m, n in zip(models, names, strict=True)]


Rule = Callable[..., Array]  # (q, p, *, alpha) of two rules.Predictions -> bool [...], bool [..., V] or π [..., V]
Combiner = Callable[..., Array]  # (models, …) of a list of rules.Predictions -> π [..., V]


def checked_int(name: str, value: Any, least: int = 1, most: int = 2**31 - 1) -> int:
  """Return a user's number as an int.

  Args:
    name: The name of the number in the error.
    value: The number.
    least: The least that it may be.
    most: The most that it may be, by default the most that 32 bits hold.

  Raises:
    ValueError: it is not whole, or less, or more.
  """
  if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
    raise ValueError(f'{name}={value!r} is not a whole number of at least {least}.')
  if value > most:
    raise ValueError(f'{name}={value!r} is more than {most}; give a smaller number.')
  return int(value)


def check_bits():
  """Refuse numbers of 64 bits, which nothing here is written for."""
  if jax.config.jax_enable_x64:
    raise ValueError('everything here has 32 bits: set jax_enable_x64 to False, or JAX_ENABLE_X64=0, around it.')


def iota(n: int) -> Array:
  """Return 0 … n-1 as a row [1, n], which broadcasts against [B, 1]."""
  return jnp.arange(n)[None]
