"""What a user gave: models, prompts and numbers, checked before anything is computed, and padded to static shapes."""

from collections.abc import Sequence
import numbers

import numpy as np

from speccascade import tokenizers
from speccascade.types import Model, Prompt, whole


def check_models(method, models: Sequence[Model]) -> list[Model]:
  """Return the models as a list, having checked that the method can decode with them."""
  models = list(models)
  few = len(models) < method.models
  if few or (len(models) > method.models and method.name != 'autoregressive'):
    raise ValueError(f'{method.name} decodes with {method.models} models, but {len(models)} were given.')
  first, *others = models
  for other in others:
    if (first.network.start_id is None) != (other.network.start_id is None):
      raise ValueError(f'{first.name} and {other.name} cannot share a text: one is an encoder–decoder, one is not.')
  return models


def vocabulary(models: Sequence[Model]) -> int:
  """Return how many token ids the models share; logits beyond them are padding, cut off for all alike."""
  if all(m.tokenizer is not None for m in models):
    return tokenizers.check_vocabularies(models)
  first = models[0]
  for other in models[1:]:
    if other.network.vocab_size != first.network.vocab_size:
      raise ValueError(
        f'The models differ in vocabulary: {first.name} has {first.network.vocab_size} tokens, {other.name} '
        f'{other.network.vocab_size}. Models of one run must share it.'
      )
  return first.network.vocab_size


def encode(models: Sequence[Model], prompts) -> list[np.ndarray]:
  """Return prompts as arrays of token ids, each checked."""
  if isinstance(prompts, str) or not len(prompts):
    raise ValueError('prompts must be a list of texts or of token lists, with one prompt at least.')
  vocab, tokenizer = vocabulary(models), models[-1].tokenizer
  rows = []
  for i, prompt in enumerate(prompts):
    if isinstance(prompt, str):
      if tokenizer is None:
        raise ValueError(f'prompt {i} is a text, but {models[-1].name} has no tokenizer; give token lists.')
      prompt = tokenizer.encode(prompt)
    row = np.asarray(prompt)
    if row.ndim != 1:
      raise ValueError(f'prompt {i} is {prompt!r}; a prompt is a text or a list of token ids.')
    if not row.size:
      raise ValueError(f'prompt {i} is empty; a model needs one token at least.')
    if not np.issubdtype(row.dtype, np.integer) or row.min() < 0 or row.max() >= vocab:
      raise ValueError(f'prompt {i} holds values that are not token ids of 0 … {vocab - 1}: {row[:10].tolist()} …')
    rows.append(row.astype(np.int32))
  return rows


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
  if not isinstance(seed, numbers.Integral) or not 0 <= seed < 2**32:
    raise ValueError(f'seed={seed!r} is not a whole number of 0 … 2^32 - 1.')
  return np.uint32(seed)


def bucket(n: int, least: int = 8) -> int:
  """Round up to 8, 12, 16, 24, 32, 48, … so that few shapes are compiled, and over 8 at most a third is padding."""
  power = least
  while power < n:
    power *= 2
  return power * 3 // 4 if power > least and n <= power * 3 // 4 else power


def prompt_width(models, rows, max_new_tokens: int, given: int | None) -> int:
  """Return the padded prompt length, having checked that every prompt fits it and the models' positions."""
  longest = max(range(len(rows)), key=lambda i: rows[i].size)
  length = rows[longest].size
  if given is not None and length > whole('max_prompt_tokens', given):
    raise ValueError(
      f'prompt {longest} has {length} tokens, more than max_prompt_tokens={given}; shorten it or raise the limit.'
    )
  for model in models:
    network = model.network
    most = network.max_positions
    needed = max_new_tokens + 1 if network.start_id is not None else length + max_new_tokens
    if most is not None and needed > most:
      raise ValueError(
        f'prompt {longest} ({length} tokens) and max_new_tokens={max_new_tokens} need {needed} positions, but '
        f'{model.name} has {most}; shorten one of them.'
      )
  return given or bucket(length)


def by_length(texts: Sequence) -> list[int]:
  """Return the places of the texts or token lists, the longest first."""
  return sorted(range(len(texts)), key=lambda i: -len(texts[i]))


def pad(rows, ids, size: int, width: int) -> tuple[Prompt, np.ndarray, np.ndarray]:
  """Return a batch of `size` rows; those beyond the real ones hold one token 0."""
  tokens = np.zeros((size, width), np.int32)
  length, real, all_ids = np.ones(size, np.int32), np.zeros(size, bool), np.zeros(size, np.uint32)
  for i, row in enumerate(rows):
    tokens[i, : row.size], length[i], real[i], all_ids[i] = row, row.size, True, ids[i]
  return Prompt(tokens, length), all_ids, real
