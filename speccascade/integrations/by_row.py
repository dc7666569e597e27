"""Decoders of other libraries as models: any that has a cache and reads a batch of one row.

  model = by_row.tunix(module)  # or by_row.gemma(module, params), by_row.keras_hub(causal_lm), or by_row.model(…)

A cache elsewhere has one index for all rows, but in speculative decoding each row accepts another number of tokens.
Under `jax.vmap` over rows of one, each row has an index of its own, and the library stays as it is. Its parameters are
those of the model, a `nnx.State`, a dict of Linen or a list, in the dtype and the shards that they have.

Nothing here imports such a library before its function is called. Whether a decoder reads windows as it reads single
tokens, `speccascade.check(model)` tells.

Axis letters: B batch, L new tokens, V vocabulary, S prompt, T slots of the cache.
"""

from collections.abc import Callable
import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from speccascade.types import Array, Cache, iota, Model, Network, Params, Prompt

Call = Callable[[Params, Cache, Array, Array], tuple[Array, Cache]]
Empty = Callable[[Params, int, int], Cache]


@dataclasses.dataclass(frozen=True, eq=False)
class ByRow(Network):
  """A network of two functions, which `model` explains.

  It equals itself alone, and is hashed so: what the functions hold need not be hashable, and another network is another
  program. So make a model once; after a step of training it is `model.replace(params=…)`.
  """

  call: Call = dataclasses.field(repr=False)
  empty: Empty = dataclasses.field(repr=False)
  vocab_size: int
  eos_ids: tuple[int, ...] = ()
  max_positions: int | None = None

  def empty_cache(self, params: Params, batch: int, slots: int) -> Cache:
    return self.empty(params, batch, slots)

  def prefill(self, params: Params, prompt: Prompt, max_len: int) -> Cache:
    """Read the padded prompts [B, S]; the slots of the padding are written again before they are seen."""
    rows, width = prompt.tokens.shape
    positions = jnp.broadcast_to(iota(width), (rows, width))
    return self.extend(params, self.empty(params, rows, max_len), prompt.tokens, positions)[1]

  def extend(self, params: Params, cache: Cache, tokens: Array, positions: Array) -> tuple[Array, Cache]:
    """Feed tokens [B, L], each row as a batch of one."""

    def row(*of_row):
      return jax.tree.map(lambda x: x[0], self.call(params, *jax.tree.map(lambda x: x[None], of_row)))

    return jax.vmap(row)(cache, tokens, positions)


def model(
  params: Params,
  call: Call,
  empty: Empty,
  *,
  tokenizer: Any = None,
  eos_ids: tuple[int, ...] = (),
  max_positions: int | None = None,
  name: str = 'model',
) -> Model:
  """Return a decoder as a model.

  Args:
    params: Its parameters, any pytree of arrays.
    call: A function `(params, cache of a row, tokens [1, L], positions [1, L]) -> logits [1, L, V], cache`. It writes
      the tokens into the slots of their positions, and a token sees the slots up to its own: what lies behind is stale.
    empty: A function `(params, rows, slots) -> cache`, whose arrays have the rows on axis 0.
    tokenizer: Anything with `encode(text)` and `decode(tokens)`; None where prompts are lists of tokens.
    eos_ids: The tokens that end a text.
    max_positions: How many positions there are; None if they are unbounded.
    name: The name in tables and errors.

  Raises:
    ValueError: The functions do not fit each other.
  """
  ids = jax.ShapeDtypeStruct((1, 2), jnp.int32)
  cache = jax.eval_shape(lambda params: empty(params, 1, 8), params)
  logits, after = jax.eval_shape(call, params, cache, ids, ids)
  if logits.ndim != 3 or logits.shape[:2] != ids.shape:
    raise ValueError(f'{name}: call returns logits {[*logits.shape]} of tokens [1, 2]; return [1, 2, V].')
  if (given := jax.tree.map(_kind, cache)) != (returned := jax.tree.map(_kind, after)):
    raise ValueError(f'{name}: call is given the cache {given} and returns {returned}; write into that of `empty`.')
  return Model(params, ByRow(call, empty, logits.shape[-1], tuple(eos_ids), max_positions), tokenizer, name)


