"""Run experiments from gin files: decode with every method, measure quality and speed, write tables and a report.

  python -m speccascade.run
      compares methods on a small pair of models that comes with the package
  python -m speccascade.run --gin_file=gin_configs/runs/multi30k_table2.gin --run_dir=runs/table2
      runs an experiment; the same command resumes a run that was killed
  python -m speccascade.run --gin.Experiment.latency_examples=100 --gin.Experiment.curves='opt(alpha=[0.0, 0.3])'
      changes a number, and the curves by a text, which needs no quotes of gin's: a rule, a method or a suite of
      speccascade.evaluate.suites; several are a list, "['cascades', 'my_rules:mine(alpha=[0.1, 0.3])']"
  python -m speccascade.run --gin_file=FILE --run_dir=RUN --shard=0/4
      measures one of four shards, each in its own process, on machines that share RUN; the last writes the results

A gin file is code: it imports modules and calls what it names. Run none that you have not read.
Exit codes: 0 done, 1 an error that you can fix, printed in one sentence, 130 interrupted, 143 ended by SIGTERM.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
import sys

from speccascade.host import commands, multihost, storage

DEFAULT = Path(__file__).parent / 'evaluate' / 'default.gin'


def main(argv: Sequence[str] | None = None) -> int:
  """Parse, build, run, report."""
  argv = list(sys.argv[1:] if argv is None else argv)
  command = multihost.command_of_one_process('speccascade.run', argv)
  end = 'interrupted; the same command goes on from here'
  return multihost.leave(commands.run(_parser(), lambda args: _run(args, command), argv, end))


def _parser() -> commands.Parser:
  parser = commands.Parser('speccascade.run', __doc__)
  commands.add_gin(parser, 'Without one the embedded default runs', 'Experiment.seed = 1')
  parser.add_argument('--only', type=commands.listed, default=[], help='the experiments to measure, by commas (all)')
  parser.add_argument(
    '--run_dir',
    help='where results go, a folder or an address, as gs://BUCKET/RUN. Default: run.folder of the config, else '
    'runs/NAME-DIGEST, one folder for each config',
  )
  parts = parser.add_mutually_exclusive_group()
  parts.add_argument(
    '--shard',
    type=commands.share,
    metavar='i/n',
    help='measure the i-th of n shards, i from 0; the same command resumes it, and the last to end writes the results',
  )
  parts.add_argument('--merge', action='store_true', help='write the results of shards, or print which are not done')
  commands.add_distributed(parser)
  return parser


def _run(args: argparse.Namespace, command: str):
  run_dir = storage.resolve(args.run_dir) if args.run_dir else None
  commands.join(args)
  from speccascade.evaluate import config, runner  # lazily: --help needs none of this
  from speccascade.evaluate.report import formats
  from speccascade.evaluate.shards import Shard

  files = args.gin_file or [str(DEFAULT)]
  text = config.parse(files, commands.bindings(args), args.gin_search_paths)
  made = config.build(placed=not args.merge)
  folder = run_dir or config.folder(files[-1], text)
  about = dict(config=text, command=command, only=args.only)
  if args.merge:
    folders = runner.merge(made, folder, **about)
  else:
    folders = runner.run(made, folder, **about, shard=Shard(*args.shard) if args.shard else None)
  if folders and multihost.is_writer():
    print(formats.closing(folders, next_steps=not args.gin_file))


if __name__ == '__main__':
  sys.exit(main())
