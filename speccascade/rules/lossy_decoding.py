r"""Lossy speculative decoding as a target: what accepts more than exactness allows, written as the distribution π.

The published algorithms accept a token by some test, and emit another after a rejection. Their tokens follow a π, which
is what these rules are. The ordinary test of that π accepts a drafted token with probability 1 - TV(π, q̃): no test with
the same output accepts more, and most published ones accept less.
"""

import functools

from jax import lax
import jax.numpy as jnp
import numpy as np

from speccascade import sampling
from speccascade.backends.ops import take
from speccascade.rules.base import as_target, declaration, INF, missing, Prefix, Range, rule, Target
from speccascade.rules.cascades import speculative
from speccascade.types import Array, iota

# α → 1 keeps what p̃ allows: not the drafter alone where p̃ = 0
RANGE = Range(0, 0.9999, verifier=0, curve=(0.1, 0.3, 0.5, 0.7, 0.9))


# ---- a residual after min(q̃, p̃ / (1 - α)) ----


def _executed(q, p, alpha, beta=1.0):
  """Return π of accepting a drafted token or drawing from the residual, as a definition."""
  return _completed(np.minimum(q, p / (1 - alpha)), np.maximum(p / beta - q, 0))


def _completed(accepted, rest):
  """Return π of what is accepted, with the mass that is rejected on the rest, as a definition."""
  return accepted + ((1 - accepted.sum()) * rest / rest.sum() if rest.sum() > 0 else 0)


@rule(
  alpha=RANGE,
  normalized=True,
  definition=lambda q, p, alpha: _executed(q.probs, p.probs, alpha),
  labels=dict(speculative='SpecDecode [Lossy]'),
)
def lossy(q, p, *, alpha):
  r"""Accept more than exactness allows (Tran-Thien 2023; Zhou et al. 2024).

  Accept a token x with probability :math:`\min(1, \tilde p(x) / ((1 - \alpha)\,\tilde q(x)))`, else draw from
  :math:`\mathrm{norm}(\max(0, \tilde p - \tilde q))`. A token with :math:`\tilde p > \tilde q` is always accepted. So
  the ordinary test has that acceptance and that residual for the target

  .. math:: \pi = \min\Bigl(\tilde q, \frac{\tilde p}{1 - \alpha}\Bigr)
            + r\,\mathrm{norm}(\max(0, \tilde p - \tilde q)), \qquad 0 \le \alpha < 1,

  with r the rejected mass. α = 0 is exact.
  """
  return _filled(jnp.minimum(q.probs, p.probs / (1 - alpha)), p.probs, q.probs)


def _star(q, p, alpha):
  """Return π of `lossy_star` as a definition, with β by a bisection of its own."""
  rejected = np.maximum(q - p / (1 - alpha), 0).sum()
  low, high = 1 - alpha, 10.0
  for _ in range(80):
    beta = (low + high) / 2
    low, high = (beta, high) if np.maximum(p / beta - q, 0).sum() > rejected else (low, beta)
  return _executed(q, p, alpha, beta)


@rule(
  alpha=RANGE,
  normalized=True,
  definition=lambda q, p, alpha: _star(q.probs, p.probs, alpha),
  labels=dict(speculative='SpecDecode [Lossy*]'),
)
def lossy_star(q, p, *, alpha):
  r"""Accept as `rules.lossy` does, with a residual of just the rejected mass (Narasimhan et al. 2024, Lemma 2).

  .. math:: \pi = \max\Bigl(\min\Bigl(\tilde q, \frac{\tilde p}{1 - \alpha}\Bigr), \frac{\tilde p}{\beta}\Bigr),
            \qquad 0 \le \alpha < 1

  At each position β in [1 - α, 10] makes π sum to 1. Where even β = 10 leaves more than the rejected mass, the residual
  :math:`\max(0, \tilde p / \beta - \tilde q)` is normalised to it.
  """
  accepted = jnp.minimum(q.probs, p.probs / (1 - alpha))
  rejected = sampling.tv(q.probs, p.probs / (1 - alpha))
  low = jnp.full_like(rejected, 1 - alpha)
  high = jnp.full_like(rejected, 10.0)
  for _ in range(24):
    beta = (low + high) / 2
    heavy = sampling.tv(p.probs / beta[..., None], q.probs) > rejected
    low = jnp.where(heavy, beta, low)
    high = jnp.where(heavy, high, beta)
  return _filled(accepted, p.probs / low[..., None], q.probs)


def _filled(accepted: Array, p: Array, q: Array) -> Array:
  """Return what is accepted of q, with the mass that is rejected on max(0, p - q)."""
  return accepted + missing(accepted) * sampling.residual(p, q)


