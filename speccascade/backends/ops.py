"""Reading and writing entries by index, in the form that each platform compiles well.

The platform is the one that the program is lowered for. A TPU runs a gather or a scatter row by row, and a masked sum
at full width; a CPU writes a row in place and takes maxima of floats as vectors.

Axis letters: B batch, N entries, K indices, V vocabulary.
"""

import jax
from jax import lax
import jax.numpy as jnp

Array = jax.Array


@jax.jit
def take(x: Array, index: Array) -> Array:
  """Gather along axis 1: x [B, N, ...] at index [B, K] gives [B, K, ...]."""
  return lax.platform_dependent(x, index, tpu=masked_take, default=gathered_take)


def gathered_take(x: Array, index: Array) -> Array:
  """Return what `take` does, as a gather."""
  index = index.reshape(index.shape + (1,) * (x.ndim - 2))
  return jnp.take_along_axis(x, index, axis=1, mode='clip')


def masked_take(x: Array, index: Array) -> Array:
  """Return what `take` does, as a masked sum."""
  here = jnp.arange(x.shape[1])[None, None] == jnp.clip(index, 0, x.shape[1] - 1)[:, :, None]  # [B, K, N]
  return _masked(here.reshape(here.shape + (1,) * (x.ndim - 2)), x[:, None], 2)


def take1(x: Array, index: Array) -> Array:
  """Gather one entry of axis 1 for each row: x [B, N, ...] at index [B] gives [B, ...]."""
  return take(x, index[:, None])[:, 0]


def with_column(x: Array, m: int, value: Array) -> Array:
  """Return x [B, M] with its column m set to value [B]."""
  return jnp.where(lax.iota(jnp.int32, x.shape[1]) == m, value[:, None], x)


def pick(x: Array, index: Array) -> Array:
  """Return the entries of x [N, ...] at index [K]: [K, ...]."""
  return jnp.take(x, index, axis=0, mode='clip')


@jax.jit
def at_token(x: Array, token: Array) -> Array:
  """Return x[..., token] for x [..., V] and token [...]."""
  return lax.platform_dependent(x, token, tpu=masked_at_token, default=gathered_at_token)


def gathered_at_token(x: Array, token: Array) -> Array:
  """Return what `at_token` does, as a gather."""
  return jnp.take_along_axis(x, token[..., None], axis=-1, mode='clip')[..., 0]


def masked_at_token(x: Array, token: Array) -> Array:
  """Return what `at_token` does, as a masked sum."""
  return _masked(lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) == token[..., None], x, -1)


def spread(x: Array, write: Array) -> Array:
  """Return numbers [..., V] of those [..., K] of some tokens, -inf for all others.

  Args:
    x: The numbers.
    write: [V] which of them a token has, -1 for none.
  """
  some = write.reshape((1,) * (x.ndim - 1) + (-1,))
  return jnp.where(some < 0, -jnp.inf, jnp.take(x, write, axis=-1, mode='clip'))


def _masked(here: Array, x: Array, axis: int) -> Array:
  """Return the one entry of x that the mask shows, of each slice along an axis."""
  if x.dtype == jnp.bool_:
    return (here & x).any(axis)
  return jnp.where(here, x, jnp.zeros((), x.dtype)).sum(axis, dtype=x.dtype)


@jax.jit
def put(buffer: Array, slot: Array, value: Array, mask: Array) -> Array:
  """Return a buffer with one entry written into each row.

  Args:
    buffer: [B, N, ...].
    slot: [B].
    value: [B, ...].
    mask: [B] the rows that are written.
  """
  return lax.platform_dependent(buffer, slot, value, mask, cpu=written_put, default=masked_put)


def masked_put(buffer: Array, slot: Array, value: Array, mask: Array) -> Array:
  """Return what `put` does, as a select over all slots."""
  at = (jnp.arange(buffer.shape[1])[None] == slot[:, None]) & mask[:, None]
  return jnp.where(at.reshape(at.shape + (1,) * (buffer.ndim - 2)), value[:, None], buffer)


def written_put(buffer: Array, slot: Array, value: Array, mask: Array) -> Array:
  """Return what `put` does, writing one slot of each row."""

  def row(buffer, slot, value, mask):
    slot = jnp.clip(slot, 0, buffer.shape[0] - 1)
    return lax.dynamic_update_index_in_dim(buffer, jnp.where(mask, value, buffer[slot]), slot, 0)

  if buffer.shape[0] == 1:  # a scatter over rows takes several kernels, this takes one
    return row(buffer[0], slot[0], value[0], mask[0])[None]
  return jax.vmap(row)(buffer, slot, value, mask)


@jax.jit
def argmax(x: Array) -> Array:
  """Return the arg max of x [..., V], the lowest index on ties."""
  return lax.platform_dependent(x, cpu=argmax_of_maxima, default=plain_argmax)


def plain_argmax(x: Array) -> Array:
  """Return what `argmax` does, as XLA has it."""
  return jnp.argmax(x, -1).astype(jnp.int32)


def argmax_of_maxima(x: Array) -> Array:
  """Return what `argmax` does, as two maxima of floats, which run as vectors on a CPU."""
  x = lax.optimization_barrier(x)  # computed twice, x and its maximum might round differently
  last = x.shape[-1] - 1
  after = last - lax.broadcasted_iota(jnp.float32, x.shape, x.ndim - 1)  # exact below 2²⁴
  return last - jnp.where(x == x.max(-1, keepdims=True), after, 0).max(-1).astype(jnp.int32)
