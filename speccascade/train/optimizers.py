"""AdamW and Adafactor with warm-up, decay and clipping, and the learning rate of T5's queries.

Adafactor is that of T5X: factored from 128 on, decay 1 - t^-0.8, steps clipped to a root mean square of 1 and scaled by
that of the parameter, no momentum.

T5 does not scale attention scores by d_kv^-½; its initial queries are smaller by that factor instead. A step of Adam
has the same size at any scale, so queries would move d_kv^½ too fast: `slow_queries` slows them down.
"""

from collections.abc import Callable
import dataclasses
import math

import jax
import jax.numpy as jnp
import optax

from speccascade.models.t5 import T5
from speccascade.types import checked_int, Network, Params

SCHEDULES = ('constant', 'linear', 'cosine', 'rsqrt')


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """An optimizer and its schedule.

  Attributes:
    name: 'adamw' or 'adafactor'.
    learning_rate: The highest rate, after `warmup` steps.
    schedule: How the rate changes then: 'constant', 'linear', 'cosine' or 'rsqrt'.
    warmup: Steps in which the rate rises linearly from 0.
    clip: The largest norm of the gradient; 0 for none.
  """

  name: str = 'adamw'
  learning_rate: float = 1e-3
  schedule: str = 'cosine'
  warmup: int = 100
  clip: float = 1.0

  def __post_init__(self):
    if self.name not in ('adamw', 'adafactor'):
      raise ValueError(f'name={self.name!r}: choose adamw or adafactor')
    if self.schedule not in SCHEDULES:
      raise ValueError(f'schedule={self.schedule!r}: choose from {", ".join(SCHEDULES)}')
    checked_int('warmup', self.warmup, least=0)
    for name, fits, wanted in (  # comparisons that NaN fails, too
      ('learning_rate', 0 < self.learning_rate < math.inf, 'above 0 and finite'),
      ('clip', 0 <= self.clip < math.inf, 'at least 0, which is none, and finite'),
    ):
      if not fits:
        raise ValueError(f'{name}={getattr(self, name)} must be {wanted}')

  def rate(self, steps: int) -> Callable:
    """Return the learning rate as a function of the step, for a run of `steps`."""
    warmup = max(1, self.warmup)
    left = max(1, steps - self.warmup)
    after = {
      'constant': optax.constant_schedule(self.learning_rate),
      'linear': optax.linear_schedule(self.learning_rate, 0.0, left),
      'cosine': optax.cosine_decay_schedule(self.learning_rate, left),
      'rsqrt': lambda step: self.learning_rate * (warmup / jnp.maximum(warmup, warmup + step)) ** 0.5,
    }[self.schedule]
    return optax.join_schedules([optax.linear_schedule(0.0, self.learning_rate, warmup), after], [self.warmup])

  def build(self, network: Network, steps: int) -> optax.GradientTransformation:
    """Return the gradient transformation for a network and a run of `steps`."""
    parts = [optax.clip_by_global_norm(self.clip)] if self.clip else []
    if self.name == 'adafactor':  # its steps are relative to each tensor's size, so queries need no scale
      adafactor = optax.adafactor(self.rate(steps))
      return optax.chain(*parts, by_layer(adafactor, network) if network.scan else adafactor)
    parts.append(optax.scale_by_adam(b2=0.99))
    if isinstance(network, T5) and network.config.decoder.attention_scale == 1:
      parts.append(slow_queries(network.config.head_dim))
    return optax.chain(*parts, optax.scale_by_learning_rate(self.rate(steps)))


def by_layer(transform: optax.GradientTransformation, network: Network) -> optax.GradientTransformation:
  """Return a transformation that takes each layer of a scanned network by itself, as those of one that is not.

  Adafactor clips and scales by the root mean square of a tensor, which is of one layer, not of a stack of them.
  """

  def depths(params: Params) -> Params:  # of stacks; 0 for what is not stacked
    layers = jax.tree_util.DictKey('layers')
    return jax.tree_util.tree_map_with_path(lambda path, x: x.shape[0] if layers in path else 0, params)

  each = optax.GradientTransformation(jax.vmap(transform.init), jax.vmap(transform.update))
  stacks = set(jax.tree.leaves(depths(jax.eval_shape(network.init, jax.random.key(0))))) - {0}
  return optax.partition({0: transform} | dict.fromkeys(stacks, each), depths)


def slow_queries(head_dim: int) -> optax.GradientTransformation:
  """Return a transformation that multiplies the steps of query matrices by head_dim^-½."""

  def queries(params: Params) -> Params:
    query = jax.tree_util.DictKey('query')
    return jax.tree_util.tree_map_with_path(lambda path, _: query in path, params)

  return optax.masked(optax.scale(head_dim**-0.5), queries)
