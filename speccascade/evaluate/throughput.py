"""What the time of a decode is made of: the reading of the prompts, and a batch whose slots are always filled."""

from collections.abc import Callable, Sequence
import dataclasses
import time
from typing import Any

import jax

from speccascade import sampling
from speccascade.backends import sharding
from speccascade.decode import stream
from speccascade.engine import Engine, inputs, requests
from speccascade.engine.method import Method
from speccascade.planning.timing import timed
from speccascade.types import Model


@dataclasses.dataclass(frozen=True)
class Steady:
  """A queue of texts that was decoded with a constant batch.

  Attributes:
    seconds: of the complete queue.
    tokens: of the complete queue.
    faults: texts that ended as faults.
    steady_seconds: of its steady part.
    steady_tokens: of the texts that ended in the steady part.
  """

  seconds: float
  tokens: int
  faults: int
  steady_seconds: float
  steady_tokens: int


def steady(
  method: Method,
  models: Sequence[Model],
  prompts: Sequence[Any],
  batch: int,
  clock: Callable[[], float] = time.perf_counter,
  **settings: Any,
) -> Steady:
  """Decode a queue, and time it while every slot is filled and the texts in them are at different positions.

  With n prompts the steady part is from the end of the `batch`-th text, by which the slots that began together are at
  different positions, to the end of the (n - `batch`)-th, after which slots stay empty. Its tokens are those of the
  texts that ended after the first bound and not after the second: as many texts are under way at both bounds. Several
  texts may end together; a bound among them divides their tokens, at both bounds alike.

  Args:
    method: the method.
    models: the models.
    prompts: at least three times `batch`.
    batch: the slots.
    clock: returns seconds.
    **settings: of `speccascade.stream`.

  Raises:
    ValueError: fewer prompts than three batches.
  """
  if len(prompts) < 3 * batch:
    raise ValueError(f'{len(prompts)} prompts are fewer than three batches of {batch}; give more.')
  start = clock()
  ended = [(start, 0)]  # the time and the number of tokens when so many texts had ended
  faults = 0
  for _, row in stream(method, models, prompts, batch_size=batch, **settings):
    ended.append((clock(), ended[-1][1] + len(row.tokens)))
    faults += row.fault is not None
  seconds = clock() - start
  first = ended[batch]
  last = ended[len(prompts) - batch]
  return Steady(seconds, ended[-1][1], faults, last[0] - first[0], last[1] - first[1])


def prefill_call(method: Method, models: Sequence[Model], prompts: Sequence[Any], **sizes: Any) -> Callable[[], float]:
  """Return a function that times the reading of prompts as `decode` does it for one batch of them.

  Args:
    method: the method.
    models: the models.
    prompts: the prompts of one batch.
    **sizes: `max_new_tokens`, `max_prompt_tokens` and `sampler` as in the decode.

  Returns:
    A function that computes the caches of all prompts and returns the seconds until the device has them.
  """
  engine, rows = _batch(method, models, prompts, **sizes)
  tokens = [row.tokens for row in rows]
  return lambda: timed(lambda: jax.block_until_ready(engine.prefill(tokens, engine.size)))[0]


def full_call(
  method: Method, models: Sequence[Model], prompts: Sequence[Any], **sizes: Any
) -> Callable[[], tuple[float, int]]:
  """Return a function that times the rounds of one batch until the first of its texts ends: no prefill, no idle row.

  It returns the seconds, and the tokens that all rows committed in them. The arguments are those of `prefill_call`.
  """
  engine, rows = _batch(method, models, prompts, **sizes)
  prefix = engine.prefill([row.tokens for row in rows], engine.size)
  batch = engine.insert_batch(rows, None, range(len(rows)))

  def run() -> tuple[float, int]:
    state = jax.block_until_ready(engine.begin(prefix, batch))
    before = int(state.length.sum())
    seconds, (_, found) = timed(lambda: engine.collect(engine.run(state, ended=engine.size - len(rows) + 1)))
    return seconds, int(found['length'].sum()) - before

  return run


def _batch(
  method: Method,
  models: Sequence[Model],
  prompts: Sequence[Any],
  *,
  max_new_tokens: int,
  max_prompt_tokens: int | None,
  sampler: sampling.Sampler,
) -> tuple[Engine, list[requests.Row]]:
  """Return an engine for one batch of prompts, and their rows."""
  rows = requests.rows(models, prompts, max_new_tokens=max_new_tokens, sampler=sampler, seed=0)
  size = sharding.even(len(rows), sharding.row_shards([models[m] for m in method.slots]))
  method = method.at(size)
  width = inputs.prompt_width(models, rows, max_prompt_tokens)
  needs = requests.features(rows)
  return Engine(method, models, needs=needs, size=size, width=width, max_new=max_new_tokens), rows
