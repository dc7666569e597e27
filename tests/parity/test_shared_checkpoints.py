"""Greedy decoding of trained checkpoints equals transformers' `generate`.

SPECCASCADE_SENTENCES is how many sentences to decode.
"""

import gzip
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade.checkpoints import hf
from speccascade.types import Prompt

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

torch.set_num_threads(1)  # tiny models: more threads only wait for each other

COUNT = int(os.environ.get('SPECCASCADE_SENTENCES', '6'))
NEW = 40
BATCH = 25


def _encode(folder: Path, texts: list[str], eos: bool) -> list[list[int]]:
  tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / 'tokenizer.json'))
  rows = tokenizer(texts, add_special_tokens=False)['input_ids']
  return [row + [1] for row in rows] if eos else [[1] + row for row in rows]


def _sentences(shared: Path) -> list[str]:
  with gzip.open(shared / 'data' / 'multi30k' / 'val.en.gz', 'rt', encoding='utf-8') as f:
    return [line.strip() for line in f][:COUNT]


def _questions(shared: Path) -> list[str]:
  with gzip.open(shared / 'data' / 'gsm8k' / 'test_first600.jsonl.gz', 'rt', encoding='utf-8') as f:
    return [f'Question: {json.loads(line)["question"]}\nAnswer:' for line in f][:COUNT]


def _ours(network, params, rows: list[list[int]]) -> list[list[int]]:
  """Decode a ragged batch greedily."""
  length = np.array([len(row) for row in rows])
  tokens = np.zeros((len(rows), 1 + max(length)), np.int32)
  for i, row in enumerate(rows):
    tokens[i, : len(row)] = row
  seq2seq = network.start_id is not None
  prompt = Prompt(jnp.array(tokens), jnp.array(length))
  cache = jax.jit(network.prefill, static_argnums=2)(params, prompt, tokens.shape[1] + NEW)
  step = jax.jit(network.extend, donate_argnums=1)
  last = np.full(len(rows), network.start_id) if seq2seq else tokens[np.arange(len(rows)), length - 1]
  first = np.zeros_like(length) if seq2seq else length - 1
  out = []
  for i in range(NEW):
    logits, cache = step(params, cache, jnp.array(last[:, None]), jnp.array(first[:, None] + i))
    last = np.asarray(logits[:, 0].argmax(-1))
    out.append(last)
  return [_until(row, network.eos_ids) for row in np.stack(out, 1).tolist()]


def _until(row: list[int], eos_ids: tuple[int, ...]) -> list[int]:
  ends = [i for i, token in enumerate(row) if token in eos_ids]
  return row[: ends[0] + 1] if ends else row


@pytest.mark.parametrize(
  'name',
  ['t5_multi30k/small', 't5_multi30k/base', 't5_multi30k/large']
  + ['llama_gsm8k/draft', 'llama_gsm8k/companion', 'llama_gsm8k/target'],
)
def test_greedy_tokens_equal_generate(shared, name):
  folder = shared / 'checkpoints' / name
  seq2seq = name.startswith('t5')
  texts = _sentences(shared) if seq2seq else _questions(shared)
  rows = _encode(folder.parent / 'hf_tokenizer', texts, eos=seq2seq)
  network, params = hf.read(folder, dtype='float32')
  kind = transformers.AutoModelForSeq2SeqLM if seq2seq else transformers.AutoModelForCausalLM
  reference = kind.from_pretrained(folder, dtype=torch.float32).eval()
  ours = [tokens for i in range(0, len(rows), BATCH) for tokens in _ours(network, params, rows[i : i + BATCH])]
  for i, row in enumerate(rows):
    theirs = reference.generate(torch.tensor([row]), max_new_tokens=NEW, do_sample=False)[0].tolist()
    assert ours[i] == _until(theirs[1 if seq2seq else len(row) :], network.eos_ids), (i, row)
