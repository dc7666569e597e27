"""What differs from device to device: one name and one signature for each, in `base`, `cpu`, `gpu` and `tpu`.

A program is made for one backend: that of the platform on which its parameters lie (`of`), unless another is in `use`.
It is a static part of the program and of the networks that are bound to it (`bind`). A network that is bound to none,
as in training, is plain XLA. `register` gives a platform another backend.
"""

from collections.abc import Iterator, Sequence
import contextlib
import functools
import inspect
from typing import Any
import warnings

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from speccascade.backends.base import Backend, Entry, entry_of, View
from speccascade.backends.cpu import CPU
from speccascade.backends.gpu import GPU
from speccascade.backends.limits import memory
from speccascade.backends.tpu import TPU

__all__ = [
  'Backend',
  'CPU',
  'Entry',
  'GPU',
  'TPU',
  'View',
  'bind',
  'entry_of',
  'known',
  'memory',
  'named',
  'of',
  'prepared',
  'register',
  'use',
]

_PLATFORMS = {'cpu': CPU(), 'gpu': GPU(), 'cuda': GPU(), 'rocm': GPU(), 'tpu': TPU()}
_OPERATIONS = ('take', 'pick', 'put', 'at_token', 'argmax')  # of `backends.ops`
_USED: list[Backend] = []  # those of `use`, the last in use


@contextlib.contextmanager
def use(backend: Backend) -> Iterator[None]:
  """Make the programs of this process for this backend, whatever the device."""
  used = _checked(backend)
  _USED.append(used)
  try:
    yield
  finally:
    last = max(i for i, other in enumerate(_USED) if other is used)  # another thread may use one, too
    del _USED[last]


def register(platform: str, backend: Backend):
  """Let programs on a platform, as JAX names it, be traced for this backend."""
  _PLATFORMS[platform] = _checked(backend)


def _checked(backend: Any) -> Backend:
  """Return a backend, having checked that it is one, may be static in a program, and is called as the base is."""
  if not isinstance(backend, Backend):
    made = f', as {backend.__name__}()' if isinstance(backend, type) else ''
    raise ValueError(f'{backend!r} is not a backend: give an instance of a subclass of backends.Backend{made}.')
  try:
    hash(backend)
  except TypeError as error:
    name = type(backend).__name__
    raise ValueError(f'{name} is a static part of a program and cannot be hashed ({error}): hold no arrays.') from None
  _check_methods(type(backend))
  if fixed := [name for name in _OPERATIONS if hasattr(backend, name)]:
    raise ValueError(f'{type(backend).__name__}.{fixed[0]} is never called: indexed operations go by the platform.')
  return backend


@functools.cache
def _check_methods(kind: type[Backend]):
  for name, of_base in inspect.getmembers(Backend, inspect.isfunction):
    wanted = inspect.signature(of_base)
    found = inspect.signature(getattr(kind, name))
    by_name = {p.name: None for p in wanted.parameters.values() if p.kind is p.KEYWORD_ONLY}
    by_place = [p for p in wanted.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    try:
      if not name.startswith('_'):
        found.bind_partial(*by_place, **by_name)
    except TypeError:
      raise ValueError(f'{kind.__name__}.{name} takes {found}, but it is called with {wanted}.') from None


def named(platform: str) -> Backend:
  """Return the backend in use or that of a platform as JAX names it, plain XLA for one without its own."""
  return _USED[-1] if _USED else _PLATFORMS.get(platform, Backend())


def of(params, mesh: Mesh | None = None, layout: Any = None) -> Backend:
  """Return the backend of the devices on which the first array of a tree lies; JAX's default for numpy's.

  Where some are traced, the program is for the devices of the mesh, or all that there are. `layout` is that of a
  program for several devices.
  """
  arrays = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
  if any(isinstance(x, jax.core.Tracer) for x in arrays):
    devices = jax.devices() if mesh is None else mesh.devices.flatten()
  else:
    devices = list(arrays[0].devices()) if arrays else jax.devices()[:1]
  backend = named(devices[0].platform)
  return backend if len(devices) == 1 else backend.on_mesh(layout)


def bind(network: Any, backend: Backend) -> Any:
  """Return a network that computes on a backend; one that names none computes as it is."""
  return network.on(backend) if hasattr(network, 'on') else network


def prepared(models: Sequence, layout: Any = None, mesh: Mesh | None = None) -> tuple[Backend, tuple]:
  """Return the backend of models that run together, and the parameters it computes with.

  Those in numpy are put on the device here, or each run would do so.
  """
  backend = of([m.params for m in models], mesh, layout)
  put = lambda params: jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, params)
  return backend, tuple(put(backend.prepare(m.params)) for m in models)


@functools.cache
def known(options: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
  """Return options of XLA, or none where this machine's compiler refuses them."""
  try:
    jax.jit(lambda: 0, compiler_options=dict(options)).lower().compile()
  except jax.errors.JaxRuntimeError as error:
    warnings.warn(f'decoding is compiled without {dict(options)}: {str(error).splitlines()[0]}', stacklevel=2)
    return ()
  return options
