"""Gin files, read with every name checked; an error is one line, with the name that was probably intended.

A gin file is code: it imports modules and calls what it names, so reading one runs it. Read only files that you trust.
"""

import ast
from collections.abc import Iterator, Sequence
import contextlib
import difflib
import importlib.util
import inspect
import os
from pathlib import Path
import re
import sys
import sysconfig

import gin

from speccascade.host import storage
from speccascade.host.errors import first_line, RunError

# The files that come with the package: inside it where it is installed, next to it in a clone.
PACKAGE = Path(__file__).parents[1]
SHIPPED = next(p for p in (PACKAGE / 'gin_configs', PACKAGE.parent / 'gin_configs') if p.is_dir())
CALLED = {'speccascade.run', 'speccascade.train', 'speccascade.mesh'}  # by the commands, and not by references
UNREAD = 'gin cannot read a value; it reads numbers, texts, lists, dicts, @NAME and %NAME'


def read(files: Sequence[str], bindings: Sequence[str] = (), search_paths: Sequence[str] = ()):
  """Make gin files and bindings gin's config and check every name in them; nothing is built."""
  files = [_path_of(file, search_paths) for file in files]
  own = [os.path.dirname(os.path.abspath(file)) for file in files]
  above = [folder for file in own for folder in (file, os.path.dirname(file))]  # where includes are looked up
  folders = [*map(str, search_paths), *dict.fromkeys(above), str(SHIPPED)]
  with gin.unlock_config(), _searching(folders), explained(), _recorded() as named:
    gin.clear_config()
    for file in files:
      gin.parse_config_file(file)
    for binding in bindings:
      _bind(binding)
    asked_for = [b.partition('=')[0].strip() for b in bindings]
    _check_macros(named, asked_for)
    _check_scopes(named)
    _check_overridden(asked_for)
    _drop_unreached(asked_for)
    gin.finalize()


def _path_of(file: str, search_paths: Sequence[str]) -> str:
  """Return the path of a file: as it is named, in a folder to search, or among the files of the package."""
  name = os.fspath(storage.local(file))
  for folder in ('', *search_paths, SHIPPED.parent, SHIPPED):
    if os.path.isfile(path := os.path.join(folder, name)):
      return path
  return name


@contextlib.contextmanager
def _searching(folders: Sequence[str]):
  """Let gin find files in folders, and forget them afterwards; modules next to the files stay importable.

  Gin's reader of package data is removed meanwhile: it takes `models/x.gin` for a file of any package called models.
  """
  prefixes = gin.config._LOCATION_PREFIXES
  readers = gin.config._FILE_READERS
  before = list(prefixes), list(readers)
  readers[:] = [r for r in readers if r[0].__module__ != 'gin.resource_reader']
  for folder in folders:
    gin.add_config_file_search_path(folder)
    if folder not in sys.path and folder != str(SHIPPED):
      sys.path.append(folder)
  try:
    yield
  finally:
    prefixes[:], readers[:] = before


def _bind(binding: str):
  """Read a binding of the command line; forgotten quotes are named."""
  name, _, value = (part.strip() for part in binding.partition('='))
  try:
    gin.parse_config(binding)
  except (SyntaxError, ValueError) as error:
    if re.fullmatch(r'[\w./-]+', name) and re.fullmatch(r'[~/.\w][^\'"\n]*', value) and not _literal(value):
      raise RunError(
        f'--gin.{name}={value}: gin needs quotes around a text, inside those of the shell: --gin.{name}="\'{value}\'"'
      ) from error
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
def _recorded():
  """Yield a set that grows by the name, scopes included, of each reference that gin parses, be it overridden later."""
  named: set[str] = set()
  delegate = gin.config.ParserDelegate

  class Recorder(delegate):
    def configurable_reference(self, scoped_selector, evaluate):
      named.add(scoped_selector)
      return super().configurable_reference(scoped_selector, evaluate)

    def macro(self, name):
      named.add(f'{name}/gin.macro')
      return super().macro(name)

  gin.config.ParserDelegate = Recorder
  try:
    yield named
  finally:
    gin.config.ParserDelegate = delegate


