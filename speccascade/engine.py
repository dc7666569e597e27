"""The engine: prefill prompts, insert them into free rows of a batch, run the method's phases, collect what has ended.

What it starts on the device stands in `loop.py`. Between two `run`s nothing crosses to the host.
"""

from collections.abc import Callable, Sequence
import functools
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speccascade import backends, inputs, layout, loop, requests, targets
from speccascade.start import cache_owners
from speccascade.types import Array, Model, Prompt, State

_NEEDED: dict[tuple, tuple[int, int, jax.Device]] = {}  # bytes of caches and weights on a device, by program and sizes


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
    self.weights = [s.params for s in slots], self.params  # a backend's copies stand beside what they were made of
    networks = tuple(s.network for s in slots)
    self.program = loop.Program(
      networks, cache_owners(slots, method.idle), buffer, self.vocab, backend, trace, needs.top, where
    )
    self.processor = targets.check_processor(processor, self.vocab, buffer)

  def prefill(self, prompts: Sequence[np.ndarray], size: int) -> tuple:
    """Read prompts, padded to `size` of them; return their caches, the prefix of the rows that continue them."""
    _check_memory(self, size)
    return self.read(self.params, inputs.pad(prompts, size, self.width))

  def read(self, params: tuple, prompt: Prompt) -> tuple:
    """Return the caches of padded prompts, as long as these."""
    room = min(self.width, self.program.buffer)  # an encoder–decoder's prompt may be longer than its output
    return loop.caches_of(self.program, params, prompt, room)

  def arrival(self, rows: Sequence[requests.Row], source: Sequence[int], target: Sequence[int]) -> loop.Arrival:
    """Return rows with the prompts of a prefix that they continue and the places that they take."""
    pad = lambda x: np.asarray([*x, *[0] * (self.size - len(x))], np.int32)
    arrays = requests.arrays(rows, self.needs, self.size, self.width, self.vocab)
    return loop.Arrival(arrays, pad(source), pad(target), np.int32(len(rows)))

  def empty(self, arrival: loop.Arrival) -> State:
    """Return a batch of which no row is in use, for rows such as these."""
    return loop.empty(self.program, self.method, self.params, arrival.rows)

  def insert(self, prefix: tuple, arrival: loop.Arrival, state: State) -> State:
    """Put rows into their places of the batch."""
    return loop.insert(self.program, self.method, prefix, arrival, state)

  def run(self, state: State | None, insert: tuple[tuple, loop.Arrival] | None = None, *, ended: int | None = None,
          rounds: int = loop.FOREVER, stop: np.ndarray | None = None) -> tuple[State, Array]:  # fmt: skip
    """Run until `ended` rows are not in use or `rounds` have passed; return the state and what `collect` takes.

    Before that, end the rows of the mask `stop`, and insert rows; where state is None they are the batch. It is one
    program, for each that the host starts costs as much as a small model's step.
    """
    stop = np.zeros(self.size, bool) if stop is None else stop
    if state is None and (insert[1].source[: insert[1].count] == np.arange(insert[1].count)).all():
      insert = insert[0], insert[1].replace(source=None)
    until = np.array([self.size if ended is None else ended, rounds], np.int32)
    run = loop.compiled_with(backends.known(self.program.backend.xla))
    return run(self.program, self.method, self.params, state, insert, stop, until, self.processor)

  def collect(self, packed: Array, state: State) -> dict[str, Any]:
    """Wait for the device and return what came to the host, arrays with rows in front."""
    whole = np.asarray(packed)
    leaves, structure = jax.tree.flatten(loop.wanted(state))
    ends = np.cumsum([math.prod(x.shape[1:]) for x in leaves])
    parts = np.split(whole, ends[:-1], axis=1)
    typed = [part.view(x.dtype) if x.dtype == np.float32 else part for part, x in zip(parts, leaves, strict=True)]
    return structure.unflatten([part.reshape(x.shape) for part, x in zip(typed, leaves, strict=True)])


def _check_memory(engine: Engine, prompts: int) -> None:
  """Refuse a batch whose caches, those of a prefill of so many prompts and weights are more than the device has."""
  key = engine.program, engine.size, engine.width, prompts
  if key not in _NEEDED:
    arrays = (x for x in jax.tree.leaves(engine.params) if isinstance(x, jax.Array))
    device = next((d for x in arrays for d in x.sharding.addressable_devices), jax.local_devices()[0])
    _NEEDED[key] = _cache_bytes(engine, prompts), _weight_bytes(engine.weights), device
  caches, weights, device = _NEEDED[key]
  limit = (device.memory_stats() or {}).get('bytes_limit') or os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  if caches + weights > limit:
    raise ValueError(
      f'{engine.size} rows of {engine.width} prompt tokens and {engine.program.buffer} positions need '
      f'{caches / 2**30:.1f} GiB of caches, with {weights / 2**30:.1f} GiB of weights more than the '
      f'{limit / 2**30:.1f} GiB of {device}: lower max_new_tokens, max_prompt_tokens or batch_size.'
    )


def _cache_bytes(engine: Engine, prompts: int) -> int:
  """Return the bytes on a device of the caches of a batch and of the prompts that are read for it."""
  program, params = engine.program, engine.params
  ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  shapes = [
    jax.eval_shape(make, params, Prompt(ints(rows, engine.width), ints(rows)))
    for make, rows in ((functools.partial(loop.caches_of, program), engine.size), (engine.read, prompts))
  ]
  if program.where is None:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))
  return sum(program.where.bytes(x, program.readers.caches(x)) for x in shapes)


def _weight_bytes(weights: Any) -> int:
  """Return the bytes of arrays on a device, each counted once."""
  arrays = {id(x): x for x in jax.tree.leaves(weights)}.values()
  shape_of = lambda x: x.sharding.shard_shape(x.shape) if isinstance(x, jax.Array) else x.shape
  return sum(math.prod(shape_of(x)) * x.dtype.itemsize for x in arrays)
