"""One step of training: the gradient, in microbatches if asked for, and the optimizer's update.

Axis letters: B batch, M microbatches.
"""

from collections.abc import Callable
import contextlib
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import optax

from speccascade.train.batches import Batch
from speccascade.train.forcing import Drafting
from speccascade.train.losses import Distillation, loss
from speccascade.types import Array, Model, Network, Params

State = dict[str, Any]  # 'params' and 'optimizer'
Objective = Callable[[Params, Batch], tuple[Array, dict[str, Array]]]


def make_step(
  network: Network,
  transform: optax.GradientTransformation,
  distillation: Distillation | None,
  *,
  drafting: Drafting | None = None,
  microbatches: int = 1,
  remat: bool = False,
  shardings: State | None = None,
  drafted: tuple[int, ...] | None = None,
) -> Callable[..., tuple[State, dict[str, Array]]]:
  """Return the jitted step: (state, batch, teacher, companion=None) -> (state, parts of the loss).

  Args:
    network: The network to train.
    transform: The optimizer.
    distillation: The loss against the teacher; None without one.
    drafting: How a drafter of several tokens is trained.
    microbatches: Parts of a batch whose gradients are computed one after another.
    remat: Recompute each layer in the backward pass, which then needs memory for the layers' inputs alone.
    shardings: Shardings of the state; None for those of its arrays.
    drafted: The ids of the tokens that a head scores; None for all.
  """

  @functools.partial(jax.jit, donate_argnums=0, out_shardings=None if shardings is None else (shardings, None))
  def step(state, batch: Batch, teacher: Model | None, companion: Model | None = None):
    def objective(params, some):
      with nn.intercept_methods(_recompute_layers()) if remat else contextlib.nullcontext():
        value, parts = loss(network, params, some, teacher, distillation, companion, drafting, drafted)
      return value, {'loss': value, **parts}

    gradient_of = functools.partial(_mean_gradient, microbatches=microbatches) if microbatches > 1 else _gradient
    gradient, parts = gradient_of(objective, state['params'], batch)
    with jax.numpy_dtype_promotion('standard'):  # optax multiplies rates by its integer counts
      updates, optimizer = transform.update(gradient, state['optimizer'], state['params'])
    return {'params': optax.apply_updates(state['params'], updates), 'optimizer': optimizer}, parts

  return step


def _gradient(objective: Objective, params: Params, batch: Batch) -> tuple[Params, dict[str, Array]]:
  """Return the gradient of a batch, and the parts of its loss."""
  (_, parts), gradient = jax.value_and_grad(objective, has_aux=True)(params, batch)
  return gradient, parts


def _mean_gradient(
  objective: Objective, params: Params, batch: Batch, *, microbatches: int
) -> tuple[Params, dict[str, Array]]:
  """Return the same in microbatches.

  The loss is a mean over tokens, so each microbatch counts with its share of them. Row i is in microbatch i mod M: each
  device then has as many rows of every microbatch, and none moves.
  """
  tokens = batch.target_length.sum().astype(jnp.float32)
  apart = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, microbatches, *x.shape[1:]), 1, 0), batch)

  def weighted(params, some):
    weight = some.target_length.sum().astype(jnp.float32) / tokens
    value, parts = objective(params, some)
    return weight * value, jax.tree.map(lambda x: weight * x, parts)

  def add(total, some):
    return jax.tree.map(jnp.add, total, _gradient(weighted, params, some)), None

  first = jax.tree.map(lambda x: x[0], apart)
  shapes = jax.eval_shape(functools.partial(_gradient, weighted), params, first)
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  return jax.lax.scan(add, zeros, apart)[0]


def _recompute_layers() -> Callable:
  """Return an interceptor of Flax that recomputes every layer in the backward pass."""
  inside = []

  def intercept(call, args, kwargs, context):
    layer = context.module
    if inside or context.method_name != '__call__' or not (layer.name or '').startswith('layers'):
      return call(*args, **kwargs)
    inside.append(layer)
    try:
      return nn.remat(lambda lifted: lifted(*args, **kwargs))(layer)
    finally:
      inside.pop()

  return intercept
