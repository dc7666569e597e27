"""One decoder-only transformer for Llama, and for all families that are declared next to it.

The families differ in the switches of `DecoderConfig` and in nothing else. Parameters are named
`token_embedder`, `layers_0`, …, `final_norm`, `logits_dense`; kernels are (in, out).

Axis letters: B batch, L new tokens, S prompt, T slots, E embedding, V vocabulary.
"""

from collections.abc import Callable
import dataclasses
import functools

from flax import linen as nn
from jax import lax
import jax.numpy as jnp

from speccascade.backends import Backend, View
from speccascade.models import cache as cache_lib
from speccascade.models import layers as blocks
from speccascade.models import rope as rope_lib
from speccascade.models.base import at_width, Base, without_layers
from speccascade.models.experts import Experts
from speccascade.models.rope import Rope
from speccascade.types import Array, Cache, Params, Prompt

PLAIN = Rope()
CHUNK = 1024  # tokens of a prompt that are read at once


@dataclasses.dataclass(frozen=True)
class Span:
  """What one layer sees: the last `window` positions (0: all), turned by `rope` (None: not turned)."""

  window: int = 0
  rope: Rope | None = PLAIN


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """Sizes and switches of a decoder.

  `norms`: 'pre' normalises what enters each block, 'shared' does so once for both (StableLM 2 12B), 'after' normalises
  what leaves it (OLMo 2), 'sandwich' both (Gemma 2), 'post' the sum (OPT-350m).
  """

  vocab_size: int
  embed_dim: int
  heads: int
  kv_heads: int
  head_dim: int
  mlp_dim: int
  spans: tuple[Span, ...]  # one for each layer
  activation: str = 'silu'
  gated: bool = True
  layer_norm: bool = False  # else RMS
  norm_eps: float = 1e-6
  norm_offset: float = 0.0
  norms: str = 'pre'
  parallel: bool = False  # whether attention and MLP read the same, else the MLP what attention has been added to
  final_norm: bool = True
  qk_norm: bool = False
  joined_qk_norm: bool = False  # over all heads together, else over each
  qkv_bias: bool = False
  out_bias: bool = False
  mlp_bias: bool = False
  tied: bool = False
  embed_scale: float | None = None
  projected_dim: int | None = None  # width of the embedding table, where it is not `embed_dim`
  positions: int = 0  # learned positions; 0: none
  position_offset: int = 0
  context: int = 0  # positions that a rotary model was made for; 0: not known
  attention_scale: float | None = None  # None: 1/√head_dim
  attention_cap: float | None = None
  final_cap: float | None = None
  block_scale: float | None = None  # multiplies what each block adds
  logits_divisor: float | None = None
  experts: int = 0  # of `mlp_dim` each, of which a router chooses for each token; 0: one MLP for all
  experts_per_token: int = 0
  experts_normalised: bool = True  # whether their weights sum to 1

  def __post_init__(self):
    if self.experts and (self.mlp_bias or not 0 < self.experts_per_token <= self.experts):
      raise ValueError(
        f'DecoderConfig(experts={self.experts}, experts_per_token={self.experts_per_token}, mlp_bias={self.mlp_bias}): '
        f'give 1 to {self.experts} experts per token, without biases.'
      )

  @property
  def kinds(self) -> tuple[Span, ...]:
    """Return the different spans."""
    return tuple(dict.fromkeys(self.spans))

  @property
  def kind_of_each(self) -> tuple[int, ...]:
    """Return which of the different spans each layer has."""
    return tuple(self.kinds.index(span) for span in self.spans)


def sights(c: DecoderConfig, positions: Array, scan: bool) -> list[tuple]:
  """Return how far back each kind of layer sees, and by which angles it turns; in a scan all turn or none does."""
  angles = [rope_lib.angles(s.rope, c.head_dim, positions) if s.rope else None for s in c.kinds]
  turned = next((x for x in angles if x), None)
  if scan and turned:
    angles = [x or (jnp.ones_like(turned[0]), jnp.zeros_like(turned[1])) for x in angles]
  return [(s.window, x) for s, x in zip(c.kinds, angles, strict=True)]


