"""What runs on the device: prefill, insert rows into a batch, run the phases in a loop.

The loop, of which the phases are those of `engine.phases`, here of speculative decoding:

  while rows and rounds are left:
    active = not done
    Propose:  repeat: feed the drafter the last token, draw the next from q̃, make it pending
    Score:    feed the verifier the pending tokens, which gives its logits at each and after them
    Verify:   π = target(logits); accept each pending token with min(1, π / q̃), up to the first that is not;
              draw one more, from norm(max(0, π - q̃)) after a rejection, else from π; commit, lower `fed`
    end rows for which no round commits a token

One jitted `lax.while_loop` around the phases, over static shapes. Rows end by mask; every array of the state has its
rows on axis 0, so that a request takes its row by one `tree.map`.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from speccascade import backends, sampling
from speccascade.backends import Backend, ops, sharding
from speccascade.engine import inputs, validate
from speccascade.engine.initial import first_state
from speccascade.engine.joined import join
from speccascade.engine.lowering import lower
from speccascade.engine.method import Method
from speccascade.engine.phases import run as run_phases
from speccascade.engine.state import Arrays, cache_slots, Context, Limits, State
from speccascade.types import Array, Cache, Model, Network, Prompt, STALLED

FOREVER = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Program:
  """What is compiled in, with the structure of the method and the shapes; its networks are bound to its backend."""

  networks: tuple[Network, ...]  # by slot of the method
  cache_of: tuple[int, ...]  # the slot in whose cache each slot works
  buffer: int  # positions of a row
  vocab: int
  backend: Backend = Backend()  # with the layout of a program for several devices
  trace: str = ''  # whose log-probabilities are recorded: 'models', 'target', or none
  top: int = 0  # how many of the likeliest tokens are recorded
  held: tuple[int, ...] | None = None  # the slots whose models lie on its devices; None: all
  shown: tuple[int, ...] | None = None  # the slots whose logits its window has; None: those that it holds
  drafts: bool = True  # whether its models draft
  eos_ids: tuple[int, ...] | None = None  # the tokens that end a text; None: those of the last network

  def __post_init__(self):
    if self.eos_ids is None:
      object.__setattr__(self, 'eos_ids', self.networks[-1].eos_ids)
    if self.held is None:
      object.__setattr__(self, 'held', tuple(range(len(self.networks))))
    if self.shown is None:
      object.__setattr__(self, 'shown', self.held)
    # A network is static in the program too, so that one for another backend is another program.
    bound = tuple(n.on(self.backend.for_slot(slot)) for slot, n in enumerate(self.networks))
    object.__setattr__(self, 'networks', bound)

  @property
  def layout(self) -> sharding.Layout:
    """Where arrays lie."""
    return self.backend.layout

  @property
  def cached(self) -> list[int]:
    """The slots that have a cache."""
    return sorted({self.cache_of[slot] for slot in self.held})

  @property
  def cached_layout(self) -> sharding.Layout:
    """The layout of the slots that have a cache."""
    return self.layout.only(self.cached)

  def specs(self, state: State) -> Any:
    """Return how each array of a state is sharded."""
    return self.layout.state(state, self.cached)

  def pin(self, state: State) -> State:
    """Constrain the arrays of a state to their shardings."""
    return self.layout.pin(state, self.specs(state))


@struct.dataclass
class InsertBatch:
  """Requests for rows of a batch: request i continues row source[i] of a prefix and gets row target[i]."""

  rows: Arrays  # [B]
  source: Array | None  # [B], None where each row reads its own
  target: Array  # [B]
  count: Array  # how many of them are real


def positions(network: Network, width: int, max_new_tokens: int, window: int) -> int:
  """Return T, the positions of a row: a padded prompt of `width` tokens, new ones and a padded window after the last.

  In steps of 16, so that methods of the same models share a compiled prefill.
  """
  start = width if network.start_id is None else 1
  return -(-(start + inputs.bucket(max_new_tokens) + window + 2) // 16) * 16


@functools.partial(jax.jit, static_argnames=('network', 'cache_len', 'layout'))
def prefill(
  network: Network, params: Any, prompt: Prompt, cache_len: int, layout: sharding.Layout = sharding.Layout()
) -> Cache:
  """Return a cache of `cache_len` positions that has seen the prompts, in the layout of the network's own slot."""
  # Constrained before and after, or the compiler might gather the prompts or replicate the caches.
  prompt = layout.pin(prompt, layout.rows(prompt))
  cache = network.prefill(params, prompt, cache_len)
  return layout.pin(cache, layout.caches([cache])[0])


def prefilled(
  networks: Sequence[Network],
  params: Sequence,
  prompt: Prompt,
  cache_len: int,
  layout: sharding.Layout = sharding.Layout(),
) -> tuple:
  """Return the caches of networks that are bound to a backend; each has a program of its own, for all methods."""
  pairs = zip(networks, params, strict=True)
  return tuple(prefill(n, p, prompt, cache_len, layout=layout.only([slot])) for slot, (n, p) in enumerate(pairs))


