"""Sources of (source tokens, target tokens) for training, which takes any iterable of such pairs.

Texts become tokens by the tokenizer's convention. A target continues its source: it gets no begin token, and always the
end of sequence.
"""

from collections.abc import Callable, Iterable, Iterator
import dataclasses
import json

import numpy as np

from speccascade import embedded
from speccascade.data import files, tokenizers
from speccascade.data import prompts as prompting
from speccascade.data.benchmarks import BENCHMARKS
from speccascade.data.seqio import tasks
from speccascade.decode import lines
from speccascade.train.batches import Pair


def tokenised(texts: Iterable[tuple[str, str]], tokenizer: tokenizers.Tokenizer) -> Iterator[Pair]:
  """Yield pairs of texts as token lists."""
  if not tokenizer.eos_ids:
    raise ValueError(
      f'{tokenizer.path} has no end of sequence for the targets: name its eos_token in the tokenizer_config.json next '
      'to it'
    )
  eos = tokenizer.eos_ids[0]
  for source, target in texts:
    ids = tokenizer.encode(target, begins=False)
    yield tokenizer.encode(source), ids if ids[-1:] == [eos] else [*ids, eos]


def repeated(pairs: Iterable[Pair]) -> Iterator[Pair]:
  """Yield pairs without end, in a new order in each epoch."""
  pairs = list(pairs)
  return shuffled(lambda: pairs, buffer=len(pairs))


def shuffled(epoch: Callable[[], Iterable[Pair]], seed: int = 0, buffer: int = 10_000) -> Iterator[Pair]:
  """Yield pairs without end, each epoch in a new order, with no more than `buffer` pairs in memory.

  Args:
    epoch: Function that returns all pairs, in the same order each time.
    seed: Of the order.
    buffer: Number of pairs from which the next one is drawn.
  """
  rng = np.random.default_rng(seed)
  while True:
    drawn = []
    for pair in epoch():
      if len(drawn) < buffer:
        drawn.append(pair)
        continue
      i = rng.integers(buffer)
      yield drawn[i]
      drawn[i] = pair
    if not drawn:
      raise ValueError('there are no pairs to train on: check the files and the limits on length')
    for i in rng.permutation(len(drawn)):
      yield drawn[i]


def seqio_task(
  name: str,
  *,
  split: str = 'train',
  tokenizer=None,
  data_dir: str | None = None,
) -> Iterator[Pair]:
  """Yield the pairs of a benchmark, or of a registered seqio task or mixture, without end and not truncated.

  Args:
    name: A benchmark of `speccascade.data.benchmarks`, or a name in seqio's registry.
    split: The split to read.
    tokenizer: Path of the tokenizer (benchmarks only; a seqio task has vocabularies of its own).
    data_dir: Folder of TensorFlow Datasets (benchmarks only).

  Raises:
    FileNotFoundError: if the data set is not prepared; it names the command.
    ValueError: if there is no such task or split, or a setting is missing.
  """
  if name in BENCHMARKS:
    benchmark = dataclasses.replace(BENCHMARKS[name], prefix='', shots=0)
    if split not in benchmark.splits or tokenizer is None:
      raise ValueError(
        f'{name}: split={split!r} must be one of {", ".join(benchmark.splits)}, and tokenizer={tokenizer} a path'
      )
    records = tasks.prepared(benchmark, data_dir)
    loaded = tokenizers.load(tokenizer)

    def read():
      return tasks.examples(benchmark, records, prompting.NO_LIMIT, split)

    yield from shuffled(lambda: tokenised(((e.prompt, e.references[0]) for e in read()), loaded))
  seqio = tasks.library()
  if name not in (*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()):
    raise ValueError(f'there is no benchmark and no seqio task or mixture {name!r}: import its module first')
  settings = dict(sequence_length=None, split=split, shuffle=False, seed=0, num_epochs=1)

  def read():
    return seqio.get_mixture_or_task(name).get_dataset(**settings).as_numpy_iterator()

  yield from shuffled(lambda: ((r['inputs'].tolist(), r['targets'].tolist()) for r in read()))


def generated(tokenizer, *, count: int | None = None) -> Iterator[Pair]:
  """Yield the sentence pairs of the package for training without end.

  Args:
    tokenizer: Path of the tokenizer.
    count: Number of pairs, the first ones; all by default.
  """
  texts = embedded.sentences('train', count)
  yield from repeated(tokenised(texts, tokenizers.load(tokenizer)))


def parallel_text(source, target, tokenizer) -> Iterator[Pair]:
  """Yield the pairs of two files with as many lines without end.

  Args:
    source: File of the sources.
    target: File of the targets.
    tokenizer: Path of the tokenizer.
  """
  sources = files.lines(source)
  targets = files.lines(target)
  if len(sources) != len(targets):
    raise ValueError(f'{source} has {len(sources)} lines, {target} {len(targets)}: the files are not parallel')
  yield from repeated(tokenised(zip(sources, targets, strict=True), tokenizers.load(tokenizer)))


def jsonl(path, tokenizer, *, prompt_field: str = 'prompt', target_field: str = 'target') -> Iterator[Pair]:
  """Yield the pairs of a file of JSON objects, one a line or in one array, without end.

  Args:
    path: The file.
    tokenizer: Path of the tokenizer.
    prompt_field: Field or template of the source, as `data.jsonl` takes it.
    target_field: Field or template of the target.
  """
  examples = files.jsonl(path, prompt_field=prompt_field, target_field=target_field).examples
  texts = ((example.prompt, example.references[0]) for example in examples)
  yield from repeated(tokenised(texts, tokenizers.load(tokenizer)))


def decoded(prompts, outputs, tokenizer) -> Iterator[Pair]:
  """Yield prompts with a teacher's outputs without end (sequence-level distillation).

  The files are the input and the output of `python -m speccascade.decode`. Outputs that no end of sequence ends are
  left out.

  Args:
    prompts: File of the prompts.
    outputs: File of the outputs.
    tokenizer: Path of the tokenizer, the teacher's too.
  """
  loaded = tokenizers.load(tokenizer)
  asked = lines.parse(prompts, '\n'.join(files.lines(prompts)))
  rows = [json.loads(line) for line in files.lines(outputs)]
  if rows and max(row['index'] for row in rows) >= len(asked):
    raise ValueError(f'{outputs} has an output for prompt {max(row["index"] for row in rows)}, but {prompts} has not')
  ended = [row for row in rows if row['finish_reason'] == 'eos']
  encode = [loaded.encode if isinstance(request.prompt, str) else loaded.chat for request in asked]
  yield from repeated([(encode[row['index']](asked[row['index']].prompt), row['tokens']) for row in ended])
