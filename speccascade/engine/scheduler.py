"""Continuous batching: a queue of requests, and which of them each row of the batch decodes.

The loop is left when an eighth of the rows in use has ended. The rows that ended are given to the next prompts, whose
caches are computed some prompts at a time. When rows change hands is decided by what the loop did, never by the clock,
so that a run and its repetition have the same batches. Networks that remember outputs are given those that ended, too.
"""

import collections
from collections.abc import Iterator, Sequence

import numpy as np

from speccascade.engine import inputs, results
from speccascade.engine.engine import Engine
from speccascade.engine.job import DecodeJob
from speccascade.engine.state import State

Outcome = tuple[int, dict, int]  # (request, what was copied to the host, its row of the batch)


class Queue:
  """The requests that wait, those whose prompts have been read, and the request of each row of the batch.

  Args:
    engine: The engine of the job.
    job: The job, whose rows are the requests.
    skip: The numbers of requests that are left out.
  """

  def __init__(self, engine: Engine, job: DecodeJob, skip: frozenset[int] = frozenset()):
    rows = job.rows
    self.engine = engine
    self.rows = rows
    self.request_of = np.full(engine.size, -1)  # -1: the row is free
    order = inputs.by_length([row.tokens for row in rows])  # samples of a prompt stay together
    self.waiting = collections.deque(request for request in order if request not in skip)
    self.read: list[tuple[int, int]] = []  # (row of the prefix, request) of prompts that have been read
    self.prefix = None
    self.more_than_a_batch = len(rows) > engine.size
    half = max(job.shards, engine.size // 2 // job.shards * job.shards)
    self.prompts_at_once = half if self.more_than_a_batch else engine.size

  @property
  def has_next(self) -> bool:
    """Whether a request waits for a row."""
    return bool(self.waiting or self.read)

  @property
  def used(self) -> np.ndarray:
    """The rows in use."""
    return np.flatnonzero(self.request_of >= 0)

  @property
  def busy(self) -> bool:
    """Whether a request waits or is under way."""
    return self.has_next or len(self.used) > 0

  def free(self, rows: Sequence[int]):
    """Give rows back."""
    self.request_of[rows] = -1

  def fill(self, state: State | None) -> State | None:
    """Give all free rows to requests that wait; return the state, which is None before the first batch."""
    while self.has_next and (self.request_of < 0).any():
      if not self.read:
        self._prefill()
      free = np.flatnonzero(self.request_of < 0)[: len(self.read)]
      come = self.read[: len(free)]
      self.read = self.read[len(free) :]
      self.request_of[free] = [request for _, request in come]
      source = [row for row, _ in come]
      own = not self.more_than_a_batch and source == list(range(len(source)))
      batch = self.engine.insert_batch([self.rows[i] for _, i in come], None if own else source, free.tolist())
      if state is None or self.engine.size == 1:  # a batch of one begins anew
        state = self.engine.begin(self.prefix, batch)
      else:
        state = self.engine.insert(self.prefix, batch, state)
    if not self.read:
      self.prefix = None
    return state

  def _prefill(self):
    """Read the next prompts, each once for all its samples."""
    self.prefix = None
    prompts: dict[int, int] = {}  # {prompt: row of the prefix}
    while self.waiting:
      source = self.rows[self.waiting[0]].source
      if len(prompts) == self.prompts_at_once and source not in prompts:
        break
      self.read.append((prompts.setdefault(source, len(prompts)), self.waiting.popleft()))
    tokens = {self.rows[request].source: self.rows[request].tokens for _, request in self.read}
    self.prefix = self.engine.prefill([tokens[source] for source in prompts], self.prompts_at_once)


def serve(
  queue: Queue, reader: results.RowReader, *, unfinished: bool, drain: bool, rounds: int
) -> Iterator[list[tuple[int, results.Row]]]:
  """Decode a queue, and take rows out of the batch while the device goes on.

  Args:
    queue: The queue.
    reader: What makes results of rows.
    unfinished: Whether rows that go on are yielded too.
    drain: Whether the last batch, for which no request waits, runs until all its rows have ended.
    rounds: After how many rounds the host looks at the rows at the latest.

  Yields:
    Lists of (request, row). Rows that ended before an error are yielded before it is raised.
  """
  engine = queue.engine
  size = engine.size

  def read(outcomes):
    return [(request, reader.row(request, *where)) for request, *where in outcomes]

  state = None
  stop = np.zeros(size, bool)
  outcomes: list[Outcome] = []
  while queue.busy:
    try:
      state = queue.fill(None if size == 1 and not len(queue.used) else state)
      enough = size if drain and not queue.has_next else size - len(queue.used) + max(1, size // 8)
      running = engine.run(state, ended=min(size, enough), rounds=rounds, stop=stop & (queue.request_of < 0))
    except BaseException:
      yield read(outcomes)
      raise
    if outcomes:
      yield read(outcomes)
    try:
      state, batch = engine.collect(running)
    except BaseException:
      if engine.latest is not None:
        yield read(_ended(queue, engine.latest))
      raise
    ended = [row for _, _, row in _ended(queue, batch)]
    ended += [r for r in queue.used if r not in ended and reader.stops(queue.request_of[r], batch, r)]
    stop = np.isin(np.arange(size), ended)
    shown = queue.used if unfinished else ended
    outcomes = [(int(queue.request_of[row]), batch, row) for row in shown]
    if engine.remembers:
      engine.remember([reader.tokens(int(queue.request_of[r]), batch, r) for r in ended])
    queue.free(ended)
  yield read(outcomes)


def _ended(queue: Queue, batch: dict) -> list[Outcome]:
  return [(int(queue.request_of[row]), batch, row) for row in queue.used if batch['done'][row]]
