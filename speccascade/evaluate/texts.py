"""Curves by texts, which are spelled as `host.names` has it.

A text is a suite, 'target only', 'draft only', or what has a name: a rule, for `methods.speculative`, or a method. Its
arguments are those of the method and of its rule. The one that is a list varies; where none is, α does, over the values
that the rule declares for a curve. `name` is the name in results; without one that is the rule's label, with the
arguments that are not the defaults, or the text::

  'cascades'  'cascades(block=3)'                       a suite, a function of `evaluate.suites`
  'opt'  'opt:0.1'  'opt(alpha=[0.0, 0.3], block=7)'    a rule
  'my_rules:mine(alpha=[0.1, 0.3])'                     one of yours
  'speculative(block=[3, 5, 7], policy=Heuristic())'    a method
  "cos(combiner=weighted, weights=(0.5, 0.5), blocks=[(5, 1), (1, 1)], name='CoS')"
"""

from collections.abc import Callable, Iterator, Mapping
import functools
import inspect
import re
from types import MappingProxyType
from typing import Any

from speccascade import acceptance, methods, rules, stopping
from speccascade.evaluate import plugins, suites
from speccascade.evaluate.curves import Curve
from speccascade.host import names
from speccascade.sv import verification


def flat(given: Any, named: set[str] | None = None) -> Iterator[Any]:
  """Yield the curves of curves, texts, rules and lists of them; 'target only' as it is, what is none of them too.

  A curve that several texts name is there once.
  """
  named = set() if named is None else named
  if isinstance(given, list | tuple):
    for some in given:
      yield from flat(some, named)
  elif isinstance(given, str):
    found = suites.TARGET if given.strip() == suites.TARGET else find(given)
    if isinstance(found, list | tuple):
      yield from flat(found, named)
    elif (key := _decodes(found)) not in named:
      named.add(key)
      yield found
  elif inspect.isfunction(given) and not inspect.isclass(inspect.unwrap(given)):
    yield curve(*plugins.resolve(given), rules.name_of(given))
  else:
    yield given


def find(text: str) -> Curve | list:
  """Return the curve that a text names, or the texts of a suite.

  Raises:
    ValueError: The text names none, or what it names does not take its arguments.
  """
  if text.strip() == suites.DRAFT:
    return Curve(suites.DRAFT, methods.autoregressive, settings={'model': 0})
  known = rules.known() | methods.known() | suites.known()
  parts = rules.known() | stopping.known() | acceptance.known() | verification.known()
  named = names.find(text, 'curve', known, parts)
  if isinstance(named.value, Curve | list | tuple):
    return named.value
  if isinstance(named.value, type):
    raise ValueError(f'{text!r} names the class {named.name}, no rule, method or suite; name a function.')
  if named.value in suites.known().values():
    return named.call(**plugins.bound(named.value) | named.arguments)
  value = rules.find(text) if named.short else named.value
  return curve(value, named.arguments, re.sub(r'[A-Za-z_][\w.]*:(?=[A-Za-z_])', '', text.strip()))


def curve(value: Callable, arguments: Mapping[str, Any], text: str) -> Curve:
  """Return the curve of a rule or a method with arguments of both, called by its text unless they name it."""
  given = dict(arguments)
  name = given.pop('name', None)
  method, rule = (methods.speculative, value) if _is_rule(value) else (value, None)
  first = next(iter(inspect.signature(method).parameters), None)
  if rule is None and first in ('rule', 'combiner') and callable(given.get(first)):
    rule = given.pop(first)
  numbers = [] if rule is None else rules.numbers_of(rule)
  takes = dict.fromkeys([*numbers, *(key for key in plugins.keywords(method) if rule is None or key != first), 'name'])
  for key in given:
    if key not in takes:
      raise ValueError(f'{text} has no argument {key}{names.meant(key, takes) or "."} It takes {", ".join(takes)}.')
  varied = [key for key, x in given.items() if isinstance(x, list)]
  if len(varied) > 1:
    raise ValueError(f'{text}: {" and ".join(varied)} are lists, and one value varies; write a text for each.')
  settings = plugins.bound(method) | {key: x for key, x in given.items() if key not in numbers}
  own = {}
  if rule is not None:
    bound = plugins.bound(rules.inside(rule)) | names.arguments(rule)
    own = bound | {key: x for key, x in given.items() if key in numbers}
    varied = varied or _declared(rule, own, text)
  parameter = varied[0] if varied else None
  values = next((x.pop(parameter) for x in (own, settings) if parameter in x), (None,))
  if name is None and rule is not None and (parameter == 'alpha' or not numbers):
    name = _label(method, rule, settings, own)
  name = name or re.sub(r'\(\s*,\s*', '(', re.sub(rf',?\s*\b{parameter}\s*=\s*\[.*?\]', '', text)).removesuffix('()')
  first = rule and functools.partial(rules.inside(rule), **own)
  return Curve(name, functools.partial(method, **settings), first, parameter, values)


def _label(method: Callable, rule: Callable, settings: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
  """Return what reports call a rule in a method, and in parentheses the arguments that are not the defaults."""
  label = rules.declaration(rule).labels.get(rules.name_of(method))
  bound = plugins.bound(method) | plugins.bound(rules.inside(rule)) | names.arguments(rule)
  given = _other(method, settings, plugins.bound(method)) | _other(rules.inside(rule), own, bound)
  if label is None or not given:
    return label
  return f'{label} ({", ".join(f"{key}={plugins.described(x)}" for key, x in given.items())})'


def _other(function: Callable, settings: Mapping[str, Any], bound: Mapping[str, Any] = MappingProxyType({})) -> dict:
  """Return the settings that are not what the function, or the config, has without them."""
  usual = {name: p.default for name, p in inspect.signature(function).parameters.items()} | dict(bound)
  return {key: x for key, x in settings.items() if plugins.described(x) != plugins.described(usual.get(key))}


def _decodes(curve: Curve | str) -> str:
  """Return the curve as text without the settings that are the defaults."""
  if isinstance(curve, str):
    return curve
  settings = plugins.described(_other(curve.method, curve.settings))
  own = rules.name_of(curve.rule) + plugins.described(curve.rule_settings) if curve.rule else ''
  return f'{curve.name}: {rules.name_of(curve.method)}{settings} of {own}, {curve.parameter} in {list(curve.values)}'


def _is_rule(value: Callable) -> bool:
  """Tell whether a value is a rule, or a combiner of the package, and no method."""
  if (function := rules.inside(value)) in methods.known().values():
    return False
  try:
    return rules.declaration(function).is_rule or function in rules.known().values()
  except ValueError:
    return False


def _declared(rule: Callable, own: dict[str, Any], text: str) -> list[str]:
  """Let α vary, where a rule takes it and it is not given, over the values that the rule declares for a curve."""
  if 'alpha' not in rules.numbers_of(rule) or 'alpha' in own:
    return []
  declared = rules.declaration(rule).alpha
  if declared is None or not declared.curve:
    raise ValueError(
      f'{text}: {rules.name_of(rule)} declares no values of alpha for a curve; give some, as in alpha=[0.1, 0.3, 0.5].'
    )
  own['alpha'] = declared.curve
  return ['alpha']
