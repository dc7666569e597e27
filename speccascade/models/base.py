"""What the networks have in common: parameters from a key, their shapes and their logical axes."""

from flax import linen as nn
import jax

from speccascade.types import Array, Params


class Base:
  """Derive the protocol's small print from a network's `config` and `_init`."""

  @property
  def vocab_size(self) -> int:
    return self.config.vocab_size

  def init(self, key: Array) -> Params:
    """Return random parameters in the network's dtype."""
    return nn.unbox(self._init(key))

  def param_shapes(self) -> Params:
    """Return the parameters' shapes and dtypes, without making them."""
    return nn.unbox(self._boxed())

  def param_axes(self) -> Params:
    """Return a PartitionSpec of logical axis names for each parameter."""
    return nn.get_partition_spec(self._boxed())

  def _boxed(self) -> Params:
    return jax.eval_shape(self._init, jax.random.key(0))
