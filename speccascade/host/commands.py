"""The part that all commands share: arguments, errors of one sentence, exit codes, and interruption.

Exit codes: 0 done, 1 an error that a user can fix, wrong arguments included, 130 interrupted, 141 nobody reads what is
printed, 143 ended by SIGTERM.
"""

import argparse
from collections.abc import Callable, Sequence
import contextlib
import os
import re
import sys

import jax
from jax.experimental.compilation_cache import compilation_cache as programs

from speccascade.host import interrupt, jax_private, multihost, names, progress, storage, streams
from speccascade.host.errors import RunError

_READ = jax_private.read_program()
CACHE = storage.cache_folder('jax')
SHARDS = 10_000  # of a run, at most
FAILURES = (ValueError, OSError, RuntimeError, MemoryError, ArithmeticError)  # errors whose cause a user can fix


class Parser(argparse.ArgumentParser):
  """The arguments of `python -m PROG`; a wrong one is a RunError."""

  def __init__(self, prog: str, doc: str, **kwargs):
    super().__init__(
      prog=f'python -m {prog}',
      description=(doc or '').replace('%', '%%'),  # python -OO has none
      allow_abbrev=False,
      formatter_class=argparse.RawDescriptionHelpFormatter,
      **kwargs,
    )
    self.add_argument('--debug', action='store_true', help='show the traceback of an error')
    about = 'a module of yours, for the families, backends, tasks or names that it registers; may be repeated'
    self.add_argument('--import', dest='imports', action='append', default=[], metavar='MODULE', help=about)
    self.add_argument(
      '--compilation_cache',
      metavar='FOLDER',
      help="folder of compiled programs, shared by processes; '' for none (JAX_COMPILATION_CACHE_DIR, else "
      '~/.cache/speccascade/jax)',
    )

  def spelled(self, argument: str) -> str:
    """Return an argument in full: --gin.NAME=VALUE, and an option written with dashes with its underscores."""
    if argument.startswith('--gin.'):
      return f'--gin_bindings={argument.removeprefix("--gin.")}'
    name, equals, value = argument.partition('=')
    known = f'--{name[2:].replace("-", "_")}'
    return f'{known}{equals}{value}' if name[:2] == '--' and known in self._option_string_actions else argument

  def error(self, message: str):
    """Raise, where argparse would print its usage and exit."""
    _, required, missing = message.partition('required: ')
    greedy = [a.option_strings[0] for a in self._actions if a.nargs == '+' and a.option_strings]
    taken = [option for option in greedy if required and option not in missing]
    if taken and not missing.startswith('-'):
      message += f' ({taken[0]} takes all that follows it up to another option: write -- before {missing})'
    raise RunError(f'{message.removesuffix(".")}; see --help.')


def add_gin(parser: Parser, unbound: str, example: str):
  """Let a command take gin files and bindings: what happens without a file, and an example of a binding."""
  repeated = dict(action='append', default=[])
  parser.add_argument('--gin_file', **repeated, help=f'a gin file; may be repeated. {unbound}')
  parser.add_argument(
    '--gin_bindings',
    **repeated,
    help=f"a binding, as in '{example}'; may be repeated. --gin.NAME=VALUE is short for it",
  )
  parser.add_argument(
    '--gin_search_paths',
    type=listed,
    default=[],
    help="folders, by commas, in which gin files and their includes are looked up after a file's own folder, the one "
    'above it, and gin_configs',
  )


def bindings(args: argparse.Namespace) -> list[str]:
  """Return the bindings that a command was given, and the imports of the config that --import makes."""
  return [*(f'import {module}' for module in args.imports), *args.gin_bindings]


def add_distributed(parser: Parser):
  """Let a command be one of several processes, which `join` makes of it."""
  parser.add_argument(
    '--distributed',
    action='store_true',
    help='run as one of several processes of a slice, which TPU, Slurm, Open MPI or Kubernetes describe, or '
    'JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES and JAX_PROCESS_ID; the first writes',
  )
  parser.add_argument(
    '--host_timeout',
    type=_patience,
    default=int(multihost.LIMIT),
    metavar='SECONDS',
    help=f'how long a process waits for another before all of them end ({multihost.LIMIT:.0f})',
  )


def join(args: argparse.Namespace):
  """Connect to the other processes with --distributed; only the first shows progress."""
  if args.distributed:
    multihost.start(args.host_timeout)
    progress.silent = not multihost.is_writer()


def listed(text: str) -> list[str]:
  """Return the parts of a text that commas separate."""
  return [part for part in text.split(',') if part]


def count(text: str) -> int:
  """Return a whole number of at least 1 that 32 bits hold."""
  if not text.isdecimal() or not 1 <= int(text) < 2**31:
    raise argparse.ArgumentTypeError(f'{text!r} is not a whole number of at least 1 and less than {2**31}')
  return int(text)


