"""T5 (Raffel et al. 2020): v1.0, v1.1, Flan-T5, mT5, umT5 and ByT5.

Attention scores are not scaled by 1/√D; positions enter as a learned bias for each bucket of the distance, shared by
all layers of a stack, or of each layer (umT5, and what T5X trains scanned). Parameters have T5X's unscanned names;
kernels are (in, out).

Axis letters: B batch, S source, L new tokens, T slots, E embedding, H heads, V vocabulary.
"""

import dataclasses
import functools

from flax import linen as nn
import jax.numpy as jnp

from speccascade.backends import Backend, Offsets, View
from speccascade.models import cache as cache_lib
from speccascade.models import layers as blocks
from speccascade.models.base import at_width, Base, without_layers
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


class _Part(nn.Module):
  """What the layers and stacks have in common: the constructors of their modules."""

  config: T5Config
  dtype: str
  backend: Backend
  scan: bool = False  # of a stack

  def norm(self) -> blocks.Norm:
    """Return a norm."""
    return blocks.Norm(self.config.norm_eps, dtype=self.dtype)

  def attention_block(self) -> blocks.Attention:
    """Return an attention, whose scores are not scaled."""
    c = self.config
    return blocks.Attention(
      c.embed_dim, c.heads, c.heads, c.head_dim, scale=1.0, dtype=self.dtype, backend=self.backend
    )

  def mlp_block(self) -> blocks.Mlp:
    """Return an MLP."""
    c = self.config
    return blocks.Mlp(c.mlp_dim, c.activation, c.gated, dtype=self.dtype, backend=self.backend)

  def relative_bias(self, bidirectional: bool) -> blocks.RelativeBias:
    """Return a relative bias."""
    c = self.config
    return blocks.RelativeBias(c.heads, c.buckets, c.max_distance, bidirectional, self.dtype)


def _of_source(bias: blocks.RelativeBias, slots: int) -> Array | Offsets:
  """Return the bias of a source's tokens on each other [1, H, S, S], of a long one by their offset."""
  if slots <= 128:
    return bias(jnp.arange(slots)[None], slots)
  return Offsets(bias(jnp.array([[slots - 1]]), 2 * slots - 1)[:, :, 0])


class EncoderLayer(_Part):
  """Self-attention and MLP."""

  def setup(self):
    self.pre_attention_layer_norm = self.norm()
    self.attention = self.attention_block()
    self.pre_mlp_layer_norm = self.norm()
    self.mlp = self.mlp_block()
    if not self.config.shared_bias:
      self.relpos_bias = self.relative_bias(bidirectional=True)

  def __call__(self, x: Array, length: Array, bias: Array | None) -> Array:
    if bias is None:
      bias = _of_source(self.relpos_bias, x.shape[1])
    y = self.pre_attention_layer_norm(x)
    x = x + self.attention.attend(y, self.attention.entry(y), length, bias)
    return x + self.mlp(self.pre_mlp_layer_norm(x))


class DecoderLayer(_Part):
  """Self-attention over the cache, cross-attention over the source, MLP."""

  def setup(self):
    self.pre_self_attention_layer_norm = self.norm()
    self.self_attention = self.attention_block()
    self.pre_cross_attention_layer_norm = self.norm()
    self.encoder_decoder_attention = self.attention_block()
    self.pre_mlp_layer_norm = self.norm()
    self.mlp = self.mlp_block()
    if not self.config.shared_bias:
      self.relpos_bias = self.relative_bias(bidirectional=False)

  def __call__(self, x, cache, number, view, bias, source, source_length):
    """Return what the layer makes of x [B, L, E], and the cache with its keys and values."""
    bias = self.relpos_bias(view.positions, cache_lib.slots_of(self.backend, cache)) if bias is None else bias
    y, cache = self.self_attention.extend(self.pre_self_attention_layer_norm(x), cache, number, view, bias)
    x = x + y
    y = self.pre_cross_attention_layer_norm(x)
    entry = cache_lib.entry_of(source, number)
    x = x + self.encoder_decoder_attention.attend(y, entry, source_length, packing=view.packing)
    return x + self.mlp(self.pre_mlp_layer_norm(x)), cache

  def read_source(self, encoded: Array) -> cache_lib.Entry:
    """Return the keys and values of the source [B, S, E] for cross-attention."""
    return self.encoder_decoder_attention.entry(encoded)


class Encoder(_Part):
  """The stack that reads the source."""

  def setup(self):
    c = self.config
    if c.shared_bias:
      self.relpos_bias = self.relative_bias(bidirectional=True)
    layer = functools.partial(EncoderLayer, c, self.dtype, self.backend)
    self.layers = layer() if self.scan else [layer() for _ in range(c.encoder_layers)]
    self.encoder_norm = self.norm()

  def __call__(self, x: Array, length: Array) -> Array:
    """Return the encoded source [B, S, E]; what lies beyond `length` [B] is padding."""
    bias = _of_source(self.relpos_bias, x.shape[1]) if self.config.shared_bias else None

    def body(layer, x, _):
      return layer(x, length, bias), None

    x, _ = blocks.over_layers(self.layers, body, x, (0,) * self.config.encoder_layers)
    return self.encoder_norm(x)


