"""The host side of decoding: prefill prompts, insert them into rows of a batch, run rounds, collect what has ended.

`loop.py` has what runs on the device, `scheduler.py` the queue.
"""

from collections.abc import Iterator, Sequence
import concurrent.futures
import dataclasses
import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speccascade import backends
from speccascade.backends import sharding
from speccascade.engine import inputs, loop, requests, validate
from speccascade.engine.job import DecodeJob
from speccascade.engine.joined import split
from speccascade.engine.lowering import lower, Lowered, Start
from speccascade.engine.state import cache_slots, State
from speccascade.host.errors import first_line, out_of_memory
from speccascade.host.memo import memo
from speccascade.types import Array, Prompt

ROUNDS = 16  # of a first run, and of every run of several processes, whose clocks differ
SECONDS = 0.5  # a run of one process that takes less is followed by one of twice as many rounds
_THREADS = concurrent.futures.ThreadPoolExecutor()  # they wait for the device, so that a signal interrupts the caller
_LOWER = 'lower max_new_tokens, max_prompt_tokens or batch_size'


class Running(NamedTuple):
  """Rounds that were started on the device."""

  state: Any
  like: State  # a state with arrays as those of the rows that are copied
  joined: Sequence[Array]  # what is copied to the host, the rows of one after those of another
  ended: int  # the run is over when so many rows are free or have ended
  left: int  # rounds of the run after them


class Side:
  """What is prepared of a job on the devices of one mesh: its program, the parameters, caches of prompts.

  Args:
    job: The job.
    method: Its method, or what of that runs here.
    start: What the first state depends on.
    size: The rows of a batch.
    held: The slots whose models lie here; None: all.
    batches: How many batches there are at once.
  """

  def __init__(
    self, job: DecodeJob, method: Lowered, start: Start, size: int, held: Sequence[int] | None = None, batches: int = 1
  ):
    models = [job.models[m] for m in method.slots]
    slots = [m if held is None or i in held else m.replace(params=None) for i, m in enumerate(models)]
    self.method = method
    self.start = start
    self.needs = requests.features(job.rows)
    self.size = size
    self.batches = batches
    self.width = job.width
    self.vocab = inputs.vocabulary(job.models)
    buffer = loop.positions(models[-1].network, job.width, job.max_new, method.beyond)
    layout = sharding.layout_for(slots)
    backend, self.params = backends.prepared(slots, layout)
    given = [x for s in slots for x in jax.tree.leaves(s.params) if isinstance(x, jax.Array)]
    self.weights = given, self.params  # a backend's copies, and what they were made of
    networks = tuple(s.network for s in slots)
    sizes = buffer, self.vocab, backend, job.trace, self.needs.top
    self.program = loop.Program(networks, cache_slots(models), *sizes, eos_ids=job.eos_ids)
    if held is not None:
      shown = tuple(range(len(slots))) if method.branches > 1 else tuple(held)  # in turn, each side tests
      drafts = any(phase.draws for phase in method.parts)
      self.program = dataclasses.replace(self.program, held=tuple(held), shown=shown, drafts=drafts)
    self.fits = set()  # how many prompts may be read at once

  def prefill(self, prompts: Sequence[np.ndarray], size: int) -> tuple:
    """Read prompts, padded to `size` of them; return their caches, the prefix of the rows that continue them."""
    if size not in self.fits:
      _check_memory(self, size)
      self.fits.add(size)
    return self.read(self.params, inputs.pad(prompts, size, self.width))

  def read(self, params: tuple, prompt: Prompt) -> tuple:
    """Return the caches of padded prompts, as long as these."""
    cache_len = min(self.width, self.program.buffer)  # an encoder–decoder's prompt may be longer than its output
    return loop.caches_of(self.program, params, prompt, cache_len)

  def insert_batch(
    self, rows: Sequence[requests.RequestRow], source: Sequence[int] | None, target: Sequence[int]
  ) -> loop.InsertBatch:
    """Return requests as arrays, for `begin` and `insert`.

    Args:
      rows: The requests, at most `size`.
      source: The row of the prefix that each continues; None: each its own.
      target: The row of the batch that each gets.
    """

    def pad(x):
      return np.asarray([*x, *[0] * (self.size - len(x))], np.int32)

    arrays = requests.arrays(rows, self.needs, self.size, self.width, self.vocab)
    return loop.InsertBatch(arrays, None if source is None else pad(source), pad(target), np.int32(len(rows)))

  @property
  def remembers(self) -> bool:
    """Whether a network remembers outputs."""
    return any(n.remembers for n in self.program.networks)

  def remember(self, texts: Sequence[tuple[np.ndarray, int]]):
    """Let the networks that remember outputs have those that ended: tokens, and where the output begins."""
    pairs = zip(self.program.networks, self.params, strict=True)
    self.params = backends.Parameters(p if p is None else n.remember(p, texts) for n, p in pairs)


