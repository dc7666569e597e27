"""Certified settings keep their promise as often as promised: on simulated losses whose expectations are known."""

import dataclasses
import functools
import json
import math

import jax
from matching import having
import numpy as np
import pytest
from runs import given, GOOD
import toys

from speccascade import calibrate, methods, rules
from speccascade import run as speccascade_run
from speccascade.data import metrics
from speccascade.data.examples import Example, Task
from speccascade.decode import __main__ as decoding
from speccascade.decode import options
from speccascade.evaluate import calibration, calibration_report, config, Curve, Experiment, rundir, runner
from speccascade.evaluate.calibration import betting_p_value, Candidate, CorpusLoss, MeanLoss
from speccascade.host import storage
from speccascade.host.errors import RunError

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
  loss = MeanLoss(equal_or_not(np.random.default_rng(2), 400, 0.03))
  bound = loss.bound(LEVEL, 0)
  assert loss.value() < bound < 20
  assert loss.p_value(bound, LEVEL, 0) <= LEVEL < loss.p_value(bound - 0.01, LEVEL, 0)


@pytest.mark.parametrize('losses, at_most, part', [([2.0], 0.1, '2.0'), ([0.0], 1.0, '1.0'), ([math.nan], 0.1, 'nan')])
def test_losses_that_are_not_bounded_are_refused(losses, at_most, part):
  with pytest.raises(ValueError, match=having(part)):
    betting_p_value(np.array(losses), at_most, LEVEL)


# ---- the choice ----


@dataclasses.dataclass(frozen=True)
class Known:
  """A loss whose p-value is given."""

  p: float

  def take(self, rows):
    return self

  def p_value(self, at_most, level, seed):
    return self.p


def settings(curve, losses, costs):
  """Return a curve's candidates."""
  return [Candidate(*given) for given in zip(curve.points(), costs, losses)]


def known(curve, p_values, costs=(0.9, 0.5, 0.3)):
  return settings(curve, map(Known, p_values), costs)


def test_testing_stops_at_the_first_setting_that_is_not_certified():
  best, tested = calibration.fastest({'opt': known(OPT, (0.01, 0.2, 0.001))}, 1, 0.95, np.arange(4))
  assert best.point.value == 0.0 and tested == {'opt': [0.01, 0.2]}
  assert calibration.fastest({'opt': known(OPT, (0.2, 0.01, 0.001))}, 1, 0.95, np.arange(4))[0] is None


def test_the_fastest_is_chosen_by_cost_and_not_by_order():
  best, _ = calibration.fastest({'opt': known(OPT, (0.01, 0.01, 0.01), (0.9, 0.4, 0.6))}, 1, 0.95, np.arange(4))
  assert best.point.value == 0.5


def test_curves_divide_the_chance_of_error():
  one = {'opt': known(OPT, (0.03, 0.5, 0.5))}
  assert calibration.fastest(one, 1, 0.95, np.arange(4))[0].point.value == 0.0
  assert calibration.fastest(one | {'plain': known(PLAIN, (0.03, 0.5))}, 1, 0.95, np.arange(4))[0] is None


@pytest.mark.parametrize('curves', [1, 3])
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
      losses = [MeanLoss(equal_or_not(rng, 600, risk, share=0.1)) for risk in risks]
      drawn[str(i)] = settings(curve, losses, np.linspace(1, 0.2, len(risks)))
    best, _ = calibration.fastest(drawn, 2, 0.9, np.arange(600))
    broken += best is not None and risks[best.point.value] > 0.02
    found += best is not None
    naive += any(c.loss.value() <= 2 and risks[c.point.value] > 0.02 for some in drawn.values() for c in some)
  assert broken / times <= 0.1 + tolerance(0.1, times)
  assert naive / times > 0.4 and found / times > 0.2


