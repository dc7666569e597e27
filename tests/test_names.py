"""What has a name has one spelling in every command and config, and a user's is named as the package's is."""

from functools import partial
import importlib.util
import re
import runpy
import subprocess
import sys

import docstrings
from matching import having
import pytest

from speccascade import acceptance, decode, methods, rules, run, stopping
from speccascade.__main__ import COMMANDS
from speccascade.decode import __main__ as command
from speccascade.decode import options
from speccascade.engine.method import Strategy
from speccascade.evaluate import config, tasks
from speccascade.evaluate.curves import Curve
from speccascade.host import commands, names
from speccascade.host.errors import RunError
from speccascade.models import toy
from speccascade.sv import plans

MINE = """import functools

import jax

from flax import struct
from speccascade import acceptance, methods, rules, sampling, stopping
from speccascade.engine.phases import Propose, Score, Verify


def mine(q, p, *, alpha, factor=1.0):
  return q.confidence < factor * p.confidence - alpha


half = functools.partial(mine, alpha=0.5)


def number(x=1):
  return x


def geometric(models, *, power):
  return models[0].sampler(power * sum(model.log_plain for model in models))


@struct.dataclass
class Entropy(stopping.Policy):
  limit: jax.Array

  def before(self, logits, sampler):
    return sampling.entropy(logits) > self.limit


def every(trial):
  return acceptance.token_wise(trial)


def drafted(combiner, block=5):
  phases = Propose(0, block), Score(1), Verify(rules.bind_combiner(combiner), (1,))
  return methods.Method(phases, (0, 1), about=methods.About('drafted', block=block))
"""
TEXTS = (  # arguments of other kinds than the docstrings have
  'speculative(rule=opt:-0.1, block=3, policy=Heuristic(first=2), accept=block, pair=(0, 1))',
  "sequence_cascade(score='sum', threshold=-2.5)",
  'ensemble_parallel(combiner=opt:0.1, models=2)',
  "planned(plan='plan.json')",
  'scheduled(predictor=margin, budget=Stale(budget=TopK(k=1)), fit=Logistic(bias=1.0, slope=2.0, rate=0))',
)
MADE = [methods.spelled(make) for make in docstrings.of_methods() if make.func is not methods.by_batch]
OWN = {  # a text, and the sources that it is known by
  'speculative(rule=my_names:mine:0.1)': {'mine'},
  'speculative(block=2, policy=my_names:Entropy(limit=1.5), accept=my_names:every)': {'Entropy', 'every'},
  'cos(combiner=my_names:geometric:0.5, blocks=(2, 1))': {'geometric'},
  'my_names:drafted(combiner=my_names:geometric:1.0, block=2)': {'drafted', 'geometric'},
}


@pytest.fixture
def my_names(tmp_path, monkeypatch):
  (tmp_path / 'my_names.py').write_text(MINE)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', [*sys.path])
  yield tmp_path
  sys.modules.pop('my_names', None)


@pytest.mark.parametrize(
  'text, name, numbers, spelled',
  [
    ('opt:0.1', 'opt', {'alpha': 0.1}, 'opt:0.1'),
    ('opt(alpha=-0.1)', 'opt', {'alpha': -0.1}, 'opt:-0.1'),
    ('lossy:0.2', 'lossy', {'alpha': 0.2}, 'lossy:0.2'),
    ('weighted:.5,.5', 'weighted', {'weights': (0.5, 0.5)}, 'weighted:0.5,0.5'),
    ('weighted(weights=(.2, .8))', 'weighted', {'weights': (0.2, 0.8)}, 'weighted:0.2,0.8'),
    ('speculative', 'speculative', {}, 'speculative'),
    ('my_names:mine:0.3', 'mine', {'alpha': 0.3}, 'my_names:mine:0.3'),
    ('my_names:mine(alpha=0.3, factor=0.9)', 'mine', {'alpha': 0.3, 'factor': 0.9}, None),
    ('my_names:half', 'mine', {'alpha': 0.5}, 'my_names:mine:0.5'),
  ],
)
def test_a_text_names_a_rule_and_its_numbers(text, name, numbers, spelled, my_names):
  for found in (rules.find(text), options.rule(text)):
    assert rules.name_of(found) == name and getattr(found, 'keywords', {}) == numbers
    assert rules.spelled(found) == (spelled or text)
    assert rules.spelled(rules.find(rules.spelled(found))) == rules.spelled(found)


def test_every_rule_and_combiner_of_the_package_has_its_name():
  known = rules.known()
  assert {'opt', 'lossy_star', 'token_v3', 'weighted', 'contrastive', 'realign'} < known.keys() and 'own' not in known
  assert all(rules.find(name) is function for name, function in known.items())


