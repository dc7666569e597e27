"""Learned rules: a head reads features of both distributions, and the rule defers by what it expects of the losses.

Commands know a rule by the name that a module gives to it, as `my_rule = functools.partial(load('FILE'), alpha=0.1)` in
`my_rules.py`: `--rule my_rules:my_rule`.
"""

import functools
import json
import pathlib
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np

from speccascade import rules, sampling
from speccascade.types import Array

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
    logp = jnp.where(logp >= best[..., None], -jnp.inf, logp)
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


ANY = rules.Range(verifier=-rules.INF, drafter=rules.INF)


@rules.rule(alpha=ANY)
def learned(q, p, *, alpha, weights):
  r"""Defer where a trained head expects the verifier's loss to be lower by α.

  .. math:: \hat\ell_q(f) - \hat\ell_p(f) > \alpha, \qquad -\infty < \alpha < \infty

  f are `features` of both models.
  """
  return gain(weights, q.logits, p.logits) > alpha


@rules.rule(alpha=ANY)
def learned_opt(q, p, *, alpha, weights):
  r"""Defer where a trained head expects the verifier's loss to be lower by the cost of a rejection.

  .. math:: \hat\ell_q(f) - \hat\ell_p(f) > \alpha\,\mathrm{TV}(\tilde q, \tilde p), \qquad -\infty < \alpha < \infty

  To `learned` it is what `rules.opt` is to `rules.diff`: α is the cost of a rejected token, not of a deferral.
  """
  return gain(weights, q.logits, p.logits) > alpha * sampling.tv(q.probs, p.probs)


@rules.rule(alpha=ANY, drafter_alone=True)
def learned_alone(q, p, *, alpha, weights):
  r"""Defer as `learned` does, by features of the drafter alone: for `methods.token_cascade`.

  .. math:: \hat\ell_q(f_q) - \hat\ell_p(f_q) > \alpha, \qquad -\infty < \alpha < \infty
  """
  del p
  return gain(weights, q.logits) > alpha


@rules.rule(alpha=ANY, normalized=True)
def learned_mixture(q, p, *, alpha, weights):
  r"""Follow a mixture whose weight a trained head chooses at each position, as DIVERSED does (Wang et al. 2026).

  .. math:: \pi = w\,\tilde p + (1 - w)\,\tilde q, \quad w = \sigma(\hat\ell_q(f) - \hat\ell_p(f) - \alpha),
            \qquad -\infty < \alpha < \infty

  At temperature 0 it is the arg max of the mixture of q and p. A fixed weight is `rules.weighted`.
  """
  verifier = jax.nn.sigmoid(gain(weights, q.logits, p.logits) - alpha)[..., None]
  return q.sampler.harden(verifier * p.soft + (1 - verifier) * q.soft)


# ---- files ----


def save(path: pathlib.Path, weights: Any, *, alone: bool, **about):
  """Write a head, with whatever else describes it."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps({'alone': alone, **about, 'weights': jax.tree.map(np.ndarray.tolist, weights)}) + '\n')


@gin.register(module='learned')
def load(path: str, folder: str = '', *, rejections: bool = False) -> functools.partial:
  """Return the rule of a trained head, which needs an α: `functools.partial(load(…), alpha=0.1)`.

  Args:
    path: the file that `save` wrote.
    folder: the folder from which the path counts.
    rejections: whether α is the cost of a rejected token, as in `learned_opt`, and not of a deferral.
  """
  content = json.loads(pathlib.Path(folder, path).read_text())
  weights = tuple((np.float32(kernel), np.float32(bias)) for kernel, bias in content['weights'])
  if content['alone']:
    return functools.partial(learned_alone, weights=weights)
  if content.get('loss') == 'mixture':
    return functools.partial(learned_mixture, weights=weights)
  return functools.partial(learned_opt if rejections else learned, weights=weights)
