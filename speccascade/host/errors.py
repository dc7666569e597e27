"""The error of the commands, and arguments by the name that they have elsewhere."""

from collections.abc import Callable
import functools
import inspect


class RunError(RuntimeError):
  """What a user has to put right, said in one line."""


def known_as(name: str, **words: str) -> Callable:
  """Let a function, `name` to its users, say how it is asked for what other packages have arguments for."""

  def decorate(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args, **given):
      for word in given.keys() & words.keys():
        raise ValueError(f'{name} has no argument {word}: write {words[word]}.')
      return function(*args, **given)

    call.__signature__ = inspect.signature(function)  # which gin reads
    return call

  return decorate
