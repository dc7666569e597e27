"""Several processes that run one program, a host each: the first writes, and the others know what it knows.

Every process makes the same calls in the same order. A call that touches files goes through `once`: the writer makes
it, and all get its value or its error. Nobody waits longer than `LIMIT` for another: a host that died ends the run,
with a sentence, or by JAX's own abort where JAX notices first. With one process all of this does nothing.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import itertools
import json
import os
import shlex
import time
from typing import Any, TypeVar

import jax
from jax.experimental import multihost_utils
import numpy as np

from speccascade.host import jax_private, streams
from speccascade.host.errors import first_line, RunError

T = TypeVar('T')
AGAIN = 'The same command on all hosts goes on from the last lines written; --host_timeout is how long they wait.'
NOT_FOUND = (
  'The processes of this run did not find each other{why}: start one on each host, all within --host_timeout seconds, '
  'and outside TPU slices, Slurm, Open MPI and Kubernetes set JAX_NUM_PROCESSES, '
  'JAX_PROCESS_ID and JAX_COORDINATOR_ADDRESS=HOST:PORT, a free port of the first host.'
)
# seconds; JAX counts milliseconds in 32 bits
LIMIT = 600.0
LONGEST = 1_000_000
BEFORE = 60.0  # that JAX waits longer for a heartbeat, for it ends the process without our error
PATIENCE = 5.0  # seconds that a failed process waits for the others to print why
PIECE = 1 << 20  # characters that the store takes at once
_turns = itertools.count()
_writing = False  # inside a call that the writer makes for all


def start(limit: float):
  """Connect the processes of this slice, which the environment (TPU, Slurm, Open MPI, Kubernetes) names."""
  global LIMIT
  given = _from_environment()
  LIMIT = limit
  jax.config.update('jax_enable_preemption_service', False)  # it would take SIGTERM, by which commands are ended
  try:
    jax.distributed.initialize(
      **given, initialization_timeout=int(limit), heartbeat_timeout_seconds=int(limit + BEFORE)
    )
    jax.devices()  # which all processes have to ask for together
  except Exception as error:  # what JAX raises where the environment of a cluster is not as it expects
    raise RunError(NOT_FOUND.format(why=f' ({first_line(error)})')) from error


def _from_environment() -> dict:
  """Return what JAX does not itself read from the environment, having checked what it does."""
  address = os.environ.get('JAX_COORDINATOR_ADDRESS')
  host, _, port = (address or '').rpartition(':')
  if address and not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
    raise RunError(f'JAX_COORDINATOR_ADDRESS={address} is not HOST:PORT, as in 10.0.0.1:1234.')
  settings = {}
  for name, least in (('num_processes', 1), ('process_id', 0)):
    variable = f'JAX_{name.upper()}'
    text = os.environ.get(variable)
    if text is not None and not (text.isdecimal() and int(text) >= least):
      raise RunError(f'{variable}={text} is not a whole number of at least {least}.')
    settings |= {} if text is None else {name: int(text)}
  return settings


def count() -> int:
  """Return how many processes run this program."""
  return jax_private.group().num_processes


def is_writer() -> bool:
  """Tell whether this process is the one that writes."""
  return jax_private.group().process_id == 0


def once(call: Callable[[], T]) -> T:
  """Return in all processes what a call, made by the writer alone, gives: JSON, or an error that all raise."""
  global _writing
  if count() == 1 or _writing:
    return call()
  if not is_writer():
    result = broadcast(None)
    if 'error' in result:
      raise RunError(result['error'])
    return result['value']
  _writing = True
  try:
    value = call()
  except BaseException as error:  # KeyboardInterrupt too: the others wait for a result
    broadcast({'error': str(error) or type(error).__name__})
    raise
  finally:
    _writing = False
  broadcast({'value': value})
  return value


@contextlib.contextmanager
def on_writer(manager: contextlib.AbstractContextManager) -> Iterator[None]:
  """Enter a context in the writer alone; its error on entering is raised in all."""
  with contextlib.ExitStack() as stack:

    def enter():
      stack.enter_context(manager)

    once(enter)
    yield


def broadcast(value: Any) -> Any:
  """Return the writer's value, which JSON can hold, in every process."""
  if count() == 1:
    return value
  client = jax_private.group().client
  key = f'speccascade/{next(_turns)}'
  if is_writer():
    text = json.dumps(value)
    pieces = [text[i : i + PIECE] for i in range(0, len(text), PIECE)]
    for i, piece in enumerate([str(len(pieces)), *pieces]):
      client.key_value_set(f'{key}/{i}', piece)
    return value
  with _waiting('The first process sent nothing'):

    def get(i):
      return client.blocking_key_value_get(f'{key}/{i}', int(LIMIT * 1000))

    return json.loads(''.join(get(i + 1) for i in range(int(get(0)))))


def barrier():
  """Wait until every process has come here."""
  if count() > 1:
    with _waiting('Another process did not come as far as this one'):
      jax_private.group().client.wait_at_barrier(f'speccascade/{next(_turns)}', int(LIMIT * 1000))


@contextlib.contextmanager
def _waiting(what: str):
  """Turn a wait that ended without a result into one sentence."""
  try:
    yield
  except RuntimeError as error:
    reason = str(error).partition(':')[0]
    raise RunError(f'{what}: it died, hangs, or needs more than {LIMIT:g} s ({reason}). {AGAIN}') from error


def ended(error: Exception) -> bool:
  """Tell whether an error may be that of a program of several processes, one of which is gone."""
  memory = str(error).startswith('RESOURCE_EXHAUSTED')
  return count() > 1 and isinstance(error, jax.errors.JaxRuntimeError) and not memory


def command_of_one_process(module: str, argv: Sequence[str]) -> str:
  """Return the command with which one process comes to the same results as shards or several processes."""
  arguments = []
  given = iter(argv)
  for argument in given:
    name, equals, _ = argument.replace('-', '_').partition('=')
    if name in ('__shard', '__host_timeout'):
      equals or next(given, None)
    elif name not in ('__merge', '__distributed'):
      arguments.append(argument)
  return shlex.join(['python', '-m', module, *arguments])


def cpus() -> int:
  """Return the CPUs that this process may use."""
  return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def threads() -> int:
  """Return how many threads may call programs at once: one, where processes must call them in one order."""
  return 1 if count() > 1 else cpus()


# ---- arrays of all processes ----


def to_host(tree: Any) -> Any:
  """Return a tree whose arrays are complete in this process; those sharded over several become numpy arrays."""
  return tree if count() == 1 else jax.tree.map(_to_host, tree)


def _to_host(x: Any) -> Any:
  if not isinstance(x, jax.Array) or x.is_fully_addressable:
    return np.asarray(x)
  if x.is_fully_replicated:
    return np.asarray(x.addressable_data(0))
  return multihost_utils.process_allgather(x, tiled=True)


def leave(code: int) -> int:
  """Return an exit code; of several processes, end one that failed at once, for JAX would wait for the others."""
  if code and count() > 1:
    streams.flush()
    with contextlib.suppress(RuntimeError, AttributeError):  # AttributeError: it had not started yet
      jax_private.group().client.wait_at_barrier('speccascade/leave', int(PATIENCE * 1000))
    if is_writer():
      time.sleep(PATIENCE / 10)  # JAX aborts those that still look for this one
    os._exit(code)
  return code
