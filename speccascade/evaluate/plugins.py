"""Functions that a config hands over by name: `@rules.opt` gives gin's wrapper, and the loop wants the function.

A rule's identity decides the program (plain speculative decoding has a bonus token), so the wrapper is taken off. What
the config binds on the function is returned with it, never dropped.
"""

from collections.abc import Callable
import functools
import inspect
import sys
from typing import Any


def resolve(function: Callable) -> tuple[Callable, dict[str, Any]]:
  """Return the function inside gin's wrapper and the values that the config binds on it, scopes included."""
  gin = sys.modules.get('gin')
  known = gin and gin.config._inverse_lookup(function, allow_decorators=True)
  if not known:
    return function, {}
  scopes = []
  if function not in (known.wrapped, known.wrapper):
    scopes = inspect.getclosurevars(function).nonlocals.get('scope_components') or []
  if inspect.isclass(known.wrapped):
    return function, {}
  with gin.config_scope(scopes or gin.current_scope()):
    bound = gin.get_bindings(known.wrapped)
  return known.wrapped, {name: plain(value) for name, value in bound.items()}


def plain(value: Any) -> Any:
  """Return a value of a config with every function in it out of its wrapper."""
  if isinstance(value, (list, tuple)):
    return type(value)(plain(v) for v in value)
  if isinstance(value, dict):
    return {k: plain(v) for k, v in value.items()}
  if not inspect.isfunction(value):
    return value
  function, bound = resolve(value)
  if bound:
    return functools.partial(function, **bound)
  return function


def keywords(function: Callable) -> list[str]:
  """Return the names that a function can be given by keyword."""
  kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
  return [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]