class Runner:
  """Rounds that were started, which the host waits for; what starts them is `_start`."""

  def __init__(self, job: DecodeJob, side: Side):
    self.size = job.size
    self.positions = f'{job.width} prompt tokens and {side.program.buffer} positions'
    self.processor = validate.check_processor(job.processor, side.vocab, side.program.buffer)
    self.rounds_at_once = ROUNDS
    self.latest = None  # what was last copied to the host

  def run(
    self, state: Any, *, ended: int | None = None, rounds: int = loop.FOREVER, stop: np.ndarray | None = None
  ) -> Running:
    """Start rounds on the device.

    Args:
      state: The state, which is donated.
      ended: The loop is left when so many rows are free or have ended; None: when all have.
      rounds: The most rounds.
      stop: [size] rows that are ended before the first round.

    Returns:
      The handle that `collect` waits for.
    """
    self.latest = None
    return self._start(state, self.size if ended is None else ended, rounds, stop)

  def _start(self, state: Any, ended: int, rounds: int, stop: np.ndarray | None = None) -> Running:
    """Start so many of the rounds that signals are answered in time."""
    raise NotImplementedError

  def collect(self, running: Running) -> tuple[Any, dict[str, Any]]:
    """Wait for the device, some rounds at a time so that Ctrl-C and SIGTERM are answered.

    Args:
      running: What `run` returned.

    Returns:
      The state, and arrays on the host with the rows of the batch in front. Where it raises, `latest` has those that
      were copied before.
    """
    while True:
      since = time.monotonic()
      self._wait(running)
      self.latest = self._to_host(running)
      if self.latest['done'].sum() >= running.ended:
        return running.state, self.latest
      if not running.left:
        return running.state, self.latest
      if time.monotonic() - since < SECONDS and jax.process_count() == 1:  # for all of its rounds
        self.rounds_at_once = min(2 * self.rounds_at_once, loop.FOREVER)
      running = self._start(running.state, running.ended, running.left)

  def _to_host(self, running: Running) -> dict[str, Any]:
    """Copy the joined array to the host, and return the arrays that were joined into it."""
    joined = [np.asarray(x) for x in running.joined]
    return split(np.concatenate(joined) if len(joined) > 1 else joined[0], loop.host_arrays(running.like))

  def _wait(self, running: Running):
    """Wait so that Python answers signals."""
    try:
      # It raises what the program raised; to copy such an array may take for ever.
      _THREADS.submit(jax.block_until_ready, running.joined).result()
    except jax.errors.JaxRuntimeError as error:
      if not out_of_memory(error):
        raise
      problem = f'{self.size} rows of {self.positions} do not fit into memory'
      raise MemoryError(f'{problem} ({first_line(error)}): {_LOWER}.') from None


