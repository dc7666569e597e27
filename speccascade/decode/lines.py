"""Requests from JSON lines, and rows written as JSON lines while they come, so that a killed command goes on."""

from collections.abc import Collection, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import gzip
import json
import os
from pathlib import Path
import sys
from typing import Any

import jax
import numpy as np

from speccascade import __version__
from speccascade.decode import stream
from speccascade.engine.inputs import PromptError
from speccascade.engine.job import DecodeJob
from speccascade.engine.requests import Request
from speccascade.engine.results import Row
from speccascade.engine.stats import acceptance_record
from speccascade.host import storage
from speccascade.host.errors import RunError
from speccascade.host.progress import Progress
from speccascade.host.runs import as_line, Journal, RunDir
from speccascade.types import checked_int, Model

STDOUT = Path('/dev/stdout')
_FIELDS = [field.name for field in dataclasses.fields(Request)]
_KINDS = {
  'prompt': ((str, list), 'a text, token ids or chat messages'),
  'stop': ((str, list), 'a text or a list of them'),
  'stop_tokens': (list, 'a list of token ids'),
  'logit_bias': (dict, 'an object {"TOKEN": NUMBER}'),
  'chat_template_kwargs': (dict, 'an object {"NAME": VALUE} for the chat template'),
}
MARK = 'speccascade'  # in the header of each journal of ours, with the package's version
_NUMBER = (int, float), 'a number'


# ---- requests ----


def parse(path: str | os.PathLike, text: str) -> list[Request]:
  """Return the requests of a file's text, one a line: a prompt, or an object with the fields of a request."""
  text = text.rstrip()
  if not text:
    raise ValueError(f'{path}: the file is empty; write a prompt or a request a line, as JSON')
  asked = []
  for number, line in enumerate(text.split('\n'), 1):
    try:
      asked.append(_request(line))
    except ValueError as e:
      raise ValueError(f'{path}, line {number}: {e}') from None
  return asked


def _request(line: str) -> Request:
  try:
    given = json.loads(line, object_pairs_hook=_object)
  except json.JSONDecodeError as e:
    raise ValueError(f'not JSON ({e}); write a text in quotes, a list or an object') from None
  except RecursionError:
    raise ValueError('its brackets are nested too deep; write a text in quotes, a list or an object') from None
  fields = given if isinstance(given, dict) else {'prompt': given}
  if strange := [name for name in fields if name not in _FIELDS]:
    raise ValueError(f'a request has no field {strange[0]!r}; there are {", ".join(_FIELDS)}')
  if 'prompt' not in fields:
    raise ValueError('a request needs a prompt')
  for name, value in fields.items():
    kinds, expected = _KINDS.get(name, _NUMBER)
    if isinstance(value, bool) or not isinstance(value, kinds) and (value is not None or name in ('prompt', 'n')):
      raise ValueError(f'{name}={value!r} is not {expected}')
  if fields.get('logit_bias'):
    fields = fields | {'logit_bias': _biases(fields['logit_bias'])}
  checked_int('n', fields.get('n', 1))
  return Request(**fields)


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
  fields = dict(pairs)
  if len(fields) < len(pairs):
    names = [name for name, _ in pairs]
    raise ValueError(f'the key {next(n for n in names if names.count(n) > 1)!r} is given twice; leave one of them')
  return fields


def _biases(given: Mapping[str, Any]) -> dict[int, Any]:
  """Return biases by token id; two spellings of one id are refused."""
  by_token = {_token(text): number for text, number in given.items()}
  if len(by_token) < len(given):
    ids = [_token(text) for text in given]
    raise ValueError(f'logit_bias has the token {next(i for i in ids if ids.count(i) > 1)} twice; leave one of them')
  return by_token


def _token(text: str) -> int:
  """Return the token id of a key, for keys of JSON are texts."""
  if not (text.isascii() and text.isdecimal() and len(text) < 20):
    raise ValueError(f'logit_bias has {text!r}, not a token id')
  return int(text)


# ---- rows ----


