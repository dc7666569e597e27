"""Print how much there is to learn: flags, settings, names and files of gin, words of prose, files of the package.

`tests/test_project.py` has the figures, which may only fall; one that rises is written there.
"""

from pathlib import Path
import re
import sys
from unittest import mock

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'docs')]

import options  # noqa: E402

from speccascade.evaluate import config  # noqa: E402
from speccascade.host import gin_files  # noqa: E402
from speccascade.train import jobs  # noqa: E402


def figures() -> dict[str, int]:
  """Return each figure by what it counts."""
  words = sum(len(page.read_text().split()) for page in (ROOT / 'README.md', *(ROOT / 'docs').rglob('*.md')))
  return {
    'flags': len({flag for command in _listed('flags', 'commands') for flag, *_ in options.flags(*command)[1]}),
    'settings': sum(len(options.settings(*thing)[1]) for thing in _listed('settings', 'settings')),
    'gin names': len(_gin_names()),
    'gin files': len([*(ROOT / 'gin_configs').rglob('*.gin')]),
    'words of prose': words,
    'files': len([*(ROOT / 'speccascade').rglob('*.py')]),
  }


def _listed(directive: str, page: str) -> list[list[str]]:
  """Return the arguments of each directive of a page of the reference."""
  text = (ROOT / 'docs' / 'reference' / f'{page}.md').read_text()
  return [found.split() for found in re.findall(rf'^\.\. {directive}:: (.*)$', text, re.MULTILINE)]


def _gin_names() -> set[str]:
  """Return the names that a config of a run or of a training may use."""
  found = {name for name, _ in config.names()}
  config.register()  # once and for all, so not below
  with mock.patch.object(gin_files, 'register', lambda thing, name: found.add(name)):
    jobs.register()
  return found


if __name__ == '__main__':
  print(', '.join(f'{count} {what}' for what, count in figures().items()))
