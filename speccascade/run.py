"""Show on toy models what the project does: `python -m speccascade.run`.

Every method decodes the same prompts with the same pair of table models. The table shows what each call bought.
"""

import argparse
import functools
import time

import jax

from speccascade import methods, rules, theory
from speccascade.decode import decode
from speccascade.models import toy
from speccascade.probs import Sampler
from speccascade.results import Decoded


def pair(vocab: int = 64):
  """Return a small and a large toy model that agree on much."""
  large = toy.model(0, vocab, scale=2.0, eos_ids=(vocab - 1,))
  return [toy.model(1, vocab, scale=0.8, near=large, eos_ids=(vocab - 1,)), large]


def demonstration(block: int) -> list[methods.Method]:
  """Return the methods that the demonstration compares."""
  bind = functools.partial
  return [
    methods.autoregressive(1),
    methods.autoregressive(0),
    methods.speculative(block=block),
    methods.speculative(bind(rules.chow, alpha=0.7), block),
    methods.speculative(bind(rules.diff, alpha=0.05), block),
    methods.speculative(bind(rules.opt, alpha=0.3), block),
    methods.speculative(bind(rules.token_v3, alpha=0.5), block),
    methods.speculative(bind(rules.lossy, alpha=0.3), block),
    methods.token_cascade(bind(rules.chow, alpha=0.7)),
    methods.bild(0.3, 2.0),
    methods.ensemble(bind(rules.weighted, weights=(0.5, 0.5))),
    methods.cos(bind(rules.weighted, weights=(0.5, 0.5)), (block, 1)),
  ]


def report(name: str, out: Decoded, seconds: float) -> str:
  """Return a row of the table: what a method called, kept and emitted."""
  s = out.stats
  emitted, tested = s.emitted.sum(), s.tested.sum()
  rate = f'{s.accepted.sum() / tested:10.2f}' if tested else f'{"–":>10}'
  large = s.calls[1].sum() if len(s.calls) > 1 else 0
  per_call = f'{emitted / large:10.2f}' if large else f'{"–":>10}'
  return f'{name:<26}{emitted:8d}{s.calls[0].sum():10d}{large:10d}{rate}{per_call}{1e3 * seconds / emitted:10.3f}'


def main():
  """Parse the command line and print the demonstration."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--block', type=int, default=5, help='γ, the tokens drafted per round')
  parser.add_argument('--temperature', type=float, default=1.0, help='0 is greedy')
  parser.add_argument('--rows', type=int, default=64, help='prompts decoded in one batch')
  parser.add_argument('--tokens', type=int, default=48, help='the most new tokens per prompt')
  parser.add_argument('--seed', type=int, default=0)
  args = parser.parse_args()
  models, prompts = pair(), [[i % 60, (7 * i) % 60] for i in range(args.rows)]
  run = functools.partial(
    decode,
    models=models,
    prompts=prompts,
    max_new_tokens=args.tokens,
    sampler=Sampler(args.temperature),
    seed=args.seed,
  )
  print(f'{args.rows} prompts on {jax.devices()[0].device_kind}, toy models of 64 tokens, T = {args.temperature:g}\n')
  print(f'{"method":<26}{"tokens":>8}{"small":>10}{"large":>10}{"accepted":>10}{"per large":>10}{"ms/token":>10}')
  outs = {}
  for i, method in enumerate(demonstration(args.block)):
    run(method)  # compile
    start = time.perf_counter()
    out = run(method)
    name = method.name if i > 1 else ('large alone', 'small alone')[i]
    outs[name] = out
    print(report(name, out, time.perf_counter() - start), flush=True)
  _explain(outs, args.block)


def _explain(outs: dict[str, Decoded], block: int):
  """Show one output by source, and what theory says of the measured acceptance."""
  out = outs['speculative[opt]']
  mark = {0: '', -1: '*', -2: '+'}
  text = ' '.join(f'{t}{mark[int(s)]}' for t, s in zip(out.tokens[0], out.stats.source[0], strict=True))
  print(f'\nFirst output of speculative[opt] (drafted, * from the residual, + bonus):\n{text}')
  s = outs['speculative[speculative]'].stats
  alpha = float(s.accepted.sum() / s.tested.sum())
  best = theory.best_block(theory.speedup_speculative, alpha, 0.1)
  print(
    f'\nPlain speculative decoding keeps {alpha:.2f} of the tokens tested. Were the small model 10 times cheaper, γ = '
    f'{block} would give {theory.speedup_speculative(alpha, block, 0.1):.2f}×, and the best γ = {best} '
    f'{theory.speedup_speculative(alpha, best, 0.1):.2f}×.'
  )


if __name__ == '__main__':
  main()
