"""A command ends as it should whatever its standard streams, its environment and the moment of a signal."""

import os
import subprocess
import sys

from matching import says
import pytest
from tiers import long_but

from speccascade.host import commands, multihost, storage

CODE = """
import os, pwd, sys
def unknown(number):
  raise KeyError(number)
pwd.getpwuid = unknown
from speccascade.host import commands, progress, storage
def command(args):
  bar = progress.Progress('work', 1)
  bar.add(1)
  bar.end()
  with open(os.devnull) as file:
    print('γ', file.fileno() > 2)
sys.exit(commands.run(commands.Parser('speccascade.x', __doc__), command, sys.argv[1:], 'stopped'))
"""


def ran(how: str, *flags: str, **environment) -> subprocess.CompletedProcess:
  """Run the code as a shell says, where {} is the command."""
  command = f'"$PYTHON" {" ".join(flags)} -c "$CODE"'
  env = os.environ | dict(PYTHON=sys.executable, CODE=CODE, PYTHONUNBUFFERED='') | environment
  return subprocess.run(['bash', '-c', how.format(command)], env=env, capture_output=True, text=True)


@pytest.mark.parametrize(('how', 'printed'), [('{} <&- 2>&-', 'γ True\n'), ('{} >&-', '')])
def test_a_stream_that_is_closed_ends_no_command(how, printed):
  out = ran(how)
  assert (out.returncode, out.stdout) == (0, printed) and 'Traceback' not in out.stderr


@pytest.mark.full
@pytest.mark.parametrize('unbuffered', long_but(['', '1'], ['']))
def test_a_command_whose_output_nobody_reads_ends_as_other_tools_do(unbuffered, tmp_path):
  errors = tmp_path / 'errors'
  out = ran('{} 2>"$ERRORS" | sleep 0; exit ${{PIPESTATUS[0]}}', PYTHONUNBUFFERED=unbuffered, ERRORS=str(errors))
  assert out.returncode == 141 and 'rror' not in errors.read_text()


@pytest.mark.full
def test_any_environment_and_any_encoding_will_do():
  out = ran('unset HOME XDG_CACHE_HOME; {}', '-OO', TQDM_MININTERVAL='x', PYTHONIOENCODING='ascii')
  assert (out.returncode, out.stdout) == (0, '\\u03b3 True\n') and says(out.stderr, 'TQDM_', "'x'")
  assert 'Traceback' not in out.stderr


@pytest.mark.full
def test_a_disk_without_room_for_what_is_printed_is_one_sentence():
  out = ran('{} >/dev/full')
  assert out.returncode == 1 and says(out.stderr.splitlines()[-1], 'error: ', 'No space left')


def test_a_name_that_is_not_utf8_is_refused_at_once(tmp_path, capsys, monkeypatch):
  run = lambda *argv: commands.run(commands.Parser('speccascade.x', ''), lambda args: 0, argv, 'stopped')
  assert run('--compilation_cache=x\udcff') == 1
  assert says(capsys.readouterr().err, r'x\udcff', 'UTF-8')
  folder = os.fsencode(tmp_path) + b'/\xff'
  os.mkdir(folder)
  monkeypatch.chdir(os.fsdecode(folder))
  assert run() == 1 and says(capsys.readouterr().err, r'\udcff', 'UTF-8')


def test_the_recorded_command_is_that_of_one_process_however_its_options_are_written():
  given = ['--run-dir=a', '--shard', '0/2', '--host-timeout=9', '--host_timeout', '9', '--distributed', '--only=b-c']
  assert multihost.command_of_one_process('m', given) == 'python -m m --run-dir=a --only=b-c'


@pytest.mark.parametrize('name', ['..', '.', '', '../x', '/x', 'a/../..', '.x', 'a b/c'])
def test_a_name_is_that_of_a_file_in_its_folder(name, tmp_path):
  assert (tmp_path / storage.file_name(name)).resolve().parent == tmp_path


@pytest.mark.parametrize('how', ['{} 2>/dev/full', 'PYTHONUNBUFFERED=1 {} 2>/dev/full'])
def test_a_command_goes_on_where_what_it_reports_cannot_be_written(how):
  out = ran(how)
  assert (out.returncode, out.stdout) == (0, 'γ True\n')


def test_an_error_that_cannot_be_written_keeps_its_exit_code():
  assert ran('{} --nonsense 2>/dev/full').returncode == 1


def test_a_gin_file_is_read_as_utf8_whatever_the_locale(tmp_path):
  (tmp_path / 'x.gin').write_text("# γ\nNAME = 'α'\n", encoding='utf-8')
  code = 'from speccascade.host import gin_files; import gin\n'
  code += "gin_files.read(['x.gin']); print(ascii(gin.query_parameter('%NAME')))"
  env = os.environ | dict(LC_ALL='C', PYTHONUTF8='0', PYTHONCOERCECLOCALE='0')
  done = subprocess.run([sys.executable, '-c', code], env=env, cwd=tmp_path, capture_output=True, text=True)
  assert done.stdout == "'\\u03b1'\n", done.stderr
