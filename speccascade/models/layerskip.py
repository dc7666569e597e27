"""Early exit: the first layers of a model with its norm and head as a drafter (LayerSkip, Elhoushi et al. 2024)."""

import dataclasses

from speccascade.models.decoder import Decoder
from speccascade.types import Model


def layerskip(model: Model, layers: int) -> Model:
  """Return the first `layers` layers of a decoder-only model as a model; it shares the very arrays."""
  network = model.network
  if not isinstance(network, Decoder) or network.scan:
    raise ValueError(
      f'layerskip needs a decoder-only model with unrolled layers, not {network}: load it with scan=False'
    )
  depth = len(network.config.spans)
  if not 0 < layers < depth:
    raise ValueError(f'layers={layers}: choose from 1 to {depth - 1}, {model.name} has {depth}')
  dropped = {f'layers_{i}' for i in range(layers, depth)}
  params = {name: x for name, x in model.params.items() if name not in dropped}
  config = dataclasses.replace(network.config, spans=network.config.spans[:layers])
  network = dataclasses.replace(network, config=config)
  suffix = f'-first{layers}'
  digest = None if model.digest is None else model.digest + suffix
  return model.replace(params=params, network=network, name=model.name + suffix, digest=digest)
