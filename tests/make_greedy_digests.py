"""Write digests of what transformers' `generate` gives for trained checkpoints, so that tests can compare without it.

PYTHONPATH=. python tests/make_greedy_digests.py [--count 200]

Only digests of token ids are written, never texts.
Needs the extra `parity`.
"""

import argparse
import hashlib
import json
from pathlib import Path

import torch
import trained
from trained import NAMES, NEW
import transformers

from experiments.helpers.families import prompts


def main():
  """Run the reference, one prompt at a time, in float32."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--count', type=int, default=200)
  args = parser.parse_args()
  torch.set_num_threads(1)
  digests = {}
  for name in NAMES:
    family = name.partition('/')[0]
    seq2seq = family == 'multi30k'
    folder = trained.folder() / name
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder.parent / 'hf_tokenizer/tokenizer.json'))
    kind = transformers.AutoModelForSeq2SeqLM if seq2seq else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for text in prompts(family, args.count, 'val'):
      row = tokenizer(text, add_special_tokens=False)['input_ids']
      row = row + [1] if seq2seq else [1, *row]
      out = model.generate(torch.tensor([row]), max_new_tokens=NEW, do_sample=False)[0].tolist()
      answers.append(out[1 if seq2seq else len(row) :])
    digests[name] = hashlib.sha256(json.dumps(answers).encode()).hexdigest()
    print(name, digests[name], flush=True)
  target = Path(__file__).parent / 'models/golden/greedy.json'
  target.write_text(json.dumps({'count': args.count, 'digests': digests}, indent=1) + '\n')


if __name__ == '__main__':
  main()
