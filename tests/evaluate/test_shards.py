"""Shards come to the bytes of one process, whichever of them was killed, and mistakes with them are one sentence."""

import dataclasses
import json
import pathlib
import re
import signal

from matching import having, says
import pytest
from runs import finish, given, lines_in, merge, QUICK, same_bytes, share, start, TARGET, wait_until, written
import toys

from speccascade import methods, rules, run
from speccascade.evaluate import Curve, Experiment, protocols, runner, shards
from speccascade.evaluate.shards import Shard
from speccascade.host.errors import RunError
from speccascade.host.runs import RunDir

ROOT = pathlib.Path(__file__).parents[2]
OPT = Curve('opt', methods.speculative, rules.opt, 'alpha', (0.0, 0.5), {'block': 2})
EXPERIMENT = Experiment(toys.task, toys.models, [TARGET, OPT], quality_batch=1, latency_examples=5, latency_trials=2)
TIMED = dataclasses.replace(QUICK, latency_examples=3, latency_trials=2)


# ---- what each has ----


@pytest.mark.parametrize('count', [1, 2, 3, 7, 40])
@pytest.mark.parametrize('protocol', protocols.PROTOCOLS, ids=lambda p: p.journal)
def test_every_line_is_one_shards(protocol, count):
  lines = protocol.lines(EXPERIMENT)
  owners = [[s for s in shards.all_of(count) if s.has(turn)] for turn, _ in lines]
  assert len(lines) > 40 and all(len(o) == 1 for o in owners)


def test_shards_have_as_much_and_no_point_the_longest_prompts_alone():
  examples = [dataclasses.replace(e, prompt=e.prompt * (1 + i)) for i, e in enumerate(toys.task(30).examples)]
  experiment = dataclasses.replace(EXPERIMENT, task=dataclasses.replace(toys.task(30), examples=examples))
  lengths = {e.index: len(e.prompt) for e in examples}
  parts = protocols.quality_plan(experiment)
  work = [sum(lengths[e.index] for p in parts if s.has(p.turn) for e in p.examples) for s in shards.all_of(3)]
  assert max(work) < 1.05 * min(work)


def test_an_example_is_timed_by_one_shard_with_every_point_in_every_trial():
  owners = {}
  for timing in protocols.latency_plan(EXPERIMENT):
    owners.setdefault(timing.examples, set()).add(timing.turn % 3)
  assert len(owners) == 5 and all(len(o) == 1 for o in owners.values()) and len(set.union(*owners.values())) == 3


# ---- as commands ----


@pytest.mark.full
def test_three_shards_of_which_one_was_killed_come_to_one_processs_bytes(tmp_path, monkeypatch, capsys):
  config, folder, whole = written(tmp_path), tmp_path / 'three', tmp_path / 'one' / 'run'
  here = lambda *flags: (run.main([*given(config, 'run'), *flags]), *capsys.readouterr())
  for name in ('one', 'three'):
    (tmp_path / name).mkdir()
  monkeypatch.chdir(tmp_path / 'one')
  code, _, err = here()
  assert code == 0, err
  monkeypatch.chdir(folder)
  killed = start(config, 'run', '--shard=1/3', cwd=folder)
  lines = folder / 'run' / 'shards' / '1-of-3' / 'examples.jsonl'
  wait_until(lambda: lines_in(lines) >= 5, killed)
  killed.kill()
  assert finish(killed)[0] == -signal.SIGKILL
  with open(lines, 'ab') as f:
    f.write(b'{"temperature": 0.0, "cur')  # as if it had died in the middle of a line
  for i in (0, 2):
    code, out, err = here(f'--shard={i}/3')
    assert code == 0 and not out and re.search(r'the results wait for .*1/3 \(\d+ of \d+ lines\)', err), err
  code, _, err = here('--merge')
  assert code == 1 and re.search(r'error: run lacks 1 of 3 shards: 1/3 \(\d+ of 20 lines\); run each with', err)
  code, out, err = here('--shard=1/3')
  assert code == 0 and 'Report: run/report.html' in out, err
  same_bytes(whole, folder / 'run')
  for name in ('results.json', 'examples.jsonl', 'report.html'):
    (folder / 'run' / name).unlink()
  code, again, err = here('--merge')
  assert code == 0 and again == out and 'models loaded' not in err, err
  same_bytes(whole, folder / 'run')
  code, again, err = here()
  assert code == 0 and again == out and 'quality' not in err, err


# ---- in Python ----


