"""An encoder–decoder as a decoder-only network, so that a prompt can hold the beginning of the output.

Axis letters: B batch, S prompt, L new tokens, V vocabulary.
"""

import dataclasses

import jax.numpy as jnp

from speccascade.backends import Backend
from speccascade.models.t5 import T5
from speccascade.types import Array, Cache, iota, Network, Params, Prompt


@dataclasses.dataclass(frozen=True)
class Continued(Network):
  """T5 whose prompt is a source up to and with the last `end`, and behind that the output so far.

  Attributes:
    inner: the network.
    end: the token that ends every source, and that no output goes on behind.
  """

  inner: T5
  end: int

  @property
  def vocab_size(self) -> int:
    """The size of its vocabulary."""
    return self.inner.vocab_size

  @property
  def eos_ids(self) -> tuple[int, ...]:
    """The tokens that end a text."""
    return self.inner.eos_ids

  def on(self, backend: Backend) -> 'Continued':
    """Return the network for a backend."""
    return dataclasses.replace(self, inner=self.inner.on(backend))

  def prefill(self, params: Params, prompt: Prompt, max_len: int) -> Cache:
    """Read the sources and the outputs so far; the last token of a source gives the decoder's place to its start."""
    slot = iota(prompt.tokens.shape[1])
    last = jnp.where(prompt.tokens == self.end, slot, 0).max(1)  # [B] where the source ends
    source = Prompt(jnp.where(slot <= last[:, None], prompt.tokens, 0), last + 1)
    cache = {'inner': self.inner.prefill(params, source, max_len), 'last': last}
    written = jnp.take_along_axis(prompt.tokens, last[:, None] + slot, 1, mode='clip')
    return self.extend(params, cache, written, last[:, None] + slot)[1]  # slots beyond the prompt are stale

  def extend(self, params: Params, cache: Cache, tokens: Array, positions: Array) -> tuple[Array, Cache]:
    """Feed tokens [B, L] at positions [B, L] of source and output; return logits [B, L, V], and the cache."""
    at = positions - cache['last'][:, None]
    logits, inner = self.inner.extend(params, cache['inner'], jnp.where(at == 0, self.inner.start_id, tokens), at)
    return logits, {**cache, 'inner': inner}
