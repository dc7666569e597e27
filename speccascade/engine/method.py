"""What `decode` takes as a method: phases over models, a choice of methods by batch size, or a cascade of texts.

What plans, times, scores or reports a method asks it here (`calls`, `block`, `verifier_width`, `target`,
`keeps_distribution`) and reads no phase.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

from flax import struct
import jax
from jax import tree_util

from speccascade import acceptance, rules, stopping
from speccascade.engine import law
from speccascade.engine.lowering import flat, lower, mapped, Phase, rounds
from speccascade.engine.phases import Propose, Score, Verify
from speccascade.types import Network, Rule, static

Target = tuple[tuple[int, ...], tree_util.Partial | None]


def index_for(rows: Sequence[int], batch: int) -> int:
  """Return the index, among ascending numbers of rows, of the first that is at least `batch`, else the last."""
  return next((i for i, n in enumerate(rows) if n >= batch), len(rows) - 1)


@dataclasses.dataclass(frozen=True)
class Baseline:
  """What a speed-up is over: `text` names it, of the verifier's name; it calls all models, or the last one alone."""

  text: str
  all_models: bool

  def models(self, slots: Sequence[int]) -> Sequence[int]:
    """Return the models that it calls, of those of a method."""
    return slots if self.all_models else slots[-1:]


ALONE = Baseline('{} alone', all_models=False)
LOCKSTEP = Baseline('the standard ensemble', all_models=True)


def tested(method: 'Method') -> Target:
  """Return the models and the combiner of a method's test; none where it tests nothing."""
  tests = next((p for p in method.all_phases if isinstance(p, Verify)), None)
  return ((), None) if tests is None else (tuple(method.slots[s] for s in tests.models), tests.combiner)


@dataclasses.dataclass(frozen=True)
class About:
  """What a method says of itself, for what plans, predicts and reports it.

  Attributes:
    name: The name of the function that makes it.
    rule: The name of its rule, where that is a part of the method's name.
    block: γ, or the γ of each model that drafts; None where it has none.
    over: What a speed-up of it is over: `ALONE`, the verifier, or `LOCKSTEP`, the standard ensemble; None: nothing.
    is_baseline: Whether it is itself what a speed-up is over.
    speedup: The speed-up of two models, `speedup(rate, block, c, v, overhead)` with the arguments of
      `theory.speedup_speculative`; None without a formula.
    accepts_all: Whether its policy decides alone, each drafted token being accepted: a rate is that of drafting on.
    target: Returns the models and the combiner whose distribution the output follows, of a method; None: there is none.
    choose: How it is told which of several models to decode with, as an example.
  """

  name: str
  rule: str | None = None
  block: int | tuple[int, ...] | None = None
  over: Baseline | None = None
  is_baseline: bool = False
  speedup: Callable[..., Any] | None = None
  accepts_all: bool = False
  target: Callable[['Method'], Target] | None = tested
  choose: str | None = None


