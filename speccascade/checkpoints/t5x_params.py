"""T5X's parameters in memory, traced or not, as a model of ours: scanned layers are taken apart, heads joined."""

import dataclasses

from flax import core
import jax.numpy as jnp

from speccascade.checkpoints import files, hf, t5x_names
from speccascade.models.layers import stack_layers
from speccascade.models.t5 import T5
from speccascade.types import Model, Params

_WHERE = "T5X's parameters"


def model(params, config, *, eos_id: int = 1) -> Model:
  """Return T5X's parameters, with its `network.T5Config`, as a model that computes in the config's dtype."""
  tensors = files.named(core.unfreeze(params))
  shapes = _shapes(tensors, own_bias=t5x_names.scanned(tensors))
  gated = 'encoder.layers_0.mlp.wi_0.kernel' in shapes
  said = f'mlp_activations = {config.mlp_activations!r}'
  projection = t5x_names.projection(config.mlp_activations, gated, said)
  sizes = t5x_names.config_of(shapes, _WHERE) | {'feed_forward_proj': projection, 'eos_token_id': eos_id}
  network = hf.network_from_config(sizes, dtype=jnp.dtype(config.dtype).name)
  return with_params(Model({}, network, name='t5x'), params)


def with_params(model: Model, params) -> Model:
  """Return a model with T5X's parameters in place of its own; scanned, they have a relative bias for each layer."""
  tensors, network = files.named(core.unfreeze(params)), model.network
  if not isinstance(network, T5):
    raise ValueError(f'{model.name} is a {type(network).__name__}, and {_WHERE} are those of a T5')
  own_bias = t5x_names.scanned(tensors) or not network.config.shared_bias
  network = dataclasses.replace(network, config=dataclasses.replace(network.config, shared_bias=not own_bias))
  parts = t5x_names.parts({name: x.shape for name, x in tensors.items()}, _WHERE, own_bias)
  files.check_shapes({part.name: part.shape for part in parts}, dataclasses.replace(network, scan=False), _WHERE)
  leaves = {part.name: jnp.asarray(part.take(tensors[part.source]), network.dtype) for part in parts}
  tree = files.nested(leaves)
  return model.replace(params=stack_layers(tree) if network.scan else tree, network=network)


def _shapes(tensors: Params, own_bias: bool) -> dict[str, tuple[int, ...]]:
  parts = t5x_names.parts({name: x.shape for name, x in tensors.items()}, _WHERE, own_bias)
  return {part.name: part.shape for part in parts}
