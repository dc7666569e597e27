"""What the documents and the layout promise is true of the code."""

import ast
import collections
import functools
import graphlib
import pathlib
import re
import runpy
import subprocess
import sys

import jax.numpy as jnp
import pytest

import speccascade
from speccascade import embedded, methods, Model
from speccascade.__main__ import COMMANDS, main
from speccascade.checkpoints import hf, t5x
from speccascade.models import toy

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / 'speccascade'
# Folders, and files at the top level, by floor: none imports a higher floor, and within a floor there is no circle.
FLOORS = (
  {'types', 'theory', 'host'},
  {'backends', 'data'},
  {'models', 'sampling'},
  {'drafters', 'rules', 'acceptance', 'stopping', 'checkpoints'},
  {'engine', 'embedded'},
  {'sv', 'methods'},
  {'decode', 'check'},
  {'planning', 'integrations'},
  {'evaluate', 'train'},
  {'run', 'calibrate', 'figure', 'plan', 'compile', 'convert', '__init__', '__main__'},
)
HEAVY = ('tensorflow', 'torch', 'transformers', 'seqio', 'keras', 'tunix', 'gemma', 'sacrebleu', 'rouge_score')


@functools.cache
def imported(path: pathlib.Path) -> set[str]:
  """Return the modules of the package that a file imports, at its top or elsewhere, and what it imports of them."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      found |= {n.name for n in node.names}
    elif isinstance(node, ast.ImportFrom):
      found |= {f'{node.module}.{n.name}' for n in node.names}
  return {n for n in found if n.startswith('speccascade.')}


def imports(path: pathlib.Path) -> set[str]:
  """Return the folders and top-level files of the package that a file imports."""
  return {n.split('.')[1] for n in imported(path)}


@functools.cache
def graph() -> dict[str, set[str]]:
  """Return what each folder and each file at the top level imports of the others."""
  found = {}
  for path in PACKAGE.rglob('*.py'):
    name = path.relative_to(PACKAGE).with_suffix('').parts[0]
    found.setdefault(name, set()).update(imports(path))
  return {name: (others & set(found)) - {name} for name, others in found.items()}


def test_folders_stand_on_lower_floors():
  floor = {name: n for n, names in enumerate(FLOORS) for name in names}
  assert set(graph()) == set(floor)
  assert not {(a, b) for a, others in graph().items() for b in others if floor[b] > floor[a]}


def test_no_two_folders_import_each_other():
  graphlib.TopologicalSorter(graph()).prepare()  # raises an error that names a circle


def test_no_two_modules_import_each_other():
  paths = {'.'.join(p.relative_to(ROOT).with_suffix('').parts): p for p in PACKAGE.rglob('*.py')}
  paths = {name.removesuffix('.__init__'): path for name, path in paths.items()}
  of = lambda path: {n if n in paths else n.rpartition('.')[0] for n in imported(path)} & set(paths)
  graphlib.TopologicalSorter({name: of(path) - {name} for name, path in paths.items()}).prepare()


def test_the_check_of_samplers_needs_no_loop():
  found = set().union(*(imports(path) for path in (PACKAGE / 'check' / 'sampler').glob('*.py')))
  assert found == {'check', 'host', 'types'}


def test_the_house_stays_small():
  folders = [p for p in PACKAGE.iterdir() if p.is_dir() and p.name != '__pycache__']
  assert len(folders) <= 17 and len(list(PACKAGE.glob('*.py'))) <= 13 and len(FLOORS) <= 10


TRACED = {  # what a round traces, None for all of a file
  'phases': None,
  'feeding': None,
  'state': None,
  'initial': None,
  'stats': None,
  'leaves': None,
  'loop': ('first_batch', 'put_rows', '_run', '_rounds', 'context_of', 'end_stalled', 'lacks_of', 'host_arrays'),
}
STATED = ('facts', 'lowered', 'for_networks', 'only', 'run', 'reads', 'told', 'follows', 'calls', 'turns', 'beyond')


SURFACE = {  # what may only fall; a rise is written here
  'flags': 82,  # plan --acceptance, which reads what engines record; plan --leaves
  'settings': 150,  # train.Job.frequent
  'gin names': 116,
  'gin files': 44,  # drafters of a chat model
  'words of prose': 48_000,  # leaves, targets of several models, rollouts, what engines record, a chat model's drafters
  'files': 229,
}


@pytest.mark.full
def test_there_is_no_more_to_learn_than_before():
  found = runpy.run_path(str(ROOT / 'scripts' / 'surface.py'))['figures']()
  assert found.keys() == SURFACE.keys()
  assert not {what: count for what, count in found.items() if count > SURFACE[what]}


def test_ci_runs_a_shard_of_the_long_tier_as_the_documents_say():
  ci, page = (ROOT / '.ci' / 'run').read_text(), (ROOT / 'docs' / 'evidence.md').read_text()
  (shards,) = re.findall(r'^shards=(\d+)', ci, re.MULTILINE)
  assert (
    re.search(r'^commit=.*rev-parse.*\nscripts/long\.sh .*commit % shards', ci, re.MULTILINE)
    and f'one of {shards} shards' in page
  )


def branches(name: str, only: tuple[str, ...] | None) -> int:
  """Return how many branches there are in what a round traces of a file of the engine."""
  tree = ast.parse((PACKAGE / 'engine' / f'{name}.py').read_text())
  functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name not in (*STATED, '__str__')]
  chosen = [n for n in functions if only is None or n.name in only]
  return len({n for f in chosen for n in ast.walk(f) if isinstance(n, ast.If | ast.IfExp)})


def test_what_a_round_traces_has_few_branches():
  found = {name: branches(name, only) for name, only in TRACED.items()}
  print(found)  # which may only fall
  assert sum(found.values()) <= 57  # three of them of leaves


def test_no_two_classes_have_one_name():
  trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob('*.py')]
  names = collections.Counter(n.name for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef))
  assert not [name for name, times in names.items() if times > 1]


def test_a_network_is_asked_for_what_its_base_has():
  asked = re.compile(r'(?:getattr|hasattr)\([^()]*(?:network|backend|family)\b[^()]*\)')
  found = {path.name: asked.findall(path.read_text()) for path in PACKAGE.rglob('*.py')}
  assert not {name: calls for name, calls in found.items() if calls}


def test_importing_loading_and_decoding_needs_no_heavy_package(tmp_path):
  model = Model(embedded.models()[0].params, embedded.models()[0].network)
  written = hf.write(tmp_path / 'hf', model), t5x.write(tmp_path / 't5x', model)
  program = f"""
