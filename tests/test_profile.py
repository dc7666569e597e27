"""A profile is what was observed, is kept whole, and is used for nothing that it is not of."""

from collections import Counter
import dataclasses
import json
import os
from pathlib import Path
import subprocess
import sys
import warnings

from matching import having, says
import numpy as np
import pytest

from speccascade import decode, embedded, methods, profile, Request, Sampler
from speccascade.data.examples import Example, Task
from speccascade.decode import __main__ as command
from speccascade.engine import profiles, requests
from speccascade.evaluate import summary, sv_studies
from speccascade.evaluate.curves import Curve
from speccascade.evaluate.experiment import Experiment
from speccascade.evaluate.report import charts, drawing
from speccascade.models import toy

EOS = 6
LARGE = toy.model(21, 7, scale=1.5, eos_ids=(EOS,))
TRIO = [toy.model(22, 7, scale=0.7, near=LARGE, eos_ids=(EOS,)), toy.model(23, 7, scale=0.5, near=LARGE), LARGE]
PROMPTS = [[1, 2], [3], [5, 4, 3, 2, 1, 0], [2, 2, 2], [0, 5]] * 8


@pytest.fixture(scope='module')
def made():
  named = [m.replace(digest=name) for m, name in zip(TRIO, 'abc')]
  return profile.profile(named, PROMPTS, block=3, max_new_tokens=13, batches=(1, 2), bins=(4, 3), trials=0), named


def law(model, prefix):
  table = np.asarray(model.params['table'])
  return np.exp(table[7 * prefix[-2] + prefix[-1]]) / np.exp(table[7 * prefix[-2] + prefix[-1]]).sum()


def test_every_token_of_the_output_is_observed_once(made):
  found, models = made
  texts = decode(methods.sv_exact(found, 3), models, PROMPTS, max_new_tokens=13, batch_size=2).tokens
  count = np.bincount(found.samples['request'].astype(int), minlength=len(PROMPTS))
  assert count.tolist() == [len(t) for t in texts]
  q, c, p = (law(m, [0, *PROMPTS[1]]) for m in TRIO)
  first = np.flatnonzero(found.samples['request'] == 1)[0]
  assert found.samples['place'][first] == 0
  assert found.samples['s'][first] == pytest.approx(np.minimum(q, c).sum(), abs=1e-5)
  assert found.samples['s_target'][first] == pytest.approx(np.minimum(q, p).sum(), abs=1e-5)
  assert min(abs(found.samples['a'][first] - np.minimum(1, c / q))) < 1e-5
  assert min(abs(found.samples['accept'][first] - np.minimum(1, p / q))) < 1e-5


def test_greedy_drafts_are_judged_by_what_the_models_are_sure_of():
  rows = requests.rows(TRIO, PROMPTS, max_new_tokens=13, sampler=Sampler(0.0), seed=0)
  found = profile.observe(TRIO, rows, 3)
  texts = decode(methods.autoregressive(), [LARGE], PROMPTS[:5], max_new_tokens=13, sampler=Sampler(0.0)).tokens
  assert max(found['place'][found['request'] < 5]) > 0 and set(found['accept']) == {0, 1}
  for number, (prompt, text) in enumerate(zip(PROMPTS[:5], texts, strict=True)):
    for i, sample in enumerate(np.flatnonzero(found['request'] == number)):
      q, c, p = (law(m, [0, *prompt, *text[:i]]) for m in TRIO)
      x = q.argmax()
      expected = np.minimum(q, c).sum(), min(1, c[x] / q[x]), np.minimum(q, p).sum(), p.argmax() == x
      observed = [found[name][sample] for name in ('s', 'a', 's_target', 'accept')]
      np.testing.assert_allclose(observed, expected, atol=1e-5)


def test_a_profile_is_the_same_from_its_file(made, tmp_path):
  found, _ = made
  plain, drafted = profiles.Way('plain'), profiles.Way('speculative', 2)
  found = dataclasses.replace(found, ways={1: drafted, 2: plain}, measured={1: {plain: 10.0, drafted: 12.5}})
  found.save(tmp_path / 'p.json')
  again = profiles.load(tmp_path / 'p.json')
  assert again.origin == found.origin and again.times == found.times and again.steps == found.steps
  assert again.ways == found.ways and again.measured == found.measured
  assert [str(again.way(n)) for n in (1, 2, 5)] == ['speculative, γ = 2', 'plain', 'plain']
  np.testing.assert_allclose(again.table.means, found.table.means)
  np.testing.assert_array_equal(again.table.a_edges, found.table.a_edges)
  assert all(np.allclose(again.samples[n], found.samples[n], atol=1e-5) for n in profiles.FIELDS)
  stored = json.loads((tmp_path / 'p.json').read_text())['table']
  assert np.sum(stored['counts']) == len(found.samples['s'])
  assert str(methods.sv_exact(str(tmp_path / 'p.json'))) == str(methods.sv_exact(found))


