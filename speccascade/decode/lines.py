"""Requests read from JSON lines, and rows kept as JSON lines while they come, so that a killed command can go on."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from speccascade import disk
from speccascade.errors import RunError
from speccascade.requests import Request
from speccascade.results import Row
from speccascade.types import whole

_FIELDS = [field.name for field in dataclasses.fields(Request)]
_KINDS = {
  'prompt': ((str, list), 'a text, token ids or chat messages'),
  'stop': ((str, list), 'a text or a list of them'),
  'stop_tokens': (list, 'a list of token ids'),
  'logit_bias': (dict, 'an object {"TOKEN": NUMBER}'),
  'chat_template_kwargs': (dict, 'an object {"NAME": VALUE} for the chat template'),
}
_NUMBER = (int, float), 'a number'


# ---- requests ----


def parse(path: str | os.PathLike, text: str) -> list[Request]:
  """Return the requests of a file's text, one a line: a prompt, or an object with the fields of a request."""
  if not text.strip():
    raise ValueError(f'{path}: the file is empty; write a prompt or a request a line, as JSON')
  found = []
  for number, line in enumerate(text.removesuffix('\n').split('\n'), 1):
    try:
      found.append(_request(line))
    except ValueError as e:
      raise ValueError(f'{path}, line {number}: {e}') from None
  return found


def _request(line: str) -> Request:
  try:
    given = json.loads(line)
  except ValueError as e:
    raise ValueError(f'not JSON ({e}); write a text in quotes, a list or an object') from None
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


class Journal:
  """The rows that have ended, a line each in the order in which they did, after a header that says of what."""

  def __init__(self, file, path: Path, header: Mapping[str, Any]):
    self._file, self.path = file, path
    self.lines = self._read(header)  # by (index, sample)
    if not self.lines:
      file.truncate(0)
      self._write([header])

  def add(self, records: Sequence[Mapping[str, Any]]):
    """Write rows, so that they stay when the process is killed."""
    self._write(records)
    self.lines |= {(r['index'], r['sample']): _line(r) for r in records}

  def finish(self, path: Path):
    """Write all rows to a file in the order of the input, and end the journal."""
    disk.write(path, ''.join(line for _, line in sorted(self.lines.items())))
    self.path.unlink()

  def _write(self, records: Sequence[Mapping[str, Any]]):
    self._file.write(''.join(map(_line, records)).encode())
    self._file.flush()

  def _read(self, header: Mapping[str, Any]) -> dict[tuple[int, int], str]:
    """Return the rows of an earlier run of the same, leaving out a line that it did not end."""
    self._file.seek(0)
    data = self._file.read()
    kept = data[: data.rfind(b'\n') + 1]
    self._file.truncate(len(kept))
    try:
      lines = [line + '\n' for line in kept.decode().split('\n')[:-1]]
      before, *records = map(json.loads, lines) if lines else [header]
      before = dict(before)
      found = {(r['index'], r['sample']): line for r, line in zip(records, lines[1:], strict=True)}
    except (ValueError, TypeError, KeyError):
      raise RunError(f'{self.path} is no journal of this command; move it away.') from None
    for name, now in header.items() if found else ():
      if (was := before.get(name)) != now:
        raise RunError(
          f'{self.path} has rows of another run ({name} was {was!r}, now {now!r}): decode with that, or remove it.'
        )
    return found


@contextlib.contextmanager
def journal(path: Path, header: Mapping[str, Any]) -> Iterator[Journal]:
  """Open the journal of a run for this process alone, making it where there is none."""
  path.parent.mkdir(parents=True, exist_ok=True)
  with open(path, 'a+b') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise RunError(f'{path} is being written by another process; wait for it, or name another output.') from None
    yield Journal(file, path, json.loads(_line(header)))


def _line(value: Mapping[str, Any]) -> str:
  return json.dumps(value, ensure_ascii=False) + '\n'
