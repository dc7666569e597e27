r"""Rules and combiners: the target distribution π of the output, from the models' logits at one position.

A *rule* reads a drafter q and a verifier p, a *combiner* any number of models::

  rule(q_logits, p_logits, *, alpha, sampler) -> probabilities [..., V]  # logits [..., V] each
  combiner(logits, *, sampler) -> probabilities [..., V]                 # logits [M, ..., V]

:math:`q, p` are the models' distributions at temperature 1, without filters. :math:`\tilde q, \tilde p` are those that
`sampler` makes: penalties, temperature, top-k, top-p, min-p; one-hot at temperature 0. Confidence, entropy H and D read
q and p; the mixture and the total variation TV read :math:`\tilde q` and :math:`\tilde p` (Narasimhan et al. 2024,
"Faster Cascades via Speculative Decoding", §4 and Remark 3).

`alpha` is the cost of deferring: a larger α defers less and is faster. Bind it with `functools.partial`. It is traced,
so another α compiles nothing.

A rule that takes the keyword `rest` can cascade three or more models: `rest` [..., V] is the target of the models after
the drafter, :math:`\tilde p` where that is one model, and `p_logits` are those of the next model. A rule that takes
`slot` gets the place of each token in its draft, from 0.

A method that takes rules and combiners takes a function without `@rule` for a combiner.

Example:
  >>> q, p = jnp.log(jnp.array([0.6, 0.3, 0.1])), jnp.log(jnp.array([0.1, 0.1, 0.8]))
  >>> print(np.asarray(rules.diff(q, p, alpha=0.1, sampler=Sampler())).round(2))  # defers: 0.6 < 0.8 - 0.1
  [0.1 0.1 0.8]
  >>> print(np.asarray(rules.diff(q, p, alpha=0.3, sampler=Sampler())).round(2))  # follows the drafter
  [0.6 0.3 0.1]
"""

from collections.abc import Callable
import functools
import inspect
import math
from typing import Any

from jax import tree_util
import jax.numpy as jnp
import numpy as np

from speccascade import sampling
from speccascade.types import Array, Combiner, Rule

INF = math.inf
BLEND = 1000.0  # the largest weight of logits: float32 still has four digits of the other model's
# how far a distribution may be from summing to 1, and an entry under 0
TOLERANCE = 1e-3
ROUNDING = 1e-6
EXAMPLE = 'functools.partial(rules.opt, alpha=0.1)'


def rule(function: Rule) -> Rule:
  """Mark a function as a rule, for methods that take combiners too."""
  function.kind = 'rule'
  return function


def combiner(function: Combiner) -> Combiner:
  """Mark a function as a combiner."""
  function.kind = 'combiner'
  return function


def always_distribution(function: Rule | Combiner) -> Rule | Combiner:
  """Mark a function that returns distributions by construction, so that the loop does not check them."""
  function.gives_distribution = True
  return function


def mixture(low: float, high: float, *, alone: bool = False) -> Callable[[Rule], Rule]:
  r"""Make a rule of a deferral decision δ.

  .. math:: \pi = (1 - \delta)\,\tilde q + \delta\,\tilde p

  A drafted token is rejected with probability :math:`\delta\,\mathrm{TV}(\tilde p, \tilde q)` (Lemma 3).

  Args:
    low: The least α.
    high: The largest α.
    alone: Whether δ reads the drafter alone, as `token_cascade` needs; its `p_logits` may then be None.

  Returns:
    A decorator of `defer(q_logits, p_logits, *, alpha, sampler) -> bool [...]`, which may take further numbers.

  Example:
    >>> @rules.mixture(0, 1)
    ... def unlikely(q_logits, p_logits, *, alpha, sampler):
    ...   first = jnp.argmax(q_logits, -1, keepdims=True)
    ...   return jnp.take_along_axis(sampler(p_logits), first, -1)[..., 0] < 1 - alpha
  """

  def decorate(defer):
    def mixed(q_logits, p_logits, **given):
      sampler = given['sampler']
      rest = _distribution_of(given.pop('rest', None), p_logits, sampler)
      delta = defer(q_logits, p_logits, **given, **if_taken(defer, rest=rest))
      return jnp.where(delta[..., None], rest, sampler(q_logits))

    mixed.__signature__ = _signature_of(defer, mixed)
    mixed.alpha_range = (low, high)
    mixed.defer = defer
    mixed.alone = alone
    return always_distribution(rule(_named_as(defer, mixed)))

  return decorate


