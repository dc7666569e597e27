"""What has a name has one spelling, in every command, config and file.

opt  speculative                              what the package has, by its name
opt(alpha=0.1)  speculative(rule=opt, block=5)  with arguments, which are values or names
opt:0.1  weighted:.5,.5                       with its first argument alone, a number or some
my_rules:mine(alpha=0.3)                      of a module in the current folder, or an installed one

A name is looked up first. What it names is checked next, and called last. A text that a user writes may import a
module; one that stands in a file of data may not (`as_data`).
"""

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import contextvars
import dataclasses
import difflib
import functools
import importlib
import inspect
import math
import os
import re
import sys
from typing import Any, NamedTuple

import numpy as np

_COLON = re.compile(r"""('[^']*'|"[^"]*")|([A-Za-z_][\w.]*):(?=[\w.+-])""")
_NUMBERS = {'nan': math.nan, 'inf': math.inf}
_A_TASK = 'gsm8k(shots=0)'  # as errors spell one
_AS_DATA = contextvars.ContextVar('as data', default=False)


class Named(NamedTuple):
  """What a text names: a value of the package or of a module, and the arguments that it gives."""

  value: Any
  name: str
  arguments: dict[str, Any]
  short: list[Any]  # the numbers of NAME:NUMBER,NUMBER
  called: bool  # whether arguments are given, be they none
  what: str  # it is to name, for errors
  known: Mapping[str, Any]  # what else it might have named
  text: str = ''

  def made(self) -> Any:
    """Return the value with its arguments: an instance of a class, a function with them bound.

    Raises:
      ValueError: It is a class of another kind than those that are known, or does not take these arguments.
    """
    if isinstance(self.value, type):
      self._check_kind()
      return self.call(*self.short, **self.arguments)
    if not self.called or not self.arguments and not self.short:
      return self.value
    if self.short or not callable(self.value):
      raise ValueError(f'{self.name} takes its arguments by name, as in {self.name}(NAME=VALUE)')
    return functools.partial(self.value, **self.arguments)

  def call(self, *args, **kwargs) -> Any:
    """Call what is named.

    Raises:
      ValueError: It does not take these arguments. What it raises itself comes through.
    """
    try:
      return self.value(*args, **kwargs)
    except TypeError as error:
      signature = inspect.signature(self.value)
      try:
        signature.bind(*args, **kwargs)
      except TypeError as mismatch:
        takes = ', '.join(signature.parameters)
        raise ValueError(f'{self.name}: {mismatch}; it takes {takes or "no argument"}') from error
      raise

  def _check_kind(self) -> None:
    """Raise for a class that is like no known one and whose instances are no functions: nothing else is called."""
    kinds = tuple({x.__mro__[-2] for x in self.known.values() if isinstance(x, type)})
    functions = not kinds or any(not isinstance(x, type) for x in self.known.values())
    called = functions and any('__call__' in vars(x) for x in self.value.__mro__)
    if not called and not issubclass(self.value, kinds):
      ways = [*sorted(f'inherit {x.__name__}' for x in kinds), *['define __call__'] * functions]
      raise ValueError(f'the class {self.name} is no {self.what}; {" or ".join(ways)} in it.')


@contextlib.contextmanager
def as_data() -> Iterator[None]:
  """Let texts in the block, which stand in a file of data, name what is imported already, and import nothing."""
  token = _AS_DATA.set(True)
  try:
    yield
  finally:
    _AS_DATA.reset(token)


def find(text: str, what: str, known: Mapping[str, Any], inner: Mapping[str, Any] = {}) -> Named:
  """Return what a text names.

  Args:
    text: The text.
    what: What it is to name, for errors.
    known: What is known by its name.
    inner: What is known by its name inside arguments.

  Raises:
    ValueError: The text names nothing.
  """
  source = _COLON.sub(lambda m: m[1] or f'{m[2]} @ ', text.strip())
  try:
    node = ast.parse(source, mode='eval').body
  except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two of one that nests very deep
    node = None
  more = []
  if isinstance(node, ast.Tuple) and node.elts:  # NAME:NUMBER,NUMBER
    node, *more = node.elts
  named = node and _named(node, what, known, inner)
  if named is None or (more and not named.short):
    forms = 'NAME:NUMBER, NAME(alpha=0.1) or MODULE:NAME, as in opt:0.1'
    if what == 'task':
      forms = f'NAME(shots=0) or MODULE:NAME, as in {_A_TASK}'
    raise ValueError(f'{text!r} names no {what}; write NAME, {forms}')
  short = [*named.short, *(_value(x, {}, f'{named.name}:{{}}') for x in more)]
  return named._replace(short=short, text=text)


