"""Early exit: the first layers of a model with its norm and head as a drafter (LayerSkip, Elhoushi et al. 2024)."""

from speccascade.types import Model


def layerskip(model: Model, layers: int) -> Model:
  """Return the first `layers` layers of a model, of T5's decoder, as a model; it shares the very arrays."""
  network = model.network
  if not network.depth or network.scan:
    raise ValueError(f'layerskip needs a T5 or decoder with unrolled layers, not {network}: load it with scan=False')
  if network.depth == 1:
    raise ValueError(f'layers={layers}: {model.name} has one layer, so there is no exit before it: take another model')
  if not 0 < layers < network.depth:
    raise ValueError(f'layers={layers}: choose from 1 to {network.depth - 1}, {model.name} has {network.depth}')
  first, params = network.first_layers(model.params, layers)
  digest = None if model.digest is None else called(model.digest, layers)
  return model.replace(params=params, network=first, name=called(model.name, layers), digest=digest)


def called(name: str, layers: int) -> str:
  """Return the name or digest of an early exit by that of the model."""
  return f'{name}-first{layers}'
