"""What every task gives: examples with references, and the metrics that judge predictions against them."""

from collections.abc import Callable, Sequence
import dataclasses
from dataclasses import field
from typing import Any


@dataclasses.dataclass(frozen=True)
class Example:
  """A prompt and what a good answer to it is."""

  index: int  # place in the split; also the id of its random stream
  prompt: str | list[int]
  target: str | list[str]  # reference text(s)
  info: dict[str, Any] = field(default_factory=dict)  # JSON-serialisable extras for metrics


Metric = Callable[[list[Example], list[str]], float]  # higher is better; 0…100 for BLEU, ROUGE and accuracy


@dataclasses.dataclass(frozen=True)
class Task:
  """Examples with their limits and metrics, of which the first is the main one."""

  name: str
  examples: Sequence[Example]  # already read, already limited
  max_prompt_tokens: int
  max_new_tokens: int
  metrics: dict[str, Metric]
  postprocess: Callable[[str, Example], str] | None = None  # prediction text -> what the metrics see