def test_other_models_and_samplers_are_refused_and_another_device_is_told(made):
  found, models = made
  run = lambda used, models, **kwargs: decode(methods.sv_exact(used, 3), models, [[1, 2]], max_new_tokens=3, **kwargs)
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    run(found, models)
  with pytest.raises(ValueError, match=having('toy23 (b)', 'toy23 (x)')):
    run(found, [models[0], models[1].replace(digest='x'), models[2]])
  with pytest.raises(ValueError, match=having('temperature 1', 'temperature 0.5', 'top_p 0.9')):
    run(found, models, sampler=Sampler(0.5, top_p=0.9))
  moved = dataclasses.replace(found, origin=dataclasses.replace(found.origin, device='TPU v9, bfloat16'))
  with pytest.warns(UserWarning, match=having('TPU v9', 'bfloat16', 'cpu')):
    run(moved, models)
  run(dataclasses.replace(found, origin=None), models, sampler=Sampler(0.5))


def test_what_a_killed_profile_left_beside_its_file_is_removed_by_the_next(tmp_path, monkeypatch):
  left, others = tmp_path / 'p.json.0123abcd.part', [tmp_path / 'p.json.part', tmp_path / 'q.json.0123abcd.part']
  for file in (left, *others, tmp_path / 'x.txt'):
    file.write_text('{')
  args = ['--models', 'a', 'b', 'c', '--data', str(tmp_path / 'x.txt'), '--out', str(tmp_path / 'p.json')]
  assert profile.main(args) == 1  # there are no such models
  assert not left.exists() and all(other.exists() for other in others)


def test_samplers_of_one_law_are_one(made):
  _, models = made
  of = lambda **numbers: profiles.Origin((), (), tuple(numbers.items()), '', '', 3)
  profiles.check_sampler(of(temperature=0.0), Sampler(0, top_p=0.9, top_k=3))
  profiles.check_sampler(of(temperature=0.7, top_p=0.9), Sampler(np.float32(0.7), top_p=np.float32(0.9)))
  with pytest.raises(ValueError, match='repetition_penalty 2'):
    profiles.check_sampler(of(temperature=0.0), Sampler(0, repetition_penalty=2.0))
  with pytest.raises(ValueError, match=having('prompt 1', 'sampler')):
    profile.profile(models, [[1], Request([2], temperature=0.3)], block=3, max_new_tokens=5, trials=0)


def test_a_batch_of_more_rows_than_were_measured_is_told(made):
  found, models = made
  with pytest.warns(UserWarning, match=having('2 rows', '4')):
    decode(methods.sv_exact(found, 3), models, PROMPTS[:4], max_new_tokens=5, batch_size=4)


def test_a_file_that_is_no_profile_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match='python -m speccascade.profile'):
    methods.sv_exact(str(tmp_path / 'p.json'))
  for old in (0, 1):
    (tmp_path / 'p.json').write_text(f'{{"speccascade_profile": {old}}}')
    with pytest.raises(ValueError, match=f'format {old}'):
      methods.sv_exact(str(tmp_path / 'p.json'))


def _set(found, path, value):
  """Return a profile's JSON with one of its parts replaced; '-' removes it."""
  *way, last = path.split('.')
  for name in way:
    found = found[int(name)] if isinstance(found, list) else found[name]
  if value == '-':
    del found[last]
  else:
    found[int(last) if isinstance(found, list) else last] = value


