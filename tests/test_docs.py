"""The examples of the documents run, and their links lead somewhere."""

import dataclasses
from pathlib import Path
import re
import runpy

import pytest

from speccascade import embedded, Request, run
from speccascade.engine.method import Strategy
from speccascade.evaluate import config
from speccascade.models import toy

ROOT = Path(__file__).parents[1]
EXTENDING = ROOT / 'docs' / 'extending.md'
PAGES = sorted((ROOT / 'docs' / 'methods').glob('*.md'))
DOCUMENTS = [ROOT / 'README.md', ROOT / 'WORKSPACE.md', *sorted((ROOT / 'docs').rglob('*.md'))]
MY_TABLES = """
import gin
import numpy as np
from speccascade import methods
from speccascade.engine.plans import Profile
from speccascade.engine.verification import AcceptanceTable

TABLE = AcceptanceTable(np.float32([0.5]), np.float32([[0.5], [0.5]]), np.float32([[0.2, 0.5], [0.4, 0.9]]))

@gin.register
def sv_measured(block=5):
  return methods.sv_exact(Profile(TABLE, np.float32([1.0, 1.1])), block)
"""


def blocks(path: Path, language: str) -> list[str]:
  """Return a page's code of one language, in order."""
  return re.findall(rf'^```{language}\n(.*?)^```$', path.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize('page', PAGES, ids=lambda p: p.stem)
def test_the_python_of_each_page_runs(page, capsys):
  large = toy.model(0)
  small, companion = (toy.model(i, near=large) for i in (1, 2))
  names = dict(small=small, companion=companion, large=large, prompts=[[1, 2], [3]])
  assert blocks(page, 'python')
  for code in blocks(page, 'python'):
    exec(code, names)


@pytest.mark.parametrize('page', PAGES, ids=lambda p: p.stem)
def test_the_gin_of_each_page_makes_methods(page, tmp_path, monkeypatch):
  (tmp_path / 'my_tables.py').write_text(MY_TABLES)
  monkeypatch.syspath_prepend(tmp_path)
  text = '\n'.join(blocks(page, 'gin'))
  scopes = dict.fromkeys(re.findall(r'^(\w+)/Curve\.', text, re.MULTILINE))
  assert scopes
  file = tmp_path / 'page.gin'
  file.write_text(f'{text}\nrun.experiments = [{", ".join(f"@{s}/Curve()" for s in scopes)}]\n')
  config.parse([str(file)])
  for curve in config.build():
    assert all(isinstance(point.build(), Strategy) for point in curve.points())


FILES = {code.split('\n')[0].removeprefix('# '): code for code in blocks(EXTENDING, 'python')}


@pytest.mark.parametrize('name', FILES)
def test_the_files_of_the_page_on_extending_run(name, tmp_path, capsys):
  (tmp_path / name).write_text(FILES[name])
  runpy.run_path(str(tmp_path / name), run_name='__main__')


def test_a_gin_file_takes_the_task_of_the_page_on_extending(tmp_path, monkeypatch):
  (tmp_path / 'my_task.py').write_text(FILES['my_task.py'])
  (tmp_path / 'page.gin').write_text('\n'.join(blocks(EXTENDING, 'gin')))
  config.parse([str(run.DEFAULT), str(tmp_path / 'page.gin')])
  (experiment,) = config.build()
  assert [e.target for e in experiment.task.examples] == ['s p e c u l a t i o n', 'c a s c a d e']


def test_the_page_on_extending_lists_its_sections():
  text = EXTENDING.read_text()
  listed = re.findall(r'^\| \[.*?\]\(#(.*?)\) ', text, re.MULTILINE)
  assert listed == [h for h in re.findall(r'^## (.*)$', text, re.MULTILINE) for h in [h.lower().replace(' ', '-')]]


def test_the_index_lists_every_page():
  index = (ROOT / 'docs' / 'methods.md').read_text()
  assert all(f'](methods/{page.name})' in index for page in PAGES)


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
  exec(blocks(ROOT / 'README.md', 'python')[1], out)
  assert out['row'].finish_reason in ('eos', 'stop', 'length')


def test_the_python_of_the_decoding_page_runs(capsys):
  names = {}
  for code in blocks(ROOT / 'docs' / 'decoding.md', 'python'):
    exec(code, names)
  assert names['out'].finish_reasons[0] in ('stop', 'eos', 'length') and len(names['out'].texts) == 3
  assert 'None' in capsys.readouterr().out  # partial texts


def test_the_decoding_page_lists_every_field_of_a_request():
  page = (ROOT / 'docs' / 'decoding.md').read_text()
  assert all(f'`{field.name}`' in page for field in dataclasses.fields(Request))


def test_every_gin_file_that_a_document_names_is_there():
  for document in DOCUMENTS:
    for name in re.findall(r'gin_configs/[\w/]+\.gin', document.read_text()):
      assert (ROOT / name).exists(), (document.name, name)
