"""How long a round of a compiled TPU program takes, simulated: one core runs the schedule, one queue feeds it.

XLA's estimate of an instruction leaves out what is fetched beside the core, what the core waits for, and kernels of our
own. Here every byte that crosses the memory (HBM) is counted once, on one queue:

* a copy that is started moves beside the core; where the schedule asks for its result, the core waits for the queue;
* a kernel of ours takes the longer of its bytes and of the cycles that it states;
* any other instruction takes the longer of XLA's estimate and of the bytes that it reads and writes itself;
* a collective takes its time on the links to other chips (`backends.links`), beside the core if it is only started;
* of branches one runs, whether they are of a conditional or loops of at most one turn (`Backend.choose`).

This is a model: copies have no latency, instructions no gap, and the memory `EFFICIENCY` of its peak.
"""

import collections
from collections.abc import Callable, Mapping
import copy
import dataclasses
import re

from speccascade.planning import hlo

EFFICIENCY = 0.9  # of the memory's peak
_PHASE = re.compile(r'/((?:propose|score|verify|truncate|wait|observe)(?:_\d+)?)/')
_CHOSEN = re.compile(r'/branch_(\d+)_of_\d+/while$')
_STATED = re.compile(r'"cycles":\s*"(\d+)"')  # in the metadata of a kernel
WAITING = 'waits for the memory'
KERNELS = 'kernels of our own'
COLLECTIVES = 'collectives'
PARTS = {  # by the names of modules in an instruction's path
  'MLP': r'/mlp',
  'head': r'logits_dense|\.attend\b.*dot_general|token_embedder\.attend',
  'embedding': r'embedder',
  'position bias': r'relpos_bias',
  'projections': r'query/|key/|value/|/out/|queries|keys_values|_project',
  'attention': r'attention|attend',
  'norms': r'norm',
}


def phase_of(x: hlo.Instruction) -> str:
  """Return the phase that an instruction belongs to, by its named scope; '' where it has none."""
  found = _PHASE.search(f'{x.path}/')
  return found[1] if found else ''


def alternatives(module: hlo.Module, computation: str) -> dict[str, list[str]]:
  """Return {first loop: the bodies of all} of loops of which one runs, for each choice of a computation, in order."""
  found, first, last = {}, '', -1
  for x in module.computations[computation]:
    if x.op == 'while' and (chosen := _CHOSEN.search(x.path)):
      if int(chosen[1]) <= last or not first:
        first = x.name
      last = int(chosen[1])
      found.setdefault(first, []).append(x.called['body'][0])
  return found


def part_of(x: hlo.Instruction) -> str:
  """Return what an instruction is a part of."""
  if x.op in ('copy', 'transpose'):
    return 'copies'
  return next((name for name, pattern in PARTS.items() if re.search(pattern, x.path)), 'sampling, tests, bookkeeping')


@dataclasses.dataclass(frozen=True)
class Round:
  """A simulated round, in cycles.

  Attributes:
    cycles: How long it takes.
    traffic: How long the memory takes to move its bytes.
    floor: What its phases take where each overlaps its bytes with its instructions: the longer of the two.
    collectives: How long it takes less without the time of collectives.
    parts: {part: cycles} that the core spends, waits among them.
    phases: {phase: cycles}.
  """

  cycles: float
  traffic: float
  floor: float
  collectives: float
  parts: Mapping[str, float]
  phases: Mapping[str, float]


def simulate(
  module: hlo.Module,
  bytes_per_cycle: float,
  unknown: int,
  *,
  network: Callable[[str, float, int], float] | None = None,
  shortest: bool = False,
  computation: str | None = None,
) -> Round:
  """Return a round of a program.

  Args:
    module: The program.
    bytes_per_cycle: What the memory moves at its peak.
    unknown: The turns of loops of which the program does not have the number.
    network: The cycles of a collective, of its operation, bytes and chips; None: none.
    shortest: Whether of branches the shortest runs, and not the longest.
    computation: What runs, as `module.entry`; None: the body of the decode loop.
  """
  line = _Timeline(module, EFFICIENCY * bytes_per_cycle, unknown, network, min if shortest else max)
  line.run(computation or module.body)
  line.bytes[''] += sum(size for _, size in line.started.values())  # which nothing waits for
  moved = {phase: n / line.speed for phase, n in line.bytes.items()}
  floor = sum(max(moved.get(phase, 0), line.core[phase]) for phase in moved.keys() | line.core.keys())
  parts, phases = collections.Counter(), collections.Counter()
  for (phase, part), cycles in line.time.items():
    parts[part] += cycles
    phases[phase or 'bookkeeping'] += cycles
  return Round(line.now, sum(moved.values()), floor, parts[COLLECTIVES], dict(parts.most_common()), dict(phases))