def _named(node: ast.expr, what: str, known: Mapping[str, Any], inner: Mapping[str, Any]) -> Named | None:
  """Return what an expression names, None for one of another form; a colon is read as @."""
  short = []
  is_number = _is_colon(node) and not isinstance(node.right, ast.Name | ast.Call)
  if is_number or _is_colon(node) and ast.unparse(node.left) in known:  # NAME:NUMBER, be it nan
    short = [_value(node.right, {}, f'{ast.unparse(node.left)}:{{}}')]
    node = node.left
  found = None
  if _is_colon(node):
    found = ast.unparse(node.left)
    node = node.right
  called = isinstance(node, ast.Call)
  keywords = node.keywords if called else []
  given = [keyword.arg for keyword in keywords]
  if called and (node.args or None in given or len(set(given)) < len(given)):
    name = ast.unparse(node.func)
    first = next(iter(inspect.signature(known[name]).parameters), '') if isinstance(known.get(name), type) else 'alpha'
    example = _A_TASK if what == 'task' else f'{name}({first}=0.1)'
    raise ValueError(f'{name} takes its arguments by name, each once, as in {example}')
  node = node.func if called else node
  if not isinstance(node, ast.Name):
    return None
  if found is None and node.id not in known:
    raise ValueError(f'no {what} is called {node.id!r}; {_among(known, node.id)}')
  value = known[node.id] if found is None else imported(found, node.id)
  arguments = {keyword.arg: _value(keyword.value, inner, f'{keyword.arg}={{}}') for keyword in keywords}
  return Named(value, node.id, arguments, short, called or bool(short), what, known)


def meant(name: str, known: Iterable[str]) -> str:
  """Return which known name may be meant, as the end of a sentence, empty where none is near."""
  near = difflib.get_close_matches(name, known, 1, 0.5)
  return f'; did you mean {near[0]}?' if near else ''


def _among(known: Mapping[str, Any], name: str) -> str:
  """Return what is known, or of many names those that are near, as the end of a sentence."""
  if not known:
    return 'name yours, as MODULE:NAME'
  near = difflib.get_close_matches(name, known)
  mean = f'did you mean {" or ".join(near)}? ' if near else ''
  listed = f'there are {", ".join(known)}, and MODULE:NAME of yours' if len(known) < 30 or not near else ''
  return f'{mean}{listed or "yours is MODULE:NAME"}'


def _is_colon(node: ast.expr) -> bool:
  return isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)


def _value(node: ast.expr, inner: Mapping[str, Any], form: str) -> Any:
  """Return the value of an argument: a number, a text, a list of values, or what is named."""
  with contextlib.suppress(ValueError, TypeError):
    return ast.literal_eval(node)
  if isinstance(node, ast.Name) and node.id in _NUMBERS:
    return _NUMBERS[node.id]
  if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
    return -_value(node.operand, inner, form)
  if isinstance(node, ast.Tuple | ast.List):
    values = [_value(x, inner, form) for x in node.elts]
    return values if isinstance(node, ast.List) else tuple(values)
  text = ast.unparse(node).replace(' @ ', ':')
  if not inner:
    raise ValueError(f'{form.format(text)} gives no number, for {text!r} is none; write one, as in {form.format(0.1)}')
  if isinstance(node, ast.Name) and node.id not in inner:
    number = form.format(0.1)
    raise ValueError(
      f'{form.format(text)}: {text!r} is neither a number, as in {number}, nor a name; {_among(inner, node.id)}'
    )
  named = _named(node, f'value of {form[:-3]}', inner, inner)
  if named is None:
    raise ValueError(f'{form.format(text)}: {text!r} is neither a value nor a name, as opt(alpha=0.1) is')
  if named.short and not isinstance(named.value, type):
    takes = _numbers_of(named.value)
    if not takes:
      raise ValueError(f'{named.name} takes no number')
    named = named._replace(arguments={takes[0]: named.short[0]}, short=[])
  return named.made()


def module(name: str) -> Any:
  """Return a module of the current folder or an installed one, which is imported unless the name is data."""
  if _AS_DATA.get():
    if name not in sys.modules:
      raise ValueError(f'{name} is not imported, and a file of data imports nothing; give --import {name}.')
    return sys.modules[name]
  if os.getcwd() not in sys.path:
    sys.path.insert(0, os.getcwd())
  try:
    return importlib.import_module(name)
  except ImportError as error:
    raise ValueError(
      f'{name} cannot be imported ({error}); its folder must be {os.getcwd()} or on sys.path.'
    ) from error
  except (Exception, SystemExit) as error:  # the module runs, and may raise anything
    raise ValueError(
      f'{name} cannot be imported: {type(error).__name__}: {error}; run it by itself to see where.'
    ) from error


