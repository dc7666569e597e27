"""Time whole decodes on a CPU without each piece of its backend's special code, in turn in one run.

python scripts/cpu_ablation.py FOLDER/small FOLDER/large --prompts FILE [--count 32] [--trials 7] [--batches 1 16]

Prints the time without a piece over the time with all of them: the median of the trials, and their quartiles.
"""

import argparse
from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools

import numpy as np

import speccascade
from speccascade import backends, decode, methods, rules, Sampler
from speccascade.backends import Backend, CPU, ops
from speccascade.data import files
from speccascade.host import commands
from speccascade.planning import timing

PIECES = {  # what is plain XLA's instead
  'products in parts, where the CPU has tiles': (),
  'kernels by row, sums of products': ('prepare', 'matmul_rows'),
  'caches with heads in front': ('entry', 'write', '_attend', 'slot_axis'),
  'a slot written row by row': ('put',),
  'arg max by two maxima': ('argmax',),
}
PLAIN = {'put': ops.masked_put, 'argmax': ops.plain_argmax}  # of indexed operations
METHODS = {
  'autoregressive, T = 0': (methods.autoregressive(1), 0.0),
  'speculative, T = 0': (methods.speculative(block=3), 0.0),
  'cascade OPT, T = 1': (methods.speculative(functools.partial(rules.opt, alpha=0.1), 3), 1.0),
}


def without(names: tuple[str, ...]) -> Backend:
  """Return the CPU's backend with members of plain XLA's; with none, one that uses no tiles.

  It is its own class, so that programs of different pieces are different programs.
  """
  if not names:
    return CPU(tiles=False)
  members = {name: getattr(Backend, name) for name in names if name not in PLAIN}
  return dataclasses.dataclass(frozen=True)(type('CPU', (CPU,), members))()


@contextlib.contextmanager
def plain_operations(names: tuple[str, ...]) -> Iterator[None]:
  """Trace with XLA's own form of indexed operations."""
  own = {name: getattr(ops, name) for name in names if name in PLAIN}
  try:
    for name in own:
      setattr(ops, name, PLAIN[name])
    yield
  finally:
    for name, operation in own.items():
      setattr(ops, name, operation)


def seconds(name: str, backend: Backend, run: Callable) -> float:
  """Return the seconds of a run without a piece."""
  backends.register('cpu', backend)
  with plain_operations(PIECES.get(name, ())):
    return timing.timed(run)[0]


def main() -> None:
  """Measure and print a table."""
  parser = argparse.ArgumentParser('cpu_ablation', description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  parser.add_argument('models', nargs=2, help='checkpoints, the small one first')
  parser.add_argument('--prompts', required=True, help='a file of lines')
  parser.add_argument('--count', type=commands.count, default=32)
  parser.add_argument('--tokens', type=commands.count, default=48)
  parser.add_argument('--trials', type=commands.count, default=7)
  parser.add_argument('--batches', type=commands.count, nargs='+', default=[1, 16])
  args = parser.parse_args()
  models, prompts = [speccascade.load(path) for path in args.models], files.texts(args.prompts, None, args.count)
  everything = {'': CPU()} | {name: without(names) for name, names in PIECES.items()}
  print(f'| without | {" | ".join(f"{m}, batch {n}" for n in args.batches for m in METHODS)} |')
  print(f'| --- |{" --- |" * len(METHODS) * len(args.batches)}')
  cells = {name: [] for name in PIECES}
  for batch in args.batches:
    some = prompts[: max(4, args.count // 4)] if batch == 1 else prompts
    for method, temperature in METHODS.values():
      call = dict(max_new_tokens=args.tokens, batch_size=batch, sampler=Sampler(temperature))
      run = functools.partial(decode, method, models, some, **call)
      runs = {name: functools.partial(seconds, name, backend, run) for name, backend in everything.items()}
      found = timing.interleave(runs, args.trials)
      for name in PIECES:
        low, middle, high = np.quantile(np.divide(found[name], found['']), (0.25, 0.5, 0.75))
        cells[name].append(f'{middle:.2f} ({low:.2f} … {high:.2f})')
  for name, row in cells.items():
    print(f'| {name} | {" | ".join(row)} |')


if __name__ == '__main__':
  main()
