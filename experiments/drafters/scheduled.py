"""What schedules of verification gain on top of drafters, at T = 1: by the drawn token's q, max q and the margin.

python -m experiments.drafters.scheduled DRAFTERS OUT [--family multi30k] [--drafters eagle …] [--check 16]

With coupled noise a draft is a function of the text before it. So the drafts from every token are observed once, and
rounds of any schedule are counted from them: those of the loop, which `--check BATCH` decodes. The folder OUT keeps
what was observed and a line for each schedule. Chances, γ and thresholds are fitted to half of the texts and judged by
the other, both ways; seconds are those of the roofline of T5 small → XXL or Llama 68M → 13B on a TPU v5e.
"""

import argparse
import dataclasses
import functools
import itertools
from pathlib import Path

import jax
import numpy as np

from experiments.drafters.drafts import MOST, observe, SIGNALS
from experiments.drafters.measure import drafter_of, NEW
from experiments.helpers import families, rows
from experiments.sv.compiled_times import PassTimes, roofline
from speccascade import backends, decode, methods, Sampler
from speccascade.models import packing, shapes
from speccascade.planning import fitting
from speccascade.sv import plans, predictors, verification

SCHEDULES = ('fixed', *SIGNALS, 'drawn_q by place', *(f'{name}, causal' for name in SIGNALS))
SETTINGS = {True: [(7, x / 10) for x in range(1, 9)], False: [(block, 0) for block in (1, 2, 3, 5, 7)]}  # of causal
NETWORKS = {'multi30k': (shapes.t5, 'small', 'xxl'), 'sums': (shapes.llama, '68m', '13b')}


def fit(seen: dict, name: str, half: int) -> tuple[predictors.Fit, np.ndarray]:
  """Return a fit to the tested tokens of the drafts of every other text, and the chance of each token of each draft."""
  place = np.broadcast_to(np.arange(MOST), seen['token'].shape)
  first = signal = seen[name.split()[0].strip(',')]
  at = place < np.minimum(seen['leading'] + 1, seen['size'])[:, None]
  at = at & (seen['text'] % 2 == half)[:, None]
  accept = np.float64(place < seen['leading'][:, None])[at]
  if signal is seen['margin']:
    made = fitting.curve(accept, signal[at]).replace(rate=0.0)
    return made, made.predict(signal.ravel()).reshape(at.shape)
  first, bins = (place, (MOST, 8)) if name.endswith('by place') else (signal, (1, 20))
  made = fitting.table(accept, first[at], signal[at], bins)
  return made, made.predict(first.ravel(), signal.ravel()).reshape(at.shape)


@dataclasses.dataclass(frozen=True)
class Costs:
  """Seconds of a drafter of a kind and of a verifier, at a batch size."""

  kind: str
  draft: PassTimes
  verifier: PassTimes
  batch: int

  def drafting(self, calls: int, most: int) -> float:
    """Return the seconds of a draft of so many of at most `most` tokens."""
    first = self.draft.seconds(self.batch, {'one_pass': 2 * most, 'eagle': most}.get(self.kind, 1))
    return first + (self.kind != 'one_pass') * (calls - 1) * self.draft.seconds(self.batch, 1)

  def latency(self, block: int) -> verification.Latency:
    """Return what `Goodput` decides by: the totals that the loop packs to."""
    b = self.batch
    widths = backends.TPU().window_widths(b, packing.fine_widths(block + 1))
    times = {b: {b * n: self.verifier.seconds(b, n) for n in widths}}
    return verification.Latency.of(times, {b: (self.drafting(block + 1, block + 1) / (block + 1), 0, 0)})


_lengths = jax.jit(lambda budget, found, active: budget(found, active))


def replay(seen, texts, costs: Costs, block: int, budget=None, chance=None, drain: bool = False) -> np.ndarray:
  """Return tokens, rounds of a row, scored tokens and seconds, while the batch is full; `drain` until all have ended.

  Without a budget all of γ tokens are scored, and none is tested alone.
  """
  first = {n: np.flatnonzero(seen['text'] == n)[[0, -1]] for n in texts}
  queue, total = list(texts), np.zeros(4)
  at, end = np.zeros((2, costs.batch), int)
  seconds, most = np.asarray(costs.latency(block).seconds[0]), block + (budget is not None)
  while True:
    for row in np.flatnonzero(at >= end)[: len(queue)]:
      at[row], end[row] = first[queue.pop(0)] + [0, 1]
    active = at < end
    if not (active.any() if drain else queue and active.all()):
      return total
    here = np.where(active, at, 0)
    drafted = scored = np.where(active, np.minimum(seen['size'][here], most), 0).astype(int)
    if budget is not None:
      there = np.arange(block) < drafted[:, None] - 1
      scored = np.asarray(_lengths(budget, np.float32(np.where(there, chance[here, :block], 0)), active))
      drafted = np.minimum(drafted, scored + 1) if budget.stops else drafted
    new = np.where(active, np.minimum(np.minimum(seen['leading'][here], scored) + 1, end - at), 0)
    verified = seconds[-1 if budget is None else active.sum() + scored.sum()]
    total += new.sum(), active.sum(), scored.sum(), verified + costs.drafting(drafted.max(), most)
    at += new