def token_mixture(low: float, high: float) -> Callable[[Rule], Rule]:
  r"""Make a rule of a set S of tokens that the drafter may emit.

  .. math:: \pi(v) = \tilde q(v)\,[v \in S] + \tilde p(v)\,\Bigl(1 - \sum_{u \in S} \tilde q(u)\Bigr)

  A drafted token of S is always accepted.

  Args:
    low: The least α.
    high: The largest α.

  Returns:
    A decorator of `accepted_set(q_logits, p_logits, *, alpha) -> bool [..., V]`.
  """

  def decorate(accepted_set):
    def mixed(q_logits, p_logits, *, alpha, sampler, rest=None):
      accepted = jnp.where(accepted_set(q_logits, p_logits, alpha=alpha), sampler(q_logits), 0)
      return accepted + _distribution_of(rest, p_logits, sampler) * _missing(accepted)

    mixed.alpha_range = (low, high)
    return always_distribution(rule(_named_as(accepted_set, mixed)))

  return decorate


def _named_as(function: Callable, made: Callable) -> Callable:
  """Give what is made of a function its name and docstring, but not its signature."""
  for name in ('__module__', '__name__', '__qualname__', '__doc__'):
    setattr(made, name, getattr(function, name))
  return made


def _signature_of(defer: Callable, mixed: Callable) -> inspect.Signature:
  """Return the signature of a mixture: logits, the keywords of its decision δ, which may be its own, and `rest`."""
  logits = list(inspect.signature(mixed).parameters.values())[:2]
  rest = inspect.Parameter('rest', inspect.Parameter.KEYWORD_ONLY, default=None)
  keywords = [p for p in inspect.signature(defer).parameters.values() if p.kind is p.KEYWORD_ONLY and p.name != 'rest']
  return inspect.Signature([*logits, *keywords, rest])


def _distribution_of(rest: Array | None, p_logits: Array, sampler: sampling.Sampler) -> Array:
  """Return what a rule defers to: the distribution of the rest where it is given, else p̃."""
  return sampler(p_logits) if rest is None else rest


def if_taken(function: Callable, **given) -> dict[str, Any]:
  """Return those of the keywords that a function has."""
  return {name: value for name, value in given.items() if takes(function, name)}


def _rejected(q_logits: Array, p_logits: Array, sampler: sampling.Sampler, rest: Array | None) -> Array:
  """Return how often a drafted token is rejected where a rule defers [...]."""
  return sampling.tv(sampler(q_logits), _distribution_of(rest, p_logits, sampler))


def _missing(accepted: Array) -> Array:
  """Return the mass that is left to give; rounding must not make it negative."""
  return jnp.maximum(1 - accepted.sum(-1, keepdims=True), 0)


# ---- rules of two models ----


@always_distribution
@rule
def speculative(q_logits, p_logits, *, sampler, rest=None):
  r"""Follow the verifier: plain speculative decoding (Leviathan et al. 2023; Chen et al. 2023).

  .. math:: \pi = \tilde p
  """
  del q_logits
  return _distribution_of(rest, p_logits, sampler)


@mixture(0, 1, alone=True)
def chow(q_logits, p_logits, *, alpha, sampler):
  r"""Defer where the drafter is unsure (Chow 1970; Narasimhan et al. 2024).

  .. math:: \max q < 1 - \alpha, \qquad 0 \le \alpha \le 1
  """
  return sampling.confidence(q_logits) < 1 - alpha


