"""Teacher forcing: the logits of every target token, given the source and the tokens before it.

A drafter of several tokens is asked for more than the next one, as in a round of decoding. The tokens of a text are
shared out among chains of γ - 1 tokens, whose offset changes from batch to batch, so that in each step every token is
drafted at one depth, next to the first token of a draft, which is drafted everywhere. The weights fall with the depth.

  one pass   a chain is masks behind the text (PARD, An et al. 2025), also of a head (P-EAGLE)
  EAGLE      a chain goes on with the head's own features, as training-time test of EAGLE-3 (Li et al. 2025) does
  Medusa     every head drafts from every position; there is no chain

Of a head beside a verifier, which is the teacher, only the head is trained.

Axis letters: B batch, S source, L target, N tokens fed, A chains, M logits of a row, V vocabulary, E features.
"""

import dataclasses

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from speccascade.backends.ops import gathered_take, take
from speccascade.drafters.hidden import Head, Reading, shifted
from speccascade.drafters.medusa import MASK, Medusa
from speccascade.models.base import Base
from speccascade.models.t5 import T5
from speccascade.train.batches import Batch
from speccascade.types import Array, Cache, checked_int, Model, Network, Params, Prompt


@dataclasses.dataclass(frozen=True)
class Drafting:
  """How a drafter in one pass, or a head beside a verifier, is trained.

  Attributes:
    depth: γ, the most tokens of a draft; Medusa has as many as heads.
    keep: The k-th token of a draft has the weight keep^(k - 1),
    least: and no less than this.
    features: Weight of the smooth L1 distance of EAGLE-1's features from the verifier's.
  """

  depth: int = 5
  keep: float = 0.7
  least: float = 0.2
  features: float = 0.0

  def __post_init__(self):
    checked_int('depth', self.depth, 2)
    for name, most in (('keep', 1.0), ('least', 1.0), ('features', float('inf'))):
      if not 0 <= getattr(self, name) <= most:
        raise ValueError(f'train.Drafting: {name}={getattr(self, name)} does not lie in 0…{most}')

  def weights(self, n: int) -> np.ndarray:
    """Return the weights [1, 1, n] of the tokens of a draft of n."""
    return np.maximum(self.keep ** np.arange(n), self.least).astype(np.float32)[None, None]


@struct.dataclass
class Forced:
  """What is said of target tokens.

  Attributes:
    logits: [B, M, V].
    at: [B, M], the index of each one's target token.
    weight: [B, M], 0 for what is no target.
    taught: The teacher's logits [B, L, V] where they were computed.
    apart: [B, M] distances of features, where they are trained.
  """

  logits: Array
  at: Array
  weight: Array
  taught: Array | None = None
  apart: Array | None = None

  def mean(self, x: Array) -> Array:
    """Return the weighted mean of x [B, M]."""
    return jnp.where(self.weight > 0, x * self.weight, 0.0).sum() / self.weight.sum().astype(jnp.float32)


def forced(
  network: Network, params: Params, batch: Batch, teacher: Model | None = None, drafting: Drafting | None = None
) -> Forced:
  """Return what a network says of every target token.

  Args:
    network: The network.
    params: Its parameters.
    batch: Token lists [B, S] and [B, L].
    teacher: The verifier of a head.
    drafting: How a drafter of several tokens is trained.
  """
  drafting = drafting or Drafting()
  if isinstance(network, Medusa):
    return _medusa(network, params, batch, teacher, drafting)
  if isinstance(network, Head):
    return _chained(network.fitted(teacher.network), params, batch, teacher, drafting)
  if network.mask_token is not None:
    return _masked(network, params, batch, drafting)
  logits = logits_of(network, params, batch)
  return Forced(logits, *_plain(batch))


def logits_of(network: Network, params: Params, batch: Batch) -> Array:
  """Return float32 logits [B, L, V] of every target token given the source and the tokens before it."""
  return _read(network, params, batch).logits


@struct.dataclass
class _Text:
  """What a network makes of source and target; `slots` [B, L] are the positions of the tokens before the target's."""

  tokens: Array  # [B, N]
  positions: Array  # [B, N]
  slots: Array
  logits: Array  # [B, L, V]
  cache: Cache
  states: Array | None  # [B, N, …]


