"""Chat messages as the text that a checkpoint's own template makes of them."""

from collections.abc import Mapping, Sequence
import functools
import json
import pathlib
from typing import Any

FILE = 'chat_template.jinja'
CONFIG = 'tokenizer_config.json'


def render(folder: pathlib.Path, messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], **tokens) -> str:
  """Return the text of the messages, up to where the model's answer begins.

  The template is chat_template.jinja of the folder, or else in `settings`; `tokens` are its bos_token, eos_token, ….
  """
  import jinja2  # lazily: only chat needs it

  _check(messages)
  file, source = _template(folder, settings)
  try:
    template = _compiled(source)
  except jinja2.TemplateError as e:
    raise ValueError(f'{file}: the chat template cannot be read ({e}); fetch the file again') from None
  try:
    return template.render(messages=messages, add_generation_prompt=True, tools=None, documents=None, **tokens)
  except Exception as e:  # a template is a program, and what it may raise is not known
    raise ValueError(f'{file}: the chat template refuses the messages ({e}); change their roles or contents') from None


def _check(messages: Sequence[Mapping[str, Any]]):
  if not isinstance(messages, (list, tuple)) or not messages:
    raise ValueError(f"messages={messages!r} must be a list such as [{{'role': 'user', 'content': 'Hello.'}}]")
  for i, message in enumerate(messages):
    fields = [message.get(name) for name in ('role', 'content')] if isinstance(message, Mapping) else []
    if not fields or not all(isinstance(x, str) for x in fields):
      raise ValueError(f'message {i} is {message!r}; a message has a role and a content, both of them texts')


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
  import jinja2
  import jinja2.sandbox

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=['jinja2.ext.loopcontrols']
  )
  environment.filters['tojson'] = _to_json
  environment.globals['raise_exception'] = _refuse
  return environment.from_string(source)


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
  """Return JSON as it is, where jinja's own filter escapes it for HTML."""
  return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str):
  import jinja2

  raise jinja2.TemplateError(message)