import sys
import speccascade
from speccascade.data import files
from speccascade.data.seqio import tasks
from speccascade.integrations import by_row, seqio_evaluator
from speccascade.models import toy
early = ('orbax', 'tensorstore', 'sentencepiece', 'tokenizers', 'huggingface_hub', 'safetensors')
print([m for m in early if m in sys.modules])
for folder in {[*map(str, written)]}:
  speccascade.load(folder)
speccascade.decode(speccascade.methods.autoregressive(), [toy.model(0)], [[1]], max_new_tokens=2)
print([m for m in {HEAVY} if m in sys.modules])
"""
  out = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
  assert out.stdout == '[]\n[]\n'


def test_the_package_lists_every_command_with_its_purpose(capsys):
  files = [p for p in PACKAGE.rglob('*.py') if "if __name__ == '__main__':" in p.read_text()]
  paths = {p.relative_to(PACKAGE).with_suffix('').as_posix().replace('/', '.') for p in files}
  found = {p.removesuffix('__main__').rstrip('.') for p in paths} - {'', 'data.templates'}
  assert main([]) == 0 and {*COMMANDS} == found
  lines = capsys.readouterr().out.splitlines()
  assert all(line.startswith(f'python -m speccascade.{n} ') and len(line) < 160 for n, line in zip(COMMANDS, lines))


def test_the_rule_in_the_readme_runs_and_is_short():
  code = re.search(r'## Add a rule.*?```python\n(.*?)```', (ROOT / 'README.md').read_text(), re.DOTALL).group(1)
  names = dict(jnp=jnp, functools=functools, methods=methods)
  exec(code, names)
  assert len([line for line in code.splitlines() if line.strip()]) < 10
  large = toy.model(0)
  out = speccascade.decode(names['method'], [toy.model(1, near=large), large], [[1, 2]], max_new_tokens=8)
  assert out.stats.emitted[0] == 8
