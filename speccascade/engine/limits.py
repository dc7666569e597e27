"""How many pending tokens a `Score` feeds its model.

Axis letters: B batch.
"""

from collections.abc import Sequence

from flax import struct
import jax.numpy as jnp

from speccascade import stopping
from speccascade.engine.state import Context, State
from speccascade.types import Array, static, Told


class Limit:
  """How many pending tokens [B] a `Score` feeds, (context, state) -> [B]. The base of every limit.

  Attributes:
    reads: The slots whose logits it looks at; None for any.
    most: The most tokens that it lets through; None for all.
    varies: Whether it may let fewer through than there are, up to `most`.
    fine: Whether it goes by what each number of tokens costs, so that a program has many widths.
    told: What it was told of drafted tokens when it chose; None: that is not known.
    policy: The policy whose carry it reads, None where it reads none.
    coupled: Whether it reads the noise of `Sampler(coupling='gumbel')`.
  """

  reads: tuple[int, ...] | None = None
  most: int | None = None
  varies: bool = True
  fine: bool = False
  told: Told | None = None
  policy: stopping.Policy | None = None
  coupled: bool = False

  def counts(self, pending: int) -> Sequence[int]:
    """Return what it may choose of so many pending tokens; -1: not even the last committed token is read."""
    most = pending if self.most is None else min(pending, self.most)
    return range(-1, most + 1) if self.varies else (most,)

  def __call__(self, context: Context, state: State) -> Array:
    raise NotImplementedError(f'{type(self).__name__} has no __call__(context, state).')

  def size(self, context: Context, state: State) -> Array:
    """Return how many are fed, no more than are pending."""
    return jnp.clip(self(context, state), -1, state.window.size)


@struct.dataclass
class Every(Limit):
  """Score every pending token."""

  reads = ()
  told = Told.NOTHING
  varies = False

  def __str__(self):
    return 'every token'

  def size(self, context: Context, state: State) -> Array:
    return state.window.size


@struct.dataclass
class First(Limit):
  """Score the first n pending tokens, and so the distributions of n + 1 positions."""

  n: int = static()

  reads = ()
  told = Told.NOTHING
  varies = False

  def __str__(self):
    return f'first {self.n}'

  @property
  def most(self) -> int:
    return self.n

  def __call__(self, context: Context, state: State) -> Array:
    return jnp.minimum(state.window.size, self.n)
