"""Which cases of a test run each time, and which in the full tier alone."""

from collections.abc import Iterable
from typing import Any

import pytest


def quick(cases: Iterable[Any], few: Iterable[Any], more: Iterable[Any] | None = None) -> list:
  """Return cases: few for each run, more for `pytest -m full` (default: all others), the rest for `pytest -m long`."""
  few, more = list(few), None if more is None else list(more)

  def marked(case):
    if case in few:
      return case
    mark = pytest.mark.full if more is None or case in more else pytest.mark.long
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)

  return [marked(case) for case in cases]