@mixture(0, INF, alone=True)
def chow_log(q_logits, p_logits, *, alpha, sampler):
  r"""Defer where the drafter's entropy is high (Narasimhan et al. 2024).

  .. math:: H(q) > \alpha, \qquad 0 \le \alpha \le \log V
  """
  return sampling.entropy(q_logits) > alpha


@mixture(-1, 1)
def diff(q_logits, p_logits, *, alpha, sampler):
  r"""Defer where the verifier is surer by α (Narasimhan et al. 2024).

  .. math:: \max q < \max p - \alpha, \qquad -1 \le \alpha \le 1
  """
  return sampling.confidence(q_logits) < sampling.confidence(p_logits) - alpha


@mixture(-INF, INF)
def diff_log(q_logits, p_logits, *, alpha, sampler):
  r"""Defer where the verifier's entropy is lower by α (Narasimhan et al. 2024).

  .. math:: H(q) > H(p) + \alpha, \qquad -\log V \le \alpha \le \log V
  """
  return sampling.entropy(q_logits) > sampling.entropy(p_logits) + alpha


@mixture(-INF, INF)
def opt(q_logits, p_logits, *, alpha, sampler, rest=None):
  r"""Defer where the verifier is surer by the cost of a rejection (Narasimhan et al. 2024).

  .. math:: \max q < \max p - \alpha\,\mathrm{TV}(\tilde q, \tilde p), \qquad -\infty < \alpha < \infty

  At temperature 0 it emits the text of `rules.diff` with the same α: TV is 1 where the two arg max differ, and where
  they agree the decision changes nothing (Lemma 8).
  """
  cost = alpha * _rejected(q_logits, p_logits, sampler, rest)
  return sampling.confidence(q_logits) < sampling.confidence(p_logits) - cost


@mixture(-INF, INF)
def opt_log(q_logits, p_logits, *, alpha, sampler, rest=None):
  r"""Defer where the verifier's entropy is lower by the cost of a rejection (Narasimhan et al. 2024).

  .. math:: H(q) > H(p) + \alpha\,\mathrm{TV}(\tilde q, \tilde p), \qquad -\infty < \alpha < \infty
  """
  cost = alpha * _rejected(q_logits, p_logits, sampler, rest)
  return sampling.entropy(q_logits) > sampling.entropy(p_logits) + cost


def discrepancy(q_logits, p_logits, *, sampler):
  r"""Return BiLD's discrepancy D(q, p) (Kim et al. 2023).

  .. math:: D(q, p) = \begin{cases} -\log p(\arg\max q) & \text{greedy} \\ -\sum_v q(v) \log p(v) & T > 0 \end{cases}

  Args:
    q_logits: The drafter's logits [..., V].
    p_logits: The verifier's logits [..., V].
    sampler: The sampler, which chooses between the two forms.

  Returns:
    D [...].
  """
  logp = sampling.log_softmax(p_logits)
  cold = lambda: -sampling.at_token(logp, sampling.argmax(q_logits))
  q = sampling.softmax(q_logits)
  warm = lambda: -jnp.sum(jnp.where(q > 0, q * logp, 0), -1)
  return sampler.by_temperature(cold, warm)


@mixture(0, INF)
def bild_star(q_logits, p_logits, *, alpha, sampler):
  r"""Defer where the verifier finds the draft unlikely, in BiLD's sense (Kim et al. 2023; Narasimhan et al. 2024).

  .. math:: D(q, p) > \alpha, \qquad 0 \le \alpha < \infty

  `rules.discrepancy` is D.
  """
  return discrepancy(q_logits, p_logits, sampler=sampler) > alpha


@token_mixture(-1, 1)
def token_v1(q_logits, p_logits, *, alpha):
  r"""Keep drafted tokens that are likely under the drafter (Narasimhan et al. 2024).

  .. math:: S = \{v : q(v) \ge \max p - \alpha\}, \qquad -1 \le \alpha \le 1
  """
  return sampling.softmax(q_logits) >= sampling.confidence(p_logits)[..., None] - alpha