def test_a_choice_by_the_mean_alone_breaks_the_promise_where_the_certified_one_keeps_it():
  losses = np.random.default_rng(7).permutation(np.repeat([1.0, 0.0, -1.0], [41, 327, 32]))  # 2.25 points in the mean
  curves = {'opt': settings(OPT, [MeanLoss(losses)] * 3, (0.9, 0.5, 0.3))}
  found = calibration.resampled(curves, 2.24, 0.95, 0.5, 100)
  assert found['kept'] >= 95 and found['none'] >= 90
  assert 90 <= found['kept_if_drawn'] <= 100  # the loss on all prompts is too large, so each choice breaks the promise
  assert 30 < found['kept_by_mean'] < 70  # half of the prompts lose less than the mean, and then the others lose more


def test_a_corpus_loss_is_the_difference_of_the_metric_and_of_its_resamples():
  rng = np.random.default_rng(4)
  words = ['ein', 'Hund', 'läuft', 'über', 'die', 'Wiese', 'am', 'Strand']
  targets = [' '.join(rng.choice(words, 9)) for _ in range(60)]
  worse = [text if i % 3 else text.replace('Hund', 'Katze') for i, text in enumerate(targets)]
  examples = [Example(i, f'{i}', target) for i, target in enumerate(targets)]
  rows = [np.column_stack([metrics.bleu.statistics(examples, texts), np.ones(60)]) for texts in (targets, worse)]
  loss = CorpusLoss(metrics.bleu, *rows)
  assert loss.value() == pytest.approx(100 - metrics.bleu(examples, worse)) and loss.value() > 2
  some = np.arange(10, 30)
  part = metrics.bleu([examples[i] for i in some], [worse[i] for i in some])
  assert loss.take(some).value() == pytest.approx(100 - part)
  low, high = np.percentile(loss.resampled(0), (5, 95))
  assert low < loss.value() < high == pytest.approx(loss.bound(LEVEL, 0))
  assert loss.p_value(high + 0.1, LEVEL, 0) <= LEVEL < loss.p_value(loss.value(), LEVEL, 0)


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
      counts={'calls_per_token': cost[p.label] / 2},
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


def report(made, loss='overlap', at_most=6, lines=None, records=None, **more):
  """Calibrate on simulated predictions."""
  simulated = decoded(made, ERRORS)
  of_run = {name: more.pop(name) for name in ('temperature', 'curves', 'batch') if name in more}
  curves, about = calibration_report.candidates(made, lines or simulated[0], records or simulated[1], loss, **of_run)
  return about | calibration_report.report(curves, at_most, **more)


def test_the_fastest_setting_of_a_run_is_reported_with_its_guarantee():
  made = experiment(task(250))
  found = report(made, curves=['opt'], resamplings=20)
  assert found['chosen']['label'] == 'opt alpha=0.5' and found['chosen']['cost'] == pytest.approx(1 / 3)
  assert [s['certified'] for s in found['settings']] == [True, True, False]
  assert (found['prompts'], found['test_prompts'], found['finite']) == (125, 125, True)
  assert found['level'] == pytest.approx(LEVEL)
  low, high = found['chosen']['test_loss_ci']
  assert low < found['chosen']['test_loss'] < high
  again = found['resampled']
  assert again['times'] == 20 == again['none'] + sum(again['chosen'].values()) and again['kept'] >= 19
  assert again['kept_if_drawn'] >= 17
  text = calibration_report.as_text(json.loads(json.dumps(found)))
  for part in ('opt alpha=0.5', 'target only', 'finite samples', '125', '--rule=opt:0.5', '--temperature=0', '0.33'):
    assert part in text


def test_a_corpus_metric_has_no_guarantee_in_finite_samples():
  found = report(experiment(task(250)), 'bleu', 30, curves=['opt'])
  assert not found['finite'] and found['chosen'] is not None
  assert 'No guarantee in finite samples' in calibration_report.as_text(found)


def test_nothing_certified_leaves_the_reference():
  found = report(experiment(task(250)), at_most=-50)
  assert found['chosen'] is None and not any(s['certified'] for s in found['settings'])
  assert [s['p_value'] is None for s in found['settings']] == [False, True, True, False, True]
  assert all(part in calibration_report.as_text(found) for part in ('target only', f'{found["least"]:g}'))
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


