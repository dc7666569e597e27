"""The names of rules and combiners; `host.names` says how they are spelled."""

import functools
from typing import Any

import numpy as np

from speccascade.host import names
from speccascade.rules import cascades, combiners, lossy_decoding
from speccascade.rules.base import declaration, inside, name_of, numbers_of
from speccascade.types import Combiner, Rule


def _known() -> dict[str, Rule | Combiner]:
  """Return the rules and combiners that the package declares, by name."""
  things = [thing for module in (cascades, lossy_decoding, combiners) for thing in vars(module).values()]
  return {name_of(x): x for x in things if hasattr(x, 'declaration') and x is not combiners.own}


def _made(named: names.Named) -> Rule | Combiner:
  """Return a rule or combiner with its numbers bound."""
  declaration(named.value)  # raises for what is neither a rule nor a combiner
  numbers = named.arguments or _short(named.value, named.short)
  return functools.partial(named.value, **numbers) if numbers else named.value


def _short(function: Rule | Combiner, values: list[Any]) -> dict[str, Any]:
  """Return the first number, or numbers, that a function takes."""
  if not values:
    return {}
  takes = numbers_of(function)
  if not takes:
    raise ValueError(f'{name_of(function)} takes no number')
  many = callable(declaration(function).models)  # a number for each model
  if len(values) > 1 and not many:
    raise ValueError(f'{name_of(function)} takes one number, {takes[0]}')
  return {takes[0]: tuple(map(float, values)) if many else float(values[0])}


def _text_of(rule: Rule | Combiner) -> str:
  """Return the text of a rule or combiner, the first number or numbers alone as a shell takes them without quotes."""
  function = inside(rule)
  name = name_of(function)
  if _known().get(name) is not function:
    name = f'{function.__module__}:{name}'
  numbers = rule.keywords if isinstance(rule, functools.partial) else {}
  if numbers and list(numbers) == numbers_of(function)[:1]:
    return f'{name}:{",".join(map(str, np.ravel(list(numbers.values()))))}'
  given = ', '.join(f'{key}={_text_of(x) if callable(x) else np.asarray(x).tolist()}' for key, x in numbers.items())
  return f'{name}({given})' if given else name


_RULES = names.Catalogue('rule', _known, _known, _made, _text_of)
known, find, spelled = _RULES.known, _RULES.find, _RULES.spelled
