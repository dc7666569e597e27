"""Benchmarks and seqio tasks as plain examples, so that decoding needs no TensorFlow.

Data must be prepared before: nothing is downloaded. seqio and TensorFlow are imported when a function is called.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import importlib
import itertools
import os
from typing import Any

import numpy as np

from speccascade.data import prompts
from speccascade.data.benchmarks import Benchmark, BENCHMARKS
from speccascade.data.examples import Example, Metric, Task
from speccascade.data.metrics import check, named

DATA_DIR = '~/tensorflow_datasets'
Read = Callable[[str], Iterable[prompts.Record]]  # of the records of a split, in order


def seqio_task(
  name: str,
  *,
  split: str | None = None,
  count: int | None = None,
  seed: int | None = None,
  language: str | None = None,
  tokenizer: str | None = None,
  data_dir: str | None = None,
  prompt_field: str | None = None,
  prefix: str | None = None,
  shots: int | None = None,
  chat: bool | str | None = None,
  stop: Sequence[str] | None = None,
  max_prompt_tokens: int | None = None,
  max_new_tokens: int | None = None,
  metrics: Sequence[str | Metric] | None = None,
) -> Task:
  r"""Return a benchmark, or a registered seqio task or mixture, as a task of plain examples.

  Settings that are None are the benchmark's.

  Args:
    name: A benchmark of `BENCHMARKS`, or a name in seqio's registry.
    split: The split to read; of a registered task 'validation' by default.
    count: Number of examples; None for all.
    seed: Of a random subset of `count` examples; None takes the first ones.
    language: The programming language (humanevalpack only).
    tokenizer: Path of the models' tokenizer, to truncate long prompts (benchmarks only).
    data_dir: Folder of TensorFlow Datasets (benchmarks only).
    prompt_field: The question, as 'Article: {article}\nSummary:': a field of the data set, or a template of fields. The
      fields of a registered task are inputs and targets.
    prefix: Text at the beginning of the prompt.
    shots: Number of worked examples (benchmarks only).
    chat: Whether the prompt is a user's message for the models' chat template; a text is the system's message.
    stop: Strings that end decoding; what follows them is neither decoded nor judged. Those of programs end a bare
      completion: give [] for a chat.
    max_prompt_tokens: The longest prompt.
    max_new_tokens: Tokens to generate at most.
    metrics: Names of metrics, or functions.

  Returns:
    A task whose examples are indexed by their position in the split.

  Raises:
    FileNotFoundError: if the data set is not prepared; it names the command.
    ValueError: if there is no such task or split, or a setting is wrong or missing.
  """
  changes = dict(prompt_field=prompt_field, prefix=prefix, shots=shots, chat=chat, stop=stop, metrics=metrics)
  changes |= dict(max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens)
  if name in BENCHMARKS:
    benchmark = _changed(_in_language(name, language), **changes)
    read = prepared(benchmark, data_dir)
    split = split or benchmark.split
    _check_split(name, split, benchmark.splits)
  else:
    benchmark = _registered(name, changes, tokenizer=tokenizer, data_dir=data_dir, language=language)
    read = functools.partial(_registered_records, name)
    split = split or 'validation'
  judged = named(benchmark.metrics)
  fit = prompts.Fitter(tokenizer, benchmark.max_prompt_tokens)
  made = list(examples(benchmark, read, fit, split, count, seed))
  return _task(name, made, (benchmark.max_prompt_tokens, benchmark.max_new_tokens), judged, benchmark.stop)


def t5x_task(
  mixture_or_task_name: str,
  *,
  task_feature_lengths: Mapping[str, int],
  metrics: Sequence[str | Metric],
  split: str = 'test',
  module: str | None = None,
) -> Task:
  """Return a seqio task or mixture with the prompts that T5X gives a model: tokens, truncated to the feature lengths.

  Args:
    mixture_or_task_name: Name in seqio's registry.
    task_feature_lengths: {'inputs': …, 'targets': …}, in tokens.
    metrics: Names of metrics, or functions; they judge texts.
    split: The split to read.
    module: A module to import first, which registers the task.

  Returns:
    A task whose prompts are token ids.

  Raises:
    ValueError: if there is no such task or split, or a length is missing.
  """
  if module is not None:
    importlib.import_module(module)
  if not isinstance(task_feature_lengths, Mapping) or not {'inputs', 'targets'} <= set(task_feature_lengths):
    raise ValueError(f"task_feature_lengths={task_feature_lengths!r}: give {{'inputs': …, 'targets': …}}, in tokens.")
  lengths = {key: task_feature_lengths[key] for key in ('inputs', 'targets')}
  judged = named(metrics)
  records = _registered_records(mixture_or_task_name, split, lengths)
  made = [Example(index, record['inputs'], record['targets']) for index, record in enumerate(records)]
  return _task(mixture_or_task_name, made, lengths.values(), judged)


# ---- reading ----


def _in_language(name: str, language: str | None) -> Benchmark:
  """Return a benchmark in a programming language."""
  benchmark = BENCHMARKS[name]
  if language is None:
    return benchmark
  if language not in benchmark.languages:
    known = ', '.join(benchmark.languages) or 'none'
    raise ValueError(f'{name} has no language {language!r}; choose from {known}.')
  return benchmark.languages[language]


def _changed(benchmark: Benchmark, **changes) -> Benchmark:
  """Return a benchmark with the changes that are not None."""
  changed = dataclasses.replace(benchmark, **{key: value for key, value in changes.items() if value is not None})
  if changed.shots < 0 or (changed.shots and changed.shots_split is None):
    raise ValueError(
      f'shots={changed.shots}: {changed.dataset} has no split to take worked examples from; give shots=0.'
    )
  return changed


def _registered(name: str, changes: Mapping[str, Any], **benchmark_settings) -> Benchmark:
  """Return a task of seqio's registry with its settings, or raise for one that is missing or impossible."""
  for key, value in benchmark_settings.items():
    if value is not None:
      raise ValueError(
        f'{key}={value!r} is a setting of benchmarks ({", ".join(BENCHMARKS)}); leave it out for {name!r}, which is '
        'registered with its own vocabularies and data.'
      )
  if changes['max_prompt_tokens'] is None or changes['max_new_tokens'] is None:
    raise ValueError(f'{name}: give max_prompt_tokens and max_new_tokens, which a seqio task does not define.')
  if not changes['metrics']:
    raise ValueError(f"{name}: give metrics, as ('bleu',); those of a seqio task judge tokens.")
  fields = dict(dataset=name, splits=(), prompt_field='inputs', target_field='targets')
  return _changed(Benchmark(**fields, max_prompt_tokens=0, max_new_tokens=0, metrics=()), **changes)


