"""Which method is the fastest for some models at each batch size: measure acceptance and costs, predict, and try.

Everything is timed by `timing.interleave`, what is compared in turn. A round is timed inside the decode loop with
forced acceptance, so that its cost is known whatever the texts are; `cost_model` makes of it and of the acceptance that
was measured a prediction for every γ. What may be the fastest is then tried on prompts.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from dataclasses import replace
import functools
import itertools
from typing import Any

import numpy as np

from speccascade import decode, methods, rules, sampling
from speccascade.backends import sharding
from speccascade.engine import inputs, plans, requests
from speccascade.engine.method import Method
from speccascade.engine.plans import Choice, Origin, Speed
from speccascade.host.progress import Progress
from speccascade.planning import cost_model, profiling, sv_model, timing
from speccascade.planning.cost_model import Costs, ENSEMBLES
from speccascade.types import checked_int, Combiner, Model, Rule

PAYS = 1.05  # a speed-up up to this is lost in what a prediction leaves out and in the noise of a measurement
TEXTS = 16  # that each trial decodes, and two batches at the least
KNOTS = 8  # of the γ to plan, at most so many are timed for plain speculative decoding
_FREE = 1e-6  # the cost of a drafter without cost
_FORCED = ('speculative', 'cascade', 'naive_cos')  # the kinds whose rounds are timed with forced acceptance
_SIMPLER = ('autoregressive', 'speculative', 'sv_exact')  # one with more to it has to be faster by PAYS


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A method for any γ, and the acceptance that was measured for it by place in the block."""

  name: str
  kind: str  # as that of `Method`
  make: Callable[[int], Method] = dataclasses.field(compare=False, repr=False)
  acceptance: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
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
class BatchPlan:
  """What was measured at one batch size, and what follows for every candidate and γ."""

  batch: int
  names: tuple[str, ...]
  costs: Costs  # of plain speculative decoding
  rows: tuple[Row, ...]
  alone: timing.Interval | None = None  # tokens a second of the verifier alone

  def best(self, *kinds: str) -> Row | None:
    """Return the fastest row of these kinds, of those that were tried if any was; of all without kinds."""
    rows = [row for row in self.rows if not kinds or row.candidate.kind in kinds]
    tried = [row for row in rows if row.measured is not None]
    return max(tried or rows, key=lambda row: row.gain, default=None)

  @property
  def choices(self) -> list[Row]:
    """The best row of those that keep the verifier's distribution, of cascades, and of ensembles."""
    best = (self.best(*kinds) for kinds in (_SIMPLER, ('cascade',), ENSEMBLES))
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
    for kind in _SIMPLER[1:]:
      row = self.best(kind)
      if row is not None and row.gain > PAYS * gain:
        chosen = Choice(kind, row.block)
        gain = row.gain
    return chosen

  @property
  def verdict(self) -> str:
    """The recommendation: a sentence for each of `choices`."""
    return ' '.join(map(self._sentence, self.choices))

  def _sentence(self, row: Row) -> str:
    kind = row.candidate.kind
    large = self.names[-1]
    what = 'A cascade' if kind == 'cascade' else 'Collaboration' if kind in ENSEMBLES else 'Speculation'
    speed = f'the speed of {"the standard ensemble" if kind in ENSEMBLES else f"{large} alone"}'
    output = f"its output is the rule's, not {large}'s" if kind == 'cascade' else 'it keeps the distribution'
    if row.measured is None:
      result = f'{row.speedup:.2f}× {speed} is predicted with {row}'
    else:
      result = f'{row.measured.median:.2f}× {speed} was measured with {row}, {row.speedup:.2f}× predicted'
    if row.gain > PAYS:
      return f'{what} {"should pay" if row.measured is None else "pays"}: {result}; {output}.'
    return f'{what} will not pay here: {self._reason(row)}; {result}.'

  def _reason(self, row: Row) -> str:
    """Return which of acceptance, drafter, window and start of a text would gain the most if it were ideal."""
    rows = [r for r in self.rows if r.candidate == row.candidate and r.costs is not None]
    if not rows:
      return 'the companion tells too little, or costs too much'
    kind = row.candidate.kind
    rates = row.candidate.acceptance
    best = lambda rates=rates, **ideal: max(
      cost_model.speedup(kind, rates, r.block, replace(r.costs, **ideal)) for r in rows
    )
    if best() > PAYS:  # in long texts
      return 'the start of a text costs more than its calls; larger models or longer texts gain'
    costs = rows[-1].costs
    wide = cost_model.window(kind, rows[-1].block)
    drafter = f'a call costs {costs.ratio:.2f} of one of the verifier'
    window = f'that of {wide} costs {costs.window(wide) / costs.token:.2f} of its tokens'
    reasons = {
      f'acceptance is too low ({rates[0]:.2f} at the first drafted token)': best(rates=(1.0,)),
      f'the drafter is too dear ({drafter})': best(draft=_FREE * costs.token),
      f"the verifier's window is too dear ({window})": best(verify={1: costs.token}),
    }
    return max(reasons, key=reasons.get)

  def __str__(self):
    small = self.names[0]
    large = self.names[-1]
    cost = self.costs
    candidates = list(dict.fromkeys(row.candidate for row in self.rows))
    lines = [
      f'batch {self.batch}: {small} {1e3 * cost.draft:.3g} ms a token, {large} {1e3 * cost.token:.3g} ms: '
      f'cost ratio {cost.ratio:.3f}',
      '',
      'speed-up as predicted, and measured where it was tried',
    ]
    heads = [f'{c.name:>{max(13, len(c.name))}}' for c in candidates]
    lines.append(f'  {"γ":>3}  {"window":>7}  ' + '  '.join(heads))
    for block in sorted({row.block for row in self.rows}):
      some = {row.candidate: row for row in self.rows if row.block == block}
      cells = [f'{_cell(some.get(c)):>{len(h)}}' for c, h in zip(candidates, heads, strict=True)]
      lines.append(f'  {block:>3}  {cost.window(block + 1) / cost.token:6.2f}   ' + '  '.join(cells))
    lines.append("window: a round but for its drafter's calls, over the verifier's time for one token")
    return '\n'.join([*lines, '', self.verdict, f'Fastest with the distribution of {large}: {self.choice}.'])