@pytest.mark.parametrize(
  'text, parts',
  [
    ('opt:x', ("'x'",)),
    ('opt:1,2', ('opt', 'alpha')),
    ('opt(0.1)', ('opt', 'alpha=0.1')),
    ('opt(alpha=x)', ('alpha=x', 'alpha=0.1')),
    ('opt(alpha', ('opt(alpha', 'NAME(alpha=0.1)')),
    ('opt(alpha=1, alpha=2)', ('opt', 'once')),
    ('opt(**{"alpha": 1})', ('opt', 'by name')),
    ('speculative:1', ('speculative', 'no number')),
    ('my_names:nope', ('my_names.py', 'nope')),
    ('my_names:number', ('number', 'neither')),
    ('opt(0.3)', ('opt(alpha=0.1)',)),
  ],
)
def test_a_text_that_names_nothing_is_refused_in_a_sentence(text, parts, my_names):
  with pytest.raises(ValueError, match=having(*parts)):
    rules.find(text)


def test_a_class_that_is_given_a_bare_number_is_spelled_with_its_own_argument():
  known = acceptance.known()
  with pytest.raises(ValueError, match=re.escape('Threshold(limit=0.1)')):
    names.find('Threshold(0.3)', 'acceptor', known)


@pytest.mark.parametrize('text', ['gsm8k(0)', 'gsm8k(shots', 'problems(0)', 'gsm8k:0'])
def test_a_task_that_is_miswritten_is_answered_by_a_task(text):
  with pytest.raises(ValueError, match='gsm8k\\(') as caught:
    tasks.find(text)
  assert 'alpha' not in str(caught.value) and 'opt' not in str(caught.value)


