"""Draft-length policies: when a draft ends before the block is full.

A policy decides for each sequence of the batch, by three methods: `length` before the draft, `before` a token is drawn
(from the drafter's logits alone), `after` it. Its carry, the state that it keeps from round to round, is updated from
tested tokens only. Otherwise the length of a draft would depend on random numbers that are still to be used, and the
output would be biased.
"""

import numbers
from typing import Any, NamedTuple

from flax import struct
from jax import tree_util
import jax.numpy as jnp
import numpy as np

from speccascade import rules, sampling
from speccascade.host import names
from speccascade.types import Array, Carry, checked_int, iota, Rule, static, Told


def check_chance(policy: 'Policy', *names: str):
  """Make numbers float32, so that they are one program; refuse what is no probability, traced ones were checked."""
  for name in names:
    value = sampling.number(getattr(policy, name))
    if isinstance(value, (str, bool, complex)) or isinstance(value, numbers.Real) and not 0 <= value <= 1:
      raise ValueError(f'{type(policy).__name__} needs 0 <= {name} <= 1, a probability, not {name}={value!s}.')
    if isinstance(value, numbers.Real):
      object.__setattr__(policy, name, np.float32(value))


class Draft(NamedTuple):
  """Drafted tokens [...] and what is known of each before it is verified; parts that nothing reads cost nothing."""

  logits: Array  # [..., V] the drafter's
  probs: Array  # [..., V] q̃, what it was drawn from
  tokens: Array  # [...]
  position: Array  # [...]
  sampler: sampling.Sampler
  noise: sampling.Noise
  third: Array | None = None  # [..., V] the logits of a third model that has read the tokens before it

  @property
  def companion(self) -> Array:
    """The logits of the third model, for a signal that declares `companion`."""
    if self.third is None:
      raise ValueError('a signal reads a companion, which no model is here: declare it by signal(companion=True).')
    return self.third

  @property
  def soft(self) -> Array:
    """The distribution q̃; at temperature 0 the unscaled one."""
    return self.sampler.soft(self.logits, self.probs)

  @property
  def q(self) -> Array:
    """The probability of each token in it."""
    return sampling.at_token(self.soft, self.tokens)


@struct.dataclass
class Policy:
  """Draft as many tokens as the block allows. The base of every policy."""

  def init(self, rows: int) -> Carry:
    """Return the carry before the first round of so many sequences."""
    return ()

  def length(self, carry: Carry, n: int) -> Array | int:
    """Return the number of tokens to draft.

    Args:
      carry: What the policy remembers.
      n: The most tokens.

    Returns:
      [B], or one number.
    """
    return n

  def before(self, logits: Array, sampler: sampling.Sampler) -> Array:
    """Return which drafts end before a token is drawn.

    Args:
      logits: The drafter's logits [B, V].
      sampler: The sampler of the batch.

    Returns:
      bool [B].
    """
    return jnp.zeros(logits.shape[:-1], bool)

  def after(self, q: Array) -> Array:
    r"""Return which drafts end after the token just drawn.

    Args:
      q: The token's probability :math:`\tilde q(x)` [B]; at temperature 0 the unscaled :math:`q(x)`.

    Returns:
      bool [B].
    """
    return jnp.zeros(q.shape, bool)

  def asks(self) -> Rule | None:
    """Return the rule of the drafter alone that it asks, if it asks one."""
    return None

  def ends(self, carry: Carry, draft: Draft) -> Array:
    """Return which drafts end after the token just drawn [B], by the carry and all that is known of the token."""
    return self.after(draft.q)

  def stops_early(self) -> bool:
    """Return whether a draft may end before its `length`, so that asking after each token saves steps."""
    return any(getattr(type(self), name) is not getattr(Policy, name) for name in ('before', 'after', 'ends'))

  def varies(self) -> bool:
    """Return whether drafts differ in length."""
    return type(self) is not Policy

  def update(self, carry: Carry, tested: Array, accepted: Array, live: Array, most: int) -> Carry:
    """Return the carry after a round.

    Args:
      carry: The carry before it.
      tested: How many tokens were tested [B], up to the first rejection.
      accepted: How many were accepted [B].
      live: Which sequences had a test [B].
      most: The length of the longest draft.

    Returns:
      The new carry.
    """
    return carry

  @property
  def told(self) -> Told | None:
    """What it learns from beside tested tokens; None: that is not known, as of one that has a `learn` of its own."""
    return Told.NOTHING if type(self).learn is Policy.learn else None

  @property
  def reads(self) -> tuple[int, ...] | None:
    """The slots whose logits it learns from; None for any, as of one that has a `learn` of its own."""
    return () if type(self).learn is Policy.learn else None

  def learn(self, state: Any, tested: Array, accepted: Array, live: Array, most: int) -> Carry:
    """Return the carry after a round from its state before the commit, `engine.state.State`; by default `update`."""
    return self.update(state.policy, tested, accepted, live, most)


