"""The file formats of tokenizers: sentencepiece, `tokenizer.json`, `vocab.json` + `merges.txt`, and ByT5's bytes.

A format knows the ids of a text, and which tokens its family puts around one. Special tokens, and tokens that the
settings add to a vocabulary, are recognised in a text, as transformers does it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import functools
import itertools
import json
import math
import os
import pathlib
import re
import reprlib
from typing import Any

from speccascade.host.errors import first_line

CONFIG = 'tokenizer_config.json'
SPECIAL = ('bos_token', 'eos_token', 'unk_token', 'pad_token', 'sep_token', 'cls_token', 'mask_token')
SENTINELS = 100  # of T5, where the settings have no number
_BESIDE = (CONFIG, 'special_tokens_map.json', 'added_tokens.json', 'merges.txt')  # what a tokenizer is made of, too
_MOST_CHARACTERS = 1 << 23  # of a text that the library reads, which needs 300 bytes for each
_NOT_OF_LIBRARY = KeyboardInterrupt, SystemExit, MemoryError
_MAX_ID = 1 << 22  # larger than any vocabulary
_STRIPS = {'lstrip': True, 'rstrip': True}  # of sentinels and control tokens: they take the spaces around them
_TEXT = '\0'  # marks the text between added tokens
_MARK = '\ue000'  # a character that no piece has, so that it merges with none, takes the space before a text
_BYTE = re.compile('<0x([0-9A-F]{2})>')
_GPT2 = ('GPT2Tokenizer', 'GPT2TokenizerFast')  # OPT's too
_QWEN2 = ('Qwen2Tokenizer', 'Qwen2TokenizerFast')
QWEN2_SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_FLAGS = (*_STRIPS, 'single_word')  # of an added token: which spaces belong to it, and whether it must be a word


class Format:
  """What a file format knows of texts.

  Attributes:
    prefix: Ids that the family puts before a text.
    suffix: Ids that the family puts after a text.
    eos_ids: Ids that end a sequence.
    pieces: The piece of every id, '' for an id without one.
    special: Tokens that `decode` leaves out by default.
  """

  prefix: tuple[int, ...] = ()
  suffix: tuple[int, ...] = ()
  eos_ids: tuple[int, ...] = ()
  pieces: list[str]
  special: list[str]

  @functools.cached_property
  def special_ids(self) -> dict[str, int]:
    """The id of each special token."""
    special = {*self.special}
    return {piece: i for i, piece in enumerate(self.pieces) if piece in special}

  def spellings(self) -> list[bytes | str | None]:
    """Return what each id stands for: bytes inside a text, the name of a special token, None for an id without a piece.

    Two formats have the same spelling of the same token.
    """
    special = {*self.special}
    return [piece if piece in special else self._written(piece) if piece else None for piece in self.pieces]

  def _written(self, piece: str) -> bytes:
    """Return the bytes of a piece of sentencepiece, in which ▁ is a space and <0x0A> a byte."""
    byte = _BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace('▁', ' ').encode()

  def encode(self, text: str) -> list[int]:
    """Return the ids of a text alone."""
    raise NotImplementedError

  def decode(self, ids: Sequence[int], special: bool) -> str:
    """Return the text of ids, with or without special tokens."""
    raise NotImplementedError


def read(path: str) -> Format:
  """Return the format of a tokenizer file, read again only where it, or a file that belongs to it, has changed."""
  folder = os.path.dirname(path)
  return _read(path, *(_stamp(path if name is None else os.path.join(folder, name)) for name in (None, *_BESIDE)))


def _stamp(path: str) -> tuple[int, ...] | None:
  """Return what changes with the content of a file, None where there is none."""
  try:
    found = os.stat(path)
  except OSError:
    return None
  return found.st_mtime_ns, found.st_size, found.st_ino


@functools.lru_cache(maxsize=32)
def _read(path: str, *_stamps: tuple[int, ...] | None) -> Format:
  file = pathlib.Path(path)
  if not file.is_file():
    raise FileNotFoundError(f'{path}: the tokenizer file is gone; restore it, or load the model with tokenizer=')
  settings = read_settings(file.parent)
  if file.suffix == '.model':
    return _SentencePiece(file, settings)
  return _Bytes(file, settings) if file.name == CONFIG else _Fast(file, settings)


# ---- settings ----


def read_settings(folder: pathlib.Path) -> dict[str, Any]:
  """Return tokenizer_config.json, completed by special_tokens_map.json."""
  return _checked(folder / 'special_tokens_map.json') | _checked(folder / CONFIG)


def _read_json(file: pathlib.Path) -> dict[str, Any]:
  """Return a JSON object, an empty one if there is no file."""
  try:
    read = json.loads(file.read_text(encoding='utf-8')) if file.is_file() else {}
    if not isinstance(read, dict):
      raise ValueError(f'but a {type(read).__name__}')
  except (ValueError, RecursionError) as e:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
    raise ValueError(f'{file}: not a JSON object ({e}); fetch the file again') from None
  return read


def _checked(file: pathlib.Path) -> dict[str, Any]:
  """Return the settings of a file, each of the type that it must have, or null."""
  settings = _read_json(file)
  for keys, is_right, expected in _TYPES:
    for key in keys:
      if (value := settings.get(key)) is not None and not is_right(value):
        raise ValueError(f'{file}: {key}={reprlib.repr(value)} is not {expected}; correct the file')
  return settings


def _is_token(value: Any) -> bool:
  flags = (value.get(flag) for flag in (*_FLAGS, 'special', 'normalized')) if isinstance(value, dict) else ()
  text = value.get('content') if isinstance(value, dict) else value
  return isinstance(text, str) and all(flag is None or isinstance(flag, bool) for flag in flags)


def _are_tokens(value: Any) -> bool:
  parts = value.values() if isinstance(value, dict) else value
  return isinstance(value, str) or (isinstance(value, list | dict) and all(map(_is_token, parts)))


def _are_tokens_by_id(value: Any) -> bool:
  def is_id(i):
    return i.isdecimal() and len(i) < 10 and int(i) < _MAX_ID

  return isinstance(value, dict) and all(is_id(i) and isinstance(t, dict) and _is_token(t) for i, t in value.items())


def _is_template(value: Any) -> bool:
  def named(x):
    return isinstance(x, dict) and isinstance(x.get('name'), str) and isinstance(x.get('template'), str)

  return isinstance(value, str) or (isinstance(value, list) and all(map(named, value)))


# Keys that are read, a test of their values, and what it tests.
_TYPES: Sequence[tuple[Sequence[str], Callable[[Any], bool], str]] = (
  (('add_bos_token', 'add_eos_token', 'add_prefix_space', 'legacy'), lambda x: isinstance(x, bool), 'true or false'),
  (SPECIAL, _is_token, 'a token: a text, or an object with its content, a text, and flags that are true or false'),
  (('additional_special_tokens', 'extra_special_tokens'), _are_tokens, 'a list or an object of tokens'),
  (('added_tokens_decoder',), _are_tokens_by_id, f'an object of tokens by their ids, of 0 to {_MAX_ID - 1}'),
  (('extra_ids',), lambda x: type(x) is int and 0 <= x < _MAX_ID, f'an integer of 0 to {_MAX_ID - 1}'),
  (('tokenizer_class',), lambda x: isinstance(x, str), 'a name'),
  (('chat_template',), _is_template, 'a text, or a list of objects with a name and a template'),
)


def content(token: str | dict | None) -> str | None:
  """Return a special token of the settings: a string, or an object with its content."""
  return token.get('content') if isinstance(token, dict) else token


def named_tokens(settings: Mapping[str, Any]) -> list[str]:
  """Return the special tokens that the settings name."""
  more = settings.get('additional_special_tokens') or settings.get('extra_special_tokens') or []
  if isinstance(more, str):
    more = [more]
  tokens = [settings.get(name) for name in SPECIAL] + list(more.values() if isinstance(more, dict) else more)
  return [content(token) for token in tokens if content(token)]


def _added_tokens(
  folder: pathlib.Path, settings: Mapping[str, Any], sentinels: Iterable[int] = (), **flags: bool
) -> dict[int, dict]:
  """Return the tokens that sentinels, added_tokens.json and the settings add to a vocabulary, by id."""
  special = named_tokens(settings)
  tokens = {str(i): {'content': f'<extra_id_{n}>', 'special': True} | flags for n, i in enumerate(sentinels)}
  listed = _read_json(folder / 'added_tokens.json').items()
  tokens |= {str(i): {'content': token} for token, i in listed}
  tokens |= settings.get('added_tokens_decoder') or {}
  for i, token in tokens.items():
    if not _are_tokens_by_id({i: token}) or not token['content']:
      raise ValueError(f'{folder}: {i!r} is not the id of a token, or {token!r} not a token; correct added_tokens.json')

  def is_special(token):
    return bool(token.get('special')) or token['content'] in special

  return {int(i): token | {'special': is_special(token)} for i, token in tokens.items()}


def _sentinel_count(settings: Mapping[str, Any], default: int) -> int:
  count = settings.get('extra_ids')
  return default if count is None else count


# ---- formats that know only their vocabulary ----


class _WithAddedTokens(Format):
  """A vocabulary with control and added tokens, which are recognised in a text before it is encoded."""

  def _add(self, pieces: Sequence[str], control: Iterable[str], added: Mapping[int, dict], **flags: bool):
    """Set the pieces, of which `control` are special, and the added tokens by id."""
    import tokenizers  # lazily: token ids alone need no tokenizer library

    control = set(control)
    tokens = {i: {'content': piece, 'special': True} | flags for i, piece in enumerate(pieces) if piece in control}
    tokens |= added
    self.pieces = [*pieces, *[''] * (max(tokens, default=0) + 1 - len(pieces))]
    for i, token in tokens.items():
      self.pieces[i] = token['content']
    self.special = [token['content'] for token in tokens.values() if token.get('special')]
    self._ids = {token['content']: i for i, token in tokens.items()}
    self._is_special = {i: bool(token.get('special')) for i, token in tokens.items()}
    self._splitter = tokenizers.Tokenizer(tokenizers.models.WordLevel({_TEXT: 0}, unk_token=_TEXT))
    self._splitter.add_tokens([_library_token(token) for token in tokens.values()])
    self._id_of_split = {self._splitter.token_to_id(token): i for token, i in self._ids.items()}

  def encode(self, text):
    split = self._splitter.encode(text)
    ids = []
    for i, (start, end) in zip(split.ids, split.offsets, strict=True):
      ids += [self._id_of_split[i]] if i else self._encode_plain(text[start:end], begins=not start)
    return ids

  def decode(self, ids, special):
    text = ''
    shown = (i for i in ids if (special or not self._is_special.get(i)) and self.pieces[i])  # an id may have no piece
    for added, run in itertools.groupby(shown, self._is_special.__contains__):
      run = list(run)
      text += ''.join(self.pieces[i] for i in run) if added else self._decode_plain(run, begins=not text)
    return text

  def _encode_plain(self, text: str, begins: bool) -> list[int]:
    """Return the ids of a text without added tokens, which may begin the whole text."""
    raise NotImplementedError

  def _decode_plain(self, ids: list[int], begins: bool) -> str:
    """Return the text of ids without added tokens, which may begin the text."""
    raise NotImplementedError


def _library_token(token: Mapping[str, Any]) -> Any:
  """Return an added token as the tokenizers library has it."""
  import tokenizers  # lazily: token ids alone need no tokenizer library

  flags = {name: bool(token.get(name)) for name in _FLAGS}
  return tokenizers.AddedToken(token['content'], normalized=False, **flags)


class _SentencePiece(_WithAddedTokens):
  """A sentencepiece model; one without a begin token ends its texts instead, as T5's.

  It puts a space before a text, and before what follows an added token unless the settings have `legacy` false.
  """

  def __init__(self, file: pathlib.Path, settings: dict[str, Any]):
    import sentencepiece  # lazily: token ids alone need no tokenizer library

    try:
      self._model = sentencepiece.SentencePieceProcessor(model_file=str(file))
    except (RuntimeError, OSError) as e:
      raise ValueError(
        f'{file}: not a sentencepiece model ({e}); fetch it again, or put tokenizer.json next to the weights'
      ) from None
    size = self._model.get_piece_size()
    pieces = [self._model.id_to_piece(i) for i in range(size)]
    control = [piece for i, piece in enumerate(pieces) if self._model.is_control(i) or self._model.is_unknown(i)]
    is_t5 = settings.get('tokenizer_class') in ('T5Tokenizer', 'T5TokenizerFast')
    sentinels = range(size + _sentinel_count(settings, SENTINELS if is_t5 else 0) - 1, size - 1, -1)
    added = _added_tokens(file.parent, settings, sentinels, **_STRIPS)
    self._add(pieces, [*control, *named_tokens(settings)], added)
    self._is_special.pop(self._model.unk_id(), None)  # sentencepiece has a text for it
    bos = self._model.bos_id()
    eos = self._ids.get(content(settings.get('eos_token')), self._model.eos_id())
    self.eos_ids = (eos,) if eos >= 0 else ()
    self.prefix = (bos,) if bos >= 0 and settings.get('add_bos_token', True) else ()
    self.suffix = self.eos_ids if settings.get('add_eos_token', bos < 0) else ()
    first = settings.get('add_prefix_space') is not False
    self._spaces = {True: first, False: first and (is_t5 or settings.get('legacy') is not False)}
    self._mark = self._model.encode(_MARK, out_type=str)
    self._has_prefix = self._model.encode('a', out_type=str)[0].startswith('▁')

  def _without_prefix(self, text: str) -> list[int]:
    """Return the ids of a text without the space that the model puts before one."""
    marked = self._model.encode(_MARK + text, out_type=str)
    mark = self._mark
    is_joined = marked[len(mark) - 1] != mark[-1]  # by unknown characters, which with an unknown mark are one piece
    return self._model.encode(_MARK + text)[len(mark) - is_joined :]

  def _encode_plain(self, text, begins):
    return self._model.encode(text) if self._spaces[begins] else self._without_prefix(text)

  def _decode_plain(self, ids, begins):
    stripped = self._has_prefix and self._model.id_to_piece(ids[0]).startswith('▁')
    return ' ' * (stripped and not (begins and self._spaces[True])) + self._model.decode(ids)


class _Bytes(_WithAddedTokens):
  """ByT5: three control tokens, the 256 bytes, then the sentinels."""

  _CONTROL = ('<pad>', '</s>', '<unk>')

  def __init__(self, file: pathlib.Path, settings: dict[str, Any]):
    pieces = [*self._CONTROL, *(f'<0x{b:02X}>' for b in range(256))]
    sentinels = range(len(pieces), len(pieces) + _sentinel_count(settings, 125))
    added = _added_tokens(file.parent, settings, sentinels)
    self._add(pieces, [*self._CONTROL, *named_tokens(settings)], added, **_STRIPS)
    self.suffix = self.eos_ids = (1,)

  def _encode_plain(self, text, begins):
    return [byte + len(self._CONTROL) for byte in text.encode('utf-8')]

  def _decode_plain(self, ids, begins):
    return bytes(i - len(self._CONTROL) for i in ids).decode('utf-8', errors='ignore')


# ---- the tokenizers library ----


class _Fast(Format):
  """A `tokenizer.json`, or the older `vocab.json` + `merges.txt` of byte-level BPE (GPT-2, OPT, Qwen2)."""

  def __init__(self, file: pathlib.Path, settings: dict[str, Any]):
    self._file = file
    self._growth = 1.0  # how many characters the normalizer may make of one
    if file.name == 'vocab.json':
      self._tokenizer = _byte_level(file, settings)
    else:
      self._tokenizer, self._growth = _tokenizer_json(file)
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    by_id = {i: piece for piece, i in self._tokenizer.get_vocab(with_added_tokens=True).items()}
    largest = max(by_id, default=_MAX_ID)
    if largest >= _MAX_ID:
      problem = f'{by_id[largest]!r} has the id {largest}, over {_MAX_ID - 1}' if by_id else 'it has no tokens'
      raise ValueError(f'{file}: {problem}; fetch the file again')
    self.pieces = [by_id.get(i, '') for i in range(largest + 1)]
    added = self._tokenizer.get_added_tokens_decoder().values()
    self.special = [token.content for token in added if token.special]
    self._check_length('a')
    sample = self._call(self._tokenizer.encode, 'a')
    text = [i for i, special in enumerate(sample.special_tokens_mask) if not special] or [len(sample.ids)]
    bos = self._ids(settings.get('bos_token'))
    eos = self._ids(settings.get('eos_token'))
    self.prefix = _around(sample.ids[: text[0]], bos, settings.get('add_bos_token'))
    self.suffix = _around(sample.ids[text[-1] + 1 :], eos, settings.get('add_eos_token'))
    self.eos_ids = eos or self.suffix
    self._added = {token.content for token in added}
    decoder = self._tokenizer.decoder
    steps = b'' if decoder is None else decoder.__getstate__()
    self._bytes = _bytes_of_characters() if b'"ByteLevel"' in steps else None
    self._falls_back = b'"ByteFallback"' in steps

  def _call(self, function: Callable, *args, **settings) -> Any:
    """Call the library, whose errors are of any class: those of a regular expression are no Exceptions."""
    try:
      return function(*args, **settings)
    except _NOT_OF_LIBRARY:
      raise
    except BaseException as e:
      raise ValueError(
        f'{self._file}: it cannot do with a text ({first_line(e)[:200]}); give its model an unk_token where it lacks '
        'one, or fetch the file again'
      ) from None

  def _written(self, piece):
    if self._bytes is None or piece in self._added or not {*piece} <= self._bytes.keys():
      return super()._written(piece)
    return bytes(self._bytes[character] for character in piece)

  def _ids(self, token: str | dict | None) -> tuple[int, ...]:
    i = None if content(token) is None else self._tokenizer.token_to_id(content(token))
    return () if i is None else (i,)

  def _check_length(self, text: str):
    """Raise for a text for which the library, which ends the process where memory does, may need too much."""
    if len(text) * self._growth > _MOST_CHARACTERS:
      more = f', of each of which its normalizer may make {self._growth:.3g}' if self._growth > 1 else ''
      raise ValueError(
        f'{self._file}: a text has {len(text)} characters{more}, more than {_MOST_CHARACTERS}; divide the text'
      )

  def encode(self, text):
    self._check_length(text)
    return self._call(self._tokenizer.encode, text, add_special_tokens=False).ids

  def decode(self, ids, special):
    text = self._call(self._tokenizer.decode, ids, skip_special_tokens=not special)
    if not self._falls_back or '\ufffd' not in text:
      return text
    # The library gives up all characters of a run of bytes in which one is not whole.
    hidden = () if special else self.special
    shown = (self.pieces[i] for i in ids if self.pieces[i] and self.pieces[i] not in hidden)
    return self._tokenizer.decoder.decode([*_with_characters(shown)])


def _with_characters(pieces: Iterable[str]) -> Iterator[str]:
  """Yield pieces, those of the bytes of a whole character as that character."""
  for is_byte, run in itertools.groupby(pieces, lambda piece: _BYTE.fullmatch(piece) is not None):
    if is_byte:
      text = bytes(int(piece[3:5], 16) for piece in run).decode(errors='surrogateescape')
      run = (f'<0x{ord(c) - 0xDC00:02X}>' if '\udc80' <= c <= '\udcff' else c for c in text)
    yield from run


def _bytes_of_characters() -> dict[str, int]:
  """Return the byte that each character of a byte-level piece stands for (Radford et al. 2019).

  A byte that Latin-1 prints is its own character, the others are the characters from U+0100 on, in their order.
  """
  printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  others = (byte for byte in range(256) if byte not in printed)
  return {chr(byte): byte for byte in printed} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def _around(processed: Sequence[int], token: tuple[int, ...], add: bool | None) -> tuple[int, ...]:
  """Return the ids on one side of a text: those of the post-processor unless the settings decide otherwise."""
  if add is None or not token:
    return tuple(processed)
  return token if add else ()


def _tokenizer_json(file: pathlib.Path) -> tuple[Any, float]:
  """Return the library's tokenizer, and how many characters its normalizer may make of one."""
  import tokenizers  # lazily: token ids alone need no tokenizer library

  content = _read_json(file)
  model = content.get('model')
  vocab = model.get('vocab') if isinstance(model, dict) else None
  _check_ids(file, vocab.items() if isinstance(vocab, dict) else ())
  added = content.get('added_tokens')
  named = [x for x in added if isinstance(x, dict)] if isinstance(added, list) else []
  _check_ids(file, [(x.get('content'), x.get('id')) for x in named])
  try:
    return tokenizers.Tokenizer.from_file(str(file)), _growth(content.get('normalizer'))
  except _NOT_OF_LIBRARY:
    raise
  except BaseException as e:  # the library raises nothing narrower
    raise ValueError(f'{file}: not a tokenizer.json ({first_line(e)}); fetch the file again') from None


