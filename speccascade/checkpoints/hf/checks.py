"""Values of a config.json: the type and the range of each, and errors that have the path of their file."""

from collections.abc import Collection, Iterator, Mapping
import contextlib
from pathlib import Path
import reprlib
import sys
from typing import Any

LARGEST = 2**31 - 1  # of a size, a window or an id
_LAYERS = frozenset('num_hidden_layers num_layers num_decoder_layers n_layer'.split())
_MOST_LAYERS = 10_000  # more than any model has, few enough to list their parameters


@contextlib.contextmanager
def errors_of(file: Path) -> Iterator[None]:
  """Let the errors of a configuration have the path of its file."""
  try:
    yield
  except ValueError as error:
    text = str(error)
    if text.startswith('generation_config.json'):
      raise ValueError(str(file.parent / text)) from error
    text = text.removeprefix('config.json') if text.startswith('config.json') else f': {text}'
    raise ValueError(f'{file}{text}') from error


def check(value: Any, key: str, kind: Any, expected: str) -> None:
  """Raise where the value of a key is of another kind."""
  if not isinstance(value, kind):
    raise ValueError(f"config.json: '{key}' is {shown(value)}, expected {expected}: correct it")


def check_keys(config: Mapping, examples: Mapping[str, Any], sizes: Collection[str]) -> None:
  """Raise for the first value, of the keys that have an example, of another kind; null is as if it were not there."""
  for key, example in examples.items():
    if (value := config.get(key)) is not None:
      check_number(key, value, example, key in sizes)


def _are_layers(value: Any) -> bool:
  return isinstance(value, list) and bool(value) and all(type(n) is int and 0 <= n < _MOST_LAYERS for n in value)


def check_number(key: str, value: Any, example: Any, is_size: bool = False) -> None:
  """Raise where a value has another type than an example, is not finite, or is out of a size's range."""
  most = _MOST_LAYERS if key in _LAYERS else LARGEST
  whole = type(value) is int
  number = type(value) in (int, float) and 0 <= value <= sys.float_info.max
  kinds = (  # the first that applies counts
    (isinstance(example, bool), isinstance(value, bool), 'true or false'),
    (is_size, whole and 1 <= value <= most, f'an integer of at least 1 and at most {most}'),
    (key == 'eos_token_id', True, ''),  # checked with that of the generation config
    (type(example) is int, whole and 0 <= value <= LARGEST, f'an integer of 0 to {LARGEST}'),
    (type(example) is float, number and (value > 0 or key.endswith(('eps', 'epsilon'))), 'a finite number above 0'),
    (isinstance(example, str), isinstance(value, str), 'a name'),
    (isinstance(example, dict), isinstance(value, dict), 'an object'),
    (isinstance(example, list), _are_layers(value), 'a list of numbers of layers, integers from 0 on'),
  )
  right, expected = next(((right, expected) for applies, right, expected in kinds if applies), (True, ''))
  if not right:
    raise ValueError(f"config.json: '{key}' is {shown(value)}, expected {expected}: correct it")


def refuse_quantised(given: Any) -> None:
  """Raise for weights that are quantised, of whose method config.json says `given`."""
  method = given.get('quant_method') if isinstance(given, dict) else given
  raise ValueError(
    f"config.json: 'quantization_config' has the method {shown(method)}, and no quantised weights are read: load the "
    'model that it was made of, or write it unquantised, by model.dequantize().save_pretrained(PATH) in transformers'
  )


def shown(value: Any) -> str:
  """Return a value as an error shows it; Python refuses to write very long numbers."""
  if type(value) is int and value.bit_length() > 1000:
    return f'a number of {value.bit_length()} bits'
  return reprlib.repr(value)