@token_mixture(-1, 1)
def token_v2(q_logits, p_logits, *, alpha):
  r"""Keep drafted tokens that are likely under the verifier (Narasimhan et al. 2024).

  .. math:: S = \{v : p(v) \ge \max p - \alpha\}, \qquad -1 \le \alpha \le 1
  """
  p = sampling.softmax(p_logits)
  return p >= p.max(-1, keepdims=True) - alpha


@token_mixture(0, 1)
def token_v3(q_logits, p_logits, *, alpha):
  r"""Keep drafted tokens that are likely under the verifier, relative to its best (Narasimhan et al. 2024).

  .. math:: S = \{v : p(v) \ge (1 - \alpha) \max p\}, \qquad 0 \le \alpha \le 1

  At α = 0 the verifier's arg max is still in S, so above temperature 0 it is not plain speculative decoding.
  """
  p = sampling.softmax(p_logits)
  return p >= (1 - alpha) * p.max(-1, keepdims=True)


@always_distribution
@rule
def lossy(q_logits, p_logits, *, alpha, sampler, rest=None):
  r"""Accept more than exactness allows (Tran-Thien 2023; Zhou et al. 2024).

  Accept a token x with probability :math:`\min(1, \tilde p(x) / ((1 - \alpha)\,\tilde q(x)))`, else draw from
  :math:`\mathrm{norm}(\max(0, \tilde p - \tilde q))`. A token with :math:`\tilde p > \tilde q` is always accepted. So
  the ordinary test has that acceptance and that residual for the target

  .. math:: \pi = \min\Bigl(\tilde q, \frac{\tilde p}{1 - \alpha}\Bigr)
            + r\,\mathrm{norm}(\max(0, \tilde p - \tilde q)), \qquad 0 \le \alpha < 1,

  with r the rejected mass. α = 0 is exact.
  """
  return _lossy(sampler(q_logits), _distribution_of(rest, p_logits, sampler), alpha, beta=1.0)


@always_distribution
@rule
def lossy_star(q_logits, p_logits, *, alpha, sampler, rest=None):
  r"""Accept as `rules.lossy` does, with a residual of just the rejected mass (Narasimhan et al. 2024, Lemma 2).

  .. math:: \pi = \max\Bigl(\min\Bigl(\tilde q, \frac{\tilde p}{1 - \alpha}\Bigr), \frac{\tilde p}{\beta}\Bigr),
            \qquad 0 \le \alpha < 1

  At each position β in [1 - α, 10] makes π sum to 1. Where even β = 10 leaves more than the rejected mass, the residual
  :math:`\max(0, \tilde p / \beta - \tilde q)` is normalised to it.
  """
  q = sampler(q_logits)
  p = _distribution_of(rest, p_logits, sampler)
  rejected = sampling.tv(q, p / (1 - alpha))
  low = jnp.full_like(rejected, 1 - alpha)
  high = jnp.full_like(rejected, 10.0)
  for _ in range(24):
    beta = (low + high) / 2
    heavy = sampling.tv(p / beta[..., None], q) > rejected
    low = jnp.where(heavy, beta, low)
    high = jnp.where(heavy, high, beta)
  return _lossy(q, p, alpha, beta=low[..., None])


def _lossy(q, p, alpha, *, beta):
  accepted = jnp.minimum(q, p / (1 - alpha))
  return accepted + _missing(accepted) * sampling.residual(p / beta, q)


lossy.alpha_range = lossy_star.alpha_range = (0, 0.9999)

RULES = (
  speculative,
  chow,
  chow_log,
  diff,
  diff_log,
  opt,
  opt_log,
  bild_star,
  token_v1,
  token_v2,
  token_v3,
  lossy,
  lossy_star,
)


# ---- rules that are learned ----

