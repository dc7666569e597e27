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

_MANY = 1 << 16  # positions of a batch from which its memory is looked at before it is compiled


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
      networks, cache_owners(slots, method.idle), buffer, self.vocab, backend, trace, needs.top, where
    )
    self.processor = targets.check_processor(processor, self.vocab, buffer)
    if size * buffer >= _MANY:
      _check_memory(self.program, size, self.params)

  def prefill(self, prompts: Sequence[np.ndarray], size: int) -> tuple:
    """Read prompts, padded to `size` of them; return their caches, the prefix of the rows that continue them."""
    networks, params = zip(*((self.program.networks[s], self.params[s]) for s in self.program.kept), strict=True)
    room = min(self.width, self.program.buffer)  # an encoder–decoder's prompt may be longer than its output
    prompt = inputs.pad(prompts, size, self.width)
    return loop.prefill(networks, self.program.backend, params, prompt, room, where=self.program.readers)

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


def _check_memory(program: loop.Program, size: int, params: tuple) -> None:
  """Refuse a batch whose caches and tokens alone are more than the device has."""
  prompt = Prompt(jax.ShapeDtypeStruct((size, 1), jnp.int32), jax.ShapeDtypeStruct((size,), jnp.int32))
  shapes, buffer = jax.eval_shape(functools.partial(loop.caches_of, program), params, prompt), program.buffer
  if program.where is None:
    caches = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))
  else:
    caches = program.where.bytes(shapes, program.readers.caches(shapes))
  arrays = (x for x in jax.tree.leaves(params) if isinstance(x, jax.Array))
  device = next((d for x in arrays for d in x.sharding.addressable_devices), jax.local_devices()[0])
  limit = (device.memory_stats() or {}).get('bytes_limit') or os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  if caches > limit:
    raise ValueError(
      f'{size} rows of {buffer} positions need {caches / 2**30:.1f} GiB of caches, more than the '
      f'{limit / 2**30:.1f} GiB of {device}: lower max_new_tokens, max_prompt_tokens or batch_size.'
    )
