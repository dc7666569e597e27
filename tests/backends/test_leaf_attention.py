"""A leaf's logits are those after the text in which it stands in the place of the window's token, on every backend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_backends import BACKENDS, NETWORKS
from tiers import long_but

from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.models.rope import Rope
from speccascade.types import Prompt

WIDE = Decoder(DecoderConfig(23, 128, 4, 2, 64, 64, spans=(Span(6), Span(0, Rope(1e5))), attention_cap=3.0))
SOME = {name: NETWORKS[name] for name in ('llama', 'opt', 't5', 't5gemma')} | {'in tiles': WIDE}
CASES = [(name, backend) for name in SOME for backend in BACKENDS]
DEPTHS = 0, 0, 1, 3


@pytest.mark.full
@pytest.mark.parametrize('name, backend', long_but(CASES, [('t5', 'cpu'), ('in tiles', 'tpu')]))
def test_logits_after_leaves_are_those_of_other_windows(name, backend):
  network = SOME[name].on(BACKENDS[backend])
  params = network.init(jax.random.key(0))
  rng = np.random.default_rng(1)
  prompt = Prompt(jnp.asarray(rng.integers(1, 23, (2, 9))), jnp.array([9, 6]))
  window, leaves = (jnp.asarray(rng.integers(1, 23, (2, n))) for n in (4, len(DEPTHS)))
  start = prompt.length if network.start_id is None else jnp.ones(2, jnp.int32)
  cache = network.prefill(params, prompt, 40)
  last = prompt.tokens[jnp.arange(2), prompt.length - 1] if network.start_id is None else jnp.full(2, network.start_id)
  extend = jax.jit(network.extend, static_argnames='leaves')
  _, cache = extend(params, cache, last[:, None], start[:, None] - 1)
  at = start[:, None] + jnp.arange(4)[None]
  depths = start[:, None] + jnp.array(DEPTHS)[None]
  alone, _ = extend(params, cache, window, at)
  both = jnp.concatenate([window, leaves], 1), jnp.concatenate([at, depths], 1)
  logits, after = extend(params, cache, *both, leaves=len(DEPTHS))
  np.testing.assert_allclose(logits[:, :4], alone, atol=1e-5)
  for i, depth in enumerate(DEPTHS):
    other, _ = extend(params, cache, window.at[:, depth].set(leaves[:, i]), at)
    np.testing.assert_allclose(logits[:, 4 + i], other[:, depth], atol=1e-5, err_msg=f'leaf {i}')
  # What leaves left in the cache is written again before anything sees it.
  more = jnp.asarray(rng.integers(1, 23, (2, 3)))
  read = lambda cache: extend(params, cache, more, start[:, None] + 2 + jnp.arange(3)[None])[0]
  np.testing.assert_allclose(read(after), read(extend(params, cache, window[:, :2], at[:, :2])[1]), atol=1e-5)
