"""What the time of a decode is made of: the reading of the prompts, and a batch whose slots are always filled."""

from collections.abc import Callable, Sequence
import dataclasses
import time
from typing import Any

import jax

from speccascade.decode import stream
from speccascade.engine.method import Method
from speccascade.planning import timing
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
  engine, rows = timing.engine_of(method, models, prompts, **sizes)
  tokens = [row.tokens for row in rows]
  return lambda: timing.timed(lambda: jax.block_until_ready(engine.prefill(tokens, engine.size)))[0]
