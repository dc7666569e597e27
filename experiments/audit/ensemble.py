"""Whether the tokens of transformers' ensemble follow v = (p + q) / 2: the first, and the one after the draft."""

import numpy as np
from samplers import transformers_ensemble

from speccascade.check.samplers import Case, check_sampler

v, q = np.array([[0.75, 0.25]] * 2), np.array([[0.9, 0.1]])
for tokens in (1, 2):
  print(check_sampler(transformers_ensemble, rng='torch', runs=4000, given=[Case(v, q, tokens)]))
