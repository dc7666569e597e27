"""Give a checkpoint another vocabulary, without training: to measure what drafting through other tokens costs.

python -m experiments.translated.give_vocabulary MODEL TEXTS OUT [--kind sentencepiece] [--size 4096] [--field TEMPLATE]

A tokenizer is trained on the texts. A token that both vocabularies have keeps its rows of the embedding and the head,
any other has the mean of the rows of the tokens that its text consists of, the longest first.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import speccascade
from speccascade.checkpoints.hf import writer
from speccascade.data import files, tokenizer_formats, tokenizers
from speccascade.drafters import translation
from speccascade.host import commands
from speccascade.train import vocabulary
from speccascade.types import Model

BEGIN, END, PAD = '<|begin|>', '<|end|>', '<|pad|>'


def byte_level(folder: Path, texts: list[str], size: int, *, begins: bool) -> tokenizers.Tokenizer:
  """Train byte-level BPE, with single digits; `begins` is whether a text has a token before it, or one after it."""
  from tokenizers import decoders, models, pre_tokenizers, processors, Tokenizer, trainers

  made = Tokenizer(models.BPE())
  by_byte = pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_byte])
  made.decoder = decoders.ByteLevel()
  special = [PAD, END, BEGIN]
  trainer = trainers.BpeTrainer(
    vocab_size=size, special_tokens=special, initial_alphabet=by_byte.alphabet(), show_progress=False
  )
  made.train_from_iterator(texts, trainer)
  around, i = (f'{BEGIN} $A', 2) if begins else (f'$A {END}', 1)
  made.post_processor = processors.TemplateProcessing(single=around, special_tokens=[(special[i], i)])
  folder.mkdir(parents=True, exist_ok=True)
  made.save(str(folder / 'tokenizer.json'))
  settings = {'pad_token': PAD, 'eos_token': END} | ({'bos_token': BEGIN} if begins else {})
  (folder / 'tokenizer_config.json').write_text(json.dumps(settings))
  return tokenizers.load(folder)


def sentencepiece(folder: Path, texts: list[str], size: int, *, begins: bool) -> tokenizers.Tokenizer:
  """Train a BPE of sentencepiece, with bytes for what it lacks and single digits."""
  vocabulary.make(
    folder / 'tokenizer.model',
    texts,
    size=size,
    hard_vocab_limit=False,  # few texts have fewer pieces
    model_type='bpe',
    character_coverage=0.9995,
    byte_fallback=True,
    split_digits=True,
    bos_id=3 if begins else -1,
    user_defined_symbols=['\n'],
  )
  return tokenizers.load(folder)


KINDS = {'byte_level': byte_level, 'sentencepiece': sentencepiece}


def with_vocabulary(model: Model, tokenizer: tokenizers.Tokenizer) -> Model:
  """Return a T5 or a decoder with the tokens of another tokenizer."""
  size = len(tokenizer.pieces())
  config = dataclasses.replace(model.network.config, vocab_size=size)
  network = dataclasses.replace(model.network, config=config, eos_ids=tokenizer.eos_ids)
  new = Model({}, network, tokenizer, f'{model.name}-{size}')
  tables = translation.translated(model, for_=new).params[translation.TABLES]
  read, write = (np.asarray(tables[name]) for name in ('read', 'write'))
  old = ids_of(model.tokenizer)
  new_spellings = tokenizer_formats.read(tokenizer.path).spellings()
  rows = [[read[i]] if write[i] >= 0 else pieces(new_spellings[i], old) or [read[i]] for i in range(size)]
  mean = lambda x: jnp.asarray(np.stack([np.asarray(x)[ids].mean(0) for ids in rows]), x.dtype)
  params = dict(model.params)
  params['token_embedder'] = {'embedding': mean(params['token_embedder']['embedding'])}
  head = params['decoder'] if 'decoder' in params else params
  if 'logits_dense' in head:
    head = {**head, 'logits_dense': {'kernel': mean(head['logits_dense']['kernel'].T).T}}
  params = {**params, 'decoder': head} if 'decoder' in params else head | {'token_embedder': params['token_embedder']}
  return new.replace(params=params)


def ids_of(tokenizer: tokenizers.Tokenizer) -> dict[bytes | str, int]:
  """Return the id of each spelling."""
  return {s: i for i, s in enumerate(tokenizer_formats.read(tokenizer.path).spellings()) if s is not None}


def pieces(spelling: bytes | str | None, ids: dict) -> list[int]:
  """Return the ids that spell a token, each the longest that goes on with it; none where bytes are missing."""
  found = []
  while isinstance(spelling, bytes) and spelling:
    piece = next((spelling[:end] for end in range(len(spelling), 0, -1) if spelling[:end] in ids), None)
    if piece is None:
      return []
    found.append(ids[piece])
    spelling = spelling[len(piece) :]
  return found


def main():
  """Write the checkpoint."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('model', help='a checkpoint of a T5 or a decoder')
  parser.add_argument('texts', help='a text file, or JSON lines with --field; .gz or not')
  parser.add_argument('out', type=Path, help='the folder to write')
  parser.add_argument('--kind', choices=KINDS, default='byte_level')
  parser.add_argument('--size', type=commands.count, default=4096, help='tokens (4096)')
  parser.add_argument('--field', help="a field of JSON lines, or a template: 'Question: {question}'")
  args = parser.parse_args()
  model = speccascade.load(args.model, dtype='float32')
  texts = files.texts(args.texts, args.field and args.field.replace('\\n', '\n'), None)
  begins = model.network.start_id is None
  tokenizer = KINDS[args.kind](args.out.with_name(f'{args.out.name}-tokenizer'), texts, args.size, begins=begins)
  print(writer.write(args.out, with_vocabulary(model, tokenizer)))


if __name__ == '__main__':
  main()