def record(row: Row, method: str, index: int, sample: int) -> dict[str, Any]:
  """Return a row of a method as JSON, with the number of its line and of its sample."""
  counts = {name: np.asarray(row.stats[name]).tolist() for name in ('calls', 'rounds', 'emitted')}
  line = dict(index=index, sample=sample, text=row.text, tokens=row.tokens, finish_reason=row.finish_reason, **counts)
  if np.any(row.stats['drafted']):
    line['metrics'] = {'speculative_decoding': acceptance_record(row.stats, method)}
  if row.fault is not None:
    line['fault'] = row.fault
  if row.top_logprobs is not None:  # JSON has no infinity
    line['top_logprobs'] = [{t: x if np.isfinite(x) else None for t, x in at.items()} for at in row.top_logprobs]
  if row.target_logprobs is not None:
    line['target_logprobs'] = [x if np.isfinite(x) else None for x in row.target_logprobs.tolist()]
  return line


class Stream:
  """Writes the rows that have ended to a stream, as a pipe, of which nothing can be read again."""

  def __init__(self, file):
    self._file = file
    self.done = set()
    self.faults = []

  def add(self, record: Mapping[str, Any]):
    """Write a row."""
    self.faults += [record['fault']] if 'fault' in record else []
    self._file.write(as_line(record).encode())
    self._file.flush()

  def finish(self, overwrite: bool):
    """Note that no row follows."""


class File:
  """Writes the rows to a journal, OUTPUT.part, as they end, and at last to the output in the order of the input.

  The first line of the journal is a header with the settings of the run.
  """

  def __init__(self, journal: Journal, output: Path, header: Mapping[str, Any], names: Collection[tuple[int, int]]):
    self._journal = journal
    self._output = output
    self._rows = self._read(header, names)
    self.faults = [fault for row in self._rows.values() if (fault := json.loads(row).get('fault'))]
    if not self._rows:
      journal.keep_while(lambda _: False)
      journal.append([header])

  @property
  def done(self) -> Collection[tuple[int, int]]:
    """Return the (index, sample) of the rows that are there."""
    return self._rows.keys()

  def add(self, record: Mapping[str, Any]):
    """Write a row, so that it stays when the process is killed."""
    self._journal.append([record])
    self._rows[record['index'], record['sample']] = as_line(record)
    self.faults += [record['fault']] if 'fault' in record else []

  def finish(self, overwrite: bool):
    """Write all rows to the output, and remove the journal."""
    path = self._journal.path
    if os.path.lexists(self._output) and not overwrite:
      raise RunError(
        f'{self._output} was written meanwhile, and {path} has the rows: move {self._output.name} away, and the same '
        'command writes it.'
      )
    text = ''.join(line for _, line in sorted(self._rows.items())).encode()
    storage.write(self._output, gzip.compress(text, mtime=0) if self._output.suffix == '.gz' else text)
    path.unlink()

  def _read(self, header: Mapping[str, Any], names: Collection[tuple[int, int]]) -> dict[tuple[int, int], str]:
    """Return the rows of an earlier run of the same settings."""
    path = self._journal.path
    before, *rows = [line.decode() for line in self._journal.raw()] or ['{}']
    before = json.loads(before)
    for name, now in header.items() if rows else ():
      if (was := before.get(name)) != now:
        first, then = ('its default' if x is None else repr(x) for x in (was, now))
        changed = 'the input has changed' if name == 'input' else f'{name} was {first}, now {then}'
        raise RunError(f'{path} has rows of another run ({changed}): decode as before, or remove it.')
    by_name = {tuple(map(json.loads(row).get, ('index', 'sample'))): row for row in rows}
    if strange := by_name.keys() - set(names):
      raise RunError(f'{path} has a row {min(strange, key=str)}, of which the input has no request; move it away.')
    return by_name


