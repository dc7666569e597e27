"""Measure lossy verification: acceptance, tokens a round, overshoot, quality with an interval, and a bound on the loss.

python -m experiments.lossy.measure PAIR TEMPERATURE OUT.csv [--count 200] [--head FILE]

PAIR is sums or multi30k, FILE the head of a learned mixture, which
`experiments/learned_deferral/train_rules.py PAIR OUT mixture` trains. Settings that OUT.csv has are not measured
again. One program serves all rules: which of them is asked is a number, like its α.
"""

import argparse
import functools
from pathlib import Path

import jax
import numpy as np

from experiments.helpers import families, rows
from speccascade import acceptance, decode, methods, Request, rules, Sampler
from speccascade.data import metrics
from speccascade.evaluate import calibration, intervals

BLOCK = 5
NEW = {'sums': 80, 'multi30k': 64}
LOSS = {'sums': 'final_number', 'multi30k': 'chrf'}  # by which losses of single texts are bounded


def mixed(q, p, *, alpha):
  """Follow a mixture with a weight of α on the drafter: `rules.weighted`."""
  return rules.weighted([q, p], weights=(alpha, 1 - alpha))


RULES = {'mixed': mixed} | {
  name: rules.find(name)
  for name in (
    'lossy',
    'mentored',
    'token_v3',
    'token_v3_tested',
    'typical',
    'medusa',
    'relaxed',
    'thresholds',
    'fuzzy',
  )
}
SETTINGS = {  # of each rule the α, the safest first; lossy at 0 is exact, fuzzy at 9 the drafter
  'lossy': (0.0, 0.5, 0.8),
  'fuzzy': (9.0, 0.1, 0.3),
  'mixed': (0.3, 0.6),
  'mentored': (0.05, 0.3),
  'token_v3': (0.5, 0.9),
  'token_v3_tested': (0.5, 0.9),
  'typical': (0.8, 0.97),
  'medusa': (0.8, 0.97),
  'relaxed': (0.3, 0.7),
  'thresholds': (0.5, 0.9),
}
AS_EXACT = ('mentored', 'typical', 'medusa', 'thresholds', 'token_v3_tested')  # at temperature 0, or as another rule is
FLY = (1.2, 0.6, 0.2)  # the least entropy, with W = 2
LEARNED = (0.0, 1.0)  # how much less the verifier weighs than the head says, in log-odds
PHASED = {'mixed': 0.6, 'mentored': 0.3, 'lossy': 0.8}  # while it thinks; exact in the answer
MARKERS = {'sums': ('Answer:', '####')}


@rules.rule(normalized=True)
def numbered(q, p, *, which, alpha):
  """Ask one of `RULES` by its number."""

  def asked(rule):
    return rules.target(functools.partial(rule, alpha=alpha), [q.logits, p.logits], q.sampler).probs

  return jax.lax.switch(which.astype(int), [functools.partial(asked, rule) for rule in RULES.values()])


def pair_of(pair: str, count: int):
  """Return the models and the task of a pair."""
  split = 'test' if pair == 'sums' else 'test_2016_flickr'
  return families.pair(pair), families.task(pair, split, count, NEW[pair])


def measure(method, models, task, temperature: float, pair: str) -> tuple[dict, np.ndarray]:
  """Return the row of a method, and the score of each text."""
  requests = [Request(example.prompt, stop=list(task.stop)) for example in task.examples]
  settings = dict(max_new_tokens=NEW[pair], batch_size=50, trace=True, sampler=Sampler(temperature))
  out = decode(method, models, requests, **settings)
  pairs = zip(out.logprobs, out.stats.source, strict=True)
  excess = np.concatenate([(logp[0] - logp[1])[np.asarray(source) == 0] for logp, source in pairs])  # log q / p
  ((name, metric),) = task.metrics.items()
  sums = metric.statistics(task.examples, out.texts)
  n = len(task.examples)
  low, high = intervals.interval(np.array([metric.combine(w @ sums, n) for w in intervals.draws(0, n)]))
  row = dict(
    acceptance=out.stats.accepted.sum() / out.stats.tested.sum(),
    tokens_per_round=out.stats.emitted.sum() / out.stats.rounds.sum(),
    overshoot=np.maximum(0, 1 - np.exp(-excess)).mean(),
    ratio_99=np.exp(np.quantile(excess, 0.99)),
    quality=metric(task.examples, out.texts),
    quality_low=low,
    quality_high=high,
  )
  scored = metrics.METRICS.get(LOSS[pair], metric) if name != LOSS[pair] else metric
  return row, scored.statistics(task.examples, out.texts)[:, 0]


def methods_of(temperature: float, pair: str, models, head: str | None):
  """Yield the rule, its number and the method of each setting; the first is exact."""
  for depth in range(3):
    for name, values in SETTINGS.items():
      if depth < len(values) and not (temperature == 0 and name in AS_EXACT):
        numbers = dict(which=float(list(RULES).index(name)), alpha=values[depth])
        yield name, values[depth], methods.speculative(functools.partial(numbered, **numbers), block=BLOCK)
  for limit in FLY:
    yield 'FLy', limit, methods.speculative(block=BLOCK, accept=acceptance.FLy(limit, window=2))
  for alpha in LEARNED if head else ():
    yield 'learned_mixture', alpha, methods.speculative(functools.partial(learned(head), alpha=alpha), block=BLOCK)
  for name, alpha in PHASED.items() if pair in MARKERS else ():
    if not (temperature == 0 and (name in AS_EXACT or name == 'lossy')):
      begin, end = (inside_of_text(models[-1], text) for text in MARKERS[pair])
      phased = functools.partial(rules.phased, inside=functools.partial(RULES[name], alpha=alpha), begin=begin, end=end)
      yield f'phased {name}', alpha, methods.speculative(phased, block=BLOCK)


def inside_of_text(model, text: str) -> tuple[int, ...]:
  """Return the tokens of a text behind another."""
  first, both = (model.tokenizer.encode(x) for x in ('\n', f'\n{text}'))
  return tuple(both[len(first) :])


def learned(head: str):
  """Return the rule of a trained head."""
  from experiments.learned_deferral.learned import load  # which needs gin

  return load(head)


def main():
  """Measure what is missing, a line each."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  for name, kind in dict(pair=str, temperature=float, out=Path).items():
    parser.add_argument(name, type=kind)
  parser.add_argument('--count', type=int, default=200)
  parser.add_argument('--head')
  args = parser.parse_args()
  models, task = pair_of(args.pair, args.count)
  scores = args.out.with_suffix(f'.{args.pair}.{args.temperature}.exact.npy')
  for name, value, method in methods_of(args.temperature, args.pair, models, args.head):
    key = dict(pair=args.pair, temperature=str(args.temperature), rule=name, value=str(value))
    if scores.exists() and rows.has(args.out, key):
      continue
    row, texts = measure(method, models, task, args.temperature, args.pair)
    if not scores.exists():
      np.save(scores, texts)
      if rows.has(args.out, key):
        continue
    losses = np.load(scores) - texts
    row |= dict(loss=100 * losses.mean(), bound=calibration.bound(losses, 0.05), examples=len(task.examples))
    rows.append(args.out, key | {name: f'{number:.5g}' for name, number in row.items()})


if __name__ == '__main__':
  main()
