"""The examples of the documents run, and their links lead somewhere."""

import ast
from collections.abc import Iterator
import dataclasses
import doctest
import functools
import gzip
import importlib
import inspect
import json
import os
from pathlib import Path
import re
import runpy
import subprocess
import sys
from types import ModuleType

from cases import Letters
import families
import gin
import pytest
from tiers import long_but

import speccascade
from speccascade import decode, embedded, methods, Request, run, Sampler
import speccascade.__main__
from speccascade.data import harness
from speccascade.data.seqio import tasks
from speccascade.engine.job import DecodeJob
from speccascade.engine.method import Strategy
from speccascade.evaluate import config, texts
from speccascade.host import commands
from speccascade.models import toy

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / 'speccascade'
DOCS = ROOT / 'docs'
EXTENDING = ROOT / 'docs' / 'extending.md'
PAGES = sorted((ROOT / 'docs' / 'methods').glob('*.md'))
DOCUMENTS = [ROOT / 'README.md', ROOT / 'WORKSPACE.md', *sorted((ROOT / 'docs').rglob('*.md'))]
OF_OTHERS = {  # options of programs that documents name beside those of the package
  *('--apply_chat_template', '--device', '--include_path', '--log_samples', '--model', '--model_args', '--tasks'),
  *('--use_cache', '--ignore-eos', '--logprobs-mode', '--per-request-spec-decode-metrics', '--speculative-config'),
  *('--accelerator-type', '--command', '--version', '--worker', '--zone', '--python', '--gin'),
  *('--no-compile', '--no-deps'),
}
A_PROFILE = """
import numpy as np
from speccascade import methods
from speccascade.sv.plans import Choice, Origin, Plan, Profile
from speccascade.sv.predictors import AcceptanceTable

TABLE = AcceptanceTable(np.float32([0.5]), np.float32([[0.5], [0.5]]), np.float32([[0.2, 0.5], [0.4, 0.9]]))
profile = Profile(TABLE, np.float32([1.0, 1.1]))
origin = Origin(('s', 'c', 'l'), (None, None, None), (('temperature', 1.0),), 'cpu, float32', 'prompts', 5)
plan = Plan(origin, {1: Choice('speculative', 3), 8: Choice('autoregressive')}, {})
"""
MY_TABLES = f"""
{A_PROFILE}
def sv_measured(block=5):
  return methods.sv_exact(profile, block)
"""


def blocks(path: Path, language: str) -> list[str]:
  """Return a page's code of one language, in order."""
  return re.findall(rf'^```{language}\n(.*?)^```$', path.read_text(), re.DOTALL | re.MULTILINE)


class Spelled(Letters):
  """A tokenizer of any text."""

  def encode(self, text):
    return [ord(x) % 6 for x in text]


def spelling_pair():
  large = toy.model(1, 7, scale=1.5)
  return toy.model(2, 7, near=large), large.replace(tokenizer=Spelled())


def checked(method, models, prompts, **call):
  """Check a call as `decode` does, and decode with one method and pair, so that pages share a program."""
  job = inspect.signature(decode).bind(method, models, prompts, **call)
  DecodeJob.of(method, models, prompts, **{'sampler': Sampler(), 'seed': 0} | job.kwargs)
  return decode(methods.speculative(block=2), spelling_pair(), [[1, 2]], max_new_tokens=16)


@pytest.mark.parametrize('decodes', long_but([False, True], [False]), ids=['checked', 'decoded'])
@pytest.mark.parametrize('page', PAGES, ids=lambda p: p.stem)
def test_the_python_of_each_page_runs(page, decodes, monkeypatch, capsys):
  if not decodes:
    monkeypatch.setattr(speccascade, 'decode', checked)
  large = toy.model(0)
  small, companion = (toy.model(i, near=large) for i in (1, 2))
  names = dict(small=small, companion=companion, large=large, prompts=[[1, 2], [3]])
  assert blocks(page, 'python')
  for code in blocks(page, 'python'):
    exec(code, names)


