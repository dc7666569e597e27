"""Check your own rule, combiner or method on toy models, in seconds.

  python -m speccascade.check my_rules:mine --alpha 0 0.3 0.7

`my_rules` is a module of the current folder or an installed one; `mine` is a rule or combiner in it, or a method.
Numbers of another name than alpha must be bound: `mine = functools.partial(geometric, power=0.5)`.
"""

import argparse
from collections.abc import Sequence
import inspect
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
  """Return the value of MODULE:NAME, or the rule of another name."""
  module, colon, name = what.partition(':')
  if colon and module.replace('.', '_').isidentifier() and name.isidentifier():
    value = rules.imported(module, name)  # a rule, a combiner or a method
    if inspect.isfunction(value):
      rules.declaration(value)  # raises for what is neither a rule nor a combiner
    return value
  return rules.find(what)


if __name__ == '__main__':
  sys.exit(main())
