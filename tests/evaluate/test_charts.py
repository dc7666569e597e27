"""Charts say what was measured, are left out without the numbers, and are drawn the same every time."""

import re
from xml.etree import ElementTree

import made
from made import point
import pytest

from speccascade.evaluate.report import charts, drawing

SVG = '{http://www.w3.org/2000/svg}'


def described(results, start):
  """Return the one chart whose name starts so."""
  (chart,) = [c for c in charts.charts(results) if c.name.startswith(start)]
  return chart


def drawn(chart):
  """Return the SVG of a chart without its legend."""
  root = ElementTree.fromstring(drawing.draw(chart).svg)
  for parent in list(root.iter()):
    for child in [c for c in parent if c.get('id') == 'legend_1']:
      parent.remove(child)
  return root


def marks(panel):
  """Return the coordinates of the marks of each curve."""
  return {s.curve: [(m.x, m.y) for m in s.marks] for s in panel.series}


def test_quality_is_drawn_against_time_with_both_intervals():
  points = [point('target only', quality=28.0, ratio=1.0), point('a', 0.1, 27.0, 1.25)]
  chart = described(made.results(points), 'quality_latency')
  (panel,) = chart.panels
  assert (chart.section, chart.name) == ('Quality and time', 'quality_latency_T0')
  assert marks(panel) == {'target only': [(1.0, 28.0)], 'a': [(0.8, 27.0)]} and panel.line_at == 28.0
  (mark,) = panel.series[1].marks
  assert mark.x_interval == pytest.approx([1 / 1.29, 1 / 1.21]) and mark.y_interval == [25.5, 28.5]


@pytest.mark.parametrize(('quality', 'far'), [(20.0, True), (27.4, False)])
def test_a_model_alone_far_from_the_rest_is_noted_and_not_drawn(quality, far):
  points = [point('target only', quality=28.0, ratio=1.0), *(point('a', x, 28.0 - x, 1.0 + x) for x in (0.1, 0.2, 0.5))]
  results = made.results([*points, point('draft only', quality=quality, ratio=1.6)])
  (panel,) = described(results, 'quality_latency').panels
  assert (f'draft only: {quality:.2f} at 0.62' in panel.note) == far == ('draft only' not in marks(panel))


def test_the_reference_takes_no_more_of_the_time_axis_than_others_may():
  fast = [point('a', x, 28.0 - x, 1.8 + x, counts=made.counts(0.5, x)) for x in (0.1, 0.2, 0.4)]
  results = made.results([point('target only', quality=28.0, ratio=1.0), *fast])
  assert described(results, 'quality_latency').panels[0].note == 'target only: 28.00 at 1.00'
  assert 'target only' in marks(described(results, 'quality_deferral').panels[0])


def test_settings_that_decoded_alike_are_drawn_once():
  counts = made.counts(0.5, 0.2)
  alike = [point('lossy', a, 28.0, r, counts=counts) for a, r in ((0.1, 1.5), (0.3, 1.2), (0.5, 1.3))]
  results = made.results([point('target only', quality=28.0, ratio=1.0), *alike])
  for name in ('quality_latency', 'quality_deferral'):
    assert len(marks(described(results, name).panels[0])['lossy']) == 1
  assert len(marks(described(results, 'speed_by_parameter').panels[0])['lossy']) == 3  # at each its own time


def test_acceptance_by_position_stops_where_nothing_was_tested_and_lengths_lose_their_empty_end_only():
  counts = made.counts(0.5) | dict(tested_at=[4, 2, 0], accepted_at=[3, 1, 0], accepted_lengths=[2, 0, 2, 0])
  chart = described(made.results([point('a', counts=counts)]), 'acceptance_T0')
  assert list(map(marks, chart.panels)) == [{'a': [(1, 0.75), (2, 0.5)]}, {'a': [(0, 0.5), (1, 0.0), (2, 0.5)]}]


def test_quality_is_drawn_against_the_calls_of_the_large_model():
  calls = lambda x: made.counts(0.5) | {'calls_per_token': x}
  points = [point('target only', quality=28.0, counts=calls(1.0)), point('a', 0.1, 27.0, counts=calls(0.25))]
  (panel,) = described(made.results(points), 'quality_calls').panels
  assert marks(panel) == {'target only': [(1.0, 28.0)], 'a': [(0.25, 27.0)]} and panel.line_at == 28.0


