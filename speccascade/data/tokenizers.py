"""Tokenizers: sentencepiece `.model`, `tokenizer.json`, `vocab.json` + `merges.txt` and ByT5's bytes in one class.

`encode` follows the family's convention: T5 appends `</s>`, Llama prepends `<s>`, others do what their post-processor
or `tokenizer_config.json` says. Special tokens in a text become their ids, as in transformers. Two tokenizers of one
path are equal.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import os
import pathlib
from typing import Any
import warnings

from speccascade.data import chat, sources, tokenizer_formats
from speccascade.data.tokenizer_formats import content, SENTINELS
from speccascade.types import Model

# The files that decide how a tokenizer behaves, besides its vocabulary; saved with a checkpoint.
FILES = (tokenizer_formats.CONFIG, 'special_tokens_map.json', 'added_tokens.json', chat.FILE, chat.TOOLS_FILE)
SUFFIXES = ('.json', '.model', '.txt', '.jinja')
_NAMES = ('tokenizer.json', 'spiece.model', 'tokenizer.model')


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """A vocabulary with its family's convention, read on first use.

  Attributes:
    path: The tokenizer file.
    plain_chat: Refuses chat messages with special tokens in them, as a user's `</s>`, which otherwise become their ids.
  """

  path: str
  plain_chat: bool = False

  @property
  def eos_ids(self) -> tuple[int, ...]:
    """The ids that end a sequence."""
    return tokenizer_formats.read(self.path).eos_ids

  @property
  def special_ids(self) -> dict[str, int]:
    """The id of each special token, which `decode` leaves out by default."""
    return tokenizer_formats.read(self.path).special_ids

  def encode(self, text: str, *, begins: bool = True) -> list[int]:
    """Return the ids of a text.

    Args:
      text: The text.
      begins: Whether it begins a sequence, and gets the tokens that the family puts before one.

    Returns:
      The ids, with the tokens that the family puts after a text.
    """
    tokens = tokenizer_formats.read(self.path)
    return [*(tokens.prefix if begins else ()), *tokens.encode(text), *tokens.suffix]

  def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
    """Return the text of ids.

    Args:
      ids: Token ids; those outside the vocabulary (padded logits) have no text.
      special: Whether to write special tokens.
    """
    tokens = tokenizer_formats.read(self.path)
    return tokens.decode([int(i) for i in ids if 0 <= i < len(tokens.pieces)], special)

  def chat(self, messages: Sequence[dict[str, Any]], /, **arguments) -> list[int]:
    """Return the ids of chat messages by the checkpoint's template; the arguments are those of `chat_text`."""
    return tokenizer_formats.read(self.path).encode(self.chat_text(messages, **arguments))

  def chat_text(self, messages: Sequence[dict[str, Any]], /, **arguments) -> str:
    """Return the text of chat messages by the checkpoint's template.

    Args:
      messages: Messages as [{'role': 'user', 'content': 'Hello.'}].
      **arguments: Arguments of the template, as tools=[…] or enable_thinking=False.

    Returns:
      The text with its special tokens, up to where the model's answer begins.

    Raises:
      ValueError: if there is no template, or it refuses the messages.
    """
    folder = pathlib.Path(self.path).parent
    tokens = tokenizer_formats.read(self.path)
    settings = tokenizer_formats.read_settings(folder)
    sides = {'bos_token': tokens.prefix, 'eos_token': tokens.eos_ids}
    special = {name: tokens.pieces[ids[0]] for name, ids in sides.items() if ids}
    extra = settings.get('extra_special_tokens')
    named = {name: settings.get(name) for name in tokenizer_formats.SPECIAL}
    named |= extra if isinstance(extra, dict) else {}
    special |= {name: content(token) for name, token in named.items() if content(token)}
    forbidden = tokens.special if self.plain_chat else ()
    text = chat.render(folder, messages, settings, arguments, forbidden=forbidden, **special)
    added = (settings.get('added_tokens_decoder') or {}).values()
    for token in (*tokenizer_formats.named_tokens(settings), *map(content, added)):
      if token in text and token not in tokens.pieces:
        raise ValueError(f'{self.path}: the chat template writes {token}, which is not in it; correct the files')
    return text

  def pieces(self) -> list[str]:
    """Return the piece of every id, '' for an id without one."""
    return list(tokenizer_formats.read(self.path).pieces)

  def files(self) -> list[str]:
    """Return the paths of the tokenizer's files, to save with a checkpoint."""
    file = pathlib.Path(self.path)
    names = [file.name, *(['merges.txt'] if file.name == 'vocab.json' else []), *FILES]
    return [str(file.parent / name) for name in dict.fromkeys(names) if (file.parent / name).is_file()]


