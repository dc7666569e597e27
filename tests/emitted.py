"""The distribution of what the compiled loop emits: exactly, by enumerating its decisions, and by χ² on many rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import reference

from speccascade import sampling
from speccascade.check import enumeration
from speccascade.engine.loop import decode_batch
from speccascade.engine.loop import run as run_engine
from speccascade.types import Prompt


def _decode(method, models, batch, *, max_new_tokens, sampler, noise, options=None):
  """Return the loop's last state; the work of many rows is worth an optimised program."""
  run = functools.partial(decode_batch, method, models, max_new_tokens=max_new_tokens, sampler=sampler)
  if options or batch.length.size > 50_000:
    run = jax.jit(run, compiler_options=options or {'xla_backend_optimization_level': 2})
  return run(batch, noise=noise)


def emitted_distribution(method, models, prompt, count, sampler, options=None):
  """Return {emitted tokens: probability} of the compiled loop, every decision enumerated."""
  decode = functools.partial(_decode, options=options)
  return enumeration.emitted_distribution(method, models, prompt, count, sampler, decode)


def chi_square(method, models, prompt, sampler, expected, *, first, rows, seed=0):
  """Return the p-value of tokens first…first+k-1 of that many rows against their joint distribution, and χ²/df."""
  count = first + expected.ndim
  batch = Prompt(jnp.tile(jnp.array([prompt], jnp.int32), (rows, 1)), jnp.full(rows, len(prompt), jnp.int32))
  keys = jax.random.key_data(jax.random.split(jax.random.key(seed), rows))
  noise = sampling.Keyed(keys, by_round=method.by_round)
  state = _decode(method, models, batch, max_new_tokens=count, sampler=sampler, noise=noise)
  late = np.asarray(state.tokens)[:, len(prompt) + first : len(prompt) + count]
  return reference.goodness(late, expected)


def traces(*runs) -> list[int]:
  """Return how many times a decode loop was traced by each run in turn, where none had been before."""
  counts = [0]
  run_engine.clear_cache()  # another test may have traced the same
  for run in runs:
    run()
    counts.append(run_engine._cache_size())
  return np.diff(counts).tolist()
