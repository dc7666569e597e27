"""The parts of a seqio task: its registration, and the preprocessing from records to prompts and tokens.

Every record becomes an example in JSON by plain Python, and from it the features. Only functions that seqio_tasks
calls are here; like them they import seqio and TensorFlow when they are called.
"""

from collections.abc import Callable, Mapping
import dataclasses
import json
from typing import Any

import numpy as np

from speccascade.data import prompts, tokenizers
from speccascade.data.benchmarks import Benchmark, Item
from speccascade.data.examples import Example


def library():
  """Return seqio, or say how to get it."""
  try:
    import seqio
  except ModuleNotFoundError as e:
    raise ModuleNotFoundError(f"{e}; tasks of seqio need the extra: pip install 'speccascade[seqio]'.") from None
  return seqio


def register(name, source, prepare: Callable, tokenizer, metrics: Mapping[str, Callable], postprocess):
  """Add a seqio task whose targets, as the metrics see them, are examples."""
  seqio = library()
  if name in seqio.TaskRegistry.names():
    raise ValueError(f'seqio already has a task {name!r}; choose another name, or seqio.TaskRegistry.remove it.')
  steps = [prepare]
  if tokenizer is None:
    features = {key: _text_feature() for key in ('inputs', 'targets')}
  else:
    features = token_features(tokenizer)
    steps += [seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim]

  def judged(text, example, is_target=False):
    found = opened_example(example['example'])
    return found if is_target else postprocess(text, found) if postprocess else text

  return seqio.TaskRegistry.add(
    name,
    source=source,
    preprocessors=steps,
    output_features=features,
    postprocess_fn=judged,
    metric_fns=[_metric_fn(key, metric) for key, metric in metrics.items()],
  )


def _metric_fn(name: str, metric: Callable) -> Callable:
  def compute(targets, predictions):  # seqio looks for these names
    return {name: metric(targets, predictions)}

  compute.__name__ = name
  return compute


def token_features(tokenizer: str) -> dict[str, Any]:
  """Return seqio's features for prompts and targets in the tokens, and with the conventions, of a tokenizer."""
  seqio = library()
  from speccascade.data.seqio.vocabulary import TokenizerVocabulary

  found = tokenizers.load(tokenizer)
  inputs, targets = TokenizerVocabulary(found, begins=True), TokenizerVocabulary(found, begins=False)
  return {
    'inputs': seqio.Feature(inputs, add_eos=inputs.ends_texts, required=True),
    'targets': seqio.Feature(targets, add_eos=targets.eos_id is not None, required=True),
  }


def _text_feature():
  import tensorflow as tf

  seqio = library()
  return seqio.Feature(seqio.PassThroughVocabulary(0), add_eos=False, dtype=tf.string, rank=0)


def forget(name: str):
  """Remove a task from seqio's registry, where it is there."""
  seqio = library()
  if name in seqio.TaskRegistry.names():
    seqio.TaskRegistry.remove(name)


# ---- preprocessing ----


def mapped(prompt: Callable[[int, Mapping[str, Any]], Example]) -> Callable:
  """Return a preprocessor that turns records of TensorFlow Datasets into examples by a plain function."""
  import tensorflow as tf

  def records(dataset):
    keys = [key for key, spec in dataset.element_spec.items() if isinstance(spec, tf.TensorSpec)]  # none is nested

    def plain(index, *values):
      fields = {key: to_plain(value) for key, value in zip(keys, values, strict=True)}
      return json.dumps(dataclasses.asdict(prompt(int(index), fields))).encode()

    def one(index, record):
      line = tf.numpy_function(plain, [index, *(record[key] for key in keys)], tf.string)
      return _features(tf.ensure_shape(line, []))

    return dataset.enumerate().map(one)

  return records


def opened() -> Callable:
  """Return a preprocessor of examples that are JSON already."""
  return lambda dataset: dataset.map(_features)


def _features(line):
  """Return the texts of an example in JSON, and the JSON."""
  import tensorflow as tf

  def texts(line):
    example = opened_example(line)
    target = example.target if isinstance(example.target, str) else example.target[0]
    return example.prompt.encode(), target.encode()

  inputs, targets = tf.numpy_function(texts, [line], [tf.string, tf.string])
  return dict(inputs=tf.ensure_shape(inputs, []), targets=tf.ensure_shape(targets, []), example=line)


def to_plain(value: Any) -> Any:
  """Return a value of TensorFlow Datasets as text, number or list."""
  if isinstance(value, bytes):
    return value.decode()
  value = np.asarray(value)
  return [to_plain(v) for v in value.tolist()] if value.ndim else value.item()


def opened_example(line: bytes) -> Example:
  """Return an example of its JSON."""
  return Example(**json.loads(line))


def prompted(
  benchmark: Benchmark, shots: Callable, fit: prompts.Fitter, index: int, fields: Mapping[str, Any]
) -> Example:
  """Return the example of a record: prefix, header, the worked examples of other questions that fit, the question."""
  item = benchmark.item(fields)
  opening = benchmark.prefix + (benchmark.header(fields) if benchmark.header else '')
  question = item.render(item.text)
  given = shots().get(fields[benchmark.group] if benchmark.group else None, ())
  worked = [shot.worked() for shot in given if shot.render(shot.text) != question]
  while worked and not fit.holds(opening + ''.join(worked) + question):
    worked.pop()
  before = opening + ''.join(worked)
  return Example(index, fit(lambda text: before + item.render(text), item.text), item.target, dict(item.info))


def shots(benchmark: Benchmark, dataset: str, data_dir: str | None) -> dict[Any, list[Item]]:
  """Return the worked examples of each group, in the order of their split."""
  found: dict[Any, list[Item]] = {}
  if not benchmark.shots:
    return found
  import tensorflow_datasets as tfds

  split = benchmark.shots_split
  split = split if benchmark.group else f'{split}[:{benchmark.shots}]'
  for record in tfds.as_numpy(tfds.builder(dataset, data_dir=data_dir).as_dataset(split=split)):
    fields = {key: to_plain(value) for key, value in record.items()}
    found.setdefault(fields[benchmark.group] if benchmark.group else None, []).append(benchmark.item(fields))
  return {group: items[: benchmark.shots] for group, items in found.items()}
