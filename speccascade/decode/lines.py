"""Requests read from JSON lines, and rows kept as JSON lines while they come, so that a killed command can go on."""

from collections.abc import Collection, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from speccascade.engine.requests import Request
from speccascade.engine.results import Row
from speccascade.host import disk
from speccascade.host.errors import RunError
from speccascade.types import whole

_FIELDS = [field.name for field in dataclasses.fields(Request)]
_KINDS = {
  'prompt': ((str, list), 'a text, token ids or chat messages'),
  'stop': ((str, list), 'a text or a list of them'),
  'stop_tokens': (list, 'a list of token ids'),
  'logit_bias': (dict, 'an object {"TOKEN": NUMBER}'),
  'chat_template_kwargs': (dict, 'an object {"NAME": VALUE} for the chat template'),
}
MARK = 'speccascade'  # what the header of a journal of ours has, with the package's version
_NUMBER = (int, float), 'a number'


# ---- requests ----


def parse(path: str | os.PathLike, text: str) -> list[Request]:
  """Return the requests of a file's text, one a line: a prompt, or an object with the fields of a request."""
  text = text.rstrip()
  if not text:
    raise ValueError(f'{path}: the file is empty; write a prompt or a request a line, as JSON')
  found = []
  for number, line in enumerate(text.split('\n'), 1):
    try:
      found.append(_request(line))
    except ValueError as e:
      raise ValueError(f'{path}, line {number}: {e}') from None
  return found


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
    fields = fields | {'logit_bias': {_token(token): number for token, number in fields['logit_bias'].items()}}
  whole('n', fields.get('n', 1))
  return Request(**fields)


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
  found = dict(pairs)
  if len(found) < len(pairs):
    names = [name for name, _ in pairs]
    raise ValueError(f'the key {next(n for n in names if names.count(n) > 1)!r} stands twice; keep one of them')
  return found


def _token(text: str) -> int:
  """Return the token id that a key says, for keys of JSON are texts."""
  if not text.isdecimal():
    raise ValueError(f'logit_bias has {text!r}, not a token id')
  return int(text)


# ---- rows ----


def record(row: Row, index: int, sample: int) -> dict[str, Any]:
  """Return a row as JSON, with the number of its line and of its sample."""
  counts = {name: np.asarray(row.stats[name]).tolist() for name in ('calls', 'rounds', 'emitted')}
  found = dict(index=index, sample=sample, text=row.text, tokens=row.tokens, finish_reason=row.finish_reason, **counts)
  if row.fault is not None:
    found['fault'] = row.fault
  if row.top_logprobs is not None:  # JSON has no infinity
    found['top_logprobs'] = [{t: x if np.isfinite(x) else None for t, x in at.items()} for at in row.top_logprobs]
  return found


class Stream:
  """The rows that have ended, written to a file that is not kept, as a pipe, when they end."""

  def __init__(self, file):
    self._file = file
    self.had, self.faults = set(), []

  def add(self, record: Mapping[str, Any]):
    """Write a row."""
    self.faults += [record['fault']] if 'fault' in record else []
    self._file.write(_line(record).encode())
    self._file.flush()

  def finish(self, overwrite: bool):
    """Say that no row follows."""


class Journal:
  """The rows that have ended, a line each in the order in which they did, after a header that says of what.

  `names` are the (index, sample) that rows may have. A file that does not begin with a header of ours is left alone.
  """

  def __init__(self, file, output: Path, header: Mapping[str, Any], names: Collection[tuple[int, int]]):
    self._file, self.path, self._output = file, Path(file.name), output
    self._rows = self._read(header, names)
    self.faults = [fault for row in self._rows.values() if (fault := json.loads(row).get('fault'))]
    if not self._rows:
      file.truncate(0)
      self._write(header)

  @property
  def had(self) -> Collection[tuple[int, int]]:
    """Return the (index, sample) of the rows that are there."""
    return self._rows.keys()

  def add(self, record: Mapping[str, Any]):
    """Write a row, so that it stays when the process is killed."""
    self._write(record)
    self._rows[record['index'], record['sample']] = _line(record)
    self.faults += [record['fault']] if 'fault' in record else []

  def finish(self, overwrite: bool):
    """Write all rows to the output in the order of the input, and end the journal."""
    if os.path.lexists(self._output) and not overwrite:
      raise RunError(
        f'{self._output} was written meanwhile, and {self.path} keeps the rows: move {self._output.name} away, and the '
        'same command writes it.'
      )
    disk.write(self._output, ''.join(line for _, line in sorted(self._rows.items())))
    self.path.unlink()

  def _write(self, record: Mapping[str, Any]):
    with disk.writing(self.path):
      disk.append(self._file, _line(record).encode())

  def _read(self, header: Mapping[str, Any], names: Collection[tuple[int, int]]) -> dict[tuple[int, int], str]:
    """Return the rows of an earlier run of the same, leaving out a line that it did not end."""
    self._file.seek(0)
    data = self._file.read()
    whole = data[: data.rfind(b'\n') + 1]
    try:
      lines = [line + '\n' for line in whole.decode().split('\n')[:-1]]
      before, *records = map(json.loads, lines) if lines else [header]
      ours = isinstance(before, dict) and MARK in before if lines else _line(header).encode().startswith(data)
      found = {(r['index'], r['sample']): line for r, line in zip(records, lines[1:], strict=True)}
    except (ValueError, TypeError, KeyError):
      ours = False
    if not ours:
      raise RunError(f'{self.path} is no journal of this command; move it away.')
    for name, now in header.items() if found else ():
      if (was := before.get(name)) != now:
        raise RunError(
          f'{self.path} has rows of another run ({name} was {was!r}, now {now!r}): decode with that, or remove it.'
        )
    if strange := found.keys() - set(names):
      raise RunError(f'{self.path} has a row {min(strange)}, of which the input has no request; move it away.')
    self._file.truncate(len(whole))
    return found


@contextlib.contextmanager
def journal(output: Path, header: Mapping[str, Any], names: Collection[tuple[int, int]]) -> Iterator[Journal]:
  """Open the journal of a run for this process alone, OUTPUT.part, making it where there is none."""
  path = output.with_name(f'{output.name}.part')
  path.parent.mkdir(parents=True, exist_ok=True)
  with open(path, 'a+b', buffering=0, opener=disk.unlinked) as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise RunError(f'{path} is being written by another process; wait for it, or name another output.') from None
    yield Journal(file, output, json.loads(_line(header)), names)


def _line(value: Mapping[str, Any]) -> str:
  return json.dumps(value, ensure_ascii=False) + '\n'