TOP = 3  # log-probabilities of a distribution that a head reads
UNLIKELY = -20.0  # the least log-probability that it sees, so that masked tokens are numbers too
FEATURES = (  # in the order of `features`; those of the drafter alone are in front
  *(f'log q {n}' for n in range(1, TOP + 1)),
  'entropy q',
  *(f'log p {n}' for n in range(1, TOP + 1)),
  'entropy p',
  'tv',
  'log p at arg max q',
  'log q at arg max p',
  'agree',
)


def features(q_logits: Array, p_logits: Array | None = None) -> Array:
  """Return what a learned rule reads of one position.

  They are features of the distributions at temperature 1 without filters, so one head serves every sampler: of each
  model the `TOP` largest log-probabilities and the entropy; with a verifier also TV(q, p), log p(arg max q),
  log q(arg max p), and whether the two arg max are one token.

  Args:
    q_logits: The drafter's logits [..., V].
    p_logits: The verifier's logits [..., V]; None for the features of the drafter alone.

  Returns:
    Features [..., F], float32, in the order of `FEATURES`.
  """
  logq = sampling.log_softmax(q_logits)
  found = _largest(logq) + [sampling.entropy(q_logits)]
  if p_logits is not None:
    logp = sampling.log_softmax(p_logits)
    first_q = sampling.argmax(q_logits)
    first_p = sampling.argmax(p_logits)
    found += _largest(logp) + [sampling.entropy(p_logits), sampling.tv(jnp.exp(logq), jnp.exp(logp))]
    found += [jnp.maximum(sampling.at_token(logp, first_q), UNLIKELY)]
    found += [jnp.maximum(sampling.at_token(logq, first_p), UNLIKELY)]
    found += [(first_q == first_p).astype(jnp.float32)]
  return jnp.stack(found, -1)


def _largest(logp: Array) -> list[Array]:
  """Return the `TOP` largest distinct entries [...] of logp [..., V], in order; a maximum each, without a sort."""
  found = []
  for _ in range(TOP):
    best = logp.max(-1)
    logp = jnp.where(logp >= best[..., None], -INF, logp)
    found.append(jnp.maximum(best, UNLIKELY))
  return found


def head(weights: Any, x: Array) -> Array:
  r"""Return the drafter's and the verifier's loss [..., 2] that a head expects at features x [..., F].

  .. math:: W_2 \max(0, W_1 x + b_1) + b_2

  Args:
    weights: :math:`((W_1, b_1), (W_2, b_2))`, kernels (in, out).
    x: Features [..., F].
  """
  first, last = weights
  return _affine(jnp.maximum(_affine(x, first), 0), last)


def _affine(x: Array, layer: tuple[Array, Array]) -> Array:
  """Return x W + b in full float32, which a TPU's matmul has not by itself."""
  kernel, bias = layer
  product = jnp.matmul(x, kernel, precision='highest')
  return product + jnp.broadcast_to(bias, product.shape)


def gain(weights: Any, q_logits: Array, p_logits: Array | None = None) -> Array:
  """Return by how much the head expects the verifier's loss to be lower than the drafter's [...]."""
  losses = head(weights, features(q_logits, p_logits))
  return losses[..., 0] - losses[..., 1]


@mixture(-INF, INF)
def learned(q_logits, p_logits, *, alpha, weights, sampler):
  r"""Defer where a trained head expects the verifier's loss to be lower by α.

  .. math:: \hat\ell_q(f) - \hat\ell_p(f) > \alpha, \qquad -\infty < \alpha < \infty

  f are `rules.features` of both models. `speccascade.train.router` trains the head, and loads the rule with its
  weights.
  """
  del sampler
  return gain(weights, q_logits, p_logits) > alpha


@mixture(-INF, INF)
def learned_opt(q_logits, p_logits, *, alpha, weights, sampler, rest=None):
  r"""Defer where a trained head expects the verifier's loss to be lower by the cost of a rejection.

  .. math:: \hat\ell_q(f) - \hat\ell_p(f) > \alpha\,\mathrm{TV}(\tilde q, \tilde p), \qquad -\infty < \alpha < \infty

  To `rules.learned` it is what `rules.opt` is to `rules.diff`: α is the cost of a rejected token, not of a deferral.
  """
  cost = alpha * _rejected(q_logits, p_logits, sampler, rest)
  return gain(weights, q_logits, p_logits) > cost


