"""Theory: tokens per round, speed-ups and the best block size, as functions of the acceptance rate α.

Each drafted token is accepted with the same probability α whatever came before it, or with the probabilities
`ByPosition` in the block: later tokens of a draft are accepted less often, and one rate for all positions overestimates
a long block.

Times are in units of one token of the verifier. c is the time of a call of the drafter; v that of the verifier's call
for a block, which the papers take as 1; `overhead` is the time of a round on top of its calls, the same for a round
of the reference, which is one token. Numbers and arrays are accepted, and broadcast. At α = 1 a formula is its limit.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", §3; Fu et al. 2025, "Fast Large
Language Model Collaborative Decoding via Speculation", §3 and Appendix A.

Example:
  >>> print(theory.tokens_per_round(0.7, 4).round(2))
  2.77
  >>> theory.best_block(theory.speedup_speculative, alpha=0.8, c=0.1)
  6
"""

from collections.abc import Callable, Sequence
import dataclasses

import numpy as np
from numpy.typing import ArrayLike


@dataclasses.dataclass(frozen=True)
class ByPosition:
  """Acceptance rates by position in the block, each given that all tokens before it were accepted.

  Attributes:
    rates: The rates; the last one is that of all further positions.
  """

  rates: Sequence[float]

  def __post_init__(self):
    rates = np.asarray(self.rates, np.float64)
    if rates.ndim != 1 or not rates.size or not ((rates >= 0) & (rates <= 1)).all():
      raise ValueError(f'acceptance={self.rates} is not a list of rates between 0 and 1.')

  def all_accepted(self, n: ArrayLike) -> np.ndarray:
    """Return the probability that the first n drafted tokens are accepted."""
    n = np.asarray(n, np.int64)
    most = max(int(n.max()), 1)
    rates = np.append(self.rates, np.full(max(most - len(self.rates), 0), self.rates[-1]))[:most]
    return np.append(1.0, np.cumprod(rates))[n]


Rate = ArrayLike | ByPosition


def acceptance_rate(q: ArrayLike, pi: ArrayLike, coupling: str = 'maximal') -> np.ndarray:
  r"""Return the acceptance rate of a drafter for a target (Leviathan et al. 2023, Theorem 3.5).

  .. math:: \alpha = \sum_v \min(\tilde q(v), \pi(v)) = 1 - \mathrm{TV}(\tilde q, \pi)

  With `Sampler(coupling='gumbel')` it is less, at least :math:`(1 - \mathrm{TV}) / (1 + \mathrm{TV})`:

  .. math:: \sum_v \frac{1}{\sum_w \max(\pi(w) / \pi(v), \tilde q(w) / \tilde q(v))}

  Args:
    q: The drafter's probabilities [..., V].
    pi: The target's probabilities [..., V].
    coupling: That of the sampler.

  Returns:
    α [...].

  Example:
    >>> print(theory.acceptance_rate([0.6, 0.4], [0.9, 0.1]).round(2))
    0.7
  """
  q = _probabilities('q', q)
  pi = _probabilities('pi', pi)
  if q.shape[-1] != pi.shape[-1]:
    raise ValueError(f'q has {q.shape[-1]} tokens and pi {pi.shape[-1]}; give distributions over one vocabulary.')
  rate = np.minimum(q, pi).sum(-1) if coupling == 'maximal' else _coupled_rate(q, pi)
  return np.clip(rate, 0, 1)  # rounding may have left a sum just over 1


def _coupled_rate(q: np.ndarray, pi: np.ndarray) -> np.ndarray:
  """Return how often the first of the clocks of q̃ is that of π: in the order of q̃ / π either sum is cumulative."""
  both = (q > 0) & (pi > 0)
  order = np.argsort(np.where(pi > 0, q / np.where(pi > 0, pi, 1), np.inf), -1)
  q, pi, both = (np.take_along_axis(x, order, -1) for x in (q, pi, both))
  after = q.sum(-1, keepdims=True) - q.cumsum(-1)  # those with a larger ratio
  total = pi.cumsum(-1) / np.where(both, pi, 1) + after / np.where(both, q, 1)
  return np.where(both, 1 / np.where(both, total, 1), 0).sum(-1)


