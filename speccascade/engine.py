"""The engine: prefill prompts, insert them into free rows of a batch, run the method's phases, collect what has ended.

One jitted `lax.while_loop` around the phases, over static shapes. Rows end by mask; every array of the state has its
rows on axis 0, so that a request takes its row by one `tree.map`. Between two `run`s nothing crosses to the host.
"""

from collections.abc import Callable, Sequence
import functools
import math
import os
from typing import Any, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from speccascade import backends, inputs, methods, probs, requests
from speccascade.phases import run as run_phases
from speccascade.start import cache_owners, first_state
from speccascade.types import Array, Context, Limits, Model, Network, Prompt, State

FOREVER = np.iinfo(np.int32).max
_MANY = 1 << 16  # positions of a batch from which its memory is looked at before it is compiled


class Program(NamedTuple):
  """What is compiled in, beside the method's structure and the shapes."""

  networks: tuple[Network, ...]
  owners: tuple[int, ...]  # the slot of the method in whose cache each slot works
  buffer: int  # positions of a row
  vocab: int
  backend: backends.Backend = backends.Backend()
  trace: bool = False  # whether log-probabilities are noted
  top: int = 0  # how many of the likeliest tokens are noted
  processor: Callable | None = None

  @property
  def kept(self) -> list[int]:
    """The slots that have a cache."""
    return sorted(set(self.owners))


@struct.dataclass
class Arrival:
  """Rows that take their places: row i of `rows` reads row source[i] of a prefix and goes to place target[i]."""

  rows: requests.Arrays  # [B]
  source: Array  # [B]
  target: Array  # [B]
  count: Array  # how many of them are meant


class Engine:
  """A method with its models, for requests of given sizes: the words of `prefill → insert → run → collect`."""

  def __init__(self, method, models: Sequence[Model], *, needs: requests.Features, size: int, width: int, max_new: int,
               trace: bool = False, processor: Callable | None = None):  # fmt: skip
    slots = [models[m] for m in method.slots]
    last = slots[-1].network
    buffer = positions(last, width, max_new, method.window)
    self.method, self.needs, self.size, self.width = method, needs, size, width
    self.vocab = inputs.vocabulary(models)
    backend, self.params = backends.prepared(slots)
    self.program = Program(
      tuple(s.network for s in slots), cache_owners(slots), buffer, self.vocab, backend, trace, needs.top, processor
    )

    if size * buffer >= _MANY:
      _check_memory(self.program.networks, self.program.backend, size, buffer, self.params)

  def prefill(self, prompts: Sequence[np.ndarray], size: int) -> tuple:
    """Read prompts, padded to `size` of them; return their caches, the prefix of the rows that continue them."""
    networks, params = zip(*((self.program.networks[s], self.params[s]) for s in self.program.kept), strict=True)
    room = min(self.width, self.program.buffer)  # an encoder–decoder's prompt may be longer than its output
    return prefill(networks, self.program.backend, params, inputs.pad(prompts, size, self.width), room)

  def arrival(self, rows: Sequence[requests.Row], source: Sequence[int], target: Sequence[int]) -> Arrival:
    """Return rows with the prompts of a prefix that they continue and the places that they take."""
    pad = lambda x: np.asarray([*x, *[0] * (self.size - len(x))], np.int32)
    arrays = requests.arrays(rows, self.needs, self.size, self.width, self.vocab)
    return Arrival(arrays, pad(source), pad(target), np.int32(len(rows)))

  def empty(self, arrival: Arrival) -> State:
    """Return a batch of which no row is in use, for rows such as these."""
    return _empty(self.program, self.method, self.params, arrival.rows)

  def insert(self, prefix: tuple, arrival: Arrival, state: State) -> State:
    """Put rows into their places of the batch."""
    return _insert(self.program, self.method, prefix, arrival, state)

  def run(self, state: State | None, insert: tuple[tuple, Arrival] | None = None, *, ended: int | None = None,
          rounds: int = FOREVER, stop: np.ndarray | None = None) -> tuple[State, Array]:  # fmt: skip
    """Run until `ended` rows are not in use or `rounds` have passed; return the state and what `collect` takes.

    Before that, end the rows of the mask `stop`, and insert rows, into a new batch where state is None: in one program,
    for each that the host starts costs as much as a small model's step.
    """
    stop = np.zeros(self.size, bool) if stop is None else stop
    until = np.array([self.size if ended is None else ended, rounds], np.int32)
    return run(self.program, self.method, self.params, state, insert, stop, until)

  def collect(self, packed: Array, state: State) -> dict[str, Any]:
    """Wait for the device and return what came to the host, arrays with rows in front."""
    whole = np.asarray(packed)
    leaves, structure = jax.tree.flatten(_wanted(state))
    ends = np.cumsum([x[0].size for x in leaves])
    parts = np.split(whole, ends[:-1], axis=1)
    typed = [part.view(x.dtype) if x.dtype == np.float32 else part for part, x in zip(parts, leaves, strict=True)]
    return structure.unflatten([part.reshape(x.shape) for part, x in zip(typed, leaves, strict=True)])


def _check_memory(networks, backend, size: int, buffer: int, params: tuple) -> None:
  """Refuse a batch whose caches and tokens alone are more than the device has."""
  prompt = Prompt(jax.ShapeDtypeStruct((size, 1), jnp.int32), jax.ShapeDtypeStruct((size,), jnp.int32))
  read = functools.partial(prefill, networks, backend, room=buffer)
  caches = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(read, params, prompt)))
  device = next((d for x in jax.tree.leaves(params) if isinstance(x, jax.Array) for d in x.devices()), jax.devices()[0])
  limit = (device.memory_stats() or {}).get('bytes_limit') or os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  if caches > limit:
    raise ValueError(
      f'{size} rows of {buffer} positions need {caches / 2**30:.1f} GiB of caches, more than the '
      f'{limit / 2**30:.1f} GiB of {device}: lower max_new_tokens, max_prompt_tokens or batch_size.'
    )


