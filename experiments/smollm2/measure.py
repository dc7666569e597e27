"""Measure drafters of SmolLM2-135M-Instruct on public prompts: acceptance, tokens a round, texts that are the model's.

python -m experiments.smollm2.measure OUT.csv --drafters lookup smollm2@6 OUT/draft/model --spec_bench question.jsonl
    --mt_bench mt-bench.jsonl --gsm8k test.jsonl --humaneval HumanEval.jsonl --math500 math500.jsonl

A drafter is `lookup`, `memory` (lookup in the outputs before, too), or the path of a model or of a head; with
`--frequent FILE` models and EAGLE-3's heads score the `--tokens` most frequent tokens of the texts in the outputs FILE
alone. Each row of OUT.csv is a drafter, a set of prompts and a sampler; rows that are there are not measured again.
Greedy and coupled texts are compared with those of the model alone; `gap` says of greedy ones how far the model's
log-probabilities of two tokens are apart at most where texts begin to differ.
"""

import argparse
from collections.abc import Iterator
import functools
import json
import math
from pathlib import Path

from experiments.helpers import counted, rows
from experiments.smollm2 import prompts
import speccascade
from speccascade import decode, drafters, methods, rules, Sampler, stopping
from speccascade.data import files, spec_bench
from speccascade.decode import scoring
from speccascade.drafters import layerskip, ngram
from speccascade.drafters.hidden import Head
from speccascade.models.one_width import one_width
from speccascade.types import Model

FUNCTION = 'Complete this function.\n\n{prompt}'
SETS = {  # the other files, as `files` reads them
  'mt_bench': files.conversations,
  'gsm8k': functools.partial(files.jsonl, prompt_field='question', target_field='answer'),
  'humaneval': functools.partial(files.jsonl, prompt_field=FUNCTION, target_field='canonical_solution'),
  'math500': files.conversations,
}
SAMPLERS = {
  '0': Sampler(0.0),
  '0.7': Sampler(0.7),
  '1': Sampler(1.0),
  '0.7, one noise': Sampler(0.7, coupling='gumbel'),
  '1, one noise': Sampler(1.0, coupling='gumbel'),
}


def sets(args: argparse.Namespace) -> Iterator[tuple[str, list]]:
  """Yield the name of each set of prompts, of Spec-Bench its categories, and the prompts."""
  if args.spec_bench:
    task = spec_bench.spec_bench(args.spec_bench, tokenizer=prompts.MODEL)
    _, measured = prompts.halves(task.examples)
    for category in dict.fromkeys(x.info['domain'] for x in measured):
      some = [x.prompt for x in measured if x.info['domain'] == category]
      yield f'spec_bench: {category}', some[: args.count]
  for name, read in SETS.items():
    if path := getattr(args, name):
      task = read(path, chat=True, count=args.count, seed=0, max_prompt_tokens=1024, tokenizer=prompts.MODEL)
      yield name, [x.prompt for x in task.examples]


def drafter_of(name: str, model: Model, ids: list[int] | None) -> Model:
  """Return a drafter, over some tokens alone where ids are given and it has scores."""
  if name in ('lookup', 'memory'):
    return ngram.drafter(model, memory=4096 if name == 'memory' else 0)
  first, _, layers = name.partition('@')
  exits = first == prompts.MODEL and layers.isdecimal()
  made = layerskip.layerskip(model, int(layers)) if exits else speccascade.load(name, dtype=model.network.dtype)
  if ids is None or (isinstance(made.network, Head) and not isinstance(made.network, drafters.eagle.Eagle)):
    return made
  return drafters.frequent(made, ids, model) if isinstance(made.network, Head) else drafters.frequent(made, ids)


def frequent_ids(model: Model, path: str, count: int) -> list[int]:
  """Return the most frequent tokens of the outputs of a decode, of those so far where it goes on."""
  texts = (json.loads(line).get('text') for line in files.lines(path))
  return drafters.frequent_tokens(model, filter(None, texts), count)


