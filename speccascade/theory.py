"""What acceptance is worth: tokens per round, speed-ups and the best block size, as functions of the acceptance rate α.

Every formula takes each drafted token to be accepted with the same chance α, whatever came before it. c is the time of
a call of the drafter over that of a call of the verifier; scoring a block is taken to cost as much as one token.
Numbers or arrays go in, and broadcast. α = 1 is the limit of the formula, not a division by zero.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", §3;
Fu et al. 2025, "Fast Large Language Model Collaborative Decoding via Speculation", §3 and Appendix A.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike


def acceptance_rate(q: ArrayLike, pi: ArrayLike) -> np.ndarray:
  """Return α = Σ_v min(q̃(v), π(v)) = 1 - TV(q̃, π) of laws [..., V] (Leviathan et al. 2023, Theorem 3.5)."""
  q, pi = _laws('q', q), _laws('pi', pi)
  if q.shape[-1] != pi.shape[-1]:
    raise ValueError(f'q has {q.shape[-1]} tokens and pi {pi.shape[-1]}; give laws over one vocabulary.')
  return np.clip(np.minimum(q, pi).sum(-1), 0, 1)  # rounding may have left a sum just over 1


def tokens_per_round(alpha: ArrayLike, gamma: ArrayLike) -> np.ndarray:
  """Return (1 - α^{γ+1}) / (1 - α): γ tokens drafted and a bonus token (Leviathan et al. 2023, Equation 1).

  A cascade of this package gives as many: it drafts and tests γ + 1 tokens and has no bonus token.
  """
  return _powers(_rate(alpha), _block(gamma) + 1)


def tokens_per_round_without_bonus(alpha: ArrayLike, gamma: ArrayLike) -> np.ndarray:
  """Return (1 - α^γ) / (1 - α): γ tokens drafted, no bonus token (Fu et al. 2025, Equation 12)."""
  return _powers(_rate(alpha), _block(gamma))


def speedup_speculative(alpha: ArrayLike, gamma: ArrayLike, c: ArrayLike) -> np.ndarray:
  """Return (1 - α^{γ+1}) / ((1 - α)(γc + 1)), over the verifier alone (Leviathan et al. 2023, Theorem 3.8)."""
  return tokens_per_round(alpha, gamma) / (_block(gamma) * _cost(c) + 1)


def speedup_cascade(alpha: ArrayLike, gamma: ArrayLike, c: ArrayLike) -> np.ndarray:
  """Return (1 - α^{γ+1}) / ((1 - α)((γ+1)c + 1)), over the verifier alone.

  The verifier scores γ tokens as in speculative decoding, but the drafter's law is needed after them too: γ + 1 calls.
  """
  return tokens_per_round(alpha, gamma) / ((_block(gamma) + 1) * _cost(c) + 1)


def speedup_naive_cos(alpha: ArrayLike, gamma: ArrayLike, c: ArrayLike) -> np.ndarray:
  """Return (1 - α^γ)(1 + c) / ((1 - α)(1 + cγ)), over the ensemble (Fu et al. 2025, Theorem 3.1)."""
  c = _cost(c)
  return tokens_per_round_without_bonus(alpha, gamma) * (1 + c) / (1 + c * _block(gamma))


def speedup_cos(alpha: ArrayLike, gamma_q: ArrayLike, gamma_p: ArrayLike, c: ArrayLike) -> np.ndarray:
  """Return (1 - α^{γ_q})(1 + c) / ((1 - α)(1 + cγ_q - α^{γ_p}c)), over the ensemble (Fu et al. 2025, Theorem 3.6).

  This is the paper's account of one cycle: q proposes, one token fewer where the cycle before, of p's proposals, was
  accepted whole. It leaves out p's own tokens and their cost; `speedup_cos_steady` counts all.
  """
  alpha, c = _rate(alpha), _cost(c)
  gamma_q, gamma_p = _block(gamma_q, 'gamma_q'), _block(gamma_p, 'gamma_p')
  return _powers(alpha, gamma_q) * (1 + c) / (1 + c * gamma_q - alpha**gamma_p * c)


def speedup_cos_steady(
  alpha_q: ArrayLike, alpha_p: ArrayLike, gamma_q: ArrayLike, gamma_p: ArrayLike, c: ArrayLike
) -> np.ndarray:
  """Return the long-run speed-up over the ensemble of the alternate proposals of two models.

  q's tokens are accepted with chance α_q, p's with α_p. With E_i = (1 - α_i^{γ_i}) / (1 - α_i), a = α_q^{γ_q} and
  b = α_p^{γ_p}, it is (E_q + a E_p)(1 + c) / (1 + cγ_q + a(γ_p - 1 + c(1 - b))): after a proposal of q that is
  accepted whole, with chance a, p's bonus token opens p's proposal, of γ_p - 1 more calls; q scores it in one call,
  and that call is the first of q's next proposal where p's was accepted whole.
  """
  alpha_q, alpha_p, c = _rate(alpha_q, 'alpha_q'), _rate(alpha_p, 'alpha_p'), _cost(c)
  gamma_q, gamma_p = _block(gamma_q, 'gamma_q'), _block(gamma_p, 'gamma_p')
  a, b = alpha_q**gamma_q, alpha_p**gamma_p
  tokens = _powers(alpha_q, gamma_q) + a * _powers(alpha_p, gamma_p)
  return tokens * (1 + c) / (1 + c * gamma_q + a * (gamma_p - 1 + c * (1 - b)))


def best_block(speedup: Callable, alpha: ArrayLike, c: ArrayLike, most: int = 64) -> int | np.ndarray:
  """Return the γ of 1 … `most` that maximises speedup(α, γ, c), the smallest on ties; an int for numbers.

  For CoS fix γ_p: `best_block(lambda alpha, gamma, c: speedup_cos(alpha, gamma, 1, c), alpha, c)`.
  """
  gammas = np.arange(1, int(_block(most, 'most')) + 1)
  values = speedup(_rate(alpha)[..., None], gammas, _cost(c)[..., None])
  best = gammas[np.argmax(values, -1)]
  return best if best.ndim else int(best)


def _powers(alpha: np.ndarray, n: np.ndarray) -> np.ndarray:
  """Return Σ_{i<n} α^i = (1 - α^n) / (1 - α), exact at α = 1 and stable next to it."""
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


def _rate(alpha: ArrayLike, name: str = 'alpha') -> np.ndarray:
  return _checked(name, alpha, lambda x: (x >= 0) & (x <= 1), 'an acceptance rate between 0 and 1')


def _cost(c: ArrayLike) -> np.ndarray:
  need = 'a ratio of times over 0; give the time of a drafter call over that of a verifier call'
  return _checked('c', c, lambda x: (x > 0) & np.isfinite(x), need)


def _block(gamma: ArrayLike, name: str = 'gamma') -> np.ndarray:
  return _checked(name, gamma, lambda x: (x >= 1) & np.isfinite(x) & (x == np.floor(x)), 'a whole number of at least 1')


def _laws(name: str, law: ArrayLike) -> np.ndarray:
  law = np.asarray(law, np.float64)
  if not law.ndim or not (law >= 0).all() or not (abs(law.sum(-1) - 1) < 1e-3).all():
    raise ValueError(f'{name} is not a law: give probabilities that sum to 1 over the last axis, not {law.flat[:5]}.')
  return law
