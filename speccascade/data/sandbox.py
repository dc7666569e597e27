"""Run a program that a model wrote, in a process with limited time and memory.

The child (this file, run as a script) has no network and its own process namespace; if the system forbids namespaces,
nothing runs unless it may run without isolation. It gains no privileges by what it starts, and root becomes an unused
user, or runs nothing. Processes, processor time, memory and files are limited; output is dropped. A program passes only
if it gets past its last statement: an early exit fails.

This contains accidents, not attacks: the program can read what you can read and write where you can write (as root:
where anyone can). Without isolation it can also use the network, leave processes behind and kill yours; the memory and
environment of this process are closed to it from then on. A program that inspects the frames above it can pretend to
pass. Use a container or another machine for models that you do not trust.
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

PROCESSES = 16  # that a program may have by default, threads included
FILE_BYTES = 1 << 24
WITHOUT_ISOLATION = 'without isolation'  # the value of allow_execution that permits to run without namespaces
PASSED = 'passed'
FAILED = 'failed'
TIMED_OUT = 'timed out'
MEMORY = 'memory'
_REFUSED = 'refused'

_NEWUSER = 0x10000000
_NEWPID = 0x20000000
_NEWNET = 0x40000000
_KEEPCAPS = 8
_PDEATHSIG = 1
_NO_NEW_PRIVS = 38
_SET_DUMPABLE = 4
_CAP_DAC_READ_SEARCH = 2
_UNUSED_USERS = range(61184, 65520)  # reserved for services without a user of their own
_REPORT = 4096


@dataclasses.dataclass(frozen=True)
class Result:
  """How a program ended.

  Attributes:
    verdict: 'passed', 'failed', 'timed out' or 'memory'.
    detail: the error, in words.
  """

  verdict: str
  detail: str = ''

  @property
  def passed(self) -> bool:
    """Whether the program ran to its end without an error."""
    return self.verdict == PASSED


def run(
  program: str, *, seconds: float = 5.0, memory: int = 1 << 30, processes: int = PROCESSES, isolated: bool = True
) -> Result:
  """Run a Python program.

  Args:
    program: its source.
    seconds: processor time; it has three times as long by the clock.
    memory: bytes of address space of each process.
    processes: number of processes, threads included.
    isolated: whether to refuse where the system forbids namespaces.

  Returns:
    How it ended.

  Raises:
    PermissionError: if the system cannot isolate the program, or root cannot be given up.
  """
  if seconds <= 0 or memory <= 0:
    raise ValueError(f'seconds={seconds!r} and memory={memory!r} must be greater than 0.')
  if not isolated and sys.platform.startswith('linux'):
    # Close this process's memory and environment to other programs of its user, some of which may outlive their run.
    _check(_libc().prctl(_SET_DUMPABLE, 0, 0, 0, 0))
  nonce = secrets.token_hex(16)
  report = b''
  with tempfile.TemporaryDirectory(prefix='speccascade-', ignore_cleanup_errors=True) as folder:
    with open(os.path.join(folder, 'job'), 'w', encoding='utf-8', errors='replace') as f:
      f.write(nonce + program)
    reader, writer = os.pipe()
    try:
      code = _wait(_start(folder, writer, seconds, memory, processes, isolated), 3 * seconds + 1)
      os.set_blocking(reader, False)
      with contextlib.suppress(BlockingIOError):  # there is no report
        report = os.read(reader, _REPORT)
    finally:
      os.close(reader)
      os.close(writer)
  return _result(code, report, nonce)


def _start(folder: str, writer: int, seconds: float, memory: int, processes: int, isolated: bool) -> subprocess.Popen:
  """Start the child; without preexec_fn, which is unsafe in a process with threads."""
  environment = {'PATH': '/usr/bin:/bin', 'HOME': folder, 'LANG': 'C.UTF-8', 'OPENBLAS_NUM_THREADS': '1'}
  if 'LD_LIBRARY_PATH' in os.environ:
    environment['LD_LIBRARY_PATH'] = os.environ['LD_LIBRARY_PATH']
  arguments = [os.path.abspath(__file__), str(writer), str(seconds), str(memory), str(processes), str(int(isolated))]
  return subprocess.Popen(
    [sys.executable, '-I', *arguments],
    stdin=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    cwd=folder,
    env=environment,
    pass_fds=(writer,),
    start_new_session=True,
  )


def _wait(child: subprocess.Popen, seconds: float) -> int | None:
  """Return the exit code, or None after `seconds`; kill what is left of the process group in any case."""
  try:
    return child.wait(seconds)
  except subprocess.TimeoutExpired:
    return None
  finally:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _result(code: int | None, report: bytes, nonce: str) -> Result:
  """Return the result of an exit code and a report, which counts only with the nonce."""
  if code is not None and code < 0:
    code = 128 - code
  if code is None or code == 128 + signal.SIGXCPU:
    return Result(TIMED_OUT)
  if report.startswith(nonce.encode()):
    verdict, _, detail = report.decode('utf-8', 'replace').removeprefix(nonce).partition(': ')
    if verdict == _REFUSED:
      raise PermissionError(f'no program is run, for the system {detail}.')
    if verdict in (PASSED, FAILED, TIMED_OUT, MEMORY):
      return Result(verdict, detail)
  if code == 128 + signal.SIGKILL:
    return Result(MEMORY, 'killed by the system')
  return Result(FAILED, f'ended before its last statement, exit code {code}')


# ---- the child ----


def _child(writer: int, seconds: float, memory: int, processes: int, isolated: bool):
  """Give up all that the program must not have, run it, and report."""
  with open('job', encoding='utf-8') as f:
    nonce = f.read(32)
    program = f.read()
  os.unlink('job')
  tasks = _tasks()
  _restrict(writer, nonce, math.ceil(seconds), isolated)
  write = os.write  # the program may replace these in `os`
  leave = os._exit
  current = os.getpid
  this = os.getpid()

  def report(verdict: str):
    if current() == this:  # a process that the program forked comes here too
      write(writer, (nonce + verdict).encode('utf-8', 'replace'))
    leave(0)

  signal.signal(signal.SIGXCPU, lambda *_: report(TIMED_OUT))
  _limit(math.ceil(seconds), memory, tasks + processes)
  try:
    exec(compile(program, '<program>', 'exec'), {'__name__': '__main__'})
    verdict = PASSED
  except MemoryError:
    verdict = MEMORY
  except BaseException as e:  # an exit before the last statement is a failure too
    verdict = f'{FAILED}: {type(e).__name__}: {e}'[:500]
  report(verdict)


def _restrict(writer: int, nonce: str, cpu: int, isolated: bool):
  """Leave the network, the processes of others and all privileges, or report a refusal and exit."""

  def refuse(reason: str):
    os.write(writer, f'{nonce}{_REFUSED}: {reason}'.encode())
    os._exit(0)

  user = _UNUSED_USERS[os.getpid() % len(_UNUSED_USERS)]
  if _can_isolate() and _isolate():
    _fork_into_namespace(cpu)
  elif isolated:
    remedy = f"run in a container that allows namespaces, or accept that with allow_execution='{WITHOUT_ISOLATION}'"
    refuse(f'does not let it leave the network and the processes of others: {remedy}')
  try:
    if os.getuid() == 0:
      _drop_root(user)
    if sys.platform.startswith('linux'):
      _check(_libc().prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))
  except OSError as e:
    remedy = 'run as an ordinary user, or in another container'
    refuse(f'does not let it give up its privileges ({e.strerror}): {remedy}')


def _libc() -> ctypes.CDLL:
  return ctypes.CDLL(None, use_errno=True)


def _check(code: int):
  """Raise OSError if a system call failed."""
  if code:
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _tasks() -> int:
  """Return the number of this user's tasks, all of which count for its limit on processes; root has none."""
  if os.getuid() == 0 or not os.path.isdir('/proc'):
    return 0
  tasks = 0
  for entry in filter(str.isdigit, os.listdir('/proc')):
    with contextlib.suppress(OSError):  # it has ended
      if os.stat(f'/proc/{entry}').st_uid == os.getuid():
        tasks += len(os.listdir(f'/proc/{entry}/task'))
  return tasks


