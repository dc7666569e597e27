"""Drafters that read the verifier's hidden states: a head beside a verifier, in one cache with it.

A head keeps, of each position that the verifier reads, what it makes of some of its hidden states: its features. It
joins the feature of position p - 1 with the token at p, and drafts the token at p + 1 from that. While it drafts, the
verifier's features end; the head goes on with its own, and reads the tokens that are committed again.

The verifier is wrapped too, so that it keeps the features. Both read and write one cache, as an early exit does:

* model: the verifier's keys and values;
* head: the head's;
* features [B, RING, D]: the latest ones, that of position p at p mod RING;
* read: the tokens and positions [B, RING] of the verifier's last window, at the same slots, -1 where it wrote none.

The features of leaves lie behind those of the window that they are beside. Where the token after a rejection is a leaf,
the head finds its feature there: the verifier has not read it yet in its own place.

Only the last features are ever read, so the ring is all that the text costs. What either network writes beyond what it
was fed is written again before it is read.

Axis letters: B batch, L new tokens, S prompt, E embedding, D feature, V vocabulary.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict
import jax
import jax.numpy as jnp

from speccascade.backends import Backend, sharding
from speccascade.backends.ops import take
from speccascade.models.around import SameTokens
from speccascade.models.base import Base
from speccascade.types import Array, Cache, Model, Network, Params, Prompt

RING = 64  # positions whose features are kept
MOST = RING // 2  # tokens that a model may be fed at once, so that those before them are still kept


class Head(Base):
  """The base of every head: a network without an embedding, whose `step` is called by `Drafter`.

  By default its sizes are those of `config.layer`, a `DecoderConfig`, and its `module` makes the features.
  """

  drafts_only = True
  scan = False

  @property
  def own_scores(self) -> bool:
    """Whether its logits are of a head of its own, and not of the verifier's."""
    return False

  @property
  def kept(self) -> tuple[int, ...]:
    """Which states of the verifier it reads, as `layers.kept_states` has them."""
    return self.config.kept

  @property
  def size(self) -> int:
    """E of the verifier that it was made for."""
    return self.config.layer.embed_dim

  @property
  def feature_dim(self) -> int:
    """D."""
    return self.config.layer.embed_dim

  @property
  def head_counts(self) -> tuple[int, int]:
    return self.config.layer.heads, self.config.layer.kv_heads

  def fitted(self, verifier: Base) -> 'Head':
    """Return the head with what follows from its verifier."""
    return self

  def features(self, params: Params, states: Array) -> Array:
    """Return the features [B, L, D] of the verifier's states [B, L, n·E]."""
    return self.module.apply({'params': params}, states, method='features')

  def empty(self, params: Params, batch: int, slots: int) -> Cache:
    """Return a cache that has seen nothing."""
    return ()

  def step(self, params: Params, cache: Cache, read: 'Reading') -> tuple[Array, Array | None, Cache]:
    """Feed tokens.

    Args:
      params: The head's parameters.
      cache: The head's cache.
      read: What is fed.

    Returns:
      The logits [B, L, V], the features [B, L, D] of these positions if the head makes them itself, and the cache.
    """
    raise NotImplementedError

  def prefill(self, params: Params, prompt: Prompt, max_len: int) -> Cache:
    raise ValueError(f'{type(self).__name__} drafts from hidden states: put it beside its verifier by drafters.beside.')

  extend = prefill


@dataclasses.dataclass(frozen=True)
class Reading:
  """What a head is fed: tokens [B, L] at positions [B, L], and the feature [B, L, D] of the position before each."""

  tokens: Array
  positions: Array
  features: Array
  verifier: Base
  params: Params  # the verifier's

  def of(self, tokens: Array, positions: Array) -> 'Reading':
    """Return the same of other tokens."""
    return dataclasses.replace(self, tokens=tokens, positions=positions)

  def embedded(self) -> Array:
    """Return the verifier's embedding of the tokens [B, L, E]."""
    return self.verifier.embedded(self.params, self.tokens, self.positions)

  def scores(self, x: Array) -> Array:
    """Return the logits of the verifier's head [B, L, V]."""
    return self.verifier.scores(self.params, x)


