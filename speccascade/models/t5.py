"""T5 (Raffel et al. 2020), v1.0, v1.1, Flan-T5, mT5, umT5 and ByT5, and T5Gemma 1 and 2 (Zhang et al. 2025).

Both are stacks of the layers of `models.decoder`, those of the decoder with cross-attention. T5's scores are not scaled
by 1/√D; positions enter as a learned bias for each bucket of the distance, shared by all layers of a stack, or of each
layer (umT5, and what T5X trains scanned). T5Gemma's layers are those of Gemma 2. Those of T5Gemma 2 are Gemma 3's: a
query attends to the text and to the source in one softmax, with one projection for the keys of both. Parameters have
T5X's unscanned names; kernels are (in, out).

Axis letters: B batch, S source, L new tokens, T slots, E embedding, H heads, V vocabulary.
"""

from collections.abc import Callable
import dataclasses
import functools
import math

from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
import jax.numpy as jnp

from speccascade.backends import Backend, Offsets, View
from speccascade.models import cache as cache_lib
from speccascade.models import layers as blocks
from speccascade.models.base import at_width, Base, without_layers
from speccascade.models.decoder import DecoderConfig, embedder_of, Layer, norm_of, sights, Span
from speccascade.types import Array, Cache, Params, Prompt


@dataclasses.dataclass(frozen=True)
class T5Config:
  """Sizes and switches; tying the head to the embedding and scaling its input by E^-½ are separate ones."""

  vocab_size: int
  embed_dim: int
  heads: int
  head_dim: int
  mlp_dim: int
  encoder_layers: int
  decoder_layers: int
  activation: str = 'gelu_tanh'
  gated: bool = True
  tied: bool = False
  scale_outputs: bool = False
  buckets: int = 32
  max_distance: int = 128
  norm_eps: float = 1e-6
  shared_bias: bool = True  # one relative bias for all layers of a stack, or one for each

  shared_table = True  # of both stacks
  merged = False

  @property
  def encoder(self) -> DecoderConfig:
    return self._stack(self.encoder_layers)

  @property
  def decoder(self) -> DecoderConfig:
    return self._stack(self.decoder_layers)

  def _stack(self, layers: int) -> DecoderConfig:
    sizes = self.vocab_size, self.embed_dim, self.heads, self.heads, self.head_dim, self.mlp_dim
    switches = dict(activation=self.activation, gated=self.gated, norm_eps=self.norm_eps, tied=self.tied)
    return DecoderConfig(*sizes, (Span(0, None),) * layers, **switches, attention_scale=1.0)

  def first_layers(self, layers: int) -> 'T5Config':
    """Return the same with fewer layers that write."""
    return dataclasses.replace(self, decoder_layers=layers)