@pytest.mark.long
def test_the_targets_of_several_models_are_those_of_their_combiners_in_lockstep():
  large = toy.model(0)
  names = dict(small=toy.model(1, near=large), companion=toy.model(2, near=large), large=large, prompts=[[1, 2], [3]])
  for code in blocks(DOCS / 'methods' / 'several.md', 'python'):
    exec(code, names)
  call = dict(prompts=[Request([1, 2], min_new_tokens=3), [3]], max_new_tokens=12)
  models = names['small'], names['companion'], large
  runs = {
    'proxy': ('proxy_tuned', dict(strength=1.0), models),
    'value': ('guided', dict(beta=0.5), (names['companion'], large, names['small'])),
    'lookup': ('remembered', dict(weight=0.4), (names['memory'], large, names['small'])),
    'mixture': ('surest', dict(sharpness=2.0), (names['small'], large)),
  }
  for name, (combiner, numbers, given) in runs.items():
    bound = functools.partial(names[combiner], **numbers)
    count = 3 if name == 'proxy' else 2
    for sampler in (Sampler(0.0), Sampler(0.7, top_p=0.9, coupling='gumbel')):
      apart = decode(methods.ensemble(bound, models=count), given[:count], sampler=sampler, **call)
      assert decode(names[name], given, sampler=sampler, **call).tokens == apart.tokens, name
    report = speccascade.check(names[name])
    assert report.ok, f'{name}: {report}'


@pytest.mark.parametrize('page', PAGES, ids=lambda p: p.stem)
def test_the_gin_of_each_page_makes_methods(page, tmp_path, monkeypatch):
  (tmp_path / 'my_tables.py').write_text(MY_TABLES)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.chdir(tmp_path)
  for code in blocks(page, 'gin'):
    (tmp_path / 'page.gin').write_text(code)
    config.parse(['page.gin'])
    curves = list(texts.flat(gin.query_parameter('Experiment.curves')))
    assert curves and all(isinstance(point.build(), Strategy) for curve in curves for point in curve.points())


PAIR = [str(Path(embedded.vocabulary()).parents[1] / size) for size in ('small', 'large')]
FILES = {code.split('\n')[0].removeprefix('# '): code for code in blocks(EXTENDING, 'python')}


RUNS = [(name, as_) for name in FILES for as_ in ('__main__', 'page') if as_ == '__main__' or 'check(' in FILES[name]]


@pytest.mark.full
@pytest.mark.parametrize('name, as_', long_but(RUNS, [x for x in RUNS if x != ('my_declared_rule.py', '__main__')]))
def test_the_files_of_the_page_on_extending_run(name, as_, tmp_path, capsys):
  (tmp_path / name).write_text(FILES[name])
  runpy.run_path(str(tmp_path / name), run_name=as_)
  said = capsys.readouterr().out
  assert 'something is wrong' not in said and ((name, as_) != ('my_phase.py', '__main__') or 'all is well' in said)


def test_a_gin_file_takes_the_task_of_the_page_on_extending(tmp_path, monkeypatch):
  (tmp_path / 'my_task.py').write_text(FILES['my_task.py'])
  (tmp_path / 'page.gin').write_text('\n'.join(blocks(EXTENDING, 'gin')))
  config.parse([str(run.DEFAULT), str(tmp_path / 'page.gin')])
  (experiment,) = config.build()
  assert [e.target for e in experiment.task.examples] == ['s p e c u l a t i o n', 'c a s c a d e']


@pytest.mark.long
def test_the_python_of_the_page_on_several_devices_runs():
  one, two = blocks(DOCS / 'scaling.md', 'python')
  code = f'{one}\nbefore = out.tokens\n{two}\nassert out.tokens == before'
  code = code.replace('PATH', str(Path(embedded.vocabulary()).parents[1]))
  flags = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count=8'
  program = f"prompts = ['A dog runs.']\n{code}\nprint(out.finish_reasons)"
  ran = subprocess.run(
    [sys.executable, '-c', program], env=os.environ | {'XLA_FLAGS': flags}, capture_output=True, text=True
  )
  assert 'eos' in ran.stdout, ran.stderr


