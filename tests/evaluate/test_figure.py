"""A chart of a finished run is drawn for a paper: of its width, with the curves that are named, the same every time."""

import re

from made import counts, point, results
from matching import having
import pytest

from speccascade import figure
from speccascade.evaluate.report import outputs

INCHES = 72  # points of each


@pytest.fixture
def run(tmp_path):
  """Return a finished run of three curves at two temperatures."""
  points = []
  for temperature in (0.0, 1.0):
    about = dict(temperature=temperature, counts=counts(0.5))
    points.append(point('target only', quality=28.0, ratio=1.0, **about))
    for curve in ('SpecDecode', 'SpecCascade [OPT]'):
      points += [point(curve, alpha, 28.0 - alpha, 1.0 + alpha, **about) for alpha in (0.1, 0.2, 0.4)]
  outputs.write(results(points), tmp_path / 'run')
  return tmp_path / 'run'


def drawn(run, *more, ending='svg') -> bytes:
  """Return what the command draws."""
  out = run.parent / f'fig.{ending}'
  assert figure.main([str(run), f'--out={out}', *more]) == 0
  return out.read_bytes()


def names_of(svg: bytes) -> list[str]:
  """Return the names of a legend."""
  return re.findall('<text[^>]*>([^<]*)<', svg.decode().split('id="legend_1"')[1])


def test_a_figure_has_the_width_of_a_column_and_the_same_bytes_each_time(run):
  for ending, size in (('svg', rb'width="([\d.]+)pt"'), ('pdf', rb'/MediaBox \[ 0 0 ([\d.]+) ')):
    for given, width in ((['--width=5.5'], 5.5), ([], 3.3)):
      first, again = (drawn(run, '--chart=quality_latency_T1', *given, ending=ending) for _ in range(2))
      assert first == again and float(re.search(size, first)[1]) == pytest.approx(width * INCHES)
  assert b'/Type0' in drawn(run, '--chart=acceptance_T0', ending='pdf')  # fonts that are no bitmaps
  assert drawn(run, '--chart=acceptance_T0', ending='png').startswith(b'\x89PNG')


def test_a_figure_has_the_curves_that_are_named_in_their_order_and_no_title(run):
  chart = '--chart=quality_latency_T0'
  svg = drawn(run, chart, '--curves', 'SpecCascade [OPT]', 'SpecDecode')
  assert names_of(svg) == ['SpecCascade [OPT]', 'SpecDecode']
  assert names_of(drawn(run, chart)) == ['target only', 'SpecDecode', 'SpecCascade [OPT]']
  assert b'BLEU' in svg and b'against time, T = 0' not in svg
  assert b'against time, T = 0' in (run / 'curves' / 'quality_latency_T0.svg').read_bytes()


@pytest.mark.parametrize(
  'more, parts',
  [
    ([], ('several quality_latency', 'quality_latency_T0, quality_latency_T1')),
    (['--chart=quality'], ('no numbers', 'quality', 'acceptance_T1')),
    (['--chart=acceptance_T0', '--curves', 'SpecDecod'], ("'SpecDecod'", 'did you mean SpecDecode?')),
  ],
)
def test_what_a_run_does_not_have_is_named(run, more, parts, capsys):
  assert figure.main([str(run), f'--out={run.parent}/fig.pdf', *more]) == 1
  assert re.search(having(*parts), capsys.readouterr().err) and not (run.parent / 'fig.pdf').exists()


def test_a_run_of_several_experiments_names_their_folders(run, capsys):
  assert figure.main([str(run.parent), f'--out={run.parent}/fig.pdf']) == 1
  assert f'name one of its experiments, {run}' in capsys.readouterr().err
