"""What acceptance is worth: tokens per round, speed-ups and the best block size, as functions of the acceptance rate α.

Each drafted token is taken to be accepted with the same chance α, whatever came before it, or with the chances
`ByPlace` in the block: drafts go astray the further they go, and one rate for all places promises too much of a long
block. Times are in units of one token of the verifier. c is the time of a call of the drafter; v that of the
verifier's call for a block, in the papers no dearer than one token; `overhead` what a round costs beside its calls,
one of the reference's rounds (a token each) as well as one of the method's. Numbers or arrays go in, and broadcast.
α = 1 is the limit of the formula, not a division by zero.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", §3;
Fu et al. 2025, "Fast Large Language Model Collaborative Decoding via Speculation", §3 and Appendix A.
"""

from collections.abc import Callable, Sequence
import dataclasses

import numpy as np
from numpy.typing import ArrayLike


@dataclasses.dataclass(frozen=True)
class ByPlace:
  """Acceptance rates by place in the block, each given that all before were accepted; the last one goes on."""

  rates: Sequence[float]

  def __post_init__(self):
    rates = np.asarray(self.rates, np.float64)
    if rates.ndim != 1 or not rates.size or not ((rates >= 0) & (rates <= 1)).all():
      raise ValueError(f'acceptance={self.rates} is not a list of rates between 0 and 1.')

  def kept(self, n: ArrayLike) -> np.ndarray:
    """Return the chance that the first n drafted tokens are accepted."""
    n = np.asarray(n, np.int64)
    most = max(int(n.max()), 1)
    rates = np.append(self.rates, np.full(max(most - len(self.rates), 0), self.rates[-1]))[:most]
    return np.append(1.0, np.cumprod(rates))[n]


Rate = ArrayLike | ByPlace


def acceptance_rate(q: ArrayLike, pi: ArrayLike) -> np.ndarray:
  """Return α = Σ_v min(q̃(v), π(v)) = 1 - TV(q̃, π) of laws [..., V] (Leviathan et al. 2023, Theorem 3.5)."""
  q, pi = _laws('q', q), _laws('pi', pi)
  if q.shape[-1] != pi.shape[-1]:
    raise ValueError(f'q has {q.shape[-1]} tokens and pi {pi.shape[-1]}; give laws over one vocabulary.')
  return np.clip(np.minimum(q, pi).sum(-1), 0, 1)  # rounding may have left a sum just over 1


def tokens_per_round(alpha: Rate, gamma: ArrayLike) -> np.ndarray:
  """Return (1 - α^{γ+1}) / (1 - α): γ tokens drafted and a bonus token (Leviathan et al. 2023, Equation 1).

  A cascade of this package gives as many: it drafts and tests γ + 1 tokens and has no bonus token.
  """
  return _tokens(_rate(alpha), _block(gamma) + 1)


def tokens_per_round_without_bonus(alpha: Rate, gamma: ArrayLike) -> np.ndarray:
  """Return (1 - α^γ) / (1 - α): γ tokens drafted, no bonus token (Fu et al. 2025, Equation 12)."""
  return _tokens(_rate(alpha), _block(gamma))


def speedup_speculative(
  alpha: Rate, gamma: ArrayLike, c: ArrayLike, v: ArrayLike = 1.0, overhead: ArrayLike = 0.0
) -> np.ndarray:
  """Return (1 - α^{γ+1}) / ((1 - α)(γc + v)), over the verifier alone (Leviathan et al. 2023, Theorem 3.8)."""
  time = _block(gamma) * _cost(c) + _cost(v, 'v')
  return _over(tokens_per_round(alpha, gamma), time, 1.0, overhead)


def speedup_cascade(
  alpha: Rate, gamma: ArrayLike, c: ArrayLike, v: ArrayLike = 1.0, overhead: ArrayLike = 0.0
) -> np.ndarray:
  """Return (1 - α^{γ+1}) / ((1 - α)((γ+1)c + v)), over the verifier alone.

  The verifier scores γ tokens as in speculative decoding, but the drafter's law is needed after them too: γ + 1 calls.
  """
  time = (_block(gamma) + 1) * _cost(c) + _cost(v, 'v')
  return _over(tokens_per_round(alpha, gamma), time, 1.0, overhead)


