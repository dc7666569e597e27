"""The exact distribution of a row beside another that decides too, by enumeration of their random numbers.

A number stands for an interval on which all that is drawn and tested by it is the same, and has the probability of that
interval. The loop draws and tests as it does outside, so that a number that is used twice is the same number.
"""

import functools

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from speccascade import Sampler, sampling
from speccascade.engine.loop import decode_batch
from speccascade.types import Array, Prompt, static

AT_ONCE = 1 << 14  # pairs of rows in a call


@struct.dataclass
class Tabled(sampling.Keyed):
  """Numbers from a table [B, rounds, places, 3], keyed as the method asks: by position, or by round and place in it."""

  table: Array | None = None
  base: int = static(default=1)

  def uniform(self, position, purpose, start):
    start = start.reshape(start.shape + (1,) * (position.ndim - 1))
    begun = jnp.minimum(start - self.base, self.table.shape[1] - 1) if self.by_round else jnp.zeros_like(start)
    place = position - (start if self.by_round else self.base)
    rows = jnp.arange(len(self.keys)).reshape((-1,) + (1,) * (position.ndim - 1))
    number = self.table[rows, jnp.broadcast_to(begun, position.shape), place, purpose]
    return jnp.stack([number, number], -1)


def distribution(method, models, cuts, *, by_round, most, measured):
  """Return the joint distribution of the first tokens of a row beside another, both of the prompt 0.

  Args:
    method: The method.
    models: Its models.
    cuts: {(row, round, place, purpose): where in (0, 1) something changes}. All other numbers are one half.
    by_round: Whether numbers are keyed by round; a round is known by its start.
    most: How many tokens the rows emit at most.
    measured: How many tokens of row 0 are measured.
  """
  edges = [np.array([0, *cut, 1]) for cut in cuts.values()]
  sizes = [len(edge) - 1 for edge in edges]
  total = int(np.prod(sizes))
  rounds = 1 + max(r for _, r, *_ in cuts)

  @functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 2})  # which many rows are worth
  @jax.vmap
  def run(table):
    noise = Tabled(jnp.zeros((2, 2), jnp.uint32), by_round=by_round, table=table)
    prompt = Prompt(jnp.zeros((2, 1), jnp.int32), jnp.ones(2, jnp.int32))
    state = decode_batch(method, models, prompt, max_new_tokens=most, sampler=Sampler(), noise=noise)
    return state.tokens[0, 1 : 1 + measured]

  found = np.zeros((models[-1].network.vocab_size,) * measured)
  for begin in range(0, total, AT_ONCE):
    which = np.arange(begin, begin + AT_ONCE)
    index = np.unravel_index(np.minimum(which, total - 1), sizes)
    table = np.full((AT_ONCE, 2, rounds, most + 1, 3), 0.5, np.float32)
    weight = np.where(which < total, 1.0, 0.0)
    for cell, edge, i in zip(cuts, edges, index, strict=True):
      table[(slice(None), *cell)] = ((edge[1:] + edge[:-1]) / 2)[i]
      weight = weight * np.diff(edge)[i]
    np.add.at(found, tuple(np.asarray(run(jnp.asarray(table))).T), weight)
  return found
