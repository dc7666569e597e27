"""A rollout worker of Tunix that decodes speculatively, so that only the time of a rollout differs.

  from speccascade.integrations import tunix

  ClusterConfig(rollout_engine=functools.partial(tunix.Rollout, memory=4096), rollout_config=…, …)

The weights are the trainer's at each call, and nothing is compiled anew for them. `return_logprobs=True` returns the
log-probability of each token under the distribution that it was drawn from: after the temperature, top-k and top-p.
One noise for all drafters makes a text a function of its prompt, the seed, its number among the prompt's samples and
the weights, whatever else is in the batch. It needs the extra `libraries`.
"""

from collections.abc import Sequence
import itertools
from typing import Any
import zlib

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from speccascade import decode, methods, Request, Sampler
from speccascade.drafters import ngram
from speccascade.integrations import by_row
from speccascade.types import Model, Params

try:
  from tunix.rl import common
  from tunix.rl.rollout import base_rollout
except ImportError as error:
  raise ImportError(f"{error}; pip install 'speccascade[libraries]' for Tunix.", name=error.name) from None


class Rollout(base_rollout.BaseRollout):
  """Speculative decoding with the weights that are trained.

  Args:
    rollout_actor: The module, as Tunix gives it.
    tokenizer: The tokenizer, as Tunix gives it.
    mesh: The mesh of the rollout, as Tunix gives it; parameters keep the shards that they have.
    rollout_config: The configuration of the cluster. Of it `generate` reads that of its call.
    drafter: A smaller module of Tunix with the same tokens, whose weights are read at each call, too, so it may be
      trained; None for prompt lookup.
    block: How many tokens are drafted at a time.
    memory: How many tokens of earlier rollouts prompt lookup also looks in.
  """

  def __init__(
    self,
    rollout_actor: nnx.Module,
    tokenizer: Any,
    mesh: Any = None,
    rollout_config: base_rollout.RolloutConfig = base_rollout.RolloutConfig(),
    *,
    drafter: nnx.Module | None = None,
    block: int = 4,
    memory: int = 0,
  ):
    if drafter is not None and memory:
      raise ValueError(f'memory={memory} is of prompt lookup: leave it out, or the drafter.')
    self._modules = [module for module in (drafter, rollout_actor) if module is not None]
    models = [by_row.tunix(module, tokenizer=tokenizer) for module in self._modules]
    self._lookup = ngram.drafter(models[-1], memory=memory) if drafter is None else None
    self._shards = [jax.tree.map(lambda x: x.sharding, model.params) for model in models]
    self._models = [model.replace(params=None) for model in models]  # the weights of a call go with it
    self._method = methods.speculative(block=block)
    self._tokenizer = tokenizer
    self._config = rollout_config
    self._calls = itertools.count()

  def generate(
    self, prompts: list[str], rollout_config: base_rollout.RolloutConfig, **kwargs: Any
  ) -> base_rollout.RolloutOutput:
    """Continue each prompt; equal prompts are samples of one, which is read once.

    Args:
      prompts: The texts.
      rollout_config: Of it are read `max_tokens_to_generate`, `max_prompt_length`, `temperature` (0 is greedy),
        `top_p`, `top_k` (None, 0 and -1 are off), `eos_tokens`, `return_logprobs`, and `seed`, a number or a JAX key;
        without one each call has a seed of its own.
      **kwargs: None.

    Returns:
      Texts and tokens without the token that ended them.

    Raises:
      ValueError: A number is out of range, or a prompt longer than `max_prompt_length`.
    """
    if kwargs:
      raise ValueError(f'generate takes no {next(iter(kwargs))}; leave it out.')
    self._config = rollout_config
    call = next(self._calls)
    seed = call if rollout_config.seed is None else _number(rollout_config.seed)
    tokens = [self._tokens(prompt) for prompt in prompts]
    samples: dict[tuple[int, ...], list[int]] = {}
    for i, row in enumerate(tokens):
      samples.setdefault(row, []).append(i)
    stop = rollout_config.eos_tokens or [self.eos_id()]
    requests = [
      Request([*row], n=len(which), stop_tokens=stop, example_id=_hash(row)) for row, which in samples.items()
    ]
    width = rollout_config.max_prompt_length
    out = decode(
      self._method,
      self._current(),
      requests,
      max_new_tokens=rollout_config.max_tokens_to_generate,
      max_prompt_tokens=width,
      sampler=_sampler(rollout_config),
      seed=seed,
      trace='target' if rollout_config.return_logprobs else False,
    )
    if self._lookup is not None and self._lookup.network.remembers:
      self._lookup = ngram.remembering(self._lookup, out.tokens, seed=seed)
    at = np.argsort(np.concatenate([*samples.values()]))  # where the rows of the prompts are
    lengths = [len(out.tokens[i]) - (out.finish_reasons[i] == 'stop') for i in at]
    ends = [*zip(at, lengths, strict=True)]
    return base_rollout.RolloutOutput(
      text=[out.texts[i] for i in at],
      logits=[],
      tokens=[np.asarray(out.tokens[i][:n], np.int32) for i, n in ends],
      left_padded_prompt_tokens=np.array([[self.pad_id()] * (width - len(row)) + [*row] for row in tokens], np.int32),
      logprobs=[out.target_logprobs[i][:n] for i, n in ends] if rollout_config.return_logprobs else None,
    )

  def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
    """Return the trainer's log-probabilities of completions, at the temperature of the last rollout."""
    return common.compute_per_token_logps(
      *nnx.split(self.model()),
      prompt_tokens=prompt_tokens,
      completion_tokens=completion_tokens,
      pad_id=self.pad_id(),
      eos_id=self.eos_id(),
      temperature=self._config.temperature or 1.0,
    )

  def update_params(self, params: Params, filter_types: tuple[Any, ...] | None = None) -> None:
    """Replace weights of the module, in its own dtypes; what the trainer shares with it is new without this.

    Raises:
      ValueError: The module has no such parameter.
    """
    own = dict(nnx.to_flat_state(nnx.state(self.model())))
    new = dict(nnx.to_flat_state(params))
    if strange := sorted(new.keys() - own.keys(), key=str):
      name = '.'.join(map(str, strange[0]))
      raise ValueError(f'{type(self.model()).__name__} has no parameter {name}; give weights of the same module.')
    cast = [(path, x.replace(x[...].astype(own[path].dtype))) for path, x in new.items()]
    nnx.update(self.model(), nnx.from_flat_state(cast))

  def pad_id(self) -> int:
    return self._tokenizer.pad_id()

  def eos_id(self) -> int:
    return self._tokenizer.eos_id()

  def model(self) -> nnx.Module:
    return self._modules[-1]

  def _current(self) -> Sequence[Model]:
    """Return the models with the weights of now, in the shards that programs are compiled for."""
    models = [
      model.replace(params=jax.device_put(nnx.state(module), shards))
      for model, module, shards in zip(self._models, self._modules, self._shards, strict=True)
    ]
    return models if self._lookup is None else [self._lookup, *models]

  def _tokens(self, prompt: str) -> tuple[int, ...]:
    """Return a prompt's tokens, which begin with BOS where there is one."""
    ids = [*self._tokenizer.encode(prompt)]
    begin = [self._tokenizer.bos_id()] if self._tokenizer.bos_id() else []
    return tuple(int(x) for x in (ids if ids[:1] == begin else begin + ids))


def _sampler(config: base_rollout.RolloutConfig) -> Sampler:
  """Return the sampler of a configuration."""
  if config.top_p is None:
    raise ValueError(
      "RolloutConfig.top_p=None is greedy in Tunix's sampler and 1 in vLLM's: give temperature=0 or top_p=1."
    )
  filters = {'top_k': config.top_k} if config.top_k not in (None, -1, 0) else {}
  return Sampler(config.temperature, top_p=config.top_p, coupling='gumbel', **filters)


def _number(seed: Any) -> int:
  """Return a seed of 32 bits for a number or a JAX key."""
  if isinstance(seed, int | np.integer):
    return int(seed)
  typed = jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
  return _hash(np.asarray(jax.random.key_data(seed) if typed else seed).reshape(-1).tolist())


def _hash(numbers: Sequence[int]) -> int:
  return zlib.crc32(np.asarray(numbers, np.uint32).tobytes())
