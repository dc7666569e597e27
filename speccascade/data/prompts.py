r"""Prompts and references made of records, truncated to a number of tokens.

A prompt is the prefix, a header, worked examples and the question. If it is too long, worked examples are
dropped from the last on, then the text of the question is truncated.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
import itertools
import string
from typing import Any

import numpy as np

from speccascade.data import chat, tokenizers
from speccascade.data.examples import Example, Prompt

Record = Mapping[str, Any]


class Fitter:
  """Builds prompts of at most `limit` tokens.

  Args:
    tokenizer: Path of the models' tokenizer; None truncates nothing.
    limit: Number of tokens.
  """

  def __init__(self, tokenizer: str | None, limit: int):
    self._tokenizer = None if tokenizer is None else tokenizers.load(tokenizer)
    self._limit = limit

  def excess(self, prompt: Prompt) -> int:
    """Return by how many tokens a text or chat messages exceed the limit; 0 or less if they fit."""
    if self._tokenizer is None:
      return 0
    encode = self._tokenizer.encode if isinstance(prompt, str) else self._tokenizer.chat
    return len(encode(prompt)) - self._limit

  def __call__(self, render: Callable[[str], Prompt], text: str) -> Prompt:
    """Return `render(text)` with as much of the text's beginning as fits the limit."""
    prompt = render(text)
    while (excess := self.excess(prompt)) > 0:
      # One pass usually suffices; more are needed where the shorter text is split into other tokens.
      shorter = self._tokenizer.decode(self._tokenizer.encode(text)[:-excess])
      is_beginning = len(shorter) < len(text) and text.startswith(shorter)  # unknown characters decode to others
      text = shorter if is_beginning else self._longest(render, text, len(shorter))
      if not text:
        around = str(render(''))[:60]
        raise ValueError(f'{around!r} leaves no room for a text in max_prompt_tokens={self._limit}; raise it.')
      prompt = render(text)
    return prompt

  def _longest(self, render: Callable[[str], Prompt], text: str, guess: int) -> str:
    """Return the longest beginning of a text that fits the limit, found around a guess of its length."""
    low, high, step = 0, len(text), 1  # `low` characters fit, `high` do not
    while high - low > 1:
      k = guess if low < guess < high else (low + high) // 2
      if self.excess(render(text[:k])) <= 0:
        low, guess = k, k + step
      else:
        high, guess = k, k - step
      step *= 2
    return text[:low]


