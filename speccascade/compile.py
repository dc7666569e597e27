"""Compile a method's decode loop for chips that need not be present, and print the program's memory and operations.

  python -m speccascade.compile --topology v5e:2x2 --models t5_small_xl --method speculative --batch_size 8 --block 5
  python -m speccascade.compile --topology v5e:2x2 --models llama_7b_70b --mesh data=1,model=4 --json

TPUs need the extra `tpu`, h100 the extra `cuda`. On a mesh, arguments and memory are those of one chip, and collectives
those of a round. What the figures are: `speccascade.planning.program_report`.
"""

import argparse
from collections.abc import Sequence
import json
import math
from pathlib import Path
import sys

import jax

from speccascade.decode import options
from speccascade.drafters.frequent import Frequent
from speccascade.engine import validate
from speccascade.host import commands, storage
from speccascade.host.errors import first_line, out_of_memory, RunError
from speccascade.models import shapes
from speccascade.planning import aot, program_report
from speccascade.types import checked_int


def main(argv: Sequence[str] | None = None) -> int:
  """Compile and report; return the exit code, 1 where the program cannot be compiled, as where it does not fit."""
  return commands.run(_parser(), _run, argv, 'interrupted')


def _parser() -> commands.Parser:
  parser = commands.Parser('speccascade.compile', __doc__)
  parser.add_argument('--topology', default='v5e:2x2', help="chips and their layout, or 'h100' (v5e:2x2)")
  sources = (
    'for each model a config.json, a folder or a hub id; SOURCE@4 has four layers, @width=8 calls of eight tokens'
  )
  pairs = f'{", ".join(shapes.PAIRS)}, or {sources}'
  parser.add_argument('--models', nargs='+', required=True, metavar='MODEL', help=pairs)
  options.add_method(parser)
  options.add_batch_size(parser, 1)
  options.add_max_new_tokens(parser)
  options.add_sampler(parser)
  parser.add_argument(
    '--max_prompt_tokens', type=commands.count, default=256, help='the padded length of prompts (256)'
  )
  options.add_dtype(parser, 'bfloat16', 'bfloat16')
  parser.add_argument('--mesh', type=options.mesh, help='chips by axis, as in data=1,model=4 (one chip)')
  parser.add_argument('--head', metavar='HEAD', help='a checkpoint of a head, which drafts beside the last model')
  parser.add_argument('--frequent', type=commands.count, help='tokens that the head of the first model has (all)')
  parser.add_argument(
    '--rules', type=commands.listed, default=[], help='replicated or sharded for each model (what is faster)'
  )
  parser.add_argument('--xla', type=options.pair, default=[], action='append', help='an option of XLA, as NAME=VALUE')
  parser.add_argument('--prefill', action='store_true', help='compile the reading of prompts, too, for its memory')
  parser.add_argument('--scan', action='store_true', help='scan the layers: a program of one layer for all')
  parser.add_argument('--text', type=Path, help="write the program's text to this file")
  parser.add_argument('--json', action='store_true', help='end with one JSON object in a line')
  return parser


def _run(args: argparse.Namespace):
  if args.text is not None:
    args.text = storage.output_file(args.text, overwrite=True)
  models = aot.models_of(args.models, args.dtype, args.scan, args.head)
  if args.frequent is not None:
    network = models[0].network
    models[0] = aot.shaped(Frequent(network, checked_int('frequent', args.frequent, 1, network.vocab_size)))
  method = options.method(args, len(models))
  validate.check_method(method, len(models))
  method = method.at(args.batch_size)
  sizes = aot.Sizes(args.batch_size, args.max_prompt_tokens, args.max_new_tokens)
  try:
    given = options.sampler(args), args.mesh or {}, args.rules, dict(args.xla), args.text, args.prefill
    report = program_report.of_topology(args.topology, method, models, sizes, *given)
  except jax.errors.JaxRuntimeError as error:
    raise RunError(_sentence(error, args)) from error
  where = ' '.join([args.topology, *(f'{axis}={n}' for axis, n in (args.mesh or {}).items())])
  names = ' and '.join(filter(None, [args.head, *args.models]))
  what = f'{names}, {method.name}, batch {sizes.batch}, γ {method.block}, {args.dtype}'
  print(f'{what}, {where}')
  program_report.show(report, aot.chip_of(args.topology))
  if args.json:
    print(json.dumps(report))


def _sentence(error: Exception, args: argparse.Namespace) -> str:
  """Return why a program was not compiled."""
  if not out_of_memory(error):
    return first_line(error)
  few = 'a chip' if args.mesh is None else f'{math.prod(args.mesh.values())} chips'
  return (
    f'{args.topology}: the program does not fit into the memory of {few} ({first_line(error)}); give a mesh of more '
    'chips, as in --mesh=data=1,model=4, or a smaller --batch_size.'
  )


if __name__ == '__main__':
  jax.config.update('jax_platforms', 'cpu')  # whatever is here, it is not what is compiled for
  sys.exit(main())
