"""A task of the lm-evaluation-harness is a task of an experiment, with the harness's prompts and scores."""

import json
import sys

import pytest

from speccascade import run
from speccascade.data.harness import lm_eval_task
from speccascade.host.errors import RunError

SUMS = [('2 + 2', '4'), ('3 + 2', '5'), ('3 + 3', '6')]
TASK = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: DATA, train: DATA}}
test_split: test
fewshot_split: train
output_type: generate_until
doc_to_text: "Q: {{question}}\\nA:"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n", ""], max_gen_toks: 4}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
  - {metric: ter, aggregation: ter, higher_is_better: false}
  - {metric: chrf, aggregation: chrf, higher_is_better: true}
filter_list:
  - {name: all, filter: [{function: take_first}]}
  - {name: digit, filter: [{function: regex, regex_pattern: "(\\\\d)"}, {function: take_first}]}
"""
CODE = """
import os
if os.environ.get('HF_ALLOW_CODE_EVAL') != '1':
  raise ValueError('To run it set the environment variable HF_ALLOW_CODE_EVAL="1"')

def passed(references, predictions):
  scope = {}
  exec(predictions[0], scope)
  return {'pass@1': 'f' in scope and scope['f']() == int(references[0])}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
  pytest.importorskip('lm_eval', reason="needs the extra 'lm-eval'")
  monkeypatch.setenv('HF_HUB_OFFLINE', '1')
  monkeypatch.setenv('HF_DATASETS_CACHE', str(tmp_path / 'cache'))
  monkeypatch.delenv('HF_ALLOW_CODE_EVAL', raising=False)
  (tmp_path / 'data.json').write_text(json.dumps([dict(question=q, answer=a) for q, a in SUMS]))
  (tmp_path / 'code.py').write_text(CODE)
  return tmp_path


def written(folder, **changes) -> str:
  """Write the task with changes of lines and return the path of its file."""
  lines = dict(line.split(': ', 1) for line in TASK.split('\nmetric_list')[0].strip().splitlines())
  lines |= changes
  rest = '' if 'metric_list' in changes else 'metric_list' + TASK.split('\nmetric_list')[1]
  text = '\n'.join(f'{name}: {value}' for name, value in lines.items()) + f'\n{rest}'
  (folder / 'sums.yaml').write_text(text.replace('DATA', str(folder / 'data.json')))
  return str(folder / 'sums.yaml')


def test_prompts_stops_and_scores_are_the_harnesss(folder):
  task = lm_eval_task(written(folder), limit=2)
  assert (task.name, task.max_new_tokens, task.stop) == ('sums', 4, ['\n'])
  assert [(e.prompt, e.target) for e in task.examples] == [('Q: 2 + 2\nA:', '4'), ('Q: 3 + 2\nA:', '5')]
  texts = task.judged(task.examples, ['4\nQ:', ' it is 5'])
  scores = {name: metric(task.examples, texts) for name, metric in task.metrics.items()}
  assert scores.keys() == {'exact_match, all', 'chrf, all', 'exact_match, digit', 'chrf, digit'}
  assert (scores['exact_match, all'], scores['exact_match, digit'], scores['chrf, digit']) == (50, 100, 100)
  assert task.metrics['exact_match, all'].statistics(task.examples, texts).tolist() == [[1], [0]]
  shots = lm_eval_task(written(folder), limit=1, num_fewshot=1, max_new_tokens=7)
  assert shots.examples[0].prompt.count('A:') == 2 and shots.max_new_tokens == 7


def test_an_experiment_has_the_task_by_its_gin_name(folder):
  settings = [
    'curves/Curve.name = "target only"',
    'curves/Curve.method = @methods.autoregressive',
    'curves/Curve.settings = {"model": 1}',
    'Experiment.curves = [@curves/Curve()]',
    'Experiment.models = @embedded.models',
    'Experiment.temperatures = [0.0]',
    'run.experiments = [@Experiment()]',
    f"Experiment.task = lm_eval_task(name='{written(folder)}', limit=2)",
  ]
  flags = [f'--gin_bindings={binding}' for binding in settings]
  assert run.main([*flags, f'--run_dir={folder / "run"}']) == 0
  results = json.loads((folder / 'run' / 'results.json').read_text())
  assert results['metrics'][0] == 'exact_match, all' and results['points'][0]['examples'] == 2


def test_a_mean_that_is_in_per_cent_stays_as_it_is(folder):
  (folder / 'points.py').write_text('def points(references, predictions): return 100.0 * (references == predictions)')
  listed = '[{metric: !function points.points, aggregation: mean, higher_is_better: true}]'
  task = lm_eval_task(written(folder, metric_list=listed))
  (judge,) = task.metrics.values()
  assert judge(task.examples, [answer for _, answer in SUMS]) == 100
  assert judge(task.examples, ['4', '', '']) == pytest.approx(100 / 3)


def test_programs_run_with_both_consents_alone(folder, monkeypatch):
  metrics = '[{metric: !function code.passed, aggregation: mean, higher_is_better: true}]'
  path = written(folder, unsafe_code='true', metric_list=metrics)
  for consent in ('0', '1'):
    monkeypatch.setenv('HF_ALLOW_CODE_EVAL', consent)
    with pytest.raises(PermissionError, match='confirm_run_unsafe_code=True and set HF_ALLOW_CODE_EVAL=1'):
      lm_eval_task(path, confirm_run_unsafe_code=consent == '0')
  task = lm_eval_task(path, confirm_run_unsafe_code=True)
  assert task.metrics['pass@1'](task.examples, ['def f(): return 4'] * 3) == pytest.approx(100 / 3)


@pytest.mark.parametrize(
  'changes, part',
  [
    (dict(output_type='loglikelihood', generation_kwargs='null', metric_list='[{metric: acc}]'), 'not one text'),
    (dict(repeats='4'), 'not one text'),
    (dict(dataset_path='nowhere'), 'reads no task'),
  ],
)
def test_a_task_that_is_none_of_an_experiment_is_one_sentence(folder, changes, part):
  with pytest.raises(RunError, match=part):
    lm_eval_task(written(folder, **changes))


def test_where_the_harness_is_missing_the_extra_is_named(monkeypatch):
  for module in ('lm_eval', 'lm_eval.models.utils', 'lm_eval.tasks'):
    monkeypatch.setitem(sys.modules, module, None)
  with pytest.raises(RunError, match=r"pip install 'speccascade\[lm-eval\]'"):
    lm_eval_task('gsm8k')
