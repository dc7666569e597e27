"""Losses under teacher forcing: cross-entropy with the data, and distances from a teacher's law.

Each loss is a mean over the target's tokens; padding has no part in it, nor has a decoder-only model's prompt.

Axis letters: B batch, S source, L target, V vocabulary.
"""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp
import optax

from speccascade.train.batches import Batch
from speccascade.types import Array, Model, Network, Params, Prompt


def _forward_kl(p: Array, q: Array) -> Array:
  return (jnp.exp(p) * (p - q)).sum(-1)


def _reverse_kl(p: Array, q: Array) -> Array:
  return (jnp.exp(q) * (q - p)).sum(-1)


def _tv(p: Array, q: Array) -> Array:
  """Return the total variation, 1 minus the acceptance of speculative decoding."""
  return jnp.abs(jnp.exp(p) - jnp.exp(q)).sum(-1) / 2


DISTANCES: dict[str, Callable[[Array, Array], Array]] = {
  'forward_kl': _forward_kl, 'reverse_kl': _reverse_kl, 'tv': _tv,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Distillation:
  """Token-level distillation: `weight` × distance(teacher, student) + (1 − weight) × cross-entropy."""

  distance: str = 'forward_kl'
  weight: float = 1.0
  temperature: float = 1.0  # of both laws

  def __post_init__(self):
    if self.distance not in DISTANCES:
      raise ValueError(f'distance={self.distance!r}: choose from {", ".join(DISTANCES)}')
    if not 0 <= self.weight <= 1 or self.temperature <= 0:
      raise ValueError(f'weight={self.weight} must lie in 0…1 and temperature={self.temperature} above 0')


def logits_of(network: Network, params: Params, batch: Batch) -> Array:
  """Return float32 logits [B, L, V] of every target token given the source and the tokens before it."""
  if network.start_id is None:
    return _after_prompt(network, params, batch)
  rows, width = batch.target.shape
  cache = network.prefill(params, Prompt(jnp.asarray(batch.source), jnp.asarray(batch.source_length)), width)
  start = jnp.full((rows, 1), network.start_id, jnp.int32)
  fed = jnp.concatenate([start, jnp.asarray(batch.target)[:, :-1]], axis=1)
  return network.extend(params, cache, fed, _positions(rows, width))[0]


def _after_prompt(network: Network, params: Params, batch: Batch) -> Array:
  """Return logits of the target's tokens by a decoder that reads each source and target as one text."""
  rows, width = batch.target.shape
  total = batch.source.shape[1] + width
  at = batch.source_length[:, None] + jnp.arange(width)[None]  # [B, L] where the target's tokens stand
  tokens = jnp.pad(jnp.asarray(batch.source), ((0, 0), (0, width)))
  tokens = tokens.at[jnp.arange(rows)[:, None], at].set(jnp.asarray(batch.target))
  logits, _ = network.extend(params, network.empty_cache(params, rows, total), tokens, _positions(rows, total))
  return jnp.take_along_axis(logits, at[:, :, None] - 1, axis=1)


def _positions(rows: int, width: int) -> Array:
  return jnp.broadcast_to(jnp.arange(width)[None], (rows, width))


def loss(
  network: Network, params: Params, batch: Batch, teacher: Model | None = None, distillation: Distillation | None = None
) -> tuple[Array, dict[str, Array]]:
  """Return the loss, and by name what it is made of."""
  logits = logits_of(network, params, batch)
  inside = jnp.arange(batch.target.shape[1])[None] < batch.target_length[:, None]

  def mean(x):
    return jnp.where(inside, x, 0.0).sum() / inside.sum().astype(jnp.float32)

  parts = {
    'cross_entropy': mean(optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(batch.target))),
    'accuracy': mean((logits.argmax(-1) == batch.target).astype(jnp.float32)),
  }
  if teacher is None:
    return parts['cross_entropy'], parts
  d = distillation or Distillation()
  given = jax.lax.stop_gradient(logits_of(teacher.network, teacher.params, batch))
  vocab = min(given.shape[-1], logits.shape[-1])  # logits beyond the shared vocabulary are padding
  p, q = (jax.nn.log_softmax(x[..., :vocab] / d.temperature) for x in (given, logits))
  parts[d.distance] = mean(DISTANCES[d.distance](p, q))
  parts['acceptance'] = 1 - mean(_tv(p, q))
  return d.weight * parts[d.distance] + (1 - d.weight) * parts['cross_entropy'], parts
