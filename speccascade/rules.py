"""Targets π: whose law the output follows, as a function of what the models say at one position.

A deferral rule is a `Rule`: `rule(q_logits, p_logits, *, alpha, sampler) -> probs [..., V]`, with q the drafter and p
the verifier. Confidence terms read the unscaled laws (temperature 1, no filter); the mixture and TV read q̃ and p̃,
which `sampler` makes (Narasimhan et al. 2024, "Faster Cascades via Speculative Decoding", §4 and Remark 3).
In a cascade of three or more models what follows the drafter is a cascade itself. A rule that takes `rest` by keyword
is given its law, p̃ where it is one model, and mixes that in; p_logits are those of the next model.
A combiner is the same for any number of models: `combiner(logits [M, ..., V], *, sampler) -> probs [..., V]`
(Fu et al. 2025, "Fast Large Language Model Collaborative Decoding via Speculation", §3).

`@mixture` makes a rule of a decision δ: π = q̃ where the rule keeps the drafter, p̃ where it defers.
`@token_mixture` makes one of a set S of acceptable tokens: π(v) = q̃(v) 1[v ∈ S] + p̃(v) (1 - Σ_S q̃).
Both note the range of α, larger α deferring less. `@rule` and `@combiner` mark any other function as what it is: a
method that takes both takes one that is not marked for a combiner.
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
BLEND = 1000.0  # the largest weight of logits: float32 still keeps four digits of the other model's
TOLERANCE, ROUNDING = 1e-3, 1e-6  # how far a law may be from summing to 1, and an entry under 0
EXAMPLE = 'functools.partial(rules.opt, alpha=0.1)'


def rule(function: Rule) -> Rule:
  """Mark a function as a rule, for methods that take combiners too."""
  function.kind = 'rule'
  return function


def combiner(function: Combiner) -> Combiner:
  """Mark a function as a combiner."""
  function.kind = 'combiner'
  return function


def always_law(function: Rule | Combiner) -> Rule | Combiner:
  """Mark a function whose result is a law by how it is made, which the loop then need not check."""
  function.lawful = True
  return function


def mixture(low: float, high: float, *, alone: bool = False) -> Callable[[Rule], Rule]:
  """Make a rule of δ(q_logits, p_logits, *, alpha, sampler) -> bool [...]; `alone`: δ does not read the verifier."""

  def decorate(defer):
    def mixed(q_logits, p_logits, *, alpha, sampler, rest=None):
      rest = _law_of(rest, p_logits, sampler)
      delta = defer(q_logits, p_logits, alpha=alpha, sampler=sampler, **_if_taken(defer, rest))
      return jnp.where(delta[..., None], rest, sampler(q_logits))

    mixed.alpha_range, mixed.defer, mixed.alone = (low, high), defer, alone
    return always_law(rule(_named_as(defer, mixed)))

  return decorate


def token_mixture(low: float, high: float) -> Callable[[Rule], Rule]:
  """Make a rule of S(q_logits, p_logits, *, alpha) -> bool [..., V]."""

  def decorate(accepted_set):
    def mixed(q_logits, p_logits, *, alpha, sampler, rest=None):
      kept = jnp.where(accepted_set(q_logits, p_logits, alpha=alpha), sampler(q_logits), 0)
      return kept + _law_of(rest, p_logits, sampler) * _missing(kept)

    mixed.alpha_range = (low, high)
    return always_law(rule(_named_as(accepted_set, mixed)))

  return decorate


def _named_as(function: Callable, made: Callable) -> Callable:
  """Give what is made of a function its name and docstring, but not its signature."""
  for name in ('__module__', '__name__', '__qualname__', '__doc__'):
    setattr(made, name, getattr(function, name))
  return made


def _law_of(rest: Array | None, p_logits: Array, sampler: sampling.Sampler) -> Array:
  """Return what a rule defers to: the law of the rest where it is given, else p̃."""
  return sampler(p_logits) if rest is None else rest


def _if_taken(function: Callable, rest: Array) -> dict[str, Array]:
  return {'rest': rest} if takes(function, 'rest') else {}


def _missing(kept: Array) -> Array:
  """Return the mass that is left to give; rounding must not make it negative."""
  return jnp.maximum(1 - kept.sum(-1, keepdims=True), 0)


# ---- rules of two models ----


@always_law
@rule
def speculative(q_logits, p_logits, *, sampler, rest=None):
  """π = p̃: plain speculative decoding (Leviathan et al. 2023; Chen et al. 2023)."""
  del q_logits
  return _law_of(rest, p_logits, sampler)


@mixture(0, 1, alone=True)
def chow(q_logits, p_logits, *, alpha, sampler):
  """Defer where max q < 1 - α (Chow 1970)."""
  return sampling.confidence(q_logits) < 1 - alpha


@mixture(0, INF, alone=True)
def chow_log(q_logits, p_logits, *, alpha, sampler):
  """Defer where H(q) > α."""
  return sampling.entropy(q_logits) > alpha


@mixture(-1, 1)
def diff(q_logits, p_logits, *, alpha, sampler):
  """Defer where max q < max p - α."""
  return sampling.confidence(q_logits) < sampling.confidence(p_logits) - alpha


@mixture(-INF, INF)
def diff_log(q_logits, p_logits, *, alpha, sampler):
  """Defer where H(q) > H(p) + α."""
  return sampling.entropy(q_logits) > sampling.entropy(p_logits) + alpha


@mixture(-INF, INF)
def opt(q_logits, p_logits, *, alpha, sampler, rest=None):
  """Defer where max q < max p - α TV(q̃, p̃): a rejection is what deferring costs."""
  cost = alpha * sampling.tv(sampler(q_logits), _law_of(rest, p_logits, sampler))
  return sampling.confidence(q_logits) < sampling.confidence(p_logits) - cost


@mixture(-INF, INF)
def opt_log(q_logits, p_logits, *, alpha, sampler, rest=None):
  """Defer where H(q) > H(p) + α TV(q̃, p̃)."""
  cost = alpha * sampling.tv(sampler(q_logits), _law_of(rest, p_logits, sampler))
  return sampling.entropy(q_logits) > sampling.entropy(p_logits) + cost


def discrepancy(q_logits, p_logits, *, sampler):
  """Return BiLD's D(q, p) (Kim et al. 2023): -log p(arg max q) when greedy, else the cross-entropy of q and p."""
  logp = sampling.log_softmax(p_logits)
  cold = lambda: -sampling.at_token(logp, sampling.argmax(q_logits))
  q = sampling.softmax(q_logits)
  warm = lambda: -jnp.sum(jnp.where(q > 0, q * logp, 0), -1)
  return sampler.by_temperature(cold, warm)


