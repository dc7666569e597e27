"""Benchmarks and seqio tasks as plain examples, so that decoding needs no TensorFlow.

Data must be prepared before: nothing is downloaded. seqio and TensorFlow are imported when a function is called.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import importlib
import itertools
from typing import Any

from speccascade.data import prompts
from speccascade.data.benchmarks import Benchmark, BENCHMARKS
from speccascade.data.examples import Example, Metric, Task
from speccascade.data.metrics import check, named
from speccascade.data.seqio import pipeline


def seqio_task(
  name: str,
  *,
  split: str = 'validation',
  count: int | None = None,
  start: int = 0,
  seed: int | None = None,
  language: str | None = None,
  tokenizer: str | None = None,
  data_dir: str | None = None,
  prompt_field: str | None = None,
  prefix: str | None = None,
  suffix: str | None = None,
  shots: int | None = None,
  shots_split: str | None = None,
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
    split: The split to read.
    count: Number of examples; None for all.
    start: Number of examples to skip.
    seed: Of a random subset of `count` examples; None takes the first ones.
    language: The programming language (humanevalpack only).
    tokenizer: Path of the models' tokenizer, to truncate long prompts (benchmarks only).
    data_dir: Folder of TensorFlow Datasets (benchmarks only).
    prompt_field: The question, as 'Article: {article}\nSummary:': a field of the data set, or a template of fields. The
      fields of a registered task are inputs and targets.
    prefix: Text at the beginning of the prompt.
    suffix: Text at the end of the prompt.
    shots: Number of worked examples.
    shots_split: The split of the worked examples.
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
  changes = dict(prompt_field=prompt_field, prefix=prefix, suffix=suffix, shots=shots, shots_split=shots_split)
  changes |= dict(chat=chat, stop=stop, metrics=metrics)
  changes |= dict(max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens)
  chosen = dict(start=start, count=count, seed=seed)
  if name in BENCHMARKS:
    benchmark = _changed(_in_language(name, language), **changes)
    judged = named(benchmark.metrics)
    dataset = pipeline.builder(benchmark, data_dir)
    _check_split(name, split, benchmark.splits)
    fit = prompts.Fitter(tokenizer, benchmark.max_prompt_tokens)
    examples = list(pipeline.benchmark_examples(benchmark, dataset, fit, split, **chosen))
  else:
    benchmark = _registered(name, changes, tokenizer=tokenizer, data_dir=data_dir, language=language)
    judged = named(benchmark.metrics)
    examples = _registered_examples(benchmark, split, **chosen)
  return _task(name, examples, (benchmark.max_prompt_tokens, benchmark.max_new_tokens), judged, benchmark.stop)


def t5x_task(
  mixture_or_task_name: str,
  *,
  task_feature_lengths: Mapping[str, int],
  metrics: Sequence[str | Metric],
  split: str = 'test',
  count: int | None = None,
  module: str | None = None,
) -> Task:
  """Return a seqio task or mixture with the prompts that T5X gives a model: tokens, truncated to the feature lengths.

  Args:
    mixture_or_task_name: Name in seqio's registry.
    task_feature_lengths: {'inputs': …, 'targets': …}, in tokens.
    metrics: Names of metrics, or functions; they judge texts.
    split: The split to read.
    count: Number of examples; None for all.
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
  examples = []
  for index, record in prompts.select(_records(mixture_or_task_name, split, lengths), count=count):
    examples.append(Example(index, pipeline.to_plain(record['inputs']), _plain(index, record).target))
  return _task(mixture_or_task_name, examples, lengths.values(), judged)


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
      f'shots={changed.shots}: {changed.dataset} has no split to take worked examples from; give shots_split.'
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
  fields = dict(dataset=name, splits={}, prompt_field='inputs', target_field='targets')
  return _changed(Benchmark(**fields, max_prompt_tokens=0, max_new_tokens=0, metrics=()), **changes)


def _registered_examples(benchmark: Benchmark, split: str, **chosen) -> list[Example]:
  """Return the examples of a registered task, with the prompts that the settings make of its own."""
  name = benchmark.dataset
  worked = []
  if benchmark.shots:
    for i, record in zip(range(benchmark.shots), _records(name, benchmark.shots_split), strict=False):
      worked.append(benchmark.worked(_as_record(_plain(i, record)), f'{name}, {benchmark.shots_split}'))
  examples = []
  for index, record in prompts.select(_records(name, split), **chosen):
    example = _plain(index, record)
    prompt = benchmark.prompt(_as_record(example), f'{name}, example {index}', worked=worked)
    examples.append(dataclasses.replace(example, prompt=prompt))
  return examples


def _as_record(example: Example) -> dict[str, Any]:
  return {'inputs': example.prompt, 'targets': example.target}


def _check_split(name: str, split: str, splits):
  if split not in splits:
    raise ValueError(f'{name} has no split {split!r}; choose from {", ".join(sorted(splits))}.')


def _records(name: str, split: str, lengths: Mapping[str, int] | None = None) -> Iterator[Mapping[str, Any]]:
  """Yield the preprocessed records of a registered task in order, of a mixture task by task, truncated to `lengths`."""
  seqio = pipeline.library()
  import tensorflow_datasets as tfds

  if name not in (*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()):
    raise ValueError(
      f'there is no benchmark and no seqio task or mixture {name!r}; benchmarks are {", ".join(BENCHMARKS)}. Import '
      'the module that registers it first.'
    )
  tasks = seqio.get_subtasks(seqio.get_mixture_or_task(name))
  for task in tasks:
    _check_split(task.name, split, task.splits)
  settings = dict(sequence_length=lengths, split=split, shuffle=False, num_epochs=1, try_in_mem_cache=False)
  return itertools.chain.from_iterable(tfds.as_numpy(task.get_dataset(**settings)) for task in tasks)


def _plain(index: int, record: Mapping[str, Any]) -> Example:
  """Return the example of a record: its texts, else its tokens."""
  prompt, target = (record.get(f'{key}_pretokenized', record.get(key)) for key in ('inputs', 'targets'))
  return Example(index, pipeline.to_plain(prompt), pipeline.to_plain(target))


def _task(
  name: str, examples: list[Example], limits: Iterable[int], metrics: dict[str, Metric], stop: Sequence[str] = ()
) -> Task:
  """Return a task, or raise unless there are examples that have texts for targets and suit the metrics."""
  if not examples:
    raise ValueError(f'{name}: the split has no examples from start on.')
  if any(not isinstance(e.target, str | list) or not all(isinstance(x, str) for x in e.references) for e in examples):
    raise ValueError(f'{name}: its targets are tokens; keep targets_pretokenized in its preprocessing.')
  check(metrics, examples, lambda example: f'{name}, example {example.index}')
  return Task(name, examples, *limits, metrics, prompts.truncation(stop), stop)