def test_the_gin_of_the_page_on_experiments_makes_an_experiment(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in ('val.en', 'val.de', 'page.gin'):
    Path(name).write_text('One line.\n' * 100)
  Path('my_rules.py').write_text('def mine(q, p, *, alpha):\n  return q.confidence < 1 - alpha\n')
  Path('page.gin').write_text('\n'.join(blocks(DOCS / 'experiments.md', 'gin')))
  config.parse(['page.gin'], [f'Experiment.models = {PAIR}'])
  (experiment,) = config.build()
  names = [curve.name for curve in experiment.curves]
  assert len(experiment.task.examples) == 100 and names[0] == 'target only' and names[-1] == 'mine'
  assert 'SpecCascade [OPT]' in names


def test_the_python_of_the_page_on_tasks_fits_the_functions(tmp_path, monkeypatch):
  def accept(module, name):
    signature = inspect.signature(getattr(module, name))
    monkeypatch.setattr(module, name, lambda *args, **kwargs: calls.append(signature.bind(*args, **kwargs)))

  calls = []
  monkeypatch.chdir(tmp_path)
  for name in ('val.en.gz', 'val.de.gz'):
    Path(name).write_bytes(gzip.compress(b'One line.\n'))
  Path('gsm8k.jsonl').write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
  Path('sharegpt.json').write_text('[{"conversations": [{"from": "human", "value": "Hello."}]}]')
  accept(tasks, 'seqio_task')
  accept(harness, 'lm_eval_task')
  exec('\n'.join(blocks(DOCS / 'tasks.md', 'python')), dict(method=None, small=None, large=None))
  assert len(calls) == 2


def test_long_commands_wrap_and_a_page_has_one_search():
  css = (DOCS / '_static' / 'site.css').read_text()
  assert re.search(r'^\.highlight pre.*white-space: pre-wrap', css, re.MULTILINE)
  (sidebars,) = re.findall(r'^html_sidebars = (.*)', (DOCS / 'conf.py').read_text(), re.MULTILINE)
  assert 'search' not in sidebars and 'sbt-sidebar-nav.html' in sidebars


def test_the_page_on_extending_has_a_file_for_each_part_of_a_method():
  assert {f'my_{part}.py' for part in ('acceptor', 'predictor', 'budget', 'drafter', 'policy', 'phase')} <= FILES.keys()


def test_a_test_runs_the_code_of_every_page():
  pages = {str(page.relative_to(ROOT)) for page in DOCUMENTS if blocks(page, 'python') or blocks(page, 'gin')}
  here = {
    f'docs/{name}.md' for name in ('check', 'decoding', 'experiments', 'extending', 'scaling', 'tasks', 'api/index')
  }
  # tests/integrations/test_t5x_step.py, tests/parity/test_lm_eval.py
  elsewhere = {'docs/t5x.md', 'docs/lm_eval.md'}
  families = {str(page.relative_to(ROOT)) for page in PAGES}
  assert pages == {'README.md'} | here | elsewhere | families


def test_the_page_on_models_has_the_families_as_they_are_declared():
  assert families.table() in (DOCS / 'models.md').read_text()  # tests/models/make_golden.py writes it


# Every public function and class of these modules, and of `speccascade.__all__`, has its entry in the API reference.
PUBLIC = [
  'acceptance',
  'embedded',
  'engine',
  'evaluate',
  'methods',
  'rules',
  'stopping',
  'theory',
  'types',
  *(f'{p.parent.name}.{p.stem}' for d in ('models', 'drafters') for p in sorted((PACKAGE / d).glob('[!_]*.py'))),
]
WITH_EXAMPLES = [path for path in sorted(PACKAGE.rglob('*.py')) if '>>> ' in path.read_text()]


def public(module: ModuleType) -> set:
  """Return the functions and classes that a module offers."""
  here = {n: x for n, x in vars(module).items() if getattr(x, '__module__', '').startswith(module.__name__)}
  found = [getattr(module, name) for name in getattr(module, '__all__', here) if not name.startswith('_')]
  return {x for x in found if inspect.isfunction(x) or inspect.isclass(x)}


def documented() -> set:
  """Return the functions and classes for which a page asks autodoc."""
  found = set()
  for page in DOCS.rglob('*.md'):
    for kind, name, options in re.findall(
      r'^\.\. (?:auto)?(\w+):: (\S+)\n((?:   :.*\n)*)', page.read_text(), re.MULTILINE
    ):
      if kind in ('function', 'class'):
        module, _, name = name.rpartition('.')
        found.add(getattr(importlib.import_module(module), name))
      elif kind == 'known' and ':summary:' not in options:
        known = importlib.import_module(name).known().items()
        within, but = (re.findall(rf':{option}: (.*)', options) for option in ('within', 'but'))
        found |= {x for n, x in known if n not in ''.join(but).split() and x.__module__.endswith(''.join(within))}
      elif kind == 'module' and ':members:' in options:
        left_out = re.findall(r'\w+', ''.join(re.findall(r':exclude-members: (.*)', options)))
        found |= {x for x in public(importlib.import_module(name)) if x.__name__ not in left_out}
  return found


def names_in(code: str) -> Iterator:
  """Yield each function and class of the package that a piece of code names."""
  known = {'speccascade': speccascade}
  for node in ast.walk(ast.parse(code)):
    if isinstance(node, ast.ImportFrom) and node.module.startswith('speccascade'):
      module = importlib.import_module(node.module)
      for alias in node.names:
        known[alias.name] = getattr(module, alias.name, None) or importlib.import_module(f'{node.module}.{alias.name}')
  yield from known.values()
  for node in ast.walk(ast.parse(code)):
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known:
      yield getattr(known[node.value.id], node.attr, None)


def code_of(document: Path) -> str:
  """Return the Python of a page or a notebook."""
  if document.suffix == '.md':
    return '\n'.join(blocks(document, 'python'))
  cells = [''.join(cell['source']) for cell in json.loads(document.read_text())['cells'] if cell['cell_type'] == 'code']
  return re.sub(r'^( *)[%!].*$', r'\1pass', '\n'.join(cells), flags=re.MULTILINE)  # IPython's own commands


def test_every_public_name_has_its_entry_in_the_api_reference():
  wanted = {x for x in vars(speccascade).values() if getattr(x, '__name__', '') in speccascade.__all__}
  for name in PUBLIC:
    wanted |= public(importlib.import_module(f'speccascade.{name}'))
  of_the_harness = DOCS / 'lm_eval.md'  # describes its class itself; the harness is not installed with every test
  for document in {*DOCUMENTS, *DOCS.rglob('*.ipynb')} - {of_the_harness}:
    wanted |= {x for x in names_in(code_of(document)) if inspect.isfunction(x) or inspect.isclass(x)}
  assert len(wanted) > 100
  missing = wanted - documented()
  assert not missing, sorted(f'{x.__module__}.{x.__qualname__}' for x in missing)


@pytest.mark.parametrize('path', WITH_EXAMPLES, ids=lambda p: p.stem)
def test_the_examples_of_docstrings_run(path):
  imports = {}
  exec('\n'.join([*blocks(DOCS / 'api' / 'index.md', 'python'), A_PROFILE]), imports)
  module = importlib.import_module('.'.join(path.relative_to(ROOT).with_suffix('').parts))
  ran = doctest.testmod(module, extraglobs=imports, optionflags=doctest.NORMALIZE_WHITESPACE)
  assert ran.attempted and not ran.failed


def test_the_docstring_of_each_method_shows_its_phases():
  for maker in methods.known().values():
    assert f'>>> print(methods.{maker.__name__}(' in maker.__doc__, maker


@pytest.mark.parametrize('document', DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(document):
  for target in re.findall(r'\]\(([^)#\s]*(?:#[^)]*)?)\)', document.read_text()):
    if target.startswith('http'):
      continue
    path, _, heading = target.partition('#')
    there = document.parent / path if path else document
    assert there.exists(), target
    assert not heading or heading in headings(there), target


def headings(path: Path) -> set[str]:
  """Return the anchors of a page: lower case, spaces to hyphens, punctuation dropped."""
  found = re.findall(r'^#+ (.*)$', path.read_text(), re.MULTILINE)
  return {re.sub(r'[^\w -]', '', h.lower()).replace(' ', '-') for h in found}


def test_the_decode_example_of_the_readme_runs():
  out = {}
  exec(blocks(ROOT / 'README.md', 'python')[0], out)
  assert len(out['out'].texts) == 1 and out['out'].stats.calls.shape[0] == len(embedded.models())
  exec(blocks(ROOT / 'README.md', 'python')[2], out)  # that between is run by tests/parity/test_smollm2.py
  assert out['row'].finish_reason in ('eos', 'stop', 'length')


@pytest.mark.full
def test_the_python_of_the_decoding_page_runs(monkeypatch, capsys):
  monkeypatch.setattr(embedded, 'models', spelling_pair)
  names = {}
  for code in blocks(ROOT / 'docs' / 'decoding.md', 'python'):
    exec(code, names)
  assert names['out'].finish_reasons[0] in ('stop', 'eos', 'length') and len(names['out'].texts) == 3
  assert 'None' in capsys.readouterr().out  # partial texts


def test_the_sampler_of_the_page_on_checks_is_refused_as_it_says(capsys):
  (code,) = blocks(DOCS / 'check.md', 'python')
  exec(code, {})
  assert f'`{capsys.readouterr().out.strip()}`' in (DOCS / 'check.md').read_text()


def test_the_decoding_page_lists_every_field_of_a_request():
  page = (ROOT / 'docs' / 'decoding.md').read_text()
  assert all(f'`{field.name}`' in page for field in dataclasses.fields(Request))


def test_every_gin_file_that_a_document_names_is_there():
  for document in DOCUMENTS:
    for name in re.findall(r'gin_configs/[\w/]+\.gin', document.read_text()):
      assert (ROOT / name).exists(), (document.name, name)


def test_the_reference_has_every_command_and_a_meaning_of_everything_that_it_takes(monkeypatch):
  monkeypatch.syspath_prepend(DOCS)
  options = importlib.import_module('options')
  pages = {name: (DOCS / 'reference' / f'{name}.md').read_text() for name in ('commands', 'settings')}
  of_pages = {name: re.findall(r'^\.\. (?:flags|settings):: (.*)$', text, re.MULTILINE) for name, text in pages.items()}
  assert {*of_pages['commands'], 'integrations.lm_eval'} == {*speccascade.__main__.COMMANDS}
  for name, read in (('commands', options.flags), ('settings', options.settings)):
    for arguments in of_pages[name]:
      about, rows = read(*arguments.split())
      assert about and rows and all(meaning and '%(' not in meaning for _, _, meaning in rows), (arguments, rows)
  _, rows = options.settings('speccascade.evaluate.experiment.Experiment', 'speccascade.Sampler')
  assert ('latency_trials', '3', 'How often each is timed, all points in turn.') in rows
  assert any(line.startswith('   * - ``--gin_file') for line in options.table(*options.flags('run')))


def test_every_option_that_a_document_names_is_one_of_a_command(monkeypatch):
  monkeypatch.syspath_prepend(DOCS)
  options = importlib.import_module('options')
  known = {option for action in commands.Parser('', '')._actions for option in action.option_strings} | OF_OTHERS
  for name in {*speccascade.__main__.COMMANDS} - {'integrations.lm_eval'}:
    known |= {row[0].split()[0] for row in options.flags(name)[1]}
  known |= set(re.findall(r"'(--\w+)'", (ROOT / 'scripts' / 'bench.py').read_text()))
  for document in {*DOCUMENTS} - {ROOT / 'WORKSPACE.md'}:  # which has those of its tests' scripts
    named = re.findall(r'(?<![\w-])--[a-z][\w-]*', document.read_text())
    assert {*named} <= known, (document.name, {*named} - known)


def test_the_gin_of_the_readme_makes_an_experiment_in_four_lines(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (code,) = blocks(ROOT / 'README.md', 'gin')
  assert len(code.splitlines()) == 4
  Path('mine.gin').write_text(code)
  Path('problems.jsonl').write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
  config.parse(['mine.gin'], [f'Experiment.models = {PAIR}'])
  (experiment,) = config.build()
  assert [curve.name for curve in experiment.curves][-1] == 'SpecCascade [OPT]' and len(experiment.points) == 4
