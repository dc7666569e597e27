"""Which method is the fastest for some models at each batch size: measure acceptance and costs, predict, and try.

Everything is timed by `timing.interleave`, what is compared in turn. A round is timed inside the decode loop, its
drafts accepted by chance as often as was observed, or, for chips that are not here, simulated (`elsewhere`);
`cost_model` makes of it and of the acceptance that was measured a prediction for every γ. What may be the fastest is
then tried on prompts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
import functools
import itertools
from typing import Any, NamedTuple

import numpy as np

from speccascade import decode, Decoded, methods, rules, sampling, theory
from speccascade.backends import sharding
from speccascade.drafters import hidden, translation
from speccascade.engine import inputs, requests
from speccascade.engine.job import DecodeJob
from speccascade.engine.method import Method
from speccascade.host import multihost, storage
from speccascade.planning import aot, cost_model, profiling, sv_model, timing
from speccascade.planning.budget import TimeBudget
from speccascade.planning.cost_model import Costs
from speccascade.planning.elsewhere import Compiled, Elsewhere
from speccascade.planning.plan_report import BatchReport, Candidate, PlanReport, PlanRow
from speccascade.sv import plans
from speccascade.sv.plans import Origin
from speccascade.sv.predictors import companion, Predictor, spelled
from speccascade.types import checked_int, Combiner, Model, Rule

TEXTS = 16  # that each trial decodes, and two batches at the least
KNOTS = 8  # of the γ to plan, at most so many are timed for plain speculative decoding


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
  predictors: Sequence[Callable] = (),
  leaves: Sequence[int] = (),
  acceptance: Sequence[float] | None = None,
  costs: Mapping[int, Costs] | None = None,
  where: Elsewhere | None = None,
  budget: float | None = None,
  progress: bool = False,
) -> PlanReport:
  """Find the fastest method at each batch size.

  Plain speculative decoding is always planned, with three models also `sv_exact`, whose companion is the second;
  `rules` adds cascades and ensembles by name, `predictors` verification that is scheduled by what drafting computes.

  Args:
    models: A drafter and a verifier, or a drafter, a companion and a verifier.
    prompts: Texts, token lists or requests, at least as many as the largest batch.
    blocks: γ to plan.
    batches: Numbers of rows.
    sampler: Of all models.
    rules: Rules and combiners by the name to print.
    max_new_tokens: Of a text.
    trials: Of everything that is timed; with 0 nothing is tried, and the prediction chooses.
    data: What the prompts are called in the file.
    predictors: Signals of `sv.predictors`, or one's own, of which `methods.scheduled` is planned, and a fit saved.
    leaves: Numbers of other choices of the drafter with which plain speculative decoding is planned too.
    acceptance: Rates by position of plain speculative decoding that are known, as of an engine that serves the pair
      (`engines.acceptance`); None for what is measured. Texts are decoded in any case, for their lengths.
    costs: By batch size, if they are known: then nothing is timed.
    where: Chips that the plan is for, where it is not for those at hand: acceptance is measured here, rounds are
      compiled for them and simulated, and nothing is tried.
    budget: Seconds after which nothing more is begun that a plan can do without, None without a limit. What matters
      most is measured first, and the report says what was left out. The profile of predictors takes what it takes.
    progress: Whether to show on standard error how far it is.

  Returns:
    The report, whose `saved` is the plan.

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
  parts = sharding.row_shards(models) if where is None else where.data
  batches = tuple(costs) if costs else _batches(parts, batches, len(prompts))
  call = dict(max_new_tokens=max_new_tokens, sampler=sampler, seed=seed)
  rows = DecodeJob.of(methods.speculative(pair=(0, len(models) - 1)), models, prompts, **call).rows
  models = hidden.attached(models, len(models) - 1)
  _check_models(models, sampler, predictors, leaves, costs, where)
  _check_requests(rows, sampler)
  measured = _Acceptance(models, rules or {}, predictors, leaves)
  trials = 0 if where is not None else trials
  timed = (
    0 if costs else len(batches) * (measured.timed(blocks, trials) if where is None else measured.compiled(blocks))
  )
  steps = len(measured.kinds) + timed + 1  # 1 is left until all is tried
  time = TimeBudget(budget, 1 + len(batches) * (1 + bool(trials)), steps, shown=progress)
  measured.measure(prompts, rows, blocks, call, time, max(8, *batches))
  if acceptance is not None:
    rates = tuple(theory.ByPosition(acceptance).rates)
    measured.candidates[0] = replace(measured.candidates[0], acceptance=rates)
  if not costs:
    _batches(parts, batches, len(measured.prompts), measured.faults)
  device = plans.device_of(models) if where is None else where.device(models)
  origin = _origin(models, measured.rows, blocks, sampler, data, device)
  if where is not None:
    timers = {n: _Simulated(models, measured, blocks, call, n, where, time) for n in batches}
  else:
    timers = {} if costs else {n: _Timer(models, measured, blocks, call, n, max(trials, 1), time) for n in batches}
  costs_of = {n: timers[n].costs() if timers else lambda _, n=n: costs[n] for n in batches}
  profile = _profile(models, measured, origin, call, timers, progress) if measured.scheduled and timers else None
  reports = []
  for n in batches:
    plain = costs_of[n](measured.candidates[0])
    report = BatchReport(n, origin.names, plain, _rows(measured, blocks, costs_of[n], profile, n))
    if where is not None:
      report = replace(report, compiled=timers[n].compiled, where=where)
    if timers and trials:
      report = try_best(report, {'alone': timers[n].alone} | measured.ensembles, timers[n].speeds)
    reports.append(report)
  time.bar.end()
  overlaps = _overlaps(models, measured)
  return PlanReport(origin, tuple(reports), profile, measured.faults, overlaps, tuple(time.left_out))