def _cell(row: Row | None) -> str:
  if row is None:
    return ''
  return f'{row.speedup:.2f}×' + ('' if row.measured is None else f' {row.measured.median:.2f}×')


@dataclasses.dataclass(frozen=True)
class Plan:
  """What was measured of some models at each batch size; `str` tells all of it, `save` writes it to a file."""

  origin: Origin
  batches: tuple[BatchPlan, ...]
  profile: plans.Profile | None = None
  faults: tuple[str, ...] = ()  # of prompts, which are left out

  def saved(self) -> plans.Plan:
    """Return what `methods.planned` decodes by."""
    choices = {b.batch: b.choice for b in self.batches}
    return plans.Plan(self.origin, choices, {b.batch: _speeds(b) for b in self.batches}, self.profile)

  def save(self, path) -> None:
    """Write the plan to a file."""
    self.saved().save(path)

  def __str__(self):
    large = self.origin.names[-1]
    candidates = list(dict.fromkeys(row.candidate for b in self.batches for row in b.rows if row.candidate.acceptance))
    wide = max(len(c.name) for c in candidates)
    lines = [', '.join(f'{name} {x:g}' for name, x in self.origin.sampler), '']
    lines.append('acceptance by place in the block, given all before')
    lines += [f'  {c.name:<{wide}}  ' + '  '.join(f'{a:.2f}' for a in c.acceptance) for c in candidates]
    own = [c.name for c in candidates if c.kind == 'cascade']
    lines += [
      '',
      f'keep the distribution of {large} or of the ensemble: '
      + ', '.join(c.name for c in candidates if c.kind != 'cascade'),
    ]
    if own:
      lines.append(f"have a distribution of their own, so that the output is not {large}'s: {', '.join(own)}")
    if self.faults:
      lines.append(f'left out, for they ended as faults: {len(self.faults)} prompts. {self.faults[0]}')
    return '\n\n'.join(['\n'.join(lines), *map(str, self.batches)])


