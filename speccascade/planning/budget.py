"""The time that a plan may take: an even share of what is left for each of its phases, and what was left out for it."""

from collections.abc import Callable
import time

from speccascade.host import multihost
from speccascade.host.progress import Progress


class TimeBudget:
  """Seconds for a number of phases, None without a limit; `left_out` has what they did not suffice for, in words."""

  def __init__(
    self,
    seconds: float | None,
    phases: int,
    steps: int,
    *,
    shown: bool = False,
    clock: Callable[[], float] = time.monotonic,
  ):
    self.seconds = seconds
    self.left_out: list[str] = []
    self.bar = Progress('plan', steps, unit='steps', shown=shown, budget=seconds)
    self._clock = clock
    self._phases = phases
    self._start = self._from = self._until = clock()

  def begin(self):
    """Begin the next phase."""
    self._from = self._clock()
    if self.seconds is not None:
      self._until = self._from + max(self._start + self.seconds - self._from, 0.0) / self._phases
    self._phases -= 1

  def allows(self, share: float = 1.0) -> bool:
    """Tell whether less than a share of the phase's time is gone, for all processes alike."""
    if self.seconds is None:
      return True
    gone = self._clock() - self._from
    return multihost.broadcast(gone < share * (self._until - self._from))

  def leave_out(self, steps: int, text: str):
    """Note what is left out, and that it is so many steps less."""
    self.bar.expect(-steps)
    self.left_out += [text] if text not in self.left_out else []
