"""Combiners of n models: ensembles and contrastive decoding."""

import jax.numpy as jnp
import numpy as np

from speccascade.rules.base import combiner, INF

MAX_WEIGHT = 1000.0  # the largest weight of logits: float32 still has four digits of the other model's


def _check_weights(weights):
  """Refuse weights that make no mean."""
  if not (min(weights) >= 0 and abs(sum(weights) - 1) <= 1e-5):
    raise ValueError(f'needs weights >= 0 that sum to 1, not {tuple(float(w) for w in weights)}.')


def _check_blend(**numbers):
  """Refuse a weight of logits beside which nothing is left of the other model's."""
  for name, value in numbers.items():
    if isinstance(value, np.floating) and abs(value) > MAX_WEIGHT:
      bounds = f'-{MAX_WEIGHT:g} … {MAX_WEIGHT:g}'
      raise ValueError(f'needs {name} of {bounds}, not {value}: beyond, rounding loses a model.')


@combiner(normalized=True, models=1)
def own(models):
  r"""Follow the only model.

  .. math:: \pi = \tilde p
  """
  return models[0].probs


@combiner(normalized=True, models=len, check=_check_weights)
def weighted(models, *, weights):
  r"""Follow a weighted mean of the models (Fu et al. 2025).

  .. math:: \pi = \sum_i \lambda_i\,\tilde p_i, \qquad \lambda_i \ge 0,\ \sum_i \lambda_i = 1

  At temperature 0 it is the arg max of :math:`\sum_i \lambda_i\,p_i`.

  Args:
    models: The predictions of M models.
    weights: λ [M].

  Returns:
    Probabilities [..., V].

  Example:
    >>> logits = jnp.log(jnp.array([[0.6, 0.3, 0.1], [0.1, 0.1, 0.8]]))
    >>> target = rules.target(functools.partial(rules.weighted, weights=(0.5, 0.5)), logits)
    >>> print(np.asarray(target.probs).round(2))
    [0.35 0.2  0.45]
  """
  if len(models) != len(weights):
    raise ValueError(f'weighted has {len(weights)} weights for {len(models)} models; give one for each.')
  return models[0].sampler.harden(sum(w * model.soft for w, model in zip(weights, models)))


@combiner(models=2, check=_check_blend, adds_logits=True)
def contrastive(models, *, mu):
  r"""Follow an expert away from an amateur: contrastive decoding (Li et al. 2023; Fu et al. 2025).

  .. math:: \pi = \mathrm{sampler}(\ell_p - \mu\,\ell_q)

  Args:
    models: The predictions of the amateur q and of the expert p.
    mu: μ; 0 is the expert alone.

  Returns:
    Probabilities [..., V].
  """
  return _blend(models, (-mu, 1.0))


@combiner(models=2, check=_check_blend, adds_logits=True)
def realign(models, *, lam):
  r"""Follow a model between a reference and its aligned version: DeRa (Liu et al. 2024).

  .. math:: \pi = \mathrm{sampler}((1 - \lambda)\,\ell_\mathrm{ref} + \lambda\,\ell_\mathrm{aligned})

  Args:
    models: The predictions of the reference and of the aligned model.
    lam: λ; 0 is the reference, 1 the aligned model, more exaggerates the alignment.

  Returns:
    Probabilities [..., V].
  """
  return _blend(models, (1.0 - lam, lam))


def _blend(models, weights):
  """Return what the sampler makes of w_0 ℓ_0 + w_1 ℓ_1.

  A masked logit (-∞) under a positive weight masks, and else does not count.
  """
  if len(models) != len(weights):
    raise ValueError(f'contrastive and realign combine two models, not {len(models)}.')
  total = 0.0
  for w, model in zip(weights, models):
    x = model.logits.astype(jnp.float32)
    lowest = jnp.min(jnp.where(jnp.isneginf(x), INF, x), -1, keepdims=True)
    total += jnp.where(jnp.isneginf(x), jnp.where(w > 0, -INF, w * lowest), w * x)
  return models[0].sampler(total)
