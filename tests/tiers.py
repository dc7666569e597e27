"""Which cases of a test are left to the long tier."""

from collections.abc import Iterable
from typing import Any

import pytest


def long_but(cases: Iterable[Any], some: Iterable[Any]) -> list:
  """Return cases, of which some have the tier of their test and all others run with `pytest -m long` alone."""
  some = list(some)

  def marked(case):
    if case in some:
      return case
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)

  return [marked(case) for case in cases]
