r"""Deferral rules of speculative cascades: a decision δ at each position, or a set of tokens that the drafter may emit.

With a decision the target is

.. math:: \pi = (1 - \delta)\,\tilde q + \delta\,\tilde p,

and a drafted token is rejected with probability :math:`\delta\,\mathrm{TV}(\tilde p, \tilde q)` (Narasimhan et al.
2024, Lemma 3). With a set S it is

.. math:: \pi(v) = \tilde q(v)\,[v \in S] + \tilde p(v)\,\Bigl(1 - \sum_{u \in S} \tilde q(u)\Bigr),

and a drafted token of S is always accepted.

`alpha` is the cost of deferring: a larger α defers less and is faster.
"""

import jax.numpy as jnp
import numpy as np

from speccascade import sampling
from speccascade.rules.base import INF, Prediction, Range, rule
from speccascade.types import Array


def _entropy(p):
  """Return the entropy of a definition's distribution [V]."""
  return -sum(x * np.log(x) for x in p if x > 0)


def _tv(a, b):
  """Return the total variation distance of a definition's distributions [V]."""
  return np.maximum(a - b, 0).sum()


@rule(normalized=True, definition=lambda q, p: p.probs, labels=dict(speculative='SpecDecode'))
def speculative(q, p):
  r"""Follow the verifier: plain speculative decoding (Leviathan et al. 2023; Chen et al. 2023).

  .. math:: \pi = \tilde p
  """
  del q
  return p.probs


@rule(
  alpha=Range(0, 1, verifier=0, drafter=1, curve=(0.1, 0.3, 0.5, 0.7, 0.9)),
  drafter_alone=True,
  definition=lambda q, p, alpha: q.plain.max() < 1 - alpha,
  labels=dict(speculative='SpecCascade [Chow]', token_cascade='TokenCascade [Chow]'),
)
def chow(q, p, *, alpha):
  r"""Defer where the drafter is unsure (Chow 1970; Narasimhan et al. 2024).

  .. math:: \max q < 1 - \alpha, \qquad 0 \le \alpha \le 1
  """
  return q.confidence < 1 - alpha


@rule(
  alpha=Range(0, verifier=0, drafter=INF, curve=(0.1, 0.5, 1.0, 2.0, 4.0)),
  drafter_alone=True,
  definition=lambda q, p, alpha: _entropy(q.plain) > alpha,
  labels=dict(speculative='SpecCascade [ChowLog]', token_cascade='TokenCascade [ChowLog]'),
)
def chow_log(q, p, *, alpha):
  r"""Defer where the drafter's entropy is high (Narasimhan et al. 2024).

  .. math:: H(q) > \alpha, \qquad 0 \le \alpha \le \log V
  """
  return q.entropy > alpha


@rule(
  alpha=Range(-1, 1, verifier=-1, drafter=1, curve=(0.0, 0.05, 0.1, 0.2, 0.4)),
  definition=lambda q, p, alpha: q.plain.max() < p.plain.max() - alpha,
  labels=dict(oracle='Oracle [Diff]', speculative='SpecCascade [Diff]'),
)
def diff(q, p, *, alpha):
  r"""Defer where the verifier is surer by α (Narasimhan et al. 2024).

  .. math:: \max q < \max p - \alpha, \qquad -1 \le \alpha \le 1
  """
  return q.confidence < p.confidence - alpha


@rule(
  alpha=Range(verifier=-INF, drafter=INF, curve=(0.0, 0.2, 0.5, 1.0, 2.0)),
  definition=lambda q, p, alpha: _entropy(q.plain) > _entropy(p.plain) + alpha,
  labels=dict(oracle='Oracle [DiffLog]', speculative='SpecCascade [DiffLog]'),
)
def diff_log(q, p, *, alpha):
  r"""Defer where the verifier's entropy is lower by α (Narasimhan et al. 2024).

  .. math:: H(q) > H(p) + \alpha, \qquad -\log V \le \alpha \le \log V
  """
  return q.entropy > p.entropy + alpha


@rule(
  alpha=Range(verifier=-INF, drafter=INF, curve=(0.0, 0.1, 0.2, 0.4, 0.8)),
  definition=lambda q, p, alpha: q.plain.max() < p.plain.max() - alpha * _tv(q.probs, p.probs),
  labels=dict(speculative='SpecCascade [OPT]'),
)
def opt(q, p, *, alpha):
  r"""Defer where the verifier is surer by the cost of a rejection (Narasimhan et al. 2024).

  .. math:: \max q < \max p - \alpha\,\mathrm{TV}(\tilde q, \tilde p), \qquad -\infty < \alpha < \infty

  At temperature 0 it emits the text of `rules.diff` with the same α: TV is 1 where the two arg max differ, and where
  they agree the decision changes nothing (Lemma 8).
  """
  return q.confidence < p.confidence - alpha * sampling.tv(q.probs, p.probs)


