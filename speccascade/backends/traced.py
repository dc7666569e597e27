"""What a program is traced for, beside its arguments: one value of a kind at a time, in each thread its own."""

from collections.abc import Callable, Iterator
import contextlib
import contextvars
from typing import Generic, TypeVar

T = TypeVar('T')


class Setting(Generic[T]):
  """A value that is in use inside `use`, None outside."""

  def __init__(self, name: str):
    self._value: contextvars.ContextVar[T | None] = contextvars.ContextVar(name, default=None)

  def current(self) -> T | None:
    """Return the value in use."""
    return self._value.get()

  @contextlib.contextmanager
  def use(self, value: T | None) -> Iterator[None]:
    """Trace with this value."""
    token = self._value.set(value)
    try:
      yield
    finally:
      self._value.reset(token)


def carried(call: Callable) -> Callable:
  """Return a function that calls another with the settings of this thread, in whichever thread."""
  context = contextvars.copy_context()
  return lambda *args: context.copy().run(call, *args)
