"""Simulate rounds of drafters and a verifier on chips of their own, whose halves of a batch take turns.

  python -m experiments.overlap.overlap PAIR OUT.csv [--batches 8 32 …] [--scan]

PAIR is t5 (small → XXL, speculative decoding) or llama (68M and a companion of 160M → 13B). All
programs are compiled for v5e and simulated (`planning.rounds`): one mesh of eight chips as 1×8 and as 2×4, one of four
as 1×4, and drafters on four chips as 4×1 beside the verifier on four as 1×4. A killed run goes on with its next batch.
It needs the extra `tpu`, and with `--scan`, one layer for all, about a minute a program; without it several.
"""

import argparse
import dataclasses
from pathlib import Path
import sys

import jax
from jax.sharding import PartitionSpec
import numpy as np

from experiments.helpers import rows
from speccascade import backends, methods, rules, Sampler
from speccascade.backends import sharding
from speccascade.engine import loop, overlap, requests
from speccascade.engine.limits import First
from speccascade.engine.lowering import cut, lower
from speccascade.engine.method import Method
from speccascade.engine.phases import Propose, Score, Verify
from speccascade.host.errors import out_of_memory
from speccascade.models import shapes
from speccascade.planning import aot, hlo, rounds

TOPOLOGY, HALF = 'v5e:2x4', 'v5e:2x2'
SOURCE, TOKENS, BLOCK = 128, 128, 5
# With a companion all of a draft is verified: the simulation would run each width that a schedule may choose.
ALL = (Propose(0, BLOCK), Score(1, First(BLOCK - 1)), Score(2), Verify(rules.bind(rules.own), (2,)))
PAIRS = {
  't5': ([(shapes.t5, n) for n in ('small', 'xxl')], methods.speculative(block=BLOCK)),
  'llama': ([(shapes.llama, n) for n in ('68m', '160m', '13b')], Method(ALL, (0, 1, 2))),
}
MESHES = {'1x4': (HALF, {'model': 4}), '1x8': (TOPOLOGY, {'model': 8}), '2x4': (TOPOLOGY, {'data': 2, 'model': 4})}
COLUMNS = [*MESHES, 'drafters', 'verifier', 'crossing']


def milliseconds(compiled, method, halves: bool) -> float:
  """Return the simulated time of a round, or of a program that is a part of one."""
  chip = aot.chip_of(TOPOLOGY)
  module = hlo.Module(compiled.as_text())
  found = rounds.simulate(
    module, chip.bandwidth / chip.clock, method.draft_turns, computation=module.entry if halves else module.body
  )
  return 1e3 * found.cycles / chip.clock


def one_mesh(networks, method, batch: int, topology: str, mesh) -> float:
  """Return the milliseconds of a round on one mesh, NaN where it does not fit."""
  placement = aot.Placement(aot.describe(topology).devices, mesh)
  try:
    found = aot.compiled(
      method, [*map(aot.shaped, networks)], aot.Sizes(batch, SOURCE, TOKENS), Sampler(1.0), placement, 'tpu'
    )
  except jax.errors.JaxRuntimeError as error:
    if not out_of_memory(error):
      raise
    return float('nan')
  return milliseconds(found, method, halves=False)


def two_meshes(networks, method, batch: int) -> tuple[float, float, int]:
  """Return the milliseconds of the drafters and of the verifier for half a batch, and the bytes that cross."""
  half = batch // overlap.HALVES
  times, crossing, size = [], None, 0
  for side, mesh in enumerate(({'data': 4}, {'model': 4})):
    made = Program(networks, method, half, mesh, side)
    run, args = made.turn(crossing)
    _, sent, _ = jax.eval_shape(lambda *x, fixed=args[:3]: overlap._turn(*fixed, *x), *args[3:])
    size += sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(sent))
    crossing = sent
    found = aot.compile_for('tpu', run, args, dict(made.fixed.backend.xla))
    times.append(milliseconds(found, method, halves=True))
  return *times, size


