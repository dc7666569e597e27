"""The notebooks run from their first cell to their last, on the pair that comes with the package."""

import os
from pathlib import Path
import tempfile

import pytest

nbformat = pytest.importorskip('nbformat')
nbclient = pytest.importorskip('nbclient')
pytest.importorskip('ipykernel')

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / 'docs' / 'colab').glob('*.ipynb'))
CACHE = os.path.join(tempfile.gettempdir(), 'speccascade-test-cache')


def read(path: Path):
  return nbformat.read(path, as_version=4)


def test_there_are_notebooks():
  assert [path.stem for path in NOTEBOOKS] == ['quickstart', 'your_own_pair']


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_valid_and_stored_without_outputs(path):
  notebook = read(path)
  nbformat.validate(notebook)
  code = [cell for cell in notebook.cells if cell.cell_type == 'code']
  assert not any(cell.outputs or cell.execution_count for cell in code)
  assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)


@pytest.mark.filterwarnings('ignore:.*:DeprecationWarning:(jupyter_|nbclient|nbformat|zmq|traitlets)')
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
  kept = [*os.environ.get('PYTHONPATH', '').split(os.pathsep), str(ROOT)]
  environment = {
    'PYTHONPATH': os.pathsep.join(filter(None, kept)),
    'JAX_COMPILATION_CACHE_DIR': CACHE,
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
    'IPYTHONDIR': str(tmp_path / 'ipython'),  # a new profile: no settings or history of whoever runs the tests
    'TMPDIR': str(tmp_path),
  }
  for name, value in environment.items():
    monkeypatch.setenv(name, value)
  client = nbclient.NotebookClient(
    read(path), timeout=300, kernel_name='python3', resources={'metadata': {'path': str(tmp_path)}}
  )
  done = client.execute()
  outputs = [output for cell in done.cells if cell.cell_type == 'code' for output in cell.outputs]
  kinds = {kind for output in outputs for kind in output.get('data', {})}
  assert 'image/png' in kinds  # a plot was drawn
  assert {'quickstart': 'text/html', 'your_own_pair': 'text/markdown'}[path.stem] in kinds
