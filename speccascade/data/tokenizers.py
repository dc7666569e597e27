"""Tokenizers: sentencepiece `.model`, `tokenizer.json`, `vocab.json` + `merges.txt` and ByT5's bytes behind one class.

`encode` follows the family's convention: T5 appends `</s>`, Llama prepends `<s>`, others do what their
post-processor or `tokenizer_config.json` says. Special tokens that stand in a text become their ids, as in
transformers. A tokenizer is its file: two of the same path are equal and hash alike.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import re
from typing import Any, Protocol
import warnings

from speccascade.data import chat
from speccascade.host import storage
from speccascade.types import Model

# The files that a checkpoint in our own format keeps, so that its tokenizer behaves the same.
FILES = ('tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json', chat.FILE)
_NAMES = ('tokenizer.json', 'spiece.model', 'tokenizer.model')
_SPECIAL = ('bos_token', 'eos_token', 'unk_token', 'pad_token')
_STRIPS = {'lstrip': True, 'rstrip': True}
_SWITCHES = (*_STRIPS, 'single_word')  # of an added token: which spaces belong to it, and whether only as a word
SENTINELS = 100  # that T5 has, where nothing says how many
_MOST = 1 << 22  # no vocabulary has an id as large


class _Backend(Protocol):
  """What a file format knows: the raw ids of a text, without the family's convention."""

  prefix: tuple[int, ...]
  suffix: tuple[int, ...]
  eos_ids: tuple[int, ...]

  def encode(self, text: str) -> list[int]: ...

  def special(self) -> list[str]: ...  # the tokens of which `decode` writes nothing unless told to

  def decode(self, ids: list[int], special: bool) -> str: ...

  def pieces(self) -> list[str]: ...


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """A vocabulary and its convention, read from `path` on first use.

  With `plain_chat`, messages that hold special tokens, as a user's `</s>`, are refused; else those become their ids.
  """

  path: str
  plain_chat: bool = False

  @property
  def eos_ids(self) -> tuple[int, ...]:
    return _backend(self.path).eos_ids

  def encode(self, text: str, *, begins: bool = True) -> list[int]:
    """Return the ids of a text, with the tokens that the family puts before, where it `begins` a text, and after it."""
    backend = _backend(self.path)
    return [*(backend.prefix if begins else ()), *backend.encode(text), *backend.suffix]

  def chat(self, messages: Sequence[dict[str, Any]], **arguments) -> list[int]:
    """Return the ids of chat messages by the checkpoint's template, which writes all special tokens itself.

    `arguments` are the template's, as tools=[…] or enable_thinking=False.
    """
    folder, backend = pathlib.Path(self.path).parent, _backend(self.path)
    settings, pieces = _settings(folder), _pieces(self.path)
    tokens = {name: pieces[ids[0]] for name, ids in (('bos_token', backend.prefix), ('eos_token', self.eos_ids)) if ids}
    tokens |= {name: token for name in _SPECIAL if (token := _content(settings.get(name)))}
    text = chat.render(
      folder, messages, settings, arguments, forbidden=backend.special() if self.plain_chat else (), **tokens
    )
    for token in (*_named(settings), *map(_content, (settings.get('added_tokens_decoder') or {}).values())):
      if token not in pieces and token in text:
        raise ValueError(f'{self.path}: the chat template writes {token}, which is no piece of it; correct the files')
    return backend.encode(text)

  def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
    """Return the text of ids; those beyond the pieces (padded logits) have none, nor have special ones unless told."""
    known = len(_pieces(self.path))
    return _backend(self.path).decode([int(i) for i in ids if 0 <= i < known], special)

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
  path = storage.local_copy(path, _is_of_tokenizer).expanduser().absolute()
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
  return _json(folder / 'special_tokens_map.json') | _json(folder / 'tokenizer_config.json')


def _json(file: pathlib.Path) -> dict[str, Any]:
  """Return a JSON object, an empty one where there is no file."""
  try:
    return dict(json.loads(file.read_text(encoding='utf-8'))) if file.is_file() else {}
  except (ValueError, TypeError) as e:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
    raise ValueError(f'{file}: not a JSON object ({e}); fetch the file again') from None


def _named(settings: Mapping[str, Any]) -> list[str]:
  """Return the special tokens that settings name."""
  more = settings.get('additional_special_tokens') or settings.get('extra_special_tokens') or []
  more = more.values() if isinstance(more, dict) else [more] if isinstance(more, str) else more
  return [token for x in (*map(settings.get, _SPECIAL), *more) if (token := _content(x))]