def find(path: str | os.PathLike, revision: str | None = None) -> Tokenizer | None:
  """Return the tokenizer of a source.

  Args:
    path: A tokenizer file, or the source of a model, as `load` takes it, of which no weights are fetched; the folder
      above it is searched too, where models share a tokenizer.
    revision: Branch, tag or commit of a model of the hub.

  Returns:
    The tokenizer, or None if there is none.
  """
  source, _ = sources.parse(path)
  chosen = lambda names, _: sources.described(names, SUFFIXES)  # noqa: E731
  path = sources.find(source, chosen, ['hf_tokenizer'], revision=revision).path
  if path.is_file():
    return Tokenizer(str(path))
  latest = [path / f'checkpoint_{max(steps)}'] if (steps := sources.steps_in(path)) else []  # of T5X
  folders = path, *latest, path / 'hf_tokenizer', path.parent, path.parent / 'hf_tokenizer'
  candidates = (file for folder in folders for file in _candidates(folder))
  file = next(candidates, None)
  return file and Tokenizer(str(file))


def _candidates(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yield the tokenizer files of a folder, the most complete first."""
  yield from (folder / name for name in _NAMES if (folder / name).is_file())
  models = sorted(folder.glob('*.model')) if folder.is_dir() else []
  if len(models) == 1:
    yield models[0]
  if (folder / 'vocab.json').is_file() and (folder / 'merges.txt').is_file():
    yield folder / 'vocab.json'
  if tokenizer_formats.read_settings(folder).get('tokenizer_class') == 'ByT5Tokenizer':
    yield folder / tokenizer_formats.CONFIG


def load(given: str | os.PathLike | Tokenizer) -> Tokenizer:
  """Return a tokenizer.

  Args:
    given: A tokenizer, which is returned, or a path as in `find`.

  Raises:
    FileNotFoundError: if there is no tokenizer at the path.
  """
  tokenizer = find(given) if isinstance(given, str | os.PathLike) else given
  if tokenizer is None:
    raise FileNotFoundError(
      f'{given}: no tokenizer there, expected tokenizer.json, a sentencepiece .model or vocab.json'
    )
  return tokenizer


def check_vocabularies(models: Sequence[Model]) -> int:
  """Return the number of token ids that models share.

  Args:
    models: Models, of which those without a `Tokenizer` (made for ids only, or with one of a user's own) count with the
      width of their logits.

  Returns:
    The size of the smallest vocabulary; logits beyond it are padding, to be masked for all alike.

  Raises:
    ValueError: if two models have different pieces for one id.
  """
  known = [(m, tokenizer_formats.read(m.tokenizer.path).pieces) for m in models if has_pieces(m)]
  for model, pieces in known[1:]:
    first, expected = known[0]
    i = _difference(first, model)
    if i is not None:
      raise ValueError(
        f'the vocabularies differ: id {i} is {expected[i]!r} in {first.name} ({first.tokenizer.path}) but '
        f'{pieces[i]!r} in {model.name} ({model.tokenizer.path}); decode with models that share a tokenizer, or '
        'see a drafter through the tokens of the last model: drafters.translated(drafter, for_=large), or --translate'
      )
  return min([m.network.vocab_size for m in models] + [len(pieces) for _, pieces in known])


def has_pieces(model: Model) -> bool:
  """Tell whether the pieces of a model's vocabulary are known, as those of a tokenizer of a user's own are not."""
  return isinstance(model.tokenizer, Tokenizer)


def are_alike(model: Model, other: Model) -> bool:
  """Tell whether two models have the same piece for every id that both have; where they are unknown, as many tokens."""
  if not (has_pieces(model) and has_pieces(other)):
    return model.network.vocab_size == other.network.vocab_size
  return _difference(model, other) is None


def _difference(model: Model, other: Model) -> int | None:
  """Return the first id that the vocabularies of two models, as far as both have it, give to different pieces."""
  return _first_difference(*(tokenizer_formats.read(m.tokenizer.path) for m in (model, other)))


@functools.lru_cache(maxsize=32)
def _first_difference(one: tokenizer_formats.Format, other: tokenizer_formats.Format) -> int | None:
  pairs = zip(one.pieces, other.pieces, strict=False)
  return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def check_special(model: Model) -> None:
  """Warn of EOS ids and special tokens of a model that are missing from its tokenizer files."""
  path = model.tokenizer.path
  pieces = model.tokenizer.pieces()
  size = len(pieces)
  missing = [f'EOS id {i}' for i in model.network.eos_ids if i >= size]
  special = tokenizer_formats.named_tokens(tokenizer_formats.read_settings(pathlib.Path(path).parent))
  missing += [repr(token) for token in dict.fromkeys(special) if token not in pieces]
  is_t5 = path.endswith('.model') and model.network.start_id is not None
  if is_t5 and '<extra_id_0>' not in pieces and model.network.vocab_size - size >= SENTINELS:
    missing.append(f'the {SENTINELS} sentinels of T5 (if it has them: {{"extra_ids": {SENTINELS}}} in {FILES[0]})')
  if missing:
    warnings.warn(
      f'{path}: {", ".join(missing[:8])} of {model.name} lie outside its {size} tokens and are neither read nor '
      'emitted; add the tokenizer.json or added_tokens.json that has them',
      stacklevel=3,
    )
