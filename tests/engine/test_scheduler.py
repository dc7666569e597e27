"""A queue of requests is read in a time that grows as their number does."""

import time
from types import SimpleNamespace

from speccascade.engine import scheduler


def test_a_long_queue_is_read_without_moving_what_waits():
  rows = [SimpleNamespace(source=i, tokens=[1]) for i in range(300_000)]
  engine = SimpleNamespace(size=len(rows), prefill=lambda prompts, _: len(prompts))
  queue = scheduler.Queue(engine, SimpleNamespace(rows=rows, shards=1))
  before = time.process_time()
  queue._prefill()
  assert len(queue.read) == len(rows) and not queue.waiting
  assert time.process_time() - before < 4  # seconds; one that moves what waits takes ten times as long
