"""The error of commands, what any error says and where it arose, and hints for arguments by names of other packages."""

from collections.abc import Callable
import functools
from pathlib import Path
import traceback


class RunError(RuntimeError):
  """An error that a user can fix; its message is one line."""


def first_line(error: BaseException, named: bool = False) -> str:
  """Return the first line of an error's text, which may follow the name of its class; without a text, that name."""
  name = type(error).__name__
  lines = str(error).strip().splitlines()
  return name if not lines else f'{name}: {lines[0]}' if named else lines[0]


def line_of(error: BaseException) -> str:
  """Return the last line of code outside this package and its libraries that led to an error, if there is one."""
  elsewhere = str(Path(__file__).parents[1]), 'site-packages', 'dist-packages', '<'
  for frame in reversed(traceback.extract_tb(error.__traceback__)):
    if not any(part in frame.filename for part in elsewhere):
      return f' at {Path(frame.filename).name}:{frame.lineno} ({frame.line})'
  return ''


def out_of_memory(error: BaseException) -> bool:
  """Return whether an error of XLA is that a device's memory does not suffice."""
  return any(sign in str(error) for sign in ('RESOURCE_EXHAUSTED', 'Out of memory', 'Ran out of memory'))


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

    return call

  return decorate
