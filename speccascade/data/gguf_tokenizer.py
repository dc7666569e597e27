"""The tokenizer in the metadata of a GGUF file, as the files of one: tokenizer.json or a sentencepiece model.

Byte-level BPE ('gpt2') is written by the tokenizers library; the file names the splitter of texts (`pre`), whose
regular expressions stand here. A vocabulary with scores ('llama') is a sentencepiece model of BPE again, byte by byte
of its protocol buffer: merges that are made of scores would be another thing where scores are not in order.
"""

from collections.abc import Mapping
import json
import struct
from typing import Any, NamedTuple

from speccascade.data import chat, tokenizer_formats
from speccascade.data.gguf_metadata import Metadata
from speccascade.host.errors import first_line

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)  # types of tokens, in GGUF and in sentencepiece
_ENDS = (  # of a turn or a text; of several ends most files name one alone
  *('<|eot_id|>', '<|eom_id|>', '<|end_of_text|>', '<|im_end|>', '<|endoftext|>', '<|end|>'),
  *('<end_of_turn>', '<EOT>'),
)
_SIDES = {'bos_token': 'bos_token_id', 'eos_token': 'eos_token_id'}
_NAMED = _SIDES | {'unk_token': 'unknown_token_id', 'pad_token': 'padding_token_id'}
_CLASSES = {'gpt2': 'PreTrainedTokenizerFast', 'llama': 'LlamaTokenizer'}  # of transformers, by the kind of tokenizer


# ---- splitters ----


