"""Programs end where they should: passed, failed, out of time or out of memory, and leave nothing behind."""

import os
import pathlib
import subprocess
import sys
import time

import pytest

from speccascade.data import sandbox

if not sys.platform.startswith('linux'):
  pytest.skip('limits differ from system to system', allow_module_level=True)

MEMORY = 1 << 28


def run(program, seconds=2.0):
  return sandbox.run(program, seconds=seconds, memory=MEMORY, isolated=False)  # as far as it goes here


def processes(mark):
  """Return the processes whose command line contains a text."""
  found = []
  for entry in pathlib.Path('/proc').glob('[0-9]*'):
    try:
      if mark.encode() in (entry / 'cmdline').read_bytes():
        found.append(entry.name)
    except OSError:
      pass
  return found


@pytest.mark.parametrize(
  'program',
  [
    'import collections, json, math\nassert math.prod([2, 3]) == 6',
    'for i in range(20_000):\n  print("x" * 1000)',  # a flood of output does no harm
    "assert 'NoNewPrivs:\\t1' in open('/proc/self/status').read()",  # nor has it privileges to gain
  ],
)
def test_a_program_that_reaches_its_end_passes(program):
  assert run(program).verdict == 'passed'


@pytest.mark.parametrize(
  'program, detail',
  [
    ('assert 1 == 2, "no"', 'AssertionError: no'),
    ('def f(:', 'SyntaxError'),
    ('import sys\nsys.exit(0)\nassert False', 'SystemExit'),
    ('raise SystemExit', 'SystemExit'),
    ('import os\nos._exit(0)', 'before its last statement'),
    ('import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\nimport ctypes\nctypes.string_at(0)', 'exit code'),
    ('def f(): f()\nf()', 'RecursionError'),
    ('input()', 'EOFError'),
    ('raise ValueError("\\ud800" * 10_000)', 'ValueError'),
    ('import os\nif os.fork():\n  os.wait()\n  assert False, "parent"', 'AssertionError: parent'),  # not the child's
  ],
)
def test_a_program_that_stops_earlier_fails_with_the_reason(program, detail):
  result = run(program)
  assert result.verdict == 'failed' and detail in result.detail


def test_endless_loops_and_sleep_run_out_of_time():
  started = time.monotonic()
  assert run('while True:\n  pass', seconds=1).verdict == 'timed out'
  assert run('while True:\n  try:\n    sum(range(10**12))\n  except BaseException:\n    pass', 1).verdict == 'timed out'
  assert run('import time\ntime.sleep(100)', seconds=0.2).verdict == 'timed out'
  assert time.monotonic() - started < 30


def test_a_memory_hog_runs_out_of_memory():
  assert run('x = bytearray(10**10)').verdict == 'memory'
  assert run('x = [0] * 10**6\nwhile True:\n  x = x + x').verdict == 'memory'


def test_a_fork_bomb_meets_the_limit_on_processes():
  assert 'BlockingIOError' in run('import os\nwhile True:\n  os.fork()').detail
  many = 'import os, time\nn = 0\ntry:\n  while True:\n    if not os.fork():\n      time.sleep(9)\n    n += 1\n'
  result = run(f'{many}except OSError:\n  raise ValueError(f"made {{n}} processes")')
  made = int(result.detail.split('made ')[1].split()[0])
  assert made < 4 * sandbox.PROCESSES or os.getuid()  # an ordinary user's own processes count as well


def test_nothing_outlives_a_program():
  mark = 'speccascade-left-over'
  program = f'import subprocess, sys\nsubprocess.Popen([sys.executable, "-c", "import time; time.sleep(60) # {mark}"]'
  assert run(f'{program})').verdict == 'passed'
  time.sleep(0.1)
  assert not processes(mark)


