"""Measure what another vocabulary costs a drafter in acceptance, and that the verifier's text stays what it is.

python -m experiments.translated.measure_translated FAMILY [--count 200] [--new 40] [--block 5] [--reading]

The drafter is given a vocabulary of each kind
(give_vocabulary.py) of the family's training texts; each line is a JSON object. With --reading it compares, on
given texts of a Llama, what the drafter may read where it lacks a token: one for one, or all that spell it.
"""

import argparse
from collections.abc import Sequence
import functools
import json
from pathlib import Path
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from experiments.helpers import families
from experiments.translated.give_vocabulary import ids_of, KINDS, pieces, with_vocabulary
from speccascade import decode, methods, Sampler
from speccascade.data import tokenizer_formats
from speccascade.drafters import translated, translation
from speccascade.engine import inputs
from speccascade.host import commands
from speccascade.types import Model, Prompt

_FOLDER = tempfile.TemporaryDirectory()


def foreign(small: Model, kind: str, texts: list[str], size: int) -> Model:
  """Return a model with a vocabulary of its own; its tokenizer's files stay in a folder of this process."""
  folder = Path(_FOLDER.name) / kind
  return with_vocabulary(small, KINDS[kind](folder, texts, size, begins=small.network.start_id is None))


def distributions(model: Model, rows: Sequence[Sequence[int]]) -> np.ndarray:
  """Return the distribution after each token of each row, read at once."""
  tokens = jnp.asarray(inputs.pad([np.asarray(row) for row in rows], len(rows), max(map(len, rows))).tokens)
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)

  @jax.jit
  def read(params):
    cache = model.network.prefill(params, Prompt(tokens, jnp.ones(len(rows), jnp.int32)), tokens.shape[1])
    return jax.nn.softmax(model.network.extend(params, cache, tokens, positions)[0])

  return np.asarray(read(model.params))


def compare_readings(small: Model, large: Model, texts: list[str], corpus: list[str], size: int):
  """Print the mean of Σ min(q, p) over the second half of each text, by what the drafter reads."""
  rows = [large.tokenizer.encode(text) for text in texts]
  after = [(i, j) for i, row in enumerate(rows) for j in range(len(row) // 2, len(row) - 1)]
  p = distributions(large, rows)
  acceptance = lambda q: round(float(np.mean([np.minimum(p[at], q[at]).sum() for at in after])), 4)
  print(json.dumps({'vocabulary': 'own', 'acceptance': acceptance(distributions(small, rows))}), flush=True)
  spellings = tokenizer_formats.read(large.tokenizer.path).spellings()
  for kind in KINDS:
    drafter = foreign(small, kind, corpus, size)
    read, write = (np.asarray(translated(drafter, for_=large).params[translation.TABLES][n]) for n in ('read', 'write'))
    spelled = [pieces(s, ids_of(drafter.tokenizer)) or [int(read[i])] for i, s in enumerate(spellings)]
    spelled = [[int(read[i])] if write[i] >= 0 else ids for i, ids in enumerate(spelled)]
    tables = {'its longest end': read, 'its longest beginning': [ids[0] for ids in spelled]}
    found = {
      name: acceptance(distributions(translated(drafter, for_=large, tables=(table, write)), rows))
      for name, table in tables.items()
    }
    own = [[i for token in row for i in spelled[token]] for row in rows]
    ends = [np.cumsum([len(spelled[token]) for token in row]) - 1 for row in rows]
    q = distributions(drafter, own)
    several = np.zeros_like(p)
    for i, end in enumerate(ends):
      several[i, : len(end)] = np.where(write < 0, 0, q[i, end][:, write])
    several /= np.maximum(several.sum(-1, keepdims=True), 1e-30)
    found['all that spell it'] = acceptance(several)
    print(json.dumps({'vocabulary': kind, 'acceptance': found}), flush=True)


def main():
  """Decode with the drafter as it is and with each vocabulary, at T = 0 and 1."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('family', choices=families.PAIRS)
  parser.add_argument('--count', type=commands.count, default=200)
  parser.add_argument('--new', type=commands.count, default=40, help='tokens a prompt (40)')
  parser.add_argument('--block', type=commands.count, default=5)
  parser.add_argument('--reading', action='store_true', help='compare what the drafter may read')
  parser.add_argument('--size', type=commands.count, default=4096, help='tokens of the vocabularies (4096)')
  args = parser.parse_args()
  small, large = families.pair(args.family)
  texts = families.corpus(args.family)
  if args.reading:
    return compare_readings(small, large, families.corpus(args.family, 40, 'test'), texts, args.size)
  prompts = families.prompts(args.family, args.count, 'val')
  run = functools.partial(decode, prompts=prompts, max_new_tokens=args.new, batch_size=50)
  alone = run(methods.autoregressive(), [large], sampler=Sampler(0.0)).tokens
  read = np.concatenate([large.tokenizer.encode(prompt) for prompt in prompts])
  for kind in ('own', *KINDS):
    drafter = small if kind == 'own' else translated(foreign(small, kind, texts, args.size), for_=large)
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
