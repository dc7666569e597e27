"""What a phase states of itself, and what follows for a round that is made of phases.

A method declares phases. `lower` derives what they must provide, in one place and once a program: how many tokens can
be pending, how wide each call is, what a drafter has to catch up with, whose logits are stored.
"""

from collections.abc import Callable, Sequence
import dataclasses
import itertools
from typing import TYPE_CHECKING

from flax import struct

from speccascade import stopping
from speccascade.types import Network, static

if TYPE_CHECKING:
  from speccascade.engine.state import Context, Record, State
  from speccascade.sampling import Sampler


class Phase:
  """A step of a round, (context, state) -> state. The base of every phase, which is a `flax.struct.dataclass`.

  Attributes:
    draws: How many tokens it may add to the window.
    feeds: The slot of the model that it feeds, and the most pending tokens that it feeds it, None for all; None where
      it feeds no model.
    calls: How often it calls that model in a round.
    beyond: How many positions behind the last committed token it may write.
    reads: The slots whose logits it looks at; None for any.
    tests: The slots whose logits must be known for the tokens that it commits.
    adds_logits: The slots whose logits it adds up, so that a token that a model lacks needs one.
    by_round: Whether the random numbers of a round are used in no other.
  """

  draws: int = 0
  feeds: tuple[int, int | None] | None = None
  calls: int = 0
  beyond: int = 0
  reads: tuple[int, ...] | None = None
  tests: tuple[int, ...] = ()
  adds_logits: tuple[int, ...] = ()
  by_round: bool = False

  def parts(self) -> tuple['Phase', ...]:
    """Return the phases that it is made of, all the way down: itself, unless it runs others."""
    return (self,)

  def rounds(self) -> list[tuple['Phase', ...]]:
    """Return the phases of each round that there may be, where it runs one of several lists of phases."""
    return [(self,)]

  def only(self, slots: Sequence[int]) -> 'Phase':
    """Return it without what feeds other models than those of some slots, where models take turns."""
    return self

  def mapped(self, change: Callable[['Phase'], 'Phase']) -> 'Phase':
    """Return it changed, or, where it runs others, with each of them changed."""
    return change(self)

  def keeps_distribution(self, by_round: bool) -> bool | None:
    """Tell whether what it commits or drops keeps the distribution of the target, with numbers by round or position.

    None: that is not known, as of a phase that does not say it.
    """
    return None

  def check_sampler(self, sampler: 'Sampler') -> None:
    """Refuse a sampler that it cannot go with."""

  def of(self, networks: Sequence[Network]) -> 'Phase':
    """Return it with what it takes from the networks of the slots."""
    return self

  def lowered(self, facts: 'Facts') -> 'Phase':
    """Return it with what follows from the round that it is a part of."""
    return self

  def records(self, rows: int, positions: int) -> 'dict[str, Record]':
    """Return what it records beside the rest, as before the first round: arrays [rows, …] or [rows, …, positions]."""
    return {}

  def __call__(self, context: 'Context', state: 'State') -> 'State':
    raise NotImplementedError(f'{type(self).__name__} has no __call__(context, state).')


def flat(phases: Sequence[Phase]) -> tuple[Phase, ...]:
  """Return phases, those of every branch where models take turns."""
  if strangers := [phase for phase in phases if not isinstance(phase, Phase)]:
    raise ValueError(f'{strangers[0]!r} is no phase; a phase is a subclass of speccascade.engine.phases.Phase.')
  return tuple(part for phase in phases for part in phase.parts())


def mapped(change: Callable[[Phase], Phase], phases: Sequence[Phase]) -> tuple[Phase, ...]:
  """Return phases of which each was changed, those of every branch where models take turns."""
  return tuple(phase.mapped(change) for phase in phases)


def rounds(phases: Sequence[Phase]) -> list[tuple[Phase, ...]]:
  """Return the phases of each round that there may be: of phases that take turns those of one branch."""
  return [sum(chosen, ()) for chosen in itertools.product(*(phase.rounds() for phase in phases))]


