"""What a plan is chosen by: a table of candidates and γ at each batch size, a verdict in words, and what is saved.

`planner.plan` makes it of what it measures; `str` of a report is the text that the command prints.
"""

from collections.abc import Callable, Mapping
import dataclasses
from dataclasses import replace
import functools
import operator
from typing import Any

import numpy as np

from speccascade import theory
from speccascade.engine.method import LOCKSTEP, Method
from speccascade.planning import cost_model, timing
from speccascade.planning.cost_model import Costs
from speccascade.planning.elsewhere import Compiled, Elsewhere
from speccascade.sv import plans
from speccascade.sv.plans import Choice, Origin, Speed

PAYS = 1.05  # a speed-up up to this is lost in what a prediction leaves out and in the noise of a measurement


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A method for any γ, and the acceptance that was measured for it at each position in the block."""

  name: str
  make: Callable[[int], Method] = dataclasses.field(compare=False, repr=False)
  acceptance: tuple[float, ...] = ()
  reference: str = 'alone'  # what its speed-up is over: the verifier alone, or the ensemble of this name
  predictor: str = ''  # of scheduled verification
  knots: int = 3  # at so many γ a round of it is timed; 0: rounds are those of another candidate
  leaves: int = 0
  hits: float = 0.0  # the share of rejections that a leaf follows

  @functools.cached_property
  def of_ensemble(self) -> bool:
    """Whether its speed-up is over the standard ensemble."""
    return self.make(1).about.over == LOCKSTEP

  @functools.cached_property
  def of_verifier(self) -> bool:
    """Whether its output follows the verifier's distribution."""
    return self.make(1).follows_verifier

  @property
  def of_rule(self) -> bool:
    """Whether its output follows neither its reference's distribution nor the verifier's."""
    return not self.of_ensemble and not self.of_verifier


@dataclasses.dataclass(frozen=True, eq=False)
class PlanRow:
  """One candidate at one γ: its speed-up as predicted and, where it was tried, as measured."""

  candidate: Candidate
  block: int
  speedup: float
  costs: Costs | None = None
  measured: timing.Interval | None = None
  speed: timing.Interval | None = None  # tokens a second

  @property
  def gain(self) -> float:
    """The speed-up as measured, or else as predicted."""
    return self.speedup if self.measured is None else self.measured.median

  def __str__(self):
    return f'{self.candidate.name} at γ = {self.block}'


