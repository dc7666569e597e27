"""Which cases of a test run each time, and which in the full tier alone."""

from collections.abc import Iterable
from typing import Any

import pytest


def quick(cases: Iterable[Any], few: Iterable[Any]) -> list:
  """Return cases for `parametrize`: a few as they are, the others for `pytest -m full`."""
  few = list(few)
  parts = lambda case: case if isinstance(case, tuple) else (case,)
  return [case if case in few else pytest.param(*parts(case), marks=pytest.mark.full) for case in cases]
