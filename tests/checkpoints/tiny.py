"""Small checkpoints: configurations of Hugging Face, and models of them."""

import functools
import json

import jax
import numpy as np
import pytest

from speccascade.checkpoints import hf
from speccascade.types import Model

T5 = {'model_type': 't5', 'vocab_size': 11, 'd_model': 8, 'd_kv': 4, 'd_ff': 6, 'num_layers': 1, 'num_heads': 3}
T5_V1_1 = T5 | {'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False}
LLAMA = {'model_type': 'llama', 'vocab_size': 11, 'hidden_size': 8, 'intermediate_size': 6, 'num_hidden_layers': 1}
LLAMA |= {'num_attention_heads': 2}


def model_of(config, dtype='float32', scan=False):
  """Return a model with random parameters, the same for the same arguments."""
  return _made(json.dumps(config), dtype, scan)


@functools.cache
def _made(config: str, dtype: str, scan: bool) -> Model:
  network = hf.network_from_config(json.loads(config), dtype=dtype, scan=scan)
  return Model(network.init(jax.random.key(0)), network, name='tiny')


def error_of(read, path, kind=ValueError) -> str:
  """Return the error of reading a path."""
  with pytest.raises(kind) as info:
    read(path)
  return str(info.value)


def assert_equal(a, b):
  """Compare two trees of parameters: structure, dtypes and every number."""
  assert jax.tree.structure(a) == jax.tree.structure(b)
  jax.tree.map(np.testing.assert_array_equal, a, b)
  assert jax.tree.map(lambda x: x.dtype, a) == jax.tree.map(lambda x: x.dtype, b)
