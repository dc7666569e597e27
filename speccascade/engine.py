"""The engine: prefill prompts, insert them into free rows of a batch, run the method's phases, collect what has ended.

What it starts on the device stands in `loop.py`. Between two `run`s nothing crosses to the host; each is meant to take
about a second, so that Ctrl-C and SIGTERM are answered.
"""

from collections.abc import Callable, Sequence
import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speccascade import backends, inputs, layout, loop, requests
from speccascade.start import cache_owners
from speccascade.types import Array, Model, Prompt, State

_MANY = 1 << 16  # positions of a batch from which its memory is looked at before it is compiled
_FIRST = 5e10  # bytes of weights times tokens of a first run, until it is known how long a round takes
_SECONDS = 1.0  # of a run
_LOWER = 'lower max_new_tokens, max_prompt_tokens or batch_size'


class Engine:
  """A method with its models, for requests of given sizes: the words of `prefill → insert → run → collect`."""

  def __init__(self, method, models: Sequence[Model], *, needs: requests.Features, size: int, width: int, max_new: int,
               trace: bool = False, processor: Callable | None = None):  # fmt: skip
    method, slots = method.at(size), [models[m] for m in method.slots]
    last = slots[-1].network
    buffer = loop.positions(last, width, max_new, method.window)
    self.method, self.needs, self.size, self.width = method, needs, size, width
    self.vocab = inputs.vocabulary(models)
    where = layout.of(slots, size, method.window, self.vocab)
    backend, self.params = backends.prepared(slots, method.idle)
    networks = tuple(s.network for s in slots)
    self.program = loop.Program(
      networks, cache_owners(slots, method.idle), buffer, self.vocab, backend, trace, needs.top, processor, where
    )
    if size * buffer >= _MANY:
      _check_memory(self.program, size, self.params, width)
    work = sum(x.nbytes for x in jax.tree.leaves(self.params)) * size * method.window
    alone = jax.process_count() == 1  # several processes have to run the same rounds
    self.pace = max(1, int(_FIRST / work)) if alone and work else loop.FOREVER  # rounds of a run
    self.length, self.stuck = None, 0  # of the rows when they were collected, and rounds since one of them grew

  def prefill(self, prompts: Sequence[np.ndarray], size: int) -> tuple:
    """Read prompts, padded to `size` of them; return their caches, the prefix of the rows that continue them."""
    networks, params = zip(*((self.program.networks[s], self.params[s]) for s in self.program.kept), strict=True)
    room = min(self.width, self.program.buffer)  # an encoder–decoder's prompt may be longer than its output
    prompt = inputs.pad(prompts, size, self.width)
    return loop.prefill(networks, self.program.backend, params, prompt, room, where=self.program.readers)

  def arrival(self, rows: Sequence[requests.Row], source: Sequence[int] | None, target: Sequence[int]) -> loop.Arrival:
    """Return rows with the prompts of a prefix that they continue, None for each its own, and their places."""
    pad = lambda x: np.asarray([*x, *[0] * (self.size - len(x))], np.int32)
    arrays = requests.arrays(rows, self.needs, self.size, self.width, self.vocab)
    return loop.Arrival(arrays, None if source is None else pad(source), pad(target), np.int32(len(rows)))

  def begin(self, prefix: tuple, arrival: loop.Arrival) -> State:
    """Return a batch of rows, the first in place 0 and so on."""
    return loop.begin(self.program, self.method, self.params, prefix, arrival)

  def insert(self, prefix: tuple, arrival: loop.Arrival, state: State) -> State:
    """Put rows into their places of the batch."""
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
    found = run(self.program, self.method, self.params, state, stop, until)
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
      time.sleep(min(0.01, max(1e-3, (time.monotonic() - start) / 100)))
    end = time.monotonic()
    try:
      packed.block_until_ready()  # raises what the program raised; to copy it to the host may then take for ever
    except jax.errors.JaxRuntimeError as error:
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      said = f'{self.size} rows of {self.program.buffer} positions do not fit into memory'
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
      self.pace = int(min(max(1, self.rounds * _SECONDS / max(seconds, 1e-6)), 8 * self.rounds))


def _check_memory(program: loop.Program, size: int, params: tuple, width: int) -> None:
  """Refuse a batch whose caches, with those of a prefill of half as many prompts, are more than the device has."""
  prompt = Prompt(jax.ShapeDtypeStruct((size, width), jnp.int32), jax.ShapeDtypeStruct((size,), jnp.int32))

  def needed(buffer: int) -> int:
    shapes = jax.eval_shape(functools.partial(loop.caches_of, program._replace(buffer=buffer)), params, prompt)
    if program.where is None:
      return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    return program.where.bytes(shapes, program.readers.caches(shapes))

  caches = needed(program.buffer) + needed(min(width, program.buffer)) // 2
  arrays = (x for x in jax.tree.leaves(params) if isinstance(x, jax.Array))
  device = next((d for x in arrays for d in x.sharding.addressable_devices), jax.local_devices()[0])
  limit = backends.memory(device)
  if caches > limit:
    raise ValueError(
      f'{size} rows of {program.buffer} positions need {caches / 2**30:.1f} GiB of caches, more than the '
      f'{limit / 2**30:.1f} GiB of {device}: {_LOWER}.'
    )
