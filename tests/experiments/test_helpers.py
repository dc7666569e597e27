"""What experiments share, and that the commands that they print exist."""

import pathlib
import re

import pytest

from experiments.helpers import families, rows
from speccascade.data import families as declared

ROOT = pathlib.Path(__file__).parents[2]


def test_a_file_grows_by_the_rows_that_it_does_not_have(tmp_path):
  path = tmp_path / 'out.csv'
  key = dict(pair='t5', batch=8)
  assert not rows.has(path, key)
  rows.append(path, key | {'tokens a round': '2.5'})
  rows.append(path, dict(pair='t5', batch=80) | {'tokens a round': '3, or so'})
  assert rows.has(path, key) and rows.has(path, dict(batch=80)) and not rows.has(path, dict(pair='t5', batch=0))
  assert path.read_bytes() == b'pair,batch,tokens a round\r\nt5,8,2.5\r\nt5,80,"3, or so"\r\n'


def test_the_models_of_a_family_are_those_that_are_declared():
  assert {name: tuple(family.models) for name, family in declared.FAMILIES.items()} == families.TRIOS
  assert families.PAIRS['multi30k'] == ('small', 'large')


@pytest.mark.parametrize('folder', sorted(p.parent.name for p in (ROOT / 'experiments').glob('*/README.md')))
def test_the_commands_of_an_experiment_name_modules_that_are_there(folder):
  texts = [p.read_text() for p in (ROOT / 'experiments' / folder).iterdir() if p.suffix in ('.md', '.py', '.gin')]
  named = set(re.findall(r'python -m (experiments\.[\w.]+\w)', '\n'.join(texts)))
  assert not [name for name in named if not (ROOT / f'{name.replace(".", "/")}.py').is_file()]
  assert not re.search(r'python experiments/', '\n'.join(texts))
