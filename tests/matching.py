"""How an error is matched: by the values and names that it must contain, never by its sentence."""

import re


def says(message: str, *parts: str) -> bool:
  """Tell whether a message has all of these values and names."""
  return all(part in message for part in parts)


def having(*parts: str) -> str:
  """Return a pattern, for `match=`, of a message that has all of these values and names, in any order."""
  return ''.join(f'(?=(?s:.*){re.escape(part)})' for part in parts)
