"""Runs, data and checkpoints in a bucket, against a server that speaks the protocol: the same bytes as on a disk."""

import json
import pathlib
import signal

import jax
from matching import having
import numpy as np
import pytest

import fake_bucket  # isort: skip

pytest.importorskip('upath')
pytest.importorskip('gcsfs')
pytest.importorskip('gcp_storage_emulator')

from runs import finish, given, lines_in, merge, QUICK, same_bytes, share, start, wait_until, written

import speccascade
from speccascade import checkpoints, run
from speccascade.checkpoints import hf
from speccascade.data import files
from speccascade.evaluate import runner
from speccascade.host import multihost, storage
from speccascade.host.errors import RunError
from speccascade.host.runs import RunDir
from speccascade.models.t5 import T5, T5Config
from speccascade.types import Model

NETWORK = T5(T5Config(11, 8, 2, 4, 8, 1, 1))


@pytest.fixture(scope='module')
def bucket(tmp_path_factory):
  cache = tmp_path_factory.mktemp('cache')
  with fake_bucket.served(cache) as address:
    before, storage.CACHE = storage.CACHE, cache / 'speccascade' / 'buckets'
    yield address
    storage.CACHE = before


@pytest.fixture
def folder(bucket, request):
  return storage.resolve(f'{bucket}/{request.node.name}')


def fetched(folder, into: pathlib.Path) -> pathlib.Path:
  """Copy all objects of a folder, and return where."""
  for name in storage.objects(folder):
    (into / name).parent.mkdir(parents=True, exist_ok=True)
    (into / name).write_bytes((folder / name).read_bytes())
  return into


def put(folder, content: dict[str, str | bytes]):
  for name, data in content.items():
    RunDir(folder).write(name, data)


# ---- objects ----


def test_what_is_written_is_read_and_is_an_object_each(folder):
  odd = bytes(range(256)) * 300 + b'\r\n\n'
  run = RunDir(folder)
  assert run.names() == [] and not run.exists('a')
  put(folder, {'a': 'ä', 'b/c': odd})
  run.write('b/d', iter([odd, odd]))
  assert run.names() == ['a', 'b'] and list(storage.objects(folder)) == ['a', 'b/c', 'b/d']
  assert run.read('a') == 'ä' and (folder / 'b' / 'c').read_bytes() == odd
  assert (folder / 'b' / 'd').read_bytes() == odd + odd
  run.remove('a')
  run.remove('b/d')
  assert list(storage.objects(folder)) == ['b/c']


def test_a_copy_is_fetched_once_and_what_changed_anew(folder, capsys):
  put(folder, {'m/a': 'one', 'm/b': 'two', 'beside': 'three', 'other/x': 'four'})
  here = storage.local_copy(str(folder / 'm'))
  assert sorted(str(p.relative_to(here.parent)) for p in here.parent.rglob('[a-z]*') if p.is_file()) == [
    'beside',
    'm/a',
    'm/b',
  ]
  assert '3/3 files' in capsys.readouterr().err
  assert storage.local_copy(str(folder / 'm')) == here and 'fetching' not in capsys.readouterr().err
  put(folder, {'m/a': 'new'})
  RunDir(folder).remove('m/b')
  here = storage.local_copy(str(folder / 'm'))
  assert (here / 'a').read_text() == 'new' and not (here / 'b').exists()
  assert '2/2 files' in capsys.readouterr().err
  with pytest.raises(FileNotFoundError, match='nothing'):
    storage.local_copy(str(folder / 'nothing'))


# ---- journals ----


def test_a_journal_in_a_bucket_goes_on_and_becomes_one_object(folder):
  path = folder / 'examples.jsonl'
  opened = lambda: RunDir(folder).journal('examples.jsonl')
  first = opened()
  first.append([{'a': 1}, {'a': 'ä\u2028'}])
  first.append([{'a': 3}])
  names = ['00000000-00000002.jsonl', '00000002-00000003.jsonl']
  assert list(storage.objects(folder / 'examples')) == names and lines_in(path) == 3
  again = opened()
  assert again.count == 3 and [line['a'] for line in again.lines()] == [1, 'ä\u2028', 3]
  again.append([{'a': 4}])
  with pytest.raises(RunError, match='00000003-00000004.jsonl'):
    first.append([{'a': 4}])
  again.seal()
  assert list(storage.objects(folder)) == ['examples.jsonl'] and path.read_bytes().count(b'\n') == 4
  put(folder, {f'examples/{names[0]}': '{"a": 1}\n'})  # as if killed before all parts were removed
  last = opened()
  assert last.count == 4 == lines_in(path)
  last.seal()
  assert list(storage.objects(folder)) == ['examples.jsonl']


def test_a_part_that_is_missing_or_damaged_is_named(folder):
  put(folder, {'a/00000000-00000001.jsonl': '{}\n', 'a/00000002-00000003.jsonl': '{}\n'})
  with pytest.raises(RunError, match=having('a/00000002-00000003.jsonl', 'line 1')):
    RunDir(folder).journal('a.jsonl')
  put(folder, {'b/00000000-00000002.jsonl': '{}\n{"x"\n'})
  with pytest.raises(RunError, match='/b'):
    RunDir(folder).journal('b.jsonl')


# ---- runs ----