def _check_models(
  models: Sequence[Model],
  sampler: sampling.Sampler,
  predictors: Sequence[Callable],
  leaves: Sequence[int],
  costs: Mapping[int, Costs] | None,
  where: Elsewhere | None,
):
  """Refuse what cannot be measured, timed or compiled of models.

  Raises:
    ValueError: says what.
  """
  scheduled = predictors or len(models) == 3
  if sharding.apart(models):
    raise ValueError('a plan is of models on the same devices: give all of them one mesh.')
  if models[0].network.drafts_only and scheduled:
    raise ValueError(
      f'{models[0].name} only drafts, and what predicts acceptance is timed with the drafter alone: plan it without '
      'predictors and a companion.'
    )
  if where is not None and scheduled:
    raise ValueError(f'{where}: a schedule needs times of the device itself; plan two models without predictors.')
  if where is None and not costs and sampler.coupling == 'gumbel':
    raise ValueError(
      "coupling='gumbel': rounds are timed with drafts that are accepted by chance; plan with coupling='maximal', or "
      'for chips elsewhere, as with --topology.'
    )
  if leaves and costs:
    raise ValueError('a round with leaves is timed, and costs are given: leave out one of them.')
  if scheduled:
    DecodeJob.of_models(profiling.scoring_all(1, len(models)), models, sampler)


def _check_requests(rows: Sequence[requests.RequestRow], sampler: sampling.Sampler):
  for row in rows:
    settings = dict(stop=row.stop, stop_tokens=row.stop_tokens, logit_bias=dict(row.bias))
    own = {name: value for name, value in settings.items() if value}
    if plans.sampler_of(row.sampler) != plans.sampler_of(sampler):
      own |= plans.sampler_of(row.sampler)
    if given := ['n > 1'] * bool(row.sample) + [f'{name}={value}' for name, value in own.items()]:
      raise ValueError(
        f'prompt {row.source} has {", ".join(given)} of its own; a plan is of one text a prompt by one sampler: leave '
        'that out, and give the sampler to plan.'
      )


