"""AdamW and Adafactor with warm-up, decay and clipping, and the learning rate that T5's queries need.

T5 does not scale scores by d_kv^-½ but starts with queries that are smaller by as much. A step of Adam has the same
size whatever the scale, so queries would move d_kv^½ too fast: `scale_queries` slows them down.
"""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp
import optax

from speccascade.models.t5 import T5
from speccascade.types import Network, Params

SCHEDULES = ('constant', 'linear', 'cosine', 'rsqrt')


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """What an optimizer is made of; `schedule` is how the rate goes down after `warmup` steps."""

  name: str = 'adamw'
  learning_rate: float = 1e-3
  schedule: str = 'cosine'
  warmup: int = 100
  final: float = 0.0  # of the learning rate, where a linear or cosine schedule ends
  b2: float = 0.99
  weight_decay: float = 0.0
  clip: float = 1.0  # the gradient's norm; 0: not at all
  scale_queries: bool = True

  def __post_init__(self):
    if self.name not in ('adamw', 'adafactor'):
      raise ValueError(f'name={self.name!r}: choose adamw or adafactor')
    if self.schedule not in SCHEDULES:
      raise ValueError(f'schedule={self.schedule!r}: choose from {", ".join(SCHEDULES)}')
    if self.learning_rate <= 0:
      raise ValueError(f'learning_rate={self.learning_rate} must be above 0')

  def rate(self, steps: int) -> Callable:
    """Return the learning rate as a function of the step."""
    left, warmup = max(1, steps - self.warmup), max(1, self.warmup)
    after = {
      'constant': optax.constant_schedule(self.learning_rate),
      'linear': optax.linear_schedule(self.learning_rate, self.final * self.learning_rate, left),
      'cosine': optax.cosine_decay_schedule(self.learning_rate, left, self.final),
      'rsqrt': lambda step: self.learning_rate * (warmup / jnp.maximum(warmup, warmup + step)) ** 0.5,
    }[self.schedule]
    return optax.join_schedules([optax.linear_schedule(0.0, self.learning_rate, warmup), after], [self.warmup])

  def build(self, network: Network, steps: int) -> optax.GradientTransformation:
    """Return the transformation for a network."""
    parts = [optax.clip_by_global_norm(self.clip)] if self.clip else []
    if self.name == 'adamw':
      parts += [optax.scale_by_adam(b2=self.b2), optax.add_decayed_weights(self.weight_decay)]
      parts += [slow_queries(network.config.head_dim)] if self.scale_queries and isinstance(network, T5) else []
      parts += [optax.scale_by_learning_rate(self.rate(steps))]
    else:  # steps are relative to each tensor's size here, so queries need nothing
      parts += [optax.adafactor(self.rate(steps), weight_decay_rate=self.weight_decay or None)]
    return optax.chain(*parts)


def slow_queries(head_dim: int) -> optax.GradientTransformation:
  """Return a transformation that multiplies the steps of query matrices by head_dim^-½."""

  def queries(params: Params) -> Params:
    query = jax.tree_util.DictKey('query')
    return jax.tree_util.tree_map_with_path(lambda path, _: query in path, params)

  return optax.masked(optax.scale(head_dim**-0.5), queries)
