"""From a Hugging Face `config.json` to a network."""

from speccascade.checkpoints.hf.checks import check, LARGEST, refuse_quantised, shown
from speccascade.checkpoints.hf.family import FAMILIES, Family, OWN, Settings
from speccascade.host.errors import first_line
from speccascade.types import Network


def settings(config: dict) -> Settings:
  """Return the text model's settings; a multi-modal config has them in `text_config`."""
  if 'model_type' not in config:
    raise ValueError("config.json has no 'model_type': is this a Hugging Face model folder?")
  name = config['model_type']
  check(name, 'model_type', str, 'a name')
  if text_family := next((f for f in FAMILIES.values() if f.inside == name), None):
    check(config.get('text_config', {}), 'text_config', dict, 'an object')
    text = {'tie_word_embeddings': config.get('tie_word_embeddings', True), **config.get('text_config', {})}
    end = {'eos_token_id': config.get('eos_token_id', text.get('eos_token_id'))}
    config = text | end | {'model_type': text_family.model_type}
  family = FAMILIES.get(config['model_type'])
  if family is None:
    known = ', '.join(dict.fromkeys(n for f in FAMILIES.values() for n in (f.model_type, f.inside) if n))
    raise ValueError(
      f"model_type '{name}' is not supported: choose from {known}, or declare it by speccascade.checkpoints.family"
    )
  if config.get('quantization_config'):
    refuse_quantised(config['quantization_config'])
  family.check(config)
  return Settings(config, family)


def network_from_config(config: dict, *, eos_ids=None, dtype: str = 'float32', scan: bool = False) -> Network:
  """Return the network that a config describes; `eos_ids` (an id, several, or None) overrides the config's."""
  c = settings(config)
  ids = c.get('eos_token_id') if eos_ids is None else eos_ids
  ids = () if ids is None else tuple(ids) if isinstance(ids, list | tuple) else (ids,)
  if wrong := [i for i in ids if type(i) is not int or not 0 <= i <= LARGEST]:
    file = 'config.json' if eos_ids is None else 'generation_config.json'
    raise ValueError(f"{file}: 'eos_token_id' has {shown(wrong[0])}, which is no token id: correct it")
  return _made(c, eos_ids=ids, dtype=dtype, scan=scan)


def _made(c: Settings, **given) -> Network:
  """Return the network that a family makes of a config, of a user's family with all tried that loading needs."""
  family: Family = c.family
  try:
    network = family.network(c, **given)
    if family.model_type not in OWN:
      if not isinstance(network, Network) or network.param_shapes() is None:
        raise TypeError(f'{type(network).__name__} is no speccascade.types.Network with param_shapes()')
      hash(network)
  except ValueError:
    raise
  except Exception as error:  # whatever a function raises
    reason = first_line(error, named=True)
    raise ValueError(
      f"the function of model_type '{family.model_type}' makes no network ({reason}): correct it"
    ) from error
  return network
