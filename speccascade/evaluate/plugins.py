"""Functions that a config hands over by name: `@rules.opt` gives gin's wrapper, and the loop wants the function.

A rule's identity decides the program (plain speculative decoding has a bonus token), so the wrapper is taken off. What
the config binds on the function is returned with it, never dropped.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import inspect
import sys
from typing import Any

import jax
import numpy as np

from speccascade import rules
from speccascade.host import storage


def resolve(function: Callable) -> tuple[Callable, dict[str, Any]]:
  """Return the function inside gin's wrapper and the values that the config binds on it, scopes included."""
  gin = sys.modules.get('gin')
  known = gin and gin.config._inverse_lookup(function, allow_decorators=True)
  if not known or inspect.isclass(known.wrapped):
    return function, {}
  references = gin.config.iterate_references(gin.config._CONFIG)
  scopes = next((x.scopes for x in references if x.scoped_configurable_fn is function), [])
  with gin.config_scope(scopes or gin.current_scope()):
    return known.wrapped, bound(known.wrapped)


def bound(thing: Callable) -> dict[str, Any]:
  """Return the values that the config binds on a function or a class that a text names; they count as used."""
  gin = sys.modules.get('gin')
  known = gin and gin.config._inverse_lookup(thing)
  if not known:
    return {}
  values = gin.get_bindings(known.wrapped)
  gin.config._OPERATIVE_CONFIG.setdefault((gin.current_scope_str(), known.selector), {}).update(values)
  return {name: plain(value) for name, value in values.items()}


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


def described(value: Any) -> str:
  """Return a value as text that is the same in every process: functions by name, with what is bound to them."""
  if isinstance(value, functools.partial):
    bound = [*map(described, value.args), *(f'{k}={described(v)}' for k, v in sorted(value.keywords.items()))]
    return f'{described(value.func)}({", ".join(bound)})'
  if isinstance(value, Mapping):
    return '{' + ', '.join(f'{k!r}: {described(v)}' for k, v in value.items()) + '}'
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    fields = [f for f in dataclasses.fields(value) if f.repr]
    return f'{type(value).__name__}({", ".join(f"{f.name}={described(getattr(value, f.name))}" for f in fields)})'
  arrays = [x for x in jax.tree.leaves(value) if isinstance(x, np.ndarray)]
  if arrays:  # what was learned
    return f'arrays {storage.digest(b"".join(x.tobytes() for x in arrays))}'
  if isinstance(value, list | tuple):
    ends = '[]' if isinstance(value, list) else '()'
    comma = ',' if len(value) == 1 and isinstance(value, tuple) else ''
    return f'{ends[0]}{", ".join(map(described, value))}{comma}{ends[1]}'
  named = callable(value) and hasattr(value, '__name__') or type(value).__repr__ is object.__repr__
  return rules.name_of(value) if named else repr(value)


def keywords(function: Callable) -> list[str]:
  """Return the names that a function can be given by keyword."""
  kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
  return [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]
