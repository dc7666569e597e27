"""The protocols measure what they say, compile once a sweep, and end the same however often they were cut off."""

import collections
import dataclasses
import functools
import io
import json

from emitted import traces
import jax
import numpy as np
import pytest
import toys

from speccascade import decode, embedded, methods, rules, Sampler
from speccascade.data import metrics
from speccascade.evaluate import Curve, Experiment, intervals, protocols, summary, trace
from speccascade.host import multihost, progress
from speccascade.host.errors import RunError
from speccascade.host.runs import RunDir
from speccascade.models import toy
from speccascade.planning import timing

TARGET = Curve('target only', methods.autoregressive, settings={'model': 1})
DRAFT = Curve('draft only', methods.autoregressive, settings={'model': 0})
OPT = Curve('opt', methods.speculative, rules.opt, 'alpha', (0.0, 0.3, 0.6), {'block': 3})
EXPERIMENT = Experiment(
  toys.task, toys.models, [TARGET, DRAFT, OPT], quality_batch=4, latency_examples=4, latency_trials=2, trace_examples=2
)
ALONE = dataclasses.replace(EXPERIMENT, curves=[TARGET, DRAFT], temperatures=(0.0,))


@pytest.fixture(scope='module')
def loaded():
  return protocols.Loaded.of(EXPERIMENT)


@pytest.fixture(scope='module')
def models(loaded):
  return loaded.models


@pytest.fixture(scope='module')
def quality(loaded, tmp_path_factory):
  """Return the path of a whole quality journal."""
  return _quality(EXPERIMENT, loaded, tmp_path_factory.mktemp('quality') / 'examples.jsonl')


def _quality(experiment, loaded, path, load=None, protocol=protocols.quality):
  """Complete a journal, and return its path."""
  protocol(experiment, load or (lambda: loaded), RunDir(path.parent).journal(path.name))
  return path


def _records(*args):
  """Return the points as results.json has them."""
  return [result.to_json() for result in summary.points(*args)]


_latency = functools.partial(_quality, protocol=protocols.latency)


def _lines(path, point=None):
  """Return the lines of a journal, or those of one point of the results."""
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  return [x for x in lines if point is None or all(x[k] == point[k] for k in ('curve', 'value', 'temperature'))]


# ---- quality ----


@pytest.mark.full
def test_every_line_is_what_decoding_that_example_alone_gives(models, quality):
  lines = _lines(quality)
  assert len(lines) == 2 * 5 * 10
  for line in lines[::7]:
    point = next(p for p in EXPERIMENT.points if p.key == (line['curve'], line['value']))
    example = EXPERIMENT.task.examples[line['example']]
    out = decode(
      point.build(),
      models,
      [example.prompt],
      max_new_tokens=6,
      sampler=Sampler(line['temperature']),
      example_ids=[example.index],
      max_prompt_tokens=4,
    )
    assert line['tokens'] == out.tokens[0] and line['prediction'] == ' '.join(map(str, out.tokens[0]))
    assert line['emitted'] == len(line['tokens']) == len(line['source'])
    assert line['accepted'] == out.stats.accepted[0] and line['rounds'] == out.stats.rounds[0]
    assert line['calls'][: len(out.stats.calls)] == out.stats.calls[:, 0].tolist() and len(line['calls']) == 2


def test_a_text_is_cut_off_where_no_eos_of_its_own_model_ends_it(loaded, tmp_path):
  small, large = loaded.models
  ends = {'draft only': (3, 4, 5), 'target only': large.network.eos_ids}
  small = small.replace(network=dataclasses.replace(small.network, eos_ids=ends['draft only']))
  experiment = dataclasses.replace(EXPERIMENT, curves=[TARGET, DRAFT])
  lines = _lines(_quality(experiment, protocols.Loaded([small, large], loaded.prompts), tmp_path / 'q'))
  assert [x['cut_off'] for x in lines] == [x['tokens'][-1] not in ends[x['curve']] for x in lines]
  assert {x['cut_off'] for x in lines if x['curve'] == 'draft only'} == {True, False}


def test_a_journal_cut_anywhere_is_completed_to_the_same_bytes(loaded, quality, tmp_path):
  whole = quality.read_bytes()
  lines = whole.splitlines(keepends=True)
  half = b''.join(lines[:52]) + lines[52][:30]
  for start in (b'', b''.join(lines[:10]), b''.join(lines[:13]), half, b''.join(lines[:-1]), whole):
    path = tmp_path / f'{len(start)}.jsonl'
    path.write_bytes(start)
    assert _quality(EXPERIMENT, loaded, path).read_bytes() == whole