@struct.dataclass
class Deferral(Policy):
  """End a draft where a rule that reads the drafter alone defers (`rules.chow`, `rules.chow_log`).

  Example:
    >>> print(stopping.spelled(stopping.Deferral(functools.partial(rules.chow, alpha=0.3))))
    Deferral(rule=chow:0.3)
  """

  rule: Rule

  def asks(self):
    return self.rule

  def before(self, logits, sampler):
    return self.rule(rules.Prediction(logits, sampler), None)


@struct.dataclass
class Fallback(Policy):
  """End a draft before a token where the drafter is unsure: max q < `threshold` (BiLD; Kim et al. 2023).

  Example:
    >>> print(stopping.spelled(stopping.Fallback(0.5)))
    Fallback(threshold=0.5)
  """

  threshold: Array

  def __post_init__(self):
    check_chance(self, 'threshold')

  def before(self, logits, sampler):
    return sampling.confidence(logits) < self.threshold


@struct.dataclass
class Confidence(Policy):
  r"""End a draft after an unlikely token.

  That is one with :math:`\tilde q(x) <` `threshold`; at temperature 0, with unscaled :math:`q(x) <` `threshold`.

  Example:
    >>> print(stopping.spelled(stopping.Confidence(0.5)))
    Confidence(threshold=0.5)
  """

  threshold: Array

  def __post_init__(self):
    check_chance(self, 'threshold')

  def after(self, q):
    return q < self.threshold


@struct.dataclass
class Heuristic(Policy):
  """Draft 2 tokens more after a round that accepted every tested token, and 1 fewer after any other.

  The first draft has `first` tokens.

  Example:
    >>> print(stopping.spelled(stopping.Heuristic(first=2)))
    Heuristic(first=2)
  """

  first: int = static(default=5)

  def __post_init__(self):
    checked_int('Heuristic: first', self.first)

  def init(self, rows):
    return jnp.full(rows, self.first, jnp.int32)

  def length(self, carry, n):
    return jnp.clip(carry, 1, n)

  def update(self, carry, tested, accepted, live, most):
    grown = jnp.where(accepted == tested, carry + 2, carry - 1)
    return jnp.where(live, jnp.clip(grown, 1, most), carry)


@struct.dataclass
class MovingAverage(Policy):
  r"""Draft a (k + 1)-th token while :math:`a^k >` `threshold`, with a the moving average of the acceptance rate.

  .. math:: a \leftarrow \mathrm{decay} \cdot a + (1 - \mathrm{decay})\,\frac{\text{accepted}}{\text{tested}}

  Attributes:
    threshold: The least probability that all drafted tokens are accepted at which another is drafted.
    decay: The weight of the past.
    first: The acceptance rate before the first round.

  Example:
    >>> print(stopping.spelled(stopping.MovingAverage(0.5, 0.75)))
    MovingAverage(threshold=0.5, decay=0.75, first=0.8)
  """

  threshold: Array
  decay: Array
  first: float = static(default=0.8)

  def __post_init__(self):
    check_chance(self, 'threshold', 'decay', 'first')

  def init(self, rows):
    return jnp.full(rows, self.first, jnp.float32)

  def length(self, carry, n):
    return 1 + jnp.sum(carry[:, None] ** (iota(n - 1) + 1).astype(jnp.float32) > self.threshold, 1, dtype=jnp.int32)

  def update(self, carry, tested, accepted, live, most):
    seen = self.decay * carry + (1 - self.decay) * (accepted / jnp.maximum(tested, 1))
    return jnp.where(live, seen, carry)


def _known() -> dict[str, type[Policy]]:
  """Return the policies of the package, by name."""
  policies = {name: x for name, x in globals().items() if isinstance(x, type) and issubclass(x, Policy)}
  return {name: x for name, x in policies.items() if x.__module__ == __name__}


_POLICIES = names.Catalogue('policy', _known, inner=rules.known, made=lambda named: check(named.made()))
known, find, spelled = _POLICIES.known, _POLICIES.find, _POLICIES.spelled


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