@mixture(-INF, INF, alone=True)
def learned_alone(q_logits, p_logits, *, alpha, weights, sampler):
  r"""Defer as `rules.learned` does, by features of the drafter alone: for `methods.token_cascade`.

  .. math:: \hat\ell_q(f_q) - \hat\ell_p(f_q) > \alpha, \qquad -\infty < \alpha < \infty
  """
  del p_logits, sampler
  return gain(weights, q_logits) > alpha


# ---- an α for each place in a draft ----


@functools.cache
def by_slot(rule: Rule) -> Rule:
  r"""Return a rule that takes an α for each token of a draft: :math:`(\alpha_0, \dots, \alpha_\gamma)`.

  A slot is a token's place in its draft. A rejection drops the rest of the draft, which is much at its first token and
  nothing at its last. A single α charges both the same. `theory.alphas_by_slot` has the :math:`\alpha_i` that charge
  what a rejection costs the whole sequence.

  Each token follows the rule's target with the α of its slot, exactly. So the output depends on where drafts begin, and
  on γ. A method without drafts has slot 0 alone.

  Args:
    rule: A mixture, as `rules.opt`.

  Example:
    >>> rule = functools.partial(rules.by_slot(rules.opt), alpha=(0.2, 0.1, 0.0))  # of γ = 2
  """
  if not hasattr(rule, 'defer'):
    raise ValueError(f'by_slot: {name_of(rule)} makes no decision at a position; give a mixture, as rules.opt.')

  def defer(q_logits, p_logits, *, alpha, slot=0, **given):
    return rule.defer(q_logits, p_logits, alpha=jnp.take(jnp.asarray(alpha), slot, mode='clip'), **given)

  signature = inspect.signature(rule.defer)
  slot = inspect.Parameter('slot', inspect.Parameter.KEYWORD_ONLY, default=0)
  defer.__signature__ = signature.replace(parameters=[*signature.parameters.values(), slot])
  return mixture(*rule.alpha_range)(_named_as(rule, defer))


# ---- combiners of n models ----


@always_distribution
@combiner
def own(logits, *, sampler):
  r"""Follow the only model.

  .. math:: \pi = \tilde p
  """
  return sampler(logits[0])


@always_distribution
@combiner
def weighted(logits, *, weights, sampler):
  r"""Follow a weighted mean of the models (Fu et al. 2025).

  .. math:: \pi = \sum_i \lambda_i\,\tilde p_i, \qquad \lambda_i \ge 0,\ \sum_i \lambda_i = 1

  At temperature 0 it is the arg max of :math:`\sum_i \lambda_i\,p_i`.

  Args:
    logits: The models' logits [M, ..., V].
    weights: λ [M].
    sampler: Applied to each model.

  Returns:
    Probabilities [..., V].

  Example:
    >>> logits = jnp.log(jnp.array([[0.6, 0.3, 0.1], [0.1, 0.1, 0.8]]))
    >>> print(np.asarray(rules.weighted(logits, weights=(0.5, 0.5), sampler=Sampler())).round(2))
    [0.35 0.2  0.45]
  """
  if len(logits) != len(weights):
    raise ValueError(f'weighted has {len(weights)} weights for {len(logits)} models; give one for each.')
  return sampler.harden(sum(w * sampler.soft(x) for w, x in zip(weights, logits)))


@combiner
def contrastive(logits, *, mu, sampler):
  r"""Follow an expert away from an amateur: contrastive decoding (Li et al. 2023; Fu et al. 2025).

  .. math:: \pi = \mathrm{sampler}(\ell_p - \mu\,\ell_q)

  Args:
    logits: The logits [2, ..., V] of the amateur q and of the expert p.
    mu: μ; 0 is the expert alone.
    sampler: Applied once, to the combined logits.

  Returns:
    Probabilities [..., V].
  """
  return sampler(_blend(logits, (-mu, 1.0)))


