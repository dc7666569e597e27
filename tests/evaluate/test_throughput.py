"""The steady part of a queue leaves out the first and the last batch's worth of texts."""

import dataclasses

from emitted import traces
import pytest
import toys

from speccascade import decode, methods, rules, Sampler
from speccascade.evaluate import throughput

SIZES = dict(max_new_tokens=6, max_prompt_tokens=4, sampler=Sampler(1.0))


@dataclasses.dataclass
class Row:
  tokens: list[int]
  fault: str | None = None


def test_only_texts_between_the_bounds_count(monkeypatch):
  rows = [Row([0] * n) for n in (1, 2, 3, 4, 5, 6, 7)]
  rows[2] = Row([0] * 3, 'a fault')
  monkeypatch.setattr(throughput, 'stream', lambda *_, **__: enumerate(rows))
  times = iter([10.0, 11.0, 12.0, 14.0, 17.0, 21.0, 26.0, 32.0, 40.0])
  found = throughput.steady(None, [], range(7), 2, clock=lambda: next(times))
  # the second text ends at 12 s, the fifth at 21 s; the third, fourth and fifth have 3 + 4 + 5 tokens
  assert found == dict(seconds=30.0, tokens=28, faults=1, steady_seconds=9.0, steady_tokens=12)


@pytest.mark.long
def test_a_queue_has_the_tokens_of_a_decode_and_no_program_of_its_own():
  models = toys.models()
  method = methods.speculative(rules.speculative, block=3)
  prompts = [e.prompt for e in toys.task(9).examples]
  found = []
  decoded = lambda: found.append(decode(method, models, prompts, batch_size=2, **SIZES))
  queued = lambda: found.append(throughput.steady(method, models, prompts, 2, **SIZES))
  assert traces(decoded, queued) == [1, 0]
  out, found = found
  assert found['tokens'] == out.stats.emitted.sum() and 0 < found['steady_tokens'] < found['tokens']
  assert 0 < found['steady_seconds'] < found['seconds'] and 'faults' not in found
