"""Tasks from the user's files: parallel text and JSON lines, plain or gzipped, in UTF-8.

Decoding refuses a prompt longer than `max_prompt_tokens`. With the models' `tokenizer` the text inside such a prompt is
truncated instead, and the template around it stays.
"""

from collections.abc import Callable, Sequence
import gzip
import json
import os
import pathlib
import string
from typing import Any
import zlib

from speccascade.data import metrics as metric_table
from speccascade.data import prompts
from speccascade.data.examples import Example, Metric, Task
from speccascade.host import storage


def parallel_text(
  source: str,
  target: str | Sequence[str],
  *,
  count: int | None = None,
  start: int = 0,
  prefix: str = '',
  suffix: str = '',
  max_prompt_tokens: int = 80,
  max_new_tokens: int = 80,
  metrics: Sequence[str | Metric] = ('bleu',),
  tokenizer: str | None = None,
  name: str | None = None,
) -> Task:
  """Return a task whose prompts and references are the lines of parallel files.

  Args:
    source: file with one source text a line.
    target: file of references with as many lines, or several such files.
    count: number of examples; None for all.
    start: number of lines to skip.
    prefix: text before each line in the prompt.
    suffix: text after each line in the prompt.
    max_prompt_tokens: the longest prompt.
    max_new_tokens: tokens to generate at most.
    metrics: names of metrics, or functions.
    tokenizer: path of the models' tokenizer, to truncate long prompts.
    name: the task's name; by default the name of the source file.

  Returns:
    A task whose examples are indexed by their line, from 0.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if a file cannot be read, the files differ in length, or the settings select no example.
  """
  targets = [target] if isinstance(target, str) else list(target)
  columns = [lines(path) for path in (source, *targets)]
  for path, column in zip(targets, columns[1:], strict=True):
    if len(column) != len(columns[0]):
      raise ValueError(
        f'{source} has {len(columns[0])} lines but {path} has {len(column)}; parallel files need as many lines.'
      )
  fit = prompts.Fitter(tokenizer, max_prompt_tokens)
  examples = []
  for i in _selected(source, len(columns[0]), start, count):
    line, *references = (column[i] for column in columns)
    prompt = fit(lambda text: f'{prefix}{text}{suffix}', line)
    examples.append(Example(i, prompt, references[0] if len(references) == 1 else references))
  metrics = metric_table.named(metrics)
  metric_table.check(metrics, examples, lambda example: f'{source}, line {example.index + 1}: its target')
  return Task(name or _stem(source), examples, max_prompt_tokens, max_new_tokens, metrics)


def jsonl(
  path: str,
  *,
  prompt_field: str = 'prompt',
  target_field: str = 'target',
  info_fields: Sequence[str] = (),
  count: int | None = None,
  start: int = 0,
  max_prompt_tokens: int = 512,
  max_new_tokens: int = 256,
  metrics: Sequence[str | Metric] = ('exact_match',),
  stop: Sequence[str] = (),
  tokenizer: str | None = None,
  allow_execution: bool | str = False,
  name: str | None = None,
) -> Task:
  r"""Return a task of JSON objects, one a line.

  Args:
    path: the file.
    prompt_field: name of a field, or a template as 'Question: {question}\nAnswer:'.
    target_field: the same for the reference; a field may hold a list of references.
    info_fields: fields that metrics need.
    count: number of examples; None for all.
    start: number of objects to skip.
    max_prompt_tokens: the longest prompt.
    max_new_tokens: tokens to generate at most.
    metrics: names of metrics, or functions.
    stop: strings that end a prediction before it is judged.
    tokenizer: path of the models' tokenizer, to truncate long prompts.
    allow_execution: True lets `pass_at_1` run generated programs; see `speccascade.data.sandbox`.
    name: the task's name; by default the name of the file.

  Returns:
    A task whose examples are indexed by their object, from 0.

  Raises:
    FileNotFoundError: if there is no such file.
    PermissionError: if a metric runs programs and `allow_execution` is False.
    ValueError: if the file cannot be read, a field is missing, or the settings select no example.
  """
  records = _records(path)
  fit = prompts.Fitter(tokenizer, max_prompt_tokens)
  examples = []
  for i in _selected(path, len(records), start, count):
    where, record = records[i]
    info = {field: _field(record, field, where) for field in info_fields}
    examples.append(Example(i, _prompt(prompt_field, record, where, fit), _target(target_field, record, where), info))
  metrics = metric_table.named(metrics, allow_execution=allow_execution)
  metric_table.check(metrics, examples, lambda example: records[example.index][0])
  postprocess = prompts.truncation(stop)
  return Task(name or _stem(path), examples, max_prompt_tokens, max_new_tokens, metrics, postprocess)


