"""A round run on facts before it is run on arrays.

Each phase does to a `RowFacts`, some small integers, what its `__call__` does to arrays: `Phase.facts` yields every row
that may follow. `rounds_of` runs the phases on all rows that a method can reach, until nothing new is reached. What a
program needs (`engine.lowering`) and whether its output is exact (`engine.law`) is read off what the phases noted.
"""

from collections.abc import Iterable
import dataclasses
from typing import Any, NamedTuple

import jax

from speccascade.host.memo import memo
from speccascade.stopping import Policy

Phases = Iterable[Any]  # of `lowering.Phase`, which imports this

MOST = 1 << 16  # kinds of rows; more are a mistake
BEHIND = 8  # rounds that a model may be behind; more are any number


class RowFacts(NamedTuple):
  """A row between two phases, as far as it shapes the program; a row that has ended is none.

  Attributes:
    pending: How many drafted tokens are pending.
    unread: By slot, how many committed tokens the model has not read; negative: how many pending ones it has read.
    closed: Whether the last pending token ends the text, so that nothing follows it.
    chosen: What limits have chosen in this round: the number of the phase, and how many pending tokens it let through.
    dropped: How many drafted tokens were forgotten untested in this round.
    leaves: The slots that have scored the leaves of this round; None where it has none.
  """

  pending: int
  unread: tuple[int, ...]
  closed: bool = False
  chosen: tuple[tuple[int, int], ...] = ()
  dropped: int = 0
  leaves: tuple[int, ...] | None = None

  def next_round(self, fed: set[int | None], most: int) -> 'RowFacts':
    """Return the row before the next round; what a model that nothing feeds has not read does not count."""
    unread = tuple(min(n, most) if slot in fed else 1 for slot, n in enumerate(self.unread))
    return RowFacts(self.pending, unread, self.closed)

  def reads(self, model: int, unread: int) -> 'RowFacts':
    """Return the row after a model has read on, so that so many tokens are unread."""
    return self._replace(unread=self.unread[:model] + (unread,) + self.unread[model + 1 :])

  def chooses(self, limit: int, count: int) -> 'RowFacts':
    """Return the row after the limit of a phase, by its number, has let so many pending tokens through."""
    return self._replace(chosen=(*self.chosen, (limit, count)))

  def scores_leaves(self, model: int) -> 'RowFacts':
    """Return the row after a model has scored its leaves."""
    return self._replace(leaves=tuple(sorted({*self.leaves, model})))

  def drafts(self, count: int, closed: bool = False) -> 'RowFacts':
    """Return the row with more tokens pending."""
    return self._replace(pending=self.pending + count, closed=self.closed or closed)

  def forgets(self, pending: int) -> 'RowFacts':
    """Return the row with the first pending tokens alone."""
    dropped = self.pending - pending
    return self._replace(pending=pending, closed=self.closed and not dropped, dropped=self.dropped + dropped)

  def commits(self, accepted: int, more: int, keep: bool = False) -> 'RowFacts':
    """Return the row after `accepted` pending tokens and `more` were committed; the rest is dropped or kept pending."""
    emitted = accepted + more
    if keep and not more:
      unread = tuple(n + accepted for n in self.unread)
      return RowFacts(self.pending - accepted, unread, self.closed)
    # A model has read no token that was dropped, nor the last that was committed.
    return RowFacts(0, tuple(max(n + emitted, more, 1) for n in self.unread))

  def commits_leaf(self, accepted: int, readers: Iterable[int]) -> 'RowFacts':
    """Return the row after `accepted` tokens, a leaf that some models then read, and a token more were committed."""
    row = self.commits(accepted, 2)
    for model in readers:
      row = row.reads(model, 1)
    return row


class Untested(NamedTuple):
  """A drafted token that a limit left untested, behind tokens that were all accepted."""

  limit: int  # the number of the phase
  ahead: int  # how many tokens more were tested than the limit had let through
  replaced: bool  # whether a token of the target stands at its position; else one is drafted there again


