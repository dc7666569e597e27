"""Decode a batch inside a step that T5X partitions and compiles; docs/t5x.md has the model that calls it.

Nothing here imports T5X.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from speccascade import sampling
from speccascade.checkpoints.t5x import model, with_params
from speccascade.engine import loop
from speccascade.engine.job import DecodeJob
from speccascade.engine.method import Method
from speccascade.engine.stats import derive
from speccascade.types import Array, iota, Model, NO_FAULT, Prompt

__all__ = ['decode_batch', 'model', 'with_params']


def decode_batch(
  method: Method,
  models: Sequence[Model],
  batch: Mapping[str, Array],
  key: Array | None = None,
  *,
  max_new_tokens: int | None = None,
  sampler: sampling.Sampler = sampling.Sampler(),
  mesh: Mesh | None = None,
) -> tuple[Array, dict[str, Any]]:
  """Decode T5X's features; return tokens [B, L], 0 after each text's end, and statistics by row.

  Args:
    method: The method.
    models: The models, drafter first.
    batch: T5X's features.
    key: The key of the step, from which each row derives its noise. None at temperature 0.
    max_new_tokens: L; None: that of `decoder_input_tokens`.
    sampler: The sampler.
    mesh: The mesh that the step is partitioned over, with axes 'data' and 'model'. Without it attention on several
      devices is plain XLA.

  Returns:
    The tokens, and the statistics, of which `calls` [B, M] are by model. Where `fault` is true, a model or the rule
    gave no distribution: do not use the row.
  """
  if method.whole_texts:
    raise ValueError(f'{method.name} decides on the host which texts are answered anew: use speccascade.decode')
  if key is None and not sampler.greedy:
    raise ValueError('sampling needs a key: T5X passes one to predict_batch_with_aux as rng')
  job = DecodeJob.of_models(method, models, sampler=sampler)
  models = job.models
  tokens = batch['encoder_input_tokens'].astype(jnp.int32)
  method = job.method.at(tokens.shape[0])
  length = jnp.max(jnp.where(tokens != 0, iota(tokens.shape[1]) + 1, 1), axis=1)  # [B]
  most = batch['decoder_input_tokens'].shape[1] if max_new_tokens is None else max_new_tokens
  keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0) if key is None else key, jnp.arange(len(tokens)))
  words = jax.random.key_data(keys) if jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) else keys
  noise = sampling.noise.make(words, method.by_round, sampler)
  sizes = dict(max_new_tokens=most, sampler=sampler, noise=noise)
  state = loop.decode_batch(method, models, Prompt(tokens, length), mesh=mesh, **sizes)
  written = jnp.where(iota(most) < (state.length - 1)[:, None], state.tokens[:, 1 : 1 + most], 0)
  counts = derive(vars(state.stats))
  named = {name: counts[name] for name in ('rounds', 'tested', 'accepted', 'emitted', 'deferred')}
  calls = jnp.zeros((len(tokens), method.models), jnp.int32).at[:, np.array(method.slots)].add(counts['calls'])
  return written, {**named, 'calls': calls, 'fault': state.fault.code != NO_FAULT}
