"""Texts of every method with Gumbel coupling, held against the lockstep of the same target.

python -m experiments.coupling.measure [--sentences 1000] [--problems 500] [--dtype float32] [--batch_size 16]
    [--families multi30k sums] [--targets 'the verifier' OPT ...] [--methods 'γ = 5' cos ...]
    [--width 8]    # of each call of the verifier (`models.one_width`)
    [--couplings gumbel maximal] [--repeats 3]    # how often each is decoded again, for tokens a second
    [--ties]    # of texts that differ the two largest log π + noise, over the whole vocabulary
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments.helpers import families
from speccascade import decode, methods, Request, rules, Sampler, sampling, stopping
from speccascade.drafters import ngram
from speccascade.models.one_width import one_width

OPT = functools.partial(rules.opt, alpha=0.1)
TOKEN = functools.partial(rules.token_v3, alpha=0.3)
MEAN = functools.partial(rules.weighted, weights=(0.4, 0.6))
CONTRAST = functools.partial(rules.contrastive, mu=0.1)
LOOKUP = 'prompt lookup'
TARGETS = {  # the lockstep first
  'the verifier': {
    'alone': methods.autoregressive(1),
    **{f'γ = {n}': methods.speculative(block=n) for n in (5, 2, 1, 3, 7)},
    'Heuristic': methods.speculative(block=5, policy=stopping.Heuristic()),
    'MovingAverage': methods.speculative(block=5, policy=stopping.MovingAverage(0.4, 0.5)),
    'Confidence': methods.speculative(block=5, policy=stopping.Confidence(0.3)),
    LOOKUP: methods.speculative(block=5),
  },
  'an ensemble': {
    'lockstep': methods.ensemble(MEAN),
    'naive_cos': methods.naive_cos(MEAN, 5),
    'cos': methods.cos(MEAN, (5, 1)),
    'ensemble_sd': methods.ensemble_sd(MEAN, 5),
  },
  'a contrast': {
    'lockstep': methods.ensemble(CONTRAST),
    'naive_cos': methods.naive_cos(CONTRAST, 5),
    'cos': methods.cos(CONTRAST, (5, 1)),
  },
  'OPT': {
    'lockstep': methods.oracle(OPT),
    'γ = 2': methods.speculative(OPT, 2),
    'γ = 5': methods.speculative(OPT, 5),
    'cos': methods.cos(OPT, (5, 1)),
  },
  'token_v3': {'lockstep': methods.oracle(TOKEN), 'γ = 5': methods.speculative(TOKEN, 5)},
}


def largest(out, i: int, at: int) -> list[tuple[int, float]]:
  """Return the two largest log π + noise at a token of a text of an encoder–decoder, with their tokens."""
  key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0), i)  # seed, stream, example
  noise = sampling.Coupled(jax.random.key_data(key)[None])
  tokens, logprobs = zip(*out.top_logprobs[i][at].items(), strict=True)
  scores = np.array(logprobs) - np.log(noise.exponential(jnp.array([1 + at]), max(tokens) + 1)[0, jnp.array(tokens)])
  return [(tokens[k], float(scores[k])) for k in np.argsort(-scores)[:2]]


def show_ties(lockstep, out, others: list[int]):
  """Print of texts that differ what either run decided between, and how far apart the runs' log π are."""
  for i in others:
    at = next(k for k, (a, b) in enumerate(zip(lockstep.tokens[i], out.tokens[i])) if a != b)
    for name, run in ('lockstep', lockstep), ('method', out):
      (a, x), (b, y) = largest(run, i, at)
      print(f'  text {i}, token {at}, {name}: {x:.6f} of {a} and {y:.6f} of {b}, {x - y:.2g} apart', flush=True)
  gaps = []
  for i, pair in enumerate(zip(lockstep.tokens, out.tokens, strict=True)):
    same = next((k for k, (a, b) in enumerate(zip(*pair)) if a != b), len(pair[0]))
    both = zip(lockstep.top_logprobs[i][:same], out.top_logprobs[i][:same], pair[0])
    gaps += [a[t] - b[t] for a, b, t in both if t in a and t in b]
  print(f'  log π of {len(gaps)} tokens differs by {np.std(gaps):.2g} (deviation), {np.abs(gaps).max():.2g} at most')


def measure(family: str, models, prompts: list[str], new_tokens: int, coupling: str, args):
  """Print for each method how much is accepted, and how many texts are others than those of the lockstep."""
  likely = models[-1].network.vocab_size if args.ties else None
  asked = [Request(prompt, logprobs=likely) for prompt in prompts]
  for target in args.targets if coupling == 'gumbel' else ['the verifier']:
    lockstep = None
    for name, method in TARGETS[target].items():
      if lockstep and args.methods and name not in args.methods:
        continue
      used = [ngram.drafter(models[-1]), models[-1]] if name == LOOKUP else models
      sampler = Sampler(1.0, coupling=coupling)
      how = dict(max_new_tokens=new_tokens, sampler=sampler, batch_size=args.batch_size)
      out = decode(method, used, asked, **how)
      lockstep = lockstep or out
      accepted = out.stats.accepted.sum() / max(1, out.stats.tested.sum())
      calls = out.stats.emitted.sum() / max(1, out.stats.calls[-1].sum())
      others = [i for i, (a, b) in enumerate(zip(lockstep.tokens, out.tokens, strict=True)) if a != b]
      print(
        f'{family} | {coupling} | {target} | {name} | {accepted:.3f} accepted | {calls:.2f} tokens a call | '
        f'{len(others)} of {len(prompts)} differ',
        flush=True,
      )
      if args.repeats:
        start = time.process_time()
        repeated = [decode(method, used, asked, **how).stats.emitted.sum() for _ in range(args.repeats)]
        print(f'  {sum(repeated) / (time.process_time() - start):.1f} tokens a second of the CPU', flush=True)
      if args.ties and target == 'the verifier' and out is not lockstep:
        show_ties(lockstep, out, others)


def main():
  """Measure both families."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--sentences', type=int, default=1000)
  parser.add_argument('--problems', type=int, default=500)
  parser.add_argument('--dtype', default='float32')
  parser.add_argument('--families', nargs='+', default=['multi30k', 'sums'])
  parser.add_argument('--targets', nargs='+', default=[*TARGETS])
  parser.add_argument('--methods', nargs='+', help='besides the lockstep (all)')
  parser.add_argument('--couplings', nargs='+', default=['gumbel', 'maximal'])
  parser.add_argument('--batch_size', type=int, default=16)
  parser.add_argument('--repeats', type=int, default=0)
  parser.add_argument('--ties', action='store_true')
  parser.add_argument('--width', type=int)
  args = parser.parse_args()
  limits = {'multi30k': (args.sentences, 48), 'sums': (args.problems, 80)}
  for family in args.families:
    count, new_tokens = limits[family]
    prompts = families.prompts(family, count, 'val')
    models = families.pair(family, args.dtype)
    models = [one_width(m, args.width) for m in models] if args.width else models
    print(f'{family}: {len(prompts)} prompts of {np.mean([len(x) for x in prompts]):.0f} characters', flush=True)
    for coupling in args.couplings:
      measure(family, models, prompts, new_tokens, coupling, args)


if __name__ == '__main__':
  main()
