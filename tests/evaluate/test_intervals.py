"""Intervals of a speed-up at a quality have quality and time of the same resampled examples."""

import dataclasses
import tracemalloc

import interval_coverage
import numpy as np
import pytest
import toys

from speccascade import methods, rules
from speccascade.evaluate import breakdown, Curve, Experiment, intervals, summary

TARGET = Curve('target only', methods.autoregressive, settings={'model': 1})
OPT = Curve('opt', methods.speculative, rules.opt, 'alpha', (0.0, 0.5), {'block': 3})
EXPERIMENT = Experiment(
  toys.task(40), toys.models, [TARGET, OPT], temperatures=(0.0,), latency_examples=40, quality_batch=1
)


def test_the_largest_speed_with_a_quality_is_at_a_point_or_where_the_curve_crosses():
  quality = np.array([[30.0, 26.0], [26.0, 30.0], [27.0, 26.0], [29.0, 29.0]])
  speed = np.array([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0], [1.5, 1.2]])
  wanted = np.full(4, 28.0)
  assert intervals.reaching(quality, speed, wanted, between=True).tolist() == [1.5, 2.0, -np.inf, 1.5]
  assert intervals.reaching(quality, speed, wanted, between=False).tolist() == [1.0, 2.0, -np.inf, 1.5]


def test_an_interval_has_no_lower_bound_where_the_quality_is_often_not_reached():
  values = np.linspace(1, 2, 1000)
  assert intervals.reached(values, 10**6) == pytest.approx([1.025, 1.975], abs=2e-3)
  values[::10] = -np.inf
  low, high = intervals.reached(values, 10**6)
  assert low is None and high == pytest.approx(1.97, abs=0.01)
  assert intervals.reached(np.full(1000, -np.inf), 10**6) is None


def test_examples_that_were_timed_together_are_drawn_together_and_the_others_alone():
  by_group, by_example = intervals.weights(3, [[4, 0], [2, -1]], 7)
  assert (by_group == intervals.draws(3, 2)).all() and (by_group.sum(1) == 2).all()
  assert (by_example[:, [4, 0, 2]] == by_group[:, [0, 0, 1]]).all()
  assert (by_example[:, [1, 3, 5, 6]].sum(1) == 4).all() and by_example.shape == (intervals.RESAMPLES, 7)
  groups, alone = intervals.weights(3, [[0], [1]], 4)  # as many of each, and yet drawn apart
  assert (alone[:, :2] == groups).all() and (alone[:, 2:] != groups).any()


def test_few_groups_have_no_interval_and_seven_a_wider_one_than_their_resamples():
  pairs = np.random.default_rng(0).lognormal(sigma=0.3, size=(8, 2))
  assert intervals.of_ratio(pairs[:5], (1, -1)) is None and intervals.of_ratio(pairs[:6], (1, -1)) is not None
  assert intervals.of_ratio(pairs * [1, 0], (1, -1)) is None and intervals.of_ratio(pairs * [0, 1], (1, -1)) is None
  low, high = intervals.of_ratio(pairs[:7], (1, -1))
  ratio = pairs[:7, 0].sum() / pairs[:7, 1].sum()
  assert low < ratio < high and low * high == pytest.approx(ratio**2)  # of the logarithm
  sums = intervals.draws(0, 7) @ pairs[:7]
  speeds = sums[:, 0] / sums[:, 1]
  resampled = intervals.interval(speeds)
  assert low < resampled[0] and high > resampled[1]
  wider = intervals.reached(speeds, 7)
  assert wider[0] < resampled[0] and wider[1] > resampled[1] and intervals.reached(speeds, 5) is None


@pytest.mark.full
@pytest.mark.parametrize('batch', interval_coverage.BATCHES)
def test_intervals_have_the_true_speed_up_as_often_as_they_say_or_are_none(batch):
  for groups in (2, 4):
    assert interval_coverage.coverage(groups, batch, 1) == dict(ratio=None, matched=None)
  for groups in (8, 32):
    for name, share in interval_coverage.coverage(groups, batch, 200).items():
      assert 0.91 <= share <= 0.99, (groups, name)


def _records(quality, seconds, batch=1):
  """Return the records of lines whose overlap is given by (curve, value) for each example, and times for each batch."""
  lines = []
  timings = []
  fields = dict(temperature=0.0, calls=[0, 1], positions=[0, 1], computed=[0, 1], drafted=[0, 0], cut_off=False)
  fields |= dict.fromkeys(('rounds', 'tested', 'accepted', 'deferred'), 0) | {'emitted': 6, 'source': [1] * 6}
  fields |= dict.fromkeys(('accepted_lengths', 'verified_lengths', 'tested_at', 'accepted_at'), [0])
  for (curve, value), right in quality.items():
    for example, count in zip(EXPERIMENT.task.examples, right, strict=True):
      words = example.target.split()
      text = ' '.join([*words[:count], *['x'] * (len(words) - count)])
      lines.append(fields | dict(curve=curve, value=value, example=example.index, prediction=text, tokens=[1] * 6))
    for i, s in enumerate(seconds[curve, value]):
      some = [*range(batch * i, batch * (i + 1))]
      about = dict(temperature=0.0, batch=batch, trial=0, examples=some, curve=curve, value=value)
      timings.append(about | dict(seconds=s, tokens=6))
  experiment = dataclasses.replace(EXPERIMENT, latency_batches=(batch,))
  return [result.to_json() for result in summary.points(experiment, lines, timings)]


