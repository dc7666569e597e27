"""When a draft stops.

A policy decides for each row how far `propose` goes: `length` before the draft, `before` a token is drawn (from the
drafter's logits alone), `after` it. Its carry is updated from what the test showed, never from tokens that no test
reached, or the choice of the next draft would depend on randomness that is still to be used.
"""

import numbers
from typing import Any

from flax import struct
from jax import tree_util
import jax.numpy as jnp
import numpy as np

from speccascade import rules, sampling
from speccascade.types import Array, places, Rule, whole


def _chance(policy: Any, *names: str):
  """Make numbers float32, so that they are one program; refuse what is no probability, traced ones were checked."""
  for name in names:
    value = sampling.number(getattr(policy, name))
    if isinstance(value, (str, bool, complex)) or isinstance(value, numbers.Real) and not 0 <= value <= 1:
      raise ValueError(f'{type(policy).__name__} needs 0 <= {name} <= 1, a probability, not {name}={value!s}.')
    if isinstance(value, numbers.Real):
      object.__setattr__(policy, name, np.float32(value))


@struct.dataclass
class Policy:
  """Draft as many tokens as the phase allows. The base of every policy."""

  def init(self, rows: int) -> Any:
    return ()

  def length(self, carry: Any, n: int) -> Array | int:
    """Return how many tokens [B] to draft, n at the most."""
    return n

  def before(self, logits: Array, sampler: sampling.Sampler) -> Array:
    """Return for the drafter's logits [B, V] whether to stop before a token is drawn."""
    return jnp.zeros(logits.shape[:-1], bool)

  def after(self, q: Array) -> Array:
    """Return for q̃(x) [B] of the token just drawn, at temperature 0 its unscaled q(x), whether to stop after it."""
    return jnp.zeros(q.shape, bool)

  def stops_early(self) -> bool:
    """Return whether a draft may end before its `length`, so that asking after each token saves steps."""
    return type(self).before is not Policy.before or type(self).after is not Policy.after

  def update(self, carry: Any, tested: Array, accepted: Array, live: Array, most: int) -> Any:
    """Return the carry after a round that tested (up to the first failure) and accepted so many tokens.

    Only `live` rows had a test; `most` is the longest draft.
    """
    return carry


@struct.dataclass
class Deferral(Policy):
  """Stop where a deferral rule that reads the drafter alone (chow, chow_log) calls the verifier."""

  rule: Rule

  def before(self, logits, sampler):
    return self.rule.func.defer(logits, None, sampler=sampler, **self.rule.keywords)


@struct.dataclass
class Fallback(Policy):
  """Stop before a token where max q is under the threshold (BiLD; Kim et al. 2023)."""

  threshold: Array

  def __post_init__(self):
    _chance(self, 'threshold')

  def before(self, logits, sampler):
    return sampling.confidence(logits) < self.threshold


@struct.dataclass
class Confidence(Policy):
  """Stop after a token whose q̃, at temperature 0 unscaled q, is under the threshold."""

  threshold: Array

  def __post_init__(self):
    _chance(self, 'threshold')

  def after(self, q):
    return q < self.threshold


@struct.dataclass
class Heuristic(Policy):
  """Draft 2 tokens more after a round that kept every tested token, 1 fewer after any other."""

  first: int = struct.field(pytree_node=False, default=5)

  def __post_init__(self):
    whole('Heuristic: first', self.first)

  def init(self, rows):
    return jnp.full(rows, self.first, jnp.int32)

  def length(self, carry, n):
    return jnp.clip(carry, 1, n)

  def update(self, carry, tested, accepted, live, most):
    grown = jnp.where(accepted == tested, carry + 2, carry - 1)
    return jnp.where(live, jnp.clip(grown, 1, most), carry)


@struct.dataclass
class MovingAverage(Policy):
  """Draft while the chance that all tokens so far are kept, rate^k by a moving average, is over the threshold."""

  threshold: Array
  decay: Array
  first: float = struct.field(pytree_node=False, default=0.8)

  def __post_init__(self):
    _chance(self, 'threshold', 'decay', 'first')

  def init(self, rows):
    return jnp.full(rows, self.first, jnp.float32)

  def length(self, carry, n):
    return 1 + jnp.sum(carry[:, None] ** (places(n - 1) + 1).astype(jnp.float32) > self.threshold, 1, dtype=jnp.int32)

  def update(self, carry, tested, accepted, live, most):
    seen = self.decay * carry + (1 - self.decay) * (accepted / jnp.maximum(tested, 1))
    return jnp.where(live, seen, carry)


def check(policy: Any) -> Policy:
  """Return a policy, having checked that it is one."""
  if isinstance(policy, Policy):
    if tree_util.all_leaves([policy]):
      raise ValueError(f'{type(policy).__name__} must be decorated by @flax.struct.dataclass, as every policy is.')
    return policy
  name = getattr(rules.inside(policy), '__name__', 'Heuristic')
  raise ValueError(
    f'policy={policy!r} is not a policy; give an instance, as in stopping.{name}(), in gin @stopping.{name}().'
  )