class _Timeline:
  """The core's and the memory's clocks while a schedule runs."""

  def __init__(self, module: hlo.Module, speed: float, unknown: int, network: Callable | None, choose: Callable):
    self.module = module
    self.speed = speed  # bytes a cycle
    self.unknown = unknown
    self.network = network
    self.choose = choose  # of the timelines of branches
    self.now = 0.0
    self.free = 0.0  # when the memory has moved all that is queued
    self.linked = 0.0  # when the links are free
    self.started: dict[tuple[str, str], tuple[float, float]] = {}  # when a copy ends, and its bytes
    self.phase = ''
    self.time = collections.Counter()  # by phase and part
    self.core = collections.Counter()  # by phase, instructions that read nothing of the memory
    self.bytes = collections.Counter()  # by phase

  def run(self, computation: str):
    """Run the instructions of a computation."""
    choices = alternatives(self.module, computation)
    for x in self.module.computations[computation]:
      self.phase = phase_of(x) or self.phase
      if x.name in choices:
        self._branch(choices[x.name])
      elif x.op == 'while':  # of a choice the first loop has stood for all
        for _ in range(0 if _CHOSEN.search(x.path) else self.module.trips(x, self.unknown)):
          self.run(x.called['body'][0])
      elif x.op in ('call', 'conditional'):
        self._branch([name for names in x.called.values() for name in names])
      elif x.op in ('copy-start', 'slice-start'):
        size = _crossing(x)
        self.started[computation, x.name] = self._move(size), size
      elif x.op in ('copy-done', 'slice-done'):
        end, size = self.started.pop((computation, x.operands[0]), (0.0, 0.0))
        self.bytes[self.phase] += size  # of the phase that needs them
        self._until(end, WAITING)
      elif sent := self._collectives(x):
        for one in sent:
          self.linked = max(self.linked, self.now) + self._on_links(one)
        if x.op.endswith('-start'):
          self.started[computation, x.name] = self.linked, 0.0
        else:
          self._until(self.linked, COLLECTIVES)
      elif x.op.endswith('-done'):
        self._until(self.started.pop((computation, x.operands[0]), (0.0, 0.0))[0], COLLECTIVES)
      else:
        self._compute(computation, x)

  def _collectives(self, x: hlo.Instruction) -> list[hlo.Instruction]:
    """Return the collectives that an instruction is or starts."""
    if x.op.removesuffix('-start') in hlo.COLLECTIVES:
      return [x]
    called = (c for names in x.called.values() for c in names) if x.op == 'async-start' else ()
    return [y for c in called for y in self.module.computations[c] if y.op in hlo.COLLECTIVES]

  def _on_links(self, x: hlo.Instruction) -> float:
    if self.network is None:
      return 0.0
    return self.network(x.op.removesuffix('-start'), self.module.result_bytes(x), self.module.group_size(x))

  def _branch(self, computations: list[str]):
    """Run one of some computations."""
    lines = []
    for name in computations:
      line = copy.copy(self)
      parts = self.started, self.time, self.core, self.bytes
      line.started, line.time, line.core, line.bytes = map(copy.copy, parts)
      line.run(name)
      lines.append(line)
    self.__dict__.update(self.choose(lines, key=lambda line: line.now).__dict__)

  def _move(self, size: float) -> float:
    """Queue bytes; return when they have moved."""
    self.free = max(self.free, self.now) + size / self.speed
    return self.free

  def _until(self, end: float, part: str):
    """Let the core be busy, or wait, until a time."""
    if end > self.now:
      self.time[self.phase, part] += end - self.now
      self.now = end

  def _compute(self, computation: str, x: hlo.Instruction):
    own = x.op == 'custom-call' and x.target in hlo.KERNELS
    size = self._kernel_bytes(computation, x) if own else self._own_bytes(computation, x)
    stated = _STATED.search(x.rest) if own else None
    cycles = int(stated[1]) if stated else x.cycles
    if own or not size:
      self.core[self.phase] += cycles
    self.bytes[self.phase] += size
    end = self.now + cycles
    self._until(max(end, self._move(size)) if size else end, KERNELS if own else part_of(x))

  def _operands(self, computation: str, x: hlo.Instruction) -> list[tuple[hlo.Array, ...]]:
    """Return the arrays of each operand."""
    here = self.module.by_name(computation)
    return [hlo.arrays(here[name].shape) if name in here else () for name in x.operands]

  def _kernel_bytes(self, computation: str, x: hlo.Instruction) -> float:
    caches = (a for some in self._operands(computation, x) for a in some if len(a.dims) == 5)  # [B, N, G, T, P]
    cache = next(caches, None)
    fetched = cache is not None and cache.memory  # by a copy, which is counted
    return 0 if fetched else self.module.kernel_bytes(computation, x)

  def _own_bytes(self, computation: str, x: hlo.Instruction) -> float:
    """Return the bytes of the memory that an instruction reads and writes itself."""
    written = [a.bytes if a.memory == 0 else 0 for a in hlo.arrays(x.shape)]
    if x.op == 'fusion':
      (called,) = x.called['calls']
      read = self.module.parts_read(called)
      for i, n in enumerate(self.module.parts_written(called)):
        if n is not None and i < len(written):
          written[i] = min(written[i], n)
    elif x.op in ('copy', 'transpose', 'convolution', 'sort'):
      read = {}
    elif x.op in ('dynamic-update-slice', 'dynamic-slice', 'reduce', 'scatter', 'gather'):
      return sum(written)
    else:
      return 0
    sizes = [sum(a.bytes for a in some if a.memory == 0) for some in self._operands(computation, x)]
    return sum(min(n, read.get(i, n)) for i, n in enumerate(sizes)) + sum(written)


def _crossing(x: hlo.Instruction) -> float:
  """Return the bytes that a started copy moves out of the memory or into it."""
  new, old = hlo.arrays(x.shape)[:2]
  if x.op == 'slice-start':  # (operand, result, …)
    return old.bytes
  return new.bytes * sum(a.memory == 0 for a in (new, old))
