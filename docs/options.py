"""Tables of the options of commands and of the settings of a config, made of the code, for `conf.py`."""

import argparse
import dataclasses
import importlib
import inspect
from pathlib import Path
import re
from unittest import mock

import speccascade
from speccascade.host import commands

Row = tuple[str, str, str]  # name, default, meaning


def flags(command: str) -> tuple[str, list[Row]]:
  """Return what a command does, and its options; those that every command has are left out."""
  name = f'speccascade.{command}'
  is_folder = Path(speccascade.__file__).parent.joinpath(*command.split('.')).is_dir()
  module = importlib.import_module(f'{name}.__main__' if is_folder else name)
  parsers = []
  with mock.patch.object(commands, 'run', lambda parser, *_: parsers.append(parser) or 0):
    module.main([])
  shared = {action.dest for action in commands.Parser('', '')._actions}
  return module.__doc__.splitlines()[0], [_row(a) for a in parsers[0]._actions if a.dest not in shared]


def _row(action: argparse.Action) -> Row:
  name = max(action.option_strings, key=len, default=action.metavar or action.dest)
  is_flag = action.nargs == 0
  value = '' if is_flag or not action.option_strings else f' {action.metavar or action.dest.upper()}'
  default = '' if is_flag or action.default in (None, [], argparse.SUPPRESS) else str(action.default)
  return f'{name}{value}', default, (action.help or '').replace('%%', '%')


def settings(path: str, *others: str) -> tuple[str, list[Row]]:
  """Return what a class or function is, and its parameters, each with what its docstring or that of another says."""
  thing, *more = (getattr(importlib.import_module(p.rpartition('.')[0]), p.rpartition('.')[2]) for p in (path, *others))
  meanings: dict[str, str] = {}
  for doc in map(inspect.getdoc, (*more, thing)):
    listed = re.split(r'\n(?:Attributes|Args):\n', doc)[-1].split('\n\n')[0]
    entries = re.findall(r'^  (\w+): (.*(?:\n    .*)*)', listed, re.MULTILINE)
    meanings |= {name: ' '.join(text.split()) for name, text in entries}
  rows = []
  for name, parameter in inspect.signature(thing).parameters.items():
    default = parameter.default
    fields = {f.name: f for f in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else {}
    if name in fields and fields[name].default_factory is not dataclasses.MISSING:
      default = fields[name].default_factory()
    rows.append((name, '' if default is parameter.empty else repr(default), meanings.get(name, '')))
  return inspect.getdoc(thing).split('\n\n')[0], rows


def table(about: str, rows: list[Row]) -> list[str]:
  """Return the lines of a sentence and a table in reStructuredText."""
  lines = [*about.split('\n'), '', '.. list-table::', '   :header-rows: 1', '   :widths: 28 14 58', '']
  lines += ['   * - name', '     - default', '     - meaning']
  for name, default, meaning in rows:
    text = re.sub(r'([*|\\])', r'\\\1', ' '.join(meaning.split()))
    lines += [f'   * - ``{name}``', f'     - ``{default}``' if default else '     -', f'     - {text}']
  return lines