def _kind(x: jax.ShapeDtypeStruct) -> str:
  return f'{x.dtype.name}{[*x.shape]}'


def tunix(module: Any, *, tokenizer: Any = None, eos_ids: tuple[int, ...] = ()) -> Model:
  """Return a decoder of Tunix (Qwen 2 and 3, Llama 3, Gemma 3); `tokenizer` and `eos_ids` are those of `model`.

  With new weights of the module it is `model.replace(params=nnx.state(module))`. Gemma 3 masks the windows of its local
  layers as those of a prompt, so it has no more positions than such a layer looks back.
  """
  from flax import nnx

  graph, params = nnx.split(module)
  name, config = type(module).__name__, dataclasses.asdict(module.config)
  if name == 'Gemma4':
    raise ValueError('Gemma4 of Tunix reads a whole prompt or one token, and no window: give that of gemma.')

  def empty(params, rows, slots):
    shape = rows, slots, config['num_kv_heads'], config['head_dim']
    zeros = jnp.zeros(shape, config.get('dtype', jax.tree.leaves(params)[0].dtype))
    index = jnp.zeros(rows, jnp.int32)
    return {f'layer_{i}': {'k': zeros, 'v': zeros, 'end_index': index} for i in range(config['num_layers'])}

  def call(params, cache, tokens, positions):
    return nnx.merge(graph, params)(tokens, positions, *_at(positions, cache))

  most = config['sliding_window_size'] if name == 'Gemma3' else None
  return model(params, call, empty, tokenizer=tokenizer, eos_ids=eos_ids, max_positions=most, name=name)


def gemma(module: Any, params: Params, *, tokenizer: Any = None, eos_ids: tuple[int, ...] = ()) -> Model:
  """Return a transformer of gemma, as `gm.nn.Gemma3_1B()`, with its parameters; the others are those of `model`."""

  def empty(params, rows, slots):
    return module.config.init_cache(batch_size=rows, dtype=module.dtype, cache_length=slots)

  def call(params, cache, tokens, positions):
    cache, mask = _at(positions, cache)
    out = module.apply({'params': params}, tokens, positions=positions, cache=cache, attention_mask=mask)
    return out.logits, out.cache

  return model(params, call, empty, tokenizer=tokenizer, eos_ids=eos_ids, name=type(module).__name__)


def keras_hub(
  causal_lm: Any, *, tokenizer: Any = None, eos_ids: tuple[int, ...] = (), max_positions: int | None = None
) -> Model:
  """Return a `CausalLM` of keras-hub, on Keras' backend of JAX; the arguments are those of `model`.

  With new weights it is `model.replace(params=[v.value for v in causal_lm.variables])`.
  """
  import keras

  variables = causal_lm.variables
  images = len(inspect.signature(causal_lm._build_cache).parameters) - 1  # arguments for what a text has not

  def empty(params, rows, slots):
    def seeded(tokens):
      with keras.StatelessScope(zip(variables, params)):
        return causal_lm._build_cache(tokens, *[None] * images)[-1]

    made = jax.eval_shape(seeded, jax.ShapeDtypeStruct((rows, slots), jnp.int32))
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made)

  def call(params, cache, tokens, positions):
    with keras.StatelessScope(zip(variables, params)):
      logits, _, cache = causal_lm.call_with_cache(tokens, cache, positions[0, 0])
    return logits, cache

  params, name = [v.value for v in variables], type(causal_lm).__name__
  return model(params, call, empty, tokenizer=tokenizer, eos_ids=eos_ids, max_positions=max_positions, name=name)


def _at(positions: Array, cache: dict) -> tuple[dict, Array]:
  """Return the cache of Tunix and gemma with its index at the first position, and the mask [1, L, T] of its slots."""
  slots = next(iter(cache.values()))['k'].shape[1]
  at = {name: layer | {'end_index': positions[:, 0]} for name, layer in cache.items()}
  return at, iota(slots)[None] <= positions[..., None]