NAN = float('nan')
DAMAGES = [
  ('origin', '-', "'origin' is missing"),
  ('origin.names', ['a', 'b'], 'origin does not have names and digests of three models'),
  ('origin.digests.0', 3, 'origin does not have names and digests of three models'),
  ('origin.block', 0, 'origin.block=0 is not a whole number of at least 1'),
  ('origin.source', 1.5, 'origin.source=1.5 is not a whole number of at least 1'),
  ('origin.sampler.0.1', -1.0, 'Sampler: temperature=-1.0 is not'),
  ('table.means.0.0', 5, 'table.means has 5, not numbers from 0 to 1'),
  ('table.means.0.0', -1, 'table.means has -1, not numbers from 0 to 1'),
  ('table.means.0.0', NAN, 'table.means has nan, not numbers from 0 to 1'),
  ('table.means.0.0', 'much', 'table has edges or means that are no numbers'),
  ('table.means', [[0.5]], 'table.means does not have a row for each bin of S and a column for each bin of A'),
  ('table.s_edges', [0.5, 0.5, 0.2], 'table.s_edges do not ascend'),
  ('table.s_edges', 0.5, 'is no profile of this version'),
  ('table.a_edges.0', [0.9, 0.3], 'table.a_edges do not ascend'),
  ('table.a_edges', [], 'table.means does not have a row for each bin of S and a column for each bin of A'),
  ('times', {}, 'latency has no times; give those of a batch of one row at least'),
  ('times.1', {}, "latency needs the verifier's time, > 0"),
  ('times.1', {'-4': 0.1}, 'tokens=-4 is not a whole number'),
  ('times.1', {'4': NAN}, "latency needs the verifier's time, > 0"),
  ('times.1', {'4': 'long'}, "could not convert string to float: 'long'"),
  ('times.0', {'4': 0.1}, 'rows=0 is not a whole number of at least 1'),
  ('steps.1.0', NAN, 'steps has nan, not numbers from 0'),
  ('steps.1.0', -1, 'steps has -1, not numbers from 0'),
  ('steps.1', [0.1], 'steps are not three times for each of the batches that times has'),
  ('steps', {}, 'steps are not three times for each of the batches that times has'),
  ('samples.accept.0', 1.5, 'samples.accept has 1.5, not numbers from 0 to 1'),
  ('samples.place.0', -2, 'samples has -2, not numbers from 0'),
  ('samples.s', [0.5], 'samples do not have as many numbers of each kind'),
  ('ways', {}, 'ways is empty: it needs a way to decode'),
  ('ways.1', ['sv', 99], 'is no way to decode; give one of plain, speculative, sv, and γ of at most 3'),
  ('ways.1', ['sv', -1], 'is no way to decode'),
  ('ways.1', ['sv', 1.5], 'is no way to decode'),
  ('ways.1', ['sv', '3'], 'is no way to decode'),
  ('ways.-1', ['sv', 1], 'a number of rows=-1 is not a whole number of at least 1'),
  ('measured', {'1': [['sv', 2, NAN]]}, 'measured has nan, not numbers from 0'),
  ('measured', {'1': [['sv', 9, 5.0]]}, 'is no way to decode'),
]  # fmt: skip


@pytest.mark.parametrize(('part', 'value', 'said'), DAMAGES, ids=[f'{part} {value}'[:40] for part, value, _ in DAMAGES])
def test_a_part_that_cannot_have_been_measured_is_named_when_the_file_is_read(made, part, value, said, tmp_path):
  made[0].save(tmp_path / 'p.json')
  found = json.loads((tmp_path / 'p.json').read_text())
  _set(found, part, value)
  (tmp_path / 'p.json').write_text(json.dumps(found))
  with pytest.raises(ValueError, match='p.json') as error:
    methods.sv_exact(str(tmp_path / 'p.json'))
  assert said in str(error.value) and '\n' not in str(error.value)


# ---- the table ----


def test_bins_have_equal_counts_and_thin_ones_lean_on_their_row():
  rng = np.random.default_rng(0)
  s, a = rng.random(6000), rng.random(6000) ** 3
  table = profiles.fit(s, a, s * a, (5, 4))
  counts = profiles.binned(table, s, a, s * a)['counts']
  assert counts.shape == (5, 4) and counts.min() > 290 and counts.max() < 310
  assert np.abs(profiles.predicted(table, s, a) - s * a).mean() < 0.1
  few = profiles.fit(s[:8], a[:8], np.float64(np.arange(8) == 0), (2, 2))
  assert few.means.max() < 0.5  # the bin with the only accepted token has two


