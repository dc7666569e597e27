"""Given texts, read by the models in one pass: their log-probability under the distribution of a method's output."""

from collections.abc import Callable, Iterable, Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax import tree_util
import jax.numpy as jnp
import numpy as np

from speccascade import backends, rules, sampling
from speccascade.backends import sharding
from speccascade.drafters import hidden
from speccascade.engine import inputs, loop
from speccascade.engine.feeding import filled
from speccascade.engine.job import DecodeJob
from speccascade.engine.method import Strategy, Target
from speccascade.host import multihost
from speccascade.types import Array, checked_int, Model, Prompt

_CHUNK = 128  # positions of a pass, so that logits of long texts fit into memory


class TokenScores(NamedTuple):
  """The score of one text.

  Attributes:
    logprobs: Log π of each token given the prompt and the tokens before it [n].
    greedy: Whether each token is the one that decoding at temperature 0 emits there [n].
  """

  logprobs: np.ndarray
  greedy: np.ndarray


def score(
  method: Strategy,
  models: Sequence[Model],
  prompts: Sequence,
  outputs: Sequence[Sequence[int]],
  *,
  batch_size: int = 16,
) -> list[TokenScores]:
  """Return the log-probabilities of texts under a method's target distribution π.

  π is the verifier's distribution for methods that keep it, the rule's for a cascade and the combiner's for
  collaborative decoding, each at temperature 1 and without filters. Texts are read in one pass, not decoded.

  Args:
    method: The method.
    models: The models, drafter first.
    prompts: Texts or token lists.
    outputs: The tokens to score after each prompt.
    batch_size: Rows scored at once.

  Returns:
    A score for each output.

  Raises:
    ValueError: The method's tokens do not follow a distribution that the tokens before them determine, an output is not
      of token ids, or a text is longer than a model has positions.

  Example:
    >>> small, large = embedded.models()
    >>> (scored,) = score(methods.speculative(), [small, large], ['A dog runs.'], [[3, 4]])
    >>> scored.logprobs.shape
    (2,)
  """
  models = [hidden.alone(model) for model in DecodeJob.of_models(method, models).models]
  numbers, combiner = _target(method, checked_int('batch_size', batch_size))
  used = [models[m] for m in numbers]
  if heads := [model.name for model in used if model.network.provisional]:
    raise ValueError(f'{heads[0]} is a head, which reads states of tokens that are decoded: it gives texts no score.')
  adds = rules.declaration(combiner).adds_logits
  lacks = [model.network.lacks(model.params) if adds else None for model in used]
  return _read(models, numbers, prompts, outputs, tree_util.Partial(_scored, combiner, lacks), batch_size)


def read(
  models: Sequence[Model], prompts: Sequence, outputs: Sequence[Sequence[int]], of: Callable, *, batch_size: int = 16
) -> list:
  """Return what a function makes of the models' logits at each token of given texts, which are read, not decoded.

  Args:
    models: The models.
    prompts: Texts, token lists or chat messages.
    outputs: The tokens that follow each prompt.
    of: A function of logits [M, B, L, V], float32, each from what precedes a token, and of the tokens [B, L]; it
      returns arrays [B, L, …] in any pytree, and is compiled.
    batch_size: Rows read at once.

  Returns:
    For each output of n tokens the same with arrays [n, …].

  Raises:
    ValueError: An output is not of token ids, or a text is longer than a model has positions.

  Example:
    >>> small, large = embedded.models()
    >>> agree = lambda logits, tokens: logits[0].argmax(-1) == logits[1].argmax(-1)
    >>> read([small, large], ['A dog runs.'], [[3, 4]], agree)[0].shape
    (2,)
  """
  return _read(
    models, range(len(models)), prompts, outputs, tree_util.Partial(of), checked_int('batch_size', batch_size)
  )


def _read(models, numbers: Iterable[int], prompts, outputs, of: tree_util.Partial, batch_size: int) -> list:
  """Return what `read` does of some of the models."""
  vocab = inputs.vocabulary(models)
  rows = inputs.encode(models, prompts)
  if not isinstance(outputs, Iterable):
    raise ValueError(f'outputs={outputs!r} is not a list of token lists, as in [[3, 4]].')
  outputs = [
    inputs.token_ids(tokens, f'output {i}', 'it is a list of token ids', vocab) for i, tokens in enumerate(outputs)
  ]
  if len(outputs) != len(rows):
    raise ValueError(f'{len(rows)} prompts need as many outputs, not {len(outputs)}.')
  used = [models[m] for m in numbers]
  _check_fits(used, rows, outputs)
  size = sharding.even(min(batch_size, inputs.bucket(len(rows), 1)), sharding.row_shards(used))
  order = inputs.by_length([[*row, *tokens] for row, tokens in zip(rows, outputs, strict=True)])
  found = {}
  for start in range(0, len(order), size):
    batch = order[start : start + size]
    made = _read_batch(used, of, [rows[i] for i in batch], [outputs[i] for i in batch], size, vocab)
    found |= dict(zip(batch, made, strict=True))
  return [found[i] for i in range(len(rows))]