def _check_macros(named: set[str], asked_for: Sequence[str]):
  """Refuse a %NAME that is bound nowhere, and a value under a name that nothing uses.

  A file may bind lists of curves and models that nothing uses, for a file to include offers several.
  """
  bound = {
    scope: values['value'] for (scope, selector), values in gin.config._CONFIG.items() if selector == 'gin.macro'
  }
  used = sorted(name.removesuffix('/gin.macro') for name in named if name.endswith('/gin.macro'))
  for reference in gin.config.iterate_references(gin.config._CONFIG, to=gin.get_configurable(gin.config.macro)):
    name = '/'.join(reference.scopes)
    if name not in bound:
      raise RunError(f'%{name} is used but bound nowhere{_suggestion(name, list(bound))}; bind it, as in {name} = …')
  for name, value in bound.items():
    if name not in used and (name in asked_for or not any(gin.config.iterate_references(value))):
      raise RunError(f'{name} is bound, but nothing uses %{name}{_suggestion(name, used)}.')


def _drop_unreached(asked_for: Sequence[str]):
  """Drop what only references that were overridden named; the config, written and read again, would be refused.

  A binding of the command line among it is an error.
  """
  config = gin.config._CONFIG
  macro = gin.get_configurable(gin.config.macro)
  while True:
    used = {'/'.join(reference.scopes) for reference in gin.config.iterate_references(config, to=macro)}
    reached = {scope for reference in gin.config.iterate_references(config) for scope in reference.scopes}
    lost = _outside(reached)
    lost += [
      (name, selector)
      for (name, selector), values in config.items()
      if selector == 'gin.macro' and name not in used and not any(gin.config.iterate_references(values))
    ]
    if not lost:
      return
    for scope, selector in lost:
      if asked := [n for n in asked_for if n == scope or selector in _selected(n) and n.rpartition('/')[0] == scope]:
        raise RunError(f'--gin.{asked[0]} has no effect, for all that used it is bound anew; leave it out.')
      del config[scope, selector]


def _outside(reached: set[str]) -> list[tuple[str, str]]:
  """Return (scope, selector) of each binding in a scope that is not of these."""
  return [
    (scope, selector)
    for scope, selector in gin.config._CONFIG
    if selector != 'gin.macro' and scope and not set(scope.split('/')) <= reached
  ]


def _check_scopes(named: set[str]):
  """Refuse a binding in a scope that nothing is made in: gin would drop it without a word."""
  used = {scope for name in named if (scope := name.rpartition('/')[0]) and not name.endswith('/gin.macro')}
  reached = {part for scope in used for part in scope.split('/')}
  for scope, selector in _outside(reached):
    raise RunError(
      f'{scope}/{selector.split(".")[-1]} is bound, but nothing is made in the scope {scope}'
      f'{_suggestion(scope, sorted(used))}.'
    )


def _check_overridden(asked_for: Sequence[str]):
  """Refuse a binding of the command line to what nothing makes, or that a scope overrides wherever it would count."""
  references = _read_references()
  reached = {scope for reference in references for scope in reference.scopes}
  for name in asked_for:
    *scope, rest = name.split('/')
    parameter = rest.rpartition('.')[2]
    for selector in {s for s in _selected(name) if _binds(scope, s, parameter)}:
      if others := _overriding(scope, selector, parameter, references):
        others = sorted({f'{"/".join(other)}/{rest}' for other in others})
        raise RunError(f'--gin.{name} has no effect, for the config binds {", ".join(others)}; bind those.')
      if others is not None or not {*scope} <= reached:
        missing = name.rpartition('.')[0] if {*scope} - reached else rest.rpartition('.')[0]
        raise RunError(f'--gin.{name} has no effect, for the config makes no {missing}; leave it out.')


def _read_references() -> list:
  """Return the references in all values but those that are overridden wherever they would count, and unused macros."""
  config = gin.config._CONFIG
  every = list(gin.config.iterate_references(config))
  before = None
  while before != len(every):
    before = len(every)
    every = [
      reference
      for (scope, selector), values in config.items()
      for parameter, value in values.items()
      if (others := _overriding(scope.split('/') if scope else [], selector, parameter, every)) is None
      or not (others or selector == 'gin.macro')
      for reference in gin.config.iterate_references(value)
    ]
  return every


