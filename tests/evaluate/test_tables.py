"""The papers' tables, checked on results small enough to work out by hand."""

import made
from made import point
import pytest

from speccascade.evaluate.report import points as pts
from speccascade.evaluate.report import tables


def curve(*pairs, **more):
  """Return a curve of (quality, speed-up) at α = 0, 1, 2, …"""
  return [point('curve', float(i), q, r, **more) for i, (q, r) in enumerate(pairs)]


ZERO = dict(tested=0, accepted=0, emitted=0, rounds=0)


# ---- where a curve first reaches a quality ----


CURVES = {
  'it never does': (curve((20.0, 1.0), (27.9, 2.0)), 28.0, None),
  'it has no points': ([], 28.0, None),
  'it is above all along': (curve((29.0, 1.0), (30.0, 1.5), (28.5, 2.5)), 28.0, 2.5),
  'halfway': (curve((30.0, 1.0), (26.0, 2.0)), 28.0, pytest.approx(1.5)),
  'near its end': (curve((30.0, 1.0), (26.0, 2.0)), 27.0, pytest.approx(1.75)),
  'on the way up': (curve((26.0, 2.0), (30.0, 1.0)), 27.0, pytest.approx(1.75)),
  'the fastest crossing is the last': (
    curve((29.0, 1.0), (27.0, 1.2), (29.0, 1.6), (27.0, 2.0)),
    28.0,
    pytest.approx(1.8),
  ),
  'the fastest crossing is not the last': (
    curve((29.0, 1.0), (27.0, 3.0), (29.0, 1.0)),
    28.0,
    pytest.approx(2.0),
  ),
  'a single point is as good': ([point('SpecDecode', quality=28.0, ratio=1.3)], 28.0, 1.3),
  'a single point is worse': ([point('SpecDecode', quality=27.99, ratio=1.3)], 28.0, None),
  'a level stretch counts to its fast end': (curve((28.0, 1.0), (28.0, 1.7), (27.0, 2.0)), 28.0, 1.7),
  'between two block sizes there is nothing': (curve((29.0, 1.0), (27.0, 2.0), parameter='block'), 28.0, 1.0),
  'between values that are no numbers there is nothing': (
    [point('seq', v, q, r, parameter='score') for v, q, r in (('sum', 29.0, 1.0), ('mean', 27.0, 2.0))],
    28.0,
    1.0,
  ),
  'a point has no time': (
    [point('curve', 0.0, 29.0, 1.0), point('curve', 0.5, 40.0), point('curve', 1.0, 27.0, 2.0)],
    28.0,
    pytest.approx(1.5),
  ),
}


@pytest.mark.parametrize('points, wanted, speed', CURVES.values(), ids=CURVES)
def test_the_speed_of_a_curve_is_the_largest_at_which_it_has_the_quality(points, wanted, speed):
  assert tables.matching_speed(points, 'bleu', wanted) == speed


def test_the_best_quality_is_that_of_points_no_slower_and_the_faster_of_equals():
  points = curve((31.0, 0.99), (29.0, 1.0), (29.0, 1.2), (20.0, 3.0))
  assert tables.best_within(points, 'bleu') is points[2]
  assert tables.best_within(points[:1], 'bleu') is None


def test_curves_are_in_the_order_of_their_numbers_and_of_the_list_without():
  points = [point('a', 0.5), point('b', [5, 1], parameter='blocks'), point('a', 0.1), point('b', [1, 1]), point('c')]
  grouped = pts.curves(points)
  assert [p.value for p in grouped['a']] == [0.1, 0.5]
  assert [p.value for p in grouped['b']] == [[1, 1], [5, 1]]
  named = [point('s', 'sum'), point('s', 'mean')]
  assert [p.value for p in pts.curves(named)['s']] == ['sum', 'mean']


# ---- settings that decoded alike ----


def test_settings_that_decoded_alike_are_one_with_all_their_values():
  counts = made.counts(0.5)
  alike = [point('lossy', a, 28.0, 1.3, counts=counts) for a in (0.1, 0.3, 0.5)]
  other = point('lossy', 0.9, 28.0, 1.1, counts=made.counts(0.6))
  again = point('SpecDecode', None, 28.0, 1.4, counts=counts)
  grouped = pts.distinct([*alike, other, again])
  assert [(p.setting, p.ratio) for p in grouped] == [('α = 0.1, 0.3, 0.5', 1.3), ('α = 0.9', 1.1), ('', 1.4)]
  assert pts.distinct([point('a', 0.1, ratio=1.0), point('a', 0.2, ratio=1.0)])[1].value == 0.2
  between = [alike[0], point('lossy', 0.2, 20.0, 3.0, counts=made.counts(0.7)), alike[1]]
  assert pts.distinct(between) == between  # a curve goes through what lies between them