@mixture(0, INF)
def bild_star(q_logits, p_logits, *, alpha, sampler):
  """Defer where D(q, p) > α."""
  return discrepancy(q_logits, p_logits, sampler=sampler) > alpha


@token_mixture(-1, 1)
def token_v1(q_logits, p_logits, *, alpha):
  """S = {v: q(v) >= max p - α}."""
  return sampling.softmax(q_logits) >= sampling.confidence(p_logits)[..., None] - alpha


@token_mixture(-1, 1)
def token_v2(q_logits, p_logits, *, alpha):
  """S = {v: p(v) >= max p - α}."""
  p = sampling.softmax(p_logits)
  return p >= p.max(-1, keepdims=True) - alpha


@token_mixture(0, 1)
def token_v3(q_logits, p_logits, *, alpha):
  """S = {v: p(v) >= (1 - α) max p}."""
  p = sampling.softmax(p_logits)
  return p >= (1 - alpha) * p.max(-1, keepdims=True)


@always_law
@rule
def lossy(q_logits, p_logits, *, alpha, sampler, rest=None):
  """Accept with min(1, p̃ / ((1-α) q̃)), else draw from norm(max(0, p̃ - q̃)) (Tran-Thien 2023; Zhou et al. 2024).

  As a target: π = min(q̃, p̃/(1-α)) + (rejected mass) · norm(max(0, p̃ - q̃)). A token with p̃ > q̃ is always accepted,
  so §2 with this π has that very acceptance and that very residual, and one loop serves lossy decoding too.
  """
  return _lossy(sampler(q_logits), _law_of(rest, p_logits, sampler), alpha, beta=1.0)


