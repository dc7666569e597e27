"""What an experiment compares: curves of points in which one value of a method or its rule varies."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import json
from typing import Any

import numpy as np

from speccascade import methods, rules
from speccascade.engine.method import Strategy
from speccascade.evaluate import plugins


@dataclasses.dataclass(frozen=True)
class Point:
  """One method with one value of its parameter."""

  curve: 'Curve'
  value: Any

  @property
  def key(self) -> tuple[str, Any]:
    """The curve's name and the value as JSON has it."""
    return self.curve.name, json.loads(json.dumps(self.value))

  @property
  def name(self) -> tuple[str, str]:
    """The key as texts, by which a point is looked up."""
    curve, value = self.key
    return curve, str(value)

  @property
  def about(self) -> dict[str, Any]:
    """The columns of results that name a point."""
    curve, value = self.key
    return dict(curve=curve, parameter=self.curve.parameter, value=value)

  @property
  def label(self) -> str:
    """The curve's name and the setting, for people."""
    return self.curve.name if self.value is None else f'{self.curve.name} {self.curve.parameter}={self.value}'

  @property
  def plan(self) -> Any:
    """The plan that the method decodes by, or the path of one; None where it needs none."""
    return {**self.curve.settings, self.curve.parameter: self.value}.get('plan')

  def build(self) -> Strategy:
    """Return the method of this point."""
    return self.curve.build(self.value)


