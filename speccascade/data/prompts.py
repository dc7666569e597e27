"""Prompts truncated to a number of tokens, and predictions truncated at a stop string."""

from collections.abc import Callable, Sequence

from speccascade.data import tokenizers
from speccascade.data.examples import Example


class Fitter:
  """Builds prompts of at most `limit` tokens.

  Args:
    tokenizer: path of the models' tokenizer; None truncates nothing.
    limit: number of tokens.
  """

  def __init__(self, tokenizer: str | None, limit: int):
    self._tokenizer = None if tokenizer is None else tokenizers.load(tokenizer)
    self._limit = limit

  def excess(self, prompt: str) -> int:
    """Return by how many tokens a prompt exceeds the limit; 0 or less if it fits."""
    return 0 if self._tokenizer is None else len(self._tokenizer.encode(prompt)) - self._limit

  def __call__(self, render: Callable[[str], str], text: str) -> str:
    """Return `render(text)` with as much of the text's beginning as fits the limit."""
    prompt = render(text)
    while (excess := self.excess(prompt)) > 0:
      # One pass usually suffices; more are needed where the shorter text is split into other tokens.
      shorter = self._tokenizer.decode(self._tokenizer.encode(text)[:-excess])
      text = shorter if len(shorter) < len(text) else text[:-1]
      if not text:
        raise ValueError(f'{render("")[:60]!r} leaves no room for a text in max_prompt_tokens={self._limit}; raise it.')
      prompt = render(text)
    return prompt


def truncation(stop: Sequence[str]) -> Callable[[str, Example], str] | None:
  """Return a postprocessing that ends predictions at the first of some stop strings, or None if there are none."""
  if isinstance(stop, str):
    raise ValueError(f'stop={stop!r} is not a list; write ({stop!r},).')

  def truncate(text: str, example: Example) -> str:
    return text[: min((text.find(s) for s in stop if s in text), default=len(text))]

  return truncate if stop else None