@always_law
@rule
def lossy_star(q_logits, p_logits, *, alpha, sampler, rest=None):
  """Scale the residual to max(0, p̃/β - q̃), with β in [1-α, 10] such that it holds just the rejected mass.

  Then π = max(min(q̃, p̃/(1-α)), p̃/β) (Narasimhan et al. 2024, Lemma 2); where even β = 10 leaves more than the
  rejected mass, the residual is normalised to it.
  """
  q, p = sampler(q_logits), _law_of(rest, p_logits, sampler)
  rejected = sampling.tv(q, p / (1 - alpha))
  low, high = jnp.full_like(rejected, 1 - alpha), jnp.full_like(rejected, 10.0)
  for _ in range(24):
    beta = (low + high) / 2
    heavy = sampling.tv(p / beta[..., None], q) > rejected
    low, high = jnp.where(heavy, beta, low), jnp.where(heavy, high, beta)
  return _lossy(q, p, alpha, beta=low[..., None])


def _lossy(q, p, alpha, *, beta):
  kept = jnp.minimum(q, p / (1 - alpha))
  return kept + _missing(kept) * sampling.residual(p / beta, q)


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


# ---- combiners of n models ----


@always_law
@combiner
def own(logits, *, sampler):
  """Return the only model's own law."""
  return sampler(logits[0])


@always_law
@combiner
def weighted(logits, *, weights, sampler):
  """π = Σ λ_i p̃_i, λ on the simplex. At temperature 0: the arg max of Σ λ_i p_i."""
  if len(logits) != len(weights):
    raise ValueError(f'weighted has {len(weights)} weights for {len(logits)} models; give one for each.')
  return sampler.harden(sum(w * sampler.soft(x) for w, x in zip(weights, logits)))


@combiner
def contrastive(logits, *, mu, sampler):
  """π = softmax(ℓ_p - μ ℓ_q), the first model being the amateur q, the last the expert p (Li et al. 2023)."""
  return sampler(_blend(logits, (-mu, 1.0)))


@combiner
def realign(logits, *, lam, sampler):
  """π = softmax((1-λ) ℓ_ref + λ ℓ_aligned), reference first (DeRa, Liu et al. 2024)."""
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


@combiner
def chain(logits, *, rule, sampler):
  """Lift a rule to n models: keep model i or defer to the cascade of the models after it.

  With n = 2 it is the rule. For more, the rule compares model i with model i+1, and what it mixes in (and measures
  TV to) is `rest`, the target of the models from i+1 on.
  """
  if len(logits) > 2 and not takes(rule, 'rest'):
    raise ValueError(
      f'{name_of(rule)} must take rest, the law to defer to, to cascade three or more models: '
      'rule(q_logits, p_logits, *, sampler, rest).'
    )
  target = sampler(logits[-1])
  for q, p in reversed(list(zip(logits[:-1], logits[1:], strict=True))):
    target = rule(q, p, sampler=sampler, **_if_taken(rule, target))
  return target


def is_law(law: Array) -> Array:
  """Return [...]: whether entries [..., V] are finite, not negative, and sum to 1."""
  total = law.sum(-1)  # NaN compares as False
  return (abs(total - 1) <= TOLERANCE) & (law.min(-1) >= -ROUNDING)


def lawful(bound: tree_util.Partial) -> bool:
  """Tell whether a bound rule or combiner always gives laws."""
  return lawful(bound.keywords['rule']) if bound.func is chain else getattr(bound.func, 'lawful', False)


# ---- plug-ins with traced numbers ----


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
  """Return the name of a plug-in, whether bound or not."""
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
  _require(bound, given=('q_logits', 'p_logits', 'sampler', 'rest'), example=EXAMPLE)
  low, high = getattr(bound.func, 'alpha_range', (-INF, INF))
  alpha = bound.keywords.get('alpha', low)
  if isinstance(alpha, (float, np.floating)) and not low <= alpha <= high:
    raise ValueError(f'rule {name_of(rule)} needs {low} <= alpha <= {high}, not alpha={alpha!s}.')
  return bound


def lift(rule: Rule) -> tree_util.Partial:
  """Return the combiner that a rule makes, checked and bound."""
  return tree_util.Partial(chain, rule=bind_rule(rule))


def bind_combiner(combiner: Combiner | Rule) -> tree_util.Partial:
  """Bind a combiner, lifting a function that says it is a rule; check its values."""
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
    if bound.func in (contrastive, realign) and isinstance(value, np.floating) and abs(value) > BLEND:
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