def imported(name: str, attribute: str) -> Any:
  """Return the value of a name in a module of the current folder or an installed one."""
  found = module(name)
  if attribute not in vars(found) and (_AS_DATA.get() or not hasattr(found, attribute)):  # which may import, too
    known = [other for other, value in vars(found).items() if callable(value)]
    raise ValueError(
      f'{name} ({getattr(found, "__file__", "no file")}) has no {attribute}{meant(attribute, known) or "."}'
    )
  return vars(found)[attribute] if attribute in vars(found) else getattr(found, attribute)


def of_modules(modules: Sequence[str]) -> Iterator[tuple[str, str]]:
  """Yield the name and the source of each module that a user names."""
  for name in modules:
    yield name, inspect.getsource(module(name))


# ---- the other way ----


def inside(value: Any) -> Any:
  """Return the function or the class of what a name means."""
  while isinstance(value, functools.partial):  # jax.tree_util.Partial is one too
    value = value.func
  return value if inspect.isroutine(value) or isinstance(value, type) else type(value)


def arguments(value: Any) -> dict[str, Any]:
  """Return what is bound to a function, or the fields of an instance."""
  found = {}
  while isinstance(value, functools.partial):
    found = value.keywords | found
    value = value.func
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    found |= {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
  return found


def spelled(value: Any, known: Mapping[str, Any], inner: Mapping[str, Any] = {}) -> str:
  """Return the text by which `find` returns a value; numbers, texts and lists are as in Python."""
  if value is None or isinstance(value, bool | int | float | str):
    return repr(value)
  if isinstance(value, tuple | list):
    ends = ',' if len(value) == 1 else ''
    return f'({", ".join(spelled(x, known) for x in value)}{ends})'
  if hasattr(value, 'dtype'):
    return spelled(_plain(value), known)
  function = inside(value)
  name = function.__name__
  if known.get(name) is not function:
    name = f'{function.__module__}:{name}'
  given = {key: spelled(x, inner or known) for key, x in arguments(value).items()}
  if len(given) == 1 and list(given) == _numbers_of(function)[:1] and re.match(r'[-.\d]', *given.values()):
    return f'{name}:{"".join(given.values())}'
  return f'{name}({", ".join(f"{key}={x}" for key, x in given.items())})' if given else name


def _numbers_of(function: Any) -> list[str]:
  """Return the names that a function takes by keyword alone."""
  if not inspect.isfunction(function):
    return []
  return [name for name, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY]


def _plain(array: Any) -> Any:
  """Return the numbers of an array in the fewest digits."""

  def digits(x):
    return tuple(map(digits, x)) if isinstance(x, list) else float(str(np.float32(x)))

  array = np.asarray(array)
  return digits(array.tolist()) if array.dtype == np.float32 else array.tolist()


def source(value: Any) -> str | None:
  """Return the source of a user's function or class; None of the package's own, or of one that was typed in."""
  function = inside(value)
  if function.__module__.partition('.')[0] in ('speccascade', 'numpy', 'jax', 'builtins'):
    return None
  with contextlib.suppress(OSError, TypeError):
    return inspect.getsource(function)


def sources(value: Any) -> Iterator[tuple[str, str]]:
  """Yield the name and the source of each user's function or class in a value and its arguments."""
  if isinstance(value, Mapping):
    value = list(value.values())
  if isinstance(value, list | tuple):
    for x in value:
      yield from sources(x)
  elif callable(value) or dataclasses.is_dataclass(value):
    if text := source(value):
      yield inside(value).__name__, text
    yield from sources(arguments(value))


# ---- both ways ----


@dataclasses.dataclass(frozen=True)
class Catalogue:
  """What a module knows by name, rules, policies and so on, and how texts name it.

  Attributes:
    what: What a text is to name, for errors.
    listed: Returns what is known, by name.
    inner: Returns what is known by its name inside arguments.
    made: Returns the value that is named, or raises where it is of another kind.
    text_of: Returns the text of a value that has another form than `spelled` of this module gives it.

  Example:
    >>> print(methods.find('speculative(rule=opt(alpha=0.1), block=3)')())
    propose(0, 4) · score(1, first 3) · verify(opt of (0, 1))
    >>> print(stopping.spelled(stopping.Heuristic(first=2)))
    Heuristic(first=2)
  """

  what: str
  listed: Callable[[], dict[str, Any]]
  inner: Callable[[], Mapping[str, Any]] = dict
  made: Callable[[Named], Any] = Named.made
  text_of: Callable[[Any], str] | None = None

  def known(self) -> dict[str, Any]:
    """Return what the package has, by name."""
    return self.listed()

  def find(self, text: str) -> Any:
    """Return what a text names, with the arguments that it gives bound.

    Raises:
      ValueError: There is none of that name, or it does not take these arguments.
    """
    return self.made(find(text, self.what, self.known(), self.inner()))

  def spelled(self, value: Any) -> str:
    """Return the text by which `find` returns a value."""
    return spelled(value, self.known(), self.inner()) if self.text_of is None else self.text_of(value)