def _speeds(found: BatchPlan) -> tuple[Speed, ...]:
  """Return the speed of the verifier alone and of everything that was tried."""
  if found.alone is None:
    return ()
  tried = [Speed('autoregressive', 0, *found.alone, found.alone.median)]
  rows = [row for row in found.rows if row.speed is not None]
  return (*tried, *(Speed(r.candidate.name, r.block, *r.speed, r.speedup * found.alone.median) for r in rows))


# ---- the plan ----


def plan(
  models: Sequence[Model],
  prompts: Sequence,
  *,
  blocks: Sequence[int] = range(1, 9),
  batches: Sequence[int] = (1,),
  sampler: sampling.Sampler = sampling.Sampler(),
  rules: Mapping[str, Rule | Combiner] | None = None,
  max_new_tokens: int = 64,
  seed: int = 0,
  trials: int = 3,
  data: str = 'prompts',
  costs: Mapping[int, Costs] | None = None,
  progress: bool = False,
) -> Plan:
  """Find the fastest method at each batch size.

  Plain speculative decoding is always planned, with three models also `sv_exact`, whose companion is the second;
  `rules` adds cascades and ensembles by name.

  Args:
    models: a drafter and a verifier, or a drafter, a companion and a verifier.
    prompts: texts, token lists or requests, at least as many as the largest batch.
    blocks: γ to plan.
    batches: numbers of rows.
    sampler: of all models.
    rules: rules and combiners by the name to print.
    max_new_tokens: of a text.
    trials: of everything that is timed; with 0 nothing is tried, and the prediction chooses.
    data: what the prompts are called in the file.
    costs: by batch size, if they are known: then nothing is timed.
    progress: whether to show on standard error how far it is.

  Returns:
    The plan.

  Raises:
    ValueError: of what cannot be planned, by name.
  """
  if len(models) not in (2, 3):
    raise ValueError(
      f'plan takes a drafter and a verifier, a companion between them or none, not {len(models)} models.'
    )
  blocks = sorted({checked_int('blocks', n) for n in blocks})
  trials = checked_int('trials', trials, 0)
  if not blocks:
    raise ValueError('blocks is empty; give γ to plan, as in (1, 3, 5).')
  batches = tuple(costs) if costs else _batches(models, batches, len(prompts))
  call = dict(max_new_tokens=max_new_tokens, sampler=sampler, seed=seed)
  bar = Progress('plan', 2 + len(rules or {}), unit='steps', shown=progress)
  measured = _Acceptance(models, prompts, blocks, call, rules or {}, bar)
  origin = _origin(models, measured.prompts, blocks, call, data)
  timers = {} if costs else {n: _Timer(models, measured, blocks, call, n, max(trials, 1), bar) for n in batches}
  by_name = {n: timers[n].costs() if timers else lambda name, n=n: costs[n] for n in batches}
  profile = _profile(models, measured, origin, call, by_name) if len(models) == 3 and timers else None
  found = []
  for n in batches:
    rows = _rows(measured, blocks, by_name[n], profile, n)
    planned = BatchPlan(n, origin.names, by_name[n]('speculative'), rows)
    if timers and trials:
      planned = try_best(planned, {'alone': timers[n].alone} | measured.ensembles, timers[n].speeds)
    found.append(planned)
  bar.end()
  return Plan(origin, tuple(found), profile, measured.faults)


def _origin(models: Sequence[Model], prompts: Sequence, blocks: Sequence[int], call: dict, data: str) -> Origin:
  rows = [row.tokens for row in requests.rows(models, prompts, **call)]
  return Origin(
    tuple(m.name for m in models),
    tuple(m.digest for m in models),
    plans.sampler_of(call['sampler']),
    plans.device_of(models),
    f'{data}, {len(rows)} prompts {plans.digest_of(rows)}',
    max(blocks),
    int(np.median([row.size for row in rows])),
  )


