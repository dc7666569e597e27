"""Examples with references, and tasks: examples with limits and the metrics that judge predictions."""

from collections.abc import Callable, Sequence
import dataclasses
from dataclasses import field
from typing import Any

Prompt = str | list[int] | list[dict[str, Any]]  # a text, token ids or chat messages


@dataclasses.dataclass(frozen=True)
class Example:
  """A prompt with its reference.

  Attributes:
    index: Position in the split; also the id of the example's random stream.
    prompt: A text, token ids, or chat messages for the template of the models' tokenizer.
    target: The reference text, or a list of them; an empty list is no reference.
    info: Further fields for metrics, JSON-serialisable.
  """

  index: int
  prompt: Prompt
  target: str | list[str]
  info: dict[str, Any] = field(default_factory=dict)

  @property
  def references(self) -> list[str]:
    """The reference texts."""
    return [self.target] if isinstance(self.target, str) else list(self.target)


# (examples, predictions) -> value; higher is better; 0 to 100 for BLEU, ROUGE and accuracy
Metric = Callable[[list[Example], list[str]], float]


@dataclasses.dataclass(frozen=True)
class Task:
  """Examples with limits and metrics.

  Attributes:
    name: The task's name in results.
    examples: The examples to decode, already read.
    max_prompt_tokens: The longest prompt that decoding accepts.
    max_new_tokens: Tokens to generate at most.
    metrics: Metrics by name; the first is the main one.
    postprocess: Maps a prediction and its example to the text that metrics judge.
    stop: Strings that end decoding; a prediction ends before the first of them.
  """

  name: str
  examples: Sequence[Example]
  max_prompt_tokens: int
  max_new_tokens: int
  metrics: dict[str, Metric]
  postprocess: Callable[[str, Example], str] | None = None
  stop: Sequence[str] = ()

  def judged(self, examples: Sequence[Example], predictions: Sequence[str]) -> list[str]:
    """Return the texts that metrics judge."""
    if self.postprocess is None:
      return list(predictions)
    return [self.postprocess(text, example) for text, example in zip(predictions, examples, strict=True)]
