"""Choose the fastest setting of a run's curves whose loss of quality is certified: a guarantee for prompts to come.

  python -m speccascade.calibrate RUN --loss chrf --at_most 1 --confidence .95
      of all curves that vary a parameter; the loss is against the reference of the run, in points of the metric

RUN is a finished run directory of speccascade.run with a curve's settings in their order, the safest first. Nothing is
decoded. One half of the prompts calibrates, the other tests. The report is printed and written to RUN/calibrated.json.
RUN/config.gin is code: read no run that you do not trust.
"""

import argparse
from collections.abc import Sequence
import sys

from speccascade.evaluate import calibration
from speccascade.host import commands, storage
from speccascade.host.runs import as_json, RunDir


def main(argv: Sequence[str] | None = None) -> int:
  """Read the run, choose, print and save; return the exit code."""
  parser = commands.Parser('speccascade.calibrate', __doc__)
  parser.add_argument('run', metavar='RUN', help='a run directory, or its address')
  parser.add_argument('--loss', required=True, metavar='METRIC', help='a mean of scores, as chrf or accuracy')
  parser.add_argument('--at_most', type=float, required=True, help='points of the metric that may be lost')
  parser.add_argument('--confidence', type=float, default=0.95, help='probability that the guarantee holds (.95)')
  parser.add_argument('--curves', nargs='+', default=[], metavar='NAME', help='those to choose from (all that vary)')
  parser.add_argument('--temperature', type=float, help='of the run (its only one)')
  parser.add_argument('--batch_size', type=commands.count, help='whose times are compared (the only one of the run)')
  parser.add_argument('--only', type=commands.listed, default=[], help='the experiment, of a run of several')
  parser.add_argument('--seed', type=int, default=0, help='by which prompts are divided (0)')
  return commands.run(parser, _run, argv, 'interrupted')


def _run(args: argparse.Namespace):
  run = RunDir(storage.resolve(args.run))
  made, lines, points = calibration.read(run, args.only)
  temperature = calibration.one_of('temperature', args.temperature, made.temperatures)
  batch = calibration.one_of('batch_size', args.batch_size, made.latency_batches)
  curves = calibration.candidates(made, lines, points, args.loss, temperature, batch, args.curves)
  report = calibration.report(curves, args.at_most, args.confidence, args.seed)
  about = dict(experiment=made.name, loss=args.loss, temperature=temperature, reference=made.reference)
  run.write('calibrated.json', as_json(about | report))
  print(calibration.as_text(report))


if __name__ == '__main__':
  sys.exit(main())
