"""Tokenizers of the tests of data."""

import pytest


@pytest.fixture(scope='session')
def byt5(tmp_path_factory):
  """Return the folder of a tokenizer that ends its texts and begins none."""
  folder = tmp_path_factory.mktemp('byt5')
  (folder / 'tokenizer_config.json').write_text('{"tokenizer_class": "ByT5Tokenizer"}')
  return str(folder)
