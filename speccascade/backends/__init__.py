"""What differs from device to device: one name and one signature for each, in `base` and a file for each backend.

A program is made for one backend: that of the platform on which its parameters lie (`backend_for`), unless another is
in `use`. It is a static part of the program and of the networks on it (`Network.on`). A network that is on none, as in
training, is plain XLA. A file in this folder declares a backend by `@backend`; `register` gives a platform another one.
"""

from collections.abc import Sequence
import functools
import importlib
import pkgutil
from typing import Any
import warnings

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from speccascade.backends import sharding
from speccascade.backends.base import Backend, Entry, entry_of, Offsets, View
from speccascade.backends.cpu import CPU
from speccascade.backends.gpu import GPU
from speccascade.backends.limits import memory
from speccascade.backends.parameters import Parameters
from speccascade.backends.registry import backend, by_name, named, register, use
from speccascade.backends.tpu import TPU
from speccascade.host.errors import first_line

for _module in pkgutil.iter_modules(__path__):
  importlib.import_module(f'{__name__}.{_module.name}')


def backend_for(params, mesh: Mesh | None = None, layout: sharding.Layout = sharding.Layout()) -> Backend:
  """Return the backend of the devices of some parameters.

  Args:
    params: A tree of parameters, whose first array decides; JAX's default device for numpy's.
    mesh: Where some are traced, the mesh that the program is for; None for all devices.
    layout: The layout of a program for several devices.
  """
  arrays = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
  if any(isinstance(x, jax.core.Tracer) for x in arrays):
    devices = jax.devices() if mesh is None else mesh.devices.flatten()
  else:
    devices = list(arrays[0].devices()) if arrays else jax.devices()[:1]
  found = named(devices[0].platform)
  return found if len(devices) == 1 else found.on_mesh(layout)


def prepared(
  models: Sequence, layout: sharding.Layout = sharding.Layout(), mesh: Mesh | None = None
) -> tuple[Backend, Parameters]:
  """Return the backend of models that run together, and the parameters that it computes with.

  Args:
    models: The models.
    layout: The layout of a program for several devices.
    mesh: The mesh of a step in which parameters are traced.

  Returns:
    The backend, and the parameters of each model; those in numpy are put on the device here, or each run would do so.
  """
  found = backend_for([m.params for m in models], mesh, layout)
  made = Parameters(found.prepare(m.params) for m in models)
  return found, jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, made)


@functools.cache
def known(options: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
  """Return options of XLA, or none where this machine's compiler refuses them."""
  try:
    jax.jit(lambda: 0, compiler_options=dict(options)).lower().compile()
  except jax.errors.JaxRuntimeError as error:
    warnings.warn(f'decoding is compiled without {dict(options)}: {first_line(error)}', stacklevel=2)
    return ()
  return options