class Splitter(NamedTuple):
  """How a text is split before byte-level BPE: each expression divides what those before it have left."""

  patterns: tuple[str, ...]
  whole_words: bool = False  # a word of the vocabulary is one token, whatever the merges
  add_bos: bool = False  # where the file does not say it
  composed: bool = False  # the text is normalised to composed characters first


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = tokenizer_formats.QWEN2_SPLIT.replace(r'|\p{N}|', r'|\p{N}{1,3}|')  # of digits up to three
_LETTERS = r'[^\r\n\p{L}\p{N}]?'  # what may stand before a word
_UPPER, _LOWER = r'[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]', r'[\p{Ll}\p{Lm}\p{Lo}\p{M}]'
_TEKKEN = (
  f'{_LETTERS}{_UPPER}*{_LOWER}+|{_LETTERS}{_UPPER}+{_LOWER}*'
  r'|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_DIGITS = Splitter((r'\p{N}', _GPT2))
_OF_LLAMA3 = Splitter((_LLAMA3,), whole_words=True, add_bos=True)
_OF_QWEN2 = Splitter((tokenizer_formats.QWEN2_SPLIT,), composed=True)
SPLITTERS = {
  'default': Splitter((r'[\p{P}\$\+<=>\^~\|]+', _GPT2, r'\p{N}+', '[0-9][0-9][0-9]')),
  'gpt-2': Splitter((_GPT2,)),
  **dict.fromkeys(('smollm', 'starcoder', 'refact', 'command-r', 'codeshell', 'minerva-7b'), _DIGITS),
  **dict.fromkeys(('llama-bpe', 'llama3', 'llama-v3', 'falcon3', 'pixtral'), _OF_LLAMA3),
  **dict.fromkeys(('smaug-bpe', 'dbrx'), Splitter((_LLAMA3,))),
  **dict.fromkeys(('qwen2', 'deepseek-r1-qwen', 'megrez'), _OF_QWEN2),
  'tekken': Splitter((_TEKKEN,), whole_words=True, add_bos=True),
}


# ---- files ----


def files(metadata: Metadata) -> dict[str, str | bytes]:
  """Return the files of the tokenizer and of its chat templates by name, none where the file has no tokenizer.

  Raises:
    ValueError: the tokenizer is damaged, or of a kind or a splitter that is not known.
  """
  kind = metadata.text('tokenizer.ggml.model', 'none')
  if kind == 'none':
    return {}
  if kind not in _CLASSES:
    raise ValueError(
      f"{metadata.file}: 'tokenizer.ggml.model' is '{kind}', and {' and '.join(_CLASSES)} are read: load it with "
      'tokenizer= and the tokenizer of the model that it was made of'
    )
  tokens = _tokens(metadata)
  named = {name: _token(metadata, key, tokens) for name, key in _NAMED.items()}
  splitter = _splitter(metadata) if kind == 'gpt2' else None
  adds = {
    'bos_token': metadata.switch('tokenizer.ggml.add_bos_token', splitter is None or splitter.add_bos),
    'eos_token': metadata.switch('tokenizer.ggml.add_eos_token', False),
  }
  settings = {'tokenizer_class': _CLASSES[kind], 'clean_up_tokenization_spaces': False}
  settings |= {f'add_{name}': adds[name] for name in _SIDES}
  settings |= {name: token for name, token in named.items() if token is not None}
  if splitter is None:
    settings['add_prefix_space'] = metadata.switch('tokenizer.ggml.add_space_prefix', True)
    vocabulary = {'tokenizer.model': _sentencepiece(metadata, tokens, named, settings['add_prefix_space'])}
  else:
    around = {name: named[name] if adds[name] else None for name in _SIDES}
    vocabulary = {'tokenizer.json': _byte_level(metadata, splitter, tokens, around)}
  settings_file = {tokenizer_formats.CONFIG: json.dumps(settings, indent=2, ensure_ascii=False) + '\n'}
  return vocabulary | settings_file | _templates(metadata)


def eos_ids(metadata: Metadata) -> list[int]:
  """Return the ids that end a text: those that the file names, and tokens whose text is known to end a turn."""
  named = (metadata.integer(f'tokenizer.ggml.{name}_token_id', None) for name in ('eos', 'eot', 'eom'))
  ids = [i for i in named if i is not None]
  if metadata.text('tokenizer.ggml.model', 'none') != 'none':
    kinds = _kinds(metadata, _tokens(metadata))
    ids += [i for i, token in enumerate(_tokens(metadata)) if token in _ENDS and kinds[i] in (_CONTROL, _USER)]
  return [*dict.fromkeys(ids)]


def _tokens(m: Metadata) -> list[str]:
  return m.several('tokenizer.ggml.tokens', str)


def _kinds(m: Metadata, tokens: list[str]) -> list[int]:
  return _as_many(m, 'tokenizer.ggml.token_type', m.several('tokenizer.ggml.token_type', int, None), tokens, _NORMAL)


def _as_many(m: Metadata, key: str, values: list | None, tokens: list[str], default: Any) -> list:
  """Return the values of a key, one for each token, or the default of each."""
  values = [default] * len(tokens) if values is None else values
  if len(values) != len(tokens):
    raise ValueError(f"{m.file}: '{key}' has {len(values)} values for {len(tokens)} tokens: download it again")
  return values


def _token(m: Metadata, key: str, tokens: list[str]) -> str | None:
  """Return the token whose id a key has."""
  i = m.integer(f'tokenizer.ggml.{key}', None)
  if i is not None and i >= len(tokens):
    raise ValueError(f"{m.file}: 'tokenizer.ggml.{key}' is {i}, and there are {len(tokens)} tokens: download it again")
  return None if i is None else tokens[i]


def _templates(m: Metadata) -> dict[str, str]:
  """Return the chat templates by the names of their files: that of the model, and that with tools."""
  keys = {chat.FILE: 'tokenizer.chat_template', chat.TOOLS_FILE: 'tokenizer.chat_template.tool_use'}
  found = {name: m.text(key, None) for name, key in keys.items()}
  return {name: template for name, template in found.items() if template is not None}


# ---- byte-level BPE ----


def _splitter(m: Metadata) -> Splitter:
  name = m.text('tokenizer.ggml.pre', 'default')
  if name not in SPLITTERS:
    raise ValueError(
      f"{m.file}: 'tokenizer.ggml.pre' is '{name}', and {', '.join(SPLITTERS)} are known: load it with tokenizer= and "
      'the tokenizer of the model that it was made of'
    )
  return SPLITTERS[name]


def _byte_level(m: Metadata, splitter: Splitter, tokens: list[str], around: Mapping[str, str | None]) -> str:
  """Return the tokenizer.json of byte-level BPE; `around` has the tokens that are put before and after a text."""
  import tokenizers  # lazily, as the formats do

  kinds = _kinds(m, tokens)
  vocab = {token: i for i, token in enumerate(tokens) if kinds[i] != _UNUSED}
  merges = [tuple(merge.split(' ', 1)) for merge in m.several('tokenizer.ggml.merges', str)]
  try:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, ignore_merges=splitter.whole_words))
  except Exception as error:  # the library raises nothing narrower
    raise ValueError(f"{m.file}: 'tokenizer.ggml.merges' do not fit the tokens ({first_line(error)})") from None
  if splitter.composed:
    tokenizer.normalizer = tokenizers.normalizers.NFC()
  split = tokenizers.pre_tokenizers
  words = [split.Split(tokenizers.Regex(pattern), behavior='isolated') for pattern in splitter.patterns]
  tokenizer.pre_tokenizer = split.Sequence([*words, split.ByteLevel(add_prefix_space=False, use_regex=False)])
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  for i, token in enumerate(tokens):
    if kinds[i] in (_CONTROL, _USER):
      add = tokenizer.add_special_tokens if kinds[i] == _CONTROL else tokenizer.add_tokens
      add([tokenizers.AddedToken(token, normalized=False, special=kinds[i] == _CONTROL)])
  before, after = around['bos_token'], around['eos_token']
  if before or after:
    single = [*([before] if before else []), '$A', *([after] if after else [])]
    ids = [(token, vocab[token]) for token in dict.fromkeys(single) if token != '$A']
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=ids)
  return tokenizer.to_str()