def acceptance_of_list(q: ArrayLike, pi: ArrayLike, choices: int, scheme: str = 'gumbel') -> np.ndarray:
  r"""Return the chance that the target's token is one of some choices of the drafter at one place.

  - `'gumbel'`: target and choices are drawn by one noise, as with `Sampler(coupling='gumbel')` and leaves. The clock of
    the target's token j rings at m times its mean, and a token i is chosen before it by chance:

    .. math:: P_K = \sum_j \pi_j \int_0^\infty e^{-m} \Pr\Bigl(\sum_{i \ne j} B_i < K\Bigr) dm, \quad
      \Pr(B_i = 1) = 1 - e^{-m (\pi_j \tilde q_i / \tilde q_j - \pi_i)_+}

  - `'iid'`: the best that any test of K independent drafts reaches, the optimal transport:
    :math:`\min_S \pi(S) + 1 - \tilde q(S)^K` over the sets of tokens with the smallest :math:`\pi / \tilde q`.
  - `'greedy'`: the K - 1 likeliest tokens H, and one that is drawn of the others:
    :math:`\pi(H) + \sum_{i \notin H} \min(\pi_i, \tilde q_i / (1 - \tilde q(H)))`.
  - `'top'`: the K likeliest tokens, the target's being drawn by itself.

  Tokens that both distributions together give less than 1e-6 are left out of the first.

  Args:
    q: The drafter's probabilities [..., V].
    pi: The target's probabilities [..., V].
    choices: K.
    scheme: How the choices are made.

  Returns:
    P_K [...].

  Example:
    >>> q, pi = [0.5, 0.3, 0.15, 0.05], [0.2, 0.5, 0.2, 0.1]
    >>> print(*(theory.acceptance_of_list(q, pi, 2, scheme).round(3) for scheme in ('gumbel', 'iid', 'greedy', 'top')))
    0.974 0.95 1.0 0.7
  """
  q, pi = _probabilities('q', q), _probabilities('pi', pi)
  if q.shape != pi.shape:
    raise ValueError(f'q is {list(q.shape)} and pi {list(pi.shape)}; give two distributions for each position.')
  k = int(_block(choices, 'choices'))
  if scheme not in _OF_LISTS:
    raise ValueError(f'scheme={scheme!r} is none of {", ".join(_OF_LISTS)}.')
  flat = [x.reshape(-1, x.shape[-1]) for x in (q, pi)]
  found = np.array([_OF_LISTS[scheme](*both, k) for both in zip(*flat, strict=True)])
  return np.clip(found.reshape(q.shape[:-1]), 0, 1)