# ---- tables ----


def by_title(results, start):
  return [t for t in tables.tables(results) if t['title'].startswith(start)]


def test_the_cascades_table_has_both_halves_of_each_curve():
  points = [
    point('target only', quality=28.0, ratio=1.0),
    point('draft only', quality=20.0, ratio=4.0),
    *curve((30.0, 1.0), (26.0, 2.0)),
    point('weak', 0.5, 27.0, 1.5),
    point('slow', 0.5, 29.0, 0.5),
    point('untimed', 0.5, 29.0),
  ]
  (table,) = by_title(made.results(points), 'Quality against')
  assert table['rows'] == [
    ['curve', pytest.approx(1.5), 30.0, 'α = 0', 1.0],
    ['weak', None, 27.0, 'α = 0.5', 1.5],
    ['slow', 0.5, None, None, None],
  ]
  assert 'never reaches it (weak)' in table['note'] and '28.00' in table['note']


def test_every_temperature_and_batch_size_has_tables_of_its_own():
  points = [point('target only', quality=28.0, ratio=1.0, temperature=t, batch=b) for t in (0.0, 1.0) for b in (1, 4)]
  titles = [t['title'] for t in tables.tables(made.results(points))]
  assert titles == [f'Summary, T = {t}, batch {b}' for t in (0, 1) for b in (1, 4)]


def test_the_summary_has_speed_and_quality_first_and_times_only_where_there_are_any():
  results = made.results([point('target only', quality=28.0), point('a', 0.3, 27.5, counts=made.counts(0.5, 0.25))])
  table = tables.tables(results)[0]
  assert 'speed-up' not in table['columns']
  assert table['rows'][1][:4] == ['a', 'α = 0.3', 27.5, '26.00 … 29.00']
  assert table['rows'][1][-1] == 0.25 and table['rows'][0][-3:] == [None] * 3
  counts = made.counts(0.5, length=31.5, cut_off=0.25)
  points = [point('target only', quality=28.0, ratio=1.0), point('a', 0.3, 27.5, 1.2, counts=counts)]
  table = tables.tables(made.results(points))[0]
  assert table['columns'][:4] == ['method', 'setting', 'speed-up', 'BLEU']
  row = dict(zip(table['columns'], table['rows'][1], strict=True))
  assert (row['speed-up'], row['95 % of speed-up'], row['tokens/s']) == (1.2, '1.16 … 1.24', 120.0)
  assert (row['tokens'], row['cut off']) == (31.5, 0.25) and 'share that reached the limit' in table['note']


def test_collaborative_decoding_is_relative_to_the_standard_ensemble_at_each_methods_best_block():
  points = [
    point('ensemble', quality=30.0, ratio=1.0),
    point('CoS', [5, 1], 30.1, 1.4, parameter='blocks'),
    point('CoS', [1, 1], 29.9, 1.6, parameter='blocks'),
    point('naive CoS', 5, 30.0, 1.2, parameter='block'),
  ]
  points[3] = made.timed(points[3], tokens_per_s=150.0)
  (table,) = by_title(made.results(points, reference='ensemble'), 'Collaborative')
  assert table['columns'][2:5] == ['tokens/s', 'speed-up over ensemble', 'tokens/s ratio']
  assert [row[:5] for row in table['rows']] == [
    ['ensemble', '', 100.0, 1.0, 1.0],
    ['CoS', 'γ = (1, 1)', 160.0, 1.6, 1.6],
    ['naive CoS', 'γ = 5', 150.0, 1.2, 1.5],
  ]
  both = [point('target only', quality=28.0, ratio=1.0), *(made.timed(p, ratio=p.ratio * 0.5) for p in points)]
  (again,) = by_title(made.results(both), 'Collaborative')
  assert [row[3] for row in again['rows']] == [row[3] for row in table['rows']]


def test_the_deferral_table_goes_from_the_small_model_to_the_large():
  points = [
    point('target only', quality=28.0),
    point('draft only', quality=20.0),
    point('oracle', 0.1, 29.0, counts=made.counts(0.5, 0.4)),
    point('oracle', 0.5, 25.0, counts=made.counts(0.5, 0.2)),
  ]
  (table,) = by_title(made.results(points), 'Quality by deferral')
  assert [row[2:] for row in table['rows']] == [[0.0, 20.0], [1.0, 28.0], [0.2, 25.0], [0.4, 29.0]]
  assert not by_title(made.results(points[:2]), 'Quality by deferral')


