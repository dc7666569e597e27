"""Measure what another vocabulary costs a drafter in acceptance, and that the verifier's text stays what it is.

python scripts/measure_translated.py FOLDER FAMILY [--count 200] [--new 40] [--block 5]

FOLDER holds checkpoints/ and data/, FAMILY is one of its checkpoints. The drafter is given a vocabulary of each kind
(scripts/give_vocabulary.py) of the family's training texts; each line is a JSON object.
"""

import argparse
import functools
import json
from pathlib import Path
import sys
import tempfile

import numpy as np

import speccascade
from speccascade import decode, methods, Sampler
from speccascade.models import translated, translation

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / 'tests'), str(ROOT / 'scripts')]
from give_vocabulary import KINDS, with_vocabulary  # noqa: E402
from trained import corpus, PAIRS, prompts  # noqa: E402


def main():
  """Decode with the drafter as it is and with each vocabulary, at T = 0 and 1."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('folder', type=Path)
  parser.add_argument('family', choices=PAIRS)
  parser.add_argument('--count', type=int, default=200)
  parser.add_argument('--new', type=int, default=40, help='tokens a prompt (40)')
  parser.add_argument('--block', type=int, default=5)
  parser.add_argument('--size', type=int, default=4096, help='tokens of the vocabularies (4096)')
  args = parser.parse_args()
  paths = [args.folder / 'checkpoints' / args.family / name for name in PAIRS[args.family]]
  small, large = (speccascade.load(path, dtype='float32') for path in paths)
  run = functools.partial(
    decode, prompts=prompts(args.folder, args.family, args.count), max_new_tokens=args.new, batch_size=50
  )
  alone = run(methods.autoregressive(), [large], sampler=Sampler(0.0)).tokens
  read = np.concatenate([large.tokenizer.encode(prompt) for prompt in run.keywords['prompts']])
  for kind, make in {'own': None, **KINDS}.items():
    drafter = small
    with tempfile.TemporaryDirectory() as folder:
      if make is not None:
        begins = small.network.start_id is None
        tokenizer = make(Path(folder), corpus(args.folder, args.family), args.size, begins=begins)
        drafter = translated(with_vocabulary(small, tokenizer), for_=large)
    common = translation.common(drafter)
    common = np.ones(large.network.vocab_size, bool) if common is None else common
    for temperature in (0.0, 1.0):
      out = run(methods.speculative(block=args.block), [drafter, large], sampler=Sampler(temperature))
      written = np.concatenate(out.tokens)
      line = dict(family=args.family, vocabulary=kind, temperature=temperature)
      line |= dict(common=int(common.sum()), of=common.size)
      line |= dict(read=round(float(common[read].mean()), 3), written=round(float(common[written].mean()), 3))
      line['acceptance'] = round(float(out.stats.accepted.sum() / out.stats.tested.sum()), 3)
      line['tokens_a_round'] = round(float(out.stats.emitted.sum() / out.stats.calls[1].sum()), 2)
      if temperature == 0:
        line['as_the_verifier_alone'] = sum(a == b for a, b in zip(out.tokens, alone, strict=True))
      print(json.dumps(line), flush=True)


if __name__ == '__main__':
  main()
