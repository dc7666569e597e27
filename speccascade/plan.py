"""Will speculation pay for this pair of models, and with which γ? Measure acceptance and forward times, then predict.

  python -m speccascade.plan SMALL LARGE --prompts FILE --rule opt:0.1

The formulas are those of `prediction`.
"""

import argparse
from collections.abc import Mapping, Sequence
import dataclasses
import functools
import sys
import time

import numpy as np

from speccascade import checkpoints, commands, disk, inputs, methods, probs, rules
from speccascade.data import files
from speccascade.decode import decode
from speccascade.evaluate import floor
from speccascade.prediction import at_width, by_place, by_width, ENSEMBLES, predict, window
from speccascade.types import Combiner, Model, Rule

PAYS = 1.05  # a predicted speed-up up to this is lost in what the prediction leaves out
TRIALS = 3  # of the method that a plan recommends
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
  speedup: float


@dataclasses.dataclass(frozen=True)
class Plan:
  """What was measured of a pair of models and what follows for every method and γ; `str` tells it all."""

  names: tuple[str, str]
  temperature: float
  seconds: tuple[dict[int, float], dict[int, float]]  # of the drafter and the verifier by width
  rows: tuple[Row, ...]
  measured: float | None = None  # the speed-up of the best row on some prompts, where it was tried

  @property
  def cost_ratio(self) -> float:
    """The drafter's time for a token over the verifier's."""
    return self.seconds[0][1] / self.seconds[1][1]

  def best(self, ensemble: bool = False) -> Row | None:
    """Return the fastest row among methods that stand in for the verifier, or for the ensemble."""
    rows = [r for r in self.rows if (r.candidate.kind in ENSEMBLES) == ensemble]
    return max(rows, key=lambda r: r.speedup, default=None)

  @property
  def pays(self) -> bool:
    """Whether any method is faster than what it stands in for: as predicted, or as measured where it was."""
    return any(r.speedup > PAYS for r in self.rows) and (self.measured is None or self.measured > PAYS)

  @property
  def verdict(self) -> str:
    """The recommendation in a sentence; one more for ensembles, where they were asked for."""
    found = [
      (self.best(), f'{self.names[1]} alone', self.measured),
      (self.best(ensemble=True), 'the standard ensemble', None),
    ]
    return ' '.join(self._sentence(*one) for one in found if one[0] is not None)

  def _sentence(self, row: Row, over: str, measured: float | None) -> str:
    said = f'{row.speedup:.2f}× the speed of {over} with {row.candidate.name} at γ = {row.block}'
    if row.speedup <= PAYS:
      return f'Speculation will not pay here: {self._reason(row.candidate)}; the best prediction is {said}.'
    if measured is None:
      return f'Speculation should pay: {said}.'
    if measured > PAYS:
      return f'Speculation pays: {said} is the prediction, {measured:.2f}× was measured on some of the prompts.'
    return (
      f'Speculation will not pay here: the prediction is {said}, but {measured:.2f}× was measured on some of the '
      'prompts, for a round and the start of a text cost more than their calls. Larger models or longer texts gain.'
    )

  def _reason(self, candidate: Candidate) -> str:
    """Return which of acceptance, drafter and window would gain the most if it were ideal."""
    rows = [r for r in self.rows if r.candidate == candidate]

    def best(**ideal):
      given = [
        dict(acceptance=candidate.acceptance, cost_ratio=self.cost_ratio, verify_cost=r.verify_cost) | ideal
        for r in rows
      ]
      return max(predict(candidate.kind, block=r.block, **g) for r, g in zip(rows, given, strict=True))

    first, widest = candidate.acceptance[0], max(rows, key=lambda r: r.block)
    costs = f"the verifier's window of {widest.block + 1} costs {widest.verify_cost:.2f} of its tokens"
    reasons = {
      f'acceptance is too low ({first:.2f} at the first drafted token)': best(acceptance=1.0),
      f'the drafter is too dear (a call costs {self.cost_ratio:.2f} of one of the verifier)': best(cost_ratio=_FREE),
      f"the verifier's window is too dear ({costs})": best(verify_cost=1.0),
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
    heads = [f'{c.name:>{max(9, len(c.name))}}' for c in candidates]
    lines += ['', f'predicted speed-up\n  {"γ":>3}  {"window":>7}  ' + '  '.join(heads)]
    for block in dict.fromkeys(r.block for r in self.rows):
      some = {r.candidate: r for r in self.rows if r.block == block}
      cells = [f'{some[c].speedup:{len(h) - 1}.2f}×' for c, h in zip(candidates, heads, strict=True)]
      cost = at_width(self.seconds[1], block + 1) / self.seconds[1][1]
      lines.append(f'  {block:>3}  {cost:6.2f}   ' + '  '.join(cells))
    lines.append("window: the verifier's time for γ + 1 tokens at once over its time for one")
    return '\n'.join([*lines, '', self.verdict])


def plan(
  models: Sequence[Model],
  prompts: Sequence[str] | Sequence[Sequence[int]],
  *,
  blocks: Sequence[int] = range(1, 9),
  temperature: float = 0.0,
  cascades: Mapping[str, Rule] | None = None,
  combiners: Mapping[str, Combiner] | None = None,
  max_new_tokens: int = 64,
  batch_size: int = 1,
  seed: int = 0,
  forward: Sequence[Mapping[int, float]] | None = None,
) -> Plan:
  """Measure a drafter and a verifier on a sample of prompts and predict the speed-up of every method at every γ.

  Plain speculative decoding is always planned; `cascades` and `combiners` add rules by name, a combiner being planned
  without and with alternate proposals (naive_cos, cos). Acceptance comes from one decode at the longest block. The
  forward times are measured at `batch_size` rows unless `forward` gives {width: seconds} of both models; then the best
  method, if it should pay, is tried on some of the prompts.
  """
  blocks = _blocks(blocks)
  if len(models) != 2:
    raise ValueError(f'plan takes a drafter and a verifier, not {len(models)} models.')
  wanted = [('speculative', 'speculative', rules.speculative)]
  wanted += [(name, 'cascade', rule) for name, rule in (cascades or {}).items()]
  wanted += [(name, 'naive_cos', combiner) for name, combiner in (combiners or {}).items()]
  candidates = []
  for name, kind, rule in wanted:
    out = decode(
      _METHODS[kind](rule, block=max(2, *blocks)), models, prompts, max_new_tokens=max_new_tokens,
      sampler=probs.Sampler(temperature), seed=seed, batch_size=min(8, len(prompts)),
    )  # fmt: skip
    rates = by_place(out.stats.tested_at.sum(0), out.stats.accepted_at.sum(0))
    kinds = ('naive_cos', 'cos') if kind == 'naive_cos' else (kind,)
    candidates += [Candidate(f'{k} {name}' if len(kinds) > 1 else name, k, rates) for k in kinds]
  here = forward is None
  if here:
    forward = _measure(models, prompts, sorted({1, *blocks, *(b + 1 for b in blocks)}), batch_size, max_new_tokens)
  seconds = by_width(forward[0]), by_width(forward[1])
  cost = seconds[0][1] / seconds[1][1]
  rows = []
  for candidate in candidates:
    for block in blocks:
      verify = at_width(seconds[1], window(candidate.kind, block)) / seconds[1][1]
      speedup = predict(candidate.kind, candidate.acceptance, cost, block, verify)
      rows.append(Row(candidate, block, verify, speedup))
  found = Plan((models[0].name, models[1].name), float(temperature), seconds, tuple(rows))
  best = found.best()
  if not here or best.speedup <= PAYS:
    return found
  rule = next(rule for name, _, rule in wanted if name == best.candidate.name)
  settings = dict(max_new_tokens=max_new_tokens, sampler=probs.Sampler(temperature), seed=seed, batch_size=batch_size)
  return dataclasses.replace(found, measured=_tried(models, methods.speculative(rule, best.block), prompts, settings))


def _tried(models, method, prompts, settings: dict) -> float:
  """Return the speed-up of a method over the verifier alone on some of the prompts, timed in turn after a warm-up."""
  some = list(prompts[: max(4, settings['batch_size'])])

  def seconds(method):
    start = time.perf_counter()
    decode(method, models, some, **settings)
    return time.perf_counter() - start

  runs = {'alone': methods.autoregressive(1), 'sped': method}
  took = floor.interleave({name: functools.partial(seconds, m) for name, m in runs.items()}, TRIALS)
  return float(np.median(took['alone']) / np.median(took['sped']))


def _blocks(blocks: Sequence[int]) -> tuple[int, ...]:
  blocks = tuple(blocks)
  if not blocks or not all(isinstance(b, (int, np.integer)) and b >= 1 for b in blocks):
    raise ValueError(f'blocks={blocks} is not a list of γ, whole numbers of at least 1.')
  return tuple(sorted({int(b) for b in blocks}))


def _measure(models, prompts, widths, batch_size, max_new_tokens) -> list[dict[str, float]]:
  source = max(row.size for row in inputs.encode(models, prompts))
  names = ('small', 'large')  # two models may have one name
  both = [m.replace(name=n) for m, n in zip(models, names, strict=True)]
  found = floor.measure(both, widths, batch=batch_size, source=source, tokens=max_new_tokens)
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
  parser.add_argument('small', help='checkpoint of the drafter')
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
  return parser


def _run(args: argparse.Namespace):
  combiners = {}
  if args.weights:
    combiners['weighted'] = functools.partial(rules.weighted, weights=tuple(args.weights))
    rules.bind_combiner(combiners['weighted'])
  probs.Sampler(args.temperature)
  prompts = _prompts(args.prompts, args.count)
  paths = [disk.local(args.small), disk.local(args.large)]
  for path in paths:
    checkpoints.digest(path)  # raises where there is no checkpoint, before the other one is read
  models = [checkpoints.load(path, dtype=args.dtype) for path in paths]
  print('measuring acceptance and forward times; compiling takes most of it …', file=sys.stderr)
  found = plan(
    models, prompts, blocks=args.blocks, temperature=args.temperature, cascades=dict(args.rule), combiners=combiners,
    max_new_tokens=args.tokens, batch_size=args.batch,
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
  name, _, alpha = text.partition(':')
  known = {r.__name__: r for r in rules.RULES}
  if name not in known:
    raise argparse.ArgumentTypeError(f'no rule is called {name}; there are {", ".join(known)}')
  try:
    rule = functools.partial(known[name], alpha=float(alpha)) if alpha else known[name]
    rules.bind_rule(rule)
  except ValueError as error:
    raise argparse.ArgumentTypeError(f'{text}: {error}') from None
  return f'{name} {alpha}'.strip(), rule


def _prompts(path: str, count: int) -> list[str]:
  return [line for line in files.lines(path) if line.strip()][:count]


if __name__ == '__main__':
  sys.exit(main())