def test_files_are_limited_and_removed():
  before = set(pathlib.Path(sandbox.tempfile.gettempdir()).glob('speccascade-*'))
  assert run('open("a", "w").write("b")\nassert open("a").read() == "b"').verdict == 'passed'
  assert 'File too large' in run('with open("a", "wb") as f:\n  while True:\n    f.write(b"x" * 10**6)').detail
  mine = set(pathlib.Path(sandbox.tempfile.gettempdir()).glob('speccascade-*')) - before
  assert not [folder for folder in mine if (folder / 'a').exists()]


def test_a_program_sees_neither_environment_nor_job(monkeypatch):
  monkeypatch.setenv('SECRET', 'value')
  assert run('import os\nassert "SECRET" not in os.environ\nassert os.listdir(".") == []').verdict == 'passed'
  assert 'FileNotFoundError' in run('open("job")').detail


@pytest.mark.skipif(os.getuid() != 0, reason='an ordinary user keeps its own rights')
def test_root_is_given_up():
  result = run('import os\nassert os.getuid() and os.geteuid()\nopen("/etc/speccascade-was-here", "w")')
  assert 'PermissionError' in result.detail
  assert run('import os\nos.setuid(0)').detail.startswith('PermissionError')


ALONE = """
import ctypes, os, sys
user = os.getuid()
if ctypes.CDLL(None).unshare(0x10000000):
  sys.exit(77)
open('/proc/self/uid_map', 'w').write(f'0 {user} 1')  # root, and no other user
from speccascade.data import sandbox
try:
  print(sandbox.run('open("/tmp/ran-as-root", "w")'))
except PermissionError as error:
  print(error)
"""


def test_where_root_cannot_be_given_up_nothing_runs():
  out = subprocess.run([sys.executable, '-c', ALONE], capture_output=True, text=True)
  if out.returncode == 77:
    pytest.skip('no user namespaces here')
  assert 'no program is run, for the system does not let it give up its privileges (' in out.stdout, out.stderr
  assert not pathlib.Path('/tmp/ran-as-root').exists()


WITHOUT_NAMESPACES = """
import ctypes, os, sys
if sys.argv[1:]:
  user, group = os.getuid(), os.getgid()
  if ctypes.CDLL(None).unshare(0x10000000):
    sys.exit(77)
  for name, text in (('setgroups', 'deny'), ('uid_map', f'1000 {user} 1'), ('gid_map', f'1000 {group} 1')):
    open(f'/proc/self/{name}', 'w').write(text)  # an ordinary user
  open('/proc/sys/user/max_user_namespaces', 'w').write('0')
  os.execv(sys.executable, [sys.executable, '-c', sys.orig_argv[2]])
from speccascade.data import sandbox
LOOK = '''
import glob
for name in glob.glob("/proc/[0-9]*/environ"):
  try:
    found = b"SECRET=value" in open(name, "rb").read()
  except OSError:
    found = False
  assert not found, name
'''
try:
  sandbox.run('open("/tmp/ran-without-isolation", "w")')
except PermissionError as error:
  print(error)
print(sandbox.run(LOOK, isolated=False))
print(open('/proc/self/environ', 'rb').read().count(b'SECRET=value'))
"""


def test_where_namespaces_are_forbidden_a_program_runs_only_if_allowed_and_cannot_read_us():
  program = [sys.executable, '-c', WITHOUT_NAMESPACES, 'become an ordinary user']
  out = subprocess.run(program, capture_output=True, text=True, env=os.environ | {'SECRET': 'value'})
  if out.returncode == 77:
    pytest.skip('no user namespaces here')
  refused, passed, readable = out.stdout.splitlines()
  assert refused.startswith('no program is run, for the system does not let it leave the network'), out.stderr
  assert "allow_execution='without isolation'" in refused and 'passed' in passed and readable == '1'
  assert not pathlib.Path('/tmp/ran-without-isolation').exists()


def test_limits_must_be_positive():
  for limits in (dict(seconds=0), dict(memory=-1)):
    with pytest.raises(ValueError, match='0'):
      sandbox.run('1', **limits)
