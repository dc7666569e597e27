"""Files of comma-separated values that grow by a row for each setting, so that a stopped experiment goes on."""

from collections.abc import Mapping
import csv
from pathlib import Path
from typing import Any


def has(path: Path, key: Mapping[str, Any]) -> bool:
  """Tell whether a file has a row of these values, which are compared as texts."""
  if not path.exists():
    return False
  wanted = {name: str(value) for name, value in key.items()}.items()
  with path.open(newline='') as opened:
    return any(wanted <= row.items() for row in csv.DictReader(opened))


def append(path: Path, row: Mapping[str, Any]):
  """Append a row to a file, whose first line has the names of the values, and print it."""
  new = not path.exists()
  with path.open('a', newline='') as opened:
    writer = csv.DictWriter(opened, row)
    if new:
      writer.writeheader()
    writer.writerow(row)
  print(dict(row), flush=True)
