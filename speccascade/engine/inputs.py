"""Prompts and numbers of a call: each checked, encoded and padded to static shapes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import numbers
from typing import Any
import warnings

import numpy as np

from speccascade.data import chat, tokenizers
from speccascade.types import checked_int, Model, Prompt


def vocabulary(models: Sequence[Model]) -> int:
  """Return how many token ids the models share; logits beyond them are padding, removed for all alike."""
  if all(map(tokenizers.has_pieces, models)):
    return tokenizers.check_vocabularies(models)
  first = models[0]
  for other in models[1:]:
    if other.network.vocab_size != first.network.vocab_size:
      raise ValueError(
        f'The models differ in vocabulary: {first.name} has {first.network.vocab_size} tokens, {other.name} '
        f'{other.network.vocab_size}. Models of one run must share it: see drafters.translated(drafter, for_=large).'
      )
  return first.network.vocab_size


def listed(prompts) -> list:
  """Return the prompts of a call as a list."""
  if isinstance(prompts, str):  # each of whose characters would be a prompt
    raise ValueError(f'prompts={prompts!r} is one text; give a list of texts, as in [{prompts!r}].')
  is_sequence = hasattr(prompts, '__len__') and hasattr(prompts, '__getitem__')  # a data set without an iterator
  if isinstance(prompts, (bytes, dict)) or not (is_sequence or isinstance(prompts, Iterable)):
    raise ValueError(f'prompts={prompts!r} must be a text, chat messages, a speccascade.Request, or a list of prompts.')
  some = list(prompts)
  if not some:
    raise ValueError('prompts must be a list of texts or of token lists, with one prompt at least.')
  return some


class PromptError(ValueError):
  """What is wrong with one prompt of a call; `index` is its place in the list."""

  def __init__(self, index: int, message: str):
    super().__init__(message)
    self.index = index


@contextlib.contextmanager
def of_prompt(index: int) -> Iterator[None]:
  """Make what is raised within an error of one prompt."""
  try:
    yield
  except PromptError:
    raise
  except ValueError as error:
    raise PromptError(index, str(error)) from None


def encode(models: Sequence[Model], prompts, arguments: Sequence[dict | None] = ()) -> list[np.ndarray]:
  """Return prompts as arrays of token ids, each checked; `arguments` are those of the chat template, by prompt."""
  vocab = vocabulary(models)
  rows = []
  for i, prompt in enumerate(listed(prompts)):
    with of_prompt(i):
      rows.append(_encoded(models, i, prompt, arguments[i] if arguments else None, vocab))
  return rows


def _encoded(models: Sequence[Model], i: int, prompt: Any, more: dict | None, vocab: int) -> np.ndarray:
  if more is not None and not (is_chat(prompt) and isinstance(more, dict)):
    raise ValueError(f'prompt {i}: chat_template_kwargs={more!r} is for chat messages, and must be a dict.')
  if is_chat(prompt):
    prompt = _reader(models, i, 'chat messages', 'chat')(prompt, **more or {})
  if isinstance(prompt, str):
    chat.check_characters(prompt, f'prompt {i}')
    prompt = _reader(models, i, 'a text', 'encode')(prompt)
  row = token_ids(prompt, f'prompt {i}', 'a prompt is a text, a list of token ids or chat messages', vocab)
  if not row.size:
    raise ValueError(f'prompt {i} is empty; a model needs one token at least.')
  return row


def token_ids(values, name: str, expected: str, vocab: int) -> np.ndarray:
  """Return a list of token ids as an array, each id checked; it may be empty."""
  try:
    row = np.asarray(values)
  except ValueError:  # uneven lists
    row = np.empty((0, 0))
  if row.ndim != 1:
    raise ValueError(f'{name} is {values!r}; {expected}.')
  if row.size and (not np.issubdtype(row.dtype, np.integer) or row.min() < 0 or row.max() >= vocab):
    raise ValueError(f'{name} has values that are not token ids of 0 … {vocab - 1}: {row[:10].tolist()} …')
  return row.astype(np.int32)


def is_chat(prompt) -> bool:
  """Tell whether a prompt is chat messages."""
  return isinstance(prompt, (list, tuple)) and bool(prompt) and all(isinstance(x, dict) for x in prompt)


def _reader(models: Sequence[Model], i: int, what: str, method: str) -> Callable:
  """Return the method of the last model's tokenizer that reads such a prompt."""
  tokenizer, name = models[-1].tokenizer, models[-1].name
  if tokenizer is None:
    raise ValueError(f'prompt {i} is {what}, but {name} has no tokenizer; give token lists.')
  if not hasattr(tokenizer, method):
    raise ValueError(f'prompt {i} is {what}, but the tokenizer of {name} has no `{method}`; give token lists.')
  return getattr(tokenizer, method)