def gap(model: Model, asked: list, texts: list, others: list) -> float:
  """Return how far the log-probabilities of two tokens are apart at most, where two texts of a prompt part."""
  parted = []
  for prompt, text, other in zip(asked, texts, others, strict=True):
    if text != other:
      end = next(i for i, (a, b) in enumerate(zip(text, other)) if a != b) + 1  # which both have, a text's end too
      parted.append((prompt, text[:end], other[:end]))
  if not parted:
    return 0.0
  same, *both = map(list, zip(*parted))
  scores = (scoring.score(methods.autoregressive(), [model], same, some) for some in both)
  return max(abs(a.logprobs[-1] - b.logprobs[-1]) for a, b in zip(*scores, strict=True))


def row_of(out, alone: list | None, block: int) -> dict:
  """Return what is measured of texts, also next to those of the model alone."""
  same = counted.same(out.tokens, alone)
  return counted.acceptance(out.stats, block, drafter=0) | {'as_alone': same, 'texts': len(out.tokens)}


def add_arguments(parser: argparse.ArgumentParser):
  """Let a command take drafters, prompts and sizes."""
  parser.add_argument('out', type=Path)
  parser.add_argument('--drafters', nargs='+', required=True)
  for name in ('spec_bench', *SETS):
    parser.add_argument(f'--{name}', metavar='FILE')
  parser.add_argument('--frequent', metavar='FILE', help='outputs whose most frequent tokens are drafted')
  parser.add_argument('--tokens', type=int, default=8192, help='how many (8192)')
  parser.add_argument('--count', type=int, default=20, help='prompts of each set (20)')
  parser.add_argument('--block', type=int, default=5)
  parser.add_argument('--new_tokens', type=int, default=128)
  parser.add_argument('--dtype', default='float32')


def method_of(drafter: str, block: int, leaves: int = 0, rule: str = 'speculative'):
  """Return speculative decoding, or a cascade, with a drafter; lookup that finds nothing drafts nothing."""
  looks = drafter in ('lookup', 'memory')
  policy = stopping.Fallback(0.5) if looks else stopping.Policy()
  return methods.speculative(rules.find(rule), block=block, policy=policy, leaves=leaves)


def main():
  """Measure what is missing, a line each."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  add_arguments(parser)
  parser.add_argument('--leaves', type=int, default=0, help='beside a draft, with one noise (0)')
  parser.add_argument('--samplers', nargs='+', choices=SAMPLERS, default=['0', '0.7', '1'])
  parser.add_argument('--batch_size', type=int, default=8)
  parser.add_argument('--width', type=int, default=0, help='of every call of the model, for texts equal bit by bit (0)')
  args = parser.parse_args()
  model = speccascade.load(prompts.MODEL, dtype=args.dtype)
  ids = args.frequent and frequent_ids(model, args.frequent, args.tokens)
  verifier = one_width(model, args.width) if args.width else model
  size = dict(max_new_tokens=args.new_tokens, batch_size=args.batch_size, seed=0)
  for name, asked in sets(args):
    size['max_prompt_tokens'] = -(-max(len(model.tokenizer.chat(x)) for x in asked) // 256) * 256  # few programs
    for sampler in args.samplers:
      exact = sampler == '0' or 'noise' in sampler
      alone = None  # the model's own texts, once something is compared with them
      for drafter in args.drafters:
        key = dict(drafter=drafter, prompts=name, sampler=sampler, dtype=args.dtype, block=args.block)
        key |= dict(tokens=args.tokens if ids else 0, batch_size=args.batch_size, leaves=args.leaves)
        key |= dict(count=args.count, new_tokens=args.new_tokens, width=args.width)
        if rows.has(args.out, key):
          continue
        made = drafter_of(drafter, model, ids)
        run = functools.partial(decode, prompts=asked, sampler=SAMPLERS[sampler], **size)
        out = run(method_of(drafter, args.block, args.leaves), [made, verifier])
        if exact and alone is None:
          alone = run(methods.autoregressive(), [verifier]).tokens
        row = row_of(out, alone, args.block)
        row['gap'] = gap(verifier, asked, out.tokens, alone) if sampler == '0' else math.nan
        rows.append(args.out, key | {name: f'{number:.4g}' for name, number in row.items()})


if __name__ == '__main__':
  main()