def test_a_finished_journal_needs_no_models_and_is_of_its_experiment(loaded, quality):
  _quality(EXPERIMENT, None, quality, load=lambda: pytest.fail('loaded'))
  with pytest.raises(RunError, match='another run'):
    _quality(dataclasses.replace(EXPERIMENT, temperatures=(1.0,)), loaded, quality)


def test_what_follows_a_stop_string_is_not_decoded():
  task = embedded.task(count=3)
  experiment = dataclasses.replace(EXPERIMENT, task=task, models=embedded.models, latency_examples=0)
  loaded = protocols.Loaded.of(experiment)
  decoded = lambda made: protocols.run_method(made, loaded, DRAFT.build(), 0.0, task.examples)
  free = decoded(experiment)
  word = free.texts[0].split()[2]
  stopping = dataclasses.replace(experiment, task=dataclasses.replace(task, stop=(f' {word}',)))
  stopped = decoded(stopping)
  assert stopped.finish_reasons[0] == 'stop' and stopped.texts[0] == free.texts[0].partition(f' {word}')[0]
  assert len(stopped.tokens[0]) < len(free.tokens[0])
  assert stopped.tokens[0] == free.tokens[0][: len(stopped.tokens[0])]
  assert f"stop [' {word}']" in stopping.describe() and 'stop [' not in experiment.describe()


# ---- compilation ----


@pytest.mark.long
@pytest.mark.parametrize('batch', [1, 3])
def test_a_sweep_over_a_split_with_a_rest_compiles_once(loaded, tmp_path, batch):
  sweep = Curve('diff', methods.speculative, rules.diff, 'alpha', (0.0, 0.1, 0.2, 0.3), {'block': 2})
  experiment = dataclasses.replace(
    EXPERIMENT, curves=[TARGET, sweep], quality_batch=batch, temperatures=(0.5, 0.7), latency_batches=(batch,)
  )
  run = functools.partial(_quality, experiment, loaded, tmp_path / 'q')
  times = functools.partial(_latency, experiment, loaded, tmp_path / 'l')
  assert traces(run, times) == [2, 0]  # one program for each method, queued or not


@pytest.mark.long
def test_one_program_serves_temperature_0_too_with_the_same_lines(loaded, quality, tmp_path):
  shared = dataclasses.replace(EXPERIMENT, one_program=True)
  found = []
  assert traces(lambda: found.append(_quality(shared, loaded, tmp_path / 'q').read_bytes())) == [3]
  assert found == [quality.read_bytes()]


def test_programs_are_dropped_where_the_kernel_would_refuse_more_mappings(monkeypatch):
  dropped = []
  monkeypatch.setattr(jax, 'clear_caches', lambda: dropped.append(True))
  protocols.few_executables()
  assert not dropped
  monkeypatch.setattr(protocols, 'MAPS', 1)
  protocols.few_executables()
  assert dropped == [True]


# ---- latency ----


def test_every_point_is_timed_in_turn_on_each_example():
  experiment = dataclasses.replace(EXPERIMENT, latency_batches=(1, 2))
  plan = protocols.latency_plan(experiment)
  assert len(plan) == 2 * 2 * 5 * (4 + 2)  # temperatures × trials × points × groups
  keys = {p.key for p in experiment.points}
  orders = set()
  for i in range(0, len(plan), 5):
    group = plan[i : i + 5]
    assert len({t.group() for t in group}) == 1 and {t.point.key for t in group} == keys
    orders.add(tuple(t.point.key for t in group))
  assert len(orders) > 10
  assert len({t.examples for t in plan if t.batch == 1}) == 4 and all(len(t.examples) == t.batch for t in plan)
  assert plan == protocols.latency_plan(experiment)
  other = protocols.latency_plan(dataclasses.replace(experiment, seed=1))
  assert plan != other


