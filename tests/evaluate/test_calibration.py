"""Certified settings keep their promise as often as promised: on simulated losses whose expectations are known."""

import dataclasses
import json
import math

from matching import having
import numpy as np
import pytest
from runs import given, GOOD
import toys

from speccascade import calibrate, methods, rules
from speccascade import run as speccascade_run
from speccascade.data import metrics
from speccascade.data.examples import Example, Task
from speccascade.evaluate import calibration, config, Curve, Experiment, runner
from speccascade.evaluate.calibration import betting_p_value, SettingLosses
from speccascade.host.errors import RunError
from speccascade.host.runs import as_json, RunDir

TIMES = 4000
LEVEL = 0.05
TARGET = Curve('target only', methods.autoregressive, settings={'model': 1})
OPT = Curve('opt', methods.speculative, rules.opt, 'alpha', (0.0, 0.5, 1.0), {'block': 2})
PLAIN = Curve('plain', methods.speculative, rules.speculative, 'block', (1, 3))


def tolerance(share: float, times: int) -> float:
  """Return three standard errors of a share that is counted so often."""
  return 3 * math.sqrt(share * (1 - share) / times)


# ---- p-values ----


def shifted(draw):
  """Return a function that draws losses [N] of a mean, from one that draws them of mean 0 in −.5 … .5."""
  return lambda rng, n, mean: draw(rng, n) + mean


def equal_or_not(rng, n, mean, share=0.3):
  """Draw losses of right answers: −1, 0 or 1, most of them 0."""
  return rng.choice([1.0, 0.0, -1.0], n, p=[(share + mean) / 2, 1 - share, (share - mean) / 2])


def rarely_all(rng, n, mean):
  """Draw losses that are nearly always a small gain and seldom 1: the sample seldom shows what they cost."""
  gain = 0.01
  return np.where(rng.random(n) < (mean + gain) / (1 + gain), 1.0, -gain)


LOSSES = {
  'right or wrong': equal_or_not,
  'rarely all': rarely_all,
  'mostly none': shifted(lambda rng, n: np.where(rng.random(n) < 0.2, rng.uniform(-0.5, 0.5, n), 0.0)),
  'skewed': shifted(lambda rng, n: np.clip(rng.exponential(0.05, n) - 0.05, None, 0.45)),
}


@pytest.mark.parametrize('name', LOSSES)
def test_p_values_are_valid_where_the_hypothesis_is_just_true(name):
  rng = np.random.default_rng(0)
  for n, mean in ((40, 0.02), (300, 0.01)):
    p_values = np.array([betting_p_value(LOSSES[name](rng, n, mean), mean, LEVEL) for _ in range(TIMES)])
    for level in (0.01, LEVEL, 0.2):
      assert (p_values <= level).mean() <= level + tolerance(level, TIMES), (n, level)
    naive = np.mean([LOSSES[name](rng, n, mean).mean() < mean for _ in range(TIMES)])
    assert naive > 0.3  # to believe the mean is wrong more often than any level above


def test_p_values_reject_what_is_clearly_false_and_more_so_with_more_prompts():
  rng = np.random.default_rng(1)
  powers = []
  for n in (100, 400, 1600):
    powers.append(np.mean([betting_p_value(equal_or_not(rng, n, -0.02), 0.05, LEVEL) <= LEVEL for _ in range(200)]))
  assert powers[0] < powers[1] < powers[2] and powers[2] > 0.95


def test_without_any_loss_the_bets_are_the_largest_and_their_wealth_decides():
  growth = 1 + 0.1 * calibration.MOST / 0.9  # of the wealth by a bet on a loss of 0 against one of .1
  needed = math.ceil(math.log(1 / LEVEL) / math.log(growth))
  assert betting_p_value(np.zeros(needed), 0.1, LEVEL) <= LEVEL < betting_p_value(np.zeros(needed - 1), 0.1, LEVEL)


def test_a_bet_does_not_know_the_loss_that_it_is_on():
  before = np.tile([0.0, -0.9], 50)  # every bet is won, and none is the largest
  low, middle, high = (1 / betting_p_value(np.append(before, last), 0.1, LEVEL) for last in (-0.9, -0.5, -0.1))
  assert low > high > 2 and middle == pytest.approx((low + high) / 2)  # the wealth is linear in the last loss


def test_a_bound_is_the_least_loss_that_is_certified():
  losses = equal_or_not(np.random.default_rng(2), 400, 0.03)
  bound = calibration.bound(losses, LEVEL)
  assert 100 * losses.mean() < bound < 20
  p_values = [betting_p_value(losses, at_most / 100, LEVEL) for at_most in (bound, bound - 0.01)]
  assert p_values[0] <= LEVEL < p_values[1]


