"""Train models: `python -m speccascade.train --gin_file=FILE --out=FOLDER`.

The same command resumes a stopped run, with the same result as an uninterrupted one.
A gin file is code: it imports modules and calls functions. Run none that you have not read.
"""

import argparse
from collections.abc import Sequence
import functools
import sys

from speccascade.host import commands, multihost, storage


def main(argv: Sequence[str] | None = None) -> int:
  """Run the jobs; return the exit code."""
  parser = commands.Parser('speccascade.train', __doc__)
  commands.add_gin(parser, 'It binds train.jobs', 'train.Settings.steps = 1000')
  parser.add_argument('--out', required=True, help='the folder of the run, with a folder for each job')
  parser.add_argument(
    '--job', action='append', default=[], help='the name of a job to run; may be repeated. Default: all of them'
  )
  commands.add_distributed(parser)
  end = 'interrupted; the same command goes on from the last saved step'
  return multihost.leave(commands.run(parser, _run, argv, end))


def _run(args: argparse.Namespace):
  out = storage.local(args.out).absolute()
  commands.join(args)
  from speccascade.train import jobs  # after the arguments are read, so that --help is quick

  configured = jobs.read(args.gin_file, commands.bindings(args), args.gin_search_paths)
  names = [job.name for job in configured]
  for name in args.job:
    if name not in names:
      raise ValueError(f'--job={name}: the config has {", ".join(names)}')
  for job in configured:
    if not args.job or job.name in args.job:
      echo = functools.partial(print, f'[{job.name}]') if multihost.is_writer() else lambda *_, **__: None
      job.run(out, echo)
      echo(f'done: {out / job.name}')


if __name__ == '__main__':
  sys.exit(main())