class Program:
  """The program of one of two meshes, as shapes."""

  def __init__(self, networks, method, rows: int, mesh, side: int):
    lowered = lower(method.for_networks(networks))
    last = len(networks) - 1
    held = (last,) if side else tuple(range(last))
    halves = cut(lowered, range(last))
    self.method = halves[side]
    self.ends = side == 1
    self.sends = overlap.NOTHING
    if not self.ends:
      self.sends = overlap.Sends(tuple(slot for slot in held if slot in halves[1].logits_read), probs=True)
    self.rows = rows
    self.placement = aot.Placement(aot.describe(HALF).devices, mesh)
    specs = [sharding.specs(n, self.placement.mesh) if m in held else None for m, n in enumerate(networks)]
    vocab = min(n.vocab_size for n in networks)
    layout = sharding.planned(networks, self.placement.mesh, specs)
    backend = backends.named('tpu').on_mesh(layout)
    buffer = loop.positions(networks[-1], SOURCE, TOKENS, lowered.beyond)
    slots = tuple(range(len(networks)))
    self.fixed = loop.Program(tuple(networks), slots, buffer, vocab, backend, held=held, drafts=not side)

    def parameters(m):
      return jax.eval_shape(backend.prepare, networks[m].param_shapes()) if m in held else None

    shapes_of = tuple(map(parameters, slots))
    self.params = tuple(x and self.placement.put(x, s) for x, s in zip(shapes_of, specs, strict=True))
    zero = np.uint32(0)
    row = requests.RequestRow(np.zeros(SOURCE, np.int32), 0, 0, 0, TOKENS, 0, zero, zero, Sampler(1.0), (), (), (), 0)
    arrays = requests.arrays([row] * rows, requests.features([row]), rows, SOURCE, vocab)
    state = jax.eval_shape(lambda p: loop.blank(self.fixed, lowered.start, p, arrays), shapes_of)
    kept, self.first = jax.eval_shape(lambda s: overlap.parted(self.fixed, s, s.length), state)
    where = self.fixed.specs(state)
    self.kept = self.placement.put(
      kept, overlap.Kept(where.caches, where.window.logits, where.window.probs, where.limits)
    )

  def turn(self, crossing):
    """Return the program and the shapes that it is compiled for, with what crossed from the other mesh."""
    crossing = self.first if crossing is None else crossing
    by_row = PartitionSpec(sharding.DATA)
    specs = jax.tree.map(lambda x: PartitionSpec() if x.ndim == 2 else by_row, crossing)
    lacks = (None,) * len(self.fixed.networks)
    given = self.placement.put(crossing, specs), self.placement.put(np.zeros(self.rows, bool)), lacks, None
    run = overlap.compiled_with(())
    return run, (
      self.fixed,
      self.ends,
      self.sends,
      self.placement.put(self.method),
      self.params,
      self.kept,
      *given,
    )


def main():
  """Append a line for each batch that the file does not have."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('pair', choices=PAIRS)
  parser.add_argument('out', type=Path)
  parser.add_argument('--batches', type=int, nargs='+', default=(8, 32, 64, 128, 256))
  parser.add_argument('--scan', action='store_true', help='compile one layer for all, which makes slower rounds')
  args = parser.parse_args()
  jax.config.update('jax_platforms', 'cpu')  # whatever is here, it is not what is compiled for
  sizes, method = PAIRS[args.pair]
  networks = [dataclasses.replace(make(size), scan=args.scan) for make, size in sizes]
  for batch in args.batches:
    key = dict(pair=args.pair, batch=batch)
    if rows.has(args.out, key):
      continue
    found = [one_mesh(networks, method, batch, *where) for where in MESHES.values()]
    found += two_meshes(networks, method, batch)
    values = [*(f'{x:.2f}' for x in found[:-1]), found[-1]]
    rows.append(args.out, key | dict(zip(COLUMNS, values, strict=True)))


if __name__ == '__main__':
  sys.exit(main())
