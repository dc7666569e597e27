"""Gin files, read with every name in them checked; what is wrong with them is said in one line, with the name meant."""

from collections.abc import Sequence
import contextlib
import difflib
import inspect
import os
import re

import gin

from speccascade.errors import RunError


def read(files: Sequence[str], bindings: Sequence[str] = (), search_paths: Sequence[str] = ()):
  """Make gin files and bindings gin's config and check every name in them; nothing is built."""
  with gin.unlock_config(), _searching([*search_paths, *_beside(files)]), explained():
    gin.clear_config()
    gin.parse_config_files_and_bindings(list(files), list(bindings), finalize_config=False)
    _check_macros()
    _check_scopes()
    gin.finalize()


def _beside(files: Sequence[str]) -> list[str]:
  """Return the folders that a file's includes are looked for in: its own, and the one above."""
  folders = [os.path.dirname(os.path.abspath(f)) for f in files]
  return list(dict.fromkeys(f for own in folders for f in (own, os.path.dirname(own))))


@contextlib.contextmanager
def _searching(folders: Sequence[str]):
  """Let gin find files in folders, and forget them afterwards.

  Its reader of package data is left out: it takes `models/x.gin` for a file of whatever package is called models.
  """
  prefixes, readers = gin.config._LOCATION_PREFIXES, gin.config._FILE_READERS
  before = list(prefixes), list(readers)
  readers[:] = [r for r in readers if r[0].__module__ != 'gin.resource_reader']
  for folder in folders:
    gin.add_config_file_search_path(folder)
  try:
    yield
  finally:
    prefixes[:], readers[:] = before


# ---- names ----


def _check_macros():
  """Refuse a %NAME that is bound nowhere."""
  bound = [scope for scope, selector in gin.config._CONFIG if selector == 'gin.macro']
  for reference in gin.config.iterate_references(gin.config._CONFIG, to=gin.get_configurable(gin.config.macro)):
    name = '/'.join(reference.scopes)
    if name not in bound:
      raise RunError(f'%{name} is used but bound nowhere{_meant(name, bound)}; bind it, as in {name} = …')


def _check_scopes():
  """Refuse a binding in a scope that nothing is made in: gin would drop it without a word."""
  used = {'/'.join(r.scopes) for r in gin.config.iterate_references(gin.config._CONFIG)}
  reached = {part for scope in used for part in scope.split('/')}
  for scope, selector in gin.config._CONFIG:
    if selector != 'gin.macro' and scope and not set(scope.split('/')) <= reached:
      raise RunError(
        f'{scope}/{selector.split(".")[-1]} is bound, but nothing is made in the scope {scope}'
        f'{_meant(scope, sorted(used - {""}))}.'
      )


def _meant(name: str, known: Sequence[str]) -> str:
  near = difflib.get_close_matches(name, known, 1, 0.5)
  return f'; did you mean {near[0]}?' if near else ''


def _known() -> list[str]:
  registry = gin.config._REGISTRY
  whole = [selector.removeprefix('speccascade.') for selector, _ in registry.items()]
  short = [registry.minimal_selector(selector) for selector, _ in registry.items()]
  return sorted({*whole, *short})


@contextlib.contextmanager
def explained():
  """Turn gin's errors into one line that names what was probably meant."""
  try:
    yield
  except RunError:
    raise
  except Exception as error:  # gin lets through whatever a configurable raises
    raise RunError(_explain(error)) from error


def _explain(error: Exception) -> str:
  lines = [line.strip() for line in str(error).splitlines() if line.strip()]
  where = [line for line in lines if re.match(r'In (bindings|file)', line)]
  said = lines[0] if lines else ''
  if not isinstance(error, (ValueError, TypeError, OSError, RuntimeError, ImportError)) or not said:
    said = f'{type(error).__name__}: {said}'
  place = f' ({where[0].rstrip(":")})' if where else ''
  if m := re.search(r"No configurable matching (?:reference )?'@?([\w./]+?)(?:\(\))?'", said):
    name = m.group(1).split('/')[-1]
    return f'config: there is no {name}{_meant(name, _known()) or "; is its module imported?"}{place}'
  if m := re.search(r"Configurable '(.+?)' doesn't have a parameter named '(.+?)'", said):
    selector, name = m.groups()
    known = _parameters(selector)
    near = _meant(name, known) or f'; it has {", ".join(known)}'
    return f'config: {selector} has no parameter {name}{near}{place}'
  if m := re.search(r'^(?:.*?)(\w+)(?:\.__init__|\.__new__)?\(\) missing \d+ required [\w-]+ arguments?: (.+)$', said):
    called = [x for x in (re.match(r"In call to configurable '([\w.]+)'", line) for line in lines) if x]
    name = called[0].group(1).split('.')[-1] if called else m.group(1)
    return f'config: {name} lacks {m.group(2)}; bind it, as in {name}.{m.group(2).split(chr(39))[1]} = …'
  if m := re.search(r'Unable to open file: (.+?)\. Searched', said):
    return f'config: no file {m.group(1)}{place}; give its path, or the folder with --gin_search_paths'
  if isinstance(error, ImportError):
    return f'config: cannot import: {said}{place}'
  scopes = [x for x in (re.search(r"in scope '(.+?)'", line) for line in lines) if x]
  inside = f' (config scope {scopes[0].group(1)})' if scopes else ''
  return f'{said.rstrip(".") if place or inside else said}{place}{inside}'


def _parameters(selector: str) -> list[str]:
  thing = gin.config._REGISTRY.get_match(selector).wrapped
  return [n for n in inspect.signature(thing).parameters if n not in ('self', 'args', 'kwargs')]
