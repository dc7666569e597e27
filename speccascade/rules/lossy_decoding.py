"""Lossy speculative decoding as a target: what accepts more than exactness allows, written as the distribution π."""

import jax.numpy as jnp
import numpy as np

from speccascade import sampling
from speccascade.rules.base import missing, Range, rule

# α → 1 keeps what p̃ allows: not the drafter alone where p̃ = 0
RANGE = Range(0, 0.9999, verifier=0, curve=(0.1, 0.3, 0.5, 0.7, 0.9))


def _executed(q, p, alpha, beta=1.0):
  """Return π of accepting a drafted token or drawing from the residual, as a definition."""
  accepted = np.minimum(q, p / (1 - alpha))
  rest = np.maximum(p / beta - q, 0)
  rejected = 1 - accepted.sum()
  return accepted + (rejected * rest / rest.sum() if rest.sum() > 0 else 0)


@rule(alpha=RANGE, normalized=True, definition=lambda q, p, alpha: _executed(q.probs, p.probs, alpha))
def lossy(q, p, *, alpha):
  r"""Accept more than exactness allows (Tran-Thien 2023; Zhou et al. 2024).

  Accept a token x with probability :math:`\min(1, \tilde p(x) / ((1 - \alpha)\,\tilde q(x)))`, else draw from
  :math:`\mathrm{norm}(\max(0, \tilde p - \tilde q))`. A token with :math:`\tilde p > \tilde q` is always accepted. So
  the ordinary test has that acceptance and that residual for the target

  .. math:: \pi = \min\Bigl(\tilde q, \frac{\tilde p}{1 - \alpha}\Bigr)
            + r\,\mathrm{norm}(\max(0, \tilde p - \tilde q)), \qquad 0 \le \alpha < 1,

  with r the rejected mass. α = 0 is exact.
  """
  return _lossy(q.probs, p.probs, alpha, beta=1.0)


def _star(q, p, alpha):
  """Return π of `lossy_star` as a definition, with β by a bisection of its own."""
  rejected = np.maximum(q - p / (1 - alpha), 0).sum()
  low, high = 1 - alpha, 10.0
  for _ in range(80):
    beta = (low + high) / 2
    low, high = (beta, high) if np.maximum(p / beta - q, 0).sum() > rejected else (low, beta)
  return _executed(q, p, alpha, beta)


@rule(alpha=RANGE, normalized=True, definition=lambda q, p, alpha: _star(q.probs, p.probs, alpha))
def lossy_star(q, p, *, alpha):
  r"""Accept as `rules.lossy` does, with a residual of just the rejected mass (Narasimhan et al. 2024, Lemma 2).

  .. math:: \pi = \max\Bigl(\min\Bigl(\tilde q, \frac{\tilde p}{1 - \alpha}\Bigr), \frac{\tilde p}{\beta}\Bigr),
            \qquad 0 \le \alpha < 1

  At each position β in [1 - α, 10] makes π sum to 1. Where even β = 10 leaves more than the rejected mass, the residual
  :math:`\max(0, \tilde p / \beta - \tilde q)` is normalised to it.
  """
  rejected = sampling.tv(q.probs, p.probs / (1 - alpha))
  low = jnp.full_like(rejected, 1 - alpha)
  high = jnp.full_like(rejected, 10.0)
  for _ in range(24):
    beta = (low + high) / 2
    heavy = sampling.tv(p.probs / beta[..., None], q.probs) > rejected
    low = jnp.where(heavy, beta, low)
    high = jnp.where(heavy, high, beta)
  return _lossy(q.probs, p.probs, alpha, beta=low[..., None])


def _lossy(q, p, alpha, *, beta):
  accepted = jnp.minimum(q, p / (1 - alpha))
  return accepted + missing(accepted) * sampling.residual(p / beta, q)
