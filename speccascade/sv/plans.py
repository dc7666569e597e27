"""What was measured of some models and how to decode with them at each batch size, in one file.

`python -m speccascade.plan MODEL … --out plan.json` makes one. It holds for each batch size the fastest method, the
speed of each that was tried and, of three models, the profile that speculative verification decides by; and the models,
sampler, device and data that it was made of.

Axis letters: N samples.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, NamedTuple
import warnings

import jax
import numpy as np

from speccascade import rules, sampling
from speccascade.host import storage
from speccascade.host.errors import first_line
from speccascade.sv import predictors
from speccascade.sv.predictors import AcceptanceTable, Fit, Logistic
from speccascade.sv.verification import Latency

FORMAT = 3
METHODS = 'autoregressive', 'speculative', 'sv_exact', 'scheduled'  # that a plan may choose
MAKE = 'make one with python -m speccascade.plan'


class Choice(NamedTuple):
  """A method of `speccascade.methods` by name, its γ and leaves, 0 where it has none, the predictor of `scheduled`."""

  method: str
  block: int = 0
  predictor: str = ''
  leaves: int = 0

  def __str__(self):
    name = f'{self.method} by {self.predictor}' if self.predictor else self.method
    name = f'{name}, γ = {self.block}' if self.block else name
    return f'{name}, {self.leaves} leaves' if self.leaves else name


class Speed(NamedTuple):
  """Tokens a second of something that was tried, with the quartiles of the trials, and as predicted."""

  name: str
  block: int
  median: float
  low: float
  high: float
  predicted: float


@dataclasses.dataclass(frozen=True)
class Origin:
  """What a plan was made of. The verifier is the last model; a digest is None for one that is in no folder."""

  names: tuple[str, ...]
  digests: tuple[str | None, ...]
  sampler: tuple[tuple[str, float], ...]
  device: str
  data: str
  block: int  # the longest γ that was measured
  source: int = 64  # the length of a prompt with which times were measured
  coupling: str = 'maximal'  # of the sampler

  def check_models(self, models: Sequence, slots: Sequence[int]) -> None:
    """Refuse models that a plan is not of, of those that a method decodes with; warn on another device."""
    last = len(self.names) - 1
    if slots[-1] != last or max(slots) > last:
      raise ValueError(
        f'the plan was made with {", ".join(self.names)}, of which model {last} verifies, and this method decodes with '
        f'the models {", ".join(map(str, slots))}: give all models of the plan and their numbers, as in pair=(0, '
        f'{last}), or {MAKE} of these models.'
      )
    for i in sorted(set(slots)):
      name = self.names[i]
      digest = self.digests[i]
      model = models[i]
      if None not in (digest, model.digest) and digest != model.digest:
        raise ValueError(
          f'the plan was made with {name} ({digest}) as model {i}, not with {model.name} ({model.digest}); '
          f'{MAKE} of these models.'
        )
    if (here := device_of(models)) != self.device:
      warnings.warn(
        f'the plan was made on {self.device}, and this is {here}: acceptance is the same, times are not; {MAKE} here.',
        stacklevel=5,
      )

  def check_sampler(self, sampler: sampling.Sampler) -> None:
    """Refuse a sampler under which a plan was not made."""
    if _deciding(sampler_of(sampler)) != _deciding(self.sampler):

      def text(numbers):
        return ', '.join(f'{name} {value:g}' for name, value in numbers)

      raise ValueError(
        f'the plan was made with {text(self.sampler)}, not with {text(sampler_of(sampler))}; {MAKE} with this sampler.'
      )
    if sampler.coupling != self.coupling and not sampler.greedy:
      raise ValueError(
        f'the plan was made with coupling={self.coupling!r}, not with {sampler.coupling!r}, by which other drafts are '
        f'accepted; {MAKE} with this coupling.'
      )


@dataclasses.dataclass(frozen=True)
class Profile:
  """What a schedule of verification decides by; `origin` None is checked against nothing.

  Attributes:
    table: The acceptance that S and A of a companion predict; None without one.
    latency: The verifier's times, made of `times` and `steps`.
    samples: Arrays [N] by name. `accept` is the chance that the verifier accepts the token, `position` its place in the
      block, `request` the prompt's number; the value of each signal has the signal's name. With a companion, `s` and
      `a` are S and A, and `s_target` is the S of drafter and verifier.
    times: {rows: {tokens: seconds}} of the verifier.
    steps: {rows: [4]} the seconds of a token of the drafter, of the companion's reading, of a token of the verifier
      alone in its loop, and of a round apart from its calls.
    rounds: {rows: {γ: seconds}} of a round of speculative decoding.
    fits: {signal: its fit} of what needs no companion.
  """

  table: AcceptanceTable | None
  latency: Latency
  origin: Origin | None = None
  samples: Mapping[str, np.ndarray] | None = None
  times: Mapping[int, Mapping[int, float]] | None = None
  steps: Mapping[int, Sequence[float]] | None = None
  rounds: Mapping[int, Mapping[int, float]] | None = None
  fits: Mapping[str, Fit] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if not isinstance(self.latency, Latency):
      object.__setattr__(self, 'latency', Latency.of(self.latency))
    if self.table is not None:
      self.table.check()

  @classmethod
  def of(cls, table, origin: Origin | None, samples, times, steps, rounds=None, fits=None) -> 'Profile':
    """Return a profile whose latency is made of its times."""
    others = {rows: (draft, companion, overhead) for rows, (draft, companion, _, overhead) in steps.items()}
    return cls(table, Latency.of(times, others), origin, samples, times, steps, rounds, fits or {})

  def fit_of(self, signal: Callable, *, required: bool = False) -> Fit | None:
    """Return the fit of a signal, None where it was not planned."""
    companion = rules.inside(signal) is predictors.companion
    found = self.table if companion else self.fits.get(predictors.spelled(signal))
    if found is None and (required or companion):
      names = 'two models' if self.origin is None else ' and '.join(self.origin.names)
      raise ValueError(f'this plan is of {names}, and speculative verification is of three models; {MAKE} of three.')
    return found


@dataclasses.dataclass(frozen=True)
class Plan:
  """The fastest method for each batch size, and what it was chosen by.

  Attributes:
    origin: Of what the plan is.
    choices: {rows: the fastest method with the verifier's distribution}.
    speeds: {rows: the speed of everything that was tried}.
    profile: Of three models, what speculative verification decides by.
  """

  origin: Origin
  choices: Mapping[int, Choice]
  speeds: Mapping[int, Sequence[Speed]]
  profile: Profile | None = None

  def save(self, path) -> None:
    """Write the plan to a file."""
    content = dict(
      origin=dataclasses.asdict(self.origin),
      choices=self.choices,
      speeds=self.speeds,
      profile=None if self.profile is None else _content(self.profile),
    )
    content = json.loads(json.dumps(content))  # as it is read again: numbers of rows are texts
    saved = dict(speccascade_plan=FORMAT, digest=storage.digest_of_json(content), **content)
    storage.write(storage.local(path), json.dumps(saved))


def _content(profile: Profile) -> dict[str, Any]:
  """Return a profile as JSON has it."""
  return dict(
    table=None if profile.table is None else profile.table.lists(),
    fits={name: fit.lists() for name, fit in profile.fits.items()},
    times=profile.times,
    rounds=profile.rounds or {},
    steps=profile.steps,
    samples={name: np.round(np.asarray(x, np.float64), 5).tolist() for name, x in profile.samples.items()},
  )


def _by_number(seconds: Mapping[str, Mapping[str, float]]) -> dict[int, dict[int, float]]:
  return {int(n): {int(t): s for t, s in some.items()} for n, some in seconds.items()}


def load(path) -> Plan:
  """Return the plan in a file, which is read once."""
  file = storage.local(path)
  if not file.is_file():
    raise FileNotFoundError(f'{file}: no such plan; {MAKE}.')
  return _read(file, file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _read(file: Path, _changed: int) -> Plan:
  try:
    content = json.loads(file.read_text(encoding='utf-8'))
    if not isinstance(content, dict) or content.pop('speccascade_plan', None) != FORMAT:
      raise ValueError('another format')
    if content.pop('digest', None) != storage.digest_of_json(content):
      raise ValueError('its content was changed after it was written')
    made = _made(content)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{file} is no plan of this version ({error}); {MAKE}.') from None
  except (TypeError, KeyError, AttributeError) as error:  # of values of another kind
    raise ValueError(f'{file} is no plan of this version ({first_line(error, named=True)}); {MAKE}.') from None
  _check_choices(file, made.choices)
  return made


def _check_choices(file: Path, choices: Mapping[int, Choice]) -> None:
  """Raise where a choice is none that a plan makes: what stands in a file is data, and names no code but declared."""
  for choice in choices.values():
    kinds = tuple(map(type, choice))
    if choice.method not in METHODS or kinds != (str, int, str, int):
      raise ValueError(f'{file}: {list(choice)} is no choice of a plan, [METHOD, γ, PREDICTOR, LEAVES]; {MAKE}.')
    if choice.predictor:
      try:
        predictors.check_declared(choice.predictor)
      except ValueError as error:
        raise ValueError(f'{file}: {error}') from None


def _made(content: Mapping[str, Any]) -> Plan:
  """Return the plan of a file's content."""
  origin = Origin(**{k: tuple(map(_tuple, v)) if isinstance(v, list) else v for k, v in content['origin'].items()})
  choices = {int(n): Choice(*choice) for n, choice in content['choices'].items()}
  speeds = {int(n): tuple(Speed(*speed) for speed in some) for n, some in content['speeds'].items()}
  profile = None if content['profile'] is None else _profile(content['profile'], origin)
  return Plan(origin, choices, speeds, profile)


def _profile(content: Mapping[str, Any], origin: Origin) -> Profile:
  steps = {int(n): tuple(s) for n, s in content['steps'].items()}
  samples = {name: np.asarray(x) for name, x in content['samples'].items()}
  times, rounds = (_by_number(content[name]) for name in ('times', 'rounds'))
  table, fits = content['table'], content.get('fits', {})
  fits = {name: Logistic(**x) if 'slope' in x else AcceptanceTable.of(**x) for name, x in fits.items()}
  return Profile.of(table and AcceptanceTable.of(**table), origin, samples, times, steps, rounds, fits)


def _tuple(value: Any) -> Any:
  return tuple(value) if isinstance(value, list) else value


def get(plan: Any) -> Plan:
  """Return a plan that is given, or the one in the file whose path is given."""
  if isinstance(plan, (str, Path)):
    return load(plan)
  if isinstance(plan, Plan):
    return plan
  raise ValueError(f'{type(plan).__name__} is no plan; give the path of one, or {MAKE}.')


def profile_of(plan: Any) -> Profile:
  """Return a profile that is given, or that of a plan or of the plan in a file."""
  if isinstance(plan, Profile):
    return plan
  made = get(plan)
  if made.profile is None:
    names = ' and '.join(made.origin.names)
    raise ValueError(f'this plan is of {names}, without a predictor; {MAKE} of three, or with --predictor.')
  return made.profile


# ---- what a plan was made of ----


def sampler_of(sampler: sampling.Sampler) -> tuple[tuple[str, float], ...]:
  """Return the numbers of a sampler that are given."""
  given = [name for name in sampling.NEUTRAL if name == 'temperature' or sampler.given(name)]
  return tuple((name, float(getattr(sampler, name))) for name in given)


def device_of(models: Sequence, devices: Collection | None = None) -> str:
  """Return the device and the dtype that the last of the models computes with, on other devices if they are given."""
  leaf = max(jax.tree.leaves(models[-1].params), key=np.size)
  devices = devices or (leaf.devices() if isinstance(leaf, jax.Array) else jax.devices()[:1])
  many = f'{len(devices)} × ' if len(devices) > 1 else ''
  return f'{many}{next(iter(devices)).device_kind}, {leaf.dtype}'


def _deciding(numbers: Sequence[tuple[str, float]]) -> dict[str, Any]:
  """Return the numbers that decide the distribution, as the program has them; no filter changes what is likeliest."""
  greedy = dict(numbers)['temperature'] == 0
  return {name: np.float32(x) for name, x in numbers if not (greedy and name in ('top_k', 'top_p', 'min_p'))}
