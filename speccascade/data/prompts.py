"""Prompts cut to a number of tokens, predictions cut where they should have ended."""

from collections.abc import Callable, Sequence
import dataclasses
import functools

from speccascade.data import tokenizers
from speccascade.data.examples import Example


@dataclasses.dataclass(frozen=True)
class Fitter:
  """Makes prompts of at most `limit` tokens; without a tokenizer nothing is cut."""

  tokenizer: tokenizers.Tokenizer | None
  limit: int

  def __call__(self, render: Callable[[str], str], text: str) -> str:
    """Return render(text), the text cut as far as it must."""
    return render(text) if self.tokenizer is None else fit(render, text, self.tokenizer, self.limit)

  def holds(self, prompt: str) -> bool:
    """Whether a prompt fits as it is."""
    return self.tokenizer is None or len(self.tokenizer.encode(prompt)) <= self.limit


def fitter(tokenizer: str | None, limit: int) -> Fitter:
  """Return what cuts prompts to `limit` tokens of the tokenizer at a path."""
  return Fitter(None if tokenizer is None else tokenizers.load(tokenizer), limit)


def fit(render: Callable[[str], str], text: str, tokenizer: tokenizers.Tokenizer, limit: int) -> str:
  """Return render(text) with as much of the text's beginning as `limit` tokens hold."""
  prompt = render(text)
  while (over := len(tokenizer.encode(prompt)) - limit) > 0:
    # The text's own ids tell how much to take off; the loop is for tokens that merge otherwise once it is shorter.
    shorter = tokenizer.decode(tokenizer.encode(text)[:-over])
    text = shorter if len(shorter) < len(text) else text[:-1]
    if not text:
      raise ValueError(f'{render("")[:60]!r} … leaves no room for a text in max_prompt_tokens={limit}; raise it.')
    prompt = render(text)
  return prompt


def cutter(stop: Sequence[str]) -> Callable[[str, Example], str] | None:
  """Return the postprocessing of a task: a prediction up to the first of the strings that end it."""
  if isinstance(stop, str):
    raise ValueError(f'stop={stop!r} is not a list; write ({stop!r},).')
  return functools.partial(cut, stop=tuple(stop)) if stop else None


def cut(text: str, example: Example, *, stop: Sequence[str]) -> str:
  """Return a prediction up to the first of the strings that end it."""
  return text[: min((text.find(s) for s in stop if s in text), default=len(text))]
