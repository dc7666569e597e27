"""Compile a method's decode loop for chips that need not be there, and say what the program holds and does.

  python -m speccascade.compile --topology v5e:2x2 --pair t5_small_xl --method speculative --batch 8 --block 5
  python -m speccascade.compile --topology v5e:2x2 --pair llama_7b_70b --mesh data=1,model=4 --json
  python -m speccascade.compile --topology v6e:2x2 --pair SMALL/config.json LARGE/config.json --method opt

TPUs need the extra `tpu`, h100 the CUDA plugin of JAX. Estimated cycles are those of XLA's own cost model: they rank
programs and do not time them. For a GPU it has none, and the kernels of a round are counted. On a mesh, what is said of
arguments and memory is of one chip, and collectives are those of a round. The floor is what the memory of the chips
takes to read, in a round, the weights and used caches of each model call.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import functools
import json
from pathlib import Path
import re
import sys
import time
from typing import Any

import jax

from speccascade import methods, rules, Sampler
from speccascade.backends import sharding
from speccascade.checkpoints.hf import network_from_config
from speccascade.host import commands
from speccascade.host.errors import RunError
from speccascade.models import shapes
from speccascade.planning import aot, hlo
from speccascade.types import Network

METHODS = {
  'autoregressive': lambda block: methods.autoregressive(1),
  'speculative': lambda block: methods.speculative(block=block),
  'opt': lambda block: methods.speculative(functools.partial(rules.opt, alpha=0.1), block),
  'cos': lambda block: methods.cos(functools.partial(rules.weighted, weights=(0.5, 0.5)), (block, 1)),
}


PARTS = {  # by the names of modules in an instruction's path
  'attention': r'attention',
  'MLP': r'/mlp',
  'head': r'logits_dense|\.attend',
  'embedding': r'embedder',
  'position bias': r'relpos_bias',
  'norms': r'norm',
}


def part(x: hlo.Instruction) -> str:
  """Return what an instruction belongs to."""
  if x.op.removesuffix('-start') in hlo.COLLECTIVES:
    return 'collectives'
  if x.op in ('copy', 'transpose'):
    return 'copies'
  return next((name for name, pattern in PARTS.items() if re.search(pattern, x.path)), 'sampling, tests, bookkeeping')


KINDS = {'params': 'weights', 'caches': 'caches', 'window': 'window'}  # by what stands in the path of an argument


def argument_bytes(module: hlo.Module) -> dict[str, int]:
  """Return the bytes of the arguments by kind, on one chip, without padding."""
  found = dict.fromkeys(('weights', 'caches', 'window', 'rest'), 0)
  for x in module.computations[module.entry]:
    if x.op == 'parameter':
      kind = next((kind for name, kind in KINDS.items() if name in x.path), 'rest')
      found[kind] += hlo.shape_bytes(x.shape)
  return found


def cache_moves(module: hlo.Module) -> list[str]:
  """Return the copies of whole caches in a round: to another layout, or back from a faster memory."""
  leaves = {
    (a.dtype, a.elements)
    for x in module.computations[module.entry] if x.op == 'parameter' and 'caches' in x.path
    for a in hlo.arrays(x.shape) if len(a.dims) > 1
  }  # fmt: skip
  copies = [(x, new) for c in module.closure(module.body) for x, _, new in module.copies(c)]
  return [f'{new.dtype}{list(new.dims)}' for _, new in copies if (new.dtype, new.elements) in leaves]


def rows_that_fit(weights: int, used: int, batch: int, memory: float) -> int:
  """Return about how many rows fit, all growing with them but the weights and their copies in other layouts."""
  return max(0, int((memory - weights) * batch / max(1, used - weights)))


def report(
  program, method, networks: Sequence[Network], sizes: aot.Sizes, chip: aot.Chip, chips: int = 1
) -> dict[str, Any]:
  """Return what a compiled loop holds and does."""
  memory, module = program.memory_analysis(), hlo.Module(program.as_text())
  relayouts, moves = module.relayouts(), cache_moves(module)
  anew = [(path, array) for path, array in relayouts if path.startswith('params')]
  cycles = module.cycles(part, aot.turns(method), chip.bandwidth / chip.clock)
  least = aot.floor_bytes(method, networks, sizes) / chips
  arguments, new = argument_bytes(module), memory.output_size_in_bytes - memory.alias_size_in_bytes
  copied = sum(array.bytes for _, array in anew)
  used = memory.argument_size_in_bytes + memory.temp_size_in_bytes + new
  return dict(
    argument_bytes=memory.argument_size_in_bytes,
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
    collectives=module.collectives(aot.turns(method)),
    kernels=module.kernels(aot.turns(method)),
    estimated_cycles=round(sum(cycles.values())) or None,
    cycles_by_part={name: round(value) for name, value in cycles.items()},
    floor_bytes=round(least),
    floor_cycles=round(least / chip.bandwidth * chip.clock),
  )


def show(found: dict[str, Any], chip: aot.Chip) -> None:
  """Print a report."""
  gib = lambda n: f'{n / 2**30:.3f} GiB'
  parts = ', '.join(f'{name} {gib(n)}' for name, n in found['arguments'].items())
  print(f'arguments       {gib(found["argument_bytes"])} with padding; {parts}')
  print(f'temporaries     {gib(found["temp_bytes"])}; results in new memory {gib(found["output_bytes"])}')
  of = f'{gib(found["used_bytes"])} of {gib(found["memory_bytes"])}'
  print(f'a chip          {of}; by this about {found["rows_that_fit"]} rows fit')
  anew = f'{found["entry_relayouts"]} weights ({gib(found["entry_relayout_bytes"])})'
  print(f'laid out anew   {anew} and {found["entry_cache_relayouts"]} other arguments, before the loop')
  print(f'in a round      {found["row_loops"]} loops over rows, {found["cache_copies"]} copies of whole caches')
  for shape, count in found['cache_copies_of'].items():
    print(f'                  {count} × {shape}')
  for name, (count, times, size) in found['collectives'].items():
    print(f'                {times} {name} of {size / 2**20:.2f} MiB in all; {count} in the text')
  floor = f'floor by bytes {found["floor_cycles"]:,} ({1e3 * found["floor_cycles"] / chip.clock:.2f} ms)'
  if not found['estimated_cycles']:  # as for GPUs
    print(f'kernels         {found["kernels"]:,} in a round; {floor}')
    return
  print(f'cycles          {found["estimated_cycles"]:,} estimated; {floor}')
  for name, cycles in found['cycles_by_part'].items():
    print(f'                  {cycles:>12,} {100 * cycles / found["estimated_cycles"]:5.1f} %  {name}')
  print("The estimate is of XLA's cost model: it ranks programs and does not time them.")


# ---- the command ----


def networks_of(pair: Sequence[str], dtype: str, scan: bool = False) -> list[Network]:
  """Return the networks of a named pair, or of two config.json."""
  if len(pair) == 1:
    return [dataclasses.replace(network, scan=scan) for network in shapes.pair(pair[0], dtype)]
  return [network_from_config(json.loads(Path(path).read_text()), dtype=dtype, scan=scan) for path in pair]


def parse_rules(text: str) -> list[str]:
  """Return the rules of 'whole,cut', one for each model."""
  if lost := [name for name in text.split(',') if name not in sharding.NAMED]:
    raise argparse.ArgumentTypeError(f"'{lost[0]}' is neither whole nor cut; give one for each model, as whole,cut")
  return text.split(',')


def parse_option(text: str) -> tuple[str, str]:
  """Return (name, value) of 'name=value'."""
  name, equals, value = text.removeprefix('--').partition('=')
  if not equals:
    raise argparse.ArgumentTypeError(f"'{text}' is not like NAME=VALUE")
  return name, value


def main(argv: Sequence[str] | None = None) -> int:
  """Compile and report; return the exit code, 1 where the program cannot be compiled, as where it does not fit."""
  return commands.run(_parser(), _report, argv, 'interrupted')


def _parser() -> commands.Parser:
  parser = commands.Parser('speccascade.compile', __doc__)
  parser.add_argument('--topology', default='v5e:2x2', help="chips and their layout, as in v5e:2x2, or 'h100'")
  parser.add_argument('--pair', nargs='+', required=True, help=f'{", ".join(shapes.PAIRS)}, or two config.json')
  parser.add_argument('--method', choices=METHODS, default='speculative')
  parser.add_argument('--batch', type=int, default=1)
  parser.add_argument('--block', type=int, default=5, help='γ')
  parser.add_argument('--source', type=int, default=256, help='padded length of the prompts')
  parser.add_argument('--tokens', type=int, default=128, help='the most new tokens')
  parser.add_argument('--temperature', type=float, default=1.0)
  parser.add_argument('--dtype', default='bfloat16', help='of weights and caches')
  parser.add_argument('--mesh', type=commands.mesh, default={}, help='chips by axis, as in data=1,model=4')
  parser.add_argument(
    '--rules', type=parse_rules, default=[],
    help='whole or cut for each model, as in whole,cut. Default: cut where that saves more than its collectives cost',
  )  # fmt: skip
  parser.add_argument('--xla', type=parse_option, default=[], action='append', help='an option of XLA, as NAME=VALUE')
  parser.add_argument('--scan', action='store_true', help='scan the layers: a program of one layer for all')
  parser.add_argument('--text', type=Path, help="write the program's text to this file")
  parser.add_argument('--json', action='store_true', help='end with one JSON object in a line')
  return parser


def _report(args: argparse.Namespace):
  if len(args.pair) > 2:
    raise RunError('--pair takes one name or two paths.')
  if len(args.rules) not in (0, 2):
    raise RunError(f'--rules has {len(args.rules)} for two models; give both, as in whole,cut.')
  try:
    found = _run(args)
  except jax.errors.JaxRuntimeError as error:
    raise RunError(aot.first_line(error)) from error
  if args.json:
    print(json.dumps(found))


def _run(args: argparse.Namespace) -> dict[str, Any]:
  start, chip = time.perf_counter(), aot.CHIPS.get(args.topology.partition(':')[0])
  devices = aot.describe(args.topology).devices
  place = aot.Placement(devices, args.mesh, args.rules)
  method, networks = METHODS[args.method](args.block), networks_of(args.pair, args.dtype, args.scan)
  sizes = aot.Sizes(args.batch, args.source, args.tokens)
  platform = 'cuda' if args.topology.startswith('h100') else 'tpu'
  done = aot.compiled(method, networks, sizes, Sampler(args.temperature), place, platform, dict(args.xla))
  if args.text:
    args.text.write_text(done.as_text())
  what = f'{" and ".join(args.pair)}, {method.name}, batch {args.batch}, γ {args.block}, {args.dtype}'
  what += f', {dict(place.mesh.shape)}'
  print(f'{devices[0].device_kind}: {what}; compiled in {time.perf_counter() - start:.0f} s')
  found = report(done, method, networks, sizes, chip, place.mesh.size)
  show(found, chip)
  return found


if __name__ == '__main__':
  jax.config.update('jax_platforms', 'cpu')  # whatever is here, it is not what is compiled for
  sys.exit(main())