def check_special(model: Model) -> None:
  """Warn of an EOS id that has no piece, and so is never emitted, and of special tokens that have no id."""
  path, pieces = model.tokenizer.path, _pieces(model.tokenizer.path)
  known = set(pieces)
  lost = [f'EOS id {i}' for i in getattr(model.network, 'eos_ids', ()) if i >= len(pieces)]
  lost += [repr(token) for token in dict.fromkeys(_named(_settings(pathlib.Path(path).parent))) if token not in known]
  is_t5 = path.endswith('.model') and getattr(model.network, 'start_id', None) is not None
  if is_t5 and '<extra_id_0>' not in known and model.network.vocab_size - len(pieces) >= SENTINELS:
    lost.append(f'the {SENTINELS} sentinels of T5 (if it has them: {{"extra_ids": {SENTINELS}}} in {FILES[0]})')
  if lost:
    warnings.warn(
      f'{path}: {", ".join(lost[:8])} of {model.name} lie outside its {len(pieces)} tokens and are neither read nor '
      'emitted; put the tokenizer.json or added_tokens.json that has them beside it',
      stacklevel=3,
    )


@functools.lru_cache(maxsize=32)
def _backend(path: str) -> _Backend:
  file = pathlib.Path(path)
  if not file.is_file():
    raise FileNotFoundError(f'{path}: the tokenizer file is gone; restore it, or load the model with tokenizer=')
  settings = _settings(file.parent)
  if file.suffix == '.model':
    return _SentencePiece(file, settings)
  return _Bytes(file, settings) if file.name == 'tokenizer_config.json' else _Fast(file, settings)


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
    pieces = [self._sp.id_to_piece(i) for i in range(self._sp.get_piece_size())]
    control = [piece for i, piece in enumerate(pieces) if self._sp.is_control(i) or self._sp.is_unknown(i)]
    is_t5 = settings.get('tokenizer_class') in ('T5Tokenizer', 'T5TokenizerFast')
    count = _sentinels(settings, SENTINELS if is_t5 else 0)
    sentinels = range(len(pieces) + count - 1, len(pieces) - 1, -1)
    self._added = _Added(pieces, [*control, *_named(settings)], _added(file.parent, settings, sentinels, **_STRIPS))
    self._added.special.pop(self._sp.unk_id(), None)  # which has a text of its own
    bos, eos = self._sp.bos_id(), self._added.ids.get(_content(settings.get('eos_token')), self._sp.eos_id())
    self.eos_ids = (eos,) if eos >= 0 else ()
    self.prefix = (bos,) if bos >= 0 and settings.get('add_bos_token', True) else ()
    self.suffix = self.eos_ids if settings.get('add_eos_token', bos < 0) else ()

  def encode(self, text: str) -> list[int]:
    return self._added.encode(text, self._sp.encode)

  def decode(self, ids: list[int], special: bool) -> str:
    return self._added.decode(ids, special, self._text)

  def _text(self, ids: list[int], begins: bool) -> str:
    apart = not begins and self._sp.id_to_piece(ids[0]).startswith('▁')
    return ' ' * apart + self._sp.decode(ids)

  def special(self) -> list[str]:
    return self._added.named

  def pieces(self) -> list[str]:
    return self._added.pieces


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

  def decode(self, ids: list[int], special: bool) -> str:
    return self._tokenizer.decode(ids, skip_special_tokens=not special)

  def special(self) -> list[str]:
    return [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]

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
    vocab, merges = tokenizers.models.BPE.read_file(str(file), str(file.parent / 'merges.txt'))
  except Exception as e:  # the library raises nothing narrower than Exception
    raise ValueError(f'{file}: not a byte-level vocabulary with its merges.txt ({e}); fetch both again') from None
  named = {vocab[token]: {'content': token, 'special': True} for token in _named(settings) if token in vocab}
  added = named | _added(file.parent, settings)
  vocab |= {token['content']: i for i, token in added.items()}  # for the library chooses the ids of others itself
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  for token in added.values():
    switches = {name: bool(token.get(name)) for name in _SWITCHES}
    add = tokenizer.add_special_tokens if token.get('special') else tokenizer.add_tokens
    add([tokenizers.AddedToken(token['content'], normalized=False, **switches)])
  return tokenizer