NO_LIMIT = Fitter(None, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Template:
  r"""How a record becomes a prompt and its reference.

  A field is named, as in 'question', or filled into a template, as in 'Question: {question}\nAnswer:'.

  Attributes:
    prompt_field: The question. A field of chat messages or token ids is the prompt as it is.
    target_field: The reference; a field may be a list of references, and None is no reference.
    worked_field: The answer in a worked example; None is the first reference.
    text_field: The field whose end is truncated if the prompt is too long; None is the longest one.
    info_fields: Fields that metrics need.
    header: An instruction before the worked examples, a text or a template.
    prefix: Text at the beginning of the prompt.
    chat: Whether the prompt is a user's message, for the models' chat template; a text is the system's message.
  """

  prompt_field: str = 'prompt'
  target_field: str | None = 'target'
  worked_field: str | None = None
  text_field: str | None = None
  info_fields: Sequence[str] = ()
  header: str = ''
  prefix: str = ''
  chat: bool | str = False

  def example(
    self, index: int, record: Record, where: str, fit: Fitter, worked: Sequence[tuple[str, str]] = ()
  ) -> Example:
    """Return the example of a record.

    Args:
      index: Its position in the split.
      record: The fields.
      where: Describes the origin of the record, for errors.
      fit: Truncates the prompt.
      worked: What `worked` returned of other records.
    """
    info = {name: field(record, name, where) for name in self.info_fields}
    return Example(index, self.prompt(record, where, fit, worked), self.target(record, where), info)

  def prompt(
    self, record: Record, where: str, fit: Fitter = NO_LIMIT, worked: Sequence[tuple[str, str]] = ()
  ) -> Prompt:
    """Return the prompt of a record: a text, chat messages or token ids."""
    ready = field(record, self.prompt_field, where) if '{' not in self.prompt_field else None
    if is_tokens_or_chat(ready):
      if worked or any((self.header, self.prefix, self.chat)):
        raise ValueError(f'{where}: {self.prompt_field} is a list; prefix, shots and chat need a text: leave them out.')
      chat.check_characters(ready, f'{where}: the field {self.prompt_field!r}')
      return ready
    render, text = self._question(record, where)
    question = render(text)
    header = _filled(self.header, record, where) if '{' in self.header else self.header
    opening = self.prefix + header
    others = [shot for asked, shot in worked if asked != question]
    system = [{'role': 'system', 'content': self.chat}] if isinstance(self.chat, str) else []

    def build(count: int, text: str) -> Prompt:
      text = opening + ''.join(others[:count]) + render(text)
      return [*system, {'role': 'user', 'content': text}] if self.chat else text

    count = len(others)
    while count and fit.excess(build(count, text)) > 0:
      count -= 1
    return fit(functools.partial(build, count), text)

  def worked(self, record: Record, where: str) -> tuple[str, str]:
    """Return the question of a record, and the question with its answer."""
    render, text = self._question(record, where)
    question = render(text)
    if self.worked_field is None:
      target = self.target(record, where)
      answer = target if isinstance(target, str) else next(iter(target), None)
      if answer is None:
        raise ValueError(f'{where} has no reference, so that it is no worked example; take shots=0.')
    else:
      answer = _filled(self.worked_field, record, where)
    return question, f'{question}{"" if question[-1:].isspace() else " "}{answer}\n\n'

  def target(self, record: Record, where: str) -> str | list[str]:
    """Return the reference of a record, or a list of them."""
    if self.target_field is None:
      return []
    value = _texts(self.target_field, record, where).get(self.target_field)
    if isinstance(value, list):
      return [str(reference) for reference in value]
    return _filled(self.target_field, record, where)

  def _question(self, record: Record, where: str) -> tuple[Callable[[str], str], str]:
    """Return what renders the question about a text, and the text."""
    values = {name: str(value) for name, value in _texts(self.prompt_field, record, where).items()}
    if not values:
      raise ValueError(f'{where}: the prompt {self.prompt_field!r} names no field; write {{field}} for one.')
    name = self.text_field if self.text_field in values else max(values, key=lambda name: len(values[name]))
    if '{' not in self.prompt_field:
      return lambda text: text, values[name]
    return lambda text: self.prompt_field.format_map({**values, name: text}), values[name]


def is_tokens_or_chat(value: Any) -> bool:
  """Return whether a value is a list of token ids or of chat messages."""
  if not isinstance(value, list) or not value:
    return False
  return all(isinstance(x, Mapping) for x in value) or all(type(x) is int for x in value)


def field(record: Record, name: str, where: str) -> Any:
  """Return a field of a record, which must have it."""
  if name not in record:
    raise ValueError(f'{where}: no field {name!r}; the fields are {", ".join(record)}.')
  return record[name]


def _texts(template: str, record: Record, where: str) -> dict[str, Any]:
  """Return the fields that a template names (a name alone is one), checked to be text, numbers or lists."""
  names = [template]
  if '{' in template:
    try:
      names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as e:
      raise ValueError(f'{where}: the template {template!r} cannot be read ({e}); double literal braces.') from None
  fields = {name: field(record, name, where) for name in names}
  for name, value in fields.items():
    if value is None or (isinstance(value, list) and None in value):
      raise ValueError(f'{where}: the field {name!r} is null; give it a text, or remove the line.')
    chat.check_characters(value, f'{where}: the field {name!r}')
  return fields


def _filled(template: str, record: Record, where: str) -> str:
  """Return a template filled with the fields of a record, or the field that it names."""
  values = _texts(template, record, where)
  return template.format_map(values) if '{' in template else str(values[template])


def select(items: Iterable[Any], count: int | None = None, seed: int | None = None) -> list[tuple[int, Any]]:
  """Return `count` items, each with its index.

  Args:
    items: The items, read no further than needed.
    count: Number of items; None for all.
    seed: None takes the first items; a number takes a random subset in the order of the items. A smaller subset of one
      seed is a part of a larger one.

  Raises:
    ValueError: if `count` is out of range.
  """
  if count is not None and count < 1:
    raise ValueError(f'count={count} must be at least 1, or None for all.')
  numbered = enumerate(items)
  if count is None or seed is None:
    return list(itertools.islice(numbered, count))
  rest = list(numbered)
  chosen = np.random.default_rng(seed).permutation(len(rest))[:count]
  return [rest[i] for i in sorted(chosen)]


def truncation(stop: Sequence[str]) -> Callable[[str, Example], str] | None:
  """Return a postprocessing that ends predictions at the first of some stop strings, or None if there are none."""
  if isinstance(stop, str):
    raise ValueError(f'stop={stop!r} is not a list; write ({stop!r},).')

  def truncate(text: str, example: Example) -> str:
    return text[: min((text.find(s) for s in stop if s in text), default=len(text))]

  return truncate if stop else None
