"""The notebooks run from their first cell to their last, and what is stored with them is what they show."""

import importlib.util
from pathlib import Path
import re

import pytest

nbformat = pytest.importorskip('nbformat')
pytest.importorskip('nbclient')
pytest.importorskip('ipykernel')

import store_notebooks as script

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / 'docs' / 'colab').glob('*.ipynb'))
STORE = 'store them anew with `python tests/store_notebooks.py`'


def read(path: Path):
  return nbformat.read(path, as_version=4)


def code(notebook) -> list:
  return [cell for cell in notebook.cells if cell.cell_type == 'code']


def kinds(notebook) -> list[list[str]]:
  """Return for each cell what it shows: printed text, and the kinds of what is displayed."""
  return [
    sorted({kind for x in cell.outputs if x.get('name') != 'stderr' for kind in x.get('data', ['printed'])})
    for cell in code(notebook)
  ]


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_stored_with_the_outputs_of_its_code(path):
  notebook = read(path)
  nbformat.validate(notebook)
  assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
  assert notebook.metadata['outputs_of'] == script.digest(notebook), f'the outputs of {path.name} are stale: {STORE}'
  assert [cell.execution_count for cell in code(notebook)] == [i + 1 for i in range(len(code(notebook)))]
  assert path.stat().st_size < 500_000


def test_outputs_are_stale_as_soon_as_the_code_changes():
  notebook = read(NOTEBOOKS[0])
  notebook.cells[0].source += ' More text.'
  assert script.digest(notebook) == notebook.metadata['outputs_of']
  code(notebook)[1].source += '\n1 + 1'
  assert script.digest(notebook) != notebook.metadata['outputs_of']


@pytest.mark.long
@pytest.mark.filterwarnings('ignore:.*:DeprecationWarning:(jupyter_|nbclient|nbformat|zmq|traitlets)')
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs_and_shows_what_is_stored(path, tmp_path):
  less = read(path)
  for cell in code(less):  # of what the kinds of its outputs do not depend on
    cell.source = re.sub(r'\b(trials|latency_examples|latency_trials)=\d+', r'\1=1', cell.source)
    cell.source = re.sub(r'\bcount=\d+', 'count=4', cell.source)
  done = script.execute(less, tmp_path)
  assert kinds(done) == kinds(read(path)), f'the outputs of {path.name} are stale: {STORE}'
  shown = {kind for some in kinds(done) for kind in some}
  assert {'image/png', 'printed'} < shown  # a plot was drawn
  assert {'quickstart': 'text/html', 'your_own_pair': 'text/markdown'}[path.stem] in shown


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_the_first_cell_installs_a_clone_or_an_address_and_says_where_there_is_neither(path, tmp_path, monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)  # as before an installation
  cell = code(read(path))[0].source.replace('%pip install -q "{SOURCE}"', 'installed.append(SOURCE)')
  monkeypatch.chdir(path.parent)
  installed = []
  exec(cell, {'installed': installed})
  monkeypatch.chdir(tmp_path)
  exec(script.SOURCE.sub("SOURCE = 'git+https://github.com/someone/fork'", cell), {'installed': installed})
  assert installed == ['../..', 'git+https://github.com/someone/fork']
  with pytest.raises(FileNotFoundError, match='set SOURCE to git'):
    exec(cell, {'installed': installed})


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_the_badge_opens_the_notebook_and_installs_from_where_it_lies(path):
  badged = script.opened_in_colab(read(path), path, 'someone/fork')
  again = script.opened_in_colab(badged, path, 'someone/fork')
  lines = again.cells[0].source.splitlines()
  assert lines[0].startswith('# ') and sum(script.BADGE in line for line in lines) == 1
  assert f'/github/someone/fork/blob/main/docs/colab/{path.name})' in lines[1]
  assert re.search(r"^SOURCE = 'git\+https://github.com/someone/fork'", code(again)[0].source, re.MULTILINE)
  assert script.digest(again) == script.digest(read(path))
  readme = (ROOT / 'README.md').read_text()
  linked = script.with_badges(script.with_badges(readme, 'someone/fork'), 'someone/fork')
  assert len(re.findall(rf'/someone/fork/blob/main/docs/colab/{path.name}\)', linked)) == 1
  assert script.with_badges(linked, None) == script.with_badges(readme, None)
  plain = script.opened_in_colab(again, path, None)
  assert script.BADGE not in plain.cells[0].source and "SOURCE = '../..'" in code(plain)[0].source