class Strategy:
  """Base of all that `decode` takes as a method.

  Attributes:
    about: What it says of itself.
    phases: The phases of a round.
    slots: The number of the model of each slot.
    extra_models: Whether more models may be given than it decodes with.
    origin: What the plan that it decides by was made of; it has `check_models(models, slots)` and
      `check_sampler(sampler)`.
    policy: How long drafts are.
    whole_texts: Whether it judges complete texts, so that no token is final before all are.
  """

  about: About
  phases: tuple[Phase, ...]
  slots: tuple[int, ...]
  extra_models = False
  origin = None
  policy = stopping.Policy()
  whole_texts = False

  @property
  def name(self) -> str:
    """What the method is called where its settings do not matter."""
    return self.about.name if self.about.rule is None else f'{self.about.name}[{self.about.rule}]'

  @property
  def block(self) -> int | tuple[int, ...] | None:
    """γ, or the γ of each model that drafts; None where it has none."""
    return self.about.block

  @property
  def target(self) -> Target:
    """The models and the combiner whose distribution the output follows; the combiner is None where there is none."""
    return (), None

  @property
  def keeps_distribution(self) -> bool | None:
    """Whether each token follows the distribution of `target`, given nothing but the tokens before it.

    None: that is not known, since a part of one's own does not say it.
    """
    return self.target[1] is not None

  @property
  def reads_prefix(self) -> bool:
    """Whether the combiner of `target` reads the tokens before a position, which nothing but decoding gives it."""
    combiner = self.target[1]
    return combiner is not None and rules.declaration(combiner).by_prefix

  @property
  def follows_verifier(self) -> bool:
    """Whether the output follows the distribution of the last model."""
    models, combiner = self.target
    return models == self.slots[-1:] and rules.inside(combiner) is rules.own

  @property
  def answering(self) -> tuple[int, ...]:
    """The models that may have the last word on a token."""
    return self.slots[-1:]

  @property
  def models(self) -> int:
    """The number of models that the method decodes with."""
    return max(self.slots) + 1

  @property
  def all_phases(self) -> tuple[Phase, ...]:
    """The phases, those of every branch where models take turns."""
    return flat(self.phases)

  @property
  def takes_turns(self) -> bool:
    """Whether the models take turns to propose."""
    return len(rounds(self.phases)) > 1

  @property
  def drafts(self) -> bool:
    """Whether a model proposes tokens that others test."""
    return any(phase.draws for phase in self.all_phases)

  @property
  def verifier_width(self) -> int:
    """The most tokens that a model other than a drafter is fed at once; 1 where each call is of one token."""
    return 1

  @property
  def of_batches(self) -> dict[str, 'Strategy']:
    """The methods that batches are decoded by, each with the beginning of a sentence about it."""
    return {'': self}

  @property
  def unnamed(self) -> 'Strategy':
    """The method without what it says of itself, by which no program differs."""
    return self

  @property
  def rule(self) -> Rule | None:
    """The rule of its only test; None of several tests, and of a combiner."""
    return None

  def check_sampler(self, sampler: Any):
    """Refuse a sampler under which what the method decides by was not made, or that a phase cannot go with."""
    for choice in self.of_batches.values():
      if choice.origin is not None:
        choice.origin.check_sampler(sampler)
      choice.check_law(sampler)

  def check_law(self, sampler: Any):
    """Refuse a sampler under which its output would not follow what it is said to follow."""

  def at(self, batch: int) -> 'Strategy':
    """Return the method for a batch of this size."""
    return self

  def for_networks(self, networks: Sequence[Network]) -> 'Strategy':
    """Return the method for these models' networks, which say how each of them drafts.

    Raises:
      ValueError: If a target needs a distribution that a model which drafts has not, given the text before a token, or
        a phase comes behind one that keeps it from its work.
    """
    return self

  def decode(self, job: Any, run: Callable) -> list:
    """Return the ended rows of a job, which `run(job)` decodes."""
    return run(job)

  def running_all(self) -> 'Strategy':
    """Return the method with settings by which it runs every program that it may need."""
    return self