def _check_split(name: str, split: str, splits):
  if split not in splits:
    raise ValueError(f'{name} has no split {split!r}; choose from {", ".join(sorted(splits))}.')


def examples(
  benchmark: Benchmark,
  read: Read,
  fit: prompts.Fitter,
  split: str,
  count: int | None = None,
  seed: int | None = None,
) -> Iterator[Example]:
  """Yield the examples of a split that `prompts.select` chooses, with their worked examples in front."""
  worked: dict[Any, list[tuple[str, str]]] = {}  # of each group
  if benchmark.shots:
    shown = read(benchmark.shots_split)
    for record in shown if benchmark.group else itertools.islice(shown, benchmark.shots):
      some = worked.setdefault(record.get(benchmark.group), [])
      if len(some) < benchmark.shots:
        some.append(benchmark.worked(record, f'{benchmark.dataset}, {benchmark.shots_split}'))
  for index, record in prompts.select(read(split), count, seed):
    where = f'{benchmark.dataset}, example {index} of {split}'
    yield benchmark.example(index, record, where, fit, worked.get(record.get(benchmark.group), ()))


def prepared(benchmark: Benchmark, data_dir: str | None) -> Read:
  """Return what reads a data set that has been prepared, or raise an error with the command."""
  library()
  import tensorflow_datasets as tfds
  from tensorflow_datasets.core import read_only_builder

  folder = os.path.expanduser(data_dir or os.environ.get('TFDS_DATA_DIR') or DATA_DIR)
  try:
    dataset = read_only_builder.builder_from_files(benchmark.dataset, data_dir=folder)
  except tfds.core.DatasetNotFoundError:
    command = benchmark.prepare or 'tfds build {dataset} --data_dir={data_dir}'
    raise FileNotFoundError(
      f'{benchmark.dataset} is not in {folder}, and reading a task downloads nothing. Prepare it once with: '
      f'{command.format(dataset=benchmark.dataset, data_dir=folder)} (or give its folder as data_dir).'
    ) from None
  return functools.partial(_prepared_records, benchmark, dataset)