def _stem(path: str) -> str:
  return pathlib.Path(path).name.removesuffix('.gz').rsplit('.', 1)[0]


def _selected(path: str, total: int, start: int, count: int | None) -> range:
  """Return the indices of the examples that `start` and `count` select."""
  if not 0 <= start < total:
    raise ValueError(f'start={start}: {path} has {total} examples; start must lie in 0 … {total - 1}.')
  if count is not None and count < 1:
    raise ValueError(f'count={count} must be at least 1, or None for all examples.')
  return range(start, total if count is None else min(total, start + count))


def texts(path: str, prompt_field: str | None = None, count: int | None = None) -> list[str]:
  """Return the prompts of a file.

  Args:
    path: a text file, or one of JSON lines.
    prompt_field: field or template of the prompt in JSON lines; None takes the lines of a text file.
    count: number of prompts; None for all.

  Returns:
    The prompts, without blank lines.
  """
  if prompt_field is None:
    return [line for line in lines(path) if line.strip()][:count]
  return [_prompt(prompt_field, record, where, prompts.Fitter(None, 0)) for where, record in _records(path)[:count]]


# ---- reading ----


def lines(path: str | os.PathLike) -> list[str]:
  r"""Return the lines of a plain or gzipped file; they end with \n or \r\n only.

  Args:
    path: a local path or a bucket's address.

  Returns:
    The lines without their ends, blank ones included.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if the file is empty, damaged or not UTF-8.
  """
  file = storage.resolve(path)
  with storage.client_errors():
    if not file.is_file():
      raise FileNotFoundError(f'{path}: no such file; give the path of a text file, plain or gzipped.')
    data = file.read_bytes()
  if data[:2] == b'\x1f\x8b':
    try:
      data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as e:
      raise ValueError(f'{path}: a damaged gzip file ({e}); fetch it again.') from None
  try:
    text = data.decode('utf-8-sig')
  except UnicodeDecodeError as e:
    line = data[: e.start].count(b'\n') + 1
    raise ValueError(f'{path}: line {line} is not UTF-8 ({e.reason}); convert the file, as with iconv.') from None
  if not text.strip():
    raise ValueError(f'{path}: the file is empty.')
  return [line.removesuffix('\r') for line in text.removesuffix('\n').split('\n')]


def _records(path: str) -> list[tuple[str, dict[str, Any]]]:
  """Return the objects of a file, each with its file and line for errors."""
  records = []
  for number, line in enumerate(lines(path), 1):
    if not line.strip():
      continue
    try:
      record = json.loads(line)
    except (ValueError, RecursionError) as e:
      raise ValueError(f'{path}: line {number} is not JSON ({e}); each line must be one object.') from None
    if not isinstance(record, dict):
      raise ValueError(f'{path}: line {number} is a {type(record).__name__}, not an object.')
    records.append((f'{path}, line {number}', record))
  return records


def _field(record: dict, name: str, where: str) -> Any:
  if name not in record:
    raise ValueError(f'{where}: no field {name!r}; the fields are {", ".join(record)}.')
  return record[name]


def _text_fields(template: str, record: dict, where: str) -> dict[str, Any]:
  """Return the fields that a template names (a name alone is one), checked to be text, numbers or lists."""
  names = [template]
  if '{' in template:
    try:
      names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as e:
      raise ValueError(f'{where}: the template {template!r} cannot be read ({e}); double literal braces.') from None
  fields = {name: _field(record, name, where) for name in names}
  for name, value in fields.items():
    if value is None or (isinstance(value, list) and None in value):
      raise ValueError(f'{where}: the field {name!r} is null; give it a text, or remove the line.')
    try:
      str(value).encode()
    except UnicodeEncodeError:
      raise ValueError(f'{where}: the field {name!r} contains half a character (a lone surrogate).') from None
  return fields


def _prompt(template: str, record: dict, where: str, fit: Callable) -> str:
  """Return the prompt of a record; if it is too long, its longest field is truncated."""
  values = {name: str(value) for name, value in _text_fields(template, record, where).items()}
  if not values:
    raise ValueError(f'{where}: the prompt {template!r} names no field; write {{field}} for one.')
  longest = max(values, key=lambda name: len(values[name]))
  render = lambda text: template.format_map({**values, longest: text}) if '{' in template else text
  return fit(render, values[longest])


def _target(template: str, record: dict, where: str) -> str | list[str]:
  values = _text_fields(template, record, where)
  if '{' in template:
    return template.format_map(values)
  value = values[template]
  return [str(v) for v in value] if isinstance(value, list) else str(value)
