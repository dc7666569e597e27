"""A task in seqio's registry, and benchmarks read as examples.

Like `tasks`, this imports seqio and TensorFlow only when a function is called.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
import json
import os
from typing import Any

import numpy as np

from speccascade.data import prompts, tokenizers
from speccascade.data.benchmarks import Benchmark
from speccascade.data.examples import Example, Task

DATA_DIR = '~/tensorflow_datasets'


def library():
  """Return seqio, or raise an error that names the extra."""
  try:
    import seqio
  except ModuleNotFoundError as e:
    raise ModuleNotFoundError(f"{e}; tasks of seqio need the extra: pip install 'speccascade[seqio]'.") from None
  return seqio


# ---- registration ----


def add_task(task: Task, *, tokenizer: str, split: str = 'validation', name: str | None = None):
  """Register a task with seqio, whose metrics then see examples as targets.

  Its features are `inputs` and `targets`, tokens of the tokenizer, and `example`, the example as JSON.

  Args:
    task: Any task whose prompts are texts.
    tokenizer: Path of the models' tokenizer.
    split: Name of its only split.
    name: Name of the seqio task; by default the task's.

  Returns:
    The seqio task.

  Raises:
    ValueError: if prompts are token lists, or seqio has a task of that name.
  """
  seqio = library()
  name = name or task.name
  if any(not isinstance(e.prompt, str) for e in task.examples):
    raise ValueError(f'{name}: its prompts are token lists or messages; seqio takes texts and a tokenizer.')
  if name in seqio.TaskRegistry.names():
    raise ValueError(f'seqio already has a task {name!r}; choose another name, or seqio.TaskRegistry.remove it.')

  def judged(text, example, is_target=False):
    example = read_example(example['example'])
    return example if is_target else task.judged([example], [text])[0]

  return seqio.TaskRegistry.add(
    name,
    source=seqio.FunctionDataSource(functools.partial(_dataset, task), splits=(split,)),
    preprocessors=[
      lambda dataset: dataset.map(_features),
      seqio.preprocessors.tokenize,
      seqio.preprocessors.append_eos_after_trim,
    ],
    output_features=token_features(tokenizer),
    postprocess_fn=judged,
    metric_fns=[_metric_fn(key, metric) for key, metric in task.metrics.items()],
  )


def _dataset(task: Task, split, shuffle_files, seed=None):  # the argument names are seqio's
  """Return the examples of a task as a data set, in JSON."""
  import tensorflow as tf

  def lines():
    return (json.dumps(dataclasses.asdict(example)) for example in task.examples)

  return tf.data.Dataset.from_generator(lines, output_signature=tf.TensorSpec((), tf.string))


def _metric_fn(name: str, metric: Callable) -> Callable:
  def compute(targets, predictions):  # the argument names are seqio's
    return {name: metric(targets, predictions)}

  compute.__name__ = name
  return compute


def token_features(tokenizer: str) -> dict[str, Any]:
  """Return seqio's features for prompts and targets, with the tokens and conventions of a tokenizer."""
  seqio = library()
  from speccascade.data.seqio.vocabulary import TokenizerVocabulary

  loaded = tokenizers.load(tokenizer)
  inputs = TokenizerVocabulary(loaded, begins=True)
  targets = TokenizerVocabulary(loaded, begins=False)
  return {
    'inputs': seqio.Feature(inputs, add_eos=inputs.ends_texts, required=True),
    'targets': seqio.Feature(targets, add_eos=targets.eos_id is not None, required=True),
  }


def _features(line):
  """Return the texts of an example in JSON, and the JSON."""
  import tensorflow as tf

  def texts(line):
    example = read_example(line)
    return example.prompt.encode(), next(iter(example.references), '').encode()

  inputs, targets = tf.numpy_function(texts, [line], [tf.string, tf.string])
  return dict(inputs=tf.ensure_shape(inputs, []), targets=tf.ensure_shape(targets, []), example=line)


def read_example(line: bytes) -> Example:
  """Return an example from its JSON."""
  return Example(**json.loads(line))


def to_plain(value: Any) -> Any:
  """Return a value of TensorFlow Datasets as text, number, list or dict of them."""
  if isinstance(value, bytes):
    return value.decode()
  if isinstance(value, Mapping):
    return {key: to_plain(v) for key, v in value.items()}
  value = np.asarray(value)
  return [to_plain(v) for v in value.tolist()] if value.ndim else value.item()


# ---- benchmarks ----


def builder(benchmark: Benchmark, data_dir: str | None):
  """Return the builder of a data set that has been prepared, or raise an error with the command."""
  library()
  import tensorflow_datasets as tfds
  from tensorflow_datasets.core import read_only_builder

  folder = os.path.expanduser(data_dir or os.environ.get('TFDS_DATA_DIR') or DATA_DIR)
  try:
    return read_only_builder.builder_from_files(benchmark.dataset, data_dir=folder)
  except tfds.core.DatasetNotFoundError:
    command = benchmark.prepare or 'tfds build {dataset} --data_dir={data_dir}'
    raise FileNotFoundError(
      f'{benchmark.dataset} is not in {folder}, and reading a task downloads nothing. Prepare it once with: '
      f'{command.format(dataset=benchmark.dataset, data_dir=folder)} (or give its folder as data_dir).'
    ) from None


def benchmark_examples(
  benchmark: Benchmark,
  dataset,
  fit: prompts.Fitter,
  split: str,
  start: int = 0,
  count: int | None = None,
  seed: int | None = None,
) -> Iterator[Example]:
  """Yield the examples of a split that `prompts.select` chooses, read from the builder of its data set."""
  worked = _worked(benchmark, dataset)
  records = _records(benchmark, dataset, benchmark.splits[split])
  for index, record in prompts.select(records, start, count, seed):
    where = f'{benchmark.dataset}, example {index} of {split}'
    yield benchmark.example(index, record, where, fit, worked.get(record.get(benchmark.group), ()))


def _records(benchmark: Benchmark, dataset, split: str) -> Iterator[dict[str, Any]]:
  """Yield the records of a split in order, without features that are nested deeper than a list of texts."""
  import tensorflow_datasets as tfds

  kinds = bytes | np.ndarray | np.generic
  for record in tfds.as_numpy(dataset.as_dataset(split=split)):
    flat = {
      key: {k: v for k, v in x.items() if isinstance(v, kinds)} if isinstance(x, dict) else x
      for key, x in record.items()
    }
    plain = {key: to_plain(value) for key, value in flat.items() if isinstance(value, kinds | dict)}
    yield benchmark.fields(plain) if benchmark.fields else plain


def _worked(benchmark: Benchmark, dataset) -> dict[Any, list[tuple[str, str]]]:
  """Return the worked examples of each group, in the order of their split."""
  groups: dict[Any, list[tuple[str, str]]] = {}
  if benchmark.shots:
    first = '' if benchmark.group else f'[:{benchmark.shots}]'
    for record in _records(benchmark, dataset, benchmark.shots_split + first):
      worked = groups.setdefault(record.get(benchmark.group), [])
      if len(worked) < benchmark.shots:
        worked.append(benchmark.worked(record, f'{benchmark.dataset}, {benchmark.shots_split}'))
  return groups
