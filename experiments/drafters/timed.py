"""Time decoding with each drafter over the verifier alone, interleaved: the median of trials and their quartiles.

python -m experiments.drafters.timed DRAFTERS OUT.csv [--family multi30k] [--batch 8] [--block 5]

T = 1 with coupled noise, so that all write the same texts. A trial is a call with each; a ratio is that of one trial.
"""

import argparse
import functools
from pathlib import Path

from experiments.drafters.measure import drafter_of, DRAFTERS, NEW
from experiments.helpers import families, rows
from speccascade import decode, methods, Sampler, stopping
from speccascade.planning import timing


def main():
  """Time, and append a line for each drafter."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  for name in ('drafters_folder', 'out'):
    parser.add_argument(name, type=Path)
  parser.add_argument('--family', choices=NEW, default='multi30k')
  parser.add_argument('--drafters', nargs='+', choices=DRAFTERS, default=DRAFTERS)
  parser.add_argument('--block', type=int, default=5)
  parser.add_argument('--batch', type=int, default=8)
  parser.add_argument('--count', type=int, default=32)
  parser.add_argument('--trials', type=int, default=5)
  args = parser.parse_args()
  pair = families.pair(args.family)
  prompts = families.prompts(args.family, args.count)
  call = dict(max_new_tokens=NEW[args.family], sampler=Sampler(coupling='gumbel'), batch_size=args.batch)
  calls = {'verifier': functools.partial(decode, methods.autoregressive(0), pair[1:], prompts, **call)}
  for name in args.drafters:
    drafter = drafter_of(name, pair, args.drafters_folder)
    policy = stopping.Fallback(0.5) if name == 'lookup' else stopping.Policy()
    method = methods.speculative(block=args.block, policy=policy)
    if drafter:
      calls[name] = functools.partial(decode, method, [drafter, pair[1]], prompts, **call)
  timers = {name: functools.partial(timing.timed, run) for name, run in calls.items()}
  trials = timing.interleave(timers, args.trials)  # and all is compiled before
  plain = trials['verifier']
  for name, of in trials.items():
    of_plain = timing.Interval.of([alone / seconds for (alone, _), (seconds, _) in zip(plain, of, strict=True)])
    row = dict(family=args.family, batch=args.batch, block=args.block, drafter=name)
    row |= {k: f'{x:.4g}' for k, x in of_plain._asdict().items()}
    same = sum(a == b for a, b in zip(of[0][1].tokens, plain[0][1].tokens, strict=True))
    row |= dict(seconds=f'{min(seconds for seconds, _ in of):.4g}', same=same, texts=args.count)
    rows.append(args.out, row)


if __name__ == '__main__':
  main()
