"""Toy models with a known distribution: tables over the last `order` tokens, read back through a cache of tokens.

They behave as real models do, stale slots and all, so the loop's mistakes show. An encoder–decoder toy also adds a
row of `source` chosen by the sum of the prompt.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from speccascade.backends.ops import take
from speccascade.models.packing import pack, Packing
from speccascade.types import Array, Model, Network, Prompt


@dataclasses.dataclass(frozen=True)
class Table(Network):
  """Next-token logits from a table indexed by the last `order` tokens; what precedes the sequence counts as token 0."""

  vocab_size: int
  order: int = 2
  eos_ids: tuple[int, ...] = ()
  start_id: int | None = None
  max_positions: int | None = None
  mask_token: int | None = None

  packs = True
  takes_leaves = True

  def prefill(self, params, prompt: Prompt, max_len: int):
    rows, width = prompt.tokens.shape
    slots = jnp.full((rows, max_len), self.vocab_size - 1, jnp.int32)  # a stale slot must never matter
    if self.start_id is None:
      return {'slots': slots.at[:, :width].set(prompt.tokens)}
    real = jnp.arange(width)[None] < prompt.length[:, None]
    source = jnp.sum(jnp.where(real, prompt.tokens, 0), 1) % self.vocab_size
    return {'slots': slots, 'source': source}

  def extend(self, params, cache, tokens: Array, positions: Array, packing: Packing | None = None, leaves: int = 0):
    slots = jax.vmap(jax.lax.dynamic_update_slice)(cache['slots'], tokens, positions[:, :1])
    index = jnp.zeros_like(positions)
    for back in reversed(range(self.order)):
      token = jnp.where(positions >= back, take(slots, positions - back), 0) if back else tokens
      index = index * self.vocab_size + token
    logits = params['table'][index]
    if self.start_id is not None:
      logits = logits + params['source'][cache['source']][:, None]
    return pack(packing, logits), {**cache, 'slots': slots}


def model(
  seed: int,
  vocab: int = 5,
  order: int = 2,
  *,
  scale: float = 1.0,
  near: Model | None = None,
  eos_ids: tuple[int, ...] = (),
  encoder: bool = False,
) -> Model:
  """Make a toy model.

  Args:
    seed: Of its table.
    vocab: V.
    order: How many tokens it looks back.
    scale: The standard deviation of its logits or, with `near`, of their difference.
    near: A model whose logits it resembles.
    eos_ids: The tokens that end a text.
    encoder: Whether it is an encoder–decoder.

  Returns:
    The model.
  """
  rng = np.random.default_rng(seed)
  params = {'table': rng.normal(scale=scale, size=(vocab**order, vocab)), 'source': rng.normal(size=(vocab, vocab))}
  params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
  if near is not None:
    params = {'table': params['table'] + near.params['table'], 'source': near.params['source']}
  return Model(params, Table(vocab, order, eos_ids, 0 if encoder else None), name=f'toy{seed}')