def _check_ids(file: pathlib.Path, ids: Iterable[tuple[Any, Any]]) -> None:
  """Raise for an id that is none of a vocabulary, before the library makes room for so many."""
  for piece, i in ids:
    if type(i) is not int or not 0 <= i < _MAX_ID:
      raise ValueError(
        f'{file}: {reprlib.repr(piece)} has the id {reprlib.repr(i)}, expected one of 0 to {_MAX_ID - 1}; fetch the '
        'file again'
      )


def _growth(normalizer: Any) -> float:
  """Return how many characters a normalizer may make of one by replacing, at the most."""
  if not isinstance(normalizer, dict):
    return 1.0
  steps = normalizer.get('normalizers')
  if isinstance(steps, list):
    return math.prod(map(_growth, steps))
  pattern, new = (normalizer.get(key) for key in ('pattern', 'content'))
  if not isinstance(pattern, dict) or not isinstance(new, str):
    return 1.0
  least = len(pattern['String']) if isinstance(pattern.get('String'), str) else _least(str(pattern.get('Regex')))
  return max(1.0, len(new) / least) if least else 1.0 + len(new)


def _least(pattern: str) -> int:
  """Return how many characters a match of a regular expression has at least; 0 where Python does not know it."""
  try:
    return re._parser.parse(pattern).getwidth()[0]
  except (re.error, RecursionError, OverflowError):
    return 0