def speedup_token_cascade(
  alpha: Rate, most: ArrayLike, c: ArrayLike, v: ArrayLike = 1.0, overhead: ArrayLike = 0.0
) -> np.ndarray:
  """Return (1 - α^{n+1}) / ((1 - α)(c(1 - α^n)/(1 - α) + v)) of drafts of at most n tokens, over the verifier alone.

  α is the share of tokens that are not deferred; the drafter runs once more for a token that it then defers.
  """
  time = _cost(c) * tokens_per_round_without_bonus(alpha, most) + _cost(v, 'v')
  return _over(tokens_per_round(alpha, most), time, 1.0, overhead)


def speedup_naive_cos(
  alpha: Rate, gamma: ArrayLike, c: ArrayLike, v: ArrayLike = 1.0, overhead: ArrayLike = 0.0
) -> np.ndarray:
  """Return (1 - α^γ)(1 + c) / ((1 - α)(cγ + v)), over the ensemble (Fu et al. 2025, Theorem 3.1)."""
  c = _cost(c)
  time = c * _block(gamma) + _cost(v, 'v')
  return _over(tokens_per_round_without_bonus(alpha, gamma), time, 1 + c, overhead)


def speedup_ensemble_sd(
  alpha: Rate, gamma: ArrayLike, c: ArrayLike, v: ArrayLike = 1.0, overhead: ArrayLike = 0.0
) -> np.ndarray:
  """Return (1 - α^{γ+1})(1 + c) / ((1 - α)(cγ + (1 + c)v)), over the ensemble.

  The drafter scores the block anew, its window as dear beside its token as the verifier's.
  """
  c = _cost(c)
  time = c * _block(gamma) + (1 + c) * _cost(v, 'v')
  return _over(tokens_per_round(alpha, gamma), time, 1 + c, overhead)


def speedup_cos(alpha: ArrayLike, gamma_q: ArrayLike, gamma_p: ArrayLike, c: ArrayLike) -> np.ndarray:
  """Return (1 - α^{γ_q})(1 + c) / ((1 - α)(1 + cγ_q - α^{γ_p}c)), over the ensemble (Fu et al. 2025, Theorem 3.6).

  This is the paper's account of one cycle: q proposes, one token fewer where the cycle before, of p's proposals, was
  accepted whole. It leaves out p's own tokens and their cost; `speedup_cos_steady` counts all.
  """
  alpha, c = _rate(alpha), _cost(c)
  gamma_q, gamma_p = _block(gamma_q, 'gamma_q'), _block(gamma_p, 'gamma_p')
  return _tokens(alpha, gamma_q) * (1 + c) / (1 + c * gamma_q - _kept(alpha, gamma_p) * c)


def speedup_cos_steady(
  alpha_q: Rate,
  alpha_p: Rate,
  gamma_q: ArrayLike,
  gamma_p: ArrayLike,
  c: ArrayLike,
  v: ArrayLike = 1.0,
  overhead: ArrayLike = 0.0,
) -> np.ndarray:
  """Return the long-run speed-up over the ensemble of the alternate proposals of two models.

  q's tokens are accepted with chance α_q, p's with α_p. With E_i = (1 - α_i^{γ_i}) / (1 - α_i), a = α_q^{γ_q} and
  b = α_p^{γ_p}, it is (E_q + a E_p)(1 + c) / (v + cγ_q + a(γ_p - 1 + c(1 - b))): after a proposal of q that is
  accepted whole, with chance a, p's bonus token opens p's proposal, of γ_p - 1 more calls; q scores it in one call,
  and that call is the first of q's next proposal where p's was accepted whole.
  """
  alpha_q, alpha_p, c = _rate(alpha_q, 'alpha_q'), _rate(alpha_p, 'alpha_p'), _cost(c)
  gamma_q, gamma_p = _block(gamma_q, 'gamma_q'), _block(gamma_p, 'gamma_p')
  a, b = _kept(alpha_q, gamma_q), _kept(alpha_p, gamma_p)
  tokens = _tokens(alpha_q, gamma_q) + a * _tokens(alpha_p, gamma_p)
  return _over(tokens, _cost(v, 'v') + c * gamma_q + a * (gamma_p - 1 + c * (1 - b)), 1 + c, overhead)