def test_each_program_is_warm_before_the_clock_runs_and_a_rest_is_completed(loaded, tmp_path, monkeypatch):
  calls = []

  def record(experiment, loaded, method, temperature, examples, batch=None):
    calls.append((method.name, temperature, len(examples)))
    return original(experiment, loaded, method, temperature, examples, batch)

  original = protocols.run_method
  monkeypatch.setattr(protocols, 'run_method', record)
  experiment = dataclasses.replace(EXPERIMENT, curves=[TARGET, DRAFT], latency_trials=1)
  whole = _lines(_latency(experiment, loaded, tmp_path / 'l'))
  assert [t for _, t, _ in calls] == [0.0] * (2 + 1 + 8) + [1.0] * (2 + 1 + 8)  # programs, this thread's first, timed
  assert all(line['seconds'] > 0 and line['tokens'] > 0 for line in whole)
  (tmp_path / 'l').write_text(''.join(json.dumps(line) + '\n' for line in whole[:11]))
  calls.clear()
  untimed = lambda lines: [{k: v for k, v in x.items() if not k.endswith('seconds')} for x in lines]
  assert untimed(_lines(_latency(experiment, loaded, tmp_path / 'l'))) == untimed(whole)
  assert len(calls) == 2 + 1 + 5 and {t for _, t, _ in calls} == {1.0}


def test_both_decodes_of_a_sequence_cascade_are_warm(loaded, tmp_path, monkeypatch):
  thresholds = []

  def run(experiment, models, method, *_):
    thresholds.append(method.threshold)
    if method.threshold == -100:  # what is measured comes after the warm-up
      raise KeyboardInterrupt

  monkeypatch.setattr(protocols, 'run_method', run)
  monkeypatch.setattr(multihost, 'threads', lambda: 2)  # a single one warms up every program first
  curve = Curve('seq', methods.sequence_cascade, None, 'threshold', (-100.0,))
  experiment = dataclasses.replace(EXPERIMENT, curves=[curve], reference='seq')
  with pytest.raises(KeyboardInterrupt):
    _quality(experiment, loaded, tmp_path / 'q')
  assert thresholds == [np.inf, -100]


def test_passes_that_are_timed_in_turn_are_those_asked_for():
  made = collections.Counter()

  class Noted(toy.Table):
    def extend(self, params, cache, tokens, positions):
      jax.debug.callback(lambda: made.update([(self.order, tokens.shape[1])]))
      return super().extend(params, cache, tokens, positions)

  small, large = (toy.model(order, order=order).replace(network=Noted(5, order)) for order in (1, 2))
  seconds = timing.passes_seconds([(small, 1, 3), (large, 4, 1)], tokens=8)
  jax.effects_barrier()
  made.clear()
  assert seconds() > 0
  jax.effects_barrier()
  rounds = made[2, 4]
  assert rounds > 2 and made == {(1, 1): 3 * rounds, (2, 4): rounds}


@pytest.mark.long
def test_a_queue_has_a_steady_part_and_one_batch_a_prefill(loaded, tmp_path):
  curves = [TARGET, dataclasses.replace(OPT, values=(0.3,)), Curve('seq', methods.sequence_cascade)]
  sizes = dict(curves=curves, temperatures=(1.0,), latency_examples=6, latency_batches=(2,), latency_trials=2)
  lines = {}
  for queue in (1, 3):
    experiment = dataclasses.replace(EXPERIMENT, latency_queue=queue, **sizes)
    lines[queue] = _lines(_latency(experiment, loaded, tmp_path / f'{queue}'))
    assert all({*protocols.LATENCY_KEYS, 'seconds', 'tokens'} <= line.keys() for line in lines[queue])
    records = _records(experiment, [], lines[queue])
    for record in records:
      times = record['latency']
      steady = queue == 3 and record['curve'] != 'seq'
      assert (times['steady_tokens_per_s'] is not None) == (times['steady_ratio'] is not None) == steady
      assert (times['prefill_share'] is not None) == (queue == 1 and record['curve'] != 'seq')
  assert [len(line['examples']) for line in lines[1]] == [2] * 18 and [len(x['examples']) for x in lines[3]] == [6] * 6
  for line in lines[1]:
    assert (line.get('prefill_seconds', 0) > 0) == (line['trial'] == 0 and line['curve'] != 'seq')
  totals = collections.Counter()
  for line in lines[1]:
    totals[line['curve'], line['trial']] += line['tokens']
  assert {(x['curve'], x['trial']): x['tokens'] for x in lines[3]} == totals  # the same examples, the same texts
  for line in lines[3]:
    if line['curve'] != 'seq':
      assert 0 < line['steady_tokens'] < line['tokens'] and 0 < line['steady_seconds'] < line['seconds']


