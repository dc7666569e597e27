"""What is learned: pairs of a prompt and its continuation, as token lists.

Texts become tokens by the tokenizer's convention. A target continues its source: it gets no begin token, and always the
end of sequence.
"""

from collections.abc import Iterable, Iterator, Sequence
import json
from typing import Any

import numpy as np

from speccascade.data import files, tokenizers
from speccascade.data.examples import Prompt, Task
from speccascade.decode import lines
from speccascade.train.batches import Pair

Learned = tuple[Prompt, str | Sequence[int]]  # a prompt and what is to follow it, as text or tokens


def pairs(of: Task | Iterable[Learned], tokenizer: tokenizers.Tokenizer | None) -> Iterable[Pair]:
  """Return pairs of token lists: those of a task or a sequence without end, in a new order in each epoch.

  Args:
    of: A task, of whose examples the first reference is learned; or prompts with what is to follow each.
    tokenizer: The tokenizer; None where all are tokens.

  Raises:
    ValueError: An example has no reference, or a text no tokenizer.
  """
  if isinstance(of, Task):
    of = [(example.prompt, _reference(of.name, example)) for example in of.examples]
  return tokenised(repeated(of) if isinstance(of, Sequence) else of, tokenizer)  # tokens would take more memory


def _reference(name: str, example) -> str:
  if not example.references:
    raise ValueError(f'{name}: example {example.index} has no reference to learn: give target_field, or another task')
  return example.references[0]


def tokenised(learned: Iterable[Learned], tokenizer: tokenizers.Tokenizer | None) -> Iterator[Pair]:
  """Yield prompts and what follows them as token lists; what is tokens stays as it is."""
  for prompt, target in learned:
    source = prompt if _is_tokens(prompt) else _encoded(prompt, tokenizer)
    yield source, target if _is_tokens(target) else _ended(target, tokenizer)


def _is_tokens(given: Any) -> bool:
  return not isinstance(given, str) and all(isinstance(x, int | np.integer) for x in given)


def _encoded(prompt: Prompt, tokenizer: tokenizers.Tokenizer | None) -> list[int]:
  if tokenizer is None:
    raise ValueError(f'{str(prompt)[:60]!r} is a text, and there is no tokenizer: name one, as train.Job.tokenizer')
  return tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.chat(prompt)


def _ended(target: str, tokenizer: tokenizers.Tokenizer) -> list[int]:
  """Return the tokens of a target, of which the last ends the sequence."""
  if not tokenizer.eos_ids:
    raise ValueError(
      f'{tokenizer.path} has no end of sequence for the targets: name its eos_token in the tokenizer_config.json next '
      'to it'
    )
  ids = tokenizer.encode(target, begins=False)
  return ids if ids[-1:] == [tokenizer.eos_ids[0]] else [*ids, tokenizer.eos_ids[0]]


def repeated(pairs: Sequence[Learned]) -> Iterator[Learned]:
  """Yield pairs without end, in a new order in each epoch, the same each time."""
  if not pairs:
    raise ValueError('there are no pairs to train on: check the files and the limits on length')
  rng = np.random.default_rng(0)
  while True:
    for i in rng.permutation(len(pairs)):
      yield pairs[i]


def decoded(prompts: str, outputs: str, unended: bool = False) -> list[Learned]:
  """Return prompts with a teacher's outputs, for distillation.

  The files are the input and the output of `python -m speccascade.decode`, or of the output what is there so far, a
  copy of OUTPUT.part.

  Args:
    prompts: File of the prompts.
    outputs: File of the outputs.
    unended: Whether outputs that were cut off are learned, too, for a student of the teacher's distributions.
  """
  asked = lines.parse(prompts, '\n'.join(files.lines(prompts)))
  rows = [row for row in map(json.loads, files.lines(outputs)) if lines.MARK not in row]
  if rows and max(row['index'] for row in rows) >= len(asked):
    raise ValueError(f'{outputs} has an output for prompt {max(row["index"] for row in rows)}, but {prompts} has not')
  learned = ('eos', 'length') if unended else ('eos',)
  return [(asked[row['index']].prompt, row['tokens']) for row in rows if row['finish_reason'] in learned]
