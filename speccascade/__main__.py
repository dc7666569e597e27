"""The commands of this package; each has its own --help."""

import argparse
import ast
from collections.abc import Sequence
from pathlib import Path
import sys

from speccascade import __version__
from speccascade.host import commands

COMMANDS = (
  'run',
  'calibrate',
  'figure',
  'decode',
  'plan',
  'check',
  'compile',
  'convert',
  'train',
  'integrations.lm_eval',
)


def main(argv: Sequence[str] | None = None) -> int:
  """List the commands; return the exit code."""
  parser = commands.Parser('speccascade', __doc__)
  parser.add_argument('--version', action='version', version=__version__)
  return commands.run(parser, _list, argv, 'interrupted')


def _list(args: argparse.Namespace):
  """Print each command with the first line of its docstring, which is read without importing it."""
  wide = max(map(len, COMMANDS))
  for name in COMMANDS:
    path = Path(__file__).parent.joinpath(*name.split('.'))
    file = path / '__main__.py' if path.is_dir() else path.with_suffix('.py')
    doc = ast.get_docstring(ast.parse(file.read_text(encoding='utf-8')))
    print(f'python -m speccascade.{name:<{wide}}  {doc.splitlines()[0]}')


if __name__ == '__main__':
  sys.exit(main())
