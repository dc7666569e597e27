"""The command line end to end: a run, its files, a killed run, two at once, and errors of one line."""

import json
import pathlib
import random
import signal
import time

from matching import says
import pytest
from runs import finish, given, GOOD, lines_in, start, wait_until, written

from speccascade import run
from speccascade.evaluate import runner
from speccascade.host.runs import as_json, RunDir

ROOT = pathlib.Path(__file__).parents[2]
MEASURED = """
Experiment.quality_batch = 4
Experiment.latency_examples = 2
Experiment.latency_trials = 2
Experiment.trace_examples = 2
"""
TIMES = ('latency', 'matched_ci')


@pytest.fixture(scope='module')
def config(tmp_path_factory):
  return written(tmp_path_factory.mktemp('configs'), GOOD + MEASURED)


@pytest.fixture(scope='module')
def whole(config):
  """Return the folder of a run that nothing interrupted, and what it printed."""
  folder = config.parent / 'whole'
  code, out, err = finish(start(config, folder))
  assert code == 0, err
  return folder, out, err


def untimed(folder: pathlib.Path) -> dict:
  """Return the results of a run without what the clock says."""
  results = json.loads((folder / 'results.json').read_text())
  for point in results['points']:
    for name in TIMES:
      point.pop(name)
  for name in ('tables', 'command'):
    results.pop(name)
  return results


def same_as(whole: pathlib.Path, folder: pathlib.Path):
  """Check that a run which was stopped has come to the same bytes as one that was not."""
  for name in ('examples.jsonl', 'traces.jsonl', 'config.gin', 'models.json'):
    assert (folder / name).read_bytes() == (whole / name).read_bytes(), name
  assert untimed(folder) == untimed(whole)
  assert not list(folder.rglob('*.part'))


def test_a_run_leaves_every_file_and_prints_the_table(whole):
  folder, out, err = whole
  names = {p.name for p in folder.iterdir()}
  assert names >= {
    'config.gin',
    'environment.json',
    'examples.jsonl',
    'latency.jsonl',
    'traces.jsonl',
    'results.json',
    'summary.csv',
    'summary.md',
    'tables.md',
    'lock',
    'curves',
    'report.html',
  }
  results = json.loads((folder / 'results.json').read_text())
  assert len(results['points']) == 2 * 3 and results['metric'] == 'overlap' and results['models'] == ['toy2', 'toy1']
  for point in results['points']:
    assert point['quality']['overlap'] >= 0 and point['latency']['ratio'] > 0 and point['counts']['rounds'] > 0
  assert len(results['traces']) == 2 * 2 * 2
  assert results['environment']['backend'] == 'cpu' and results['environment']['versions']['jax']
  points = results['points']
  assert [line.split(' | ')[0].strip('| ') for line in out.splitlines() if line.startswith('| t')][0] == 'target only'
  assert 'overlap' in out and 'large calls' not in out and out.count('± reaches') == 2 and 'summary.md' in out
  assert all(f'{point["quality"]["overlap"]:.2f}' in out for point in points)
  assert [line for line in out.splitlines() if line.startswith('T = ')] == [
    line for line in (folder / 'summary.md').read_text().splitlines() if line.startswith('T = ')
  ]
  assert str(folder / 'report.html') in out
  assert max(len(line) for line in out.splitlines() if line.startswith('|')) <= 80
  assert 'quality: 60/60 examples' in err and 'latency: 24/24 calls' in err
  rows = [line for line in err.splitlines() if line.startswith('T = ')]
  assert len(rows) == 6 and rows[0].startswith('T = 0: target only, overlap ')
  assert f'overlap {results["points"][0]["quality"]["overlap"]:.2f}, ' in rows[0] and 'speed-up' not in ''.join(rows)
  table = err.index('Quality, T = 0; times follow')
  assert err.index(rows[2]) < table < err.index(rows[3]) < err.index('latency: ')
  assert len((folder / 'summary.csv').read_text().splitlines()) == 7


def test_the_same_command_again_only_shows_the_results(config, whole, capsys):
  folder, out, _ = whole
  before = [(p, p.stat().st_mtime_ns) for p in (folder / 'results.json', folder / 'report.html')]
  assert run.main(given(config, folder)) == 0
  again, err = capsys.readouterr()
  assert again == out and 'quality' not in err and 'models loaded' not in err
  assert [(p, p.stat().st_mtime_ns) for p, _ in before] == before