class Engine(Side, Runner):
  """The program of a job: `prefill`, `insert`, `run`, `collect`."""

  def __init__(self, job: DecodeJob):
    method = lower(job.method.at(job.size))
    Side.__init__(self, job, method, method.start, job.size)
    Runner.__init__(self, job, self)

  def begin(self, prefix: tuple, batch: loop.InsertBatch) -> State:
    """Return the state of a first batch, request i in row i."""
    return loop.begin(self.program, self.start, self.params, prefix, batch)

  def insert(self, prefix: tuple, batch: loop.InsertBatch, state: State) -> State:
    """Put requests into their rows of a running batch."""
    return loop.insert(self.program, self.start, prefix, batch, state)

  def _start(self, state: State, ended: int, rounds: int, stop: np.ndarray | None = None) -> Running:
    stop = np.zeros(self.size, bool) if stop is None else stop
    now = min(rounds, self.rounds_at_once)
    run = loop.compiled_with(backends.known(self.program.backend.xla))
    stop_at = np.array([ended, now], np.int32)
    state, joined = run(self.program, self.method, self.params, state, stop, stop_at, self.processor)
    return Running(state, state, [joined], ended, rounds - now)


def _check_memory(engine: Side, prompts: int) -> None:
  """Refuse caches of a batch and a prefill that with the weights are more than the device has."""
  dtypes = tuple(x.dtype for x in jax.tree.leaves(engine.params))
  known = memo(engine.program, engine.size * engine.batches, engine.width, prompts, dtypes)
  if known:  # to ask costs as much as some rounds
    return
  caches = _cache_bytes(engine, prompts)
  reading = _read_bytes(engine, prompts)
  weights = _weight_bytes(engine.weights)
  arrays = (x for x in jax.tree.leaves(engine.params) if isinstance(x, jax.Array))
  device = next((d for x in arrays for d in x.sharding.addressable_devices), jax.local_devices()[0])
  limit = backends.memory(device)
  if caches + reading + weights > limit:
    raise ValueError(
      f'{engine.size * engine.batches} rows of {engine.width} prompt tokens and {engine.program.buffer} positions need '
      f'{caches / 2**30:.1f} GiB of caches and {reading / 2**30:.1f} GiB to read {prompts} prompts, with '
      f'{weights / 2**30:.1f} GiB of weights more than the {limit / 2**30:.1f} GiB of {device}: {_LOWER}.'
    )
  known['fits'] = True


def _cache_bytes(engine: Side, prompts: int) -> int:
  """Return the bytes on a device of the caches of a batch and of the prompts that are read for it."""
  program = engine.program
  params = engine.params
  rows = engine.size * engine.batches
  batch, prefix = _prompt_shapes(engine, rows), _prompt_shapes(engine, prompts)
  shapes = loop.cache_shapes(program, params, batch), jax.eval_shape(engine.read, params, prefix)
  return sum(program.layout.bytes(x, program.cached_layout.caches(x)) for x in shapes)


def _prompt_shapes(engine: Side, rows: int) -> Prompt:
  """Return the shapes of so many padded prompts."""
  return Prompt(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, engine.width), (rows,))))


def _read_bytes(engine: Side, prompts: int) -> int:
  """Return about the bytes on a device of what is alive while prompts are read: twice the largest product.

  With long prompts that is a layer's attention scores, which are alive with their softmax.
  """
  products = _products(jax.make_jaxpr(engine.read)(engine.params, _prompt_shapes(engine, prompts)).jaxpr)
  largest = max((math.prod(x.shape) * x.dtype.itemsize for x in products), default=0)
  layout = engine.program.layout
  return 2 * largest // (layout.devices if layout.shards_models else layout.row_shards)


def _products(jaxpr: Any) -> Iterator[Any]:
  """Yield the abstract values of the matrix products of a program, also of its loops and branches."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'dot_general':
      yield equation.outvars[0].aval
    for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, 'jaxpr')):
      if hasattr(inner, 'jaxpr'):
        yield from _products(inner.jaxpr)


def _weight_bytes(weights: Any) -> int:
  """Return the bytes of arrays on a device, each counted once."""
  arrays = {id(x): x for x in jax.tree.leaves(weights)}.values()

  def shape_of(x):
    return x.sharding.shard_shape(x.shape) if isinstance(x, jax.Array) else x.shape

  return sum(math.prod(shape_of(x)) * x.dtype.itemsize for x in arrays)
