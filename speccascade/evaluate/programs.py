"""The programs that methods need: which of them share one, and all compiled before they are needed."""

import collections
from collections.abc import Callable, Iterable, Sequence
import concurrent.futures
from typing import Any

import jax
import numpy as np

from speccascade import rules
from speccascade.engine.lowering import lower
from speccascade.engine.method import Strategy
from speccascade.host import multihost
from speccascade.host.progress import Progress
from speccascade.rules.base import OneOf

Call = Callable[[Strategy, float], Any]  # (method, temperature): decode something with the program, untimed


def sharing(made: Sequence[Strategy]) -> list[Strategy]:
  """Return methods; those that differ by their rule alone have the rules of all of them, and so share a program."""
  alike = collections.defaultdict(list)
  for i, method in enumerate(made):
    if method.rule is not None:
      facts = rules.declaration(method.rule)
      shape = facts.by_slot, facts.by_prefix, facts.adds_logits
      alike[_program(lower(method.with_rule(rules.bind(rules.own)))), shape].append(i)
  shared = list(made)
  for group in alike.values():
    kinds = {_program(made[i].rule): made[i].rule for i in group}
    for i in group if len(kinds) > 1 else ():
      own = _program(made[i].rule)
      choices = tuple(made[i].rule if kind == own else rule for kind, rule in kinds.items())
      shared[i] = made[i].with_rule(OneOf(np.int32([*kinds].index(own)), choices))
  return shared


def _program(method: Any) -> tuple:
  """Return what of a method shapes its program."""
  leaves, structure = jax.tree.flatten(method)
  return structure, *map(np.shape, leaves)


def compiled(call: Call, runs: Iterable[tuple[float, Strategy]], batch: int, label: str):
  """Call each program that methods need once, several at the same time; methods that differ in numbers share one.

  Args:
    call: Calls a program.
    runs: (temperature, method).
    batch: The size of the batches.
    label: Names the progress.
  """
  needed: dict[tuple, tuple[Strategy, float]] = {}
  for temperature, method in runs:
    method = method.running_all()
    needed.setdefault((temperature, *_program(method.unnamed)), (method, temperature))
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
