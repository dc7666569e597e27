"""Measure drafters beside a pair: acceptance by position, tokens a round, calls, and texts that are the lockstep's.

python -m experiments.drafters.measure DRAFTERS OUT.csv [--family multi30k] [--drafters eagle …]

DRAFTERS is the folder of `gin_configs/train/drafters.gin`; a drafter that is not
there is left out. Settings that OUT.csv has are not measured again. Every drafter is a third model beside the pair, and
one program serves all targets and temperatures: which target it is is a number, like its α.
"""

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp

from experiments.helpers import counted, families, rows
import speccascade
from speccascade import decode, methods, rules, Sampler, stopping
from speccascade.drafters import layerskip, ngram

BLOCK = 5
NEW = {'multi30k': 48, 'sums': 80}
DRAFTERS = 'small', 'one_pass', 'eagle', 'p_eagle', 'medusa', 'layer_skip', 'lookup'
SAMPLERS = {'T=0': Sampler(0.0), 'T=1': Sampler(1.0), 'coupled': Sampler(1.0, coupling='gumbel')}


def mixed(q, p, *, alpha):
  """Follow an ensemble with a weight of α on the small model; at 0 it is the verifier."""
  return rules.weighted([q, p], weights=(alpha, 1 - alpha))


def contrast(q, p, *, alpha):
  """Follow the large model away from the small one."""
  return rules.contrastive([q, p], mu=alpha)


RULES = mixed, rules.opt, contrast
TARGETS = {'p': (0, 0.0), 'OPT': (1, 0.1), 'ensemble': (0, 0.4), 'contrast': (2, 0.1)}


@rules.rule(normalized=True)
def numbered(q, p, *, which, alpha):
  """Ask one of `RULES` by its number."""

  def asked(rule):
    return rules.target(functools.partial(rule, alpha=alpha), [q.logits, p.logits], q.sampler).probs

  return jax.lax.switch(jnp.int32(which), [functools.partial(asked, rule) for rule in RULES])


def drafter_of(name: str, pair, folder: Path):
  """Return a drafter, None where it is not trained."""
  small, large = pair
  made = {
    'small': lambda: small.replace(name='small again'),
    'layer_skip': lambda: layerskip.layerskip(large, 2),
    'lookup': lambda: ngram.drafter(large),
  }
  if name in made:
    return made[name]()
  path = folder / name / 'model'
  return speccascade.load(path, dtype='float32', name=name) if path.is_dir() else None


def row_of(out, lockstep: list | None) -> dict:
  """Return what is measured of texts, also next to the lockstep's; the drafter is model 2, the verifier model 1."""
  s = out.stats
  row = counted.acceptance(s, BLOCK, drafter=2)
  row |= {'verifier_calls_per_token': s.calls[1].sum() / s.emitted.sum()}
  return row | {'as_lockstep': counted.same(out.tokens, lockstep), 'texts': len(out.tokens)}


def main():
  """Measure what is missing, a line each."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  for name in ('drafters_folder', 'out'):
    parser.add_argument(name, type=Path)
  parser.add_argument('--family', choices=NEW, default='multi30k')
  parser.add_argument('--drafters', nargs='+', choices=DRAFTERS, default=DRAFTERS)
  parser.add_argument('--samplers', nargs='+', choices=SAMPLERS, default=[*SAMPLERS])
  parser.add_argument('--targets', nargs='+', choices=TARGETS, default=[*TARGETS])
  parser.add_argument('--count', type=int, default=200)
  args = parser.parse_args()
  pair = families.pair(args.family)
  write = functools.partial(decode, prompts=families.prompts(args.family, args.count), batch_size=50)
  write = functools.partial(write, max_new_tokens=NEW[args.family])

  @functools.cache
  def lockstep(sampler, target):
    return write(methods.oracle(rule(target)), pair, sampler=SAMPLERS[sampler]).tokens

  for name in args.drafters:
    drafter = drafter_of(name, pair, args.drafters_folder)
    for sampler in args.samplers if drafter else ():
      for target in args.targets:
        key = dict(family=args.family, drafter=name, target=target, sampler=sampler)
        if rows.has(args.out, key):
          continue
        policy = stopping.Fallback(0.5) if name == 'lookup' else stopping.Policy()
        method = methods.speculative(rule(target), block=BLOCK, drafter=2, policy=policy)
        out = write(method, [*pair, drafter], sampler=SAMPLERS[sampler])
        row = row_of(out, lockstep(sampler, target) if sampler != 'T=1' else None)
        rows.append(args.out, key | {name: f'{number:.5g}' for name, number in row.items()})


def rule(target: str):
  """Return the rule of a target."""
  which, alpha = TARGETS[target]
  return functools.partial(numbered, which=float(which), alpha=alpha)


if __name__ == '__main__':
  main()
