"""How Hugging Face stores one kind of model, declared once for reading, writing, tests and documents."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import inspect
from typing import Any, NamedTuple

from speccascade.checkpoints.hf.checks import check, check_number, LARGEST, refuse_quantised, shown
from speccascade.host.errors import first_line
from speccascade.models.decoder import Decoder, DecoderConfig
from speccascade.models.t5 import T5GemmaConfig
from speccascade.types import Network

_SIZES = frozenset(
  'num_hidden_layers num_key_value_heads head_dim word_embed_proj_dim num_decoder_layers n_layer n_inner '
  'sliding_window_pattern no_rope_layer_interval num_experts num_local_experts'.split()
)  # those that a function reads
MASK = 'pard_token'  # by which a model that drafts in one pass states its mask
_NEEDED = {'rms_norm_eps', 'layer_norm_epsilon', 'max_window_layers'}  # numbers that are not null


class ConfigFields(dict):
  """A config.json with the defaults of its family; asking for what is in neither is a clear error."""

  def __init__(self, config: Mapping, family: 'Family'):
    stated = {key: value for key, value in config.items() if value is not None or key in family.defaults}
    super().__init__(family.defaults | stated)
    examples = _examples()
    of_floats = [key for key in family.defaults if type(self[key]) is int and type(examples.get(key)) is float]
    self.update({key: float(self[key]) for key in of_floats})
    self.family = family

  def __missing__(self, key):
    raise ValueError(
      f"config.json of a {self['model_type']} model has no '{key}': copy or download the checkpoint again"
    )

  def share(self, size: str, count: str) -> int:
    """Return how much of a size each of a count has."""
    if self[size] < self[count]:
      raise ValueError(f"config.json: '{count}' is {self[count]}, more than '{size}', {self[size]}: correct it")
    return self[size] // self[count]

  def by_layer(self, key: str, count: int, allowed: tuple) -> list:
    """Return the list under a key, which has one of the allowed values for each layer."""
    values = self[key]
    check(values, key, list, 'a list')
    wrong = [value for value in values if value not in allowed]
    if wrong or len(values) != count:
      raise ValueError(
        f"config.json: '{key}' has {wrong[0] if wrong else len(values)!r}, expected {' or '.join(map(str, allowed))} "
        f'for each of {count} layers: correct it'
      )
    return values


class Key(NamedTuple):
  """A field of a network's configuration that is stored in another form: how it is read, and how it is written."""

  read: Callable[[ConfigFields], Any]
  write: Callable[[Any], Mapping[str, Any]]  # of the network's configuration; keys that a family has not are left out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """The declaration of a family.

  Attributes:
    model_type: The name by which config.json states it.
    network: Function `(config, *, eos_ids, dtype, scan)` that returns the network. `decoder` makes it of `keys` and
      `switches`.
    config: The class of the network's configuration.
    keys: For each field of the configuration the key of config.json that has it, a `Key`, or a function of config.json
      for what follows from other keys.
    switches: Fields that are the same for all models of the family.
    defaults: Keys that config.json may leave out, with the values that they have then.
    only: Keys of which one value is supported.
    names: Prefix of the tensors of each module, with `layers` for every `layers_N` and `{}` for N; a second `{}` is the
      number of a row, where each has a tensor of its own, as of an expert. Modules of the same prefix lie in one
      tensor, one after the other in this order.
    by_head: Whether modules of the same prefix lie in it one after the other for each head.
    prefixes: `(old, new)`, how older or enclosing classes begin names, and how these begin here; `''` is any name that
      does not begin with `new`, nor with the head's.
    transposed: Whether kernels are stored as (out, in).
    hf: The class of transformers; None for a family that is not written.
    inside: The model_type of multi-modal models whose `text_config` is of this family.
    models: Names of models, for the documents.
    about: What of it is supported, for the documents.
    tiny: A small config.json, with which tests compare with transformers.
  """

  model_type: str
  network: Callable[..., Network]
  config: type = DecoderConfig
  keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  switches: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  only: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  names: Mapping[str, str] = dataclasses.field(default_factory=dict)
  by_head: bool = False
  prefixes: tuple[tuple[str, str], ...] = ()
  transposed: bool = True
  hf: str | None = None
  inside: str | None = None
  models: str = ''
  about: str = ''
  tiny: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def fields_of(self, settings: ConfigFields) -> dict[str, Any]:
    """Return the fields of our configuration."""

    def read(key):
      return settings[key] if isinstance(key, str) else (key.read if isinstance(key, Key) else key)(settings)

    return self.switches | {name: read(key) for name, key in self.keys.items()}

  def config_of(self, config: Any) -> dict[str, Any]:
    """Return config.json for one of our configurations; one that the family cannot express is read back as another."""
    written = {}
    for name, key in self.keys.items():
      if isinstance(key, str):
        written[key] = getattr(config, name)
      elif isinstance(key, Key):
        written |= {k: value for k, value in key.write(config).items() if k in self.defaults or k in self.sizes}
    return written

  @property
  def sizes(self) -> frozenset[str]:
    """The keys whose values are integers of at least 1."""
    whole = {field.name for field in dataclasses.fields(self.config) if field.type is int}
    return _SIZES.union(key for name, key in self.keys.items() if name in whole and isinstance(key, str))

  def check(self, config: Mapping) -> None:
    """Raise for the first value of config.json that is of another type, out of range, or not supported."""
    sizes = self.sizes
    examples = _examples()
    for key, value in (self.defaults | config).items():
      default = self.defaults.get(key)
      needed = isinstance(default, str) or (key in sizes | _NEEDED and default is not None)
      if (key in sizes or key in self.defaults) and (needed or value is not None):
        check_number(key, value, examples.get(key), key in sizes)
    for key, supported in self.only.items():
      if config.get(key) not in (supported, None):
        raise ValueError(f"config.json: '{key}' is {shown(config[key])}, and only {supported!r} is supported")


_CONTEXT = 2048  # written where it is not known for how many positions a model was made
FAMILIES: dict[str, Family] = {}  # by model_type, those of the package first; a network is written as the first it fits
OWN: set[str] = set()  # of the package


def _examples() -> dict[str, Any]:
  """Return a value of each key that has a default, whose type a key's values have in every family."""
  return {key: x for f in FAMILIES.values() for key, x in f.defaults.items() if x is not None}