def _over(tokens: np.ndarray, time: np.ndarray, reference: ArrayLike, overhead: ArrayLike) -> np.ndarray:
  """Return the speed-up of rounds of so many tokens and such a time over a reference's time for a token."""
  overhead = _checked('overhead', overhead, lambda x: (x >= 0) & np.isfinite(x), 'a time of at least 0')
  return (tokens * (reference + overhead) / (time + overhead))[()]


def best_block(speedup: Callable, alpha: Rate, c: ArrayLike, most: int = 64) -> int | np.ndarray:
  """Return the γ of 1 … `most` that maximises speedup(α, γ, c), the smallest on ties; an int for numbers.

  For CoS fix γ_p: `best_block(lambda alpha, gamma, c: speedup_cos(alpha, gamma, 1, c), alpha, c)`.
  """
  gammas = np.arange(1, int(_block(most, 'most')) + 1)
  rate = alpha if isinstance(alpha, ByPlace) else _rate(alpha)[..., None]
  values = speedup(rate, gammas, _cost(c)[..., None])
  best = gammas[np.argmax(values, -1)]
  return best if best.ndim else int(best)


def _kept(alpha: np.ndarray | ByPlace, n: np.ndarray) -> np.ndarray:
  """Return the chance α^n that n tokens are accepted."""
  return alpha.kept(n) if isinstance(alpha, ByPlace) else alpha**n


def _tokens(alpha: np.ndarray | ByPlace, n: np.ndarray) -> np.ndarray:
  """Return Σ_{i<n} α^i = (1 - α^n) / (1 - α), exact at α = 1 and stable next to it."""
  if isinstance(alpha, ByPlace):
    return np.cumsum(alpha.kept(np.arange(int(np.max(n)))))[np.asarray(n, np.int64) - 1]
  loss = np.where(alpha < 1, 1 - alpha, 1)
  with np.errstate(divide='ignore'):  # α = 0: log 0 = -∞ and 0^n = 0
    total = -np.expm1(n * np.log1p(-loss)) / loss
  return np.where(alpha < 1, total, n)[()]


def _checked(name: str, value: ArrayLike, ok: Callable, need: str) -> np.ndarray:
  value = np.asarray(value, np.float64)
  bad = value[~ok(value)]
  if bad.size:
    raise ValueError(f'{name}={bad.flat[0]:g} is not {need}.')
  return value


def _rate(alpha: Rate, name: str = 'alpha') -> np.ndarray | ByPlace:
  return (
    alpha
    if isinstance(alpha, ByPlace)
    else _checked(name, alpha, lambda x: (x >= 0) & (x <= 1), 'an acceptance rate between 0 and 1')
  )


def _cost(c: ArrayLike, name: str = 'c') -> np.ndarray:
  need = "a ratio of times over 0; give the time of a call over that of the verifier's call for one token"
  return _checked(name, c, lambda x: (x > 0) & np.isfinite(x), need)


def _block(gamma: ArrayLike, name: str = 'gamma') -> np.ndarray:
  return _checked(name, gamma, lambda x: (x >= 1) & np.isfinite(x) & (x == np.floor(x)), 'a whole number of at least 1')


def _laws(name: str, law: ArrayLike) -> np.ndarray:
  law = np.asarray(law, np.float64)
  if not law.ndim or not (law >= 0).all() or not (abs(law.sum(-1) - 1) < 1e-3).all():
    raise ValueError(f'{name} is not a law: give probabilities that sum to 1 over the last axis, not {law.flat[:5]}.')
  return law
