"""A rule has one spelling in every command, and a user's has one as a rule of the package has."""

from functools import partial
import subprocess
import sys

from matching import having
import pytest

from speccascade import rules
from speccascade.decode import options
from speccascade.train import jobs

MINE = """import functools


def mine(q, p, *, alpha, factor=1.0):
  return q.confidence < factor * p.confidence - alpha


half = functools.partial(mine, alpha=0.5)


def number(x=1):
  return x
"""


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
  assert rules.spelled(jobs.rule(text)) == (spelled or text)


def test_every_rule_and_combiner_of_the_package_has_its_name():
  known = rules.known()
  assert {'opt', 'lossy_star', 'token_v3', 'weighted', 'contrastive', 'realign'} < known.keys() and 'own' not in known
  assert all(rules.find(name) is function for name, function in known.items())


@pytest.mark.parametrize(
  'text, parts',
  [
    ('op:1', ('op', 'lossy_star', 'MODULE:NAME')),
    ('opt:x', ("'x'",)),
    ('opt:1,2', ('opt', 'alpha')),
    ('opt(0.1)', ('opt', 'alpha=0.1')),
    ('opt(alpha=x)', ('alpha=x', 'alpha=0.1')),
    ('opt(alpha', ('opt(alpha', 'NAME(alpha=0.1)')),
    ('speculative:1', ('speculative', 'no number')),
    ('my_names:nope', ('my_names.py', 'nope')),
    ('my_names:number', ('number', 'neither')),
    ('nowhere:mine', ('nowhere', 'imported')),
  ],
)
def test_a_text_that_names_nothing_is_refused_in_a_sentence(text, parts, my_names):
  with pytest.raises(ValueError, match=having(*parts)):
    rules.find(text)


def test_what_a_name_means_is_known_by_its_source(my_names):
  assert rules.source(partial(rules.opt, alpha=0.1)) is None
  assert 'factor * p.confidence' in rules.source(rules.find('my_names:half'))


@pytest.mark.full
def test_commands_take_a_rule_of_ones_own(my_names):
  """The pair of the package, decoded towards and planned for a rule in the current folder."""
  from speccascade import embedded
  from speccascade.checkpoints import orbax

  for name, model in zip(('small', 'large'), embedded.models()):
    orbax.save(my_names / name, model)
  (my_names / 'in.jsonl').write_text('{"prompt": "A dog runs."}\n')
  run = partial(subprocess.run, cwd=my_names, capture_output=True, text=True, check=True)
  python = [sys.executable, '-m']
  own = ['--rule', 'my_names:mine(alpha=0.1, factor=0.9)', '--block', '2', '--max-new-tokens', '8']
  run([*python, 'speccascade.decode', '--models', 'small', 'large', *own, '--', 'in.jsonl', 'out.jsonl'])
  assert (my_names / 'out.jsonl').read_text().count('\n') >= 1
  plan = ['speccascade.plan', 'small', 'large', '--prompts', 'in.jsonl', '--blocks', '2', '--max-new-tokens', '8']
  assert 'my_names' in run([*python, *plan, '--rule', 'my_names:mine:0.1', '--trials', '0', '--budget', '20']).stdout