def _overlaps(models: Sequence[Model], measured: '_Acceptance') -> tuple[str, ...]:
  """Return for each model that lacks tokens how many it has, and what that costs in acceptance."""
  found = [(model.name, common) for model in models if (common := translation.common(model)) is not None]
  if not found:
    return ()
  prompts = np.concatenate([row.tokens for row in measured.rows])
  large = models[-1].name
  lines = []
  for name, common in found:
    shares = [f'{common[tokens].mean():.0%}' for tokens in (prompts, measured.written)]
    lines.append(
      f'{name} has {common.sum()} of the {common.size} tokens of {large}: {shares[0]} of the tokens in the prompts, '
      f'and {shares[1]} of those that {large} writes, the most that can be accepted'
    )
  return tuple(lines)


def digest_of(rows: Sequence[Sequence[int]]) -> str:
  """Return 16 hex digits that tell prompts from any other."""
  return storage.digest_of_json([list(map(int, row)) for row in rows])


def _origin(
  models: Sequence[Model],
  rows: Sequence[requests.RequestRow],
  blocks: Sequence[int],
  sampler: sampling.Sampler,
  data: str,
  device: str,
) -> Origin:
  prompts = [row.tokens for row in rows]
  return Origin(
    tuple(m.name for m in models),
    tuple(m.digest for m in models),
    plans.sampler_of(sampler),
    device,
    f'{data}, {len(prompts)} prompts {digest_of(prompts)}',
    max(blocks),
    int(np.median([tokens.size for tokens in prompts])),
    sampler.coupling,
  )


def _batches(parts: int, batches: Sequence[int], prompts: int, faults: Sequence[str] = ()) -> tuple[int, ...]:
  """Return the batch sizes that so many devices share evenly; so many prompts are without a fault."""
  batches = tuple(sorted({sharding.even(checked_int('batches', n), parts) for n in batches}))
  if max(batches) > prompts:
    sound = f'of {prompts + len(faults)} prompts are sound ({faults[0]}) and' if faults else 'prompts'
    raise ValueError(f'{prompts} {sound} do not fill a batch of {max(batches)}; give more, or a smaller batch.')
  return batches