def test_equal_values_stay_in_one_bin():
  s, a = np.array([0.0, 1.0] * 50), np.array([1.0] * 100)
  table = profiles.fit(s, a, s, (20, 15))
  assert np.shape(table.means) == (2, 1)
  assert profiles.predicted(table, np.array([0.0, 1.0]), np.ones(2)) == pytest.approx([1 / 29, 28 / 29], abs=0.05)
  assert np.asarray(table(np.float32([0.0, 1.0]), np.float32([1.0, 1.0]))).tolist() == table.means[:, 0].tolist()


def test_an_interval_holds_the_mean_and_shrinks():
  low, high = profiles.wilson(np.array([3.0, 300.0, 0.0]), np.array([10.0, 1000.0, 0.0]))
  assert (low[:2] < 0.3).all() and (high[:2] > 0.3).all() and high[1] - low[1] < 0.06 < high[0] - low[0]


# ---- studies ----


def test_a_run_may_have_its_profile_from_python_or_several(made, tmp_path):
  found, _ = made
  found.save(tmp_path / 'p.json')
  given = Curve('given', methods.sv_exact, settings={'profile': found, 'block': 3})
  varied = Curve('varied', methods.sv_exact, parameter='profile', values=[str(tmp_path / 'p.json')])
  line = dict(value=None, temperature=1.0, example=0, positions=[1, 1, 3], calls=[1, 1, 2], emitted=2, rounds=2)
  lines = [line | dict(curve='given', verified_lengths=[1, 1])]
  titles = [t['title'] for t in sv_studies.of_run([*given.points(), *varied.points()], lines, batches=(1,))]
  assert titles.count('Break-even by batch') == 2 and 'Way taken by batch' in titles


def test_an_experiment_refuses_a_profile_of_another_sampler_and_knows_its_file(made, tmp_path):
  found, models = made
  found.save(tmp_path / 'p.json')
  task = Task('t', [Example(0, [1, 2], 'x')], 4, 3, {'exact': lambda examples, texts: 0.0})
  target = Curve('target only', methods.autoregressive, settings={'model': 2})
  curves = [target, Curve('SV', methods.sv_exact, settings={'profile': str(tmp_path / 'p.json')})]
  with pytest.raises(ValueError, match=having('SV, T = 0', 'temperature 1')):
    Experiment(task, models, curves, temperatures=[1.0, 0.0])
  experiment = Experiment(task, models, curves, temperatures=[1.0])
  before = experiment.describe()
  dataclasses.replace(found, ways={1: profiles.Way('plain')}).save(tmp_path / 'p.json')
  assert experiment.describe() != before
  with pytest.raises(ValueError, match='drafter'):
    Experiment(task, [models[1], *models[1:]], curves, temperatures=[1.0]).load()


def test_rates_of_another_batch_s_way_are_not_told(made):
  found, models = made
  ways = {1: profiles.Way('plain'), 4: profiles.Way('speculative', 2)}
  curve = Curve('SV', methods.sv_exact, settings={'profile': dataclasses.replace(found, ways=ways)})
  task = Task('t', [Example(i, [1, 2], 'x') for i in range(4)], 4, 3, {'exact': lambda examples, texts: 0.0})
  target = Curve('target only', methods.autoregressive, settings={'model': 2})
  experiment = Experiment(task, models, [target, curve], temperatures=[1.0], quality_batch=4)
  counts = dict(acceptance=0.5, tokens_per_round=2.0, length=3)
  (point,) = curve.points()
  assert summary._at_batch(experiment, point, 4, counts) == counts
  assert summary._at_batch(experiment, point, 1, counts) == counts | dict(acceptance=None, tokens_per_round=None)


def test_information_is_all_none_and_what_chance_makes_up():
  rng = np.random.default_rng(0)
  s, a = rng.random(4000), rng.random(4000)
  samples = dict(s=s, a=a, accept=s, s_target=s, request=np.zeros(4000), place=np.zeros(4000))
  table = profiles.fit(s, a, s, (10, 2))
  known = sv_studies.information(samples, table, (10,))['rows'][0]
  assert known[1] == pytest.approx(np.log2(10), abs=0.01) and known[2] == known[4] == pytest.approx(0)
  nothing = sv_studies.information(samples | {'accept': rng.random(4000)}, table, (5,))['rows'][0]
  assert nothing[5] == pytest.approx(nothing[7], rel=0.2) and nothing[5] < 0.06
  assert sv_studies.correlation(samples) == pytest.approx(1)


