"""Will speculation pay for this pair of models, and with which γ? Measure acceptance and times, predict, and try.

  python -m speccascade.plan SMALL LARGE --prompts FILE --rule opt:0.1

The formulas are those of `theory`.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import sys
import time

import numpy as np

from speccascade import checkpoints, methods, rules, sampling
from speccascade.backends import sharding
from speccascade.data import files
from speccascade.decode import decode
from speccascade.engine import inputs
from speccascade.host import commands
from speccascade.host.progress import Progress
from speccascade.planning import floor
from speccascade.planning.cost_model import at_width, by_place, by_width, ENSEMBLES, predict, window
from speccascade.types import Combiner, Model, Rule

PAYS = 1.05  # a speed-up up to this is lost in what a prediction leaves out and in the noise of a measurement
TRIALS = 3  # of a method that is timed
_FREE = 1e-6  # the cost of a drafter without cost
_METHODS = {'speculative': methods.speculative, 'cascade': methods.speculative, 'naive_cos': methods.naive_cos}


# ---- a plan ----


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A method whose acceptance was measured: what it is called, its kind, and its rates by place in the block."""

  name: str
  kind: str
  acceptance: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Row:
  """One method at one γ."""

  candidate: Candidate
  block: int
  verify_cost: float
  speedup: float  # predicted
  measured: float | None = None  # on some of the prompts, where it was tried

  @property
  def gain(self) -> float:
    """The speed-up as measured, or else as predicted."""
    return self.speedup if self.measured is None else self.measured

  def __str__(self):
    return f'{self.candidate.name} at γ = {self.block}'


@dataclasses.dataclass(frozen=True)
class Overhead:
  """What a token of the verifier alone and a round cost beside their calls, in tokens of the verifier."""

  token: float = 0.0
  round: float = 0.0