def test_a_run_in_a_bucket_is_that_on_a_disk(folder, tmp_path):
  runner.run([QUICK], tmp_path / 'disk', config='a = 1\n')
  for _ in range(2):  # once more, it finds everything
    assert runner.run([QUICK], folder, config='a = 1\n') == [folder]
    same_bytes(tmp_path / 'disk', fetched(folder, tmp_path / 'fetched'))
  names = {p.name for p in (tmp_path / 'disk').iterdir()}
  assert set(RunDir(folder).names()) == names
  with pytest.raises(RunError, match='\\+a = 2'):
    runner.run([QUICK], folder, config='a = 2\n')


@pytest.mark.full
def test_shards_in_a_bucket_are_merged_to_one_processs_bytes(folder, tmp_path):
  runner.run([QUICK], tmp_path / 'disk', config='a = 1\n')
  assert share(QUICK, folder, 1) == share(QUICK, folder, 0) == []
  with pytest.raises(RunError, match='2/3'):
    merge(QUICK, folder)
  with pytest.raises(RunError, match=having('shard 2/3', '+a = 2')):
    share(QUICK, folder, 2, config='a = 2\n')
  with pytest.raises(RunError, match='3 shards'):
    runner.run([QUICK], folder, config='a = 1\n')
  assert share(QUICK, folder, 2) == [folder] == merge(QUICK, folder)
  same_bytes(tmp_path / 'disk', fetched(folder, tmp_path / 'fetched'))


def test_shards_in_another_kind_of_bucket_are_merged_alike(tmp_path):
  runner.run([QUICK], tmp_path / 'disk', config='a = 1\n')
  memory = storage.resolve(f'memory://{tmp_path.name}')
  assert [share(QUICK, memory, i, 2) for i in range(2)] == [[], [memory]]
  same_bytes(tmp_path / 'disk', fetched(memory, tmp_path / 'fetched'))


@pytest.mark.long
def test_a_run_in_a_bucket_that_was_killed_goes_on_to_the_same_bytes(bucket, folder, tmp_path, monkeypatch, capsys):
  config = written(tmp_path)
  killed = start(config, str(folder), '--debug')
  wait_until(lambda: storage.objects(folder / 'examples'), killed)
  killed.kill()
  assert finish(killed)[0] == -signal.SIGKILL
  left = lines_in(folder / 'examples.jsonl')
  assert 0 < left < 60
  assert run.main([*given(config, folder), '--debug']) == 0
  assert f'Report: {folder}/report.html' in capsys.readouterr().out
  same = multihost.command_of_one_process('speccascade.run', [*given(config, folder), '--debug'])
  monkeypatch.setattr(multihost, 'command_of_one_process', lambda *_: same)  # results name the command
  assert run.main([*given(config, tmp_path / 'disk'), '--debug']) == 0
  same_bytes(tmp_path / 'disk', fetched(folder, tmp_path / 'fetched'))
  assert json.loads((folder / 'results.json').read_bytes())['points']


# ---- data and checkpoints ----


def test_data_is_read_from_a_bucket(folder):
  put(folder, {'x.txt': 'a\nb\n', 'y.txt': 'c\nd\n'})
  task = files.parallel_text(str(folder / 'x.txt'), str(folder / 'y.txt'))
  assert [(e.prompt, e.target) for e in task.examples] == [('a', 'c'), ('b', 'd')]
  with pytest.raises(FileNotFoundError, match='z.txt'):
    files.lines(str(folder / 'z.txt'))


@pytest.mark.full
def test_a_checkpoint_is_loaded_from_a_bucket(folder, tmp_path, capsys):
  model = Model(NETWORK.init(jax.random.key(0)), NETWORK)
  saved = hf.write(tmp_path / 'small', model)
  for file in (p for p in saved.rglob('*') if p.is_file()):
    RunDir(folder / 'small').write(file.relative_to(saved).as_posix(), file.read_bytes())
  address = str(folder / 'small')
  loaded = speccascade.load(address)
  assert loaded.name == 'small' and checkpoints.digest(address) == checkpoints.digest(saved)
  for mine, theirs in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(model.params), strict=True):
    np.testing.assert_array_equal(mine, theirs)
  capsys.readouterr()
  speccascade.load(address)
  assert 'fetching' not in capsys.readouterr().err
  with pytest.raises(FileNotFoundError, match='/none'):
    speccascade.load(str(folder / 'none'))


def test_of_t5x_the_latest_step_is_fetched_without_its_optimizer(folder):
  put(
    folder,
    {
      f'small/{name}': name
      for name in (
        'checkpoint_100/checkpoint',
        'checkpoint_20/checkpoint',
        'checkpoint_100/target.a/.zarray',
        'checkpoint_100/state.a/.zarray',
        'config.gin',
        'pytorch_model.bin',
        'hf_tokenizer/tokenizer.json',
        'x/y',
      )
    },
  )
  here, name = checkpoints._source(str(folder / 'small'))
  assert name == 'small'
  found = {str(p.relative_to(here.parent)) for p in here.parent.rglob('*') if p.is_file()}
  assert here.name == 'checkpoint_100' and found == {
    'checkpoint_100/checkpoint',
    'checkpoint_100/target.a/.zarray',
    'config.gin',
    'hf_tokenizer/tokenizer.json',
  }
