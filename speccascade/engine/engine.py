"""The engine: prefill prompts, insert them into free rows of a batch, run the method's phases, collect what has ended.

`loop.py` runs on the device. Between two calls of `run` nothing crosses to the host; each is meant to take about
a second, so that Ctrl-C and SIGTERM are answered.
"""

from collections.abc import Callable, Sequence
import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speccascade import backends
from speccascade.backends import sharding
from speccascade.engine import inputs, loop, requests, validate
from speccascade.engine.state import cache_owners, State
from speccascade.types import Array, Model, Prompt

FIRST = 5e10  # bytes of weights and caches times tokens of a first run
SECONDS = 1.0  # of a run
_LOWER = 'lower max_new_tokens, max_prompt_tokens or batch_size'
_NO_MEMORY = 'RESOURCE_EXHAUSTED', 'Out of memory'  # in an error of XLA


class Engine:
  """A method with its models, for requests of given sizes: the words of `prefill → insert → run → collect`."""

  def __init__(self, method, models: Sequence[Model], *, needs: requests.Features, size: int, width: int, max_new: int,
               trace: bool = False, processor: Callable | None = None):  # fmt: skip
    slots = [models[m] for m in method.slots]
    last = slots[-1].network
    buffer = loop.positions(last, width, max_new, method.window)
    self.method, self.needs, self.size, self.width = method, needs, size, width
    self.vocab = inputs.vocabulary(models)
    layout = sharding.of(slots, size, method.window, self.vocab)
    backend, self.params = backends.prepared(slots, layout)
    given = [x for s in slots for x in jax.tree.leaves(s.params) if isinstance(x, jax.Array)]
    self.weights = given, self.params  # a backend's copies are held as well as what they were made of
    networks = tuple(s.network for s in slots)
    self.program = loop.Program(networks, cache_owners(slots), buffer, self.vocab, backend, trace, needs.top)
    self.fits = set()  # how many prompts may be read at once
    self.processor = validate.check_processor(processor, self.vocab, buffer)
    self.pace = None  # rounds of a run
    self.length, self.stuck = None, 0  # of the rows when they were collected, and rounds since one of them grew

  def prefill(self, prompts: Sequence[np.ndarray], size: int) -> tuple:
    """Read prompts, padded to `size` of them; return their caches, the prefix of the rows that continue them."""
    if size not in self.fits:
      caches = _check_memory(self, size)
      self.fits.add(size)
      self.pace = self.pace or self._first_pace(caches)
    return self.read(self.params, inputs.pad(prompts, size, self.width))

  def _first_pace(self, caches: int) -> int:
    """Return how many rounds the first run may have, until it is known how long one takes."""
    if jax.process_count() > 1:  # which have to run the same rounds, and whose clocks differ
      return loop.FOREVER
    weights = sum(x.nbytes for x in jax.tree.leaves(self.params))
    return max(1, int(FIRST / ((weights * self.size + caches) * self.method.window + 1)))

  def read(self, params: tuple, prompt: Prompt) -> tuple:
    """Return the caches of padded prompts, as long as these."""
    room = min(self.width, self.program.buffer)  # an encoder–decoder's prompt may be longer than its output
    return loop.caches_of(self.program, params, prompt, room)

  def arrival(self, rows: Sequence[requests.Row], source: Sequence[int] | None, target: Sequence[int]) -> loop.Arrival:
    """Return rows with the prompts of a prefix that they continue, None for each its own, and their places."""
    pad = lambda x: np.asarray([*x, *[0] * (self.size - len(x))], np.int32)
    arrays = requests.arrays(rows, self.needs, self.size, self.width, self.vocab)
    return loop.Arrival(arrays, None if source is None else pad(source), pad(target), np.int32(len(rows)))

  def begin(self, prefix: tuple, arrival: loop.Arrival) -> State:
    """Return a batch of rows, the first in place 0 and so on."""
    self.length, self.stuck = None, 0
    return loop.begin(self.program, self.method, self.params, prefix, arrival)

  def insert(self, prefix: tuple, arrival: loop.Arrival, state: State) -> State:
    """Put rows into their places of the batch."""
    self.length, self.stuck = None, 0
    return loop.insert(self.program, self.method, prefix, arrival, state)

  def run(
    self, state: State, *, ended: int | None = None, rounds: int = loop.FOREVER, stop: np.ndarray | None = None
  ) -> tuple[State, Array]:
    """Run until `ended` rows are not in use, or for at most so many rounds; return the state and what `collect` takes.

    Before that, end the rows of the mask `stop`.
    """
    stop = np.zeros(self.size, bool) if stop is None else stop
    self.ended, self.rounds = self.size if ended is None else ended, min(rounds, self.pace)
    until = np.array([self.ended, self.rounds], np.int32)
    run = loop.compiled_with(backends.known(self.program.backend.xla))
    found = run(self.program, self.method, self.params, state, stop, until, self.processor)
    self.since = time.monotonic()
    return found

  def collect(self, packed: Array, state: State) -> dict[str, Any]:
    """Wait for the device and return what came to the host, arrays with rows in front."""
    late = self._wait(packed)
    whole = np.asarray(packed)
    leaves, structure = jax.tree.flatten(loop.wanted(state))
    ends = np.cumsum([math.prod(x.shape[1:]) for x in leaves])
    parts = np.split(whole, ends[:-1], axis=1)
    typed = [part.view(x.dtype) if x.dtype == np.float32 else part for part, x in zip(parts, leaves, strict=True)]
    found = structure.unflatten([part.reshape(x.shape) for part, x in zip(typed, leaves, strict=True)])
    if found['done'].sum() < self.ended:  # all rounds have passed
      self._look(found['length'], late)
    return found

  def _wait(self, packed: Array) -> float | None:
    """Wait for a run, so that Python answers signals; return its seconds, None where it ended while nobody looked."""
    start, late = time.monotonic(), not packed.is_ready()
    while not packed.is_ready():
      time.sleep(min(0.01, max(1e-4, (time.monotonic() - start) / 20)))
    end = time.monotonic()
    try:
      packed.block_until_ready()  # raises what the program raised; to copy it to the host may then take for ever
    except jax.errors.JaxRuntimeError as error:
      if not any(sign in str(error) for sign in _NO_MEMORY):
        raise
      sizes = f'{self.width} prompt tokens and {self.program.buffer} positions'
      said = f'{self.size} rows of {sizes} do not fit into memory'
      raise MemoryError(f'{said} ({str(error).splitlines()[0]}): {_LOWER}.') from None
    return end - self.since if late else None

  def _look(self, length: np.ndarray, seconds: float | None):
    """Note how many rounds the next run may have, and refuse to go on where none commits a token."""
    self.stuck = self.stuck + self.rounds if np.array_equal(length, self.length) else 0
    self.length = length
    if self.stuck > self.method.turns(self.size):
      raise ValueError(
        f'{self.method.name}: {self.stuck} rounds have committed no token of {self.size} rows; every round must end in '
        'a Verify whose models have scored what is pending, as those of speccascade.methods do.'
      )
    if seconds is not None and self.pace < loop.FOREVER:
      self.pace = int(min(max(1, self.rounds * SECONDS / max(seconds, 1e-6)), 8 * self.rounds))


