"""Distributions over the vocabulary: softmax, distances, the residual. Float32, broadcast over leading axes `...`."""

import jax
import jax.numpy as jnp

from speccascade.backends import ops
from speccascade.types import Array


def softmax(logits: Array) -> Array:
  """Return the unscaled distribution of logits [..., V]."""
  return jax.nn.softmax(logits.astype(jnp.float32))


def log_softmax(logits: Array) -> Array:
  """Return the unscaled log-distribution of logits [..., V]."""
  return jax.nn.log_softmax(logits.astype(jnp.float32))


def confidence(logits: Array) -> Array:
  """Return max_v of the unscaled distribution, without computing the distribution: 1 / Σ exp(ℓ - max ℓ)."""
  logits = logits.astype(jnp.float32)
  return 1 / jnp.exp(logits - logits.max(-1, keepdims=True)).sum(-1)


def entropy(logits: Array) -> Array:
  """Return H of the unscaled distribution; 0 log 0 = 0."""
  logp = log_softmax(logits)
  p = jnp.exp(logp)
  return -jnp.sum(jnp.where(p > 0, p * logp, 0), -1)


def tv(a: Array, b: Array) -> Array:
  """Return the total variation distance, Σ_v max(0, a(v) - b(v))."""
  return jnp.maximum(a - b, 0).sum(-1)


def argmax(x: Array) -> Array:
  """Return the arg max of x [..., V], the lowest index on ties."""
  return ops.argmax(x)


def one_hot_max(x: Array) -> Array:
  """Return the one-hot distribution of the arg max, the lowest index on ties."""
  return jax.nn.one_hot(argmax(x), x.shape[-1], dtype=jnp.float32)


def at_token(x: Array, token: Array) -> Array:
  """Return x[..., token]."""
  return ops.at_token(x, token)


def residual(pi: Array, q: Array) -> Array:
  """Return norm(max(0, π - q)), and π where that is all zero (by rounding: π = q is never rejected)."""
  rest = jnp.maximum(pi - q, 0)
  total = rest.sum(-1, keepdims=True)
  return jnp.where(total > 0, rest / jnp.where(total > 0, total, 1), pi)
