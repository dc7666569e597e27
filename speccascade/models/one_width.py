"""A model whose calls are all of one width, so that rounding is the same whatever drafts.

The rounding of a call depends on its shape. At one width and batch no bit of a row's logits depends on their place in
the window or on the other rows. So with `Sampler(coupling='gumbel')`, or at temperature 0, the text is the same bit by
bit for each γ, policy, drafter and queue, in any dtype. A call reads the weights once whatever its width, so that this
costs little where reading them takes the time. It takes no leaves: the key of one lies in another slot than that of a
token of the text, so that its attention is summed up in another order.

Axis letters: B batch, L new tokens, V vocabulary.
"""

import dataclasses

import jax
from jax import lax
import jax.numpy as jnp

from speccascade.models.around import SameTokens
from speccascade.types import Array, Cache, checked_int, Model, Network, Params, Prompt


@dataclasses.dataclass(frozen=True)
class OneWidth(SameTokens):
  """A network that is fed `width` tokens a row at each call, those behind the given ones being padding."""

  network: Network
  width: int

  @property
  def inner(self) -> Network:
    return self.network

  def endless(self) -> 'OneWidth':
    return dataclasses.replace(self, network=self.network.endless())

  def on(self, backend) -> 'OneWidth':
    return dataclasses.replace(self, network=self.network.on(backend))

  def param_shapes(self) -> Params | None:
    return self.network.param_shapes()

  def param_axes(self) -> Params | None:
    return self.network.param_axes()

  def lacks(self, params: Params) -> Array | None:
    return self.network.lacks(params)

  def prefill(self, params: Params, prompt: Prompt, max_len: int) -> Cache:
    """Read prompts, with slots for the padding of the last call."""
    return self.network.prefill(params, prompt, max_len + self.width)

  def empty_cache(self, params: Params, batch: int, slots: int) -> Cache:
    return self.network.empty_cache(params, batch, slots + self.width)

  def extend(self, params: Params, cache: Cache, tokens: Array, positions: Array) -> tuple[Array, Cache]:
    """Feed tokens [B, L]; return logits [B, L, V] of the tokens after them, and the cache."""
    given = tokens.shape[1]
    spare = self.width - given
    if spare < 0:
      raise ValueError(
        f'a model of one width {self.width} is fed {given} tokens at once: give it a width of {given} or more.'
      )
    after = positions[:, -1:] + 1 + jnp.arange(spare)[None]
    tokens = jnp.concatenate([tokens, jnp.zeros_like(after)], 1)
    positions = jnp.concatenate([positions, after], 1)
    tokens, positions = lax.optimization_barrier((tokens, positions))
    with jax.named_scope('one_width'):
      logits, cache = self.network.extend(params, cache, tokens, positions)
    logits = lax.optimization_barrier(logits)  # what reads a part of them must not change how all are computed
    return logits[:, :given], cache


def one_width(model: Model, width: int) -> Model:
  """Return a model that is fed `width` tokens a row at each call of the loop, whatever the method needs.

  Args:
    model: The verifier; of a target of several models give each of them so.
    width: The widest call of the methods that are compared: γ + 2.

  Raises:
    ValueError: If the model only drafts, or the width is not positive.
  """
  if model.network.drafts_only:
    raise ValueError(f'{model.name} only drafts, and no text depends on how its calls are rounded: give the verifier.')
  width = checked_int('width', width)
  return model.replace(network=OneWidth(model.network, width), name=f'{model.name}-width{width}')
