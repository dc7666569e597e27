"""The law of what the compiled loop emits: exactly, by enumerating its decisions, and by χ² on many rows."""

import functools

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import reference

from speccascade import probs
from speccascade.decode import _go_on, _loop, decode_batch
from speccascade.types import ACCEPT, DRAFT, FINAL, NOWHERE, Prompt, RESIDUAL


@struct.dataclass
class Enumerated:
  """Noise that takes every decision from a row's digits and notes the probability that the decision had.

  A decision has the key (position, purpose), as in `probs.Keyed`, and the last one made under a key counts: an
  earlier one belonged to a drafted token that no test reached. With `by_round` the round's start is part of the key.
  """

  digits: jax.Array  # [B, R, P, 3]
  chances: jax.Array  # [B, R, P, 3]
  base: int = struct.field(pytree_node=False)
  by_round: bool = struct.field(pytree_node=False, default=False)

  def _place(self, position, start):
    rows = jnp.arange(position.shape[0])
    return rows, (start - self.base if self.by_round else jnp.zeros_like(start)), position - self.base

  def _note(self, place, purpose, chance):
    return self.replace(chances=self.chances.at[(*place, purpose)].set(chance, mode='drop'))

  def draw(self, weights, position, purpose, start):
    place = self._place(position, start)
    token = self.digits[(*place, purpose)]
    chance = probs.at_token(weights, token) / weights.sum(-1)
    return token, self._note(place, purpose, chance)

  def accept(self, numerator, denominator, position, start):
    noise, outcomes = self, []
    for j in range(position.shape[1]):
      place = self._place(position[:, j], start)
      a, b = numerator[:, j], denominator[:, j]
      sure = jnp.where(b > 0, jnp.minimum(1, a / jnp.where(b > 0, b, 1)), (a > 0).astype(jnp.float32))
      yes = self.digits[(*place, ACCEPT)] == 0
      noise = noise._note(place, ACCEPT, jnp.where(yes, sure, 1 - sure))
      outcomes.append(yes)
    return jnp.stack(outcomes, 1), noise


def _decode(method, models, batch, count, sampler, noise):
  """Return the loop's last state; the work of many rows is worth an optimised program."""
  run = functools.partial(decode_batch, method, models, max_new_tokens=count, sampler=sampler)
  if batch.length.size > 50_000:
    run = jax.jit(run, compiler_options={'xla_backend_optimization_level': 2})
  return run(batch, noise=noise)


def emitted_law(method, models, prompt, count, sampler):
  """Return {emitted tokens: probability} of the compiled loop, every decision enumerated."""
  vocab = models[-1].network.vocab_size
  rounds = count if method.by_round else 1
  radix = np.array([vocab, 2, vocab])
  # With rounds, a round that starts at token r decides about positions from r on.
  cells = [(r, p) for r in range(rounds) for p in range(r, count)]
  total = int(np.prod(radix)) ** len(cells)
  digits = np.zeros((total, rounds, count, 3), np.int32)
  rest = np.arange(total)
  for r, p in cells:
    for purpose in range(3):
      rest, digits[:, r, p, purpose] = np.divmod(rest, radix[purpose])
  chances = jnp.asarray(np.tile((1 / radix).astype(np.float32), (total, rounds, count, 1)))
  noise = Enumerated(jnp.asarray(digits), chances, base=len(prompt), by_round=method.by_round)
  batch = Prompt(jnp.tile(jnp.array([prompt], jnp.int32), (total, 1)), jnp.full(total, len(prompt), jnp.int32))
  state = jax.device_get(_decode(method, models, batch, count, sampler, noise))
  weight = _weights(state, len(prompt), count, radix, method.by_round, rounds)
  emitted = state.tokens[:, len(prompt) : len(prompt) + count]
  emitted = np.where(np.arange(count) < (state.length - len(prompt))[:, None], emitted, -1)
  outcomes, which = np.unique(emitted, axis=0, return_inverse=True)
  mass = np.bincount(which.ravel(), weight)
  return {tuple(int(t) for t in o if t >= 0): m for o, m in zip(outcomes, mass) if m > 0}


def _weights(state, base, count, radix, by_round, rounds):
  """Return each row's probability: the chances of the decisions that its tokens came from, the others being free."""
  chance = state.noise.chances.astype(np.float64)
  if by_round:  # every decision ever made counts; those of cells that do not exist have chance 1
    exists = np.arange(count)[None, :] >= np.arange(rounds)[:, None]
    return np.where(exists[None, :, :, None], chance, 1).prod((1, 2, 3))
  source = state.stats.source[:, base : base + count]
  free = 1 / radix.astype(np.float64)
  drafted = (source >= 0) | (source == RESIDUAL)
  weight = np.where(drafted, chance[:, 0, :, DRAFT] * chance[:, 0, :, ACCEPT], free[DRAFT] * free[ACCEPT])
  final = (source < 0) & (source != NOWHERE)
  return (weight * np.where(final, chance[:, 0, :, FINAL], free[FINAL])).prod(1)


def distance(law, reference):
  """Return the total variation distance of two laws as dictionaries, and how far the first is from summing to 1."""
  keys = law.keys() | reference.keys()
  return 0.5 * sum(abs(law.get(k, 0) - reference.get(k, 0)) for k in keys), abs(sum(law.values()) - 1)


def chi_square(method, models, prompt, sampler, expected, *, first, rows, seed=0):
  """Return the p-value of tokens first…first+k-1 of that many rows against their joint law, and χ²/df."""
  count = first + expected.ndim
  batch = Prompt(jnp.tile(jnp.array([prompt], jnp.int32), (rows, 1)), jnp.full(rows, len(prompt), jnp.int32))
  keys = jax.random.key_data(jax.random.split(jax.random.key(seed), rows))
  noise = probs.Keyed.make(keys, len(prompt) + count + method.window, method.window + 1 if method.by_round else 1)
  state = _decode(method, models, batch, count, sampler, noise)
  late = np.asarray(state.tokens)[:, len(prompt) + first : len(prompt) + count]
  return reference.goodness(late, expected)


def traces(*runs) -> list[int]:
  """Return how many times a decode loop was traced by each run in turn, where none had been before."""
  loops, counts = (_loop, _go_on), [0]
  for loop in loops:
    loop.clear_cache()  # another test may have traced the same
  for run in runs:
    run()
    counts.append(sum(loop._cache_size() for loop in loops))
  return np.diff(counts).tolist()