def _mentored(q, p, alpha):
  """Return π of `mentored` as a definition; β is found among the ratios q / p, between which the mass is linear."""
  if _divergence(p, q) <= alpha:
    return q
  ratio = np.unique(np.append(np.where(p > 0, q / np.where(p > 0, p, 1), 1).clip(0, 1), (0, 1)))
  masses = [np.maximum(p * x - q, 0).sum() for x in ratio]

  def at(keep):
    accepted = np.minimum(q, p / keep)
    return _completed(accepted, np.maximum(p * np.interp(1 - accepted.sum(), masses, ratio) - q, 0))

  low, high = 0.0, 1.0
  for _ in range(36):
    keep = (low + high) / 2
    low, high = (low, keep) if _divergence(p, at(keep)) <= alpha else (keep, high)
  return at(high)


def _divergence(a, b):
  """Return KL(a ‖ b) of a definition's distributions [V]."""
  a, b = a[a > 0], b[a > 0]
  return (a * np.log(a / b)).sum() if b.all() else np.inf


@rule(
  alpha=Range(0, verifier=0, drafter=INF, curve=(0.01, 0.03, 0.1, 0.3)),
  normalized=True,
  definition=lambda q, p, alpha: _mentored(q.probs, p.probs, alpha),
)
def mentored(q, p, *, alpha):
  r"""Accept as much as a divergence from the verifier allows: mentored decoding (Tran-Thien 2023).

  .. math:: \pi = \max\Bigl(\min\Bigl(\tilde q, \frac{\tilde p}{a}\Bigr), \frac{\tilde p}{\beta}\Bigr)
            \quad\text{with}\quad \mathrm{KL}(\tilde p \,\Vert\, \pi) = \alpha, \qquad 0 \le \alpha < \infty

  At each position a and β make it so, and :math:`\pi = \tilde q` where that is as near. No π with that divergence is
  accepted more often. The vocabulary is sorted for each tested token. The search for a and β has no gradient, so that a
  drafter is not to be trained towards this target.
  """
  keep, share = _ends(q.probs, p.probs, alpha)
  accepted = jnp.minimum(q.probs, p.probs / keep[..., None])
  pi = _filled(accepted, p.probs * share[..., None], q.probs)
  ratio = jnp.where(p.probs > 0, p.probs, 1) / jnp.where(p.probs > 0, q.probs, 1)
  near = (jnp.sum(p.probs * jnp.log(ratio), -1) <= alpha) & (alpha > 0)
  return jnp.where(near[..., None], q.probs, pi)


def _ends(q: Array, p: Array, alpha: Array) -> tuple[Array, Array]:
  """Return a and 1/β [...] of `mentored`, by a search for a among sums over tokens in the order of q / p."""
  ratio = jnp.where(p > 0, q / jnp.where(p > 0, p, 1), INF)
  order = jnp.argsort(ratio)
  ratio, q, p = (jnp.take_along_axis(x, order, -1) for x in (ratio, q, p))
  middle = (q > 0) & (p > 0)
  logs = jnp.where(middle, p * jnp.log(jnp.where(middle, p, 1) / jnp.where(middle, q, 1)), 0)
  sums = [jnp.pad(jnp.cumsum(x, -1), [(0, 0)] * (x.ndim - 1) + [(1, 0)]) for x in (q, p, logs)]
  masses = sums[1][..., 1:] * ratio - sums[0][..., 1:]  # of max(0, x p - q), for each x of the ratios
  search = jnp.vectorize(jnp.searchsorted, signature='(n),()->()')

  def at(keep):
    """Return 1/β for a, and the divergence."""
    high = _at(sums, search(ratio, 1 / keep))  # sums of what is not over 1 / keep
    q_high, p_high = (x[..., -1] - y for x, y in zip(sums[:2], high))
    rejected = jnp.maximum(q_high - p_high / keep, 0)
    q_last, p_last, logs_last = _at(sums, search(masses, rejected))
    share = jnp.clip((rejected + q_last) / jnp.where(p_last > 0, p_last, 1), 0, 1)
    inner = high[2] - logs_last
    return share, inner + p_high * jnp.log(keep) - p_last * jnp.log(jnp.where(p_last > 0, share, 1))

  def halve(_, bounds):
    low, high = bounds
    keep = (low + high) / 2
    near = (at(keep)[1] <= alpha) & (alpha > 0)  # rounding hides less than 1e-6
    return jnp.where(near, low, keep), jnp.where(near, keep, high)

  one = jnp.ones_like(q[..., 0])
  keep = lax.fori_loop(0, 24, halve, (0 * one, one))[1]
  return keep, jnp.where(keep < 1, at(keep)[0], 1)


def _at(sums: list[Array], index: Array) -> list[Array]:
  return [jnp.take_along_axis(x, index[..., None], -1)[..., 0] for x in sums]


# ---- a set of tokens that are always accepted ----


TYPICAL = (0.5, 0.7, 0.8, 0.91, 0.97)