def test_an_error_inside_of_a_task_is_no_wrong_argument(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', [*sys.path])
  (tmp_path / 'my_broken.py').write_text('def broken(count=1):\n  return len(count)\n')
  with pytest.raises(TypeError, match=r"^object of type 'int' has no len\(\)"):
    tasks.find('my_broken:broken')
  with pytest.raises(ValueError, match=having("broken: got an unexpected keyword argument 'shots'", 'it takes count')):
    tasks.find('my_broken:broken(shots=1)')
  (tmp_path / 'mine.gin').write_text('Experiment.models = @embedded.models')
  config.parse(['mine.gin'], ['Experiment.curves = opt', 'Experiment.task = my_broken:broken'])
  with pytest.raises(RunError, match=having('has no len()', 'my_broken.py:2')):
    config.build()


def test_what_a_name_means_is_known_by_its_source(my_names):
  assert names.source(partial(rules.opt, alpha=0.1)) is None
  assert 'factor * p.confidence' in names.source(rules.find('my_names:half'))


# ---- methods, policies, acceptors ----


def of_check(name):
  """Return what the command speccascade.check has under a name, without leaving its module behind."""
  return runpy.run_module('speccascade.check.__main__')[name]


@pytest.mark.parametrize('text', [*TEXTS, *MADE])
def test_every_method_of_the_package_is_named_as_it_is_spelled(text, my_names):
  origin = plans.Origin(('small', 'large'), (None, None), (), 'cpu', 'texts', 3)
  plans.Plan(origin, {1: plans.Choice('speculative', 3), 8: plans.Choice('autoregressive')}, {}).save('plan.json')
  found = methods.find(text)
  assert methods.spelled(found) == text
  made, name = found(), found.func.__name__
  assert isinstance(made, Strategy) and made.about.name == {'planned': 'by_batch'}.get(name, name)
  args = command._parser().parse_args(['--models', 'a', 'b', '--method', text, '--', 'in', 'out'])
  assert str(options.method(args, 2)) == str(made) == str(Curve('curve', text).build())


def test_every_policy_and_acceptor_of_the_package_is_named_as_it_is_spelled():
  policies = [docstrings.of_class(x, 'stopping') for x in stopping.known().values()]
  acceptors = [docstrings.of_class(x, 'acceptance') if isinstance(x, type) else x for x in acceptance.known().values()]
  for module, values in ((stopping, policies), (acceptance, acceptors)):
    for value in values:
      text = module.spelled(value)
      assert module.spelled(module.find(text)) == text


@pytest.mark.full
@pytest.mark.parametrize('text', OWN)
def test_what_is_a_users_is_named_in_every_command_that_takes_a_method(text, my_names):
  found = methods.find(text)
  assert methods.spelled(found) == text and {name for name, _ in names.sources(found)} == OWN[text]
  args = command._parser().parse_args(['--models', 'a', 'b', '--method', text, '--', 'in', 'out'])
  made = options.method(args, 2)
  assert str(made) == str(found()) == str(of_check('_value')(text)) == str(Curve('curve', text).build())
  digests = options.settings(args, but=('imports',))
  assert digests['method'] == text and {f'source of {name}' for name in OWN[text]} < digests.keys()
  large = toy.model(1)
  out = decode(made, [toy.model(2, near=large), large], [[1, 2]], max_new_tokens=3)
  assert len(out.tokens[0]) == 3


def test_an_option_and_an_argument_are_one_spelling(my_names):
  settings = []
  for more in (['--rule=opt:0.1', '--block=3'], ['--method=speculative(block=3, rule=opt(alpha=0.1))']):
    args = command._parser().parse_args(['--models', 'a', 'b', *more, '--', 'in', 'out'])
    options.method(args, 2)
    settings.append(options.settings(args, but=()))
  assert settings[0] == settings[1] and settings[0]['method'] == 'speculative(rule=opt:0.1, block=3)'


def test_an_option_sets_an_argument_of_the_method(my_names):
  make = lambda *more: options.method(command._parser().parse_args(['--models', 'a', 'b', *more, '--', 'i', 'o']), 2)
  found = make('--policy=my_names:Entropy(limit=1.5)', '--accept=block', '--block=2')
  assert str(found) == str(methods.speculative(block=2, policy=found.policy, accept=acceptance.block))
  assert str(make('--method=my_names:drafted', '--rule=my_names:geometric:1.0')) == str(
    methods.find('my_names:drafted(combiner=my_names:geometric(power=1.0))')()
  )


def test_a_module_is_imported_before_a_command_runs(my_names, capsys):
  (my_names / 'my_backends.py').write_text('there = True')
  seen = []
  command = lambda args: seen.append('my_backends' in sys.modules)
  run = lambda *argv: commands.run(commands.Parser('x', ''), command, argv, '')
  assert run('--import=my_backends') == 0 and seen == [True]
  sys.modules.pop('my_backends')
  assert run('--import=nowhere') == 1 and seen == [True] and 'nowhere cannot be imported' in capsys.readouterr().err


def test_a_module_that_a_run_imports_is_a_part_of_its_config(my_names):
  (my_names / 'my_tasks.py').write_text('there = True')
  args = run._parser().parse_args(['--import=my_tasks', '--gin_bindings=Experiment.seed = 3'])
  names.module('my_tasks')  # as `commands.run` does
  text = config.parse([str(run.DEFAULT)], commands.bindings(args))
  assert 'import my_tasks' in text and '# source of my_tasks: ' in text and 'Experiment.seed = 3' in text
  sys.modules.pop('my_tasks')


@pytest.mark.long
def test_commands_take_a_rule_of_ones_own(my_names):
  """The pair of the package, decoded towards and planned for a rule in the current folder."""
  from speccascade import embedded
  from speccascade.checkpoints import hf

  for name, model in zip(('small', 'large'), embedded.models()):
    hf.write(my_names / name, model)
  (my_names / 'in.jsonl').write_text('{"prompt": "A dog runs."}\n')
  run = partial(subprocess.run, cwd=my_names, capture_output=True, text=True, check=True)
  python = [sys.executable, '-m']
  own = ['--rule', 'my_names:mine(alpha=0.1, factor=0.9)', '--block', '2', '--max-new-tokens', '8']
  run([*python, 'speccascade.decode', '--models', 'small', 'large', *own, '--', 'in.jsonl', 'out.jsonl'])
  assert (my_names / 'out.jsonl').read_text().count('\n') >= 1
  plan = ['speccascade.plan', 'small', 'large', '--prompts', 'in.jsonl', '--blocks', '2', '--max-new-tokens', '8']
  assert 'my_names' in run([*python, *plan, '--rule', 'my_names:mine:0.1', '--trials', '0', '--budget', '20']).stdout


@pytest.mark.parametrize('name', [x for x in COMMANDS if x != 'integrations.lm_eval'])  # which has the harness's
def test_every_command_takes_a_module_of_ones_own(name, capsys):
  folder = importlib.util.find_spec(f'speccascade.{name}').submodule_search_locations
  module = f'speccascade.{name}.__main__' if folder else f'speccascade.{name}'
  with pytest.raises(SystemExit):
    (of_check('main') if name == 'check' else importlib.import_module(module).main)(['--help'])
  assert '--import MODULE' in capsys.readouterr().out