@dataclasses.dataclass(frozen=True)
class Pair(SameTokens):
  """What a head and its verifier have in common; their parameters are {'model': …, 'head': …}."""

  model: Any  # a Base with `observe`
  head: Head

  @property
  def inner(self) -> Network:
    return self.model

  def endless(self) -> 'Pair':
    return dataclasses.replace(self, model=self.model.endless())

  def on(self, backend: Backend) -> 'Pair':
    return dataclasses.replace(self, model=self.model.on(backend), head=self.head.on(backend))

  def param_shapes(self) -> Params:
    return {'model': self.model.param_shapes(), 'head': self.head.param_shapes()}

  def param_axes(self) -> Params:
    return {'model': self.model.param_axes(), 'head': self.head.param_axes()}

  def prefill(self, params: Params, prompt: Prompt, max_len: int) -> Cache:
    """Return the cache of both; the head has read the prompt with the verifier's features."""
    head = self.head.empty(params['head'], prompt.length.shape[0], max_len)
    if self.start_id is not None:  # an encoder–decoder's text begins with its start token
      model, features = self.model.prefill(params['model'], prompt, max_len), self._ring(params, prompt)
      return {'model': model, 'head': head, 'features': features, 'read': _nothing_read(prompt)}
    model, states = self.model.observe_prompt(params['model'], prompt, max_len, self.head.kept)
    features = self.head.features(params['head'], states)
    positions = jnp.broadcast_to(jnp.arange(prompt.tokens.shape[1])[None], prompt.tokens.shape)
    read = Reading(prompt.tokens, positions, shifted(features), self.model, params['model'])
    _, _, head = self.head.step(params['head'], head, read)
    last = prompt.length[:, None] - 1
    latest = last - (last - jnp.arange(RING)[None]) % RING  # the last position of each slot
    features = take(features, jnp.maximum(latest, 0))
    return {'model': model, 'head': head, 'features': features, 'read': _nothing_read(prompt)}

  def _ring(self, params: Params, prompt: Prompt) -> Array:
    shape = jax.eval_shape(self._embedded, params, prompt)
    return jnp.zeros((prompt.length.shape[0], RING, self.head.feature_dim), shape.dtype)

  def _embedded(self, params: Params, prompt: Prompt) -> Array:
    return self.model.embedded(params['model'], prompt.tokens, prompt.tokens)


class Observed(Pair):
  """The verifier, which keeps the features of what it reads."""

  takes_leaves = True

  def reads(self, params: Params, cache: Cache) -> tuple[Params, Cache]:
    own, model = self.model.reads(params['model'], cache['model'])
    return own, {'model': model, 'features': cache['features'], 'read': cache['read']}

  def extend(
    self, params: Params, cache: Cache, tokens: Array, positions: Array, leaves: int = 0
  ) -> tuple[Array, Cache]:
    """Feed tokens [B, L]; return logits [B, L, V] and the cache."""
    fed = params['model'], cache['model'], tokens, positions
    logits, model, states = self.model.observe(*fed, self.head.kept, leaves)
    features = _stored(cache['features'], self.head.features(params['head'], states), positions)
    index, fresh = _places(positions)
    read = tuple(jnp.where(fresh, take(x, index), -1) for x in (tokens, positions))
    return logits, {**cache, 'model': model, 'features': features, 'read': read}


class Drafter(Pair):
  """The head as a drafter, which goes on with its own features where the verifier's end."""

  drafts_only = True
  provisional = True

  @property
  def mask_token(self) -> int | None:
    return self.head.mask_token

  @property
  def corrects(self) -> bool:
    return self.head.corrects

  def lacks(self, params: Params) -> Array | None:
    return self.head.lacks(params['head'])

  def reads(self, params: Params, cache: Cache) -> tuple[Params, Cache]:
    """Leave out the verifier, but for its scores where the head has none, and a table of the head's."""
    path = () if self.head.own_scores else self.model.head_path
    scores = {name: x for name, x in flatten_dict(params['model']).items() if path and name[: len(path)] == path}
    head = {name: x for name, x in params['head'].items() if name != 'token_embedder'}
    return {'head': head, 'model': unflatten_dict(scores)}, {name: x for name, x in cache.items() if name != 'model'}

  def corrected(self, params: Params, logits: Array, token: Array) -> Array:
    return self.head.corrected(params['head'], logits, token)

  def shares_cache(self, params: Params, other: Network, other_params: Params) -> bool:
    return (
      isinstance(other, Observed) and (other.model, other.head) == (self.model, self.head) and params is other_params
    )

  def extend(self, params: Params, cache: Cache, tokens: Array, positions: Array) -> tuple[Array, Cache]:
    """Feed tokens [B, L]; return logits [B, L, V] of the tokens after them, and the cache."""
    ring = cache['features']
    slots = _slots_before(cache['read'], tokens, positions)
    before = jnp.where((positions > 0)[..., None], take(ring, slots), 0)
    read = Reading(tokens, positions, before.astype(ring.dtype), self.model, params['model'])
    logits, features, head = self.head.step(params['head'], cache['head'], read)
    ring = ring if features is None else _stored(ring, features, positions)
    return logits, {**cache, 'head': head, 'features': ring}