def positions(network: Network, width: int, max_new_tokens: int, window: int) -> int:
  """Return the positions of a row, with room for a padded window after the last token.

  In steps of 16, so that methods of the same models share a compiled prefill.
  """
  start = width if network.start_id is None else 1
  return -(-(start + inputs.bucket(max_new_tokens) + window + 2) // 16) * 16


@functools.partial(jax.jit, static_argnums=(0, 1, 4), static_argnames='room')
def prefill(networks, backend, params, prompt: Prompt, room: int) -> tuple:
  """Return caches of `room` positions that have seen the prompts."""
  with backends.use(backend):
    return tuple(n.prefill(p, prompt, room) for n, p in zip(networks, params, strict=True))


def _caches(program: Program, params: tuple, prompt: Prompt) -> tuple:
  """Return caches of the prompts with all the positions of a row."""
  networks, some = (tuple(x[s] for s in program.kept) for x in (program.networks, params))
  return prefill(networks, program.backend, some, prompt, program.buffer)


def blank(program, method, params, rows: requests.Arrays) -> State:
  """Return zeros for the rows, none of them in use."""
  shapes = jax.eval_shape(lambda: first_state(program, method, _caches(program, params, rows.prompt), rows))
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes).replace(done=jnp.ones(rows.real.shape, bool))


_empty = jax.jit(blank, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _insert(program, method, prefix: tuple, arrival: Arrival, state: State) -> State:
  return _put_rows(program, method, prefix, arrival, state)


def _put_rows(program, method, prefix: tuple, arrival: Arrival, state: State) -> State:
  new = first_state(program, method, (), arrival.rows)

  def put(i, state):
    def from_row(source):
      def one(old, new):  # positions that a row of the batch has beyond the prefix are rewritten before they are seen
        n = old.shape[0] // state.done.shape[0]  # indices of axis 0 that are one row
        row = jax.lax.dynamic_slice_in_dim(new, source * n, n, 0)
        return jax.lax.dynamic_update_slice(old, row, (arrival.target[i] * n, *[0] * (old.ndim - 1)))

      return one

    caches = jax.tree.map(from_row(arrival.source[i]), state.caches, prefix)
    return jax.tree.map(from_row(i), state.replace(caches=()), new).replace(caches=caches)

  return jax.lax.fori_loop(0, arrival.count, put, state)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def run(program, method, params, state, insert, stop, until) -> tuple[State, Array]:
  """Insert and loop; return the state and what the host wants of it in one array, since each that is fetched costs."""
  if state is None:
    state = blank(program, method, params, insert[1].rows)
  state = state.replace(done=state.done | stop)
  if insert is not None:
    state = _put_rows(program, method, *insert, state)
  state = _rounds(program, method, params, state, until)
  return state, jnp.concatenate([_as_numbers(x).reshape(x.shape[0], -1) for x in jax.tree.leaves(_wanted(state))], 1)


def _rounds(program, method, params, state: State, until) -> State:
  extend = tuple(functools.partial(n.extend, p) for n, p in zip(program.networks, params, strict=True))
  cache_of = tuple(program.kept.index(s) for s in program.owners)
  context = Context(extend, cache_of, method.policy, program.networks[-1].eos_ids, program.processor)

  def go_on(carry):
    passed, state = carry
    return (state.done.sum() < until[0]) & (passed < until[1])

  def step(carry):
    passed, state = carry
    with backends.use(program.backend):
      return passed + 1, run_phases(method.phases, context, state.replace(active=~state.done))

  return jax.lax.while_loop(go_on, step, (jnp.int32(0), state))[1]


def _wanted(state: State) -> dict[str, Any]:
  """Return what comes to the host."""
  names = ('done', 'tokens', 'length', 'fault', 'no_law', 'stats', 'logprobs', 'top')
  return {name: getattr(state, name) for name in names}


def _as_numbers(x: Array) -> Array:
  return jax.lax.bitcast_convert_type(x, jnp.int32) if x.dtype == jnp.float32 else x.astype(jnp.int32)


def decode_batch(
  method: methods.Method, models: Sequence[Model], prompt: Prompt, *, max_new_tokens: int, sampler: probs.Sampler,
  noise: probs.Noise,
) -> State:  # fmt: skip
  """Decode one padded batch on the device with noise of one's own and return the loop's last state."""
  slots = [models[m] for m in method.slots]
  rows, width = prompt.tokens.shape
  buffer = positions(slots[-1].network, width, max_new_tokens, method.window)
  program = Program(tuple(s.network for s in slots), cache_owners(slots), buffer, inputs.vocabulary(models))
  full = lambda value, dtype=jnp.float32: jnp.full(rows, value, dtype)
  by_row = jax.tree.map(lambda x: full(x), sampler)
  limits = Limits(jnp.zeros((rows, 0), jnp.int32))
  max_new, real = full(max_new_tokens, jnp.int32), full(True, bool)
  arrays = requests.Arrays(prompt, jnp.zeros((rows, 4), jnp.uint32), max_new, max_new, by_row, limits, real)
  return _decode_batch(program, method, tuple(s.params for s in slots), arrays, noise)


@functools.partial(jax.jit, static_argnums=0)
def _decode_batch(program, method, params, rows, noise) -> State:
  state = first_state(program, method, _caches(program, params, rows.prompt), rows, noise)
  return _rounds(program, method, params, state, jnp.array([rows.real.shape[0], FOREVER], jnp.int32))
