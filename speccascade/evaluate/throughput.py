"""What the time of a decode is made of: the prefill, and a batch whose rows are always in use."""

from collections.abc import Callable, Sequence
import time
from typing import Any

import jax

from speccascade.decode import stream
from speccascade.engine.method import Method
from speccascade.planning import timing
from speccascade.types import Model


def steady(
  method: Method,
  models: Sequence[Model],
  prompts: Sequence[Any],
  batch: int,
  clock: Callable[[], float] = time.perf_counter,
  **settings: Any,
) -> dict[str, float]:
  """Decode a queue, and time it while every row is in use and the sequences in them are at different positions.

  With n prompts, at least three batches, the steady part is from the end of the `batch`-th sequence, by which the rows
  that began together are at different positions, to the end of the (n - `batch`)-th, after which rows stay empty. Its
  tokens are those of the sequences that ended after the first bound and not after the second: as many are under way at
  both bounds. Several may end together; a bound among them divides their tokens, at both bounds alike.

  Returns:
    `seconds` and `tokens` of the queue, `steady_seconds` and `steady_tokens` of its steady part and, if any texts ended
    as faults, the number of these `faults`.
  """
  start = clock()
  ended = [(start, 0)]  # the time and the number of tokens when so many texts had ended
  faults = 0
  for _, row in stream(method, models, prompts, batch_size=batch, **settings):
    ended.append((clock(), ended[-1][1] + len(row.tokens)))
    faults += row.fault is not None
  seconds = clock() - start
  first = ended[batch]
  last = ended[len(prompts) - batch]
  times = dict(seconds=seconds, tokens=ended[-1][1])
  times |= dict(steady_seconds=last[0] - first[0], steady_tokens=last[1] - first[1])
  return times | ({'faults': faults} if faults else {})


def prefill_seconds(method: Method, models: Sequence[Model], prompts: Sequence[Any], **sizes: Any) -> float:
  """Compute the caches of one batch of prompts, and return the seconds until the device has them.

  Sizes are `max_new_tokens`, `max_prompt_tokens` and `sampler`, as in the decode.
  """
  engine, rows = timing.engine_of(method, models, prompts, **sizes)
  tokens = [row.tokens for row in rows]
  return timing.timed(lambda: jax.block_until_ready(engine.prefill(tokens, engine.size)))[0]
