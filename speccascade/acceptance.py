r"""Acceptors: how many of the tested tokens are accepted, and what the next token is drawn from.

An acceptor is `accept(trial) -> (Verdict, noise)`. It sees one round of every sequence: R tokens :math:`x_1 … x_R`, the
distributions :math:`\tilde q` that they were drawn from, and the targets π.

An acceptor may say more of itself by the decorator `acceptor`.
"""

from collections.abc import Callable
import inspect
from typing import NamedTuple

from flax import struct
from jax import lax
import jax.numpy as jnp
import numpy as np

from speccascade import rules, sampling
from speccascade.backends.ops import take1
from speccascade.host import names
from speccascade.rules.base import declared
from speccascade.types import Array, checked_int, FINAL, iota, static, Told, Window


class Trial(NamedTuple):
  """What an acceptor may read; parts that it does not read cost nothing."""

  window: Window  # with q̃ of each pending token as probs [B, W, V]
  tokens: Array  # [B, W] the pending tokens
  tested: Array  # [B] R, how many of them are tested
  pi: Array  # [B, W+1, V] the targets
  position: Array  # [B, W] the positions of the pending tokens
  start: Array  # [B] the position of the first
  noise: sampling.Noise  # noise.accept(a, b, position, start) accepts with probability min(1, a / b)
  sampler: sampling.Sampler  # of the batch
  models: tuple[int, ...]  # the slots of the test, the verifier last


class Verdict(NamedTuple):
  """Accept the first tokens; if they are not all, the next comes from norm(max(0, scale · π - subtract · q̃))."""

  accepted: Array  # [B] how many
  scale: Array | float = 1.0  # a number or [B], as is the next
  subtract: float = 1.0  # 0 to draw from the target
  token: Array | None = None  # [B] the token after the accepted ones, where the acceptor has drawn it


class AcceptorFacts(NamedTuple):
  """What is said of an acceptor by its decorator.

  Attributes:
    reads: The slots of the method whose logits it reads beside those of the test; None: any, so that the logits of all
      models are stored.
    told: What it decides on a token by, beside it and those before it: `Told.LATER` if it reads tokens that it then
      drops. Then random numbers are keyed by round, because a number that has decided which tokens to drop may not draw
      them again; so they are where it is None, not known.
    exact: Whether the output follows π; None where that is not known.
  """

  reads: tuple[int, ...] | None = None
  told: Told | None = None
  exact: bool | None = None


def acceptor(**facts) -> Callable:
  """Declare an acceptor: a decorator that takes fields of `AcceptorFacts`."""
  return declared(AcceptorFacts(**facts))


def declaration(accept: Callable) -> AcceptorFacts:
  """Return what an acceptor declares; a function without a decorator may read all and look ahead."""
  return getattr(rules.inside(accept), 'declaration', AcceptorFacts())


def leading(ok: Array) -> Array:
  """Count the leading True of each row of [B, W]."""
  return jnp.cumprod(ok, 1, dtype=jnp.int32).sum(1, dtype=jnp.int32)


def in_test(trial: Trial) -> Array:
  """Return [B, W]: whether a pending token is tested."""
  return iota(trial.tokens.shape[1]) < trial.tested[:, None]


def at_tokens(trial: Trial) -> tuple[Array, Array]:
  """Return π_j(x_j) and q̃_j(x_j), [B, W]."""
  width = trial.tokens.shape[1]
  return sampling.at_token(trial.pi[:, :width], trial.tokens), sampling.at_token(trial.window.probs, trial.tokens)


