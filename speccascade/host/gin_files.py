"""Gin files; an error is one line, with the name that was probably intended.

A gin file is code: it imports modules and calls what it names, so reading one runs it. Read only files that you trust.
"""

import ast
from collections.abc import Iterator, Sequence
import contextlib
import functools
import importlib.util
import inspect
import io
import os
from pathlib import Path
import re
import sys
import sysconfig
from typing import Any

import gin

from speccascade.host import names, storage
from speccascade.host.errors import first_line, line_of, RunError

# The files that come with the package: inside it where it is installed, next to it in a clone.
PACKAGE = Path(__file__).parents[1]
SHIPPED = next(p for p in (PACKAGE / 'gin_configs', PACKAGE.parent / 'gin_configs') if p.is_dir())
UNREAD = 'gin cannot read a value; it reads numbers, texts, lists, dicts, @NAME and %NAME'


@functools.cache
def register(thing: Any, name: str):
  """Give gin a name that a config may use, once."""
  gin.external_configurable(thing, name=name)
  _registered.append(name.removeprefix('speccascade.'))


_registered: list[str] = []
_asked_for: list[str] = []  # names that bindings of the command line have


def read(files: Sequence[str], bindings: Sequence[str] = (), search_paths: Sequence[str] = ()):
  """Make gin files and bindings gin's config, whose names must be known; nothing is built."""
  paths = [_path_of(file, search_paths) for file in files]
  own = [os.path.dirname(os.path.abspath(path)) for path in paths]
  above = [folder for file in own for folder in (file, os.path.dirname(file))]
  folders = [*map(str, search_paths), *dict.fromkeys(above)]  # where includes are looked up, and modules
  sys.path += [folder for folder in folders if folder not in sys.path]
  with gin.unlock_config(), explained():
    gin.clear_config()
    for path in paths:
      _parse(path, folders)
    for binding in bindings:
      _bind(binding)
    _asked_for[:] = [b.partition('=')[0].strip() for b in bindings if not b.startswith('import ')]
    gin.finalize()


def _path_of(file: str, folders: Sequence[str], where: str = '') -> str:
  """Return the path of a file: as it is named, in a folder to search, or among the files of the package."""
  name = os.fspath(storage.local(file))
  for folder in ('', *folders, SHIPPED.parent, SHIPPED):
    if os.path.isfile(path := os.path.join(folder, name)):
      return path
  raise RunError(f'config: no file {name}{where}; give its path, or the folder with --gin_search_paths')


class _Piece(io.StringIO):
  """Text that gin reads as a part of a file."""

  def __init__(self, lines: Sequence[str], name: str):
    super().__init__('\n'.join(lines))
    self.name = name


def _parse(path: str, folders: Sequence[str], within: Sequence[str] = ()):
  """Parse a file, and at its place each file that it includes, in UTF-8 whatever the locale.

  gin's own search for includes takes `models/x.gin` for a file of any package called models, and keeps its folders.
  """
  if os.path.realpath(path) in within:
    raise RunError(f'config: {path} includes itself, or a file that includes it')
  lines = Path(path).read_text(encoding='utf-8').split('\n')
  before: list[str] = []  # empty lines in place of what was parsed, but for imports: each piece has its line numbers
  for number, line in enumerate([*lines, "include ''"], 1):
    if found := re.match(r"""include\s+(['"])(.*)\1\s*(#.*)?$""", line):
      gin.parse_config(_Piece([*before, *lines[len(before) : number - 1]], path))
      before = [x if re.match('(import|from) ', x) else '' for x in lines[:number]]
      if found[2]:
        included = _path_of(found[2], folders, f' (In file "{path}", line {number})')
        _parse(included, folders, [*within, os.path.realpath(path)])


