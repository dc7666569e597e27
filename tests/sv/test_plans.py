"""A plan file is data: reading it runs nothing that it names."""

import dataclasses
import json
import sys

from matching import having
import pytest

from speccascade import methods, Sampler, stopping
from speccascade.evaluate import texts
from speccascade.host import names, storage
from speccascade.sv import plans, predictors

ORIGIN = plans.Origin(('s', 'l'), (None, None), (('temperature', 0.0),), 'cpu, float32', 'prompts', 5)
MINE = """import pathlib
from speccascade.sv import predictors
pathlib.Path('imported').touch()

@predictors.signal()
def declared(draft):
  return draft.q

def undeclared(draft):
  return draft.q
"""


@pytest.fixture
def written(tmp_path, monkeypatch):
  """Return a function that writes a plan with one choice, its digest right, and returns its path."""
  (tmp_path / 'my_plan_signals.py').write_text(MINE)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)

  def write(choice, **changed):
    content = dict(origin=vars(ORIGIN), choices={'1': choice})
    content = json.loads(json.dumps(content | dict(speeds={}, profile=None) | changed))
    saved = dict(speccascade_plan=plans.FORMAT, digest=storage.digest_of_json(content), **content)
    (tmp_path / 'plan.json').write_text(json.dumps(saved))
    return str(tmp_path / 'plan.json')

  yield write
  sys.modules.pop('my_plan_signals', None)


@pytest.mark.parametrize(
  'text, said',
  [
    ("subprocess:Popen(args=['touch', 'executed'])", 'Popen'),
    ("subprocess:run(args=['touch', 'executed'])", 'declared signal'),
    ("os:system(command='touch executed')", 'declared signal'),
    ('my_plan_signals:declared', '--import my_plan_signals'),
    ('speccascade.sv.predictors:os', 'no os'),
    ('pathlib:Path', 'declared signal'),
    ('(' * 100_000, 'names no predictor'),
    ('margin(x=print:1)', 'x=print:1'),
  ],
)
def test_a_plan_runs_and_imports_nothing_that_it_names(text, said, written, tmp_path):
  path = written(['scheduled', 3, text])
  with pytest.raises(ValueError, match=having('plan.json', said)):
    methods.planned(path)
  with pytest.raises(ValueError, match='plan.json'):
    plans.load(path)
  assert not (tmp_path / 'executed').exists() and not (tmp_path / 'imported').exists()
  assert 'my_plan_signals' not in sys.modules


def test_a_plan_names_the_signals_of_the_package_and_those_declared_in_what_is_imported(written):
  path = written(['scheduled', 3, 'margin'])
  assert plans.load(path).choices[1].predictor == 'margin'
  names.module('my_plan_signals')  # as --import does
  assert plans.load(written(['scheduled', 3, 'my_plan_signals:declared'])).choices[1].block == 3
  with pytest.raises(ValueError, match=having('undeclared', '@predictors.signal()')):
    plans.load(written(['scheduled', 3, 'my_plan_signals:undeclared']))


@pytest.mark.parametrize(
  'choice', [['eval', 3, ''], ['speculative', '3', ''], ['scheduled', 3, 5], [], 'x', None, [1] * 9]
)
def test_a_choice_of_another_kind_is_refused_in_a_sentence(choice, written):
  with pytest.raises(ValueError, match=having('plan.json', 'speccascade.plan')):
    plans.load(written(choice))


@pytest.mark.parametrize(
  'changed', [{'origin': 3}, {'origin': {'x': 1}}, {'choices': 3}, {'profile': 7}, {'speeds': 1}]
)
def test_a_part_of_another_kind_is_refused_in_a_sentence(changed, written):
  with pytest.raises(ValueError, match=having('plan.json', 'speccascade.plan')):
    plans.load(written(['speculative', 3, ''], **changed))


@pytest.mark.parametrize(
  'make',
  [
    lambda text: stopping.find(text),
    lambda text: predictors.find(text),
    lambda text: texts.find(text),
    lambda text: methods.find(f'speculative(policy={text})'),
    lambda text: methods.find(f'scheduled(predictor=margin, budget={text})'),
  ],
)
def test_what_a_text_names_has_its_role_checked_before_it_is_called(make, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError, match='Popen'):
    make("subprocess:Popen(args=['touch', 'executed'])")
  assert not (tmp_path / 'executed').exists()


def test_a_plan_of_another_coupling_is_refused_but_for_greedy_texts():
  sampled = dataclasses.replace(ORIGIN, sampler=plans.sampler_of(Sampler()))
  sampled.check_sampler(Sampler())
  with pytest.raises(ValueError, match=having("coupling='maximal'", "'gumbel'")):
    sampled.check_sampler(Sampler(coupling='gumbel'))
  dataclasses.replace(sampled, coupling='gumbel').check_sampler(Sampler(coupling='gumbel'))
  ORIGIN.check_sampler(Sampler(0.0, coupling='gumbel'))
