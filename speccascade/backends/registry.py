"""Which backend a platform has: each backend's own file says it, and `use` replaces all for a while."""

from collections.abc import Callable, Iterator
import contextlib
import functools
import inspect
from typing import Any

from speccascade.backends.base import Backend

OF_PLATFORM: dict[str, Backend] = {}
_USED: list[Backend] = []  # those of `use`, the last in use


def register(platform: str, backend: Backend):
  """Compile the programs of a platform for this backend.

  Args:
    platform: The platform as JAX names it, such as 'gpu'.
    backend: An instance of a subclass of `Backend`.

  Raises:
    ValueError: it is no backend, cannot be hashed, or has methods that are not called as those of `Backend` are.
  """
  OF_PLATFORM[platform] = _checked(backend)


def backend(*platforms: str) -> Callable[[type[Backend]], type[Backend]]:
  """Declare a class as the backend of platforms, as JAX names them."""

  def declare(kind: type[Backend]) -> type[Backend]:
    for platform in platforms:
      register(platform, kind())
    return kind

  return declare


def by_name() -> dict[str, Backend]:
  """Return each backend by the first of its platforms."""
  first = {backend: platform for platform, backend in reversed(OF_PLATFORM.items())}
  return {platform: backend for backend, platform in reversed(first.items())}


@contextlib.contextmanager
def use(backend: Backend) -> Iterator[None]:
  """Compile the programs of this process for this backend, whatever the device.

  Args:
    backend: An instance of a subclass of `Backend`.

  Raises:
    ValueError: as `register` does.
  """
  used = _checked(backend)
  _USED.append(used)
  try:
    yield
  finally:
    last = max(i for i, other in enumerate(_USED) if other is used)  # another thread may use one, too
    del _USED[last]


def named(platform: str) -> Backend:
  """Return the backend in use or that of a platform as JAX names it, plain XLA for one without its own."""
  return _USED[-1] if _USED else OF_PLATFORM.get(platform, Backend())


def _checked(backend: Any) -> Backend:
  """Return a backend, having checked that it is one, may be static in a program, and is called as the base is."""
  if not isinstance(backend, Backend):
    made = f', as {backend.__name__}()' if isinstance(backend, type) else ''
    raise ValueError(f'{backend!r} is not a backend: give an instance of a subclass of backends.Backend{made}.')
  try:
    hash(backend)
  except TypeError as error:
    name = type(backend).__name__
    raise ValueError(
      f'{name} is a static part of a program and cannot be hashed ({error}): give it no arrays.'
    ) from None
  _check_methods(type(backend))
  return backend


@functools.cache
def _check_methods(kind: type[Backend]):
  """Refuse a class of which a method cannot be called as that of the base is."""
  for name, of_base in inspect.getmembers(Backend, inspect.isfunction):
    if name.startswith('_'):
      continue
    base = inspect.signature(of_base)
    signature = inspect.signature(getattr(kind, name))
    by_name = {p.name: None for p in base.parameters.values() if p.kind is p.KEYWORD_ONLY}
    by_position = [p for p in base.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    try:
      signature.bind_partial(*by_position, **by_name)
    except TypeError:
      raise ValueError(f'{kind.__name__}.{name} takes {signature}, but it is called with {base}.') from None
