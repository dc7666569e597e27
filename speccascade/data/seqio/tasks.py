"""Tasks as entries of seqio's registry, and tasks of seqio's registry as plain examples.

`add_benchmark`, `add_parallel_text`, `add_jsonl` and `add_task` register a seqio task; `seqio_task` reads one and hands
out examples, so that decoding knows no TensorFlow. A registered task has the features `inputs` and `targets`, tokens
of the given tokenizer (any that speccascade reads), and `example`, the example as JSON. Its metrics see examples.

Data must be there before: nothing is downloaded. seqio and TensorFlow are imported when a function is called.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import importlib
import itertools
import json
import os
from typing import Any

from speccascade.data import files, prompts
from speccascade.data.benchmarks import Benchmark, BENCHMARKS
from speccascade.data.examples import Example, Metric, Task
from speccascade.data.metrics import check, named
from speccascade.data.seqio import pipeline as pipeline

DATA_DIR = '~/tensorflow_datasets'


def seqio_task(
  name: str,
  *,
  split: str = 'validation',
  count: int | None = None,
  start: int = 0,
  tokenizer: str | None = None,
  data_dir: str | None = None,
  prefix: str | None = None,
  shots: int | None = None,
  max_prompt_tokens: int | None = None,
  max_new_tokens: int | None = None,
  metrics: Sequence[str | Metric] | None = None,
  allow_execution: bool | str = False,
) -> Task:
  """Return at most `count` examples of a benchmark, or of any seqio task or mixture that is registered.

  None stands for the benchmark's own: its prefix, worked examples, lengths and metrics. With `tokenizer`, a path,
  texts are cut to `max_prompt_tokens`; without, a longer prompt is an error of decoding.
  """
  if start < 0 or (count is not None and count < 1):
    raise ValueError(f'start={start}, count={count}: start must be at least 0, count at least 1 or None.')
  if name not in BENCHMARKS:
    only_benchmarks = dict(data_dir=data_dir, prefix=prefix, shots=shots)
    if given := [key for key, value in only_benchmarks.items() if value is not None]:
      raise ValueError(f'{given[0]} belongs to benchmarks ({", ".join(BENCHMARKS)}), and {name!r} is none of them.')
    if tokenizer is not None:
      raise ValueError(f'{name!r} is registered with vocabularies of its own; leave out tokenizer={tokenizer!r}.')
    return _registered(name, split, count, start, max_prompt_tokens, max_new_tokens, metrics, allow_execution)
  benchmark = _adapted(
    BENCHMARKS[name],
    prefix=prefix, shots=shots, max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens, metrics=metrics,
  )  # fmt: skip
  judged = named(benchmark.metrics, allow_execution=allow_execution)
  registered = f'speccascade_{name}'
  pipeline.forget(registered)
  add_benchmark(registered, benchmark, tokenizer=tokenizer, data_dir=data_dir, allow_execution=allow_execution)
  examples = [pipeline.opened_example(e['example']) for e in _records(registered, split, start, count)]
  return _task(name, split, examples, benchmark, judged)


def t5x_task(
  mixture_or_task_name: str,
  *,
  task_feature_lengths: Mapping[str, int],
  metrics: Sequence[str | Metric],
  split: str = 'test',
  count: int | None = None,
  module: str | None = None,
  allow_execution: bool | str = False,
) -> Task:
  """Return a seqio task or mixture with what T5X gives a model: tokens, cut to the feature lengths.

  `module` is imported before, for it registers the task. Metrics are judged on texts.
  """
  if module is not None:
    importlib.import_module(module)
  if not isinstance(task_feature_lengths, Mapping) or not {'inputs', 'targets'} <= set(task_feature_lengths):
    raise ValueError(f"task_feature_lengths={task_feature_lengths!r}: give {{'inputs': …, 'targets': …}}, in tokens.")
  lengths = {key: task_feature_lengths[key] for key in ('inputs', 'targets')}
  examples = []
  for index, record in enumerate(_records(mixture_or_task_name, split, 0, count, lengths)):
    texts = pipeline.opened_example(record['example']).target if 'example' in record else _given(record, 'targets')
    examples.append(Example(index, pipeline.to_plain(record['inputs']), texts))
  judged = named(metrics, allow_execution=allow_execution)
  return _judged(Task(mixture_or_task_name, _of_texts(mixture_or_task_name, examples), *lengths.values(), judged))


def add_benchmark(
  name: str,
  benchmark: str | Benchmark | None = None,
  *,
  tokenizer: str | None = None,
  data_dir: str | None = None,
  allow_execution: bool | str = False,
  **changes,
):
  """Register a benchmark with seqio and return its task; `changes` replace fields of the benchmark.

  The benchmark is the one of that name unless another, or its name, is given. Without a tokenizer the features are
  texts, good for reading but not for a seqio Evaluator.
  """
  seqio = pipeline.library()
  benchmark = name if benchmark is None else benchmark
  if isinstance(benchmark, str):
    if benchmark not in BENCHMARKS:
      raise ValueError(f'there is no benchmark {benchmark!r}; choose from {", ".join(BENCHMARKS)}.')
    benchmark = BENCHMARKS[benchmark]
  benchmark = _adapted(benchmark, **changes)
  found = _local(benchmark, data_dir)
  folder = None if data_dir is None else os.path.expanduser(data_dir)
  source = seqio.TfdsDataSource(found, tfds_data_dir=folder, splits=dict(benchmark.splits), read_only=True)
  fit = prompts.fitter(tokenizer, benchmark.max_prompt_tokens)
  shots = functools.cache(functools.partial(pipeline.shots, benchmark, found, folder))
  judged = named(benchmark.metrics, allow_execution=allow_execution)
  post = prompts.cutter(benchmark.stop)
  prompt = functools.partial(pipeline.prompted, benchmark, shots, fit)
  return pipeline.register(name, source, pipeline.mapped(prompt), tokenizer, judged, post)


def add_parallel_text(name: str, source: str, target: str | Sequence[str], *, tokenizer: str, **settings):
  """Register parallel text, read as `files.parallel_text` reads it, with seqio; its only split is 'validation'."""
  return add_task(files.parallel_text(source, target, tokenizer=tokenizer, name=name, **settings), tokenizer=tokenizer)


def add_jsonl(name: str, path: str, *, tokenizer: str, **settings):
  """Register JSON lines, read as `files.jsonl` reads them, with seqio; the only split is 'validation'."""
  return add_task(files.jsonl(path, tokenizer=tokenizer, name=name, **settings), tokenizer=tokenizer)


def add_task(task: Task, *, tokenizer: str, split: str = 'validation', name: str | None = None):
  """Register any task whose prompts are texts with seqio and return the seqio task."""
  seqio = pipeline.library()
  import tensorflow as tf

  if any(not isinstance(e.prompt, str) for e in task.examples):
    raise ValueError(f'{task.name}: its prompts are token lists; seqio is given texts and a tokenizer.')
  lines = [json.dumps(dataclasses.asdict(e)) for e in task.examples]

  def read(split, shuffle_files, seed=None):  # seqio looks for these names
    return tf.data.Dataset.from_tensor_slices(lines)

  source = seqio.FunctionDataSource(read, splits=[split], num_input_examples={split: len(lines)})
  return pipeline.register(name or task.name, source, pipeline.opened(), tokenizer, task.metrics, task.postprocess)


# ---- reading ----


def _adapted(benchmark: Benchmark, **changes) -> Benchmark:
  """Return a benchmark with the changes that are not None."""
  changed = dataclasses.replace(benchmark, **{key: value for key, value in changes.items() if value is not None})
  if changed.shots < 0 or (changed.shots and changed.shots_split is None):
    raise ValueError(f'shots={changed.shots}: {changed.dataset} has no split to take worked examples from.')
  return changed


def _local(benchmark: Benchmark, data_dir: str | None) -> str:
  """Return the name and version of a data set that lies ready, or say how it is made ready."""
  import tensorflow_datasets as tfds
  from tensorflow_datasets.core import read_only_builder

  folder = os.path.expanduser(data_dir or os.environ.get('TFDS_DATA_DIR') or DATA_DIR)
  try:
    builder = read_only_builder.builder_from_files(benchmark.dataset, data_dir=folder)
  except tfds.core.DatasetNotFoundError:
    how = benchmark.prepare or 'tfds build {dataset} --data_dir={data_dir}'
    raise FileNotFoundError(
      f'{benchmark.dataset} is not in {folder}, and nothing is downloaded while tasks are read. Prepare it once with: '
      f'{how.format(dataset=benchmark.dataset, data_dir=folder)} (or give data_dir, the folder where it is).'
    ) from None
  return f'{benchmark.dataset}:{builder.version}'


def _records(
  name: str, split: str, start: int, count: int | None, lengths: Mapping[str, int] | None = None
) -> Iterator[Mapping[str, Any]]:
  """Yield the preprocessed records of a registered task in the order of its split, of a mixture task by task.

  Tokens are cut to `lengths`, by feature.
  """
  seqio = pipeline.library()
  import tensorflow_datasets as tfds

  if name not in (*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()):
    raise ValueError(
      f'there is no benchmark and no seqio task or mixture {name!r}; benchmarks are {", ".join(BENCHMARKS)}. Import '
      'the module that registers it first.'
    )
  tasks = seqio.get_subtasks(seqio.get_mixture_or_task(name))
  for task in tasks:
    if split not in task.splits:
      raise ValueError(f'{task.name} has no split {split!r}; choose from {", ".join(sorted(task.splits))}.')
  settings = dict(sequence_length=lengths, split=split, shuffle=False, num_epochs=1, try_in_mem_cache=False)
  records = itertools.chain.from_iterable(tfds.as_numpy(task.get_dataset(**settings)) for task in tasks)
  yield from itertools.islice(records, start, None if count is None else start + count)


def _task(name, split, examples, benchmark: Benchmark, metrics) -> Task:
  if not examples:
    raise ValueError(f'{name}: the split {split!r} has no examples from start on.')
  post = prompts.cutter(benchmark.stop)
  return _judged(Task(name, examples, benchmark.max_prompt_tokens, benchmark.max_new_tokens, metrics, post))


def _judged(task: Task) -> Task:
  check(task.metrics, task.examples, lambda example: f'{task.name}, example {example.index}')
  return task


def _registered(name, split, count, start, max_prompt_tokens, max_new_tokens, metrics, allow_execution) -> Task:
  """Return a task of anyone's: its pretokenized texts, else its texts or tokens."""
  if max_prompt_tokens is None or max_new_tokens is None:
    raise ValueError(f'{name}: give max_prompt_tokens and max_new_tokens; a seqio task does not tell them.')
  if not metrics:
    raise ValueError(f"{name}: give metrics, as ('bleu',); a seqio task's own judge tokens.")
  examples = []
  for index, record in zip(itertools.count(start), _records(name, split, start, count), strict=False):
    if 'example' in record:
      examples.append(dataclasses.replace(pipeline.opened_example(record['example']), index=index))
    else:
      examples.append(Example(index, _given(record, 'inputs'), _given(record, 'targets')))
  judged = named(metrics, allow_execution=allow_execution)
  return _judged(Task(name, _of_texts(name, examples), max_prompt_tokens, max_new_tokens, judged))


def _of_texts(name: str, examples: list[Example]) -> list[Example]:
  """Return the examples, having checked that there are some and that their targets are texts."""
  if not examples:
    raise ValueError(f'{name}: the split has no examples from start on.')
  if any(not isinstance(e.target, (str, list)) or (e.target and not isinstance(e.target[0], str)) for e in examples):
    raise ValueError(f'{name}: its targets are tokens; keep targets_pretokenized in its preprocessing.')
  return examples


def _given(record: Mapping[str, Any], key: str) -> str | list:
  value = record.get(f'{key}_pretokenized', record.get(key))
  return pipeline.to_plain(value)