@acceptor(reads=(), told=Told.NOTHING, exact=True)
def token_wise(trial: Trial) -> tuple[Verdict, sampling.Noise]:
  r"""Accept each token in turn (Leviathan et al. 2023, Algorithm 1).

  .. math:: \Pr(\text{accept } x_i) = \min\Bigl(1, \frac{\pi_i(x_i)}{\tilde q_i(x_i)}\Bigr)

  With `Sampler(coupling='gumbel')` a token is accepted if it is the target's.
  """
  if trial.noise.coupled:  # each of the target's tokens is drawn by the noise of the draft; the last one follows
    position = trial.start[:, None] + iota(trial.pi.shape[1])
    own, noise = trial.noise.draw(trial.pi, position, FINAL, trial.start)  # [B, W+1]
    accepted = leading((own[:, :-1] == trial.tokens) & in_test(trial))
    return Verdict(accepted, token=take1(own, accepted)), noise
  pi, q = at_tokens(trial)
  # All tests of a round are made at once. Those after the first failure decide nothing, so that the next round may use
  # their random numbers again.
  ok, noise = trial.noise.accept(pi, q, trial.position, trial.start)
  return Verdict(leading(ok & in_test(trial))), noise


@acceptor(reads=(), told=Told.NOTHING, exact=False)
def everything(trial: Trial) -> tuple[Verdict, sampling.Noise]:
  """Accept every token. It suits drafts that a policy ends before a token that must not be accepted."""
  return Verdict(trial.tested, subtract=0.0), trial.noise


@struct.dataclass
class Threshold:
  """Accept tokens while D(q, p) is at most `limit`, then take the verifier's: BiLD's roll-back (Kim et al. 2023).

  Attributes:
    limit: The largest D (`rules.discrepancy`) of a token that is accepted.
    drafter: The slot of the drafter.

  Example:
    >>> print(acceptance.spelled(acceptance.Threshold(2.0)))
    Threshold(limit=2.0, drafter=0)
  """

  limit: Array
  drafter: int = static(default=0)

  @property
  def declaration(self) -> AcceptorFacts:
    """It reads the drafter, too, and replaces what it rejects by the verifier's."""
    return AcceptorFacts((self.drafter,), told=Told.NOTHING, exact=False)

  def __post_init__(self):
    object.__setattr__(self, 'limit', sampling.traced(self.limit))

  def __call__(self, trial: Trial) -> tuple[Verdict, sampling.Noise]:
    width = trial.tokens.shape[1]
    logits = (trial.window.logits[m][:, :width] for m in (self.drafter, trial.models[-1]))
    ok = rules.discrepancy(*(rules.Prediction(x, trial.sampler) for x in logits)) <= self.limit
    return Verdict(leading(ok & in_test(trial)), subtract=0.0), trial.noise


@struct.dataclass
class FLy:
  """Accept a token that fails its test, too, where the verifier is unsure and the next ones pass (Li et al. 2025).

  A token that fails is still accepted if the verifier's likeliest three tokens have an entropy of at least `limit`, it
  allows the token, and the next `window` drafted tokens pass. A token too near the end of its draft is not.

  No π describes the output: whether a token is accepted depends on those after it, on γ and on its place in the draft.

  Attributes:
    limit: The least -Σ p log p of the three tokens.
    window: How many tokens have to pass.

  Example:
    >>> print(methods.speculative(block=8, accept=acceptance.FLy(limit=0.3, window=4)))
    propose(0, 8) · score(1) · verify(own of (1,), FLy)
  """

  limit: Array
  window: int = static(default=6)

  @property
  def declaration(self) -> AcceptorFacts:
    """It reads tokens that it then drops."""
    return AcceptorFacts((), told=Told.LATER, exact=False)

  def __post_init__(self):
    object.__setattr__(self, 'limit', sampling.traced(self.limit))
    checked_int('window', self.window)
    if isinstance(self.limit, float | np.floating) and not self.limit >= 0:
      raise ValueError(f'FLy needs limit >= 0, an entropy, not limit={self.limit}.')

  def __call__(self, trial: Trial) -> tuple[Verdict, sampling.Noise]:
    width = trial.tokens.shape[1]
    ok, noise = trial.noise.accept(*at_tokens(trial), trial.position, trial.start)
    ok = ok & in_test(trial)
    padded = jnp.pad(ok, ((0, 0), (0, self.window)))
    followed = jnp.stack([padded[:, i : i + width] for i in range(1, self.window + 1)]).all(0)
    p = rules.Prediction(trial.window.logits[trial.models[-1]], trial.sampler)
    largest = lax.top_k(p.plain[:, :width], min(3, p.plain.shape[-1]))[0]
    unsure = -jnp.where(largest > 0, largest * jnp.log(largest), 0).sum(-1) >= self.limit
    allowed = sampling.at_token(p.soft[:, :width], trial.tokens) > 0
    return Verdict(leading(ok | (unsure & allowed & followed & in_test(trial)))), noise


