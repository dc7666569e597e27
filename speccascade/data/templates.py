"""Chat templates, in the sandbox of jinja2: a template comes with a checkpoint and is a program."""

import datetime
import functools
import json
from typing import Any


def render(where: Any, source: str, variables: dict[str, Any]) -> str:
  """Return the text of a template.

  Args:
    where: The template's file, for errors.
    source: The template.
    variables: Its variables, where None and a list as `content` of a message are those of a chat.

  Raises:
    ValueError: it cannot be read, or refuses the messages.
  """
  try:
    template = _compiled(source)
  except Exception as e:  # jinja raises more than its own errors, as RecursionError
    raise ValueError(f'{where}: the chat template cannot be read ({e}); fetch the file again') from None
  try:
    return template.render(variables | {'messages': list(map(_message, variables['messages']))})
  except Exception as e:  # a template is a program, and may raise anything
    reason = str(e) or type(e).__name__
    raise ValueError(
      f'{where}: the chat template refuses the messages ({reason}); change their roles or contents'
    ) from None


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
  import jinja2.ext  # lazily: few models chat
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
