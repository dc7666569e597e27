"""Chat templates, rendered in a process of their own with limited processor time and memory.

A template comes with a checkpoint and is a program: `{{ 'a' * 10**10 }}` would take all memory, and Python cannot be
stopped inside of an operation. The process is this file, run as a script. It answers one request after the other until
its input ends. A request that takes too long ends it, and the next one starts another.
"""

import atexit
import contextlib
import datetime
import functools
import json
import math
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from typing import Any

SECONDS = 10  # of processor time for one rendering
_MEMORY = 1 << 31  # bytes of address space
_LONGEST = 1 << 25  # characters of a text
_TEXT, _UNREADABLE, _REFUSED, _TOO_MUCH = b'=', b'?', b'!', b'+'  # the first byte of an answer

_processes: dict[int, subprocess.Popen] = {}  # by the process that started it, for a fork must not share one
_lock = threading.Lock()


def render(where: Any, source: str, variables: dict[str, Any]) -> str:
  """Return the text of a template.

  Args:
    where: The template's file, for errors.
    source: The template.
    variables: Its variables, where None and a list as `content` of a message are those of a chat.

  Raises:
    ValueError: it cannot be read, refuses the messages, or exceeds a limit.
  """
  try:
    request = pickle.dumps((SECONDS, source, variables))
  except Exception as e:  # whatever an object raises
    raise ValueError(f'chat_template_kwargs: {e}; give plain values, as JSON has them') from None
  with _lock:
    kind, text = _ask(request)
  if kind == _TEXT:
    return text
  raise ValueError(
    {
      _UNREADABLE: f'{where}: the chat template cannot be read ({text}); fetch the file again',
      _REFUSED: f'{where}: the chat template refuses the messages ({text}); change their roles or contents',
      _TOO_MUCH: f'{where}: the chat template {text}; correct it, or give a text',
    }[kind]
  )


def _ask(request: bytes) -> tuple[bytes, str]:
  """Return the kind and the text of the process's answer."""
  process = _running()
  try:
    _write(process.stdin, request)
    answer = _read(process.stdout)
  except (EOFError, BrokenPipeError):
    code = _end()
    late = code == -signal.SIGXCPU
    return _TOO_MUCH, f'takes more than {SECONDS} seconds' if late else f'ends its process (exit code {code})'
  except BaseException:  # an answer may be under way
    _end()
    raise
  return answer[:1], answer[1:].decode('utf-8', 'surrogatepass')


def _running() -> subprocess.Popen:
  """Return the process of this one, started where there is none."""
  process = _processes.get(os.getpid())
  if process is not None and process.poll() is not None:
    _end()
    process = None
  if process is None:
    pipe = subprocess.PIPE
    command = [sys.executable, '-P', os.path.abspath(__file__)]  # -P: the modules next to this file are not to be found
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True)
    _processes[os.getpid()] = process
  return process


@atexit.register
def _end() -> int | None:
  """End the process and return its exit code, None where there is none."""
  process = _processes.pop(os.getpid(), None)
  if process is None:
    return None
  process.kill()
  process.stdout.close()
  with contextlib.suppress(BrokenPipeError):  # of what it did not read
    process.stdin.close()
  return process.wait()


def _write(stream, data: bytes):
  stream.write(len(data).to_bytes(8, 'little') + data)
  stream.flush()


def _read(stream) -> bytes:
  """Return what `_write` wrote."""
  head = stream.read(8)
  if len(head) < 8:
    raise EOFError
  return stream.read(int.from_bytes(head, 'little'))


# ---- the process ----


def _serve():
  """Answer requests until there are no more."""
  requests, answers = sys.stdin.buffer, sys.stdout.buffer
  _limit(resource.RLIMIT_AS, _MEMORY)
  _limit(resource.RLIMIT_CORE, 0)
  while True:
    try:
      request = _read(requests)
    except EOFError:
      return
    kind, text = _answer(request)
    _write(answers, kind + text.encode('utf-8', 'surrogatepass'))


def _answer(request: bytes) -> tuple[bytes, str]:
  kind = _UNREADABLE
  try:
    seconds, source, variables = pickle.loads(request)
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + seconds)
    template = _compiled(source)
    kind = _REFUSED
    text = template.render(variables | {'messages': list(map(_message, variables['messages']))})
  except MemoryError:
    return _TOO_MUCH, 'takes more than 2 GiB of memory'
  except Exception as e:  # a template is a program, and may raise anything
    return kind, str(e) or type(e).__name__
  return (_TOO_MUCH, f'writes more than {_LONGEST} characters') if len(text) > _LONGEST else (_TEXT, text)


def _limit(kind: int, value: int):
  """Set a limit of this process, which no process may raise over its hard one."""
  hard = resource.getrlimit(kind)[1]
  resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


class _Null(str):
  """A content of null: a template writes it as nothing, where it would write None, and its test `none` holds."""


_NULL = _Null()


class _Parts(list):
  """The parts of a content, for templates that iterate over them; one that writes them as text is an error."""

  def _refuse(self, *_):
    raise TypeError('it takes a content as one text, not as parts')

  __str__ = __add__ = __radd__ = _refuse


def _message(message: dict[str, Any]) -> dict[str, Any]:
  """Return a message as templates get it: without nulls but that of its content."""
  given = {name: value for name, value in message.items() if value is not None}
  content = message.get('content', '')
  if 'content' in message:
    given['content'] = _NULL if content is None else _Parts(content) if isinstance(content, list) else content
  return given


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
  import jinja2.ext  # in the process alone
  import jinja2.sandbox

  class Generation(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %}, which mark the trained text: rendered as that text."""

    tags = {'generation'}

    def parse(self, parser):
      line = next(parser.stream).lineno
      body = parser.parse_statements(['name:endgeneration'], drop_needle=True)
      return jinja2.nodes.Scope(body, lineno=line)

  def refuse(message: str):
    raise jinja2.TemplateError(message)

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, 'jinja2.ext.loopcontrols']
  )
  environment.filters['tojson'] = _to_json
  environment.tests['none'] = lambda value: value is None or value is _NULL
  environment.globals['raise_exception'] = refuse
  environment.globals['strftime_now'] = lambda form: datetime.datetime.now().strftime(form)
  return environment.from_string(source)


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
  """Return plain JSON; jinja's own filter escapes it for HTML."""
  return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


if __name__ == '__main__':
  _serve()
