"""Convert a checkpoint from any format that is read to one that is written, and verify it by reading it back.

hf is for every family and head, for transformers and vLLM; t5x is for T5 and T5X. A t5x checkpoint is written without
`param_states`, those of an optimizer: T5X evaluates and infers with it, and trains on from it with
`RestoreCheckpointConfig.fallback_to_scratch = True` and `assignment_map = (('state/param_states.*', None),)`.
"""

import argparse
from collections.abc import Sequence
import sys

from speccascade.checkpoints.convert import convert, FORMATS
from speccascade.host import commands


def main(argv: Sequence[str] | None = None) -> int:
  """Run the command line; return the exit code."""
  return commands.run(_parser(), _run, argv, 'interrupted')


def _run(args: argparse.Namespace) -> None:
  names = ('dtype', 'overwrite', 'step', 'scan', 'activation')
  convert(args.src, args.dst, form=args.format, **{name: getattr(args, name) for name in names})


def _parser() -> commands.Parser:
  parser = commands.Parser('speccascade.convert', __doc__)
  parser.add_argument('src', metavar='SRC', help='folder, GGUF file or hub id to read')
  parser.add_argument('dst', metavar='DST', help='folder to write; t5x writes DST/checkpoint_STEP unless DST is one')
  parser.add_argument('--format', choices=FORMATS, default='hf', help='what to write (hf)')
  parser.add_argument('--dtype', choices=['float32', 'bfloat16'], help='dtype to write (default: as stored)')
  parser.add_argument('--step', type=int, help='of t5x: the number of the checkpoint (1; T5X passes over 0)')
  parser.add_argument('--scan', action='store_true', help="of t5x: layers stacked, for T5X's scalable_t5")
  parser.add_argument('--activation', help="of SRC's MLPs, if SRC is T5X without its gin file: gelu, relu, silu, swish")
  parser.add_argument('--overwrite', action='store_true', help='replace a checkpoint that is at DST')
  return parser


if __name__ == '__main__':
  sys.exit(main())
