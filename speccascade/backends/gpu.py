"""GPUs: few kernels, and no predicate that the host has to read."""

import dataclasses

from speccascade.backends.base import Backend


@dataclasses.dataclass(frozen=True)
class GPU(Backend):
  """Plain XLA, whose scatters and selects are single kernels on a GPU."""

  short_products = True
  slot_multiple = 16