class _Acceptance:
  """The candidates with the acceptance of each, the prompts without a fault, and the lengths of their texts."""

  def __init__(self, models, given: Mapping[str, Rule | Combiner], signals: Sequence[Callable], leaves: Sequence[int]):
    self.models = models
    self.signals = [signal for signal in map(_signal, signals) if signal is not companion]
    self.scheduled = [companion] * (len(models) == 3) + self.signals
    self.pair = (0, len(models) - 1)
    self.candidates = []
    self.ensembles = {}
    self.kinds = {'speculative': self._kinds('speculative', rules.speculative)}
    self.kinds |= {c.name: [c] for n in sorted({checked_int('leaves', n) for n in leaves}) for c in [self._with(n)]}
    self.kinds |= {name: self._kinds(name, rule) for name, rule in given.items()}

  def timed(self, blocks: Sequence[int], trials: int) -> int:
    """Return how many runs are timed for a batch size, before what is tried because its neighbour was the fastest."""
    made = [candidate for some in self.kinds.values() for candidate in some]
    rounds = sum(len(_knots(c, blocks)) for c in made) + 4 + bool(self.scheduled)
    tried = 1 + len(self.ensembles) + len(made) + len(self.scheduled) + min(2, len(blocks) - 1)
    return rounds * (max(trials, 1) + 1) + bool(trials) * tried * (trials + 1)

  def compiled(self, blocks: Sequence[int]) -> int:
    """Return how many programs are compiled for a batch size, of a plan for chips elsewhere."""
    made = sum(len(_knots(c, blocks, 3)) for some in self.kinds.values() for c in some if c.knots)
    return made + 2 - self.models[0].network.drafts_only

  def measure(self, prompts, rows: Sequence[requests.RequestRow], blocks, call, time: TimeBudget, least: int):
    """Decode prompts, whose rows are given, by each rule: as many as there is time for, and `least` in any case."""
    time.begin()
    faults = {}
    call = call | dict(max_prompt_tokens=inputs.prompt_width(self.models, rows, None), keep_faults=True)
    given = len(prompts)
    for name, kinds in self.kinds.items():
      run = functools.partial(decode, kinds[0].make(max(2, *blocks)), self.models, **call)
      first = not self.candidates
      size = least if first and time.seconds is not None else len(prompts)
      outs = _in_parts(run, prompts, size, lambda: time.allows(1 / len(self.kinds)))
      ended = [fault for out in outs for fault in out.faults]
      faults |= {i: fault for i, fault in enumerate(ended) if fault}
      sound = [i for i, fault in enumerate(ended) if fault is None]
      if not sound:
        raise ValueError(ended[0])
      if first:
        prompts = prompts[: len(ended)]
        lengths = _stat(outs, 'emitted')
        tokens = [row for out in outs for row in out.tokens]
        self.written = np.concatenate([tokens[i] for i in sound])
      tested, accepted = (_stat(outs, name)[sound].sum(0) for name in ('tested_at', 'accepted_at'))
      rates = cost_model.by_position(tested, accepted)
      followed = _stat(outs, 'hits')[sound].sum() / max((tested - accepted).sum(), 1)
      self.candidates += [replace(kind, acceptance=rates, hits=float(followed)) for kind in kinds]
      time.bar.add(1, f'acceptance, {name}')
    if len(prompts) < given:
      time.leave_out(0, f'{given - len(prompts)} of {given} prompts')
    self.prompts = [prompt for i, prompt in enumerate(prompts) if i not in faults]
    self.rows = [rows[i] for i in range(len(prompts)) if i not in faults]
    self.lengths = [int(n) for i, n in enumerate(lengths) if i not in faults]
    self.faults = tuple(faults.values())

  def _with(self, leaves: int) -> Candidate:
    """Return plain speculative decoding with leaves."""
    networks = [model.network for model in self.models]

    def make(n):
      return methods.speculative(block=n, pair=self.pair, leaves=leaves).for_networks(networks)

    return Candidate(f'speculative, {leaves} leaves', make, leaves=leaves)

  def _kinds(self, name: str, rule: Rule | Combiner) -> list[Candidate]:
    """Return the candidates of a rule, the first of which measures the acceptance of all."""
    if rules.declaration(rule).is_rule:
      knots = {'knots': KNOTS} if rule is rules.speculative else {}
      networks = [model.network for model in self.models]
      return [Candidate(name, lambda n: methods.speculative(rule, n, pair=self.pair).for_networks(networks), **knots)]
    if len(self.models) != 2:
      raise ValueError(f'{name} combines two models, and there are {len(self.models)}: plan it of two.')
    self.ensembles[name] = methods.ensemble(rule)
    return [
      Candidate(f'naive_cos {name}', lambda n: methods.naive_cos(rule, n), reference=name),
      Candidate(f'cos {name}', lambda n: methods.cos(rule, (n, 1)), reference=name, knots=0),
    ]


def _signal(signal: Callable) -> Callable:
  """Return a signal, having checked that a plan can observe it by itself."""
  if Predictor.of(signal).declaration.coupled:
    raise ValueError(f'{spelled(signal)} reads the noise of a coupling, which no plan has; plan margin.')
  return signal


def _in_parts(run: Callable[..., Decoded], prompts: Sequence, size: int, may: Callable[[], bool]) -> list[Decoded]:
  """Return what decoding so many prompts at a time gives: of the first, and of more as long as that `may` be."""
  outs: list[Decoded] = []
  for start in range(0, len(prompts), size):
    if outs and not may():
      break
    some = prompts[start : start + size]
    outs.append(run(some, example_ids=range(start, start + len(some)), batch_size=min(8, len(some))))
  return outs


def _stat(outs: Sequence[Decoded], name: str) -> np.ndarray:
  """Return a statistic of the rows of all parts."""
  return np.concatenate([getattr(out.stats, name) for out in outs])