@dataclasses.dataclass(frozen=True)
class T5GemmaConfig(DecoderConfig):
  """Sizes and switches of the stack that writes, and those of its encoder, whose windows reach as far ahead as back.

  With `merged` (T5Gemma 2) self- and cross-attention are one, a table serves both stacks, and half a window of the
  encoder lies ahead.
  """

  encoder: DecoderConfig = dataclasses.field(kw_only=True)
  merged: bool = dataclasses.field(default=False, kw_only=True)

  scale_outputs = False
  buckets = 0  # no relative bias

  def __post_init__(self):
    super().__post_init__()
    if self.merged and self.encoder.embed_dim != self.embed_dim:
      raise ValueError(
        f'T5GemmaConfig(merged=True, embed_dim={self.embed_dim}): its encoder has embed_dim={self.encoder.embed_dim}, '
        'and one table serves both: give both the same.'
      )
    plain = dict(parallel=False, final_norm=True, projected_dim=None, positions=0, logits_divisor=None, experts=0)
    for stack in (self, self.encoder):
      others = [name for name, x in plain.items() if getattr(stack, name) != x] + ['norms'] * (stack.norms == 'shared')
      if others:
        value = getattr(stack, others[0])
        raise ValueError(f'T5GemmaConfig({others[0]}={value!r}) is of decoders alone: leave {others[0]} out.')

  @property
  def decoder(self) -> DecoderConfig:
    return self

  @property
  def shared_table(self) -> bool:
    return self.merged

  def reach(self, window: int) -> tuple[int, int]:
    """Return how far back and ahead the encoder sees through a window."""
    return ((window - 1) // 2, window // 2) if self.merged else (window, window)

  def first_layers(self, layers: int) -> 'T5GemmaConfig':
    """Return the same with fewer layers that write."""
    return dataclasses.replace(self, spans=self.spans[:layers])


Config = T5Config | T5GemmaConfig


def _of_source(bias: Callable[[Array], Array], slots: int) -> Array | Offsets:
  """Return the bias of a source's tokens on each other [1, H, S, S], of a long one by their offset."""
  if slots <= 128:
    return bias(View(jnp.arange(slots)[None]).distance(slots))
  return Offsets(bias(View(jnp.array([[slots - 1]])).distance(2 * slots - 1))[:, :, 0])


def _near(heads: int, back: int, ahead: int, distance: Array) -> Array:
  """Return a bias [B, H, L, T] by which queries see no further back and ahead than that."""
  distance = distance[:, None]
  bias = jnp.where((-ahead <= distance) & (distance <= back), 0, jnp.finfo(jnp.float32).min)
  return jnp.broadcast_to(bias, (bias.shape[0], heads, *bias.shape[2:]))


class EncoderLayer(Layer):
  """Self-attention and MLP."""

  def __call__(self, x: Array, length: Array, angles, bias: Array | Offsets | None) -> Array:
    bias = _of_source(self.relpos_bias, x.shape[1]) if self.relative else bias
    y = self._enter(x, 'attention')
    return self._finish(x, self.attention.attend(y, self.attention.entry(y, angles), length, bias, angles))


class DecoderLayer(Layer):
  """Self-attention over the cache, cross-attention over the source, MLP."""

  attentions = (('self_attention', 'self_attention'), ('cross_attention', 'encoder_decoder_attention'))

  def __call__(self, x, cache, number, view, angles, bias, source, source_length):
    """Return what the layer makes of x [B, L, E], and the cache with its keys and values."""
    bias = self.relpos_bias(view.distance(cache_lib.slots_of(self.backend, cache))) if self.relative else bias
    y, cache = self.self_attention.extend(self._enter(x, 'self_attention'), cache, number, view, bias, angles)
    x = self._leave(x, y, 'self_attention')
    y = self._enter(x, 'cross_attention')
    y = self.encoder_decoder_attention.attend(y, source, source_length, packing=view.packing, layer=number)
    return self._finish(x, y, 'cross_attention'), cache

  def read_source(self, encoded: Array) -> cache_lib.Entry:
    """Return the keys and values of the source [B, S, E] for cross-attention."""
    return self.encoder_decoder_attention.entry(encoded)


class MergedLayer(Layer):
  """Attention over the cache and over the source in one softmax, and MLP; what is of the source is not turned."""

  def __call__(self, x, cache, number, view, angles, bias, source, source_length):
    """Return what the layer makes of x [B, L, E], and the cache with its keys and values."""
    view = view._replace(source=(cache_lib.entry_of(source, number), source_length))
    return super().__call__(x, cache, number, view, angles, bias)

  def read_source(self, encoded: Array) -> cache_lib.Entry:
    """Return the keys and values of the source [B, S, E]."""
    return self.attention.entry(encoded)


class _Stack(nn.Module):
  """What both stacks have: layers, and T5's bias, one for all of them or one for each."""

  config: Config
  dtype: str
  backend: Backend
  scan: bool

  def fill(self, c: DecoderConfig, layer: type[Layer], bidirectional: bool) -> None:
    """Make the layers and their bias."""
    t5 = self.config
    relative = None
    if t5.buckets:
      sizes = c.heads, t5.buckets, t5.max_distance
      relative = functools.partial(blocks.RelativeBias, *sizes, bidirectional, self.dtype)
    self.shares_bias = bool(relative and t5.shared_bias)
    if self.shares_bias:
      self.relpos_bias = relative()
    layer = functools.partial(layer, c, self.dtype, self.backend, None if self.shares_bias else relative)
    self.layers = layer() if self.scan else [layer() for _ in c.spans]


class Encoder(_Stack):
  """The stack that reads the source."""

  def setup(self):
    c = self.config.encoder
    if not self.config.shared_table:
      self.token_embedder = embedder_of(c, self.dtype, self.backend)
    self.fill(c, EncoderLayer, bidirectional=True)
    self.encoder_norm = norm_of(c, self.dtype)()

  def __call__(self, x: Array, length: Array) -> Array:
    """Return the encoded source [B, S, E]; what lies beyond `length` [B] is padding."""
    kinds = self._kinds(x.shape[1])

    def body(layer, x, at):
      return layer(x, length, *blocks.choose(kinds, at[1])), None

    x, _ = blocks.over_layers(self.layers, body, x, self.config.encoder.kind_of_each)
    return self.encoder_norm(x)

  def _kinds(self, slots: int) -> list[tuple]:
    """Return by which angles each kind of layer turns, and the bias on its scores, which in a scan all have or none."""
    c = self.config.encoder
    bias = _of_source(self.relpos_bias, slots) if self.shares_bias else None
    windows, angles = zip(*sights(c, jnp.arange(slots)[None], self.scan))
    far = slots, slots
    reaches = [self.config.reach(window) if window else far for window in windows]
    reaches = [reach if min(reach) < slots - 1 else far for reach in reaches]
    if {*reaches} == {far}:
      return [(turn, bias) for turn in angles]
    biased = [reach != far or self.scan for reach in reaches]
    near = [_of_source(functools.partial(_near, c.heads, *r), slots) if b else None for r, b in zip(reaches, biased)]
    return list(zip(angles, near, strict=True))


class DecoderStack(_Stack):
  """The stack that writes the target."""

  def setup(self):
    c = self.config.decoder
    self.fill(c, MergedLayer if self.config.merged else DecoderLayer, bidirectional=False)
    self.decoder_norm = norm_of(c, self.dtype)()
    if not c.tied:
      self.logits_dense = blocks.Dense(
        c.vocab_size, ('embed', 'vocab'), out_dtype=jnp.float32, dtype=self.dtype, backend=self.backend
      )

  def __call__(self, x: Array, cache: Cache, view: View, kept=()) -> tuple[Array, Cache, Array | None]:
    """Return the normalised output [B, L, E] for x [B, L, E], the cache, and with `kept` states of `kept_states`."""
    c = self.config.decoder
    own = cache['target']
    source = cache['source']
    bias = self.relpos_bias(view.distance(cache_lib.slots_of(self.backend, own))) if self.shares_bias else None
    kinds = sights(c, view.positions, self.scan)

    def body(layer, carry, at):
      window, angles = blocks.choose(kinds, at[1])
      seen = view._replace(window=window)
      after = layer(*carry, at[0], seen, angles, bias, source, cache['source_length'])
      return after, after[0] if kept else None

    first = x
    (x, own), states = blocks.over_layers(self.layers, body, (x, own), c.kind_of_each)
    x = self.decoder_norm(x)
    return x, {**cache, 'target': own}, blocks.kept_states(kept, first, states, x) if kept else None

  def read_source(self, encoded: Array) -> Cache:
    """Return every layer's keys and values of the source."""

    def body(layer, carry, _):
      return carry, layer.read_source(encoded)

    return cache_lib.stack(blocks.over_layers(self.layers, body, (), self.config.decoder.kind_of_each)[1])


class T5Module(nn.Module):
  """Encoder, decoder and the decoder's embedding, which T5's encoder shares."""

  config: Config
  dtype: str
  scan: bool
  backend: Backend

  def setup(self):
    c = self.config
    self.token_embedder = embedder_of(c.decoder, self.dtype, self.backend)
    self.encoder = Encoder(c, self.dtype, self.backend, self.scan)
    self.decoder = DecoderStack(c, self.dtype, self.backend, self.scan)

  def read_source(self, tokens: Array, length: Array) -> Cache:
    """Return the decoder's keys and values of the source [B, S]."""
    table = self.token_embedder if self.config.shared_table else self.encoder.token_embedder
    return self.decoder.read_source(self.encoder(table(tokens), length))

  def __call__(self, cache: Cache, tokens: Array, view: View, kept=()) -> tuple:
    """Feed tokens [B, L]; return logits [B, L, V] and the cache, and with `kept` states of `kept_states`, too."""
    x, cache, states = self.decoder(self.token_embedder(tokens, view.packing), cache, view, kept)
    return self.scores(x), cache, *([states] if kept else [])

  def embed(self, tokens: Array) -> Array:
    """Return what the first layer reads [B, L, E]."""
    return self.token_embedder(tokens)

  def scores(self, x: Array) -> Array:
    """Return the head's logits [B, L, V] of normed states."""
    c = self.config
    x = x * c.embed_dim**-0.5 if c.scale_outputs else x
    logits = self.token_embedder.attend(x) if c.tied else self.decoder.logits_dense(x)
    return nn.with_logical_constraint(blocks.softcap(logits, c.decoder.final_cap), ('batch', 'length', 'vocab'))

  def visit(self, cache: Cache, tokens: Array) -> None:
    """Use every parameter once."""
    source = self.read_source(tokens, jnp.ones((1,), jnp.int32))
    self({**cache, 'source': source}, tokens, View(jnp.zeros((1, 1), jnp.int32)))


@dataclasses.dataclass(frozen=True)
class T5(Base):
  """An encoder-decoder network."""

  config: Config
  eos_ids: tuple[int, ...] = (1,)
  start_id: int = 0
  dtype: str = 'float32'
  scan: bool = False

  max_positions = None
  dense_head = ('decoder', 'logits_dense')

  def __post_init__(self):
    if not isinstance(self.config, Config):
      raise ValueError(f'T5: config={self.config!r} is no T5Config or T5GemmaConfig; in a gin file @train.T5Config().')

  @property
  def head_counts(self) -> tuple[int, int]:
    """Return numbers that divide those of both stacks."""
    stacks = self.config.encoder, self.config.decoder
    return math.gcd(*(c.heads for c in stacks)), math.gcd(*(c.kv_heads for c in stacks))

  @property
  def module(self) -> T5Module:
    return T5Module(self.config, self.dtype, self.scan, self.backend)

  def prefill(self, params: Params, prompt: Prompt, max_len: int) -> Cache:
    """Encode the prompt [B, S]; return its keys and values for every layer, and empty slots for the target."""
    batch, width = prompt.tokens.shape

    def read(w):
      args = {'params': params}, prompt.tokens[:, :w], prompt.length
      return cache_lib.resize(self.backend, self.module.apply(*args, method='read_source'), width)

    source = at_width(prompt.length.max(), width, read)
    target = self._empty_target(batch, max_len, self._activations(params))
    return {'source': source, 'source_length': prompt.length, 'target': target}

  def embedded(self, params: Params, tokens: Array, positions: Array) -> Array:
    """Return what the decoder's first layer reads [B, L, E]."""
    return self.module.apply({'params': params}, tokens, method='embed')

  @property
  def depth(self) -> int:
    return len(self.config.decoder.spans)

  def reads(self, params: Params, cache: Cache) -> tuple[Params, Cache]:
    """Leave out the encoder, and what only reads the encoded source."""
    params, cache = super().reads(params, cache)
    leaves = {path: x for path, x in flatten_dict(params).items() if path[0] != 'encoder'}
    of_source = {path for path in leaves if 'encoder_decoder_attention' in path and {'key', 'value'} & {*path}}
    return unflatten_dict({path: x for path, x in leaves.items() if path not in of_source}), cache

  def first_layers(self, params: Params, layers: int) -> tuple['T5', Params]:
    """Return the network of the decoder's first layers, with all else of this one, and its parameters."""
    params = {**params, 'decoder': without_layers(params['decoder'], layers)}
    return dataclasses.replace(self, config=self.config.first_layers(layers)), params

  def _cached(self, params: Params) -> Params:
    """Return the parameters that a cache's content depends on."""
    decoder = {name: x for name, x in params['decoder'].items() if name not in ('decoder_norm', 'logits_dense')}
    return {**params, 'decoder': decoder}

  def _empty_target(self, batch: int, slots: int, dtype) -> Cache:
    c = self.config.decoder
    return cache_lib.empty(self.backend, len(c.spans), batch, c.kv_heads, slots, c.head_dim, dtype, self.scan)

  def _init(self) -> Params:
    cache = {'target': self._empty_target(1, 1, self.dtype), 'source_length': jnp.ones((1,), jnp.int32)}
    return self.module.init({}, cache, jnp.zeros((1, 1), jnp.int32), method='visit')['params']
