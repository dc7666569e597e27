"""What a call decodes: a method, models and prompts with their numbers.

`DecodeJob.of` checks all of them, and is the only place that refuses any. `decode`, `stream`, scoring, the command for
files, the evaluation harness, seqio's evaluator, T5X's step and experiments start from it.
"""

from collections.abc import Callable, Sequence
import dataclasses
import os
from typing import Any

import jax

from speccascade import sampling
from speccascade.backends import sharding
from speccascade.drafters import hidden
from speccascade.engine import inputs, law, requests, validate
from speccascade.engine.lowering import cut, lower
from speccascade.engine.method import Strategy
from speccascade.host import jax_private
from speccascade.types import check_bits, checked_int, Model, Network

_FORKED: list[int] = []  # this process, where it was forked after JAX had started its threads


def _note_fork():
  if jax_private.has_started():
    _FORKED.append(os.getpid())


if hasattr(os, 'register_at_fork'):
  os.register_at_fork(after_in_child=_note_fork)


@dataclasses.dataclass(frozen=True)
class DecodeJob:
  """A method with models and rows, each checked.

  Attributes:
    method: The method.
    models: The models.
    rows: A row for every sample of every prompt; none where the method and the models alone were checked.
    width: The tokens of a padded prompt.
    size: The most rows that are decoded at once.
    processor: Changes the logits of every model.
    trace: Whose log-probabilities are recorded: 'models', 'target', or '' for none.
    eos_ids: The tokens that end a text; None: those of the last model that the method runs.
  """

  method: Strategy
  models: list[Model]
  rows: list[requests.RequestRow] = dataclasses.field(default_factory=list)
  width: int = 0
  size: int = 1
  processor: Callable | None = None
  trace: str = ''
  eos_ids: tuple[int, ...] | None = None

  @classmethod
  def of_models(cls, method: Strategy, models: Sequence[Model], sampler: sampling.Sampler | None = None) -> 'DecodeJob':
    """Check a method and its models, where prompts are not known yet.

    Args:
      method: The method.
      models: The models.
      sampler: The sampler; None where it is not known either.

    Raises:
      ValueError: If anything is invalid.
    """
    models = _check_models(method, models)
    made = method.for_networks([m.network for m in models])
    if sampler is not None:
      validate.check_sampler(sampler)
      made.check_sampler(sampler)
    _check_targets(method, models, sampler or sampling.Sampler())
    return cls(made, models)

  @classmethod
  def of(
    cls,
    method: Strategy,
    models: Sequence[Model],
    prompts: Any,
    *,
    sampler: sampling.Sampler,
    batch_size: int | None = None,
    max_prompt_tokens: int | None = None,
    processor: Callable | None = None,
    trace: bool | str = False,
    **numbers: Any,
  ) -> 'DecodeJob':
    """Check a call: first the models and the method, then the prompts, then what they need together.

    Args:
      method: The method.
      models: The models.
      prompts: The prompts.
      sampler: The sampler.
      batch_size: The most rows that are decoded at once.
      max_prompt_tokens: The padded length of prompts.
      processor: As of `speccascade.decode`.
      trace: As of `speccascade.decode`.
      **numbers: The other arguments of `engine.requests.rows`.

    Raises:
      ValueError: If anything is invalid; an `inputs.PromptError` where it is a prompt.
    """
    models = _check_models(method, models)
    validate.check_sampler(sampler)
    rows = requests.rows(models, prompts, sampler=sampler, max_prompt_tokens=max_prompt_tokens, **numbers)
    _check_targets(method, models, rows[0].sampler)
    method = method.for_networks([m.network for m in models])
    _check_numbers(method, [models[m] for m in method.slots], rows)
    trace = _checked_trace(trace, method)
    for row in rows:
      with inputs.of_prompt(row.source):
        method.check_sampler(row.sampler)
        if trace == 'target' or row.processed:
          _check_traced(method, row.sampler, "trace='target'" if trace == 'target' else 'processed=True')
    width = inputs.prompt_width(models, rows, max_prompt_tokens)
    size = inputs.bucket(len(rows), 1)
    size = size if batch_size is None else min(size, checked_int('batch_size', batch_size))
    job = cls(method, models, rows, width, size, processor, trace)
    return dataclasses.replace(job, size=sharding.even(size, job.shards))

  @property
  def shards(self) -> int:
    """The number of equal parts that a mesh makes of a batch."""
    return sharding.row_shards([self.models[m] for m in self.method.slots])

  @property
  def max_new(self) -> int:
    """The most new tokens of a row."""
    return max(row.max_new for row in self.rows)