@dataclasses.dataclass(frozen=True)
class Plan:
  """What was measured of a pair of models and what follows for every method and γ; `str` tells it all."""

  names: tuple[str, str]
  temperature: float
  seconds: tuple[dict[int, float], dict[int, float]]  # of the drafter and the verifier by width
  rows: tuple[Row, ...]
  overhead: Overhead = Overhead()
  faults: tuple[str, ...] = ()  # of prompts, which are left out

  @property
  def cost_ratio(self) -> float:
    """The drafter's time for a token over the verifier's."""
    return self.seconds[0][1] / self.seconds[1][1]

  def best(self, *kinds: str) -> Row | None:
    """Return the fastest row of these kinds, of those that were tried if any was; of all methods without kinds."""
    rows = [r for r in self.rows if not kinds or r.candidate.kind in kinds]
    tried = [r for r in rows if r.measured is not None]
    return max(tried or rows, key=lambda r: r.gain, default=None)

  @property
  def _choices(self) -> list[Row]:
    """The best row of those that keep the verifier's law, of cascades, and of those that keep the ensemble's law."""
    best = (self.best(*kinds) for kinds in (('speculative',), ('cascade',), ENSEMBLES))
    return [row for row in best if row is not None]

  @property
  def pays(self) -> bool:
    """Whether any method is faster than what it stands in for: as measured, or as predicted where none was tried."""
    return any(row.gain > PAYS for row in self._choices)

  @property
  def verdict(self) -> str:
    """The recommendation: a sentence for what keeps the verifier's law, one for cascades, one for ensembles."""
    return ' '.join(map(self._sentence, self._choices))

  def _sentence(self, row: Row) -> str:
    ensemble, large = row.candidate.kind in ENSEMBLES, self.names[1]
    what = {'speculative': 'Speculation', 'cascade': 'A cascade'}.get(row.candidate.kind, 'Collaboration')
    speed = f'the speed of {"the standard ensemble" if ensemble else f"{large} alone"}'
    law = f"its output is the rule's, not {large}'s" if row.candidate.kind == 'cascade' else 'it keeps the law'
    if row.measured is None:
      said = f'{row.speedup:.2f}× {speed} is predicted with {row}'
    else:
      said = f'{row.measured:.2f}× {speed} was measured with {row}, {row.speedup:.2f}× predicted'
    if row.gain > PAYS:
      return f'{what} {"should pay" if row.measured is None else "pays"}: {said}; {law}.'
    if row.speedup <= PAYS:
      return f'{what} will not pay here: {self._reason(row.candidate)}; {said}.'
    return (
      f'{what} will not pay here: {said}, for the start of a text costs more than its calls. Larger models or longer '
      'texts gain.'
    )

  def _reason(self, candidate: Candidate) -> str:
    """Return which of acceptance, drafter and window would gain the most if it were ideal."""
    rows = [r for r in self.rows if r.candidate == candidate]

    def best(**ideal):
      given = [
        dict(acceptance=candidate.acceptance, cost_ratio=self.cost_ratio, verify_cost=r.verify_cost) | ideal
        for r in rows
      ]
      return max(_predict(candidate.kind, self.overhead, block=r.block, **g) for r, g in zip(rows, given, strict=True))

    first, widest = candidate.acceptance[0], max(rows, key=lambda r: r.block)
    costs = f"the verifier's window of {widest.block + 1} costs {widest.verify_cost:.2f} of its tokens"
    reasons = {
      f'acceptance is too low ({first:.2f} at the first drafted token)': best(acceptance=1.0),
      f'the drafter is too dear (a call costs {self.cost_ratio:.2f} of one of the verifier)': best(cost_ratio=_FREE),
      f"the verifier's window is too dear ({costs})": best(verify_cost=1.0),
      f'a round is too dear beside its calls ({self.overhead.round:.2f} of a token of the verifier)': max(
        predict(candidate.kind, candidate.acceptance, self.cost_ratio, r.block, r.verify_cost) for r in rows
      ),
    }
    return max(reasons, key=reasons.get)

  def __str__(self):
    small, large = self.names
    candidates = list(dict.fromkeys(r.candidate for r in self.rows))
    lines = [
      f'{small} {1e3 * self.seconds[0][1]:.3g} ms a token, {large} {1e3 * self.seconds[1][1]:.3g} ms: '
      f'cost ratio {self.cost_ratio:.3f}; T = {self.temperature:g}',
      '',
      'acceptance by place in the block, given all before',
    ]
    wide = max(len(c.name) for c in candidates)
    lines += [f'  {c.name:<{wide}}  ' + '  '.join(f'{a:.2f}' for a in c.acceptance) for c in candidates]
    laws = {k: [c.name for c in candidates if (c.kind == 'cascade') == k] for k in (False, True)}
    lines += ['', f'keep the law of {large} or of the ensemble: {", ".join(laws[False])}']
    if laws[True]:
      lines.append(f"follow a law of their own, so that the output is not {large}'s: {', '.join(laws[True])}")
    heads = [f'{c.name:>{max(9, len(c.name))}}' for c in candidates]
    lines += ['', f'predicted speed-up\n  {"γ":>3}  {"window":>7}  ' + '  '.join(heads)]
    for block in dict.fromkeys(r.block for r in self.rows):
      some = {r.candidate: r for r in self.rows if r.block == block}
      cells = [f'{some[c].speedup:{len(h) - 1}.2f}×' for c, h in zip(candidates, heads, strict=True)]
      cost = at_width(self.seconds[1], block + 1) / self.seconds[1][1]
      lines.append(f'  {block:>3}  {cost:6.2f}   ' + '  '.join(cells))
    lines.append("window: the verifier's time for γ + 1 tokens at once over its time for one")
    if self.overhead != Overhead():
      said = f'{self.overhead.token:.2f} for a token of {large} alone, {self.overhead.round:.2f} for a round'
      lines.append(f'counted beside the calls, in tokens of the verifier: {said}')
    if self.faults:
      lines.append(f'left out, for they ended as faults: {len(self.faults)} prompts. {self.faults[0]}')
    return '\n'.join([*lines, '', self.verdict])


