"""Speculative decoding, cascades, collaborative decoding and speculative verification as one jitted loop."""

from speccascade import methods, rules
from speccascade.decode import Decoded, decode
from speccascade.probs import Sampler
from speccascade.types import Model

__all__ = ['Decoded', 'Model', 'Sampler', 'decode', 'methods', 'rules']
