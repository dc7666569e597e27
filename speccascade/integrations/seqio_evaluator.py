"""seqio's Evaluator with our decoding behind it.

  evaluator = seqio.Evaluator(TASK, seqio_evaluator.converter(large), eval_split='validation', logger_cls=[])
  predict = seqio_evaluator.predict_fn(method, [small, large], max_new_tokens=80)
  metrics, _ = evaluator.evaluate(compute_metrics=True, step=0, predict_fn=predict)

evaluates a registered task or mixture with its own prompts and metrics. Its vocabulary must be that of the models.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from speccascade import decode, sampling
from speccascade.integrations import t5x
from speccascade.types import Model


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
  and the index of an example determine its randomness.

  Args:
    method: The method.
    models: The models, drafter first.
    max_new_tokens: The most new tokens of a text.
    batch_size: Rows decoded at once.
    sampler: The sampler.
    seed: The seed of the randomness, which each example's index keys.
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