def _bind(binding: str):
  """Read a binding of the command line; a text needs no quotes there."""
  name, _, value = (part.strip() for part in binding.partition('='))
  try:
    gin.parse_config(binding)
  except (SyntaxError, ValueError) as error:
    constant = value.lower() in ('true', 'false', 'none', 'null')  # in another case than Python's
    is_text = not constant and re.fullmatch(r'[~/.\w][^\'"\n()\[\]{}]*|[\w.:]+\(.*\)', value)
    if re.fullmatch(r'[\w./-]+', name) and is_text and not _literal(value):
      gin.parse_config(f'{name} = {value!r}')
      return
    if isinstance(error, SyntaxError):
      message = first_line(error)
      message = f'{UNREAD}.' if 'malformed node' in message else message
      raise RunError(f'--gin.{binding}: {message} Write --gin.NAME=VALUE.') from error
    raise


def _literal(value: str) -> bool:
  try:
    ast.literal_eval(value)
  except (ValueError, SyntaxError):
    return False
  return True


# ---- names ----


@contextlib.contextmanager
def building() -> Iterator[None]:
  """Build from the config that was read: an error is one line, and a binding of the command line has an effect."""
  with explained():
    yield
    _check_asked_for()


def _check_asked_for():
  """Refuse a binding of the command line that no call has read, nor is to read: those of what a call was handed."""
  waiting = list(gin.config._OPERATIVE_CONFIG)
  calls: dict[tuple[str, str], dict[str, tuple[str, Any]]] = {}
  while waiting:
    if (call := waiting.pop()) not in calls:
      calls[call] = _in_effect(*call)
      waiting += [reference.config_key for reference in gin.config.iterate_references(list(calls[call].values()))]
  read = {(at, selector, parameter) for (_, selector), bound in calls.items() for parameter, (at, _) in bound.items()}
  for name in _asked_for:
    scope, _, rest = name.rpartition('/')
    is_macro = '.' not in rest
    key = (name, 'gin.macro', 'value') if is_macro else gin.config.ParsedBindingKey.parse(name).scope_selector_arg
    if key in read or not _is_ours(key[1]):
      continue
    inner = sorted(f'{at}/{rest}' for at, *of in read if not is_macro and not scope and of == [*key[1:]])
    known = sorted({at for at, selector, _ in read if (selector == 'gin.macro') == is_macro})
    unused = f'nothing uses {"%" * is_macro}{name}{names.meant(name if is_macro else scope, known)}'
    why = f'the config binds {", ".join(inner)}; bind those' if inner else unused
    raise RunError(f'--gin.{name} has no effect: {why}.')


def _is_ours(selector: str) -> bool:
  """Tell whether a configurable is called by gin or this package; a user's module may call what it registers later."""
  return gin.get_configurable(selector).__module__.split('.')[0] in ('gin', PACKAGE.name)


def _in_effect(scope: str, selector: str) -> dict[str, tuple[str, Any]]:
  """Return the bindings of a call by parameter, each with its scope, the innermost, and its value."""
  parts = scope.split('/') if scope else []
  found = {}
  for at in ['/'.join(parts[:i]) for i in range(len(parts) + 1)]:
    own = gin.get_bindings(f'{at}/{selector}'.lstrip('/'), resolve_references=False, inherit_scopes=False)
    found |= {parameter: (at, value) for parameter, value in own.items()}
  return found


def sources() -> dict[str, str]:
  """Return a digest of the source of each module that the config imports, or that one of these uses.

  Installed modules are skipped: their packages have versions.
  """
  found = re.findall(r'^(?:from (\S+) )?import (\S+)', gin.config_str(), re.MULTILINE)
  waiting = ['.'.join(filter(None, names)) for names in found]
  digests = {}
  while waiting:
    name = waiting.pop()
    file = getattr(sys.modules.get(name), '__file__', None)
    if name in digests or not file or _installed(file):
      continue
    source = Path(file).read_bytes()
    digests[name] = storage.digest(source)
    waiting.append(name.rpartition('.')[0])
    if file.endswith('.py'):
      waiting += _imports(source, sys.modules[name].__package__)
  return dict(sorted(digests.items()))


def _imports(source: bytes, package: str) -> Iterator[str]:
  """Yield what may be a module in the import statements of a module's source."""
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      base = importlib.util.resolve_name('.' * node.level + (node.module or ''), package) if node.level else node.module
      yield base
      yield from (f'{base}.{alias.name}' for alias in node.names)


