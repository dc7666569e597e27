"""Sources of (source tokens, target tokens) for training, which takes any iterable of such pairs.

Texts become tokens by the tokenizer's convention. A target continues its source: it gets no begin token, and always the
end of sequence.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any
import warnings

import numpy as np

from speccascade import embedded, methods
from speccascade.checkpoints import digests
from speccascade.data import files, prompts, tokenizers
from speccascade.data.benchmarks import BENCHMARKS
from speccascade.data.seqio import pipeline
from speccascade.decode import decode
from speccascade.host import storage
from speccascade.host.runs import RunDir
from speccascade.sampling import Sampler
from speccascade.train.batches import Pair
from speccascade.types import Model


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


def repeated(pairs: Iterable[Pair], seed: int = 0) -> Iterator[Pair]:
  """Yield pairs without end, in a new order in each epoch."""
  pairs = list(pairs)
  if not pairs:
    raise ValueError('there are no pairs to train on: check the files and the limits on length')
  rng = np.random.default_rng(seed)
  while True:
    for i in rng.permutation(len(pairs)):
      yield pairs[i]


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
      raise ValueError('there are no pairs to train on: check the data')
    for i in rng.permutation(len(drawn)):
      yield drawn[i]


def seqio_task(
  name: str,
  *,
  split: str = 'train',
  tokenizer=None,
  prefix: str = '',
  data_dir: str | None = None,
  module: str | None = None,
  seed: int = 0,
) -> Iterator[Pair]:
  """Yield the pairs of a benchmark, or of a registered seqio task or mixture, without end and not truncated.

  Args:
    name: A benchmark of `speccascade.data.benchmarks`, or a name in seqio's registry.
    split: The split to read.
    tokenizer: Path of the tokenizer (benchmarks only; a seqio task has vocabularies of its own).
    prefix: Beginning of every source (benchmarks only).
    data_dir: Folder of TensorFlow Datasets (benchmarks only).
    module: A module to import first, which registers the seqio task.
    seed: Of the order in each epoch.

  Raises:
    FileNotFoundError: if the data set is not prepared; it names the command.
    ValueError: if there is no such task or split, or a setting is missing.
  """
  if name in BENCHMARKS:
    benchmark = dataclasses.replace(BENCHMARKS[name], prefix=prefix, shots=0)
    if split not in benchmark.splits or tokenizer is None:
      raise ValueError(
        f'{name}: split={split!r} must be one of {", ".join(benchmark.splits)}, and tokenizer={tokenizer} a path'
      )
    dataset = pipeline.builder(benchmark, data_dir)
    loaded = tokenizers.load(tokenizer)

    def read():
      return pipeline.benchmark_examples(benchmark, dataset, prompts.NO_LIMIT, split)

    yield from shuffled(lambda: tokenised(((e.prompt, e.references[0]) for e in read()), loaded), seed)
  seqio = pipeline.library()
  if module is not None:
    importlib.import_module(module)
  if name not in (*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()):
    raise ValueError(f'there is no benchmark and no seqio task or mixture {name!r}: give the module that registers it')
  settings = dict(sequence_length=None, split=split, shuffle=False, seed=seed, num_epochs=1)

  def read():
    return seqio.get_mixture_or_task(name).get_dataset(**settings).as_numpy_iterator()

  yield from shuffled(lambda: ((r['inputs'].tolist(), r['targets'].tolist()) for r in read()), seed)


def generated(tokenizer, *, split: str = 'train', count: int | None = None, seed: int = 0) -> Iterator[Pair]:
  """Yield the sentence pairs of the package without end.

  Args:
    tokenizer: Path of the tokenizer.
    split: 'train', 'validation' or 'test'.
    count: Number of pairs, the first ones of the split; all by default.
    seed: Of the order in each epoch.
  """
  texts = embedded.sentences(split, count)
  yield from repeated(tokenised(texts, tokenizers.load(tokenizer)), seed)


def generated_sources(*, count: int, split: str = 'train') -> list[str]:
  """Return the first `count` English sentences of a split of the package, for a teacher to translate."""
  return [source for source, _ in embedded.sentences(split, count)]


def parallel_text(source, target, tokenizer, *, seed: int = 0) -> Iterator[Pair]:
  """Yield the pairs of two files with as many lines without end.

  Args:
    source: File of the sources.
    target: File of the targets.
    tokenizer: Path of the tokenizer.
    seed: Of the order in each epoch.
  """
  sources = files.lines(source)
  targets = files.lines(target)
  if len(sources) != len(targets):
    raise ValueError(f'{source} has {len(sources)} lines, {target} {len(targets)}: the files are not parallel')
  yield from repeated(tokenised(zip(sources, targets, strict=True), tokenizers.load(tokenizer)), seed)


def jsonl(
  path, tokenizer, *, prompt_field: str = 'prompt', target_field: str = 'target', seed: int = 0
) -> Iterator[Pair]:
  """Yield the pairs of a file of JSON objects, one a line or in one array, without end.

  Args:
    path: The file.
    tokenizer: Path of the tokenizer.
    prompt_field: Field or template of the source, as `data.jsonl` takes it.
    target_field: Field or template of the target.
    seed: Of the order in each epoch.
  """
  examples = files.jsonl(path, prompt_field=prompt_field, target_field=target_field).examples
  texts = ((example.prompt, example.references[0]) for example in examples)
  yield from repeated(tokenised(texts, tokenizers.load(tokenizer)), seed)


def from_teacher(
  teacher: Model | Callable[[], Model],
  sources: Sequence[str],
  *,
  file,
  temperature: float = 0.0,
  max_new_tokens: int = 64,
  batch_size: int = 64,
  seed: int = 0,
) -> Iterator[Pair]:
  """Yield sources with the teacher's outputs without end (sequence-level distillation).

  Args:
    teacher: A model, or a function that returns one, which is called when the first pair is asked for.
    sources: Texts.
    file: A journal of the outputs, with which a killed run goes on; its first line has the settings.
    temperature: Of the teacher.
    max_new_tokens: Of the teacher; outputs that reach it are dropped.
    batch_size: Of the teacher's decoding.
    seed: Of the teacher's samples and the order in each epoch.

  Raises:
    ValueError: if the file has outputs for other sources or settings.
  """
  file = storage.local(file)
  teacher = teacher() if callable(teacher) else teacher
  settings = {
    'teacher': digests.of_params(teacher.params),
    'temperature': temperature,
    'max_new_tokens': max_new_tokens,
    'seed': seed,
  }
  rows = _outputs(teacher, sources, file, settings, batch_size)
  pairs = [(teacher.tokenizer.encode(row['source']), row['target']) for row in rows]
  ends = teacher.network.eos_ids
  complete = [(source, target) for source, target in pairs if target and target[-1] in ends]
  yield from repeated(complete, seed)


def _outputs(
  teacher: Model, sources: Sequence[str], file: Path, settings: dict[str, Any], batch_size: int
) -> list[dict[str, Any]]:
  """Return a row for each source, without a target where logits were not finite; decode those that the file lacks."""
  journal = RunDir(file.parent, 'name another file').journal(file.name)
  if not journal.count:
    journal.append([settings])
  done = len(_read(file, sources, settings))
  for start in range(done, len(sources), 8 * batch_size):
    journal.append(_decoded(teacher, sources[start : start + 8 * batch_size], start, settings, batch_size))
  rows = _read(file, sources, settings)
  faults = [row['fault'] for row in rows if 'fault' in row]
  if faults and len(faults) == len(sources):
    raise ValueError(faults[0])
  if faults and done < len(sources):
    summary = f"{len(faults)} of the teacher's {len(sources)} outputs are faults, and are dropped. {faults[0]}"
    warnings.warn(summary, stacklevel=2)
  return rows


def _read(file: Path, sources: Sequence[str], settings: dict[str, Any]) -> list[dict[str, Any]]:
  """Return the rows of a file of outputs, checked to be for the first of these sources, and for these settings."""
  header, *rows = [json.loads(line) for line in files.lines(file)]
  for name, value in settings.items():
    if header.get(name) != value:
      raise ValueError(f'{file} has outputs for {name}={header.get(name)}, not {value}: remove it or name another file')
  if [row.get('source') for row in rows] != list(sources[: len(rows)]) or len(rows) > len(sources):
    raise ValueError(f'{file} has outputs for other sources: remove it, or name another file')
  return rows


def _decoded(
  teacher: Model, sources: Sequence[str], start: int, settings: dict[str, Any], batch_size: int
) -> list[dict[str, Any]]:
  """Decode sources, the first of which is number `start`, and return a row for each."""
  out = decode(
    methods.autoregressive(),
    [teacher],
    list(sources),
    max_new_tokens=settings['max_new_tokens'],
    sampler=Sampler(settings['temperature']),
    seed=settings['seed'],
    example_ids=range(start, start + len(sources)),
    batch_size=batch_size,
    keep_faults=True,
  )
  rows = [
    {'source': text, 'target': [int(t) for t in tokens]} for text, tokens in zip(sources, out.tokens, strict=True)
  ]
  return [
    row if fault is None else row | dict(target=[], fault=fault) for row, fault in zip(rows, out.faults, strict=True)
  ]