def _overriding(scope: Sequence[str], selector: str, parameter: str, references: Sequence) -> list | None:
  """Return the scopes of the bindings that override one wherever it would count, none where nothing is made of it.

  It is None for a binding that counts somewhere.
  """
  made = [r.scopes for r in references if r.config_key[1] == selector]
  if selector == 'gin.macro':
    return None if list(scope) in made else []
  inner = [[s[:i] for i in range(len(scope) + 1, len(s) + 1) if _binds(s[:i], selector, parameter)] for s in made]
  if made:
    return [some[-1] for some in inner] if all(inner) else None
  ours = getattr(gin.config._REGISTRY[selector].wrapped, '__module__', '').startswith('speccascade.')
  return [] if ours and selector not in CALLED else None  # a user's module may call what it registers


def _selected(name: str) -> set[str]:
  """Return the full names in the config of what a binding's name may select."""
  given = name.rpartition('/')[2].rpartition('.')[0]
  return {selector for _, selector in gin.config._CONFIG if given and f'.{selector}'.endswith(f'.{given}')}


def _binds(scope: Sequence[str], selector: str, parameter: str) -> bool:
  return parameter in gin.config._CONFIG.get(('/'.join(scope), selector), {})


def sources() -> dict[str, str]:
  """Return a digest of the source of each module that the config imports, or that one of these uses.

  Installed modules are skipped: their packages have versions.
  """
  waiting = [statement.module for statement in gin.config._IMPORTS]
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


def macro_of(configurable: str, parameter: str) -> str:
  """Return the macro that a parameter is bound to, else the parameter's own name."""
  value = gin.config._CONFIG.get(('', configurable), {}).get(parameter)
  is_macro = getattr(value, 'selector', '') == 'gin.macro'
  return '/'.join(value.scopes) if is_macro else f'{configurable.split(".")[-1]}.{parameter}'


def _suggestion(name: str, known: Sequence[str]) -> str:
  near = difflib.get_close_matches(name, known, 1, 0.5)
  return f'; did you mean {near[0]}?' if near else ''


def _known() -> list[str]:
  registry = gin.config._REGISTRY
  full = [selector.removeprefix('speccascade.') for selector, _ in registry.items()]
  short = [registry.minimal_selector(selector) for selector, _ in registry.items()]
  return sorted({*full, *short})


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
    return f'config: there is no {name}{_suggestion(name, _known()) or "; is its module imported?"}{location}'
  if m := re.search(r"Configurable '(.+?)' doesn't have a parameter named '(.+?)'", message):
    selector, name = m.groups()
    known = _parameters(selector)
    near = _suggestion(name, known) or f'; it has {", ".join(known)}'
    return f'config: {selector} has no parameter {name}{near}{location}'
  if m := re.search(r'^(?:.*?)(\w+)(\.__init__|\.__new__)?\(\) missing \d+ required [\w-]+ arguments?: (.+)$', message):
    if not m.group(2) and m.group(3) in ("'q' and 'p'", "'models'"):  # a rule, a combiner
      return f'config: {m.group(1)} was called; hand it over, as @rules.{m.group(1)} without (){location}'
    called = [x for x in (re.match(r"In call to configurable '([\w.]+)'", line) for line in lines) if x]
    name = called[0].group(1).split('.')[-1] if called else m.group(1)
    return f'config: {name} lacks {m.group(3)}; bind it, as in {name}.{m.group(3).split(chr(39))[1]} = …'
  if m := re.search(r"Ambiguous selector '(.+?)', matches \[(.+?)\]", message):
    return f'config: {m.group(1)} is the end of several names, {m.group(2)}; write one of them{location}'
  if isinstance(error, RecursionError):
    return 'config: a file includes itself, or one that includes it'
  if 'malformed node' in message:
    return f'config: {UNREAD}{location}'
  if m := re.search(r'Unable to open file: (.+?)\. Searched', message):
    return f'config: no file {m.group(1)}{location}; give its path, or the folder with --gin_search_paths'
  if isinstance(error, ImportError):
    return (
      f'config: cannot import: {message}{location}; modules are looked for next to the gin file, here and on PYTHONPATH'
    )
  scopes = [x for x in (re.search(r"in scope '(.+?)'", line) for line in lines) if x]
  inside = f' (config scope {scopes[0].group(1)})' if scopes else ''
  return f'{message.rstrip(".") if location or inside else message}{location}{inside}'


def _parameters(selector: str) -> list[str]:
  thing = gin.config._REGISTRY.get_match(selector).wrapped
  return [n for n in inspect.signature(thing).parameters if n not in ('self', 'args', 'kwargs')]
