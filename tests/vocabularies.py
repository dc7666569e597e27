"""Folders of tokenizers: a vocabulary with such settings."""

from collections.abc import Sequence
import json
from pathlib import Path
import shutil

from speccascade import embedded
from speccascade.data import tokenizers


def t5(folder: Path, **settings) -> tokenizers.Tokenizer:
  """Write the sentencepiece vocabulary of the embedded pair, of 1000 pieces."""
  shutil.copyfile(embedded.vocabulary(), folder / 'spiece.model')
  return bare(folder, **settings)


def byte_level(
  folder: Path,
  before: Sequence[str] = (),
  after: Sequence[str] = (),
  merges: Sequence[str] = ('t h', 'th e'),
  **settings,
) -> tokenizers.Tokenizer:
  """Write a vocabulary and merges as GPT-2 has them, with special tokens before and after the pieces."""
  from tokenizers import pre_tokenizers

  merged = [merge.replace(' ', '') for merge in merges]
  pieces = [*before, *sorted(pre_tokenizers.ByteLevel.alphabet()), *merged, *after]
  (folder / 'vocab.json').write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
  (folder / 'merges.txt').write_text('\n'.join(['#version: 0.2', *merges, '']))
  return bare(folder, **settings)


def bare(folder: Path, **settings) -> tokenizers.Tokenizer:
  """Write the settings alone, which is all that a ByT5 has."""
  (folder / 'tokenizer_config.json').write_text(json.dumps(settings))
  return tokenizers.find(folder)
