"""Time drafters of SmolLM2-135M-Instruct beside the model alone and transformers' generate, in turns, greedily.

python -m experiments.smollm2.timed OUT.csv --drafters lookup OUT/draft/model --gsm8k test.jsonl --dtype bfloat16
    --batch_sizes 1 8 --transformers

The arguments are those of `measure`. Each row is one way to decode a set of prompts: the median of its tokens a
second, prefill included, and of its ratio to the model alone in the same turn, and how many texts are the model's.
"""

import argparse
from collections.abc import Callable
import functools
import itertools
import statistics

from experiments.helpers import counted, rows
from experiments.smollm2 import measure, prompts
import speccascade
from speccascade import decode, methods, Sampler
from speccascade.host import packaged
from speccascade.planning import timing

ALONE = 'alone'


def generate(asked: list, dtype: str, new_tokens: int) -> Callable[[], list[list[int]]]:
  """Return a call of transformers' greedy generate, a text at a time, that returns the tokens of each."""
  import torch
  import transformers

  file = packaged.MODELS[prompts.MODEL].find()
  tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
  kind = getattr(torch, dtype)
  model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=kind).eval()
  ids = [tokenizer.apply_chat_template(x, add_generation_prompt=True, return_dict=False) for x in asked]

  def run() -> list[list[int]]:
    with torch.no_grad():
      texts = [model.generate(torch.tensor([x]), max_new_tokens=new_tokens, do_sample=False) for x in ids]
    return [text[0, len(x) :].tolist() for text, x in zip(texts, ids, strict=True)]

  return run


def main():
  """Time what is asked for, and append its rows."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  measure.add_arguments(parser)
  parser.add_argument('--batch_sizes', nargs='+', type=int, default=[1])
  parser.add_argument('--trials', type=int, default=3)
  parser.add_argument('--rule', default='speculative', help='as opt:0.1 for a cascade (speculative)')
  parser.add_argument('--transformers', action='store_true', help='time its generate, too, at batch 1')
  args = parser.parse_args()
  model = speccascade.load(prompts.MODEL, dtype=args.dtype)
  ids = args.frequent and measure.frequent_ids(model, args.frequent, args.tokens)
  made = {name: measure.drafter_of(name, model, ids) for name in args.drafters}
  for (prompted, asked), size in itertools.product(measure.sets(args), args.batch_sizes):
    key = dict(dtype=args.dtype, batch_size=size, block=args.block, prompts=prompted, count=len(asked))
    key |= dict(tokens=args.tokens if ids else 0, rule=args.rule)
    if rows.has(args.out, key | {'way': ALONE}):
      continue
    sizes = dict(max_new_tokens=args.new_tokens, batch_size=size, sampler=Sampler(0.0))

    def run(method, models, asked=asked, sizes=sizes) -> list[list[int]]:
      return decode(method, models, asked, **sizes).tokens

    runs = {ALONE: functools.partial(run, methods.autoregressive(), [model])}
    for name, drafter in made.items():
      runs[name] = functools.partial(run, measure.method_of(name, args.block, rule=args.rule), [drafter, model])
    if args.transformers and size == 1:
      runs['transformers'] = generate(asked, args.dtype, args.new_tokens)
    found = timing.interleave({name: functools.partial(timing.timed, call) for name, call in runs.items()}, args.trials)
    speeds = {name: [sum(map(len, texts)) / seconds for seconds, texts in turns] for name, turns in found.items()}
    for name, some in reversed(speeds.items()):  # the model alone last, by which it is known that all are there
      ratios = [x / y for x, y in zip(some, speeds[ALONE], strict=True)]
      numbers = dict(tokens_a_second=statistics.median(some), over_alone=statistics.median(ratios))
      same = counted.same(found[name][0][1], found[ALONE][0][1])
      numbers |= dict(least=min(ratios), most=max(ratios), as_alone=same)
      rows.append(args.out, key | {'way': name} | {what: f'{number:.4g}' for what, number in numbers.items()})


if __name__ == '__main__':
  main()
