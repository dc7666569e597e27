"""Equal networks, optimizers and settings share a step, as tests train much the same again and again."""

import functools

import jax
import pytest

from speccascade.train import loop
from speccascade.train.optimizers import Optimizer


@pytest.fixture(scope='module', autouse=True)
def shared_steps():
  """Trace and compile each step once."""
  make, steps = loop.make_step, {}

  def shared(*args, shardings, **options):
    key = *args, *options.items(), *jax.tree.leaves(shardings)
    if key not in steps:
      steps[key] = make(*args, shardings=shardings, **options)
    return steps[key]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(Optimizer, 'build', functools.cache(Optimizer.build))
    patch.setattr(loop, 'make_step', shared)
    yield
