"""Check a rule, a combiner or a method of one's own on toy models, in seconds.

  python -m speccascade.check my_rules:mine --alpha 0 0.3 0.7

`my_rules` is a module of the current folder or an installed one; `mine` a function in it, or a method.
"""

import argparse
from collections.abc import Sequence
import importlib
import os
import sys
from typing import Any

from speccascade.check import enumeration
from speccascade.host import commands


def main(argv: Sequence[str] | None = None) -> int:
  """Check and print the findings; return the exit code, 1 where something is wrong."""
  return commands.run(_parser(), _run, argv, 'interrupted')


def _parser() -> commands.Parser:
  parser = commands.Parser('speccascade.check', __doc__)
  parser.add_argument('what', metavar='MODULE:NAME', help='as in my_rules:mine or speccascade.rules:opt')
  parser.add_argument('--alpha', type=float, nargs='+', help='values of alpha to try (some of 0 … 0.9)')
  return parser


def _run(args: argparse.Namespace) -> int:
  report = enumeration.check(_result(args.what), args.alpha, progress=True)
  print(report)
  return 0 if report.ok else 1


def _result(what: str) -> Any:
  """Return what a module calls by a name."""
  module, _, name = what.partition(':')
  if not module or not name:
    raise ValueError(f'{what!r} names nothing; write MODULE:NAME, as in my_rules:mine.')
  if os.getcwd() not in sys.path:
    sys.path.insert(0, os.getcwd())
  try:
    result = importlib.import_module(module)
  except ImportError as error:
    raise ValueError(
      f'{module} cannot be imported ({error}); its folder must be {os.getcwd()} or on sys.path.'
    ) from error
  if not hasattr(result, name):
    raise ValueError(f'{module} ({result.__file__}) has no {name}.')
  return getattr(result, name)


if __name__ == '__main__':
  sys.exit(main())
