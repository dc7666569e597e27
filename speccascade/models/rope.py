"""Rotary position embeddings (Su et al. 2021) and the static methods to stretch them over longer contexts.

Axis letters: B batch, L new tokens, D head dimension, R turned pairs of dimensions (D/2 where all
are), and X for any axes between L and D.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from speccascade.types import Array

KINDS = ('default', 'linear', 'llama3', 'yarn')


@dataclasses.dataclass(frozen=True)
class Rope:
  """Say how positions turn into angles; `original` is the context length before stretching by `factor`."""

  theta: float = 10000.0
  kind: str = 'default'
  factor: float = 1.0
  original: int = 0
  low: float = 1.0  # llama3: rotations in the original context below which a frequency is divided by `factor`
  high: float = 4.0  # llama3: and above which it is not changed
  beta_fast: float = 32.0  # yarn: the same two bounds, in rotations
  beta_slow: float = 1.0
  truncate: bool = True
  magnitude: float = 1.0  # yarn: what cosines and sines are multiplied by
  share: float = 1.0  # how much of each head is turned, from its first dimension on


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
  """Return the angle that one position adds, for each pair of dimensions that is turned: [R], float32."""
  head_dim = int(head_dim * rope.share)
  exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
  plain = np.float32(1) / np.float32(rope.theta) ** exponents
  if rope.kind == 'linear':
    return plain / np.float32(rope.factor)
  if rope.kind == 'llama3':
    return _mix(plain, rope.factor, _llama3_share(plain, rope))
  if rope.kind == 'yarn':
    return _mix(plain, rope.factor, _yarn_share(rope, head_dim))
  return plain


def _mix(plain: np.ndarray, factor: float, share: np.ndarray) -> np.ndarray:
  """Return share · plain + (1 - share) · plain / factor."""
  return (share * plain + (1 - share) * plain / factor).astype(np.float32)


def _llama3_share(plain: np.ndarray, rope: Rope) -> np.ndarray:
  """Return how much of each frequency is unchanged, linear in its rotations within the original context."""
  rotations = rope.original * plain / (2 * math.pi)
  return np.clip((rotations - rope.low) / (rope.high - rope.low), 0, 1)


def _yarn_share(rope: Rope, head_dim: int) -> np.ndarray:
  """Return how much of each frequency is unchanged, linear in the dimension (YaRN, Peng et al. 2023, equation 23)."""

  def dimension(rotations):
    return head_dim * math.log(rope.original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

  low = dimension(rope.beta_fast)
  high = dimension(rope.beta_slow)
  if rope.truncate:
    low = math.floor(low)
    high = math.ceil(high)
  low = max(low, 0)
  high = min(high, head_dim - 1)
  high += 0.001 * (low == high)  # a step, where the two bounds meet
  return 1 - np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)


def angles(rope: Rope, head_dim: int, positions: Array) -> tuple[Array, Array]:
  """Return cosines and sines [B, L, R] at positions [B, L]."""
  angle = positions.astype(jnp.float32)[:, :, None] * frequencies(rope, head_dim)[None, None]
  return jnp.cos(angle) * rope.magnitude, jnp.sin(angle) * rope.magnitude


def rotate(x: Array, cos_sin: tuple[Array, Array]) -> Array:
  """Rotate the pairs (x_i, x_{i + R}) of x [B, L, X, D], i < R; computed in float32."""
  cos, sin = (a[:, :, None] for a in cos_sin)  # [B, L, 1, R]
  pairs = cos.shape[-1]
  ends = (pairs,) if 2 * pairs == x.shape[-1] else (pairs, 2 * pairs)
  a, b, *rest = jnp.split(x.astype(jnp.float32), ends, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, *rest], axis=-1).astype(x.dtype)