# ---- results ----


def _timing(curve, example, trial, seconds, tokens=10):
  return dict(
    temperature=0.0, batch=1, trial=trial, examples=[example], curve=curve, value=None, seconds=seconds, tokens=tokens
  )


def test_ratios_compare_sums_of_medians_over_the_same_examples():
  timings = []
  for trial, slow in enumerate((1.0, 5.0, 1.0)):  # a trial on a busy machine is outvoted
    for example, seconds in enumerate((0.2, 0.4) * 3):
      timings.append(_timing('target only', example, trial, slow * seconds))
      timings.append(_timing('draft only', example, trial, slow * seconds / 4))
  target, draft = _records(ALONE, [], timings)
  assert target['latency']['ratio'] == 1 and target['latency']['ratio_ci'] == [1, 1]
  took = draft['latency']
  assert took['ratio'] == pytest.approx(4) and took['ratio_ci'] == pytest.approx([4, 4])
  assert took['median_s'] == pytest.approx(0.075) and took['tokens_per_s'] == pytest.approx(20 / 0.15)
  assert took['trials'] == 3 and took['examples'] == took['groups'] == 6 and draft['quality'] is None
  assert took['ratio_by_domain'] is None
  info = [{'domain': 'ab'[i % 2]} if i else {} for i in range(len(ALONE.task.examples))]
  examples = [dataclasses.replace(e, info=x) for e, x in zip(ALONE.task.examples, info, strict=True)]
  slow = 'draft only', 1
  slower = [x | dict(seconds=2 * x['seconds']) if (x['curve'], *x['examples']) == slow else x for x in timings]
  divided = dataclasses.replace(ALONE, task=dataclasses.replace(ALONE.task, examples=examples))
  found = _records(divided, [], slower)[1]['latency']['ratio_by_domain']
  assert found == {'a': pytest.approx(4), 'b': pytest.approx(3)}  # 1.2 s over .1 + .1 + .2
  few = _records(ALONE, [], [x for x in timings if x['examples'][0] < 5])[1]['latency']
  assert (few['groups'], few['ratio_ci'], few['tokens_per_s_ratio_ci']) == (5, None, None)
  assert few['ratio'] == pytest.approx(4)


def test_settings_that_decoded_alike_have_the_times_of_all_of_them():
  lines = []
  timings = [_timing('target only', example, 0, 2.0) for example in range(6)]
  for value, seconds, drafted in ((0.0, 1.0, 4), (0.3, 2.0, 4), (0.6, 4.0, 5)):
    timings += [_timing('opt', example, 0, seconds) | {'value': value} for example in range(6)]
    counted = dict.fromkeys(('rounds', 'tested', 'accepted', 'deferred'), 0) | dict(cut_off=False, source=[1])
    counted |= dict(calls=[0, 1], positions=[0, 1], computed=[0, 1], drafted=[drafted, 0], emitted=1, prediction='0')
    counted |= dict.fromkeys(('accepted_lengths', 'verified_lengths', 'tested_at', 'accepted_at'), [0])
    lines += [counted | dict(temperature=0.0, curve='opt', value=value, example=i) for i in range(10)]
  some = dataclasses.replace(EXPERIMENT, curves=[TARGET, OPT], temperatures=(0.0,), latency_examples=6)
  took = [x['latency'] for x in _records(some, lines, timings)]
  assert [x['ratio'] for x in took] == pytest.approx([1, 4 / 3, 4 / 3, 0.5]) and [x['trials'] for x in took] == [
    1,
    2,
    2,
    1,
  ]


def _of_two(prefill: float) -> list[dict]:
  """Return timings of both models, of the drafter with so many seconds for its prompts."""
  both = ('target only', 2.0, 20, 0.5), ('draft only', 1.0, 30, prefill)
  timed = [(example, *of) for example in range(6) for of in both]
  return [_timing(name, i, 0, seconds, tokens) | {'prefill_seconds': x} for i, name, seconds, tokens, x in timed]


