"""The names of rules and combiners, spelled once for every command, config and plan.

opt:0.1  weighted:.5,.5          a name with the number that it takes, or the list
opt(alpha=0.1)                   a name with numbers by keyword
my_rules:mine:0.3                a function of a module of yours, with numbers in either form
"""

import ast
import contextlib
import functools
import importlib
import inspect
import os
import re
import sys
from typing import Any

import numpy as np

from speccascade.rules import cascades, combiners, lossy_decoding
from speccascade.rules.base import declaration, inside, name_of, numbers_of
from speccascade.types import Combiner, Rule

_NAME = re.compile(
  r'(?:(?P<module>[A-Za-z_][\w.]*):(?=[A-Za-z_]\w*(?:$|[:(])))?'  # what follows is a name, not a number such as nan
  r'(?P<name>[A-Za-z_]\w*)'
  r'(?:\((?P<given>.*)\)|:(?P<short>[^()]+))?'
)


def known() -> dict[str, Rule | Combiner]:
  """Return the rules and combiners that the package declares, by name."""
  things = [thing for module in (cascades, lossy_decoding, combiners) for thing in vars(module).values()]
  return {name_of(x): x for x in things if hasattr(x, 'declaration') and x is not combiners.own}


def find(text: str) -> Rule | Combiner:
  """Return the rule or combiner that a text names, with the numbers in it bound.

  Raises:
    ValueError: There is none of that name, or it does not take these numbers.
  """
  match = _NAME.fullmatch(text.strip())
  if match is None:
    raise ValueError(f'{text!r} names no rule; write NAME, NAME:NUMBER, NAME(alpha=0.1) or MODULE:NAME, as in opt:0.1')
  module, name, given, short = match.groups()
  if module in known():  # as in opt:nan
    module, name, short = None, module, name
  if module is not None:
    function = imported(module, name)
  elif name in known():
    function = known()[name]
  else:
    raise ValueError(f'no rule is called {name!r}; there are {", ".join(known())}, and MODULE:NAME of yours')
  declaration(function)  # raises for what is neither a rule nor a combiner
  numbers = _numbers(function, given, short)
  return functools.partial(function, **numbers) if numbers else function


def _numbers(function: Rule | Combiner, given: str | None, short: str | None) -> dict[str, Any]:
  """Return the numbers of NAME(given), or of NAME:short for the first that a function takes."""
  if given is not None:
    call = ast.parse(f'f({given})', mode='eval').body
    if call.args:
      raise ValueError(f'{name_of(function)} takes its numbers by name, as in {name_of(function)}(alpha=0.1)')
    return {keyword.arg: _number(keyword) for keyword in call.keywords}
  if short is None:
    return {}
  names = numbers_of(function)
  if not names:
    raise ValueError(f'{name_of(function)} takes no number')
  values = tuple(float(x) for x in short.split(','))
  many = callable(declaration(function).models)  # a number for each model
  if len(values) > 1 and not many:
    raise ValueError(f'{name_of(function)} takes one number, {names[0]}')
  return {names[0]: values if many else values[0]}


def _number(keyword: ast.keyword) -> Any:
  """Return the number, or the numbers, of a keyword."""
  try:
    return ast.literal_eval(keyword.value)
  except ValueError:
    raise ValueError(f'{ast.unparse(keyword)} gives no number, as {keyword.arg}=0.1 does') from None


def imported(module: str, name: str) -> Any:
  """Return the value of a name in a module of the current folder or an installed one."""
  if os.getcwd() not in sys.path:
    sys.path.insert(0, os.getcwd())
  try:
    found = importlib.import_module(module)
  except ImportError as error:
    raise ValueError(
      f'{module} cannot be imported ({error}); its folder must be {os.getcwd()} or on sys.path.'
    ) from error
  except Exception as error:  # the module runs, and may raise anything
    raise ValueError(
      f'{module} cannot be imported: {type(error).__name__}: {error}; run it by itself to see where.'
    ) from error
  if not hasattr(found, name):
    raise ValueError(f'{module} ({found.__file__}) has no {name}.')
  return getattr(found, name)


def spelled(rule: Rule | Combiner) -> str:
  """Return the text by which `find` returns a rule or combiner."""
  function = inside(rule)
  name = name_of(function)
  if known().get(name) is not function:
    name = f'{function.__module__}:{name}'
  numbers = rule.keywords if isinstance(rule, functools.partial) else {}
  if numbers and list(numbers) == numbers_of(function)[:1]:  # which a shell takes without quotes
    return f'{name}:{",".join(map(str, np.ravel(list(numbers.values()))))}'
  given = ', '.join(f'{key}={np.asarray(value).tolist()}' for key, value in numbers.items())
  return f'{name}({given})' if given else name


def source(rule: Rule | Combiner) -> str | None:
  """Return the source of a rule or combiner of a user's; None of the package's own, or of one that was typed in."""
  function = inside(rule)
  if function.__module__.startswith('speccascade.'):
    return None
  with contextlib.suppress(OSError, TypeError):
    return inspect.getsource(function)