def test_a_table_predicts_its_own_data_best_and_says_how_well(made):
  found, models = made
  cold = sv_studies.robustness({'T = 1': found, 'same': found})['rows']
  assert cold[0][1] == cold[1][1] < cold[2][1]
  mean = sv_studies.reliability(found.table, found.samples)['rows']
  assert sum(row[5] for row in mean) == len(found.samples['s'])


def test_the_cost_model_finds_where_speculation_stops_paying(made):
  found, _ = made
  cheap = dataclasses.replace(found, steps={2: (1e-3, 1e-3, 1.0)}, times={2: {2: 1.0, 4: 1.0, 6: 1.0, 8: 1.0}})
  dear = dataclasses.replace(found, steps={2: (0.5, 0.5, 1.0)}, times={2: {2: 1.0, 4: 2.0, 6: 3.0, 8: 4.0}})
  gains = []
  for some in (cheap, dear):
    some = dataclasses.replace(some, latency=profiles.Latency.of(some.times, some.steps))
    x = sv_studies.simulate(some, 2)
    gains.append(x['sv'] / x['plain'])
    (row,) = sv_studies.break_even(some)['rows']
    assert row[0] == 2 and (row[11] > row[10]) == (x['sv'] > max(x['plain'], x['speculative']))
  assert gains[0] > 1.5 and gains[1] < 1


def test_a_run_tells_what_was_verified_in_vain_and_for_whom(made, tmp_path):
  found, models = made
  found.save(tmp_path / 'p.json')
  curve = Curve('SV', methods.sv_exact, settings={'profile': str(tmp_path / 'p.json'), 'block': 3})
  out = decode(curve.build(), models, PROMPTS, max_new_tokens=13, batch_size=2)
  names = ('emitted', 'rounds', 'verified_lengths')
  lines = [
    dict(curve='SV', value=None, temperature=1.0, example=i, positions=out.stats.positions[:, i].tolist(),
         calls=out.stats.calls[:, i].tolist(), **{name: getattr(out.stats, name)[i].tolist() for name in names})
    for i in range(len(PROMPTS))
  ]  # fmt: skip
  by_batch = Curve('by batch', methods.sv_exact, settings={'profile': str(tmp_path / 'p.json')})
  points = [*curve.points(), *by_batch.points()]
  tables = {t['title']: t for t in sv_studies.of_run(points, lines, batches=(1, 8))}
  assert tables['Way taken by batch']['rows'] == [['by batch', n, str(found.way(n))] for n in (1, 8)]
  (waste,) = tables['Verification in vain']['rows']
  assert waste[5] == pytest.approx(1 - out.stats.emitted.sum() / out.stats.positions[2].sum())
  rows = tables['Verified lengths by request: SV 1.0']['rows']
  assert len(rows) == 11 and rows[0][2] <= rows[10][2] <= rows[5][2]
  assert sum(rows[10][4:]) == sum(rows[10][3:4]) == out.stats.rounds.sum()
  assert all(sum(n * x for n, x in enumerate(row[4:])) == pytest.approx(row[2] * row[3]) for row in rows[:10])
  assert {'Information gain of the companion', 'Break-even by batch'} < set(tables)
  assert sv_studies.of_run([], lines) == []
  drawn = [drawing.draw(chart) for chart in charts.charts({'points': [], 'studies': list(tables.values())})]
  assert [d.chart.name for d in drawn] == ['reliability', 'verified_lengths']
  assert 'verified fewest' in drawn[1].files['verified_lengths.svg'].decode()


# ---- ways to decode ----


def test_without_measuring_a_way_has_to_promise_more_than_a_simpler_one(made):
  found, _ = made
  costs = {2: {2 * n: 1 + n / 1e3 for n in range(1, 5)}}  # drafts cost nothing to verify
  chosen = {}
  for name, steps in dict(cheap=(1e-3, 1e-3, 1.0), companion=(1e-3, 5.0, 1.0), draft=(5.0, 1e-3, 1.0)).items():
    some = dataclasses.replace(found, steps={2: steps}, times=costs)
    some = dataclasses.replace(some, latency=profiles.Latency.of(some.times, some.steps))
    (chosen[name],) = sv_studies.best_ways(some).values()
    speed = sv_studies.candidates(some, 2)
    assert all(speed[chosen[name]] * 1.05 > x for x in speed.values())
  drafted, plain = profiles.Way('speculative', 3), profiles.Way('plain')
  assert chosen == {'cheap': drafted, 'companion': drafted, 'draft': plain}