@rule(
  alpha=Range(verifier=-INF, drafter=INF, curve=(0.0, 0.5, 1.0, 2.0, 4.0)),
  definition=lambda q, p, alpha: _entropy(q.plain) > _entropy(p.plain) + alpha * _tv(q.probs, p.probs),
  labels=dict(speculative='SpecCascade [OPTLog]'),
)
def opt_log(q, p, *, alpha):
  r"""Defer where the verifier's entropy is lower by the cost of a rejection (Narasimhan et al. 2024).

  .. math:: H(q) > H(p) + \alpha\,\mathrm{TV}(\tilde q, \tilde p), \qquad -\infty < \alpha < \infty
  """
  return q.entropy > p.entropy + alpha * sampling.tv(q.probs, p.probs)


def discrepancy(q: Prediction, p: Prediction) -> Array:
  r"""Return BiLD's discrepancy D(q, p) [...] (Kim et al. 2023).

  .. math:: D(q, p) = \begin{cases} -\log p(\arg\max q) & \text{greedy} \\ -\sum_v q(v) \log p(v) & T > 0 \end{cases}
  """

  def cold():
    return -sampling.at_token(p.log_plain, q.argmax)

  def warm():
    return -jnp.sum(jnp.where(q.plain > 0, q.plain * p.log_plain, 0), -1)

  return q.sampler.by_temperature(cold, warm)


def _discrepancy(q, p):
  """Return D of a definition's `Position`s."""
  if q.greedy:
    return -np.log(p.plain[q.plain.argmax()])
  return -sum(a * np.log(b) for a, b in zip(q.plain, p.plain) if a > 0)


@rule(
  alpha=Range(0, verifier=0, drafter=INF, curve=(0.5, 1.0, 2.0, 3.0, 4.0)),
  definition=lambda q, p, alpha: _discrepancy(q, p) > alpha,
  labels=dict(speculative='BiLD*'),
)
def bild_star(q, p, *, alpha):
  r"""Defer where the verifier finds the draft unlikely, in BiLD's sense (Kim et al. 2023; Narasimhan et al. 2024).

  .. math:: D(q, p) > \alpha, \qquad 0 \le \alpha < \infty

  `rules.discrepancy` is D.
  """
  return discrepancy(q, p) > alpha


@rule(
  alpha=Range(-1, 1, verifier=-1, drafter=1, curve=(0.0, 0.2, 0.4, 0.6, 0.8)),
  definition=lambda q, p, alpha: q.plain >= p.plain.max() - alpha,
  labels=dict(speculative='SpecCascade [TokenV1]'),
)
def token_v1(q, p, *, alpha):
  r"""Keep drafted tokens that are likely under the drafter (Narasimhan et al. 2024).

  .. math:: S = \{v : q(v) \ge \max p - \alpha\}, \qquad -1 \le \alpha \le 1
  """
  return q.plain >= p.confidence[..., None] - alpha


@rule(
  alpha=Range(-1, 1, verifier=-1, drafter=1, curve=(0.0, 0.2, 0.4, 0.6, 0.8)),
  definition=lambda q, p, alpha: p.plain >= p.plain.max() - alpha,
  labels=dict(speculative='SpecCascade [TokenV2]'),
)
def token_v2(q, p, *, alpha):
  r"""Keep drafted tokens that are likely under the verifier (Narasimhan et al. 2024).

  .. math:: S = \{v : p(v) \ge \max p - \alpha\}, \qquad -1 \le \alpha \le 1
  """
  return p.plain >= p.plain.max(-1, keepdims=True) - alpha


@rule(
  alpha=Range(0, 1, drafter=1, curve=(0.1, 0.3, 0.5, 0.7, 0.9)),
  definition=lambda q, p, alpha: p.plain >= (1 - alpha) * p.plain.max(),
  labels=dict(speculative='SpecCascade [Token]'),
)
def token_v3(q, p, *, alpha):
  r"""Keep drafted tokens that are likely under the verifier, relative to its best (Narasimhan et al. 2024).

  .. math:: S = \{v : p(v) \ge (1 - \alpha) \max p\}, \qquad 0 \le \alpha \le 1

  At α = 0 the verifier's arg max is still in S, so above temperature 0 it is not plain speculative decoding.
  """
  return p.plain >= (1 - alpha) * p.plain.max(-1, keepdims=True)
