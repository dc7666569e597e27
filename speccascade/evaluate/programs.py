"""The programs that points need, compiled before they are needed."""

from collections.abc import Callable, Iterable, Sequence
import concurrent.futures
from typing import Any

import jax
import numpy as np

from speccascade.engine.method import Strategy
from speccascade.evaluate.curves import Point
from speccascade.host import multihost

Call = Callable[[Strategy, float], Any]  # (method, temperature): decode something with the program, untimed


class Programs:
  """Compile programs in the background, in the order in which they are needed.

  Points that differ in numbers only share a program. Where several processes have to call programs in one order, one
  thread calls them, and the first wait is for all.

  Args:
    call: Calls a program once.
    runs: (temperature, point) in the order in which they are needed.
    batch: The size of the batches.
  """

  def __init__(self, call: Call, runs: Iterable[tuple[float, Point]], batch: int):
    self._call = call
    self._program_of: dict[tuple, tuple] = {}  # by point
    self._labels: dict[tuple, str] = {}
    needed: dict[tuple, tuple[Strategy, float]] = {}
    for temperature, point in runs:
      name = (temperature, *point.name)
      if name in self._program_of:
        continue
      method = point.build().running_all()
      leaves, structure = jax.tree.flatten(method)
      key = (temperature, structure, *map(np.shape, leaves))
      self._program_of[name] = key
      needed.setdefault(key, (method, temperature))
      self._labels.setdefault(key, f'{point.label}, T = {temperature:g}')
    self._in_order = multihost.threads() == 1
    self._pool = concurrent.futures.ThreadPoolExecutor(multihost.threads())
    self._futures: dict[tuple, concurrent.futures.Future] = {}
    heads: dict[tuple[int, ...], concurrent.futures.Future] = {}  # by slots: it compiles the prefill of these models
    for key, (method, temperature) in needed.items():
      slots = None if method.whole_texts else method.at(batch).slots  # of whole texts: it decodes as others do
      after = [head for models, head in heads.items() if slots in (None, models)]
      self._futures[key] = self._pool.submit(self._call_after, after, method, temperature)
      if slots is not None:
        heads.setdefault(slots, self._futures[key])

  def __enter__(self) -> 'Programs':
    return self

  def __exit__(self, *error: Any):
    self._pool.shutdown(wait=error[0] is None, cancel_futures=True)  # after a stop what has not begun need not compile

  def __len__(self) -> int:
    return len(self._futures)

  def _call_after(self, after: Sequence[concurrent.futures.Future], method: Strategy, temperature: float):
    for future in after:
      future.result()
    self._call(method, temperature)

  def ready(self, temperature: float, point: Point) -> bool:
    """Return whether a program need not be waited for."""
    return self._future(temperature, point).done()

  def wait(self, temperature: float, point: Point):
    """Wait for a program; raise what it raised."""
    if self._in_order:
      concurrent.futures.wait(self._futures.values())  # so that this thread calls nothing meanwhile
    self._future(temperature, point).result()

  def _future(self, temperature: float, point: Point) -> concurrent.futures.Future:
    return self._futures[self._program_of[(temperature, *point.name)]]

  def wait_for_all(self, ended: Callable[[str], None]):
    """Wait for all programs; `ended` gets the label of each."""
    label_of = {future: self._labels[key] for key, future in self._futures.items()}
    for future in concurrent.futures.as_completed(label_of):
      future.result()
      ended(label_of[future])
