"""Adafactor is T5X's, by its definition in numpy, and of each layer by itself where layers are stacked."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from speccascade.models.layers import stack_layers
from speccascade.models.t5 import T5, T5Config
from speccascade.train.optimizers import Optimizer

RATE = 1e-3
NET = T5(T5Config(256, 128, 2, 64, 128, encoder_layers=1, decoder_layers=2))
T5X = Optimizer('adafactor', RATE, 'constant', warmup=0, clip=0)


def rms(x: np.ndarray) -> float:
  return np.sqrt(np.mean(x * x))


def expected(param: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
  """Return a parameter after some steps of T5X's Adafactor: β₂ = 1 − t^-0.8, factored where two axes have 128."""
  param = param.astype(np.float64)
  rows = columns = full = 0.0
  for t, gradient in enumerate(gradients, 1):
    decay = 1 - t**-0.8
    square = gradient.astype(np.float64) ** 2 + 1e-30
    if param.ndim == 2 and min(param.shape) >= 128:
      rows = decay * rows + (1 - decay) * square.mean(axis=1)
      columns = decay * columns + (1 - decay) * square.mean(axis=0)
      second = np.outer(rows, columns) / rows.mean()
    else:
      full = second = decay * full + (1 - decay) * square
    step = gradient / np.sqrt(second)
    param = param - RATE * max(1e-3, rms(param)) * step / max(1.0, rms(step))
  return param


@pytest.mark.parametrize('shape', [(128, 192), (256, 128), (127, 300), (200,)])
def test_adafactor_is_t5xs(shape):
  rng = np.random.default_rng(0)
  param = rng.normal(size=shape).astype(np.float32)
  gradients = [(rng.normal(size=shape) * 10.0**-i).astype(np.float32) for i in range(4)]
  transform = T5X.build(NET, 100)
  params = {'x': jnp.asarray(param)}
  state = transform.init(params)
  for gradient in gradients:
    with jax.numpy_dtype_promotion('standard'):
      updates, state = transform.update({'x': jnp.asarray(gradient)}, state, params)
    params = optax.apply_updates(params, updates)
  np.testing.assert_allclose(params['x'], expected(param, gradients), rtol=0, atol=1e-6)
  assert np.abs(params['x'] - param).max() > 1e-3


@pytest.mark.long
def test_layers_that_are_stacked_take_the_steps_of_layers_that_are_not():
  params = jax.jit(NET.init)(jax.random.key(0))
  scales = np.random.default_rng(1)  # layers of different sizes, which a stack as one tensor would mix
  params = jax.tree.map(lambda x: x * scales.uniform(0.1, 10), params)
  gradients = jax.tree.map(lambda x: jnp.sin(37 * x), params)

  def stepped(network, params, gradients):
    transform = T5X.build(network, 100)
    with jax.numpy_dtype_promotion('standard'):
      return jax.jit(lambda p, g: transform.update(g, transform.init(p), p)[0])(params, gradients)

  apart = stack_layers(stepped(NET, params, gradients))
  stacked = stepped(T5(NET.config, scan=True), stack_layers(params), stack_layers(gradients))
  assert jax.tree.structure(apart) == jax.tree.structure(stacked)
  for x, y in zip(jax.tree.leaves(apart), jax.tree.leaves(stacked), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5)
