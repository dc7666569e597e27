"""Check your own rule, combiner or method on toy models, in seconds.

  python -m speccascade.check my_rules:mine --alpha 0 0.3 0.7

`my_rules` is a module of the current folder or an installed one; `mine` is a rule or combiner in it, or a method.
Numbers of another name than alpha must be bound: `mine = functools.partial(geometric, power=0.5)`.
"""

import argparse
from collections.abc import Sequence
import importlib
import inspect
import os
import sys
from typing import Any

from speccascade import rules
from speccascade.check import enumeration
from speccascade.host import commands


def main(argv: Sequence[str] | None = None) -> int:
  """Check and print the report; return the exit code, 1 where something is wrong."""
  return commands.run(_parser(), _run, argv, 'interrupted')


def _parser() -> commands.Parser:
  parser = commands.Parser('speccascade.check', __doc__)
  parser.add_argument('what', metavar='MODULE:NAME', help='as in my_rules:mine or speccascade.rules:opt')
  parser.add_argument('--alpha', type=float, nargs='+', help='values of alpha to try (some of 0 … 0.9)')
  return parser


def _run(args: argparse.Namespace) -> int:
  report = enumeration.check(_value(args.what), args.alpha, progress=True)
  print(report)
  return 0 if report.ok else 1


def _value(what: str) -> Any:
  """Return the value of MODULE:NAME."""
  module, _, name = what.partition(':')
  if not module or not name:
    raise ValueError(f'{what!r} names nothing; write MODULE:NAME, as in my_rules:mine.')
  if os.getcwd() not in sys.path:
    sys.path.insert(0, os.getcwd())
  try:
    imported = importlib.import_module(module)
  except ImportError as error:
    raise ValueError(
      f'{module} cannot be imported ({error}); its folder must be {os.getcwd()} or on sys.path.'
    ) from error
  except Exception as error:  # the module runs, and may raise anything
    raise ValueError(
      f'{module} cannot be imported: {type(error).__name__}: {error}; run it by itself to see where.'
    ) from error
  if not hasattr(imported, name):
    raise ValueError(f'{module} ({imported.__file__}) has no {name}.')
  value = getattr(imported, name)
  if inspect.isfunction(value):
    rules.declaration(value)  # raises for what is neither a rule nor a combiner
  return value


if __name__ == '__main__':
  sys.exit(main())