def check_ids(example_ids, count: int) -> np.ndarray:
  """Return example ids as uint32, one for each prompt."""
  ids = np.arange(count) if example_ids is None else np.asarray(example_ids)
  if ids.shape != (count,):
    raise ValueError(f'{count} prompts need as many example_ids, not {ids.shape[0] if ids.ndim else "a single one"}.')
  if not np.issubdtype(ids.dtype, np.integer) or (ids < 0).any() or (ids >= 2**32).any():
    raise ValueError('example_ids must be whole numbers of 0 … 2^32 - 1.')
  return ids.astype(np.uint32)


def check_seed(seed: int) -> np.uint32:
  """Return the seed as uint32."""
  if not isinstance(seed, numbers.Integral) or isinstance(seed, bool) or not 0 <= seed < 2**32:
    raise ValueError(f'seed={seed!r} is not a whole number of 0 … 2^32 - 1.')
  return np.uint32(seed)


def bucket(n: int, least: int = 8) -> int:
  """Round up to 8, 12, 16, 24, 32, 48, … so that few shapes are compiled, and over 8 at most a third is padding."""
  power = least
  while power < n:
    power *= 2
  return power * 3 // 4 if power > least and n <= power * 3 // 4 else power


def check_fits(models, rows, given: int | None):
  """Raise where a prompt is longer than `given`, or a row longer than a model has positions."""
  longest = max(rows, key=lambda row: row.tokens.size)
  if given is not None and longest.tokens.size > checked_int('max_prompt_tokens', given):
    raise PromptError(
      longest.source,
      f'prompt {longest.source} has {longest.tokens.size} tokens, more than max_prompt_tokens={given}; shorten it or '
      'raise the limit.',
    )
  for model in models:
    row, needed = _most_needed(model.network, rows)
    with of_prompt(row.source):
      check_positions(model, needed, f'prompt {row.source} ({row.tokens.size} tokens) and max_new_tokens={row.max_new}')

  context = _context(models[-1].network)
  if context is not None and longest.tokens.size > context:
    raise PromptError(
      longest.source,
      f'prompt {longest.source} has {longest.tokens.size} tokens, and {models[-1].name} was made for {context} '
      'positions (by its config.json): shorten it, as with truncate=True (--truncate).',
    )


def _context(network) -> int | None:
  """Return beyond how many positions of a text a network that reads more is not to be trusted, if that is known."""
  limited = network.max_positions is not None or network.start_id is not None
  return None if limited else network.context


def truncated(models, tokens: np.ndarray, max_new: int, most: int | None) -> np.ndarray:
  """Return a prompt of at most `most` tokens, and of as many as the models' positions leave beside the new ones.

  A decoder-only model's loses what follows its first token, an encoder–decoder's what precedes its last.
  """
  keeps_start = models[-1].network.start_id is None
  positions = [*(m.network.max_positions for m in models), _context(models[-1].network)] if keeps_start else []
  limits = [*(n - max_new for n in positions if n is not None), *([] if most is None else [most])]
  room = min(limits, default=tokens.size)
  if not 0 < room < tokens.size:
    return tokens
  return np.delete(tokens, slice(1, tokens.size - room + 1) if keeps_start else slice(room - 1, -1))


def check_positions(model: Model, needed: int, texts: str):
  """Raise where a model has fewer positions than `texts`, a prompt and what follows it, need."""
  most = model.network.max_positions
  if most is not None and needed > most:
    raise ValueError(f'{texts} need {needed} positions, but {model.name} has {most}; shorten one of them.')


def prompt_width(models, rows, given: int | None) -> int:
  """Return the padded prompt length, having checked that every row fits it and the models' positions."""
  check_fits(models, rows, given)
  for model in models:
    row, needed = _most_needed(model.network, rows)
    context = _context(model.network)
    if context is not None and needed > context:
      warnings.warn(
        f'prompt {row.source} ({row.tokens.size} tokens) and max_new_tokens={row.max_new} need {needed} '
        f'positions; {model.name} was made for {context} (by its config.json), what it writes beyond may be poor.',
        stacklevel=6,
      )
  return given or bucket(max(row.tokens.size for row in rows))


def _most_needed(network, rows) -> tuple[Any, int]:
  """Return the row that needs most positions, and how many."""

  def needed(row):
    return row.max_new + (1 if network.start_id is not None else row.tokens.size)

  row = max(rows, key=needed)
  return row, needed(row)


def by_length(texts: Sequence) -> list[int]:
  """Return the indices of the texts or token lists, the longest first."""
  return sorted(range(len(texts)), key=lambda i: -len(texts[i]))


def pad(prompts: Sequence[np.ndarray], size: int, width: int) -> Prompt:
  """Return token lists as a batch of `size` rows; those beyond the real ones have one token 0."""
  tokens = np.zeros((size, width), np.int32)
  length = np.ones(size, np.int32)
  for i, prompt in enumerate(prompts):
    tokens[i, : prompt.size], length[i] = prompt, prompt.size
  return Prompt(tokens, length)