def _read(network: Network, params: Params, batch: Batch, beyond: int = 0, kept: tuple[int, ...] = ()) -> _Text:
  """Feed the texts of a batch, a decoder's as one text, with slots beyond them, and keep states of the layers."""
  rows, width = batch.target.shape
  target = jnp.asarray(batch.target)
  if network.start_id is None:
    total = batch.source.shape[1] + width
    slots = jnp.asarray(batch.source_length)[:, None] + jnp.arange(width)[None]  # of the target's tokens
    tokens = jnp.pad(jnp.asarray(batch.source), ((0, 0), (0, width)))
    tokens = tokens.at[jnp.arange(rows)[:, None], slots].set(target)
    slots = slots - 1
    cache = network.empty_cache(params, rows, total + beyond)
  else:
    tokens = jnp.concatenate([jnp.full((rows, 1), network.start_id, jnp.int32), target[:, :-1]], axis=1)
    slots = jnp.broadcast_to(jnp.arange(width)[None], (rows, width))
    prompt = Prompt(jnp.asarray(batch.source), jnp.asarray(batch.source_length))
    prefill = _source if isinstance(network, T5) else type(network).prefill
    cache = prefill(network, params, prompt, width + beyond)
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
  given = params, cache, tokens, positions
  if not isinstance(network, Base):
    logits, cache = network.extend(*given)
    return _Text(tokens, positions, slots, gathered_take(logits, slots), cache, None)
  _, cache, states = network.observe(*given, (*kept, -1))  # all logits are not used, nor computed: only the target's
  *others, last = jnp.split(states, len(kept) + 1, -1)
  states = jnp.concatenate(others, -1) if kept else None
  return _Text(tokens, positions, slots, network.scores(params, gathered_take(last, slots)), cache, states)


def _source(network: T5, params: Params, prompt: Prompt, width: int) -> Cache:
  """Return what `prefill` does, whose program has the encoder three times, for long and short prompts.

  A batch is as wide as its texts, and each of the three would be differentiated.
  """
  first = Prompt(prompt.tokens[:, :1], jnp.ones_like(prompt.length))
  cache = network.prefill(params, first, width)
  source = network.module.apply({'params': params}, prompt.tokens, prompt.length, method='read_source')
  return {**cache, 'source': source, 'source_length': prompt.length}


def _plain(batch: Batch) -> tuple[Array, Array]:
  """Return the index [B, L] of each target token, and whether it is one."""
  at = jnp.broadcast_to(jnp.arange(batch.target.shape[1])[None], batch.target.shape)
  return at, (at < jnp.asarray(batch.target_length)[:, None]).astype(jnp.float32)


# ---- drafters of several tokens ----


def _masked(network: Network, params: Params, batch: Batch, drafting: Drafting) -> Forced:
  """Return what a drafter in one pass says, of the first token of each draft and of those that masks stand for."""
  text = _read(network, params, batch, drafting.depth)
  first, at = _chains(text, batch, drafting)
  rows, chains, n = at.shape
  logits, _ = network.extend(params, _repeated(text.cache, rows, chains), *_masks(network, first, n))
  return _joined(text.logits, logits.reshape(rows, chains * n, -1), at, batch, drafting)


def _masks(network: Network, first: Array, n: int) -> tuple[Array, Array]:
  """Return the masks [B·A, n] of chains behind slots [B, A], and their positions."""
  positions = (first[..., None] + 1 + jnp.arange(n)[None, None]).reshape(-1, n)
  return jnp.full_like(positions, network.mask_token), positions


