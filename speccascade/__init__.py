"""Speculative decoding, cascades, collaborative decoding and speculative verification as one jitted loop."""

# ruff: noqa: E402
from speccascade import interrupt

interrupt.while_importing()

from speccascade import acceptance, methods, rules, stopping, theory
from speccascade.check import check
from speccascade.checkpoints import load
from speccascade.commands import compilation_cache
from speccascade.decode import decode, stream
from speccascade.layout import mesh, place
from speccascade.probs import Sampler
from speccascade.requests import Request
from speccascade.results import Decoded, Row
from speccascade.types import Model

__version__ = '0.1.0'
__all__ = [
  'Decoded', 'Model', 'Request', 'Row', 'Sampler', 'acceptance', 'check', 'compilation_cache', 'decode', 'load', 'mesh',
  'methods', 'place', 'rules', 'stopping', 'stream', 'theory',
]  # fmt: skip
