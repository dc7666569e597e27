"""Drafting in one pass: a model that returns a distribution for each of the next tokens in a single call.

PARD (An et al. 2025, "PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation") trains a small
language model to do so. Behind the text it reads γ - 1 times the same mask token; what follows the last token and each
mask are the distributions of the next γ tokens, none of which knows another. Each token is drawn from its own, which is
what it is tested with, so the output follows the target whatever the masks make of it. What a mask has written into
the cache is written again by the tokens that are committed.
"""

import dataclasses

from speccascade.types import checked_int, Model


def one_pass(model: Model, mask_token: int) -> Model:
  """Return a model that drafts in one pass; it shares the arrays.

  Checkpoints of PARD are loaded so. A model that was not trained for it drafts badly, and the output stays right.

  Args:
    model: T5 or a decoder-only model.
    mask_token: The id that stands for a token that is not drawn yet: one that no text has, such as a sentinel of T5.

  Raises:
    ValueError: If the id is none of the vocabulary, or the network has no masks.
  """
  network = model.network
  mask_token = checked_int('mask_token', mask_token, 0, network.vocab_size - 1)
  if not any(field.name == 'mask_token' for field in dataclasses.fields(network)):
    raise ValueError(f'{model.name} is a {type(network).__name__}, which reads no mask token: take T5 or a decoder.')
  name, digest = (x and f'{x}-mask{mask_token}' for x in (model.name, model.digest))
  return model.replace(network=dataclasses.replace(network, mask_token=mask_token), name=name, digest=digest)
