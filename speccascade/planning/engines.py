"""Acceptance as engines record it: rates by position in the block from what a server answered or a decoded file says.

A record has `acceptance_histogram`, of how many rounds accepted 0, 1, 2, … drafted tokens, as a list or an object.
vLLM (`--per-request-spec-decode-metrics`) and TensorRT-LLM answer with it, and each line of `speccascade.decode` has
it, under `metrics.speculative_decoding`.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence
import json
from typing import Any

import numpy as np

from speccascade import methods
from speccascade.data import files
from speccascade.host.errors import RunError
from speccascade.planning import cost_model

_HISTOGRAM = 'acceptance_histogram'
_MOST = 1 << 10  # tokens of a draft
_STEADY = 0.9  # the least share of drafts of full length by which their lengths are taken to be equal


def acceptance(path: str) -> tuple[float, ...]:
  """Return the acceptance rate at each position, given all before, of all records in a file of JSON or JSON lines."""
  text = files.read_text(path)
  try:
    try:
      found = json.loads(text)
    except json.JSONDecodeError:
      found = [json.loads(line) for line in text.splitlines() if line.strip()]
  except (json.JSONDecodeError, RecursionError) as error:
    raise RunError(f'{path} is no JSON ({error}); give records of acceptance, as JSON or JSON lines.') from None
  try:
    return rates([*records(found)])
  except ValueError as error:
    raise RunError(f'{path}: {error}') from None


def records(found: Any) -> Iterator[Mapping[str, Any]]:
  """Yield the records in what JSON has, however deep."""
  if isinstance(found, dict) and _HISTOGRAM in found:
    yield found
  elif isinstance(found, dict | list):
    for part in found.values() if isinstance(found, dict) else found:
      yield from records(part)


def rates(given: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
  """Return the acceptance rate at each position of records, which a plan takes.

  Where a record has the steps one by one (`per_step_accepted`, `per_step_drafted`), drafts may have any lengths;
  without them all are taken to have `num_spec_tokens`.

  Raises:
    ValueError: A record contradicts itself, or its drafts have several lengths.
  """
  if not given:
    raise ValueError(f'no record has an {_HISTOGRAM}; serve with --per-request-spec-decode-metrics, or decode here.')
  plain = methods.speculative().name
  if others := {str(record['method']) for record in given if record.get('method', plain) != plain}:
    raise ValueError(f'records of {", ".join(sorted(others))}; give those of plain speculative decoding.')
  width = max(1, *map(_width, given))
  tested, accepted = np.zeros((2, width), np.int64)
  place = np.arange(1, width + 1)
  for record in given:
    lengths = _lengths(record)
    drafted = _steps(record, 'per_step_drafted')
    if drafted is None:
      drafted = np.full(lengths.size, _width(record))
      if record.get('num_draft_tokens', drafted.sum()) < _STEADY * drafted.sum():
        raise ValueError(
          f'{record["num_draft_tokens"]} tokens were drafted in {lengths.size} steps of at most {_width(record)}: '
          'drafts of several lengths have no rate by position; vLLM records each of them with '
          '--per-request-spec-decode-metrics detailed.'
        )
    elif drafted.size != lengths.size or (drafted < lengths).any():
      raise ValueError(f'per_step_drafted={drafted.tolist()} does not fit per_step_accepted={lengths.tolist()}.')
    reached = np.minimum(drafted, lengths + 1)
    tested += (place <= reached[:, None]).sum(0)
    accepted += (place <= lengths[:, None]).sum(0)
  return cost_model.by_position(tested, accepted)


def _histogram(record: Mapping[str, Any]) -> dict[int, int]:
  """Return how many steps accepted each number of tokens."""
  given = record[_HISTOGRAM]
  pairs = given.items() if isinstance(given, dict) else enumerate(given) if isinstance(given, list) else None
  try:
    found = {int(length): count for length, count in pairs}
  except (TypeError, ValueError):
    found = {-1: 0}
  counts = [x for x in found.values() if type(x) is int and x >= 0]
  if len(counts) < len(found) or not all(0 <= length <= _MOST for length in found):
    raise ValueError(
      f'{_HISTOGRAM}={given!r} is no list of counts, nor an object {{"LENGTH": COUNT}} of at most {_MOST}.'
    )
  return found


def _steps(record: Mapping[str, Any], name: str) -> np.ndarray | None:
  """Return the numbers of the steps, None where the record does not have them."""
  given = record.get(name)
  if given is not None and not (isinstance(given, list) and all(type(x) is int and 0 <= x <= _MOST for x in given)):
    raise ValueError(f'{name}={given!r} is no list of numbers of 0 … {_MOST}.')
  return None if given is None else np.asarray(given, np.int64)


def _width(record: Mapping[str, Any]) -> int:
  """Return how many tokens the longest draft has."""
  stated = record.get('num_spec_tokens') or 0
  if type(stated) is not int or not 0 <= stated <= _MOST:
    raise ValueError(f'num_spec_tokens={stated!r} is no number of 1 … {_MOST}.')
  drafted = _steps(record, 'per_step_drafted')
  return max(stated, *_histogram(record), *([] if drafted is None else drafted.tolist()), 0)


def _lengths(record: Mapping[str, Any]) -> np.ndarray:
  """Return how many tokens each step accepted, in any order where the record does not have the steps."""
  histogram = _histogram(record)
  steps = _steps(record, 'per_step_accepted')
  if steps is not None:
    if collections.Counter(steps.tolist()) != collections.Counter(histogram):
      raise ValueError(f'per_step_accepted={steps.tolist()} contradicts {_HISTOGRAM}={record[_HISTOGRAM]!r}.')
    return steps
  return np.repeat(np.fromiter(histogram, np.int64), np.fromiter(histogram.values(), np.int64))
