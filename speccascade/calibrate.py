"""Choose the fastest setting of a run's curves whose loss of quality is certified: a guarantee for prompts to come.

  python -m speccascade.calibrate RUN --loss chrf --at_most 1 --confidence .95
      of all curves that vary a parameter; the loss is against the reference of the run, in points of the metric
  python -m speccascade.calibrate RUN --loss bleu --at_most .5 --curve 'SpecCascade [OPT]' --temperature 0
      of one curve; a metric that has no value for a single text has no guarantee in finite samples
  python -m speccascade.calibrate RUN --loss chrf --at_most 1 --resamplings 100
      also counts how often the guarantee holds where calibration and test are divided anew

RUN is a finished run directory of speccascade.run with a curve's settings in their order, the safest first. Nothing is
decoded. The report is printed and written to RUN/calibrated.json. RUN/config.gin is code: read no run that you do not
trust.
"""

import argparse
from collections.abc import Sequence
import sys

from speccascade.evaluate import calibration_report, rundir
from speccascade.host import commands, storage


def main(argv: Sequence[str] | None = None) -> int:
  """Read the run, choose, print and save; return the exit code."""
  return commands.run(_parser(), _run, argv, 'interrupted')


def _parser() -> commands.Parser:
  parser = commands.Parser('speccascade.calibrate', __doc__)
  parser.add_argument('run', metavar='RUN', help='a run directory, or its address')
  parser.add_argument(
    '--loss', required=True, metavar='METRIC', help='of the run or of the package, as chrf or accuracy'
  )
  parser.add_argument('--at_most', type=float, required=True, help='points of the metric that may be lost')
  parser.add_argument('--confidence', type=float, default=0.95, help='probability that the guarantee holds (.95)')
  about = 'a curve of the run; may repeat, and the chance of error is divided (all that vary a parameter)'
  parser.add_argument('--curve', action='append', default=[], metavar='NAME', help=about)
  parser.add_argument('--temperature', type=float, help='of the run (its only one)')
  parser.add_argument('--batch_size', type=commands.count, help='whose times are compared (the first of the run)')
  parser.add_argument('--only', type=commands.listed, default=[], help='the experiment, of a run of several')
  about = 'share of the prompts that the choice does not see (.5); 0 for none'
  parser.add_argument('--test_share', type=float, default=0.5, help=about)
  parser.add_argument('--resamplings', type=commands.count, default=0, help='how often prompts are divided anew (0)')
  parser.add_argument('--seed', type=int, default=0, help='by which prompts are divided (0)')
  return parser


def _run(args: argparse.Namespace):
  experiment, folder = calibration_report.read(storage.resolve(args.run), args.only)
  lines = calibration_report.lines(folder)
  records = calibration_report.records(folder)
  chosen = dict(temperature=args.temperature, curves=args.curve, batch=args.batch_size)
  curves, about = calibration_report.candidates(experiment, lines, records, args.loss, **chosen)
  names = ('at_most', 'confidence', 'test_share', 'resamplings', 'seed')
  report = about | calibration_report.report(curves, **{name: getattr(args, name) for name in names})
  rundir.write_json(folder / calibration_report.FILE, report)
  print(calibration_report.as_text(report))


if __name__ == '__main__':
  sys.exit(main())
