"""Distributions, the sampler that makes them of logits, and the noise that tokens are drawn by."""

from speccascade.sampling.distributions import (
  argmax,
  at_token,
  confidence,
  entropy,
  log_softmax,
  one_hot_max,
  residual,
  softmax,
  tv,
)
from speccascade.sampling.noise import Coupled, draw, Keyed, Noise
from speccascade.sampling.sampler import (
  COUPLINGS,
  keep_min_p,
  keep_top_k,
  keep_top_p,
  LARGEST,
  NEUTRAL,
  number,
  Sampler,
  traced,
)