def _checked_trace(trace: bool | str, method: Strategy) -> str:
  """Return whose log-probabilities are recorded, '' for none."""
  if trace not in (False, True, 'target'):
    raise ValueError(f"trace={trace!r} is none of False, True, of the models, and 'target', of what was tested.")
  if trace and method.whole_texts:
    raise ValueError(f'trace records one decode, and {method.name} is two; trace each with autoregressive().')
  return trace if trace == 'target' else 'models' if trace else ''


def _check_traced(method: Strategy, sampler: sampling.Sampler, given: str):
  """Refuse a method whose tokens do not follow the target that is traced."""
  for choice in method.of_batches.values():
    if not (found := law.law(choice, sampler)).exact:
      raise ValueError(
        f'{given}: {choice.name} has no such log-probabilities, for {found.why}; take those of the models.'
      )


def _check_targets(method: Strategy, models: Sequence[Model], sampler: sampling.Sampler):
  vocab = inputs.vocabulary(models)
  for choice in method.of_batches.values():
    validate.check_targets(choice, vocab, sampler)


def _check_numbers(method: Strategy, slots: Sequence[Model], rows: Sequence[requests.RequestRow]):
  """Refuse rows with the same random numbers where what these made of one decides about another."""
  some = law.same_numbers(method, slots)
  first: dict[tuple, int] = {}
  remembered = {seed: model.name for model in slots for seed in model.seeds}
  for row in rows if some else ():
    if row.sampler.greedy or row.sampler.coupling == 'gumbel':
      continue
    if (name := remembered.get(int(row.seed))) is not None:
      raise ValueError(
        f'{name} remembers outputs of the seed {row.seed}, which prompt {row.source} is decoded with: their random '
        "numbers would test drafts that they made; give another seed, or decode with coupling='gumbel'."
      )
    key = row.seed, row.stream, row.example_id, row.sample
    if (other := first.setdefault(key, row.source)) != row.source:
      raise ValueError(
        f'prompts {other} and {row.source} have the same random numbers (seed {row.seed}, example_id '
        f'{row.example_id}), and {some[0]}; give each a seed or an example_id of its own, or decode with '
        "coupling='gumbel'."
      )


def _check_models(method: Strategy, models: Sequence[Model]) -> list[Model]:
  """Return the models as a list, having checked that the method can decode with them."""
  check_bits()
  if _FORKED:
    raise RuntimeError(
      f'process {_FORKED[-1]} was forked after JAX had started threads, which it has not, and would wait for ever; '
      "start processes with multiprocessing.get_context('spawn'), or before JAX is used."
    )
  if isinstance(models, Model | str | os.PathLike):
    raise ValueError(f'models={getattr(models, "name", models)} must be a list of models, as in [small, large].')
  models = list(models)
  for model in models:
    if not isinstance(model, Model):
      given_as = repr(model) if isinstance(model, str | os.PathLike) else f'a {type(model).__name__}'
      raise ValueError(f'models has {given_as}, not a loaded model: give what speccascade.load(PATH) returns.')
    if not isinstance(model.network, Network):
      raise ValueError(
        f'{type(model.network).__name__} is no network: inherit speccascade.types.Network, with vocab_size, prefill, '
        'extend, and those of eos_ids, start_id and max_positions that are others than the base has.'
      )
  validate.check_method(method, len(models))
  models = hidden.attached(models, method.slots[-1])
  for choice in method.of_batches.values():
    for model in (models[m] for m in choice.answering):
      if model.network.drafts_only:
        part = (
          f'a model of a {choice.name.replace("_", " ")}, which answers alone' if choice.whole_texts else 'the verifier'
        )
        raise ValueError(f'{model.name} only drafts: give it as a drafter, not as {part}.')
  first, *others = models
  for other in others:
    if (first.network.start_id is None) != (other.network.start_id is None):
      raise ValueError(f'{first.name} and {other.name} cannot share a text: one is an encoder–decoder, one is not.')
  for choice in method.of_batches.values():
    if choice.origin is not None:
      choice.origin.check_models(models, choice.slots)
  for model in models:
    validate.check_network(model)
  for choice in method.of_batches.values():
    if not choice.whole_texts:
      _check_apart(choice, [models[m] for m in choice.slots])
  return models


def _check_apart(method: Strategy, slots: Sequence[Model]):
  """Refuse a method with drafters on devices of their own that are not fed before its verifier, and only then."""
  drafters = sharding.apart(slots)
  if not drafters:
    return
  if jax.process_count() > 1:
    raise ValueError(
      'drafters on devices of their own need one process that has all devices: give all models one mesh.'
    )
  try:
    cut(lower(method), drafters)
  except ValueError as error:
    problem = f'{method.name} cannot draft on devices of its own: {error}'
    raise ValueError(f'{problem}; give all models one mesh.') from None
