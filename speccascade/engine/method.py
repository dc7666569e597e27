"""What a method is: its phases, the models that they run, and what the engine asks of it."""

from collections.abc import Callable
from typing import Any

from flax import struct

from speccascade import stopping
from speccascade.engine import profiles
from speccascade.engine.phases import BySize, Elect, Propose, Score
from speccascade.types import Phase


@struct.dataclass
class Method:
  """Phases over `slots`; slot s runs the model number `slots[s]`, each slot with a cache of its own.

  `kind` is the function that made it, but that `speculative` with a rule that reads both models makes a 'cascade'.
  """

  phases: tuple[Phase, ...]
  slots: tuple[int, ...] = struct.field(pytree_node=False)
  window: int = struct.field(pytree_node=False)  # W, the most tokens ever pending
  policy: stopping.Policy = stopping.Policy()
  by_round: bool = struct.field(pytree_node=False, default=False)  # whether random numbers are keyed by round as well
  kind: str = struct.field(pytree_node=False, default='method')
  rule: str | None = struct.field(pytree_node=False, default=None)  # its name, for the name of the method
  beside: bool = struct.field(pytree_node=False, default=False)  # whether more models may be given than it decodes with
  origin: profiles.Origin | None = struct.field(pytree_node=False, default=None)  # of the profile that it decodes by
  idle: tuple[int, ...] = struct.field(pytree_node=False, default=())  # slots that need not read the prompt

  def __str__(self):
    until = '' if type(self.policy) is stopping.Policy else f' (drafts end by {type(self.policy).__name__})'
    return ' · '.join(map(str, self.phases)) + until

  @property
  def name(self) -> str:
    """What the method is called where its settings do not matter."""
    kind = 'speculative' if self.kind == 'cascade' else self.kind
    return kind if self.rule is None else f'{kind}[{self.rule}]'

  @property
  def models(self) -> int:
    """The number of models that the method decodes with."""
    return max(self.slots) + 1

  def turns(self, rows: int) -> int:
    """Return in how many rounds one of so many rows commits a token at least."""
    return rows * max((len(p.branches) for p in self.phases if isinstance(p, Elect)), default=0) or 1

  def at(self, rows: int) -> 'Method':
    """Return the method as a batch of so many rows runs it."""
    first = self.phases[0]
    return self.replace(**reach(first.at(rows))) if isinstance(first, BySize) else self


def reach(phases: tuple[Phase, ...]) -> dict[str, Any]:
  """Return phases over three slots, the window that they fill, and the slots that they leave idle."""
  fed = {p.model for p in phases if isinstance(p, Score | Propose)}
  window = max((p.n for p in phases if isinstance(p, Propose)), default=1)
  return dict(phases=phases, window=window, idle=tuple(s for s in range(3) if s not in fed))


@struct.dataclass
class SequenceCascade:
  """Model 0 writes the whole answer; model 1 writes it anew where the answer's score is under the threshold."""

  score: Callable = struct.field(pytree_node=False)
  threshold: float = struct.field(pytree_node=False)

  models = 2
  beside = False
  name = kind = 'sequence_cascade'
