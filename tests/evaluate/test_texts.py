"""A curve's text builds the method that it says, and a suite has the curves of its figure."""

import ast
import importlib
from pathlib import Path
import re
import sys

import gin
from matching import having
import pytest
from test_papers import save_plan
import toys

from speccascade import acceptance, rules, stopping
from speccascade.evaluate import config, Curve, Experiment, suites, texts

OPT = [0.0, 0.1, 0.2, 0.4, 0.8]
MINE = """from speccascade import methods, rules

def mine(q, p, *, alpha):
  return q.confidence < 1 - alpha

@rules.rule(alpha=rules.Range(0, 1, curve=(0.2, 0.4)))
def declared(q, p, *, alpha):
  return q.confidence < 1 - alpha

def drafted(combiner, block=5):
  return methods.naive_cos(combiner, block)

SUITE = ['opt', 'my_curves:declared']
"""


@pytest.fixture
def my_curves(tmp_path, monkeypatch):
  (tmp_path / 'my_curves.py').write_text(MINE)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', [str(tmp_path), *sys.path])
  yield
  sys.modules.pop('my_curves', None)


def described(text: str) -> list[str]:
  return [str(curve) for curve in texts.flat(text)]


@pytest.mark.parametrize(
  ('text', 'curve'),
  [
    ('opt', f'SpecCascade [OPT]: speculative() of opt(), alpha in {OPT}'),
    ('opt(block=5)', f'SpecCascade [OPT]: speculative(block=5) of opt(), alpha in {OPT}'),
    ('opt(block=7)', f'SpecCascade [OPT] (block=7): speculative(block=7) of opt(), alpha in {OPT}'),
    ('opt(alpha=[-0.1, 0.3])', 'SpecCascade [OPT]: speculative() of opt(), alpha in [-0.1, 0.3]'),
    ('opt:0.1', 'opt:0.1: speculative() of opt(alpha=0.1)'),
    ('opt(alpha=0.1, block=[3, 5])', 'opt(alpha=0.1): speculative() of opt(alpha=0.1), block in [3, 5]'),
    ("opt(alpha=[0.1], name='x')", 'x: speculative() of opt(), alpha in [0.1]'),
    ('speculative', 'speculative: speculative()'),
    ('speculative(block=[3, 5])', 'speculative: speculative(), block in [3, 5]'),
    ('token_cascade(rule=chow)', 'TokenCascade [Chow]: token_cascade() of chow(), alpha in [0.1, 0.3, 0.5, 0.7, 0.9]'),
    (
      "cos(combiner=weighted, weights=(0.5, 0.5), blocks=[(5, 1), (1, 1)], name='CoS')",
      'CoS: cos() of weighted(weights=(0.5, 0.5)), blocks in [(5, 1), (1, 1)]',
    ),
    (
      'cos(blocks=(5, 1), weights=[(0.5, 0.5)], combiner=weighted)',
      'cos(blocks=(5, 1), combiner=weighted): cos(blocks=(5, 1)) of weighted(), weights in [(0.5, 0.5)]',
    ),
    ('draft only', 'draft only: autoregressive(model=0)'),
    ('my_curves:mine(alpha=[0.1])', 'mine: speculative() of mine(), alpha in [0.1]'),
    ('my_curves:mine:0.3', 'mine:0.3: speculative() of mine(alpha=0.3)'),
    ('my_curves:declared', 'declared: speculative() of declared(), alpha in [0.2, 0.4]'),
    (
      'speculative(rule=my_curves:mine, alpha=[.1, .3], block=5)',
      'speculative(rule=mine, block=5): speculative(block=5) of mine(), alpha in [0.1, 0.3]',
    ),
    (
      'my_curves:drafted(combiner=opt, alpha=[0.1], block=2)',
      'drafted(combiner=opt, block=2): drafted(block=2) of opt(), alpha in [0.1]',
    ),
  ],
)
def test_a_text_is_a_curve(text, curve, my_curves):
  assert described(text) == [curve]
  assert all(point.build() for made in texts.flat(text) for point in made.points())


def _of_readme() -> list[list]:
  """Return the lists and texts of curves that README has, in its blocks and in its lines."""
  text = (Path(__file__).parents[2] / 'README.md').read_text()
  found = re.findall(r'Experiment\.curves ?= ?("\[.*?\]"|\'.*?\')|`(\[\'.*?\'\])`', text)
  return [ast.literal_eval(named.strip('"') if named.startswith('"[') else named or listed) for named, listed in found]


@pytest.mark.parametrize(
  'given',
  [*_of_readme(), ['opt(block=5)', 'opt(block=7)'], ['opt', 'opt(pair=(0, 1))'], ['cascades', 'cascades(block=7)']],
  ids=str,
)
def test_curves_that_differ_have_names_that_differ(given, my_curves):
  Path('my_rules.py').write_text(MINE + '\naverage_where_unsure = mine\n')
  try:
    experiment = Experiment(toys.task(3, 4), toys.models, given)
  finally:
    sys.modules.pop('my_rules', None)
  assert len(experiment.curves) > 1


def test_readme_has_inline_curves():
  assert len(_of_readme()) >= 3 and any(isinstance(given, list) and 'cascades' in given for given in _of_readme())


