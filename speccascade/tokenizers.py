"""Tokenizers: sentencepiece `.model`, `tokenizer.json`, `vocab.json` + `merges.txt` and ByT5's bytes behind one class.

`encode` follows the family's convention: T5 appends `</s>`, Llama prepends `<s>`, others do what their
post-processor or `tokenizer_config.json` says. A tokenizer is its file: two of the same path are equal and hash alike.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import json
import os
import pathlib
import re
from typing import Any, Protocol

from speccascade import chat, disk
from speccascade.types import Model

# The files that a checkpoint in our own format keeps, so that its tokenizer behaves the same.
FILES = ('tokenizer_config.json', 'special_tokens_map.json', chat.FILE)
_NAMES = ('tokenizer.json', 'spiece.model', 'tokenizer.model')


class _Backend(Protocol):
  """What a file format knows: the raw ids of a text, without the family's convention."""

  prefix: tuple[int, ...]
  suffix: tuple[int, ...]
  eos_ids: tuple[int, ...]

  def encode(self, text: str) -> list[int]: ...

  def control(self) -> dict[str, int]: ...  # the ids of tokens that `encode` does not find in a text

  def decode(self, ids: list[int]) -> str: ...

  def pieces(self) -> list[str]: ...


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """A vocabulary and its convention, read from `path` on first use."""

  path: str

  @property
  def eos_ids(self) -> tuple[int, ...]:
    return _backend(self.path).eos_ids

  def encode(self, text: str, *, begins: bool = True) -> list[int]:
    """Return the ids of a text, with the tokens that the family puts before, where it `begins` a text, and after it."""
    backend = _backend(self.path)
    return [*(backend.prefix if begins else ()), *backend.encode(text), *backend.suffix]

  def chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
    """Return the ids of chat messages by the checkpoint's template, which writes all special tokens itself."""
    folder, backend = pathlib.Path(self.path).parent, _backend(self.path)
    settings, pieces = _settings(folder), _pieces(self.path)
    tokens = {name: pieces[ids[0]] for name, ids in (('bos_token', backend.prefix), ('eos_token', self.eos_ids)) if ids}
    for name in ('bos_token', 'eos_token', 'unk_token', 'pad_token'):
      if token := _content(settings.get(name)):
        tokens[name] = token
    text = chat.render(folder, messages, settings, **tokens)
    return _encode_marked(self.path, backend, text, settings)

  def decode(self, ids: Sequence[int]) -> str:
    """Return the text of ids; control tokens, and ids beyond the pieces (padded logits), have none."""
    known = len(_pieces(self.path))
    return _backend(self.path).decode([int(i) for i in ids if 0 <= i < known])

  def pieces(self) -> list[str]:
    """Return the piece of every id, '' where an id has none."""
    return list(_pieces(self.path))

  def files(self) -> list[str]:
    """Return the tokenizer's files, for copying it beside a checkpoint."""
    here = pathlib.Path(self.path)
    names = [here.name, *(['merges.txt'] if here.name == 'vocab.json' else []), *FILES]
    return [str(here.parent / name) for name in dict.fromkeys(names) if (here.parent / name).is_file()]


def find(path: str | os.PathLike) -> Tokenizer | None:
  """Return the tokenizer at a file, or of a model folder: inside it, else beside it, where sizes share one."""
  path = disk.here(path, _is_of_tokenizer).expanduser().absolute()
  if path.is_file():
    return Tokenizer(str(path))
  for folder in (path, path.parent, path.parent / 'hf_tokenizer'):
    for file in _candidates(folder):
      return Tokenizer(str(file))
  return None


def _is_of_tokenizer(name: str) -> bool:
  return pathlib.PurePosixPath(name).suffix in ('.json', '.model', '.txt', '.jinja')


def load(given: str | os.PathLike | Tokenizer) -> Tokenizer:
  """Return the tokenizer that is given, or that `find` finds at a path, or raise."""
  found = find(given) if isinstance(given, str | os.PathLike) else given
  if found is None:
    raise FileNotFoundError(
      f'{given}: no tokenizer there, expected tokenizer.json, a sentencepiece .model or vocab.json'
    )
  return found