# ---- the choice ----


GOOD_LOSSES = np.zeros(800)
BAD_LOSSES = np.ones(800)


def settings(curve, losses, times):
  """Return a curve's candidates."""
  return [SettingLosses(*given) for given in zip(curve.points(), times, losses)]


def certified(*curves, times=(0.9, 0.5, 0.3), at_most=2.0):
  """Return which settings are certified and the value of the chosen one, from losses of each setting of each curve."""
  found = calibration.report({str(i): settings(OPT, losses, times) for i, losses in enumerate(curves)}, at_most)
  return [x['certified'] for x in found['settings']], found['chosen'] and found['chosen']['value']


def test_testing_stops_at_the_first_setting_that_is_not_certified():
  assert certified([GOOD_LOSSES, BAD_LOSSES, GOOD_LOSSES]) == ([True, False, False], 0.0)
  assert certified([BAD_LOSSES, GOOD_LOSSES, GOOD_LOSSES]) == ([False, False, False], None)
  separate = [GOOD_LOSSES, BAD_LOSSES, BAD_LOSSES], [GOOD_LOSSES, GOOD_LOSSES, BAD_LOSSES]
  assert certified(*separate) == ([True, False, False, True, True, False], 0.5)


def test_the_fastest_is_chosen_by_time_and_not_by_order():
  assert certified([GOOD_LOSSES] * 3, times=(0.9, 0.4, 0.6)) == ([True] * 3, 0.5)


def test_curves_divide_the_chance_of_error():
  growth = 1 + 0.1 * calibration.MOST / 0.9  # of the wealth by a bet on a loss of 0 against one of .1
  between = 2 * math.ceil(math.log(1 / 0.03) / math.log(growth))  # half of them calibrate, whose p-value is nearly .03
  one = [np.zeros(between), np.ones(between), np.ones(between)]
  assert certified(one, at_most=10)[1] == 0.0
  assert certified(one, one, at_most=10)[1] is None


