"""The speculative samplers of other packages, as `speccascade.check_sampler` takes them.

python -m speccascade.check --sampler samplers:transformers --rng torch     # in this folder, with the extra `parity`
"""

import numpy as np
import torch
from transformers.generation import utils


def _transformers(tokens, q, p, rng, **settings):
  torch.manual_seed(rng.initial_seed())  # it draws from the global generator
  logits = lambda x: torch.log(torch.tensor(np.asarray(x), dtype=torch.float32))[None]
  emitted, _ = utils._speculative_sampling(torch.tensor([list(tokens)]), logits(q), len(tokens), logits(p), **settings)
  return emitted[0].tolist()


def transformers(tokens, q, p, rng):
  """What assisted generation verifies with."""
  return _transformers(tokens, q, p, rng)


def transformers_ensemble(tokens, q, p, rng, weight=0.5):
  """The same towards v = w p + (1 - w) q: `p` here is v, so the verifier's own distributions follow from it."""
  own = np.clip((p - (1 - weight) * np.vstack([q, q[-1:]])) / weight, 0, None)
  return _transformers(tokens, q, own / own.sum(-1, keepdims=True), rng, assistant_ensemble_weight=weight)