@dataclasses.dataclass(frozen=True)
class BatchReport:
  """What was measured at one batch size, and what follows for every candidate and γ."""

  batch: int
  names: tuple[str, ...]
  costs: Costs  # of plain speculative decoding
  rows: tuple[PlanRow, ...]
  alone: timing.Interval | None = None  # tokens a second of the verifier alone
  where: Elsewhere | None = None  # the chips that it is for, where these are not at hand
  compiled: Mapping[Any, Compiled] = dataclasses.field(default_factory=dict)  # for them, by name

  @property
  def candidates(self) -> list[Candidate]:
    """The candidates, the simplest first."""
    return list(dict.fromkeys(row.candidate for row in self.rows))

  def best(self, fits: Callable[[Candidate], bool] = lambda candidate: True) -> PlanRow | None:
    """Return the fastest row of the candidates that fit, of those that were tried if any was."""
    rows = [row for row in self.rows if fits(row.candidate)]
    tried = [row for row in rows if row.measured is not None]
    return max(tried or rows, key=lambda row: row.gain, default=None)

  @property
  def choices(self) -> list[PlanRow]:
    """The best row of those that keep the verifier's distribution, of cascades, and of ensembles."""
    groups = 'of_verifier', 'of_rule', 'of_ensemble'
    best = (self.best(operator.attrgetter(group)) for group in groups)
    return [row for row in best if row is not None]

  @property
  def pays(self) -> bool:
    """Whether any method is faster than its reference."""
    return any(row.gain > PAYS for row in self.choices)

  @property
  def choice(self) -> Choice:
    """The fastest method with the verifier's distribution; one with more to it has to be faster by 5 %."""
    chosen = Choice('autoregressive')
    gain = 1.0
    for candidate in filter(operator.attrgetter('of_verifier'), self.candidates):
      row = self.best(candidate.__eq__)
      if row.gain > PAYS * gain:
        name = candidate.make(row.block).about.name
        chosen = Choice(name, row.block, candidate.predictor if name == 'scheduled' else '', candidate.leaves)
        gain = row.gain
    return chosen

  @property
  def speeds(self) -> tuple[Speed, ...]:
    """The speed of the verifier alone and of everything that was tried."""
    if self.alone is None:
      return ()
    rows = [row for row in self.rows if row.speed is not None]
    tried = [Speed(r.candidate.name, r.block, *r.speed, r.speedup * self.alone.median) for r in rows]
    return Speed('autoregressive', 0, *self.alone, self.alone.median), *tried

  @property
  def verdict(self) -> str:
    """The recommendation: a sentence for each of `choices`, and one about leaves if they were planned."""
    return ' '.join([*map(self._sentence, self.choices), *self._about_leaves()])

  def _about_leaves(self) -> list[str]:
    """Return whether leaves pay, as a sentence."""
    best = self.best(operator.attrgetter('leaves'))
    if best is None:
      return []
    plain = self.best(self.rows[0].candidate.__eq__)
    said = f'{best.gain:.2f}× with {best}, {plain.gain:.2f}× with {plain}'
    hits = f'{best.candidate.hits:.0%} of rejections are followed by one'
    if best.gain > plain.gain:
      return [f'Leaves pay: {said}; {hits}.']
    return [f'Leaves do not pay here: {said}; {hits}, which does not make up for the wider call of {self.names[-1]}.']

  def _sentence(self, row: PlanRow) -> str:
    candidate = row.candidate
    large = self.names[-1]
    what = 'Collaboration' if candidate.of_ensemble else 'A cascade' if candidate.of_rule else 'Speculation'
    speed = f'the speed of {candidate.make(row.block).about.over.text.format(large)}'
    output = f"its output is the rule's, not {large}'s" if candidate.of_rule else 'it keeps the distribution'
    if row.measured is None:
      result = f'{row.speedup:.2f}× {speed} is predicted with {row}'
    else:
      result = f'{row.measured.median:.2f}× {speed} was measured with {row}, {row.speedup:.2f}× predicted'
    if row.gain > PAYS:
      return f'{what} {"should pay" if row.measured is None else "pays"}: {result}; {output}.'
    return f'{what} will not pay here: {self._reason(row)}; {result}.'

  def _reason(self, row: PlanRow) -> str:
    """Return which of acceptance, drafter, window and start of a text would gain the most if it were ideal."""
    rows = [r for r in self.rows if r.candidate == row.candidate and r.costs is not None]
    if not rows:
      return 'the predictor tells too little, or costs too much'
    make = row.candidate.make
    rates = row.candidate.acceptance

    def best(rates=rates, **ideal):
      of = row.candidate.hits
      return max(cost_model.speedup(make(r.block), rates, replace(r.costs, **ideal), hits=of) for r in rows)

    if best() > PAYS:  # in long texts
      return 'the start of a text costs more than its calls; larger models or longer texts gain'
    costs = rows[-1].costs
    wide = cost_model.window(make(rows[-1].block))
    drafter = f'a call costs {costs.ratio:.2f} of one of the verifier'
    window = f'that of {wide} costs {costs.window(wide) / costs.token:.2f} of its tokens'
    reasons = {
      f'acceptance is too low ({rates[0]:.2f} at the first drafted token)': best(rates=(1.0,)),
      f'the drafter is too dear ({drafter})': best(draft=cost_model.FREE * costs.token),
      f"the verifier's window is too dear ({window})": best(verify={1: costs.token}),
    }
    return max(reasons, key=reasons.get)

  def __str__(self):
    small = self.names[0]
    large = self.names[-1]
    cost = self.costs
    candidates = self.candidates
    timed = cost.ratio > 2 * cost_model.FREE  # whether the drafter's calls were timed alone
    ratio = f'{small} {1e3 * cost.draft:.3g} ms a token, {large} {1e3 * cost.token:.3g} ms: cost ratio {cost.ratio:.3f}'
    beside = f'{large} {1e3 * cost.token:.3g} ms a token; {small} drafts beside it alone'
    lines = [
      f'batch {self.batch}: {ratio if timed else beside}',
      '',
      'speed-up as predicted, and measured where it was tried',
    ]
    heads = [f'{c.name:>{max(13, len(c.name))}}' for c in candidates]
    lines.append(f'  {"γ":>3}  {"window":>7}  ' + '  '.join(heads))
    for block in sorted({row.block for row in self.rows}):
      some = {row.candidate: row for row in self.rows if row.block == block}
      cells = [f'{_cell(some.get(c)):>{len(h)}}' for c, h in zip(candidates, heads, strict=True)]
      lines.append(f'  {block:>3}  {cost.window(block + 1) / cost.token:6.2f}   ' + '  '.join(cells))
    calls = "a round but for its drafter's calls" if timed else "a round, its drafter's calls in it"
    lines.append(f"window: {calls}, over the verifier's time for one token")
    verdict = [self.verdict, f'Fastest with the distribution of {large}: {self.choice}.']
    return '\n'.join([*lines, '', *self._programs(), *verdict])

  def _programs(self) -> list[str]:
    """Return lines about what was compiled for chips elsewhere."""
    if self.where is None:
      return []
    lines = [f'  {"a round, simulated":>20}  {"collectives":>11}  {"memory of a chip":>18}  for {self.where}']
    for name, found in self.compiled.items():
      if found.fits:
        memory = f'{found.used / 2**30:.1f} of {self.where.chip.memory:.1f} GiB'
        cells = f'{1e3 * found.seconds:17.2f} ms  {1e3 * found.collectives:8.2f} ms  {memory:>18}'
      else:
        cells = f'{"does not fit":>53}'
      lines.append(f'  {cells}  {name}')
    return [*lines, '']