def family(model_type: str, *, like: str | None = None, **parts: Any) -> Family:
  """Declare how Hugging Face stores one kind of model, so that `load` reads its folders, and with `hf` writes them.

  Args:
    model_type: The name by which config.json states it.
    like: The model_type of another family, whose parts this one has where it declares none. The entries of `keys`,
      `switches`, `defaults`, `only`, `names` and `tiny` are added to those of the other.
    **parts: The fields of `speccascade.checkpoints.Family`.

  Returns:
    The family.

  Raises:
    ValueError: a part is none, or the package has that model_type itself.
  """
  if model_type in OWN:
    raise ValueError(f"model_type '{model_type}' is one of the package's own: declare another name.")
  if like is not None and like not in FAMILIES:
    raise ValueError(f'like={like!r} is no model_type that has been declared: {", ".join(FAMILIES)}.')
  base = Family(model_type=model_type, network=decoder) if like is None else FAMILIES[like]
  known = {field.name for field in dataclasses.fields(Family)}
  if unknown := sorted(set(parts) - known):
    raise ValueError(f'{unknown[0]}={parts[unknown[0]]!r} is no part of a family: {", ".join(sorted(known))}.')
  _check_parts(**{'config': base.config} | parts)
  merged = {name: getattr(base, name) | x if isinstance(x, Mapping) else x for name, x in parts.items()}
  own = {'model_type': model_type, 'hf': None, 'inside': None, 'models': ''}  # these are not another's
  for one, other in (('keys', 'switches'), ('switches', 'keys')):  # what is declared here replaces either
    kept = merged.get(one, getattr(base, one)).items()
    merged[one] = {name: x for name, x in kept if name in parts.get(one, ()) or name not in parts.get(other, ())}
  FAMILIES[model_type] = dataclasses.replace(base, **own | merged)
  return FAMILIES[model_type]


def _check_parts(config: type, network: Callable | None = None, names: Any = (), keys: Any = (), **_: Any) -> None:
  if network is not None:
    try:
      inspect.signature(network).bind({}, eos_ids=(), dtype='', scan=False)
    except TypeError as error:
      raise ValueError(f'{network!r} ({error}) is no function of (config, *, eos_ids, dtype, scan).') from None
  for module, prefix in dict(names).items():
    if not isinstance(prefix, str) or prefix.replace('{}', '', 2 * ('layers' in module.split('.'))).count('{'):
      raise ValueError(f"names['{module}']={prefix!r} is no prefix of tensors, with {{}} for the number of a layer.")
  fields = {field.name for field in dataclasses.fields(config)}
  for name, key in dict(keys).items():
    if name not in fields or not (isinstance(key, str | Key) or callable(key)):
      raise ValueError(f"keys['{name}']={key!r} is no key of config.json for a field of {', '.join(sorted(fields))}.")


