"""Every kind of drafter in its smallest form, for compositions to cross with everything else.

A kind is a function of a `World` to a drafter, under `@drafter`. One that is added here, or in another file of this
folder, is crossed without another edit, as are rules, acceptors, policies, signals and budgets that a file defines.
"""

from collections.abc import Callable
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speccascade.backends.ops import take
from speccascade.drafters import layerskip, ngram, one_pass, translated
from speccascade.models import toy
from speccascade.types import Model

DRAFTERS: dict[str, Callable] = {}
MEMORY = 8


class World(NamedTuple):
  """The verifier, and models that resemble it."""

  vocab: int
  large: Model
  middle: Model
  small: Model


def drafter(name: str) -> Callable:
  """Name a kind of drafter."""
  return lambda make: DRAFTERS.setdefault(name, make)


@drafter('small')
def small(world):
  return world.small


@drafter('one pass')
def at_once(world):
  return one_pass(world.small, 0)


@dataclasses.dataclass(frozen=True)
class Corrected(toy.Table):
  """A drafter in one pass whose logits are corrected by the token before."""

  corrects = True
  drafts_only = True

  def corrected(self, params, logits, token):
    return logits + params['bigram'][token]


@drafter('one pass, corrected')
def corrected(world):
  network = Corrected(world.vocab, 2, world.large.network.eos_ids, world.large.network.start_id, mask_token=0)
  bigram = jnp.asarray(np.random.default_rng(3).normal(size=(world.vocab, world.vocab)), jnp.float32)
  return world.small.replace(params={**world.small.params, 'bigram': bigram}, network=network, name='corrected')


@dataclasses.dataclass(frozen=True)
class Watched(toy.Table):
  """A verifier that keeps of each position that it has read it; what another has read since is not its own."""

  def prefill(self, params, prompt, max_len):
    cache = super().prefill(params, prompt, max_len)
    return {**cache, 'own': jnp.ones(cache['slots'].shape, bool)}

  def extend(self, params, cache, tokens, positions, packing=None, leaves=0, reader=True):
    own = {k: v for k, v in cache.items() if k != 'own'}
    logits, table = super().extend(params, own, tokens, positions, packing, leaves)
    read = jnp.full(tokens.shape, reader)
    return logits, {**table, 'own': jax.vmap(jax.lax.dynamic_update_slice)(cache['own'], read, positions[:, :1])}


@dataclasses.dataclass(frozen=True)
class Stateful(Watched):
  """A head in small: its logits shift with the tokens that it has read since the last that its verifier has."""

  drafts_only = True
  provisional = True
  packs = takes_leaves = False

  def shares_cache(self, params, other, other_params):
    return type(other) is Watched and params['verifier'] is other_params['table']

  def extend(self, params, cache, tokens, positions):
    logits, cache = super().extend(params, cache, tokens, positions, reader=False)
    depth = jnp.zeros_like(positions)
    for back in (3, 2, 1):
      alone = ~take(cache['own'], jnp.maximum(positions - back, 0)) & (positions >= back)
      depth = jnp.where(alone, depth + 1, 0)
    return logits + params['shift'][depth], cache


@drafter('head')
def head(world):
  shift = jnp.asarray(np.random.default_rng(4).normal(size=(4, world.vocab)), jnp.float32)
  shape = world.vocab, 2, world.large.network.eos_ids, world.large.network.start_id
  verifier = world.large.replace(network=Watched(*shape), name='watched')
  params = {**world.small.params, 'shift': shift, 'verifier': verifier.params['table']}
  return Model(params, Stateful(*shape), name='head'), verifier  # for which alone it drafts


@dataclasses.dataclass(frozen=True)
class Layered(toy.Table):
  """Tables in two layers, each with what it has read; the first alone is an early exit, which leaves the second."""

  layers: int = 2

  @property
  def depth(self):
    return self.layers

  def prefill(self, params, prompt, max_len):
    one = super().prefill(params['layers'][0], prompt, max_len)
    return {'layers': [one] * self.layers}

  def extend(self, params, cache, tokens, positions, packing=None, leaves=0):
    logits, made = 0, list(cache['layers'])
    for i in range(self.layers):
      more, made[i] = super().extend(params['layers'][i], cache['layers'][i], tokens, positions, packing, leaves)
      logits = logits + more
    return logits, {'layers': made}

  def first_layers(self, params, layers):
    return dataclasses.replace(self, layers=layers), {'layers': params['layers'][:layers]}

  def shares_cache(self, params, other, other_params):
    return (
      isinstance(other, Layered)
      and other.layers > self.layers
      and all(a is b for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(other_params['layers'][: self.layers])))
    )


def deep(world):
  """Return the verifier of an early exit."""
  one, more = world.large.params, world.middle.params
  network = Layered(world.vocab, 2, world.large.network.eos_ids, world.large.network.start_id)
  return Model({'layers': [one, jax.tree.map(lambda a, b: a - b, more, one)]}, network, name='deep')


@drafter('early exit')
def early_exit(world):
  verifier = deep(world)
  return layerskip.layerskip(verifier, 1), verifier  # which drafts for that verifier alone


@drafter('lookup')
def lookup(world):
  return ngram.drafter(world.large, 2)


@drafter('lookup with memory')
def remembering(world):
  return ngram.drafter(world.large, 2, memory=MEMORY)


@drafter('translated')
def foreign(world):
  """Of four tokens two are the verifier's; a third token of the verifier is none of the drafter's."""
  if world.vocab < 3:
    tables = [2, 0], [0, 3]
  else:
    tables = [3, 1, *range(world.vocab - 2)], [3, -1, *range(world.vocab - 2)]
  encoder = world.large.network.start_id is not None
  return translated(toy.model(6, 4, scale=1.2, encoder=encoder), for_=world.large, tables=tables)


@dataclasses.dataclass(frozen=True)
class Some(toy.Table):
  """A drafter that scores all tokens but the first, as one with a head over the frequent ones does."""

  def lacks(self, params):
    return jnp.arange(self.vocab_size) == 0

  def extend(self, params, cache, tokens, positions, packing=None, leaves=0):
    logits, cache = super().extend(params, cache, tokens, positions, packing, leaves)
    return jnp.where(self.lacks(params), -jnp.inf, logits), cache


@drafter('frequent')
def frequent(world):
  network = Some(world.vocab, 2, world.large.network.eos_ids, world.large.network.start_id)
  return world.small.replace(network=network, name='frequent')