def embedder_of(c: DecoderConfig, dtype: str, backend: Backend) -> blocks.Embed:
  """Return a config's table of tokens."""
  return blocks.Embed(c.vocab_size, c.projected_dim or c.embed_dim, scale=c.embed_scale, dtype=dtype, backend=backend)


def norm_of(c: DecoderConfig, dtype: str) -> Callable[..., blocks.Norm]:
  """Return the constructor of a config's norms."""
  return functools.partial(blocks.Norm, c.norm_eps, c.norm_offset, c.layer_norm, dtype=dtype)


def attention_of(c: DecoderConfig, dtype: str, backend: Backend) -> blocks.Attention:
  """Return the attention of a config's layers."""
  scale = c.head_dim**-0.5 if c.attention_scale is None else c.attention_scale
  return blocks.Attention(
    c.embed_dim,
    c.heads,
    c.kv_heads,
    c.head_dim,
    scale,
    c.attention_cap,
    c.qkv_bias,
    c.out_bias,
    norm_of(c, dtype) if c.qk_norm else None,
    c.joined_qk_norm,
    dtype,
    backend,
  )


class Layer(nn.Module):
  """Attention and MLP, each added to what it read; `relative` makes a bias on the scores that is the layer's own."""

  config: DecoderConfig
  dtype: str
  backend: Backend
  relative: Callable[[], blocks.RelativeBias] | None = None

  attentions = (('attention', 'attention'),)  # the names of each, in its norms and of its module

  def setup(self):
    c = self.config
    norm = norm_of(c, self.dtype)
    for block, _ in (*self.attentions, ('mlp', 'mlp')):
      if c.norms in ('pre', 'sandwich', 'shared'):
        shared = c.norms == 'shared' and block == 'mlp'
        setattr(self, f'pre_{block}_layer_norm', self.pre_attention_layer_norm if shared else norm())
      if c.norms not in ('pre', 'shared'):
        setattr(self, f'post_{block}_layer_norm', norm())
    for _, name in self.attentions:
      setattr(self, name, attention_of(c, self.dtype, self.backend))
    if c.experts:
      routed = c.experts, c.experts_per_token, c.experts_normalised
      self.mlp = Experts(c.mlp_dim, *routed, c.activation, c.gated, self.dtype, self.backend)
    else:
      self.mlp = blocks.Mlp(c.mlp_dim, c.activation, c.gated, c.mlp_bias, self.dtype, self.backend)
    if self.relative:
      self.relpos_bias = self.relative()

  def __call__(
    self, x: Array, cache: Cache, number: Array | int, view: View, angles, bias: Array | None = None
  ) -> tuple[Array, Cache]:
    """Return what the layer makes of x [B, L, E], and the cache with its keys and values."""
    y, cache = self.attention.extend(self._enter(x, 'attention'), cache, number, view, bias, angles)
    return self._finish(x, y), cache

  def read(self, x: Array, view: View, angles) -> tuple[Array, cache_lib.Entry]:
    """Return the same for a text from its beginning: x [B, L, E] and its entry."""
    y = self._enter(x, 'attention')
    entry = self.attention.entry(y, angles)
    return self._finish(x, self.attention.attend(y, entry, view.mask(x.shape[1]), rope=angles)), entry

  def _finish(self, x: Array, y: Array, block: str = 'attention') -> Array:
    after = self._leave(x, y, block)
    return self._leave(after, self.mlp(self._enter(x if self.config.parallel else after, 'mlp')), 'mlp')

  def _enter(self, x: Array, block: str) -> Array:
    return getattr(self, f'pre_{block}_layer_norm')(x) if self.config.norms in ('pre', 'sandwich', 'shared') else x

  def _leave(self, x: Array, y: Array, block: str) -> Array:
    c = self.config
    if c.block_scale is not None:
      y = (y.astype(jnp.float32) * c.block_scale).astype(y.dtype)  # which bfloat16 would round
    if c.norms in ('pre', 'shared'):
      return x + y
    norm = getattr(self, f'post_{block}_layer_norm')
    return norm(x + y) if c.norms == 'post' else x + norm(y)