def _batches(models: Sequence[Model], batches: Sequence[int], prompts: int) -> tuple[int, ...]:
  """Return the batch sizes, of a mesh those that its devices share evenly."""
  parts = sharding.row_shards(models)
  batches = tuple(sorted({sharding.even(checked_int('batches', n), parts) for n in batches}))
  if max(batches) > prompts:
    raise ValueError(f'{prompts} prompts do not fill a batch of {max(batches)}; give more, or a smaller batch.')
  return batches


class _Acceptance:
  """The candidates with the acceptance of each, the prompts without a fault, and the lengths of their texts."""

  def __init__(self, models, prompts, blocks, call, given: Mapping[str, Rule | Combiner], bar: Progress):
    self.models, self.pair, self.faults = models, (0, len(models) - 1), ()
    self.candidates = []
    self.ensembles = {}
    faults = {}
    most = max(2, *blocks)
    lengths = None
    for name, rule in {'speculative': rules.speculative, **given}.items():
      kinds = self._kinds(name, rule)
      out = decode(kinds[0].make(most), models, prompts, **call, batch_size=min(8, len(prompts)), keep_faults=True)
      faults |= {i: fault for i, fault in enumerate(out.faults) if fault}
      sound = [i for i in range(len(prompts)) if out.faults[i] is None]
      if not sound:
        out.raise_for_fault()
      rates = cost_model.by_place(out.stats.tested_at[sound].sum(0), out.stats.accepted_at[sound].sum(0))
      self.candidates += [replace(kind, acceptance=rates) for kind in kinds]
      lengths = out.stats.emitted if lengths is None else lengths
      bar.add(1, f'acceptance, {name}')
    self.prompts = [prompt for i, prompt in enumerate(prompts) if i not in faults]
    self.lengths = [int(n) for i, n in enumerate(lengths) if i not in faults]
    self.faults = tuple(faults.values())

  def _kinds(self, name: str, rule: Rule | Combiner) -> list[Candidate]:
    """Return the candidates of a rule, the first of which measures the acceptance of all."""
    if getattr(rules.inside(rule), 'kind', 'combiner') == 'rule':
      kind = 'speculative' if rule is rules.speculative else 'cascade'
      return [Candidate(name, kind, lambda n: methods.speculative(rule, n, pair=self.pair))]
    if len(self.models) != 2:
      raise ValueError(f'{name} combines two models, and there are {len(self.models)}: plan it of two.')
    self.ensembles[name] = methods.ensemble(rule)
    return [
      Candidate(f'naive_cos {name}', 'naive_cos', lambda n: methods.naive_cos(rule, n)),
      Candidate(f'cos {name}', 'cos', lambda n: methods.cos(rule, (n, 1))),
    ]


def _rows(measured: _Acceptance, blocks, costs: Callable[[str], Costs], profile, batch: int) -> tuple[Row, ...]:
  """Predict every candidate at every γ."""
  rows = []
  for candidate in measured.candidates:
    cost = costs(candidate.name)
    speedup = functools.partial(cost_model.speedup, candidate.kind, candidate.acceptance, costs=cost)
    rows += [Row(candidate, n, speedup(block=n, lengths=measured.lengths), cost) for n in blocks]
  if profile is not None:
    candidate = Candidate('sv_exact', 'sv_exact', functools.partial(methods.sv_exact, profile))
    for n in blocks:
      x = sv_model.simulate(profile, batch, n)
      rows.append(Row(candidate, n, x['sv'] / x['plain']))
  return tuple(rows)


def _profile(models, measured: _Acceptance, origin: Origin, call: dict, costs: Mapping[int, Callable]) -> plans.Profile:
  """Measure what speculative verification decides by; the overhead of a round is that of speculative decoding."""
  block = origin.block
  if call['max_new_tokens'] <= block:
    raise ValueError(
      f'max_new_tokens={call["max_new_tokens"]} is not more than γ = {block}: no text holds a whole draft.'
    )
  samples = profiling.samples_of(models, measured.prompts, block=block, batch_size=16, **call)
  sizes = dict(source=origin.source, tokens=call['max_new_tokens'])
  times, steps = profiling.measure_times(models, block, tuple(costs), **sizes)
  for n, (draft, companion, alone) in steps.items():
    spent = costs[n]('speculative').round(block, block + 1)
    steps[n] = draft, companion, alone, max(0.0, spent - block * draft - times[n][n * (block + 1)])
  return profiling.profile(origin, samples, times, steps)


