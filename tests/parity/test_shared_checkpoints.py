"""Greedy decoding of trained checkpoints equals transformers' `generate`.

SPECCASCADE_SENTENCES is how many sentences to decode.
"""

import os

import pytest
from trained import NAMES, NEW, prompts

from speccascade import decode, load, methods, Sampler

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

torch.set_num_threads(1)  # tiny models: more threads only wait for each other

COUNT = int(os.environ.get('SPECCASCADE_SENTENCES', '6'))


def _until(row: list[int], eos_ids: tuple[int, ...]) -> list[int]:
  ends = [i for i, token in enumerate(row) if token in eos_ids]
  return row[: ends[0] + 1] if ends else row


@pytest.mark.parametrize('name', NAMES)
def test_greedy_tokens_equal_generate(shared, name):
  folder = shared / 'checkpoints' / name
  model = load(folder, dtype='float32')
  rows = [model.tokenizer.encode(text) for text in prompts(shared, name, COUNT)]
  settings = dict(max_new_tokens=NEW, sampler=Sampler(0.0), batch_size=min(COUNT, 25))
  ours = decode(methods.autoregressive(), [model], rows, **settings).tokens
  seq2seq = name.startswith('t5')
  kind = transformers.AutoModelForSeq2SeqLM if seq2seq else transformers.AutoModelForCausalLM
  reference = kind.from_pretrained(folder, dtype=torch.float32).eval()
  for i, row in enumerate(rows):
    theirs = reference.generate(torch.tensor([row]), max_new_tokens=NEW, do_sample=False)[0].tolist()
    assert ours[i] == _until(theirs[1 if seq2seq else len(row) :], model.network.eos_ids), (i, row)