def plan(
  models: Sequence[Model], prompts: Sequence[str] | Sequence[Sequence[int]], *, blocks: Sequence[int] = range(1, 9),
  temperature: float = 0.0, cascades: Mapping[str, Rule] | None = None,
  combiners: Mapping[str, Combiner] | None = None, max_new_tokens: int = 64, batch_size: int = 1, seed: int = 0,
  forward: Sequence[Mapping[int, float]] | None = None, progress: bool = False,
  clock: Callable[[], float] = time.perf_counter,
) -> Plan:  # fmt: skip
  """Measure a drafter and a verifier on a sample of prompts and predict the speed-up of every method at every γ.

  Plain speculative decoding is always planned; `cascades` and `combiners` add rules by name, a combiner being planned
  without and with alternate proposals (naive_cos, cos). Acceptance comes from one decode at the longest block. The
  forward times are measured at `batch_size` rows unless `forward` gives {width: seconds} of both models. Where they
  are measured and anything should pay, plain speculative decoding is timed beside the verifier on some of the
  prompts, which tells what a token and a round cost beside their calls; then the fastest choice that keeps the
  verifier's law is tried, and the fastest cascade. `progress` shows how far it is on standard error; decodes are timed
  by `clock`.
  """
  blocks = _blocks(blocks)
  if len(models) != 2:
    raise ValueError(f'plan takes a drafter and a verifier, not {len(models)} models.')
  rules_of = {'speculative': {'speculative': rules.speculative}, 'cascade': cascades, 'naive_cos': combiners}
  wanted = {(kind, name): rule for kind, some in rules_of.items() for name, rule in (some or {}).items()}
  here = forward is None
  if here and batch_size > len(prompts):
    raise ValueError(f'{len(prompts)} prompts do not fill a batch of {batch_size}; give more, or a smaller batch.')
  settings = dict(max_new_tokens=max_new_tokens, sampler=sampling.Sampler(temperature), seed=seed)
  widths = sorted({1, *blocks, *(b + 1 for b in blocks)})
  bar = Progress('plan', len(wanted) + (2 * len(widths) + 2 * (TRIALS + 1)) * here, unit='steps', shown=progress)
  candidates, sound, faults = _candidates(models, prompts, wanted, max(2, *blocks), settings, bar)
  if here:
    forward = _measure(models, prompts, widths, batch_size, max_new_tokens, bar)
  seconds = by_width(forward[0]), by_width(forward[1])
  found = Plan(tuple(m.name for m in models), temperature, seconds, _rows(candidates, blocks, seconds), faults=faults)
  if here and found.best('speculative', 'cascade').speedup > PAYS and len(sound) >= batch_size:
    trial = functools.partial(_tried, models, sound, settings | dict(batch_size=batch_size), bar=bar, clock=clock)
    found = _with_trials(found, blocks, wanted, trial)
  bar.end()
  return found


def _candidates(models, prompts, wanted: Mapping, block: int, settings: dict, bar: Progress) -> tuple:
  """Measure the acceptance of each rule; return beside it the prompts without a fault, and what the others' say."""
  candidates, faults = [], {}
  for (kind, name), rule in wanted.items():
    method = _METHODS[kind](rule, block=block)
    out = decode(method, models, prompts, **settings, batch_size=min(8, len(prompts)), keep_faults=True)
    faults |= {i: fault for i, fault in enumerate(out.faults) if fault}
    sound = [i for i in range(len(prompts)) if out.faults[i] is None]
    if not sound:
      out.raise_for_fault()
    rates = by_place(out.stats.tested_at[sound].sum(0), out.stats.accepted_at[sound].sum(0))
    kinds = ('naive_cos', 'cos') if kind == 'naive_cos' else (kind,)
    candidates += [Candidate(f'{k} {name}' if len(kinds) > 1 else name, k, rates) for k in kinds]
    bar.add(1, f'acceptance, {name}')
  sound = [prompt for i, prompt in enumerate(prompts) if i not in faults]
  return candidates, sound, tuple(faults.values())


def _rows(candidates: Sequence[Candidate], blocks, seconds, overhead: Overhead = Overhead()) -> tuple[Row, ...]:
  """Predict every candidate at every γ."""
  cost, rows = seconds[0][1] / seconds[1][1], []
  for candidate in candidates:
    for block in blocks:
      verify = at_width(seconds[1], window(candidate.kind, block)) / seconds[1][1]
      said = _predict(candidate.kind, overhead, candidate.acceptance, cost, block, verify)
      rows.append(Row(candidate, block, verify, said))
  return tuple(rows)