class _Bytes:
  """ByT5: three control tokens, the 256 bytes, then the sentinels."""

  _CONTROL = ('<pad>', '</s>', '<unk>')

  def __init__(self, file: pathlib.Path, settings: dict[str, Any]):
    pieces = [*self._CONTROL, *(f'<0x{b:02X}>' for b in range(256))]
    sentinels = range(len(pieces), len(pieces) + _sentinels(settings, 125))
    added = _added(file.parent, settings, sentinels)
    self._added = _Added(pieces, [*self._CONTROL, *_named(settings)], added, **_STRIPS)
    self.prefix, self.suffix, self.eos_ids = (), (1,), (1,)

  def encode(self, text: str) -> list[int]:
    return self._added.encode(text, lambda part: [byte + len(self._CONTROL) for byte in part.encode('utf-8')])

  def decode(self, ids: list[int], special: bool) -> str:
    return self._added.decode(ids, special, lambda run, _: bytes(i - 3 for i in run).decode('utf-8', errors='ignore'))

  def special(self) -> list[str]:
    return self._added.named

  def pieces(self) -> list[str]:
    return self._added.pieces


# ---- tokens beside a vocabulary ----


def _added(folder: pathlib.Path, settings: Mapping[str, Any], sentinels: Iterable[int] = (), **switches) -> dict:
  """Return the tokens that T5's sentinels, added_tokens.json and the settings add to a vocabulary, by id."""
  special = _named(settings)
  found = {str(i): {'content': f'<extra_id_{n}>', 'special': True} | switches for n, i in enumerate(sentinels)}
  beside = _json(folder / 'added_tokens.json').items()
  found |= {str(i): {'content': token, 'special': token in special} for token, i in beside}
  decoder = settings.get('added_tokens_decoder') or {}
  if not isinstance(decoder, dict):
    raise ValueError(f'{folder}: added_tokens_decoder={decoder!r} is not tokens by id; correct {FILES[0]}')
  found |= decoder
  for i, token in found.items():
    if not (i.isdecimal() and int(i) < _MOST and isinstance(token, dict) and token.get('content')):
      raise ValueError(f'{folder}: the added token {token!r} has the id {i!r}, which is none; correct {FILES[0]}')
  return {int(i): token for i, token in found.items()}


def _sentinels(settings: Mapping[str, Any], default: int) -> int:
  count = settings.get('extra_ids')
  count = default if count is None else count
  if type(count) is not int or not 0 <= count < _MOST:
    raise ValueError(f'{FILES[0]}: extra_ids={count!r} is not a whole number of 0 or more; correct it')
  return count


class _Added:
  """A vocabulary's pieces with the tokens that are found in a text as they stand: those added to it, and `control`."""

  def __init__(self, pieces: Sequence[str], control: Sequence[str], added: Mapping[int, dict], **switches):
    known = set(control)
    own = {i: {'content': piece, 'special': True} | switches for i, piece in enumerate(pieces) if piece in known}
    tokens = own | dict(added)
    self.pieces = [*pieces, *[''] * (max(tokens, default=0) + 1 - len(pieces))]
    for i, token in tokens.items():
      self.pieces[i] = token['content']
    self.ids = {token['content']: i for i, token in tokens.items()}
    self.special = {i: bool(token.get('special')) for i, token in tokens.items()}
    self.named = [token['content'] for token in tokens.values() if token.get('special')]
    self._tokens = {token['content']: token for token in tokens.values()}
    self._pattern = _pattern(tokens.values())

  def encode(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Return the ids of a text, whose parts between the tokens `encode` gives."""
    parts = self._pattern.split(text)  # text, token, text, …, text
    ids = []
    for at in range(0, len(parts), 2):
      part = parts[at]
      if at and self._tokens[parts[at - 1]].get('rstrip'):
        part = part.lstrip()
      if at + 1 < len(parts) and self._tokens[parts[at + 1]].get('lstrip'):
        part = part.rstrip()
      ids += encode(part) if part else []
      ids += [self.ids[token] for token in parts[at + 1 : at + 2]]
    return ids

  def decode(self, ids: Iterable[int], special: bool, text: Callable[[list[int], bool], str]) -> str:
    """Return the text of ids; `text` gives that of a run of the vocabulary's own, told whether it begins the text."""
    found = ''
    wanted = (i for i in ids if (special or not self.special.get(i)) and self.pieces[i])  # an id may have no piece
    for added, run in itertools.groupby(wanted, self.special.__contains__):
      run = list(run)
      found += ''.join(self.pieces[i] for i in run) if added else text(run, not found)
    return found


def _pattern(tokens: Iterable[Mapping[str, Any]]) -> re.Pattern:
  """Return what splits a text at tokens, of which the longest goes first."""
  forms = []
  for token in sorted(tokens, key=lambda token: -len(token['content'])):
    form = re.escape(token['content'])
    forms.append(rf'(?<!\w){form}(?!\w)' if token.get('single_word') else form)
  return re.compile(f'({"|".join(forms) or "(?!)"})')