def shifted(x: Array) -> Array:
  """Return x [B, N, E] of the position before each one, 0 before the first."""
  return jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]


def _nothing_read(prompt: Prompt) -> tuple[Array, Array]:
  """Return the tokens and positions [B, RING] of no window."""
  nothing = jnp.full((prompt.length.shape[0], RING), -1, jnp.int32)
  return nothing, nothing


def _slots_before(read: tuple[Array, Array], tokens: Array, positions: Array) -> Array:
  """Return the slot of the feature before each of tokens [B, L], that of a leaf where the token before is one."""
  own = (positions - 1) % RING
  same = [x[:, :-1, None] == there[:, None] for x, there in zip((tokens, positions), read, strict=True)]
  found = same[0] & same[1]  # [B, L-1, RING]
  return own.at[:, 1:].set(jnp.where(found.any(-1), found.argmax(-1), own[:, 1:]))


def _places(positions: Array) -> tuple[Array, Array]:
  """Return which of L tokens that are fed from a position on each slot has [B, RING], and whether it has one."""
  width = positions.shape[1]
  if width > MOST:
    raise ValueError(
      f'a head beside a verifier takes windows of at most {MOST} tokens and leaves, not {width}: draft fewer.'
    )
  index = (jnp.arange(RING)[None] - positions[:, :1]) % RING
  return index, index < width


def _stored(ring: Array, new: Array, positions: Array) -> Array:
  """Return a ring of features [B, RING, D] with those [B, L, D] of tokens that are fed at positions [B, L]."""
  index, fresh = _places(positions)
  return jnp.where(fresh[..., None], take(new, index).astype(ring.dtype), ring)


def beside(head: Model, verifier: Model) -> list[Model]:
  """Return a head as a drafter and its verifier, which share their arrays and a cache.

  `decode` does so itself where a head is among its models.

  Args:
    head: A head that `load` has read, or one of one's own.
    verifier: The model that it was trained with.

  Raises:
    ValueError: If `head` is none, or the verifier is not of its size.
  """
  network, model = head.network, verifier.network
  if sharding.apart([head, verifier]):
    raise ValueError(f'{head.name} reads the states of {verifier.name}: load both with one mesh=….')
  if not isinstance(network, Head):
    raise ValueError(f'{head.name} is no head that reads hidden states, but a {type(network).__name__}: draft with it.')
  if isinstance(model, Head):
    raise ValueError(
      f'{verifier.name} is a head, which drafts and does not answer: give its verifier, as the last model.'
    )
  if not isinstance(model, Base):
    raise ValueError(
      f'{verifier.name} is a {type(model).__name__}, which shows no hidden states: take T5 or a decoder.'
    )
  if network.size != model.config.embed_dim:
    raise ValueError(
      f'{head.name} reads states of {network.size} numbers, and those of {verifier.name} have '
      f'{model.config.embed_dim}: give the verifier that it was trained with.'
    )
  network = network.fitted(model)
  if network.vocab_size != model.vocab_size:
    raise ValueError(
      f'{head.name} drafts {network.vocab_size} tokens, and {verifier.name} has {model.vocab_size}: give the verifier '
      'that it was trained with.'
    )
  params = {'model': verifier.params, 'head': head.params}
  digest = None if head.digest is None or verifier.digest is None else f'{head.digest}-{verifier.digest}'
  drafter = Model(params, Drafter(model, network), verifier.tokenizer, head.name, digest, verifier.generation)
  return [drafter, verifier.replace(params=params, network=Observed(model, network))]


def attached(models: Sequence[Model], verifier: int) -> list[Model]:
  """Return models, a head among them beside the verifier, whose number is given."""
  models = list(models)
  heads = [i for i, model in enumerate(models) if isinstance(model.network, Head)]
  if len(heads) > 1:
    names = ' and '.join(models[i].name for i in heads)
    raise ValueError(f'{names} are heads, and one reads the states of {models[verifier].name} at a time: give one.')
  for i in heads:
    models[i], models[verifier] = beside(models[i], models[verifier])
  return models


def alone(model: Model) -> Model:
  """Return a verifier without the head beside it; any other model as it is."""
  if not isinstance(model.network, Observed):
    return model
  return model.replace(params=model.params['model'], network=model.network.model)
