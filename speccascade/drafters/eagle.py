"""Heads of few layers on hidden states: EAGLE-1 (Li et al. 2024), EAGLE-3 (Li et al. 2025), P-EAGLE (2026), MTP.

Row p joins the feature of position p - 1 with the token at p. Row 0 has no feature: it is never attended to.

* EAGLE-1: x = fc [e; f], a layer without an input norm. f is what the verifier's head reads, and so is the result.
* EAGLE-3: g = fc [three states]. The layer reads [norm e; norm g] and adds to g. It has a norm and a head of its own,
  perhaps over a part of the vocabulary.
* P-EAGLE: EAGLE-3 that drafts in one pass, behind masks, which have a learned feature; more layers follow the first.
* MTP: x = fc [norm b; norm e], a layer as the verifier's, a norm of its own. b is the last state before the final norm.

Axis letters: B batch, L new tokens, T slots, E embedding, V vocabulary, D draft vocabulary.
"""

import dataclasses
import functools

from flax import linen as nn
import jax.numpy as jnp

from speccascade.backends import Backend, View
from speccascade.drafters.hidden import Head, Reading
from speccascade.models import cache as cache_lib
from speccascade.models import layers as blocks
from speccascade.models import rope as rope_lib
from speccascade.models.base import Base
from speccascade.models.decoder import attention_of, DecoderConfig, Layer, norm_of
from speccascade.types import Array, Cache, Params

UNSEEN = -1e9  # of a slot's score


@dataclasses.dataclass(frozen=True)
class HeadConfig:
  """Sizes and switches of a head.

  Attributes:
    kind: 'eagle', 'eagle3' or 'mtp'.
    layer: Sizes of its layers, whose vocabulary is the verifier's.
    kept: Which states of the verifier it reads, as `layers.kept_states` has them; () is EAGLE-3's choice by its depth.
    states: How many they are.
    fc_bias: Whether what joins features and tokens has a bias.
    draft_vocab: D, the tokens that it drafts; 0 for all.
    target_dim: E of the verifier where it is not that of the layer.
    own_embedding: Whether it has an embedding of its own.
    norms_residual: Whether EAGLE-3 adds to the normed g.
    norms_output: Whether EAGLE-3's next row reads the normed result.
    norms_states: 'each', 'all' or '' for none: which states EAGLE-3 norms before it joins them.
    mask_token: The id behind which P-EAGLE drafts; None for a head that drafts token by token.
    own_scores: Whether EAGLE-3 scores tokens by a matrix of its own, else by the verifier's.
  """

  kind: str
  layer: DecoderConfig
  kept: tuple[int, ...]
  states: int = 1
  target_dim: int = 0
  fc_bias: bool = False
  draft_vocab: int = 0
  own_embedding: bool = False
  norms_residual: bool = False
  norms_output: bool = False
  norms_states: str = ''
  mask_token: int | None = None
  own_scores: bool = True

  tied = False

  @property
  def vocab_size(self) -> int:
    """V of the verifier."""
    return self.layer.vocab_size

  @property
  def scores_itself(self) -> bool:
    """Whether it has a matrix of its own that scores tokens."""
    return self.kind == 'eagle3' and self.own_scores