def _knots(candidate: Candidate, blocks: Sequence[int], most: int = KNOTS) -> list[int]:
  """Return the γ at which a candidate is timed: the largest, the smallest and those between."""
  some = np.linspace(0, len(blocks) - 1, min(candidate.knots, most)).round().astype(int)
  return list(dict.fromkeys(blocks[i] for i in (*some[-1:], *some)))


def _rows(
  measured: _Acceptance, blocks, costs: Callable[[Candidate], Costs], profile, batch: int
) -> tuple[PlanRow, ...]:
  """Predict every candidate at every γ."""
  rows = []
  for candidate in measured.candidates:
    cost = costs(candidate)
    for n in blocks if cost else ():
      speedup = cost_model.speedup(candidate.make(n), candidate.acceptance, cost, measured.lengths, candidate.hits)
      rows.append(PlanRow(candidate, n, speedup, cost))
  plain = costs(measured.candidates[0])
  for signal in () if profile is None else measured.scheduled:
    name = spelled(signal)
    of_signal = functools.partial(methods.scheduled, signal, plan=profile, pair=measured.pair)
    make = functools.partial(methods.sv_exact, profile) if signal is companion else of_signal
    candidate = Candidate('sv_exact' if signal is companion else f'scheduled by {name}', make, predictor=name, knots=0)
    for n in blocks:
      seconds = batch / sv_model.simulate(profile, batch, n, sv_model.Variant(name))['sv']  # of a token of each row
      rows.append(PlanRow(candidate, n, cost_model.speedup_of_texts(plain, seconds, measured.lengths)))
  return tuple(rows)


def _profile(
  models,
  measured: _Acceptance,
  origin: Origin,
  call: dict,
  timers: 'Mapping[int, _Timer]',
  progress: bool,
) -> plans.Profile:
  """Measure what scheduled verification decides by; a round's overhead is what it takes more than its calls."""
  block = origin.block
  tokens = max(row.max_new for row in measured.rows)
  if tokens <= block:
    raise ValueError(f'max_new_tokens={tokens} is not more than γ = {block}: no text is long enough for a draft.')
  how = dict(block=block, batch_size=16, signals=measured.signals, progress=progress)
  samples = profiling.samples_of(models, measured.prompts, **how, **call)
  sizes = dict(source=origin.source, tokens=tokens, progress=progress)
  times, steps = profiling.measure_times(models, block, tuple(timers), **sizes)
  rounds = {}
  for n, (draft, reading, _) in steps.items():
    rounds[n] = timers[n].speculative_rounds()
    overhead = profiling.overhead(timers[n].rounds['all'], block, draft, reading, times[n][n * (block + 1)])
    steps[n] = draft, reading, timers[n].rounds['alone'], overhead
  return profiling.profile(origin, samples, times, steps, rounds, signals=measured.signals)


# ---- times ----


class _Drafted(NamedTuple):
  """What rounds are timed of: a candidate at a γ."""

  candidate: Candidate
  block: int

  def __str__(self):
    return f'{self.candidate.name} at γ = {self.block}'