@pytest.mark.long
def test_a_run_killed_at_20_random_points_ends_as_one_that_was_not(config, whole):
  rng = random.Random(0)
  folder, began = config.parent / 'random 0', time.monotonic()
  assert finish(start(config, folder))[0] == 0  # the programs are in the cache now
  seconds = time.monotonic() - began
  for kill in range(1, 21):
    if (folder / 'report.html').exists():
      same_as(whole[0], folder)
      folder = config.parent / f'random {kill}'
    process = start(config, folder)
    time.sleep(rng.uniform(0, seconds))
    process.kill()
    finish(process)
  code, _, err = finish(start(config, folder))
  assert code == 0, err
  same_as(whole[0], folder)


@pytest.mark.long
@pytest.mark.parametrize(('number', 'code'), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_is_alone_in_its_directory_and_where_it_is_ended_names_the_command_that_resumes_it(
  config, number, code, capsys
):
  folder = config.parent / number.name
  process = start(config, folder, TOYS_SLEEP='60')
  wait_until((folder / 'examples.jsonl').exists, process)
  assert run.main(given(config, folder)) == 1
  assert says(capsys.readouterr().err, 'error: ', str(folder), f'process {process.pid} ')
  process.send_signal(number)
  ended, out, err = finish(process)
  assert ended == code and not out and err.splitlines()[-1] == 'interrupted; the same command goes on from here'
  assert 'Traceback' not in err


@pytest.mark.full
def test_several_experiments_have_a_folder_each(config, capsys):
  path = config.parent / 'two.gin'
  path.write_text(
    GOOD.replace('[@Experiment()]', '[@one/Experiment(), @two/Experiment()]')
    + "one/Experiment.name = 'one'\ntwo/Experiment.name = 'two'\ntwo/Experiment.seed = 1\n"
    + 'Experiment.temperatures = [1.0]\nExperiment.quality_batch = 4\n'
  )
  folder = config.parent / 'two'
  begin = lambda *flags: (run.main([*given(path, folder), *flags]), *capsys.readouterr())
  code, _, err = begin('--only=three')
  assert code == 1 and says(err.splitlines()[-1], 'only=three', 'one, two')
  code, out, err = begin('--only=two')
  assert code == 0 and '# two: toys' in out and '# one: toys' not in out and not (folder / 'one').exists(), err
  before = (folder / 'two' / 'examples.jsonl').stat().st_mtime_ns
  code, out, err = begin()
  assert code == 0 and (folder / 'two' / 'examples.jsonl').stat().st_mtime_ns == before, err
  one, two = (json.loads((folder / name / 'results.json').read_text()) for name in ('one', 'two'))
  assert one['name'] == 'one' and two['points'] != one['points'] and '# one: toys' in out and '# two: toys' in out
  assert one['points'][0]['latency'] is None and one['points'][0]['batch'] == 4


def test_resuming_in_another_environment_is_a_warning(tmp_path, capsys):
  folder = RunDir(tmp_path)
  now = runner.environment()
  for _ in range(2):
    runner._prepare(folder, 'a = 1\n')
  assert capsys.readouterr().err == ''
  folder.write('environment.json', as_json(now | {'device': 'abacus'}))
  runner._prepare(folder, 'a = 1\n')
  assert f'device: abacus → {now["device"]}' in capsys.readouterr().err


@pytest.mark.long
def test_a_run_killed_three_times_ends_as_one_that_was_not(config, whole):
  folder = config.parent / 'killed'
  journals = ('examples.jsonl', 'examples.jsonl', 'latency.jsonl')
  for name, lines in zip(journals, (3, 33, 7), strict=True):
    process = start(config, folder)
    wait_until(lambda path=folder / name, lines=lines: lines_in(path) >= lines, process)
    process.send_signal(signal.SIGKILL)
    assert finish(process)[0] == -signal.SIGKILL
    with open(folder / name, 'ab') as f:
      f.write(b'{"temperature": 0.0, "cur')  # as if it had died in the middle of a line
  code, _, err = finish(start(config, folder))
  assert code == 0, err
  same_as(whole[0], folder)


def test_another_config_in_the_same_directory_is_refused_with_what_changed(config, whole, capsys):
  assert run.main([*given(config, whole[0]), '--gin.Experiment.seed=7']) == 1
  assert says(capsys.readouterr().err, '+Experiment.seed = 7', '--run_dir')
