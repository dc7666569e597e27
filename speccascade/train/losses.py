"""Losses under teacher forcing: cross-entropy with the data, and distances from a teacher's distributions.

Each loss is a mean over the tokens of the targets, without padding and without the prompt of a decoder-only model.

Axis letters: B batch, S source, L target, V vocabulary.
"""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp
import optax

from speccascade.models.t5 import T5
from speccascade.train.batches import Batch
from speccascade.types import Array, Cache, Model, Network, Params, Prompt


def _forward_kl(p: Array, q: Array) -> Array:
  return (jnp.exp(p) * (p - q)).sum(-1)


def _reverse_kl(p: Array, q: Array) -> Array:
  return (jnp.exp(q) * (q - p)).sum(-1)


def _tv(p: Array, q: Array) -> Array:
  """Return the total variation, 1 minus the acceptance of speculative decoding."""
  return jnp.abs(jnp.exp(p) - jnp.exp(q)).sum(-1) / 2


# name -> distance of the teacher's log-probabilities p from the student's q, [..., V] -> [...]
DISTANCES: dict[str, Callable[[Array, Array], Array]] = {
  'forward_kl': _forward_kl,
  'reverse_kl': _reverse_kl,
  'tv': _tv,
}


@dataclasses.dataclass(frozen=True)
class Distillation:
  """Token-level distillation: `weight` × distance(teacher, student) + (1 − weight) × cross-entropy.

  Attributes:
    distance: 'forward_kl', 'reverse_kl' or 'tv'.
    weight: of the distance, in 0 … 1.
    temperature: of both distributions.
  """

  distance: str = 'forward_kl'
  weight: float = 1.0
  temperature: float = 1.0

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
  prompt = Prompt(jnp.asarray(batch.source), jnp.asarray(batch.source_length))
  cache = _read(network, params, prompt, width) if isinstance(network, T5) else network.prefill(params, prompt, width)
  start = jnp.full((rows, 1), network.start_id, jnp.int32)
  inputs = jnp.concatenate([start, jnp.asarray(batch.target)[:, :-1]], axis=1)
  return network.extend(params, cache, inputs, _positions(rows, width))[0]


def _read(network: T5, params: Params, prompt: Prompt, width: int) -> Cache:
  """Return what `prefill` does, whose program has the encoder three times, for long and short prompts.

  A batch is as wide as its texts, and each of the three would be differentiated.
  """
  first = Prompt(prompt.tokens[:, :1], jnp.ones_like(prompt.length))
  cache = network.prefill(params, first, width)
  source = network.module.apply({'params': params}, prompt.tokens, prompt.length, method='read_source')
  return {**cache, 'source': source, 'source_length': prompt.length}


def _after_prompt(network: Network, params: Params, batch: Batch) -> Array:
  """Return logits [B, L, V] of the target by a decoder that reads each source and target as one text."""
  rows, width = batch.target.shape
  total = batch.source.shape[1] + width
  slots = batch.source_length[:, None] + jnp.arange(width)[None]  # [B, L] of the target's tokens
  tokens = jnp.pad(jnp.asarray(batch.source), ((0, 0), (0, width)))
  tokens = tokens.at[jnp.arange(rows)[:, None], slots].set(jnp.asarray(batch.target))
  logits, _ = network.extend(params, network.empty_cache(params, rows, total), tokens, _positions(rows, total))
  return jnp.take_along_axis(logits, slots[:, :, None] - 1, axis=1)


def _positions(rows: int, width: int) -> Array:
  return jnp.broadcast_to(jnp.arange(width)[None], (rows, width))


def loss(
  network: Network, params: Params, batch: Batch, teacher: Model | None = None, distillation: Distillation | None = None
) -> tuple[Array, dict[str, Array]]:
  """Return the loss of a batch.

  Args:
    network: the network to train.
    params: its parameters.
    batch: token lists [B, S] and [B, L].
    teacher: model to distil; without one the loss is the cross-entropy.
    distillation: how to distil; forward KL by default.

  Returns:
    The loss, and its parts by name: cross-entropy, accuracy and, with a teacher, the distance and the acceptance.
  """
  logits = logits_of(network, params, batch)
  is_target = jnp.arange(batch.target.shape[1])[None] < batch.target_length[:, None]  # [B, L]

  def mean(x):
    return jnp.where(is_target, x, 0.0).sum() / is_target.sum().astype(jnp.float32)

  parts = {
    'cross_entropy': mean(optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(batch.target))),
    'accuracy': mean((logits.argmax(-1) == batch.target).astype(jnp.float32)),
  }
  if teacher is None:
    return parts['cross_entropy'], parts
  d = distillation or Distillation()
  teacher_logits = jax.lax.stop_gradient(logits_of(teacher.network, teacher.params, batch))
  vocab = min(teacher_logits.shape[-1], logits.shape[-1])  # logits beyond the shared vocabulary are padding
  p, q = (jax.nn.log_softmax(x[..., :vocab] / d.temperature) for x in (teacher_logits, logits))
  parts[d.distance] = mean(DISTANCES[d.distance](p, q))
  parts['acceptance'] = 1 - mean(_tv(p, q))
  return d.weight * parts[d.distance] + (1 - d.weight) * parts['cross_entropy'], parts