class _Rounds:
  """What rounds of one batch size take, by candidate and γ, and what follows: the costs of every candidate."""

  measured: _Acceptance
  blocks: Sequence[int]
  batch: int

  @property
  def rounds(self) -> dict[Any, float]:
    """The seconds of a round of the verifier, 'alone', of the drafter's token, 'draft', and of what was drafted."""
    raise NotImplementedError

  def costs(self) -> Callable[[Candidate], Costs | None]:
    """Return the costs of each candidate; where no round of its own was timed, those of plain speculative decoding.

    With leaves a round is another, so that there are none.
    """
    token = self.rounds['alone']
    draft = self.rounds.get('draft', cost_model.FREE * token)
    start_alone = max(self.rounds.get('start alone', token) - token, 0.0)
    start = max(self.rounds.get('start speculative', token + draft) - token - draft, 0.0)  # of a draft of one token

    def windows(candidate: Candidate) -> dict[int, float]:
      found = {}
      for n, seconds in self._rounds_of(candidate).items():
        method = candidate.make(n)
        [calls] = method.calls()
        found[cost_model.window(method)] = max(seconds - calls[0] * draft, 1e-9)
      return found

    def costs_of(candidate: Candidate) -> Costs | None:
      verify = windows(self._as_timed(candidate))
      if candidate.leaves and not verify:
        return None
      verify = verify or windows(self.measured.candidates[0])
      return Costs(draft, {**verify, 1: token}, start=start, start_alone=start_alone)

    return costs_of

  def speculative_rounds(self) -> dict[int, float]:
    """Return the seconds of a round of plain speculative decoding by γ."""
    return self._rounds_of(self.measured.candidates[0])

  def _rounds_of(self, candidate: Candidate) -> dict[int, float]:
    """Return the seconds of a round of a candidate by γ, as far as they were timed."""
    keys = {n: _Drafted(candidate, n) for n in self.blocks}
    return {n: self.rounds[key] for n, key in keys.items() if key in self.rounds}

  def _as_timed(self, candidate: Candidate) -> Candidate:
    """Return the candidate whose rounds are those of this one."""
    if candidate.knots:
      return candidate
    return next(c for c in self._made if c.reference == candidate.reference)

  @property
  def _made(self) -> list[Candidate]:
    """The candidates whose rounds are timed; those of cos are a naive_cos's and the drafter's."""
    return [c for c in self.measured.candidates if c.knots]