def _installed(file: str) -> bool:
  """Tell whether a file belongs to Python, to an installed package, or to this one."""
  roots = [PACKAGE, *map(sysconfig.get_path, ('stdlib', 'platstdlib'))]
  return bool({'site-packages', 'dist-packages'} & {*Path(file).parts}) or any(
    Path(file).is_relative_to(r) for r in roots
  )


@contextlib.contextmanager
def explained():
  """Turn gin's errors into one line that names what was probably intended."""
  try:
    yield
  except RunError:
    raise
  except Exception as error:  # gin lets through whatever a configurable raises
    raise RunError(_explain(error)) from error


def _explain(error: Exception) -> str:
  lines = [line.strip() for line in str(error).splitlines() if line.strip()]
  sources = [line for line in lines if re.match(r'In (bindings|file)', line)]
  message = lines[0] if lines else ''
  if not isinstance(error, (ValueError, TypeError, OSError, RuntimeError, ImportError)) or not message:
    message = f'{type(error).__name__}: {message}'
  location = f' ({sources[0].rstrip(":")})' if sources else ''
  if m := re.search(r"No configurable matching (?:reference )?'@?([\w./]+?)(?:\(\))?'", message):
    name = m.group(1).split('/')[-1]
    known = [*_registered, *(x.rpartition('.')[2] for x in _registered)]
    return f'config: there is no {name}{names.meant(name, known) or "; is its module imported?"}{location}'
  if m := re.search(r"Configurable '(.+?)' doesn't have a parameter named '(.+?)'", message):
    selector, name = m.groups()
    known = _parameters(selector)
    near = names.meant(name, known) or f'; it has {", ".join(known)}'
    return f'config: {selector} has no parameter {name}{near}{location}'
  if m := re.search(r'^(?:.*?)(\w+)(\.__init__|\.__new__)?\(\) missing \d+ required [\w-]+ arguments?: (.+)$', message):
    if not m.group(2) and m.group(3) in ("'q' and 'p'", "'models'"):  # a rule, a combiner
      return f'config: {m.group(1)} was called; hand it over, as @rules.{m.group(1)} without (){location}'
    called = [x for x in (re.match(r"In call to configurable '([\w.]+)'", line) for line in lines) if x]
    name = called[0].group(1).split('.')[-1] if called else m.group(1)
    return f'config: {name} lacks {m.group(3)}; bind it, as in {name}.{m.group(3).split(chr(39))[1]} = …'
  if m := re.search(r"No bindings specified for '(.+?)/(?:gin\.)?macro'", message):
    macros = re.findall(r'^([\w/]+) =', gin.config_str(), re.MULTILINE)
    return f'%{m.group(1)} is used but bound nowhere{names.meant(m.group(1), macros)}; bind it, as in {m.group(1)} = …'
  if m := re.search(r"Ambiguous selector '(.+?)', matches \[(.+?)\]", message):
    return f'config: {m.group(1)} is the end of several names, {m.group(2)}; write one of them{location}'
  if 'malformed node' in message:
    return f'config: {UNREAD}{location}'
  if isinstance(error, ImportError):
    return (
      f'config: cannot import: {message}{location}; modules are looked for next to the gin file, here and on PYTHONPATH'
    )
  scopes = [x for x in (re.search(r"in scope '(.+?)'", line) for line in lines) if x]
  inside = f' (config scope {scopes[0].group(1)})' if scopes else ''
  if not isinstance(error, (ValueError, OSError, RuntimeError)):  # of a function, which may be a user's
    inside = f'{line_of(error)}{inside}'
  return f'{message.rstrip(".") if location or inside else message}{location}{inside}'


def _parameters(selector: str) -> list[str]:
  thing = gin.get_configurable(selector)  # of a class a subclass, whose call takes anything
  parameters = inspect.signature(thing.__init__ if isinstance(thing, type) else thing).parameters
  return [n for n in parameters if n not in ('self', 'args', 'kwargs')]