def _chained(head: Head, params: Params, batch: Batch, verifier: Model, drafting: Drafting) -> Forced:
  """Return what a head says, after the verifier's features and in chains after its own, or of masks."""
  text = _read(verifier.network, verifier.params, batch, kept=head.kept)
  features = head.features(params, text.states)
  rows = batch.target.shape[0]
  cache = head.empty(params, rows, text.tokens.shape[1] + drafting.depth)

  def step(cache, tokens, positions, before):
    return head.step(params, cache, Reading(tokens, positions, before, verifier.network, verifier.params))

  logits, own, cache = step(cache, text.tokens, text.positions, shifted(features))
  first, at = _chains(text, batch, drafting)
  chains, n = at.shape[1:]
  cache = _repeated(cache, rows, chains)
  if head.mask_token is not None:
    masks = _masks(head, first, n)
    drafted, _, _ = step(cache, *masks, jnp.zeros((*masks[0].shape, features.shape[-1]), features.dtype))
    result = _joined(take(logits, text.slots), drafted.reshape(rows, chains * n, -1), at, batch, drafting)
    return result.replace(taught=text.logits)
  x = take(own, first)
  drafted, made = [], []
  for j in range(1, n + 1):
    tokens = take(text.tokens, first + j)
    q, x, cache = step(cache, tokens.reshape(-1, 1), (first + j).reshape(-1, 1), x.reshape(rows * chains, 1, -1))
    drafted.append(q.reshape(rows, chains, 1, -1))
    made.append(x.reshape(rows, chains, 1, -1))
  drafted, made = (jnp.concatenate(x, 2).reshape(rows, chains * n, -1) for x in (drafted, made))
  result = _joined(take(logits, text.slots), drafted, at, batch, drafting)
  result = result.replace(taught=text.logits)
  if not drafting.features:
    return result
  made = jnp.concatenate([take(own, text.slots), made], 1)
  true = take(features, take(text.slots, result.at))
  return result.replace(apart=optax.huber_loss(made.astype(jnp.float32), true.astype(jnp.float32)).mean(-1))


def _medusa(head: Medusa, params: Params, batch: Batch, verifier: Model, drafting: Drafting) -> Forced:
  """Return what every head says of the token that it drafts, from every position."""
  text = _read(verifier.network, verifier.params, batch, kept=head.kept)
  x = take(shifted(text.states), text.slots)  # [B, L, E] of the last token but one
  rows, width = batch.target.shape
  heads = head.config.heads
  tokens = jnp.where(jnp.arange(heads)[None] > 0, MASK, jnp.zeros((rows * width, 1), jnp.int32))
  given = Reading(tokens, tokens, x.reshape(rows * width, 1, -1), verifier.network, verifier.params)
  logits, _, _ = head.step(params, (), given)
  at = jnp.arange(width)[None, :, None] + jnp.arange(heads)[None, None]  # [1, L, K]
  weight = jnp.where(at < jnp.asarray(batch.target_length)[:, None, None], drafting.weights(heads), 0.0)
  at = jnp.broadcast_to(jnp.minimum(at, width - 1), weight.shape)
  flat = (logits.reshape(rows, width * heads, -1), at.reshape(rows, -1), weight.reshape(rows, -1))
  return Forced(*flat, taught=text.logits)


def _chains(text: _Text, batch: Batch, drafting: Drafting) -> tuple[Array, Array]:
  """Return the slot [B, A] that each chain begins behind, and the indices [B, A, γ - 1] of its target tokens.

  The offsets are drawn with a key of the batch, so that a run that is resumed draws the same.
  """
  rows, width = batch.target.shape
  n = drafting.depth - 1
  target = jnp.asarray(batch.target)
  key = jax.random.fold_in(jax.random.key(0), (target * (1 + jnp.arange(width))[None]).sum())
  begin = jax.random.randint(key, (rows, 1), 0, n) + n * jnp.arange(-(-width // n))[None]
  return take(text.slots, begin), begin[..., None] + 1 + jnp.arange(n)[None, None]


def _joined(plain: Array, drafted: Array, at: Array, batch: Batch, drafting: Drafting) -> Forced:
  """Return the first tokens of drafts [B, L, V] and those of chains [B, A·(γ - 1), V] together."""
  rows, width = batch.target.shape
  targets, weight = _plain(batch)
  inside = at < jnp.asarray(batch.target_length)[:, None, None]
  deep = jnp.where(inside, drafting.weights(drafting.depth)[..., 1:], 0.0)
  at = jnp.concatenate([targets, jnp.minimum(at, width - 1).reshape(rows, -1)], 1)
  return Forced(jnp.concatenate([plain, drafted], 1), at, jnp.concatenate([weight, deep.reshape(rows, -1)], 1))


def _repeated(cache: Cache, rows: int, times: int) -> Cache:
  """Return a cache whose rows are each there so many times."""

  def one(x):
    x = x.reshape(rows, 1, x.shape[0] // rows, *x.shape[1:])
    return jnp.broadcast_to(x, (rows, times, *x.shape[2:])).reshape(-1, *x.shape[3:])

  return jax.tree.map(one, cache)