@struct.dataclass
class Method(Strategy):
  """Phases over `slots`; slot s runs the model number `slots[s]`, each slot with a cache of its own."""

  phases: tuple[Phase, ...]
  slots: tuple[int, ...] = static()
  policy: stopping.Policy = stopping.Policy()
  about: About = static(default=About('method'))
  extra_models: bool = static(default=False)
  origin: Any = static(default=None)

  def __str__(self):
    policy = '' if not self.policy.varies() else f' (drafts end by {type(self.policy).__name__})'
    return ' · '.join(map(str, self.phases)) + policy

  @property
  def target(self) -> Target:
    return ((), None) if self.about.target is None else self.about.target(self)

  @property
  def keeps_distribution(self) -> bool | None:
    return law.law(self).exact

  def for_networks(self, networks: Sequence[Network]) -> 'Method':
    slots = [networks[m] for m in self.slots]
    method = self.replace(phases=mapped(lambda p: p.for_networks(slots), self.phases))
    if (misread := law.misread(method, slots)) is not None:
      slot, why = misread
      raise ValueError(
        f'{self.name} reads the distribution of model {self.slots[slot]}, {why}. Let the model draft beside those of '
        'the target, as in methods.speculative(rule, drafter=2).'
      )
    for slot in lower(method).leaves_scored:  # lower refuses a phase that cannot do its work
      if not slots[slot].takes_leaves:
        model = f'model {self.slots[slot]}, a {type(slots[slot]).__name__},'
        raise ValueError(f'{self.name} has leaves, which {model} does not score: leave them out.')
    return method

  def check_law(self, sampler: Any):
    if (verdict := law.law(self, sampler)).refused:
      raise ValueError(f'{verdict.why}.')

  @property
  def unnamed(self) -> 'Method':
    return self.replace(about=About('method'))

  @property
  def rule(self) -> Rule | None:
    tests = [phase.combiner for phase in self.all_phases if isinstance(phase, Verify)]
    return tests[0] if len(tests) == 1 and rules.declaration(tests[0]).is_rule else None

  def with_rule(self, rule: Rule) -> 'Method':
    """Return the method with another rule in its test."""
    return self.replace(phases=mapped(lambda p: p.replace(combiner=rule) if isinstance(p, Verify) else p, self.phases))

  def accepting(self, accept: Callable) -> 'Method':
    """Return the method with another acceptor, as one whose acceptance is forced while a round is timed."""
    bound = acceptance.bind(accept)
    return self.replace(phases=mapped(lambda p: p.replace(accept=bound) if isinstance(p, Verify) else p, self.phases))

  @property
  def window(self) -> int:
    """W, the most tokens ever pending."""
    return lower(self).window

  @property
  def by_round(self) -> bool:
    """Whether random numbers are keyed by round as well."""
    return law.by_round(self)

  @property
  def verifier_width(self) -> int:
    lowered = lower(self)
    leaves = sum(n - 1 for n in lowered.leaves)
    return max((max(p.widths) + leaves for p in lowered.parts if isinstance(p, Score)), default=1)

  @property
  def draft_turns(self) -> int:
    """The most turns of a loop over drafts, a number that a compiled program need not have; 1 without such a loop."""
    return max((p.turns for p in lower(self).parts if isinstance(p, Propose)), default=1)

  def calls(self) -> list[dict[int, int]]:
    """Return {slot: model calls} of a round; where models take turns, of the round of each."""
    return [_calls(phases) for phases in rounds(lower(self).phases)]


def _all(answers: Sequence[bool | None]) -> bool | None:
  """Return False where one is, else None where one is, else True."""
  return False if False in answers else None if None in answers else True


def _calls(phases: Sequence[Phase]) -> dict[int, int]:
  calls: dict[int, int] = {}
  for phase in phases:
    if phase.feeds is not None:
      calls[phase.feeds] = calls.get(phase.feeds, 0) + phase.calls
  return calls


@struct.dataclass
class ByBatch(Strategy):
  """A method for each batch size: `choices[i]` decodes batches of at most `rows[i]` rows, the last larger ones too.

  It is resolved on the host, before anything is made for the batch.
  """

  choices: tuple[Method, ...]
  rows: tuple[int, ...] = static()

  about = About('by_batch')

  @property
  def of_batches(self) -> dict[str, Strategy]:
    return {f'batch {n}: ': choice for n, choice in zip(self.rows, self.choices, strict=True)}

  def __str__(self):
    return 'by batch[' + ' | '.join(f'{n}: {choice}' for n, choice in zip(self.rows, self.choices, strict=True)) + ']'

  @property
  def phases(self) -> tuple[Phase, ...]:
    return tuple(phase for choice in self.choices for phase in choice.phases)

  @property
  def slots(self) -> tuple[int, ...]:
    """The models of all choices, the verifier last."""
    last = self.choices[-1].slots[-1]
    return (*sorted({s for choice in self.choices for s in choice.slots} - {last}), last)

  @property
  def extra_models(self) -> bool:
    return any(choice.extra_models for choice in self.choices)

  @property
  def target(self) -> Target:
    return self.choices[-1].target

  @property
  def verifier_width(self) -> int:
    return max(choice.verifier_width for choice in self.choices)

  @property
  def keeps_distribution(self) -> bool | None:
    targets = [jax.tree.flatten(choice.target) for choice in self.choices]
    same = all(target == targets[0] for target in targets)  # else the size of a batch decides about the distribution
    return _all([same, *(choice.keeps_distribution for choice in self.choices)])

  def for_networks(self, networks: Sequence[Network]) -> 'ByBatch':
    return self.replace(choices=tuple(choice.for_networks(networks) for choice in self.choices))

  def at(self, batch: int) -> Method:
    return self.choices[index_for(self.rows, batch)]
