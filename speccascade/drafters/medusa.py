"""Medusa (Cai et al. 2024): heads that each draft one of the next tokens from the verifier's last state alone.

With n tokens committed, head k drafts position n + k from what the verifier's head reads at n - 2, the last token but
one, since the last has not been fed. There is no cache, and one call drafts all: each mask behind the text is a head.

Axis letters: B batch, L new tokens, E embedding, V vocabulary, K heads.
"""

import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp

from speccascade.backends import Backend
from speccascade.backends.ops import take
from speccascade.drafters.hidden import Head, Reading
from speccascade.models import layers as blocks
from speccascade.models.base import Base
from speccascade.types import Array, Cache, Params

MASK = 2**31 - 1  # no token, since nothing looks it up


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
  """Sizes of the heads, of which each is so many residual layers and, unless the verifier's head does, its scores."""

  embed_dim: int
  vocab_size: int
  heads: int
  layers: int = 1
  own_scores: bool = True

  tied = False


class MedusaModule(nn.Module):
  """K heads."""

  config: MedusaConfig
  dtype: str
  backend: Backend

  def setup(self):
    c = self.config
    dense = dict(dtype=self.dtype, backend=self.backend)
    inner = [blocks.Dense(c.embed_dim, ('embed', 'table'), True, **dense) for _ in range(c.heads * c.layers)]
    self.residual = inner
    if c.own_scores:
      self.logits_dense = [
        blocks.Dense(c.vocab_size, ('embed', 'vocab'), out_dtype=jnp.float32, **dense) for _ in range(c.heads)
      ]

  def __call__(self, x: Array) -> Array:
    """Return for each head the state [B, K, E] that it makes of x [B, E], or with own scores logits [B, K, V]."""
    c = self.config
    outs = []
    for k in range(c.heads):
      z = x[:, None]
      for j in range(c.layers):
        z = z + jax.nn.silu(self.residual[k * c.layers + j](z))
      outs.append(self.logits_dense[k](z) if c.own_scores else z)
    return jnp.concatenate(outs, 1)


@dataclasses.dataclass(frozen=True)
class Medusa(Head):
  """Medusa's heads; a draft has at most K tokens."""

  config: MedusaConfig
  dtype: str = 'float32'

  kept = (-1,)

  def __post_init__(self):
    object.__setattr__(self, 'mask_token', MASK)

  def fitted(self, verifier: Base) -> 'Medusa':
    if self.config.own_scores:
      return self
    return dataclasses.replace(self, config=dataclasses.replace(self.config, vocab_size=verifier.vocab_size))

  @property
  def own_scores(self) -> bool:
    return self.config.own_scores

  @property
  def size(self) -> int:
    return self.config.embed_dim

  @property
  def feature_dim(self) -> int:
    return self.config.embed_dim

  @property
  def head_counts(self) -> tuple[int, int]:
    return 1, 1

  @property
  def module(self) -> MedusaModule:
    return MedusaModule(self.config, self.dtype, self.backend)

  def features(self, params: Params, states: Array) -> Array:
    return states

  def step(self, params: Params, cache: Cache, read: Reading) -> tuple[Array, None, Cache]:
    masked = read.tokens == MASK
    last = jnp.sum(~masked, 1) - 1  # the last token's index
    x = take(read.features, jnp.maximum(last, 0)[:, None])[:, 0]
    outs = self.module.apply({'params': params}, x)
    logits = outs if self.config.own_scores else read.scores(outs)
    number = jnp.arange(masked.shape[1])[None] - last[:, None]  # of the head for each token
    found = take(logits, jnp.clip(number, 0, self.config.heads - 1))
    drafts = (number >= 0) & (number < self.config.heads)
    return jnp.where(drafts[..., None], found, -jnp.inf), None, cache  # no distribution ends a draft

  def _init(self) -> Params:
    return self.module.init({}, jnp.zeros((1, self.config.embed_dim), self.dtype))['params']
