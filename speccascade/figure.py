"""Draw a chart of a finished run as a figure for a paper.

  python -m speccascade.figure RUN --out fig.pdf
      quality against time with 95 % intervals, as wide as a column
  python -m speccascade.figure RUN --chart quality_calls_T1 --curves 'SpecCascade [OPT]' BiLD --out fig.svg
      quality against the calls of the large model at temperature 1, of two curves in this order

RUN is a run directory of speccascade.run, or of several experiments the folder of one. Charts and curves have the names
of its report. Nothing is measured, and no code of the run is read.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
import sys

from speccascade.evaluate.report import charts, drawing, points
from speccascade.host import commands, names, storage
from speccascade.host.errors import RunError
from speccascade.host.runs import RunDir

RESULTS = 'results.json'


def main(argv: Sequence[str] | None = None) -> int:
  """Read the results, draw and save; return the exit code."""
  parser = commands.Parser('speccascade.figure', __doc__)
  parser.add_argument('run', metavar='RUN', help='a run directory, or its address')
  parser.add_argument('--out', required=True, metavar='FILE', help=f'{", ".join(drawing.FORMATS)} by its ending')
  about = 'a file of RUN/curves, which may lack _T0 where there is one temperature (quality_latency)'
  parser.add_argument('--chart', default='quality_latency', metavar='NAME', help=about)
  parser.add_argument('--curves', nargs='+', metavar='NAME', help='those to draw, in this order (all)')
  parser.add_argument('--width', type=float, default=3.3, metavar='INCHES', help='of the figure (3.3)')
  return commands.run(parser, _run, argv, 'interrupted')


def _run(args: argparse.Namespace):
  out = Path(args.out)
  if out.suffix[1:] not in drawing.FORMATS:
    raise RunError(f'--out={args.out}: a figure is {", ".join(drawing.FORMATS)}; name one, as fig.pdf.')
  if not 1 <= args.width <= 20:
    raise RunError(f'--width={args.width:g}: a figure is from 1 to 20 inches wide.')
  out = storage.output_file(storage.local(out), overwrite=True)
  results = _results(RunDir(storage.resolve(args.run)))
  if args.curves:
    results['points'] = _chosen(results['points'], args.curves)
  storage.write(out, drawing.for_paper(_chart(results, args.chart), args.width, out.suffix[1:]))
  print(out)


def _results(run: RunDir) -> dict:
  """Return the results of a finished run."""
  if not run.exists(RESULTS):
    several = [name for name in sorted(run.names()) if run.exists(f'{name}/{RESULTS}')]
    remedy = f'name one of its experiments, {", ".join(str(run / name) for name in several)}'
    raise RunError(
      f'{run} has no {RESULTS}: {remedy if several else "give a run that python -m speccascade.run ended"}.'
    )
  return points.read(run.read(RESULTS))


def _chosen(of: Sequence[points.PointResult], curves: Sequence[str]) -> list[points.PointResult]:
  """Return the points of some curves, in the order of these."""
  known = dict.fromkeys(p.curve for p in of)
  for name in curves:
    if name not in known:
      raise RunError(
        f'--curves: the run has no {name!r}{names.meant(name, known)}; it has {", ".join(map(repr, known))}.'
      )
  return sorted((p for p in of if p.curve in curves), key=lambda p: curves.index(p.curve))


def _chart(results: dict, name: str) -> charts.Chart:
  """Return the chart of a name, or the only one that begins so."""
  described = {chart.name: chart for chart in charts.charts(results)}
  found = [name] if name in described else [x for x in described if x.startswith(f'{name}_T')]
  if len(found) != 1:
    what = f'several {name}' if found else f'no numbers for a chart {name}'
    raise RunError(f'--chart: there are {what}; choose from {", ".join(found or described) or "none"}.')
  return described[found[0]]


if __name__ == '__main__':
  sys.exit(main())
