"""Decode prompts with a method, all at once (`decode`) or row by row as they end (`stream`).

More prompts than a batch holds form a queue: the loop is left when an eighth of its rows has ended, and the next
prompts take their places (continuous batching).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
import itertools
import sys

import numpy as np
import tqdm

from speccascade import sampling
from speccascade.backends import sharding
from speccascade.decode import sequence_cascade
from speccascade.engine import engine, inputs, loop, plans, requests, results, validate
from speccascade.engine.method import SequenceCascade, Strategy
from speccascade.host.errors import known_as
from speccascade.types import Model, whole

_LOOKS = 8  # rounds between two looks for stop strings
_WORDS = {name: f'sampler=speccascade.Sampler({name}=…)' for name in sampling.NEUTRAL} | {
  'max_tokens': 'max_new_tokens=…'
}
_WORDS |= {name: f'speccascade.Request(prompt, {name}=…)' for name in ('stop', 'stop_tokens', 'logit_bias', 'n')}


@known_as('decode', **_WORDS)
def decode(
  method: Strategy,
  models: Sequence[Model],
  prompts: str | requests.Request | Sequence,
  *,
  max_new_tokens: int | None = None,
  sampler: sampling.Sampler = sampling.Sampler(),
  seed: int = 0,
  example_ids: Sequence[int] | None = None,
  batch_size: int | None = None,
  max_prompt_tokens: int | None = None,
  processor: Callable | None = None,
  trace: bool = False,
  progress: bool = False,
  keep_faults: bool = False,
) -> results.Decoded:
  """Continue each prompt by at most `max_new_tokens` tokens.

  A prompt is a text, a token list, chat messages or a `Request`, which may say anything else about its row; a single
  one that is no token list needs no list around it. The EOS ids of the last model that the method runs end a text.
  `example_ids` key the randomness, the places of the prompts unless they are given: an example's output does not depend
  on its batch mates. A request with a seed of its own is keyed by that alone. Of more prompts than `batch_size` the
  rest is queued. A batch is padded to 1, 2, 3, 4, 6, 8, 12, … rows, its prompts to a length of such steps;
  `max_prompt_tokens` fixes the padded length, so that calls with other prompts compile nothing.
  `processor(logits [V], tokens [T], count)` returns what every model's logits become after the first `count` of these
  tokens; arrays that change are bound to it with `functools.partial`. `trace` records each output token's
  log-probability under every model that scored it. `progress` shows a bar. Rows that end as faults are warned of, and
  raise where there are no others; with `keep_faults` they are returned and no more is said.
  """
  models = inputs.check_models(method, models)
  rows = requests.rows(
    models, prompts, max_new_tokens=max_new_tokens, sampler=sampler, seed=seed, example_ids=example_ids
  )
  settings = dict(batch_size=batch_size, max_prompt_tokens=max_prompt_tokens, processor=processor, progress=progress)
  if isinstance(method, SequenceCascade):
    if trace:
      raise ValueError('trace records one decode, and a sequence cascade is two; trace each with autoregressive().')
    ended = sequence_cascade.decode(
      method, rows, lambda one, some, **more: _decode(one, models, some, **settings, **more)
    )
  else:
    ended = _decode(method, models, rows, trace=trace, **settings)
  return results.collect(ended, keep_faults=keep_faults)


@known_as('stream', **_WORDS)
def stream(
  method: Strategy, models: Sequence[Model], prompts, *, max_new_tokens: int | None = None,
  sampler: sampling.Sampler = sampling.Sampler(), seed: int = 0, example_ids: Sequence[int] | None = None,
  batch_size: int | None = None, max_prompt_tokens: int | None = None, processor: Callable | None = None,
  trace: bool = False, every: int | None = None, skip: Collection[int] = (),
) -> Iterator[tuple[int, results.Row]]:  # fmt: skip
  """Yield (index, row) as rows end, what `decode` would return of them; index counts the samples of all prompts.

  With `every`, rows that go on are yielded as well after at most so many rounds, their `finish_reason` None: each text
  begins with the one before it, for half a character and what a stop string may begin with are held back. Rows whose
  index is in `skip`, as those of an earlier call that was stopped, are left out; the programs are as with them.
  """
  models = inputs.check_models(method, models)
  if isinstance(method, SequenceCascade):
    raise ValueError('a sequence cascade knows an answer only when both models are done: use decode.')
  rows = requests.rows(
    models, prompts, max_new_tokens=max_new_tokens, sampler=sampler, seed=seed, example_ids=example_ids
  )
  every = None if every is None else whole('every', every)
  skip = frozenset(whole('skip', i, 0) for i in skip)
  if skip and max(skip) >= len(rows):
    raise ValueError(f'skip has {max(skip)}, and the rows are 0 … {len(rows) - 1}; skip those of an earlier call.')
  sizes = dict(batch_size=batch_size, max_prompt_tokens=max_prompt_tokens, skip=skip)
  some = _serve(method, models, rows, trace=trace, processor=processor, every=every, patient=False, **sizes)
  return itertools.chain.from_iterable(some)


def _decode(
  method, models, rows, *, skip: frozenset[int] = frozenset(), progress: bool = False, **settings
) -> list[results.Row]:
  ended = {}
  with tqdm.tqdm(total=len(rows) - len(skip), disable=not progress, file=sys.stderr, unit='text') as bar:
    for some in _serve(method, models, rows, every=None, patient=True, skip=skip, **settings):
      ended |= dict(some)
      bar.update(len(some))
  return [ended[i] for i in sorted(ended)]


def _serve(
  method, models, rows, *, batch_size, max_prompt_tokens, trace=False, processor=None, every, patient, skip=frozenset()
) -> Iterator[list[tuple[int, results.Row]]]:
  """Return lists of (index, row) that ended or, with `every`, are under way, while the device goes on."""
  needs = requests.features(rows)
  size = inputs.bucket(len(rows), 1)
  size = size if batch_size is None else min(size, whole('batch_size', batch_size))
  shares = sharding.row_parts([models[m] for m in method.slots])
  size = sharding.even(size, shares)
  width = inputs.prompt_width(models, rows, max_prompt_tokens)
  max_new = max(row.max_new for row in rows)
  validate.check_targets(method, inputs.vocabulary(models), rows[0].sampler)
  for row in rows:
    plans.check_sampler(method.origin, row.sampler)
  method = method.at(size)
  made = engine.Engine(
    method, models, needs=needs, size=size, width=width, max_new=max_new, trace=trace, processor=processor
  )
  rounds = min(every or loop.FOREVER, _LOOKS if needs.texts else loop.FOREVER)
  parts, queue = results.Parts(method, models, rows, processor), _Queue(made, rows, skip, shares)
  return _run(queue, parts, every=every is not None, patient=patient, rounds=rounds)


def _run(queue: '_Queue', parts: results.Parts, *, every: bool, patient: bool, rounds: int):
  """Yield rows as `_serve` returns them; those that ended before something went wrong are given before it is raised."""
  made, size = queue.engine, queue.engine.size
  rows = lambda found: [(index, parts.row(index, *where)) for index, *where in found]
  state, stop, seen, early, left = None, np.zeros(size, bool), [], [], 0
  while queue.busy:
    try:
      if left <= 0:  # places change hands where the method says so, and never by the clock
        state = queue.fill(None if size == 1 and not queue.in_use else state)
        enough = size - queue.in_use + max(1, size // 8) if queue.waiting or not patient else size
        left = rounds
      state, packed = made.run(state, ended=min(size, enough), rounds=left, stop=stop & (queue.held < 0))
    except BaseException:
      yield rows(seen + early)
      raise
    if seen:
      yield rows(seen)
    try:
      batch = made.collect(packed, state)
    except BaseException:
      yield rows(early)
      raise
    left = 0 if batch['done'].sum() >= made.ended else left - made.rounds
    ended = [place for place in queue.places if batch['done'][place]]
    if left > 0:
      seen, early = [], [(int(queue.held[place]), batch, place) for place in ended]
      continue
    ended += [p for p in queue.places if p not in ended and parts.stops(queue.held[p], batch, p)]
    stop = np.isin(np.arange(size), ended)
    seen, early = [(int(queue.held[place]), batch, place) for place in (queue.places if every else ended)], []
    queue.free(ended)
  yield rows(seen)


class _Queue:
  """The rows that wait, those whose prompts have been read, and which row each place of the batch holds."""

  def __init__(self, made: engine.Engine, rows: Sequence[requests.Row], skip: frozenset[int], shares: int):
    self.engine, self.rows = made, rows
    self.held = np.full(made.size, -1)
    order = inputs.by_length([row.tokens for row in rows])  # samples of a prompt stay together
    self.order = [row for row in order if row not in skip]
    self.prefix, self.read = None, []  # (row of the prefix, row)
    self.queued = len(rows) > made.size
    self.chunk = max(shares, made.size // 2 // shares * shares) if self.queued else made.size  # prompts of one prefill

  @property
  def waiting(self) -> bool:
    return bool(self.order or self.read)

  @property
  def places(self) -> np.ndarray:
    """The places in use."""
    return np.flatnonzero(self.held >= 0)

  @property
  def in_use(self) -> int:
    return len(self.places)

  @property
  def busy(self) -> bool:
    return self.waiting or self.in_use > 0

  def free(self, places: Sequence[int]):
    self.held[places] = -1

  def fill(self, state):
    """Give all free places to rows that wait; return the state."""
    while self.waiting and (self.held < 0).any():
      if not self.read:
        self._prefill()
      free = np.flatnonzero(self.held < 0)[: len(self.read)]
      come, self.read = self.read[: len(free)], self.read[len(free) :]
      self.held[free] = [row for _, row in come]
      source = [at for at, _ in come]
      own = not self.queued and source == list(range(len(source)))
      arrival = self.engine.arrival([self.rows[i] for _, i in come], None if own else source, free.tolist())
      if state is None or self.engine.size == 1:  # a batch of one begins anew
        state = self.engine.begin(self.prefix, arrival)
      else:
        state = self.engine.insert(self.prefix, arrival, state)
    if not self.read:
      self.prefix = None
    return state

  def _prefill(self):
    """Read the next prompts, each once for all its samples."""
    self.prefix, prompts = None, {}
    while self.order and (len(prompts) < self.chunk or self.rows[self.order[0]].source in prompts):
      row = self.order.pop(0)
      source = self.rows[row].source
      self.read.append((prompts.setdefault(source, len(prompts)), row))
    tokens = {self.rows[row].source: self.rows[row].tokens for _, row in self.read}
    self.prefix = self.engine.prefill([tokens[source] for source in prompts], self.chunk)