def _can_isolate() -> bool:
  """Try `_isolate` in a process that ends: some systems allow an ordinary user only half of it."""
  if os.getuid() == 0:
    return True
  child = os.fork()
  if not child:
    with contextlib.suppress(OSError):
      os._exit(not _isolate())
    os._exit(1)
  return os.waitpid(child, 0)[1] == 0


def _isolate() -> bool:
  """Enter new namespaces of networks and processes; return whether the system allows it."""
  if not sys.platform.startswith('linux'):
    return False
  user = os.getuid()
  group = os.getgid()
  if _libc().unshare(_NEWNET | _NEWPID | (0 if user == 0 else _NEWUSER)):
    return False
  if user != 0:  # without a mapping it could not make files
    for name, text in (('setgroups', 'deny'), ('uid_map', f'{user} {user} 1'), ('gid_map', f'{group} {group} 1')):
      with open(f'/proc/self/{name}', 'w') as f:
        f.write(text)
  return True


def _fork_into_namespace(cpu: int):
  """Continue as the first process of the new namespace: when it ends, the kernel ends all that it started."""
  child = os.fork()
  if child:
    _, status, used = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    # The kernel kills a program that ignores SIGXCPU; its clock for that is coarser than this one.
    late = code < 0 and used.ru_utime + used.ru_stime > cpu / 2
    os._exit(128 + signal.SIGXCPU if late else 128 - code if code < 0 else code)
  _libc().prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _limit(cpu: int, memory: int, processes: int):
  """Set the limits of this process."""
  import resource  # not on every system

  limits = dict(CPU=cpu, AS=memory, FSIZE=FILE_BYTES, NOFILE=64, CORE=0, NPROC=processes)
  for name, value in limits.items():
    kind = getattr(resource, f'RLIMIT_{name}', None)
    if kind is not None:
      hard = resource.getrlimit(kind)[1]
      unlimited = hard == resource.RLIM_INFINITY
      soft = value if unlimited else min(value, hard)
      resource.setrlimit(kind, (soft, soft + 1 if name == 'CPU' and unlimited else soft))


def _drop_root(user: int):
  """Become an unused user, who may still read the interpreter wherever it is, or raise OSError."""
  libc = _libc()
  os.chown('.', user, user)
  _check(libc.prctl(_KEEPCAPS, 1, 0, 0, 0))
  os.setgroups([])
  os.setresgid(user, user, user)
  os.setresuid(user, user, user)
  header = (ctypes.c_uint32 * 2)(0x20080522, 0)
  allowed = 1 << _CAP_DAC_READ_SEARCH
  _check(libc.capset(header, (ctypes.c_uint32 * 6)(allowed, allowed, 0, 0, 0, 0)))


if __name__ == '__main__':
  _child(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == '1')