# ---- sentencepiece ----


def _sentencepiece(m: Metadata, tokens: list[str], named: Mapping[str, str | None], space: bool) -> bytes:
  """Return the sentencepiece model of tokens with scores, fields numbered as its ModelProto numbers them."""
  kinds = _kinds(m, tokens)
  scores = _as_many(m, 'tokenizer.ggml.scores', m.several('tokenizer.ggml.scores', float), tokens, 0.0)
  pieces = []
  for token, score, kind in zip(tokens, scores, kinds, strict=True):
    token = token.replace(' ', '▁') if kind == _USER else token  # as the text is when it is looked for
    pieces.append(_field(1, _field(1, token) + _field(2, score) + _field(3, kind)))
  trainer = _field(3, 2) + _field(4, len(tokens)) + _field(35, _BYTE in kinds)  # 2: BPE
  sides = {45: 'unk_token', 46: 'bos_token', 47: 'eos_token', 48: 'pad_token'}
  trainer += b''.join(_field(number, named[name] or '') for number, name in sides.items())
  normalizer = _field(1, 'identity') + _field(3, space) + _field(4, False) + _field(5, True)
  return b''.join(pieces) + _field(2, trainer) + _field(3, normalizer)


def _field(number: int, value: str | bytes | float | int) -> bytes:
  """Return a field of a protocol buffer."""
  if isinstance(value, float):
    return _varint(number << 3 | 5) + struct.pack('<f', value)
  if isinstance(value, int):
    return _varint(number << 3) + _varint(value)
  data = value.encode() if isinstance(value, str) else value
  return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
  """Return an integer of at least 0, seven bits a byte, the lowest first."""
  head = bytes([value & 0x7F | 0x80 * (value > 0x7F)])
  return head if value < 0x80 else head + _varint(value >> 7)