def caches_of(program: Program, params: tuple, prompt: Prompt, cache_len: int | None = None) -> tuple:
  """Return caches of the prompts with `cache_len` positions, or all those of a row."""
  networks, owned = (tuple(x[slot] for slot in program.cached) for x in (program.networks, params))
  return prefilled(networks, owned, prompt, cache_len or program.buffer, program.cached_layout)


def cache_shapes(program: Program, params: tuple, prompt: Prompt) -> tuple:
  """Return the shapes of the caches of rows with these prompts; that of a decoder is the same for all prompts."""

  def cache(network, params, prompt):
    if network.start_id is None:  # so no prefill is traced
      return network.empty_cache(params, prompt.tokens.shape[0], program.buffer)
    return network.prefill(params, prompt, program.buffer)

  pairs = [(program.networks[slot], params[slot]) for slot in program.cached]
  return tuple(jax.eval_shape(functools.partial(cache, network), own, prompt) for network, own in pairs)


def blank(program, start, params, rows: Arrays) -> State:
  """Return zeros for the rows, none of them in use."""
  caches = cache_shapes(program, params, rows.prompt)
  shapes = jax.eval_shape(lambda caches: first_state(program, start, caches, rows), caches)
  state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes).replace(done=jnp.ones(rows.real.shape, bool))
  return program.pin(state)


def first_batch(program, start, params, prefix: tuple, batch: InsertBatch) -> State:
  """Return the state of a batch of requests, request i in row i."""
  if program.layout.devices > 1 and batch.source is not None:  # rows cross a mesh one by one
    return put_rows(program, start, prefix, batch, blank(program, start, params, batch.rows))
  rows = batch.target.shape[0]

  # A prefill computes caches as long as the prompts. The zeros that make them as long as a row are added here, once, so
  # that the prefill of one length serves every max_new_tokens.
  def padded(shape, x):
    if batch.source is not None:
      n = shape.shape[0] // rows  # indices of axis 0 that are one row
      # An n-gram's cache may be empty, so that -1 would be ambiguous.
      by_row = x.reshape(x.shape[0] // n, n, *x.shape[1:])
      x = by_row[batch.source].reshape(shape.shape[0], *x.shape[1:])
    tails = [(0, all_ - some, 0) for all_, some in zip(shape.shape, x.shape, strict=True)]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), tails)

  shapes = cache_shapes(program, params, batch.rows.prompt)
  return program.pin(first_state(program, start, jax.tree.map(padded, shapes, prefix), batch.rows))


begin = jax.jit(first_batch, static_argnums=0)


def put_rows(program, start, prefix: tuple, batch: InsertBatch, state: State) -> State:
  """Put requests, with the prefixes that they continue, into their rows of the batch."""
  new = program.pin(first_state(program, start, (), batch.rows))
  state = program.pin(state)
  layout = program.cached_layout
  prefix = layout.pin(prefix, layout.caches(prefix))

  # A loop over rows, not a scatter: each turn writes one row in place, and the state is donated.
  def put(i, state):
    def from_row(source):
      def one(old, new):  # positions that a row of the batch has beyond the prefix are rewritten before they are seen
        n = old.shape[0] // state.done.shape[0]  # indices of axis 0 that are one row
        if layout.row_shards > 1:  # a sum over the rows crosses a mesh as one row; a slice would gather all of them
          row = ops.masked_take(new[None], source[None, None])[0]
        else:
          row = jax.lax.dynamic_slice_in_dim(new, source * n, n, 0)
        return jax.lax.dynamic_update_slice(old, row, (batch.target[i] * n, *[0] * (old.ndim - 1)))

      return one

    caches = jax.tree.map(from_row(batch.source[i]), state.caches, prefix)
    return jax.tree.map(from_row(i), state.replace(caches=()), new).replace(caches=caches)

  return program.pin(jax.lax.fori_loop(0, batch.count, put, state))


insert = jax.jit(put_rows, static_argnums=0, donate_argnums=4)


def _run(program, method, params, state, stop, stop_at, processor=None) -> tuple[State, Array]:
  """Loop; return the state, and what the host reads of it as one array, since each copy has a cost."""
  state = _rounds(program, method, params, state.replace(done=state.done | stop), stop_at, processor)
  return state, program.layout.pin(join(host_arrays(state)))


@functools.cache
def compiled_with(options: tuple[tuple[str, str], ...]) -> Callable:
  """Return the jitted `run(program, method, params, state, stop, stop_at, processor)`, compiled with options of XLA."""
  return jax.jit(_run, static_argnums=0, donate_argnums=3, compiler_options=dict(options))


run = compiled_with(())


