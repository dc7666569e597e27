"""Run a program that a model wrote: in a process of its own, for a limited time, with limited memory, to its very end.

The child (this file again, as a script) has no network and a process namespace of its own; where the system forbids
namespaces nothing runs, unless it may run without isolation. It gains no privileges by what it starts, and as root
becomes an unused user, or runs nothing. Its processes, processor time, memory and files are limited; what it prints is
dropped. A program passes only if its last statement was left behind: an early exit is no pass.

This guards against accidents, not against attacks: the program may read what you may read and write where you may write
(as root: where anyone may). Without isolation it may also use the network, leave processes behind and end yours, this
one included, whose memory and environment are closed to it from then on. A program that looks through the frames above
it could pretend to pass. Use a container or another machine for models that you do not trust.
"""

import contextlib
import ctypes
import dataclasses
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile

PROCESSES = 16  # that a program may have, threads included
FILE_BYTES = 1 << 24
WITHOUT_ISOLATION = 'without isolation'  # what allows programs to run where namespaces are forbidden
PASSED, FAILED, TIMED_OUT, MEMORY = 'passed', 'failed', 'timed out', 'memory'
_REFUSED = 'refused'

_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_KEEPCAPS, _PDEATHSIG, _NO_NEW_PRIVS, _SET_DUMPABLE = 8, 1, 38, 4
_CAP_DAC_READ_SEARCH = 2
_UNUSED_USERS = range(61184, 65520)  # set aside for services without a user of their own
_REPORT = 4096


@dataclasses.dataclass(frozen=True)
class Result:
  """How a program ended: 'passed', 'failed', 'timed out' or 'memory', and the error in words."""

  verdict: str
  detail: str = ''

  @property
  def passed(self) -> bool:
    """Whether the program ran to its end without an error."""
    return self.verdict == PASSED


def run(program: str, *, seconds: float = 5.0, memory: int = 1 << 30, isolated: bool = True) -> Result:
  """Run a Python program in `seconds` of processor time, thrice that by the clock, and `memory` bytes.

  Where namespaces are forbidden an `isolated` program does not run, which raises PermissionError; any other does.
  """
  if seconds <= 0 or memory <= 0:
    raise ValueError(f'seconds={seconds!r} and memory={memory!r} must be greater than 0.')
  nonce = secrets.token_hex(16)
  with tempfile.TemporaryDirectory(prefix='speccascade-', ignore_cleanup_errors=True) as folder:
    with open(os.path.join(folder, 'job'), 'w', encoding='utf-8', errors='replace') as f:
      f.write(nonce + program)
    reader, writer = os.pipe()
    try:
      if not isolated:
        _close_to_others()
      code = _wait(_start(folder, writer, seconds, memory, isolated), 3 * seconds + 1)
      os.set_blocking(reader, False)
      report = _read(reader)
    finally:
      os.close(reader)
      os.close(writer)
  return _result(code, report, nonce)


def _close_to_others():
  """Keep this process's memory and environment from other programs of its user, some of which may outlive their run."""
  if sys.platform.startswith('linux'):
    _made(_libc().prctl(_SET_DUMPABLE, 0, 0, 0, 0))


def _start(folder: str, writer: int, seconds: float, memory: int, isolated: bool) -> subprocess.Popen:
  """Start the child without a hook between fork and exec, which a process with threads must not have."""
  environment = {'PATH': '/usr/bin:/bin', 'HOME': folder, 'LANG': 'C.UTF-8', 'OPENBLAS_NUM_THREADS': '1'}
  environment |= {k: os.environ[k] for k in ('LD_LIBRARY_PATH',) if k in os.environ}
  return subprocess.Popen(
    [sys.executable, '-I', os.path.abspath(__file__), str(writer), str(seconds), str(memory), str(int(isolated))],
    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    cwd=folder, env=environment, pass_fds=(writer,), start_new_session=True,
  )  # fmt: skip


def _wait(child: subprocess.Popen, seconds: float) -> int | None:
  """Return the exit code, None at the end of the time; kill what is left of the group in any case."""
  try:
    return child.wait(seconds)
  except subprocess.TimeoutExpired:
    return None
  finally:
    try:
      os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
      pass
    child.wait()


def _read(reader: int) -> bytes:
  try:
    return os.read(reader, _REPORT)
  except BlockingIOError:
    return b''


def _result(code: int | None, report: bytes, nonce: str) -> Result:
  code = 128 - code if code is not None and code < 0 else code
  if code is None or code == 128 + signal.SIGXCPU:
    return Result(TIMED_OUT)
  said, _, detail = report.decode('utf-8', 'replace').removeprefix(nonce).partition(': ')
  if report.startswith(nonce.encode()) and said == _REFUSED:
    raise PermissionError(f'no program is run, for the system {detail}.')
  if report.startswith(nonce.encode()) and said in (PASSED, FAILED, TIMED_OUT, MEMORY):
    return Result(said, detail)
  if code == 128 + signal.SIGKILL:
    return Result(MEMORY, 'killed by the system')
  return Result(FAILED, f'ended before its last statement, exit code {code}')


# ---- the child ----