def test_a_curve_is_there_once_where_a_text_gives_a_default():
  curves = [*texts.flat(['cascades', 'opt', 'opt(block=5)'])]
  assert [curve.name for curve in curves].count('SpecCascade [OPT]') == 1


def test_policies_and_acceptors_are_named_inside():
  (curve,) = texts.flat('speculative(policy=Heuristic(first=2), accept=block)')
  assert curve.settings == {'policy': stopping.Heuristic(first=2), 'accept': acceptance.block}


def test_a_rule_is_handed_over_as_a_function_and_a_suite_as_a_list_of_a_module(my_curves):
  module = importlib.import_module('my_curves')
  assert described([module.declared, rules.opt]) == described(['my_curves:declared', 'opt'])
  assert described('my_curves:SUITE') == described(['opt', 'my_curves:declared'])


def test_what_a_rule_does_not_declare_is_asked_for(my_curves):
  with pytest.raises(ValueError, match=having('my_curves:mine'.partition(':')[2], 'alpha=[0.1, 0.3, 0.5]')):
    list(texts.flat('my_curves:mine'))


@pytest.mark.parametrize('name', suites.known())
def test_every_suite_builds_and_its_names_differ(name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  given = "(plan='plan.json')" if name in ('verification', 'verification_by_block', 'goodputs') else ''
  if given:
    config.register()
    with gin.unlock_config():
      gin.parse_config('Experiment.temperatures=[1.0]\nExperiment.top_k=None')
      gin.parse_config('Experiment.top_p=None\nExperiment.repetition_penalty=None')
    save_plan('plan.json')
  curves = [*texts.flat(['target only', f'{name}{given}', f'{name}{given}', 'target only'])]
  names = [curve.name if isinstance(curve, Curve) else curve for curve in curves]
  assert curves[0] == 'target only' and len(set(names)) == len(names) > 2
  assert all(point.build() for curve in curves[1:] for point in curve.points())


def test_the_values_of_a_rule_are_in_its_range_and_lead_from_the_verifier_to_the_drafter():
  for rule in rules.known().values():
    if declared := rules.declaration(rule).alpha:
      assert declared.low <= declared.curve[0] and declared.curve[-1] <= declared.high
      assert list(declared.curve) == sorted(set(declared.curve))


def test_the_last_of_models_that_are_not_there_yet_is_that_of_the_curves():
  task = toys.task(3, 4)
  assert Experiment(task, toys.models, 'opt').references[0].build().slots == (1,)
  pair = Experiment(task, toys.models, ['target only', 'speculative(pair=(0, 2))'])
  assert pair.references[0].build().slots == (2,) and [c.name for c in pair.curves][0] == 'target only'


TASK = 'import toys\nExperiment.task = @toys.task()\nExperiment.models = @toys.models\n'


@pytest.mark.parametrize(
  ('curves', 'names'),
  [
    ("'opt:0.1'", ['target only', 'opt:0.1']),
    ("'my_curves:mine(alpha=[0.1, 0.3])'", ['target only', 'mine']),
    ("['cascades', 'my_curves:mine(alpha=[0.1])']", ['target only', 'draft only', 'SpecDecode', 'mine']),
    ('@toys.mean', ['target only', 'mean']),
    ('[@x/Curve(), "draft only"]', ['target only', 'x', 'draft only']),
  ],
)
def test_a_first_try_works(curves, names, my_curves):
  own = "x/Curve.name = 'x'\nx/Curve.method = 'speculative'\ntoys.mean.weight = 0.5\n"
  Path('first.gin').write_text(f'{TASK}Experiment.curves = {curves}\n{own}')
  config.parse(['first.gin'])
  (experiment,) = config.build()
  found = [curve.name for curve in experiment.curves]
  assert [name for name in found if name in names] == names and (len(found) == len(names) or 'SpecDecode' in names)
  assert [model.name for model in experiment.load()] == ['toy2', 'toy1']


def test_the_config_binds_what_a_text_leaves_out(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  Path('bound.gin').write_text(
    f"{TASK}Experiment.curves = ['opt', 'chow(block=3)', 'oracles', 'diff(alpha=[0.1], block=4)']\n"
    'methods.speculative.block = 7\nsuites.oracles.block = 2\nrules.opt.alpha = 0.2\n'
  )
  config.parse(['bound.gin'], ['methods.speculative.block = 9'])
  curves = {curve.name: str(curve).partition(': ')[2] for curve in config.build()[0].curves}
  assert curves['opt'] == 'speculative(block=9) of opt(alpha=0.2)' and 'block=2' in curves['SpecDecode (block=2)']
  assert curves['SpecCascade [Chow] (block=3)'].startswith('speculative(block=3)')
  assert curves['SpecCascade [Diff] (block=4)'] == 'speculative(block=4) of diff(), alpha in [0.1]'


def test_a_path_is_a_model_with_what_the_config_binds_on_checkpoints(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  text = TASK.replace('@toys.models', "['a', 'org/b@4']") + "Experiment.curves = 'opt'\nCheckpoint.dtype = 'bfloat16'\n"
  Path('paths.gin').write_text(text)
  config.parse(['paths.gin'], ['Checkpoint.scan = True'])
  models = config.build()[0].models
  assert [(m.path, m.dtype, m.scan) for m in models] == [('a', 'bfloat16', True), ('org/b@4', 'bfloat16', True)]