def _prepared_records(benchmark: Benchmark, dataset, split: str) -> Iterator[dict[str, Any]]:
  """Yield the records of a split in order, without features that are nested deeper than a list of texts."""
  import tensorflow_datasets as tfds

  kinds = bytes | np.ndarray | np.generic
  for record in tfds.as_numpy(dataset.as_dataset(split=split)):
    flat = {
      key: {k: v for k, v in x.items() if isinstance(v, kinds)} if isinstance(x, dict) else x
      for key, x in record.items()
    }
    plain = {key: _to_plain(value) for key, value in flat.items() if isinstance(value, kinds | dict)}
    yield benchmark.fields(plain) if benchmark.fields else plain


def _registered_records(name: str, split: str, lengths: Mapping[str, int] | None = None) -> Iterator[dict[str, Any]]:
  """Yield the inputs and targets of a registered task in order, of a mixture task by task, as texts.

  With `lengths` inputs are tokens, truncated to them; so they are where the task keeps no text.
  """
  seqio = library()
  import tensorflow_datasets as tfds

  if name not in (*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()):
    raise ValueError(
      f'there is no benchmark and no seqio task or mixture {name!r}; benchmarks are {", ".join(BENCHMARKS)}. Import '
      'the module that registers it first.'
    )
  settings = dict(sequence_length=lengths, split=split, shuffle=False, num_epochs=1, try_in_mem_cache=False)
  for task in seqio.get_subtasks(seqio.get_mixture_or_task(name)):
    _check_split(task.name, split, task.splits)
    for record in tfds.as_numpy(task.get_dataset(**settings)):
      texts = {key: record.get(f'{key}_pretokenized', record.get(key)) for key in ('inputs', 'targets')}
      plain = _to_plain(texts if lengths is None else texts | {'inputs': record['inputs']})
      targets = plain['targets'] if isinstance(plain['targets'], list) else [plain['targets']]
      if not all(isinstance(x, str) for x in targets):
        raise ValueError(f'{name}: its targets are tokens; keep targets_pretokenized in its preprocessing.')
      yield plain


def _to_plain(value: Any) -> Any:
  """Return a value of TensorFlow Datasets as text, number, list or dict of them."""
  if isinstance(value, bytes):
    return value.decode()
  if isinstance(value, Mapping):
    return {key: _to_plain(v) for key, v in value.items()}
  value = np.asarray(value)
  return [_to_plain(v) for v in value.tolist()] if value.ndim else value.item()


def library():
  """Return seqio, or raise an error that names the extra."""
  try:
    import seqio
  except ModuleNotFoundError as e:
    raise ModuleNotFoundError(f"{e}; tasks of seqio need the extra: pip install 'speccascade[seqio]'.") from None
  return seqio


def _task(
  name: str, made: list[Example], limits: Iterable[int], metrics: dict[str, Metric], stop: Sequence[str] = ()
) -> Task:
  """Return a task, or raise unless there are examples that suit the metrics."""
  if not made:
    raise ValueError(f'{name}: the split has no examples.')
  check(metrics, made, lambda example: f'{name}, example {example.index}')
  return Task(name, made, *limits, metrics, prompts.truncation(stop), stop)