class DecoderStack(_Part):
  """The stack that writes the target."""

  def setup(self):
    c = self.config
    if c.shared_bias:
      self.relpos_bias = self.relative_bias(bidirectional=False)
    layer = functools.partial(DecoderLayer, c, self.dtype, self.backend)
    self.layers = layer() if self.scan else [layer() for _ in range(c.decoder_layers)]
    self.decoder_norm = self.norm()
    if not c.tied:
      self.logits_dense = blocks.Dense(
        c.vocab_size, ('embed', 'vocab'), out_dtype=jnp.float32, dtype=self.dtype, backend=self.backend
      )

  def __call__(self, x: Array, cache: Cache, view: View, kept=()) -> tuple[Array, Cache, Array | None]:
    """Return the normalised output [B, L, E] for x [B, L, E], the cache, and with `kept` states of `kept_states`."""
    own = cache['target']
    source = cache['source']
    bias = self.relpos_bias(view.positions, cache_lib.slots_of(self.backend, own)) if self.config.shared_bias else None

    def body(layer, carry, at):
      after = layer(*carry, at[0], view, bias, source, cache['source_length'])
      return after, after[0] if kept else None

    first = x
    (x, own), states = blocks.over_layers(self.layers, body, (x, own), (0,) * self.config.decoder_layers)
    x = self.decoder_norm(x)
    return x, {**cache, 'target': own}, blocks.kept_states(kept, first, states, x) if kept else None

  def read_source(self, encoded: Array) -> Cache:
    """Return every layer's keys and values of the source."""

    def body(layer, carry, _):
      return carry, layer.read_source(encoded)

    return cache_lib.stack(blocks.over_layers(self.layers, body, (), (0,) * self.config.decoder_layers)[1])


class T5Module(nn.Module):
  """Encoder, decoder and the embedding that they share."""

  config: T5Config
  dtype: str
  scan: bool
  backend: Backend

  def setup(self):
    c = self.config
    self.token_embedder = blocks.Embed(c.vocab_size, c.embed_dim, dtype=self.dtype, backend=self.backend)
    self.encoder = Encoder(c, self.dtype, self.backend, self.scan)
    self.decoder = DecoderStack(c, self.dtype, self.backend, self.scan)

  def read_source(self, tokens: Array, length: Array) -> Cache:
    """Return the decoder's keys and values of the source [B, S]."""
    return self.decoder.read_source(self.encoder(self.token_embedder(tokens), length))

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
    return nn.with_logical_constraint(logits, ('batch', 'length', 'vocab'))

  def visit(self, cache: Cache, tokens: Array) -> None:
    """Use every parameter once."""
    source = self.read_source(tokens, jnp.ones((1,), jnp.int32))
    self({**cache, 'source': source}, tokens, View(jnp.zeros((1, 1), jnp.int32)))


@dataclasses.dataclass(frozen=True)
class T5(Base):
  """An encoder-decoder network."""

  config: T5Config
  eos_ids: tuple[int, ...] = (1,)
  start_id: int = 0
  dtype: str = 'float32'
  scan: bool = False

  max_positions = None

  def __post_init__(self):
    if not isinstance(self.config, T5Config):
      raise ValueError(f'T5: config={self.config!r} is no T5Config; in a gin file it is @train.T5Config().')

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

  def extend(self, params: Params, cache: Cache, tokens: Array, positions: Array, packing=None) -> tuple[Array, Cache]:
    """Feed tokens [B, L] at consecutive positions [B, L]; return logits [B, L, V] of the tokens after them."""
    return self.module.apply({'params': params}, cache, tokens, View(positions, packing=packing))

  def observe(self, params: Params, cache: Cache, tokens: Array, positions: Array, kept: tuple) -> tuple:
    """Do as `extend` does; return the states of `blocks.kept_states` [B, L, …], too."""
    return self.module.apply({'params': params}, cache, tokens, View(positions), kept)

  def embedded(self, params: Params, tokens: Array, positions: Array) -> Array:
    """Return what the decoder's first layer reads [B, L, E]."""
    return self.module.apply({'params': params}, tokens, method='embed')

  def scores(self, params: Params, x: Array) -> Array:
    """Return the head's logits [B, L, V] of normed states [B, L, E]."""
    return self.module.apply({'params': params}, x, method='scores')

  @property
  def depth(self) -> int:
    return self.config.decoder_layers

  def first_layers(self, params: Params, layers: int) -> tuple['T5', Params]:
    """Return the network of the decoder's first layers, with all else of this one, and its parameters."""
    config = dataclasses.replace(self.config, decoder_layers=layers)
    params = {**params, 'decoder': without_layers(params['decoder'], layers)}
    return dataclasses.replace(self, config=config), params

  def _cached(self, params: Params) -> Params:
    """Return the parameters that a cache's content depends on."""
    decoder = {name: x for name, x in params['decoder'].items() if name not in ('decoder_norm', 'logits_dense')}
    return {**params, 'decoder': decoder}

  def _empty_target(self, batch: int, slots: int, dtype) -> Cache:
    c = self.config
    return cache_lib.empty(self.backend, c.decoder_layers, batch, c.heads, slots, c.head_dim, dtype, self.scan)

  def _init(self, key: Array) -> Params:
    cache = {'target': self._empty_target(1, 1, self.dtype), 'source_length': jnp.ones((1,), jnp.int32)}
    return self.module.init(key, cache, jnp.zeros((1, 1), jnp.int32), method='visit')['params']
