"""Speculative decoding, cascades, collaborative decoding and speculative verification as one jitted loop."""

from speccascade import acceptance, methods, rules, stopping, theory
from speccascade.checkpoints import load
from speccascade.decode import decode
from speccascade.laws import check
from speccascade.probs import Sampler
from speccascade.results import Decoded
from speccascade.types import Model

__all__ = [
  'Decoded', 'Model', 'Sampler', 'acceptance', 'check', 'decode', 'load', 'methods', 'rules', 'stopping', 'theory',
]  # fmt: skip