def check_vocabularies(models: Sequence[Model]) -> int:
  """Return how many token ids all models share, or raise where two models differ on one.

  Models agree on every id below the smallest piece count; logits beyond it are padding, to be masked for all alike.
  Models without a tokenizer (made for ids only) count with the width of their logits.
  """
  known = [(m, _pieces(m.tokenizer.path)) for m in models if m.tokenizer is not None]
  shared = min([m.network.vocab_size for m in models] + [len(pieces) for _, pieces in known])
  for model, pieces in known[1:]:
    first, expected = known[0]
    i = _first_difference(first.tokenizer.path, model.tokenizer.path)
    if i is not None:
      raise ValueError(
        f'the vocabularies differ: id {i} is {expected[i]!r} in {first.name} ({first.tokenizer.path}) but '
        f'{pieces[i]!r} in {model.name} ({model.tokenizer.path}); decode with models that share a tokenizer'
      )
  return shared


@functools.lru_cache(maxsize=256)
def _first_difference(path: str, other: str) -> int | None:
  """Return the first id that two vocabularies, as far as both have it, give to different pieces."""
  pairs = zip(_pieces(path), _pieces(other), strict=False)
  return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def _encode_marked(path: str, backend: _Backend, text: str, settings: dict[str, Any]) -> list[int]:
  """Return the ids of a text in which special tokens are written out."""
  known = set(_pieces(path))
  for token in (settings.get('added_tokens_decoder') or {}).values():
    if (token := _content(token)) not in known and token in text:
      raise ValueError(f'{path}: the chat template writes {token}, which is no piece of it; add its tokenizer.json')
  control = backend.control()
  parts = re.split('|'.join(f'({re.escape(token)})' for token in control) or '(?!)', text)
  return [i for part in parts if part for i in ([control[part]] if part in control else backend.encode(part))]