def test_costs_are_times_of_a_batch_size_or_else_calls():
  made = experiment(task(60))
  lines, records = decoded(made, ERRORS)
  costs = lambda **more: report(made, lines=lines, curves=['plain'], **more)
  assert costs(records=records)['settings'][0]['cost'] == pytest.approx(1 / 5)
  assert costs(records=records, batch=2)['settings'][0]['cost'] == pytest.approx(1 / 10)
  untimed = costs(records=[r | {'latency': None} for r in records])
  assert untimed['settings'][0]['cost'] == pytest.approx(1 / 5) and untimed['measure'] == calibration_report.CALLS


def test_times_of_curves_that_are_not_compared_are_not_needed():
  made = experiment(task(60))
  _, records = decoded(made, ERRORS)
  some = [r | {'latency': {'ratio': None}} if r['curve'] in ('opt', 'target only') else r for r in records]
  assert report(made, records=some, curves=['plain'])['measure'] == calibration_report.TIME
  assert report(made, records=some)['measure'] == calibration_report.CALLS
  none = [r | {'counts': {'calls_per_token': None}} for r in some]
  with pytest.raises(RunError, match=having('opt alpha=0.0', 'neither times nor calls')):
    report(made, records=none)


def test_a_curve_without_a_reference_is_named():
  other = dataclasses.replace(OPT, name='other')
  made = Experiment(task(60), toys.models, [TARGET, OPT, other], reference='opt', temperatures=(0.0,))
  lines, records = decoded(made, ERRORS | {point.label: 10 for point in made.points})
  assert calibration_report.candidates(made, lines, records, 'overlap', curves=['other'])[0]
  with pytest.raises(RunError, match=having('target only has no reference', 'opt', '--curve')):
    calibration_report.candidates(made, lines, records, 'overlap', curves=['target only'])


BAD = {
  'no such metric': (dict(loss='meteor'), ('loss=meteor', 'chrf')),
  'a metric of longer scores': (dict(loss='length'), ('loss=length', '4')),
  'words': (dict(loss='words'), ('loss=words', '4')),
  'no such curve': (dict(curves=['diff']), ('curve=diff', 'opt, plain')),
  'the reference': (dict(curves=['target only']), ('curve=target only', 'opt, plain')),
  'another temperature': (dict(temperature=1.0), ('temperature=1', '0')),
  'another batch size': (dict(batch=3), ('batch_size=3', '1, 2')),
  'a loss of more than all': (dict(at_most=100), ('at_most=100', '-100')),
  'certainty': (dict(confidence=1.0), 'confidence=1'),
  'only tests': (dict(test_share=1.0), 'test_share=1'),
  'resamplings without tests': (dict(test_share=0.0, resamplings=3), ('resamplings', 'test_share')),
  'a seed under 0': (dict(seed=-1), 'seed=-1'),
  'too few prompts': (dict(test_share=0.99), ('1', '59')),
}


@pytest.mark.parametrize('given, parts', BAD.values(), ids=BAD)
def test_what_a_run_does_not_have_is_named(given, parts):
  with pytest.raises((RunError, ValueError), match=having(*([parts] if isinstance(parts, str) else parts))):
    report(experiment(task(60)), **given)


def test_several_temperatures_need_a_choice():
  made = dataclasses.replace(experiment(task(60)), temperatures=(0.0, 1.0))
  with pytest.raises(RunError, match=having('--temperature', '0, 1')):
    report(made)
  assert report(made, temperature=1.0)['temperature'] == 1.0


CURVES = {
  'a rule': Curve('a', methods.speculative, rules.opt, 'alpha', (-0.5,), {'block': 2}),
  'a block': Curve('a', methods.speculative, rules.chow, 'block', (3,), rule_settings={'alpha': 0.2}),
  'blocks': Curve('a', methods.cos, rules.weighted, 'blocks', ((2, 1),), rule_settings={'weights': (0.5, 0.5)}),
  'weights': Curve('a', methods.naive_cos, rules.weighted, 'weights', ((0.25, 0.75),)),
  'one model': Curve('a', methods.autoregressive, settings={'model': 1}),
}