def test_the_table_by_domain_has_what_a_call_of_the_large_model_yields():
  domains = {'qa': dict(examples=2, tested=10, accepted=4, emitted=9, rounds=6), 'code': dict(examples=1) | ZERO}
  timed = made.timed(point('a', 0.3, ratio=1.5, counts=made.counts(0.5) | {'acceptance_by_domain': domains}))
  timed = made.timed(timed, ratio_by_domain={'qa': 1.4})
  (table,) = by_title(made.results([point('target only', ratio=1.0), timed]), 'By domain')
  assert table['rows'] == [['a', 'α = 0.3', 'code', 1, None, None, None], ['a', 'α = 0.3', 'qa', 2, 0.4, 1.5, 1.4]]


# ---- the verdict ----


LARGE = point('target only', quality=28.0, ratio=1.0, temperature=1.0)


def verdict(*points, **more):
  return tables.verdicts(made.results([LARGE, *points], **more))


def at_one(*args, **more):
  return point(*args, temperature=1.0, **more)


def test_the_verdict_names_the_fastest_point_of_those_that_keep_the_quality():
  token = [at_one('Token', 0.5, 28.4, 1.6), at_one('Token', 0.7, 28.0, 1.95), at_one('Token', 0.9, 27.9, 2.4)]
  (alone,) = verdict(*token, at_one('OPT', 0.1, 27.0, 3.0))
  assert alone == (
    "T = 1: Token at α = 0.7 has at least the large model's BLEU on these 50 examples at 1.95× (1.91 … 1.99); "
    'no other curve does.'
  )
  (two,) = verdict(*token, at_one('OPT', 0.1, 28.0, 1.5), at_one('slow', 0.1, 30.0, 0.9))
  assert two.endswith('; so has OPT at α = 0.1 at 1.50× (1.46 … 1.54).')
  (many,) = verdict(*token, *(at_one(f'c{i}', quality=28.0, ratio=1.5 - i / 10) for i in range(5)))
  assert '; so have c0 at 1.50×' in many and many.endswith(' and 2 more.') and 'slow' not in many


def test_the_verdict_says_where_no_point_is_faster_and_nothing_where_nothing_was_timed():
  (none,) = verdict(at_one('Token', 0.7, 27.0, 2.0), at_one('OPT', 0.1, 29.0, 0.8))
  assert none == "T = 1: No point is faster and has at least the large model's BLEU on these 50 examples."
  assert verdict(at_one('Token', 0.7, 27.0)) == verdict() == []
  (nothing,) = verdict(at_one('Token', 0.7, 0.0, 2.0))
  assert nothing == 'T = 1: The BLEU is 0 at every point; examples.jsonl has the outputs: does the metric fit them?'
  points = [at_one('ensemble', quality=28.0, ratio=1.0), at_one('CoS', quality=28.5, ratio=1.2)]
  (said,) = tables.verdicts(made.results(points, reference='ensemble'))
  assert said == 'T = 1: CoS has at least the BLEU of ensemble on these 50 examples at 1.20× (1.16 … 1.24).'


def test_the_brief_table_has_how_far_intervals_reach():
  table = tables.brief(made.results([LARGE]), 'T = 1', [LARGE, at_one('Token', 0.7, 27.5, 2.0), at_one('untimed')])
  assert table['columns'] == ['method', 'setting', 'BLEU', 'speed-up']
  assert table['rows'][1:] == [['Token', 'α = 0.7', '27.50 ± 1.50', '2.00 ± 0.04'], ['untimed', '', None, None]]


# ---- as text ----


def test_values_are_written_as_they_were_given():
  assert [pts.text(x) for x in (None, 0.1, 3, [0.5, 0.5], 'mean')] == ['–', '0.1', '3', '(0.5, 0.5)', 'mean']
  assert point('a', [0.5, 0.5], parameter='weights').setting == 'λ = (0.5, 0.5)'
  assert point('a').setting == ''


def test_methods_whose_intervals_overlap_are_called_equal():
  large = point('target only', quality=28.0, ratio=1.0)
  fast, near, slow, unsure = (
    point(name, 0.5, 28.0, ratio, matched_ci=ci)
    for name, ratio, ci in (
      ('fast', 1.5, [1.3, 1.7]),
      ('near', 1.4, [1.2, 1.31]),
      ('slow', 1.1, [0.9, 1.29]),
      ('unsure', 1.2, [None, 1.4]),
    )
  )
  never = point('never', 0.5, 20.0, 2.0, matched_ci=None)
  (table,) = by_title(made.results([large, fast, near, slow, unsure, never]), 'Quality against')
  at = table['columns'].index('rank')
  assert [row[at - 2 : at + 1] for row in table['rows']] == [
    [1.5, '1.30 … 1.70', 'fastest'],
    [1.4, '1.20 … 1.31', 'equal'],
    [1.1, '0.90 … 1.29', 'slower'],
    [1.2, '– … 1.40', 'equal'],
    [None, None, None],
  ]
  assert 'Equal in speed to the large model: slow, unsure.' in table['note']