# ---- times ----


class _Timer:
  """The clock of one batch size: what rounds cost inside the loop, and how fast decoding is."""

  def __init__(self, models, measured: _Acceptance, blocks, call: dict, batch: int, trials: int, bar: Progress):
    self.models = timing.endless(models)
    self.measured = measured
    self.blocks = blocks
    self.batch = batch
    self.trials, self.bar, self.alone = trials, bar, methods.autoregressive(len(models) - 1)
    count = min(len(measured.prompts), max(TEXTS, 2 * batch)) // batch * batch
    self.prompts = measured.prompts[:count]
    self.lengths = measured.lengths[:count]
    width = inputs.prompt_width(models, requests.rows(models, measured.prompts, **call), None)
    self.call = call | dict(batch_size=batch, max_prompt_tokens=width)

  def _interleave(self, runs: Mapping[Any, Callable[[], Any]], note: str) -> dict[Any, list]:
    """Time runs in turn, and show how far that is."""
    self.bar.need(len(runs) * (self.trials + 1))

    def shown(run):
      result = run()
      self.bar.add(1, f'batch {self.batch}, {note}')
      return result

    return timing.interleave({name: functools.partial(shown, run) for name, run in runs.items()}, self.trials)

  def costs(self) -> Callable[[str], Costs]:
    """Return the costs of each candidate by its name, of rounds inside the decode loop with forced acceptance."""
    made = [c for c in self.measured.candidates if c.kind != 'cos']
    ends = {self.blocks[0], self.blocks[len(self.blocks) // 2], self.blocks[-1]}
    spread = {self.blocks[i] for i in np.linspace(0, len(self.blocks) - 1, KNOTS).round().astype(int)}
    knots = {c.name: sorted(spread if c.kind == 'speculative' else ends) for c in made}
    batches = self._enough()
    runs = {(c.name, n): self._forced(c.make(n), batches) for c in made for n in knots[c.name]}
    alone = {'draft': methods.autoregressive(0), 'token': self.alone}
    runs |= {name: self._of_two_lengths(method, batches) for name, method in alone.items()}
    found = {name: np.median(x, 0).clip(1e-9).tolist() for name, x in self._interleave(runs, 'rounds').items()}
    (draft, _) = found['draft']
    (token, start_alone) = found['token']
    start = float(np.median([found['speculative', n][1] for n in knots['speculative']]))

    def of(name: str) -> Costs:
      candidate = next(c for c in made if c.name in (name, f'naive_{name}'))
      calls = {n: candidate.make(n).calls()[0] for n in knots[candidate.name]}
      windows = {
        cost_model.window(candidate.kind, n): max(found[candidate.name, n][0] - calls[n] * draft, 1e-9) for n in calls
      }
      return Costs(draft, {**windows, 1: token}, start=start, start_alone=start_alone)

    return of

  def _enough(self) -> int:
    """Return how many batches to decode at once, so that a run is long beside the noise of the clock."""
    run = self._decode(self.alone, 1)
    run()  # compiles
    return int(np.clip(timing.ENOUGH / run()[0], 1, max(1, TEXTS // self.batch)))

  def _decode(self, method: Method, batches: int, tokens: int | None = None) -> Callable[[], tuple[float, int]]:
    """Return a function that decodes texts of one length: seconds, and rounds of all batches."""
    prompts = list(itertools.islice(itertools.cycle(self.prompts), batches * self.batch))
    call = self.call | dict(max_new_tokens=tokens or max(8, *self.lengths))

    def run() -> tuple[float, int]:
      seconds, out = timing.timed(lambda: decode(method, self.models, prompts, **call))
      return seconds, batches * int(out.stats.rounds.max())  # rows that are all as long end together

    return run

  def _forced(self, method: Method, batches: int) -> Callable[[], tuple[float, float]]:
    """Return a function that times a round and the start of a batch; all drafts are rejected, then all accepted."""
    slow, fast = (self._decode(method.accepting(timing.forced(rate)), batches) for rate in (0.0, 1.0))
    return lambda: _split(slow(), fast(), batches)

  def _of_two_lengths(self, method: Method, batches: int) -> Callable[[], tuple[float, float]]:
    """Return the same of a method that drafts nothing."""
    long, short = (self._decode(method, batches, tokens) for tokens in (None, 1))
    return lambda: _split(long(), short(), batches)

  def speeds(self, made: Mapping[Any, Method]) -> dict[Any, list[float]]:
    """Return the tokens a second of methods in each trial, of texts as long as those that were observed."""
    return self._interleave({name: self._speed(method) for name, method in made.items()}, 'decoding')

  def _speed(self, method: Method) -> Callable[[], float]:
    if method.kind in _FORCED:
      method = method.accepting(timing.forced(None))  # the program whose rounds were timed
    asked = [_of_length(p, n) for p, n in zip(self.prompts, self.lengths, strict=True)]
    run = lambda: decode(method, self.models, asked, **self.call)

    def speed() -> float:
      seconds, out = timing.timed(run)
      return out.stats.emitted.sum() / seconds

    return speed


def _split(long: tuple[float, int], short: tuple[float, int], batches: int) -> tuple[float, float]:
  """Return the seconds of a round and of the start of a batch, from two runs of (seconds, rounds)."""
  round_ = (long[0] - short[0]) / (long[1] - short[1])
  return round_, (long[0] - long[1] * round_) / batches


def _of_length(prompt: Any, tokens: int) -> requests.Request:
  request = prompt if isinstance(prompt, requests.Request) else requests.Request(prompt)
  return replace(request, max_new_tokens=tokens)


# ---- what is tried ----


def try_best(
  found: BatchPlan, references: Mapping[str, Method], speeds: Callable[[Mapping[Any, Method]], Mapping[Any, Sequence]]
) -> BatchPlan:
  """Return a plan with what may be the fastest tried, in turn with what it is compared to.

  Each candidate is tried at its best γ; plain speculative decoding also at those beside its fastest, until both are
  slower.

  Args:
    found: the plan as predicted.
    references: the verifier alone by the name 'alone', and ensembles by the names of their rules.
    speeds: returns tokens a second in each trial of methods that take turns.
  """
  measured: dict[Row, tuple[timing.Interval, timing.Interval]] = {}
  alone = []
  some = _best_rows(found.rows)
  while some:
    tokens = speeds({**references, **{row: row.candidate.make(row.block) for row in some}})
    alone += tokens['alone']
    for row in some:
      reference = next((n for n in references if row.candidate.name.endswith(f'cos {n}')), 'alone')
      gains = np.divide(tokens[row], tokens[reference])
      measured[row] = timing.Interval.of(gains), timing.Interval.of(tokens[row])
    drafted = [row for row in measured if row.candidate.kind == 'speculative']
    fastest = max(drafted, key=lambda row: measured[row][0].median)
    some = [row for row in _beside(found.rows, fastest) if row not in measured]
  rows = [replace(r, measured=measured[r][0], speed=measured[r][1]) if r in measured else r for r in found.rows]
  return replace(found, rows=tuple(rows), alone=timing.Interval.of(alone))


def _best_rows(rows: Sequence[Row]) -> list[Row]:
  """Return the best row of each candidate as predicted, and those beside that of plain speculative decoding."""
  groups = itertools.groupby(rows, key=lambda row: row.candidate)
  best = [max(some, key=lambda row: row.speedup) for _, some in groups]
  return best + _beside(rows, best[0])


def _beside(rows: Sequence[Row], row: Row) -> list[Row]:
  """Return the rows with the next smaller and the next larger γ."""
  same = [r for r in rows if r.candidate == row.candidate]
  at = same.index(row)
  return [same[i] for i in (at - 1, at + 1) if 0 <= i < len(same)]