@pytest.mark.parametrize('curve', CURVES.values(), ids=CURVES)
def test_decode_takes_the_options_of_a_setting(curve):
  (point,) = curve.points()
  words = calibration_report.decode_options(point).split()
  args = decoding._parser().parse_args([*words, '--models', 'a', 'b', '--', 'in', 'out'])
  given = jax.tree.flatten(options.method(args, 2))
  wanted = jax.tree.flatten(point.build())
  assert given == wanted


def test_a_rule_of_ones_own_has_its_name_and_a_method_of_ones_own_no_options_of_decode():
  curve = Curve('mine', methods.speculative, functools.partial(toys.mean), 'weight', (0.5,))
  assert calibration_report.decode_options(curve.points()[0]) == f'--method=speculative --rule={toys.__name__}:mean:0.5'
  mine = Curve('mine', lambda rule: methods.speculative(rule), toys.mean, 'weight', (0.5,))
  assert calibration_report.decode_options(mine.points()[0]) is None


CONFIG = GOOD.replace('[0.0, 0.5]', '[0.0, 0.5, 1.0]') + 'toys.task.count = 60\nExperiment.temperatures = [0.0]\n'


@pytest.fixture
def run(tmp_path):
  """Return a run directory as if its texts had been decoded."""
  (tmp_path / 'run').mkdir()
  (tmp_path / 'run.gin').write_text(CONFIG)
  text = config.parse([str(tmp_path / 'run.gin')])
  (made,) = config.build()
  lines, records = decoded(made, ERRORS)
  fields = dict.fromkeys(calibration_report.protocols.QUALITY_FIELDS, 0)
  rundir.write(tmp_path / 'run' / 'config.gin', runner.config_text(text, [made]))
  rundir.write(tmp_path / 'run' / 'examples.jsonl', ''.join(json.dumps(fields | line) + '\n' for line in lines))
  rundir.write_json(tmp_path / 'run' / 'results.json', {'points': records})
  return tmp_path / 'run'


def test_the_command_prints_and_writes_the_report(run, capsys):
  with open(run / 'config.gin', 'a') as f:
    f.write("mesh.shape = {'data': 64}\n")  # as many devices as decoded it are not needed to read it
  argv = [str(run), '--loss=exact_match', '--at_most=60', '--confidence=.9', '--seed=3']
  assert calibrate.main(argv) == 0
  out = capsys.readouterr().out
  written = json.loads((run / 'calibrated.json').read_text())
  assert written['chosen']['label'] in out and (written['seed'], written['confidence']) == (3, 0.9)
  assert calibrate.main([*argv, '--resamplings=4']) == 0
  again = json.loads((run / 'calibrated.json').read_text())
  assert again.pop('resampled')['times'] == 4 and again == written


def test_a_run_in_a_bucket_is_calibrated(run, tmp_path, monkeypatch):
  pytest.importorskip('upath')
  monkeypatch.setattr(storage, 'CACHE', tmp_path / 'copies')
  there = storage.resolve(f'memory://{tmp_path.name}/run')
  for file in run.iterdir():
    storage.write(there / file.name, file.read_bytes())
  asked = ['--loss=exact_match', '--at_most=60']
  assert calibrate.main([str(run), *asked]) == calibrate.main([str(there), *asked]) == 0
  assert (there / 'calibrated.json').read_bytes() == (run / 'calibrated.json').read_bytes()


@pytest.mark.parametrize(
  'change, parts',
  [
    (lambda run: (run / 'results.json').unlink(), 'results.json'),
    (lambda run: (run / 'examples.jsonl').write_text('{"curve": 1}\n'), 'examples.jsonl'),
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
  ratios = [p['latency']['ratio'] for p in calibration_report.records(tmp_path / 'run') if p['curve'] == 'opt']
  assert [s['cost'] for s in written['settings']] == pytest.approx([1 / ratio for ratio in ratios])
  assert (written['prompts'], written['test_prompts'], written['measure']) == (4, 4, calibration_report.TIME)