def _target(method: Strategy, batch_size: int) -> Target:
  """Return the models and the combiner of π, or raise where the tokens follow no such distribution."""
  method = method.at(batch_size)
  if method.keeps_distribution is None:
    raise ValueError(
      f'{method.name}: nothing says that its tokens follow its target, so texts have no log-probability; declare it of '
      'the part of your own: acceptor(told=Told.NOTHING, exact=True), or `told` of a policy, a limit or a phase.'
    )
  if not method.keeps_distribution:
    raise ValueError(
      f'{method.name}: the distribution of its next token is not determined by the tokens before it, so texts have no '
      'log-probability; score them with speculative, oracle, cos or sv_exact.'
    )
  if method.reads_prefix:
    raise ValueError(
      f'{method.name}: its rule changes with the tokens before, and has no log-probability of texts here.'
    )
  return method.target


def _check_fits(models: Sequence[Model], prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]):
  """Raise where a text is longer than a model has positions; its last token is never fed."""
  for model in models:
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
      needed = len(output) if model.network.start_id is not None else len(prompt) + len(output) - 1
      texts = f'prompt {i} ({len(prompt)} tokens) and its output ({len(output)} tokens)'
      inputs.check_positions(model, needed, texts)


def forced(prompt: Prompt, tokens: np.ndarray, start: int | None) -> tuple[np.ndarray, np.ndarray, int]:
  """Return what makes a network compute the logits of given tokens (teacher forcing).

  Args:
    prompt: The prompts of B rows.
    tokens: [B, L] the tokens after them.
    start: The token that the network's decoder starts with, None where that is the prompt.

  Returns:
    The token before each token [B, L], its position [B, L], and the slots that a cache needs.
  """
  rows, length = tokens.shape
  last = prompt.tokens[np.arange(rows), prompt.length - 1] if start is None else np.full(rows, start, np.int32)
  first = prompt.length - 1 if start is None else np.zeros(rows, np.int32)
  fed = np.concatenate([last[:, None], tokens[:, :-1]], 1)
  positions = first[:, None] + np.arange(length, dtype=np.int32)[None]
  return fed, positions, length + 1 + (prompt.tokens.shape[1] if start is None else 0)


def _read_batch(models, of: tree_util.Partial, prompts, outputs, size: int, vocab: int) -> list:
  """Return what a function makes of at most `size` rows."""
  layout = sharding.layout_for(models)
  backend, params = backends.prepared(models, layout)
  networks = tuple(m.network.on(backend.for_slot(i)) for i, m in enumerate(models))
  width = inputs.bucket(max(row.size for row in prompts))
  step = min(inputs.bucket(max(1, *(row.size for row in outputs))), _CHUNK)
  length = -(-max(1, *(row.size for row in outputs)) // step) * step
  prompt = inputs.pad(prompts, size, width)
  goal = inputs.pad(outputs, size, length).tokens
  fed, positions, cache_len = forced(prompt, goal, networks[-1].start_id)
  caches = loop.prefilled(networks, params, prompt, cache_len, layout)
  found = []
  for at in range(0, length, step):
    chunk = [x[:, at : at + step] for x in (fed, positions, goal)]
    made, caches = _read_chunk(networks, params, of, caches, *chunk, vocab)
    found.append(made)
  found = jax.tree.map(lambda *x: np.concatenate(x, 1), *jax.device_get(multihost.to_host(found)))
  return [jax.tree.map(lambda x, i=i, n=row.size: x[i, :n], found) for i, row in enumerate(outputs)]


@functools.partial(jax.jit, static_argnums=(0, 7), donate_argnums=3)
def _read_chunk(networks, params, of, caches, fed, positions, goal, vocab) -> tuple[Any, tuple]:
  """Return what a function makes of the logits of the tokens [B, L], and the caches that have read them."""
  passes = [n.extend(p, cache, fed, positions) for n, p, cache in zip(networks, params, caches, strict=True)]
  logits = jnp.stack([x[..., :vocab].astype(jnp.float32) for x, _ in passes])
  return of(logits, goal), tuple(cache for _, cache in passes)


def _scored(combiner, lacks: list[Array | None], logits: Array, tokens: Array) -> TokenScores:
  """Return log π of the tokens [B, L], and whether each is the greedy one."""
  logits = [filled(None if some is None else some[: x.shape[-1]], x) for some, x in zip(lacks, logits, strict=True)]
  if rules.inside(combiner) is rules.own:  # in logarithms, for a small probability may round to 0
    logprobs = sampling.log_softmax(logits[-1])
  else:
    logprobs = jnp.log(rules.target(combiner, logits).probs)
  best = sampling.argmax(rules.target(combiner, logits, sampling.Sampler(0.0)).probs)
  return TokenScores(sampling.at_token(logprobs, tokens), best == tokens)
