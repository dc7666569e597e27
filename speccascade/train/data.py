"""Where pairs of (source tokens, target tokens) come from. Training takes any iterable of them; these are some.

A pair of texts becomes tokens by the tokenizer's convention; a target goes on after its source, so nothing begins it,
and always ends with the end of sequence.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import json
from pathlib import Path
from typing import Any
import warnings

import numpy as np

from speccascade import embedded, methods
from speccascade.checkpoints import digests
from speccascade.data import files, tokenizers
from speccascade.decode import decode
from speccascade.host import storage
from speccascade.sampling import Sampler
from speccascade.train.batches import Pair
from speccascade.types import Model


def tokenised(texts: Iterable[tuple[str, str]], tokenizer: tokenizers.Tokenizer) -> Iterator[Pair]:
  """Yield pairs of texts as token lists."""
  if not tokenizer.eos_ids:
    raise ValueError(
      f'{tokenizer.path} names no end of sequence, with which targets end: name its eos_token in '
      'tokenizer_config.json beside it'
    )
  eos = tokenizer.eos_ids[0]
  for source, target in texts:
    ids = tokenizer.encode(target, begins=False)
    yield tokenizer.encode(source), ids if ids[-1:] == [eos] else [*ids, eos]


def repeated(pairs: Iterable[Pair], seed: int = 0) -> Iterator[Pair]:
  """Yield pairs without end, in a new order each time through."""
  pairs, rng = list(pairs), np.random.default_rng(seed)
  if not pairs:
    raise ValueError('there are no pairs to train on: check the files and the limits on length')
  while True:
    for i in rng.permutation(len(pairs)):
      yield pairs[i]


def features(examples: Iterable[dict], *, source: str = 'inputs', target: str = 'targets') -> Iterator[Pair]:
  """Yield the pairs of feature dicts, such as a seqio dataset's `as_numpy_iterator()` gives."""
  for example in examples:
    yield [int(t) for t in example[source]], [int(t) for t in example[target]]


def generated(tokenizer, *, split: str = 'train', count: int | None = None, seed: int = 0) -> Iterator[Pair]:
  """Yield the sentence pairs of the package, all or the first `count` of a split, again and again.

  Each time through they come in a new order, which `seed` decides.
  """
  texts = embedded.sentences(split, count)
  yield from repeated(tokenised(texts, tokenizers.load(tokenizer)), seed)


def parallel_text(source, target, tokenizer, *, seed: int = 0) -> Iterator[Pair]:
  """Yield the pairs of two files of equally many lines, again and again."""
  rows = [files.lines(path) for path in (source, target)]
  if len(rows[0]) != len(rows[1]):
    raise ValueError(f'{source} has {len(rows[0])} lines, {target} {len(rows[1])}: the files are not parallel')
  yield from repeated(tokenised(zip(*rows, strict=True), tokenizers.load(tokenizer)), seed)


def from_teacher(
  teacher: Model | Callable[[], Model], sources: Sequence[str], *, file, temperature: float = 0.0,
  max_new_tokens: int = 64, batch_size: int = 64, seed: int = 0,
) -> Iterator[Pair]:  # fmt: skip
  """Yield sources with the teacher's outputs, again and again (sequence-level distillation).

  A teacher may be a function that returns one, which is called when the first pair is asked for. The outputs are kept
  in `file`, what they were made with in its first line, so that a restart need not make them again.
  """
  file, teacher = storage.local(file), teacher() if callable(teacher) else teacher
  made_with = {'teacher': digests.of_params(teacher.params), 'temperature': temperature}
  made_with |= {'max_new_tokens': max_new_tokens, 'seed': seed}
  if not file.is_file():
    _write_outputs(teacher, sources, file, made_with, batch_size)
  pairs = [(teacher.tokenizer.encode(row['source']), row['target']) for row in _outputs(file, sources, made_with)]
  ends = teacher.network.eos_ids
  whole = [(source, target) for source, target in pairs if target and target[-1] in ends]  # not cut off, no fault
  yield from repeated(whole, seed)


def _outputs(file: Path, sources: Sequence[str], made_with: dict[str, Any]) -> list[dict]:
  """Return the rows of a file of outputs, having checked that they are these sources' and made the same way."""
  before, *rows = [json.loads(line) for line in files.lines(file)]
  for name, value in made_with.items():
    if before.get(name) != value:
      raise ValueError(
        f'{file} holds outputs made with {name}={before.get(name)}, not {value}: remove it, or name another file'
      )
  if [row['source'] for row in rows] != list(sources):
    raise ValueError(f'{file} holds the outputs for other sources: remove it, or name another file')
  return rows


def _write_outputs(teacher, sources, file: Path, made_with: dict[str, Any], batch_size: int) -> None:
  lines, sampler = [json.dumps(made_with) + '\n'], Sampler(made_with['temperature'])
  settings = dict(max_new_tokens=made_with['max_new_tokens'], seed=made_with['seed'], batch_size=batch_size)
  faults = []
  for start in range(0, len(sources), 8 * batch_size):
    texts = list(sources[start : start + 8 * batch_size])
    out = decode(
      methods.autoregressive(), [teacher], texts, sampler=sampler, example_ids=range(start, start + len(texts)),
      **settings, keep_faults=True,
    )  # fmt: skip
    faults += [fault for fault in out.faults if fault]
    for text, tokens, fault in zip(texts, out.tokens, out.faults, strict=True):
      target = [int(t) for t in tokens] if fault is None else []
      lines.append(json.dumps({'source': text, 'target': target}, ensure_ascii=False) + '\n')
  if faults and len(faults) == len(sources):
    raise ValueError(faults[0])
  if faults:
    said = f"{len(faults)} of the teacher's {len(sources)} outputs ended as faults, and are left out. {faults[0]}"
    warnings.warn(said, stacklevel=2)
  storage.write(file, ''.join(lines))


def generated_sources(*, count: int, split: str = 'train') -> list[str]:
  """Return the first `count` English sentences of a split of the package, for a teacher to translate."""
  return [source for source, _ in embedded.sentences(split, count)]
