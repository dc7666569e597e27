"""Benchmarks read as examples; seqio and TensorFlow are imported when a function is called."""

from collections.abc import Iterator, Mapping
import os
from typing import Any

import numpy as np

from speccascade.data import prompts
from speccascade.data.benchmarks import Benchmark
from speccascade.data.examples import Example

DATA_DIR = '~/tensorflow_datasets'


def library():
  """Return seqio, or raise an error that names the extra."""
  try:
    import seqio
  except ModuleNotFoundError as e:
    raise ModuleNotFoundError(f"{e}; tasks of seqio need the extra: pip install 'speccascade[seqio]'.") from None
  return seqio


def to_plain(value: Any) -> Any:
  """Return a value of TensorFlow Datasets as text, number, list or dict of them."""
  if isinstance(value, bytes):
    return value.decode()
  if isinstance(value, Mapping):
    return {key: to_plain(v) for key, v in value.items()}
  value = np.asarray(value)
  return [to_plain(v) for v in value.tolist()] if value.ndim else value.item()


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
