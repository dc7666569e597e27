"""Two halves of a batch take turns: while the verifier tests one, models on devices of their own draft for the other.

A round is cut at the first phase that feeds a model of the verifier's devices, and lowered in two programs, one for
each mesh. The caches, and the logits that are read where they were made, stay; what else a half is crosses between the
meshes: small arrays in one, the distributions of the drafts unless the noise is coupled, and the drafters' logits if
the test reads them. The host starts the programs in turn, for one half and for the other; the devices go on by
themselves, since each waits only for what it reads.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

from flax import struct
import jax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
import numpy as np

from speccascade import backends, sampling
from speccascade.backends import Backend, sharding
from speccascade.engine import loop, requests
from speccascade.engine.engine import Engine, Runner, Running, Side
from speccascade.engine.job import DecodeJob
from speccascade.engine.joined import join, split
from speccascade.engine.lowering import cut, lower
from speccascade.engine.phases import run as run_phases
from speccascade.engine.phases import Score
from speccascade.engine.state import Limits, State
from speccascade.types import Array, Cache, static

HALVES = 2


@struct.dataclass
class Kept:
  """What of a half stays on the devices of a program between its turns."""

  caches: tuple[Cache, ...]
  logits: tuple[Array | None, ...]  # by slot, of the models that lie there
  probs: Array | None
  limits: Limits


@struct.dataclass
class Crossing:
  """What of a half crosses from one mesh to the other."""

  joined: Array  # [B, N] all that is small
  probs: Array | None
  logits: tuple[Array | None, ...]  # by slot
  form: Any = static()  # the structure of what is joined, and its shapes

  @property
  def like(self) -> tuple[State, Array]:
    """What is joined, as shapes: the state, and the lengths before the round."""
    structure, shapes = self.form
    return structure.unflatten(shapes)


@dataclasses.dataclass(frozen=True)
class Shape:
  """The shape and the dtype of an array, a leaf of a static tree."""

  shape: tuple[int, ...]
  dtype: np.dtype


class Sends(NamedTuple):
  """What crosses of the drafts."""

  logits: tuple[int, ...]  # the slots whose logits cross
  probs: bool  # whether the distributions cross that the tokens were drawn from


NOTHING = Sends((), False)


@struct.dataclass
class Half:
  """A half of the batch between two rounds, when the drafters are next."""

  drafters: Kept
  verifier: Kept
  crossing: Crossing


# ---- in a program ----


def _on(state: State, layout: sharding.Layout, backend: Backend) -> State:
  """Return a state with the static parts that name devices."""
  noise = state.noise.replace(layout=layout) if isinstance(state.noise, sampling.Keyed) else state.noise
  return state.replace(noise=noise, sampler=dataclasses.replace(state.sampler, backend=backend))


def parted(program: loop.Program, state: State, since: Array, sends: Sends = NOTHING) -> tuple[Kept, Crossing]:
  """Return what stays of a state and what crosses.

  Args:
    program: The program.
    state: The state.
    since: [B] the lengths before the round.
    sends: What crosses of logits and of the distributions of drafts.
  """
  w = state.window
  own = tuple(x if slot in program.shown else None for slot, x in enumerate(w.logits))
  kept = Kept(state.caches, own, w.probs if program.drafts else None, state.limits)
  none = (None,) * len(w.logits)
  small = state.replace(caches=(), limits=None, window=w.replace(logits=none, probs=None))
  small = _on(small, sharding.Layout(), Backend())  # of neither mesh
  leaves, structure = jax.tree.flatten((small, since))
  form = structure, tuple(Shape(x.shape, np.dtype(x.dtype)) for x in leaves)
  joined = program.layout.pin(join((small, since)))
  logits = tuple(x if slot in sends.logits else None for slot, x in enumerate(w.logits))
  return kept, Crossing(joined, w.probs if sends.probs else None, logits, form)


def joined(program: loop.Program, kept: Kept, crossing: Crossing) -> tuple[State, Array]:
  """Return the state of which a part stayed and a part crossed, and the lengths [B] before the round."""
  state, since = split(crossing.joined, crossing.like)
  logits = tuple(mine if x is None else x for mine, x in zip(kept.logits, crossing.logits, strict=True))
  probs = kept.probs if crossing.probs is None else crossing.probs
  window = state.window.replace(logits=logits, probs=probs)
  whole = _on(state, program.layout, program.backend)
  return program.pin(whole.replace(caches=kept.caches, limits=kept.limits, window=window)), since


def _begin(program, start, params, prefix: tuple, batch: loop.InsertBatch) -> tuple[Kept, Crossing]:
  state = loop.first_batch(program, start, params, prefix, batch)
  return parted(program, state, state.length)


def _insert(program, start, prefix: tuple, batch: loop.InsertBatch, kept: Kept, crossing: Crossing):
  state, since = joined(program, kept, crossing)
  return parted(program, loop.put_rows(program, start, prefix, batch, state), since)


def _turn(
  program,
  ends: bool,
  sends: Sends,
  method,
  params,
  kept: Kept,
  crossing: Crossing,
  stop,
  lacks,
  processor,
) -> tuple[Kept, Crossing, Array]:
  """Run the phases of one side; return also how many rows are done.

  Args:
    program: The program.
    ends: Whether the round ends here.
    sends: As of `parted`.
    method: The phases.
    params: The parameters.
    kept: What stayed.
    crossing: What crossed.
    stop: [B] rows that are ended before the phases.
    lacks: As of a `Context`.
    processor: As of `speccascade.decode`.
  """
  state, since = joined(program, kept, crossing)
  if not ends:
    done = state.done | stop
    state = state.replace(done=done, active=~done)
    since = state.length
  state = run_phases(method.phases, loop.context_of(program, method, params, processor, lacks), state)
  if ends:
    state = loop.end_stalled(method, since, state)
  kept, crossing = parted(program, program.pin(state), since, sends)
  return kept, crossing, state.done.sum()


begin = jax.jit(_begin, static_argnums=0)
insert = jax.jit(_insert, static_argnums=0, donate_argnums=4)


@functools.cache
def compiled_with(options: tuple[tuple[str, str], ...]):
  """Return the jitted `_turn`, compiled with options of XLA."""
  return jax.jit(_turn, static_argnums=(0, 1, 2), donate_argnums=5, compiler_options=dict(options))


def _shown(crossing: Crossing) -> Array:
  state, _ = split(crossing.joined, crossing.like)
  return join(loop.host_arrays(state))


shown = jax.jit(_shown)

# ---- on the host ----


class Overlapped(Runner):
  """The programs of a job whose drafters and verifier lie on devices of their own; it has what an `Engine` has."""

  def __init__(self, job: DecodeJob):
    method = lower(job.method.at(job.size))
    apart = sharding.apart([job.models[m] for m in method.slots])
    held = apart, tuple(slot for slot in range(len(method.slots)) if slot not in apart)
    size = job.size // HALVES
    sides = [
      Side(job, part, method.start, size, slots, HALVES) for part, slots in zip(cut(method, apart), held, strict=True)
    ]
    super().__init__(job, sides[-1])
    self.sides = sides
    self.half = size
    self.method = method
    self.needs = sides[-1].needs
    read = range(len(method.slots)) if job.trace == 'models' else sides[-1].method.logits_read
    # With one noise for both models no test reads what a token was drawn from; a limit of the verifier's may.
    limited = any(phase.reads != () for phase in sides[-1].method.parts if isinstance(phase, Score))
    probs = job.rows[0].sampler.coupling != 'gumbel' or limited
    self.sends = Sends(tuple(slot for slot in apart if slot in read), probs), NOTHING
    if method.branches > 1:  # each side tests, and moves what is pending
      self.sends = (Sends(tuple(range(len(method.slots))), probs),) * 2
    self.where = [_where(side) for side in sides]
    params = [next(side.params[i] for side in sides if i in side.program.held) for i in range(len(method.slots))]
    lacks = loop.lacks_of(sides[-1].program, method, params)
    self.lacks = [jax.device_put(lacks, whole) for whole, _ in self.where]

  def prefill(self, prompts: Sequence[np.ndarray], size: int) -> tuple:
    """Read prompts, padded to `size` of them, on both sides."""
    return tuple(side.prefill(prompts, size) for side in self.sides)

  def insert_batch(
    self, rows: Sequence[requests.RequestRow], source: Sequence[int] | None, target: Sequence[int]
  ) -> list[loop.InsertBatch]:
    """Return requests as arrays, those of each half; the arguments are those of `Side.insert_batch`."""
    given = [*zip(rows, range(len(rows)) if source is None else source, target, strict=True)]
    made = []
    for half in range(HALVES):
      some = [x for x in given if x[2] // self.half == half]
      # A half without a request has a row that is none.
      chosen, sources, targets = zip(*some or given[:1], strict=True)
      batch = self.sides[0].insert_batch(chosen, sources, [x % self.half for x in targets])
      if not some:
        nothing = dataclasses.replace(batch.rows, real=np.zeros(self.half, bool))
        batch = dataclasses.replace(batch, rows=nothing, count=np.int32(0))
      made.append(batch)
    return made

  def begin(self, prefix: tuple, batch: Sequence[loop.InsertBatch]) -> tuple[Half, ...]:
    """Return the halves of a first batch."""

    def one(some):
      begun = [
        begin(side.program, side.start, side.params, caches, some)
        for side, caches in zip(self.sides, prefix, strict=True)
      ]
      (drafters, crossing), (verifier, _) = begun
      return Half(drafters, verifier, crossing)

    return tuple(map(one, batch))

  def insert(self, prefix: tuple, batch: Sequence[loop.InsertBatch], state: tuple[Half, ...]) -> tuple[Half, ...]:
    """Put requests into their rows of the halves."""

    def one(some, half):
      if not some.count:
        return half
      kept = half.drafters, half.verifier
      crossing = half.crossing, self._put(1, half.crossing)
      done = [
        insert(side.program, side.start, caches, some, *x)
        for side, caches, *x in zip(self.sides, prefix, kept, crossing, strict=True)
      ]
      (drafters, crossing), (verifier, _) = done
      return Half(drafters, verifier, crossing)

    return tuple(map(one, batch, state))

  @property
  def remembers(self) -> bool:
    """Whether a network remembers outputs."""
    return self.sides[0].remembers

  def remember(self, texts: Sequence[tuple[np.ndarray, int]]):
    """As of `Side`."""
    for side in self.sides:
      side.remember(texts)

  def _put(self, side: int, crossing: Crossing) -> Crossing:
    """Move what crosses to the devices of a side."""
    whole, by_row = self.where[side]
    return jax.device_put(crossing, jax.tree.map(lambda x: whole if x.ndim == 2 else by_row, crossing))

  def _start(self, state: tuple[Half, ...], ended: int, rounds: int, stop: np.ndarray | None = None) -> Running:
    now = min(rounds, self.rounds_at_once)
    halves = [*state]
    stops = np.split(np.zeros(self.size, bool) if stop is None else stop, HALVES)
    before: list[Array] = []  # how many rows of each half were done after the round before
    for number in range(now):
      counts = []
      for i, half in enumerate(halves):
        halves[i], count = self._round(half, stops[i] if number == 0 else np.zeros(self.half, bool))
        counts.append(count)
      # The host looks at the round before, so that the devices have work meanwhile.
      if before and sum(map(int, before)) >= ended:
        break
      before = counts
    joined = [shown(half.crossing) for half in halves]
    return Running(tuple(halves), halves[0].crossing.like[0], joined, ended, rounds - number - 1)

  def _round(self, half: Half, stop: np.ndarray) -> tuple[Half, Array]:
    """Start a round of one half; return it, and how many of its rows are done."""
    crossing = half.crossing
    kept = [half.drafters, half.verifier]
    for i, side in enumerate(self.sides):
      turn = compiled_with(backends.known(side.program.backend.xla))
      how = stop, self.lacks[i], self.processor
      given = side.program, i == 1, self.sends[i], side.method, side.params
      kept[i], crossing, count = turn(*given, kept[i], crossing, *how)
      crossing = self._put(1 - i, crossing)
    return Half(*kept, crossing), count


def _where(side: Side) -> tuple[Any, Any]:
  """Return the shardings of arrays that all devices of a side have, and of those by rows."""
  layout = side.program.layout
  if layout.devices > 1:
    axis = sharding.DATA if sharding.DATA in layout.mesh.shape else None
    return NamedSharding(layout.mesh, PartitionSpec()), NamedSharding(layout.mesh, PartitionSpec(axis))
  arrays = (x for x in jax.tree.leaves(side.params) if isinstance(x, jax.Array))
  device = next((d for x in arrays for d in x.sharding.device_set), jax.devices()[0])
  return SingleDeviceSharding(device), SingleDeviceSharding(device)


def engine_for(job: DecodeJob) -> Engine | Overlapped:
  """Return the engine of a job, that of two meshes where drafters and verifier lie on devices of their own."""
  apart = sharding.apart([job.models[m] for m in job.method.at(job.size).slots])
  return Overlapped(job) if apart else Engine(job)