def _predict(kind: str, overhead: Overhead, acceptance, cost_ratio, block, verify_cost) -> float:
  """Predict a speed-up where a token of the reference and a round cost different times beside their calls."""
  reference = 1 + cost_ratio if kind in ENSEMBLES else 1.0
  said = predict(kind, acceptance, cost_ratio, block, verify_cost, overhead.round)
  return said * (reference + overhead.token) / (reference + overhead.round)


def _with_trials(found: Plan, blocks, wanted: Mapping, trial: Callable) -> Plan:
  """Time what a plan recommends, and predict anew with what a round was seen to cost beside its calls."""
  first = found.best('speculative')
  gains, overhead = trial([methods.speculative(block=first.block)], found.seconds)
  candidates = list(dict.fromkeys(r.candidate for r in found.rows))
  found = dataclasses.replace(found, overhead=overhead, rows=_rows(candidates, blocks, found.seconds, overhead))
  best = [row for kind in ('speculative', 'cascade') if (row := found.best(kind)) is not None]
  if [str(row) for row in best] != [str(first)]:
    rule_of = [wanted[row.candidate.kind, row.candidate.name] for row in best]
    made = [methods.speculative(rule, row.block) for rule, row in zip(rule_of, best, strict=True)]
    gains, _ = trial(made, found.seconds)
  measured = dict(zip(map(str, best), gains, strict=True))
  rows = [dataclasses.replace(r, measured=measured.get(str(r)) if r in best else None) for r in found.rows]
  return dataclasses.replace(found, rows=tuple(rows))