@combiner
def realign(logits, *, lam, sampler):
  r"""Follow a model between a reference and its aligned version: DeRa (Liu et al. 2024).

  .. math:: \pi = \mathrm{sampler}((1 - \lambda)\,\ell_\mathrm{ref} + \lambda\,\ell_\mathrm{aligned})

  Args:
    logits: The logits [2, ..., V] of the reference and of the aligned model.
    lam: λ; 0 is the reference, 1 the aligned model, more exaggerates the alignment.
    sampler: Applied once, to the combined logits.

  Returns:
    Probabilities [..., V].
  """
  return sampler(_blend(logits, (1.0 - lam, lam)))


def _blend(logits, weights):
  """Return w_0 ℓ_0 + w_1 ℓ_1 where a masked logit (-∞) under a positive weight masks, and else does not count."""
  if len(logits) != len(weights):
    raise ValueError(f'contrastive and realign combine two models, not {len(logits)}.')
  total = 0.0
  for w, x in zip(weights, logits):
    x = x.astype(jnp.float32)
    lowest = jnp.min(jnp.where(jnp.isneginf(x), INF, x), -1, keepdims=True)
    total += jnp.where(jnp.isneginf(x), jnp.where(w > 0, -INF, w * lowest), w * x)
  return total


def blends(bound: tree_util.Partial) -> bool:
  """Return whether a bound combiner adds up logits."""
  return bound.func in (contrastive, realign)


@combiner
def chain(logits, *, rule, sampler, slot=0):
  """Cascade n models by a rule: keep model i, or defer to the cascade of the models after it.

  With two models it is the rule. With more, the rule compares model i with model i + 1, and `rest` is the target of the
  models from i + 1 on.

  Args:
    logits: The models' logits [M, ..., V].
    rule: A rule of two models; it takes `rest` where M > 2.
    sampler: Applied to each model.
    slot: The place of each token in its draft, from 0, for a rule that takes it.

  Returns:
    Probabilities [..., V].
  """
  if len(logits) > 2 and not takes(rule, 'rest'):
    raise ValueError(
      f'{name_of(rule)} must take rest, the distribution to defer to, to cascade three or more models: '
      'rule(q_logits, p_logits, *, sampler, rest).'
    )
  target = sampler(logits[-1])
  for q, p in reversed(list(zip(logits[:-1], logits[1:], strict=True))):
    target = rule(q, p, sampler=sampler, **if_taken(rule, rest=target, slot=slot))
  return target


def is_distribution(distribution: Array) -> Array:
  """Return whether entries [..., V] are distributions: finite, not negative, with sum 1."""
  total = distribution.sum(-1)  # NaN compares as False
  return (abs(total - 1) <= TOLERANCE) & (distribution.min(-1) >= -ROUNDING)


def gives_distribution(bound: tree_util.Partial) -> bool:
  """Return whether a bound rule or combiner gives distributions by construction."""
  if bound.func is chain:
    return gives_distribution(bound.keywords['rule'])
  return getattr(bound.func, 'gives_distribution', False)


# ---- functions with traced numbers ----


def bind(function: Callable, **numbers) -> tree_util.Partial:
  """Return `function` as a pytree: keyword numbers become traced leaves, so changing them compiles nothing."""
  while isinstance(function, functools.partial):  # jax.tree_util.Partial is one too
    if function.args:
      raise ValueError(f'{name_of(function)}: bind values by keyword, as in {EXAMPLE}.')
    function, numbers = function.func, {**function.keywords, **numbers}
  if not callable(function) or inspect.isclass(function):
    raise ValueError(f'{function!r} is not a function; give one with its values bound, as in {EXAMPLE}.')
  for name, value in numbers.items():
    if value is None or any(isinstance(x, (str, bool, complex)) for x in tree_util.tree_leaves(value)):
      raise ValueError(
        f'{name_of(function)} needs a number for {name}, not {name}={value!s}: only numbers and arrays can be bound; '
        'write anything else into the function.'
      )
  return tree_util.Partial(function, **tree_util.tree_map(sampling.traced, numbers))


