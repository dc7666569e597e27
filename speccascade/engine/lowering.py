"""What a phase states of itself, and what follows for a round that is made of phases.

A method declares phases. `lower` derives what they must provide, in one place and once a program: how many tokens can
be pending, how wide each call is, what a drafter has to catch up with, whose logits are stored.
"""

from collections.abc import Callable, Iterable, Sequence
import itertools
from typing import TYPE_CHECKING

from flax import struct

from speccascade import stopping
from speccascade.engine import law
from speccascade.engine.facts import Notes, rounds_of, RowFacts, Run
from speccascade.types import Network, static, Told

if TYPE_CHECKING:
  from speccascade.engine.state import Context, Record, State


class Phase:
  """A step of a round, (context, state) -> state. The base of every phase, which is a `flax.struct.dataclass`.

  Attributes:
    draws: How many tokens it may add to the window.
    feeds: The slot of the model that it feeds, None where it feeds none.
    calls: How often it calls that model in a round.
    beyond: How many positions behind the last committed token it may write.
    reads: The slots whose logits it looks at; None for any.
    tests: The slots whose logits must be known for the tokens that it commits.
    adds_logits: The slots whose logits it adds up, so that a token that a model lacks needs one.
    told: What it was told of drafted tokens when it decided about them; None: that is not known.
    follows: Whether what it commits follows its target, if it was told no more than the law allows; None: not known.
    redraws: Whether a token that was dropped may be drawn again from another distribution.
    coupled: Whether it reads the noise of `Sampler(coupling='gumbel')`.
    leaves: How many choices it keeps at each place of its draft, the drafted token among them; () where that alone.
  """

  draws: int = 0
  feeds: int | None = None
  calls: int = 0
  beyond: int = 0
  reads: tuple[int, ...] | None = None
  tests: tuple[int, ...] = ()
  adds_logits: tuple[int, ...] = ()
  told: Told | None = None
  follows: bool | None = True
  redraws: bool = False
  coupled: bool = False
  leaves: tuple[int, ...] = ()

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

  def for_networks(self, networks: Sequence[Network]) -> 'Phase':
    """Return it with what it takes from the networks of the slots."""
    return self

  def facts(self, row: RowFacts, notes: Notes) -> Iterable[RowFacts]:
    """Yield every row that may follow a row, as `__call__` changes it, and note what that needs."""
    yield row.drafts(self.draws)

  def run(self, run: Run, rows: set[RowFacts], number: int) -> tuple[set[RowFacts], int]:
    """Return the rows after it, which has a number among all phases, and the number of the phase behind it."""
    run.notes[number].reached |= bool(rows)
    return {after for row in rows for after in self.facts(row, run.notes[number])}, number + 1

  def lowered(self, notes: Notes) -> 'Phase':
    """Return it with what follows from the rounds that it is a part of.

    Raises:
      ValueError: If it cannot do its work in a row that reaches it.
    """
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


@struct.dataclass
class Start:
  """What the first state depends on; methods that differ in a rule alone share the program that makes it."""

  policy: stopping.Policy
  recorders: tuple[Phase, ...]  # the phases that record something
  window: int = static()  # W, the most tokens ever pending
  logits_read: tuple[int, ...] = static()  # the slots whose logits are read later
  by_round: bool = static()  # whether random numbers are keyed by round as well
  leaves: tuple[int, ...] = static()  # as of the phase that drafts
  leaves_scored: tuple[int, ...] = static()  # the slots whose logits after leaves are read


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
  leaves: tuple[int, ...] = static()  # as of the phase that drafts
  leaves_scored: tuple[int, ...] = static()  # the slots whose logits after leaves are read

  @property
  def parts(self) -> tuple[Phase, ...]:
    """The phases, those of every branch where models take turns."""
    return flat(self.phases)

  @property
  def logits_read(self) -> set[int]:
    """The slots whose logits a later phase or the policy reads."""
    reads = [self.policy.reads, *(phase.reads for phase in self.parts)]
    return set(range(len(self.slots))) if None in reads else {slot for some in reads for slot in some}

  @property
  def adds_logits(self) -> set[int]:
    """The slots whose logits are added up."""
    return {slot for phase in self.parts for slot in phase.adds_logits}

  @property
  def start(self) -> Start:
    """What the first state depends on."""
    recorders = tuple(phase for phase in self.parts if phase.records(0, 0))
    read = tuple(sorted(self.logits_read))
    return Start(self.policy, recorders, self.window, read, self.by_round, self.leaves, self.leaves_scored)

  def turns(self, rows: int) -> int:
    """Return in how many rounds at least one of so many rows commits a token."""
    return rows * self.branches if self.branches > 1 else 1


def lower(method) -> Lowered:
  """Return a method, `method.Method`, as the loop runs it."""
  found = rounds_of(method.phases, method.policy, len(method.slots))
  notes = iter(found.notes)
  phases = mapped(lambda phase: phase.lowered(next(notes)), method.phases)
  parts = flat(phases)
  beyond = max(found.window, *(phase.beyond for phase in parts))
  branches = len(rounds(method.phases))
  leaves = _leaves(parts, branches)
  tested = {slot for phase in parts for slot in phase.tests}
  scored = {phase.feeds for phase, notes in zip(parts, found.notes, strict=True) if notes.leaves} & tested
  if leaves and not scored:
    raise ValueError(f'{parts[0]} has leaves that no model of a test scores: put Score between it and Verify.')
  beyond += sum(n - 1 for n in leaves)
  by_round = law.by_round(method)
  return Lowered(
    phases, method.policy, method.slots, found.window, beyond, by_round, branches, leaves, tuple(sorted(scored))
  )


def _leaves(parts: Sequence[Phase], branches: int) -> tuple[int, ...]:
  """Return the leaves of the phases of a round, which is to have one draft and one test."""
  found = [phase for phase in parts if phase.leaves]
  if not found:
    return ()
  drafts, tests = ([p for p in parts if some(p)] for some in (lambda p: p.draws, lambda p: p.tests))
  if branches > 1 or len(drafts) > 1 or len(tests) > 1:
    raise ValueError(f'{found[0]} has leaves, which are of rounds with one draft and one test: leave them out.')
  return found[0].leaves


def cut(method: Lowered, drafters: Sequence[int]) -> tuple[Lowered, Lowered]:
  """Return what of a round runs on the devices of some slots, the drafters, and what follows on the verifier's.

  Where models take turns, each side has those of its own.

  Raises:
    ValueError: If a drafter is fed after the verifier.
  """
  slots = range(len(method.slots))
  if method.leaves:
    raise ValueError('it has leaves')
  if method.branches > 1:
    sides = drafters, [slot for slot in slots if slot not in drafters]
    return tuple(method.replace(phases=tuple(p.only(side) for p in method.phases)) for side in sides)
  fed = [phase.feeds for phase in method.phases]
  at = next(i for i, slot in enumerate(fed) if slot is not None and slot not in drafters)
  if any(slot in drafters for slot in fed[at:]):
    raise ValueError('it feeds a drafter after the verifier')
  return method.replace(phases=method.phases[:at]), method.replace(phases=method.phases[at:])