@pytest.fixture
def spending(monkeypatch):
  """Return a clock by which a decode in a way takes such a time, longer with each trial, and the ways as they came."""
  real, made, now = profile.sv_exact, [], [0.0]

  def clock_of(spent):
    def decode(method, *, seed, **call):
      now[0] += spent[made[-1]] * (1 + seed) / 4  # of eight texts, two at a time; a trial's seed is its number
      return plain_decode(method, seed=seed, **call)

    plain_decode = profile.decode
    monkeypatch.setattr(profile, 'sv_exact', lambda found: made.append(found.ways[2]) or real(found))
    monkeypatch.setattr(profile, 'decode', decode)
    return lambda: now[0]

  return clock_of, made


def test_the_fastest_way_is_taken_whatever_the_cost_model_says(made, spending, monkeypatch):
  found, models = made
  spent = {profiles.Way('plain'): 3.0, profiles.Way('sv', 3): 4.0}
  spent |= {profiles.Way('speculative', n): x for n, x in ((1, 4.0), (2, 2.0), (3, 6.0))}
  monkeypatch.setattr(sv_studies, 'candidates', lambda found, batch: dict.fromkeys(spent, 1.0))
  found = dataclasses.replace(found, times={2: found.times[2]})
  measured = profile.measure_ways(found, models, PROMPTS[:3], max_new_tokens=5, clock=spending[0](spent))
  lengths = np.bincount(found.samples['request'].astype(int))
  tokens = [sum(lengths[(8 * trial + i) % 3] for i in range(8)) for trial in range(4)]  # each goes on with the prompts
  assert len(set(tokens[1:])) > 1
  speed = {way: np.median([tokens[t] / (x * (1 + t)) for t in (1, 2, 3)]) for way, x in spent.items()}
  assert measured[2] == {way: pytest.approx(x) for way, x in speed.items()}
  found = dataclasses.replace(found, measured=measured)
  found = dataclasses.replace(found, ways=sv_studies.best_ways(found))
  assert found.ways == {2: profiles.Way('speculative', 2)}
  rows = sv_studies.ways(found)['rows']
  assert [row[:2] + row[4:] for row in rows] == [
    [2, str(way), 1, 1, 'yes' if way == profiles.Way('speculative', 2) else ''] for way in spent
  ]
  assert [row[2:4] for row in rows] == [[x, pytest.approx(x / rows[0][2])] for x in measured[2].values()]


PLAIN = profiles.Way('plain')
TURNS = [
  ({1: 4.0, 2: 2.0, 3: 3.0}, [[0, 1], [0, 1, 2], [0, 2, 3]]),  # up to the longest draft
  ({1: 2.0, 2: 3.0}, [[0, 1], [0, 1, 2]]),
  ({}, [[0]]),
]


@pytest.mark.parametrize('seconds, turns', TURNS)
def test_the_drafts_beside_the_fastest_are_tried_until_both_were(seconds, turns, made, spending, monkeypatch):
  found, models = made
  way = lambda n: profiles.Way('speculative', n) if n else PLAIN
  clock_of, tried = spending
  monkeypatch.setattr(sv_studies, 'candidates', lambda found, batch: {way(n): 1.0 for n in turns[0]})
  found = dataclasses.replace(found, times={2: found.times[2]})
  clock = clock_of({PLAIN: 9.0} | {way(n): x for n, x in seconds.items()})
  measured = profile.measure_ways(found, models, PROMPTS[:3], max_new_tokens=5, trials=1, clock=clock)
  assert {*measured[2]} == {way(n) for turn in turns for n in turn}
  assert Counter(tried) == Counter(2 * [way(n) for turn in turns for n in turn])


# ---- the command ----


