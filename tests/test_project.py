"""What the documents and the layout promise is true of the code."""

import ast
import functools
import pathlib
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import speccascade
from speccascade import acceptance, methods, rules, stopping
from speccascade.__main__ import COMMANDS, main
from speccascade.engine import plans, verification
from speccascade.models import toy

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / 'speccascade'
ORDER = ['traced', 'layout', 'backends', 'packing', 'types', 'probs', 'rules', 'acceptance', 'stopping', 'scheduling',
         'profiles', 'phases', 'methods', 'targets', 'inputs', 'requests', 'start', 'loop', 'engine', 'results',
         'cascade', 'decode', 'data', 'embedded', 'train', 'evaluate', 'run']  # fmt: skip
# What stands beside that order, and which of it may know it.
BESIDE = {
  'models',
  'checkpoints',
  'prediction',
  'plan',
  'laws',
  'check',
  'ahead',
  'hlo',
  'compile',
}
KNOWN = {
  'decode': {'checkpoints'},
  'embedded': {'checkpoints'},
  'train': {'models', 'checkpoints'},
  'evaluate': {'checkpoints', 'prediction'},
}
HEAVY = ('tensorflow', 'torch', 'transformers', 'seqio', 'keras')


def imports(path: pathlib.Path) -> set[str]:
  """Return the modules of the package that a file imports, as paths below it."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      found |= {n.name for n in node.names}
    elif isinstance(node, ast.ImportFrom):
      found |= {f'{node.module}.{n.name}' for n in node.names} | {node.module}
  return {n.removeprefix('speccascade.') for n in found if n.startswith('speccascade.')}


@pytest.mark.parametrize('name', ORDER)
def test_imports_go_one_way(name):
  paths = [*PACKAGE.glob(f'{name}.py'), *PACKAGE.glob(f'{name}/*.py')]
  assert paths
  seen = {n.split('.')[0] for path in paths for n in imports(path)}
  assert not seen & {*ORDER[ORDER.index(name) + 1 :], *(BESIDE - KNOWN.get(name, set()))}


def test_training_and_experiments_do_not_know_each_other():
  for name, other in (('train', 'evaluate'), ('evaluate', 'train')):
    assert not any(n.split('.')[0] == other for path in (PACKAGE / name).glob('*.py') for n in imports(path)), name


def test_models_and_checkpoints_know_no_phase():
  for path in [*(PACKAGE / 'models').glob('*.py'), *(PACKAGE / 'checkpoints').glob('*.py')]:
    assert not {n.split('.')[0] for n in imports(path)} & set(ORDER[ORDER.index('probs') :]), path.name


def test_importing_and_decoding_needs_no_heavy_package():
  program = (
    'import sys, speccascade\n'
    'from speccascade.models import toy\n'
    'from speccascade import decode, methods\n'
    'decode(methods.autoregressive(), [toy.model(0)], [[1]], max_new_tokens=2)\n'
    f'print([m for m in {HEAVY} if m in sys.modules])\n'
  )
  out = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
  assert out.stdout.strip() == '[]'


def test_the_package_lists_every_command_with_its_purpose(capsys):
  files = [p for p in PACKAGE.rglob('*.py') if "if __name__ == '__main__':" in p.read_text()]
  paths = {p.relative_to(PACKAGE).with_suffix('').as_posix().replace('/', '.') for p in files}
  found = {p.removesuffix('__main__').rstrip('.') for p in paths} - {'', 'data.sandbox'}
  assert main([]) == 0 and {*COMMANDS} == found
  lines = capsys.readouterr().out.splitlines()
  assert all(line.startswith(f'python -m speccascade.{n} ') and len(line) < 160 for n, line in zip(COMMANDS, lines))


def test_the_methods_page_lists_each_method_with_its_phases():
  edges, means = np.float32([[0.5], [0.5]]), np.float32([[0.2, 0.5], [0.5, 0.9]])
  table = verification.AcceptanceTable(np.float32([0.5]), edges, means)
  names = dict(
    vars(methods), partial=functools.partial, rules=rules, acceptance=acceptance, stopping=stopping,
    plan=plans.Profile(table, [1.0, 2.0]),
  )  # fmt: skip
  page = (ROOT / 'docs' / 'methods.md').read_text()
  rows = re.findall(r'^\| `(\w+\(.*\))` \| (.*) \|$', page, re.MULTILINE)
  listed = set()
  for expression, phases in rows:
    if expression.split('(')[0] in vars(methods):
      assert str(eval(expression, names)) == phases.replace('\\|', '|'), expression
      listed.add(expression.split('(')[0])
  makers = {n for n, f in vars(methods).items() if getattr(f, '__module__', '') == methods.__name__ and n.islower()}
  makers = {n for n in makers if not n.startswith('_')}
  assert listed | {'sequence_cascade', 'planned'} == makers and '`sequence_cascade(' in page
  for rule in rules.RULES:
    assert f'| `{rule.__name__}` |' in page


def test_the_rule_in_the_readme_runs_and_is_short():
  code = re.search(r'## Add a rule.*?```python\n(.*?)```', (ROOT / 'README.md').read_text(), re.DOTALL).group(1)
  names = dict(jnp=jnp, functools=functools, methods=methods)
  exec(code, names)
  assert len([line for line in code.splitlines() if line.strip()]) < 10
  large = toy.model(0)
  out = speccascade.decode(names['method'], [toy.model(1, near=large), large], [[1, 2]], max_new_tokens=8)
  assert out.stats.emitted[0] == 8