def _candidates(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yield the tokenizer files of a folder, the most complete first."""
  yield from (folder / name for name in _NAMES if (folder / name).is_file())
  models = sorted(folder.glob('*.model')) if folder.is_dir() else []
  if len(models) == 1:
    yield models[0]
  if (folder / 'vocab.json').is_file() and (folder / 'merges.txt').is_file():
    yield folder / 'vocab.json'
  if _settings(folder).get('tokenizer_class') == 'ByT5Tokenizer':
    yield folder / 'tokenizer_config.json'


def _settings(folder: pathlib.Path) -> dict[str, Any]:
  """Return what tokenizer_config.json says, with special_tokens_map.json beneath it."""
  merged = {}
  for name in ('special_tokens_map.json', 'tokenizer_config.json'):
    if (folder / name).is_file():
      try:
        merged.update(json.loads((folder / name).read_text(encoding='utf-8')))
      except (ValueError, TypeError) as e:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ValueError(f'{folder / name}: not a JSON object ({e}); fetch the file again') from None
  return merged


@functools.lru_cache(maxsize=32)
def _backend(path: str) -> _Backend:
  file = pathlib.Path(path)
  if not file.is_file():
    raise FileNotFoundError(f'{path}: the tokenizer file is gone; restore it, or load the model with tokenizer=')
  settings = _settings(file.parent)
  if file.suffix == '.model':
    return _SentencePiece(file, settings)
  return _Bytes(settings) if file.name == 'tokenizer_config.json' else _Fast(file, settings)


@functools.lru_cache(maxsize=32)
def _pieces(path: str) -> tuple[str, ...]:
  return tuple(_backend(path).pieces())


class _SentencePiece:
  """A sentencepiece model; one without a begin token is of T5's kind, which ends its texts instead."""

  def __init__(self, file: pathlib.Path, settings: dict[str, Any]):
    import sentencepiece  # lazily: token ids alone need no tokenizer library

    try:
      self._sp = sentencepiece.SentencePieceProcessor(model_file=str(file))
    except (RuntimeError, OSError) as e:
      raise ValueError(
        f'{file}: not a sentencepiece model ({e}); fetch it again, or keep tokenizer.json beside the weights'
      ) from None
    bos, eos = self._sp.bos_id(), self._sp.eos_id()
    self.eos_ids = (eos,) if eos >= 0 else ()
    self.prefix = (bos,) if bos >= 0 and settings.get('add_bos_token', True) else ()
    self.suffix = self.eos_ids if settings.get('add_eos_token', bos < 0) else ()

  def encode(self, text: str) -> list[int]:
    return self._sp.encode(text)

  def control(self) -> dict[str, int]:
    return {piece: i for i, piece in enumerate(self.pieces()) if self._sp.is_control(i)}

  def decode(self, ids: list[int]) -> str:
    return self._sp.decode(ids)

  def pieces(self) -> list[str]:
    return [self._sp.id_to_piece(i) for i in range(self._sp.get_piece_size())]


class _Fast:
  """A `tokenizer.json`, or the older `vocab.json` + `merges.txt` of byte-level BPE (GPT-2, OPT)."""

  def __init__(self, file: pathlib.Path, settings: dict[str, Any]):
    self._tokenizer = _byte_level(file, settings) if file.name == 'vocab.json' else _tokenizer_json(file)
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    sample = self._tokenizer.encode('a')
    body = [i for i, special in enumerate(sample.special_tokens_mask) if not special] or [len(sample.ids)]
    bos, eos = (self._id(_content(settings.get(key))) for key in ('bos_token', 'eos_token'))
    self.prefix = _override(tuple(sample.ids[: body[0]]), bos, settings.get('add_bos_token'))
    self.suffix = _override(tuple(sample.ids[body[-1] + 1 :]), eos, settings.get('add_eos_token'))
    self.eos_ids = eos or self.suffix

  def _id(self, token: str | None) -> tuple[int, ...]:
    found = None if token is None else self._tokenizer.token_to_id(token)
    return () if found is None else (found,)

  def encode(self, text: str) -> list[int]:
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def control(self) -> dict[str, int]:
    return {}

  def decode(self, ids: list[int]) -> str:
    return self._tokenizer.decode(ids, skip_special_tokens=True)

  def pieces(self) -> list[str]:
    by_id = {i: piece for piece, i in self._tokenizer.get_vocab(with_added_tokens=True).items()}
    return [by_id.get(i, '') for i in range(max(by_id) + 1)]


def _content(token: str | dict | None) -> str | None:
  """Return a special token as settings name it: a string, or an object with its content."""
  return token.get('content') if isinstance(token, dict) else token


def _override(processed: tuple[int, ...], token: tuple[int, ...], wanted: bool | None) -> tuple[int, ...]:
  """Return what goes around a text: the post-processor's tokens unless the settings say otherwise."""
  if wanted is None or not token:
    return processed
  return token if wanted else ()


def _tokenizer_json(file: pathlib.Path) -> Any:
  import tokenizers  # lazily: token ids alone need no tokenizer library

  try:
    return tokenizers.Tokenizer.from_file(str(file))
  except Exception as e:  # the library raises nothing narrower than Exception
    raise ValueError(f'{file}: not a tokenizer.json ({e}); fetch the file again') from None


def _byte_level(file: pathlib.Path, settings: dict[str, Any]) -> Any:
  import tokenizers  # lazily: token ids alone need no tokenizer library

  try:
    model = tokenizers.models.BPE.from_file(str(file), str(file.parent / 'merges.txt'))
  except Exception as e:  # the library raises nothing narrower than Exception
    raise ValueError(f'{file}: not a byte-level vocabulary with its merges.txt ({e}); fetch both again') from None
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  special = (_content(settings.get(key)) for key in ('bos_token', 'eos_token', 'pad_token', 'unk_token'))
  tokenizer.add_special_tokens(
    [token for token in dict.fromkeys(special) if token and tokenizer.token_to_id(token) is not None]
  )
  return tokenizer


class _Bytes:
  """ByT5: three control tokens, the 256 bytes, then the sentinels."""

  _CONTROL = ('<pad>', '</s>', '<unk>')

  def __init__(self, settings: dict[str, Any]):
    self._sentinels = int(settings.get('extra_ids', 125))
    self.prefix, self.suffix, self.eos_ids = (), (1,), (1,)

  def encode(self, text: str) -> list[int]:
    return [byte + len(self._CONTROL) for byte in text.encode('utf-8')]

  def control(self) -> dict[str, int]:
    return {piece: i for i, piece in enumerate(self._CONTROL)}

  def decode(self, ids: list[int]) -> str:
    return bytes(i - 3 for i in ids if 3 <= i < 259).decode('utf-8', errors='ignore')

  def pieces(self) -> list[str]:
    return [*self._CONTROL, *(f'<0x{b:02X}>' for b in range(256)), *(f'<extra_id_{i}>' for i in range(self._sentinels))]