def test_tokens_per_second_and_the_parts_of_a_time_are_compared_too():
  timings = _of_two(0.25)
  target, draft = (x['latency'] for x in _records(ALONE, [], timings))
  assert (target['ratio'], target['tokens_per_s_ratio']) == (1, 1) and target['tokens_per_s_ratio_ci'] == [1, 1]
  assert draft['ratio'] == 2 and draft['tokens_per_s_ratio'] == pytest.approx(3)
  assert draft['tokens_per_s_ratio_ci'] == pytest.approx([3, 3]) and draft['prefill_share'] == 0.25
  assert draft['tokens_per_s'] == 30 and draft['decode_tokens_per_s'] == pytest.approx(40)
  assert target['steady_tokens_per_s'] is target['steady_ratio'] is None
  queued = [x | dict(steady_seconds=x['seconds'] / 2, steady_tokens=x['tokens'] // 5) for x in timings]
  target, draft = (x['latency'] for x in _records(ALONE, [], queued))
  assert target['steady_tokens_per_s'] == 4 and draft['steady_ratio'] == pytest.approx(3)


def test_a_call_that_is_shorter_than_reading_its_prompts_again_has_no_share_of_prefill():
  timings = _of_two(1.1)
  target, draft = (x['latency'] for x in _records(ALONE, [], timings))
  assert draft['prefill_share'] is draft['decode_tokens_per_s'] is None and target['prefill_share'] == 0.25


def test_each_value_is_compared_with_its_own_reference():
  sweep = dataclasses.replace(OPT, values=(0.1, 0.2))
  other = dataclasses.replace(sweep, name='other')
  experiment = dataclasses.replace(
    EXPERIMENT, curves=[TARGET, sweep, other], reference='opt', temperatures=(0.0,), latency_examples=2
  )
  seconds = {('opt', 0.1): 4.0, ('opt', 0.2): 2.0, ('other', 0.1): 1.0, ('other', 0.2): 1.0, ('target only', None): 1.0}
  timings = [_timing(name, i, 0, s) | {'value': value} for (name, value), s in seconds.items() for i in range(2)]
  records = _records(experiment, [], timings)
  ratios = {(x['curve'], x['value']): x['latency']['ratio'] for x in records}
  assert ratios == {('target only', None): None, ('opt', 0.1): 1, ('opt', 0.2): 1, ('other', 0.1): 4, ('other', 0.2): 2}
  assert [x['matched_ci'] for x in records] == [None] * 5


def test_quality_has_an_interval_and_counts_add_up(quality):
  points = _records(EXPERIMENT, _lines(quality), [])
  assert [(p['curve'], p['value'], p['temperature'], p['batch']) for p in points] == [
    (*p.key, t, 4) for t in (0.0, 1.0) for p in EXPERIMENT.points
  ]
  for p in points:
    low, high = p['quality_ci']['overlap']
    assert low <= p['quality']['overlap'] <= high and p['latency'] is None and p['examples'] == 10
    c = p['counts']
    lines = _lines(quality, p)
    assert c['emitted'] == sum(len(x['tokens']) for x in lines)
    assert c['length'] == c['emitted'] / 10 and c['cut_off'] == np.mean(
      [toys.VOCAB - 1 not in x['tokens'] for x in lines]
    )
    assert c['calls'] == np.sum([x['calls'] for x in lines], 0).tolist()
    assert c['accepted_lengths'] == np.sum([x['accepted_lengths'] for x in lines], 0).tolist()
    if p['curve'] == 'opt':
      assert 0 < c['acceptance'] <= 1 and 0 < c['deferral_rate'] < 1 and c['tokens_per_round'] > 1
      assert sum(c['accepted_at']) == c['accepted'] and sum(c['tested_at']) == c['tested']
    else:
      assert c['acceptance'] is None and c['deferral_rate'] is None and c['tokens_per_round'] == 1
  texts = points[0]['quality']['overlap'], points[1]['quality']['overlap']
  assert texts[0] != texts[1] and 0 < sum(p['counts']['cut_off'] for p in points) < len(points)


@pytest.mark.long
def test_calls_of_the_large_model_are_counted_for_every_method(loaded, tmp_path):
  chow = functools.partial(rules.chow, alpha=0.3)
  curves = [
    TARGET,
    DRAFT,
    Curve('exact', methods.speculative, rules.speculative),
    Curve('opt', methods.speculative, chow),
    Curve('lossy', methods.speculative, functools.partial(rules.lossy, alpha=0.3)),
    Curve('token', methods.token_cascade, chow),
    Curve('seq', methods.sequence_cascade, settings={'threshold': -1.5}),
  ]
  experiment = dataclasses.replace(EXPERIMENT, curves=curves, temperatures=(1.0,), quality_batch=1)
  lines = _lines(_quality(experiment, loaded, tmp_path / 'q'))
  counted = {x['curve']: x['counts'] for x in _records(experiment, lines, [])}
  assert counted['target only']['calls_per_token'] == 1 and counted['draft only']['calls_per_token'] == 0
  for name in ('exact', 'opt', 'lossy'):
    calls = counted[name]['calls_per_token']
    assert calls == pytest.approx(1 / counted[name]['tokens_per_round']) and calls < 1
  for name in ('token', 'seq'):
    some = [x for x in lines if x['curve'] == name]
    large = sum(x['calls'][1] for x in some) / sum(len(x['tokens']) for x in some)
    assert counted[name]['calls_per_token'] == large > 0


def test_the_interval_of_a_difference_pairs_the_examples(quality):
  points = _records(EXPERIMENT, _lines(quality), [])
  base, other = points[0], points[2]
  assert base['quality_gain_ci'] == {'overlap': [0, 0]}
  scores = [
    100 * toys.overlap.statistics([toys.task().examples[x['example']] for x in some], [x['prediction'] for x in some])
    for some in (_lines(quality, base), _lines(quality, other))
  ]
  gains = np.ravel(scores[1] - scores[0])
  drawn = np.random.default_rng(5).choice(gains, (4000, 10)).mean(1)
  assert other['quality_gain_ci']['overlap'] == pytest.approx(
    np.quantile(drawn, (intervals.TAIL, 1 - intervals.TAIL)), abs=2.5
  )


def test_what_the_metrics_see_is_post_processed(quality):
  seen = []

  def metric(examples, predictions):
    seen.append((examples[1].index, predictions[1]))
    return 0.0

  task = dataclasses.replace(
    EXPERIMENT.task, metrics={'m': metric}, postprocess=lambda text, example: f'{example.index}: {text}'
  )
  points = _records(dataclasses.replace(EXPERIMENT, task=task), _lines(quality), [])
  assert seen[0] == (1, f'1: {_lines(quality)[1]["prediction"]}') and points[0]['quality_ci'] == {'m': None}


def test_a_metric_that_is_no_number_at_the_end_is_none(quality):
  undefined = metrics.Mean(lambda example, text: float('nan'))
  judged = {'f': lambda examples, texts: float('inf'), 'sums': undefined}
  task = dataclasses.replace(EXPERIMENT.task, metrics=judged)
  (first, *_) = _records(dataclasses.replace(EXPERIMENT, task=task), _lines(quality), [])
  assert first['quality'] == first['quality_ci'] == {'f': None, 'sums': None} and first['quality_gain_ci'] == {}


def test_a_token_cascade_counts_the_verifiers_tokens_as_deferred(loaded, tmp_path):
  cascade = Curve('token', methods.token_cascade, rules.chow, 'alpha', (0.3, 0.7))
  sequence = Curve('seq', methods.sequence_cascade, None, 'threshold', (-1.5,))
  experiment = dataclasses.replace(EXPERIMENT, curves=[TARGET, cascade, sequence], temperatures=(0.0,), quality_batch=1)
  lines = _lines(_quality(experiment, loaded, tmp_path / 'q'))
  _, often, seldom, whole = (p['counts']['deferral_rate'] for p in _records(experiment, lines, []))
  assert 0 < seldom < often < 1
  answers = [x for x in lines if x['curve'] == 'seq']
  assert whole == sum(set(x['source']) == {1} for x in answers) / 10


# ---- traces ----


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_every_token_says_where_it_came_from(loaded, quality, temperature):
  found = [x for x in trace.traces(EXPERIMENT, loaded, _lines(quality)) if x['temperature'] == temperature]
  curves = {'target only': {'verifier'}, 'draft only': {'drafter'}, 'opt': {'drafter', 'residual', 'bonus'}}
  assert [(x['curve'], x['value'], x['example']) for x in found] == [
    (c, v, i) for c, v in zip(curves, (None, None, 0.3)) for i in range(2)
  ]
  key = lambda x: (x['temperature'], x['curve'], x['value'], x['example'])
  tokens = {key(line): line['tokens'] for line in _lines(quality)}
  for x in found:
    assert [int(t['text']) for t in x['tokens']] == tokens[key(x)]
    assert {t['source'] for t in x['tokens']} <= curves[x['curve']]


def test_sources_are_named_by_the_part_that_a_model_plays():
  partial = functools.partial(rules.weighted, weights=(0.5, 0.5))
  names = {
    'speculative': (methods.speculative(), {0: 'drafter', 1: 'verifier', -1: 'residual', -2: 'bonus'}),
    'cos': (methods.cos(partial), {0: 'drafter', 1: 'second drafter', -1: 'residual', -2: 'bonus'}),
    'ensemble': (methods.ensemble(partial), {0: 'drafter', 1: 'verifier', -1: 'residual', -2: 'combined'}),
    'sequence': (methods.sequence_cascade(), {0: 'drafter', 1: 'verifier', -1: 'residual', -2: 'combined'}),
  }
  for name, (method, expected) in names.items():
    assert trace._sources(method) == expected, name
  assert methods.bild().target == ((), None)
  slots, combiner = methods.token_cascade(functools.partial(rules.chow, alpha=0.3)).target
  assert slots == (0, 1) and rules.inside(combiner) is rules.chow
  assert methods.ensemble_sd(partial).target[0] == (0, 1)


# ---- progress ----


class Stream(io.StringIO):
  """A stream that is a terminal or none."""

  def __init__(self, terminal: bool):
    super().__init__()
    self.isatty = lambda: terminal


def test_progress_updates_a_line_on_a_terminal(monkeypatch):
  screen = Stream(True)
  with progress.Progress('latency', 2, stream=screen, unit='calls') as bar:
    bar.mininterval = 0
    bar.add(1, 'T = 0')
    bar.add(1)
  first, *lines = screen.getvalue().split('\r')[1:]
  assert first.startswith('latency: 0/2 calls') and lines[0].startswith('latency: 1/2 calls')
  assert lines[0].rstrip().endswith(', T = 0]') and lines[-1].startswith('latency: 2/2 calls')
  assert screen.getvalue().count('\n') == 1


def test_progress_writes_lines_now_and_then_where_there_is_no_terminal():
  log, clock = Stream(False), iter(range(5, 1000, 5))
  bar = progress.Progress('quality', 10, 2, stream=log)
  bar.start_t = bar.last_print_t = 0
  bar._time = lambda: next(clock)
  for _ in range(8):
    bar.add(1, 'opt')
  bar.end()
  lines = log.getvalue().splitlines()
  assert [line.split(' [')[0] for line in lines] == [f'quality: {n}/10 examples' for n in (6, 9, 10)], lines
  assert lines[0].endswith('[00:30<00:30,  0.13 examples/s, opt]')


def test_a_bar_below_another_writes_lines_of_text_alone():
  log = Stream(False)
  outer, inner = (progress.Progress(name, 1, stream=log) for name in ('quality', 'programs'))
  for bar in inner, outer:
    bar.add(1)
    bar.end()
  assert [line.split(' [')[0] for line in log.getvalue().splitlines()] == [
    'programs: 1/1 examples',
    'quality: 1/1 examples',
  ]


def test_progress_leaves_out_time_and_counts_what_is_added_to_it(monkeypatch):
  log = Stream(False)
  bar = progress.Progress('plan', 1, stream=log)
  before = bar.start_t
  bar.leave_out(100)
  assert bar.start_t == before + 100
  bar.add(1)
  bar.expect(3)
  bar.add(1)
  bar.end()
  assert [line.split(' ')[1] for line in log.getvalue().splitlines()] == ['1/1', '2/2']
  monkeypatch.setattr(progress, 'silent', True)
  bar = progress.Progress('plan', 1, stream=log)
  bar.leave_out(1)
  bar.add(1)
  bar.end()
  assert log.getvalue().count('plan') == 2


def test_the_interval_of_a_ratio_covers_the_ratio_as_often_as_it_says():
  rng, covered = np.random.default_rng(0), 0
  many = dataclasses.replace(ALONE, task=dataclasses.replace(ALONE.task, examples=ALONE.task.examples[:1] * 40))
  for _ in range(100):
    timings = []
    for example in range(40):
      seconds = rng.lognormal(sigma=0.3)
      timings.append(_timing('target only', example, 0, seconds))
      timings.append(_timing('draft only', example, 0, seconds / 2 * rng.lognormal(sigma=0.2) / np.exp(0.02)))
    low, high = _records(many, [], timings)[1]['latency']['ratio_ci']
    covered += low <= 2 <= high
  assert covered >= 85
