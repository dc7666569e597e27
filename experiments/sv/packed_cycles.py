"""Compile the verifier's call of speculative verification for TPUs that need not be there, packed and padded.

  python -m experiments.sv.packed_cycles --topology v5e:2x2 --pair t5_small_xl --batch 32 --block 5

A line for each number of tokens a row, on average, to which the compiled loop packs, and one for the padded window: the
cycles of the verifier's call, simulated (`planning.rounds`), and of its parts.
"""

import argparse
import json
import sys

import jax
import numpy as np

from speccascade import backends, methods, Sampler
from speccascade.host import commands
from speccascade.models import packing, shapes
from speccascade.planning import aot, hlo, rounds
from speccascade.sv.plans import Profile
from speccascade.sv.predictors import AcceptanceTable

TABLE = AcceptanceTable.of(np.arange(1, 20) / 20, [np.arange(1, 15) / 15] * 20, np.full((20, 15), 0.7))


def calls(args: argparse.Namespace) -> dict[int, rounds.Round]:
  """Return {tokens a row: the verifier's call} of what a compiled round chooses from."""
  chip, models = aot.CHIPS[args.topology.partition(':')[0]], aot.models_of([args.pair], 'bfloat16')
  place = aot.Placement(aot.describe(args.topology).devices, {})
  sizes = aot.Sizes(args.batch, args.source, args.tokens)
  method = methods.sv_exact(Profile(TABLE, np.ones(args.batch * (args.block + 1), np.float32)), args.block)
  method = method.replace(slots=(0, 0, 1))  # the drafter is its own companion
  program = hlo.Module(aot.compiled(method, models, sizes, Sampler(1.0), place, 'tpu').as_text())
  first = {x.name: x for x in program.computations[program.body]}
  choices = rounds.alternatives(program, program.body).items()
  (bodies,) = (some for name, some in choices if rounds.phase_of(first[name]) == 'score_2')
  found = [rounds.simulate(program, chip.bandwidth / chip.clock, 1, shortest=True, computation=x) for x in bodies]
  return dict(zip(packing.fine_widths(args.block + 1), found, strict=True))


def main():
  """Compile and print."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--topology', default='v5e:2x2')
  parser.add_argument('--pair', default='t5_small_xl', choices=list(shapes.PAIRS))
  parser.add_argument('--batch', type=commands.count, default=32)
  parser.add_argument('--block', type=commands.count, default=5)
  parser.add_argument('--source', type=commands.count, default=256)
  parser.add_argument('--tokens', type=commands.count, default=128)
  args = parser.parse_args()
  TABLE.check()
  backends.TPU.pack_from = 0  # what packing costs where it does not pay, too
  for width, call in calls(args).items():
    how = 'padded' if width == args.block + 1 else 'packed'
    said = dict(pair=args.pair, batch=args.batch, tokens=args.batch * width, how=how, verifier=round(call.cycles))
    print(json.dumps(said | {part: round(cycles) for part, cycles in call.parts.items()}), flush=True)


if __name__ == '__main__':
  jax.config.update('jax_platforms', 'cpu')  # whatever is here, it is not what is compiled for
  sys.exit(main())
