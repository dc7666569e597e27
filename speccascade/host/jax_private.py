"""What this package needs of JAX that has no public name there, in one place."""

from collections.abc import Callable
from typing import Any

from jax._src import compilation_cache, distributed, xla_bridge


def has_started() -> bool:
  """Tell whether JAX has started its backends."""
  return xla_bridge.backends_are_initialized()


def read_program() -> Callable[..., Any]:
  """Return the function by which JAX reads a program of its compilation cache."""
  return compilation_cache.get_executable_and_time


def read_programs_by(read: Callable[..., Any]) -> None:
  """Let JAX read the programs of its compilation cache by another function."""
  compilation_cache.get_executable_and_time = read


def group() -> Any:
  """Return the state of the processes that `jax.distributed` joined: `num_processes`, `process_id`, `client`.

  The client has a key-value store that waits with a limit, which collectives lack.
  """
  return distributed.global_state
