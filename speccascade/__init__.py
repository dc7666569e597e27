"""Speculative decoding, cascades, collaborative decoding and speculative verification as one jitted loop."""

from speccascade import acceptance, methods, rules, stopping, theory
from speccascade.backends.sharding import mesh, meshes, place
from speccascade.check import check, check_sampler
from speccascade.checkpoints import load
from speccascade.decode import decode, stream
from speccascade.engine.requests import Request
from speccascade.engine.results import Decoded, Row
from speccascade.host.commands import compilation_cache
from speccascade.sampling import Sampler
from speccascade.types import Model

__version__ = '0.1.0'
__all__ = [
  'Decoded',
  'Model',
  'Request',
  'Row',
  'Sampler',
  'acceptance',
  'check',
  'check_sampler',
  'compilation_cache',
  'decode',
  'load',
  'mesh',
  'meshes',
  'methods',
  'place',
  'rules',
  'stopping',
  'stream',
  'theory',
]
