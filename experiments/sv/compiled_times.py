"""What a forward pass takes on a chip that need not be there, for any number of rows and tokens.

A pass is compiled ahead of time and simulated (`planning.rounds`), and its cycles are split in two: attention's
kernels, which read the caches, cost as much as there are rows, all else as much as there are tokens. Networks of one
and of three layers are compiled; another layer costs half of their difference, so that neither compilation nor memory
limits the size. It is a model: trust ratios that the roofline of the same pass confirms.
"""

from collections.abc import Callable, Sequence
import dataclasses

import numpy as np

from speccascade import backends, methods, Sampler
from speccascade.planning import aot, hlo, rounds, timing
from speccascade.planning.synthetic import tree_bytes, weight_bytes
from speccascade.types import Network

GRID = ((8, 1), (32, 1), (64, 1), (128, 1), (256, 1), (256, 2), (256, 4))  # (rows, tokens of each) to compile


@dataclasses.dataclass(frozen=True)
class PassTimes:
  """Seconds of a forward pass: `dense` of so many `tokens`, ascending, and `cache` of each row."""

  tokens: Sequence[int]
  dense: Sequence[float]
  cache: float

  def seconds(self, rows: int, width: float) -> float:
    """Return the seconds of a pass of `width` tokens a row, on the line between compiled totals and beyond the last."""
    total = rows * width
    last = (self.dense[-1] - self.dense[-2]) / (self.tokens[-1] - self.tokens[-2])
    beyond = max(0, total - self.tokens[-1]) * last
    return float(np.interp(total, self.tokens, self.dense)) + beyond + rows * self.cache


def compiled(
  make: Callable[[int], Network],
  layers: int,
  topology: str,
  grid: Sequence[tuple[int, int]] = GRID,
  source: int = 128,
  tokens: int = 128,
) -> PassTimes:
  """Return the times of a network by simulated passes.

  Args:
    make: Returns the network with so many layers.
    layers: Of the network.
    topology: The chip, as in 'v5e:2x2'; one of them is used.
    grid: (rows, tokens of each) of the passes to compile.
    source: The length of prompts.
    tokens: The most new tokens.
  """
  clock = aot.chip_of(topology).clock
  points = {}
  for rows, width in grid:
    one, three = (_cycles(make(n), topology, aot.Sizes(rows, source, tokens), width) for n in (1, 3))
    dense, cache = (one[i] + (layers - 1) * (three[i] - one[i]) / 2 for i in (0, 1))
    points[rows * width] = dense / clock, cache / clock / rows
  dense, cache = zip(*points.values(), strict=True)
  dense = np.minimum.accumulate(dense[::-1])[::-1]  # fewer tokens cost no more: they may be padded
  return PassTimes(tuple(points), tuple(dense.tolist()), float(np.mean(cache)))


def _cycles(network: Network, topology: str, sizes: aot.Sizes, width: int) -> tuple[float, float]:
  """Return the simulated cycles of a pass, without attention's kernels and of these alone."""
  chip = aot.chip_of(topology)
  backend = backends.named('tpu')
  placement = aot.Placement(aot.describe(topology).devices, {})
  _, args = aot.program(methods.autoregressive(0), [aot.shaped(network)], sizes, Sampler(0.0), placement, backend)
  program, _, params, state, *_ = args
  loop = timing.passes_loop([network], program.backend, (width,), sizes.batch, sizes.source, program.buffer, (1,))
  found = aot.compile_for('tpu', loop, (params, state.caches, np.int32(2)), dict(backend.xla))
  parts = dict(rounds.simulate(hlo.Module(found.as_text()), chip.bandwidth / chip.clock, 1).parts)
  cache = parts.pop(rounds.KERNELS, 0.0)
  return sum(parts.values()), cache


def roofline(network: Network, topology: str, source: int = 128, tokens: int = 128) -> PassTimes:
  """Return the least times: of reading the weights or of multiplying by them, and of reading the used caches."""
  chip = aot.chip_of(topology)
  model = aot.shaped(network)
  params, caches = network.reads(model.params, aot.caches(model, aot.Sizes(1, source, tokens), tokens // 2 + source))
  weights, caches = weight_bytes(params), tree_bytes(caches)
  knee = weights / chip.bandwidth
  totals = (1, max(2, round(knee * chip.flops / weights)), 1 << 14)
  dense = tuple(max(knee, weights * n / chip.flops) for n in totals)  # two bytes and two operations a weight
  return PassTimes(totals, dense, caches / chip.bandwidth)
