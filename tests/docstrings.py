"""What the docstrings of plug-ins show, so that one that has an example is tested without a row of its own."""

import ast
import doctest
import functools
import inspect

import jax.numpy as jnp
import numpy as np

from speccascade import acceptance, methods, rules, stopping
from speccascade.sv import predictors, verification

NAMES = dict(
  functools=functools,
  jnp=jnp,
  np=np,
  acceptance=acceptance,
  methods=methods,
  predictors=predictors,
  rules=rules,
  stopping=stopping,
  verification=verification,
)


def calls(thing, module):
  """Return the calls of a function or class in the examples of its docstring, but those of what only the docs have."""
  found = []
  for example in doctest.DocTestParser().get_examples(thing.__doc__):
    for node in ast.walk(ast.parse(example.source)):
      if isinstance(node, ast.Call) and ast.unparse(node.func) == f'{module}.{thing.__name__}':
        try:
          args, given = eval(
            ast.unparse(ast.Call(ast.Name('_given'), node.args, node.keywords)), NAMES | {'_given': _given}
          )
        except NameError:  # a measured profile or plan
          continue
        found.append(functools.partial(thing, **inspect.signature(thing).bind(*args, **given).arguments))
  return found


def _given(*args, **keywords):
  return args, keywords


def of_methods():
  """Return the methods of the package that the examples make, as functions without an argument."""
  return [make for maker in methods.known().values() for make in calls(maker, 'methods')]


def of_class(thing, module):
  """Return an instance of a policy or an acceptor: as its example has it, or without arguments."""
  return next(iter(calls(thing, module)), thing)()