def _rounds(program, method, params, state: State, stop_at, processor) -> State:
  """Run rounds until `stop_at[0]` rows are done, or `stop_at[1]` rounds have passed."""
  context = context_of(program, method, params, processor, lacks_of(program, method, params))

  # The state is constrained in every round, or its sharding would be what the compiler infers from the first one.
  def go_on(carry):
    passed, state = carry
    return (state.done.sum() < stop_at[0]) & (passed < stop_at[1])

  def step(carry):
    passed, state = carry
    state = state.replace(active=~state.done)  # a row that has ended passes through every phase unchanged
    after = end_stalled(method, state.length, run_phases(method.phases, context, state))
    return passed + 1, program.pin(after)

  return jax.lax.while_loop(go_on, step, (jnp.int32(0), program.pin(state)))[1]


def context_of(program, method, params, processor, lacks: tuple[Array | None, ...]) -> Context:
  """Return what is fixed while a program decodes by a method."""
  models = [*zip(program.networks, params, strict=True)]
  return Context(
    extend=tuple(functools.partial(n.extend, p) for n, p in models),
    corrected=tuple(functools.partial(n.corrected, p) if n.corrects else None for n, p in models),
    packs=tuple(n.packs for n in program.networks),
    cache_of=tuple(program.cached.index(slot) if slot in program.cached else None for slot in program.cache_of),
    policy=method.policy,
    eos_ids=program.eos_ids,
    processor=processor,
    backend=program.backend,
    lacks=lacks,
  )


def end_stalled(method, before: Array, state: State) -> State:
  """End rows for which no round commits a token: `before` [B] were the lengths, `state` is that after the round."""
  grew = state.length > before
  if method.branches > 1:  # a row may wait for the others
    grew = jnp.broadcast_to(grew.any(), grew.shape)
  idle = jnp.where(grew, 0, state.idle + 1)
  stalled = ~state.done & (idle >= method.turns(grew.shape[0]))
  fault = state.fault.replace(code=jnp.where(stalled, STALLED, state.fault.code))
  return state.replace(idle=idle, fault=fault, done=state.done | stalled)


def lacks_of(program, method, params) -> tuple[Array | None, ...]:
  """Return [V] by slot: the tokens that a drafter lacks, where a combiner of logits reads it."""
  by_slot = [n.lacks(p) for n, p in zip(program.networks, params, strict=True)]
  read = method.adds_logits
  return tuple(x[: program.vocab] if x is not None and m in read else None for m, x in enumerate(by_slot))


def host_arrays(state: State) -> dict[str, Any]:
  """Return the arrays that are copied to the host."""
  records = {name: record for name, record in state.records.items() if record.for_host}
  return {name: getattr(state, name) for name in ('done', 'tokens', 'length', 'fault')} | records


def decode_batch(
  method: Method,
  models: Sequence[Model],
  prompt: Prompt,
  *,
  max_new_tokens: int,
  sampler: sampling.Sampler,
  noise: sampling.Noise,
  mesh: jax.sharding.Mesh | None = None,
  processor: Callable | None = None,
) -> State:
  """Decode one padded batch on the device, with noise of one's own.

  Args:
    method: The method.
    models: The models.
    prompt: The prompts of the batch.
    max_new_tokens: The most new tokens of a row.
    sampler: The sampler.
    noise: Where random choices come from.
    mesh: The mesh of a step that is partitioned over one, in which parameters are traced.
    processor: As of `speccascade.decode`.

  Returns:
    The loop's last state.
  """
  rows, width = prompt.tokens.shape
  method = lower(method.at(rows).for_networks([m.network for m in models]))
  slots = [models[m] for m in method.slots]
  buffer = positions(slots[-1].network, width, max_new_tokens, method.beyond)
  vocab = inputs.vocabulary(models)
  layout = sharding.layout_for_step(slots, mesh)
  backend, params = backends.prepared(slots, layout, mesh)
  program = Program(tuple(s.network for s in slots), cache_slots(slots), buffer, vocab, backend)

  def full(value, dtype=jnp.float32):
    return jnp.full(rows, value, dtype)

  by_row = jax.tree.map(lambda x: full(x), sampler)
  limits = Limits(jnp.zeros((rows, 0), jnp.int32))
  max_new = full(max_new_tokens, jnp.int32)
  real = full(True, bool)
  arrays = Arrays(prompt, jnp.zeros((rows, 4), jnp.uint32), max_new, by_row, limits, real)
  return _decode_batch(program, method, params, arrays, noise, validate.bind_processor(processor))


@functools.partial(jax.jit, static_argnums=0)
def _decode_batch(program, method, params, rows, noise, processor) -> State:
  state = first_state(program, method.start, caches_of(program, params, rows.prompt), rows, noise)
  return _rounds(program, method, params, state, jnp.array([rows.real.shape[0], FOREVER]), processor)