def decoder(settings: ConfigFields, *, eos_ids: tuple[int, ...], dtype: str, scan: bool) -> Decoder:
  """Return the decoder that a config.json describes by the keys and switches of its family."""
  fields = settings.family.fields_of(settings)
  heads, kv_heads, head_dim = (fields[name] for name in ('heads', 'kv_heads', 'head_dim'))
  if heads % kv_heads:
    raise ValueError(
      f"config.json: 'num_key_value_heads' is {kv_heads}, expected a divisor of {heads}, the heads: correct it"
    )
  experts, chosen = (fields.get(name, 0) for name in ('experts', 'experts_per_token'))
  if chosen > experts:
    raise ValueError(
      f"config.json: 'num_experts_per_tok' is {chosen}, expected at most {experts}, the experts of a layer: correct it"
    )
  for share in {span.rope.share for span in fields['spans'] if span.rope}:
    if int(head_dim * share) % 2 or share > 1:
      part = '' if share == 1 else f", of which 'partial_rotary_factor' {share} is turned"
      raise ValueError(f"config.json: 'head_dim' is {head_dim}{part}, expected an even number: correct it")
  return Decoder(DecoderConfig(**fields), eos_ids, dtype, scan)


# ---- from config.json to a network ----


def settings(config: dict) -> ConfigFields:
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
  return ConfigFields(config, family)


def network_from_config(config: dict, *, eos_ids=None, dtype: str = 'float32', scan: bool = False) -> Network:
  """Return the network that a config describes; `eos_ids` (an id, several, or None) overrides the config's."""
  c = settings(config)
  ids = c.get('eos_token_id') if eos_ids is None else eos_ids
  ids = () if ids is None else tuple(ids) if isinstance(ids, list | tuple) else (ids,)
  if wrong := [i for i in ids if type(i) is not int or not 0 <= i <= LARGEST]:
    file = 'config.json' if eos_ids is None else 'generation_config.json'
    raise ValueError(f"{file}: 'eos_token_id' has {shown(wrong[0])}, which is no token id: correct it")
  network = _made(c, eos_ids=ids, dtype=dtype, scan=scan)
  mask = token_id(config, (MASK,), network.vocab_size)
  return network if mask is None else dataclasses.replace(network, mask_token=mask)


def token_id(config: Mapping, keys: Sequence[str], vocab: int) -> int | None:
  """Return the token id under the first key of a config.json that has one, None where none has."""
  key = next((key for key in keys if config.get(key) is not None), None)
  if key is not None and (type(config[key]) is not int or not 0 <= config[key] < vocab):
    raise ValueError(f"config.json: '{key}' is {shown(config[key])}, which is no token id: correct it")
  return None if key is None else config[key]


def _made(c: ConfigFields, **given) -> Network:
  """Return the network that a family makes of a config, of a user's family with all tried that loading needs."""
  family: Family = c.family
  try:
    network = family.network(c, **given)
    if family.model_type not in OWN:
      hash(network)
      if not isinstance(network, Network) or network.param_shapes() is None:
        raise TypeError(f'{type(network).__name__} is no speccascade.types.Network with param_shapes()')
  except ValueError:
    raise
  except Exception as error:  # whatever a function raises
    reason = first_line(error, named=True)
    raise ValueError(
      f"the function of model_type '{family.model_type}' makes no network ({reason}): correct it"
    ) from error
  return network


# ---- from a network to config.json ----


def config_of(network: Network) -> dict[str, Any]:
  """Return the config.json of a settled network: that of the first family which gives it back."""
  for family in FAMILIES.values():
    if family.hf and isinstance(network.config, family.config):
      config = _common(network, family) | family.config_of(network.config)
      try:
        if network_from_config(config, dtype=network.dtype) == network:
          return config
      except (ValueError, TypeError):  # a size that the family does not have, or has and this network not
        continue
  raise ValueError(
    f'no model_type is a {network.config}: declare one that is, with the tensors it is stored in, by '
    'speccascade.checkpoints.family'
  )


def settled(network: Network) -> Network:
  """Return a network as it is read back: its layers apart, and its context a number, as Hugging Face's has to be."""
  config = network.config
  if isinstance(config, T5GemmaConfig):
    config = dataclasses.replace(config, encoder=with_context(config.encoder))
  return dataclasses.replace(network, config=with_context(config), scan=False)


def with_context(config: Any) -> Any:
  """Return the configuration of a stack with a number of positions that it was made for."""
  if isinstance(config, DecoderConfig) and not config.positions and not config.context:
    return dataclasses.replace(config, context=_CONTEXT)
  return config


def _common(network: Network, family: Family) -> dict[str, Any]:
  """Return what the config.json of every model has."""
  ids = network.eos_ids
  return {
    'architectures': [family.hf],
    'model_type': family.model_type,
    'is_encoder_decoder': network.start_id is not None,
    'bos_token_id': None,
    'pad_token_id': network.start_id,
    'decoder_start_token_id': network.start_id,
    'eos_token_id': list(ids) if len(ids) > 1 else next(iter(ids), None),
    'dtype': network.dtype,
  } | ({} if network.mask_token is None else {MASK: network.mask_token})
