"""What is known of a program, found once."""

import functools
from typing import Any


@functools.lru_cache(maxsize=1024)  # each key refers to the functions of a program
def memo(*key: Any) -> dict:
  """Return what is known of a program or a network: an empty dict at first, the same one while it is kept."""
  return {}