class _Timer(_Rounds):
  """The clock of one batch size: what rounds cost inside the loop, and how fast decoding is."""

  def __init__(self, models, measured: _Acceptance, blocks, call: dict, batch: int, trials: int, time: TimeBudget):
    self.models = timing.endless(models)
    self.measured = measured
    self.blocks = blocks
    self.batch = batch
    self.trials, self.time, self.alone = trials, time, methods.autoregressive(len(models) - 1)
    self._tried = False
    count = min(len(measured.prompts), max(TEXTS, 2 * batch)) // batch * batch
    lengths = measured.lengths[:count]
    self.asked = [_of_length(*pair) for pair in zip(measured.prompts[:count], lengths, strict=True)]
    self._longest = max(8, *lengths)
    width = inputs.prompt_width(models, measured.rows, None)
    self.call = call | dict(batch_size=batch, max_prompt_tokens=width)

  def _interleave(self, runs: Mapping[Any, Callable[[], Any]], note: str, least: int) -> dict[Any, list]:
    """Time runs in turn, those that matter most first and `least` in any case, and show how far that is."""

    def shown(run):
      result = run()
      self.time.bar.add(1, f'batch {self.batch}, {note}')
      return result

    shown_runs = {name: functools.partial(shown, run) for name, run in runs.items()}
    found = timing.interleave(shown_runs, self.trials, self.time.allows, least)
    about = f'batch {self.batch}, {note}:'
    if missed := [str(name) for name in runs if name not in found]:
      self.time.leave_out(len(missed) * (self.trials + 1), f'{about} {", ".join(missed)}')
    if skipped := self.trials - len(next(iter(found.values()))):
      self.time.leave_out(len(found) * skipped, f'{about} {skipped} of {self.trials} trials')
    return found

  @functools.cached_property
  def rounds(self) -> dict[Any, float]:
    """The seconds of rounds of full batches, inside the decode loop, and of texts of one token, if there is time.

    Drafts are accepted by chance, as often as was observed. 'all' is a round of a schedule that scores all it may.
    """
    self.time.begin()
    speculative = self.measured.candidates[0]
    turns = itertools.zip_longest(*([_Drafted(c, n) for n in _knots(c, self.blocks)] for c in self._made))
    made = {key: (key.candidate.make(key.block), key.candidate) for turn in turns for key in turn if key}
    if self.measured.scheduled:
      made = {'all': (profiling.scoring_all(self.blocks[-1], len(self.models)), speculative)} | made
    drafted = {
      name: method.accepting(timing.forced(cost_model.mean_rate(candidate.acceptance, method.block)))
      for name, (method, candidate) in made.items()
    }
    least = {'alone': self.alone}
    least |= {} if self.models[0].network.drafts_only else {'draft': methods.autoregressive(0)}
    least |= dict(itertools.islice(drafted.items(), 1 + bool(self.measured.scheduled)))
    runs = {name: self._full(method) for name, method in least.items()}
    first = drafted[_Drafted(speculative, self.blocks[0])]
    runs |= {'start alone': self._first_token(self.alone), 'start speculative': self._first_token(first)}
    runs |= {name: self._full(method) for name, method in drafted.items() if name not in runs}
    return {name: float(np.median(x)) for name, x in self._interleave(runs, 'rounds', len(least)).items()}

  def _full(self, method: Method) -> Callable[[], float]:
    """Return a function that times a round of full batches."""
    sizes = {name: self.call[name] for name in ('batch_size', 'max_prompt_tokens', 'sampler')}
    run = timing.full_rounds(method, self.models, self._repeated, max_new_tokens=self._longest, **sizes)

    def seconds() -> float:
      done = run()
      return done.seconds / done.rounds

    return seconds

  def _first_token(self, method: Method) -> Callable[[], float]:
    """Return a function that times a batch of texts of one token."""
    asked = [_of_length(request, 1) for request in self._repeated]
    run = functools.partial(decode, method, self.models, asked, **self.call)
    return lambda: timing.timed(run)[0] * self.batch / len(asked)

  @functools.cached_property
  def _repeated(self) -> list[requests.Request]:
    """The prompts of so many batches that a run is long against the noise of the clock, again from the first."""
    longest = [_of_length(request, self._longest) for request in self.asked]
    run = functools.partial(decode, self.alone, self.models, longest[: self.batch], **self.call)
    run()  # compiles
    batches = multihost.broadcast(int(np.clip(timing.ENOUGH / timing.timed(run)[0], 1, max(1, TEXTS // self.batch))))
    return list(itertools.islice(itertools.cycle(longest), batches * self.batch))

  def speeds(self, made: Mapping[Any, Method]) -> dict[Any, list[float]]:
    """Return the tokens a second of methods in each trial, of texts as long as those that were observed."""
    if not self._tried:
      self.time.begin()
    elif self.time.allows():  # only now it is known that these are tried too
      self.time.bar.expect(len(made) * (self.trials + 1))
    else:
      self.time.leave_out(0, f'batch {self.batch}, decoding: {", ".join(map(str, list(made)[1:]))}')
      return {}
    self._tried = True
    return self._interleave({name: self._speed(method) for name, method in made.items()}, 'decoding', 2)

  def _speed(self, method: Method) -> Callable[[], float]:
    def run():
      return decode(method, self.models, self.asked, **self.call)

    def speed() -> float:
      seconds, out = timing.timed(run)
      return out.stats.emitted.sum() / seconds

    return speed


class _Simulated(_Rounds):
  """Rounds of one batch size on chips elsewhere; of a candidate at the smallest, the middle and the largest γ."""

  def __init__(self, models, measured: _Acceptance, blocks, call: dict, batch: int, where: Elsewhere, time: TimeBudget):
    self.models = models
    self.measured = measured
    self.blocks = blocks
    self.batch = batch
    self.where = where
    self.time = time
    self.sampler = call['sampler']
    self.sizes = aot.Sizes(batch, inputs.prompt_width(models, measured.rows, None), call['max_new_tokens'])

  @functools.cached_property
  def compiled(self) -> dict[Any, Compiled]:
    """What was compiled, by name or candidate and γ: as many as there is time for, the first three in any case."""
    self.time.begin()
    made = {'alone': methods.autoregressive(len(self.models) - 1)}
    made |= {} if self.models[0].network.drafts_only else {'draft': methods.autoregressive(0)}
    made |= {_Drafted(c, n): c.make(n) for c in self._made for n in _knots(c, self.blocks, 3)}
    found = {}
    for name, method in made.items():
      if len(found) > 2 and not self.time.allows():
        self.time.leave_out(1, f'batch {self.batch}, compiling: {name}')
        continue
      found[name] = self.where.compiled(method, self.models, self.sizes, self.sampler)
      self.time.bar.add(1, f'batch {self.batch}, compiling')
    if not found['alone'].fits or not any(x.fits for key, x in found.items() if isinstance(key, _Drafted)):
      names = ' and '.join(model.name for model in self.models)
      raise ValueError(
        f'{self.where}: {self.batch} rows of {names} do not fit into the memory of a chip; give more chips, as in '
        '--mesh model=8, or a smaller batch.'
      )
    return found

  @functools.cached_property
  def rounds(self) -> dict[Any, float]:
    found = {name: program.seconds for name, program in self.compiled.items() if program.fits}
    plain = sorted((n, found[key]) for n in self.blocks if (key := _Drafted(self.measured.candidates[0], n)) in found)
    if 'draft' in found and len(plain) > 1:  # a token more in a draft costs less than a round of the drafter alone
      (first, least), (last, most) = plain[0], plain[-1]
      found['draft'] = min(found['draft'], max((most - least) / (last - first), cost_model.FREE * found['alone']))
    return found


def _of_length(prompt: Any, tokens: int) -> requests.Request:
  """Return the request for so many new tokens of a prompt, whatever numbers it has of its own."""
  request = prompt if isinstance(prompt, requests.Request) else requests.Request(prompt)
  return replace(request, max_new_tokens=tokens, min_new_tokens=None)


# ---- what is tried ----


def try_best(
  report: BatchReport,
  references: Mapping[str, Method],
  speeds: Callable[[Mapping[Any, Method]], Mapping[Any, Sequence]],
) -> BatchReport:
  """Return a report with what may be the fastest tried, in turn with what it is compared to.

  Each candidate is tried at its best γ; plain speculative decoding also at those next to its fastest, until both are
  slower.

  Args:
    report: The predictions.
    references: The verifier alone by the name 'alone', and ensembles by the names of their rules.
    speeds: Returns tokens a second in each trial of methods that take turns, of the first of them where time is short.
  """
  measured: dict[PlanRow, tuple[timing.Interval, timing.Interval]] = {}
  alone = []
  some = _best_rows(report.rows)
  while some:
    asked = {'alone': references['alone']}
    for row in some:
      asked |= {row.candidate.reference: references[row.candidate.reference], row: _program_of(row)}
    tokens = speeds(asked)
    if not tokens:
      break
    alone += tokens['alone']
    for row in filter(tokens.__contains__, some):
      gains = np.divide(tokens[row], tokens[row.candidate.reference])
      measured[row] = timing.Interval.of(gains), timing.Interval.of(tokens[row])
    drafted = [row for row in measured if row.candidate == report.rows[0].candidate]
    fastest = max(drafted, key=lambda row: measured[row][0].median)
    some = [row for row in _neighbours(report.rows, fastest) if row not in measured]
  rows = [replace(r, measured=measured[r][0], speed=measured[r][1]) if r in measured else r for r in report.rows]
  return replace(report, rows=tuple(rows), alone=timing.Interval.of(alone))


def _program_of(row: PlanRow) -> Method:
  """Return the method of a row, as the program whose rounds were timed, if some were."""
  method = row.candidate.make(row.block)
  return method.accepting(timing.forced(None)) if row.candidate.knots else method


def _best_rows(rows: Sequence[PlanRow]) -> list[PlanRow]:
  """Return the best row of each candidate as predicted, and those next to that of plain speculative decoding."""
  groups = itertools.groupby(rows, key=lambda row: row.candidate)
  best = [max(some, key=lambda row: row.speedup) for _, some in groups]
  return best + _neighbours(rows, best[0])


def _neighbours(rows: Sequence[PlanRow], row: PlanRow) -> list[PlanRow]:
  """Return the rows with the next smaller and the next larger γ."""
  same = [r for r in rows if r.candidate == row.candidate]
  at = same.index(row)
  return [same[i] for i in (at - 1, at + 1) if 0 <= i < len(same)]