@dataclasses.dataclass(frozen=True)
class Facts:
  """What is known of a round.

  A model that scores k of the drafted tokens knows k + 1 distributions, a drafter as many as it draws. A round emits at
  most what all models of its test know. What a model has not read of that comes on top in the next round.
  """

  phases: tuple[Phase, ...]  # all of them, flat
  in_turn: bool  # whether one of several branches runs
  policy: stopping.Policy

  @property
  def drafted(self) -> int:
    """The most tokens that a round drafts."""
    return sum(phase.draws for phase in self.phases)

  @property
  def window(self) -> int:
    """W, the most tokens ever pending."""
    return max(self.drafted, 1)

  @property
  def varies(self) -> bool:
    """Whether drafts differ in length."""
    return self.in_turn or self.policy.varies()

  @property
  def tested(self) -> set[int]:
    """The slots whose logits a test needs."""
    return {slot for phase in self.phases for slot in phase.tests}

  def feeding(self, model: int) -> list[Phase]:
    """Return the phases that feed a model."""
    return [phase for phase in self.phases if phase.feeds is not None and phase.feeds[0] == model]

  def known(self, model: int, drafted: int) -> int:
    """Return how many distributions a model knows at most after a draft."""
    fed = self.feeding(model)
    scored = [phase.feeds[1] for phase in fed if not phase.draws]
    if fed and not scored:  # a drafter
      return drafted
    most = scored[-1] if scored else 0
    return (drafted if most is None else min(most, drafted)) + 1

  def emitted(self, drafted: int) -> int:
    """Return how many tokens a round commits at most after a draft."""
    return min((self.known(m, drafted) for m in self.tested), default=1)


@struct.dataclass
class Start:
  """What the first state depends on; methods that differ in a rule alone share the program that makes it."""

  policy: stopping.Policy
  recorders: tuple[Phase, ...]  # the phases that record something
  window: int = static()  # W, the most tokens ever pending
  logits_read: tuple[int, ...] = static()  # the slots whose logits a later phase reads
  by_round: bool = static()  # whether random numbers are keyed by round as well


@struct.dataclass
class Lowered:
  """A method as the loop runs it: its phases with what follows from their round."""

  phases: tuple[Phase, ...]
  policy: stopping.Policy
  slots: tuple[int, ...] = static()
  window: int = static()  # W, the most tokens ever pending
  beyond: int = static()  # the most positions behind the last committed token that are written
  by_round: bool = static()  # whether random numbers are keyed by round as well
  branches: int = static()  # how many rounds there may be

  @property
  def parts(self) -> tuple[Phase, ...]:
    """The phases, those of every branch where models take turns."""
    return flat(self.phases)

  @property
  def logits_read(self) -> set[int]:
    """The slots whose logits a later phase reads."""
    reads = [phase.reads for phase in self.parts]
    return set(range(len(self.slots))) if None in reads else {slot for some in reads for slot in some}

  @property
  def adds_logits(self) -> set[int]:
    """The slots whose logits are added up."""
    return {slot for phase in self.parts for slot in phase.adds_logits}

  @property
  def start(self) -> Start:
    """What the first state depends on."""
    recorders = tuple(phase for phase in self.parts if phase.records(0, 0))
    return Start(self.policy, recorders, self.window, tuple(sorted(self.logits_read)), self.by_round)

  def turns(self, rows: int) -> int:
    """Return in how many rounds at least one of so many rows commits a token."""
    return rows * self.branches if self.branches > 1 else 1


def lower(method) -> Lowered:
  """Return a method, `method.Method`, as the loop runs it."""
  parts = flat(method.phases)
  branches = len(rounds(method.phases))
  facts = Facts(parts, any(phase.parts() != (phase,) for phase in method.phases), method.policy)
  phases = mapped(lambda phase: phase.lowered(facts), method.phases)
  by_round = any(phase.by_round for phase in parts)
  beyond = max(facts.window, *(phase.beyond for phase in flat(phases)))
  return Lowered(phases, method.policy, method.slots, facts.window, beyond, by_round, branches)


def cut(method: Lowered, drafters: Sequence[int]) -> tuple[Lowered, Lowered]:
  """Return what of a round runs on the devices of some slots, the drafters, and what follows on the verifier's.

  Where models take turns, each side has those of its own.

  Raises:
    ValueError: If a drafter is fed after the verifier.
  """
  slots = range(len(method.slots))
  if method.branches > 1:
    sides = drafters, [slot for slot in slots if slot not in drafters]
    return tuple(method.replace(phases=tuple(p.only(side) for p in method.phases)) for side in sides)
  fed = [phase.feeds[0] if phase.feeds is not None else None for phase in method.phases]
  at = next(i for i, slot in enumerate(fed) if slot is not None and slot not in drafters)
  if any(slot in drafters for slot in fed[at:]):
    raise ValueError('it feeds a drafter after the verifier')
  return method.replace(phases=method.phases[:at]), method.replace(phases=method.phases[at:])