def inside(function: Any) -> Any:
  """Return the function that values are bound to."""
  while isinstance(function, functools.partial):
    function = function.func
  return function


def name_of(function: Callable) -> str:
  """Return the name of a rule, a combiner or another function, whether bound or not."""
  function = inside(function)
  return getattr(function, '__name__', type(function).__name__)


def takes(function: Callable, name: str) -> bool:
  """Return whether a function has a parameter of that name."""
  return name in inspect.signature(inside(function)).parameters


def bind_rule(rule: Rule) -> tree_util.Partial:
  """Bind a rule and check its α: every value that the rule needs is given and in range."""
  bound = bind(rule)
  if getattr(bound.func, 'kind', 'rule') != 'rule':
    raise ValueError(f'{name_of(rule)} is a {bound.func.kind}, not a rule of two models; give it to cos or ensemble.')
  _require(bound, given=('q_logits', 'p_logits', 'sampler', 'rest', 'slot'), example=EXAMPLE)
  low, high = getattr(bound.func, 'alpha_range', (-INF, INF))
  for alpha in tree_util.tree_leaves(bound.keywords.get('alpha', low)):
    if isinstance(alpha, (float, np.floating)) and not low <= alpha <= high:
      raise ValueError(f'rule {name_of(rule)} needs {low} <= alpha <= {high}, not alpha={alpha!s}.')
  return bound


def lift(rule: Rule) -> tree_util.Partial:
  """Return the combiner that a rule makes, checked and bound."""
  return tree_util.Partial(chain, rule=bind_rule(rule))


def bind_combiner(combiner: Combiner | Rule) -> tree_util.Partial:
  """Bind a combiner, lifting a function that is marked as a rule; check its values."""
  if getattr(inside(combiner), 'kind', 'combiner') == 'rule':
    return lift(combiner)
  bound = bind(combiner)
  _require(bound, given=('logits', 'sampler'), example='functools.partial(rules.contrastive, mu=0.1)')
  weights = bound.keywords.get('weights')
  if bound.func is weighted and not (min(weights) >= 0 and abs(sum(weights) - 1) <= 1e-5):
    raise ValueError(f'weighted needs weights >= 0 that sum to 1, not {tuple(float(w) for w in weights)}.')
  for name, value in bound.keywords.items():
    if isinstance(value, np.floating) and not np.isfinite(value):
      raise ValueError(f'{name_of(combiner)} needs a finite {name}, not {value}.')
    if blends(bound) and isinstance(value, np.floating) and abs(value) > BLEND:
      raise ValueError(
        f'{name_of(combiner)} needs {name} of -{BLEND:g} … {BLEND:g}, not {value}: beyond, rounding loses a model.'
      )
  return bound


def _require(bound: tree_util.Partial, *, given: tuple[str, ...], example: str):
  parameters = inspect.signature(bound.func).parameters
  sampler = parameters.get('sampler')
  if sampler is None or sampler.kind is not inspect.Parameter.KEYWORD_ONLY:
    raise ValueError(
      f'{name_of(bound)} must take its sampler by keyword: rule(q_logits, p_logits, *, sampler) or '
      'combiner(logits, *, sampler).'
    )
  if unknown := bound.keywords.keys() - parameters.keys():
    raise ValueError(
      f'{name_of(bound)} has no argument {", ".join(sorted(unknown))}; it takes {", ".join(parameters)}.'
    )
  for name, parameter in parameters.items():
    keyword_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
    if keyword_only and parameter.default is parameter.empty and name not in (*given, *bound.keywords):
      raise ValueError(f'{name_of(bound)} needs a value for {name}; bind it, as in {example}.')
