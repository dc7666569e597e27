"""When a draft stops, and how much of it is verified.

A policy decides for each row how far `propose` goes: `length` before the draft, `before` a token is drawn (from the
drafter's logits alone), `after` it. Its carry is updated from what the test showed, never from tokens that no test
reached, or the choice of the next draft would depend on randomness that is still to be used.
A limit decides after the draft how many of its tokens the verifier scores.
"""

import numbers
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from speccascade import probs, rules
from speccascade.types import Array, Context, places, Rule, State, take, whole


def _chance(policy: Any, *names: str):
  """Refuse a number that is no probability; traced ones were checked when they were given."""
  for name in names:
    value = getattr(policy, name)
    if isinstance(value, (str, bool)) or isinstance(value, numbers.Real) and not 0 <= value <= 1:
      raise ValueError(f'{type(policy).__name__} needs 0 <= {name} <= 1, a probability, not {name}={value!s}.')


@struct.dataclass
class Policy:
  """Draft as many tokens as the phase allows. The base of every policy."""

  def init(self, rows: int) -> Any:
    return ()

  def length(self, carry: Any, n: int) -> Array | int:
    """Return how many tokens [B] to draft, n at the most."""
    return n

  def before(self, logits: Array, sampler: probs.Sampler) -> Array:
    """Return for the drafter's logits [B, V] whether to stop before a token is drawn."""
    return jnp.zeros(logits.shape[:-1], bool)

  def after(self, q: Array) -> Array:
    """Return for q̃(x) [B] of the token just drawn whether to stop after it."""
    return jnp.zeros(q.shape, bool)

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
    return probs.confidence(logits) < self.threshold


@struct.dataclass
class Confidence(Policy):
  """Stop after a token whose q̃ is under the threshold."""

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
    return policy
  name = getattr(rules.inside(policy), '__name__', 'Heuristic')
  raise ValueError(
    f'policy={policy!r} is not a policy; give an instance, as in stopping.{name}(), in gin @stopping.{name}().'
  )


# ---- limits: how many drafted tokens the verifier scores ----


@struct.dataclass
class First:
  """Score the first n pending tokens, and so the laws of n + 1 positions."""

  n: int = struct.field(pytree_node=False)

  def __str__(self):
    return f'first {self.n}'

  def __call__(self, context: Context, state: State) -> Array:
    return jnp.minimum(state.window.size, self.n)


@struct.dataclass
class AcceptanceTable:
  """Mean acceptance by S and A: `means` [I, J] with inner edges `s_edges` [I-1] and, for each S, `a_edges` [I, J-1]."""

  s_edges: Array
  a_edges: Array
  means: Array

  def __call__(self, s: Array, a: Array) -> Array:
    row = jnp.searchsorted(self.s_edges, s, side='right')
    column = jnp.sum(self.a_edges[row] <= a[..., None], -1)
    return self.means[row, column]


@struct.dataclass
class Goodput:
  """Choose how many tokens of each row to verify, by speculative verification's expected goodput.

  With S = Σ_v min(q̃, c̃) and A = min(1, c̃(x)/q̃(x)) of drafter and companion, `table` gives a(S, A), the chance that
  the verifier accepts; Π a over a row's first k tokens is the gain of its k-th. Tokens of the whole batch are added
  in the order of their gains while (B + Σ gains) / latency(B + tokens) does not fall. `latency[n]` is the verifier's
  time for n tokens. A row's (k+1)-th token has no larger gain than its k-th, so the choice to stop at v looks at no
  token after x_{v+1}.
  """

  table: AcceptanceTable
  latency: Array  # [N]
  companion: int = struct.field(pytree_node=False)
  most: int = struct.field(pytree_node=False)

  def __str__(self):
    return 'goodput'

  def __call__(self, context: Context, state: State) -> Array:
    gains = jnp.cumprod(self._acceptance(context, state), 1)  # [B, W]
    rows = jnp.maximum(jnp.sum(state.active), 1).astype(jnp.float32)
    order = jnp.argsort(-gains.ravel(), stable=True)
    gain = gains.ravel()[order]
    count = rows + jnp.arange(1, gain.size + 1).astype(jnp.float32)
    goodput = (rows + jnp.cumsum(gain)) / self._time(count)
    before = jnp.concatenate([(rows / self._time(rows))[None], goodput[:-1]])
    taken = jnp.cumprod((goodput >= before) & (gain > 0), dtype=jnp.int32)
    chosen = jnp.zeros(gain.size, jnp.int32).at[order].set(taken)
    return jnp.minimum(chosen.reshape(gains.shape).sum(1, dtype=jnp.int32), self.most)

  def _acceptance(self, context: Context, state: State) -> Array:
    """Return a(S, A) of the pending tokens [B, W], 0 where there is none."""
    w = state.window
    width = w.source.shape[1]
    position = state.length[:, None] + places(width)
    tokens = take(state.tokens, position)
    c = probs.at_window(state)(w.logits[self.companion])[:, :width]
    q = jax.nn.one_hot(tokens, c.shape[-1], dtype=jnp.float32) if w.probs is None else w.probs
    q_x, c_x = probs.at_token(q, tokens), probs.at_token(c, tokens)
    a = jnp.where(q_x > 0, jnp.minimum(1, c_x / jnp.where(q_x > 0, q_x, 1)), 0)
    accepted = self.table(jnp.minimum(q, c).sum(-1), a)
    pending = (places(width) < w.size[:, None]) & state.active[:, None]
    return jnp.where(pending, accepted, 0)

  def _time(self, tokens: Array) -> Array:
    last = self.latency.shape[0] - 1
    beyond = jnp.maximum(tokens - last, 0) * jnp.maximum(self.latency[-1] - self.latency[-2], 0)  # at the last slope
    return jnp.interp(tokens, jnp.arange(last + 1).astype(jnp.float32), self.latency) + beyond