def test_shards_of_several_experiments_with_times_write_what_one_process_does(tmp_path):
  made = [dataclasses.replace(TIMED, name='a b'), dataclasses.replace(QUICK, name='c')]
  go = lambda shard: runner.run(made, tmp_path / 'run', config='', shard=shard)
  assert go(Shard(1, 2)) == [] and not (tmp_path / 'run' / 'a_b').exists()
  assert go(Shard(0, 2)) == [tmp_path / 'run' / 'a_b', tmp_path / 'run' / 'c']
  runner.run(made, tmp_path / 'one', config='')
  for name in ('a_b/examples.jsonl', 'c/examples.jsonl', 'a_b/traces.jsonl', 'a_b/models.json', 'c/latency.jsonl'):
    assert (tmp_path / 'run' / name).read_bytes() == (tmp_path / 'one' / name).read_bytes()
  mine, one = (
    [{k: v for k, v in json.loads(line).items() if not k.endswith('seconds')} for line in text.splitlines()]
    for text in ((tmp_path / folder / 'a_b' / 'latency.jsonl').read_text() for folder in ('run', 'one'))
  )
  assert mine == one and len(mine) == 3 * 2
  results = json.loads((tmp_path / 'run' / 'a_b' / 'results.json').read_text())
  assert results['points'][0]['latency']['examples'] == 3 and results['points'][0]['latency']['ratio'] == 1


def test_of_more_shards_than_there_is_to_do_some_have_nothing_and_the_first_finds_the_results_written(tmp_path):
  assert [share(QUICK, tmp_path / 'run', i, 5) for i in (4, 3, 1, 0, 2, 0)] == [[]] * 4 + [[tmp_path / 'run']] * 2
  runner.run([QUICK], tmp_path / 'one', config='a = 1\n')
  assert (tmp_path / 'run' / 'examples.jsonl').read_bytes() == (tmp_path / 'one' / 'examples.jsonl').read_bytes()


@pytest.fixture
def begun(tmp_path):
  """Return a run directory in which the first of three shards is done."""
  share(QUICK, tmp_path / 'run', 0)
  return tmp_path / 'run'


def test_a_merge_needs_no_devices_for_its_mesh(tmp_path, capsys):
  argv = [*given(written(tmp_path), tmp_path / 'nowhere'), "--gin.mesh.shape={'data': 64}", '--merge']
  assert run.main(argv) == 1 and 'has no shards' in capsys.readouterr().err


def test_the_shards_that_a_merge_lacks_are_named(begun):
  (begun / 'shards' / '0-of-3' / 'models.json').unlink()
  share(QUICK, begun, 2)
  with pytest.raises(RunError) as caught:
    merge(QUICK, begun)
  message = str(caught.value)
  assert says(message, str(begun), '0/3', 'models.json', '1/3', '--shard=i/3') and '2/3' not in message
  with pytest.raises(RunError, match=having('nowhere', '--shard=i/n')):
    merge(QUICK, begun / 'nowhere')


OTHER = 'a = 2\n'
REFUSED = {
  'another config': (lambda run: share(QUICK, run, 1, config=OTHER), having('shard 1/3', '+a = 2')),
  'another number of shards': (lambda run: share(QUICK, run, 0, 4), having('--shard=0/4', '3 shards', '--shard=i/3')),
  'one process': (lambda run: runner.run([QUICK], run, config='a = 1\n'), having('3 shards', '--shard=i/3')),
  'a merge with another config': (lambda run: merge(QUICK, run, config=OTHER), having('config', '+a = 2')),
}


@pytest.mark.parametrize('name', REFUSED)
def test_what_does_not_belong_to_the_shards_of_a_run_is_refused(begun, name):
  call, message = REFUSED[name]
  before = {p: p.read_bytes() for p in begun.rglob('*') if p.is_file() and p.name != 'lock'}
  with pytest.raises(RunError, match=message):
    call(begun)
  assert before == {p: p.read_bytes() for p in begun.rglob('*') if p.is_file() and p.name != 'lock'}
  assert {p.name for p in (begun / 'shards').iterdir()} == {'0-of-3'}


def test_a_shard_of_a_run_that_one_process_began_is_refused(tmp_path):
  runner.run([QUICK], tmp_path / 'run', config='a = 1\n')
  with pytest.raises(RunError, match='without --shard'):
    share(QUICK, tmp_path / 'run', 0)


def test_a_shard_is_of_one_process_and_others_may_run_meanwhile(begun):
  with shards.locked(RunDir(begun), Shard(1, 3), lambda: None):
    with pytest.raises(RunError, match=r'1-of-3.* process \d+ '):
      share(QUICK, begun, 1)
    assert share(QUICK, begun, 2) == []


def test_lines_of_another_plan_in_a_shard_are_no_part_of_the_results(begun):
  for i in (1, 2):
    share(QUICK, begun, i)
  (begun / 'examples.jsonl').unlink()
  first, second = (begun / 'shards' / f'{i}-of-3' / 'examples.jsonl' for i in (0, 1))
  first.write_bytes(second.read_bytes())
  with pytest.raises(RunError, match=having('0-of-3/examples.jsonl', 'another run')):
    merge(QUICK, begun)
  assert not (begun / 'examples.jsonl').exists()
