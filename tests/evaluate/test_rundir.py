"""A run directory is one process's at a time, keeps its config, and loses nothing that was finished."""

import json
import os
import pathlib
import resource
import subprocess
import sys

from matching import having
import pytest

from speccascade.evaluate import rundir
from speccascade.host.errors import RunError
from speccascade.host.runs import as_json, RunDir


def test_a_journal_truncated_anywhere_has_its_complete_lines(tmp_path):
  path = tmp_path / 'j'
  whole = b''.join(json.dumps({'line': i, 'text': 'x' * i}).encode() + b'\n' for i in range(3))
  ends = [i for i in range(len(whole) + 1) if i == 0 or whole[i - 1 : i] == b'\n']
  for cut in range(len(whole) + 1):
    path.write_bytes(whole[:cut])
    journal = RunDir(tmp_path).journal('j')
    keep = max(e for e in ends if e <= cut)
    assert journal.count == ends.index(keep) and path.read_bytes() == whole[:keep]
    journal.append([{'line': 9}])
    assert path.read_bytes() == whole[:keep] + b'{"line": 9}\n'


def test_a_last_line_of_rubbish_is_cut_off_and_one_in_the_middle_refused(tmp_path):
  path = tmp_path / 'j'
  path.write_bytes(b'{"a": 1}\n\0\0\0\n')
  RunDir(tmp_path).journal('j')
  assert path.read_bytes() == b'{"a": 1}\n'
  path.write_bytes(b'{"a": 1}\n{"a"\n{"a": 2}\n')
  with pytest.raises(RunError, match='line 2'):
    RunDir(tmp_path).journal('j')


def test_lines_of_another_plan_are_refused(tmp_path):
  journal = RunDir(tmp_path).journal('j')
  journal.append([{'t': 0.0, 'v': [1, 2]}, {'t': 1.0, 'v': None}])
  journal.agree(('t', 'v'), [(0.0, [1, 2]), (1.0, None), (2.0, None)])
  for plan in ([(0.0, [1, 2]), (2.0, None)], [(0.0, [1, 2])]):
    with pytest.raises(RunError, match='another run'):
      journal.agree(('t', 'v'), plan)


def test_a_file_is_written_atomically(tmp_path, monkeypatch):
  path = tmp_path / 'f'
  RunDir(tmp_path).write('f', 'old')

  def full(*_):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(os, 'fsync', full)
  with pytest.raises(RunError, match=having('/f', 'No space left on device')):
    RunDir(tmp_path).write('f', 'new')
  assert path.read_text() == 'old'


def test_a_folder_in_which_a_run_was_killed_before_its_first_file_is_a_run_directory(tmp_path, monkeypatch):
  monkeypatch.setattr(os, 'replace', lambda part, _: os.link(part, tmp_path / 'kept'))
  monkeypatch.setattr(pathlib.Path, 'unlink', lambda *_, **__: None)  # a killed process removes nothing
  RunDir(tmp_path).write('config.gin', 'a = 1')
  monkeypatch.undo()
  (tmp_path / 'kept').unlink()
  (left,) = tmp_path.iterdir()
  assert left.name.startswith('config.gin.')
  with rundir.locked(RunDir(tmp_path)):
    assert [p.name for p in tmp_path.iterdir()] == ['lock']


def test_only_a_line_feed_ends_a_line(tmp_path):
  path, lines = tmp_path / 'traces.jsonl', [{'a': 'x\u2028y\x85z\r\x0b'}, {'a': 2}]
  RunDir(tmp_path).write(path.name, ''.join(json.dumps(line, ensure_ascii=False) + '\n' for line in lines))
  assert RunDir(tmp_path).read_json(path.name) == lines


def test_not_a_number_is_not_written():
  with pytest.raises(ValueError, match='Out of range float'):
    as_json({'x': float('nan')})


def test_a_full_disk_is_one_error_and_the_run_goes_on_from_what_is_written(tmp_path):
  path, limit = tmp_path / 'j', resource.getrlimit(resource.RLIMIT_FSIZE)
  journal = RunDir(tmp_path).journal('j')
  resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
  try:
    with pytest.raises(RunError, match='/j cannot be written: File too large; free some space'):
      for i in range(100):
        journal.append([{'line': i}])
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
  assert path.stat().st_size == 100
  journal = RunDir(tmp_path).journal('j')
  assert [r['line'] for r in journal.lines()] == list(range(8)) and journal.count == 8
  journal.append([{'line': 8}])
  assert [json.loads(line)['line'] for line in path.read_text().splitlines()] == list(range(9))


def test_a_journal_drops_what_follows_the_first_line_that_is_not_wanted(tmp_path):
  journal = RunDir(tmp_path).journal('j')
  journal.append([{'step': i} for i in (1, 2, 5, 3)])
  journal.keep_while(lambda line: line['step'] < 4)
  assert journal.count == 2 and [line['step'] for line in journal.lines()] == [1, 2]
  journal.append([{'step': 3}])
  assert (tmp_path / 'j').read_bytes() == b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'


@pytest.mark.parametrize('name, part', [('thesis.tex', 'thesis.tex'), ('examples.jsonl', 'config.gin')])
def test_a_directory_of_something_else_is_left_alone(tmp_path, name, part):
  (tmp_path / name).write_text('{}\n')
  with pytest.raises(RunError, match=having(part, '--run_dir')), rundir.locked(RunDir(tmp_path)):
    pass
  strange = '(File exists|Not a directory).*--run_dir'
  with pytest.raises(RunError, match=strange), rundir.locked(RunDir(tmp_path / name)):
    pass
  assert [p.name for p in tmp_path.iterdir()] == [name]


def test_another_config_is_refused_with_what_changed(tmp_path):
  rundir.write_config(RunDir(tmp_path), 'a = 0\n')
  rundir.write_config(RunDir(tmp_path), 'a = 1\nb = 2\n')  # nothing was measured yet
  (tmp_path / 'part').mkdir()
  (tmp_path / 'part' / 'examples.jsonl').write_text('{}\n')
  rundir.write_config(RunDir(tmp_path), 'a = 1\nb = 2\n')
  with pytest.raises(RunError) as caught:
    rundir.write_config(RunDir(tmp_path), 'a = 1\nb = 3\nc = 4\n')
  message = str(caught.value)
  assert message.endswith('\n  -b = 2\n  +b = 3\n  +c = 4')
  assert '--run_dir' in message
  assert (tmp_path / 'config.gin').read_text() == 'a = 1\nb = 2\n'


HOLD = """
import sys, time
from pathlib import Path
from speccascade.evaluate import rundir
from speccascade.host.runs import RunDir
with rundir.locked(RunDir(Path(sys.argv[1]))):
  print('held', flush=True)
  time.sleep(60)
"""


def test_a_directory_is_one_processs_until_that_is_killed(tmp_path):
  holder = subprocess.Popen([sys.executable, '-c', HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
  try:
    assert holder.stdout.readline() == 'held\n'
    with pytest.raises(RunError, match=f'process {holder.pid} '), rundir.locked(RunDir(tmp_path)):
      pass
  finally:
    holder.kill()
    holder.wait()
    holder.stdout.close()
  with rundir.locked(RunDir(tmp_path)):
    assert (tmp_path / 'lock').read_text().startswith(f'process {os.getpid()} ')
