"""T5X's parameters in memory, traced or not, as a model of ours: scanned layers are taken apart, heads joined."""

import dataclasses

from flax import core
from flax.traverse_util import flatten_dict, unflatten_dict
import jax.numpy as jnp

from speccascade.checkpoints import assemble, stored
from speccascade.checkpoints.hf.family import network_from_config
from speccascade.checkpoints.t5x import axes
from speccascade.checkpoints.t5x.config import config_of, other_kind, projection
from speccascade.models.layers import stack_layers
from speccascade.types import Model

_WHERE = "T5X's parameters"


def model(params, config, *, eos_id: int = 1) -> Model:
  """Return T5X's parameters as a model that computes in the dtype of their config.

  Args:
    params: The parameters of T5X's model, traced or not.
    config: Its `network.T5Config`.
    eos_id: Id of the token that ends a text.
  """
  shapes = axes.shapes_by_layer(_tensors(params))
  gated = 'encoder.layers_0.mlp.wi_0.kernel' in shapes
  activation = projection(config.mlp_activations, gated, f'mlp_activations = {config.mlp_activations!r}')
  sizes = config_of(shapes, _WHERE) | {'feed_forward_proj': activation, 'eos_token_id': eos_id}
  network = network_from_config(sizes, dtype=jnp.dtype(config.dtype).name)
  return with_params(Model({}, network, name='t5x'), params)


def with_params(model: Model, params) -> Model:
  """Return a model with T5X's parameters in place of its own; scanned, they have a relative bias for each layer.

  Args:
    model: A T5 of the same sizes.
    params: The parameters of T5X's model, traced or not.

  Raises:
    ValueError: the model is no T5, or has other sizes.
  """
  network = model.network
  if other := other_kind(network):
    raise ValueError(f'{model.name} is a {other}, and {_WHERE} are those of a T5')
  tensors = _tensors(params)
  own_bias = any('.layers.' in name for name in tensors) or not network.config.shared_bias
  config = dataclasses.replace(network.config, shared_bias=not own_bias)
  network = dataclasses.replace(network, config=config, quantised=False)
  entries = assemble.plan_by_own_names(dataclasses.replace(network, scan=False), tensors)
  assemble.check(entries, tensors, network, _WHERE)
  leaves = {}
  for entry in entries:
    box = entry.stored_box()
    leaves[entry.path] = jnp.asarray(entry.take(tensors[entry.source].read(box), box), network.dtype)
  tree = unflatten_dict(leaves)
  return model.replace(params=stack_layers(tree) if network.scan else tree, network=network)


def _tensors(params) -> dict[str, stored.Tensor]:
  leaves = flatten_dict(core.unfreeze(params), sep='.')
  tensors = {name: stored.in_memory(_WHERE, name, x) for name, x in leaves.items()}
  return axes.with_our_axes(tensors, _WHERE, compare_biases=False)
