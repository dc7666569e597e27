"""No test leaves a config to the next."""

import gin
import pytest


@pytest.fixture(autouse=True)
def empty_config():
  yield
  with gin.unlock_config():
    gin.clear_config()
