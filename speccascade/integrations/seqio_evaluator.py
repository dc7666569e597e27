"""seqio's Evaluator with our decoding behind it.

`predict_fn` is what an Evaluator calls; `evaluate` builds the Evaluator for a registered task, with the feature
converter that the models' architecture needs, and returns the task's own metrics.
"""

from collections.abc import Callable, Mapping, Sequence
import os
from typing import Any

import numpy as np

from speccascade import decode, sampling
from speccascade.data import tokenizers
from speccascade.engine.job import Job
from speccascade.integrations import t5x
from speccascade.types import checked_int, Model


def evaluate(
  task_name: str,
  method,
  models: Sequence[Model],
  *,
  max_new_tokens: int,
  max_prompt_tokens: int | None = None,
  split: str = 'validation',
  count: int | None = None,
  batch_size: int = 32,
  sampler: sampling.Sampler = sampling.Sampler(),
  seed: int = 0,
  log_dir: str | None = None,
) -> dict[str, float]:
  """Decode a split of a registered seqio task with seqio's own prompts and metrics.

  Args:
    task_name: The name of a registered task or mixture.
    method: The method.
    models: The models, drafter first.
    max_new_tokens: The most new tokens of a text.
    max_prompt_tokens: The length to which seqio truncates prompts, from the right; by default none.
    split: The split.
    count: The number of examples, the first ones; by default all.
    batch_size: Rows decoded at once.
    sampler: The sampler.
    seed: The seed of the randomness, which each example's index keys.
    log_dir: A folder in which seqio logs metrics and outputs.

  Returns:
    The metrics by name, of a mixture by TASK/NAME.

  Raises:
    ValueError: An argument is invalid, or the task has other tokens than the models (which a vocabulary without a file
      of tokens does not tell), no metrics, or no such split.
  """
  models = Job.of_models(method, models, sampler=sampler).models
  count = None if count is None else checked_int('count', count)  # seqio takes 0 for all
  evaluator = _evaluator(task_name, models[-1], split, max_prompt_tokens, count, log_dir)
  predict = predict_fn(method, models, max_new_tokens=max_new_tokens, batch_size=batch_size, sampler=sampler, seed=seed)
  metrics, _ = evaluator.evaluate(compute_metrics=True, step=0, predict_fn=predict)
  return {
    name if task == task_name else f'{task}/{name}': float(getattr(value, 'value', value))
    for task, values in metrics.result().items()
    for name, value in values.items()
  }


def _evaluator(task_name, model, split, max_prompt_tokens, count, log_dir):
  """Return a new Evaluator, for one that has failed never answers again."""
  import seqio

  tasks = seqio.get_subtasks(seqio.get_mixture_or_task(task_name))
  for task in tasks:
    _check_tokens(task, model)
  if log_dir is not None:
    os.makedirs(log_dir, exist_ok=True)  # the logger does not
  evaluator = seqio.Evaluator(
    task_name,
    converter(model),
    eval_split=split,
    sequence_length=None if max_prompt_tokens is None else {'inputs': max_prompt_tokens},
    num_examples=count,
    logger_cls=[] if log_dir is None else [seqio.JSONLogger],
    log_dir=log_dir,
    async_compute_metrics=False,
  )
  if not evaluator.eval_tasks:
    splits = sorted(set().union(*(task.splits for task in tasks)))
    raise ValueError(f'{task_name} has no metrics or no split {split!r}; its splits: {", ".join(splits)}.')
  return evaluator


def predict_fn(
  method,
  models: Sequence[Model],
  *,
  max_new_tokens: int,
  batch_size: int = 32,
  sampler: sampling.Sampler = sampling.Sampler(),
  seed: int = 0,
) -> Callable[..., list[tuple[int, list[int]]]]:
  """Return the `predict_fn` of an Evaluator, from its enumerated data set to pairs (index, tokens).

  It takes the keywords of T5X: a `train_state` replaces the parameters of the last model. `rng` is ignored, for `seed`
  and the index of an example determine its randomness. The arguments are those of `evaluate`.
  """

  def predict(dataset, model_feature_shapes=None, train_state=None, rng=None) -> list[tuple[int, list[int]]]:
    last = models[-1] if train_state is None else t5x.with_params(models[-1], train_state.params)
    indices = []
    prompts = []
    for index, features in dataset.as_numpy_iterator():
      indices.append(int(index))
      prompts.append(prompt_tokens(features))
    out = decode(
      method,
      [*models[:-1], last],
      prompts,
      max_new_tokens=max_new_tokens,
      sampler=sampler,
      seed=seed,
      example_ids=indices,
      batch_size=min(batch_size, len(prompts)),
    )
    # The Evaluator needs rows of one length; what follows an end of text is not read.
    end = (*models[-1].network.eos_ids, 0)[0]
    longest = max(map(len, out.tokens))
    return [(index, [*row, *[end] * (longest - len(row))]) for index, row in zip(indices, out.tokens, strict=True)]

  return predict


def converter(model: Model):
  """Return seqio's feature converter for an encoder–decoder, or for a decoder that reads its prompt."""
  import seqio

  if model.network.start_id is not None:
    return seqio.EncDecFeatureConverter(pack=False)
  return seqio.PrefixLMFeatureConverter(pack=False)


def prompt_tokens(features: Mapping[str, np.ndarray]) -> list[int]:
  """Return the prompt of a converted record without its padding."""
  if 'decoder_causal_attention' in features:
    # The mask covers the prompt and one position more.
    length = int(features['decoder_causal_attention'].sum()) - 1
    return features['decoder_target_tokens'][:length].tolist()
  if 'encoder_input_tokens' in features:
    tokens = features['encoder_input_tokens']
    return tokens[: np.flatnonzero(tokens).max(initial=-1) + 1].tolist()
  raise ValueError(
    f'no prompt in the features {", ".join(features)}; convert with seqio.EncDecFeatureConverter or '
    'seqio.PrefixLMFeatureConverter.'
  )


def _check_tokens(task: Any, model: Model):
  """Raise where the task's tokens are not the model's."""
  vocabulary = task.output_features['inputs'].vocabulary
  if not task.output_features['inputs'].dtype.is_integer:
    raise ValueError(f'{task.name} was registered without a tokenizer; register it again with tokenizer=PATH.')
  theirs = getattr(vocabulary, 'tokenizer', None)
  if isinstance(theirs, tokenizers.Tokenizer):
    path, pieces = theirs.path, theirs.pieces()
  elif path := getattr(vocabulary, 'sentencepiece_model_file', None):  # of seqio's own, which has read that file
    pieces = [theirs.id_to_piece(i) for i in range(theirs.get_piece_size())]
  if path and model.tokenizer is not None:
    pairs = zip(map(_sentinel, pieces), map(_sentinel, model.tokenizer.pieces()), strict=False)
    if any(a != b for a, b in pairs):
      raise ValueError(f'{task.name} is tokenised with {path}, {model.name} with {model.tokenizer.path}.')


def _sentinel(piece: str) -> str:
  """Return a piece, a sentinel as transformers writes it: T5X's vocabularies have ▁ before it."""
  return piece[1:] if piece.startswith('▁<extra_id_') else piece