def _byte_level(file: pathlib.Path, settings: dict[str, Any]) -> Any:
  import tokenizers  # lazily: token ids alone need no tokenizer library

  kind = settings.get('tokenizer_class')
  if kind is not None and kind not in _GPT2 + _QWEN2:
    raise ValueError(
      f'{file.parent}: its tokenizer_class {kind!r} has no rules here for vocab.json + merges.txt (only '
      f'{", ".join(_GPT2 + _QWEN2)} have); write its tokenizer.json with transformers: '
      'AutoTokenizer.from_pretrained(folder, use_fast=True).save_pretrained(folder)'
    )
  _check_ids(file, _read_json(file).items())
  try:
    vocab, merges = tokenizers.models.BPE.read_file(str(file), str(file.parent / 'merges.txt'))
  except _NOT_OF_LIBRARY:
    raise
  except BaseException as e:  # the library raises nothing narrower
    raise ValueError(
      f'{file}: not a byte-level vocabulary with its merges.txt ({first_line(e)}); fetch both again'
    ) from None
  added = {vocab[token]: {'content': token, 'special': True} for token in named_tokens(settings) if token in vocab}
  added |= _added_tokens(file.parent, settings)
  vocab |= {token['content']: i for i, token in added.items()}  # otherwise the library chooses their ids
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
  split = tokenizers.pre_tokenizers
  if kind in _QWEN2:
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    words = split.Split(tokenizers.Regex(QWEN2_SPLIT), behavior='isolated')
    tokenizer.pre_tokenizer = split.Sequence([words, split.ByteLevel(add_prefix_space=False, use_regex=False)])
  else:
    tokenizer.pre_tokenizer = split.ByteLevel(add_prefix_space=bool(settings.get('add_prefix_space')))
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  for token in added.values():
    add = tokenizer.add_special_tokens if token.get('special') else tokenizer.add_tokens
    add([_library_token(token)])
  return tokenizer
