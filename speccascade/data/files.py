"""Tasks from files of one's own: parallel text, line by line, and JSON lines. Plain or gzipped; UTF-8.

A prompt that is too long for `max_prompt_tokens` is an error of decoding, unless the task is given the models'
`tokenizer` (a path): then the text inside the prompt is cut, and what stands around it stays.
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
  """Return a task of lines to be turned into other lines: at most `count` pairs, after the first `start`.

  `target` is a file of references or several of them. A prompt is prefix + line + suffix.
  """
  targets = [target] if isinstance(target, str) else list(target)
  columns = [lines(path) for path in (source, *targets)]
  for path, column in zip(targets, columns[1:], strict=True):
    if len(column) != len(columns[0]):
      raise ValueError(
        f'{source} has {len(columns[0])} lines but {path} has {len(column)}; parallel files pair line with line.'
      )
  fit = prompts.fitter(tokenizer, max_prompt_tokens)
  examples = []
  for i in _span(source, len(columns[0]), start, count):
    line, *references = (column[i] for column in columns)
    prompt = fit(lambda text: f'{prefix}{text}{suffix}', line)
    examples.append(Example(i, prompt, references[0] if len(references) == 1 else references))
  where = lambda example: f'{source}, line {example.index + 1}: its target'
  return _task(name or _stem(source), examples, max_prompt_tokens, max_new_tokens, metrics, where)


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

  `prompt_field` and `target_field` are names of fields or templates of them ('Question: {question}\nAnswer:'); a target
  may be a list of references. `info_fields` are kept for the metrics. A prediction is judged up to its first `stop`.
  """
  records = _records(path)
  fit = prompts.fitter(tokenizer, max_prompt_tokens)
  examples = []
  for i in _span(path, len(records), start, count):
    line, record = records[i]
    where = f'{path}, line {line}'
    prompt = _prompt(prompt_field, record, where, fit)
    info = {field: _field(record, field, where) for field in info_fields}
    examples.append(Example(i, prompt, _target(target_field, record, where), info))
  limits = max_prompt_tokens, max_new_tokens
  where = lambda example: f'{path}, line {records[example.index][0]}'
  return _task(name or _stem(path), examples, *limits, metrics, where, stop=stop, allow_execution=allow_execution)


def _task(name, examples, max_prompt_tokens, max_new_tokens, metrics, where, *, stop=(), allow_execution=False) -> Task:
  judged = metric_table.named(metrics, allow_execution=allow_execution)
  metric_table.check(judged, examples, where)
  return Task(name, examples, max_prompt_tokens, max_new_tokens, judged, prompts.cutter(stop))


def _stem(path: str) -> str:
  return pathlib.Path(path).name.removesuffix('.gz').rsplit('.', 1)[0]


def _span(path: str, total: int, start: int, count: int | None) -> range:
  """Return the places of the examples that were asked for."""
  if start < 0 or start >= total:
    raise ValueError(f'start={start}: {path} has {total} examples, of which 0 … {total - 1} can be left out in front.')
  if count is not None and count < 1:
    raise ValueError(f'count={count}: ask for one example at least, or None for all.')
  return range(start, total if count is None else min(total, start + count))


def texts(path: str, prompt_field: str | None = None, count: int | None = None) -> list[str]:
  """Return the prompts of a file: its lines or, with a field or a template of them, what its JSON lines say."""
  if prompt_field is None:
    return [line for line in lines(path) if line.strip()][:count]
  whole = lambda make, text: make(text)
  return [_prompt(prompt_field, record, f'{path}, line {line}', whole) for line, record in _records(path)[:count]]


# ---- reading ----


def lines(path: str | os.PathLike) -> list[str]:
  """Return the lines of a plain or gzipped file; only line feeds (with carriage returns before them) end a line."""
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


def _records(path: str) -> list[tuple[int, dict[str, Any]]]:
  """Return the objects of a file, each with its line."""
  records = []
  for number, line in enumerate(lines(path), 1):
    if not line.strip():
      continue
    try:
      record = json.loads(line)
    except (ValueError, RecursionError) as e:
      raise ValueError(f'{path}: line {number} is not JSON ({e}); each line must hold one object.') from None
    if not isinstance(record, dict):
      raise ValueError(f'{path}: line {number} holds {type(record).__name__}, not an object.')
    records.append((number, record))
  return records


def _field(record: dict, name: str, where: str) -> Any:
  if name not in record:
    raise ValueError(f'{where}: no field {name!r}; there are {", ".join(record)}.')
  return record[name]


def _text_field(record: dict, name: str, where: str) -> Any:
  """Return a field that becomes text, which null does not."""
  value = _field(record, name, where)
  if value is None or (isinstance(value, list) and None in value):
    raise ValueError(f'{where}: the field {name!r} is null; give it a text, or take the line out.')
  try:
    str(value).encode()
  except UnicodeEncodeError:
    raise ValueError(f'{where}: the field {name!r} holds half a character (a lone surrogate).') from None
  return value


def _fields_of(template: str, where: str) -> list[str]:
  """Return the fields that a template names; a name alone is itself one."""
  if '{' not in template:
    return [template]
  try:
    return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
  except ValueError as e:
    raise ValueError(f'{where}: the template {template!r} cannot be read ({e}); double braces that are text.') from None


def _prompt(template: str, record: dict, where: str, fit: Callable) -> str:
  """Return the prompt; where it has to be cut, its longest field is."""
  values = {name: str(_text_field(record, name, where)) for name in _fields_of(template, where)}
  if not values:
    raise ValueError(f'{where}: the prompt {template!r} names no field; write {{field}} for one.')
  longest = max(values, key=lambda name: len(values[name]))
  if '{' not in template:
    return fit(lambda text: text, values[longest])
  return fit(lambda text: template.format_map({**values, longest: text}), values[longest])


def _target(template: str, record: dict, where: str) -> str | list[str]:
  values = {name: _text_field(record, name, where) for name in _fields_of(template, where)}
  if '{' in template:
    return template.format_map(values)
  value = values[template]
  return [str(v) for v in value] if isinstance(value, list) else str(value)