def test_acceptance_is_drawn_by_round_prompt_and_domain():
  domains = {name: dict(examples=2, tested=10, accepted=n) for name, n in (('prose', 4), ('code', 7))}
  more = dict(accepted_by_round=[8, 3], texts_by_round=[4, 2], acceptance_by_prompt=[0, 3, 1, 0])
  results = made.results([point('a', counts=made.counts(0.5) | more | {'acceptance_by_domain': domains})])
  by_round, texts = described(results, 'acceptance_by_round').panels
  assert marks(by_round) == {'a': [(1, 2.0), (2, 1.5)]}
  assert marks(texts) == {'a': [(1, 4), (2, 2)]}
  prompts, by_domain = described(results, 'acceptance_by_prompt').panels
  assert marks(prompts) == {'a': [(0.125, 0), (0.375, 0.75), (0.625, 0.25), (0.875, 0)]}
  assert by_domain.x_names == ['code', 'prose'] and marks(by_domain) == {'a': [(1, 0.4), (0, 0.7)]}
  text = drawing.draw(described(results, 'acceptance_by_prompt')).svg.decode()
  assert '>code<' in text and '>prose<' in text


@pytest.mark.parametrize('texts, drawn', [([4, 2, 1, 2], 2), ([30, 12, 10, 9, 8, 1], 3), ([100, 10], 2), ([1], 1)])
def test_acceptance_by_round_stops_where_few_texts_have_the_round(texts, drawn):
  more = dict(accepted_by_round=[2 * n for n in texts], texts_by_round=texts)
  by_round, counted = described(
    made.results([point('a', counts=made.counts(0.5) | more)]), 'acceptance_by_round'
  ).panels
  assert marks(by_round) == {'a': [(i + 1, 2.0) for i in range(drawn)]}
  assert marks(counted) == {'a': list(enumerate(texts[:drawn], 1))}


def test_a_histogram_has_bars():
  bins = dict(acceptance_by_prompt=[0, 0, 0, 0, 0, 1, 3, 2, 0, 4], acceptance_by_domain=None)
  results = made.results([point('a', counts=made.counts(0.5, block=2) | bins)])
  (prompts,) = described(results, 'acceptance_by_prompt').panels
  rates, lengths = described(results, 'acceptance_T0').panels
  assert (rates.bars, lengths.bars, prompts.bars) == (0, 1, 0.1) and not (lengths.lines or prompts.lines)
  outlines = [path.get('d') for path in drawn(described(results, 'acceptance_by_prompt')).iter(f'{SVG}path')]
  assert max(d.count('L') for d in outlines) >= 2 * 10  # a step at each edge of ten bins


def test_the_legend_has_every_name():
  series = [charts.Series(name, i, [charts.Mark(i, 1)]) for i, name in enumerate(['_mine', 'a'])]
  svg = drawing.draw(charts.Chart('', 'x', [charts.Panel('', '', '', series, line_at=1)])).svg
  _, legend = svg.decode().split('id="legend_1"')
  assert re.findall('<text[^>]*>([^<]*)<', legend) == ['_mine', 'a']


def test_the_middle_setting_of_each_curve_is_drawn():
  points = [point('a', x, counts=made.counts(x)) for x in (0.1, 0.2, 0.3)]
  chart = described(made.results(points), 'acceptance')
  assert [[s.label for s in panel.series] for panel in chart.panels] == [['a at α = 0.2']] * 2
  assert 'a at α = 0.2' in drawing.draw(chart).svg.decode()


def test_only_parameters_that_vary_are_drawn():
  points = [point('one', 0.1, ratio=1.0), *(point('cos', [g, 1], ratio=1.0 + g, parameter='blocks') for g in (1, 5))]
  (panel,) = described(made.results(points), 'speed_by_parameter').panels
  assert marks(panel) == {'cos': [(1, 2.0), (5, 6.0)]} and panel.integer_x


def test_charts_without_numbers_are_left_out():
  assert charts.charts(made.results([point('target only', quality=28.0), point('a', 0.1, 27.0)])) == []
  ordinary = made.results([point('target only', quality=28.0, ratio=1.0), point('a', 0.1, 27.0, 1.2)])
  assert [c.name for c in charts.charts(ordinary)] == ['quality_latency_T0']


def test_a_file_names_every_curve_and_its_axes_as_they_are():
  points = [point('target only', quality=28.0, ratio=1.0), point(r'$\frac{$ of $x^2$', 0.1, 27.0, 1.2)]
  text = drawing.draw(described(made.results(points), 'quality')).svg.decode()
  for name in ('target only', r'$\frac{$ of $x^2$', 'BLEU', 'time relative to target only'):
    assert name in text


def test_charts_have_the_same_bytes_again():
  chart = described(made.cascades((0.0,)), 'acceptance')
  assert drawing.draw(chart) == drawing.draw(chart)
