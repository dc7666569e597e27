"""Compile the verifier's call of speculative verification for TPUs that need not be there, packed and padded.

  python experiments/sv/packed_cycles.py --topology v5e:2x2 --pair t5_small_xl --batch 32 --block 5

A line for the padded window, and one for each number of tokens a row, on average, that are packed: XLA's estimate of
the call in cycles, by part. It is the difference of two loops, one of which has that call in a branch more. Estimates
rank programs and do not time them.
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
from speccascade.planning import aot
from speccascade.planning.program_report import report
from speccascade.sv.plans import Profile
from speccascade.sv.verification import AcceptanceTable

TABLE = AcceptanceTable.of(np.arange(1, 20) / 20, [np.arange(1, 15) / 15] * 20, np.full((20, 15), 0.7))


def compiled(widths: tuple[int, ...], args: argparse.Namespace) -> dict:
  """Return what a loop holds and does whose verifier is compiled for so many tokens a row."""
  chip, networks = aot.CHIPS[args.topology.partition(':')[0]], shapes.pair(args.pair)
  place = aot.Placement(aot.describe(args.topology).devices, {})
  sizes = aot.Sizes(args.batch, args.source, args.tokens)
  method = methods.sv_exact(Profile(TABLE, np.ones(args.batch * (args.block + 1), np.float32)), args.block)
  *first, score, verify = method.phases
  phases = (*first, dataclasses.replace(score, widths=widths), verify)
  method = method.replace(phases=phases, slots=(0, 0, 1))  # the drafter is its own companion
  return report(aot.compiled(method, networks, sizes, Sampler(1.0), place, 'tpu'), method, networks, sizes, chip)


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
  whole = args.block + 1
  base = compiled((whole,), args)
  for width in (whole, *packing.fine_widths(whole)[:-1]):
    found = compiled((width, whole), args)
    parts = {name: n - base['cycles_by_part'].get(name, 0) for name, n in found['cycles_by_part'].items()}
    how = 'padded' if width == whole else 'packed'
    said = dict(pair=args.pair, batch=args.batch, tokens=args.batch * width, how=how)
    said['cycles'] = found['estimated_cycles'] - base['estimated_cycles']
    more = {name: found[name] - base[name] for name in ('row_loops', 'cache_copies')}
    print(json.dumps(said | more | {'by_part': {name: n for name, n in parts.items() if n}}), flush=True)


if __name__ == '__main__':
  jax.config.update('jax_platforms', 'cpu')  # whatever is here, it is not what is compiled for
  sys.exit(main())
