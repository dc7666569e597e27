"""Run the notebooks and store them with their outputs; put badges that open them in Colab there and into README.

python tests/store_notebooks.py [--repository OWNER/NAME] [NOTEBOOK …]

A badge needs the GitHub repository that the notebooks are read from: by default that of the remote `origin`. Without
one there are none, and Colab's first cell asks for the address.
"""

import argparse
import contextlib
import hashlib
import os
from pathlib import Path
import re
import subprocess
import tempfile

import nbclient
import nbformat

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / 'docs' / 'colab').glob('*.ipynb'))
BADGE = '[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]'
SOURCE = re.compile(r"^SOURCE = '[^']*'", re.MULTILINE)


def digest(notebook) -> str:
  """Return a digest of the code, which its outputs belong to."""
  code = [cell.source for cell in notebook.cells if cell.cell_type == 'code']
  return hashlib.sha256('\0'.join(SOURCE.sub('', source) for source in code).encode()).hexdigest()[:16]


def execute(notebook, folder: Path):
  """Return the notebook with the outputs of a run in a folder, of this package and a new kernel."""
  paths = [str(ROOT), *os.environ.get('PYTHONPATH', '').split(os.pathsep)]
  environment = {
    'PYTHONPATH': os.pathsep.join(filter(None, paths)),
    'IPYTHONDIR': str(folder / 'ipython'),  # a new profile: no settings or history of whoever runs it
    'TMPDIR': str(folder),
  }
  with _environment(environment):
    resources = {'metadata': {'path': str(folder)}}
    return nbclient.NotebookClient(notebook, timeout=600, kernel_name='python3', resources=resources).execute()


@contextlib.contextmanager
def _environment(values: dict[str, str]):
  before = dict(os.environ)
  os.environ.update(values)
  try:
    yield
  finally:
    os.environ.clear()
    os.environ.update(before)


def clean(notebook):
  """Remove progress, clocks and the kernel's version; record the digest of the code that made the outputs."""
  notebook.metadata = {
    'kernelspec': {'display_name': 'Python 3', 'language': 'python', 'name': 'python3'},
    'language_info': {'name': 'python'},
    'outputs_of': digest(notebook),
  }
  for cell in notebook.cells:
    cell.metadata = {}
    if cell.cell_type == 'code':
      cell.outputs = [x for x in cell.outputs if x.get('name') != 'stderr']
  return notebook


def opened_in_colab(notebook, path: Path, repository: str | None):
  """Put the badge under the title, and let Colab install the package from the same repository."""
  title = notebook.cells[0]
  lines = [line for line in title.source.splitlines() if not line.startswith(BADGE)]
  badge = [badge_of(path.resolve().relative_to(ROOT).as_posix(), repository)] if repository else []
  title.source = '\n'.join([lines[0], *badge, *lines[1:]])
  source = f'git+https://github.com/{repository}' if repository else '../..'
  for cell in notebook.cells:
    if cell.cell_type == 'code':
      cell.source = SOURCE.sub(f"SOURCE = '{source}'", cell.source)
  return notebook


def badge_of(name: str, repository: str) -> str:
  """Return a badge that opens a file of a repository in Colab."""
  return f'{BADGE}(https://colab.research.google.com/github/{repository}/blob/main/{name})'


def with_badges(page: str, repository: str | None) -> str:
  """Return a page of the repository's root with a badge behind each link to a notebook, or with none."""
  page = re.sub(rf' {re.escape(BADGE)}\([^)]*\)', '', page)
  if repository is None:
    return page
  return re.sub(r'\]\((docs/colab/\w+\.ipynb)\)', lambda m: f'{m[0]} {badge_of(m[1], repository)}', page)


def origin() -> str | None:
  """Return OWNER/NAME of the clone's remote, None where it is not on GitHub."""
  asked = subprocess.run(['git', 'remote', 'get-url', 'origin'], cwd=ROOT, capture_output=True, text=True, check=False)
  found = re.search(r'github\.com[:/]([\w.-]+/[\w.-]+?)(\.git)?$', asked.stdout.strip())
  return found and found.group(1)


def main():
  """Run and store the notebooks that were named, or all."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--repository', default=origin(), help='OWNER/NAME on GitHub, for the badge')
  parser.add_argument('notebooks', nargs='*', type=Path, default=NOTEBOOKS)
  args = parser.parse_args()
  for path in args.notebooks:
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
      execute(notebook, Path(folder))
    nbformat.write(clean(opened_in_colab(notebook, path, args.repository)), path)
    print(f'{path}: {path.stat().st_size / 1e3:.0f} kB')
  readme = ROOT / 'README.md'
  readme.write_text(with_badges(readme.read_text(), args.repository))


if __name__ == '__main__':
  main()
