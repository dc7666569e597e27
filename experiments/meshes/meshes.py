"""Compile rounds for the chips of meshes that one does not have, and simulate them with their collectives.

  python -m experiments.meshes.meshes OUT.csv [--only TEXT] [--layers unrolled|scanned]

Each line is one program: a pair on a mesh, a batch and a method. It has what a chip holds, its collectives, and how
long a round takes (`planning.rounds`, `backends.links`). A killed run goes on with its next program. It needs the extra
`tpu`, and a minute or several a program, less with scanned layers, which are one layer for all.
"""

import argparse
from pathlib import Path
import sys
from typing import NamedTuple

import jax

from experiments.helpers import rows
from speccascade import methods, rules, Sampler
from speccascade.engine.method import Method
from speccascade.host.errors import out_of_memory
from speccascade.planning import aot, program_report

SIZES = dict(source=256, tokens=128)
BLOCK = 5
METHODS = {
  'autoregressive': methods.autoregressive(1),
  'speculative': methods.speculative(block=BLOCK),
  'opt': methods.speculative(rules.bind(rules.find('opt'), alpha=0.1), block=BLOCK),
}
LAYERS = ('unrolled', 'scanned')


class Program(NamedTuple):
  """What is compiled."""

  pair: str
  topology: str
  mesh: str  # data x model, or data x model x expert
  batch: int
  method: str
  layers: str

  @property
  def shape(self) -> dict[str, int]:
    """The chips along each axis."""
    return dict(zip(('data', 'model', 'expert'), map(int, self.mesh.split('x'))))


MESHES = [
  ('t5_small_xxl', 'v5e:2x2', '1x4', (1, 8, 64)),
  ('t5_small_xxl', 'v5e:2x4', '1x8', (8, 64, 256)),
  ('t5_small_xxl', 'v5e:2x4', '2x4', (64,)),
  ('llama_7b_70b', 'v5e:4x8', '1x32', (8, 32)),
  ('llama_7b_70b', 'v5e:4x8', '2x16', (8,)),
  ('llama_7b_70b', 'v5p:2x2x2', '1x8', (8,)),
  ('gemma2_2b_27b', 'v6e:2x4', '1x8', (8, 64)),
  ('gemma2_2b_27b', 'v6e:2x4', '2x4', (64,)),
  ('mistral_7b_8x7b', 'v5e:4x4', '1x16', (8,)),
]
FIGURES = ['weights', 'caches', 'used', 'rows', 'all_reduces', 'other', 'moved', 'traffic', 'collectives', 'round']
GIB, MIB = 2**30, 2**20


def programs(only: str, layers: str | None) -> list[Program]:
  """Return what is compiled; other methods than speculative decoding for one batch of a mesh alone."""
  found = []
  for pair, topology, mesh, batches in MESHES:
    for batch in batches:
      for method in METHODS if batch == 8 or len(batches) == 1 else ['speculative']:
        found += [Program(pair, topology, mesh, batch, method, kind) for kind in LAYERS if layers in (None, kind)]
  return [program for program in found if only in ' '.join(map(str, program))]


def figures(program: Program) -> list[str]:
  """Return the figures of a program, dashes where it does not fit."""
  models = aot.models_of([program.pair], 'bfloat16', program.layers == 'scanned')
  sizes = aot.Sizes(program.batch, **SIZES)
  method: Method = METHODS[program.method]
  try:
    found = program_report.of_topology(program.topology, method, models, sizes, Sampler(1.0), program.shape)
  except jax.errors.JaxRuntimeError as error:
    if not out_of_memory(error):
      raise
    return ['–'] * len(FIGURES)
  moved = found['collectives']
  reduced = moved.get('all-reduce', [0, 0, 0])[1]
  cycles = ('traffic_cycles', 'collective_cycles', 'simulated_cycles')
  milliseconds = [1e3 * found[name] / aot.chip_of(program.topology).clock for name in cycles]
  held = [found['arguments']['weights'] / GIB, found['arguments']['caches'] / GIB, found['used_bytes'] / GIB]
  count = [found['rows_that_fit'], reduced, sum(times for _, times, _ in moved.values()) - reduced]
  size = sum(size for _, _, size in moved.values()) / MIB
  return [*(f'{x:.2f}' for x in held), *map(str, count), f'{size:.0f}', *(f'{x:.2f}' for x in milliseconds)]


def main():
  """Append a line for each program that the file does not have."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('out', type=Path)
  parser.add_argument('--only', default='', help='programs whose line has this text, as in "llama_7b_70b v5e"')
  parser.add_argument('--layers', choices=LAYERS, help='both, if it is left out')
  args = parser.parse_args()
  jax.config.update('jax_platforms', 'cpu')  # whatever is here, it is not what is compiled for
  for program in programs(args.only, args.layers):
    if not rows.has(args.out, program._asdict()):
      rows.append(args.out, program._asdict() | dict(zip(FIGURES, figures(program), strict=True)))


if __name__ == '__main__':
  sys.exit(main())
