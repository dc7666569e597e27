"""Predictors of acceptance: how likely the verifier is to accept a drafted token, told before it has read it.

A predictor is a signal and a fit. A signal is a function of a `stopping.Draft` to one array, or two, of the shape of
its tokens, and declares what it reads by the decorator `signal`. A fit makes the chance of it: `AsIs`, by a table of
what was observed (`AcceptanceTable`), or by a logistic curve that goes on to learn from tested tokens (`Logistic`).

Axis letters: B batch, L drafted tokens, V vocabulary, N samples, I bins of S, J bins of A.
"""

from collections.abc import Callable, Sequence
import dataclasses
import inspect
import numbers
from typing import Any

from flax import struct
import jax
from jax import lax, tree_util
import jax.numpy as jnp
import numpy as np

from speccascade import rules, sampling
from speccascade.backends import ops
from speccascade.host import names
from speccascade.rules.base import declared
from speccascade.stopping import Draft
from speccascade.types import Array, Carry, static

MOST = 30.0  # a larger gap says no more, and that of a lone token is infinite

# ---- fits ----


@struct.dataclass
class Fit:
  """How a signal becomes the chance of acceptance. The base of every fit.

  Attributes:
    learns: Whether it has a carry, which tested tokens change.
  """

  learns = False

  def init(self, rows: int) -> Carry:
    """Return the carry before the first round of so many sequences."""
    return ()

  def chance(self, carry: Carry, *signals: Array) -> Array:
    """Return the chance of acceptance, 0 … 1, of the shape of the signals [B, ...]."""
    raise NotImplementedError(f'{type(self).__name__} has no chance(carry, *signals).')

  def update(self, carry: Carry, tested: Array, accepted: Array, *signals: Array) -> Carry:
    """Return the carry after a round: which tokens [B, L] were tested, and which of them accepted."""
    return carry

  def predict(self, *signals: np.ndarray) -> np.ndarray:
    """Return the chances of samples [N], on the host, before anything is learned."""
    arrays = [jnp.asarray(x, jnp.float32)[None] for x in signals]
    return np.asarray(self.chance(self.init(1), *arrays)[0], np.float64)


@struct.dataclass
class AsIs(Fit):
  """Take a signal that is a probability for the chance; of two, the last."""

  def chance(self, carry, *signals):
    return jnp.clip(signals[-1], 0, 1)


@struct.dataclass
class Logistic(Fit):
  r"""The chance :math:`1 / (1 + e^{-(b + w x)})`, each sequence with a b and a w that go on to learn.

  After a round each tested token moves them by `rate` times its error, over :math:`1 + x^2` (normalised least mean
  squares); with rate 0 they stay. Of two signals x is the last.
  """

  bias: Array = 0.0
  slope: Array = 1.0
  rate: float = static(default=0.1)

  def __post_init__(self):
    for name in ('bias', 'slope', 'rate'):
      value = sampling.number(getattr(self, name))
      real = isinstance(value, numbers.Real) and not isinstance(value, bool)
      if isinstance(value, (str, bool, complex)) or real and not np.isfinite(value) or name == 'rate' and value < 0:
        raise ValueError(f'Logistic: {name}={value!s} is no number{", 0 or more" if name == "rate" else ""}.')
      if real and name != 'rate':
        object.__setattr__(self, name, np.float32(value))

  @property
  def learns(self) -> bool:
    return self.rate > 0

  def init(self, rows):
    return jnp.stack([jnp.full(rows, x, jnp.float32) for x in (self.bias, self.slope)], 1)

  def chance(self, carry, *signals):
    x = signals[-1]
    bias, slope = (carry[:, i].reshape((-1,) + (1,) * (x.ndim - 1)) for i in range(2))
    return jax.nn.sigmoid(bias + slope * x)

  def update(self, carry, tested, accepted, *signals):
    x = signals[-1]
    error = jnp.where(tested, accepted.astype(jnp.float32) - self.chance(carry, x), 0) / (1 + x * x)
    return carry + self.rate * jnp.stack([error.sum(1), (error * x).sum(1)], 1)

  def lists(self) -> dict[str, float]:
    """Return its numbers."""
    return dict(bias=float(self.bias), slope=float(self.slope))


