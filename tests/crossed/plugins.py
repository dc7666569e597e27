"""An acceptor, policies, a signal and a budget of one's own, which compositions cross as they do the package's."""

from flax import struct
import jax.numpy as jnp

from speccascade import acceptance, rules, stopping
from speccascade.backends.ops import take
from speccascade.sv import predictors, verification
from speccascade.types import iota, Told


@acceptance.acceptor(reads=(), told=Told.NOTHING, exact=True)
def generous(trial):
  """Accept more tokens than are tested, where a test accepts all; the loop knows better."""
  verdict, noise = acceptance.token_wise(trial)
  more = 2 * (verdict.accepted == trial.tested).astype('int32')
  return verdict._replace(accepted=verdict.accepted + more), noise


@struct.dataclass
class Nosy(stopping.Policy):
  """Draft one token, or all, by the drafted tokens of the last round that no test looked at."""

  def init(self, rows):
    return jnp.full(rows, 3, jnp.int32)

  def length(self, carry, n):
    return jnp.minimum(carry, n)

  def learn(self, state, tested, accepted, live, most):
    place = iota(state.window.source.shape[1])
    tokens = take(state.tokens, state.length[:, None] + place)
    dropped = (place >= tested[:, None]) & (place < state.window.size[:, None])
    return jnp.where((dropped & (tokens == 0)).any(1), 1, 3)


@struct.dataclass
class InTurn(stopping.Policy):
  """Draft one token and three in turn."""

  def init(self, rows):
    return jnp.full(rows, 1, jnp.int32)

  def length(self, carry, n):
    return jnp.minimum(carry, n)

  def update(self, carry, tested, accepted, live, most):
    return 4 - carry


CHANCES = jnp.array([0.97, 0.5, 0.99, 0.95, 0.05, 0.99, 0.95])


def mixed(position, tokens):
  """Return chances that have no order, by positions and all drafted tokens up to each."""
  if tokens.ndim == 1:  # of a draft that is being made, a token alone
    return CHANCES[(3 * position + 2 * tokens) % 7]
  texts = jnp.cumsum((tokens + 1) * (1 + iota(tokens.shape[1])), 1)
  return CHANCES[(3 * position + 2 * texts) % 7]


@predictors.signal(drawn=False)
def mixed_before(draft):
  """A chance by the place and the drafted tokens before it."""
  if draft.tokens.ndim == 1:
    return mixed(draft.position, jnp.zeros_like(draft.tokens))
  return mixed(draft.position, jnp.pad(draft.tokens[:, :-1], ((0, 0), (1, 0)), constant_values=1))


@predictors.signal()
def mixed_drawn(draft):
  """A chance by the place and the drafted tokens up to it."""
  return mixed(draft.position, draft.tokens)


def third(draft, likely):
  """Return chances by which a third token is worth its test just so, and a row at a later place is worth little."""
  first = jnp.array([0.99, 0.99, 0.5, 0.5, 0.99, 0.05])[jnp.minimum(draft.position, 5)]
  if draft.tokens.ndim == 1:
    return first
  place = iota(draft.tokens.shape[1])
  return jnp.where(place == 0, first[:, :1], jnp.where((place == 1) | likely[:, None], 0.99, 0.95))


@predictors.signal(drawn=False)
def third_before(draft):
  """The third token of a draft is likely by the second."""
  return third(draft, draft.tokens[:, 1:2].sum(1) == 0 if draft.tokens.ndim > 1 else None)


@predictors.signal()
def third_drawn(draft):
  """The third token of a draft is likely by itself."""
  return third(draft, draft.tokens[:, 2:3].sum(1) == 0 if draft.tokens.ndim > 1 else None)


@predictors.signal(drawn=False)
def raced_before(draft):
  """A draft from place 2 is likely, its third token by the second; of another the first token alone is worth a test."""
  if draft.tokens.ndim == 1:
    return jnp.full(draft.tokens.shape, 0.9)
  place = iota(draft.tokens.shape[1])
  likely = jnp.where((place < 2) | (draft.tokens[:, 1:2].sum(1, keepdims=True) == 0), 0.99, 0.5)
  return jnp.where(draft.position[:, :1] == 2, likely, jnp.where(place == 0, 0.9, 0.1))


@struct.dataclass
class Longest(verification.Budget):
  """Verify the whole draft of the row whose draft is the likeliest, and one token of the others."""

  def __call__(self, chances, active):
    chance = jnp.where(active, jnp.max(chances, 1), -1.0)
    best = jnp.arange(len(chance)) == chance.argmax()
    drafted = jnp.sum(chances > 0, 1)
    return jnp.where(best, drafted, jnp.minimum(drafted, 1)).astype(jnp.int32)


@rules.rule()
def half_way(q, p):
  """A target half way between the two."""
  return (q.probs + p.probs) / 2
