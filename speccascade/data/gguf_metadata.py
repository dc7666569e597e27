"""The metadata of a GGUF file: values by key, each of the type that it must have."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
import reprlib
from typing import Any

import numpy as np

_NEEDED = object()  # the default of a key that must be there


class Metadata:
  """The fields of a GGUF file by key; those of its architecture, as llama.block_count, are its own.

  Attributes:
    file: The file.
    architecture: The architecture that the file states.
  """

  def __init__(self, file: Path, fields: Mapping[str, Any]):
    self.file = file
    self._fields = fields
    self._read: set[str] = set()
    self.architecture = self.text('general.architecture')

  def integer(self, key: str, default: Any = _NEEDED) -> Any:
    """Return an integer of at least 0."""
    return self._value(key, default, lambda x: type(x) is int and x >= 0, 'an integer of at least 0')

  def number(self, key: str, default: Any = _NEEDED) -> Any:
    """Return a number in the fewest digits that are the same in float32, as config.json has it."""
    value = self._value(key, default, lambda x: type(x) in (int, float), 'a number')
    return value if value is default else float(str(np.float32(value)))

  def text(self, key: str, default: Any = _NEEDED) -> Any:
    """Return a text."""
    return self._value(key, default, lambda x: isinstance(x, str), 'a text')

  def switch(self, key: str, default: Any = _NEEDED) -> Any:
    """Return true or false."""
    return self._value(key, default, lambda x: isinstance(x, bool), 'true or false')

  def several(self, key: str, kind: Any, default: Any = _NEEDED) -> Any:
    """Return a list whose values are all of a kind."""
    expected = f'a list of {kind.__name__}'
    return self._value(key, default, lambda x: isinstance(x, list) and all(isinstance(y, kind) for y in x), expected)

  def own_integer(self, key: str, default: Any = _NEEDED) -> Any:
    """Return an integer of the architecture."""
    return self.integer(f'{self.architecture}.{key}', default)

  def own_number(self, key: str, default: Any = _NEEDED) -> Any:
    """Return a number of the architecture."""
    return self.number(f'{self.architecture}.{key}', default)

  def own_text(self, key: str, default: Any = _NEEDED) -> Any:
    """Return a text of the architecture."""
    return self.text(f'{self.architecture}.{key}', default)

  def expect(self, key: str, value: Any, supported: Any) -> None:
    """Raise where a value of the architecture is another than the one that is supported."""
    if value != supported:
      self.refuse(key, value, supported)

  def refuse(self, key: str, value: Any, supported: Any) -> None:
    """Raise for a value of the architecture."""
    raise ValueError(
      f"{self.file}: '{self.architecture}.{key}' is {reprlib.repr(value)}, and {supported} is supported: give the "
      'Hugging Face folder that it was made of'
    )

  def refuse_others(self, but: Collection[str]) -> None:
    """Raise for a key of the architecture that was not read, but for some: it would change what the model computes."""
    known = self._read | {f'{self.architecture}.{key}' for key in but}
    others = [key for key in self._fields if key.startswith(f'{self.architecture}.') and key not in known]
    if others:
      raise ValueError(
        f"{self.file}: '{others[0]}' is {reprlib.repr(self._fields[others[0]])}, a setting that is not read: give the "
        'Hugging Face folder that it was made of'
      )

  def _value(self, key: str, default: Any, is_right: Callable[[Any], bool], expected: str) -> Any:
    self._read.add(key)
    if key not in self._fields:
      if default is _NEEDED:
        raise ValueError(f"{self.file} has no '{key}': copy or download it again, or make it anew with llama.cpp")
      return default
    value = self._fields[key]
    if not is_right(value):
      raise ValueError(f"{self.file}: '{key}' is {reprlib.repr(value)}, expected {expected}: make it anew")
    return value
