"""Figures are whole, the same every time, and left out where there are no numbers."""

import made
from made import point
import pytest

from speccascade.evaluate import plots


@pytest.fixture(scope='module')
def directory(tmp_path_factory):
  results = made.cascades((1.0,))
  results['points'] = [p for p in results['points'] if p['temperature'] == 1.0]
  path = tmp_path_factory.mktemp('plots') / 'curves'
  plots.write(results, path)
  return path


def test_every_figure_is_written_as_svg_and_png(directory):
  wanted = {f'{name}_T1.{kind}' for name in plots.FIGURES for kind in ('svg', 'png')}
  assert wanted <= {p.name for p in directory.iterdir()}
  for path in directory.iterdir():
    content = path.read_bytes()
    assert content.startswith(b'\x89PNG' if path.suffix == '.png' else b'<?xml') and len(content) > 3000


def test_svg_names_every_curve_and_its_axes(directory):
  text = (directory / 'quality_latency_T1.svg').read_text()
  for name in ('target only', 'draft only', 'SpecCascade [OPT]', 'BLEU', 'time relative to target only'):
    assert name in text


def test_a_model_alone_far_from_the_rest_is_said_and_not_drawn(tmp_path):
  points = [point('target only', quality=28.0, ratio=1.0), *(point('a', x, 28.0 - x, 1.0 + x) for x in (0.1, 0.2, 0.5))]
  for quality, far in ((20.0, True), (27.4, False)):
    plots.write(made.results([*points, point('draft only', quality=quality, ratio=1.6)]), tmp_path)
    text = (tmp_path / 'quality_latency_T0.svg').read_text()
    assert (f'draft only: {quality:.2f} at 0.62' in text) == far and 'draft only' in text


def test_the_reference_takes_no_more_of_the_time_axis_than_others_may(tmp_path):
  fast = [point('a', x, 28.0 - x, 1.8 + x, counts=made.counts(0.5, x)) for x in (0.1, 0.2, 0.4)]
  plots.write(made.results([point('target only', quality=28.0, ratio=1.0), *fast]), tmp_path)
  assert 'target only: 28.00 at 1.00' in (tmp_path / 'quality_latency_T0.svg').read_text()
  assert 'target only: 28.00' not in (tmp_path / 'quality_deferral_T0.svg').read_text()


def test_names_are_drawn_as_they_are(tmp_path):
  points = [point('target only', quality=28.0, ratio=1.0), point(r'$\frac{$ of $x^2$', 0.1, 27.0, 1.2)]
  written = plots.write(made.results(points), tmp_path)
  assert len(written) == 2 and r'$\frac{$ of $x^2$' in (tmp_path / 'quality_latency_T0.svg').read_text()


def test_figures_have_the_same_bytes_again(tmp_path):
  results = made.results([point('target only', quality=28.0, ratio=1.0), point('a', 0.1, 27.0, 1.2)])
  once, again = (plots.write(results, tmp_path / name) for name in ('once', 'again'))
  assert len(once) == 2
  for first, second in zip(once, again, strict=True):
    assert first.read_bytes() == second.read_bytes(), first.name


def test_figures_without_numbers_are_left_out(tmp_path):
  assert plots.write(made.results([point('target only', quality=28.0), point('a', 0.1, 27.0)]), tmp_path) == []
  ordinary = made.results([point('target only', quality=28.0, ratio=1.0), point('a', 0.1, 27.0, 1.2)])
  assert {p.stem for p in plots.write(ordinary, tmp_path)} == {'quality_latency_T0'}


def test_ten_curves_have_ten_looks_and_the_models_alone_their_own():
  looks = plots.styles(made.results([point('target only'), *(point(str(i)) for i in range(10))]))
  assert len(set(looks.values())) == 12


def test_acceptance_by_place_stops_where_nothing_was_tested():
  assert plots.by_place(dict(tested_at=[4, 2, 0], accepted_at=[3, 1, 0])) == [0.75, 0.5]


def test_a_histogram_loses_its_empty_end_only():
  assert plots.shares_of([2, 0, 2, 0]) == [0.5, 0.0, 0.5]
  assert plots.shares_of([0, 0]) == []


def test_only_parameters_that_vary_are_drawn():
  points = [point('one', 0.1, ratio=1.0), *(point('cos', [g, 1], ratio=1.0 + g, parameter='blocks') for g in (1, 5))]
  assert list(plots.varying(points)) == ['blocks'] and list(plots.varying(points)['blocks']) == ['cos']
