"""Rules and combiners with their numbers: bound as traced leaves of a pytree, and checked."""

from collections.abc import Callable
import functools
import inspect

from jax import tree_util
import numpy as np

from speccascade import sampling
from speccascade.rules.base import CombinerFacts, declaration, inside, name_of, Range
from speccascade.types import Combiner, Rule

_LARGEST = float(np.finfo(np.float32).max)
EXAMPLE = 'functools.partial(rules.opt, alpha=0.1)'


def bind(function: Callable, **numbers) -> tree_util.Partial:
  """Return `function` as a pytree: keyword numbers become traced leaves, so changing them compiles nothing.

  Rules may be among them.
  """
  while isinstance(function, functools.partial):  # jax.tree_util.Partial is one too
    if function.args:
      raise ValueError(f'{name_of(function)}: bind values by keyword, as in {EXAMPLE}.')
    function, numbers = function.func, {**function.keywords, **numbers}
  if not callable(function) or inspect.isclass(function):
    raise ValueError(f'{function!r} is not a function; give one with its values bound, as in {EXAMPLE}.')
  numbers = {name: bind_rule(value) if callable(value) else value for name, value in numbers.items()}
  for name, value in numbers.items():
    if value is None or any(isinstance(x, (str, bool, complex)) for x in tree_util.tree_leaves(value)):
      raise ValueError(
        f'{name_of(function)} needs a number for {name}, not {name}={value!s}: only numbers and arrays can be bound; '
        'write anything else into the function.'
      )
    if any(isinstance(x, int | float) and _overflows(x) for x in tree_util.tree_leaves(value)):
      raise ValueError(f'{name_of(function)} has {name}={value!s:.40}, beyond float32; give a number of at most 3e38.')
  return tree_util.Partial(function, **tree_util.tree_map(sampling.traced, numbers))


def _overflows(x: float) -> bool:
  """Tell whether a finite number is none as float32, which programs compute with."""
  return abs(x) > _LARGEST and abs(x) != float('inf')


def bind_rule(rule: Rule) -> tree_util.Partial:
  """Bind a rule and check its α: every value that the rule needs is given and in range."""
  bound = bind(rule)
  facts = _declared(bound)
  if not facts.is_rule:
    raise ValueError(f'{name_of(rule)} is a combiner, not a rule of two models; give it to cos or ensemble.')
  low, high, *_ = facts.alpha or Range()
  alpha = bound.keywords.get('alpha', low)
  if isinstance(alpha, (float, np.floating)) and not low <= alpha <= high:
    raise ValueError(f'rule {name_of(rule)} needs {low} <= alpha <= {high}, not alpha={alpha!s}.')
  return bound


def bind_combiner(combiner: Combiner | Rule) -> tree_util.Partial:
  """Bind a combiner, or a rule, which cascades the models; check its values."""
  bound = bind(combiner)
  facts = _declared(bound)
  if facts.is_rule:
    return bind_rule(bound)
  for name, value in bound.keywords.items():
    if isinstance(value, np.floating) and not np.isfinite(value):
      raise ValueError(f'{name_of(combiner)} needs a finite {name}, not {value}.')
  if facts.check is not None:
    try:
      facts.check(**bound.keywords)
    except ValueError as error:
      raise ValueError(f'{name_of(combiner)} {error}') from None
  return bound


def models_of(bound: tree_util.Partial) -> int | None:
  """Return how many models a bound combiner takes; None: any number."""
  models = declaration(bound).models
  return models(*bound.keywords.values()) if callable(models) else models


def _declared(bound: tree_util.Partial) -> CombinerFacts:
  """Return the declaration of a function, having refused unknown, missing and old-fashioned arguments."""
  parameters = inspect.signature(inside(bound)).parameters
  if strange := [name for name in ('sampler', 'rest') if name in parameters and name not in bound.keywords]:
    raise ValueError(
      f'{name_of(bound)} takes {strange[0]}, but a rule reads predictions: write def {name_of(bound)}(q, p, *, alpha), '
      'with q.logits for q_logits and q.probs for sampler(q_logits); a combiner is a function of a list of them.'
    )
  if unknown := bound.keywords.keys() - parameters.keys():
    raise ValueError(
      f'{name_of(bound)} has no argument {", ".join(sorted(unknown))}; it takes {", ".join(parameters)}.'
    )
  for name, parameter in parameters.items():
    keyword_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
    if keyword_only and parameter.default is parameter.empty and name not in bound.keywords:
      of = name_of(bound)
      raise ValueError(
        f'{of} needs a value for {name}: functools.partial({of}, {name}=…) in Python, {of}({name}=…) in a config, '
        f'{of}:VALUE after --rule.'
      )
  return declaration(bound)