@contextlib.contextmanager
def opened(output: Path, header: Mapping[str, Any], names: Collection[tuple[int, int]]) -> Iterator[File]:
  """Open the journal of an output for this process alone, making it where there is none.

  Args:
    output: The file that gets all rows in the end.
    header: The settings of the run; rows of other settings are refused.
    names: The (index, sample) that rows may have.

  Raises:
    RunError: where another process writes the journal, or the file is not ours, or is of another run.
  """
  path = output.with_name(f'{output.name}.part')
  path.parent.mkdir(parents=True, exist_ok=True)
  with open(path, 'ab') as file:
    if not storage.try_lock(file):
      raise RunError(f'{path} is being written by another process; wait for it, or name another output.')
    header = json.loads(json.dumps(header), parse_constant=str)  # as it is read again; JSON has no infinity
    if not _is_ours(path, header):
      raise RunError(f'{path} is no journal of this command; move it away.')
    journal = RunDir(path.parent, 'name another output').journal(path.name, sync=False)
    yield File(journal, output, header, names)


def _is_ours(path: Path, header: Mapping[str, Any]) -> bool:
  """Tell whether a file is empty or begins with a header of ours, be it one that was not finished."""
  with open(path, 'rb') as file:
    first = file.readline()
  if not first.endswith(b'\n'):
    return as_line(header).encode().startswith(first)
  try:
    before = json.loads(first)
  except ValueError:
    return False
  return isinstance(before, dict) and MARK in before


# ---- from a file to a file ----


def header(digests: Sequence[str], text: str, settings: Mapping[str, Any]) -> dict[str, Any]:
  """Return what has to be the same for a run to go on: package, device, models, input and settings."""
  device = jax.devices()[0].device_kind
  input_digest = storage.digest(text.encode())
  return {MARK: __version__, 'device': device, 'models': list(digests), 'input': input_digest, **settings}


def names(asked: Sequence[Request]) -> list[tuple[int, int]]:
  """Return the (index, sample) of every row of some requests."""
  return [(index, sample) for index, request in enumerate(asked) for sample in range(request.n)]


def decode_to(rows: 'File | Stream', method, models: Sequence[Model], asked: Sequence[Request], **call):
  """Decode the requests whose rows are not there yet, each row written as it ends; `call` are options of `stream`."""
  every = names(asked)
  done = {i for i, name in enumerate(every) if name in rows.done}
  bar = Progress('decode', len(every), len(done), unit='texts')
  if len(done) < len(every):
    for i, row in stream(method, models, asked, skip=done, **call):
      rows.add(record(row, method.name, *every[i]))
      bar.add(1)


def check_requests(path: Path, method, models, asked: Sequence[Request], **call):
  """Raise for a line whose request cannot be decoded; `call` has the arguments of `DecodeJob.of`."""
  if not asked:
    DecodeJob.of_models(method, models, call['sampler'])
    return
  try:
    DecodeJob.of(method, models, asked, **call)
  except PromptError as e:
    problem = str(e).replace(f'prompt {e.index}', 'the prompt', 1)
    raise ValueError(f'{path}, line {e.index + 1}: {problem}') from None


def checked_output(source: Path, output: Path, overwrite: bool) -> Path:
  """Return the file to write, which a link may name; raise where it would replace one that is to stay."""
  if output == STDOUT and sys.stdout is None:
    raise RunError('standard output is closed: name another output.')
  file = output if _is_stream(output) else Path(os.path.realpath(output))
  for path in (file, file.with_name(f'{file.name}.part')):
    if path.is_file() and source.exists() and path.samefile(source):
      raise RunError(f'{path} is the input: name another output.')
  return file if _is_stream(file) else storage.output_file(file, overwrite)


def _is_stream(path: Path) -> bool:
  """Tell whether a path is standard output, a pipe or a device, of which nothing can be read again."""
  return path == STDOUT or storage.is_device(path)


@contextlib.contextmanager
def opened_output(output: Path, header: dict[str, Any], asked: Sequence[Request]) -> Iterator['File | Stream']:
  """Yield what the rows of the requests are written to."""
  if output == STDOUT:
    yield Stream(sys.stdout.buffer)
  elif _is_stream(output):
    with open(output, 'wb') as file:
      yield Stream(file)
  else:
    with opened(output, header, names(asked)) as rows:
      yield rows