def test_the_speed_up_at_the_large_models_quality_has_an_interval():
  rng = np.random.default_rng(0)
  base = rng.integers(2, 5, 40)
  names = [('target only', None), ('opt', 0.0), ('opt', 0.5)]
  quality = dict(zip(names, (base, base + 1, base - 1), strict=True))
  seconds = dict(zip(names, (np.full(40, 2.0), np.full(40, 1.0), np.full(40, 0.5)), strict=True))
  records = _records(quality, seconds)
  # better by the same on every example, so halfway between on every resample; times do not vary either
  assert records[1]['matched_ci'] == pytest.approx([3, 3]) and records[1]['matched_ci'] == records[2]['matched_ci']
  few = {name: s[:6] for name, s in seconds.items()}
  assert _records(quality, few)[1]['matched_ci'] == pytest.approx([3, 3])
  assert _records(quality, {name: s[:5] for name, s in seconds.items()})[1]['matched_ci'] is None
  noisy = {name: s * rng.lognormal(sigma=0.3, size=40) for name, s in seconds.items()}
  low, high = _records(quality, noisy)[1]['matched_ci']
  assert 2.2 < low < 2.9 < 3.1 < high < 4
  unsure = quality | {('opt', 0.0): rng.permutation(base), ('opt', 0.5): base - 2}
  low, high = _records(unsure, seconds)[1]['matched_ci']
  assert low is None and 2 <= high < 4  # half of the resamples are under the large model's quality
  assert _records(quality | {('opt', 0.0): base - 1}, seconds)[1]['matched_ci'] is None


def test_quality_and_time_are_resampled_together():
  slow = np.arange(40) % 2 == 0
  names = [('target only', None), ('opt', 0.0), ('opt', 0.5)]
  base = np.full(40, 3)
  # where examples that are slow for opt are drawn often, its quality is high: apart, more resamples would be fast
  quality = dict(zip(names, (base, np.where(slow, 4, 2), base - 2), strict=True))
  seconds = dict(zip(names, (np.full(40, 2.0), np.where(slow, 2.0, 0.5), np.full(40, 0.5)), strict=True))
  _, high = _records(quality, seconds)[1]['matched_ci']
  share = intervals.draws(0, 40)[:, slow].sum(1) / 40
  speed = 2 / (2 * share + 0.5 * (1 - share))
  better = (4 * share + 2 * (1 - share)) >= 3
  # between the points both are linear: opt at 0.0 has quality 2 + 2·share, at 0.5 1, and the wanted one is 3
  at = np.where(better, speed + (4 - speed) * np.clip((2 * share - 1) / (2 * share + 1), 0, 1), -np.inf)
  assert high == pytest.approx(intervals.reached(at, 40)[1])


def test_examples_of_one_batch_are_resampled_as_one_where_quality_meets_time():
  rng = np.random.default_rng(0)
  base = rng.integers(2, 5, 40)
  names = [('target only', None), ('opt', 0.0), ('opt', 0.5)]
  quality = dict(zip(names, (base, base + 1, base - 1), strict=True))  # halfway on every resample
  seconds = dict(zip(names, rng.lognormal(sigma=0.3, size=(3, 10)) / [[1], [2], [4]], strict=True))
  records = _records(quality, seconds, batch=4)
  sums = intervals.draws(0, 10) @ np.stack(list(seconds.values()), 1)
  speeds = (sums[:, 0] / sums[:, 1] + sums[:, 0] / sums[:, 2]) / 2
  assert records[1]['matched_ci'] == pytest.approx(intervals.reached(speeds, 10))
  assert records[1]['latency']['groups'] == 10 and records[1]['latency']['examples'] == 40


def test_the_rounds_of_a_text_are_read_from_its_tokens_or_not_at_all():
  line = dict(tested_at=[0, 0, 0], source=[0, -1, 0, 0, 0, -2, -1, 0, 0], accepted_lengths=[1, 1, 1, 1])
  assert breakdown.accepted_by_round(line) == [1, 3, 0, 2]
  full = dict(tested_at=[0, 0], source=[0, 0, 0, 0, 0, -1], accepted_lengths=[0, 1, 2])  # without bonus tokens
  assert breakdown.accepted_by_round(full) == [2, 2, 1]
  assert breakdown.accepted_by_round(full | {'accepted_lengths': [1, 1, 2]}) is None


def test_domains_are_those_of_the_examples_that_have_one():
  examples = [dataclasses.replace(e, info={'domain': 'code'} if e.index < 3 else {}) for e in toys.task(5).examples]
  experiment = dataclasses.replace(
    EXPERIMENT, task=dataclasses.replace(toys.task(5), examples=examples), latency_examples=0
  )
  lines = [
    dict(example=i, tested=4, accepted=i, emitted=9, rounds=3, tested_at=[1], source=[-1], accepted_lengths=[1, 0])
    for i in range(1, 5)
  ]
  found = breakdown.acceptance(experiment, lines)
  assert found['acceptance_by_domain'] == {'code': dict(examples=2, tested=8, accepted=3, emitted=18, rounds=6)}
  assert found['acceptance_by_prompt'] == [0, 0, 1, 0, 0, 1, 0, 1, 0, 1]
  assert (found['accepted_by_round'], found['texts_by_round']) == ([0], [4])


def test_resamples_of_many_examples_are_held_as_bytes_and_summed_in_blocks():
  n = 20_000
  statistics = np.random.default_rng(1).normal(size=(n, 3))
  tracemalloc.start()
  try:
    drawn = intervals.draws(5, n)
    sums = intervals.totals(drawn, statistics)
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
    intervals.draws.cache_clear()
  at_once = np.random.default_rng(5).multinomial(n, np.full(n, 1 / n), intervals.RESAMPLES)
  assert (drawn == at_once).all()
  np.testing.assert_allclose(sums, at_once @ statistics, rtol=1e-9)
  assert peak < 0.75 * 8 * at_once.size  # of one array of float64