@struct.dataclass
class AcceptanceTable(Fit):
  """Mean acceptance by S and A: `means` [I, J] with inner edges `s_edges` [I-1] and, for each S, `a_edges` [I, J-1].

  A single signal is A, with one bin of S.
  """

  s_edges: Array
  a_edges: Array
  means: Array

  def __call__(self, s: Array, a: Array) -> Array:
    """Return the means for s and a of one shape; comparisons and sums, where a TPU would gather entry by entry."""

    def trailing(x):
      return jnp.asarray(x).reshape((1,) * s.ndim + np.shape(x))

    count, most = np.shape(self.means)
    row = jnp.sum(trailing(self.s_edges) <= s[..., None], -1)[..., None] == trailing(jnp.arange(count))  # [..., I]
    column = jnp.sum(trailing(self.a_edges) <= a[..., None, None], -1)  # [..., I]
    cell = row[..., None] & (column[..., None] == trailing(jnp.arange(most)[None]))
    return jnp.sum(jnp.where(cell, trailing(self.means), 0), (-2, -1))

  def chance(self, carry, *signals):
    return self(signals[0], signals[-1])

  @classmethod
  def of(cls, s_edges: Sequence, a_edges: Sequence[Sequence], means: Sequence) -> 'AcceptanceTable':
    """Return a table from rows of edges, which may differ in length: the edges of A are padded with infinity."""
    padded = np.full((len(a_edges), max(map(len, a_edges), default=0)), np.inf, np.float32)
    for i, edges in enumerate(a_edges):
      padded[i, : len(edges)] = edges
    return cls(np.asarray(s_edges, np.float32), padded, np.asarray(means, np.float32))

  def lists(self) -> dict[str, list]:
    """Return what `of` takes, as lists."""
    rows = [row[np.isfinite(row)].tolist() for row in np.asarray(self.a_edges)]
    return dict(s_edges=np.asarray(self.s_edges).tolist(), a_edges=rows, means=np.asarray(self.means).tolist())

  def check(self) -> None:
    """Refuse a table whose shapes do not fit, whose edges do not ascend or whose means are no shares."""
    means = np.asarray(self.means)
    a_edges = np.asarray(self.a_edges)
    if means.shape != (len(self.s_edges) + 1, a_edges.shape[1] + 1) or len(a_edges) != len(means):
      raise ValueError(
        'table: means need a row for each bin of S and a column for each bin of A, a_edges a row for each'
      )
    if bad := means[~((means >= 0) & (means <= 1 + 1e-4))].tolist():
      raise ValueError(f'table: means has {bad[0]:g}, which is no share of accepted tokens, 0 … 1.')
    for name, edges in [('s_edges', np.asarray(self.s_edges)), *(('a_edges', row[row < np.inf]) for row in a_edges)]:
      if not (np.diff(edges) > 0).all() or not np.isfinite(edges).all():
        raise ValueError(f'table: {name}={edges.tolist()} do not ascend.')

  def cells(self, s: np.ndarray, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the row and the column of each sample [N], on the host."""
    row = np.searchsorted(self.s_edges, np.float32(s), side='right')
    return row, (np.asarray(self.a_edges)[row] <= np.float32(a)[:, None]).sum(1)

  def predict(self, *signals):
    return np.asarray(self.means, np.float64)[self.cells(signals[0], signals[-1])]


# ---- signals ----


@dataclasses.dataclass(frozen=True)
class SignalFacts:
  """What is said of a signal by its decorator.

  Attributes:
    drawn: Whether it looks at the drawn token, and not only at the tokens before it.
    companion: Whether it reads the logits of a companion.
    coupled: Whether it reads the noise of `Sampler(coupling='gumbel')`.
    fit: The fit of a signal where nothing was measured.
  """

  drawn: bool = True
  companion: bool = False
  coupled: bool = False
  fit: Fit = AsIs()


def signal(**facts) -> Callable:
  """Declare a signal: a decorator that takes fields of `SignalFacts`. Without it a function looks at the token."""
  return declared(SignalFacts(**facts))


def _gap(x: Array) -> Array:
  """Return by how much the largest of x [..., V] is more than the next."""
  top = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) == ops.argmax(x)[..., None]
  return jnp.minimum(x.max(-1) - jnp.where(top, -jnp.inf, x).max(-1), MOST)


@signal(companion=True)
def companion(draft: Draft) -> tuple[Array, Array]:
  r"""Return speculative verification's S and A of drafter and companion.

  .. math:: S = \sum_v \min(\tilde q(v), \tilde c(v)), \qquad A = \min(1, \tilde c(x) / \tilde q(x))

  They are those of the sampled distributions of drafter and companion, at temperature 0 of the unscaled ones.
  """
  q = draft.soft
  c = draft.sampler.soft(draft.companion)
  return jnp.minimum(q, c).sum(-1), ratio(q, c, draft.tokens)


@signal(drawn=False, fit=Logistic())
def margin(draft: Draft) -> Array:
  """Return by how much the drafter's largest logit is more than the next."""
  return _gap(draft.logits)


@signal(drawn=False)
def max_q(draft: Draft) -> Array:
  """Return the probability of the drafter's likeliest token, max q."""
  return sampling.confidence(draft.logits)


@signal()
def drawn_q(draft: Draft) -> Array:
  r"""Return the probability of the drawn token, :math:`\tilde q(x)`; at temperature 0 the unscaled one."""
  return draft.q


@signal(coupled=True, fit=Logistic())
def noisy_margin(draft: Draft) -> Array:
  r"""Return the gap of the two largest :math:`\log \tilde q(v) - \log E_v`; the drawn token has the largest."""
  noise = draft.noise.exponential(draft.position, draft.probs.shape[-1])
  return _gap(jnp.log(draft.probs) - jnp.log(noise))


def ratio(q: Array, p: Array, tokens: Array) -> Array:
  """Return min(1, p / q) at tokens."""
  q_x = sampling.at_token(q, tokens)
  p_x = sampling.at_token(p, tokens)
  return jnp.where(q_x > 0, jnp.minimum(1, p_x / jnp.where(q_x > 0, q_x, 1)), 0)


# ---- predictors ----


@struct.dataclass
class Predictor:
  """A signal with its numbers bound, and the fit that makes the chance of acceptance of it."""

  signal: tree_util.Partial
  fit: Fit

  @classmethod
  def of(cls, function: Callable, fit: Fit | None = None) -> 'Predictor':
    """Return the predictor of a signal; `fit` None takes the signal's own."""
    check(function)
    if fit is not None and not isinstance(fit, Fit):
      raise ValueError(f'fit={fit!r} is no fit; give Logistic(), AsIs() or an AcceptanceTable.')
    return cls(rules.bind(function), declaration(function).fit if fit is None else fit)

  @property
  def name(self) -> str:
    """The name of its signal."""
    return rules.name_of(self.signal)

  @property
  def declaration(self) -> SignalFacts:
    """What its signal declares."""
    return declaration(self.signal)

  def signals(self, draft: Draft) -> tuple[Array, ...]:
    """Return the signal as one array, or two."""
    found = self.signal(draft)
    return found if isinstance(found, tuple) else (found,)

  def __call__(self, carry: Carry, draft: Draft) -> Array:
    """Return the chance that each token is accepted."""
    return self.fit.chance(carry, *self.signals(draft))


def declaration(function: Callable) -> SignalFacts:
  """Return what a signal declares; one that declares nothing looks at the drawn token."""
  return getattr(rules.inside(function), 'declaration', SignalFacts())


def check(function: Any) -> None:
  """Raise where a value is no signal; nothing is called."""
  if not callable(function) or isinstance(function, type) or not isinstance(declaration(function), SignalFacts):
    raise ValueError(
      f'predictor={rules.name_of(function) if callable(function) else repr(function)} is no signal; give one of '
      f'{", ".join(known())}, or a function of a Draft.'
    )


def check_declared(text: str) -> None:
  """Raise where a text names no declared signal of the package or of an imported module: a plan may name no other."""
  with names.as_data():
    function = names.find(text, 'predictor', known()).value
  if not inspect.isfunction(function) or not isinstance(getattr(function, 'declaration', None), SignalFacts):
    raise ValueError(f'{text!r} names no declared signal, as a plan does; write @predictors.signal() above it.')


def _known() -> dict[str, Callable]:
  """Return the signals of the package, by name."""
  return {name: x for name, x in globals().items() if inspect.isfunction(x) and hasattr(x, 'declaration')}


def _made(named: names.Named) -> Callable:
  """Return a signal with its numbers bound."""
  check(named.value)
  return named.made()


_SIGNALS = names.Catalogue('predictor', _known, made=_made)
known, find, spelled = _SIGNALS.known, _SIGNALS.find, _SIGNALS.spelled