class DecoderModule(nn.Module):
  """Embedding, layers, head."""

  config: DecoderConfig
  dtype: str
  scan: bool
  backend: Backend

  def setup(self):
    c = self.config
    on = dict(dtype=self.dtype, backend=self.backend)
    self.token_embedder = embedder_of(c, **on)
    if c.positions:
      rows = c.positions + c.position_offset
      self.position_embedder = blocks.Embed(rows, c.embed_dim, ('positions', 'embed'), **on)
    if c.projected_dim:
      self.input_projection = blocks.Dense(c.embed_dim, ('table', 'embed'), **on)
      self.output_projection = blocks.Dense(c.projected_dim, ('embed', 'table'), **on)
    layer = functools.partial(Layer, c, self.dtype, self.backend)
    self.layers = layer() if self.scan else [layer() for _ in c.spans]
    if c.final_norm:
      self.final_norm = norm_of(c, self.dtype)()
    if not c.tied:
      self.logits_dense = blocks.Dense(c.vocab_size, ('embed', 'vocab'), out_dtype=jnp.float32, **on)

  def __call__(self, cache: Cache, tokens: Array, view: View, kept=()) -> tuple:
    """Feed tokens [B, L]; return logits [B, L, V] and the cache, and with `kept` the states of `kept_states`, too."""
    x, *rest = self.feed(cache, tokens, view, kept)
    return self.scores(x), *rest

  def feed(self, cache: Cache, tokens: Array, view: View, kept=()) -> tuple:
    """Return the same with what the head reads [B, L, E] in the place of logits."""
    visible = sights(self.config, view.positions, self.scan)

    def body(layer, carry, at):
      window, angles = blocks.choose(visible, at[1])
      after = layer(*carry, at[0], view._replace(window=window), angles)
      return after, after[0] if kept else None

    first = self.embed(tokens, view.positions, view.packing)
    (x, cache), states = blocks.over_layers(self.layers, body, (first, cache), self.config.kind_of_each)
    x = self.normed(x)
    return x, cache, *([blocks.kept_states(kept, first, states, x)] if kept else [])

  def read(self, tokens: Array, kept=()) -> tuple[Cache, Array | None]:
    """Return the cache of texts [B, L] from their beginning, and with `kept` the states of `kept_states`."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    visible = sights(self.config, positions, self.scan)

    def body(layer, x, at):
      window, angles = blocks.choose(visible, at[1])
      x, entry = layer.read(x, View(positions, window), angles)
      return x, (entry, x if kept else None)

    first = self.embed(tokens, positions)
    x, outs = blocks.over_layers(self.layers, body, first, self.config.kind_of_each)
    entries, states = outs if self.scan else tuple(zip(*outs))
    return cache_lib.stack(entries), blocks.kept_states(kept, first, states, self.normed(x)) if kept else None

  def embed(self, tokens: Array, positions: Array, packing=None) -> Array:
    """Return the first layer's input [B, L, E]."""
    c = self.config
    x = self.token_embedder(tokens, packing)
    if c.projected_dim:
      x = self.input_projection(x)
    if c.positions:
      x = x + self.position_embedder(positions + c.position_offset, packing).astype(x.dtype)
    return x

  def normed(self, x: Array) -> Array:
    """Return what the last layer made [B, L, E] as the head reads it."""
    return self.final_norm(x) if self.config.final_norm else x

  def scores(self, x: Array) -> Array:
    """Return the head's float32 logits [B, L, V] of normed states."""
    c = self.config
    x = self.output_projection(x) if c.projected_dim else x
    logits = self.token_embedder.attend(x) if c.tied else self.logits_dense(x)
    logits = logits if c.logits_divisor is None else logits / c.logits_divisor
    return nn.with_logical_constraint(blocks.softcap(logits, c.final_cap), ('batch', 'length', 'vocab'))


