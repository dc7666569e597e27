"""Tasks from the user's files: parallel text, JSON lines and conversations, plain or gzipped, in UTF-8.

Decoding refuses a prompt longer than `max_prompt_tokens`. With the models' `tokenizer` the text inside such a prompt is
truncated instead, and the template around it stays.
"""

from collections.abc import Sequence
import dataclasses
import gzip
import io
import json
import os
import pathlib
from typing import Any
import zlib

from speccascade.data import chat as chats
from speccascade.data import metrics as metric_table
from speccascade.data import prompts, sources
from speccascade.data.examples import Example, Metric, Prompt, Task
from speccascade.host import storage

_MOST_BYTES = 4 << 30  # of a file of texts, which is read as a whole


def parallel_text(
  source: str,
  target: str | Sequence[str],
  *,
  count: int | None = None,
  seed: int | None = None,
  prefix: str = '',
  chat: bool | str = False,
  max_prompt_tokens: int = 80,
  max_new_tokens: int = 80,
  metrics: Sequence[str | Metric] = ('bleu',),
  tokenizer: str | None = None,
  name: str | None = None,
) -> Task:
  """Return a task whose prompts and references are the lines of parallel files.

  Args:
    source: File with one source text a line.
    target: File of references with as many lines, or several such files.
    count: Number of examples; None for all.
    seed: Of a random subset of `count` lines; None takes the first ones.
    prefix: Text before each line in the prompt.
    chat: Whether the prompt is a user's message for the models' chat template; a text is the system's message.
    max_prompt_tokens: The longest prompt.
    max_new_tokens: Tokens to generate at most.
    metrics: Names of metrics, or functions.
    tokenizer: Path of the models' tokenizer, to truncate long prompts.
    name: The task's name; by default the name of the source file.

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
  records = [
    (f'{source}, line {i}', {'source': line, 'target': references[0] if len(references) == 1 else references})
    for i, (line, *references) in enumerate(zip(*columns, strict=True), 1)
  ]
  template = prompts.Template(prompt_field='source', prefix=prefix, chat=chat)
  fit = prompts.Fitter(tokenizer, max_prompt_tokens)
  chosen = _selected(source, range(len(records)), count, seed)
  examples = [template.example(i, records[i][1], records[i][0], fit) for i in chosen]
  return _task(source, name, records, examples, (max_prompt_tokens, max_new_tokens), metrics)


def jsonl(
  path: str,
  *,
  prompt_field: str = 'prompt',
  target_field: str = 'target',
  info_fields: Sequence[str] = (),
  domain: str | None = None,
  prefix: str = '',
  shots: int = 0,
  chat: bool | str = False,
  count: int | None = None,
  seed: int | None = None,
  max_prompt_tokens: int = 512,
  max_new_tokens: int = 256,
  metrics: Sequence[str | Metric] = ('exact_match',),
  stop: Sequence[str] = (),
  tokenizer: str | None = None,
  name: str | None = None,
) -> Task:
  r"""Return a task of JSON objects, one a line or in one array.

  Args:
    path: The file.
    prompt_field: Name of a field, or a template as 'Question: {question}\nAnswer:'. A field may have chat messages.
    target_field: The same for the reference; a field may be a list of references, and None is no reference.
    info_fields: Fields that metrics need.
    domain: Field whose values divide the examples in reports.
    prefix: Text at the beginning of the prompt.
    shots: Number of worked examples before the question, the first objects of `path` but for the question itself.
    chat: Whether the prompt is a user's message for the models' chat template; a text is the system's message.
    count: Number of examples; None for all.
    seed: Of a random subset of `count` objects; None takes the first ones.
    max_prompt_tokens: The longest prompt.
    max_new_tokens: Tokens to generate at most.
    metrics: Names of metrics, or functions.
    stop: Strings that end decoding; what follows them is neither decoded nor judged.
    tokenizer: Path of the models' tokenizer, to truncate long prompts.
    name: The task's name; by default the name of the file.

  Returns:
    A task whose examples are indexed by their object, from 0.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if the file cannot be read, a field is missing, or the settings select no example.
  """
  fields = dict(prompt_field=prompt_field, target_field=target_field, info_fields=info_fields)
  template = prompts.Template(**fields, prefix=prefix, chat=chat)
  records = _records(path)
  worked = [template.worked(record, where) for where, record in records[:shots]]
  fit = prompts.Fitter(tokenizer, max_prompt_tokens)
  chosen = _selected(path, range(len(records)), count, seed)
  examples = [template.example(i, records[i][1], records[i][0], fit, worked) for i in chosen]
  examples = _in_domains(examples, domain, records)
  return _task(path, name, records, examples, (max_prompt_tokens, max_new_tokens), metrics, stop)


def conversations(
  path: str,
  *,
  turns: int = 1,
  info_fields: Sequence[str] = (),
  domain: str | None = None,
  chat: bool | str = False,
  count: int | None = None,
  seed: int | None = None,
  max_prompt_tokens: int = 1024,
  max_new_tokens: int = 256,
  tokenizer: str | None = None,
  name: str | None = None,
) -> Task:
  """Return a task of recorded conversations, whose prompts are what people asked first; there are no references.

  Args:
    path: A file of JSON objects, one a line or in one array, either as ShareGPT has them,
      {'conversations': [{'from': 'human', 'value': 'Hello.'}, …]}, or as chat messages,
      {'messages': [{'role': 'user', 'content': 'Hello.'}, …]}, or as MT-bench has them, {'turns': ['Hello.', …]}, what
      the user says. Those with fewer turns of the user are left out.
    turns: Number of turns of the user; those before the last one come with the recorded answers, and need `chat`.
    info_fields: Fields that metrics need.
    domain: Field whose values divide the examples in reports.
    chat: Whether the prompt is messages for the models' chat template; a text is the system's message.
    count: Number of examples; None for all.
    seed: Of a random subset of `count` conversations; None takes the first ones.
    max_prompt_tokens: The longest prompt.
    max_new_tokens: Tokens to generate at most.
    tokenizer: Path of the models' tokenizer, to truncate the last turn of long prompts.
    name: The task's name; by default the name of the file.

  Returns:
    A task whose examples are indexed by their object, from 0.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if the file cannot be read, or the settings select no example.
  """
  if turns < 1 or (turns > 1 and not chat):
    raise ValueError(f'turns={turns}: give at least 1, and chat=True for more than 1.')
  records = _records(path)
  openings = [_opening(record, where, turns) for where, record in records]
  usable = [i for i, opening in enumerate(openings) if opening is not None]
  if not usable:
    raise ValueError(f'{path}: no conversation has {turns} turns of a user; give fewer turns, or another file.')
  chosen = _selected(path, usable, count, seed)
  fit = prompts.Fitter(tokenizer, max_prompt_tokens)
  system = [{'role': 'system', 'content': chat}] if isinstance(chat, str) else []

  def prompt(messages: list[dict[str, str]]) -> Prompt:
    *before, last = messages

    def render(text):
      return [*system, *before, last | {'content': text}] if chat else text

    return fit(render, last['content'])

  info = {i: {name: prompts.field(records[i][1], name, records[i][0]) for name in info_fields} for i in chosen}
  examples = _in_domains([Example(i, prompt(openings[i]), [], info[i]) for i in chosen], domain, records)
  return _task(path, name, records, examples, (max_prompt_tokens, max_new_tokens), ('words',))


_ROLES = {'human': 'user', 'user': 'user', 'system': 'system'}  # of other speakers: assistant


def _opening(record: dict[str, Any], where: str, turns: int) -> list[dict[str, str]] | None:
  """Return the messages of a conversation up to a turn of the user, None if it has fewer turns."""
  listed = record.get('conversations', record.get('messages'))
  if isinstance(asked := record.get('turns'), list):
    if turns > 1:
      raise ValueError(f'turns={turns}: {where} has no answers; record them as messages, or give turns=1.')
    listed = [{'role': 'user', 'content': text} for text in asked]
  if not isinstance(listed, list):
    raise ValueError(f'{where}: no list of conversations, messages or turns; the fields are {", ".join(record)}.')
  messages = []
  for message in listed:
    if not isinstance(message, dict):
      raise ValueError(f'{where}: {message!r} is no message; write {{"from": "human", "value": "Hello."}}.')
    role = _ROLES.get(message.get('from', message.get('role')), 'assistant')
    text = message.get('value', message.get('content'))
    if not isinstance(text, str) or not text.strip() or (role == 'assistant' and not messages):
      continue  # parts of longer conversations begin with an answer
    chats.check_characters(text, f'{where}: a text')
    messages.append({'role': role, 'content': text})
    if [m['role'] for m in messages].count('user') == turns:
      return messages
  return None


def _in_domains(examples: list[Example], field: str | None, records: Sequence[tuple[str, Any]]) -> list[Example]:
  """Return examples with the value of a field as their domain."""
  if field is None:
    return examples
  found = [prompts.field(records[e.index][1], field, records[e.index][0]) for e in examples]
  return [dataclasses.replace(e, info=e.info | {'domain': x}) for e, x in zip(examples, found, strict=True)]


def _task(
  path: str,
  name: str | None,
  records: Sequence[tuple[str, Any]],
  examples: list[Example],
  limits: tuple[int, int],
  metrics: Sequence[str | Metric],
  stop: Sequence[str] = (),
) -> Task:
  """Return a task that is called like its file by default, checked to suit its metrics."""
  judged = metric_table.named(metrics)
  metric_table.check(judged, examples, lambda example: records[example.index][0])
  name = name or pathlib.Path(path).name.removesuffix('.gz').rsplit('.', 1)[0]
  return Task(name, examples, *limits, judged, prompts.truncation(stop), stop)


def _selected(path: str, usable: Sequence[int], count: int | None, seed: int | None) -> list[int]:
  """Return the indices of the examples that the settings select, of those that are usable."""
  if not usable:
    raise ValueError(f'{path} has no examples.')
  return [i for _, i in prompts.select(usable, count, seed)]


def texts(path: str, prompt_field: str | None = None, count: int | None = None) -> list[Prompt]:
  """Return the prompts of a file.

  Args:
    path: A text file, or one of JSON objects.
    prompt_field: Field or template of the prompt in JSON objects; None takes the lines of a text file.
    count: Number of prompts; None for all.

  Returns:
    The prompts, without blank lines: texts, or the chat messages or token ids of the field.
  """
  if prompt_field is None:
    return [line for line in lines(path) if line.strip()][:count]
  template = prompts.Template(prompt_field=prompt_field)
  return [template.prompt(record, where) for where, record in _records(path)[:count]]


# ---- reading ----


def lines(path: str | os.PathLike) -> list[str]:
  r"""Return the lines of a plain or gzipped file; they end with \n or \r\n only.

  Args:
    path: A local path or a bucket's address.

  Returns:
    The lines without their ends, blank ones included.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if the file is empty, damaged or not UTF-8.
  """
  text = read_text(path)
  if not text.strip():
    raise ValueError(f'{path}: the file is empty.')
  return [line.removesuffix('\r') for line in text.removesuffix('\n').split('\n')]


def read_text(path: str | os.PathLike) -> str:
  """Return the text of a plain or gzipped file, or of a pipe; it raises the errors of `lines`."""
  file = sources.resolve(path)
  with storage.client_errors():
    if file.is_dir() or not file.exists():
      here = '' if storage.is_address(path) or file.is_absolute() else f' in {os.getcwd()}'
      raise FileNotFoundError(f'{path}: no such file{here}; give the path of a text file, plain or gzipped.')
    data = file.read_bytes()
  if data[:2] == b'\x1f\x8b':
    try:
      with gzip.open(io.BytesIO(data)) as packed:
        data = packed.read(_MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as e:
      raise ValueError(f'{path}: a damaged gzip file ({e}); fetch it again.') from None
  if len(data) > _MOST_BYTES:
    raise ValueError(f'{path}: a file of more than {_MOST_BYTES >> 30} GiB of text; divide it.')
  try:
    return data.decode('utf-8-sig')
  except UnicodeDecodeError as e:
    line = data[: e.start].count(b'\n') + 1
    raise ValueError(f'{path}: line {line} is not UTF-8 ({e.reason}); convert the file, as with iconv.') from None


def _records(path: str) -> list[tuple[str, dict[str, Any]]]:
  """Return the objects of a file, one a line or in one array, each with its origin for errors."""
  numbered = [(f'{path}, line {number}', line) for number, line in enumerate(lines(path), 1) if line.strip()]
  if len(numbered) and numbered[0][1].lstrip().startswith('['):
    array = _json(path, '\n'.join(line for _, line in numbered))
    records = [(f'{path}, object {number}', record) for number, record in enumerate(array, 1)]
  else:
    records = [(where, _json(where, line)) for where, line in numbered]
  for where, record in records:
    if not isinstance(record, dict):
      raise ValueError(f'{where} is a {type(record).__name__}, not an object.')
  return records


def _json(where: str, text: str) -> Any:
  try:
    return json.loads(text)
  except (ValueError, RecursionError) as e:
    raise ValueError(f'{where} is not JSON ({e}); write one object a line, or one array of them.') from None