@dataclasses.dataclass
class Notes:
  """What is noted of a phase, over all rows that reach it.

  Attributes:
    number: The phase's number among all.
    drafts_vary: Whether the policy makes drafts of several lengths.
    reached: Whether any row reaches it.
    goes_on: Whether it drafts where its model has read all tokens before it, so that other rows sit out.
    needs: How many tokens its model has to read at once.
    usual: The same without rows whose draft ended early because the text did.
    slots: The first slots of the window whose logits its model does not know.
    waits: Whether other rows may wait meanwhile.
    beside: Whether the windows of some that wait are still needed.
    behind: Whether in some row tokens are pending before it, or its model has read all.
    drafted: The most tokens that it made pending.
    leaves: Whether its model scores leaves.
    untested: As of the class.
  """

  number: int
  drafts_vary: bool
  goes_on: bool = False
  reached: bool = False
  needs: set[int] = dataclasses.field(default_factory=set)
  usual: set[int] = dataclasses.field(default_factory=set)
  slots: set[int] = dataclasses.field(default_factory=set)
  waits: bool = False
  beside: bool = False
  behind: bool = False
  drafted: int = 0
  leaves: bool = False
  untested: set[Untested] = dataclasses.field(default_factory=set)

  @property
  def need(self) -> int:
    """The most tokens that its model has to read at once."""
    return max(self.needs, default=0)

  @property
  def aligned(self) -> bool:
    """Whether in every row the logits of what it reads begin at the start of a window that nothing else needs."""
    return self.slots <= {0} and not self.beside

  @property
  def varies(self) -> bool:
    """Whether some rows need nothing, or less than half of what others do."""
    return self.waits or bool(self.usual) and 2 * min(self.usual) < self.need

  def feeds(self, row: RowFacts, model: int, pending: int):
    """Note that a model reads what is committed and so many pending tokens."""
    self.slots.add(1 - row.unread[model])
    if need := max(row.unread[model] + pending, 0):
      self.needs.add(need)
      if not row.closed:
        self.usual.add(need)


@dataclasses.dataclass(frozen=True)
class RoundFacts:
  """What was noted of all rounds: of each phase in order, and of all."""

  notes: tuple[Notes, ...]
  window: int  # the most tokens ever pending


class Run:
  """A run of phases on rows."""

  def __init__(self, phases: Phases, varies: bool, goes_on: frozenset[int]):
    count = sum(len(phase.parts()) for phase in phases)
    self.notes = tuple(Notes(i, varies, i in goes_on) for i in range(count))
    self.window = 1

  def through(self, phases: Phases, rows: set[RowFacts], first: int = 0) -> tuple[set[RowFacts], int]:
    """Return the rows after phases of which the first has a number, and the number of the phase behind them."""
    for phase in phases:
      rows, first = phase.run(self, rows, first)
      self.window = max([self.window, *(row.pending for row in rows)])
      if len(rows) > MOST:
        raise ValueError(f'{phase} leaves too many kinds of rows; draft fewer tokens in a round.')
    return rows, first


def rounds_of(phases: Phases, policy: Policy, slots: int) -> RoundFacts:
  """Return what is noted of all rounds of phases over so many slots."""
  known = memo('rounds', jax.tree.structure((phases, policy)), slots)  # numbers that are traced change no fact
  if not known:
    known['rounds'] = _rounds(phases, policy.varies(), slots)
  return known['rounds']


def _rounds(phases: Phases, varies: bool, slots: int) -> RoundFacts:
  parts = [part for phase in phases for part in phase.parts()]
  fed = {part.feeds for part in parts}
  most = BEHIND * (1 + sum(part.draws for part in parts))
  goes_on: frozenset[int] = frozenset()
  while True:
    run = Run(phases, varies, goes_on)
    reached: set[RowFacts] = set()
    new = {RowFacts(0, (1,) * slots)}
    while new:
      reached |= new
      rows, _ = run.through(phases, new)
      if run.window > most:
        raise ValueError(f'{parts[-1]} leaves any number of drafted tokens pending; test them all, or forget the rest.')
      new = {row.next_round(fed, most) for row in rows} - reached
    found = frozenset(note.number for note in run.notes if note.goes_on or note.behind or note.beside)
    if found == goes_on:
      if late := [part for part, note in zip(parts, run.notes, strict=True) if note.need >= most]:
        raise ValueError(f'{late[0]} may have any number of tokens to read, since some rounds leave its model out.')
      return RoundFacts(run.notes, run.window)
    goes_on = found