@acceptor(reads=(), told=Told.LATER, exact=True)
def block(trial: Trial) -> tuple[Verdict, sampling.Noise]:
  r"""Accept the block jointly (Sun et al. 2024, "Block Verification Accelerates Speculative Decoding", Algorithm 2).

  .. math::

     s_0 = 1, \qquad s_i = \min\Bigl(1, s_{i-1} \frac{\pi_i(x_i)}{\tilde q_i(x_i)}\Bigr), \qquad
     r_i = \sum_v \max\bigl(0, s_i\,\pi_{i+1}(v) - \tilde q_{i+1}(v)\bigr)

  The test of a prefix i < R succeeds with probability :math:`r_i / (r_i + 1 - s_i)`, that of R with :math:`s_R`. The
  longest prefix whose test succeeds is accepted. The next token comes from π after all R, else from
  :math:`\mathrm{norm}(\max(0, s_i\,\pi_{i+1} - \tilde q_{i+1}))`. The distribution of the output is that of
  `acceptance.token_wise`, and no fewer tokens are accepted in expectation: later ratios make up for an unlucky one.
  """
  pi, q = at_tokens(trial)
  width = pi.shape[1]
  # A ratio over 1 makes up for earlier ones under 1, up to s = 1.
  scales = [jnp.ones_like(pi[:, 0])]
  for i in range(width):
    ratio = jnp.where(q[:, i] > 0, pi[:, i] / jnp.where(q[:, i] > 0, q[:, i], 1), 0)
    scales.append(jnp.minimum(1, scales[-1] * ratio))
  s = jnp.stack(scales[1:], 1)  # [B, W] s_1..s_W
  after = jnp.pad(trial.window.probs[:, 1:], ((0, 0), (0, 1), (0, 0)))  # q̃_{i+1}
  left = sampling.tv(s[..., None] * trial.pi[:, 1:], after)
  # s = 1 leaves nothing to reject, also where π = q̃ makes r vanish. The denominator is 0 only there.
  inner = jnp.where(s >= 1, 1, left / jnp.maximum(left + 1 - s, jnp.finfo(s.dtype).tiny))
  last = iota(width) == trial.tested[:, None] - 1  # the target after it may not be known, which r would read
  ok, noise = trial.noise.accept(jnp.where(last, s, inner), jnp.ones_like(s), trial.position, trial.start)
  ok = ok & in_test(trial)
  # The longest prefix, not the first failure: this is why a number may have read tokens that are then dropped.
  accepted = jnp.max(jnp.where(ok, iota(width) + 1, 0), 1)
  return Verdict(accepted, take1(jnp.stack(scales, 1), accepted)), noise


def bind(accept: Callable) -> Callable:
  """Return an acceptor as a pytree."""
  if isinstance(accept, (str, type)) or not callable(accept):
    raise ValueError(f'accept={accept!r} is not an acceptor; give a function of a Trial, as acceptance.block is one.')
  inside = rules.inside(accept)
  return rules.bind(accept) if inside is not accept or inspect.isfunction(accept) else accept


def _known() -> dict[str, Callable]:
  """Return the acceptors of the package, by name."""
  return {name: x for name, x in globals().items() if callable(x) and hasattr(x, 'declaration')}


_ACCEPTORS = names.Catalogue('acceptor', _known, made=lambda named: bind(named.made()))
known, find, spelled = _ACCEPTORS.known, _ACCEPTORS.find, _ACCEPTORS.spelled