def _list_of_one_noise(q: np.ndarray, pi: np.ndarray, k: int) -> float:
  """Return P_K of one position: the number of tokens before the target's is a sum of independent ones, by m and j."""
  order = np.argsort(-np.maximum(q, pi))
  left_out = np.cumsum((q + pi)[order][::-1])[::-1] < 1e-6
  q, pi = (x[order][~left_out] for x in (q, pi))
  m = np.exp(np.arange(-32, 4.5, 0.5))  # the trapezoidal sum over log m of what vanishes at both ends
  every = np.flatnonzero((q > 0) & (pi > 0))
  total = 0.0
  for j in np.array_split(every, -(-every.size // 256)):
    number = np.zeros((k, j.size, m.size))  # the chance that so many are before token j
    number[0] = 1
    for q_i, pi_i in zip(q, pi, strict=True):
      ahead = -np.expm1(-np.outer(np.maximum(pi[j] * q_i / q[j] - pi_i, 0), m))
      number[1:] += ahead * (number[:-1] - number[1:])
      number[0] *= 1 - ahead
    total += pi[j] @ (number.sum(0) @ (np.exp(-m) * m)) * 0.5
  return total


def _list_of_drafts(q: np.ndarray, pi: np.ndarray, k: int) -> float:
  order = np.argsort(np.where(q > 0, pi / np.where(q > 0, q, 1), np.inf))
  p, drafted = (np.concatenate([[0], x[order].cumsum()]) for x in (pi, q))
  return float(np.min(p + 1 - np.minimum(drafted, 1) ** k))


def _list_with_a_draw(q: np.ndarray, pi: np.ndarray, k: int) -> float:
  order = np.argsort(-q)
  likeliest, others = order[: k - 1], order[k - 1 :]
  left = max(q[others].sum(), np.finfo(float).tiny)
  return pi[likeliest].sum() + np.minimum(pi[others], q[others] / left).sum()


def _list_of_likeliest(q: np.ndarray, pi: np.ndarray, k: int) -> float:
  return pi[np.argsort(-q)[:k]].sum()


_OF_LISTS = {
  'gumbel': _list_of_one_noise,
  'iid': _list_of_drafts,
  'greedy': _list_with_a_draw,
  'top': _list_of_likeliest,
}


def tokens_per_round(alpha: Rate, gamma: ArrayLike) -> np.ndarray:
  r"""Return the expected tokens of a round: γ drafted and a bonus token (Leviathan et al. 2023, Equation 1).

  .. math:: \frac{1 - \alpha^{\gamma+1}}{1 - \alpha}

  A cascade of this package gives as many: it drafts and tests γ + 1 tokens, without a bonus token.
  """
  return _tokens(_rate(alpha), _block(gamma) + 1)


def tokens_per_round_without_bonus(alpha: Rate, gamma: ArrayLike) -> np.ndarray:
  r"""Return the expected tokens of a round of γ drafted tokens and no bonus token (Fu et al. 2025, Equation 12).

  .. math:: \frac{1 - \alpha^\gamma}{1 - \alpha}
  """
  return _tokens(_rate(alpha), _block(gamma))


def speedup_speculative(
  alpha: Rate, gamma: ArrayLike, c: ArrayLike, v: ArrayLike = 1.0, overhead: ArrayLike = 0.0
) -> np.ndarray:
  r"""Return the speed-up of speculative decoding over the verifier alone (Leviathan et al. 2023, Theorem 3.8).

  .. math:: \frac{1 - \alpha^{\gamma+1}}{(1 - \alpha)(\gamma c + v)}

  Args:
    alpha: α, or the rates by position.
    gamma: γ.
    c: The time of a call of the drafter.
    v: The time of the verifier's call for a block.
    overhead: The time of a round on top of its calls.

  Returns:
    The ratio of times per token, of the broadcast shape.
  """
  time = _block(gamma) * _cost(c) + _cost(v, 'v')
  return _over(tokens_per_round(alpha, gamma), time, 1.0, overhead)


def speedup_cascade(
  alpha: Rate, gamma: ArrayLike, c: ArrayLike, v: ArrayLike = 1.0, overhead: ArrayLike = 0.0
) -> np.ndarray:
  r"""Return the speed-up of a speculative cascade over the verifier alone.

  .. math:: \frac{1 - \alpha^{\gamma+1}}{(1 - \alpha)((\gamma + 1) c + v)}

  The verifier scores γ tokens as in speculative decoding; the drafter's distribution is needed after them too.

  The arguments are those of `theory.speedup_speculative`.
  """
  time = (_block(gamma) + 1) * _cost(c) + _cost(v, 'v')
  return _over(tokens_per_round(alpha, gamma), time, 1.0, overhead)


def speedup_token_cascade(
  alpha: Rate, most: ArrayLike, c: ArrayLike, v: ArrayLike = 1.0, overhead: ArrayLike = 0.0
) -> np.ndarray:
  r"""Return the speed-up of a token cascade over the verifier alone.

  .. math:: \frac{1 - \alpha^{n+1}}{(1 - \alpha)\bigl(c\,\frac{1 - \alpha^n}{1 - \alpha} + v\bigr)}

  α is the share of tokens that are not deferred and n, `most`, the longest draft. The drafter also runs for a token
  that it then defers.

  The arguments are those of `theory.speedup_speculative`.
  """
  time = _cost(c) * tokens_per_round_without_bonus(alpha, most) + _cost(v, 'v')
  return _over(tokens_per_round(alpha, most), time, 1.0, overhead)


def speedup_naive_cos(
  alpha: Rate, gamma: ArrayLike, c: ArrayLike, v: ArrayLike = 1.0, overhead: ArrayLike = 0.0
) -> np.ndarray:
  r"""Return the speed-up of `methods.naive_cos` over the ensemble (Fu et al. 2025, Theorem 3.1).

  .. math:: \frac{(1 - \alpha^\gamma)(1 + c)}{(1 - \alpha)(c \gamma + v)}

  The arguments are those of `theory.speedup_speculative`.
  """
  c = _cost(c)
  time = c * _block(gamma) + _cost(v, 'v')
  return _over(tokens_per_round_without_bonus(alpha, gamma), time, 1 + c, overhead)


def speedup_ensemble_sd(
  alpha: Rate, gamma: ArrayLike, c: ArrayLike, v: ArrayLike = 1.0, overhead: ArrayLike = 0.0
) -> np.ndarray:
  r"""Return the speed-up of `methods.ensemble_sd` over the ensemble.

  .. math:: \frac{(1 - \alpha^{\gamma+1})(1 + c)}{(1 - \alpha)(c \gamma + (1 + c) v)}

  The drafter scores the block again; its block costs as many of its tokens as the verifier's block of the verifier's.

  The arguments are those of `theory.speedup_speculative`.
  """
  c = _cost(c)
  time = c * _block(gamma) + (1 + c) * _cost(v, 'v')
  return _over(tokens_per_round(alpha, gamma), time, 1 + c, overhead)


def speedup_cos(alpha: ArrayLike, gamma_q: ArrayLike, gamma_p: ArrayLike, c: ArrayLike) -> np.ndarray:
  r"""Return the speed-up of one cycle of `methods.cos` over the ensemble (Fu et al. 2025, Theorem 3.6).

  .. math:: \frac{(1 - \alpha^{\gamma_q})(1 + c)}{(1 - \alpha)(1 + c \gamma_q - \alpha^{\gamma_p} c)}

  In the paper's cycle q proposes, one token fewer where p's proposals of the cycle before were all accepted. It leaves
  out p's own tokens and their cost; `theory.speedup_cos_steady` counts all.

  Args:
    alpha: α, of either model's proposals.
    gamma_q: The tokens of a proposal of q.
    gamma_p: The tokens of a proposal of p.
    c: The time of a call of q.

  Returns:
    The ratio of times per token, of the broadcast shape.
  """
  alpha = _rate(alpha)
  c = _cost(c)
  gamma_q = _block(gamma_q, 'gamma_q')
  gamma_p = _block(gamma_p, 'gamma_p')
  return _tokens(alpha, gamma_q) * (1 + c) / (1 + c * gamma_q - _all_accepted(alpha, gamma_p) * c)


def speedup_cos_steady(
  alpha_q: Rate,
  alpha_p: Rate,
  gamma_q: ArrayLike,
  gamma_p: ArrayLike,
  c: ArrayLike,
  v: ArrayLike = 1.0,
  overhead: ArrayLike = 0.0,
) -> np.ndarray:
  r"""Return the long-run speed-up of `methods.cos` over the ensemble, for two models.

  .. math::

     \frac{(E_q + a E_p)(1 + c)}{v + c \gamma_q + a (\gamma_p - 1 + c (1 - b))}, \qquad
     E_i = \frac{1 - \alpha_i^{\gamma_i}}{1 - \alpha_i}, \quad a = \alpha_q^{\gamma_q}, \quad b = \alpha_p^{\gamma_p}

  After a proposal of q of which all tokens are accepted, with probability a, p's bonus token opens p's proposal, of
  :math:`\gamma_p - 1` more calls. q scores it in one call, which is the first of q's next proposal where all tokens of
  p's were accepted.

  Args:
    alpha_q: The acceptance rate of q's tokens.
    alpha_p: The acceptance rate of p's tokens.
    gamma_q: The tokens of a proposal of q.
    gamma_p: The tokens of a proposal of p.
    c: The time of a call of q.
    v: The time of p's call for a block.
    overhead: The time of a round on top of its calls.

  Returns:
    The ratio of times per token, of the broadcast shape.
  """
  alpha_q = _rate(alpha_q, 'alpha_q')
  alpha_p = _rate(alpha_p, 'alpha_p')
  c = _cost(c)
  gamma_q = _block(gamma_q, 'gamma_q')
  gamma_p = _block(gamma_p, 'gamma_p')
  a = _all_accepted(alpha_q, gamma_q)
  b = _all_accepted(alpha_p, gamma_p)
  tokens = _tokens(alpha_q, gamma_q) + a * _tokens(alpha_p, gamma_p)
  return _over(tokens, _cost(v, 'v') + c * gamma_q + a * (gamma_p - 1 + c * (1 - b)), 1 + c, overhead)


def distinct_experts(experts: ArrayLike, chosen: ArrayLike, tokens: ArrayLike) -> np.ndarray:
  """Return how many experts of a layer are expected to be read by some tokens, E (1 - (1 - k/E)^n), if chosen evenly.

  Args:
    experts: E, of a layer.
    chosen: k, of a token.
    tokens: n, of all rows together.
  """
  experts = np.asarray(experts, np.float64)
  return experts * (1 - (1 - np.asarray(chosen) / experts) ** np.asarray(tokens))


def _over(tokens: np.ndarray, time: np.ndarray, reference: ArrayLike, overhead: ArrayLike) -> np.ndarray:
  """Return the speed-up of rounds of so many tokens and such a time over a reference's time for a token."""
  overhead = _checked('overhead', overhead, lambda x: (x >= 0) & np.isfinite(x), 'a time of at least 0')
  return (tokens * (reference + overhead) / (time + overhead))[()]


def best_block(speedup: Callable, alpha: Rate, c: ArrayLike, most: int = 64) -> int | np.ndarray:
  """Return the γ of 1 … `most` that maximises `speedup(alpha, gamma, c)`, the smallest on ties.

  Args:
    speedup: A function of (alpha, gamma, c), as `theory.speedup_speculative`.
    alpha: α, or the rates by position.
    c: The time of a call of the drafter.
    most: The largest γ.

  Returns:
    An int for numbers, else an array of the broadcast shape.

  Example:
    >>> theory.best_block(lambda alpha, gamma, c: theory.speedup_cos(alpha, gamma, 1, c), alpha=0.8, c=0.1)
    7
  """
  gammas = np.arange(1, int(_block(most, 'most')) + 1)
  rate = alpha if isinstance(alpha, ByPosition) else _rate(alpha)[..., None]
  values = speedup(rate, gammas, _cost(c)[..., None])
  best = gammas[np.argmax(values, -1)]
  return best if best.ndim else int(best)


def divide_leaves(leaves: int, block: int, alpha: ArrayLike = 0.65) -> tuple[int, ...]:
  """Divide a number of leaves over the places of a draft, so that the most rejections are followed by one.

  A place is rejected with the chance that all places before it are accepted and it is not. Of the rejected tokens that
  the first k choices have not, about k^-3/4 are left, as was measured for models that draw by one noise.

  Args:
    leaves: The number.
    block: How many tokens are drafted.
    alpha: The chance that a tested token is accepted, at all places or at each [block].

  Returns:
    How many choices there are at each place, the drafted token among them; without the places at the end with one.

  Example:
    >>> theory.divide_leaves(10, block=5)
    (4, 4, 3, 2, 2)
  """
  each = np.broadcast_to(_rate(alpha), (int(block),))
  reached = np.cumprod([1, *each[:-1]]) * (1 - each)
  counts = np.ones(int(block), np.int64)
  for _ in range(leaves):
    counts[np.argmax(reached * (counts**-0.75 - (counts + 1.0) ** -0.75))] += 1
  return tuple(int(n) for n in counts[: np.max(np.flatnonzero(counts > 1), initial=-1) + 1])


def _all_accepted(alpha: np.ndarray | ByPosition, n: np.ndarray) -> np.ndarray:
  """Return the chance α^n that n tokens are accepted."""
  return alpha.all_accepted(n) if isinstance(alpha, ByPosition) else alpha**n


def _tokens(alpha: np.ndarray | ByPosition, n: np.ndarray) -> np.ndarray:
  """Return Σ_{i<n} α^i = (1 - α^n) / (1 - α), exact at α = 1 and stable next to it."""
  if isinstance(alpha, ByPosition):
    return np.cumsum(alpha.all_accepted(np.arange(int(np.max(n)))))[np.asarray(n, np.int64) - 1]
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


def _rate(alpha: Rate, name: str = 'alpha') -> np.ndarray | ByPosition:
  if isinstance(alpha, ByPosition):
    return alpha
  return _checked(name, alpha, lambda x: (x >= 0) & (x <= 1), 'an acceptance rate between 0 and 1')


def _cost(c: ArrayLike, name: str = 'c') -> np.ndarray:
  need = "a ratio of times over 0; give the time of a call over that of the verifier's call for one token"
  return _checked(name, c, lambda x: (x > 0) & np.isfinite(x), need)


def _block(gamma: ArrayLike, name: str = 'gamma') -> np.ndarray:
  return _checked(name, gamma, lambda x: (x >= 1) & np.isfinite(x) & (x == np.floor(x)), 'a whole number of at least 1')


def _probabilities(name: str, values: ArrayLike) -> np.ndarray:
  values = np.asarray(values, np.float64)
  if not values.ndim or not (values >= 0).all() or not (abs(values.sum(-1) - 1) < 1e-3).all():
    raise ValueError(f'{name}={values.flat[:5]}… must be probabilities that sum to 1 over the last axis.')
  return values