def _patience(text: str) -> int:
  """Return seconds that processes may wait for each other."""
  if count(text) > multihost.LONGEST:
    raise argparse.ArgumentTypeError(f'{text} seconds is more than {multihost.LONGEST}, which is 11 days')
  return int(text)


def counts(text: str) -> tuple[int, ...]:
  """Return whole numbers of at least 1 that commas separate."""
  return tuple(map(count, text.split(',')))


def share(text: str) -> tuple[int, int]:
  """Return (i, n) of i/n, the i-th of n shards, which count from 0."""
  index, _, count = text.partition('/')
  if count.isdecimal() and int(count) > SHARDS:
    raise argparse.ArgumentTypeError(f'{text!r} is of more than {SHARDS} shards; give fewer')
  if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
    raise argparse.ArgumentTypeError(f'{text!r} is no shard; write i/n with i from 0 to n - 1, as in 0/4')
  return int(index), int(count)


def compilation_cache(folder: str | os.PathLike | None = None):
  """Cache compiled programs in a folder, for other processes too.

  Args:
    folder: The folder; '' for none. None keeps the one of JAX_COMPILATION_CACHE_DIR or jax.config, else takes
      ~/.cache/speccascade/jax, or none where no home is known.
  """
  # With XLA's own caches the path of the folder would be part of a program's key, and a copy of it of no use.
  jax.config.update('jax_persistent_cache_enable_xla_caches', 'none')
  jax_private.read_programs_by(_read_or_remove)
  if folder is None and jax.config.jax_compilation_cache_dir:
    return
  jax.config.update('jax_compilation_cache_dir', os.fspath((CACHE or '') if folder is None else folder) or None)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
  programs.reset_cache()  # JAX decides at the first compilation whether there is a cache, which may have been


def _read_or_remove(key: str, *args):
  """Read a program of JAX's cache; remove a damaged one, since JAX writes what it compiles anew only where none is."""
  try:
    return _READ(key, *args)
  except OSError:
    raise
  except Exception:  # whatever decompression or XLA raises
    with contextlib.suppress(OSError):
      (storage.resolve(jax.config.jax_compilation_cache_dir) / f'{key}-cache').unlink(missing_ok=True)
    raise


def run(
  parser: Parser, command: Callable[[argparse.Namespace], int | None], argv: Sequence[str] | None, stopped: str
) -> int:
  """Run a command and return its exit code, 0 for None; print `stopped` where a signal ends it."""
  with streams.lossy():
    return _run(parser, command, argv, stopped)


def _run(parser: Parser, command: Callable, argv: Sequence[str] | None, stopped: str) -> int:
  argv = list(sys.argv[1:] if argv is None else argv)
  args = argparse.Namespace()
  try:
    with streams.prepared():
      _check_encoded(argv)
      args = parser.parse_args(list(map(parser.spelled, argv)))
      compilation_cache(args.compilation_cache)
      with interrupt.handled():
        for name in args.imports:
          names.module(name)
        return command(args) or 0
  except KeyboardInterrupt as stop:
    print(stopped, file=sys.stderr)
    return 143 if isinstance(stop, interrupt.Ended) else 130
  except FAILURES as error:
    if '--debug' in argv:
      raise
    unread = isinstance(error, BrokenPipeError) and streams.unread()
    streams.discard()
    if unread:
      return 141
    print(f'error: {_with_options(_message(error), parser, args)}', file=sys.stderr)
    return 1


def _check_encoded(argv: Sequence[str]):
  """Raise for an argument, or a working directory, whose bytes are no text: no file of ours could name it."""
  for name in (*argv, os.getcwd()):
    try:
      name.encode()
    except UnicodeEncodeError:
      raise RunError(f'{name!r} is not UTF-8: rename the file or folder.') from None


def _with_options(text: str, parser: Parser, args: argparse.Namespace) -> str:
  """Return a message in which an option's name replaces that of the Python argument which it sets."""
  for action in parser._actions:
    value = getattr(args, action.dest, None)
    if action.option_strings and value is not None:
      option = action.option_strings[0] if value is True else f'{action.option_strings[0]}={value}'
      given = '|'.join(re.escape(form(value)) for form in (repr, str))
      text = re.sub(rf'\b(?<!-){action.dest}=(?:{given})(?![\w.])', lambda _, option=option: option, text)
  return text


def _message(error: Exception) -> str:
  """Return the message of an error, complete for a RunError, else its first line."""
  text = str(error).strip() or type(error).__name__
  if isinstance(error, RunError):
    return text
  if isinstance(error, OSError) and error.errno in storage.FULL:
    path = error.filename or 'a file'
    return f'{path} cannot be written ({error.strerror}): free some space, then run the same command again.'
  first, *more = text.splitlines()
  text = f'{first} … (--debug shows all of it)' if more else first
  return f'{text}. Where another process died, that is why. {multihost.AGAIN}' if multihost.ended(error) else text
