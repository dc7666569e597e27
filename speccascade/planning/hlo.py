"""Read the text of a compiled program: what a decode loop does in a round, and what is done before it.

The text is XLA's optimised HLO. A computation is a list of instructions; loops, branches and fusions name the ones that
they call. Sizes are those of the elements, without the padding of tiles.
"""

import collections
from collections.abc import Iterator
import dataclasses
import functools
import math
import re

BITS = {'pred': 8, 'c64': 64, 'c128': 128}  # the others have them in their names
COLLECTIVES = (
  'all-gather',
  'all-reduce',
  'reduce-scatter',
  'all-to-all',
  'ragged-all-to-all',
  'collective-permute',
  'collective-broadcast',
)
KERNELS = ('tpu_custom_call', '__gpu$xla.gpu.triton', 'triton_kernel_call')  # targets of Pallas
MOVES = {'parameter', 'bitcast', 'reshape', 'copy', 'transpose', 'convert', 'get-tuple-element', 'tuple'}
CONTROL = {'parameter', 'constant', 'bitcast', 'tuple', 'get-tuple-element', 'while', 'conditional', 'call'}
PASSING = {
  'bitcast',
  'copy-start',
  'copy-done',
  'slice-start',
  'slice-done',
  'get-tuple-element',
  'optimization-barrier',
}
_ARRAY = re.compile(r'\b(pred|bf16|[fsuc]\d+(?:e\dm\d\w*)?)\[([\d,]*)\](\{[^}]*\})?')
_INSTRUCTION = re.compile(r'^\s*(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$')
_ROWS = re.compile(r'(scatter|gather)[\w\-]*$')  # what a loop over rows came from
_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+)\s*(?:\(.*)?\{\s*$')
_METADATA = re.compile(r'=\{\n([^{}]*)\n\}')  # of a kernel, in lines of its own
_CALLED = re.compile(
  r'\b(body|condition|calls|to_apply|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)'
)


@dataclasses.dataclass(frozen=True)
class Array:
  """One array of a shape: its elements, and how they lie in which memory (0 is the device's own)."""

  dtype: str
  dims: tuple[int, ...]
  order: str
  memory: int

  @property
  def elements(self) -> int:
    return math.prod(self.dims)

  @property
  def lanes(self) -> int:
    """The size of the dimension whose elements lie next to each other."""
    first = re.match(r'\{(\d+)', self.order)
    return self.dims[int(first[1])] if first and self.dims else 1

  @property
  def bytes(self) -> int:
    digits = re.search(r'\d+', self.dtype)
    return -(-self.elements * (BITS.get(self.dtype) or int(digits[0])) // 8)


@functools.cache
def arrays(shape: str) -> tuple[Array, ...]:
  """Return the arrays of a shape, which may be a tuple."""
  result = []
  for dtype, dims, layout in _ARRAY.findall(shape):
    memory = re.search(r'S\((\d+)\)', layout)
    order = re.sub(r'S\(\d+\)', '', layout).replace(':}', '}')
    result.append(Array(dtype, tuple(map(int, filter(None, dims.split(',')))), order, int(memory[1]) if memory else 0))
  return tuple(result)


def shape_bytes(shape: str) -> int:
  """Return the bytes of all arrays of a shape."""
  return sum(x.bytes for x in arrays(shape))


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a computation."""

  name: str
  shape: str
  op: str
  rest: str  # operands and attributes
  root: bool = False

  @property
  def operands(self) -> list[str]:
    """The names of the operands."""
    depth = 1
    end = len(self.rest)
    for i, c in enumerate(self.rest):
      depth += (c == '(') - (c == ')')
      if not depth:
        end = i
        break
    return re.findall(r'%([\w.\-]+)', self.rest[:end])

  @property
  def path(self) -> str:
    """The names of the functions that it comes from, 'jit(f)/while/body/…'."""
    match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.rest)
    return match[1].replace("\\'", "'") if match else ''

  @property
  def called(self) -> dict[str, list[str]]:
    """The computations that it calls, by role."""
    return {role: re.findall(r'[\w.\-]+', names) for role, names in _CALLED.findall(self.rest)}

  @property
  def target(self) -> str:
    """The kernel of a custom call."""
    match = re.search(r'custom_call_target="([^"]*)"', self.rest)
    return match[1] if match else ''

  @property
  def cycles(self) -> int:
    """The estimate of XLA's cost model, 0 where it has none."""
    match = re.search(r'"estimated_cycles":"(\d+)"', self.rest)
    return int(match[1]) if match else 0


class Module:
  """A compiled program."""

  def __init__(self, text: str):
    self.computations, self.entry = parse(text)
    found = re.search(r'\bnum_partitions=(\d+)', text.partition('\n')[0])
    self.devices = int(found[1]) if found else 1

  def by_name(self, computation: str) -> dict[str, Instruction]:
    """Return the instructions of a computation by name."""
    return {x.name: x for x in self.computations[computation]}

  def closure(self, start: str) -> list[str]:
    """Return the computations that run when this one does: bodies, branches and calls."""
    seen = []
    todo = [start]
    while todo:
      name = todo.pop()
      if name in seen or name not in self.computations:
        continue
      seen.append(name)
      for x in self.computations[name]:
        if x.op in ('while', 'conditional', 'call', 'async-start'):
          todo += [c for names in x.called.values() for c in names]
    return seen

  def loops(self, computation: str) -> list[Instruction]:
    """Return the loops of a computation and of what it calls."""
    return [x for c in self.closure(computation) for x in self.computations[c] if x.op == 'while']

  @functools.cached_property
  def decode_loop(self) -> Instruction:
    """The loop that carries most."""
    loops = self.loops(self.entry)
    if not loops:
      raise ValueError('the program has no loop')
    return max(loops, key=lambda x: shape_bytes(x.shape))

  @property
  def body(self) -> str:
    """The computation of a round."""
    return self.decode_loop.called['body'][0]

  def row_loops(self) -> list[Instruction]:
    """Return the loops of a round that a scatter or gather became: one turn a row."""
    return [x for x in self.loops(self.body) if _ROWS.search(x.path)]

  def is_copy(self, x: Instruction) -> bool:
    """Tell whether an instruction moves its operand to another memory, layout or dtype and does nothing else."""
    if x.op in ('copy', 'copy-start', 'transpose'):
      return True
    inside = [y.op for c in x.called.get('calls', []) for y in self.computations[c]] if x.op == 'fusion' else []
    return bool({'copy', 'transpose', 'convert'} & set(inside)) and set(inside) <= MOVES

  def copies(self, computation: str) -> Iterator[tuple[Instruction, Array, Array]]:
    """Yield (instruction, from, to) of each copy: not what only goes to a faster memory to be read there."""
    here = self.by_name(computation)
    for x in here.values():
      if x.op == 'copy-start':
        new, old = arrays(x.shape)[:2]
      elif self.is_copy(x) and x.operands and x.operands[0] in here:
        new = arrays(x.shape)[0]
        old = (*arrays(here[x.operands[0]].shape), None)[0]
      else:
        continue
      if old and not (new.memory > old.memory == 0 and (new.order, new.dtype) == (old.order, old.dtype)):
        yield x, old, new

  def origin(self, computation: str, name: str) -> Instruction | None:
    """Return the parameter that an array is, or a part of, before any computation."""
    here = self.by_name(computation)
    while name in here:
      x = here[name]
      if x.op == 'parameter':
        return x
      passing = x.op in PASSING or x.target == 'ConcatBitcast' or self.is_copy(x)
      if not passing or not x.operands:
        return None
      name = x.operands[0]
    return None

  def relayouts(self, least: int = 1 << 16) -> list[tuple[str, Array]]:
    """Return (path of the argument, what it becomes) for arguments of so many bytes laid out anew before the loop."""
    result = []
    for x, _, new in self.copies(self.entry):
      source = self.origin(self.entry, x.operands[0])
      if source is not None and new.bytes >= least and new.order != arrays(source.shape)[0].order:
        result.append((source.path, new))
    return result

  def collectives(self, unknown: int = 1) -> dict[str, list[int]]:
    """Return {operation: [how many in the text, how many in a round, bytes of their results]} of a round."""
    counts = {}
    for _, x, times in self.runs(unknown):
      op = x.op.removesuffix('-start')
      if op in COLLECTIVES:
        count = counts.setdefault(op, [0, 0, 0])
        for i, n in enumerate((1, times, times * self.result_bytes(x))):
          count[i] += n
    return counts

  def group_size(self, x: Instruction) -> int:
    """Return how many devices take part in each group of a collective."""
    given = re.search(r'replica_groups=(.*)', x.rest)
    if not given or given[1].startswith('{}'):
      return self.devices
    # The axes of a mesh, the order of its devices where it is another, and the axes of a group.
    if sizes := re.match(r'mesh\[(.*?)\](?:, device_ids=\(.*?\) | ?)\{(.*?)\}', given[1]):
      axes = dict(re.findall(r"'(\w+)'=(\d+)", sizes[1]))
      return math.prod(int(part or axes[name]) for name, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", sizes[2]))
    if listed := re.match(r'\{\{([\d,]*)\}', given[1]):
      return listed[1].count(',') + 1
    if counted := re.match(r'\[\d+,(\d+)\]', given[1]):
      return int(counted[1])
    raise ValueError(f'groups of devices in an unknown form: {given[1][:80]}')

  def thin_arrays(self, least: int = 1 << 20) -> list[Array]:
    """Return the arrays of a round, of so many bytes, that leave most of the 128 lanes of a TPU's tiles empty."""
    made = [a for c in self.closure(self.body) for x in self.computations[c] for a in arrays(x.shape)]
    return [a for a in made if a.bytes >= least and a.lanes < 16]

  def result_bytes(self, x: Instruction) -> int:
    """Return the bytes of what a collective gives, its operands left out."""
    parts = arrays(x.shape)
    return parts[1].bytes if x.op.endswith('-start') and len(parts) > 1 else sum(p.bytes for p in parts)

  def trips(self, loop: Instruction, unknown: int) -> int:
    """Return how many turns a loop takes: its bound, one if its body ends it, or what is given."""
    condition, body = (self.computations[loop.called[role][0]] for role in ('condition', 'body'))
    fused = [(x, y) for x in condition for c in x.called.get('calls', []) for y in self.computations[c]]
    inside = [*condition, *(y for _, y in fused)]
    given = {y.name: x.operands[int(y.rest.partition(')')[0])] for x, y in fused if y.op == 'parameter'}
    constants = {x.name: re.match(r'(\d+)\)', x.rest) for x in inside if x.op == 'constant'}
    compared = [y for x in inside if x.op == 'compare' and x.shape.startswith('pred[]') for y in x.operands]
    bounds = [int(m[1]) for y in compared if (m := constants.get(given.get(y, y)))]
    if bounds:
      return max(bounds)
    last = next(x for x in condition if x.root)
    end = next((x for x in body if x.root and x.op == 'tuple'), None)
    index = re.search(r'index=(\d+)', last.rest) if last.op == 'get-tuple-element' else None
    if end and index:
      here = {x.name: x for x in body}
      predicate = here.get(end.operands[int(index[1])])
      while predicate and predicate.op == 'copy':  # a TPU keeps it in another memory
        predicate = here.get(predicate.operands[0])
      if predicate and predicate.op == 'constant' and 'false' in predicate.rest:
        return 1
    return unknown

  def runs(self, unknown: int) -> Iterator[tuple[str, Instruction, int]]:
    """Yield (computation, instruction, how often it runs in a round) of a round.

    Loops count with their turns, `unknown` where the program does not have their number; of branches all count.
    """
    todo = [(self.body, 1)]
    while todo:
      computation, times = todo.pop()
      for x in self.computations[computation]:
        yield computation, x, times
        if x.op == 'while':
          todo.append((x.called['body'][0], times * self.trips(x, unknown)))
        elif x.op in ('call', 'conditional'):
          todo += [(c, times) for names in x.called.values() for c in names]

  def kernels(self, unknown: int) -> int:
    """Return how many kernels a round runs."""
    return sum(times for _, x, times in self.runs(unknown) if x.op not in CONTROL)

  def kernel_bytes(self, computation: str, x: Instruction) -> int:
    """Return the bytes that a kernel declares; else those of its operands and results."""
    match = re.search(r'"bytes_accessed":"(\d+)"', x.rest)
    if match:
      return int(match[1])
    here = self.by_name(computation)
    return shape_bytes(x.shape) + sum(shape_bytes(here[name].shape) for name in x.operands if name in here)

  def parts_read(self, computation: str) -> dict[int, int]:
    """Return {parameter: bytes} that a fused computation reads of parameters of which it reads parts alone."""
    here = self.computations[computation]
    users = collections.defaultdict(list)
    for x in here:
      for i, name in enumerate(x.operands):
        users[name].append((x, i))
    parts = {int(x.rest.partition(')')[0]): self._part_read(x, users) for x in here if x.op == 'parameter'}
    return {i: n for i, n in parts.items() if n is not None}

  def _part_read(self, x: Instruction, users: dict[str, list]) -> int | None:
    """Return the bytes that are read of an array in slices; None where all of it may be."""
    total = 0
    for user, i in users[x.name]:
      if user.op in ('dynamic-slice', 'slice') or (user.op == 'gather' and i == 0):
        total += shape_bytes(user.shape)
      elif (user.op in ('bitcast', 'reshape') or self.is_copy(user)) and not user.root:  # read as it is asked for
        part = self._part_read(user, users)
        if part is None:
          return None
        total += part
      elif user.op == 'fusion':
        part = self.parts_read(user.called['calls'][0]).get(i)
        if part is None:
          return None
        total += part
      elif not (user.op == 'dynamic-update-slice' and i == 0):  # which goes on in place
        return None
    return total

  def parts_written(self, computation: str) -> list[int | None]:
    """Return for each result of a fused computation the bytes that are written in place; None where all of it is."""
    here = self.by_name(computation)
    root = next(x for x in here.values() if x.root)
    results = [here[name] for name in root.operands] if root.op == 'tuple' else [root]
    written = []
    for x in results:
      while x.op == 'bitcast' and x.operands[0] in here:
        x = here[x.operands[0]]
      update = here.get(x.operands[1]) if x.op == 'dynamic-update-slice' else None
      written.append(None if update is None else shape_bytes(update.shape))
    return written


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
  """Return the computations of a program's text, and the name of the one that it starts with."""
  computations = {}
  current = None
  entry = None
  for line in _METADATA.sub(r'={\1}', text).splitlines():
    if not line.startswith((' ', '}')) and (match := _COMPUTATION.match(line)):
      current = computations.setdefault(match[2], [])
      entry = match[2] if match[1] else entry
    elif line.startswith('}'):
      current = None
    elif current is not None and (match := _INSTRUCTION.match(line)):
      current.append(Instruction(match[2], match[3], match[4], match[5], bool(match[1])))
  if entry is None:
    raise ValueError('this is not the text of a compiled program: it has no ENTRY computation')
  return computations, entry
