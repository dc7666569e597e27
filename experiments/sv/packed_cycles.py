"""Compile the verifier's call of speculative verification for TPUs that need not be there, packed and padded.

  python experiments/sv/packed_cycles.py --topology v5e:2x2 --pair t5_small_xl --batch 32 --block 5

A line for the padded window, and one for each number of tokens a row, on average, that are packed: the cycles of the
verifier's phase and of the round that has it, simulated (`planning.rounds`).
"""

import argparse
import dataclasses
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


def simulated(widths: tuple[int, ...], args: argparse.Namespace) -> rounds.Round:
  """Return a round whose verifier is compiled for so many tokens a row, and is fed the fewest of them."""
  chip, networks = aot.CHIPS[args.topology.partition(':')[0]], shapes.pair(args.pair)
  place = aot.Placement(aot.describe(args.topology).devices, {})
  sizes = aot.Sizes(args.batch, args.source, args.tokens)
  method = methods.sv_exact(Profile(TABLE, np.ones(args.batch * (args.block + 1), np.float32)), args.block)
  *first, score, verify = method.phases
  phases = (*first, dataclasses.replace(score, widths=widths), verify)
  method = method.replace(phases=phases, slots=(0, 0, 1))  # the drafter is its own companion
  program = hlo.Module(aot.compiled(method, networks, sizes, Sampler(1.0), place, 'tpu').as_text())
  return rounds.simulate(program, chip.bandwidth / chip.clock, method.draft_turns, shortest=True)


def main():
  """Compile and print."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--topology', default='v5e:2x2')
  parser.add_argument('--pair', default='t5_small_xl', choices=list(shapes.PAIRS))
  parser.add_argument('--batch', type=commands.count, default=32)
  parser.add_argument('--block', type=commands.count, default=5)
  parser.add_argument('--source', type=commands.count, default=256)
  parser.add_argument('--tokens', type=commands.count, default=128)
  parser.add_argument(
    '--widths', type=commands.count, nargs='*', help='tokens a row to pack to (all that the loop packs to)'
  )
  args = parser.parse_args()
  TABLE.check()
  backends.TPU.pack_from = 0  # what packing costs where it does not pay, too
  whole = args.block + 1
  for width in (whole, *(args.widths or packing.fine_widths(whole)[:-1])):
    found = simulated((whole,) if width == whole else (width, whole), args)
    how = 'padded' if width == whole else 'packed'
    said = dict(pair=args.pair, batch=args.batch, tokens=args.batch * width, how=how)
    said |= dict(verifier=round(found.phases['score_2']), round=round(found.cycles))
    print(json.dumps(said), flush=True)


if __name__ == '__main__':
  jax.config.update('jax_platforms', 'cpu')  # whatever is here, it is not what is compiled for
  sys.exit(main())