def _cell(row: PlanRow | None) -> str:
  if row is None:
    return ''
  return f'{row.speedup:.2f}×' + ('' if row.measured is None else f' {row.measured.median:.2f}×')


@dataclasses.dataclass(frozen=True)
class PlanReport:
  """What was measured of some models at each batch size; `str` has all of it, `save` writes its plan to a file."""

  origin: Origin
  batches: tuple[BatchReport, ...]
  profile: plans.Profile | None = None
  faults: tuple[str, ...] = ()  # of prompts, which are left out
  overlaps: tuple[str, ...] = ()  # of vocabularies, a sentence for each translated model
  left_out: tuple[str, ...] = ()  # what the budget did not suffice for

  def saved(self) -> plans.Plan:
    """Return what `methods.planned` decodes by."""
    choices = {b.batch: b.choice for b in self.batches}
    return plans.Plan(self.origin, choices, {b.batch: b.speeds for b in self.batches}, self.profile)

  def vllm(self) -> dict[str, dict[str, Any]]:
    """Return the `speculative_config` of vLLM for each batch and method, at its best γ.

    By it that engine times itself without a drafter, accepting each drafted token as often as was measured here.
    """
    found = {}
    for batch in self.batches:
      for candidate in batch.candidates:
        if candidate.acceptance and not candidate.leaves and (block := batch.best(candidate.__eq__).block):
          rates = theory.ByPosition(candidate.acceptance).all_accepted(np.arange(1, block + 1))
          found[f'{candidate.name}, batch {batch.batch}'] = dict(
            num_speculative_tokens=block,
            rejection_sample_method='synthetic',
            synthetic_acceptance_rates=[round(float(rate), 4) for rate in rates],
          )
    return found

  def save(self, path) -> None:
    """Write the plan to a file."""
    self.saved().save(path)

  def __str__(self):
    large = self.origin.names[-1]
    candidates = [c for c in dict.fromkeys(c for b in self.batches for c in b.candidates) if c.acceptance]
    wide = max(len(c.name) for c in candidates)
    lines = [', '.join(f'{name} {x:g}' for name, x in self.origin.sampler), *self.overlaps, '']
    lines.append('acceptance by position in the block, given all before')
    lines += [f'  {c.name:<{wide}}  ' + '  '.join(f'{a:.2f}' for a in c.acceptance) for c in candidates]
    own = [c.name for c in candidates if c.of_rule]
    lines += [
      '',
      f'keep the distribution of {large} or of the ensemble: ' + ', '.join(c.name for c in candidates if not c.of_rule),
    ]
    if own:
      lines.append(f"have a distribution of their own, so that the output is not {large}'s: {', '.join(own)}")
    if self.faults:
      lines.append(f'left out, for they ended as faults: {len(self.faults)} prompts. {self.faults[0]}')
    left_out = '\n  '.join(['left out, for the budget was short (a larger --budget measures it):', *self.left_out])
    return '\n\n'.join(['\n'.join(lines), *map(str, self.batches), *([left_out] if self.left_out else [])])
