"""What a compiled decode loop holds and does: memory by kind, copies, collectives, and how long a round takes.

For a TPU a round is simulated (`planning.rounds`). Next to it stand the traffic, the time in which the memory moves the
bytes of the round; the floor, that of phases which overlap their bytes with their instructions; and the time that
reading the weights and used caches of each model call takes once. For a GPU the kernels of a round are counted.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speccascade import Sampler
from speccascade.engine import loop
from speccascade.engine.lowering import lower
from speccascade.host import storage
from speccascade.planning import aot, hlo, rounds
from speccascade.types import Model

KINDS = {'params': 'weights', 'caches': 'caches', 'window': 'window'}  # by a name in the path of an argument


def argument_bytes(module: hlo.Module) -> dict[str, int]:
  """Return the bytes of the arguments by kind, on one chip, without padding."""
  total = dict.fromkeys(('weights', 'caches', 'window', 'rest'), 0)
  for x in module.computations[module.entry]:
    if x.op == 'parameter':
      kind = next((kind for name, kind in KINDS.items() if name in x.path), 'rest')
      total[kind] += hlo.shape_bytes(x.shape)
  return total


def cache_moves(module: hlo.Module) -> list[str]:
  """Return the copies of complete caches in a round: to another layout, or back from a faster memory."""
  leaves = {
    (a.dtype, a.elements)
    for x in module.computations[module.entry]
    if x.op == 'parameter' and 'caches' in x.path
    for a in hlo.arrays(x.shape)
    if len(a.dims) > 1
  }
  copies = [(x, new) for c in module.closure(module.body) for x, _, new in module.copies(c)]
  return [f'{new.dtype}{list(new.dims)}' for _, new in copies if (new.dtype, new.elements) in leaves]


def rows_that_fit(weights: int, used: int, batch: int, memory: float) -> int:
  """Return about how many rows fit, all growing with them but the weights and their copies in other layouts."""
  return max(0, int((memory - weights) * batch / max(1, used - weights)))


def report(
  program, method, models: Sequence[Model], sizes: aot.Sizes, chip: aot.Chip, placement: aot.Placement | None = None
) -> dict[str, Any]:
  """Return what a compiled loop holds and does on a chip of its placement, None for one chip."""
  method = method.for_networks([m.network for m in models])
  memory = program.memory_analysis()
  module = hlo.Module(program.as_text())
  relayouts = module.relayouts()
  moves = cache_moves(module)
  anew = [(path, array) for path, array in relayouts if path.startswith('params')]
  on_tpu = any(x.cycles for x in module.computations[module.body])  # a GPU's program has no estimates
  simulated = None
  if on_tpu:
    network = None if chip.links is None else lambda *what: chip.clock * chip.links.seconds(*what)
    simulated = rounds.simulate(module, chip.bandwidth / chip.clock, method.draft_turns, network=network)
  least = aot.floor_bytes(method, models, sizes, placement)
  arguments = argument_bytes(module)
  taken = memory.argument_size_in_bytes
  new = memory.output_size_in_bytes - memory.alias_size_in_bytes
  copied = sum(array.bytes for _, array in anew)
  used = taken + memory.temp_size_in_bytes + new
  return dict(
    argument_bytes=taken,
    arguments=arguments,
    temp_bytes=memory.temp_size_in_bytes,
    output_bytes=new,
    used_bytes=used,
    memory_bytes=round(chip.memory * 2**30),
    rows_that_fit=rows_that_fit(arguments['weights'] + copied, used, sizes.batch, chip.memory * 2**30),
    row_loops=len(module.row_loops()),
    cache_copies=len(moves),
    cache_copies_of={shape: moves.count(shape) for shape in sorted(set(moves))},
    entry_relayouts=len(anew),
    entry_relayout_bytes=copied,
    entry_cache_relayouts=len(relayouts) - len(anew),
    collectives=module.collectives(method.draft_turns),
    kernels=module.kernels(method.draft_turns),
    thin_arrays=len(module.thin_arrays()) if on_tpu else 0,
    floor_bytes=least,
    **_cycles(simulated),
  )


def _cycles(found: rounds.Round | None) -> dict[str, Any]:
  """Return the figures of a simulated round."""
  if found is None:
    return dict(simulated_cycles=None)

  def whole(figures):
    return {name: round(x) for name, x in figures.items()}

  return dict(
    simulated_cycles=round(found.cycles),
    collective_cycles=round(found.collectives),
    traffic_cycles=round(found.traffic),
    floor_cycles=round(found.floor),
    cycles_by_part=whole(found.parts),
    cycles_by_phase=whole(found.phases),
  )


def show(figures: dict[str, Any], chip: aot.Chip) -> None:
  """Print what `report` returns."""

  def gib(n):
    return f'{n / 2**30:.3f} GiB'

  parts = ', '.join(f'{name} {gib(n)}' for name, n in figures['arguments'].items())
  print(f'arguments       {gib(figures["argument_bytes"])} with padding; {parts}')
  print(f'temporaries     {gib(figures["temp_bytes"])}; results in new memory {gib(figures["output_bytes"])}')
  of = f'{gib(figures["used_bytes"])} of {gib(figures["memory_bytes"])}'
  print(f'a chip          {of}; by this about {figures["rows_that_fit"]} rows fit')
  if 'reading_bytes' in figures:
    print(
      f'to read prompts {gib(figures["reading_bytes"])}, the new caches among them, of the model that needs the most'
    )
  anew = f'{figures["entry_relayouts"]} weights ({gib(figures["entry_relayout_bytes"])})'
  print(f'laid out anew   {anew} and {figures["entry_cache_relayouts"]} other arguments, before the loop')
  print(f'in a round      {figures["row_loops"]} loops over rows, {figures["cache_copies"]} copies of complete caches')
  for shape, count in figures['cache_copies_of'].items():
    print(f'                  {count} × {shape}')
  for name, (count, times, size) in figures['collectives'].items():
    print(f'                {times} {name} of {size / 2**20:.2f} MiB in all; {count} in the text')
  least = f'weights and used caches are read in {1e3 * figures["floor_bytes"] / chip.bandwidth:.2f} ms'
  if not (cycles := figures['simulated_cycles']):  # as for GPUs
    print(f'kernels         {figures["kernels"]:,} in a round; {least}')
    return

  def of(name):
    return f'{figures[name] / 1e6:.2f} M ({1e3 * figures[name] / chip.clock:.2f} ms)'

  traffic, floor = (f'{of(name)}, {cycles / figures[name]:.2f} times' for name in ('traffic_cycles', 'floor_cycles'))
  print(f'a round         {of("simulated_cycles")}, simulated; {least}')
  if figures['collectives']:
    print(f'  collectives   {of("collective_cycles")} of it')
  print(f'  over traffic  {traffic}')
  print(f'  over floor    {floor}')
  for kind in ('phase', 'part'):
    for name, n in figures[f'cycles_by_{kind}'].items():
      print(f'                  {n:>12,} {100 * n / cycles:5.1f} %  {name}')


def of_topology(
  topology: str,
  method,
  models: Sequence[Model],
  sizes: aot.Sizes,
  sampler: Sampler,
  mesh: Mapping[str, int] = {},
  rules: Sequence[str] = (),
  options: Mapping[str, str] = {},
  text: Path | None = None,
  prefill: bool = False,
) -> dict[str, Any]:
  """Compile a method's loop for the chips of a topology and return its report.

  Args:
    topology: Chips and their layout, as 'v5e:2x2', or 'h100'.
    method: To compile.
    models: Its models.
    sizes: Of the decode.
    sampler: Whose filters are compiled in.
    mesh: {axis: chips}.
    rules: 'replicated' or 'sharded' for each model.
    options: Of XLA.
    text: A file that the program's text is written to.
    prefill: Whether the reading of the prompts is compiled, too.
  """
  placement = aot.Placement(aot.describe(topology).devices, dict(mesh), rules)
  platform = 'cuda' if topology.startswith('h100') else 'tpu'
  program = aot.compiled(method, models, sizes, sampler, placement, platform, dict(options))
  if text is not None:
    storage.write(text, program.as_text())
  found = report(program, method, models, sizes, aot.chip_of(topology), placement)
  if prefill:
    slots = loop.positions(models[-1].network, sizes.source, sizes.tokens, lower(method).window)
    found['reading_bytes'] = aot.reading_bytes(models, sizes, placement, platform, slots)
  return found
