"""Chat messages as the text that a checkpoint's own template makes of them."""

from collections.abc import Iterator, Mapping, Sequence
import datetime
import functools
import json
import pathlib
from typing import Any

FILE = 'chat_template.jinja'
CONFIG = 'tokenizer_config.json'


def render(
  folder: pathlib.Path, messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any],
  arguments: Mapping[str, Any], *, forbidden: Sequence[str] = (), **tokens,
) -> str:  # fmt: skip
  """Return the text of the messages, up to where the model's answer begins.

  The template is chat_template.jinja of the folder, or else in `settings`; `tokens` are its bos_token, eos_token, …,
  `arguments` what else it is given. Messages that hold one of the `forbidden` texts are refused.
  """
  import jinja2  # lazily: only chat needs it

  _check(messages, forbidden)
  if wrong := [name for name in arguments if name in ('messages', *tokens)]:
    raise ValueError(f'chat_template_kwargs: {wrong[0]} is of the messages or the tokenizer; leave it out')
  file, source = _template(folder, settings)
  try:
    template = _compiled(source)
  except jinja2.TemplateError as e:
    raise ValueError(f'{file}: the chat template cannot be read ({e}); fetch the file again') from None
  given = dict(add_generation_prompt=True, tools=None, documents=None) | dict(arguments)
  in_parts = lambda message: {'content': _Parts(message['content'])} if isinstance(message.get('content'), list) else {}
  messages = [{**message, **in_parts(message)} for message in messages]
  try:
    return template.render(messages=messages, **given, **tokens)
  except Exception as e:  # a template is a program, and what it may raise is not known
    raise ValueError(f'{file}: the chat template refuses the messages ({e}); change their roles or contents') from None


class _Parts(list):
  """The parts of a content, for templates that look for them; one that writes it as a text would write Python's."""

  def _refuse(self, *_):
    raise TypeError('it takes a content as one text, not in parts')

  __str__ = __add__ = __radd__ = _refuse


def _check(messages: Sequence[Mapping[str, Any]], forbidden: Sequence[str]):
  if not isinstance(messages, (list, tuple)) or not messages:
    raise ValueError(f"messages={messages!r} must be a list such as [{{'role': 'user', 'content': 'Hello.'}}]")
  for i, message in enumerate(messages):
    texts = _texts(message) if isinstance(message, Mapping) and isinstance(message.get('role'), str) else None
    if texts is None:
      raise ValueError(
        f'message {i} is {message!r}; a message has a role and a content, both of them texts, or as content parts '
        "[{'type': 'text', 'text': 'Hello.'}]"
      )
    said = ''.join(_strings(message))
    for token in forbidden:
      if token in said:
        raise ValueError(f'message {i} holds {token}, which the tokenizer would read as a special token; remove it')


def _texts(message: Mapping[str, Any]) -> list[str] | None:
  """Return the texts of a message's content, None where it is neither a text nor parts that are texts."""
  content = message.get('content')
  if content is None and message.get('tool_calls'):
    return []
  parts = content if isinstance(content, list) else [{'type': 'text', 'text': content}]
  right = [isinstance(x, Mapping) and x.get('type') == 'text' and isinstance(x.get('text'), str) for x in parts]
  return [x['text'] for x in parts] if all(right) else None


def _strings(value: Any) -> Iterator[str]:
  """Yield every text inside a message, with a break after each."""
  if isinstance(value, str):
    yield value + '\n'
  elif isinstance(value, Mapping | list | tuple):
    for part in value.values() if isinstance(value, Mapping) else value:
      yield from _strings(part)


def _template(folder: pathlib.Path, settings: Mapping[str, Any]) -> tuple[pathlib.Path, str]:
  """Return a folder's template and the file that has it."""
  if (folder / FILE).is_file():
    return folder / FILE, (folder / FILE).read_text(encoding='utf-8')
  file, found = folder / CONFIG, settings.get('chat_template')
  if isinstance(found, list):
    named = {x.get('name'): x.get('template') for x in found if isinstance(x, dict)}
    if not isinstance(named.get('default'), str):
      raise ValueError(f"{file}: of the chat templates {list(named)} none is called 'default'; put one into {FILE}")
    found = named['default']
  if not isinstance(found, str):
    raise ValueError(f'{file} has no chat_template and there is no {FILE} beside it; add one, or give a text')
  return file, found


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
  import jinja2.ext
  import jinja2.sandbox

  class Generation(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %}, around what a model is trained on: here the text inside."""

    tags = {'generation'}

    def parse(self, parser):
      line = next(parser.stream).lineno
      body = parser.parse_statements(['name:endgeneration'], drop_needle=True)
      return jinja2.nodes.Scope(body, lineno=line)

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, 'jinja2.ext.loopcontrols']
  )
  environment.filters['tojson'] = _to_json
  environment.globals['raise_exception'] = _refuse
  environment.globals['strftime_now'] = lambda form: datetime.datetime.now().strftime(form)
  return environment.from_string(source)


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
  """Return JSON as it is, where jinja's own filter escapes it for HTML."""
  return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str):
  import jinja2

  raise jinja2.TemplateError(message)
