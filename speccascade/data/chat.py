"""Chat messages rendered by a checkpoint's own template."""

from collections.abc import Iterator, Mapping, Sequence
import pathlib
from typing import Any

from speccascade.data import templates
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
  defaults = dict(add_generation_prompt=True, tools=None, documents=None)
  text = templates.render(file, source, {**defaults, **arguments, **tokens, 'messages': list(map(dict, messages))})
  check_characters(text, f'the chat template of {file}')
  return text


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
