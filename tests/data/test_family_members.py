"""Families: a member is found where a user says or in the cache; texts are made or fetched, models are trained."""

import gzip
import io
import pathlib
import subprocess
import sys

from matching import having
import pytest

import speccascade
from speccascade.data import families as declared
from speccascade.data import files, sources, sums, tokenizers
from speccascade.host.errors import RunError


@pytest.fixture
def cache(monkeypatch, tmp_path):
  """Let this machine have no family but what is made in the test."""
  monkeypatch.delenv(declared.FOLDER, raising=False)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  return tmp_path / 'cache' / 'speccascade' / 'families'


def publish(monkeypatch, folder, name, member, lines):
  """Let a file of a folder be what a publisher has."""
  file = declared.FAMILIES[name].files[member]
  made = declared.Fetched((folder / member).as_uri(), lines)
  monkeypatch.setitem(declared.FAMILIES[name].files, member, made)
  return file


def test_a_family_of_a_user_is_found_in_the_folder_that_is_named(monkeypatch, tmp_path, cache):
  (tmp_path / 'mine' / 'sums' / 'draft').mkdir(parents=True)
  (tmp_path / 'mine' / 'sums' / 'draft' / 'config.json').write_text('{}')
  with gzip.open(tmp_path / 'mine' / 'sums' / 'test.jsonl.gz', 'wt') as file:
    file.write('{"question": "of mine"}\n')
  monkeypatch.setenv(declared.FOLDER, str(tmp_path / 'mine'))
  found = sources.find('family:sums/draft', lambda names, _: names)
  assert found == (tmp_path / 'mine' / 'sums' / 'draft', 'draft')
  for text in ('family:sums/test.jsonl', 'family:sums/test.jsonl.gz'):
    assert files.lines(text) == ['{"question": "of mine"}']
  assert len(files.lines('family:sums/train.jsonl')) == sums.TRAIN  # which that folder lacks
  monkeypatch.setenv(declared.FOLDER, str(tmp_path / 'none'))
  with pytest.raises(RunError, match=having(declared.FOLDER, 'none', 'is no folder')):
    speccascade.load('family:sums/draft')


def test_problems_are_made_once(cache):
  test = files.lines('family:sums/test.jsonl')
  assert len(test) == sums.TEST and (cache / 'sums' / 'test.jsonl').is_file()
  assert not {*map(str, sums.lines(0, 2000))} & {*map(str, sums.lines(sums.TRAIN, sums.TRAIN + sums.TEST))}
  (cache / 'sums' / 'test.jsonl').write_text('{}\n')
  assert files.lines('family:sums/test.jsonl') == ['{}']


def test_texts_of_others_are_fetched_whole_or_not_at_all(monkeypatch, tmp_path, cache, capsys):
  with gzip.open(tmp_path / 'val.en.gz', 'wt') as file:
    file.write('A door.\nA tree.\n')
  publish(monkeypatch, tmp_path, 'multi30k', 'val.en.gz', 2)
  assert files.lines('family:multi30k/val.en') == ['A door.', 'A tree.']
  said = capsys.readouterr().err
  assert 'val.en.gz' in said and 'for research' in said
  assert files.lines('family:multi30k/val.en') and not capsys.readouterr().err  # the cache has it
  publish(monkeypatch, tmp_path, 'multi30k', 'val.de.gz', 2)
  said = having('family:multi30k/val.de', 'could not be fetched', 'copy file:', 'val.de.gz')
  with pytest.raises(RunError, match=said):
    files.lines('family:multi30k/val.de')
  (tmp_path / 'val.de.gz').write_bytes(gzip.compress(b'<html>\n'))
  with pytest.raises(RunError, match='has 1 lines, not 2'):
    files.lines('family:multi30k/val.de')
  assert not (cache / 'multi30k' / 'val.de.gz').exists()


@pytest.mark.parametrize(
  ('text', 'said'),
  [
    ('family:sum/draft', "no family 'sum'; did you mean sums"),
    ('family:sums/drafts', "no 'drafts'; did you mean draft?"),
    ('family:x/y', 'one of sums, multi30k, gsm8k'),
    ('family:sums', 'name a member, as family:sums/draft'),
  ],
)
def test_a_name_that_is_none_is_explained(text, said):
  with pytest.raises(ValueError, match=having(said)):
    speccascade.load(text)
  with pytest.raises(ValueError, match=having(said)):
    tokenizers.load(text)


def test_a_model_is_trained_where_a_user_agrees(monkeypatch, cache, capsys):
  told = 'family:sums/target is not here, and takes 2.1 hours of a CPU core to train'
  with pytest.raises(RunError, match=having(told, 'python -m speccascade.train family:sums/target', declared.FOLDER)):
    speccascade.load('family:sums/target')

  class Terminal(io.StringIO):
    def isatty(self):
      return True

  called = []
  monkeypatch.setattr(sys, 'stderr', Terminal())
  monkeypatch.setattr(subprocess, 'run', lambda command: called.append(command) or subprocess.CompletedProcess([], 3))
  for answer in ('n\n', '\n', ''):
    monkeypatch.setattr(sys, 'stdin', Terminal(answer))
    with pytest.raises(RunError, match=having('family:sums/target is not here: python -m')):
      speccascade.load('family:sums/target')
  assert not called
  monkeypatch.setattr(sys, 'stdin', Terminal('y\n'))
  with pytest.raises(RunError, match=having('speccascade.train family:sums/target ended with exit code 3')):
    speccascade.load('family:sums/target')
  assert called == [[sys.executable, '-m', 'speccascade.train', 'family:sums/target']]
  assert told in sys.stderr.getvalue()


def test_every_recipe_trains_the_models_that_are_declared():
  from speccascade.train import jobs

  for name, family in declared.FAMILIES.items():
    read = jobs.read([family.recipe], ['TOKENIZER = None'])
    assert [job.name for job in read] == list(family.models)
    texts = {declared._plain(file) for file in family.files}
    recipe = (pathlib.Path(jobs.gin_files.SHIPPED) / family.recipe).read_text()
    named = {line.split('/')[1].rstrip("'") for line in recipe.splitlines() if f"'family:{name}/" in line}
    assert named and named <= texts


def test_problems_have_one_right_answer_and_no_question_twice():
  problems = sums.problems(seed=1)
  some = [next(problems) for _ in range(2000)]
  assert len({problem['question'] for problem in some}) == len(some)
  for problem in some:
    steps, _, answer = problem['answer'].partition(' #### ')
    results = [text.partition('=') for text in steps.split('; ')]
    assert all(eval(left) == int(right) for left, _, right in results) and results[-1][2] == answer
    assert 1 <= int(answer) <= sums.LARGEST
  again = sums.problems(seed=1)
  assert [next(again) for _ in range(5)] == some[:5]