def _check_memory(engine: Engine, prompts: int) -> int:
  """Return the bytes of a batch's caches and a prefill's; refuse what with the weights is more than the device has."""
  arrays = (x for x in jax.tree.leaves(engine.params) if isinstance(x, jax.Array))
  device = next((d for x in arrays for d in x.sharding.addressable_devices), jax.local_devices()[0])
  dtypes = tuple(x.dtype for x in jax.tree.leaves(engine.params))
  known = validate.remembered(engine.program, engine.size, engine.width, prompts, dtypes)
  if 'bytes' not in known:  # to ask costs as much as some rounds
    known['bytes'] = _cache_bytes(engine, prompts)
  caches, weights, limit = known['bytes'], _weight_bytes(engine.weights), backends.memory(device)
  if caches + weights > limit:
    raise ValueError(
      f'{engine.size} rows of {engine.width} prompt tokens and {engine.program.buffer} positions need '
      f'{caches / 2**30:.1f} GiB of caches, with {weights / 2**30:.1f} GiB of weights more than the '
      f'{limit / 2**30:.1f} GiB of {device}: {_LOWER}.'
    )
  return caches


def _cache_bytes(engine: Engine, prompts: int) -> int:
  """Return the bytes on a device of the caches of a batch and of the prompts that are read for it."""
  program, params = engine.program, engine.params
  ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  shapes = [
    jax.eval_shape(make, params, Prompt(ints(rows, engine.width), ints(rows)))
    for make, rows in ((functools.partial(loop.caches_of, program), engine.size), (engine.read, prompts))
  ]
  if program.layout is None:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))
  return sum(program.layout.bytes(x, program.cached_layout.caches(x)) for x in shapes)


def _weight_bytes(weights: Any) -> int:
  """Return the bytes of arrays on a device, each counted once."""
  arrays = {id(x): x for x in jax.tree.leaves(weights)}.values()
  shape_of = lambda x: x.sharding.shard_shape(x.shape) if isinstance(x, jax.Array) else x.shape
  return sum(math.prod(shape_of(x)) * x.dtype.itemsize for x in arrays)