def _typical(p, alpha):
  """Return S of `typical` as a definition."""
  return p > min(1 - alpha, np.sqrt(1 - alpha) * np.exp(sum(x * np.log(x) for x in p if x > 0)))


def _plausible(p: Array, alpha: Array) -> Array:
  entropy = -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0), -1, keepdims=True)
  return p > jnp.minimum(1 - alpha, jnp.sqrt(1 - alpha) * jnp.exp(-entropy))


@rule(alpha=Range(0, 1, curve=TYPICAL), definition=lambda q, p, alpha: _typical(p.probs, alpha))
def typical(q, p, *, alpha):
  r"""Keep drafted tokens that are typical of the verifier, else draw from it (after Cai et al. 2024, "Medusa").

  .. math:: S = \{v : \tilde p(v) > \min(\varepsilon, \sqrt\varepsilon\,e^{-H(\tilde p)})\},
            \qquad \varepsilon = 1 - \alpha, \quad 0 \le \alpha \le 1

  Medusa's thresholds .09 and .3 are α = .91. At temperature 0 it follows the verifier.
  """
  return _plausible(p.probs, alpha)


def _else_best(q: Array, p: Array, some: Array) -> Array:
  """Return π of accepting some tokens and else emitting the arg max of p."""
  accepted = jnp.where(some, q, 0)
  return accepted + missing(accepted) * sampling.one_hot_max(p)


def _best(q, p, some):
  """Return the same as a definition."""
  return q * some + (1 - (q * some).sum()) * (np.arange(len(p)) == p.argmax())


@rule(
  alpha=Range(0, 1, curve=TYPICAL),
  normalized=True,
  definition=lambda q, p, alpha: _best(q.probs, p.probs, _typical(p.probs, alpha)),
)
def medusa(q, p, *, alpha):
  r"""Keep drafted tokens that are typical of the verifier, else emit its arg max: Medusa's own (Cai et al. 2024).

  .. math:: \pi(v) = \tilde q(v)\,[v \in S] + (1 - \tilde q(S))\,[v = \arg\max \tilde p], \qquad 0 \le \alpha \le 1

  S is that of `rules.typical`.
  """
  return _else_best(q.probs, p.probs, _plausible(p.probs, alpha))


@rule(
  alpha=Range(0, 1, curve=(0.1, 0.3, 0.5, 0.7, 0.9)),
  normalized=True,
  definition=lambda q, p, alpha: _best(
    q.probs, p.probs, p.plain >= max(p.plain.max() - alpha, np.sort(p.plain)[-10:][0])
  ),
)
def relaxed(q, p, *, alpha, top_k=10):
  r"""Keep drafted tokens among the verifier's k likeliest and near the best, else emit that (TensorRT-LLM).

  .. math:: S = \{v : p(v) \ge \max p - \alpha,\ v \text{ among the } k \text{ largest}\}, \quad
            \pi(v) = \tilde q(v)\,[v \in S] + (1 - \tilde q(S))\,[v = \arg\max \tilde p], \qquad 0 \le \alpha \le 1

  It was made for greedy drafts: at temperature 0, with k as large as the vocabulary, it is `rules.token_v2`.
  """
  near = p.plain >= p.plain.max(-1, keepdims=True) - alpha
  return _else_best(q.probs, p.probs, near & (sampling.keep_top_k(p.logits, top_k, p.sampler.backend) > -INF))


@rule(
  alpha=Range(0, 1, drafter=1, curve=(0.1, 0.3, 0.5, 0.7, 0.9)),
  normalized=True,
  definition=lambda q, p, alpha: _completed(
    np.where(p.plain >= (1 - alpha) * p.plain.max(), q.probs, np.minimum(q.probs, p.probs)),
    np.maximum(p.probs - q.probs, 0),
  ),
)
def token_v3_tested(q, p, *, alpha):
  r"""Keep the drafted tokens that `rules.token_v3` keeps, and test the others as exactness does (after MTPLX).

  .. math:: S = \{v : p(v) \ge (1 - \alpha) \max p\}, \quad
            \pi(v) = \tilde q(v)\,[v \in S] + \min(\tilde q(v), \tilde p(v))\,[v \notin S]
            + r\,\mathrm{norm}(\max(0, \tilde p - \tilde q))(v), \qquad 0 \le \alpha \le 1,

  with r the rejected mass. With the same α it is never farther from the verifier than `rules.token_v3`, in total
  variation, and never accepted less.
  """
  some = p.plain >= (1 - alpha) * p.plain.max(-1, keepdims=True)
  return _filled(jnp.where(some, q.probs, jnp.minimum(q.probs, p.probs)), p.probs, q.probs)


# ---- other tests ----