@pytest.mark.full
def test_two_commands_lead_from_weights_to_texts(tmp_path, capsys):
  folder = Path(embedded.__file__).parent / 'pretrained'
  models = ['--models', *(str(folder / name) for name in ('small', 'large@1', 'large'))]
  (tmp_path / 'lines.txt').write_text('\n'.join(e.prompt for e in embedded.task(count=12).examples))
  options = ['--data', str(tmp_path / 'lines.txt'), '--tokens=16', '--block=2', '--batches=2', '--temperature=0.7']
  assert profile.main([*models, *options, '--trials=1', '--out', str(tmp_path / 'p.json')]) == 0
  said = capsys.readouterr().out
  assert 'Break-even by batch' in said and 'Ways to decode by batch' in said
  found = profiles.load(tmp_path / 'p.json')
  speeds = found.measured[2]
  assert {('plain', 0), ('speculative', 1), ('speculative', 2), ('sv', 2)} <= speeds.keys()
  assert found.ways == sv_studies.best_ways(found) and f'{speeds[found.ways[2]]:.1f}' in said
  (tmp_path / 'in.jsonl').write_text('"A dog runs."\n"Two men sit."\n')
  paths = [str(tmp_path / name) for name in ('in.jsonl', 'out.jsonl')]
  options = ['--method=sv_exact', '--block=2', '--max-new-tokens=16', '--profile', str(tmp_path / 'p.json')]
  run = [*models, *options, *paths]
  assert command.main(run) == 1 and says(capsys.readouterr().err, 'temperature 0.7', 'temperature 1')
  assert command.main([*run, '--temperature=0.7']) == 0
  assert len((tmp_path / 'out.jsonl').read_text().splitlines()) == 2
  options = ['--times', str(tmp_path / 'p.json'), '--batches=1', '--tokens=16', '--out', str(tmp_path / 'q.json')]
  options += ['--data', str(tmp_path / 'lines.txt'), '--trials=0']
  assert profile.main([*models, *options, '--against', str(tmp_path / 'p.json')]) == 0
  assert 'Tables on the samples of others' in capsys.readouterr().out
  old, new = (profiles.load(tmp_path / name) for name in ('p.json', 'q.json'))
  assert set(new.times) == set(new.ways) == {1} and (new.table.means == old.table.means).all() and not new.measured


@pytest.mark.full
def test_on_a_mesh_batches_are_timed_of_which_every_device_has_rows(tmp_path):
  folder = Path(embedded.__file__).parent / 'pretrained'
  (tmp_path / 'lines.txt').write_text('\n'.join(e.prompt for e in embedded.task(count=5).examples))
  models = (str(folder / name) for name in ('small', 'large@1', 'large'))
  asked = [sys.executable, '-m', 'speccascade.profile', '--models', *models]
  options = ['--mesh=data=2,model=2', '--batches=1,2,3', '--block=2', '--tokens=8', '--trials=0', '--temperature=0']
  files = ['--data', str(tmp_path / 'lines.txt'), '--out', str(tmp_path / 'p.json')]
  flags = f'{os.environ["XLA_FLAGS"]} --xla_force_host_platform_device_count=4'
  env = os.environ | {'XLA_FLAGS': flags}
  done = subprocess.run([*asked, *options, *files], env=env, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  found = profiles.load(tmp_path / 'p.json')
  assert set(found.times) == {2, 4} and found.origin.device.startswith('4 × ')


@pytest.mark.parametrize(
  'arguments, said',
  [
    ([], ['--data', '--times']),
    (['--data', 'no.txt'], ['no.txt']),
    (['--times', 'no.json'], ['no.json']),
    (['--data', __file__, '--against', 'no.json'], ['no.json']),
    (['--data', 'no.txt', '--bins=3'], ['--bins', 'two']),
    (['--data', 'no.txt', '--trials=-1'], ['--trials=-1']),
    (['--data', 'no.txt', '--temperature=-1'], ['temperature=-1']),
    (['--data', 'no.txt', '--tokens=5'], ['--tokens 5', '--block 5']),
    (['--times', 'no.json', '--top-p=0.5'], ['--top-p', '--times']),
  ],
)
def test_the_command_refuses_in_a_sentence(arguments, said, tmp_path, capsys):
  models = ['--models', 'a', 'b', 'c', '--out', str(tmp_path / 'p.json')]
  assert profile.main([*models, *arguments]) == 1
  assert says(capsys.readouterr().err, *said)


def test_what_is_there_is_not_replaced_unasked(tmp_path, capsys):
  (tmp_path / 'p.json').write_text('{}')
  assert profile.main(['--models', 'a', 'b', 'c', '--data', 'x', '--out', str(tmp_path / 'p.json')]) == 1
  assert says(capsys.readouterr().err, 'p.json', '--overwrite')