def budget_of(name: str, costs: Costs, block: int, threshold: float) -> verification.Budget | None:
  """Return the budget of a schedule."""
  if name == 'fixed':
    return None
  budget = verification.Causal(threshold) if name.endswith('causal') else verification.Goodput()
  return budget.measured(costs.latency(block), block + 1, False)


def judged(seen: dict, name: str, costs: Costs) -> dict:
  """Return what a schedule with settings that are best on half of the texts makes of the other, both ways."""
  total, chosen = np.zeros(4), []
  texts = np.unique(seen['text'])
  for half in 0, 1:
    chance = None if name == 'fixed' else fit(seen, name, half)[1]

    def run(setting, half, chance=chance):
      return replay(seen, texts[texts % 2 == half], costs, setting[0], budget_of(name, costs, *setting), chance)

    found = {setting: run(setting, half) for setting in SETTINGS[name.endswith('causal')]}
    chosen.append(max(found, key=lambda setting: found[setting][0] / found[setting][3]))
    total += run(chosen[-1], 1 - half)
  tokens, rounds, scored, seconds = total
  speed = tokens / seconds * costs.verifier.seconds(costs.batch, 1) / costs.batch
  numbers = dict(tokens_per_round=tokens / rounds, scored_per_round=1 + scored / rounds, speed=speed)
  return {k: f'{x:.4g}' for k, x in numbers.items()} | {'settings': ' and '.join(f'{b}/{t:g}' for b, t in chosen)}


def compared(seen: dict, costs: Costs, models, prompts, call: dict) -> dict:
  """Return what the loop makes of one batch by the drawn token's q, next to what is counted; which texts are plain."""
  made, chance = fit(seen, 'drawn_q', 0)
  texts = np.arange(costs.batch)
  budget = budget_of('drawn_q', costs, 7, 0)
  counted = replay(seen, texts, costs, 7, budget, chance, drain=True)
  schedule = methods.scheduled(predictors.drawn_q, 7, plan=plans.Profile(None, costs.latency(7)), fit=made)
  out = decode(schedule, models, prompts, batch_size=costs.batch, **call)
  plain = decode(methods.autoregressive(1), models, prompts, batch_size=costs.batch, **call).tokens
  scored = (out.stats.verified_lengths * np.arange(out.stats.verified_lengths.shape[1])).sum()
  same = sum(a == b for a, b in zip(out.tokens, plain, strict=True))
  return dict(
    rounds=f'{out.stats.rounds.sum()} for {counted[1]:.0f}', scored=f'{scored} for {counted[2]:.0f}', same=same
  )


def main():
  """Observe what is missing, and write the lines that are."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  for name in ('drafters_folder', 'out'):
    parser.add_argument(name, type=Path)
  parser.add_argument('--family', choices=NEW, default='multi30k')
  parser.add_argument('--drafters', nargs='+', default=['small', 'one_pass', 'eagle'])
  parser.add_argument('--batches', nargs='+', type=int, default=[1, 4, 16, 64])
  parser.add_argument('--count', type=int, default=400)
  parser.add_argument('--check', type=int, default=0, help='decode a batch of so many, in place of all else')
  args = parser.parse_args()
  pair = families.pair(args.family)
  texts = families.prompts(args.family, args.count)
  prompts = sorted(texts, key=lambda text: len(pair[1].tokenizer.encode(text)))  # as the loop takes them
  call = dict(max_new_tokens=NEW[args.family], sampler=Sampler(coupling='gumbel'), seed=0)
  make, small, large = NETWORKS[args.family]
  for name in args.drafters:
    models = [drafter_of(name, pair, args.drafters_folder), pair[1]]
    if not (path := args.out / f'{args.family}_{name}.npz').exists():
      np.savez_compressed(path, **observe(models, prompts, 50, **call))
    seen = dict(np.load(path))
    drafter = make(large, layers=1) if name == 'eagle' else make(small)
    of = functools.partial(Costs, name, roofline(drafter, 'v5e:2x2'), roofline(make(large), 'v5e:2x2'))
    if args.check:
      print(args.family, name, compared(seen, of(args.check), models, prompts[: args.check], call))
      continue
    for batch, schedule in itertools.product(args.batches, SCHEDULES):
      key = dict(family=args.family, drafter=name, batch=str(batch), schedule=schedule)
      file = args.out / 'scheduled.csv'
      if not rows.has(file, key):
        rows.append(file, key | judged(seen, schedule, of(batch)))


if __name__ == '__main__':
  main()
