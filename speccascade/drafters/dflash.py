"""DFlash and DSpark: a block of masks that is filled in one pass, over the verifier's hidden states as context.

With n tokens committed, the block is the last one and B - 1 masks, at positions n - 1 … n + B - 2. Each layer attends
from the block to itself, in both directions, and to a context: slot i < n - 1 has the keys and values of what the head
makes of the verifier's states at i. Output j fills position n - 1 + j, so B - 1 tokens are drafted.

DSpark's output j is of the position after that: the last token drafts, too, so B tokens are drafted. Its Markov head,
of low rank, adds to a token's logits what follows from the token before it.

Axis letters: B batch, L new tokens, E embedding, V vocabulary, T slots.
"""

import dataclasses

from flax import linen as nn
import jax.numpy as jnp

from speccascade.backends import Backend
from speccascade.backends.ops import take
from speccascade.drafters.hidden import Head, Reading
from speccascade.models import cache as cache_lib
from speccascade.models import layers as blocks
from speccascade.models import rope as rope_lib
from speccascade.models.decoder import attention_of, DecoderConfig, norm_of
from speccascade.types import Array, Cache, Params


@dataclasses.dataclass(frozen=True)
class DFlashConfig:
  """Sizes of a head: `layer` of its layers, `block` B, whether the last token drafts, and the rank of a Markov head."""

  layer: DecoderConfig
  kept: tuple[int, ...]
  block: int
  mask_token: int
  last_drafts: bool = False
  rank: int = 0

  tied = False

  @property
  def vocab_size(self) -> int:
    """V of the verifier."""
    return self.layer.vocab_size


@dataclasses.dataclass(frozen=True)
class Block:
  """Where the rows [B, L] that are fed lie, and what they may see."""

  positions: Array
  last: Array  # [B, 1] n - 1
  size: int

  @property
  def seen(self) -> Array:
    """The number of slots that the block sees [B]."""
    return self.last[:, 0] + self.size

  def joined(self, context: Array, block: Array) -> tuple[Array, Array]:
    """Return what consecutive slots get, and the first of them [B].

    Args:
      context: What the slot before each row gets [B, L, …] as context.
      block: What the slot of each row gets [B, L, …] as a part of the block.
    """
    first = self.positions[:, :1]
    start = jnp.maximum(first - 1, 0)
    slot = start + jnp.arange(self.positions.shape[1])[None]
    before = (slot < self.last).reshape(*slot.shape, *[1] * (block.ndim - 2))
    at = [jnp.clip(slot + n - first, 0, slot.shape[1] - 1) for n in (1, 0)]
    return jnp.where(before, take(context, at[0]), take(block, at[1])), start[:, 0]


class DFlashLayer(nn.Module):
  """Attention to the context and the block, and an MLP."""

  config: DecoderConfig
  dtype: str
  backend: Backend

  def setup(self):
    c = self.config
    norm = norm_of(c, self.dtype)
    self.attention = attention_of(c, self.dtype, self.backend)
    self.mlp = blocks.Mlp(c.mlp_dim, c.activation, c.gated, c.mlp_bias, self.dtype, self.backend)
    self.pre_attention_layer_norm, self.pre_mlp_layer_norm = norm(), norm()

  def __call__(self, x: Array, context: Array, cache: Cache, block: Block) -> tuple[Array, Cache]:
    """Return what the layer makes of x [B, L, E], and the cache with the context [B, L, E] and the block."""
    c = self.config
    here, there = (rope_lib.angles(c.spans[0].rope, c.head_dim, block.positions - n) for n in (0, 1))
    inside = self.pre_attention_layer_norm(x)
    both = zip(self.attention.keys_values(context, there), self.attention.keys_values(inside, here), strict=True)
    (k, start), (v, _) = (block.joined(*pair) for pair in both)
    cache = self.backend.write(cache, self.backend.entry(k, v), start)
    x = x + self.attention.attend(inside, cache, block.seen, rope=here)
    return x + self.mlp(self.pre_mlp_layer_norm(x)), cache


