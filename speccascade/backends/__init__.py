"""What differs from device to device: one name and one signature for each, in `base`, `cpu`, `gpu` and `tpu`.

A program is traced for one backend, chosen from where its parameters lie (`of`) and entered with `use`. What is traced
outside, as in training, is plain XLA.
"""

from collections.abc import Collection, Sequence
import functools
import warnings

import jax

from speccascade.backends.base import Backend, Entry, entry_of, View
from speccascade.backends.cpu import CPU
from speccascade.backends.gpu import GPU
from speccascade.backends.limits import memory
from speccascade.backends.tpu import TPU
from speccascade.traced import Setting

__all__ = ['Backend', 'CPU', 'Entry', 'GPU', 'TPU', 'View', 'current', 'entry_of', 'known', 'memory', 'named',
           'of', 'prepared', 'use']  # fmt: skip

_PLATFORMS = {'cpu': CPU(), 'gpu': GPU(), 'cuda': GPU(), 'rocm': GPU(), 'tpu': TPU()}
_BACKEND: Setting[Backend] = Setting('backend')
use = _BACKEND.use  # trace for this backend


def named(platform: str) -> Backend:
  """Return the backend of a platform as JAX names it, plain XLA for one without its own."""
  return _PLATFORMS.get(platform, Backend())


def of(params) -> Backend:
  """Return the backend of the devices on which the first array of a tree lies; JAX's default for numpy's."""
  for x in jax.tree.leaves(params):
    if isinstance(x, jax.Array):
      backend = named(next(iter(x.devices())).platform)
      return backend if len(x.devices()) == 1 else backend.on_mesh()
  return named(jax.default_backend())


def prepared(models: Sequence, idle: Collection[int] = ()) -> tuple[Backend, tuple]:
  """Return the backend of models that run together, and the parameters it computes with, of idle ones None."""
  backend = of([m.params for m in models])
  return backend, tuple(None if i in idle else backend.prepare(m.params) for i, m in enumerate(models))


@functools.cache
def known(options: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
  """Return options of XLA, or none where this machine's compiler refuses them."""
  try:
    jax.jit(lambda: 0, compiler_options=dict(options)).lower().compile()
  except jax.errors.JaxRuntimeError as error:
    warnings.warn(f'decoding is compiled without {dict(options)}: {str(error).splitlines()[0]}', stacklevel=2)
    return ()
  return options


def current() -> Backend:
  """Return the backend that is traced for, plain XLA where none is in use."""
  return _BACKEND.current() or Backend()