@dataclasses.dataclass(frozen=True)
class Decoder(Base):
  """A decoder-only network."""

  config: DecoderConfig
  eos_ids: tuple[int, ...] = ()
  dtype: str = 'float32'
  scan: bool = False

  @property
  def max_positions(self) -> int | None:
    return self.config.positions or None

  @property
  def context(self) -> int | None:
    """Return beyond how many positions the model's distributions are not to be trusted, if that is known."""
    stretched = [int(span.rope.original * span.rope.factor) for span in self.config.kinds if span.rope]
    return max([self.config.context, *stretched]) or None

  @property
  def experts(self) -> tuple[int, int]:
    return (self.config.experts, self.config.experts_per_token) if self.config.experts else (1, 1)

  @property
  def head_counts(self) -> tuple[int, int]:
    return self.config.heads, self.config.kv_heads

  @property
  def module(self) -> DecoderModule:
    return DecoderModule(self.config, self.dtype, self.scan, self.backend)

  def prefill(self, params: Params, prompt: Prompt, max_len: int) -> Cache:
    """Return a cache that has seen the prompt [B, S]; what the padding left in it is invisible later on."""
    return self.observe_prompt(params, prompt, max_len, ())[0]

  def observe_prompt(self, params: Params, prompt: Prompt, max_len: int, kept: tuple) -> tuple[Cache, Array | None]:
    """Return that cache, and the states [B, S, …] of `blocks.kept_states`."""
    width = prompt.tokens.shape[1]

    def read(w):
      if w > CHUNK and not kept:
        return cache_lib.resize(self.backend, self._read_chunks(params, prompt.tokens[:, :w], max_len), max_len), None
      entries, states = self.module.apply({'params': params}, prompt.tokens[:, :w], kept, method='read')
      states = states if states is None else jnp.pad(states, ((0, 0), (0, width - w), (0, 0)))
      return cache_lib.resize(self.backend, entries, max_len), states

    return at_width(prompt.length.max() - 1, width, read)  # the last token is fed by the loop

  def _read_chunks(self, params: Params, tokens: Array, slots: int) -> Cache:
    """Return a cache that has seen texts [B, S], a chunk at a time, with what a chunk takes for memory beside it."""
    batch, width = tokens.shape
    chunks = -(-width // CHUNK)
    tokens = jnp.pad(tokens, ((0, 0), (0, chunks * CHUNK - width))).reshape(batch, chunks, CHUNK)

    def read(cache, chunk):
      number, tokens = chunk
      positions = jnp.broadcast_to(number * CHUNK + jnp.arange(CHUNK)[None], tokens.shape)
      return self.module.apply({'params': params}, cache, tokens, View(positions), method='feed')[1], None

    cache = self.empty_cache(params, batch, max(slots, chunks * CHUNK))
    return lax.scan(read, cache, (jnp.arange(chunks), jnp.swapaxes(tokens, 0, 1)))[0]

  def embedded(self, params: Params, tokens: Array, positions: Array) -> Array:
    """Return what the first layer reads [B, L, E]."""
    return self.module.apply({'params': params}, tokens, positions, method='embed')

  @property
  def depth(self) -> int:
    return len(self.config.spans)

  def first_layers(self, params: Params, layers: int) -> tuple['Decoder', Params]:
    """Return the network of the first layers, with this one's norm and head, and its parameters."""
    config = dataclasses.replace(self.config, spans=self.config.spans[:layers])
    return dataclasses.replace(self, config=config), without_layers(params, layers)

  def _cached(self, params: Params) -> Params:
    """Return the parameters that a cache's content depends on."""
    return {name: x for name, x in params.items() if name not in ('final_norm', 'output_projection', 'logits_dense')}

  def empty_cache(self, params: Params, batch: int, slots: int) -> Cache:
    """Return a cache that has seen nothing, in the dtype of the embeddings."""
    c = self.config
    dtype = self._activations(params)
    return cache_lib.empty(self.backend, len(c.spans), batch, c.kv_heads, slots, c.head_dim, dtype, self.scan)

  def _init(self) -> Params:
    zeros = jnp.zeros((1, 1), jnp.int32)
    c = self.config
    cache = cache_lib.empty(self.backend, len(c.spans), 1, c.kv_heads, 1, c.head_dim, self.dtype, self.scan)
    return self.module.init({}, cache, zeros, View(zeros))['params']
