"""The programs that points need, compiled before they are needed."""

from collections.abc import Callable, Iterable
import concurrent.futures
from typing import Any

import jax
import numpy as np

from speccascade.engine.method import Strategy
from speccascade.evaluate.curves import Point
from speccascade.host import multihost
from speccascade.host.progress import Progress

Call = Callable[[Strategy, float], Any]  # (method, temperature): decode something with the program, untimed


def compiled(call: Call, runs: Iterable[tuple[float, Point]], batch: int, label: str):
  """Call each program that points need once, several at the same time; points that differ in numbers share one.

  Args:
    call: Calls a program.
    runs: (temperature, point).
    batch: The size of the batches.
    label: Names the progress.
  """
  needed: dict[tuple, tuple[Strategy, float]] = {}
  runs = list(runs)  # so that each point has an id of its own
  built: dict[int, Strategy] = {}  # once a point, for functions that a method makes anew are other programs
  for temperature, point in runs:
    if id(point) not in built:
      built[id(point)] = point.build()
    method = built[id(point)].running_all()
    leaves, structure = jax.tree.flatten(method)
    needed.setdefault((temperature, structure, *map(np.shape, leaves)), (method, temperature))
  first = {}  # of the same models: it compiles their prefill, which the others find compiled
  for method, temperature in needed.values():
    if not method.whole_texts:  # they decode as others do
      first.setdefault(method.at(batch).slots, (method, temperature))
  rest = [run for run in needed.values() if run not in first.values()]
  progress = Progress(label, len(needed), unit='programs')
  pool = concurrent.futures.ThreadPoolExecutor(multihost.threads())
  try:
    for some in (first.values(), rest):
      for future in concurrent.futures.as_completed([pool.submit(call, *run) for run in some]):
        future.result()
        progress.add(1)
  except BaseException:
    pool.shutdown(wait=False, cancel_futures=True)  # after a stop what has not begun need not compile
    raise
  pool.shutdown()
