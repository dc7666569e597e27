"""Networks that are quickly trained, and what they learn: to copy."""

import numpy as np

from speccascade.models.decoder import Decoder, DecoderConfig, Span
from speccascade.models.t5 import T5, T5Config
from speccascade.train.loop import Settings
from speccascade.train.optimizers import Optimizer

T5_NET = T5(T5Config(12, 16, 2, 8, 32, 1, 1))
DECODER = Decoder(DecoderConfig(12, 16, 2, 2, 8, 32, (Span(),)), eos_ids=(1,))
NETWORKS = {'t5': T5_NET, 't5 scanned': T5(T5_NET.config, scan=True), 'decoder': DECODER}


def copies(seed=0):
  """Yield pairs whose target is the source, without end."""
  rng = np.random.default_rng(seed)
  while True:
    row = [*rng.integers(2, 12, rng.integers(2, 6)).tolist(), 1]
    yield row, row


def settings(**changes):
  optimizer = Optimizer(learning_rate=1e-2, warmup=2, schedule='constant')
  usual = dict(steps=6, batch_size=4, widths=(8,), optimizer=optimizer, log_every=2, save_every=2)
  return Settings(**usual | changes)


def quiet(*_, **__):
  """Print nothing."""
