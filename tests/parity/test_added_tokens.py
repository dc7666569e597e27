"""Tokens that are added to a vocabulary have the ids that transformers and seqio give them, in folders made here."""

import json

import pytest
from vocabularies import bare, byte_level, t5

from speccascade import embedded
from speccascade.data import tokenizers

TURN = {'content': '<|turn|>', 'lstrip': False, 'rstrip': False, 'single_word': False, 'normalized': False}
TEXTS = [
  'A dog <extra_id_0> along the <extra_id_1>.',
  'A dog<extra_id_99>runs',
  '<extra_id_2> A dog runs.</s> a',
  'a<|turn|>b <|turn|> dog  <|turns|><pad>',
  ' A dog   runs <unk> </s> a',
]


T5 = dict(tokenizer_class='T5Tokenizer', eos_token='</s>', unk_token='<unk>', pad_token='<pad>')
GPT2 = dict(tokenizer_class='GPT2Tokenizer', after=['<|endoftext|>'])
GPT2 |= dict.fromkeys(('eos_token', 'bos_token', 'unk_token'), '<|endoftext|>')


def at(i: int, special: bool) -> dict:
  """Return settings that add a token by its id."""
  return {'added_tokens_decoder': {str(i): TURN | {'special': special}}}


CASES = {
  't5, 100 sentinels': (t5, T5 | {'extra_ids': 100}, {}),
  't5, sentinels unsaid': (t5, T5, {}),
  't5, another special token': (t5, T5 | {'extra_ids': 5} | at(1005, special=True), {}),
  't5, another token': (t5, T5 | {'extra_ids': 5} | at(1005, special=False), {}),
  'gpt2, added_tokens.json': (byte_level, GPT2 | {'eos_token': '<|turn|>'}, {'<|turn|>': 259}),
  'gpt2, another special token': (byte_level, GPT2 | at(259, special=True), {}),
  'gpt2, another token': (byte_level, GPT2 | at(259, special=False), {}),
  'byt5': (bare, {'tokenizer_class': 'ByT5Tokenizer', 'extra_ids': 125}, {}),
}


@pytest.fixture(params=CASES)
def folder(request, tmp_path):
  """Return a folder with a vocabulary and tokens beside it."""
  write, settings, added = CASES[request.param]
  write(tmp_path, **settings)
  if added:
    (tmp_path / 'added_tokens.json').write_text(json.dumps(added))
  return tmp_path


def test_ids_and_texts_equal_transformers(folder):
  transformers = pytest.importorskip('transformers')
  theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), tokenizers.find(folder)
  assert len(ours.pieces()) == len(theirs) and ours.eos_ids == (theirs.eos_token_id,)
  for text in TEXTS:
    ids = theirs(text).input_ids
    assert ours.encode(text) == ids, text
    if theirs.unk_token_id not in ids:  # of which sentencepiece writes a mark of its own
      assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
      assert ours.decode(ids, special=True) == theirs.decode(ids)


def test_sentinels_equal_seqio(tmp_path):
  seqio = pytest.importorskip('seqio')
  ours = t5(tmp_path, **T5, extra_ids=100)
  theirs = seqio.SentencePieceVocabulary(embedded.vocabulary(), extra_ids=100)
  for text in ('A dog <extra_id_0> along the <extra_id_1> .', '<extra_id_2> A dog runs <extra_id_99>', 'A dog runs.'):
    assert ours.encode(text) == [*theirs.encode(text), 1]