class EagleModule(nn.Module):
  """What joins features and tokens, a layer that reads both, more layers, and what follows them."""

  config: HeadConfig
  dtype: str
  backend: Backend

  def setup(self):
    c, head = self.config.layer, self.config
    norm = norm_of(c, self.dtype)
    dense = functools.partial(blocks.Dense, dtype=self.dtype, backend=self.backend)
    self.fc = dense(c.embed_dim, ('table', 'embed'), head.fc_bias)
    self.attention = attention_of(c, self.dtype, self.backend)
    self.mlp = blocks.Mlp(c.mlp_dim, c.activation, c.gated, c.mlp_bias, self.dtype, self.backend)
    self.pre_mlp_layer_norm = norm()
    self.layers = [Layer(c, self.dtype, self.backend) for _ in c.spans[1:]]
    if head.mask_token is not None:
      shape = (head.states * (head.target_dim or c.embed_dim),)
      self.mask_hidden = blocks.parameter(self, 'mask_hidden', ('table',), shape, std=1.0)
    if head.kind != 'eagle':
      self.token_norm, self.feature_norm, self.final_norm = norm(), norm(), norm()
    if head.kind == 'mtp':
      self.pre_attention_layer_norm = norm()
    if head.norms_states == 'all':
      self.states_norm = norm()
    elif head.norms_states:
      self.states_norms = [norm() for _ in range(head.states)]
    if head.own_embedding:
      self.token_embedder = blocks.Embed(c.vocab_size, c.embed_dim, dtype=self.dtype, backend=self.backend)
    if head.scores_itself:
      self.logits_dense = dense(head.draft_vocab or c.vocab_size, ('embed', 'vocab'), out_dtype=jnp.float32)

  def features(self, states: Array) -> Array:
    """Return the features [B, L, E] of the verifier's states [B, L, n·E]."""
    head = self.config
    if head.kind != 'eagle3':
      return states
    if head.norms_states == 'all':
      states = self.states_norm(states)
    elif head.norms_states:
      parts = jnp.split(states, head.states, -1)
      states = jnp.concatenate([norm(part) for norm, part in zip(self.states_norms, parts, strict=True)], -1)
    return self.fc(states)

  def masked(self, features: Array, masks: Array) -> Array:
    """Return features [B, L, E], of those that are masks [B, L] what is learned."""
    return jnp.where(masks[..., None], self.features(self.mask_hidden[None, None]), features)

  def __call__(self, cache: Cache, tokens: Array, embedded: Array, features: Array, positions: Array) -> tuple:
    """Return what the head reads [B, L, E], the features [B, L, E] of these positions, and the cache."""
    c, head = self.config.layer, self.config
    e = self.token_embedder(tokens) if head.own_embedding else embedded
    e, g = (x.astype(self.dtype) for x in (e, features))
    if head.mask_token is not None:
      g = self.masked(g, tokens == head.mask_token)
    if head.kind == 'eagle':
      x = inside = self.fc(jnp.concatenate([e, g], -1))
    elif head.kind == 'eagle3':
      normed = self.feature_norm(g)
      x = normed if head.norms_residual else g
      inside = jnp.concatenate([self.token_norm(e), normed], -1)
    else:
      x = self.fc(jnp.concatenate([self.feature_norm(g), self.token_norm(e)], -1))
      inside = self.pre_attention_layer_norm(x)
    angles = rope_lib.angles(c.spans[0].rope, c.head_dim, positions)
    slots = cache_lib.slots_of(self.backend, cache)
    hidden = jnp.where(jnp.arange(slots) == 0, UNSEEN, 0.0).astype(jnp.float32)
    bias = jnp.broadcast_to(hidden, (1, c.heads, positions.shape[1], slots))
    y, cache = self.attention.extend(inside, cache, 0, View(positions, c.spans[0].window), bias, angles)
    x = x + y
    x = x + self.mlp(self.pre_mlp_layer_norm(x))
    for i, layer in enumerate(self.layers, 1):
      x, cache = layer(x, cache, i, View(positions, c.spans[i].window), angles, bias)
    normed = x if head.kind == 'eagle' else self.final_norm(x)
    return normed, (normed if head.norms_output else x), cache

  def scores(self, x: Array) -> Array:
    """Return the logits [B, L, D] of EAGLE-3's own matrix."""
    return self.logits_dense(x)

  def visit(self, cache: Cache) -> None:
    """Use every parameter once."""
    c = self.config.layer
    dim = self.config.target_dim or c.embed_dim
    states = jnp.zeros((1, 1, self.config.states * dim), self.dtype)
    zeros = jnp.zeros((1, 1), jnp.int32)
    x, _, _ = self(cache, zeros, jnp.zeros((1, 1, dim), self.dtype), self.features(states), zeros)
    if self.config.scores_itself:
      self.scores(x)


@dataclasses.dataclass(frozen=True)
class Eagle(Head):
  """An EAGLE head or an MTP layer; `write` [V] of its parameters numbers the tokens that it drafts, -1 for others.

  Where `spreads` is not set there is no `write`, and logits are of the D tokens alone, as training takes them.
  """

  config: HeadConfig
  dtype: str = 'float32'
  spreads: bool = dataclasses.field(default=True, kw_only=True, repr=False)

  def __post_init__(self):
    object.__setattr__(self, 'mask_token', self.config.mask_token)

  def fitted(self, verifier: Base) -> 'Eagle':
    if self.kept:
      return self
    depth = verifier.depth
    return dataclasses.replace(self, config=dataclasses.replace(self.config, kept=(2, depth // 2, depth - 3)))

  def over(self, count: int) -> 'Eagle':
    """Return the head with a matrix of its own over so many tokens."""
    return dataclasses.replace(self, config=dataclasses.replace(self.config, draft_vocab=count, own_scores=True))

  @property
  def size(self) -> int:
    return self.config.target_dim or self.config.layer.embed_dim

  @property
  def own_scores(self) -> bool:
    return self.config.scores_itself

  @property
  def _writes(self) -> bool:
    """Whether it has `write`."""
    return bool(self.config.draft_vocab) and self.spreads

  @property
  def module(self) -> EagleModule:
    return EagleModule(self.config, self.dtype, self.backend)

  def empty(self, params: Params, batch: int, slots: int) -> Cache:
    c = self.config.layer
    return cache_lib.empty(self.backend, len(c.spans), batch, c.kv_heads, slots, c.head_dim, self.dtype, False)

  def lacks(self, params: Params) -> Array | None:
    return params['write'] < 0 if self._writes else None

  def step(self, params: Params, cache: Cache, read: Reading) -> tuple[Array, Array | None, Cache]:
    args = cache, read.tokens, read.embedded(), read.features, read.positions
    x, features, cache = self.module.apply({'params': params}, *args)
    features = features if self.mask_token is None else None  # all that it reads is the verifier's
    if not self.own_scores:
      return read.scores(x), features, cache
    logits = self.module.apply({'params': params}, x, method='scores')
    if self._writes:
      logits = self.backend.spread(logits, params['write'])
    return logits, features, cache

  def init(self, key: Array) -> Params:
    params = super().init(key)
    if self._writes:
      ids = jnp.arange(self.vocab_size, dtype=jnp.int32)
      params['write'] = jnp.where(ids < self.config.draft_vocab, ids, -1)
    return params

  def _init(self) -> Params:
    params = self.module.init({}, self.empty({}, 1, 1), method='visit')['params']
    written = blocks.Drawn(jnp.zeros(self.vocab_size, jnp.int32), (None,))
    return params | ({'write': written} if self._writes else {})