class DFlashModule(nn.Module):
  """What makes the context, the layers and the norm behind them."""

  config: DFlashConfig
  dtype: str
  backend: Backend

  def setup(self):
    c = self.config.layer
    norm = norm_of(c, self.dtype)
    self.fc = blocks.Dense(c.embed_dim, ('table', 'embed'), dtype=self.dtype, backend=self.backend)
    self.feature_norm, self.final_norm = norm(), norm()
    self.layers = [DFlashLayer(c, self.dtype, self.backend) for _ in c.spans]
    if rank := self.config.rank:
      how = dict(dtype=self.dtype, backend=self.backend)
      self.markov_embedder = blocks.Embed(c.vocab_size, rank, **how)
      self.markov_dense = blocks.Dense(c.vocab_size, ('table', 'vocab'), out_dtype=jnp.float32, **how)

  def features(self, states: Array) -> Array:
    """Return the context [B, L, E] of the verifier's states [B, L, n·E]."""
    return self.feature_norm(self.fc(states))

  def __call__(self, cache: Cache, x: Array, context: Array, block: Block) -> tuple[Array, Cache]:
    """Return what the verifier's head reads [B, L, E], and the cache."""
    entries = []
    for layer, entry in zip(self.layers, cache, strict=True):
      x, entry = layer(x, context, entry, block)
      entries.append(entry)
    return self.final_norm(x), tuple(entries)

  def follows(self, token: Array) -> Array:
    """Return what the Markov head adds to the logits [B, V] after a token [B]."""
    return self.markov_dense(self.markov_embedder(token))

  def visit(self, cache: Cache) -> None:
    """Use every parameter once."""
    if self.config.rank:
      self.follows(jnp.zeros(1, jnp.int32))
    c, zeros = self.config, jnp.zeros((1, 1), jnp.int32)
    x = self.features(jnp.zeros((1, 1, len(c.kept) * c.layer.embed_dim), self.dtype))
    self(cache, x, x, Block(zeros, zeros, 1))


@dataclasses.dataclass(frozen=True)
class DFlash(Head):
  """A head that fills a block of masks."""

  config: DFlashConfig
  dtype: str = 'float32'

  def __post_init__(self):
    object.__setattr__(self, 'mask_token', self.config.mask_token)

  @property
  def module(self) -> DFlashModule:
    return DFlashModule(self.config, self.dtype, self.backend)

  def empty(self, params: Params, batch: int, slots: int) -> Cache:
    c = self.config.layer
    slots += self.config.block  # masks may lie behind the last position of a row
    return cache_lib.empty(self.backend, len(c.spans), batch, c.kv_heads, slots, c.head_dim, self.dtype, False)

  def step(self, params: Params, cache: Cache, read: Reading) -> tuple[Array, None, Cache]:
    """Feed tokens, each row's masks made up to a block."""
    length, size = read.tokens.shape[1], self.config.block
    pad = ((0, 0), (0, size))
    tokens = jnp.pad(read.tokens, pad, constant_values=self.config.mask_token)
    positions = read.positions[:, :1] + jnp.arange(tokens.shape[1])[None]
    last = jnp.sum(read.tokens != self.config.mask_token, 1, keepdims=True) - 1 + read.positions[:, :1]
    context = jnp.pad(read.features, (*pad, (0, 0))).astype(self.dtype)
    x = read.of(tokens, positions).embedded().astype(self.dtype)
    block = Block(positions, last, size)
    x, cache = self.module.apply({'params': params}, cache, x, context, block)
    ahead = 1 - self.config.last_drafts  # a mask's output is of its own position
    logits = read.scores(x[:, ahead : length + ahead])
    drafts = read.positions + ahead < last + size
    return jnp.where(drafts[..., None], logits, -jnp.inf), None, cache

  @property
  def corrects(self) -> bool:
    return self.config.rank > 0

  def corrected(self, params: Params, logits: Array, token: Array) -> Array:
    more = self.module.apply({'params': params}, token, method='follows')
    return logits + more[:, : logits.shape[1]]

  def _init(self) -> Params:
    return self.module.init({}, self.empty({}, 1, 1), method='visit')['params']