@pytest.mark.long
@pytest.mark.parametrize('curves', [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_promise_is_broken_no_more_often_than_it_says(curves):
  """The true losses are 0, 2, a little more than 2, 5 and 9 points; the last three must seldom be certified for 2."""
  rng = np.random.default_rng(3)
  risks = (0.0, 0.02, 0.02 + 1e-9, 0.05, 0.09)
  curve = dataclasses.replace(OPT, values=tuple(range(len(risks))))
  broken = 0
  naive = 0
  found = 0
  times = TIMES // 4
  for _ in range(times):
    drawn = {}
    for i in range(curves):
      losses = [equal_or_not(rng, 1200, risk, share=0.1) for risk in risks]
      drawn[str(i)] = settings(curve, losses, np.linspace(1, 0.2, len(risks)))
    made = calibration.report(drawn, 2, 0.9)
    broken += any(x['certified'] and risks[x['value']] > 0.02 for x in made['settings'])
    found += made['chosen'] is not None
    naive += any(x['loss'] <= 2 and risks[x['value']] > 0.02 for x in made['settings'])
  assert broken / times <= 0.1 + tolerance(0.1, times)
  assert naive / times > 0.4 and found / times > 0.2


def test_a_loss_on_other_prompts_is_reported_of_the_half_that_did_not_calibrate():
  losses = np.random.default_rng(7).permutation(np.repeat([1.0, 0.0, -1.0], [41, 327, 32]))
  (found,) = calibration.report({'opt': settings(OPT, [losses], [0.9])}, 50)['settings']
  assert found['loss'] + found['test_loss'] == pytest.approx(2 * 100 * losses.mean())
  assert found['loss'] != found['test_loss'] and found['bound'] > found['loss']


# ---- from a run ----


def overlap(example, prediction):
  """Score the share of the target's words."""
  return float(np.isin(example.references[0].split(), prediction.split()).mean())


def length(example, prediction):
  """Count words: no score in 0 … 1."""
  return len(prediction.split())


def task(count, copies=1):
  """Return a task of so many prompts, each of them so often."""
  examples = [Example(i, [i // copies % 16, i // copies // 16], '1 2 3 4') for i in range(count * copies)]
  judged = metrics.named([metrics.mean(overlap), metrics.mean(length), 'bleu', 'words'])
  return Task('words', examples, max_prompt_tokens=4, max_new_tokens=6, metrics=judged)


def decoded(experiment, errors):
  """Return the lines of predictions in which, by setting, so many words in 100 are wrong, and results."""
  rng = np.random.default_rng(5)
  lines = []
  for temperature in experiment.temperatures:
    for point in experiment.points:
      name, value = point.key
      for example in experiment.task.examples:
        wrong = rng.random(4) < errors[point.label] / 100
        text = ' '.join('x' if bad else word for bad, word in zip(wrong, '1234'))
        lines.append(dict(temperature=temperature, curve=name, value=value, example=example.index, prediction=text))
  cost = {point.label: 1 / (1 + i) for i, point in enumerate(experiment.points)}
  records = [
    dict(
      curve=p.key[0],
      value=p.key[1],
      temperature=t,
      batch=b,
      latency={'ratio': b / cost[p.label]},
    )
    for t in experiment.temperatures
    for b in (1, 2)
    for p in experiment.points
  ]
  return lines, records


ERRORS = {'target only': 10, 'opt alpha=0.0': 10, 'opt alpha=0.5': 11, 'opt alpha=1.0': 60, 'plain block=1': 10}
ERRORS |= {'plain block=3': 10}


def experiment(task, **more):
  return Experiment(task, toys.models, [TARGET, OPT, PLAIN], temperatures=(0.0,), **more)


def report(made, loss='overlap', at_most=6, lines=None, records=None, curves=(), temperature=0.0, batch=1, **more):
  """Calibrate on simulated predictions."""
  simulated = decoded(made, ERRORS)
  of_run = lines or simulated[0], records or simulated[1]
  return calibration.report(calibration.candidates(made, *of_run, loss, temperature, batch, curves), at_most, **more)


def test_the_fastest_setting_of_a_run_is_reported_with_its_guarantee():
  made = experiment(task(250))
  found = report(made, curves=['opt'])
  assert found['chosen']['label'] == 'opt alpha=0.5' and found['chosen']['time'] == pytest.approx(1 / 3)
  assert [s['certified'] for s in found['settings']] == [True, True, False]
  assert (found['prompts'], found['test_prompts']) == (125, 125)
  assert found['level'] == pytest.approx(LEVEL)
  assert found['chosen']['loss'] < found['chosen']['bound'] <= 6
  text = calibration.as_text(json.loads(json.dumps(found)))
  for part in ('opt alpha=0.5: 0.33', 'finite samples', '125', '| no', '| yes'):
    assert part in text


def test_nothing_certified_leaves_the_reference():
  found = report(experiment(task(250)), at_most=-50)
  assert found['chosen'] is None and not any(s['certified'] for s in found['settings'])
  assert all(part in calibration.as_text(found) for part in ('None is certified', f'{found["least"]:g}'))
  half = LEVEL / 2  # of two curves
  p_values = [betting_p_value(np.zeros(125), (found['least'] - less) / 100, half) for less in (0, 0.01)]
  assert p_values[0] <= half < p_values[1]


def test_examples_of_one_prompt_count_as_one():
  made = experiment(task(40, copies=5))
  lines, records = decoded(made, ERRORS)
  first = {(line['curve'], str(line['value']), line['example'] // 5): line['prediction'] for line in lines[::-1]}
  same = [line | {'prediction': first[line['curve'], str(line['value']), line['example'] // 5]} for line in lines]
  single = [line | {'example': line['example'] // 5} for line in same if line['example'] % 5 == 0]
  one = report(experiment(task(40)), lines=single, records=records)
  many = report(made, lines=same, records=records)
  assert many['prompts'] == 20 and [s['bound'] for s in many['settings']] == [s['bound'] for s in one['settings']]


def test_times_are_those_of_a_batch_size():
  made = dataclasses.replace(experiment(task(60)), latency_batches=(1, 2))
  times = [report(made, curves=['plain'], batch=batch)['settings'][0]['time'] for batch in (1, 2)]
  assert times == pytest.approx([1 / 5, 1 / 10])


def test_times_of_curves_that_are_not_compared_are_not_needed():
  made = experiment(task(60))
  _, records = decoded(made, ERRORS)
  some = [r | {'latency': {'ratio': None}} if r['curve'] in ('opt', 'target only') else r for r in records]
  assert len(report(made, records=some, curves=['plain'])['settings']) == 2
  untimed = [r | {'latency': None, 'batch': made.quality_batch} for r in records]  # as a run has them
  for without in (some, untimed):
    with pytest.raises(RunError, match=having('opt alpha=0.0', 'no time', '--curves')):
      report(made, records=without)


BAD = {
  'no such metric': (dict(loss='meteor'), ('loss=meteor', 'chrf')),
  'a metric of longer scores': (dict(loss='length'), ('loss=length', '4')),
  'words': (dict(loss='words'), ('loss=words', '4')),
  'a metric of all texts': (dict(loss='bleu'), ('loss=bleu', 'finite samples', 'chrf')),
  'no such curve': (dict(curves=['diff']), ('curves=diff', 'opt, plain')),
  'the reference': (dict(curves=['target only']), ('curves=target only', 'opt, plain')),
  'a loss of more than all': (dict(at_most=100), ('at_most=100', '-100')),
  'certainty': (dict(confidence=1.0), 'confidence=1'),
  'a seed under 0': (dict(seed=-1), 'seed=-1'),
}


@pytest.mark.parametrize('given, parts', BAD.values(), ids=BAD)
def test_what_a_run_does_not_have_is_named(given, parts):
  with pytest.raises((RunError, ValueError), match=having(*([parts] if isinstance(parts, str) else parts))):
    report(experiment(task(60)), **given)


def test_several_temperatures_need_a_choice():
  for asked, known, part in ((None, (0.0, 1.0), '0, 1'), (3, (1, 2), 'batch_size=3')):
    with pytest.raises(RunError, match=having('--batch_size', part)):
      calibration.one_of('batch_size', asked, known)
  assert [calibration.one_of('temperature', *some) for some in ((None, (0.5,)), (1.0, (0.0, 1.0)))] == [0.5, 1.0]


CONFIG = GOOD.replace('[0.0, 0.5]', '[0.0, 0.5, 1.0]') + 'toys.task.count = 60\nExperiment.temperatures = [0.0]\n'


@pytest.fixture
def run(tmp_path):
  """Return a run directory as if its texts had been decoded."""
  (tmp_path / 'run').mkdir()
  (tmp_path / 'run.gin').write_text(CONFIG)
  text = config.parse([str(tmp_path / 'run.gin')])
  (made,) = config.build()
  lines, records = decoded(made, ERRORS)
  RunDir(tmp_path / 'run').write('config.gin', runner.config_text(text, [made]))
  RunDir(tmp_path / 'run').write('examples.jsonl', ''.join(json.dumps(line) + '\n' for line in lines))
  RunDir(tmp_path / 'run').write('results.json', as_json({'points': records}))
  return tmp_path / 'run'


def test_the_command_prints_and_writes_the_report(run, capsys):
  with open(run / 'config.gin', 'a') as f:
    f.write("mesh.shape = {'data': 64}\n")  # as many devices as decoded it are not needed to read it
  argv = [str(run), '--loss=exact_match', '--at_most=60', '--confidence=.9', '--seed=3']
  assert calibrate.main(argv) == 0
  out = capsys.readouterr().out
  written = json.loads((run / 'calibrated.json').read_text())
  assert written['chosen']['label'] in out and (written['seed'], written['confidence']) == (3, 0.9)


@pytest.mark.parametrize(
  'change, parts',
  [
    (lambda run: (run / 'results.json').unlink(), 'results.json'),
    (lambda run: (run / 'examples.jsonl').write_text('{"curve": \n'), 'examples.jsonl'),
    (lambda run: change(run / 'config.gin', 'toys.task.count = 60', 'toys.task.count = 61'), ('data', 'changed')),
    (
      lambda run: change(
        run / 'config.gin', '[@Experiment()]', "[@Experiment(), @b/Experiment()]\nb/Experiment.name = 'b'"
      ),
      ('--only', 'experiment, b'),
    ),
  ],
  ids=['not finished', 'damaged', 'other data', 'several experiments'],
)
def test_a_run_that_cannot_be_read_is_named(run, change, parts, capsys):
  change(run)
  assert calibrate.main([str(run), '--loss=exact_match', '--at_most=60']) == 1
  error = capsys.readouterr().err
  assert error.startswith('error: ') and all(p in error for p in ([parts] if isinstance(parts, str) else parts))


def change(path, old, new):
  text = path.read_text()
  assert old in text
  path.write_text(text.replace(old, new))


@pytest.mark.full
def test_a_run_is_calibrated_as_it_was_decoded(tmp_path, capsys):
  few = CONFIG.replace('count = 60', 'count = 8') + 'Experiment.latency_examples = 2\nExperiment.latency_trials = 1\n'
  (tmp_path / 'run.gin').write_text(few)
  assert speccascade_run.main(given(tmp_path / 'run.gin', tmp_path / 'run')) == 0
  assert calibrate.main([str(tmp_path / 'run'), '--loss=exact_match', '--at_most=99.9']) == 0
  written = json.loads((tmp_path / 'run' / 'calibrated.json').read_text())
  points = json.loads((tmp_path / 'run' / 'results.json').read_text())['points']
  ratios = [p['latency']['ratio'] for p in points if p['curve'] == 'opt']
  assert [s['time'] for s in written['settings']] == pytest.approx([1 / ratio for ratio in ratios])
  assert (written['prompts'], written['test_prompts'], written['temperature']) == (4, 4, 0.0)
