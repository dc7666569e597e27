"""The error of the commands, and hints for arguments by the names that other packages give them."""

from collections.abc import Callable
import functools
import inspect


class RunError(RuntimeError):
  """An error that a user can fix; its message is one line."""


def known_as(name: str, **words: str) -> Callable:
  """Return a decorator that answers arguments of other packages with the remedy in `words`.

  Args:
    name: The public name of the decorated function.
    **words: The remedy by the argument's name.
  """

  def decorate(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args, **given):
      for word in given.keys() & words.keys():
        raise ValueError(f'{name} has no argument {word}: write {words[word]}.')
      return function(*args, **given)

    call.__signature__ = inspect.signature(function)  # which gin reads
    return call

  return decorate
