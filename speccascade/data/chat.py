"""Chat messages rendered by a checkpoint's own template, in the sandbox of jinja2: it is a program."""

from collections.abc import Iterator, Mapping, Sequence
import datetime
import functools
import json
import pathlib
from typing import Any

from speccascade.data.tokenizer_formats import CONFIG

FILE = 'chat_template.jinja'
TOOLS_FILE = 'additional_chat_templates/tool_use.jinja'


def render(
  folder: pathlib.Path,
  messages: Sequence[Mapping[str, Any]],
  settings: Mapping[str, Any],
  arguments: Mapping[str, Any],
  *,
  forbidden: Sequence[str] = (),
  **tokens: str,
) -> str:
  """Return the text of chat messages.

  Args:
    folder: The model's folder, whose chat_template.jinja comes before a template of the settings. With tools the
      template of the name tool_use comes first, where there is one.
    messages: Messages with a role and a content.
    settings: Tokenizer_config.json.
    arguments: Further arguments of the template.
    forbidden: Texts that no message may contain.
    **tokens: The special tokens of the template: bos_token, eos_token, ….

  Returns:
    The text up to where the model's answer begins.

  Raises:
    ValueError: if there is no template, it cannot be read, or it refuses the messages.
  """
  _check(messages, forbidden)
  check_characters(arguments, 'chat_template_kwargs')
  for name in ('messages', *tokens):
    if name in arguments:
      raise ValueError(f'chat_template_kwargs: {name} comes from the messages or the tokenizer; leave it out')
  file, source = _template(folder, settings, with_tools=arguments.get('tools') is not None)
  variables = dict(add_generation_prompt=True, tools=None, documents=None) | arguments | tokens
  try:
    template = _compiled(source)
  except Exception as e:  # jinja raises more than its own errors, as RecursionError
    raise ValueError(f'{file}: the chat template cannot be read ({e}); fetch the file again') from None
  try:
    return template.render(variables | {'messages': list(map(_message, messages))})
  except Exception as e:  # a template is a program, and may raise anything
    reason = str(e) or type(e).__name__
    raise ValueError(
      f'{file}: the chat template refuses the messages ({reason}); change their roles or contents'
    ) from None


def check_characters(value: Any, what: str):
  """Raise if a text, or a text inside of lists and mappings, has a lone surrogate, as JSON's "\\ud83d" is."""
  try:
    ''.join(_strings(value)).encode()
  except UnicodeEncodeError:
    raise ValueError(f'{what} contains half a character (a lone surrogate); read its text as UTF-8') from None


def _check(messages: Sequence[Mapping[str, Any]], forbidden: Sequence[str]):
  if not isinstance(messages, (list, tuple)) or not messages:
    raise ValueError(f"messages={messages!r} must be a list such as [{{'role': 'user', 'content': 'Hello.'}}]")
  for i, message in enumerate(messages):
    if not (isinstance(message, Mapping) and isinstance(message.get('role'), str) and _has_text(message)):
      raise ValueError(
        f'message {i} is {message!r}; a message has a role and a content, both of them texts, or as content parts '
        "[{'type': 'text', 'text': 'Hello.'}]"
      )
    check_characters(message, f'message {i}')
    text = ''.join(_strings(message))
    for token in forbidden:
      if token in text:
        raise ValueError(f'message {i} contains {token}, which the tokenizer reads as a special token; remove it')


def _has_text(message: Mapping[str, Any]) -> bool:
  """Tell whether a message has a text, parts that are texts, or calls of tools alone."""
  content = message.get('content')
  if content is None:
    return bool(message.get('tool_calls'))
  parts = content if isinstance(content, list) else [{'type': 'text', 'text': content}]
  return all(isinstance(x, Mapping) and x.get('type') == 'text' and isinstance(x.get('text'), str) for x in parts)


def _strings(value: Any) -> Iterator[str]:
  """Yield every text inside a message, with a line break after each."""
  if isinstance(value, str):
    yield value + '\n'
  elif isinstance(value, Mapping | list | tuple):
    for part in value.values() if isinstance(value, Mapping) else value:
      yield from _strings(part)


def _template(folder: pathlib.Path, settings: Mapping[str, Any], with_tools: bool) -> tuple[pathlib.Path, str]:
  """Return the file of a folder's template, and the template."""
  for name in (TOOLS_FILE, FILE) if with_tools else (FILE,):
    if (folder / name).is_file():
      return folder / name, (folder / name).read_text(encoding='utf-8')
  file = folder / CONFIG
  template = settings.get('chat_template')
  if isinstance(template, list):
    by_name = {x.get('name'): x.get('template') for x in template if isinstance(x, dict)}
    template = by_name.get('default')
    if with_tools:
      template = by_name.get('tool_use', template)
    if not isinstance(template, str):
      raise ValueError(f"{file}: none of the chat templates {list(by_name)} is called 'default'; put one into {FILE}")
  if not isinstance(template, str):
    raise ValueError(f'{file} has no chat_template, and there is no {FILE} next to it; add one, or give a text')
  return file, template


class _Null(str):
  """A content of null: a template writes it as nothing, where it would write None, and its test `none` holds."""


_NULL = _Null()


class _Parts(list):
  """The parts of a content, for templates that iterate over them; one that writes them as text is an error."""

  def _refuse(self, *_):
    raise TypeError('it takes a content as one text, not as parts')

  __str__ = __add__ = __radd__ = _refuse


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
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