def _tried(
  models, prompts, settings: dict, tried: Sequence, seconds, *, bar: Progress, clock: Callable[[], float]
) -> tuple[list[float], Overhead]:
  """Time methods on some of the prompts in turn with the verifier alone, after a warm-up.

  Return their speed-ups over it, and what one of its tokens and a round of the first of them cost beside their calls.
  """
  batch = settings['batch_size']
  some, counted = list(prompts[: min(max(4, batch), len(prompts)) // batch * batch]), {}  # whole batches
  runs = [methods.autoregressive(1), *tried]
  bar.need(len(runs) * (TRIALS + 1))

  def seconds_of(i: int) -> float:
    start = clock()
    out = decode(runs[i], models, some, **settings)
    spent = clock() - start
    counted[i] = out.stats
    bar.add(1, f'decoding, {runs[i].name}')
    return spent

  took = floor.interleave({i: functools.partial(seconds_of, i) for i in range(len(runs))}, TRIALS)
  alone, *sped = (float(np.median(t)) for t in took.values())
  token = _beside(alone, counted[0], [0.0, 1.0], seconds, batch)
  stats, width = counted[1], tried[0].phases[1].widths[-1]
  costs = [seconds[0][1], at_width(seconds[1], width)]
  round_ = _beside(sped[0], stats, [c / seconds[1][1] for c in costs], seconds, batch)
  return [alone / s for s in sped], Overhead(token, round_)


def _beside(spent: float, stats, costs: Sequence[float], seconds, batch: int) -> float:
  """Return what a round cost beside its calls, in tokens of the verifier, where a model's call costs so many."""
  calls = sum(cost * n for cost, n in zip(costs, stats.calls.sum(1), strict=True))
  return max(0.0, float((spent * batch / seconds[1][1] - calls) / stats.rounds.sum()))


def _blocks(blocks: Sequence[int]) -> tuple[int, ...]:
  blocks = tuple(blocks)
  if not blocks or not all(isinstance(b, (int, np.integer)) and b >= 1 for b in blocks):
    raise ValueError(f'blocks={blocks} is not a list of γ, whole numbers of at least 1.')
  return tuple(sorted({int(b) for b in blocks}))


def _measure(models, prompts, widths, batch_size, max_new_tokens, bar: Progress) -> list[dict[str, float]]:
  source = max(row.size for row in inputs.encode(models, prompts))
  names = ('small', 'large')  # two models may have one name
  both = [m.replace(name=n) for m, n in zip(models, names, strict=True)]
  tell = lambda name, width: bar.add(1, f'forward passes, {name} {width}')
  found = floor.measure(both, widths, batch=batch_size, source=source, tokens=max_new_tokens, tell=tell)
  return [_monotone(found[n]) for n in names]


def _monotone(forward: Mapping[str, float]) -> dict[int, float]:
  """Bound each window's time by those of wider ones: other work on the machine can only add to a measurement."""
  seconds = by_width(forward)
  return {w: min(s for other, s in seconds.items() if other >= w) for w in seconds}


# ---- the command ----


def main(argv: Sequence[str] | None = None) -> int:
  """Load the pair, plan and print; return the exit code."""
  return commands.run(_parser(), _run, argv, 'interrupted')


def _parser() -> commands.Parser:
  parser = commands.Parser('speccascade.plan', __doc__)
  parser.add_argument('small', help='checkpoint of the drafter; FOLDER@4 is the first four layers of FOLDER')
  parser.add_argument('large', help='checkpoint of the verifier')
  parser.add_argument('--prompts', required=True, help='a text file, one prompt a line, .gz or not')
  parser.add_argument('--count', type=commands.count, default=32, help='how many of the prompts (32)')
  parser.add_argument('--tokens', type=commands.count, default=64, help='the most new tokens (64)')
  parser.add_argument('--temperature', type=float, default=0.0, help='of both models (0)')
  parser.add_argument('--blocks', type=_listed_blocks, default='1-8', help='γ to plan, as in 1-8 or 1,3,5 (1-8)')
  parser.add_argument('--batch', type=commands.count, default=1, help='rows decoded at once (1)')
  parser.add_argument(
    '--rule', type=_rule, action='append', default=[], help='a cascade to plan too, as in opt:0.1; may repeat'
  )
  parser.add_argument('--weights', type=float, nargs=2, help='plan an ensemble of these weights as well')
  parser.add_argument('--dtype', choices=['float32', 'bfloat16', 'float16'], help='default: as stored')
  parser.add_argument('--mesh', type=commands.mesh, help='devices by axis, as in data=1,model=4; default: one')
  return parser


def _run(args: argparse.Namespace):
  combiners = {}
  if args.weights:
    combiners['weighted'] = functools.partial(rules.weighted, weights=tuple(args.weights))
    rules.bind_combiner(combiners['weighted'])
  sampling.Sampler(args.temperature)
  prompts = _prompts(args.prompts, args.count)
  paths = [args.small, args.large]
  for path in paths:
    checkpoints.digest(path)  # raises where there is no checkpoint, before the other one is read
  mesh = None if args.mesh is None else sharding.mesh(args.mesh)
  models = checkpoints.load_all(paths, dtype=args.dtype, mesh=mesh)
  found = plan(
    models, prompts, blocks=args.blocks, temperature=args.temperature, cascades=dict(args.rule), combiners=combiners,
    max_new_tokens=args.tokens, batch_size=args.batch, progress=True,
  )  # fmt: skip
  print(found)


def _listed_blocks(text: str) -> list[int]:
  found: list[int] = []
  for part in text.split(','):
    low, _, high = part.partition('-')
    if not (low.isdecimal() and (high or low).isdecimal() and 1 <= int(low) <= int(high or low)):
      raise argparse.ArgumentTypeError(f'{text!r} is no list of γ from 1 on, as in 1-8 or 1,3,5')
    found += range(int(low), int(high or low) + 1)
  return found


def _rule(text: str) -> tuple[str, Rule]:
  rule = commands.rule(text)
  try:
    rules.bind_rule(rule)
  except ValueError as error:  # of a combiner
    raise argparse.ArgumentTypeError(f'{text}: {error}') from None
  return text.replace(':', ' '), rule


def _prompts(path: str, count: int) -> list[str]:
  return [line for line in files.lines(path) if line.strip()][:count]


if __name__ == '__main__':
  sys.exit(main())
