"""How long a collective between the chips of a slice takes, by a model of their links (ICI).

Chips lie in a grid of two or three axes. A collective is launched, crosses the hops of its group's grid, and moves its
bytes over all links of a chip at once. Long enough axes are closed to rings, which halves the hops and doubles the
links. This is a model: nothing else uses the links, and a group is a rectangle of neighbours.
"""

import dataclasses

LAUNCH = 1e-6  # seconds before a collective begins


@dataclasses.dataclass(frozen=True)
class Links:
  """The links of a kind of chip.

  Attributes:
    bandwidth: Bytes a second of a link in one direction.
    axes: The axes of the grid.
    ring: An axis of so many chips is closed.
    hop: Seconds from a chip to the next.
  """

  bandwidth: float
  axes: int
  ring: int
  hop: float = 1e-6

  def grid(self, chips: int) -> list[int]:
    """Return the rectangle of a group: its chips along each axis, as even as possible."""
    sides = [1] * self.axes
    for factor in reversed(prime_factors(chips)):
      sides[sides.index(min(sides))] *= factor
    return [n for n in sides if n > 1]

  def seconds(self, operation: str, size: float, chips: int) -> float:
    """Return how long a collective takes.

    Args:
      operation: Its name in HLO, as 'all-reduce'.
      size: The bytes of the array that is gathered, or reduced, whole.
      chips: How many take part.
    """
    if chips < 2:
      return 0.0
    grid = self.grid(chips)
    rings = [n >= self.ring for n in grid]
    hops = sum(n // 2 if ring else n - 1 for n, ring in zip(grid, rings, strict=True))
    moved = size * (chips - 1) / chips / (self.bandwidth * sum(1 + ring for ring in rings))
    if operation.startswith('collective'):  # from one chip to another
      return LAUNCH + self.hop + size / self.bandwidth
    passes = 2 if operation == 'all-reduce' else 1  # which scatters sums and gathers them
    return LAUNCH + passes * (hops * self.hop + moved)


def prime_factors(n: int) -> list[int]:
  """Return the prime factors of n, ascending."""
  found = []
  while n > 1:
    found.append(next(k for k in range(2, n + 1) if n % k == 0))
    n //= found[-1]
  return found


V5E = Links(50e9, 2, 16)
