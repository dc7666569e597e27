"""How many pending tokens a `Score` feeds its model.

Axis letters: B batch.
"""

from collections.abc import Sequence

from flax import struct
import jax.numpy as jnp

from speccascade.engine.state import Context, State
from speccascade.sampling import Sampler
from speccascade.types import Array, Network, static


class Limit:
  """How many pending tokens [B] a `Score` feeds, (context, state) -> [B]. The base of every limit.

  Attributes:
    reads: The slots whose logits it looks at; None for any.
    most: The most tokens that it lets through; None for all.
    varies: Whether it may let fewer through than there are, up to `most`.
    fine: Whether it goes by what each number of tokens costs, so that a program has many widths.
    compares: Whether how much of one row's draft is tested depends on another row's draft, which later rounds draw by
      the same numbers unless these are keyed by round.
  """

  reads: tuple[int, ...] | None = None
  most: int | None = None
  varies: bool = True
  fine: bool = False
  compares: bool = False

  def of(self, networks: Sequence[Network]) -> 'Limit':
    """Return it with what it takes from the networks of the slots."""
    return self

  def keeps_distribution(self, by_round: bool) -> bool | None:
    """Tell whether the output follows the target however it chooses; None: that is not known."""
    return None

  def check_sampler(self, sampler: Sampler) -> None:
    """Refuse a sampler that it cannot go with."""

  def __call__(self, context: Context, state: State) -> Array:
    raise NotImplementedError(f'{type(self).__name__} has no __call__(context, state).')


@struct.dataclass
class First(Limit):
  """Score the first n pending tokens, and so the distributions of n + 1 positions."""

  n: int = static()

  reads = ()
  varies = False

  def __str__(self):
    return f'first {self.n}'

  @property
  def most(self) -> int:
    return self.n

  def keeps_distribution(self, by_round: bool) -> bool:
    return True

  def __call__(self, context: Context, state: State) -> Array:
    return jnp.minimum(state.window.size, self.n)
