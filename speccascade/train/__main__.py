"""Train models: `python -m speccascade.train --gin_file=FILE --out=FOLDER`.

`python -m speccascade.train family:sums` trains the models of a family to where all commands look for them, and
family:sums/draft one of them. The same command resumes a stopped run, with the same result as an uninterrupted one.
`--compile=v5e:4x4` compiles the step of each job for chips that need not be there (extra `tpu`), and prints its memory
on a chip and its collectives. A gin file is code: it imports modules and calls functions. Run none that you have not
read.
"""

import argparse
from collections.abc import Sequence
import functools
import sys

from speccascade.data import families
from speccascade.host import commands, multihost, storage


def main(argv: Sequence[str] | None = None) -> int:
  """Run the jobs; return the exit code."""
  end = 'interrupted; the same command goes on from the last saved step'
  return multihost.leave(commands.run(_parser(), _run, argv, end))


def _parser() -> commands.Parser:
  parser = commands.Parser('speccascade.train', __doc__)
  known = ', '.join(f'{families.PREFIX}{name}' for name in families.FAMILIES)
  parser.add_argument('family', nargs='?', help=f'a family or a model of one, which has a gin file: {known}')
  commands.add_gin(parser, 'It binds train.jobs', 'train.Settings.steps = 1000')
  parser.add_argument('--out', help='the folder of the run, with a folder for each job')
  parser.add_argument(
    '--job', action='append', default=[], help='the name of a job to run; may be repeated. Default: all of them'
  )
  parser.add_argument(
    '--compile', metavar='TOPOLOGY', help='train nothing, but compile for chips and print what they need: v5e:4x4'
  )
  commands.add_distributed(parser)
  return parser


def _run(args: argparse.Namespace):
  if args.family:
    _take_recipe(args)
  if (args.out is None) == (args.compile is None):
    raise ValueError('give --out, the folder of the run, or --compile, the chips to compile for')
  if args.compile:
    _compile(args)
    return
  out = storage.local(args.out).absolute()
  commands.join(args)
  for job in _chosen(args, _configured(args)):
    echo = functools.partial(print, f'[{job.name}]') if multihost.is_writer() else lambda *_, **__: None
    job.run(out, echo)
    echo(f'done: {out / job.name}')


def _take_recipe(args: argparse.Namespace):
  """Set gin file, bindings, jobs and folder to those of a family."""
  if not args.out and not args.compile and (args.gin_file or args.gin_bindings):
    raise ValueError(f'{args.family} with settings of your own would take the place of the family: give --out')
  recipe = families.training(args.family)
  args.gin_file = [recipe.gin_file, *args.gin_file]
  args.gin_bindings = [*recipe.bindings, *args.gin_bindings]
  args.job = [*recipe.jobs, *args.job]
  if not (args.out or args.compile):
    args.out = recipe.out


def _compile(args: argparse.Namespace) -> None:
  import jax

  jax.config.update('jax_platforms', 'cpu')  # whatever is here, it is not what is compiled for
  from speccascade.planning import aot
  from speccascade.train import compiled

  devices = aot.describe(args.compile).devices
  configured = _configured(args, devices)
  for job in _chosen(args, configured):
    for line in compiled.report(job, devices, configured):
      print(f'[{job.name}] {line}')


def _configured(args: argparse.Namespace, devices=None) -> list:
  """Return the jobs of the config, on a mesh of the devices."""
  from speccascade.train import jobs  # after the arguments are read, so that --help is quick

  return jobs.read(args.gin_file, commands.bindings(args), args.gin_search_paths, devices)


def _chosen(args: argparse.Namespace, configured: list) -> list:
  """Return the jobs to run."""
  names = [job.name for job in configured]
  for name in args.job:
    if name not in names:
      raise ValueError(f'--job={name}: the config has {", ".join(names)}')
  return [job for job in configured if not args.job or job.name in args.job]


if __name__ == '__main__':
  sys.exit(main())
