"""A damaged file of a run is named and deleting it is enough; no character of a text keeps a run from ending."""

import dataclasses
import json
import shutil

import jax.numpy as jnp
from matching import says
import pytest
import toys

from speccascade import methods
from speccascade.evaluate import Curve, Experiment, runner
from speccascade.host.errors import RunError
from speccascade.host.runs import RunDir

TASK = toys.task(3, 4)
ODD = 'a\u2028b\x85c\x0bd\u2029'
TASK = dataclasses.replace(TASK, examples=[dataclasses.replace(e, target=f'{e.target} {ODD}') for e in TASK.examples])
ALONE = Curve('target only', methods.autoregressive, settings={'model': 1})
EXPERIMENT = Experiment(
  TASK, toys.models, [ALONE], temperatures=[0.0], quality_batch=1, latency_examples=1, latency_trials=1
)


def run(folder):
  runner.run([EXPERIMENT], folder, config='')


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  folder = tmp_path_factory.mktemp('runs') / 'whole'
  run(folder)
  return folder


def test_a_text_with_other_line_ends_can_be_finished_and_repeated(whole):
  run(whole)
  traces = json.loads((whole / 'results.json').read_text())['traces']
  assert traces and all(ODD in t['target'] for t in traces)


def test_a_run_without_a_name_is_called_by_its_models_and_its_task(whole):
  results, report = json.loads((whole / 'results.json').read_text()), (whole / 'report.html').read_text()
  assert (results['name'], results['task']) == ('toy2 → toy1', 'toys')
  assert '<title>toy2 → toy1: toys</title>' in report and report.count('toy2 → toy1</') == 1
  assert (whole / 'summary.md').read_text().startswith('# toy2 → toy1: toys')


def test_no_experiment_has_a_folder_outside_the_run_or_a_file_of_it(tmp_path):
  named = lambda *names: [dataclasses.replace(EXPERIMENT, name=name) for name in names]
  folders = [study.folder(RunDir(tmp_path)).path for study in runner.studies_of(named('..', 'a/../b', '/x'), ())]
  assert {folder.resolve().parent for folder in folders} == {tmp_path}
  for taken in ('lock', 'shards', 'config.gin', 'environment.json'):
    with pytest.raises(RunError, match=taken):
      runner.studies_of(named('a', taken), ())


DAMAGES = {'cut off': '{"a": ', 'no text': '\xff'}


@pytest.mark.parametrize('name', ('models.json', 'environment.json', 'traces.jsonl'))
def test_a_damaged_file_is_named_and_deleting_it_is_enough(whole, tmp_path, name):
  folder = tmp_path / 'run'
  shutil.copytree(whole, folder)
  for damage, content in DAMAGES.items():
    (folder / name).write_text(content, encoding='latin-1')
    with pytest.raises(RunError) as caught:
      run(folder)
    assert str(caught.value) == f'{folder / name} is damaged; delete it, and the same command makes it again.', damage
  (folder / name).unlink()
  run(folder)
  assert (folder / name).read_text() == (whole / name).read_text()


def test_damaged_results_are_written_anew(whole, tmp_path):
  folder = tmp_path / 'run'
  shutil.copytree(whole, folder)
  (folder / 'results.json').write_text('{"na')
  run(folder)
  assert (folder / 'results.json').read_text() == (whole / 'results.json').read_text()


def faulty_models():
  """Return toys of which neither can say what follows the prompt of example 2."""
  rows = TASK.examples[2].prompt[0] * toys.VOCAB + TASK.examples[2].prompt[1]
  models = toys.models()
  return [m.replace(params=m.params | {'table': m.params['table'].at[rows].set(jnp.nan)}) for m in models]


@pytest.mark.filterwarnings('ignore:model 0 .* drafted nothing')  # for that is what a fault of its parameters does
def test_a_sequence_with_a_fault_is_counted_left_out_of_timing_and_costs_no_run(tmp_path, capsys):
  sequence = Curve('answers', methods.sequence_cascade, parameter='threshold', values=[-1.0])
  experiment = dataclasses.replace(
    EXPERIMENT, models=faulty_models, curves=[ALONE, sequence], latency_examples=3, latency_trials=2
  )
  folder = tmp_path / 'run'
  runner.run([experiment], folder, config='')
  assert says(capsys.readouterr().err, 'target only', '1 of 1', 'example 2', 'model 1')
  lines = [json.loads(line) for line in (folder / 'examples.jsonl').read_text().splitlines()]
  assert [line['example'] for line in lines if 'fault' in line] == [2, 2]
  results = json.loads((folder / 'results.json').read_text())
  for point in results['points']:
    assert (point['examples'], point['faults'], point['latency']['examples']) == (3, 1, 2)
  assert [row[-1] for row in results['tables'][0]['rows']] == [1, 1] and results['tables'][0]['columns'][-1] == 'faults'
  assert 'not timed. example 2: the logits of' in (folder / 'report.html').read_text()
  whole = (folder / 'examples.jsonl').read_bytes()
  (folder / 'examples.jsonl').write_bytes(b''.join(whole.splitlines(True)[:1]))
  runner.run([experiment], folder, config='')
  assert (folder / 'examples.jsonl').read_bytes() == whole
