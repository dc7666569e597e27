"""GPUs: few kernels, for each takes some microseconds whatever it computes."""

import dataclasses

from speccascade.backends.base import Backend
from speccascade.backends.registry import backend


@backend('gpu', 'cuda', 'rocm')
@dataclasses.dataclass(frozen=True)
class GPU(Backend):
  """Plain XLA, whose scatters and selects are single kernels on a GPU."""

  short_products = True
  slot_multiple = 16
  pack_from = 256  # in bfloat16 an H100 computes with some 300 tokens in the time that it takes to read the weights