def _child(writer: int, seconds: float, memory: int, isolated: bool):
  """Give up what the program must not have, run it, and report."""
  with open('job', encoding='utf-8') as f:
    nonce, program = f.read(32), f.read()
  os.unlink('job')
  cpu, tasks, me = math.ceil(seconds), _tasks(), os.getpid()
  if _may_be_alone() and _alone():
    _become_first(cpu)
  elif isolated:
    remedy = f"run in a container that allows namespaces, or accept that with allow_execution='{WITHOUT_ISOLATION}'"
    _refuse(writer, nonce, f'does not let it leave the network and the processes of others: {remedy}')
  try:
    if os.getuid() == 0:
      _become_nobody(_UNUSED_USERS[me % len(_UNUSED_USERS)])
    if sys.platform.startswith('linux'):
      _made(_libc().prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))
  except OSError as e:
    remedy = 'run as an ordinary user, or in another container'
    _refuse(writer, nonce, f'does not let it give up its privileges ({e.strerror}): {remedy}')
  write, leave, who, first = os.write, os._exit, os.getpid, os.getpid()

  def report(verdict: str):
    if who() == first:  # a process that the program made comes by here too
      write(writer, (nonce + verdict).encode('utf-8', 'replace'))
    leave(0)

  signal.signal(signal.SIGXCPU, lambda *_: report(TIMED_OUT))
  _limit(cpu, memory, tasks)
  try:
    exec(compile(program, '<program>', 'exec'), {'__name__': '__main__'})
    verdict = PASSED
  except MemoryError:
    verdict = MEMORY
  except BaseException as e:  # an exit before the last statement is a failure too
    verdict = f'{FAILED}: {type(e).__name__}: {e}'[:500]
  report(verdict)


def _refuse(writer: int, nonce: str, why: str):
  os.write(writer, f'{nonce}{_REFUSED}: {why}'.encode())
  os._exit(0)


def _libc() -> ctypes.CDLL:
  return ctypes.CDLL(None, use_errno=True)


def _tasks() -> int:
  """Return how many tasks this user has, for the limit on processes counts them all; root's are not limited."""
  if os.getuid() == 0 or not os.path.isdir('/proc'):
    return 0
  found = 0
  for entry in filter(str.isdigit, os.listdir('/proc')):
    try:
      if os.stat(f'/proc/{entry}').st_uid == os.getuid():
        found += len(os.listdir(f'/proc/{entry}/task'))
    except OSError:  # it has ended
      pass
  return found


def _may_be_alone() -> bool:
  """Tell, by a process that ends, whether the system allows all of `_alone`: some allow an ordinary user half of it."""
  if os.getuid() == 0:
    return True
  child = os.fork()
  if not child:
    with contextlib.suppress(OSError):
      os._exit(not _alone())
    os._exit(1)
  return os.waitpid(child, 0)[1] == 0


def _alone() -> bool:
  """Leave the network and the others' processes; return whether the system allowed it."""
  if not sys.platform.startswith('linux'):
    return False
  user, group = os.getuid(), os.getgid()
  if _libc().unshare(_NEWNET | _NEWPID | (0 if user == 0 else _NEWUSER)):
    return False
  if user != 0:  # without a mapping no file could be made
    for name, text in (('setgroups', 'deny'), ('uid_map', f'{user} {user} 1'), ('gid_map', f'{group} {group} 1')):
      with open(f'/proc/self/{name}', 'w') as f:
        f.write(text)
  return True


def _become_first(cpu: int):
  """Go on as the first process of the new namespace: when it ends, the kernel ends all that it started."""
  child = os.fork()
  if child:
    _, status, used = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    # The kernel kills what did not heed SIGXCPU; the time that it counts by is coarser than this one.
    late = code < 0 and used.ru_utime + used.ru_stime > cpu / 2
    os._exit(128 + signal.SIGXCPU if late else 128 - code if code < 0 else code)
  _libc().prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _limit(cpu: int, memory: int, tasks: int):
  import resource  # not on every system

  limits = dict(CPU=cpu, AS=memory, FSIZE=FILE_BYTES, NOFILE=64, CORE=0, NPROC=tasks + PROCESSES)
  for name, value in limits.items():
    kind = getattr(resource, f'RLIMIT_{name}', None)
    if kind is not None:
      hard = resource.getrlimit(kind)[1]
      value = value if hard == resource.RLIM_INFINITY else min(value, hard)
      resource.setrlimit(kind, (value, value + 1 if name == 'CPU' and hard == resource.RLIM_INFINITY else value))


def _become_nobody(user: int):
  """Turn root into an unused user who may still read what the interpreter is made of, wherever that is, or raise."""
  libc = _libc()
  os.chown('.', user, user)
  _made(libc.prctl(_KEEPCAPS, 1, 0, 0, 0))
  os.setgroups([])
  os.setresgid(user, user, user)
  os.setresuid(user, user, user)
  header = (ctypes.c_uint32 * 2)(0x20080522, 0)
  kept = 1 << _CAP_DAC_READ_SEARCH
  _made(libc.capset(header, (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)))


def _made(code: int):
  """Raise where a call of the system failed."""
  if code:
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == '__main__':
  _child(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == '1')