@dataclasses.dataclass(frozen=True)
class Curve:
  """A method, the rule or combiner that it takes first, and the parameter of either that varies.

  A config may also bind arguments on the functions themselves.

  Attributes:
    name: The name in results.
    method: A function of `speccascade.methods`, or one like them.
    rule: The first argument of the method, if it takes one.
    parameter: What varies: a parameter of the rule, or else of the method; None: nothing.
    values: The values of the parameter, a point each: numbers, texts, or tuples of them.
    settings: Arguments of the method.
    rule_settings: Arguments of the rule.
  """

  name: str
  method: Callable
  rule: Callable | None = None
  parameter: str | None = None
  values: Sequence[Any] = (None,)
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  rule_settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if not isinstance(self.name, str) or not self.name:
      raise ValueError(f'Curve: name={self.name!r} is not a text.')
    method, bound = self._plug('method', self.method)
    settings = _merged(self, 'settings', bound, self.settings)
    rule = None
    rule_settings = {}
    if self.rule is not None:
      rule, bound = self._plug('rule', self.rule)
      rule_settings = _merged(self, 'rule_settings', bound, self.rule_settings)
    elif self.rule_settings:
      raise ValueError(f'{self.name}: rule_settings={dict(self.rule_settings)} without a rule.')
    if isinstance(self.values, (str, bytes)) or not isinstance(self.values, Sequence):
      raise ValueError(f'{self.name}: values={self.values!r} is not a list; write [{self.values!r}].')
    values = tuple(map(_of_python, self.values))
    new = dict(method=method, rule=rule, values=values, settings=settings, rule_settings=rule_settings)
    for name, value in new.items():
      object.__setattr__(self, name, value)
    self._check()

  def _plug(self, name: str, function: Any) -> tuple[Callable, dict]:
    if isinstance(function, str):
      function = {'method': methods.find, 'rule': rules.find}[name](function)
    if isinstance(function, functools.partial):
      if function.args:
        raise ValueError(f'{self.name}: bind values of the {name} by keyword.')
      return function.func, dict(function.keywords)
    if not callable(function):
      raise ValueError(
        f'{self.name}: {name}={function!r} is no {name}; write its name as a text, or @{name}s.NAME without ().'
      )
    return plugins.resolve(function)

  def _check(self):
    """Refuse what could only be ignored: unknown names, values without a parameter, the same value twice."""
    takes = plugins.keywords(self.method)
    owners = {'settings': (self.settings, takes, self.method)}
    if self.rule is not None:
      owners['rule_settings'] = self.rule_settings, self._rule_takes(), self.rule
    for name, (given, known, function) in owners.items():
      for key in given:
        if key not in known:
          raise ValueError(
            f'{self.name}: {name} has {key}, but {rules.name_of(function)} takes {", ".join(known) or "nothing"}.'
          )
    for value in self.values:
      try:
        json.dumps(value, allow_nan=False)
      except (TypeError, ValueError):
        raise ValueError(
          f'{self.name}: values has {value!r}, which results cannot hold; give finite numbers or texts, and each '
          'function a curve of its own.'
        ) from None
    if not self.values:
      raise ValueError(f'{self.name} has no values; leave values out, or give one at least.')
    if self.parameter is None:
      if self.values != (None,):
        raise ValueError(f'{self.name} has values={self.values} but no parameter; name what they are values of.')
      return
    if self.parameter not in (*takes, *self._rule_takes()):
      rule = '' if self.rule is None else f', its rule {rules.name_of(self.rule)} {", ".join(self._rule_takes())}'
      raise ValueError(
        f'{self.name}: nothing has the parameter {self.parameter}: {rules.name_of(self.method)} takes '
        f'{", ".join(takes)}{rule}.'
      )
    if self.parameter in (self.rule_settings if self.of_rule else self.settings):
      raise ValueError(f'{self.name}: {self.parameter} is both the parameter that varies and a setting; drop one.')
    if None in self.values or len(set(map(repr, self.values))) < len(self.values):
      raise ValueError(f'{self.name}: values={self.values} must be different from each other, and none of them None.')

  def _rule_takes(self) -> list[str]:
    """Return the rule's own parameters, without those that the loop binds."""
    return [] if self.rule is None else rules.numbers_of(self.rule)

  @property
  def of_rule(self) -> bool:
    """Whether the parameter that varies is the rule's."""
    return self.parameter in self._rule_takes()

  def points(self) -> list[Point]:
    """Return one point for each value."""
    return [Point(self, value) for value in self.values]

  def build(self, value: Any = None) -> Strategy:
    """Return the method with the parameter at this value; a value out of range raises."""
    varied = {} if self.parameter is None else {self.parameter: value}
    rule_settings = {**self.rule_settings, **varied} if self.of_rule else self.rule_settings
    settings = dict(self.settings) if self.of_rule else {**self.settings, **varied}
    first = [] if self.rule is None else [functools.partial(self.rule, **rule_settings) if rule_settings else self.rule]
    try:
      return self.method(*first, **settings)
    except (TypeError, ValueError) as error:
      raise ValueError(f'{self.name}{"" if value is None else f", {self.parameter}={value}"}: {error}') from error

  def __str__(self):
    """Return the curve as it runs, with every binding in it."""
    parts = [rules.name_of(self.method) + _arguments(self.settings)]
    if self.rule is not None:
      parts.append(rules.name_of(self.rule) + _arguments(self.rule_settings))
    varied = '' if self.parameter is None else f', {self.parameter} in {list(self.values)}'
    return f'{self.name}: {" of ".join(parts)}{varied}'


def _of_python(value: Any) -> Any:
  """Return a value with numpy's numbers as Python's, and lists as tuples."""
  if isinstance(value, np.generic | np.ndarray):
    value = value.tolist()
  return tuple(map(_of_python, value)) if isinstance(value, list | tuple) else value


def _merged(curve: Curve, name: str, bound: dict, given: Any) -> dict:
  """Return settings of both kinds, refusing two values for one name."""
  if not isinstance(given, Mapping):
    raise ValueError(f'{curve.name}: {name}={given!r} is not a dict of names and values.')
  given = {key: plugins.plain(value) for key, value in given.items()}
  same = plugins.described
  if twice := [key for key in bound.keys() & given.keys() if same(bound[key]) != same(given[key])]:
    raise ValueError(f'{curve.name}: {", ".join(sorted(twice))} is bound on the function and in {name}; drop one.')
  return bound | given


def _arguments(settings: Mapping[str, Any]) -> str:
  return f'({", ".join(f"{k}={plugins.described(v)}" for k, v in sorted(settings.items()))})'