def _two_thresholds(q, p, alpha):
  """Return π of `thresholds` as a definition: accept x, or draw from p without x."""
  pi = np.zeros(len(q))
  for x in np.flatnonzero(q):
    accepted = min(1, p[x] / (1 - alpha))
    pi[x] += q[x] * accepted
    others = np.where(np.arange(len(p)) == x, 0, p)
    pi += q[x] * (1 - accepted) * others / (others.sum() if accepted < 1 else 1)
  return pi


@rule(alpha=RANGE, normalized=True, definition=lambda q, p, alpha: _two_thresholds(q.probs, p.probs, alpha))
def thresholds(q, p, *, alpha, single=1.0):
  r"""Accept by the verifier's probability alone: SGLang's two thresholds, for one draft.

  Accept a token x with probability :math:`a(x) = \min(1, \tilde p(x) / (1 - \alpha))`, or surely where
  :math:`\tilde p(x)` is at least `single`; else draw from :math:`\tilde p` without x.

  .. math:: \pi(v) = \tilde q(v)\,a(v) + \tilde p(v) \sum_{u \ne v} \frac{\tilde q(u)\,(1 - a(u))}{1 - \tilde p(u)},
            \qquad 0 \le \alpha < 1

  α = 0 with single = 1 is exact. SGLang accepts a share of :math:`\sum_x \tilde q(x)\,a(x)`; here the same π is
  accepted with :math:`1 - \mathrm{TV}(\pi, \tilde q)`, which is no less.
  """
  sure = p.probs >= jnp.minimum(single, 1 - alpha)
  accepted = jnp.where(sure, 1, p.probs / (1 - alpha))
  lost = jnp.where(sure, 0, q.probs * (1 - accepted) / jnp.where(sure, 1, 1 - p.probs))
  return q.probs * accepted + p.probs * jnp.maximum(lost.sum(-1, keepdims=True) - lost, 0)


@rule(
  alpha=Range(0, verifier=0, drafter=INF, curve=(0.05, 0.1, 0.2, 0.4)),
  definition=lambda q, p, alpha: (
    sum(_divergence(x, (q.plain + p.plain) / 2) for x in (q.plain, p.plain)) / 2 > alpha or alpha <= 0
  ),
)
def fuzzy(q, p, *, alpha):
  r"""Defer where the models are far apart: fuzzy speculative decoding (Holsman et al. 2025).

  .. math:: \mathrm{JS}(q, p) > \alpha, \qquad 0 \le \alpha \le \log 2

  The divergence is Jensen and Shannon's. The published test rejects a token wherever it defers; this one then rejects
  it with probability :math:`\mathrm{TV}(\tilde p, \tilde q)`, and has the same output.
  """
  middle = sampling.entropy(jnp.log((q.plain + p.plain) / 2))
  return (middle - (q.entropy + p.entropy) / 2 > alpha) | (alpha <= 0)


@rule(by_prefix=True)
def phased(q, p, *, inside, begin, end, outside=speculative):
  r"""Follow one rule between two markers and another outside, as while a model thinks and while it answers.

  Whether a token is inside depends on the tokens before it alone, pending ones included: inside a draft that crosses a
  marker the rule changes with it. The prompt of a decoder-only model counts; the last marker decides.

  Args:
    q: The prediction of the drafter.
    p: The prediction of the verifier.
    inside: The rule from after `begin` to the last token of `end`, with its numbers bound.
    begin: The token ids of the first marker.
    end: The token ids of the second marker.
    outside: The rule elsewhere.

  Example:
    >>> think = functools.partial(rules.lossy, alpha=0.4)
    >>> print(methods.speculative(functools.partial(rules.phased, inside=think, begin=(5,), end=(6, 7))))
    propose(0, 6) · score(1, first 5) · verify(phased of (0, 1))
  """
  targets = [as_target(some(q, p), (q, p), declaration(some)) for some in (inside, outside)]
  begun = _last(q.prefix, begin) > _last(q.prefix, end)
  normalized = all(target.normalized for target in targets)
  return Target(jnp.where(begun[..., None], *(target.probs for target in targets)), None, normalized)


def _last(prefix: Prefix, marker: tuple[int, ...]) -> Array:
  """Return where a marker last ended [B, …] before each position, -1 where it did not."""
  marker = jnp.atleast_1d(jnp.asarray(marker)).astype(jnp.int32)
  width = prefix.tokens.shape[1]
  tokens = jnp.pad(prefix.tokens, ((0, 0), (marker.size - 1, 0)), constant_values=-1)
  met = functools.reduce(jnp.logical_and, [tokens[:, i : i + width] == marker[i] for i in range(marker.size)])
  ended = lax.cummax(jnp.where(met, iota(width), -1), axis=1)
  before = jnp.maximum(prefix.length - 1, 0)
  return take(ended, before.reshape(before.shape[0], -1)).reshape(before.shape)
